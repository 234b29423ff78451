"""Sums around a ring of islands: reduce-scatter and all-gather of a flat tensor in fp32, fp16, or int8 with a scale for each row.

A chunk is encoded anew at each hop of the reduce-scatter, so that nothing wider than chosen is ever sent. Who ends with the sum of
a chunk encodes it once and takes over what the others will decode: every member has the same numbers afterwards, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...schema.local_updates import ROW, WireBits
from .ring_links import RingLinks


def encode(values: Tensor, bits: WireBits) -> Tensor:
    """Return fp32 values [N], N a multiple of ROW, as bytes; int8 rounds to the nearest of 255 steps of each row."""
    if bits == 32:
        return values.contiguous().view(torch.uint8)
    if bits == 16:
        return values.to(torch.float16).view(torch.uint8)
    rows = values.view(-1, ROW)
    scales = rows.abs().amax(dim=1) / 127
    steps = torch.where(scales > 0, scales, 1.0)
    return torch.cat(
        ((rows / steps[:, None]).round_().to(torch.int8).view(torch.uint8).flatten(), scales.view(torch.uint8))
    )


def decode(message: Tensor, bits: WireBits) -> Tensor:
    """Return the fp32 values of a message."""
    if bits == 32:
        return message.view(torch.float32)
    if bits == 16:
        return message.view(torch.float16).float()
    size = len(message) // (ROW + 4) * ROW
    scales = message[size:].clone().view(torch.float32)
    return (message[:size].view(torch.int8).view(-1, ROW).float() * scales[:, None]).flatten()


class Ring:
    """One rank of each island that is there, those at the same place, in the order of the plan; over the host's memory.

    Every method raises an OSError, or what the check of the links raises, where a member is gone.

    Attributes:
        sent_bytes: of all messages so far.
    """

    def __init__(self, links: RingLinks, position: int, size: int) -> None:
        self.position, self.size, self.sent_bytes = position, size, 0
        self._links = links

    def sum(self, values: Tensor, bits: WireBits) -> Tensor:
        """Return the sum over the ring of fp32 values [N], the same on every member."""
        chunk = -(-len(values) // (self.size * ROW)) * ROW
        padded = torch.zeros(self.size * chunk)
        padded[: len(values)] = values
        chunks = list(padded.split(chunk))
        for hop in range(self.size - 1):
            to_send, to_add = (self.position - hop) % self.size, (self.position - hop - 1) % self.size
            chunks[to_add] = chunks[to_add] + decode(self._pass_on(encode(chunks[to_send], bits)), bits)
        message = encode(chunks[(self.position + 1) % self.size], bits)
        chunks[(self.position + 1) % self.size] = decode(message, bits)
        for hop in range(self.size - 1):
            message = self._pass_on(message)
            chunks[(self.position - hop) % self.size] = decode(message, bits)
        return torch.cat(chunks)[: len(values)]

    def maximum(self, value: float) -> float:
        """Return the largest of one number of each member; all of them have called it then."""
        numbers = torch.tensor([value])
        for _ in range(self.size - 1):
            numbers = torch.maximum(self._pass_on(numbers.view(torch.uint8)).view(torch.float32), torch.tensor([value]))
            value = float(numbers)
        return value

    def hand_on(self, tensors: Sequence[Tensor], lacks: Sequence[bool]) -> None:
        """Give tensors to the members that lack them, each from the one before, which has them or gets them first."""
        for tensor in tensors:
            values = memoryview(tensor.view(-1).view(torch.uint8).numpy())
            if lacks[self.position]:
                self._links.exchange(None, values)
            if lacks[(self.position + 1) % self.size]:
                self._links.exchange(values, None)
                self.sent_bytes += len(values)

    def close(self) -> None:
        """Leave the ring, which the neighbours see."""
        self._links.close()

    def _pass_on(self, message: Tensor) -> Tensor:
        """Send a message to the next member and return that of the one before."""
        arrived = torch.empty_like(message)
        self._links.exchange(memoryview(message.numpy()), memoryview(arrived.numpy()))
        self.sent_bytes += message.numel()
        return arrived
