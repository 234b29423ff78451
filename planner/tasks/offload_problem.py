"""One layout as a problem of solvers/offload/schedule.py; its answer as stage, schedule and estimate of a plan, and back again."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...cost_models.layer import data
from ...cost_models.layer.parallel import sharded_params
from ...cost_models.stage import memory
from ...cost_models.stage.contents import RecomputeCosts, contents_between, stage_memory_terms, step_shape
from ...cost_models.stage.step import estimate_from_terms, estimate_step
from ...cost_models.stage.table import CostTable
from ...schema import (
    ClusterSpec,
    Layout,
    ModelSpec,
    OffloadMarginalValues,
    OffloadSchedule,
    Stage,
    TrainingEstimate,
    TrainingPlan,
)
from ...schema.layers import Block, Layer
from ...schema.layout import Recompute
from ...schema.layout_table import RECOMPUTES, LayoutTable
from ...schema.offload import LayerOffload
from ...schema.training_plan import MemoryBreakdown
from ...schema.units import GB, GIB, FloatArray
from ...solvers.offload.instance import OPTIONS, AllowedMoves, Links, OffloadChoice, OffloadInstance
from ...solvers.offload.schedule import OffloadSolution
from ...solvers.offload.simulation import SimulatedStep, simulate
from ..request import OffloadRequest
from .training import stage_of_layers

RECOMPUTE_OF: tuple[Recompute, ...] = ("none", "selective", "full", "none", "full")
OFFLOAD_OF: tuple[LayerOffload, ...] = ("none", "none", "none", "activations", "boundary")
"""What the options of solvers/offload/instance.py are in a plan."""

_RECOMPUTE_IDXS = [RECOMPUTES.index(option) for option in RECOMPUTE_OF]
_NONE = RECOMPUTES.index("none")


def build_instances(
    options: RecomputeCosts, idx: int, request: OffloadRequest, recompute: Recompute | None = None
) -> list[OffloadInstance]:
    """Return the problems of layout ``idx`` (one stage): where a rank keeps full copies, without and with layers that are gathered
    one by one.

    Args:
        recompute: what all blocks must do; None: each its best.
    """
    base, costs = _instance(options, idx, request, recompute), options.minimum
    table = costs.layouts
    if not base.may.parameters or table.zero_stage[idx] == 3:
        return [base]
    without = replace(base, may=replace(base.may, parameters=False))
    if table.dp[idx] * table.cp[idx] > 1:  # below zero 3 parameters stay gathered over the ranks
        return [without]
    in_pieces = 2.0 * float(costs.block_params[idx]) + float(costs.root_params[idx])
    return [without, replace(base, fixed_bytes=base.fixed_bytes + in_pieces * costs.workload.compute_bytes)]


def _instance(
    options: RecomputeCosts, idx: int, request: OffloadRequest, recompute: Recompute | None
) -> OffloadInstance:
    costs, plain = options.minimum, options.by_option[_NONE]
    workload, cluster, is_block = costs.workload, costs.cluster, costs.is_block
    rates = request.rates(workload, cluster)
    busy, retained = (
        np.asarray(options.of_kinds(name, idx)[costs.kind_of_layer].T) for name in ("busy_s", "activation_bytes")
    )
    retained = (retained * cluster.calibration.activations)[_RECOMPUTE_IDXS]
    moves = np.array([0.0, 0.0, 0.0, 1.0, 1.0])[:, None] * is_block
    forward = plain.per_layer("forward_s", idx) + plain.per_layer("comm_forward_s", idx)
    sizes = _sizes(options, idx)
    fixed, turn, update = _fixed_bytes(plain, idx, sizes)
    may_move = request.kinds in ("auto", "activations")
    allowed = np.array([
        recompute in (None, option) and (offload == "none" or may_move)
        for option, offload in zip(RECOMPUTE_OF, OFFLOAD_OF, strict=True)
    ])  # fmt: skip
    margin = float(memory.required_bytes(1.0, 0.0, costs.scenario))
    num_microbatches = int(costs.layouts.num_microbatches[idx])
    return OffloadInstance(
        forward_s=forward,
        backward_s=busy[_NONE] - forward,
        kind=costs.kind_of_layer,
        allowed=np.where(is_block, allowed[:, None], np.arange(len(OPTIONS))[:, None] == 0),
        repeated_s=np.maximum(busy[_RECOMPUTE_IDXS] - busy[_NONE], 0.0) * is_block,
        retained_bytes=retained * (1 - moves),
        moved_bytes=retained * moves,
        working_bytes=np.where(is_block, options.working_bytes(idx)[_RECOMPUTE_IDXS][:, None], 0.0),
        links=Links(
            to_host_bytes_per_s=rates.to_host_bytes_per_s,
            to_device_bytes_per_s=rates.to_device_bytes_per_s,
            duplex=rates.duplex,
            compute_lost_to_host=rates.compute_lost_to_host,
            compute_lost_to_device=rates.compute_lost_to_device,
            read_bytes_per_s=rates.storage_bytes_per_s,
            write_bytes_per_s=rates.storage_bytes_per_s,
        ),
        may=AllowedMoves(
            host_optimizer=request.kinds in ("auto", "optimizer"),
            streamed_optimizer=request.kinds in ("auto", "optimizer"),
            parameters=request.kinds in ("auto", "params"),
        ),
        fixed_bytes=fixed,
        turn_bytes=turn,
        update_bytes=update,
        cap_bytes=cluster.memory_budget_bytes / margin,
        host_cap_bytes=rates.memory_bytes,
        storage_cap_bytes=request.storage_bytes / cluster.largest_node,
        num_microbatches=num_microbatches,
        gradients_accumulate=num_microbatches > 1,
        streamable=(is_block | (not costs.model.tie_embeddings)) & (sizes["parameter_bytes"] > 0),
        host_update_s=sizes["parameter_bytes"] / workload.master_bytes * rates.update_s_per_param,
        device_update_s=plain.per_step.update_s(*_trained_params(costs, idx), idx),
        pieces=np.array([_num_pieces(layer) for layer in costs.model.iter_layers()], dtype=np.int64),
        **sizes,
    )


def _num_pieces(layer: Layer) -> int:
    """Return equal pieces in which the runtime updates at least, parameter by parameter: a matrix is at most a third of a block, or
    half of it where only two are large.
    """
    return 1 if not isinstance(layer, Block) or layer.traced is not None else 2 + layer.mlp.gated


def _trained_params(costs: CostTable, idx: int) -> tuple[FloatArray, FloatArray]:
    return costs.per_layer("num_trained", idx), costs.per_layer("expert_params", idx)


def _sizes(options: RecomputeCosts, idx: int) -> dict[str, FloatArray]:
    """Return bytes of one rank's master parameters, copies that stay, gradients and states of each layer [L]."""
    workload, table = options.minimum.workload, options.minimum.layouts
    trained, experts = _trained_params(options.minimum, idx)
    optimised = sharded_params(trained, experts, table.num_optimizer_shards[idx], table.expert_optimizer_shards[idx])
    reduced = sharded_params(trained, experts, table.num_gradient_shards[idx], table.expert_gradient_shards[idx])
    zero, master = int(table.zero_stage[idx]), float(workload.master_bytes)
    is_unsharded = zero == 0 or (zero == 1 and table.num_microbatches[idx] > 1)
    shape = step_shape(table, np.ones(1), num_neighbours=np.zeros(1, dtype=np.int64), idx=idx)
    copied = bool(data.has_copies(shape, workload)) and zero < 3
    return {
        "parameter_bytes": np.asarray(master * optimised),
        "copy_bytes": np.asarray(workload.compute_bytes * trained * copied),
        "gradient_bytes": np.asarray(master * (trained if is_unsharded else reduced)),
        "state_bytes": np.asarray(float(workload.optimizer_bytes) * optimised),
    }


def _fixed_bytes(costs: CostTable, idx: int, sizes: dict[str, FloatArray]) -> tuple[float, float, float]:
    """Return bytes besides states and activations: always present, at the turn (the loss), and in the update."""
    first, last = np.array([0]), np.array([len(costs.kind_of_layer)])
    contents = replace(contents_between(costs, idx, first, last), working_bytes=np.zeros(1))
    # With activations beyond any device's the loss is the peak, with none and no logits the update is.
    saving_all = replace(contents, activation_bytes=np.full(1, 2.0**52))
    loss_terms = stage_memory_terms(costs, idx, saving_all, np.zeros(1, dtype=np.int64))
    unsharded, temporary, logits = (
        float(np.ravel(loss_terms[name])[0]) for name in ("unsharded", "temporary", "logits")
    )
    copies = float(sizes["copy_bytes"].sum())
    shape = step_shape(costs.layouts, np.ones(1), num_neighbours=first, idx=idx)
    frozen = float(np.ravel(contents.frozen(shape, costs.workload))[0])
    root = costs.workload.compute_bytes * float(np.ravel(contents.root_params)[0]) * (unsharded > 0)
    return temporary + (unsharded - copies) + frozen, logits, root - (unsharded - copies)


def build_stage(choice: OffloadChoice, model: ModelSpec) -> Stage:
    """Return the stage of a plan: recompute and offload of each layer."""
    offload = tuple(OFFLOAD_OF[k] for k in choice.option)
    recomputes = [RECOMPUTE_OF[k] for k in choice.option]
    stage = stage_of_layers(0, recomputes, [layer.is_block for layer in model.iter_layers()])
    return stage.replace(layer_offload=offload) if any(option != "none" for option in offload) else stage


def build_schedule(
    solution: OffloadSolution, instance: OffloadInstance, request: OffloadRequest, ranks: int, constant_s: float
) -> OffloadSchedule:
    """Return the schedule of a plan; ``constant_s`` is what the step has besides."""
    choice, simulated = solution.choice, solution.simulated
    assert choice is not None and simulated is not None

    def layers(mask: NDArray[np.bool_]) -> tuple[int, ...]:
        return tuple(int(idx) for idx in np.flatnonzero(mask))

    budget = instance.host_cap_bytes * ranks
    objective, bound = solution.objective + constant_s, solution.bound + constant_s
    return OffloadSchedule(
        host_optimizer_layers=layers(choice.host_optimizer),
        streamed_optimizer_layers=layers(choice.streamed_optimizer),
        streamed_parameter_layers=layers(choice.parameters),
        storage_optimizer_layers=layers(choice.storage),
        storage_path=request.storage_path if choice.storage.any() else None,
        prefetch_layers=solution.prefetch,
        host_bytes=int(simulated.host_bytes * ranks),
        host_budget_bytes=int(budget) + 1 if np.isfinite(budget) else None,
        storage_bytes=int(simulated.storage_bytes * ranks),
        to_host_bytes=int(simulated.to_host_bytes),
        to_device_bytes=int(simulated.to_device_bytes),
        step_time_s=objective,
        simulated_s=simulated.step_s + constant_s,
        bound_s=min(bound, objective),
        gap=max(0.0, 1 - bound / objective),
        worth=OffloadMarginalValues(
            device_s_per_gib=solution.marginal.device_s_per_byte * GIB,
            host_s_per_gib=solution.marginal.host_s_per_byte * GIB,
            to_host_s_per_gb_per_s=solution.marginal.to_host_s2_per_byte * GB,
            to_device_s_per_gb_per_s=solution.marginal.to_device_s2_per_byte * GB,
        ),
    )


def constant_s(options: RecomputeCosts, idx: int) -> float:
    """Return exposed communication over data in a step and copies for it, which no schedule here changes."""
    plain = options.by_option[_NONE]
    return float(plain.per_step.exposed_s(idx).sum() + plain.per_step.dp_edges_s[idx])


def build_estimate(
    options: RecomputeCosts, idx: int, instance: OffloadInstance, choice: OffloadChoice, simulated: SimulatedStep
) -> TrainingEstimate:
    """Return the estimate of a layout with a schedule: the simulated step by terms, memory at the fuller phase."""
    costs = options.assigned(idx, [_RECOMPUTE_IDXS[k] for k in choice.option])
    plain = estimate_step(costs, 0, (0, instance.num_layers))
    constant, terms, copied = constant_s(options, idx), plain.breakdown_s, float(costs.per_step.copied_s(0).sum())
    within_layers = terms.compute - copied + terms.recompute + terms.tp + terms.cp + terms.ep
    seconds = instance.num_microbatches * simulated.microbatch_s
    # Kernels next to copies lose some of their speed, which is part of waiting for the host.
    waiting = max(0.0, seconds - within_layers)
    breakdown = terms.replace(dp=constant - copied, optimizer=simulated.update_s, offload=waiting, pp=0.0, bubble=0.0)
    stage = plain.stages[0].replace(memory_bytes=_memory_terms(instance, choice, simulated), device="")
    return estimate_from_terms(costs, 0, breakdown, (stage,), 0)


def _memory_terms(i: OffloadInstance, choice: OffloadChoice, simulated: SimulatedStep) -> MemoryBreakdown:
    """Return the terms of the peak that the simulation found."""
    resident, peak = ~choice.parameters, int(simulated.peak_bytes)
    in_update = simulated.update_bytes >= simulated.microbatch_bytes
    states = i.state_bytes[resident & ~choice.host_optimizer & ~choice.streamed_optimizer].sum()
    if in_update:
        states += 2 * i.state_bytes[choice.streamed_optimizer].max(initial=0.0)
    temporary = i.fixed_bytes + (i.update_bytes if in_update else 0.0) + float(choice.take(i.working_bytes).max())
    terms = {
        "parameters": int(i.parameter_bytes[resident].sum()),
        "optimizer": int(states),
        "unsharded": 0 if in_update else int(i.copy_bytes[resident].sum()),
        "logits": 0 if in_update else int(i.turn_bytes),
        "temporary": int(temporary),
    }
    # In the backward pass copies leave as gradients come.
    terms["unsharded"] = max(0, min(terms["unsharded"], peak - sum(terms.values()) + terms["unsharded"]))
    remaining = max(0, peak - sum(terms.values()))
    gradients = float(i.gradient_bytes[resident].sum()) if in_update or i.gradients_accumulate else 0.0
    gradients_now = remaining if in_update else min(remaining, int(gradients))
    return MemoryBreakdown(**terms, gradients=gradients_now, activations=remaining - gradients_now)


@dataclass(frozen=True)
class PlanProblem:
    """Costs of the plan's layout (row 0), its problem, and what its schedule chooses."""

    options: RecomputeCosts
    instance: OffloadInstance
    choice: OffloadChoice
    prefetch: int

    @property
    def estimate(self) -> TrainingEstimate:
        """What this version says of the plan's schedule."""
        simulated = simulate(self.instance, self.choice, prefetch=self.prefetch)
        return build_estimate(self.options, 0, self.instance, self.choice, simulated)


def problem_of_plan(plan: TrainingPlan) -> PlanProblem:
    """Return the problem of a plan that has a schedule."""
    schedule, request = plan.offload, OffloadRequest.from_plan(plan)
    assert schedule is not None and request is not None
    options, choice = option_costs_of_plan(plan, plan.cluster), choice_of_plan(plan)
    problems = build_instances(options, 0, request)
    return PlanProblem(options, problems[-1 if choice.parameters.any() else 0], choice, schedule.prefetch_layers)


def option_costs_of_plan(plan: TrainingPlan, cluster: ClusterSpec) -> RecomputeCosts:
    """Return the costs of the plan's layout on a cluster (row 0), whatever its blocks recompute."""
    layout = without_schedule(plan.layout)
    batch = LayoutTable.from_layouts([layout], plan.workload.global_batch_size)
    return RecomputeCosts(CostTable.from_layouts(plan.model, plan.workload, cluster, batch))


def without_schedule(layout: Layout) -> Layout:
    """Return a layout with neither an offload schedule nor one recompute for all blocks."""
    return layout.replace(offload="none", recompute="mixed")


def choice_of_plan(plan: TrainingPlan) -> OffloadChoice:
    """Return what a plan's stage and schedule say of each layer."""
    schedule, stage = plan.offload, plan.stages[0]
    assert schedule is not None
    options_by_name = {names: k for k, names in reversed([*enumerate(zip(RECOMPUTE_OF, OFFLOAD_OF, strict=True))])}
    options = [
        options_by_name[stage.recompute_of(idx), stage.offload_of(idx)] if layer.is_block else 0
        for idx, layer in enumerate(plan.model.iter_layers())
    ]

    def mask(idxs: tuple[int, ...]) -> NDArray[np.bool_]:
        return np.isin(np.arange(len(options)), np.array(idxs, dtype=np.int64))

    return OffloadChoice(
        option=np.array(options, dtype=np.int64),
        host_optimizer=mask(schedule.host_optimizer_layers),
        streamed_optimizer=mask(schedule.streamed_optimizer_layers),
        parameters=mask(schedule.streamed_parameter_layers),
        storage=mask(schedule.storage_optimizer_layers),
    )
