"""Fragments of the parameters that islands sum up together, as flat pieces, and the anchor that the sums move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...schema.local_updates import ROW

WIDE_BELOW = 64 * ROW
"""Smaller tensors (norms, biases, routers) are sent in fp32: they are a thousandth of all bytes, and ranks that share other tensors
have copies of them, which must stay the same."""


class Piece(NamedTuple):
    """Neighbouring numbers of one tensor, flat: in the parameter, the anchor, and the anchor's momentum where there is one."""

    value: Tensor
    anchor: nn.Parameter
    momentum: Tensor | None
    is_wide: bool


class Fragment:
    """Some parameters that are summed up together: their pieces."""

    def __init__(self, pieces: Sequence[Piece], *, learning_rate: float, momentum: float) -> None:
        self.pieces = pieces
        anchors = [piece.anchor for piece in pieces]
        self._optimizer = torch.optim.SGD(anchors, lr=learning_rate, momentum=momentum, nesterov=momentum > 0)
        for piece in pieces:
            if piece.momentum is not None:
                self._optimizer.state[piece.anchor]["momentum_buffer"] = piece.momentum
        self._before: list[Tensor] = []

    @torch.no_grad()
    def begin(self) -> list[Tensor]:
        """Return what changed since the anchor, and remember the parameters as they are."""
        self._before = [piece.value.to("cpu", torch.float32, copy=True) for piece in self.pieces]
        return [piece.anchor - before for piece, before in zip(self.pieces, self._before, strict=True)]

    @torch.no_grad()
    def take_over(self, deltas: Sequence[Tensor]) -> None:
        """Move the anchor by the sum of what all islands changed, and the parameters with it."""
        for piece, delta in zip(self.pieces, deltas, strict=True):
            piece.anchor.grad = delta
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        for piece, before in zip(self.pieces, self._before, strict=True):
            since = piece.value.to("cpu", torch.float32) - before
            piece.value.copy_(piece.anchor + since if since.any() else piece.anchor)
        self._before = []

    @torch.no_grad()
    def go_to_anchor(self) -> None:
        """Set the parameters to the anchor."""
        for piece in self.pieces:
            piece.value.copy_(piece.anchor)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors one after another, each filled up to whole rows, so that no row has numbers of two of them."""
    return torch.cat([part for tensor in tensors for part in (tensor, torch.zeros(-tensor.numel() % ROW))])


def spread(values: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a flat tensor back."""
    first = 0
    for tensor in tensors:
        tensor.copy_(values[first : first + tensor.numel()])
        first += -(-tensor.numel() // ROW) * ROW
