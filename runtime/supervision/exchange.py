"""What members of a generation exchange beside the training: words as JSON through the store, bytes over gloo in host memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor


class Members(Protocol):
    """Processes that exchange something: `Membership` of a generation, or any others with a store."""

    position: int
    store: Any

    def group(self, name: str, position: int, size: int) -> Any:
        """Return a group of gloo's of the first ``size`` of them."""
        ...


class Exchange:
    """An exchange among the first ``size`` members of a generation; each of them has one and calls its methods in the same order.

    Raises:
        GenerationOverError: by any method, where a member dies meanwhile.
    """

    def __init__(self, membership: Members, name: str, size: int) -> None:
        self.position, self.size = membership.position, size
        self._name, self._store, self._num_topics = name, membership.store, 0
        self._group = membership.group(name, self.position, size)

    def tell(self, value: Any) -> list[Any]:
        """Return what every member tells, in their order; JSON values."""
        self._num_topics += 1
        topic = f"{self._name}/{self._num_topics}"
        self._store.set(f"{topic}/{self.position}", json.dumps(value))
        return [json.loads(text) for text in self._store.multi_get([f"{topic}/{i}" for i in range(self.size)])]

    def start(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> list[Any]:
        """Begin to send bytes to members and to receive into buffers from others; return what to wait for."""
        receives = [self._group.recv([buffer], source, 0) for source, buffer in incoming.items() if buffer.numel()]
        sends = [self._group.send([buffer], target, 0) for target, buffer in outgoing.items() if buffer.numel()]
        return [*receives, *sends]

    def barrier(self) -> None:
        """Wait for every member."""
        if self.size > 1:
            self._group.barrier().wait()


def as_bytes(tensors: list[Tensor]) -> Tensor:
    """Return the bytes of tensors, one after the other, in host memory."""
    flat = [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)
