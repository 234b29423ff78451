"""Profiles as files: whether one may be trusted, what it comes to, several as one."""
