"""Sums around a ring of islands: reduce-scatter and all-gather of a flat tensor in fp32, fp16, or int8 with a scale for each row.

A chunk is encoded anew at each hop of the reduce-scatter, so that nothing wider than chosen is ever sent. Who ends with the sum of
a chunk encodes it once and takes over what the others will decode: every member has the same numbers afterwards, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ...schema.errors import MeshwrightError
from ...schema.local_updates import ROW, WireBits

_TAG = 7


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
    """One rank of each island, those at the same place, in the order of the plan; gloo over the host's memory.

    Attributes:
        sent_bytes: of all messages so far.
    """

    def __init__(self, store: dist.Store, position: int, size: int, timeout_s: float) -> None:
        self.position, self.size, self.sent_bytes = position, size, 0
        self._group = dist.ProcessGroupGloo(store, position, size, timedelta(seconds=timeout_s))

    def sum(self, values: Tensor, bits: WireBits) -> Tensor:
        """Return the sum over the ring of fp32 values [N], the same on every member.

        Raises:
            MeshwrightError: an island did not answer in time.
        """
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
        """Return the largest of one number of each member."""
        numbers = torch.tensor([value])
        for _ in range(self.size - 1):
            numbers = torch.maximum(self._pass_on(numbers.view(torch.uint8)).view(torch.float32), torch.tensor([value]))
            value = float(numbers)
        return value

    def _pass_on(self, message: Tensor) -> Tensor:
        """Send a message to the next member and return that of the one before."""
        arrived = torch.empty_like(message)
        try:
            work: Sequence[dist.Work] = (
                self._group.send([message], (self.position + 1) % self.size, _TAG),
                self._group.recv([arrived], (self.position - 1) % self.size, _TAG),
            )
            for each in work:
                each.wait()
        except RuntimeError as error:
            raise MeshwrightError(
                f"a region did not answer: {str(error).splitlines()[0]}",
                help="the others have their checkpoints: start again with --resume once it is back, or plan without it",
            ) from None
        self.sent_bytes += message.numel()
        return arrived
