"""The loss of a user's batches, of which a plan computes one for each micro-batch and takes the mean.

That is the loss of the batch where it is a mean over samples. One that couples them (the negatives of a contrastive loss, a mean
over as many targets as samples happen to have) is another loss for every layout: a first micro-batch shows it, in its halves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from ..schema.errors import RuntimeMismatchError
from ..schema.units import counted

BatchLoss = Callable[[Any, Any], Tensor]
"""What a module puts out for a micro-batch, and the micro-batch, to a mean loss."""

TOLERANCE = 1e-3
"""Of the loss: rounding in 16 bits is less, what couples samples is more."""


class MeanLoss:
    """A loss of batches that is refused where its first micro-batch shows that it is no mean over samples."""

    def __init__(self, batch_loss: BatchLoss) -> None:
        self._batch_loss, self._is_checked = batch_loss, False

    def __call__(self, outputs: Any, batch: Any) -> Tensor:
        """Return the loss of a micro-batch.

        Raises:
            RuntimeMismatchError: it is not the mean of the losses of its halves.
        """
        loss = self._batch_loss(outputs, batch)
        if not self._is_checked:
            self._is_checked = True
            self._check(outputs, batch, loss)
        return loss

    @torch.no_grad()
    def _check(self, outputs: Any, batch: Any, loss: Tensor) -> None:
        num_samples = next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), 0)
        is_by_sample = all(_is_by_sample(leaf, num_samples) for leaf in _leaves(outputs))
        if not num_samples or not is_by_sample or isinstance(loss, FakeTensor) or not torch.isfinite(loss).all():
            return
        # One sample has no halves: it is taken twice, of which the mean is that of one.
        middle = num_samples // 2
        parts = [slice(middle), slice(middle, None)] if middle else [[0, 0]]

        def loss_of(part: slice | list[int]) -> float:
            def rows(value: Any) -> Any:
                is_sample = isinstance(value, Tensor) and value.ndim and len(value) == num_samples
                return value[part] if is_sample else value

            return float(self._batch_loss(_mapped(rows, outputs), _mapped(rows, batch)).mean())

        try:
            with torch.random.fork_rng([]):
                again, *losses = map(loss_of, (slice(None), *parts))
        except Exception:  # whatever it says of parts of what it is for
            return
        total = float(loss.mean())
        mean = (middle * losses[0] + (num_samples - middle) * losses[-1]) / num_samples
        # A loss of zero has nothing that another one could be relative to.
        if abs(again - total) <= TOLERANCE * max(abs(total), abs(mean)) < abs(mean - total):
            compared = "the mean of its halves' losses" if middle else "that of the sample taken twice"
            raise RuntimeMismatchError(
                f"the loss of a micro-batch of {counted(num_samples, 'sample')} is {total:.6g}, {compared} {mean:.6g}: "
                "it couples the samples, or counts them unequally, and its mean over micro-batches is not the loss of the batch",
                help="return a mean over samples; or plan one micro-batch on one rank of data (--fix dp_replicate=1,dp_shard=1 "
                "and a micro_batch_size of the batch); or take it of each micro-batch: parallelize(..., per_micro_batch=True)",
            )


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what a structure holds, dataclasses that torch does not know taken apart as well."""
    for leaf in tree_leaves(value):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _leaves([getattr(leaf, field.name) for field in fields(leaf)])
        else:
            yield leaf


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a structure with its leaves changed, those of dataclasses as well."""

    def changed(leaf: Any) -> Any:
        if is_dataclass(leaf) and not isinstance(leaf, type):
            return replace(leaf, **{field.name: _mapped(change, getattr(leaf, field.name)) for field in fields(leaf)})
        return change(leaf)

    return tree_map(changed, value)


def _is_by_sample(leaf: Any, num_samples: int) -> bool:
    """Say whether a part of the outputs belongs to no sample or has a row for each; a number may count them."""
    if isinstance(leaf, Tensor):
        return leaf.numel() == 1 or len(leaf) == num_samples
    return leaf is None or isinstance(leaf, str | bool)
