"""Bound (R) of a serving plan: device-seconds that any schedule of these requests takes, from peaks and bytes alone.

    F_w   2 P_active (i_w + o_w - 1)                                           FLOPs of a request's tokens (without attention)
    B_w   (o_w - 1) (W / b + kv (i_w + o_w / 2))                               bytes that its decoding reads, batched with b
    b     at most what the caches of all devices hold, (n M - W) / (kv mean context without shared prefixes), and what TPOT allows
    n >= rate sum_w share_w max(F_w / peak, B_w / bandwidth)                   (R)

P_active counts what one token goes through; a batch may read fewer experts than all, so that W is the part that every token reads.
Neither has routed experts where they may lie with the host, whose processors take part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...cost_models.serving.host_experts import num_routed_params
from ...schema.cluster import Device
from ...schema.serving import BYTES_OF

if TYPE_CHECKING:
    from ...schema import ClusterSpec
    from ..tasks.serving import ServingProblem
    from .kinds import InstanceKind


def resource_bound(problem: ServingProblem) -> float | None:
    """Return the bound in the unit of the objective: devices, dollars an hour, or tokens a second and device; None of latency."""
    kinds, requests = problem.space.kinds, problem.serving.requests
    if problem.goal == "latency" or not kinds:
        return None
    clusters = [part.cluster for part in problem.request.cluster.parts] or [problem.request.cluster]
    if problem.space.split and len(clusters) > 1:  # FLOPs on the devices that have most, bytes on others
        per_request = unlike_device_seconds(problem, clusters)
    else:
        per_request = min(device_seconds(problem, cluster) for cluster in clusters)
    if problem.goal == "throughput":
        return problem.tokens / per_request
    if requests.rate is None:
        return None
    devices = requests.rate * per_request
    if problem.goal == "cost":
        prices = [cluster.weakest_device.price_per_hour for cluster in clusters]
        cheapest = min(kind.usd_per_hour / kind.size for kind in kinds if kind.usd_per_hour is not None)
        return devices * (min([cheapest, *(p for p in prices if p is not None)]) if problem.space.split else cheapest)
    return devices


def device_seconds(problem: ServingProblem, cluster: ClusterSpec) -> float:
    """Return the seconds of a device that a mean request takes at least (R)."""
    return max(_seconds(problem, cluster.weakest_device, cluster.num_devices))


def unlike_device_seconds(problem: ServingProblem, clusters: Sequence[ClusterSpec]) -> float:
    """Return the same where one request may be on several kinds of devices: each of its two needs where that is quickest.

    Devices with the most memory and bandwidth there are bound what any of them holds and reads.
    """
    total = sum(cluster.num_devices for cluster in clusters)
    devices = [cluster.weakest_device for cluster in clusters]
    largest = max(device.memory_bytes for device in devices)
    quickest = max(device.memory_bandwidth_bytes_per_s for device in devices)
    ideal = [d.replace(memory_bytes=largest, memory_bandwidth_bytes_per_s=quickest) for d in devices]
    each = [_seconds(problem, device, total) for device in ideal]
    return max(min(flops for flops, _ in each), min(read for _, read in each))


def _seconds(problem: ServingProblem, device: Device, num_devices: int) -> tuple[float, float]:
    """Return the seconds of one of so many devices for the FLOPs of a mean request, and for the bytes that it reads."""
    serving, mix, model = problem.serving, problem.mix, problem.request.model
    kind = problem.space.kinds[0]
    peaks = device.peak_flops_per_s
    fastest = max(
        peak or 0.0
        for peak in (
            peaks.bf16, peaks.fp16, peaks.fp32, peaks.tf32, *((peaks.fp8,) if BYTES_OF[kind.weights] <= 1 else ()),
            *((peaks.fp4,) if BYTES_OF[kind.weights] < 1 else ()),
        )
    ) or 1e30  # fmt: skip
    active = sum(
        run.count * run.layer.num_active_params(model.hidden_dim) for run in model.layers if run.layer.is_block
    )
    tokens = float(mix.share @ (mix.new_len + mix.output_len - 1))
    if serving.experts_on_host is not None:  # the host may compute them
        active -= num_routed_params(model, visited=True)
    flops = 2 * active * tokens
    read = 0.0
    if mix.decode_steps:
        kv = min(_cache_bytes(entry) for entry in (*problem.space.kinds, *problem.space.split))
        context = mix.cached_steps / mix.decode_steps
        weights = active * BYTES_OF[kind.weights]
        total = num_devices * device.memory_bytes
        occupied = mix.occupied_steps(reserves_output=False) / mix.decode_steps
        batch = max((total - weights) / max(kv * occupied, 1e-9), 1.0)
        limits = [limit.seconds for limit in serving.limits if limit.metric == "tpot"]
        if limits:
            room = min(limits) * device.memory_bandwidth_bytes_per_s * num_devices - weights
            batch = min(batch, max(room / max(kv * context, 1e-9), 1.0))
        read = mix.decode_steps * weights / batch + kv * mix.cached_steps
    return flops / fastest, read / device.memory_bandwidth_bytes_per_s


def _cache_bytes(kind: InstanceKind) -> float:
    """Return the bytes of a cached token over all devices of an attention rank, windows left out."""
    step = kind.step
    windowed = sum(size for _, size in step.window_cache_bytes)
    return float(step.cache_bytes_per_token - windowed)
