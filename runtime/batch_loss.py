"""The loss of a user's batches, of which a plan computes one for each micro-batch and takes the mean.

That is the loss of the batch where it is a mean over samples. One that couples them (the negatives of a contrastive loss, a mean
over as many targets as samples happen to have) is another loss for every layout: a first micro-batch shows it, in its halves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from ..schema.errors import RuntimeMismatchError

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
        is_by_sample = all(
            isinstance(leaf, Tensor) and (leaf.numel() == 1 or len(leaf) == num_samples)
            for leaf in tree_leaves(outputs)
        )
        if num_samples < 2 or not is_by_sample or isinstance(loss, FakeTensor) or not torch.isfinite(loss).all():
            return
        middle = num_samples // 2
        parts = [slice(middle), slice(middle, None)]

        def rows(value: Any, part: slice) -> Any:
            is_sample = isinstance(value, Tensor) and value.ndim and len(value) == num_samples
            return value[part] if is_sample else value

        try:
            with torch.random.fork_rng([]):
                again, *halves = (
                    float(
                        self._batch_loss(
                            *(tree_map(lambda v, p=part: rows(v, p), given) for given in (outputs, batch))
                        ).mean()
                    )
                    for part in (slice(None), *parts)
                )
        except Exception:  # whatever it says of parts of what it is for
            return
        total, mean = float(loss.mean()), (middle * halves[0] + (num_samples - middle) * halves[1]) / num_samples
        if abs(again - total) <= TOLERANCE * abs(total) < abs(mean - total):
            raise RuntimeMismatchError(
                f"the loss of a micro-batch of {num_samples} samples is {total:.6g}, the mean of its halves' losses {mean:.6g}: "
                "it couples the samples, or counts them unequally, and its mean over micro-batches is not the loss of the batch",
                help="return a mean over samples; or plan one micro-batch on one rank of data (--fix dp_replicate=1,dp_shard=1 "
                "and a micro_batch_size of the batch); or take it of each micro-batch: parallelize(..., per_micro_batch=True)",
            )
