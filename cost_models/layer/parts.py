"""What the compute of a layer is spent on: arithmetic at the device's peak, what is lost of it, memory, dispatch.

The same operators are timed twice: as the cost model does, and on a device that reaches its peak and has neither latency nor a
limit of bandwidth. For every layer

    forward_s + backward_s = products + attention + memory-bound kernels + waiting for dispatch + copies that outlast the passes

with products and attention each split into their FLOPs at the peak and the rest. FLOPs are those of model FLOPs utilisation:
attention's backward pass counts twice the forward one, without the scores that its kernel computes again.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from ...schema import Workload
from ...schema.units import FloatArray
from ..hardware.compute import DeviceRates, GroupedGemm, OperatorTime, operator_time, unpacked_s
from ..hardware.machine import device_rates, peak_flops_per_s
from .layer import LayerCost
from .operators import (
    BACKWARD_ATTENTION_RATIO,
    CORE_ATTENTION,
    CostInputs,
    Elementwise,
    FusedAttention,
    Gemm,
    Layer,
    Operator,
    Scan,
)
from .parallel import token_share
from .passes import layer_passes


class ComputeParts(NamedTuple):
    """Seconds of compute, forward and backward: arrays [N] of one layer and micro-batch, or sums of a step.

    Attributes:
        products_ideal, attention_ideal: their FLOPs at the peak of the data sheet.
        products_loss, attention_loss: what they take beyond that.
        memory_bound: norms, activations, sums, casts: kernels that move more than they compute.
        dispatch: the device waits for the host to launch work.
        host_copies: copies of activations to the host and back that outlast the passes.
        parameter_copies: casts, copies and sums of parameters and gradients, once a step or pass.
    """

    products_ideal: FloatArray | float
    products_loss: FloatArray | float
    attention_ideal: FloatArray | float
    attention_loss: FloatArray | float
    memory_bound: FloatArray | float
    dispatch: FloatArray | float
    host_copies: FloatArray | float = 0.0
    parameter_copies: FloatArray | float = 0.0


def layer_parts(layer: Layer, inputs: CostInputs, cost: LayerCost) -> ComputeParts:
    """Return what ``cost``, the layer's under the same layouts [N], is made of."""
    passes, workload = layer_passes(layer, inputs), inputs.workload
    none = np.zeros(len(inputs.layouts))
    seconds = {"products": none, "attention": none, "memory_bound": none}
    ideal_s = {"products": none, "attention": none}
    for op, time, ideal in zip(passes.operators, passes.times, ideal_times(passes.operators, inputs), strict=True):
        part = part_of(op)
        seconds[part] = seconds[part] + _step_s(time.forward_s, time.backward_s, workload)
        if part in ideal_s:
            ideal_s[part] = ideal_s[part] + _step_s(ideal.forward_s, ideal.backward_s, workload)
    # A calibration may say that a device is faster than its data sheet.
    peak_s = {part: np.minimum(ideal, seconds[part]) for part, ideal in ideal_s.items()}
    written_s = unpacked_s(passes.operators, inputs, device_rates(inputs.scenario))
    seconds["memory_bound"] = seconds["memory_bound"] + _step_s(written_s, written_s, workload)
    of_passes = _step_s(passes.forward_s, passes.backward_s, workload)
    return ComputeParts(
        products_ideal=peak_s["products"],
        products_loss=seconds["products"] - peak_s["products"],
        attention_ideal=peak_s["attention"],
        attention_loss=seconds["attention"] - peak_s["attention"],
        memory_bound=seconds["memory_bound"],
        dispatch=of_passes - sum(seconds.values(), start=none),
        host_copies=cost.forward_s + cost.backward_s - of_passes,
    )


def part_of(op: Operator) -> str:
    """Return what an operator counts to: products of activations with weights, attention, or what is bound by memory."""
    if op.name in CORE_ATTENTION or not isinstance(op, Gemm | Elementwise):
        return "attention"
    return "products" if isinstance(op, Gemm) else "memory_bound"


def _step_s(forward_s: FloatArray, backward_s: FloatArray, workload: Workload) -> FloatArray:
    """Return both passes; of a step without a backward pass all its forward passes (`layer._forward_only`)."""
    if workload.has_backward:
        return forward_s + backward_s
    return forward_s * sum(phase.num_passes for phase in workload.phases)


def ideal_times(
    operators: tuple[Operator, ...], inputs: CostInputs, limit: Literal["arithmetic", "traffic"] = "arithmetic"
) -> list[OperatorTime]:
    """Return the seconds of each operator on a device with the data sheet's peak, or bandwidth, as its only limit."""
    layouts, rates = inputs.layouts, _ideal_rates(inputs, limit)
    routed_tokens = inputs.tokens * token_share(layouts, inputs.workload)
    times = []
    for op in operators:
        if getattr(op, "routed", False):
            time = operator_time(
                op, routed_tokens, layouts.expert_tp, layouts.sequence_parallel, rates=rates, ep=layouts.ep
            )
        else:
            time = operator_time(op, inputs.tokens, layouts.tp, layouts.sequence_parallel, rates=rates)
        if isinstance(op, FusedAttention | Scan) and limit == "arithmetic":
            time = time._replace(backward_s=time.backward_s * 2 / BACKWARD_ATTENTION_RATIO)
        times.append(time)
    return times


def _ideal_rates(inputs: CostInputs, limit: Literal["arithmetic", "traffic"]) -> DeviceRates:
    device = inputs.cluster.weakest_device
    is_traffic = limit == "traffic"
    flops_per_s = np.inf if is_traffic else peak_flops_per_s(device, inputs.workload.precision)
    bytes_per_s = device.memory_bandwidth_bytes_per_s if is_traffic else np.inf
    in_one_product = GroupedGemm(expert_s=0.0, ratio=1.0)
    return device_rates(inputs.scenario)._replace(
        gemm=None,
        full_gemm=None,
        attention=None,
        gemm_flops_per_s=flops_per_s,
        vector_flops_per_s=np.inf,
        quantize_bytes=0.0,
        expert_by_expert=False,
        grouped=dict.fromkeys(("forward", "dgrad", "wgrad"), in_one_product),
        gemm_bytes_per_s=bytes_per_s,
        elementwise_bytes_per_s=bytes_per_s,
        launch_s=0.0,
        kernel_s=0.0,
    )
