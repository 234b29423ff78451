"""The steps of a thorough measurement of tiny things; rank 1 has more to do than the others where the task asks for it."""

from __future__ import annotations

import os

from meshwright.cli.profile import profile_steps
from meshwright.profilers import model_steps
from meshwright.profilers.measure import host, kernels, links, timing
from meshwright.profilers.measure.compute import LinearShape
from meshwright.profilers.run import steps
from meshwright.profilers.run.protocol import MeasurementStep, ProfileTask, RankPlace
from meshwright.schema.units import KIB, MIB

BUSY = "busy"


def tiny_steps(task: ProfileTask, place: RankPlace, on_gpu: bool) -> list[MeasurementStep]:
    if task.storage_path == BUSY and os.environ["RANK"] == "1":
        work_more()
    steps.CPU_LAYERS, kernels.STREAM_BYTES = (LinearShape(64, 64, 64),), 2 * MIB
    steps.NUM_SHAPES, steps._SHAPE_FRACTION = 8, 1e-6
    steps.CPU_ATTENTION = steps.CPU_ATTENTION[:1]
    steps.CPU_GROUPED = steps.CPU_GROUPED[-1:]
    steps.ALL_SIZES = steps.SIZES = (1 * KIB, 8 * MIB)
    steps._ELEMENTS = (2**16, 2**18)
    host.ADAM_PARAMETERS = (2**16, 2**18)
    host.CPU_SIZES, host.CPU_MATMUL = (MIB,), (64, 64, 64)
    links.MESSAGE_BYTES = (64 * KIB, MIB)
    host.FILE_BYTES, host.BLOCK_BYTES = (MIB,), 64 * KIB
    model_steps.MICRO_BATCHES = (1,)
    return profile_steps(task, place, on_gpu)


def work_more() -> None:
    """Each measured call of this rank really does its work five times."""
    once = timing.Bench._seconds

    def five_times(bench, call, calls):
        return once(bench, lambda: [call() for _ in range(5)], calls)

    timing.Bench._seconds = five_times
