"""What a process takes for training besides its tensors: code that is loaded at the first pass, threads, buffers of gloo.

It is much the same for every model, so a few sharded steps of a tiny one measure it: the growth of the resident set, pages of files
left out, less what its tensors hold. It begins where `apply` begins to measure, after one step of a single layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import torch
import torch.distributed as dist
from torch import nn

from .resident import file_bytes, peak_bytes, reset_peak

if TYPE_CHECKING:
    from .timing import Bench, Points

_STEPS, _VOCAB, _DIM, _LEN = 4, 256, 64, 64


class _Tiny(nn.Module):
    """A decoder of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(_VOCAB, _DIM), nn.Linear(_DIM, _VOCAB, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(_DIM) for _ in range(2))
        self.mixes = nn.ModuleList(nn.Linear(_DIM, 3 * _DIM, bias=False) for _ in range(2))
        self.outs = nn.ModuleList(nn.Linear(_DIM, _DIM, bias=False) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [B, S, V] of tokens [B, S]."""
        x = self.embedding(tokens)
        for norm, mix, out in zip(self.norms, self.mixes, self.outs, strict=True):
            q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in mix(norm(x)).chunk(3, dim=-1))
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + nn.functional.silu(out(mixed.transpose(1, 2).flatten(2)))
        return self.head(x)  # type: ignore[no-any-return]


def measure_process(bench: Bench, _: Points) -> Points:
    """Return the most that any rank's process grows by, as AllocatorMemory; nothing where the kernel does not say it."""
    with torch.random.fork_rng(devices=()), torch.enable_grad():
        _train(nn.Sequential(nn.Linear(_DIM, _VOCAB)), torch.ones(1, _DIM))
        before = psutil.Process().memory_info().rss - file_bytes()
        is_known = reset_peak()
        tensor_bytes = _train(_sharded(_Tiny()), torch.zeros(1, _LEN, dtype=torch.int64))
        grown = max(0, peak_bytes() - file_bytes() - before - tensor_bytes) if is_known else 0
    grown = max(int(value) for value in bench.gather(grown))
    record = {"context_bytes": psutil.Process().memory_info().rss, "process_bytes": grown}
    return {"allocator": [] if dist.get_rank() else [record]}


def _sharded(model: _Tiny) -> nn.Module:
    """Return the model as ranks of training have it; what that needs of torch is loaded here and not before."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*model.mixes, *model.outs):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _train(model: nn.Module, inputs: torch.Tensor) -> int:
    """Do some steps; return the bytes of parameters, gradients and AdamW's states."""
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(_STEPS):
        logits = model(inputs).flatten(0, -2)
        nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return sum(4 * parameter.nbytes for parameter in model.parameters())
