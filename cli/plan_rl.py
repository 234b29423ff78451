"""`meshwright plan-rl`: pools, layouts and moves of a post-training workflow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import OptionModel, command, option
from .plan_options import ClusterOptions, SearchOptions
from .terminal import INTERRUPTED, show_answer, spinner, stopping_on_interrupt


class RlPlanOptions(OptionModel):
    """What bounds the search, and where the plan goes."""

    mirrors = SearchOptions

    time_limit_s: float = option(120.0, "for the search; the best so far is the answer.", ge=0.1, metavar="S")
    top: int = option(4, "runner-ups to report.", ge=0, le=50, metavar="K")
    out: Path = option(Path("rl.json"), "where the plan is written.")
    report: Path | None = None
    as_json: bool = option(False, "JSON on stdout instead of a table.", name="--json")


@command()
def plan_rl(
    workflow: Annotated[Path, typer.Argument(metavar="WORKFLOW", help="a TOML file: models, batch, policy.")],
    cluster: ClusterOptions,
    output: RlPlanOptions,
) -> None:
    """Place the models of GRPO or PPO: which share devices, on how many, the layout of each call, what moves between them; writes
    rl.json. Needs no GPU.

    The workflow is a TOML file (docs/post-training.md). The answer says whether the generator shares the actor's devices and why,
    how much the other way would take, and draws the calls of a step.
    """
    from ..planner import plan_rl as best_pools
    from ..planner.request import Deadline
    from ..schema.rl_file import read_workflow
    from .show.rl import rl_tables

    workload, machine = read_workflow(workflow), cluster.read()
    deadline = Deadline(output.time_limit_s)
    with spinner("layouts of every model on pools of every size"), stopping_on_interrupt(deadline):
        answer = best_pools(workload, machine, top=output.top, deadline=deadline)
    answer.save(output.out)
    show_answer(answer, *rl_tables(answer), as_json=output.as_json)
    if output.report is not None:
        from .page.document import write_report

        write_report(answer, output.report, None, explain_limit_s=0.0)
    typer.echo(f"wrote {output.out}; next: meshwright report {output.out} --report rl.html", err=True)
    if deadline.is_stopped:
        raise typer.Exit(INTERRUPTED)
