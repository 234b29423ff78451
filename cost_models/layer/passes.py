"""LayerPasses: seconds of one layer's forward and backward pass under every layout of a table, one micro-batch at a time.

Operators by themselves on the device, with what context parallelism, measurements and the engine's recompute make of them; the
communication within the layer; and the host that dispatches all of it. A layer that can run by half-batches has both modes.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from ...schema import Workload
from ...schema.layers import Block
from ...schema.layout_table import RECOMPUTES, LayoutTable
from ...schema.recurrences import Recurrence
from ...schema.units import FloatArray, IntArray, Numbers
from ..hardware.compute import OperatorTime, operator_time, unpacked_s
from ..hardware.machine import HostCosts, device_rates, host_costs, waiting_s
from ..measured import attention_ratio, layer_ratios
from . import recurrences as _registered  # noqa: F401  operators and saved tensors of those kinds
from .adapters import with_adapters
from .context import AddedTime, context_parallel, state_passing_s, ulysses_exchange
from .data import has_copies
from .gradient_sums import sums_of_inputs
from .memory import MODULES
from .operators import (
    CORE_ATTENTION,
    CostInputs,
    FusedAttention,
    Gemm,
    Layer,
    Operator,
    layer_operators,
    operator_rules,
)
from .overlap import NUM_HALVES, by_half_batches_s, half_batches, is_chosen, repeated_product_s, supported
from .parallel import exposed_communication, norm_sums, norm_sums_s, reductions, repeated_over_tp, token_share


class LayerPasses(NamedTuple):
    """The passes of a layer [N] as its operators make them, before copies to the host that outlast them.

    Attributes:
        operators, times: what runs, and its isolated seconds with what context parallelism adds.
        tp_s, cp_s, ep_s: exposed communication, forward and backward; tp_hidden_s: what half-batches hide of the first;
            ep_hidden_s: what another micro-batch hides of the last.
        by_halves: 1 where the layer runs by half-batches.
        forward_s, backward_s, recompute_s: operators with the host's dispatch, no communication.
        launched_s: seconds of a backward pass without recompute, the device's and the host's, 0 where they add up.
    """

    operators: tuple[Operator, ...]
    times: list[OperatorTime]
    tp_s: tuple[FloatArray, FloatArray]
    cp_s: tuple[FloatArray, FloatArray]
    ep_s: tuple[FloatArray, FloatArray]
    ep_hidden_s: FloatArray
    tp_hidden_s: FloatArray
    by_halves: FloatArray
    forward_s: FloatArray
    backward_s: FloatArray
    recompute_s: FloatArray
    launched_s: tuple[FloatArray, FloatArray]

    @property
    def busy_s(self) -> FloatArray:
        """Seconds of both passes with recompute and the communication within the layer [N]."""
        comm_s = sum(pair[0] + pair[1] for pair in (self.tp_s, self.cp_s, self.ep_s))
        return self.forward_s + self.backward_s + self.recompute_s + comm_s

    def with_rows(self, rows: IntArray, others: LayerPasses, taken: IntArray) -> LayerPasses:
        """Return the passes with ``rows`` replaced by the rows ``taken`` of others."""

        def merged(ours: Any, other: Any) -> Any:
            if isinstance(ours, list):
                return [OperatorTime(*map(merged, a, b)) for a, b in zip(ours, other, strict=True)]
            if isinstance(ours, tuple):
                return tuple(map(merged, ours, other))
            values = np.broadcast_to(np.asarray(ours, dtype=np.float64), self.forward_s.shape).copy()
            values[rows] = np.broadcast_to(other, others.forward_s.shape)[taken]
            return values

        return LayerPasses(self.operators, *map(merged, self[1:], others[1:]))


def layer_passes(layer: Layer, inputs: CostInputs) -> LayerPasses:
    """Return the operators of a layer, their seconds, its communication and its passes, in the one mode (V1) that takes least (O).

    Source: overlap.py.
    """
    entire, rows = passes_in_mode(layer, inputs), np.flatnonzero(supported(layer, inputs))
    if not len(rows):
        return entire
    halved = passes_in_mode(layer, inputs.select(rows), by_halves=True)
    taken = np.arange(len(rows))
    if is_chosen(inputs):
        taken = np.flatnonzero(halved.busy_s < entire.busy_s[rows])
    return entire.with_rows(rows[taken], halved, taken)


def passes_in_mode(layer: Layer, inputs: CostInputs, *, by_halves: bool = False) -> LayerPasses:
    """Return the passes in one mode: entire, or by half-batches."""
    operators, num_batches = operators_with_adapters(layer, inputs), NUM_HALVES if by_halves else 1
    isolated = operator_times(operators, half_batches(inputs) if by_halves else inputs)
    if inputs.cluster.profile is not None and (ratios := layer_ratios(layer, inputs, _isolated_s)):
        # Where the host's dispatch adds to the device's time the measured one includes it.
        adds = inputs.cluster.weakest_device.backend.is_host
        isolated = [time.scaled(*ratios, with_dispatches=adds) for time in isolated]
    times, cp_s = _with_context(layer, operators, isolated, inputs)
    tp_s, ep_s, hidden_s = exposed_communication(layer, operators, times, inputs)
    tp_hidden_s, mode = np.zeros(len(inputs.layouts)), np.full(len(inputs.layouts), float(by_halves))
    if by_halves:
        forward_s, backward_s, tp_hidden_s = by_half_batches_s(operators, times, half_batches(inputs))
        sums_s = num_batches * norm_sums_s(layer, half_batches(inputs))
        tp_s = forward_s + sums_s, backward_s + sums_s
        times = [time.scaled(num_batches, num_batches, with_dispatches=True) for time in times]
    sums = sums_of_inputs(layer, inputs)
    tp_s = tp_s[0], tp_s[1] + sums.seconds
    comm_s = (tp_s[0] + cp_s[0] + ep_s[0], tp_s[1] + cp_s[1] + ep_s[1])
    forward, backward, recompute, launched_s = passes_s(
        layer, operators, times, comm_s, inputs, num_batches=num_batches, num_sums=sums.number
    )
    if by_halves:
        recompute = recompute + repeated_product_s(operators, times, inputs.layouts)
    return LayerPasses(
        operators, times, tp_s, cp_s, ep_s, hidden_s, tp_hidden_s, mode, forward, backward, recompute, launched_s
    )


def total_of(times: list[OperatorTime], name: str, layouts: LayoutTable) -> FloatArray:
    """Return the sum of one field of operators' times [N]."""
    return sum((getattr(time, name) for time in times), start=np.zeros(len(layouts)))


def operators_with_adapters(layer: Layer, inputs: CostInputs) -> tuple[Operator, ...]:
    """Return what the layer runs under the scenario's workload, adapters included."""
    operators = layer_operators(layer, operator_rules(inputs.hidden_dim, inputs.scenario))
    adapters = inputs.workload.adapters
    return operators if adapters is None else with_adapters(operators, adapters)


def operator_times(operators: tuple[Operator, ...], inputs: CostInputs) -> list[OperatorTime]:
    """Return the isolated seconds of operators; routed ones see the rows of this rank's experts, others those of its tokens."""
    rows, case_idx = inputs.layouts.operators
    inputs = inputs.select(rows)
    layouts, workload = inputs.layouts, inputs.workload
    routed_tokens = inputs.tokens * token_share(layouts, workload)
    time_of = partial(operator_time, rates=device_rates(inputs.scenario))

    def attention_s(op: FusedAttention, num_tokens: int, direction: Literal["forward", "backward"]) -> float:
        one = np.ones(1, dtype=np.int64)
        time = time_of(op, one * num_tokens, one, one)
        return float((time.forward_s if direction == "forward" else time.backward_s)[0])

    times = []
    for op in operators:
        if getattr(op, "routed", False):
            time = time_of(op, routed_tokens, layouts.expert_tp, layouts.sequence_parallel, ep=layouts.ep)
        else:
            time = time_of(op, inputs.tokens, layouts.tp, layouts.sequence_parallel)
        if isinstance(op, FusedAttention) and inputs.cluster.profile is not None:
            forward, backward = (attention_ratio(op, which, inputs, attention_s) for which in ("forward", "backward"))
            time = time.scaled(forward, backward)
        times.append(time.take(case_idx))
    return times


def _isolated_s(layer: Layer, inputs: CostInputs) -> tuple[FloatArray, FloatArray]:
    """Return forward and backward seconds of a layer on one rank with its dispatch, no communication and no sharding."""
    host, times = host_costs(inputs.scenario), operator_times(operators_with_adapters(layer, inputs), inputs)
    seconds = []
    for which in ("forward", "backward"):
        device = total_of(times, f"{which}_s", inputs.layouts)
        dispatch = host.operator_s * sum(getattr(time, f"{which}_dispatches") for time in times)
        seconds.append(device + (dispatch if host.adds else waiting_s(device, dispatch, host.overlap_norm)))
    return seconds[0], seconds[1]


def context_of_attention(block: Block, inputs: CostInputs) -> AddedTime:
    """Return what context parallelism adds to the fused attention of a block, where it has one."""
    cut = _cut_attention(block, operators_with_adapters(block, inputs))
    if cut is None:
        none = np.zeros(len(inputs.layouts))
        return AddedTime(*(none for _ in AddedTime._fields))
    isolated = operator_times((cut[1],), inputs)[0]
    return context_parallel(cut[1], (isolated.forward_s, isolated.backward_s), inputs)


def _cut_attention(layer: Layer, operators: tuple[Operator, ...]) -> tuple[int, FusedAttention] | None:
    """Return the position and operator that context parallelism cuts; it is not planned for blocks traced from code."""
    if layer.inner_block is None or layer.inner_block.counted is not None:
        return None
    return next(((idx, op) for idx, op in enumerate(operators) if isinstance(op, FusedAttention)), None)


def _with_context(
    layer: Layer, operators: tuple[Operator, ...], times: list[OperatorTime], inputs: CostInputs
) -> tuple[list[OperatorTime], tuple[FloatArray, FloatArray]]:
    """Return attention's time with what context parallelism adds to it, and its exposed communication in both passes."""
    layouts, cut, block = inputs.layouts, _cut_attention(layer, operators), layer.inner_block
    if block is not None and isinstance(block.attention, Recurrence) and block.counted is None:
        passed = state_passing_s(block.attention, inputs)
        return times, (passed, passed * np.where(layouts.recompute == RECOMPUTES.index("full"), 2, 1))
    if cut is None or np.all(layouts.cp == 1):
        return times, (np.zeros(len(layouts)), np.zeros(len(layouts)))
    idx, attention = cut
    isolated = times[idx]
    added = context_parallel(attention, (isolated.forward_s, isolated.backward_s), inputs)
    longer = OperatorTime(
        isolated.forward_s + added.forward_s,
        isolated.backward_s + added.backward_s,
        isolated.forward_dispatches + added.dispatches,
        isolated.backward_dispatches + added.dispatches,
        isolated.weight_s,
    )
    is_full, is_selective = (layouts.recompute == RECOMPUTES.index(kind) for kind in ("full", "selective"))
    # Selective recompute keeps attention's output, not what was exchanged for its operands.
    exchanged = is_selective & inputs.workload.engine_facts.is_own_runtime
    sent_again = exchanged * ulysses_exchange(attention, inputs).exposed_forward_s
    repeated = np.where(is_full, added.exposed_forward_s, sent_again)
    exposed = (added.exposed_forward_s, added.exposed_backward_s + repeated)
    return [*times[:idx], longer, *times[idx + 1 :]], exposed


def passes_s(
    layer: Layer,
    operators: tuple[Operator, ...],
    times: list[OperatorTime],
    comm_s: tuple[FloatArray, FloatArray],
    inputs: CostInputs,
    *,
    num_batches: int = 1,
    num_sums: FloatArray | float = 0.0,
) -> tuple[FloatArray, FloatArray, FloatArray, tuple[FloatArray, FloatArray]]:
    """Return forward, backward and recompute seconds [N] with the host's dispatch, of a micro-batch in ``num_batches`` parts, and
    `LayerPasses.launched_s`.

    On an accelerator the host runs ahead and waits show only where it falls behind kernels and the communication within the
    layer, ``comm_s`` forward and backward (`waiting_s`). Collectives themselves are not included. ``num_sums`` are those that the
    backward pass has more (gradient_sums.py).
    """
    layouts, workload = inputs.layouts, inputs.workload
    host = host_costs(inputs.scenario)
    zero = np.zeros(len(layouts))
    forward, backward = total_of(times, "forward_s", layouts), total_of(times, "backward_s", layouts)
    has_block = layer.inner_block is not None
    recompute, repeated = recompute_s(operators, times, layouts, workload) if has_block else (zero, zero)
    recompute, repeated = layouts.recompute_fraction * recompute, layouts.recompute_fraction * repeated
    written_s = num_batches * unpacked_s(operators, inputs, device_rates(inputs.scenario))
    forward, backward = forward + written_s, backward + written_s
    recompute = recompute + written_s * layouts.recompute_fraction * (layouts.recompute == RECOMPUTES.index("full"))
    # Two pairs of all-gather and reduce-scatter a pass, or two all-reduces; sums of norms.
    per_pass = 0.5 if layer.inner_block is None else reductions(layer, inputs)
    each_pass = per_pass * np.where(layouts.sequence_parallel == 1, 2, 1) + norm_sums(layer, inputs)
    collectives = np.where(layouts.tp > 1, num_batches * each_pass, 0.0)
    again = repeated_over_tp(collectives, num_batches, inputs)
    each_s = host.collective_s + layouts.tp * _between_nodes_s(host, inputs)
    is_wrapped = has_copies(layouts, workload) | (layouts.cp > 1)
    unit_s = host.fsdp_unit_s / np.where((layouts.half_blocks == 1) & has_block, 4, 2)  # one for both halves
    host_s = collectives * each_s + np.where(is_wrapped, unit_s, 0.0)
    if layer.experts is not None and not host.adds:
        host_s = host_s + host.routing_s / 2
    host_forward = host_s + host.operator_s * sum(time.forward_dispatches for time in times)
    host_backward = host_s + num_sums * each_s + host.operator_s * sum(time.backward_dispatches for time in times)
    host_recompute = repeated * host.operator_s + again * each_s
    if has_block and layouts.cuda_graphs.any():  # collectives and recompute are in the graph
        is_graph = layouts.cuda_graphs == 1
        outside_s, is_out = _outside_graphs_s(layer, operators, times, host), layouts.expert_graphs == 0
        in_graph_s = [host.operator_s + is_out * seconds for seconds in outside_s]
        host_forward, host_backward = (
            np.where(is_graph, graph_s, eager_s)
            for graph_s, eager_s in zip(in_graph_s, (host_forward, host_backward), strict=True)
        )
        host_recompute = np.where(is_graph, 0.0, host_recompute)
    if host.adds:
        return forward + host_forward, backward + host_backward, recompute + host_recompute, (backward, zero)
    comm_forward, comm_backward = comm_s
    busy_backward = backward + recompute + comm_backward
    return (
        forward + waiting_s(forward + comm_forward, host_forward, host.overlap_norm),
        backward + waiting_s(busy_backward, host_backward + host_recompute, host.overlap_norm),
        recompute,
        (backward + comm_forward, host_backward),  # forward is sent what a backward pass sends without recompute
    )


def _outside_graphs_s(
    layer: Layer, operators: tuple[Operator, ...], times: list[OperatorTime], host: HostCosts
) -> tuple[Numbers, Numbers]:
    """Return the host's seconds forward and backward [N] for what no graph holds: routed experts, whose shapes change.

    Megatron's transformer_config.py takes experts into the graph of a layer only where their inputs are padded to a capacity.
    """
    if layer.experts is None:
        return 0.0, 0.0
    routed = [time for op, time in zip(operators, times, strict=True) if getattr(op, "routed", False)]
    dispatches = (sum(getattr(time, f"{which}_dispatches") for time in routed) for which in ("forward", "backward"))
    forward, backward = (host.operator_s * count + host.graphed_routing_s / 2 for count in dispatches)
    return forward, backward


def _between_nodes_s(host: HostCosts, inputs: CostInputs) -> FloatArray:
    """Return what a rank adds to a tensor-parallel collective [N] for traffic between nodes, where the engine is known for it."""
    layouts, node = inputs.layouts, max(group.devices_per_node for group in inputs.cluster.groups)
    over_pipeline = np.where((layouts.pp > 1) & (inputs.cluster.num_nodes > 1), host.pipelined_collective_s, 0.0)
    return np.asarray(over_pipeline + np.where(layouts.tp > node, host.spanning_collective_s, 0.0))


def recompute_s(
    operators: tuple[Operator, ...], times: list[OperatorTime], layouts: LayoutTable, workload: Workload
) -> tuple[FloatArray, FloatArray]:
    """Return the forward seconds and dispatches [N] repeated under each layout's recompute.

    Ours stops once the last product has its input, and selective repeats neither products nor fused attention
    (runtime/recompute.py). Megatron repeats the entire layer, and selective is the core of unfused attention: scores, softmax,
    dropout and both products (arXiv:2205.05198 section 5); with fused attention ours stands in for the engines' own choices.
    """
    # Ours saves products with weights and fused attention, not scores.
    saved = [isinstance(op, Gemm | FusedAttention) and op.name not in ("scores", "context") for op in operators]
    cheap = [time for time, is_saved in zip(times, saved, strict=True) if not is_saved]
    if workload.engine_facts.is_eager_like_megatron:
        full = times
        if modules := workload.recompute_modules:
            names = {name for module in modules for name in MODULES[module]}
            cheap = [time for op, time in zip(operators, times, strict=True) if op.name in names]
        elif workload.attention == "math":
            cheap = [time for op, time in zip(operators, times, strict=True) if op.name in CORE_ATTENTION]
    else:
        last_product = max((idx for idx, op in enumerate(operators) if isinstance(op, Gemm)), default=-1)
        full = [time for idx, time in enumerate(times) if idx != last_product]
    is_kind = [layouts.recompute == RECOMPUTES.index(kind) for kind in ("full", "selective")]
    seconds = [total_of(repeated, "forward_s", layouts) for repeated in (full, cheap)]
    if workload.engine_facts.recomputes_cores_first:  # in the other blocks; the fraction is multiplied with afterwards
        seconds[0] = seconds[0] + (1 / layouts.recompute_fraction - 1) * seconds[1]
    if workload.keeps_alternate_products:
        seconds[1] = seconds[1] + alternate_products_s(operators, times, layouts)
    dispatches = [total_of(repeated, "forward_dispatches", layouts) for repeated in (full, cheap)]
    return np.select(is_kind, seconds, 0.0), np.select(is_kind, dispatches, 0.0)


def alternate_products_s(
    operators: tuple[Operator, ...], times: list[OperatorTime], layouts: LayoutTable
) -> FloatArray:
    """Return the forward seconds of every second product of a block [N]: of q, k, v, out, gate, up, down these are k, out and up.

    Source: torchtitan, distributed/activation_checkpoint.py: its policy counts the products and saves those with an odd number.
    """
    products = {op.name: op for op in operators if isinstance(op, Gemm)}
    shares = dict.fromkeys(products, 0.0)
    # Gate and up, and q, k and v, are one product here.
    if "attention_out" in products:
        shares["attention_out"] = 1.0
    if (qkv := products.get("qkv")) is not None:
        shares["qkv"] = (qkv.n - products["attention_out"].k) / 2 / qkv.n
    if "mlp_up" in products and products["mlp_up"].n == 2 * products["mlp_down"].k:
        shares["mlp_up"] = 0.5
    repeated = np.zeros(len(layouts))
    for op, time in zip(operators, times, strict=True):
        repeated += shares.get(op.name, 0.0) * time.forward_s
    return repeated
