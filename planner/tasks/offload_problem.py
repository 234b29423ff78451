"""One layout as a problem of solvers/offload/schedule.py, and its answer as stages, schedule and estimate of a plan.

A plan's own offload schedule as a problem and a choice (solvers/offload/instance.py): to cost, compare and draw it again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...cost_models.layer import data
from ...cost_models.layer.parallel import sharded_params
from ...cost_models.stage import memory
from ...cost_models.stage.contents import contents_between, step_shape
from ...cost_models.stage.memory import stage_memory_terms
from ...cost_models.stage.recompute import RecomputeCosts
from ...cost_models.stage.step import estimate_from_terms, estimate_step
from ...cost_models.stage.table import CostTable
from ...schema import ClusterSpec, Estimate, Layout, ModelSpec, OffloadMarginalValues, OffloadSchedule, Plan, Stage
from ...schema.arrays import FloatArray, IntArray
from ...schema.layers import Block, Layer
from ...schema.layout import Recompute
from ...schema.layout_table import RECOMPUTES, LayoutTable
from ...schema.offload import LayerOffload
from ...schema.plan import MemoryBreakdown, StageEstimate
from ...schema.units import GB, GIB
from ...solvers.offload.instance import OPTIONS, AllowedMoves, Links, OffloadChoice, OffloadInstance
from ...solvers.offload.schedule import OffloadSolution
from ...solvers.offload.simulation import SimulatedStep, simulate
from ..request import OffloadRequest

RECOMPUTE_OF: tuple[Recompute, ...] = ("none", "selective", "full", "none", "full")


OFFLOAD_OF: tuple[LayerOffload, ...] = ("none", "none", "none", "activations", "boundary")
"""What the options of solvers/offload/instance.py are in a plan."""


def build_instances(
    options: RecomputeCosts, idx: int, request: OffloadRequest, recompute: Recompute | None = None
) -> list[OffloadInstance]:
    """The problem of layout ``idx`` (one stage): where a rank keeps whole copies, with and without layers that are gathered one by
    one.

    Args:
        recompute: what all blocks must do; None: each its best.
    """
    base = _instance(options, idx, request, recompute)
    b = options.minimum.layouts
    if not base.may.parameters or b.zero_stage[idx] == 3:
        return [base]
    in_pieces = 2.0 * float(options.minimum.block_params[idx]) + float(options.minimum.root_params[idx])
    gathered = in_pieces * options.minimum.workload.compute_bytes
    without = replace(base, may=replace(base.may, parameters=False))
    if b.dp[idx] * b.cp[idx] > 1:  # below zero 3 parameters stay gathered over the ranks
        return [without]
    return [without, replace(base, fixed_bytes=base.fixed_bytes + gathered)]


def _instance(
    options: RecomputeCosts, idx: int, request: OffloadRequest, recompute: Recompute | None
) -> OffloadInstance:
    least, workload, cluster = options.minimum, options.minimum.workload, options.minimum.cluster
    kinds = least.kind_of_layer
    is_block = np.array([kind.is_block for kind in least.kinds])[kinds]
    rates = request.rates(workload, cluster)
    busy, kept = (_by_option(options, name, idx) for name in ("busy_s", "activation_bytes"))
    kept = kept * cluster.calibration.activations
    none = RECOMPUTES.index("none")
    moves = np.array([0.0, 0.0, 0.0, 1.0, 1.0])[:, None] * is_block
    forward = options.by_option[none].per_layer("forward_s", idx) + options.by_option[none].per_layer(
        "comm_forward_s", idx
    )
    working = np.where(is_block, _of_recomputes(options.working_bytes(idx)[:, None]), 0.0)
    sizes = _sizes(options, idx)
    fixed, turn, update = _fixed_bytes(options, idx)
    allowed = np.array([recompute is None or recompute == option for option in RECOMPUTE_OF])
    away = request.kinds in ("auto", "activations")
    allowed &= np.array([offload == "none" or away for offload in OFFLOAD_OF])
    margin = float(memory.required_bytes(1.0, 0.0, least.scenario))
    return OffloadInstance(
        forward_s=forward,
        backward_s=busy[none] - forward,
        kind=kinds,
        allowed=np.where(is_block, allowed[:, None], np.arange(len(OPTIONS))[:, None] == 0),
        repeated_s=np.maximum(_of_recomputes(busy) - busy[none], 0.0) * is_block,
        retained_bytes=_of_recomputes(kept) * (1 - moves),
        moved_bytes=_of_recomputes(kept) * moves,
        working_bytes=working,
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
        num_microbatches=int(least.layouts.num_microbatches[idx]),
        gradients_accumulate=bool(least.layouts.num_microbatches[idx] > 1),
        streamable=(is_block | (not least.model.tie_embeddings)) & (sizes["parameter_bytes"] > 0),
        host_update_s=sizes["parameter_bytes"] / workload.master_bytes * rates.update_s_per_param,
        device_update_s=options.by_option[none].update_s(*_trained(options, idx), idx),
        pieces=_pieces(least.model),
        **sizes,
    )


def _pieces(model: ModelSpec) -> IntArray:
    """Equal pieces [L] in which the runtime updates at least, parameter by parameter: a matrix is at most a third of a block, or
    half of it where only two are large.
    """

    def of(layer: Layer) -> int:
        return 1 if not isinstance(layer, Block) or layer.traced is not None else 2 + layer.mlp.gated

    return np.array([of(layer) for layer in model.iter_layers()], dtype=np.int64)


def _of_recomputes(values: FloatArray) -> FloatArray:
    """Values [O, ...] by recompute as values [K, ...] by option."""
    return np.asarray(values[[RECOMPUTES.index(option) for option in RECOMPUTE_OF]])


def _by_option(options: RecomputeCosts, name: str, idx: int) -> FloatArray:
    return np.asarray(options.of_kinds(name, idx)[options.minimum.kind_of_layer].T)


def _trained(options: RecomputeCosts, idx: int) -> tuple[FloatArray, FloatArray]:
    least = options.minimum
    return least.per_layer("num_trained", idx), least.per_layer("expert_params", idx)


def _sizes(options: RecomputeCosts, idx: int) -> dict[str, FloatArray]:
    """Bytes of one rank's master parameters, copies that stay, gradients and states of each layer [L]."""
    workload, b = options.minimum.workload, options.minimum.layouts
    trained, experts = _trained(options, idx)
    owned = sharded_params(trained, experts, b.num_optimizer_shards[idx], b.expert_optimizer_shards[idx])
    reduced = sharded_params(trained, experts, b.num_gradient_shards[idx], b.expert_gradient_shards[idx])
    zero, master = int(b.zero_stage[idx]), float(workload.master_bytes)
    accumulates = b.num_microbatches[idx] > 1
    whole = zero == 0 or (zero == 1 and accumulates)
    shape = step_shape(b, np.ones(1), num_neighbours=np.zeros(1, dtype=np.int64), idx=idx)
    copied = bool(data.has_copies(shape, workload)) and zero < 3
    return {
        "parameter_bytes": np.asarray(master * owned),
        "copy_bytes": np.asarray(workload.compute_bytes * trained * copied),
        "gradient_bytes": np.asarray(master * (trained if whole else reduced)),
        "state_bytes": np.asarray(float(workload.optimizer_bytes) * owned),
    }


def _fixed_bytes(options: RecomputeCosts, idx: int) -> tuple[float, float, float]:
    """Bytes beside states and activations: always there, at the turn (the loss), and in the update, of memory.py's own parts."""
    costs = options.by_option[0]
    first, last = np.array([0]), np.array([len(costs.kind_of_layer)])
    contents = replace(contents_between(costs, idx, first, last), working_bytes=np.zeros(1))
    # With activations beyond any device's the loss is the peak, with none and no logits the update is.
    at_loss = stage_memory_terms(
        costs, idx, replace(contents, activation_bytes=np.full(1, 2.0**52)), np.zeros(1, dtype=np.int64)
    )
    copies = float(_sizes(options, idx)["copy_bytes"].sum())
    gathered = float(np.ravel(at_loss["unsharded"])[0]) - copies
    frozen = float(np.ravel(contents.frozen(step_shape(costs.layouts, np.ones(1), num_neighbours=first, idx=idx)))[0])
    fixed = float(np.ravel(at_loss["temporary"])[0]) + gathered + frozen
    root = costs.workload.compute_bytes * float(np.ravel(contents.root_params)[0]) * (copies + gathered > 0)
    return fixed, float(np.ravel(at_loss["logits"])[0]), root - gathered


def build_stage(choice: OffloadChoice, model: ModelSpec) -> Stage:
    """The stage of a plan: recompute and offload of each layer."""
    is_block = [layer.is_block for layer in model.iter_layers()]
    recompute = [RECOMPUTE_OF[k] for k in choice.option]
    offload = tuple(OFFLOAD_OF[k] for k in choice.option)
    used = {option for option, block in zip(recompute, is_block, strict=True) if block}
    strongest = max(used, key=RECOMPUTES.index)
    return Stage(
        first_layer_idx=0,
        num_layers=len(recompute),
        recompute=strongest,
        layer_recompute=tuple(recompute) if len(used) > 1 else (),
        layer_offload=offload if any(option != "none" for option in offload) else (),
    )


def build_schedule(
    solution: OffloadSolution, instance: OffloadInstance, request: OffloadRequest, ranks: int, constant_s: float
) -> OffloadSchedule:
    """The schedule of a plan; ``constant_s`` is what the step has besides."""
    choice, found = solution.choice, solution.simulated
    assert choice is not None and found is not None

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
        host_bytes=int(found.host_bytes * ranks),
        host_budget_bytes=int(budget) + 1 if np.isfinite(budget) else None,
        storage_bytes=int(found.storage_bytes * ranks),
        to_host_bytes=int(found.to_host_bytes),
        to_device_bytes=int(found.to_device_bytes),
        step_time_s=objective,
        simulated_s=found.step_s + constant_s,
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
    """Exposed communication over data in a step and copies for it, which no schedule here changes."""
    none = options.by_option[RECOMPUTES.index("none")]
    return float(none.exposed_s(idx).sum() + none.dp_edges_s[idx])


def build_estimate(
    options: RecomputeCosts, idx: int, instance: OffloadInstance, choice: OffloadChoice, found: SimulatedStep
) -> Estimate:
    """The estimate of a layout with a schedule: the simulated step in the parts of a TimeBreakdown, memory at the fuller phase."""
    recomputes = [RECOMPUTES.index(RECOMPUTE_OF[k]) for k in choice.option]
    costs = options.assigned(idx, recomputes)
    plain = estimate_step(costs, 0, (0, instance.num_layers))
    constant, parts, copied = constant_s(options, idx), plain.breakdown_s, float(costs.copied_s(0).sum())
    inside = parts.compute - copied + parts.recompute + parts.tp + parts.cp + parts.ep
    seconds = instance.num_microbatches * found.microbatch_s
    # Kernels beside copies lose some of their speed, which is part of waiting for the host.
    breakdown = parts.replace(
        dp=constant - copied, optimizer=found.update_s, offload=max(0.0, seconds - inside), pp=0.0, bubble=0.0
    )
    stage = StageEstimate(
        forward_s=plain.stages[0].forward_s,
        backward_s=plain.stages[0].backward_s,
        memory_bytes=_memory_parts(instance, choice, found),
    )
    return estimate_from_terms(costs, breakdown, (stage,), 0)


def _memory_parts(i: OffloadInstance, choice: OffloadChoice, found: SimulatedStep) -> MemoryBreakdown:
    """Parts of the peak that the simulation found."""
    there = ~choice.parameters
    in_update = found.update_bytes >= found.microbatch_bytes
    states = i.state_bytes[there & ~choice.host_optimizer & ~choice.streamed_optimizer].sum()
    if in_update:
        states += 2 * i.state_bytes[choice.streamed_optimizer].max(initial=0.0)
    parts = {
        "parameters": float(i.parameter_bytes[there].sum()),
        "optimizer": float(states),
        "unsharded": 0.0 if in_update else float(i.copy_bytes[there].sum()),
        "logits": 0.0 if in_update else i.turn_bytes,
        "temporary": i.fixed_bytes + (i.update_bytes if in_update else 0.0) + float(choice.take(i.working_bytes).max()),
    }
    whole = {name: int(size) for name, size in parts.items()}
    # In the backward pass copies leave as gradients come.
    whole["unsharded"] = max(
        0, min(whole["unsharded"], int(found.peak_bytes) - sum(whole.values()) + whole["unsharded"])
    )
    left = max(0, int(found.peak_bytes) - sum(whole.values()))
    gradients = float(i.gradient_bytes[there].sum()) if in_update or i.gradients_accumulate else 0.0
    held = left if in_update else min(left, int(gradients))
    return MemoryBreakdown(**whole, gradients=held, activations=left - held)


@dataclass(frozen=True)
class PlanProblem:
    """Costs of the plan's layout (row 0), its problem, and what its schedule chooses."""

    options: RecomputeCosts
    instance: OffloadInstance
    choice: OffloadChoice
    prefetch: int

    @property
    def estimate(self) -> Estimate:
        """What this version says of the plan's schedule."""
        found = simulate(self.instance, self.choice, prefetch=self.prefetch)
        return build_estimate(self.options, 0, self.instance, self.choice, found)


def problem_of_plan(plan: Plan) -> PlanProblem:
    """The schedule of a plan that has one."""
    schedule, request = plan.offload, OffloadRequest.from_plan(plan)
    assert schedule is not None and request is not None
    options, choice = option_costs_of_plan(plan, plan.cluster), choice_of_plan(plan)
    problems = build_instances(options, 0, request)
    return PlanProblem(options, problems[-1 if choice.parameters.any() else 0], choice, schedule.prefetch_layers)


def option_costs_of_plan(plan: Plan, cluster: ClusterSpec) -> RecomputeCosts:
    """Costs of the plan's layout on a cluster (row 0), whatever its blocks recompute."""
    layout = without_schedule(plan.layout)
    batch = LayoutTable.from_layouts([layout], plan.workload.global_batch_size)
    return RecomputeCosts.from_table(CostTable.from_layouts(plan.model, plan.workload, cluster, batch))


def without_schedule(layout: Layout) -> Layout:
    """A layout with neither an offload schedule nor one recompute for all blocks."""
    return layout.replace(offload="none", recompute="mixed")


def choice_of_plan(plan: Plan) -> OffloadChoice:
    """What a plan's stage and schedule say of each layer."""
    schedule, stage = plan.offload, plan.stages[0]
    assert schedule is not None
    layers = list(plan.model.iter_layers())
    said = list(zip(RECOMPUTE_OF, OFFLOAD_OF, strict=True))
    options = [
        said.index((stage.recompute_of(idx), stage.offload_of(idx))) if layer.is_block else 0
        for idx, layer in enumerate(layers)
    ]
    named = (
        schedule.host_optimizer_layers,
        schedule.streamed_optimizer_layers,
        schedule.streamed_parameter_layers,
        schedule.storage_optimizer_layers,
    )
    masks = [np.isin(np.arange(len(layers)), np.array(idxs, dtype=np.int64)) for idxs in named]
    return OffloadChoice(
        option=np.array(options, dtype=np.int64),
        host_optimizer=masks[0],
        streamed_optimizer=masks[1],
        parameters=masks[2],
        storage=masks[3],
    )
