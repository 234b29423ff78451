"""The steps of a measurement: the brief one describes a cluster, the thorough one everything this package can measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...schema.units import MIB
from ..measure.compute import CPU_LAYERS, GPU_LAYERS, best_rate, measure_matmuls, measure_shapes
from ..measure.host import measure_copies, measure_cpu_adam, measure_overlap, measure_storage
from ..measure.kernels import (
    CPU_ATTENTION,
    CPU_GROUPED,
    GPU_ATTENTION,
    GPU_GROUPED,
    measure_attention,
    measure_elementwise,
    measure_grouped,
    measure_streams,
    stream_bandwidth,
)
from ..measure.links import ALL_SIZES, SIZES, axes_of, groups_of, measure_collectives, measure_pairs, world_group
from .protocol import MeasurementStep, ProfileTask, RankPlace

if TYPE_CHECKING:
    from ..measure.timing import Bench, Points
    from ..model_steps import BuildModel

NUM_SHAPES = 600
"""Products measured at most: beyond some hundred, more do not help."""

_MIN_SHAPES = 8
_SHAPE_FRACTION = 1 / 40
"""Of the step's time that one product may take with all its repetitions."""

_CALLS = 5
_CHOICE_S, _CHOICE_OF_ONE_S = 0.5, 3e-3
"""Of choosing products: reading the learned model, and each one."""

_CACHE_BYTES = 32 * MIB
"""Last cache of a CPU core, for choosing shapes only."""

_GROUP_S = 0.1
"""Of making process groups."""

_ELEMENTS = (2**22, 2**24, 2**20, 2**26)


ChooseShapes = Callable[..., Sequence[tuple[int, int, int]]]
"""Chooses the products (m, n, k) that are worth measuring on a device, best first: `cost_models.learned.calibration`."""


def brief_steps(task: ProfileTask, place: RankPlace, on_gpu: bool) -> list[MeasurementStep]:
    """Return the steps for products, memory bandwidth, collectives, and what a process holds besides tensors."""
    layers = (GPU_LAYERS if on_gpu else CPU_LAYERS)[: task.num_layers]
    sizes = SIZES[: task.num_sizes] if place.world_size > 1 else ()

    def streams(bench: Bench, _: Points) -> Points:
        return {"elementwise": measure_streams(bench)}

    def products(bench: Bench, _: Points) -> Points:
        return {"matmuls": measure_matmuls(bench, layers)}

    return [
        _besides_tensors(on_gpu),  # before others load what a first training step loads
        MeasurementStep("compute", "memory bandwidth", 0.2, streams, is_needed=True),
        MeasurementStep("compute", "matrix products", 1, products, is_needed=True),
        MeasurementStep("links", "collectives", 1, partial(_collectives, place, sizes), is_needed=place.world_size > 1),
    ]


def _besides_tensors(on_gpu: bool) -> MeasurementStep:
    measure = _allocator if on_gpu else _process
    return MeasurementStep("memory", "what is held besides tensors", 0.2, measure, is_needed=True)


def thorough_steps(
    task: ProfileTask,
    place: RankPlace,
    on_gpu: bool,
    *,
    choose_shapes: ChooseShapes,
    build_model: BuildModel | None = None,
) -> list[MeasurementStep]:
    """Return the steps for every part, in the order of `protocol.ALL_PARTS`.

    Args:
        build_model: makes the layers of the task's model; None: no layers are measured.
    """
    dtype = "bf16" if on_gpu else "fp32"
    single = "" if place.world_size > 1 else "there is one rank"
    no_device = "" if on_gpu else "ranks compute in host memory"
    no_storage = "" if task.storage_path else "no --nvme PATH"
    nodes, local = (place.num_nodes, place.ranks_per_node), (place.local_rank, place.ranks_per_node)
    besides_tensors, streams, products, collectives = brief_steps(task, place, on_gpu)
    unmeasured = (("memory", "layers on fake tensors", 6), ("layers", "layers of the model", 16))
    of_model = [MeasurementStep(*step, lambda *_: {}, "no --model") for step in unmeasured]
    if build_model is not None:
        from ..model_steps import model_steps  # with all that a model needs of torch: seconds

        of_model = model_steps(build_model, task, place, dtype)

    def rate(bench: Bench, points: Points) -> float:
        return bench.agree_min(best_rate(points["matmuls"], dtype) or 1e9)

    def elementwise(bench: Bench, points: Points) -> Points:
        return {"elementwise": measure_elementwise(bench, dtype, _ELEMENTS, stream_bandwidth(points["elementwise"]))}

    def attention(bench: Bench, points: Points) -> Points:
        shapes = GPU_ATTENTION if on_gpu else CPU_ATTENTION
        return {"attention": measure_attention(bench, dtype, shapes, rate(bench, points))}

    def grouped(bench: Bench, points: Points) -> Points:
        shapes = GPU_GROUPED if on_gpu else CPU_GROUPED
        return {"grouped_matmuls": measure_grouped(bench, dtype, shapes, rate(bench, points))}

    def informative(bench: Bench, points: Points) -> Points:
        rates = {
            "flops_per_s": rate(bench, points),
            "memory_bandwidth_bytes_per_s": bench.agree_min(stream_bandwidth(points["elementwise"])),
        }
        shapes = _informative_shapes(bench, choose_shapes, element_bytes=2.0 if on_gpu else 4.0, **rates)
        return {"matmuls": measure_shapes(bench, shapes, dtype, rates["flops_per_s"])}

    return [
        streams._replace(value=1),
        products._replace(value=6),
        MeasurementStep("compute", "elementwise kernels", 4, elementwise),
        MeasurementStep("compute", "attention", 5, attention),
        MeasurementStep("compute", "grouped products", 3, grouped),
        MeasurementStep("compute", "informative products", 14, informative),
        besides_tensors,
        *of_model,
        collectives._replace(value=10, measure=partial(_collectives, place, ALL_SIZES), skipped=single),
        MeasurementStep("links", "pairs of ranks", 5, lambda b, _: {"pairs": measure_pairs(b, *nodes)}, single),
        MeasurementStep("links", "groups of a mesh", 10, partial(_groups, place), single),
        MeasurementStep("host", "copies", 5, lambda b, _: {"host_copies": measure_copies(b, *local)}, no_device),
        MeasurementStep("host", "AdamW on the host", 3, lambda b, _: {"cpu_adam": measure_cpu_adam(b, *local)}),
        MeasurementStep(
            "storage", "storage", 5,
            lambda b, _: {"storage": measure_storage(b, task.storage_path, place.ranks_per_node)}, no_storage,
        ),
        MeasurementStep(
            "overlap", "streams at once", 8,
            lambda b, points: {"overlaps": measure_overlap(b, dtype, points)}, "" if on_gpu else single,
        ),
    ]  # fmt: skip


def _informative_shapes(bench: Bench, choose_shapes: ChooseShapes, **rates: float) -> list[tuple[int, int, int]]:
    """Return the first rank's choice of products (m, n, k), for all ranks."""
    import torch
    import torch.distributed as dist

    work_s = bench.remaining_work_s()
    count = min(NUM_SHAPES, max(_MIN_SHAPES, int(work_s / (2 * bench.sample_s))))
    if not bench.has_time(_CHOICE_S + count * _CHOICE_OF_ONE_S, f"the choice of {count} products"):
        return []
    shapes: list[tuple[int, int, int]] = []
    if dist.get_rank() == 0:
        num_processors, cache_bytes = 1, float(_CACHE_BYTES)
        if bench.device.type == "cuda":
            properties = torch.cuda.get_device_properties(bench.device)
            num_processors, cache_bytes = properties.multi_processor_count, float(properties.L2_cache_size)
        chosen = choose_shapes(
            **rates,
            num_processors=num_processors,
            cache_bytes=cache_bytes,
            count=count,
            max_s=max(1e-4, work_s * _SHAPE_FRACTION / _CALLS),
            max_bytes=bench.free_bytes() / 16,
        )
        shapes = [(int(m), int(n), int(k)) for m, n, k in chosen]
    chosen_first: list[tuple[int, int, int]] = bench.gather(shapes)[0]
    return chosen_first


def _process(bench: Bench, points: Points) -> Points:
    """Measure what a process takes besides its tensors; its modules need torch, which reading a profile does not load."""
    from ..measure.process import measure_process

    return measure_process(bench, points)


def _allocator(bench: Bench, _: Points) -> Points:
    """Measure driver, libraries and communicators."""
    import torch
    import torch.distributed as dist

    if dist.get_rank():
        return {"allocator": []}
    free, total = torch.cuda.mem_get_info(bench.device)
    peaks = torch.cuda.max_memory_allocated(bench.device), torch.cuda.max_memory_reserved(bench.device)
    context = total - free - torch.cuda.memory_reserved(bench.device)
    return {"allocator": [{"context_bytes": context, "allocated_bytes": peaks[0], "reserved_bytes": peaks[1]}]}


def _collectives(place: RankPlace, sizes: Sequence[int], bench: Bench, _: Points) -> Points:
    return {"collectives": measure_collectives(bench, world_group(place.num_nodes), sizes)}


def _groups(place: RankPlace, bench: Bench, _: Points) -> Points:
    points: list[dict[str, Any]] = []
    axes = axes_of(place.num_nodes, place.ranks_per_node)
    groups = groups_of(axes, place.num_nodes, place.ranks_per_node)
    for i, axis in enumerate(axes):
        if not bench.has_time(_GROUP_S, f"groups of {axis.size} ranks at a distance of {axis.stride}"):
            bench.leave_out("", len(axes) - i - 1)
            break
        group = next(groups)  # which makes it
        with bench.part_of_budget(1 / (len(axes) - i)):
            points += measure_collectives(bench, group, SIZES)
    return {"collectives": points}
