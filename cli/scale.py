"""`meshwright scale`: how many machines a training holds over time, on demand and of a spot pool."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import JsonOption, OptionModel, TimeLimitOption, command, option
from .terminal import Table, headed_table, show_answer

if TYPE_CHECKING:
    from ..schema.machines_file import Change
    from ..schema.scaling import ScalePolicy


class ScaleOptions(OptionModel):
    """What is to be done by when, with which machines."""

    offers: Path = option(
        ..., "TOML file of offers of the plan's nodes (docs/cluster.md): on demand, and one of spot nodes."
    )
    tokens: float = option(..., "of the training, e.g. 1e11.", ge=1, le=1e18, metavar="N")
    deadline_h: float = option(..., "hours from the start to the deadline.", ge=1e-3, le=1e5, metavar="H")
    trace: Path | None = option(
        None, "recording of the spot pool: [trace,] time_s, available. Default: the offer's losses."
    )
    pool: str | None = option(None, "of a recording with several pools: which.", metavar="NAME")
    save_s: float = option(30.0, "seconds that a checkpoint stops the training.", ge=1e-3, le=1e6, metavar="S")
    restart_s: float = option(300.0, "seconds of a start where no machine is left.", ge=1e-3, le=1e6, metavar="S")


@command()
def scale(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="a plan.json of training, on the most machines.")],
    options: ScaleOptions,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the policy is written, for `apply --scale`.")
    ] = None,
    time_limit_s: TimeLimitOption = 60.0,
    json: JsonOption = False,
) -> None:
    """Say how many machines to hold on demand and of a spot pool, by what the pool has, the work and the time that are left.

    With a recording the policy of its first half is compared with simpler rules from starts in the second.
    """
    from ..planner.request import Deadline
    from ..planner.scaling import scale as make_policy
    from ..planner.spot import Costs
    from ..schema import ConfigError, Plan, TrainingPlan
    from ..schema.offers import offers_from_file

    document = Plan.load(plan)
    if not isinstance(document, TrainingPlan):
        raise ConfigError(f"{plan} is a plan for {document.task_name}; one for training is needed")
    policy = make_policy(
        document,
        offers_from_file(str(options.offers)),
        tokens=options.tokens,
        deadline_s=options.deadline_h * 3600,
        costs=Costs(save_s=options.save_s, restart_s=options.restart_s),
        recording=_recording(options),
        deadline=Deadline(time_limit_s),
    )
    if out is not None:
        policy.save(out)
    show_answer(policy, *_tables(policy), as_json=json)
    if not json:
        typer.echo(f"next: meshwright apply {plan} --scale {out or 'POLICY (--out)'} --on-fault continue", err=True)


def _recording(options: ScaleOptions) -> tuple[str, tuple[Change, ...]] | None:
    from ..schema import ConfigError
    from ..schema.machines_file import read_pools

    if options.trace is None:
        if options.pool is not None:
            raise ConfigError("--pool is one of a --trace")
        return None
    pools = read_pools(options.trace)
    name = options.pool or next(iter(pools))
    if name not in pools or (options.pool is None and len(pools) > 1):
        raise ConfigError(f"{options.trace} has the pools {', '.join(sorted(pools))}", help="choose one with --pool")
    return name, pools[name]


def _tables(policy: ScalePolicy) -> list[Table]:
    from ..planner.scaling import solved
    from ..schema.units import format_count, format_percent
    from .markup import plain

    decisions = solved(policy)
    data = decisions.instance
    gap = (policy.expected_usd - policy.bound_usd) / policy.expected_usd if policy.expected_usd else 0.0
    title = (
        f"{format_count(policy.tokens)} tokens within {policy.deadline_s / 3600:.3g} h: {policy.expected_usd:.2f} USD expected, "
        f"{100 * gap:.1f} % above what no policy is below"
    )
    moments = [(0.0, 1.0), (0.5, 0.5), (0.5, 0.9), (0.9, 0.1)]
    columns = [f"{100 * gone:.0f} % of time, {100 * remaining:.0f} % of work left" for gone, remaining in moments]
    table = headed_table(title, "pool has", *columns, text=("pool has", *columns))
    for available in range(len(data.move)):
        cells = []
        for gone, remaining in moments:
            h = decisions.decide(gone * policy.deadline_s, remaining * policy.tokens, available, 0)
            spot, demand = data.machines(h, available)
            cells.append(f"{spot} spot, {demand} on demand")
        table.add_row(str(available), *cells)
    tables = [table]
    if policy.replay is not None:
        title = f"{plain(policy.replay.pool)}, {policy.replay.starts} starts in its second half"
        replayed = headed_table(title, "rule", "in time", "USD", "to hindsight", text=("rule",))
        for entry in policy.replay.rules:
            replayed.add_row(entry.rule, format_percent(entry.met, 1), f"{entry.usd:.2f}", f"{entry.to_hindsight:.2f}")
        tables.append(replayed)
    return tables
