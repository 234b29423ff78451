"""`plan` and `estimate`: model + cluster + task -> Plan, in the order in which it happens.

PlanRequest (request.py): what is asked; its task says who answers (PLANNERS). For training:
build_space (space.py): every layout that the rules allow, by groups of degrees.
search (search.py): the layouts in the order of their bounds, each cut into stages (expand.py).
choose (choice.py): the simplest of the layouts that may be as fast as the fastest one.
plan_layout (tasks/training.py): the plan of it, with its runner-ups and its notes.
search_offload (tasks/offload.py), where offload is allowed: layouts with a schedule, where that is faster or nothing else fits.
For generation: search_generation (tasks/generation.py) and build_generation_plan (generation/answer.py).
For serving: search_serving (tasks/serving.py) over instances (serving/space.py) and families (serving/families.py), each finalist
simulated (serving/checks.py), and build_serving_plan (serving/answer.py).
For post-training: search_post_training (tasks/post_training.py) over pools, the layouts of each by the searches above, and
build_rl_plan (post_training/answer.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Unpack, overload

from ..schema import (
    ClusterSpec,
    ConfigError,
    Generation,
    GenerationPlan,
    InfeasibleError,
    Layout,
    ModelSpec,
    Plan,
    RlPlan,
    RlWorkload,
    Serving,
    ServingPlan,
    TrainingEstimate,
    TrainingPlan,
    Workload,
)
from ..schema.layout_rules import ENGINE_RULES, VERSION_RULES, broken_rules, problem_on, require_valid
from ..schema.task import Task
from .expand import expand_layout
from .experts import with_experts_placed, with_imbalance
from .explain.infeasible import explain_infeasible, explain_no_batch
from .request import ClusterInput, ModelInput, OffloadRequest, PlanRequest, RequestOptions, read_inputs
from .search import SearchResult
from .tasks.generation import search_generation
from .tasks.offload import Effort, OffloadResult, plan_schedule, schedule_layout, search_offload
from .tasks.training import WORTH_MOVING, plan_layout, search_layouts


@overload
def plan(
    model: ModelInput, cluster: ClusterInput, task: Workload, *, top: int = 4, expert_load: Any = None,
    **options: Unpack[RequestOptions],
) -> TrainingPlan: ...  # fmt: skip
@overload
def plan(
    model: ModelInput, cluster: ClusterInput, task: Generation, *, top: int = 4, **options: Unpack[RequestOptions]
) -> GenerationPlan: ...
@overload
def plan(
    model: ModelInput, cluster: ClusterInput, task: Serving, *, top: int = 4, **options: Unpack[RequestOptions]
) -> ServingPlan: ...
@overload
def plan(
    model: ModelInput, cluster: ClusterInput, task: RlWorkload, *, top: int = 4, **options: Unpack[RequestOptions]
) -> RlPlan: ...
@overload
def plan(
    model: ModelInput, cluster: ClusterInput, *, global_batch_size: int, seq_len: int, **options: Any
) -> TrainingPlan: ...
@overload
def plan(
    model: ModelInput, cluster: ClusterInput, *, prompt_len: int, generate_len: int, **options: Any
) -> GenerationPlan: ...
def plan(
    model: ModelInput,
    cluster: ClusterInput,
    task: Task | None = None,
    *,
    top: int = 4,
    expert_load: Any = None,
    **options: Any,
) -> Plan:
    """Return the best plan that fits, with a certificate and its runner-ups.

    Args:
        model, cluster: as objects or as one types them for the command line: ``"llama-3.1-8b"``, ``"64xH100-SXM-80GB"``.
        task: a Workload is trained as fast as possible, a Generation generates as many tokens a second as possible, a Serving
            serves a load within limits on latency, an RlWorkload is post-trained as fast as possible; without one its fields
            stand among the options: ``global_batch_size=1024, seq_len=8192`` or ``prompt_len=512, generate_len=128``.
        top: runner-ups to report.
        expert_load: of training: tokens of each expert [layers with experts, experts], several workloads in front; what their
            imbalance costs enters the choice of ep, and the plan says where experts stand.
        options: ``fixed``: fields that the search must keep, e.g. ``{"tp": 8}``; ``runnable``: only layouts that
            `meshwright apply` executes; ``time_limit_s``; ``offload``: what may lie on the host (docs/offload.md), without it
            nothing; the others are those of `PlanRequest.create`.

    Raises:
        ConfigError: the input rules out every plan (a degree that does not divide, a precision the device lacks).
        InfeasibleError: plans exist, but none fits the memory; names what binds and the smallest change that fits.
        SolverLimitError: the time limit came before any plan that fits.
    """
    model, cluster, task, options = read_inputs(model, cluster, task, options)
    if expert_load is None:
        return plan_request(PlanRequest.create(model, cluster, task, **options), top=top)
    if not isinstance(task, Workload):
        raise ConfigError("loads of experts are read for training only", help="leave out expert_load")
    workload = with_imbalance(model, cluster, task, expert_load)
    answer = plan_training(PlanRequest.create(model, cluster, workload, **options), top=top)
    return with_experts_placed(answer, expert_load)


def plan_request(request: PlanRequest, *, top: int = 4) -> Plan:
    """Return the plan that answers a request; raises like `plan`."""
    return PLANNERS[type(request.task)](request, top=top)


def plan_training(request: PlanRequest, *, top: int = 4) -> TrainingPlan:
    """Return the plan of what was asked, or of fewer devices or another batch where that is faster (planner/variants.py)."""
    if request.local_updates is not None:
        from .regions import plan_regions

        return plan_regions(request, top=top, plan_one=plan_as_requested, plan_on_pools=plan_on_pools)
    if request.workload.lengths is not None:
        from .lengths import plan_lengths

        return plan_lengths(request, top=top)
    answer: TrainingPlan | ConfigError | InfeasibleError
    try:
        answer = plan_as_requested(request, top=top)
    except (ConfigError, InfeasibleError) as error:
        answer = error
    if _is_settled(request, answer):
        if isinstance(answer, TrainingPlan):
            return answer
        raise answer
    from .variants import best_variant

    return best_variant(request, answer, lambda variant, worse_than_s: _plan_faster(variant, worse_than_s, top=top))


FULL_NODE = 8
"""Devices that the axes of a model can share where their number is a multiple of it."""


def _is_settled(request: PlanRequest, answer: TrainingPlan | ConfigError | InfeasibleError) -> bool:
    """Return whether fewer devices or another batch are not worth looking at: the devices divide well, and the batch under what is
    taken or under the fastest layout, which loses nothing to uneven shares.
    """
    devices, cluster = request.cluster.num_devices, request.cluster
    if request.batch_tolerance or len(cluster.groups) > 1:
        return not request.batch_tolerance
    is_power_of_two = devices & (devices - 1) == 0
    if not isinstance(answer, TrainingPlan):
        return is_power_of_two
    takes_uneven = request.workload.engine_facts.takes_uneven_shares
    if not is_power_of_two and not (takes_uneven and devices % FULL_NODE == 0):
        return False
    fastest = answer.layout if answer.fastest is None else answer.fastest.layout
    return answer.is_even or answer.workload.global_batch_size % (fastest.dp * fastest.micro_batch_size) == 0


def _plan_faster(request: PlanRequest, worse_than_s: float, *, top: int) -> TrainingPlan | None:
    """Return the plan of a variant; None where no layout is faster than ``worse_than_s``, with which its search begins."""
    if request.cluster.is_mixed or request.offload is not None or math.isinf(worse_than_s):
        return plan_as_requested(request, top=top)
    result = search_layouts(request, worse_than_s=worse_than_s)
    if not result.feasible or result.feasible[0].step_time_s >= worse_than_s:
        return None
    result.add_runner_ups(top, request.deadline)
    return plan_layout(request, result, top=top)


def plan_as_requested(request: PlanRequest, *, top: int = 4) -> TrainingPlan:
    """Return the layout that is taken of those that fit: without offload, or with it where that is faster or nothing else fits."""
    if request.cluster.is_mixed and request.offload is None:
        answer, result = plan_on_pools(request, top=top)
        if answer is None:
            raise explain_infeasible(request, result)
        return answer
    result = search_layouts(request, runner_ups=top)
    plain = plan_layout(request, result, top=top) if result.feasible else None
    if request.offload is None:
        if plain is None:
            raise explain_infeasible(request, result)
        return plain
    slowest_s = result.feasible[0].step_time_s if result.feasible else math.inf
    try:
        offloaded = search_offload(request, worse_than_s=slowest_s, runner_ups=top)
    except InfeasibleError:
        if plain is None:
            raise
        offloaded = None
    if offloaded is not None and offloaded.estimate.step_time_s < slowest_s * (1 - WORTH_MOVING):
        return plan_schedule(request, offloaded, result if plain is not None else None, top=top)
    assert plain is not None
    return plain.replace(notes=(*plain.notes, "no offload schedule that was found is faster"))


def plan_on_pools(request: PlanRequest, *, top: int, **limits: Any) -> tuple[TrainingPlan | None, SearchResult]:
    """Return the plan of the device pools that are used of a mixed cluster, and what was found; ``limits`` are those of
    `search_device_pools`, within which there may be none.
    """
    from .device_groups import notes_on_left_out, search_device_pools

    request, result, left_out = search_device_pools(request, runner_ups=top, **limits)
    if not result.feasible:
        return None, result
    answer = plan_layout(request, result, top=top)
    notes = (*answer.notes, *notes_on_left_out(left_out, answer.estimate))
    return answer.replace(left_out=left_out, notes=notes), result


def plan_generation(request: PlanRequest, *, top: int) -> GenerationPlan:
    """Return the batch and placement that generate the most tokens a second, or the most within a latency."""
    from .generation.answer import build_generation_plan

    problem, answer = search_generation(request)
    if not problem.solved:
        raise explain_no_batch(problem, answer, request.deadline)
    return build_generation_plan(request, problem, answer, top=top)


def plan_serving(request: PlanRequest, *, top: int) -> ServingPlan:
    """Return the deployment that serves a load best within its limits on latency."""
    from .explain.serving import explain_unserved
    from .serving.answer import build_serving_plan
    from .tasks.serving import search_serving

    search = search_serving(request)
    if search.answer.best is None:
        raise explain_unserved(request, search)
    return build_serving_plan(request, search, top=top)


def plan_post_training(request: PlanRequest, *, top: int) -> RlPlan:
    """Return the pools and layouts with the shortest step of post-training."""
    from .post_training.answer import build_rl_plan
    from .tasks.post_training import search_post_training

    return build_rl_plan(request, search_post_training(request), top=top)


def plan_rl(workload: RlWorkload, cluster: ClusterInput, *, top: int = 4, **options: Unpack[RequestOptions]) -> RlPlan:
    """Return the post-training plan of a workload, which has its models: `plan` of the actor."""
    return plan(workload.model_of("actor"), cluster, workload, top=top, **options)


PLANNERS: dict[type[Task], Callable[..., Plan]] = {
    Workload: plan_training,
    Generation: plan_generation,
    Serving: plan_serving,
    RlWorkload: plan_post_training,
}
"""What answers a request, by its task."""


def estimate(
    model: ModelInput,
    cluster: ClusterInput,
    workload: Workload | None = None,
    layout: Layout | str = "",
    *,
    offload: OffloadRequest | None = None,
    **fields: Any,
) -> TrainingEstimate:
    """Return what one given layout costs; its layers are cut into stages as evenly as memory allows. Under mixed recompute each
    block does what is best for the step.

    Inputs are as of `plan`, the layout an object or text: ``"tp=8,dp_shard=8"``.
    Layouts that other engines execute and our runtime does not (`not_executed` says why) have an estimate too. One whose offload is
    scheduled has its best schedule within what ``offload`` says (unset: all that the cluster has).

    Raises:
        ConfigError: the layout breaks a rule that holds for any engine; every broken one is named.
        InfeasibleError: its offload is scheduled and no schedule fits.
    """
    model, cluster, task, unknown = read_inputs(model, cluster, workload, fields)
    if unknown or not isinstance(task, Workload):
        raise ConfigError(f"an estimate is of training and takes no {', '.join(unknown) or type(task).__name__}")
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    return estimate_with_schedule(PlanRequest(model, cluster, task, offload=offload), layout)[0]


def estimate_with_schedule(
    request: PlanRequest, layout: Layout, *, effort: Effort = "exact", as_listed: bool = False
) -> tuple[TrainingEstimate, OffloadResult | None]:
    """Return the estimate of a layout and, where its offload is scheduled, its schedule; raises like `estimate`.

    Args:
        as_listed: ranks are on the nodes in the order of the cluster's file; else in the best order found where that matters.
    """
    model, cluster, workload = request.model, request.cluster, request.workload
    require_valid(
        model,
        workload,
        layout,
        world_size=cluster.num_devices,
        scaleup_domain=cluster.scaleup_domain,
        rules=ENGINE_RULES,
    )
    if workload.lengths is not None:
        from .lengths import estimate_lengths

        return estimate_lengths(request, layout), None
    if layout.offload == "scheduled":
        result = schedule_layout(request, layout, effort=effort)
        return result.estimate, result
    return expand_layout(request, layout, as_listed=as_listed).estimate, None


def not_executed(model: ModelSpec, cluster: ClusterSpec, workload: Workload, layout: Layout) -> tuple[str, ...]:
    """Return why `apply` of this version does not execute a layout that `estimate` can cost; empty when it does."""
    engine, problem = workload.engine_facts, problem_on(model, workload, cluster)
    broken = broken_rules(layout, problem, (engine.rules or ()) + (VERSION_RULES if engine.is_own_runtime else ()))
    return broken if engine.is_own_runtime else (*broken, f"it is costed for {workload.engine}")
