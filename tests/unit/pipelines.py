"""Small pipelines for the schedule tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np
from meshwright.cost_models.pipeline.orders import Pipeline
from meshwright.schema.schedules import placement


def pipeline(
    forward: Sequence[float],
    backward: Sequence[float],
    weight: Sequence[float],
    *,
    micro_batches: int,
    transfer: float = 0.0,
    chunks: int = 1,
    style: Literal["loop", "wave", "wave_from_last"] = "loop",
    held: Sequence[float] | None = None,
    freed: Sequence[float] | None = None,
) -> Pipeline:
    """Seconds and bytes per rank, cut into equal chunks; without `held` F keeps 2, B and W free 1 each; `freed` is what B frees."""
    ranks = placement(len(forward), chunks, style)
    held = held or [2.0] * len(forward)
    freed = freed or [h / 2 for h in held]

    def cut(column: Sequence[float]) -> tuple[float, ...]:
        return tuple(column[rank] / chunks for rank in ranks)

    return Pipeline(
        num_microbatches=micro_batches,
        rank_of_stage=ranks,
        forward_s=cut(forward),
        backward_s=cut(backward),
        weight_s=cut(weight),
        transfer_s=(transfer,) * (len(ranks) - 1),
        held_bytes=cut(held),
        backward_freed_bytes=cut(freed),
        weight_freed_bytes=cut([h - f for h, f in zip(held, freed, strict=True)]),
    )


def equal(ranks: int, micro_batches: int, *, chunks: int = 1, style: Literal["loop", "wave"] = "loop") -> Pipeline:
    """F = B = W = 1 on every rank, free transfers."""
    unit = [1.0] * ranks
    return pipeline(unit, unit, unit, micro_batches=micro_batches, chunks=chunks, style=style)


def random_pipeline(
    seed: int, *, ranks: int, micro_batches: int, chunks: int = 1, style: Literal["loop", "wave"] = "loop"
) -> Pipeline:
    """Whole seconds 1..9 that differ by rank and pass, transfers 0..2, memory 2..5 of which B frees a part."""
    rng = np.random.default_rng(seed)
    columns = [[float(chunks * x) for x in rng.integers(1, 10, ranks)] for _ in range(3)]
    held = [float(chunks * x) for x in rng.integers(2, 6, ranks)]
    freed = [chunks * float(rng.integers(0, h // chunks + 1)) for h in held]
    return pipeline(
        *columns,
        micro_batches=micro_batches,
        transfer=float(rng.integers(0, 3)),
        chunks=chunks,
        style=style,
        held=held,
        freed=freed,
    )


# Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241: times in microseconds (table 9) and bubble rates (table 5).
# ranks, micro-batches, F, B, W, transfer, 1F1B, ZB-H1, ZB-H2, ZB-1p, ZB-2p
PUBLISHED = (
    (8, 24, 18522, 18086, 9337, 601, 0.2431, 0.1585, 0.1083, 0.1585, 0.0433),
    (8, 32, 18513, 18086, 9331, 626, 0.1985, 0.1242, 0.0837, 0.1242, 0.0039),
    (8, 64, 18546, 18097, 9321, 762, 0.1240, 0.0674, 0.0444, 0.0674, 0.0026),
    (8, 24, 29718, 29444, 19927, 527, 0.2347, 0.1323, 0.0698, 0.1323, 0.0029),
    (8, 32, 29802, 29428, 19530, 577, 0.1898, 0.1045, 0.0559, 0.1045, 0.0022),
    (8, 64, 29935, 29621, 19388, 535, 0.1091, 0.0554, 0.0294, 0.0554, 0.0010),
    (16, 48, 11347, 11248, 8132, 377, 0.2552, 0.1397, 0.0672, 0.1397, 0.0066),
    (16, 64, 11307, 11254, 8101, 379, 0.2082, 0.1088, 0.0516, 0.1088, 0.0054),
    (16, 128, 11325, 11308, 8109, 378, 0.1251, 0.0576, 0.0266, 0.0576, 0.0028),
    (32, 96, 10419, 10207, 7715, 408, 0.2646, 0.1421, 0.0641, 0.1421, 0.0038),
    (32, 128, 10408, 10204, 7703, 408, 0.2168, 0.1106, 0.0490, 0.1106, 0.0029),
    (32, 256, 10402, 10248, 7698, 460, 0.1352, 0.0594, 0.0257, 0.0594, 0.0018),
)


def published_pipeline(row: Sequence[float]) -> Pipeline:
    """The pipeline of a row of `PUBLISHED`: equal stages, one unit of memory a micro-batch, half of it freed by B."""
    ranks, micro_batches, *times = row[:6]
    forward, backward, weight = ([float(t)] * int(ranks) for t in times[:3])
    return pipeline(forward, backward, weight, micro_batches=int(micro_batches), transfer=float(times[3]))


def published_cases(*names: str) -> list[tuple[object, ...]]:
    """(row, name, rate) for the named columns of `PUBLISHED`."""
    columns = {"1F1B": 6, "ZB-H1": 7, "ZB-H2": 8, "ZB-1p": 9, "ZB-2p": 10}
    return [(row, name, row[columns[name]]) for row, name in itertools.product(PUBLISHED, names)]
