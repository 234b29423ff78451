"""Launch files of other tools as jobs: what they train, how, and where each setting is said. Nothing is executed."""

from .job import Given, Job
from .read import read_job

__all__ = ["Given", "Job", "read_job"]
