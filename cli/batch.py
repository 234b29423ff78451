"""`meshwright batch`: which ranks compute which sequences of a batch of unequal lengths."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import JsonOption, OptionModel, command, option
from .terminal import Table, headed_table, show

if TYPE_CHECKING:
    from ..solvers.batch_groups import BatchProblem, BatchSchedule

_MAX_SHOWN = 24
"""Micro-batches in the table."""


class BatchOptions(OptionModel):
    """The batch of a plan."""

    lengths: Path | None = option(
        None, "tokens of each sequence, one in each line (.gz is read too); of a plan.", metavar="FILE"
    )
    plot: Path | None = option(
        None, "a picture of the schedule: ranks against seconds, a colour for each size of group.", metavar="FILE.svg"
    )
    pack: int | None = option(
        None,
        "only pack the sequences of a file of lengths: as few packs of at most so many tokens as hold them, equal in tokens and in "
        "attention.",
        metavar="TOKENS",
        ge=1,
        barred_by=("plot", "lengths"),
    )


@command()
def batch(
    plan: Annotated[
        str,
        typer.Argument(
            metavar="PLAN|BATCH|LENGTHS", help="a plan.json, batches with their own costs, or with --pack lengths."
        ),
    ],
    options: BatchOptions,
    json: JsonOption = False,
) -> None:
    """Schedule one batch of unequal lengths: its micro-batches, the groups of ranks in each and their sequences, with a bound.

    PLAN is a plan of training, whose layout gives the seconds and the memory; --lengths has the batch. Through pipeline stages its
    sequences are packed, and packs ordered.
    BATCH is a JSON object, or a list of them, with lengths and costs (docs/batch.md). With --pack nothing is scheduled: LENGTHS is
    a file of lengths, whose sequences are put together to packs of one shape.
    """
    if options.pack is not None:
        _pack(plan, options.pack, json=json)
        return
    from ..solvers.batch_groups import schedule_batch

    problems = _problems(plan, options.lengths)
    answers = [(name, instance, schedule_batch(instance)) for name, instance in problems]
    if options.plot is not None:
        _plot(options.plot, answers)
    if json:
        documents = [document(name, schedule) for name, _, schedule in answers]
        typer.echo(json_module.dumps(documents[0] if len(documents) == 1 else documents, indent=2))
    else:
        for name, instance, schedule in answers:
            show(_table(name, instance, schedule), *_remarks(instance, schedule))


def _plot(path: Path, answers: list[tuple[str, BatchProblem, BatchSchedule]]) -> None:
    from ..schema import ConfigError
    from ..schema.base import write_atomically
    from .show.batch_picture import batch_picture

    if len(answers) > 1:
        raise ConfigError(f"--plot is of one batch, the file has {len(answers)}", help="give one of them")
    write_atomically(path, batch_picture(*answers[0]))
    typer.echo(f"wrote {path}", err=True)


def _pack(path: str, capacity: int, *, json: bool) -> None:
    from ..schema.batch import read_lengths
    from ..schema.units import format_percent
    from ..solvers.batch_groups.packing import pack_evenly

    packing = pack_evenly(read_lengths(path), capacity)
    if json:
        fields = {"padding": packing.padding, "imbalance": packing.imbalance, "tokens": packing.tokens}
        typer.echo(json_module.dumps({**fields, "packs": packing.packs}, indent=2))
        return
    title = f"{len(packing.packs):,} packs of at most {capacity:,} tokens: {format_percent(packing.padding, 2)} padding"
    table = headed_table(title, "", "fewest", "mean", "most", "most over mean")
    rows = (
        ("sequences", [len(pack) for pack in packing.packs]),
        ("tokens", packing.tokens),
        ("squares of lengths", packing.squares),
    )
    for name, values in rows:
        mean = sum(values) / len(values)
        table.add_row(name, f"{min(values):,.0f}", f"{mean:,.0f}", f"{max(values):,.0f}", f"{max(values) / mean:.3f}")
    show(table)


def _problems(path: str, lengths: Path | None) -> list[tuple[str, BatchProblem]]:
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


def _table(name: str, instance: BatchProblem, schedule: BatchSchedule) -> Table:
    from ..schema.units import format_percent, format_seconds

    title = (
        f"{name or 'batch'}: {len(instance.lengths):,} sequences, {int(instance.lengths.sum()):,} tokens on "
        f"{instance.num_ranks:,} ranks: {format_seconds(schedule.seconds)}, within {format_percent(schedule.gap)} of the bound"
    )
    table = headed_table(
        title, "micro-batch", "groups", "of ranks", "sequences", "tokens", "longest", "seconds", "idle"
    )
    for number, groups in enumerate(schedule.micro_batches[:_MAX_SHOWN]):
        slowest = max(group.seconds for group in groups)
        for size in dict.fromkeys(group.size for group in groups):
            alike = [group for group in groups if group.size == size]
            lengths = instance.lengths[[idx for group in alike for idx in group.sequences]]
            busy = sum(group.seconds for group in alike) / len(alike) / slowest if slowest else 1.0
            counts = (len(lengths), int(lengths.sum()), int(lengths.max()))
            seconds = format_seconds(max(group.seconds for group in alike))
            texts = (f"{count:,}" for count in counts)
            table.add_row(str(number), str(len(alike)), str(size), *texts, seconds, format_percent(1 - busy))
    return table


def _remarks(instance: BatchProblem, schedule: BatchSchedule) -> Iterator[str]:
    """Yield what the table does not have."""
    from ..schema.units import format_seconds

    if (left_out := len(schedule.micro_batches) - _MAX_SHOWN) > 0:
        yield f" {left_out:,} further micro-batches: --json has all"
    if instance.fixed_s:
        each = "micro-batch" if instance.waits else "group or pack"
        yield f" besides, {format_seconds(instance.fixed_s)} for each {each}, whatever is in it: gathers and dispatch"
    yield ""
