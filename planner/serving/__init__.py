"""Serving plans: the space of engine instances, families and their bounds, the answer, its checks, and its replay."""
