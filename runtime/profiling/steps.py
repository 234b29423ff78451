"""The steps of a measurement that need a model: memory on fake tensors, its real layers; and which products to measure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import psutil
import torch
import torch.distributed as dist

from ...profilers.run.protocol import MeasurementStep, ProfileTask, RankPlace
from ...profilers.run.steps import thorough_steps
from ...schema.units import MIB

if TYPE_CHECKING:
    from ...profilers.measure.timing import Bench, Points

NUM_SHAPES = 600
"""Products measured at most: beyond some hundred, more do not help."""

_FEWEST_SHAPES = 8

_SHAPE_PART = 1 / 40
"""Of the step's time that one product may take with all its repetitions."""

_CALLS = 5
_CHOICE_S, _CHOICE_OF_ONE_S = 0.5, 3e-3
"""Of choosing products: reading the learned model, and each one."""

_CACHE_BYTES = 32 * MIB
"""Last cache of a CPU core, for choosing shapes only."""


def steps_with_model(task: ProfileTask, place: RankPlace, on_gpu: bool) -> Sequence[MeasurementStep]:
    """All steps of a thorough measurement, in the order of `task.ALL_PARTS`."""
    steps = thorough_steps(task, place, on_gpu=on_gpu, choose=partial(choose_shapes, bf16=on_gpu))
    if task.model:
        from .model_steps import model_steps  # with all that a model needs of torch: seconds

        of_model = model_steps(task, place, "bf16" if on_gpu else "fp32")
    else:
        of_model = [
            MeasurementStep("memory", "layers on fake tensors", 6, _nothing, "no --model"),
            MeasurementStep("layers", "layers of the model", 16, _nothing, "no --model"),
        ]
    compute = [step for step in steps if step.part == "compute"]
    mine = [MeasurementStep("memory", "what the device holds beside tensors", 1, _allocator), *of_model]
    return [*compute, *mine, *(step for step in steps if step.part != "compute")]


def _nothing(bench: Bench, points: Points) -> Points:
    """What a step measures that is skipped."""
    return {}


def choose_shapes(
    bench: Bench, flops_per_s: float, bandwidth_bytes_per_s: float, *, bf16: bool
) -> list[tuple[int, int, int]]:
    """Products (m, n, k) that the learned model is least sure of on this device, the first rank's choice for all."""
    from ...cost_models.learned.calibration import candidate_shapes, most_informative_shapes
    from ...cost_models.learned.gemm import GemmDevice, GemmRates, known_coefficients

    work_s = bench.remaining_work_s()
    count = min(NUM_SHAPES, max(_FEWEST_SHAPES, int(work_s / (2 * bench.sample_s))))
    most_s = max(1e-4, work_s * _SHAPE_PART / _CALLS)
    shapes: list[list[int]] = []
    if not bench.has_time(_CHOICE_S + count * _CHOICE_OF_ONE_S, f"the choice of {count} products"):
        return []
    if dist.get_rank() == 0:
        processors, cache = 1, float(_CACHE_BYTES)
        if bench.device.type == "cuda":
            properties = torch.cuda.get_device_properties(bench.device)
            processors, cache = properties.multi_processor_count, float(properties.L2_cache_size)
        coefficients, software, _ = known_coefficients("", "")
        hardware = GemmDevice(flops_per_s / coefficients.compute_efficiency, bandwidth_bytes_per_s, processors, cache)
        rates = GemmRates(coefficients, hardware, software, 2.0 if bf16 else 4.0)
        m, n, k = candidate_shapes(rates, seed=0, most_s=most_s, most_bytes=bench.free_bytes() / 16)
        chosen = most_informative_shapes(m, n, k, rates, count) if len(m) else []
        shapes = [[int(m[i]), int(n[i]), int(k[i])] for i in chosen]
    return [(a, b, c) for a, b, c in bench.gather(shapes)[0]]


def _allocator(bench: Bench, _: Points) -> Points:
    """Driver, libraries and communicators; on a CPU what the process holds."""
    if dist.get_rank():
        return {"allocator": []}
    if bench.device.type != "cuda":
        return {"allocator": [{"context_bytes": psutil.Process().memory_info().rss}]}
    free, total = torch.cuda.mem_get_info(bench.device)
    peaks = torch.cuda.max_memory_allocated(bench.device), torch.cuda.max_memory_reserved(bench.device)
    context = total - free - torch.cuda.memory_reserved(bench.device)
    return {"allocator": [{"context_bytes": context, "allocated_bytes": peaks[0], "reserved_bytes": peaks[1]}]}
