"""Conversions of values between the forms of schema/placement_forms.py, by collectives that autograd differentiates.

One law covers all of them: the gradient makes the move from the dual of the target back to the dual of the source. The column of
tensor parallelism (whole in, gradients summed), its row (a sum, gradients passed on), both with sequence parallelism, and the
gathering of sharded weights are instances.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...profilers.placements.parts import joined, part_of
from ...schema.placement_forms import Form, move_between, moves

# torch 2.13 has other names for the two, and warns of these.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, source: Form, target: Form, group: dist.ProcessGroup) -> Tensor:
        ctx.forms, ctx.group = (source, target), group
        return moved(value, source, target, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        source, target = ctx.forms
        # A conversion again, as a gradient may have one itself.
        return convert(gradients[0], target.dual, source.dual, ctx.group), None, None, None


def convert(value: Tensor, source: Form, target: Form, group: dist.ProcessGroup) -> Tensor:
    """Return a value, held in one form, in another; so is its gradient, in their duals."""
    if moves(source, target) == ("none", "none"):
        return value
    made: Tensor = _Convert.apply(value, source, target, group)
    return made


def moved(value: Tensor, source: Form, target: Form, group: dist.ProcessGroup) -> Tensor:
    """Return the values of one form as those of another, without a gradient."""
    if (
        value.is_complex()
    ):  # not every backend sends them; dimensions count from the first, which one behind leaves alone
        pairs = moved(torch.view_as_real(value.resolve_conj()), source, target, group)
        return torch.view_as_complex(pairs.contiguous())
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    match move_between(source, target):
        case "none":
            return value.view_as(value)
        case "slice":
            return part_of(value, target, rank, num_ranks).contiguous()
        case "divide":
            return value / num_ranks
        case "gather":
            return _gathered(value, source, group)
        case "exchange":
            return _exchanged(value, source, target, group)
        case "pad":
            entire = torch.zeros(_full_shape(value, source, num_ranks), dtype=value.dtype, device=value.device)
            return _placed(entire, value, source, rank, num_ranks)
        case "sum":
            summed = value.contiguous().clone()
            dist.all_reduce(summed, group=group)
            return summed
        case "scatter":
            parts = [part_of(value, target, other, num_ranks).contiguous() for other in range(num_ranks)]
            out = torch.empty_like(parts[rank])
            _reduce_scatter(out.view(-1), torch.cat([part.reshape(-1) for part in parts]), group=group)
            return out


def _gathered(value: Tensor, source: Form, group: dist.ProcessGroup) -> Tensor:
    num_ranks = dist.get_world_size(group)
    sent = value.contiguous()
    received = torch.empty((num_ranks * sent.numel(),), dtype=sent.dtype, device=sent.device)
    _all_gather(received, sent.view(-1), group=group)
    of_ranks = received.view(num_ranks, *sent.shape)
    runs = of_ranks.unflatten(source.dim + 1, (source.runs, sent.shape[source.dim] // source.runs))
    return runs.movedim(0, source.dim + 1).flatten(source.dim, source.dim + 2)


def _exchanged(value: Tensor, source: Form, target: Form, group: dist.ProcessGroup) -> Tensor:
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    if source.dim == target.dim:  # other runs of one dimension
        return part_of(_gathered(value, source, group), target, rank, num_ranks).contiguous()
    pieces = [part_of(value, target, other, num_ranks) for other in range(num_ranks)]
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return joined(list(received.view(num_ranks, *pieces[0].shape)), source)


def _full_shape(value: Tensor, form: Form, num_ranks: int) -> list[int]:
    return [size * num_ranks if dim == form.dim else size for dim, size in enumerate(value.shape)]


def _placed(entire: Tensor, part: Tensor, form: Form, rank: int, num_ranks: int) -> Tensor:
    """Write a rank's part into its place in a whole value."""
    runs = entire.unflatten(form.dim, (form.runs, num_ranks, entire.shape[form.dim] // (form.runs * num_ranks)))
    runs.select(form.dim + 1, rank).copy_(part.unflatten(form.dim, (form.runs, -1)))
    return entire
