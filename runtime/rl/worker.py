"""The program of each rank of a post-training job, started by `launch_rl`: ``python -m meshwright.runtime.rl.worker job.json``."""

from __future__ import annotations

import sys

from ...profilers.run.processes import serve_rank
from .run import RlJob, train


def main() -> None:
    """Do this rank's part of the job that the command line names."""
    train(RlJob.load(sys.argv[1]))


if __name__ == "__main__":
    serve_rank(main)
