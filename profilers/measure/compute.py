"""Matrix products of one device: measuring them, and the roofline through the measurements.

The roofline is that of ``schema.cluster.GemmFit``: ``t = launch_s + max(F / (P * e_c), B / (W * e_m))`` with F = 2mnk
FLOPs, B the bytes of both operands and the result, P the best rate measured in the same dtype and W the measured memory
bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class LinearShape(NamedTuple):
    """A linear layer: ``[m,k] x [k,n]`` forward, and unless ``forward_only`` ``[m,n] x [n,k]``, ``[n,m] x [m,k]`` backward."""

    m: int
    k: int
    n: int
    forward_only: bool = False

    @property
    def products(self) -> tuple[str, ...]:
        """Return the names of the products that training makes with it."""
        return ("forward",) if self.forward_only else ("forward", "input_gradient", "weight_gradient")

    @property
    def num_elements(self) -> int:
        """Return the elements of both operands and the result."""
        return self.m * self.k + self.k * self.n + self.m * self.n


CPU_LAYERS = (
    LinearShape(512, 576, 1536),  # first, so that a slow machine has at least one typical layer
    LinearShape(16, 64, 64),  # launch
    LinearShape(8, 2048, 2048, forward_only=True),  # bound by memory: the weight is read once for eight tokens
    LinearShape(1024, 1024, 1024),
    LinearShape(2048, 576, 1536, forward_only=True),
    LinearShape(512, 576, 576),
    LinearShape(512, 2048, 2048),
    LinearShape(1024, 2048, 2048, forward_only=True),  # peak
)
GPU_LAYERS = (
    LinearShape(4096, 4096, 4096),
    LinearShape(64, 64, 64),
    LinearShape(8, 8192, 8192, forward_only=True),
    LinearShape(8192, 8192, 8192),  # peak
    LinearShape(2048, 1024, 4096),
    LinearShape(8192, 4096, 14336),
    LinearShape(4096, 8192, 1024),
    LinearShape(1024, 2048, 2048),
)

USEFUL_RATIO = 0.5
"""A reduced precision slower than half of fp32 is emulated: one layer tells the planner so, more would cost time."""

WEIGHT_RING_BYTES = 64 * MIB
"""Successive calls take turns among weights of so many bytes, as the layers of a model do: no cache keeps them."""

FIRST_RATE = 1e10
"""FLOP/s that the first product is expected to reach, and of other formats the part ``_UNKNOWN_FORMAT`` of the best fp32 rate."""

_UNKNOWN_FORMAT = 1 / 8

_MAKING_BYTES_PER_S = 2e9
"""Of operands, by one core: written, read and written again."""

_NOISE_ELEMENTS = 2**18


def measure_matmuls(bench: Bench, layers: Sequence[LinearShape]) -> list[dict[str, Any]]:
    """Measure each product of each layer in each dtype that the device runs at a useful speed; return fields of MatmulPoint.

    The forward product of the first layer is measured in any case.
    """
    points: list[dict[str, Any]] = []
    dtypes = _supported_dtypes(bench.device)
    rates: dict[str, float] = {}
    ring = _Ring(bench.device)
    for i, layer in enumerate(layers):
        for dtype in dtypes:
            rate = rates.get(dtype) or (rates["fp32"] * _UNKNOWN_FORMAT if rates else FIRST_RATE)
            if _has_time(bench, layer, dtype, rate):
                points += _measure_layer(bench, ring, layer, dtype)
            elif i == 0:
                points += _measure_layer(bench, ring, layer._replace(forward_only=True), dtype)
            if (best := best_rate(points, dtype)) is not None:
                rates[dtype] = best
        if i == 0:
            forward = {point["dtype"]: bench.agree(point["time_s"]) for point in reversed(points)}
            slowest_s = forward["fp32"] / USEFUL_RATIO
            dtypes = [dtype for dtype in dtypes if forward.get(dtype, float("inf")) <= slowest_s]
    return points


def best_rate(points: Sequence[dict[str, Any]], dtype: str) -> float | None:
    """Return the best rate of the products measured so far in a format, FLOP/s."""
    rates = (2.0 * p["m"] * p["n"] * p["k"] / p["time_s"] for p in points if p["dtype"] == dtype)
    return max(rates, default=None)


def measure_shapes(
    bench: Bench, shapes: Sequence[tuple[int, int, int]], dtype: str, flops_per_s: float
) -> list[dict[str, Any]]:
    """Measure chosen shapes (m, n, k), in their order, until the time is over; return fields of MatmulPoint.

    Forward products, as the learned model is of those; of every fourth shape the two backward products as well.
    """
    points: list[dict[str, Any]] = []
    ring = _Ring(bench.device)
    for i, (m, n, k) in enumerate(shapes):
        layer = LinearShape(m, k, n, forward_only=i % 4 != 3)
        if not bench.has_memory(2 * WEIGHT_RING_BYTES + 2 * DTYPE_BYTES[dtype] * layer.num_elements):
            continue
        if _has_time(bench, layer, dtype, flops_per_s):
            points += _measure_layer(bench, ring, layer, dtype)
        elif bench.remaining_s() <= 0:
            bench.leave_out("", len(shapes) - i - 1)
            break
    return points


def _has_time(bench: Bench, layer: LinearShape, dtype: str, flops_per_s: float) -> bool:
    m, k, n, _ = layer
    call_s = 2 * m * k * n / flops_per_s
    made_s = DTYPE_BYTES[dtype] * layer.num_elements / _MAKING_BYTES_PER_S
    return bench.has_time(len(layer.products) * bench.point_s(call_s) + made_s, f"{dtype} product {m} x {n} x {k}")


def random_tensor(shape: Sequence[int], device: torch.device, dtype: str) -> torch.Tensor:
    """Return normal numbers; on a CPU a few of them over and over, as drawing one takes longer than multiplying it."""
    import torch

    size = int(np.prod(shape))
    if device.type != "cpu" or size <= _NOISE_ELEMENTS:
        return torch.randn(*shape, device=device).to(torch_dtype(dtype))
    few = torch.randn(_NOISE_ELEMENTS).to(torch_dtype(dtype))
    return few.repeat(-(-size // _NOISE_ELEMENTS))[:size].view(*shape)


def _supported_dtypes(device: torch.device) -> list[str]:
    """Return the formats to measure products in, fp32 first."""
    import torch

    if device.type == "cpu":
        return ["fp32", "bf16"]
    if torch.version.hip:
        return ["fp32", "fp16", "bf16"]
    ampere = torch.cuda.get_device_capability(device) >= (8, 0)
    return ["fp32", "tf32", "fp16", "bf16"] if ampere else ["fp32", "fp16"]


def torch_dtype(dtype: str) -> torch.dtype:
    """Return the dtype of the tensors of a format; tf32 is how fp32 ones are multiplied."""
    import torch

    return {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]


class _Ring:
    """Weights that successive calls take turns among: parts of one tensor, made once for each format. Final."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[str, torch.Tensor] = {}

    def weights(self, n: int, k: int, dtype: str) -> list[torch.Tensor]:
        """Return weights [n, k], as many as fit, 16 at most and one at least."""
        room = WEIGHT_RING_BYTES // DTYPE_BYTES[dtype]
        if n * k > room:
            return [random_tensor((n, k), self._device, dtype)]
        if dtype not in self._made:
            self._made[dtype] = random_tensor((room,), self._device, dtype)
        count = min(16, room // (n * k))
        return list(self._made[dtype][: count * n * k].view(count, n, k).unbind())


def _measure_layer(bench: Bench, ring: _Ring, layer: LinearShape, dtype: str) -> list[dict[str, Any]]:
    import torch

    m, k, n, _ = layer

    def random(*shape: int) -> torch.Tensor:
        return random_tensor(shape, bench.device, dtype)  # zeros would flatter a GPU: less power, higher clocks

    tokens, grad = random(m, k), random(m, n) if not layer.forward_only else None
    weights = ring.weights(n, k, dtype)
    copies, turn = len(weights), iter(range(10**9))
    calls: dict[str, tuple[tuple[int, int, int], Callable[[], Any]]] = {
        "forward": ((m, n, k), lambda: tokens @ weights[next(turn) % copies].t()),
        "input_gradient": ((m, k, n), lambda: grad @ weights[next(turn) % copies]),
        "weight_gradient": ((n, k, m), lambda: grad.t() @ tokens),
    }
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    points = []
    for which in layer.products:
        (rows, columns, inner), call = calls[which]
        fields = {"dtype": dtype, "m": rows, "n": columns, "k": inner, "which": which}
        points.append({**fields, **bench.measure(call)._asdict()})
    torch.set_float32_matmul_precision(precision)
    return points


def peak_flops(points: Sequence[MatmulPoint]) -> PeakFlops:
    """Return the best rate measured in each dtype."""
    rates: dict[str, float] = {}
    for point in points:
        rates[point.dtype] = max(rates.get(point.dtype, 0.0), 2 * point.m * point.n * point.k / point.time_s)
    if "fp32" not in rates:
        raise ProfileError("the profile has no fp32 matrix product", help="measure again with `--cluster local`")
    return PeakFlops(**rates)


def fit_gemm(points: Sequence[MatmulPoint], memory_bandwidth: float, source: str) -> GemmFit:
    """Fit the roofline with the smallest mean error ``|log(predicted / measured)|``, on a grid and then on a finer one.

    Absolute and logarithmic, so that no point counts for its size, too fast counts like too slow, and a point that another
    process disturbed does not bend the rest. A grid, since the maximum makes the error neither smooth nor convex.
    """
    peaks = peak_flops(points)
    times = np.array([point.time_s for point in points])
    compute_s = np.array([2 * p.m * p.n * p.k / (getattr(peaks, p.dtype) or 1.0) for p in points])
    num_bytes = [DTYPE_BYTES[p.dtype] * LinearShape(p.m, p.k, p.n).num_elements for p in points]
    memory_s = np.array(num_bytes, dtype=np.float64) / memory_bandwidth  # counts of a file may exceed 64 bits

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
