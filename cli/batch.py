"""`meshwright batch`: which ranks compute which sequences of a batch of unequal lengths."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import JsonOption, OptionModel, command, option
from .terminal import Table, headed_table, show

if TYPE_CHECKING:
    from ..solvers.batch_groups import BatchInstance, BatchSchedule

_MAX_ROWS = 40


class BatchOptions(OptionModel):
    """The batch of a plan."""

    lengths: Path | None = option(
        None, "tokens of each sequence, one in each line (.gz is read too); of a plan.", metavar="FILE"
    )
    plot: Path | None = option(
        None, "a picture: ranks against seconds, a colour for each size of group.", metavar="FILE.png"
    )


@command()
def batch(
    plan: Annotated[str, typer.Argument(metavar="PLAN|BATCH", help="a plan.json, or batches with their own costs.")],
    options: BatchOptions,
    json: JsonOption = False,
) -> None:
    """Schedule one batch of unequal lengths: its micro-batches, the groups of ranks in each and their sequences, with a bound.

    PLAN is a plan of training without pipeline stages, whose layout gives the seconds and the memory; --lengths has the batch.
    BATCH is a JSON object, or a list of them, with lengths and costs (docs/batch.md).
    """
    from ..solvers.batch_groups import schedule_batch

    problems = _problems(plan, options.lengths)
    answers = [(name, instance, schedule_batch(instance)) for name, instance in problems]
    if json:
        documents = [document(name, schedule) for name, _, schedule in answers]
        typer.echo(json_module.dumps(documents[0] if len(documents) == 1 else documents, indent=2))
    else:
        for name, instance, schedule in answers:
            show(_table(name, instance, schedule))


def _problems(path: str, lengths: Path | None) -> list[tuple[str, BatchInstance]]:
    from ..planner.batch import batch_instance, instance_of_plan
    from ..schema import ConfigError, Plan, TrainingPlan
    from ..schema.base import read_json
    from ..schema.batch import read_batches, read_lengths

    data = read_json(path)
    if isinstance(data, dict) and "schema_version" in data:
        if lengths is None:
            raise ConfigError(
                "a plan needs a batch", help="add --lengths FILE: tokens of each sequence, one in each line"
            )
        answer = Plan.load(path)
        if not isinstance(answer, TrainingPlan):
            raise ConfigError(f"{path} is a plan for {answer.task_name}; one for training is needed")
        return [(answer.model.name, instance_of_plan(answer, read_lengths(lengths)))]
    if lengths is not None:
        raise ConfigError(f"{path} has lengths of its own", help="leave out --lengths, or give a plan")
    return [(entry.name, batch_instance(entry)) for entry in read_batches(path)]


def document(name: str, schedule: BatchSchedule) -> dict[str, Any]:
    """Return a schedule as JSON: micro-batches as lists of groups, with the indices of their sequences in the batch."""
    return {
        "name": name,
        "seconds": schedule.seconds,
        "bound_seconds": schedule.bound_seconds,
        "gap": schedule.gap,
        "solve_seconds": schedule.solve_seconds,
        "micro_batches": [
            [
                {"first": group.first, "size": group.size, "seconds": group.seconds, "sequences": list(group.sequences)}
                for group in groups
            ]
            for groups in schedule.micro_batches
        ],
    }


def _table(name: str, instance: BatchInstance, schedule: BatchSchedule) -> Table:
    from rich.markup import escape

    from ..schema.units import format_percent, format_seconds

    title = (
        f"{escape(name) or 'batch'}: {len(instance.lengths):,} sequences, {int(instance.lengths.sum()):,} tokens on "
        f"{instance.num_ranks:,} ranks: {format_seconds(schedule.seconds)}, within {format_percent(schedule.gap)} of the bound"
    )
    table = headed_table(
        title, "micro-batch", "groups", "of ranks", "sequences", "tokens", "longest", "seconds", "idle"
    )
    rows = 0
    for number, groups in enumerate(schedule.micro_batches):
        slowest = max(group.seconds for group in groups)
        for size in dict.fromkeys(group.size for group in groups):
            alike = [group for group in groups if group.size == size]
            lengths = instance.lengths[[idx for group in alike for idx in group.sequences]]
            busy = sum(group.seconds for group in alike) / len(alike) / slowest if slowest else 1.0
            counts = (len(lengths), int(lengths.sum()), int(lengths.max()))
            seconds = format_seconds(max(group.seconds for group in alike))
            if rows < _MAX_ROWS:
                texts = (f"{count:,}" for count in counts)
                table.add_row(str(number), str(len(alike)), str(size), *texts, seconds, format_percent(1 - busy))
            rows += 1
    if rows > _MAX_ROWS:
        table.caption = f"{rows - _MAX_ROWS} further rows: --json has all"
    return table
