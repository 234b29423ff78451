"""Values and the parts of them that ranks hold (schema/placement_forms.py), all ranks in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...schema.placement_forms import Form, moves


def part_of(value: Tensor, form: Form, rank: int, num_ranks: int) -> Tensor:
    """Return what a rank holds of a whole value."""
    if form.is_entire:
        return value
    if form.kind == "P":
        return value / num_ranks
    runs = value.unflatten(form.dim, (form.runs, num_ranks, value.shape[form.dim] // (form.runs * num_ranks)))
    return runs.select(form.dim + 1, rank).flatten(form.dim, form.dim + 1)


def joined(parts: Sequence[Tensor], form: Form) -> Tensor:
    """Return the whole value of which each rank holds a part."""
    if form.is_entire:
        return parts[0]
    if form.kind == "P":
        return torch.stack(list(parts)).sum(0)
    runs = [part.unflatten(form.dim, (form.runs, part.shape[form.dim] // form.runs)) for part in parts]
    return torch.stack(runs, dim=form.dim + 1).flatten(form.dim, form.dim + 2)


def is_cut(size: int, form: Form, num_ranks: int) -> bool:
    """Return whether a dimension can be held in a form."""
    return size % (form.runs * num_ranks) == 0 and size > 0


class ConvertAll(torch.autograd.Function):
    """A conversion on all ranks at once: what the runtime does with collectives (runtime/placements/conversions.py)."""

    @staticmethod
    def forward(ctx: Any, source: Form, target: Form, *parts: Tensor) -> tuple[Tensor, ...]:
        """Return the parts in the target's form."""
        ctx.forms = source, target
        return _moved(parts, source, target)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the parts of the gradient in the source's dual."""
        source, target = ctx.forms
        return (None, None, *converted(gradients, target.dual, source.dual))


def converted(parts: Sequence[Tensor], source: Form, target: Form) -> Sequence[Tensor]:
    """Return the parts of all ranks in another form."""
    if moves(source, target) == ("none", "none"):
        return parts
    made: tuple[Tensor, ...] = ConvertAll.apply(source, target, *parts)
    return made


def _moved(parts: Sequence[Tensor], source: Form, target: Form) -> tuple[Tensor, ...]:
    num_ranks = len(parts)
    if source.is_entire:  # each rank works on its own copy, so that copies that differ are seen
        return tuple(part_of(part, target, rank, num_ranks).clone() for rank, part in enumerate(parts))
    entire = joined(parts, source)
    return tuple(part_of(entire, target, rank, num_ranks).clone() for rank in range(num_ranks))
