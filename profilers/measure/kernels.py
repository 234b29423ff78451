"""Kernels other than single products: what memory bounds, attention, the grouped products of experts, and entire modules."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ...schema.units import MIB
from .compute import DTYPE_BYTES, random_tensor, torch_dtype
from .timing import Timing, summarise_samples

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from .timing import Bench


STREAM_BYTES = 128 * MIB
"""Size of the tensors for memory bandwidth, beyond the caches; less where a rank has little memory."""

_NORM_DIM = 4096

_ATTENTION_PART = 2.0
"""Expected seconds of attention over those of products of as many FLOPs."""


class Heads(NamedTuple):
    """Attention of one micro-batch."""

    batch: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def flops(self) -> float:
        """Return the FLOPs, forward and causal: half of two products of [seq, head_dim] x [head_dim, seq] for each head."""
        return 2.0 * self.batch * self.num_heads * self.seq_len**2 * self.head_dim


class Grouped(NamedTuple):
    """``num_groups`` products [rows / num_groups, k] x [k, n]."""

    num_groups: int
    rows: int
    n: int
    k: int


CPU_ATTENTION = (Heads(1, 512, 8, 8, 64), Heads(1, 256, 8, 2, 64), Heads(1, 1024, 4, 4, 64), Heads(2, 512, 8, 2, 128))

GPU_ATTENTION = (
    Heads(1, 4096, 32, 8, 128),
    Heads(1, 8192, 32, 8, 128),
    Heads(2, 2048, 32, 32, 128),
    Heads(1, 4096, 8, 8, 64),
    Heads(4, 1024, 16, 16, 128),
    Heads(1, 16384, 8, 1, 128),
    Heads(1, 512, 16, 4, 64),
    Heads(1, 32768, 4, 1, 128),
)

CPU_GROUPED = (Grouped(8, 512, 256, 256), Grouped(4, 512, 512, 512), Grouped(32, 256, 128, 128))

GPU_GROUPED = (
    Grouped(8, 16384, 14336, 4096),
    Grouped(64, 16384, 2048, 2048),
    Grouped(128, 32768, 768, 2048),
    Grouped(8, 4096, 4096, 4096),
    Grouped(32, 8192, 1408, 2048),
)


def measure_streams(bench: Bench) -> list[dict[str, Any]]:
    """Measure ``c = a + b`` and ``c *= s`` out of cache, which memory bandwidth is taken from.

    Return fields of ElementwisePoint.
    """
    import torch

    size = int(min(STREAM_BYTES, max(64 * MIB, bench.agree_min(bench.free_bytes()) // 16)))
    a, b, c = (torch.ones(size // 4, device=bench.device) for _ in range(3))
    shape = {"dtype": "fp32", "num_elements": size // 4}
    return [
        {"op": "add", **shape, "traffic_bytes": 3 * size, **bench.measure(lambda: torch.add(a, b, out=c)).fields()},
        {"op": "scale", **shape, "traffic_bytes": 2 * size, **bench.measure(lambda: c.mul_(1.0)).fields()},
    ]


def stream_bandwidth(points: Sequence[dict[str, Any]]) -> float:
    """Return the bytes read and written per second by ``c = a + b`` and ``c *= s`` together."""
    streams = [point for point in points if point["op"] in ("add", "scale")]
    return float(sum(point["traffic_bytes"] for point in streams) / sum(point["time_s"] for point in streams))


_SLOWEST_PASSES = 16
"""Of a kernel before it was measured, as if it moved its elements so often: a softmax on one core computes more than it moves."""


def measure_elementwise(
    bench: Bench, dtype: str, sizes: Sequence[int], bandwidth_bytes_per_s: float
) -> list[dict[str, Any]]:
    """Measure the kernels of a decoder at these numbers of elements; return fields of ElementwisePoint."""
    points = []
    element_s = {}
    for size in sizes:
        num_bytes = size * DTYPE_BYTES[dtype]
        for op, (passes, call) in _elementwise_calls(bench.device, dtype, size).items():
            call_s = element_s.get(op, _SLOWEST_PASSES * DTYPE_BYTES[dtype] / bandwidth_bytes_per_s) * size
            if not bench.has_memory(4 * num_bytes):
                continue
            if bench.has_time(
                bench.point_s(call_s) + 6 * num_bytes / bandwidth_bytes_per_s, f"{op} of {size} elements"
            ):
                bench.say(f"{op} of {size} elements")
                timing = bench.measure(call())
                element_s[op] = timing.time_s / size
                shape = {"op": op, "dtype": dtype, "num_elements": size}
                points.append({**shape, "traffic_bytes": passes * num_bytes, **timing.fields()})
    return points


def _elementwise_calls(
    device: torch.device, dtype: str, size: int
) -> dict[str, tuple[int, Callable[[], Callable[[], Any]]]]:
    """Return the elements read and written for each of the tensor's, and what makes the call; nothing is allocated before."""
    import torch
    import torch.nn.functional as F

    def tensor() -> torch.Tensor:
        return random_tensor((size // _NORM_DIM, _NORM_DIM), device, dtype)

    def copy() -> Callable[[], Any]:
        source, target = tensor(), tensor()
        return lambda: target.copy_(source)

    def norm() -> Callable[[], Any]:
        hidden, weight = tensor(), torch.ones(_NORM_DIM, device=device, dtype=torch_dtype(dtype))
        return lambda: F.rms_norm(hidden, (_NORM_DIM,), weight)

    def gated() -> Callable[[], Any]:
        gate, up = tensor(), tensor()
        return lambda: F.silu(gate) * up

    def softmax() -> Callable[[], Any]:
        scores = tensor()
        return lambda: scores.softmax(-1)

    return {"copy": (2, copy), "rms_norm": (2, norm), "silu_mul": (5, gated), "softmax": (2, softmax)}


def measure_attention(bench: Bench, dtype: str, shapes: Sequence[Heads], flops_per_s: float) -> list[dict[str, Any]]:
    """Measure attention of these shapes, forward and backward, until the time is over; return fields of AttentionPoint."""
    import torch.nn.functional as F

    points = []
    for shape in shapes:
        elements = shape.batch * shape.seq_len * shape.head_dim * (shape.num_heads + shape.num_kv_heads)
        if not bench.has_memory(8 * elements * DTYPE_BYTES[dtype]):
            continue
        both_s = bench.point_s(shape.flops / flops_per_s) + bench.point_s(2.5 * shape.flops / flops_per_s)
        if not bench.has_time(_ATTENTION_PART * both_s, f"attention over {shape.seq_len} tokens"):
            continue
        bench.say(f"attention over {shape.seq_len} tokens")
        query, key, value = (
            random_tensor((shape.batch, heads, shape.seq_len, shape.head_dim), bench.device, dtype)
            for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        )
        options = {"is_causal": True, "enable_gqa": shape.num_heads != shape.num_kv_heads}
        forward, backward = forward_and_backward(
            lambda q, k, v, options=options: F.scaled_dot_product_attention(q, k, v, **options), (query, key, value)
        )
        fields = {"dtype": dtype, **shape._asdict(), "causal": True}
        points.append({**fields, "direction": "forward", **bench.measure(forward).fields()})
        points.append({**fields, "direction": "backward", **bench.measure(backward).fields()})
    return points


def measure_grouped(bench: Bench, dtype: str, shapes: Sequence[Grouped], flops_per_s: float) -> list[dict[str, Any]]:
    """Measure grouped products of these shapes, forward and backward, until the time is over.

    Return fields of GroupedMatmulPoint.
    """
    import torch

    points = []
    for shape in shapes:
        groups, rows, n, k = shape
        elements = rows * (n + k) + groups * n * k
        if not bench.has_memory(3 * elements * DTYPE_BYTES[dtype]):
            continue
        call_s = 2 * rows * n * k / flops_per_s
        if not bench.has_time(bench.point_s(call_s) + bench.point_s(2 * call_s), f"{groups} products at once"):
            continue
        bench.say(f"{groups} products at once")
        tokens, weights = (
            random_tensor((rows, k), bench.device, dtype),
            random_tensor((groups, k, n), bench.device, dtype),
        )
        ends = torch.arange(1, groups + 1, device=bench.device, dtype=torch.int32) * (rows // groups)
        forward, backward = forward_and_backward(
            lambda t, w, ends=ends: torch.nn.functional.grouped_mm(t, w, offs=ends), (tokens, weights)
        )
        fields = {"dtype": dtype, **shape._asdict()}
        points.append({**fields, "direction": "forward", **bench.measure(forward).fields()})
        points.append({**fields, "direction": "backward", **bench.measure(backward).fields()})
    return points


def forward_and_backward(
    function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return calls of the forward pass, and of the backward pass only, through one graph that is stored."""
    import torch

    with torch.enable_grad():
        leaves = tuple(tensor.detach().requires_grad_() for tensor in inputs)
        out = function(*leaves)
        gradient = torch.randn_like(out)

    def forward() -> None:
        with torch.enable_grad():
            function(*leaves)

    return forward, lambda: torch.autograd.grad(out, leaves, gradient, retain_graph=True)


Inputs = Callable[[], "tuple[Tensor, ...]"]


def measure_passes(bench: Bench, module: nn.Module, inputs: Inputs, *, sample_s: float) -> tuple[Timing, Timing]:
    """Measure forward and backward, the latter with whatever the module recomputes; gradients are not accumulated."""
    run = _runner(module, inputs())
    _clocked(bench, run, 1)
    first = sum(_clocked(bench, run, 1)[0])
    count = bench.num_samples(first, sample_s)
    samples = _clocked(bench, run, count)
    return summarise_samples([forward for forward, _ in samples]), summarise_samples(
        [backward for _, backward in samples]
    )


def _runner(module: nn.Module, inputs: tuple[Tensor, ...]) -> Callable[[], Callable[[], Any]]:
    """Return a forward pass that returns its backward pass."""
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
    """Return the seconds forward and backward of ``count`` passes; on a GPU they follow one another without a look at the clock."""
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
    """Return what a GPU's allocator says of one pass: ``saved_bytes`` and ``transient_bytes`` of a LayerMemory."""
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
