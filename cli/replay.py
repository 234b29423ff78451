"""`meshwright replay`: a serving plan under recorded requests, a training plan on machines that come and go."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..schema.errors import ConfigError
from ..schema.units import format_percent, format_seconds
from .options import JsonOption, OptionModel, TimeLimitOption, command, option
from .terminal import Table, headed_table, show_answer

if TYPE_CHECKING:
    from ..planner.request import Deadline
    from ..planner.serving.replay import Replay
    from ..planner.spot import Costs
    from ..schema.serving_plan import ServingPlan
    from ..schema.training_plan import TrainingPlan


class MachineOptions(OptionModel):
    """What faults cost a training that is replayed over machines that come and go."""

    save_s: float = option(30.0, "of training: seconds that a checkpoint stops it.", ge=1e-3, le=1e6, metavar="S")
    restart_s: float = option(300.0, "of training: seconds of a restart.", ge=1e-3, le=1e6, metavar="S")
    notice_s: float = option(
        30.0, "of training: how long before it goes a machine says so (AWS: 120; Azure, Google: 30).", ge=0, le=1e6, metavar="S"
    )  # fmt: skip
    usd_per_hour: float | None = option(None, "of training: price of a machine.", ge=0, le=1e6, metavar="USD")


@command()
def replay(
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN", help="A plan of `meshwright plan`, of serving or of training.")
    ],
    machines: MachineOptions,
    requests: Annotated[
        str | None,
        typer.Option(
            metavar="LOAD",
            help="Of serving: recorded requests, a csv with arrival_s, prompt_tokens, output_tokens; or a load as `plan` takes it: "
            "isl=1024,osl=128,rate=5.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE.csv", help="Of training: machines over time: [trace,] time_s, available."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(metavar="X", help="Requests a second instead of the load's.", min=1e-6, max=1e9),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(metavar="N", help="Keep N requests in flight instead.", min=1, max=10**6)
    ] = None,
    time_limit_s: TimeLimitOption = 60.0,
    json: JsonOption = False,
) -> None:
    """Serve other requests with a plan, in simulation: percentiles, limits, queue and cache of every instance. Needs no GPU.

    A plan of training is replayed over a recording of machines that come and go (--trace): what part of their time each policy
    keeps, waiting for all of them, restarting on what is left, or going on, and what no policy exceeds.
    """
    from ..planner.request import Deadline
    from ..planner.serving.replay import replay as replay_requests
    from ..planner.spot import Costs
    from ..schema.plan import Plan
    from ..schema.requests_file import is_stated, parse_requests, read_trace
    from ..schema.serving_plan import ServingPlan
    from ..schema.training_plan import TrainingPlan

    if rate is not None and concurrency is not None:
        raise ConfigError("--rate (requests arrive) and --concurrency (requests in flight) exclude each other")
    document = Plan.load(plan)
    if isinstance(document, TrainingPlan) and trace is not None and requests is None:
        costs = Costs(
            save_s=machines.save_s, restart_s=machines.restart_s, notice_s=machines.notice_s,
            usd_per_unit_hour=machines.usd_per_hour,
        )  # fmt: skip
        _replay_machines(document, trace, costs, Deadline(time_limit_s), as_json=json)
        return
    if not isinstance(document, ServingPlan) or requests is None or trace is not None:
        if isinstance(document, ServingPlan | TrainingPlan):
            needed = "--requests" if isinstance(document, ServingPlan) else "--trace"
            raise ConfigError(f"{plan} is a plan for {document.task_name}: it is replayed with {needed} alone")
        raise ConfigError(
            f"{plan} is a plan for {document.task_name}, not for serving", help="make one: meshwright plan --serve"
        )
    if is_stated(requests):
        stated = parse_requests(requests, rate=rate, concurrency=concurrency)
        if stated.rate is None and stated.concurrency is None:
            raise ConfigError(f"--requests {requests}: how many", help="add rate=R or concurrency=N")
        answer = replay_requests(document, stated)
    else:
        answer = replay_requests(document, read_trace(requests), rate=rate, concurrency=concurrency)
    show_answer(answer, _latencies(answer), _instances(answer, document), as_json=json)
    if not json:
        typer.echo(f"next: meshwright explain {plan}", err=True)


def _latencies(answer: Replay) -> Table:
    title = (
        f"{answer.num_requests} requests in {format_seconds(answer.duration_s)}: {answer.requests_per_s:.3g} requests/s, "
        f"{answer.output_tokens_per_s:,.0f} tokens/s generated, {answer.mean_in_flight:,.1f} in flight, "
        f"{answer.preemptions} preempted"
    )
    table = headed_table(title, "", "mean", "p50", "p90", "p99", "longest", "limit", "within")
    limits = {entry.limit.metric: entry for entry in answer.limits}
    for metric, entry in answer.latencies.items():
        limit = limits.get(metric)  # type: ignore[call-overload]
        words = ("", "")
        if limit is not None:
            words = (
                f"{format_seconds(limit.limit.seconds)} at p{100 * limit.limit.quantile:g}",
                format_percent(limit.within),
            )
        seconds = (entry.mean_s, entry.p50_s, entry.p90_s, entry.p99_s, entry.max_s)
        table.add_row(metric, *map(format_seconds, seconds), *words)
    return table


def _instances(answer: Replay, plan: ServingPlan) -> Table:
    table = headed_table(
        "engine instances, averaged over the time", "pool", "instance", "steps", "busy", "running", "waiting", "most",
        "cache", "most", "prompt tokens", "decoded", text=("pool",),
    )  # fmt: skip
    for entry in answer.instances:
        table.add_row(
            plan.pools[entry.pool].role, str(entry.instance), str(entry.steps), format_percent(entry.utilisation),
            f"{entry.running:.1f}", f"{entry.waiting:.1f}", str(entry.max_waiting), format_percent(entry.cache_use),
            format_percent(entry.max_cache_use), str(entry.prompt_tokens), str(entry.output_tokens),
        )  # fmt: skip
    return table


def _replay_machines(plan: TrainingPlan, trace: Path, costs: Costs, deadline: Deadline, *, as_json: bool) -> None:
    from ..planner.fallbacks import num_units
    from ..planner.spot import plans_by_units, replay_pool
    from ..schema.goodput import MachinesReplay
    from ..schema.machines_file import read_pools
    from .markup import plain

    pools, units = read_pools(trace), num_units(plan.cluster)
    plans = plans_by_units(
        plan, sorted({change.available for changes in pools.values() for change in changes}), deadline
    )
    answer = MachinesReplay(
        num_units=units,
        pools=tuple(replay_pool(plan, plans, name, changes, costs) for name, changes in pools.items()),
    )
    table = headed_table(
        f"{plan.model.name} on up to {units} machines: part of what they could do that is kept", "pool", "machines",
        "lost", "policy", "kept", "most of the rest", "running", "USD per million tokens",
        text=("pool", "policy", "most of the rest"),
    )  # fmt: skip
    for pool in answer.pools:
        for entry in pool.policies:
            causes = sorted(entry.lost.items(), key=lambda item: -item[1])[:2]
            rest = ", ".join(f"{cause} {format_percent(part, 1)}" for cause, part in causes if part > 0)
            usd = "" if entry.usd_per_million_tokens is None else f"{entry.usd_per_million_tokens:.3g}"
            table.add_row(
                plain(pool.pool), f"{pool.mean_units:.1f}", str(pool.losses), entry.policy, format_percent(entry.fraction, 1), rest,
                format_seconds(entry.running_s), usd,
            )  # fmt: skip
        table.add_row(plain(pool.pool), "", "", "at most", format_percent(pool.bound, 1), "restarts alone", "", "")
    show_answer(answer, table, as_json=as_json)
