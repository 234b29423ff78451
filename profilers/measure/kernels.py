"""Kernels other than single products: what memory bounds, attention, the grouped products of experts, and entire modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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

_PASSES = {"copy": 2, "rms_norm": 2, "silu_mul": 5, "softmax": 2}
"""Elements read and written for each element of a tensor."""

_SLOWEST_PASSES = 16
"""Of a kernel before it was measured, as if it moved its elements so often: a softmax on one core computes more than it moves."""

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
    """Measure ``c = a + b`` and ``c *= s`` out of cache, for the memory bandwidth; return fields of ElementwisePoint."""
    import torch

    size = int(min(STREAM_BYTES, max(64 * MIB, bench.agree_min(bench.free_bytes()) // 16)))
    a, b, c = (torch.ones(size // 4, device=bench.device) for _ in range(3))
    calls: dict[str, tuple[int, Callable[[], Any]]] = {
        "add": (3 * size, lambda: torch.add(a, b, out=c)),
        "scale": (2 * size, lambda: c.mul_(1.0)),
    }
    shape = {"dtype": "fp32", "num_elements": size // 4}
    return [
        {"op": op, **shape, "traffic_bytes": traffic, **bench.measure(call)._asdict()}
        for op, (traffic, call) in calls.items()
    ]


def stream_bandwidth(points: Sequence[dict[str, Any]]) -> float:
    """Return the bytes read and written per second by ``c = a + b`` and ``c *= s`` together."""
    streams = [point for point in points if point["op"] in ("add", "scale")]
    return float(sum(point["traffic_bytes"] for point in streams) / sum(point["time_s"] for point in streams))


def measure_elementwise(
    bench: Bench, dtype: str, sizes: Sequence[int], bandwidth_bytes_per_s: float
) -> list[dict[str, Any]]:
    """Measure the kernels of a decoder at these numbers of elements; return fields of ElementwisePoint."""
    points = []
    element_s = dict.fromkeys(_PASSES, _SLOWEST_PASSES * DTYPE_BYTES[dtype] / bandwidth_bytes_per_s)
    for size in sizes:
        num_bytes = size * DTYPE_BYTES[dtype]
        for op, passes in _PASSES.items():
            expected_s = bench.point_s(element_s[op] * size) + 6 * num_bytes / bandwidth_bytes_per_s
            if bench.has_memory(4 * num_bytes) and bench.has_time(expected_s, f"{op} of {size} elements"):
                timing = bench.measure(_elementwise_call(op, bench.device, dtype, size))
                element_s[op] = timing.time_s / size
                shape = {"op": op, "dtype": dtype, "num_elements": size}
                points.append({**shape, "traffic_bytes": passes * num_bytes, **timing._asdict()})
    return points


def _elementwise_call(op: str, device: torch.device, dtype: str, size: int) -> Callable[[], Any]:
    import torch
    import torch.nn.functional as F

    a, b = (random_tensor((size // _NORM_DIM, _NORM_DIM), device, dtype) for _ in range(2))
    weight = torch.ones(_NORM_DIM, device=device, dtype=torch_dtype(dtype))
    calls: dict[str, Callable[[], Any]] = {
        "copy": lambda: b.copy_(a),
        "rms_norm": lambda: F.rms_norm(a, (_NORM_DIM,), weight),
        "silu_mul": lambda: F.silu(a) * b,
        "softmax": lambda: a.softmax(-1),
    }
    return calls[op]


def measure_attention(bench: Bench, dtype: str, shapes: Sequence[Heads], flops_per_s: float) -> list[dict[str, Any]]:
    """Measure attention of these shapes, forward and backward, until the time is over; return fields of AttentionPoint."""
    import torch.nn.functional as F

    points = []
    for shape in shapes:
        elements = shape.batch * shape.seq_len * shape.head_dim * (shape.num_heads + shape.num_kv_heads)
        both_s = bench.point_s(shape.flops / flops_per_s) + bench.point_s(2.5 * shape.flops / flops_per_s)
        if bench.has_memory(8 * elements * DTYPE_BYTES[dtype]) and bench.has_time(
            _ATTENTION_PART * both_s, f"attention over {shape.seq_len} tokens"
        ):
            inputs = [
                random_tensor((shape.batch, heads, shape.seq_len, shape.head_dim), bench.device, dtype)
                for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
            ]
            options = {"is_causal": True, "enable_gqa": shape.num_heads != shape.num_kv_heads}
            attend = partial(F.scaled_dot_product_attention, **options)
            points += _both_directions(bench, {"dtype": dtype, **shape._asdict(), "causal": True}, attend, inputs)
    return points


def measure_grouped(bench: Bench, dtype: str, shapes: Sequence[Grouped], flops_per_s: float) -> list[dict[str, Any]]:
    """Measure grouped products, forward and backward, until the time is over; return fields of GroupedMatmulPoint."""
    import torch

    points = []
    for shape in shapes:
        groups, rows, n, k = shape
        elements = rows * (n + k) + groups * n * k
        call_s = 2 * rows * n * k / flops_per_s
        both_s = bench.point_s(call_s) + bench.point_s(2 * call_s)
        if bench.has_memory(3 * elements * DTYPE_BYTES[dtype]) and bench.has_time(both_s, f"{groups} products at once"):
            inputs = [random_tensor(dims, bench.device, dtype) for dims in ((rows, k), (groups, k, n))]
            ends = torch.arange(1, groups + 1, device=bench.device, dtype=torch.int32) * (rows // groups)
            multiply = partial(torch.nn.functional.grouped_mm, offs=ends)
            points += _both_directions(bench, {"dtype": dtype, **shape._asdict()}, multiply, inputs)
    return points


def _both_directions(
    bench: Bench, fields: dict[str, Any], function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[dict[str, Any]]:
    """Measure the forward pass, and the backward pass only, through one graph that is stored."""
    import torch

    forward = torch.enable_grad()(function)
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = forward(*leaves)
    gradient = torch.randn_like(out)
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: forward(*leaves),
        "backward": lambda: torch.autograd.grad(out, leaves, gradient, retain_graph=True),
    }
    return [{**fields, "direction": name, **bench.measure(call)._asdict()} for name, call in calls.items()]


# --- entire modules --------------------------------------------------------------------------------------------------


def measure_passes(bench: Bench, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Timing, Timing]:
    """Measure forward and backward, the latter with whatever the module recomputes; gradients are not accumulated."""
    run = _runner(module, inputs)
    _clocked(bench, run, 1)
    first = sum(_clocked(bench, run, 1)[0])
    forward, backward = zip(*_clocked(bench, run, bench.num_samples(first)), strict=True)
    return summarise_samples(list(forward)), summarise_samples(list(backward))


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
            begin = bench.sample_clock()
            backward = run()
            middle = bench.sample_clock()
            backward()
            samples.append((middle - begin, bench.sample_clock() - middle))
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


def allocator_bytes(device: torch.device, module: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, int]:
    """Return what a GPU's allocator says of one pass: ``saved_bytes`` and ``transient_bytes`` of a LayerMemory."""
    import torch

    run = _runner(module, inputs)
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
