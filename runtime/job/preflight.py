"""Compare a job's ranks before they begin to train, on every node at once: who is slow, and by how much."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ...profilers.run import preflight as ranks_program
from ...profilers.run.faults import explain_failure
from ...profilers.run.preflight import REPORT_KEY, PreflightTask
from ...profilers.run.processes import NodeJob, program, run_ranks
from ...schema import ConfigError, MeshwrightError
from ...schema.errors import InterruptedRunError
from ...schema.preflight import PreflightReport
from .rendezvous import Meeting

PREFLIGHT_S = 10.0
"""How long ranks are compared: a hundred repetitions and more of each work."""

_START_S = 120.0
"""For processes to start and meet."""


def compare_nodes(
    meeting: Meeting,
    nodes: Sequence[range],
    backend: str,
    *,
    seconds: float,
    variables: Mapping[str, str] | None = None,
) -> PreflightReport:
    """Return how long each rank takes against its peers; every node of the meeting calls it.

    Args:
        nodes: the numbers of each node's ranks.
        variables: for the ranks' environment, besides those of the meeting.

    Raises:
        ConfigError: there are no peers.
        MeshwrightError: a rank failed.
    """
    local, size = nodes[meeting.node_rank], nodes[-1].stop
    if size < 2:
        raise ConfigError("one rank has no peers to be compared with", help="leave out --preflight")
    with tempfile.TemporaryDirectory(prefix="meshwright-") as name:
        folder = Path(name)
        task = PreflightTask(backend=backend, seconds=seconds, nodes=tuple(map(len, nodes)))
        task.save(folder / "task.json")
        ranks = NodeJob(
            command=program(ranks_program.__name__, folder / "task.json"),
            folder=folder,
            num_ranks=len(local),
            first_rank=local.start,
            world_size=size,
            node_rank=meeting.node_rank,
            variables={**(variables or {}), **meeting.variables},
        )
        end = run_ranks(ranks)
    if end.received:
        raise InterruptedRunError(end.received)
    if end.deaths:
        failure = explain_failure(end.deaths, world_size=size)
        raise MeshwrightError(f"comparing the ranks failed: {failure.message}", details=failure.details)
    try:
        meeting.store.wait([REPORT_KEY], timedelta(seconds=_START_S))
        return PreflightReport.model_validate_json(meeting.store.get(REPORT_KEY))
    except dist.DistError as error:
        raise MeshwrightError("comparing the ranks failed", details=(str(error).splitlines()[0],)) from None
