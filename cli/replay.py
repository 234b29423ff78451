"""`meshwright replay`: a serving plan under recorded requests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..schema.errors import ConfigError
from ..schema.units import format_percent, format_seconds
from .options import JsonOption, command
from .terminal import Table, headed_table, show_answer

if TYPE_CHECKING:
    from ..planner.serving.replay import Replay
    from ..schema.serving_plan import ServingPlan


@command()
def replay(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan of `meshwright plan --serve`.")],
    requests: Annotated[
        Path, typer.Option(metavar="FILE.csv", help="Recorded requests: arrival_s, prompt_tokens, output_tokens.")
    ],
    rate: Annotated[
        float | None,
        typer.Option(metavar="X", help="Requests a second instead of the recorded rate.", min=1e-6, max=1e9),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(metavar="N", help="Keep N requests in flight instead.", min=1, max=10**6)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Serve recorded requests with a plan, in simulation: percentiles, limits, queue and cache of every instance. Needs no GPU."""
    from ..planner.serving.replay import replay as replay_requests
    from ..schema.plan import Plan
    from ..schema.requests_file import read_trace
    from ..schema.serving_plan import ServingPlan

    if rate is not None and concurrency is not None:
        raise ConfigError("--rate (requests arrive) and --concurrency (requests in flight) exclude each other")
    document = Plan.load(plan)
    if not isinstance(document, ServingPlan):
        raise ConfigError(
            f"{plan} is a plan for {document.task_name}, not for serving", help="make one: meshwright plan --serve"
        )
    answer = replay_requests(document, read_trace(requests), rate=rate, concurrency=concurrency)
    show_answer(answer, _latencies(answer), _instances(answer, document), as_json=json)
    if not json:
        typer.echo(f"next: meshwright explain {plan}", err=True)


def _latencies(answer: Replay) -> Table:
    title = (
        f"{answer.num_requests} requests in {format_seconds(answer.duration_s)}: {answer.requests_per_s:.3g} requests/s, "
        f"{answer.output_tokens_per_s:,.0f} tokens/s generated, {answer.mean_in_flight:.3g} in flight, "
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
