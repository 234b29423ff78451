"""`meshwright plan`: the best layout for a model on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .errors import INTERRUPTED, exit_on_error
from .inputs import (
    AttentionOption,
    BatchOption,
    CalibrateOption,
    ClusterOption,
    EngineOption,
    JsonOption,
    ModelArgument,
    OptimizerOption,
    PrecisionOption,
    SeqLenOption,
    read_inputs,
)


def plan(
    model: ModelArgument,
    cluster: ClusterOption,
    global_batch_size: BatchOption,
    seq_len: SeqLenOption,
    precision: PrecisionOption = None,
    optimizer: OptimizerOption = "adamw",
    attention: AttentionOption = "flash",
    engine: EngineOption = "fsdp2",
    fix: Annotated[str, typer.Option(metavar="A=B,...", help="Layout fields to keep, e.g. tp=8,recompute=full.")] = "",
    space: Annotated[
        Literal["runnable", "full"] | None,
        typer.Option(
            help="Layouts to search: what meshwright apply executes, or all of the engine. Default: runnable where apply trains "
            "the model."
        ),
    ] = None,
    time_limit_s: Annotated[
        float, typer.Option(metavar="S", min=0.1, help="Stop the search then, with the best so far.")
    ] = 60.0,
    top: Annotated[int, typer.Option(metavar="K", min=0, max=50, help="Runner-ups to report.")] = 4,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the plan is written.")] = Path("plan.json"),
    calibrate: CalibrateOption = None,
    json: JsonOption = False,
) -> None:
    """Find the fastest layout that fits, say why it won, and write plan.json. Needs no GPU.

    Ctrl-C ends the search with the best so far, which is shown and written; the exit code is then 130, so that no command chained
    after this one runs. Where nothing was found yet, nothing is written.

    With --engine megatron or deepspeed the search is over what that engine executes; `meshwright apply` does not run such a plan.
    """
    with exit_on_error():
        from ..planner import plan as make_plan
        from ..planner.deadline import Deadline
        from ..schema.layout import parse_assignments
        from .interrupt import stopping_on_interrupt
        from .progress import search_progress
        from .tables import plan_table, show

        fixed = parse_assignments(fix)
        inputs = read_inputs(
            model,
            cluster,
            global_batch_size=global_batch_size,
            seq_len=seq_len,
            precision=precision,
            optimizer=optimizer,
            attention=attention,
            engine=engine,
            calibrate=calibrate,
        )
        deadline = Deadline(time_limit_s)
        with search_progress(quiet=json) as on_progress, stopping_on_interrupt(deadline):
            runnable = None if space is None else space == "runnable"
            found = make_plan(
                *inputs, fixed=fixed, runnable=runnable, top=top, on_progress=on_progress, deadline=deadline
            )
        found.save(out)
        if json:
            typer.echo(found.model_dump_json(indent=2))
        else:
            show(plan_table(found))
        then = f"next: meshwright apply {out}" if engine == "fsdp2" else f"it is for {engine}, not for meshwright apply"
        typer.echo(f"wrote {out}; {then}", err=True)
        if deadline.is_stopped:
            raise typer.Exit(INTERRUPTED)
