"""Serving plans in the words of the engines that run them, one file each; the same form of record as for training."""
