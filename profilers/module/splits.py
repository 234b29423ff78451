"""Which tensors of a block are split over tp: followed through its operators from the layers that a rule splits.

The output of a layer that is split by output is this rank's part, and so is whatever is computed from it, until a layer that is
split by input adds the parts up. Storages are followed, so that a view is split where its base is. Backward it is the other way
round: the gradient at a layer's input is split where the layer is split by input.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...schema.traced import TracedShard
from .split_rules import Rule

_SHARDS: Mapping[Rule, TracedShard] = {
    "by_output": "column", "gathered": "column", "by_input": "row", "by_slice": "row", "heads_norm": "none",
}  # fmt: skip


def storage_key(tensor: Tensor) -> int:
    """Return what tells one storage from another while both are alive."""
    return tensor.untyped_storage()._cdata


@dataclass
class Splits:
    """Storages that are split, and those that are read in full by layers that are split; kept, so that no key is used again.

    ``rules``: by the storage of a layer's weight.
    """

    rules: Mapping[int, Rule]
    split: dict[int, Any] = field(default_factory=dict)
    read: dict[int, Any] = field(default_factory=dict)

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a rank's part."""
        return storage_key(tensor) in self.split

    def follow(self, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> bool:
        """Note what comes out of an operator between split layers; return whether its work is split."""
        is_split = any(map(self.has, inputs))
        if is_split:
            self._add(outputs)
        return is_split

    def product(self, inputs: Iterable[Tensor], outputs: Iterable[Tensor], *, backward: bool) -> TracedShard:
        """Note what comes out of a product, and return how it is split."""
        given = list(inputs)
        rule = next((self.rules[key] for tensor in given if (key := storage_key(tensor)) in self.rules), None)
        if rule is None:
            return "column" if self.follow(given, outputs) else "none"
        if rule == ("by_input" if backward else "by_output"):
            self._add(outputs)
        if not backward and _SHARDS[rule] == "column":
            self.read |= {storage_key(t): t.untyped_storage() for t in given if storage_key(t) not in self.rules}
        return _SHARDS[rule]

    def _add(self, outputs: Iterable[Tensor]) -> None:
        self.split |= {storage_key(tensor): tensor.untyped_storage() for tensor in outputs}
