"""`meshwright goodput`: how often to save a plan's training, and what faults leave of its speed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..schema.goodput import Faults
from .options import JsonOption, OptionModel, TimeLimitOption, command, option
from .terminal import Table, figures_table, headed_table, show_answer

if TYPE_CHECKING:
    from ..schema import TrainingPlan
    from ..schema.goodput import GoodputReport


class FaultOptions(OptionModel):
    """Faults, and what they take."""

    mirrors = Faults

    mtbf_hours_per_device: float = option(..., "mean hours between faults of one device.", ge=1e-6, metavar="H")
    save_s: float = option(..., "seconds that a checkpoint stops the training.", ge=1e-6, metavar="S")
    restart_s: float = option(..., "seconds from a fault to the first step after it.", ge=1e-6, metavar="S")
    repair_hours: float = option(24.0, "until a lost node is back.", ge=1e-6, metavar="H")
    tolerate: int = option(0, "lost nodes (devices of a single node) for which to plan what remains.", ge=0, le=64)
    spares: int = option(0, "nodes that stand by besides those of the plan.", ge=0, le=10_000)


@command()
def goodput(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="a plan.json of training.")],
    faults: FaultOptions,
    time_limit_s: TimeLimitOption = 60.0,
    json: JsonOption = False,
) -> None:
    """Say how often to save a training and what part of the time makes progress under faults, by policy.

    With --tolerate also the plans for what remains, which `apply --replan` uses after a loss.
    """
    from ..planner.goodput import expected_goodput
    from ..planner.request import Deadline
    from ..schema import ConfigError, Plan, TrainingPlan

    answer = Plan.load(plan)
    if not isinstance(answer, TrainingPlan):
        raise ConfigError(f"{plan} is a plan for {answer.task_name}; one for training is needed")
    report = expected_goodput(
        answer,
        Faults(
            mtbf_hours_per_device=faults.mtbf_hours_per_device,
            save_s=faults.save_s,
            restart_s=faults.restart_s,
            repair_hours=faults.repair_hours,
            tolerate=faults.tolerate,
            spares=faults.spares,
        ),
        Deadline(time_limit_s),
    )
    show_answer(report, *_tables(answer, report), as_json=json)
    typer.echo(
        f"next: meshwright apply {plan} --checkpoint-dir DIR --checkpoint-every {report.interval_steps}", err=True
    )


def _tables(plan: TrainingPlan, report: GoodputReport) -> list[Table]:
    from ..schema.units import format_count, format_percent, format_seconds
    from .markup import plain

    table = figures_table(f"{plan.model.name} on {plan.cluster.name}", 1)
    interval = format_seconds(report.interval_s)
    table.add_row("between faults of the job", format_seconds(report.mtbf_s), "")
    table.add_row("work between checkpoints", interval, f"--checkpoint-every {report.interval_steps}")
    tokens = f"{format_count(report.tokens_per_day)} tokens a day"
    table.add_row("goodput, lost units replaced at once", format_percent(report.goodput, 2), tokens)
    table.add_row("a second less for a save", f"+ {format_percent(report.second_of_save, 3)}", "")
    table.add_row("a second less for a restart", f"+ {format_percent(report.second_of_restart, 4)}", "")
    table.add_row("a tenth fewer faults", f"+ {format_percent(report.tenth_of_faults, 3)}", "")
    table.add_row("goodput, waiting for repairs", format_percent(report.waiting, 2), "")
    if report.falling_back is not None:
        table.add_row("goodput, on what remains", format_percent(report.falling_back, 2), plain(report.not_tolerated))
    if report.going_on is not None:
        table.add_row("goodput, going on at once", format_percent(report.going_on, 2), "--on-fault continue")
    tables = [table]
    if report.fallbacks:
        remains = headed_table(
            "what remains; re-routed: micro-batches of the lost stage on its peers, which apply does not run",
            "lost", "devices", "layout", "step", "of the time", "re-routed", "is better up to", text=("layout",),
        )  # fmt: skip
        for entry in report.fallbacks:
            share = format_percent(entry.share_of_time, 2)
            rerouted = up_to = ""
            if entry.rerouted_step_s is not None:
                rerouted, up_to = format_seconds(entry.rerouted_step_s), "any outage"
            if entry.rerouted_up_to_s is not None:
                up_to = format_seconds(entry.rerouted_up_to_s)
            remains.add_row(
                str(entry.lost),
                str(entry.num_devices),
                entry.layout,
                format_seconds(entry.step_s),
                share,
                rerouted,
                up_to,
            )
        tables.append(remains)
    return tables
