"""`plan` and `estimate`: the method, in the order it happens."""

from __future__ import annotations

import datetime as dt
import hashlib
import itertools
import math
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ..cost_models.hardware.device import is_measured
from ..cost_models.measured import measured_terms
from ..cost_models.stage.table import CostTable
from ..schema import (
    ClusterSpec,
    ConfigError,
    Estimate,
    InfeasibleError,
    Layout,
    ModelSpec,
    Plan,
    Stage,
    Workload,
)
from ..schema.engine_facts import PLANNED_ENGINES
from ..schema.engine_rules import VERSION_RULES
from ..schema.layers import Block
from ..schema.layout import Recompute, check_fields, format_assignments
from ..schema.layout_rules import ENGINE_RULES
from ..schema.layout_table import RECOMPUTES, LayoutTable
from ..schema.plan import PlanProvenance
from ..schema.runnable import broken_rules, problem_facts, require_valid, why_not_runnable
from ..schema.task import Precision
from ..schema.units import format_bytes
from ..solvers.pipeline.torch_csv import to_torch_csv
from .deadline import Deadline
from .expand import Candidate, expand
from .experts import with_experts_placed, with_imbalance
from .explain.infeasible import explain_infeasible
from .rank_map import device_of_rank
from .request import OffloadRequest, PlanRequest, is_runnable, split_offload_request
from .search import OnProgress, SearchResult, search
from .space import build_space
from .tasks.training import (
    add_synthesised_orders,
    alternatives_with_schedules,
    build_alternative,
    build_alternatives,
    choose_simplest,
)

if TYPE_CHECKING:
    from .tasks.offload import OffloadResult


def plan(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    *,
    fixed: Mapping[str, Any] | None = None,
    runnable: bool | None = None,
    time_limit_s: float = 60.0,
    top: int = 4,
    on_progress: OnProgress | None = None,
    deadline: Deadline | None = None,
    expert_load: Any = None,
    offload: OffloadRequest | None = None,
) -> Plan:
    """The fastest layout that fits, with a certificate and its runner-ups.

    Args:
        model, cluster, workload: what to train, where, and how.
        fixed: fields of Layout that the search must keep, e.g. ``{"tp": 8}``.
        runnable: only layouts that `meshwright apply` of this version executes; unset, so it is for models that it trains,
            and for others the space is all of the engine.
        time_limit_s: stop then with the best found so far and its gap.
        top: runner-ups to report.
        on_progress: called after every expanded layout.
        deadline: stands in for ``time_limit_s`` where somebody may end the search before (`Deadline.stop`).
        expert_load: tokens of each expert [layers with experts, experts], several workloads in front; what their imbalance
            costs enters the choice of ep, and the plan says where experts stand.
        offload: what may lie on the host (docs/offload.md): layouts with an offload schedule are searched too, and the fastest of
            all is taken. Without it nothing is offloaded, because what the host has is not known of most clusters.

    Raises:
        ConfigError: the input rules out every layout (a degree that does not divide, a precision the device lacks).
        InfeasibleError: layouts exist, but none fits the memory; names what binds and the smallest change found that fits.
        SolverLimitError: the time limit came before any layout that fits.
    """
    fixed = check_fields(fixed or {})
    if workload.engine_facts.rules is None:
        raise ConfigError(f"cannot plan for {workload.engine}", help="plan for one of " + ", ".join(PLANNED_ENGINES))
    runnable = is_runnable(model, workload, runnable)
    deadline = deadline or Deadline(time_limit_s)
    if expert_load is not None:
        workload = with_imbalance(model, cluster, workload, expert_load)
    fixed, offload = split_offload_request(fixed, offload)
    space = build_space(model, workload, cluster, fixed, runnable=runnable, deadline=deadline)
    result = search(
        model,
        workload,
        cluster,
        space,
        time_limit_s=time_limit_s,
        runner_ups=top,
        on_progress=on_progress,
        deadline=deadline,
    )
    if "schedule" not in fixed:
        result = add_synthesised_orders(result, deadline)
    if not result.fitting and offload is None:
        raise explain_infeasible(PlanRequest(model, cluster, workload, fixed, runnable), result, deadline)
    found = plan_of(result, fixed, runnable=runnable, top=top) if result.fitting else None
    if offload is not None:
        found = _with_offload(found, result, fixed, offload, runnable=runnable, top=top, deadline=deadline)
    assert found is not None
    return found if expert_load is None else with_experts_placed(found, expert_load)


WORTH_MOVING = 1e-4
"""The share of a step that an offload schedule saves at least, where the model fits without."""


def _with_offload(
    found: Plan | None,
    result: SearchResult,
    fixed: Mapping[str, Any],
    request: OffloadRequest,
    *,
    runnable: bool,
    top: int,
    deadline: Deadline,
) -> Plan:
    """The plan, or one with an offload schedule where that is faster or nothing else fits; ``found`` is then a runner-up."""
    from .tasks.offload import search_offload  # its solver is not needed without

    costs = result.costs
    model, cluster, workload = costs.model, costs.cluster, costs.workload
    slowest_s = found.estimate.step_time_s if found is not None else math.inf
    try:
        better = search_offload(
            model,
            cluster,
            workload,
            request=request,
            fixed=fixed,
            runnable=runnable,
            deadline=deadline,
            worse_than_s=slowest_s,
            runner_ups=top,
        )
    except InfeasibleError:
        if found is None:
            raise
        better = None
    if better is None or better.estimate.step_time_s >= slowest_s * (1 - WORTH_MOVING):
        assert found is not None
        return found.replace(
            notes=(*found.notes, "no offload schedule that was found is faster"),
            provenance=found.provenance.replace(offload=request.allowed),
        )
    beside = result if found is not None else None
    return plan_of_offload(
        better, model, cluster, workload, fixed, request=request, runnable=runnable, top=top, beside=beside
    )


def plan_of_offload(
    better: OffloadResult,
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    fixed: Mapping[str, Any],
    *,
    request: OffloadRequest,
    runnable: bool,
    top: int,
    beside: SearchResult | None = None,
) -> Plan:
    """The plan that a search of offload schedules found; its runner-ups are of that search and of the one ``beside`` it."""
    notes = []
    if request.rates(workload, cluster).memory_bytes == math.inf:
        held = format_bytes(better.schedule.host_bytes)
        notes.append(
            f"the host's memory is not known: each node needs {held} for what is offloaded (--host-memory-gib)"
        )
    notes += _note_on_measured(cluster, workload)
    if lacking := why_not_runnable(model, workload):
        notes.append("`meshwright apply` cannot train this model yet: " + "; ".join(lacking))
    others = [build_alternative(layout, found, better.estimate) for layout, found in better.runner_ups]
    return Plan(
        model=model,
        cluster=cluster,
        workload=workload,
        layout=better.layout,
        stages=(better.stage,),
        rank_map=device_of_rank(cluster, ()),
        estimate=better.estimate,
        search=better.certificate,
        alternatives=alternatives_with_schedules(others, beside, better.estimate, top),
        offload=better.schedule,
        notes=tuple(notes),
        provenance=_provenance(model, cluster, workload, fixed, runnable=runnable, offload=request),
    )


def plan_of(
    result: SearchResult, fixed: Mapping[str, Any], *, runnable: bool, top: int, slowest_s: float = math.inf
) -> Plan:
    """The plan that a search found: the simplest of its fastest layouts, none beyond ``slowest_s``, with runner-ups and
    notes.
    """
    model, cluster, workload, batch = (
        result.costs.model,
        result.costs.cluster,
        result.costs.workload,
        result.costs.batch,
    )
    chosen = choose_simplest(result, batch, slowest_s=slowest_s)
    layout = chosen.layout(batch)
    return Plan(
        model=model,
        cluster=cluster,
        workload=workload,
        layout=layout,
        stages=_stages(model, chosen),
        pipeline_order=tuple(to_torch_csv(chosen.order).splitlines()),
        rank_map=device_of_rank(cluster, chosen.nodes),
        estimate=chosen.estimate,
        search=result.certificate(),
        alternatives=build_alternatives(result, batch, chosen, top),
        notes=_notes(model, cluster, workload, chosen, result.fitting[0]),
        provenance=_provenance(model, cluster, workload, fixed, runnable=runnable),
    )


def estimate(
    model: ModelSpec, cluster: ClusterSpec, workload: Workload, layout: Layout, *, offload: OffloadRequest | None = None
) -> Estimate:
    """What one given layout costs; its layers are cut into stages as evenly as memory allows. Under mixed recompute each block does
    what is best for the step.

    Layouts that other engines execute and our runtime does not (`not_executed` says why) have an estimate too. One whose offload is
    scheduled has its best schedule within what ``offload`` says (unset: all that the cluster has).

    Raises:
        ConfigError: the layout breaks a rule that holds for any engine; every broken one is named.
        InfeasibleError: its offload is scheduled and no schedule fits.
    """
    return estimate_with_schedule(model, cluster, workload, layout, offload=offload)[0]


def estimate_with_schedule(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    layout: Layout,
    *,
    offload: OffloadRequest | None = None,
    quickly: bool = False,
) -> tuple[Estimate, OffloadResult | None]:
    """The estimate of a layout and, where its offload is scheduled, its schedule: the best one, or ``quickly`` the one that a
    search of layouts compares. Raises like `estimate`.
    """
    require_valid(
        model,
        workload,
        layout,
        world_size=cluster.num_devices,
        scaleup_domain=cluster.scaleup_domain,
        rules=ENGINE_RULES,
    )
    if layout.offload == "scheduled":
        from .tasks.offload import schedule_layout

        request = offload or OffloadRequest()
        found = schedule_layout(model, cluster, workload, layout, request, quickly=quickly)
        return found.estimate, found
    batch = LayoutTable.from_layouts([layout], workload.global_batch_size)
    return expand(CostTable.of(model, workload, cluster, batch), 0).estimate, None


def not_executed(model: ModelSpec, cluster: ClusterSpec, workload: Workload, layout: Layout) -> tuple[str, ...]:
    """Why `apply` of this version does not execute a layout that `estimate` can cost; empty when it does."""
    problem = problem_facts(model, workload, world_size=cluster.num_devices, scaleup_domain=cluster.scaleup_domain)
    engine = workload.engine_facts
    broken = broken_rules(layout, problem, (engine.rules or ()) + (VERSION_RULES if engine.is_own_runtime else ()))
    return broken if engine.is_own_runtime else (*broken, f"it is costed for {workload.engine}")


def default_precision(cluster: ClusterSpec) -> Precision:
    """bf16-mixed where the device has a bf16 rate, else fp16-mixed; fp32 on a CPU.

    Raises:
        ConfigError: the device has none of the three.
    """
    device = cluster.weakest_device
    if device.backend.is_host:
        return "fp32"
    choices: tuple[tuple[Precision, str], ...] = (("bf16-mixed", "bf16"), ("fp16-mixed", "fp16"), ("fp32", "fp32"))
    for precision, peak in choices:
        if getattr(device.peak_flops_per_s, peak) is not None:
            return precision
    raise ConfigError(f"{device.name} has no bf16, fp16 or fp32 rate")


def _stages(model: ModelSpec, chosen: Candidate) -> tuple[Stage, ...]:
    """The layers of each stage in order, as they were costed (Layout.num_model_chunks says which rank holds which)."""
    is_block = [isinstance(layer, Block) for layer in model.iter_layers()]
    options = [RECOMPUTES[option] for option in chosen.options]
    return tuple(_stage(first, options[first:end], is_block) for first, end in itertools.pairwise(chosen.boundaries))


def _stage(first: int, options: list[Recompute], is_block: list[bool]) -> Stage:
    """With one recompute for all its blocks where they do the same."""
    used = {option for idx, option in enumerate(options, first) if is_block[idx]}
    strongest = max(used, key=RECOMPUTES.index)
    each = tuple(options) if len(used) > 1 else ()
    return Stage(first_layer_idx=first, num_layers=len(options), recompute=strongest, layer_recompute=each)


def _notes(
    model: ModelSpec, cluster: ClusterSpec, workload: Workload, chosen: Candidate, fastest: Candidate
) -> tuple[str, ...]:
    notes, is_ours = [], workload.engine_facts.is_own_runtime
    if not is_ours:
        notes.append(f"for {workload.engine}: `meshwright apply` does not execute this plan")
    if chosen.idx != fastest.idx:
        slower = chosen.estimate.step_time_s / fastest.estimate.step_time_s - 1
        notes.append(
            f"{100 * slower:.1f} % slower than the fastest layout found, within the model's error, and simpler"
        )
    if chosen.order:
        notes.append("the order of passes was made for these stages and this memory (pipeline_order); it has no name")
    if cluster.is_mixed:
        notes.append(_note_on_parts(chosen))
    if cluster.profile is not None and cluster.profile.foreign_load_fraction > 0.2:
        load = 100 * cluster.profile.foreign_load_fraction
        notes.append(
            f"other work used {load:.0f} % of the cores while this machine was measured: its figures are too low"
        )
    notes += _note_on_measured(cluster, workload)
    if model.is_moe and workload.engine == "deepspeed":
        notes.append(
            "experts are split over tp only: DeepSpeed is planned without expert parallelism; fsdp2 and megatron have it"
        )
    if workload.seq_len > model.max_seq_len:
        notes.append(
            f"sequences of {workload.seq_len} are longer than the {model.max_seq_len} of the published configuration"
        )
    if not is_measured(cluster.weakest_device):
        notes.append(f"{cluster.weakest_device.name} is known from its data sheet only; its kernels were not measured")
    lacking = why_not_runnable(model, workload)
    if lacking and is_ours:
        notes.append("`meshwright apply` cannot train this model yet: " + "; ".join(lacking))
    return tuple(notes)


def _note_on_measured(cluster: ClusterSpec, workload: Workload) -> list[str]:
    """What of the estimate comes from the profile beside products, attention, layers and collectives."""
    terms = measured_terms(cluster, workload)
    return [f"from the profile: {'; '.join(terms)}"] if terms else []


def _note_on_parts(chosen: Candidate) -> str:
    """Which stages lie on which nodes of a mixed cluster."""
    if not chosen.part_of_stage:
        return "mixed cluster: the stages do not each lie on nodes of one kind; every rank is planned as the slowest and smallest"
    runs = itertools.groupby(enumerate(chosen.estimate.stages), key=lambda item: item[1].device)
    parts = [(device, [s for s, _ in stages]) for device, stages in runs]
    placed = ", ".join(f"{s[0]} to {s[-1]} on {device}" if len(s) > 1 else f"{s[0]} on {device}" for device, s in parts)
    return f"mixed cluster: stages {placed}; each stage is planned for its own devices and links"


def _provenance(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    fixed: Mapping[str, Any],
    *,
    runnable: bool,
    offload: OffloadRequest | None = None,
) -> PlanProvenance:
    inputs = [
        model.model_dump_json(),
        cluster.model_dump_json(),
        workload.model_dump_json(),
        repr(sorted(fixed.items())),
    ]
    return PlanProvenance(
        meshwright=version("meshwright"),
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        inputs_sha256=hashlib.sha256("\n".join(inputs).encode()).hexdigest(),
        fixed=format_assignments(fixed),
        space="runnable" if runnable else "full",
        offload=None if offload is None else offload.allowed,
    )
