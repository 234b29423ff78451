"""Matrix products of one device: measuring them, and the roofline through the measurements.

The roofline is that of ``schema.cluster.GemmFit``: ``t = launch_s + max(F / (P * e_c), B / (W * e_m))`` with F = 2mnk
FLOPs, B the bytes of both operands and the result, P the best rate measured in the same dtype and W the measured memory
bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...schema.cluster import GemmFit, PeakFlops
from ...schema.errors import ProfileError
from ...schema.profile import MatmulPoint
from ...schema.units import MIB

if TYPE_CHECKING:
    import torch

    from .timing import Bench

FloatArray = NDArray[np.float64]

DTYPE_BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


class Layer(NamedTuple):
    """A linear layer: ``[m,k] x [k,n]`` forward, and unless ``forward_only`` ``[m,n] x [n,k]``, ``[n,m] x [m,k]`` backward."""

    m: int
    k: int
    n: int
    forward_only: bool = False


CPU_LAYERS = (
    Layer(512, 576, 1536),  # first, so that a slow machine has at least one typical layer
    Layer(16, 64, 64),  # launch
    Layer(8, 2048, 2048, forward_only=True),  # bound by memory: the weight is read once for eight tokens
    Layer(1024, 1024, 1024),
    Layer(2048, 576, 1536, forward_only=True),
    Layer(512, 576, 576),
    Layer(512, 2048, 2048),
    Layer(1024, 2048, 2048, forward_only=True),  # peak
)
GPU_LAYERS = (
    Layer(4096, 4096, 4096),
    Layer(64, 64, 64),
    Layer(8, 8192, 8192, forward_only=True),
    Layer(8192, 8192, 8192),  # peak
    Layer(2048, 1024, 4096),
    Layer(8192, 4096, 14336),
    Layer(4096, 8192, 1024),
    Layer(1024, 2048, 2048),
)

USEFUL_RATIO = 0.5
"""A reduced precision slower than half of fp32 is emulated: one layer tells the planner so, more would cost time."""

WEIGHT_RING_BYTES = 64 * MIB
"""Successive calls take turns among weights of so many bytes, as the layers of a model do: no cache keeps them."""

_CALLS = 5
"""Of one product, at least: what a shape is expected to cost before it is measured."""


def measure_matmuls(bench: Bench, layers: Sequence[Layer]) -> list[dict[str, Any]]:
    """Fields of MatmulPoint for each product of each layer in each dtype that the device runs at a useful speed.

    The first layer is measured in any case.
    """
    points: list[dict[str, Any]] = []
    dtypes = supported_dtypes(bench.device)
    for i, layer in enumerate(layers):
        for dtype in dtypes:
            if i == 0 or bench.has_time():
                points += _measure_layer(bench, layer, dtype)
        if i == 0:
            forward = {point["dtype"]: bench.agree(point["time_s"]) for point in reversed(points)}
            dtypes = [dtype for dtype in dtypes if forward[dtype] * USEFUL_RATIO <= forward["fp32"]]
    return points


def measure_shapes(
    bench: Bench, shapes: Iterable[tuple[int, int, int]], dtype: str, flops_per_s: float
) -> list[dict[str, Any]]:
    """Fields of MatmulPoint of chosen shapes (m, n, k), in their order, until the time is over.

    Forward products, as the learned model is of those; of every fourth shape the two backward products as well.
    """
    points: list[dict[str, Any]] = []
    for i, (m, n, k) in enumerate(shapes):
        forward_only = i % 4 != 3
        expected_s = _CALLS * (1 if forward_only else 3) * 2 * m * n * k / flops_per_s
        num_bytes = 2 * WEIGHT_RING_BYTES + 2 * DTYPE_BYTES[dtype] * (m * k + k * n + m * n)
        if bench.has_memory(num_bytes) and bench.has_time(expected_s):
            points += _measure_layer(bench, Layer(m, k, n, forward_only=forward_only), dtype)
        if not bench.has_time():
            break
    return points


def supported_dtypes(device: torch.device) -> list[str]:
    """Formats to measure products in, fp32 first."""
    import torch

    if device.type == "cpu":
        return ["fp32", "bf16"]
    if torch.version.hip:
        return ["fp32", "fp16", "bf16"]
    ampere = torch.cuda.get_device_capability(device) >= (8, 0)
    return ["fp32", "tf32", "fp16", "bf16"] if ampere else ["fp32", "fp16"]


def torch_dtype(dtype: str) -> torch.dtype:
    """Of the tensors of a format; tf32 is how fp32 ones are multiplied."""
    import torch

    return {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]


def _measure_layer(bench: Bench, layer: Layer, dtype: str) -> list[dict[str, Any]]:
    import torch

    kind = torch_dtype(dtype)
    bench.say(f"{dtype} product {layer.m} x {layer.n} x {layer.k}")
    m, k, n, forward_only = layer

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=bench.device).to(kind)  # zeros would flatter a GPU: less power, higher clocks

    tokens, grad, weight = random(m, k), random(m, n), random(n, k)
    copies = max(1, min(16, WEIGHT_RING_BYTES // (weight.numel() * weight.element_size())))
    weights = [weight.clone() for _ in range(copies)]
    turn = iter(range(10**9))
    products: list[tuple[str, tuple[int, int, int], Callable[[], Any]]] = [
        ("forward", (m, n, k), lambda: tokens @ weights[next(turn) % copies].t()),
        ("input_gradient", (m, k, n), lambda: grad @ weights[next(turn) % copies]),
        ("weight_gradient", (n, k, m), lambda: grad.t() @ tokens),
    ]
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    points = [
        {"dtype": dtype, "m": rows, "n": columns, "k": inner, "which": which, **bench.measure(call).fields()}
        for which, (rows, columns, inner), call in products[: 1 if forward_only else 3]
    ]
    torch.set_float32_matmul_precision(precision)
    return points


def peak_flops(points: Sequence[MatmulPoint]) -> PeakFlops:
    """Best rate measured in each dtype.

    Raises:
        ProfileError: there is no fp32 product, which every measurement has.
    """
    rates: dict[str, float] = {}
    for point in points:
        rates[point.dtype] = max(rates.get(point.dtype, 0.0), 2 * point.m * point.n * point.k / point.time_s)
    if "fp32" not in rates:
        raise ProfileError("the profile has no fp32 matrix product", help="measure again with `--cluster local`")
    return PeakFlops(**rates)


def fit_gemm(points: Sequence[MatmulPoint], memory_bandwidth: float, source: str) -> GemmFit:
    """Roofline with the least mean error ``|log(predicted / measured)|``, found on a grid and then on a finer one.

    Absolute and logarithmic, so that no point counts for its size, too fast counts like too slow, and a point that another
    process disturbed does not bend the rest. A grid, since the maximum makes the error neither smooth nor convex.
    """
    peaks = peak_flops(points)
    times = np.array([point.time_s for point in points])
    compute_s = np.array([2 * p.m * p.n * p.k / (getattr(peaks, p.dtype) or 1.0) for p in points])
    memory_s = np.array([_matmul_bytes(point) for point in points]) / memory_bandwidth

    def best(launch: FloatArray, compute: FloatArray, memory: FloatArray) -> tuple[float, float, float, float]:
        grid = np.ix_(launch, compute, memory)
        roof_s = np.maximum(compute_s / grid[1][..., None], memory_s / grid[2][..., None])
        errors = np.abs(np.log((grid[0][..., None] + roof_s) / times)).mean(-1)
        i, j, k = np.unravel_index(np.argmin(errors), errors.shape)
        return float(launch[i]), float(compute[j]), float(memory[k]), float(errors[i, j, k])

    coarse = np.geomspace(times.min() / 16, times.min(), 13), np.geomspace(0.2, 1.5, 41), np.geomspace(1.5, 0.05, 41)
    launch, compute, memory, _ = best(*coarse)
    finer = np.geomspace(0.8, 1.25, 19)
    launch, compute, memory, error = best(
        launch * finer, np.minimum(1.5, compute * finer), np.minimum(1.5, memory * finer)
    )
    return GemmFit(
        launch_s=launch,
        compute_efficiency=compute,
        memory_efficiency=memory,
        source=f"{source}: {len(points)} products, mean error {100 * error:.0f} %",
    )


def _matmul_bytes(point: MatmulPoint) -> int:
    return DTYPE_BYTES[point.dtype] * (point.m * point.k + point.k * point.n + point.m * point.n)
