"""LayerCost: everything one layer costs under every layout of a table, one micro-batch at a time.

Composes its passes with the communication within them (passes.py), its collectives over data (data.py), its parameters and saved
tensors (memory.py, working_set.py). Stages and steps only add layers up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...schema import Workload
from ...schema.units import FloatArray, IntArray
from ..hardware.host_memory import host_link_bytes_per_s
from .data import data_parallel_s
from .memory import activation_bytes, read_bytes, tp_params, trained_and_frozen
from .operators import CostInputs, Gemm, Layer
from .parallel import expert_params
from .passes import layer_passes, operators_with_adapters, total_of
from .working_set import last_pending_bytes, pending_bytes, working_bytes


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Arrays [N], one entry per layout: seconds and bytes of one layer on one rank, for one micro-batch.

    Attributes:
        forward_s, backward_s: operators, without communication.
        weight_s: gradients of weights, the part of backward_s that a pipeline schedule may defer.
        recompute_s: forward work repeated in the backward pass.
        device_backward_s, host_backward_s: of a backward pass without recompute, the device's seconds and those of the host, which
            launches it; the latter 0 where they add up.
        tp_forward_s, tp_backward_s: exposed tensor-parallel communication; tp_hidden_s: what of it half-batches hide.
        by_halves: 1 where the layer runs by half-batches (overlap.py), else 0.
        cp_forward_s, cp_backward_s: exposed communication of context parallelism.
        ep_forward_s, ep_backward_s: exposed communication of tokens with experts; ep_hidden_s: what a micro-batch beside hides.
        gather_s, regather_s, reduce_s, levels_s: collectives over data (`DataParallelTime`).
        num_params: parameters of this rank's tensor-parallel share and of the experts it holds.
        frozen_bytes: of parameters that are not trained, as they are stored.
        num_trained: those of them, or of their adapters, that are trained.
        expert_params: those of the trained ones that are routed experts'.
        activation_bytes: saved from forward to backward.
        pending_bytes: what waits from its input pass to its weight pass where a schedule splits the backward pass;
            last_pending_bytes: if it is the last layer of its stage.
        read_bytes: of the activations what goes as gradients of weights are made.
        working_bytes: alive only while this layer runs backward, of our runtime with gradients of its weights;
            split_working_bytes: while it runs an input pass.
    """

    forward_s: FloatArray
    backward_s: FloatArray
    weight_s: FloatArray
    recompute_s: FloatArray
    device_backward_s: FloatArray
    host_backward_s: FloatArray
    tp_forward_s: FloatArray
    tp_backward_s: FloatArray
    tp_hidden_s: FloatArray
    by_halves: FloatArray
    cp_forward_s: FloatArray
    cp_backward_s: FloatArray
    ep_forward_s: FloatArray
    ep_backward_s: FloatArray
    ep_hidden_s: FloatArray
    gather_s: FloatArray
    regather_s: FloatArray
    reduce_s: FloatArray
    levels_s: FloatArray
    num_params: FloatArray
    frozen_bytes: FloatArray
    num_trained: FloatArray
    expert_params: FloatArray
    activation_bytes: FloatArray
    pending_bytes: FloatArray
    last_pending_bytes: FloatArray
    read_bytes: FloatArray
    working_bytes: FloatArray
    split_working_bytes: FloatArray

    @classmethod
    def concatenate(cls, costs: Sequence[LayerCost]) -> LayerCost:
        """Return the layouts of several costs after one another."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: np.concatenate([getattr(cost, name) for cost in costs]) for name in names})

    def masked(self, keep: NDArray[np.bool_]) -> LayerCost:
        """Return zero cost where not ``keep`` [N]."""
        return LayerCost(**{field.name: np.where(keep, getattr(self, field.name), 0.0) for field in fields(self)})

    def take(self, rows: IntArray) -> LayerCost:
        """Return the cost under a subset of the layouts."""
        return LayerCost(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    @cached_property
    def busy_s(self) -> FloatArray:
        """Seconds of forward and backward with recompute and the communication within the layer."""
        compute = self.forward_s + self.backward_s + self.recompute_s
        return compute + self.comm_forward_s + self.comm_backward_s

    @cached_property
    def comm_forward_s(self) -> FloatArray:
        """Exposed communication within the layer, forward."""
        return self.tp_forward_s + self.cp_forward_s + self.ep_forward_s

    @cached_property
    def comm_backward_s(self) -> FloatArray:
        """Exposed communication within the layer, backward."""
        return self.tp_backward_s + self.cp_backward_s + self.ep_backward_s


def with_data_parallel(cost: LayerCost, layer: Layer, inputs: CostInputs) -> LayerCost:
    """Return the cost with its collectives over data; layouts that share them are evaluated once."""
    rows, case_idx = inputs.layouts.across_data
    norms = 0 if layer.inner_block is None else layer.inner_block.num_parts
    num_tensors = norms + sum(isinstance(op, Gemm) for op in operators_with_adapters(layer, inputs))
    params = (cost.num_trained[rows], cost.expert_params[rows], cost.frozen_bytes[rows], num_tensors)
    seconds = data_parallel_s(*params, inputs.select(rows))
    return replace(cost, **{name: values[case_idx] for name, values in seconds._asdict().items()})


def within_layer_cost(layer: Layer, inputs: CostInputs) -> LayerCost:
    """Return what a layer costs without its collectives over data, which are left at zero.

    Layouts that a layer cannot tell apart are evaluated once; one without experts does not see where experts are.
    """
    layouts = inputs.layouts
    rows, case_idx = layouts.within_layer if layer.experts else layouts.within_dense_layer
    return _evaluate(layer, inputs.select(rows)).take(case_idx)


def _evaluate(layer: Layer, inputs: CostInputs) -> LayerCost:
    """Return what a layer costs in its mode; in any of them it holds what an entire micro-batch does (V3)."""
    hidden_dim, layouts, workload = inputs.hidden_dim, inputs.layouts, inputs.workload
    none = np.zeros(len(layouts))
    passes = layer_passes(layer, inputs)
    times, forward, backward = passes.times, passes.forward_s, passes.backward_s
    # Gradients of weights as a part of the backward pass; what the host adds counts to both parts alike.
    deferrable, isolated_backward = total_of(times, "weight_s", layouts), total_of(times, "backward_s", layouts)
    weight_share = np.divide(deferrable, isolated_backward, out=none.copy(), where=isolated_backward > 0)
    saved, again, gradients = activation_bytes(layer, inputs)
    # What leaves for the host's memory during a forward pass hides behind it.
    to_memory = host_link_bytes_per_s(np.zeros_like(layouts.offload_to_storage), inputs.scenario)
    moved_s = layouts.offload_activations * saved / to_memory
    num_params = tp_params(layer, hidden_dim, layouts)
    num_trained, frozen_bytes = trained_and_frozen(layer, num_params, inputs)
    in_use = working_bytes(layer, inputs) or (gradients, gradients)
    if workload.engine_facts.memory is None and layer.is_block and (layer.counted is not None or workload.adapters):
        in_use = in_use[0] + workload.compute_bytes * num_trained, in_use[1]
    cost = LayerCost(
        forward_s=np.maximum(forward, moved_s),
        backward_s=np.maximum(backward, moved_s),
        weight_s=weight_share * backward,
        recompute_s=passes.recompute_s,
        device_backward_s=passes.launched_s[0],
        host_backward_s=passes.launched_s[1],
        tp_forward_s=passes.tp_s[0],
        tp_backward_s=passes.tp_s[1],
        tp_hidden_s=passes.tp_hidden_s,
        by_halves=passes.by_halves,
        cp_forward_s=passes.cp_s[0],
        cp_backward_s=passes.cp_s[1],
        ep_forward_s=passes.ep_s[0],
        ep_backward_s=passes.ep_s[1],
        ep_hidden_s=passes.ep_hidden_s,
        **dict.fromkeys(("gather_s", "regather_s", "reduce_s", "levels_s"), none),
        num_params=num_params,
        frozen_bytes=frozen_bytes,
        num_trained=num_trained,
        expert_params=expert_params(layer, hidden_dim, layouts) if workload.adapters is None else none,
        activation_bytes=saved * (1 - layouts.offload_activations),
        pending_bytes=pending_bytes(layer, inputs),
        last_pending_bytes=last_pending_bytes(layer, inputs),
        read_bytes=read_bytes(layer, inputs),
        working_bytes=again + in_use[0],
        split_working_bytes=in_use[1],
    )
    return cost if workload.has_backward else _forward_only(cost, workload)


def _forward_only(cost: LayerCost, workload: Workload) -> LayerCost:
    """Return the further forward passes of a step in place of the backward one: nothing is saved, and they make no gradients."""
    again, none = sum(phase.num_passes for phase in workload.phases) - 1, np.zeros_like(cost.forward_s)
    return replace(
        cost, backward_s=again * cost.forward_s, weight_s=none, recompute_s=none, device_backward_s=none, host_backward_s=none,
        tp_backward_s=again * cost.tp_forward_s, cp_backward_s=again * cost.cp_forward_s, ep_backward_s=again * cost.ep_forward_s,
        activation_bytes=none, pending_bytes=none, last_pending_bytes=none, read_bytes=none,
    )  # fmt: skip


def with_minimum(cost: LayerCost, num_options: int) -> LayerCost:
    """Return ``num_options`` times as many cases, [options x cases], followed by the minimum of the options field by field."""
    by_option = {field.name: getattr(cost, field.name).reshape(num_options, -1) for field in fields(cost)}
    return LayerCost(**{name: np.concatenate([*values, values.min(axis=0)]) for name, values in by_option.items()})
