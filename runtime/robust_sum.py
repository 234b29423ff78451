"""Means of gradients that a few wrong ranks cannot spoil (`apply --robust-sum`): losses are no longer those of the plain mean.

A rank whose device computes wrongly, or whose data are broken, moves a plain mean as far as it likes. Each rank here gets its part
[k] of every rank's gradients, by one exchange of all with all (as many bytes as a reduce-scatter), has them as rows [n, k], and
takes of them

    trimmed   element by element the mean without the (n - 1) // 3 least and largest
    median    element by element the median
    flag      the mean of the ranks that agree, decided for each unit of gradients from their Gram matrix [n, n] alone

`flag` follows the Flag Aggregator (arXiv:2302.05865) in what it looks at and how: the unit gradients, and iteratively reweighted
least squares on their inner products, whose parts are summed over the ranks. They give the point to which the unit gradients are
nearest by the sum of (not squared) distances. A rank does not count whose gradient points away from it, is not finite, or is much
longer than the median one. Where no rank is wrong the mean is the plain one; the projection of the paper, on (n + 1) // 2
dimensions, lets noise through (docs/log.md). A third of the ranks that are wrong alike, with minus the mean, win where a right
gradient's own noise exceeds 1.7 times what all share: twice as many then pull less along it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from .parallel_model import ParallelModel
from .training.options import RobustSum

MAX_LENGTH = 3.0
"""Of a gradient, by the median one. [measured: benchmarks/robust_sum.py, where flag without faults is the plain mean]"""

_ROUNDS, _MIN_DISTANCE = 4, 1e-3


def apply_robust_sum(model: ParallelModel, kind: RobustSum) -> None:
    """Let data-parallel ranks take a robust mean of their gradients, under a plan that `require_robust_sum` lets pass."""
    if model.reduction is not None:
        group = model.reduction.group
        model.reduction.mean = lambda buffer: all_mean(buffer, kind, group)
        return
    for module in model.module.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(RobustReduceScatter(kind))


class RobustReduceScatter(DefaultReduceScatter):
    """In place of FSDP's reduce-scatter."""

    def __init__(self, kind: RobustSum) -> None:
        self._kind = kind

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Write this rank's part of the mean, or of as many times it as there are ranks where a sum is wanted."""
        mean = scattered_mean(input_tensor, self._kind, group)
        output_tensor.copy_(mean * group.size() if op == dist.ReduceOp.SUM else mean)


def all_mean(buffer: Tensor, kind: RobustSum, group: dist.ProcessGroup) -> None:
    """Replace gradients [k] by their mean over a group."""
    padded = torch.nn.functional.pad(buffer, (0, -len(buffer) % group.size()))
    mean = scattered_mean(padded, kind, group)
    dist.all_gather_single(padded, mean, group=group)
    buffer.copy_(padded[: len(buffer)])


def scattered_mean(parts: Tensor, kind: RobustSum, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part [k] of the mean of gradients [n * k]."""
    rows = torch.empty_like(parts)
    dist.all_to_all_single(rows, parts, group=group)
    rows = rows.view(group.size(), -1)
    if kind != "flag":
        return middle(rows, (len(rows) - 1) // (3 if kind == "trimmed" else 2))
    gram = (rows @ rows.T).double()
    dist.all_reduce(gram, group=group)
    return flag_weights(gram).to(rows.dtype) @ rows.nan_to_num(0.0, 0.0, 0.0)


def middle(rows: Tensor, num_trimmed: int) -> Tensor:
    """Return the mean of each column of rows [n, k] without its least and largest; what is no number is among the largest."""
    return rows.sort(dim=0).values[num_trimmed : len(rows) - num_trimmed].mean(dim=0)


def flag_weights(gram: Tensor) -> Tensor:
    """Return the weight [n] of each gradient in the mean, from their inner products [n, n] in double precision."""
    lengths = gram.diagonal().sqrt()
    is_finite = lengths.isfinite()
    positive = lengths[is_finite & (lengths > 0)]
    if not len(positive):
        return is_finite / is_finite.sum().clamp(min=1)
    counts = is_finite & (lengths <= MAX_LENGTH * positive.median())
    lengths, gram = lengths[counts].clamp(min=1e-300), gram[counts][:, counts]
    cosines, center = gram / lengths / lengths[:, None], torch.full_like(lengths, 1 / len(lengths))
    for _ in range(_ROUNDS):
        distances = (1 - 2 * cosines @ center + center @ cosines @ center).clamp(min=_MIN_DISTANCE**2).sqrt()
        center = distances.reciprocal() / distances.reciprocal().sum()
    weights = torch.zeros_like(is_finite, dtype=gram.dtype)
    weights[counts] = (cosines @ center >= 0).to(gram.dtype)
    return weights / weights.sum()
