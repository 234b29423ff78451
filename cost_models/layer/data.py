"""Data parallelism of one layer: gathers, reductions, what of them is exposed, copies around them, and the update."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...schema import Workload
from ...schema.layout_table import OFFLOADS, LayoutTable
from ...schema.units import Array, FloatArray, IntArray
from ..hardware.collectives import Op, Pair, collective_s, exposed_s, slowdown_law
from ..hardware.host_memory import host_link_bytes_per_s, host_update_s_per_param, leaving_bytes, update_bytes_per_param
from ..hardware.machine import device_rates, host_costs, measured_rates, waiting_s
from .operators import CostInputs
from .overlap import shared_link
from .parallel import sharded_params

_ZEROTH_ORDER_ELEMENTS = 14
"""Elements that zeroth-order training reads and writes of one parameter in a step: three moves and a step along the direction, each
of two reads and a write, and the decay (runtime/training/optimizer.py)."""

_DIRECTION_ELEMENTS = 4
"""Elements written of one parameter's direction, drawn unsharded by every rank for each of the four."""

_NEWTON_SCHULZ_FLOPS = 25.0
"""FLOPs a weight and hidden width of Muon: five steps of X X', its square and a product with X, 4 a + 2 a^2 / b for [a, b]."""

_SUB_GROUP_PARAMS = 1e9
"""Under zero 3 DeepSpeed's update goes through sub-groups of so many parameters."""


class ShardGroups(NamedTuple):
    """Groups of ranks that share parameters [N]: over how many parameters, gradients and optimizer states are sharded, each a
    multiple of the one before; how many groups hold the same states; and the distance between neighbours.
    """

    parameters: IntArray
    gradients: IntArray
    optimizer: IntArray
    replicas: IntArray
    stride: IntArray


class DataParallelTime(NamedTuple):
    """Seconds [N] of one layer's collectives over data.

    Attributes:
        gather_s: of parameters before the forward pass, or once a step below zero 3.
        regather_s: of parameters before the backward pass, under zero 3.
        reduce_s: of gradients after the backward pass.
        levels_s: once a step, between ranks over which states are sharded differently.
    """

    gather_s: FloatArray
    regather_s: FloatArray
    reduce_s: FloatArray
    levels_s: FloatArray


def data_parallel_s(
    trained: FloatArray, routed: FloatArray, frozen_bytes: FloatArray, num_tensors: int, inputs: CostInputs
) -> DataParallelTime:
    """Return gathers and reductions over the ranks that share parameters [N]; experts with axes of their own have their own groups.

    Where the engine runs them tensor by tensor, each costs the steps of a ring: its latency is not shared.
    Frozen parameters are gathered only where they are sharded. Offloaded ones reach the device over the host's link first.
    Without a backward pass nothing is reduced; zeroth-order training moves parameters before each of its two passes, so that below
    zero 3 they are gathered twice too.

    Args:
        trained, routed: parameters of one rank before data parallelism shards them [N], and which of them are routed experts'.
        frozen_bytes: of the others, as they are stored [N].
        num_tensors: how many matrices and vectors they are.
        inputs: layouts and scenario.
    """
    layouts = inputs.layouts
    dense = np.where(layouts.experts_follow_tp, trained, trained - routed)
    frozen = np.where(layouts.zero_stage == 3, frozen_bytes, 0.0)
    replicas = layouts.num_replicas * layouts.num_shards // layouts.num_optimizer_shards
    shards = (layouts.num_shards, layouts.num_gradient_shards, layouts.num_optimizer_shards)
    seconds = _sharded_s(dense, frozen, ShardGroups(*shards, replicas, layouts.tp), inputs, max(num_tensors, 1))
    # One rank's shard over the host's link, where parameters are offloaded.
    rate = host_link_bytes_per_s(layouts.offload_to_storage, inputs.scenario)
    shard_bytes = trained * inputs.workload.compute_bytes + frozen_bytes
    is_offloaded = layouts.offload == OFFLOADS.index("parameters")
    fetch_s = np.where(is_offloaded, shard_bytes / layouts.num_optimizer_shards / rate, 0.0)
    seconds = DataParallelTime(
        seconds.gather_s + fetch_s, seconds.regather_s + fetch_s, seconds.reduce_s, seconds.levels_s
    )
    if not np.all(layouts.experts_follow_tp):
        routed = np.where(layouts.experts_follow_tp, 0.0, routed)
        shards = (layouts.expert_shards, layouts.expert_gradient_shards, layouts.expert_optimizer_shards)
        replicas = np.maximum(layouts.expert_replicas * layouts.expert_shards // layouts.expert_optimizer_shards, 1)
        groups = ShardGroups(*shards, replicas, layouts.ep * layouts.expert_tp)
        of_experts = _sharded_s(routed, np.zeros(len(layouts)), groups, inputs)
        seconds = DataParallelTime(
            *(a + np.where(routed > 0, b, 0.0) for a, b in zip(seconds, of_experts, strict=True))
        )
    if inputs.workload.has_backward:
        return seconds
    none, passes = np.zeros(len(layouts)), sum(phase.num_passes for phase in inputs.workload.phases)
    gather_s = np.where(layouts.zero_stage == 3, seconds.gather_s, passes * seconds.gather_s)
    return DataParallelTime(gather_s, (passes - 1) * seconds.regather_s, none, none)


def _sharded_s(
    num_trained: FloatArray, frozen_bytes: FloatArray, groups: ShardGroups, inputs: CostInputs, num_tensors: int = 1
) -> DataParallelTime:
    """Return all-gathers of parameters in the compute dtype, reduce-scatters of gradients, all-reduces over replicas [N].

    With P, G, S ranks that share parameters, gradients and optimizer states: passes gather over P, and reduce over G. Once a step
    gradients are reduced from G to S and updated parameters gathered from S to P, unless the engine gathers over S in every
    forward pass. What is unsharded (parameters below zero 3) is gathered over S.
    """
    workload, cluster, layouts = inputs.workload, inputs.cluster, inputs.layouts
    facts = workload.engine_facts.data_parallel
    is_zero3 = layouts.zero_stage == 3
    gathered = num_trained * workload.compute_bytes + frozen_bytes
    reduced = num_trained * gradient_bytes(layouts, workload)
    by_tensor = facts.zero1_by_tensor & (layouts.zero_stage == 1)

    def of_states(op: Op, size: FloatArray, group: IntArray, stride: IntArray) -> FloatArray:
        """Return a collective on a layer's states as a whole, or one for each of its tensors in one launch."""
        seconds = collective_s(op, size, group, stride, cluster)
        if not np.any(by_tensor):
            return seconds
        of_tensor = collective_s(op, size / num_tensors, group, stride, cluster, in_one_launch=True)
        return np.where(by_tensor, num_tensors * of_tensor, seconds)

    gather = regather = of_states("all_gather", gathered, groups.parameters, groups.stride)
    scatter = of_states("reduce_scatter", reduced, groups.gradients, groups.stride)
    # All-reduces of a layer's unsharded gradients; a share of a bucket is filled by its neighbours.
    buckets = num_trained * workload.compute_bytes / facts.bucket_bytes
    buckets = np.where((layouts.zero_stage == 0) & (buckets > 0), buckets, 1.0)
    distance = groups.stride * groups.optimizer
    bucket_s = collective_s("all_reduce", reduced / groups.optimizer / buckets, groups.replicas, distance, cluster)
    over_replicas = buckets * bucket_s
    levels = np.zeros(len(layouts))
    if np.any(groups.optimizer > groups.parameters):
        from_owners = of_states("all_gather", gathered, groups.optimizer, groups.stride)
        gathers_once = is_zero3 & (not facts.gathers_from_owners)
        gather = np.where(gathers_once, regather, from_owners)
        once = collective_s(
            "all_gather",
            gathered / groups.parameters,
            groups.optimizer // groups.parameters,
            groups.stride * groups.parameters,
            cluster,
        )
        levels = levels + np.where(gathers_once, once, 0.0)
        levels = levels + of_states(
            "reduce_scatter",
            reduced / groups.gradients,
            groups.optimizer // groups.gradients,
            groups.stride * groups.gradients,
        )
    sums_once = (groups.optimizer > groups.gradients) | (is_zero3 & facts.defers_replica_sums)
    reduce = scatter + np.where(sums_once, 0.0, over_replicas)
    return DataParallelTime(gather, regather, reduce, levels + np.where(sums_once, over_replicas, 0.0))


def exposed_collectives_s(cost: Any, overlap: float, inputs: CostInputs, *, is_head: bool) -> FloatArray:
    """Return what gathering and reducing a layer of a LayerCost adds to its compute in a step [N].

    ``overlap`` is the part of the compute time that collectives hide behind, one layer ahead, for which there is memory; tokens on
    their way to experts take the links themselves. A head stays gathered, as its backward pass follows at once.
    """
    layouts, workload = inputs.layouts, inputs.workload
    facts = workload.engine_facts.data_parallel
    backward = overlap * np.maximum(
        cost.backward_s + cost.recompute_s + cost.comm_backward_s - _busy_link_s(cost, inputs)[1], 0.0
    )
    backward = backward * (workload.overlaps & (layouts.zero_stage >= facts.reduction_hides_from))
    # What waits for the last backward pass has nothing left to hide behind.
    backward = np.where(waits_for_pipeline(layouts, workload), 0.0, backward)
    gather_backward = np.where((layouts.zero_stage == 3) & (not is_head), cost.regather_s, 0.0)
    # A ring all-gather or reduce-scatter sends what all others hold; sums over replicas are small next to it.
    shard, dp = layouts.dp_shard, layouts.dp
    again = (shard - 1) / shard * cost.num_params * workload.compute_bytes
    sent = (dp - 1) / dp * cost.num_params * gradient_bytes(layouts, workload)
    both_s = gather_backward + cost.reduce_s
    both = np.where(gather_backward > 0, again, 0.0) + sent
    in_forward = exposed_gather_s(cost, overlap, inputs)
    in_backward = _added_s(backward, both_s, both, inputs)
    passes = passes_per_step(layouts, workload)
    behind = cost.backward_s + cost.recompute_s + cost.comm_backward_s + both_s
    left = np.maximum(leaving_s(cost, inputs) - behind, 0.0)
    exposed = passes.gathers * in_forward + passes.reductions * (in_backward + left)
    if workload.engine_facts.updates_in_backward:  # in the last pass, while further gradients leave
        update = _host_update_s(cost.num_trained, cost.expert_params, inputs)
        exposed = exposed + np.maximum(update - behind - left, 0.0)
    return np.asarray(exposed)


def _busy_link_s(cost: Any, inputs: CostInputs) -> tuple[FloatArray, FloatArray]:
    """Return what of a forward and a backward pass the links are taken by exchanges and by what halves hide [N]."""
    if not inputs.layouts.tp_halves.any():
        return cost.ep_forward_s, cost.ep_backward_s
    taken = shared_link(cost.tp_hidden_s / 2, inputs)
    return cost.ep_forward_s + taken, cost.ep_backward_s + taken


def exposed_gather_s(cost: Any, overlap: float, inputs: CostInputs) -> FloatArray:
    """Return what gathering a layer of a LayerCost once adds to its forward pass [N]."""
    layouts, facts = inputs.layouts, inputs.workload.engine_facts.data_parallel
    forward = overlap * np.maximum(cost.forward_s + cost.comm_forward_s - _busy_link_s(cost, inputs)[0], 0.0)
    forward = forward * (inputs.workload.overlaps & (layouts.zero_stage >= facts.gather_hides_from))
    from_owners, shard = facts.gathers_from_owners | (layouts.zero_stage < 3), layouts.dp_shard
    gathers = np.where(from_owners, shard * (layouts.num_optimizer_shards // layouts.num_shards), shard)
    sent = (gathers - 1) / gathers * cost.num_params * inputs.workload.compute_bytes
    return _added_s(forward, cost.gather_s, sent, inputs)


def leaving_s(cost: Any, inputs: CostInputs) -> FloatArray:
    """Return what the gradients of a layer of a LayerCost take to the host in a pass, where they leave during it [N]."""
    layouts, workload = inputs.layouts, inputs.workload
    if not (workload.engine_facts.offloads_in_backward and np.any(layouts.offload > 0)):
        return np.zeros(len(layouts))
    owners = layouts.num_optimizer_shards, layouts.expert_optimizer_shards
    away = np.where(layouts.offload > 0, layouts.offload_fraction, 0.0)
    share = away * sharded_params(cost.num_trained, cost.expert_params, *owners)
    link = host_link_bytes_per_s(np.zeros_like(layouts.offload_to_storage), inputs.scenario)
    return np.asarray(share * leaving_bytes(workload) / link)


def _added_s(compute_s: FloatArray, collective_s: FloatArray, sent_bytes: FloatArray, inputs: CostInputs) -> FloatArray:
    """Return what a collective adds to its layer's compute, or in all chunks but one to pp micro-batches of the next [N].

    Each device sends ``sent_bytes`` [N] in it.
    """
    layouts, memory = inputs.layouts, inputs.cluster.weakest_device.memory_bandwidth_bytes_per_s
    rate = np.divide(sent_bytes, collective_s, out=np.zeros_like(collective_s), where=collective_s > 0)
    law, ratio = (
        slowdown_law(rate / memory, inputs.scenario.coefficients),
        measured_rates(inputs.scenario).overlap_ratio,
    )
    pair = Pair(compute=law.compute * ratio, collective=law.collective * ratio)
    of_layer = exposed_s(compute_s, collective_s, pair)
    # With model chunks communication of one may run while others compute.
    if not (inputs.workload.overlaps and inputs.workload.engine_facts.data_parallel.hides_in_chunks):
        return of_layer
    of_others = exposed_s(compute_s * np.minimum(layouts.num_microbatches, layouts.pp), collective_s, pair)
    return np.asarray(of_layer / layouts.num_model_chunks + of_others * (1 - 1 / layouts.num_model_chunks))


class PassesPerStep(NamedTuple):
    """How often in a step [N] parameters are gathered and gradients reduced."""

    gathers: IntArray
    reductions: IntArray


def waits_for_pipeline(layouts: Any, workload: Workload) -> Array:
    """Return where parameters stay gathered through a pipeline's passes and gradients wait for the last one.

    torch's PipelineStage asks fully_shard for it, and torchtitan's reshard_after_forward is off there; our stages let zero 3 gather
    and reduce in every pass. Of a StepShape or a LayoutTable.
    """
    is_ours = workload.engine_facts.is_own_runtime & (np.asarray(layouts.zero_stage) == 3)
    return layouts.is_piped & workload.engine_facts.reduces_after_pipeline & ~is_ours


def passes_per_step(layouts: LayoutTable, workload: Workload) -> PassesPerStep:
    """Return how often a step gathers and reduces: under a pipeline that waits (`waits_for_pipeline`), once.

    Sharded gradients are a reason to reduce in every pass only where the whole gradients are nowhere to add up
    (`DataParallelFacts.sums_shards`).
    """
    zero, facts, is_piped = layouts.zero_stage, workload.engine_facts, layouts.is_piped
    is_gathered = waits_for_pipeline(layouts, workload)
    # DeepSpeed's stages 1 and 2 gather the updated parameters in the step; fully_shard frees them after every backward pass.
    gathers = (zero == 3) | ((zero == 2) & facts.uses_fully_shard)
    reduces = (zero == 3) | ((zero == 2) & facts.data_parallel.sums_shards & ~is_piped)
    m = layouts.num_microbatches
    return PassesPerStep(np.where(gathers & ~is_gathered, m, 1), np.where(reduces & ~is_gathered, m, 1))


def copied_bytes_per_param(layouts: LayoutTable, workload: Workload, *, of_experts: bool = False) -> FloatArray:
    """Return the bytes that all micro-batches of a step read and write for one parameter, besides the layers' operators [N].

    Routed experts are sharded over groups of their own.

    Megatron's weight-gradient products read and write the fp32 sum when they end (gradient_accumulation_fusion); others add in a
    pass of their own once micro-batches accumulate: autograd in the compute dtype, nanotron in fp32 (FP32GradientAccumulator). Runs
    of Megatron-Core on H100 and GB200 show 10 +- 1 bytes beyond their products, whatever the micro-batch.
    """
    m, sums = layouts.num_microbatches, workload.engine_facts.sums_gradients
    if sums == "shards":
        return _bytes_copied_by_torch(layouts, workload, of_experts=of_experts)
    added = _summed_bytes(layouts, workload)
    return np.asarray(np.where((m > 1) | (sums == "products"), m * added, 0), dtype=np.float64)


def _summed_bytes(layouts: LayoutTable, workload: Workload) -> FloatArray:
    """Return what it reads and writes to add the gradient of a pass to the sum of those before it, for one parameter [N]."""
    b, g = workload.compute_bytes, gradient_bytes(layouts, workload)
    by_engine = {"products": 8.0, "fp32": b + 8.0, "shards": 2 * g + b}
    return np.asarray(by_engine.get(workload.engine_facts.sums_gradients, 3.0 * b) + 0.0 * g)


def _bytes_copied_by_torch(layouts: LayoutTable, workload: Workload, *, of_experts: bool) -> FloatArray:
    """Return what torch copies, casts and adds in a step for one parameter, bytes read and written [N].

    fully_shard casts shards and copies them into its buffer, copies gathered parameters out of it and gradients into the one
    that is reduced: in every pass under zero 3, gradients of every micro-batch under zero 2, else (and under a pipeline that
    waits) once a step. Where a shard is all there is, it is cast and copied, and a reduced gradient is copied once more.
    Gradients that wait for the last micro-batch add up unsharded in the reduction's dtype, those that are reduced more than once as
    shards. DDP, which replicas in one dtype have, copies into its buckets and divides there. Every gradient of experts may be
    multiplied (`EngineFacts.scales_expert_gradients`).
    Source: torch.distributed.fsdp, torch.nn.parallel.
    """
    m, b, facts = layouts.num_microbatches, workload.compute_bytes, workload.engine_facts
    g = gradient_bytes(layouts, workload)
    ranks, owners, summed_over = (
        (layouts.expert_copies, layouts.expert_optimizer_shards, layouts.expert_gradient_shards)
        if of_experts
        else (layouts.dp * layouts.cp, layouts.num_optimizer_shards, layouts.num_gradient_shards)
    )
    is_gathered = waits_for_pipeline(layouts, workload)
    has_one_shard = _has_one_shard(layouts, workload, owners)
    gathers = np.where(is_gathered | (layouts.zero_stage < 2), 1, np.where(layouts.zero_stage == 3, 2 * m, m))
    gathered = gathers * _gathered_bytes(layouts, workload, owners)
    if not workload.has_backward:
        return np.asarray(gathered, dtype=np.float64)
    waits = (m > 1) & (is_gathered | (layouts.zero_stage < 2))
    # The first gradient is cast where dtypes differ; each further one is read, and the sum read and written.
    summed = np.where(
        waits, (m - 1) * _summed_bytes(layouts, workload) + (b + g) * (b != g), 3 * g * (m - 1) / summed_over
    )
    is_ddp = (layouts.zero_stage == 0) & (b == g) & (layouts.stage_ranks == layouts.dp) & ~layouts.is_piped
    buffered = np.where(is_ddp, 4 * g, np.where(waits, 2 * g, b + g) + np.where(has_one_shard, 2 * g, 0))
    reductions = np.where((ranks > 1) | has_one_shard, np.where(waits, 1, m), 0)
    scaled = np.zeros(len(layouts))
    if of_experts and facts.scales_expert_gradients:
        is_scaled = (layouts.expert_copies != layouts.dp * layouts.cp) & (layouts.experts_follow_tp == 0)
        scaled = np.where(is_scaled, m * 2.0 * b, 0.0)
    return np.asarray(gathered + summed + scaled + reductions * buffered, dtype=np.float64)


def summed_bytes_per_param(layouts: LayoutTable, workload: Workload) -> FloatArray:
    """Return what of `copied_bytes_per_param` every backward pass but the first reads and writes, adding gradients up [N]."""
    adds = (layouts.num_microbatches > 1) & (waits_for_pipeline(layouts, workload) | (layouts.zero_stage < 2))
    return np.where(adds & workload.has_backward, _summed_bytes(layouts, workload), 0.0)


def summed_s(seconds: FloatArray, cost: Any, inputs: CostInputs, host_s: FloatArray | float = 0.0) -> FloatArray:
    """Return how much longer sums of so many seconds [N] make a backward pass of a LayerCost, which may wait for the host [N].

    Without recompute, so that it is the same whatever a layer repeats. ``host_s`` are of the host, to launch them.
    """
    host = host_costs(inputs.scenario)
    if host.adds:
        return seconds + host_s
    device, launched = cost.device_backward_s, cost.host_backward_s
    waits = waiting_s(device, launched, host.overlap_norm)
    return seconds + waiting_s(device + seconds, launched + host_s, host.overlap_norm) - waits


def gathers_in_passes(layouts: LayoutTable, workload: Workload) -> Array:
    """Return where a stage gathers parameters in its first forward pass, in which they then stay, or in each one (zero 3).

    Where torch's runtime runs an order from a table, it gathers while a stage waits for its first input.
    """
    stays = waits_for_pipeline(layouts, workload)
    has_table = (layouts.num_model_chunks > 1) | (layouts.schedule_fact("torch_class") == "")
    return np.where(stays, ~has_table, layouts.zero_stage == 3)


def filling_bytes_per_param(layouts: LayoutTable, workload: Workload, *, of_experts: bool = False) -> FloatArray:
    """Return what of `copied_bytes_per_param` the gathers of one pass of a stage read and write (`gathers_in_passes`) [N]."""
    owners = layouts.expert_optimizer_shards if of_experts else layouts.num_optimizer_shards
    return np.where(gathers_in_passes(layouts, workload), _gathered_bytes(layouts, workload, owners), 0.0)


def _gathered_bytes(layouts: LayoutTable, workload: Workload, owners: IntArray) -> FloatArray:
    """Return what fully_shard reads and writes for one parameter to gather it once, of so many shards [N]."""
    b, master = workload.compute_bytes, workload.master_bytes
    into_buffer = np.where(owners > 1, 2 * b / owners, 0) + (b + master) / owners * (b != master)
    return np.where((owners > 1) | _has_one_shard(layouts, workload, owners), 2 * b, 0) + into_buffer


def _has_one_shard(layouts: LayoutTable, workload: Workload, owners: IntArray) -> Array:
    """Return where ours wraps what has nothing to gather or reduce, for its casts."""
    is_wrapped = has_copies(layouts, workload) | (layouts.cp > 1)
    return workload.engine_facts.is_own_runtime & is_wrapped & (owners == 1)


def gradient_bytes(layouts: Any, workload: Workload) -> Array:
    """Return the bytes of one gradient as it adds up and is reduced; of a StepShape or a LayoutTable."""
    return np.where(layouts.reduces_in_compute_dtype, float(workload.compute_bytes), float(workload.master_bytes))


def has_copies(layouts: Any, workload: Workload) -> Array:
    """Return whether parameters are gathered or cast by fully_shard, not replicated by DDP; of a StepShape or a LayoutTable."""
    is_cast = not workload.is_full_precision and workload.precision != "bf16"
    return ((layouts.dp_shard * layouts.dp_replicate > 1) & ~has_plain_replicas(layouts, workload)) | is_cast


def has_plain_replicas(layouts: Any, workload: Workload) -> Array:
    """Return whether our runtime has fp32 replicas and nothing more: gradients are reduced in DDP's buckets, which stay."""
    return layouts.is_replicated & (workload.engine_facts.is_own_runtime & workload.is_full_precision)


def summed_gradients(stage: Any, step: Any, workload: Workload) -> tuple[Array, Array]:
    """Return the bytes of gradients of a StageContents in our runtime when the last backward pass begins, and when it has ended."""
    unsharded = float(workload.master_bytes) * stage.trained
    sharded = float(workload.master_bytes) * stage.reduced(step)
    accumulates = (step.num_microbatches > 1) | (step.num_neighbours > 0)
    # Below zero 2 unsharded gradients wait for the last micro-batch; each unit's are freed as its shard is made.
    waits = waits_for_pipeline(step, workload)
    final = np.where((step.zero_stage == 0) | waits | ((step.zero_stage == 1) & accumulates), unsharded, sharded)
    # Sums of earlier micro-batches lie next to DDP's buckets until the last one moves into them.
    buckets = np.where(has_plain_replicas(step, workload), unsharded, 0.0)
    if workload.update == "in_backward":  # of each unit, as long as it takes
        final = np.where(accumulates, final, 0.0)
    return np.where(accumulates, final, 0.0) + buckets, final


def buffered_gradients(stage: Any, step: Any, workload: Workload, *, keeps_fp32: bool) -> tuple[Array, Array]:
    """Return the bytes of gradients of a StageContents in another engine, before and in the update.

    DeepSpeed's BF16_Optimizer adds gradients in the compute dtype up in an fp32 copy of all of them. With the states on the host
    each shard leaves for it as soon as it is reduced.
    """
    g, sharded = gradient_bytes(step, workload), stage.owned(step)
    if keeps_fp32:
        g = np.where(g == 4, g + workload.compute_bytes, g)
    # With offloaded parameters every engine streams so.
    leaves = (keeps_fp32 & (step.zero_stage >= 2) & (step.offload > 0)) | (step.offload == 2)
    buffer = np.where(leaves, 0.0, g * np.where(step.zero_stage >= 2, stage.reduced(step), stage.trained))
    updated = np.where(step.zero_stage == 3, np.minimum(_SUB_GROUP_PARAMS, sharded), sharded) * step.on_device
    final = buffer + np.where(g >= workload.master_bytes, 0.0, 4.0 * updated)
    return np.where(keeps_fp32 & (step.zero_stage < 3), final, buffer), final


def update_s(
    trained: FloatArray | float, expert_params: FloatArray | float, inputs: CostInputs, idx: int | slice = slice(None)
) -> FloatArray:
    """Return the seconds of the optimizer on a stage, given parameters per tensor-parallel rank, under layouts ``idx``."""
    b, workload, rates = inputs.layouts, inputs.workload, device_rates(inputs.scenario)
    owners = b.num_optimizer_shards[idx], b.expert_optimizer_shards[idx]
    share = np.asarray(sharded_params(trained, expert_params, *owners))
    if not workload.has_backward:
        unsharded = (trained - expert_params) * b.tp[idx] + expert_params * b.ep[idx] * b.expert_tp[idx]
        moved = share * (_ZEROTH_ORDER_ELEMENTS * workload.master_bytes) / rates.update_bytes_per_s
        drawn = unsharded * (_DIRECTION_ELEMENTS * workload.master_bytes) / rates.update_bytes_per_s
        return np.asarray(moved + drawn)
    update_bytes = update_bytes_per_param(workload)
    seconds = share * update_bytes / rates.update_bytes_per_s
    if workload.optimizer == "muon":
        seconds = seconds + share * _NEWTON_SCHULZ_FLOPS * inputs.hidden_dim / rates.gemm_flops_per_s
    if workload.paged_states:
        # Pages that were used longest ago leave first: where not all fit, each has left before its turn, and comes as others go.
        is_full = share * (workload.master_bytes + workload.optimizer_bytes) > inputs.cluster.memory_budget_bytes
        link = host_link_bytes_per_s(np.zeros_like(b.offload_to_storage[idx]), inputs.scenario)
        seconds = seconds + np.where(is_full, share * workload.optimizer_bytes / link, 0.0)
    seconds = seconds * (1 - np.where(b.offload[idx] > 0, b.offload_fraction[idx], 0.0))
    is_hidden = workload.engine_facts.updates_in_backward  # counted with the passes
    return np.asarray(seconds if is_hidden else seconds + _host_update_s(trained, expert_params, inputs, idx))


def _host_update_s(
    trained: FloatArray | float, expert_params: FloatArray | float, inputs: CostInputs, idx: int | slice = slice(None)
) -> FloatArray:
    """Return the seconds of what the host updates, of parameters per tensor-parallel rank, under layouts ``idx``."""
    b = inputs.layouts
    away = np.where(b.offload[idx] > 0, b.offload_fraction[idx], 0.0)
    share = sharded_params(trained, expert_params, b.num_optimizer_shards[idx], b.expert_optimizer_shards[idx])
    comes_back = b.offload[idx] != OFFLOADS.index("parameters")
    on_host = host_update_s_per_param(inputs.scenario, b.offload_to_storage[idx], comes_back)
    return np.asarray(away * share * on_host)
