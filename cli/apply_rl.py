"""`meshwright apply-rl`: run a post-training plan on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .options import JsonOption, OptionModel, PlanArgument, command, option

if TYPE_CHECKING:
    from ..schema.rl_plan import RlPlan


class RlRunOptions(OptionModel):
    """What is run, and how long."""

    prompts: Path = option(
        ..., 'a JSON object in each line: {"prompt": [tokens]}, with fields for the reward function.'
    )
    reward: str = option(
        ..., "the function that rewards a sample: file.py:name or module:name; it is given the line with its response.",
        metavar="FILE.py:NAME",
    )  # fmt: skip
    steps: int = option(..., "steps to do.", ge=1)
    reward_timeout_s: float = option(30.0, "how long the function may take for a sample.", ge=0.1, metavar="S")
    learning_rate: float = option(1e-5, "of the actor.", ge=1e-12)
    critic_learning_rate: float = option(1e-5, "of the critic.", ge=1e-12)
    end_token: int | None = option(None, "token that ends a response. Default: they end at max_len.", ge=0)
    seed: int = option(0, "of initial weights, of the order of prompts and of draws.", ge=0)
    weights: Path | None = option(
        None, "folder of Hugging Face safetensors to start from. Default: made weights.", metavar="FOLDER"
    )
    teacher_weights: Path | None = option(
        None, "folder of the teacher's weights. Default: made weights.", metavar="FOLDER"
    )
    save_weights: Path | None = option(None, "where the actor's weights go at the end.", metavar="FOLDER")
    exchange: Path | None = option(
        None, "folder that islands share responses through, for plans of several islands.", metavar="FOLDER"
    )
    island: int = option(0, "which island this is, from 0.", ge=0, metavar="I")
    report: Path | None = option(None, "file that each step appends a JSON object to.")
    timeout_s: float = option(600.0, "how long a rank may wait for another one.", ge=1, metavar="S")


@command()
def apply_rl(plan: PlanArgument, options: RlRunOptions, json: JsonOption = False) -> None:
    """Run a post-training plan on this machine: generate, reward, score and update, step by step, in the plan's pools.

    The reward function is code of yours that you name here; it runs in a process of its own. The plan is one for CPUs
    (`meshwright plan-rl --cluster local:2`).
    """
    from ..runtime.rl.launch import run_rl
    from ..runtime.rl.run import RlOptions
    from ..schema.rl_plan import RlPlan

    loaded = RlPlan.load(plan)
    fields = options.model_dump(exclude={"report", "timeout_s", "end_token"}, mode="json")
    given = RlOptions(**fields, end_id=options.end_token)
    records = run_rl(loaded, given, report=options.report, timeout_s=options.timeout_s)
    _show(loaded, records, as_json=json)


def _show(plan: RlPlan, records: list[dict[str, Any]], *, as_json: bool) -> None:
    import json

    from ..schema.units import format_seconds
    from .terminal import headed_table, show

    if as_json:
        typer.echo(json.dumps(records))
        return
    table = headed_table(plan.summary["pools"], "step", "mean reward", "length", "loss", "seconds", text=())
    marks = sorted({0, *range(9, len(records), 10), len(records) - 1})
    for record in (records[idx] for idx in marks):
        loss = sum(record["loss"]) / len(record["loss"])
        table.add_row(
            str(record["step"]), f"{record['mean_reward']:.3f}", f"{record['mean_len']:.1f}", f"{loss:+.4f}",
            format_seconds(record["step_time_s"]),
        )  # fmt: skip
    show(table)
    times = sorted(record["step_time_s"] for record in records)
    middle = times[len(times) // 2]
    typer.echo(f"median step {format_seconds(middle)}; planned {format_seconds(plan.estimate.step_time_s)}", err=True)
