"""Layers that nobody holds any more, as the mean of the nearest ones that are held: `--recover neighbours`.

Only where the states are lost for good: no survivor has them, no peer a copy, and there is no checkpoint. Weights and moments of a
lost layer become (below + above) / 2, tensor by tensor; the losses that follow are not those of a run without faults. What comes
before the first and after the last layer has no such neighbours. (The idea: CheckFree, arXiv:2506.15461, which weighs by gradient
norms.)
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from .holdings import Piece, missing

_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")

Means = Mapping[str, tuple[str, str]]
"""Names of lost tensors, and of those whose mean they become."""


def layer_of(name: str) -> int | None:
    """Return the layer that a tensor belongs to; None of the embedding, the head and what is with them."""
    place = _LAYER.search(name)
    return None if place is None else int(place[0])


def means_of_neighbours(needed: Mapping[str, Sequence[int]], pieces: Iterable[Piece]) -> Means:
    """Return what replaces the lost tensors of a state; nothing where something is lost that has no neighbours.

    Args:
        needed: sizes of the model's tensors by name.
        pieces: all that is held of the state.
    """
    pieces = list(pieces)
    lost = {layer_of(name) for name in missing(needed, pieces)}
    layers = {layer for name in needed if (layer := layer_of(name)) is not None}
    offsets = defaultdict[str, set[tuple[int, ...]]](set)
    for piece in pieces:
        offsets[piece.name].add(piece.offsets)
    means = dict[str, tuple[str, str]]()
    for layer in lost:
        below = max((each for each in layers - lost if layer is not None and each < layer), default=None)
        above = min((each for each in layers - lost if layer is not None and each > layer), default=None)
        if below is None or above is None:
            return {}
        for name in [name for name in offsets if layer_of(name) == below]:
            other = _LAYER.sub(str(above), name)
            if offsets[name] != offsets.get(other):
                return {}
            means[_LAYER.sub(str(layer), name)] = name, other
    return means
