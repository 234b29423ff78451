"""LayerCost: everything one layer costs under every layout of a batch, one micro-batch at a time.

Composes the layer's operators (operators.py), their seconds on the device (compute.py) and on the host (host_dispatch.py), its
communication (tensor_parallel.py, context.py, experts.py, data_parallel.py), parameters (parameters.py) and saved activations
(saved_bytes.py). Stages and steps only add layers up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from ...schema import ClusterSpec, Workload
from ...schema.arrays import FloatArray, IntArray
from ...schema.layers import Block, MTPHead
from ...schema.layout_table import RECOMPUTES, LayoutTable
from ..hardware.compute import OperatorTime, operator_time
from ..hardware.device import device_rates
from ..hardware.host import host_costs, host_link_bytes_per_s, waiting_s
from ..measured import as_measured, with_measured_attention
from .data import LayerParams, data_parallel_s, without_reductions
from .operators import CostInputs, FusedAttention, Gemm, Layer, Operator, Softmax, layer_operators
from .parallel import (
    AddedTime,
    context_parallel,
    expert_parallel_s,
    expert_params,
    mixture_of,
    overlapped_s,
    tensor_parallel_s,
    token_share,
)
from .parameters import frozen_bytes, tp_params, trained_params, with_adapters
from .passes import compute_s
from .saved import activation_bytes


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Arrays [N], one entry per layout: seconds and bytes of one layer on one rank, for one micro-batch.

    Attributes:
        forward_s, backward_s: operators, without communication.
        weight_s: gradients of weights, the part of backward_s that a pipeline schedule may defer.
        recompute_s: forward work repeated in the backward pass.
        tp_forward_s, tp_backward_s: exposed tensor-parallel communication.
        cp_forward_s, cp_backward_s: exposed communication of context parallelism.
        ep_forward_s, ep_backward_s: communication of tokens with their experts.
        gather_s, regather_s: all-gather of the layer's parameters before the forward and before the backward pass.
        reduce_s: reduction of its gradients over data parallelism.
        levels_s: once a step, between ranks over which its states are sharded differently.
        num_params: parameters of this rank's tensor-parallel share and of the experts it holds.
        frozen_bytes: of parameters that are not trained, as they are stored.
        num_trained: those of them, or of adapters beside them, that are trained.
        expert_params: those of the trained ones that are routed experts'.
        activation_bytes: kept from forward to backward.
        working_bytes: alive only while this layer runs backward.
    """

    forward_s: FloatArray
    backward_s: FloatArray
    weight_s: FloatArray
    recompute_s: FloatArray
    tp_forward_s: FloatArray
    tp_backward_s: FloatArray
    cp_forward_s: FloatArray
    cp_backward_s: FloatArray
    ep_forward_s: FloatArray
    ep_backward_s: FloatArray
    gather_s: FloatArray
    regather_s: FloatArray
    reduce_s: FloatArray
    levels_s: FloatArray
    num_params: FloatArray
    frozen_bytes: FloatArray
    num_trained: FloatArray
    expert_params: FloatArray
    activation_bytes: FloatArray
    working_bytes: FloatArray

    @classmethod
    def concatenate(cls, costs: Sequence[LayerCost]) -> LayerCost:
        """The layouts of several after one another."""
        return cls(
            **{field.name: np.concatenate([getattr(cost, field.name) for cost in costs]) for field in fields(cls)}
        )

    def masked(self, keep: NDArray[np.bool_]) -> LayerCost:
        """Nothing where not ``keep`` [N]."""
        return LayerCost(**{field.name: np.where(keep, getattr(self, field.name), 0.0) for field in fields(self)})

    def at(self, rows: IntArray) -> LayerCost:
        """The same under some of the layouts."""
        return LayerCost(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    @cached_property
    def busy_s(self) -> FloatArray:
        """Seconds of forward and backward with recompute and the communication inside a layer."""
        compute = self.forward_s + self.backward_s + self.recompute_s
        return compute + self.comm_forward_s + self.comm_backward_s

    @cached_property
    def comm_forward_s(self) -> FloatArray:
        """Exposed communication inside the layer, forward."""
        return self.tp_forward_s + self.cp_forward_s + self.ep_forward_s

    @cached_property
    def comm_backward_s(self) -> FloatArray:
        """Exposed communication inside the layer, backward."""
        return self.tp_backward_s + self.cp_backward_s + self.ep_backward_s


def layer_cost(
    layer: Layer, hidden_dim: int, batch: LayoutTable, workload: Workload, cluster: ClusterSpec
) -> LayerCost:
    """Cost of ``layer`` under every layout of ``batch``."""
    setting = CostInputs(hidden_dim=hidden_dim, batch=batch, workload=workload, cluster=cluster)
    return with_data_parallel(within_layer_cost(layer, setting), layer, setting)


def with_data_parallel(cost: LayerCost, layer: Layer, setting: CostInputs) -> LayerCost:
    """The cost with its collectives over data: of many layouts that share them they are evaluated once."""
    rows, like = setting.batch.across_data
    params = LayerParams(
        trained=cost.num_trained[rows],
        routed=cost.expert_params[rows],
        frozen_bytes=cost.frozen_bytes[rows],
        num_tensors=_num_tensors(layer, setting),
    )
    shared = setting.select(rows)
    found = data_parallel_s(params, shared)
    if not setting.workload.has_backward:
        found = without_reductions(found, shared.batch)
    return replace(cost, **{name: seconds[like] for name, seconds in found._asdict().items()})


def within_layer_cost(layer: Layer, setting: CostInputs) -> LayerCost:
    """What a layer costs without its collectives over data, which are left at zero.

    Where experts are is nothing to a layer without them: layouts that differ in that alone are evaluated once.
    """
    batch = setting.batch
    rows, like = batch.within_layer if mixture_of(layer) else batch.within_dense_layer
    return _within_layer(layer, setting.select(rows)).at(like)


def _within_layer(layer: Layer, setting: CostInputs) -> LayerCost:
    hidden_dim, batch, workload, cluster = setting.hidden_dim, setting.batch, setting.workload, setting.cluster
    operators, none = _operators(layer, setting), np.zeros(len(batch))
    alone = as_measured(_operator_times(operators, setting), layer, setting, partial(_isolated_s, operators))
    times, cp_s = _with_context(layer, operators, alone, setting)
    tp_s = tensor_parallel_s(layer, setting)
    hidden = overlapped_s(operators, times, setting)
    tp_s = (tp_s[0] - hidden[0], tp_s[1] - hidden[1])
    ep_s = expert_parallel_s(layer, setting)
    comm_s = (tp_s[0] + cp_s[0] + ep_s[0], tp_s[1] + cp_s[1] + ep_s[1])
    forward, backward, recompute = compute_s(layer, operators, times, comm_s, setting)
    weight_part = _weight_part(times, len(batch))
    kept, working = activation_bytes(layer, hidden_dim, batch, workload, cluster)
    # What leaves for the host during the forward pass and comes back during the backward one hides behind them.
    moved_s = batch.offload_activations * kept / host_link_bytes_per_s(batch.offload_to_storage, cluster)
    num_params = tp_params(layer, hidden_dim, batch)
    cost = LayerCost(
        forward_s=np.maximum(forward, moved_s),
        backward_s=np.maximum(backward, moved_s),
        weight_s=weight_part * backward,
        recompute_s=recompute,
        tp_forward_s=tp_s[0],
        tp_backward_s=tp_s[1],
        cp_forward_s=cp_s[0],
        cp_backward_s=cp_s[1],
        ep_forward_s=ep_s[0],
        ep_backward_s=ep_s[1],
        gather_s=none,
        regather_s=none,
        reduce_s=none,
        levels_s=none,
        num_params=num_params,
        frozen_bytes=frozen_bytes(layer, num_params, batch, workload),
        num_trained=trained_params(layer, hidden_dim, num_params, batch, workload),
        expert_params=expert_params(layer, hidden_dim, batch) if workload.adapters is None else none,
        activation_bytes=kept * (1 - batch.offload_activations),
        working_bytes=working,
    )
    return cost if workload.has_backward else forward_again(cost)


def forward_again(cost: LayerCost) -> LayerCost:
    """A second forward pass in place of the backward one: nothing is kept for it, and it makes no gradients."""
    nothing = np.zeros_like(cost.forward_s)
    return replace(
        cost, backward_s=cost.forward_s, weight_s=nothing, recompute_s=nothing, tp_backward_s=cost.tp_forward_s,
        cp_backward_s=cost.cp_forward_s, ep_backward_s=cost.ep_forward_s, activation_bytes=nothing,
    )  # fmt: skip


def _isolated_s(operators: tuple[Operator, ...], setting: CostInputs) -> tuple[FloatArray, FloatArray]:
    """Forward and backward seconds of a layer's operators on one rank with their dispatch, no communication and no sharding."""
    host, times = host_costs(setting.cluster, setting.workload), _operator_times(operators, setting)
    found = []
    for seconds, dispatches in (("forward_s", "forward_dispatches"), ("backward_s", "backward_dispatches")):
        device = sum((getattr(time, seconds) for time in times), start=np.zeros(len(setting.batch)))
        dispatch = host.operator_s * sum(getattr(time, dispatches) for time in times)
        found.append(device + (dispatch if host.adds else waiting_s(device, dispatch, host.overlap_norm)))
    return found[0], found[1]


def with_minimum(cost: LayerCost, num_options: int) -> LayerCost:
    """``num_options`` times as many cases, [options x cases], followed by the least of the options in each of its parts."""
    parts = {field.name: getattr(cost, field.name).reshape(num_options, -1) for field in fields(cost)}
    return LayerCost(**{name: np.concatenate([*values, np.min(values, axis=0)]) for name, values in parts.items()})


def _weight_part(times: list[OperatorTime], size: int) -> FloatArray:
    """Gradients of weights as a part of the backward pass [N]; what the host adds is spread over both parts alike."""
    backward, weight = (
        sum((getattr(time, name) for time in times), start=np.zeros(size)) for name in ("backward_s", "weight_s")
    )
    return np.asarray(np.divide(weight, backward, out=np.zeros(size), where=backward > 0))


def _num_tensors(layer: Layer, setting: CostInputs) -> int:
    products = sum(isinstance(op, Gemm) for op in _operators(layer, setting))
    return products + 2 * isinstance(layer, Block | MTPHead)


def _operators(layer: Layer, setting: CostInputs) -> tuple[Operator, ...]:
    """What the layer runs under this workload, adapters included."""
    workload = setting.workload
    operators = layer_operators(
        layer,
        setting.hidden_dim,
        workload.attended_len,
        unfused=softmax_kernels(workload),
        engine=workload.engine,
        dropout=workload.dropout,
        fusion=workload.fusion,
        on_cpu=setting.cluster.weakest_device.backend.is_host,
    )
    return operators if workload.adapters is None else with_adapters(operators, workload.adapters)


def softmax_kernels(workload: Workload) -> Softmax | None:
    """How unfused attention turns scores into probabilities; None for fused attention.

    Megatron's scale-mask-softmax kernel takes 16-bit inputs only (FusedScaleMaskSoftmax.is_kernel_available).
    """
    if workload.attention == "flash":
        return None
    return "fused" if workload.engine_facts.is_eager_like_megatron and workload.compute_bytes == 2 else "separate"


def _operator_times(operators: tuple[Operator, ...], setting: CostInputs) -> list[OperatorTime]:
    """Seconds of each operator alone; routed ones see the rows of this rank's experts, all others those of its tokens."""
    rows, like = setting.batch.operators
    setting = setting.select(rows)
    batch, rates = setting.batch, device_rates(setting.cluster, setting.workload)
    routed_tokens = setting.tokens * token_share(batch, setting.workload)
    of = partial(operator_time, rates=rates, compute_bytes=setting.workload.compute_bytes)
    times = [
        of(op, routed_tokens, batch.expert_tp, batch.sequence_parallel, ep=batch.ep)
        if getattr(op, "routed", False)
        else of(op, setting.tokens, batch.tp, batch.sequence_parallel)
        for op in operators
    ]
    times = [with_measured_attention(op, time, setting, of) for op, time in zip(operators, times, strict=True)]
    return [time.at(like) for time in times]


def context_of_attention(block: Block, setting: CostInputs) -> AddedTime:
    """What context parallelism adds to a block with fused attention."""
    if block.traced is not None:  # context parallelism is not planned for it
        nothing = np.zeros(len(setting.batch))
        return AddedTime(*(nothing for _ in AddedTime._fields))
    operators = _operators(block, setting)
    at = next(idx for idx, op in enumerate(operators) if isinstance(op, FusedAttention))
    alone = _operator_times(operators[at : at + 1], setting)[0]
    return context_parallel(block.attention, (alone.forward_s, alone.backward_s), setting)


def _with_context(
    layer: Layer, operators: tuple[Operator, ...], times: list[OperatorTime], setting: CostInputs
) -> tuple[list[OperatorTime], tuple[FloatArray, FloatArray]]:
    """Attention's time with what context parallelism adds to it, and its exposed communication in both passes."""
    batch, block = setting.batch, layer.block if isinstance(layer, MTPHead) else layer
    if not isinstance(block, Block) or block.traced is not None or np.all(batch.cp == 1):
        return times, (np.zeros(len(batch)), np.zeros(len(batch)))
    at = next(idx for idx, op in enumerate(operators) if isinstance(op, FusedAttention))
    alone = times[at]
    added = context_parallel(block.attention, (alone.forward_s, alone.backward_s), setting)
    longer = OperatorTime(
        alone.forward_s + added.forward_s,
        alone.backward_s + added.backward_s,
        alone.forward_dispatches + added.dispatches,
        alone.backward_dispatches + added.dispatches,
        alone.weight_s,
    )
    repeated = np.where(batch.recompute == RECOMPUTES.index("full"), added.exposed_forward_s, 0.0)
    exposed = (added.exposed_forward_s, added.exposed_backward_s + repeated)
    return [*times[:at], longer, *times[at + 1 :]], exposed
