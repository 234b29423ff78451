"""Forward and backward pass of a module: seconds, and on a GPU what its allocator holds meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .timing import Timing, timing_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from .timing import Bench

Inputs = Callable[[], "tuple[Tensor, ...]"]


def measure_passes(bench: Bench, module: nn.Module, inputs: Inputs, *, sample_s: float) -> tuple[Timing, Timing]:
    """Forward and backward, the latter with whatever the module recomputes; gradients are not accumulated."""
    run = _runner(module, inputs())
    _clocked(bench, run, 1)
    first = sum(_clocked(bench, run, 1)[0])
    count = bench.num_samples(first, sample_s)
    samples = _clocked(bench, run, count)
    return timing_of([forward for forward, _ in samples]), timing_of([backward for _, backward in samples])


def _runner(module: nn.Module, inputs: tuple[Tensor, ...]) -> Callable[[], Callable[[], Any]]:
    """A forward pass that returns its backward pass."""
    import torch

    leaves = [tensor for tensor in (*inputs, *module.parameters()) if tensor.requires_grad]

    def forward() -> Callable[[], Any]:
        with torch.enable_grad():
            out = module(*inputs)
        gradient = torch.ones_like(out)

        def backward() -> None:
            torch.autograd.grad(out, leaves, gradient, allow_unused=True)

        return backward

    return forward


def _clocked(bench: Bench, run: Callable[[], Callable[[], Any]], count: int) -> list[tuple[float, float]]:
    """Seconds forward and backward of ``count`` passes; on a GPU they follow one another without a look at the clock."""
    if bench.device.type != "cuda":
        samples = []
        for _ in range(count):
            begin = time.perf_counter()
            backward = run()
            middle = time.perf_counter()
            backward()
            samples.append((middle - begin, time.perf_counter() - middle))
        return samples
    import torch

    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(3)) for _ in range(count)]
    for begin, middle, end in events:
        begin.record()
        backward = run()
        middle.record()
        backward()
        end.record()
        del backward
    bench.synchronize()
    return [(a.elapsed_time(b) / 1e3, b.elapsed_time(c) / 1e3) for a, b, c in events]


def allocator_bytes(device: torch.device, module: nn.Module, inputs: Inputs) -> dict[str, int]:
    """What a GPU's allocator says of one pass: ``saved_bytes`` and ``transient_bytes`` of a LayerMemory."""
    import torch

    run = _runner(module, inputs())
    run()()  # libraries take their workspaces at the first call
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    backward = run()
    saved = torch.cuda.memory_allocated(device) - before
    backward()
    torch.cuda.synchronize(device)
    gradients = sum(p.numel() * p.element_size() for p in module.parameters())
    peak = torch.cuda.max_memory_allocated(device) - before
    return {"saved_bytes": saved, "transient_bytes": max(0, peak - saved - gradients)}
