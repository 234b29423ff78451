"""`meshwright plan`: the best layout for a model on a cluster, or the best batch for generating with it."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from ..schema.errors import ConfigError
from ..schema.task import Generation
from ..schema.units import GB
from .options import Mode, ModelArgument, command, option
from .plan_options import (
    ClusterOptions,
    CostOptions,
    GenerationOptions,
    OffloadOptions,
    PlannedStepOptions,
    PrecisionOptions,
    SearchOptions,
)
from .serving_options import ServingOptions
from .terminal import INTERRUPTED, progress_bar, search_progress, show_answer, stopping_on_interrupt

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..planner.request import Deadline
    from ..schema import ClusterSpec, GenerationPlan, Offer, Plan, ServingPlan, TrainingPlan


class PlanOptions(PrecisionOptions):
    """What is planned, and where the plan goes."""

    objective: Literal["throughput", "cost", "energy", "gpus", "latency"] = option(
        "throughput",
        "the fastest layout on the cluster; or, of all its sizes (and all offers), the one that takes the least money or energy "
        "for a token. With --serve: most tokens a second and device, least money, fewest devices (default where a rate is "
        "given), least latency.",
    )
    infer: bool = option(False, "plan generation instead of training: batch and places of weights and keys and values.")
    serve: bool = option(False, "plan a deployment that serves requests within limits on latency (docs/serving.md).")
    time_limit_s: float = option(60.0, "stop the search then, with the best so far.", ge=0.1, metavar="S")
    top: int = option(4, "runner-ups to report.", ge=0, le=50, metavar="K")
    rehearse: bool = option(
        False,
        "let every kind of rank go through a step before the answer (docs/rehearsal.md); where the choice does not run or fit, the "
        "first runner-up that does is taken.",
    )
    out: Path = option(Path("plan.json"), "where the plan is written.")
    as_json: bool = option(False, "JSON on stdout instead of a table.", name="--json")


_REGIONS = ("sync", "max_local_steps", "max_delay_steps")

_ALWAYS = (ClusterOptions, OffloadOptions, PlanOptions)
_TRAINING = (*_ALWAYS, PlannedStepOptions, SearchOptions)

SERVING = Mode(
    name="--serve",
    when=lambda values: values["serve"],
    takes=(*_ALWAYS, ServingOptions, SearchOptions, CostOptions),
    without=frozenset({
        "infer", "offload", "host_memory_gib", "nvme", "nvme_gib", "solver", "write_lp", "precision", "space", "prefer",
        "batch_tolerance", "pareto", "expert_load", "report", "trace", "explain_limit_s", "rehearse", "min_tokens_per_s",
        "tokens", "deadline_h", "mix",
    }),
    why="plans no training",
)  # fmt: skip
GENERATION = Mode(
    name="--infer",
    when=lambda values: values["infer"],
    takes=(*_ALWAYS, GenerationOptions),
    without=frozenset({"objective", "offload", "rehearse"}),
    why="plans no training",
)
COST = Mode(
    name="--objective cost",
    when=lambda values: values["objective"] == "cost",
    takes=(*_TRAINING, CostOptions),
    without=frozenset({"expert_load", "batch_tolerance", "rehearse", "lengths", "max_len", *_REGIONS}),
    why="is not for one cluster",
)
ENERGY = replace(COST, name="--objective energy", when=lambda values: values["objective"] == "energy")
LENGTHS = Mode(
    name="--lengths",
    when=lambda values: values["lengths"] is not None,
    takes=_TRAINING,
    without=frozenset({
        "seq_len", "batch_tolerance", "pareto", "expert_load", "rehearse", "offload", "host_memory_gib", "nvme", "nvme_gib",
        "tolerate", "mtbf_hours_per_device", "spares", *_REGIONS,
    }),
    why="has batches of many shapes",
)  # fmt: skip
TRAINING = Mode(takes=_TRAINING, without=frozenset({"max_len"}), fix="or plan generation: --infer --prompt-len N")


@command(SERVING, GENERATION, COST, ENERGY, LENGTHS, TRAINING)
def plan(
    model: ModelArgument,
    step: PlannedStepOptions | None,
    cluster: ClusterOptions,
    search: SearchOptions | None,
    cost: CostOptions | None,
    generation: GenerationOptions | None,
    serving: ServingOptions | None,
    offload: OffloadOptions,
    output: PlanOptions,
) -> None:
    """Find the fastest layout that fits, say why it won, and write plan.json. Needs no GPU.

    Ctrl-C ends the search with the best so far, which is shown and written; the exit code is then 130, so that no command chained
    after this one runs. Where nothing was found yet, nothing is written.

    With --infer the plan is for generating text: a batch, and where weights and keys and values lie (docs/inference.md). With
    --serve it is a deployment under load: engine instances, their layouts and limits, within limits on latency (docs/serving.md).

    With --engine the search is over what that engine executes, and the plan can be exported to it; `meshwright apply` runs plans
    of its own engine only.
    """
    from ..planner.request import Deadline
    from ..schema import TrainingPlan
    from ..schema.base import require_writable
    from .show.plan import plan_tables

    require_writable(output.out)
    deadline = Deadline(output.time_limit_s)
    if generation is not None:
        answer: Plan = _plan_generation(model, cluster, generation, offload, output, deadline)
    elif serving is not None:
        assert search is not None and cost is not None
        answer = _plan_serving(model, cluster, serving, search, cost, output, deadline)
    else:
        assert step is not None and search is not None
        answer = _plan_training(model, step, cluster, search, cost, offload, output, deadline)
        if step.tolerate:
            answer = _tolerant(answer, step, Deadline(output.time_limit_s, within=deadline))
    hint = f"it is an estimate: meshwright runs no {answer.task_name}"
    if serving is not None:
        hint = f"next: meshwright explain {output.out}, meshwright replay {output.out} --requests FILE"
    elif isinstance(answer, TrainingPlan):
        is_code = answer.model.code is not None
        script = " SCRIPT, which calls parallelize(model, plan)" if is_code else ""
        hint = f"next: meshwright apply {output.out}{script}"
        if answer.why_not_applied(is_user_model=is_code):
            from .show.next_step import instead_of_apply

            hint = instead_of_apply(answer, output.out)
        elif not cluster.profile and not str(cluster.cluster).startswith("local"):
            hint = f"next: meshwright explain {output.out}, and on the cluster meshwright apply {output.out}{script}"
    answer.save(output.out)
    show_answer(answer, *plan_tables(answer), as_json=output.as_json)
    if search is not None and (search.report is not None or search.trace is not None):
        from .page.document import write_report

        write_report(answer, search.report, search.trace, explain_limit_s=search.explain_limit_s)
    typer.echo(f"wrote {output.out}; {hint}" if "\n" not in hint else f"wrote {output.out}\n{hint}", err=True)
    if deadline.is_stopped:
        raise typer.Exit(INTERRUPTED)


def _plan_training(
    model: str,
    step: PlannedStepOptions,
    cluster: ClusterOptions,
    search: SearchOptions,
    cost: CostOptions | None,
    offload: OffloadOptions,
    output: PlanOptions,
    deadline: Deadline,
) -> TrainingPlan:
    """Return the fastest plan on the cluster, or with cost options the cheapest of the sizes of the cluster or the offers."""
    from ..planner import cheapest
    from ..planner import pareto as pareto_front
    from ..planner import plan as fastest
    from ..planner.expert_files import read_loads
    from ..planner.request import resolve_model
    from ..schema.layout import parse_assignments

    if output.objective in ("gpus", "latency"):
        raise ConfigError(f"--objective {output.objective} without --serve", help="add --serve, or use throughput")
    spec, fixed = resolve_model(model, step.seq_len, step.sample_batch), parse_assignments(search.fix)
    machine, offers = _machines(
        cluster, step, cost, lambda read: step.calibrated(read, spec, output.precision, search.engine)
    )
    deadline.restart()
    workload = step.workload(spec, machine, output.precision, search.engine)
    cluster.require_layers(machine, spec, workload)
    loads = None if search.expert_load is None else read_loads([search.expert_load])
    request: dict[str, Any] = {
        "fixed": fixed,
        "runnable": None if search.space is None else search.space == "runnable",
        "offload": offload.request(),
        "deadline": deadline,
        "prefer": search.prefer,
        "local_updates": step.sync_limits(),
    }
    with search_progress(quiet=output.as_json) as on_progress, stopping_on_interrupt(deadline):
        request["on_progress"] = on_progress
        if cost is not None:
            return cheapest(
                spec, offers, workload, objective=output.objective, front=search.pareto, top=output.top, mix=cost.mix,
                min_tokens_per_s=cost.min_tokens_per_s, tokens=cost.tokens,
                deadline_s=None if cost.deadline_h is None else 3600 * cost.deadline_h, **request,
            )  # fmt: skip
        answer = fastest(
            spec, machine, workload, top=output.top, expert_load=loads, batch_tolerance=search.tolerance, **request
        )
        if search.pareto:
            answer = answer.replace(pareto=pareto_front(spec, answer.cluster, answer.workload, **request))
    return _rehearsed(answer, request, top=output.top, quiet=output.as_json) if output.rehearse else answer


def _tolerant(answer: TrainingPlan, step: PlannedStepOptions, deadline: Deadline) -> TrainingPlan:
    """Return the plan, or one whose states are all held twice, whichever makes more tokens under faults, with its fallbacks."""
    from ..cost_models.goodput import RESTART_S, SAVE_S
    from ..planner import plan as fastest
    from ..planner.goodput import tolerant
    from ..schema import InfeasibleError
    from ..schema.goodput import Faults
    from ..schema.layout import parse_assignments
    from ..schema.shares import state_copies

    plans = [answer]
    if state_copies(answer) == 1:
        fixed = {**parse_assignments(answer.provenance.fixed), "dp_replicate": 2}
        with contextlib.suppress(InfeasibleError, ConfigError):
            plans.append(
                fastest(answer.model, answer.cluster, answer.workload, fixed=fixed, runnable=True, deadline=deadline)
            )
    faults = Faults(
        mtbf_hours_per_device=step.mtbf_hours_per_device, save_s=SAVE_S, restart_s=RESTART_S,
        tolerate=step.tolerate, spares=step.spares,
    )  # fmt: skip
    return tolerant(plans, faults, deadline)


def _rehearsed(answer: TrainingPlan, request: dict[str, Any], *, top: int, quiet: bool) -> TrainingPlan:
    """Return the plan, or the first runner-up that runs and fits where it is rehearsed, with a note on those that do not."""
    from ..planner import plan as fastest
    from ..planner.rehearse import first_that_runs
    from ..planner.request import Deadline

    def again(fields: dict[str, Any]) -> TrainingPlan:
        first = request["deadline"]
        options = {**request, "fixed": fields, "on_progress": None, "deadline": Deadline(first.limit_s, within=first)}
        return fastest(answer.model, answer.cluster, answer.workload, top=top, **options)  # type: ignore[return-value]

    with progress_bar("rehearsing", quiet=quiet) as bar:
        plan, reasons = first_that_runs(
            answer, again, progress=lambda done, total: bar.set(done / total, f"{done} of {total} kinds of ranks")
        )
    return plan.replace(notes=(*plan.notes, *(f"does not go through its rehearsal: {reason}" for reason in reasons)))


def _machines(
    cluster: ClusterOptions,
    step: PlannedStepOptions,
    cost: CostOptions | None,
    calibrated: Callable[[ClusterSpec], ClusterSpec],
) -> tuple[ClusterSpec, tuple[Offer, ...]]:
    """Return the cluster that decides the precision, and what can be rented: the offers of a file, or the cluster itself.

    Of several offers it is the first one whose best precision is one that all others have too.

    Raises:
        ConfigError: neither a cluster nor offers are given, or both, or the file does not hold offers with prices.
    """
    from ..planner import default_precision
    from ..schema.offers import Offer, offers_from_file

    if cost is None or cost.offers is None:
        if cost is not None and cluster.cluster is None and not cluster.profile:
            raise ConfigError(
                "cost and energy need --cluster or --offers: neither is given",
                help="for one kind of machine: --cluster 64xH100-SXM-80GB",
            )
        machine = calibrated(cluster.read())
        return machine, () if cost is None else (Offer.from_cluster(machine),)
    if cluster.profile:
        raise ConfigError("--profile is of one machine, not of offers of several", help="use --cluster")
    if cluster.cluster is not None:
        raise ConfigError("cost and energy need --cluster or --offers: both are given", help="leave out --cluster")
    if step.calibrate is not None:
        raise ConfigError("--calibrate corrects one cluster, not offers of several", help="use --cluster")
    offers, order = offers_from_file(str(cost.offers)), ("bf16-mixed", "fp16-mixed", "fp32")
    offers = tuple(offer.replace(cluster=offer.cluster.with_headroom(cluster.free_fraction)) for offer in offers)
    return max((offer.cluster for offer in offers), key=lambda each: order.index(default_precision(each))), offers


def _plan_generation(
    model: str, cluster: ClusterOptions, generation: GenerationOptions, offload: OffloadOptions, output: PlanOptions,
    deadline: Deadline,
) -> GenerationPlan:  # fmt: skip
    from ..planner import default_precision
    from ..planner import plan as most_tokens
    from ..schema import ModelSpec

    spec, machine = ModelSpec.resolve(model), cluster.read()
    deadline.restart()
    precision = (output.precision or default_precision(machine)).removesuffix("-mixed")
    if precision not in ("bf16", "fp16", "tf32", "fp32"):
        raise ConfigError(
            f"--precision {output.precision}: generation is planned in bf16, fp16, tf32 or fp32",
            help="use --precision bf16",
        )
    rates = {
        "host_attention_bytes_per_s": generation.host_attention_gb_per_s,
        "drive_attention_bytes_per_s": generation.storage_attention_gb_per_s,
    }
    allowed = offload.request(
        kinds="auto", **{name: None if rate is None else rate * GB for name, rate in rates.items()}
    )
    task = Generation(
        prompt_len=generation.prompt_len, generate_len=generation.generate_len, precision=precision,
        across_nodes=generation.across_nodes,
    )  # fmt: skip
    fields = {"batch_size": generation.batch_size, "tp": generation.tp}
    fixed = {name: value for name, value in fields.items() if value is not None}
    limit_s = generation.latency_limit_s
    with stopping_on_interrupt(deadline):
        return most_tokens(
            spec,
            machine,
            task,
            top=output.top,
            fixed=fixed,
            offload=allowed,
            latency_limit_s=limit_s,
            deadline=deadline,
        )


def _plan_serving(
    model: str,
    cluster: ClusterOptions,
    serving: ServingOptions,
    search: SearchOptions,
    cost: CostOptions,
    output: PlanOptions,
    deadline: Deadline,
) -> ServingPlan:
    from ..planner import plan as best_deployment
    from ..schema import ModelSpec
    from ..schema.layout import parse_assignments

    if output.objective == "energy":
        raise ConfigError("--objective energy with --serve", help="use throughput, gpus, cost or latency")
    if cost.offers is not None:
        from ..planner.serving.mix import cluster_of_offers
        from ..schema.offers import offers_from_file

        if cluster.cluster is not None or cluster.profile:
            raise ConfigError("--offers and a cluster are given", help="leave out --cluster and --profile")
        machine = cluster_of_offers(offers_from_file(str(cost.offers)))
    else:
        machine = cluster.read()
    deadline.restart()
    # On a machine without GPUs it is our own engine that `meshwright serve` runs.
    engine = search.engine or ("meshwright" if machine.weakest_device.backend.is_host else "vllm")
    task = serving.task(engine, None if output.objective == "throughput" else output.objective)
    with search_progress(quiet=output.as_json) as on_progress, stopping_on_interrupt(deadline):
        return best_deployment(
            ModelSpec.resolve(model), machine, task, top=output.top, fixed=parse_assignments(search.fix, task.fixable),
            deadline=deadline, on_progress=on_progress,
        )  # fmt: skip
