"""The steps of a measurement: the brief one describes a cluster, the thorough one everything this package can measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..measure.compute import (
    CPU_LAYERS,
    GPU_LAYERS,
    measure_matmuls,
    measure_shapes,
)
from ..measure.host import measure_copies, measure_cpu_adam, measure_storage
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
from ..measure.overlap import measure_overlap
from .protocol import MeasurementStep, ProfileTask, RankPlace

if TYPE_CHECKING:
    from ..measure.timing import Bench, Points

Chooser = Callable[["Bench", float, float], Sequence[tuple[int, int, int]]]
"""From the rate (FLOP/s) and the memory bandwidth (bytes/s) measured so far to shapes (m, n, k) worth measuring, best first."""

_GROUP_S = 0.1
"""Of making process groups."""

_ELEMENTS = (2**22, 2**24, 2**20, 2**26)


def brief_steps(task: ProfileTask, place: RankPlace, *, on_gpu: bool) -> list[MeasurementStep]:
    """Products, memory bandwidth and collectives."""
    layers = (GPU_LAYERS if on_gpu else CPU_LAYERS)[: task.num_layers]
    sizes = SIZES[: task.num_sizes] if place.world_size > 1 else ()
    return [
        MeasurementStep(
            "compute", "memory bandwidth", 0.2, lambda bench, _: {"elementwise": measure_streams(bench)}, is_needed=True
        ),
        MeasurementStep(
            "compute",
            "matrix products",
            1,
            lambda bench, _: {"matmuls": measure_matmuls(bench, layers)},
            is_needed=True,
        ),
        MeasurementStep("links", "collectives", 1, partial(_collectives, place, sizes), is_needed=place.world_size > 1),
    ]


def thorough_steps(task: ProfileTask, place: RankPlace, *, on_gpu: bool, choose: Chooser) -> list[MeasurementStep]:
    """Every part of this package; the parts of a model are `runtime.profiling.steps`."""
    dtype = "bf16" if on_gpu else "fp32"
    alone = "" if place.world_size > 1 else "there is one rank"
    streams, products, collectives = brief_steps(task, place, on_gpu=on_gpu)
    shapes = (GPU_ATTENTION, GPU_GROUPED) if on_gpu else (CPU_ATTENTION, CPU_GROUPED)
    return [
        streams._replace(value=1),
        products._replace(value=6),
        MeasurementStep(
            "compute",
            "elementwise kernels",
            4,
            partial(_elementwise, dtype),
        ),
        MeasurementStep("compute", "attention", 5, partial(_attention, dtype, shapes[0])),
        MeasurementStep("compute", "grouped products", 3, partial(_grouped, dtype, shapes[1])),
        MeasurementStep("compute", "informative products", 14, partial(_informative, dtype, choose)),
        collectives._replace(value=10, measure=partial(_collectives, place, ALL_SIZES), skipped=alone),
        MeasurementStep("links", "pairs of ranks", 5, partial(_pairs, place), skipped=alone),
        MeasurementStep("links", "groups of a mesh", 10, partial(_groups, place), skipped=alone),
        MeasurementStep(
            "host", "copies", 5, partial(_copies, place), skipped="" if on_gpu else "ranks compute in host memory"
        ),
        MeasurementStep("host", "AdamW on the host", 3, partial(_adam, place)),
        MeasurementStep(
            "storage",
            "storage",
            5,
            partial(_storage, task, place),
            skipped="" if task.storage_path else "no --nvme PATH",
        ),
        MeasurementStep(
            "overlap",
            "streams at once",
            8,
            lambda bench, points: {"overlaps": measure_overlap(bench, dtype, points)},
            skipped="" if on_gpu else alone,
        ),
    ]


def rate_of(bench: Bench, points: Points, dtype: str) -> float:
    """Best rate of the products measured so far in a format, FLOP/s, of the slowest rank."""
    rates = [2.0 * p["m"] * p["n"] * p["k"] / p["time_s"] for p in points["matmuls"] if p["dtype"] == dtype]
    return bench.agree_least(max(rates, default=1e9))


def _elementwise(dtype: str, bench: Bench, points: Points) -> Points:
    return {"elementwise": measure_elementwise(bench, dtype, _ELEMENTS, stream_bandwidth(points["elementwise"]))}


def _informative(dtype: str, choose: Chooser, bench: Bench, points: Points) -> Points:
    rate = rate_of(bench, points, dtype)
    bandwidth = bench.agree_least(stream_bandwidth(points["elementwise"]))
    return {"matmuls": measure_shapes(bench, choose(bench, rate, bandwidth), dtype, rate)}


def _attention(dtype: str, shapes: Any, bench: Bench, points: Points) -> Points:
    return {"attention": measure_attention(bench, dtype, shapes, rate_of(bench, points, dtype))}


def _grouped(dtype: str, shapes: Any, bench: Bench, points: Points) -> Points:
    return {"grouped_matmuls": measure_grouped(bench, dtype, shapes, rate_of(bench, points, dtype))}


def _collectives(place: RankPlace, sizes: Sequence[int], bench: Bench, _: Points) -> Points:
    return {"collectives": measure_collectives(bench, world_group(place.num_nodes), sizes)}


def _groups(place: RankPlace, bench: Bench, _: Points) -> Points:
    points: list[dict[str, Any]] = []
    axes = axes_of(place.num_nodes, place.ranks_per_node)
    groups = groups_of(axes, place.num_nodes, place.ranks_per_node)
    for i in range(len(axes)):
        if not bench.has_time(_GROUP_S, f"groups of {axes[i].size} ranks at a distance of {axes[i].stride}"):
            bench.leave_out("", len(axes) - i - 1)
            break
        group = next(groups)
        with bench.part_of_budget(1 / (len(axes) - i)):
            points += measure_collectives(bench, group, SIZES)
    return {"collectives": points}


def _pairs(place: RankPlace, bench: Bench, _: Points) -> Points:
    return {"pairs": measure_pairs(bench, place.num_nodes, place.ranks_per_node)}


def _copies(place: RankPlace, bench: Bench, _: Points) -> Points:
    return {"host_copies": measure_copies(bench, place.local_rank, place.ranks_per_node)}


def _adam(place: RankPlace, bench: Bench, _: Points) -> Points:
    return {"cpu_adam": measure_cpu_adam(bench, place.local_rank, place.ranks_per_node)}


def _storage(task: ProfileTask, place: RankPlace, bench: Bench, _: Points) -> Points:
    return {"storage": measure_storage(bench, task.storage_path, place.ranks_per_node)}
