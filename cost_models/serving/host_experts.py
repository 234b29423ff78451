"""Experts in the host's memory: how many rows meet one there, and the seconds until its part of a layer is done (docs/serving.md).

Of the n experts of a rank the most visited are on the device, n_h in the host's memory. Popularity is gamma distributed, as all
loads of experts are (operators.py): shape k = 1 / cv^2, G(k, x) the regularised incomplete gamma function, g the quantile of n_h.

    (H1) rows that meet experts on the device    h = 1 - G(k + 1, g),   G(k, g) = n_h / n                         resident_hits
    (H2) host's experts that are reached         e = n (G(k, g) - (1 + q / k)^-k G(k, g (1 + q / k)))             host_reached
    (H3) until y of e are copied to the device   l(y) = C y - min(a C y, a A, Q),   C = e B / L                   until_copied_s
    (H4) until the others are computed           o(y) = o_0 + O (1 - y),   O = max(e B / M, 2 P (1 - h) r / F)    until_computed_s
    (H5) a layer's experts take                  min over y of max(d(y), l(y), o(y)),   d(y) = d_0 + (d_1 - d_0) y       balanced
    (H6) of e in the mean a step reaches         e - s or e + s, or where s > e none or e + s^2 / e,                        spread
                                                 s^2 = e (1 - e / c) (1 - c / n) n / (n - 1),   c: of all experts

q: mean rows of an expert; r: of the rank; B, P: bytes and parameters of an expert on it; L: rate of the link to the host while all
devices of a node copy; M, F: bytes and FLOPs a second of the host's processors, a device's part; d_0: the kernel of the experts on
the device, d_1: of all; a: share of the copies that are predicted, which begin beside the products and the communication of the
layer before (A), as far as there is room for them on the device (Q: seconds of copying its half of the buffer). Experts are copied
and computed one after the other, so that the device computes one while the next comes, and the host its own beside both. o_0:
handing the rows over, and their way down and up.

l and d rise with y and o falls, all piecewise linear, so that (H5) is where o first meets one of the rising lines. It holds for
each number of (H6), of which the mean is taken: with few rows the device has more to do in the steps in which the host has less.

Source: arXiv:2504.05897 (HybriMoE: a layer's experts are split over both so that they end together), arXiv:2504.09345 (MoE-Lens),
arXiv:2410.17954 (ExpertFlow: experts are predicted before the router has chosen).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import gammainc, gammaincinv

from ...schema import ClusterSpec, ConfigError, ModelSpec
from ...schema.host_experts import ExpertsOnHost
from ...schema.layers import Block, MoE
from ...schema.serving import Serving, ServingLayout
from ...schema.units import FloatArray, format_bytes
from ..hardware.host_memory import host_copy_bytes_per_s, host_weight_rates
from ..hardware.streams import USABLE_HOST_MEMORY
from ..layer.operators import Layer
from ..learned.serving_kernels import reached_fraction
from .operators import Instance, expert_bytes, expert_shape, weight_bytes
from .step import StepCosts, counted_stages
from .tables import ROWS

HOST_PARTS = ("host_link", "host_compute")
"""Waiting for experts that are copied, and for those that the host computes."""

HALVES = 2
"""Of the room for copied experts: one is computed while the other fills."""


def experts_off_device(moe: MoE, layout: ServingLayout, share: float) -> int:
    """Return how many of a rank's experts of a layer lie with the host: at least the share."""
    experts = moe.num_experts // layout.ep
    return min(math.ceil(share * experts - 1e-9), experts)


def exact_share(model: ModelSpec, layout: ServingLayout, share: float) -> float:
    """Return the share of the experts of a layer that lie with the host where about ``share`` of them are to."""
    if not share:
        return 0.0
    moe = next(block.experts for block, _ in model.block_runs if block.experts is not None)
    return experts_off_device(moe, layout, share) * layout.ep / moe.num_experts


def num_routed_params(model: ModelSpec, *, visited: bool = False) -> int:
    """Return the parameters of all routed experts, or of those that one token visits."""
    return sum(
        count
        * (block.experts.top_k if visited else block.experts.num_experts)
        * block.experts.expert.num_params(model.hidden_dim)
        for block, count in model.block_runs
        if block.experts is not None
    )


def resident_hits(share: float, popularity_cv: float) -> float:
    """Return the share of rows that meet the experts on the device, where ``share`` of them, the least visited, are not (H1)."""
    shape = 1 / popularity_cv**2
    return float(1 - gammainc(shape + 1, gammaincinv(shape, share)))


def host_reached(rows: FloatArray, share: float, popularity_cv: float) -> FloatArray:
    """Return the part of all experts that lie with the host and are reached, where one has ``rows`` [...] on average (H2)."""
    shape = 1 / popularity_cv**2
    quantile, more = gammaincinv(shape, share), 1 + rows / shape
    return np.asarray(share - more**-shape * gammainc(shape, quantile * more))


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Seconds [...] of a layer's experts that do not depend on the split.

    Attributes:
        resident_s, all_s: the device's kernel with the experts that are on it, and with all that are reached (d_0, d_1).
        copy_s: of all that are reached and not on the device (C); ahead_s: in which predicted ones may come (A); room_s: of copying
            as many as may lie ready (Q); predicted: a.
        spread: weights and numbers [2, ...] of the host's experts that steps reach, over their mean (`spread`).
        compute_s: of the host, if it computes all of them (O); handed_s: beside that (o_0).
    """

    resident_s: FloatArray
    all_s: FloatArray
    copy_s: FloatArray
    ahead_s: FloatArray
    room_s: FloatArray
    predicted: float
    compute_s: FloatArray
    handed_s: FloatArray
    spread: tuple[FloatArray, FloatArray]

    def reaching(self, ratio: FloatArray) -> LayerTimes:
        """Return the times of a step that reaches so many times the mean number of the host's experts, and fewer of the others."""
        return replace(
            self,
            resident_s=np.maximum(self.all_s - ratio * (self.all_s - self.resident_s), 0.0),
            copy_s=ratio * self.copy_s,
            compute_s=ratio * self.compute_s,
            handed_s=np.where(ratio > 0, self.handed_s, 0.0),
        )

    def until_copied_s(self, copied: FloatArray) -> FloatArray:
        """Return when a part of them is on the device (H3)."""
        hidden = np.minimum(np.minimum(copied * self.copy_s, self.ahead_s) * self.predicted, self.room_s)
        return np.asarray(copied * self.copy_s - hidden)

    def until_computed_s(self, copied: FloatArray) -> FloatArray:
        """Return when the host has computed the others; 0 where there are none (H4)."""
        return np.where(copied < 1, self.handed_s + (1 - copied) * self.compute_s, 0.0)

    def device_s(self, copied: FloatArray) -> FloatArray:
        """Return the seconds of the device's kernels."""
        return np.asarray(self.resident_s + (self.all_s - self.resident_s) * copied)

    def seconds(self, copied: FloatArray) -> FloatArray:
        """Return the seconds until all is done."""
        done = np.maximum(self.device_s(copied), self.until_copied_s(copied))
        return np.maximum(done, self.until_computed_s(copied))


def balanced(times: LayerTimes) -> FloatArray:
    """Return the part [...] of the experts reached with the host that is best copied (H5).

    The lines that rise with it are d and those of l: (1 - a) C y, C y - a A and C y - Q.
    """
    more_s = times.all_s - times.resident_s
    rising = (
        (more_s, times.resident_s),
        ((1 - times.predicted) * times.copy_s, 0.0),
        (times.copy_s, -times.predicted * times.ahead_s),
        (times.copy_s, -times.room_s),
    )
    falls_from = times.handed_s + times.compute_s
    meets = [(falls_from - start) / np.maximum(slope + times.compute_s, 1e-30) for slope, start in rising]
    split = np.clip(np.minimum.reduce(meets), 0.0, 1.0)
    # With nothing for the host no rows are handed to it.
    return np.where(times.seconds(np.ones_like(split)) <= times.seconds(split), 1.0, split)


def spread(off_reached: FloatArray, reached: FloatArray, experts: float) -> tuple[FloatArray, FloatArray]:
    """Return weights [2, ...] and numbers [2, ...] of the host's experts that steps reach, over their mean (H6).

    Of ``reached`` experts a step reaches, ``off_reached`` are the host's in the mean: drawn without return, of ``experts``.
    """
    mean = np.maximum(off_reached, 1e-12)
    others = np.clip(1 - mean / np.maximum(reached, mean), 0, 1) * np.clip(1 - reached / experts, 0, 1)
    squared = others * experts / max(experts - 1, 1) / mean  # s^2 / e^2
    is_narrow = squared <= 1
    many = np.where(is_narrow, 0.5, 1 / (1 + squared))
    ratios = np.where(is_narrow, (1 - np.sqrt(squared), 1 + np.sqrt(squared)), (0 * squared, 1 + squared))
    return np.stack([1 - many, many]), np.asarray(ratios)


def layer_times(
    instance: Instance, layer: Block, rows: FloatArray, off_device: int, ahead_s: FloatArray, spec: ExpertsOnHost
) -> LayerTimes:
    """Return the times of a layer's experts for ``rows`` of each attention rank; ``ahead_s``: of what comes before them."""
    moe, layout = layer.experts, instance.layout
    assert moe is not None
    cv, experts = float(instance.coefficients["serving"]["popularity_cv"]), moe.num_experts / layout.ep
    shape, share = expert_shape(instance, moe, rows), off_device / experts
    hits, mean = resident_hits(share, cv), shape.rows / experts
    off_reached = experts * host_reached(mean, share, cv)
    all_s = instance.products.experts(shape, instance.experts)
    resident = shape._replace(
        rows=np.maximum(hits * shape.rows, 1e-9),
        reached=np.maximum(experts * reached_fraction(mean, cv) - off_reached, 1e-9),
        experts=np.asarray(float(max(experts - off_device, 1))),
    )
    resident_s = instance.products.experts(resident, instance.experts) if off_device < experts else 0 * all_s
    link = host_copy_bytes_per_s(instance.cluster, instance.coefficients)
    read_per_s, flops_per_s = host_weight_rates(instance.cluster, instance.coefficients)
    size = expert_bytes(instance, layer)
    params = (2 + moe.gated) * instance.model.hidden_dim * moe.ffn_dim / layout.moe_tp
    flops = 2 * params * (1 - hits) * shape.rows
    element_bytes = instance.rates.compute_bytes
    handed_s = float(instance.coefficients["serving"]["host_experts"]["layer_s"])
    moved = 2 * element_bytes * instance.model.hidden_dim * np.minimum(shape.tokens, (1 - hits) * shape.rows)
    return LayerTimes(
        resident_s=np.minimum(resident_s, all_s),
        all_s=all_s,
        copy_s=off_reached * size / link,
        ahead_s=ahead_s,
        room_s=np.asarray(buffered_experts(moe, layout, off_device, spec) / HALVES * size / link),
        predicted=spec.predicted,
        compute_s=np.maximum(off_reached * size / read_per_s, flops / flops_per_s),
        handed_s=np.where(off_reached > 0, handed_s + moved / link, 0.0),
        spread=spread(off_reached, experts * reached_fraction(mean, cv), experts),
    )


def buffered_experts(moe: MoE, layout: ServingLayout, off_device: int, spec: ExpertsOnHost) -> int:
    """Return the experts that a device has room for beside its own: those a row visits, while as many are computed."""
    return 0 if spec.by == "compute" else min(off_device, HALVES * math.ceil(moe.top_k / layout.ep))


def experts_s(times: LayerTimes, spec: ExpertsOnHost) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the mean seconds of the device's kernels of a layer's experts, of waiting for copies and for the host.

    What is waited for both is told by their parts of the experts.
    """
    device_s, link_s, host_s = (np.zeros(np.shape(times.copy_s)) for _ in range(3))
    for weight, ratio in zip(*times.spread, strict=True):
        step = times.reaching(ratio)
        copied = split_of(step, spec)
        waits_s = step.seconds(copied) - step.device_s(copied)
        device_s = device_s + weight * step.device_s(copied)
        link_s, host_s = link_s + weight * copied * waits_s, host_s + weight * (1 - copied) * waits_s
    return device_s, link_s, host_s


def split_of(times: LayerTimes, spec: ExpertsOnHost) -> FloatArray:
    """Return the part [...] of the experts reached with the host that is copied."""
    if spec.by == "balance":
        return balanced(times)
    return np.full(np.shape(times.copy_s), float(spec.by == "copy"))


def with_experts_on_host(step: StepCosts, spec: ExpertsOnHost) -> StepCosts:
    """Return the costs of an instance that has a share of its experts in the host's memory.

    A stage's products and communication are taken as those of its mean block, beside which the experts of the next one come.

    Raises:
        ConfigError: the model has no experts, or its devices are the host's own processors.
    """
    instance, share = step.instance, spec.share
    require_experts(instance.model, instance.cluster)
    assert share is not None
    counts = counted_stages(instance.model, instance.layout.pp)
    known: dict[int, Any] = {}
    for stage, layers in zip(step.stages, counts, strict=True):
        if id(stage) not in known:
            known[id(stage)] = replace(stage, by_rows=_rows_with_host(instance, stage.by_rows, layers, spec))
    on_host = [_bytes_off_device(instance, layers, spec) for layers in counts]
    sizes = [
        sum(count * weight_bytes(instance, layer) for layer, count in layers.items()) - stored + buffer
        for layers, (stored, buffer) in zip(counts, on_host, strict=True)
    ]
    return replace(
        step,
        stages=tuple(known[id(stage)] for stage in step.stages),
        weight_bytes=max(sizes),
        host_weight_bytes=max(stored for stored, _ in on_host),
    )


def _rows_with_host(
    instance: Instance, by_rows: dict[str, FloatArray], layers: dict[Layer, int], spec: ExpertsOnHost
) -> dict[str, FloatArray]:
    """Return the seconds [G] of a stage's parts at ROWS, those of experts with what waits for the host."""
    rows, blocks = np.maximum(ROWS, 1.0), sum(count for layer, count in layers.items() if isinstance(layer, Block))
    ahead_s = np.asarray((by_rows["products"] + by_rows["communication"]) / max(blocks, 1))
    made = {name: np.zeros_like(ROWS) for name in ("experts", *HOST_PARTS)}
    for layer, count in layers.items():
        if not isinstance(layer, Block) or layer.experts is None:
            continue
        off_device = experts_off_device(layer.experts, instance.layout, spec.share or 0.0)
        times = layer_times(instance, layer, rows, off_device, ahead_s, spec)
        for name, seconds in zip(made, experts_s(times, spec), strict=True):
            made[name] = made[name] + count * np.where(ROWS > 0, seconds, 0.0)
    return by_rows | made


def _bytes_off_device(instance: Instance, layers: dict[Layer, int], spec: ExpertsOnHost) -> tuple[float, float]:
    """Return the bytes of a device's experts in the host's memory, and of its room for copies."""
    stored, buffer = 0.0, 0.0
    for layer, count in layers.items():
        if layer.experts is not None:
            off_device = experts_off_device(layer.experts, instance.layout, spec.share or 0.0)
            size = expert_bytes(instance, layer)
            stored += count * off_device * size
            buffer = max(buffer, buffered_experts(layer.experts, instance.layout, off_device, spec) * size)
    return stored, buffer


def may_lie_with_host(model: ModelSpec, cluster: ClusterSpec, serving: Serving) -> bool:
    """Return whether a task that has all experts on its devices may be asked with some on the host."""
    plain = serving.speculate is None and not serving.nano_batches and serving.fine_tuning is None
    is_host = any(group.device.backend.is_host for group in cluster.groups)
    return plain and serving.experts_on_host is None and serving.engine != "meshwright" and model.is_moe and not is_host


def require_experts(model: ModelSpec, cluster: ClusterSpec) -> None:
    """Refuse experts on the host where there are none, or no host apart.

    Raises:
        ConfigError: the model has no routed experts, or the devices are the host's own processors.
    """
    if not model.is_moe:
        raise ConfigError(
            f"experts on the host: {model.name} has no routed experts",
            help="a mixture of experts (mixtral-8x7b, deepseek-v3), or meshwright plan --infer for layers on the host",
        )
    if any(group.device.backend.is_host for group in cluster.groups):
        raise ConfigError(
            f"experts on the host: the devices of {cluster.name} are the host's own processors", help="plan for GPUs"
        )


def why_host_lacks(step: StepCosts, prefix_bytes: float = 0.0) -> str:
    """Return why the memory of a node does not hold its devices' experts beside ``prefix_bytes`` of each; "" where it does."""
    cluster = step.instance.cluster
    sizes = [group.host_memory_bytes for group in cluster.groups]
    if not step.host_weight_bytes or not all(sizes):
        return ""
    usable = USABLE_HOST_MEMORY * min(size or 0.0 for size in sizes)
    needed = cluster.largest_node * (step.host_weight_bytes + prefix_bytes)
    if needed <= usable:
        return ""
    return (
        f"experts of {format_bytes(needed)} exceed the {format_bytes(usable)} of a host's memory"
        if not prefix_bytes
        else f"experts and prefixes of {format_bytes(needed)} exceed the {format_bytes(usable)} of a host's memory"
    )
