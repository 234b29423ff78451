"""`meshwright recipes`: published training runs beside our prediction of them, and beside the plan that we would make."""

from __future__ import annotations

import json as json_module
from typing import TYPE_CHECKING

import typer

from .options import JsonOption, OptionModel, command, option
from .terminal import INTERRUPTED, headed_table, progress_bar, show, stopping_on_interrupt

if TYPE_CHECKING:
    from ..validation.recipes import Recipe
    from .terminal import Table


class RecipeOptions(OptionModel):
    """What is worked out."""

    plan: bool = option(False, "also plan each: minutes for all; the page docs/recipes.md has them.")
    only: str = option("", "those whose title has this text.", metavar="TEXT")
    time_limit_s: float = option(60.0, "of each search.", ge=0.1, metavar="S", needs=("plan",))


@command()
def recipes(options: RecipeOptions, json: JsonOption = False) -> None:
    """Show published training runs: what their publishers measured, what we predict of the same layout, and how far that is off.

    With --plan also what the best plan for the same model, batch, machine and engine is predicted to give. Rows are facts with
    their sources; none was left out for its error (docs/recipes.md).
    """
    from ..planner.request import Deadline
    from ..schema.errors import ConfigError
    from ..validation.recipes import recipes as all_recipes
    from ..validation.recipes import with_plans

    pairs = [pair for pair in all_recipes() if options.only.lower() in pair[0].title.lower()]
    if not pairs:
        raise ConfigError(f"no recipe has {options.only!r} in its title", help="meshwright recipes lists all")
    answers, deadline = [recipe for recipe, _ in pairs], Deadline()
    if options.plan:
        answers = []
        with progress_bar("planning", quiet=json) as bar, stopping_on_interrupt(deadline):
            for answer in with_plans(pairs, time_limit_s=options.time_limit_s, deadline=deadline):
                answers.append(answer)
                bar.set(len(answers) / len(pairs), f"{len(answers)} of {len(pairs)}: {answer.title}")
    if json:
        typer.echo(json_module.dumps([document(answer) for answer in answers], indent=2))
    else:
        show(recipes_table(answers, has_plans=options.plan))
    if deadline.is_stopped:
        raise typer.Exit(INTERRUPTED)
    typer.echo(
        "next: meshwright recipes --json has sources, layouts and what was assumed; docs/recipes.md has the plans",
        err=True,
    )


def document(recipe: Recipe) -> dict[str, object]:
    """Return a recipe as JSON, with its error."""
    return recipe.model_dump(mode="json") | {"error": recipe.error}


def recipes_table(answers: list[Recipe], *, has_plans: bool) -> Table:
    """Return measured, predicted and, where asked for, planned figures of each recipe."""
    from ..schema.units import format_percent

    planned = ("plan", "gain", "of axes") if has_plans else ()
    table = headed_table(
        "published runs: tokens/s per device, or MFU", "run", "devices", "measured", "predicted", "error", *planned, "remarks",
        text=("run", "remarks"),
    )  # fmt: skip
    for answer in answers:
        gains = ("-" if gain is None else format_percent(gain, sign=True) for gain in (answer.gain, answer.axes_gain))
        plans = (figure(answer, answer.planned_figure), *gains)
        table.add_row(
            answer.title,
            f"{answer.num_devices:,} {answer.device.partition('-')[0]}",
            figure(answer, answer.measured),
            figure(answer, answer.predicted),
            "-" if answer.error is None else format_percent(answer.error, sign=True),
            *(plans if has_plans else ()),
            "; ".join(remarks(answer)),
        )
    return table


def figure(recipe: Recipe, value: float | None) -> str:
    """Format a figure of a recipe in the unit of its measurement."""
    from ..schema.units import format_percent

    if value is None:
        return "-"
    return format_percent(value) if recipe.is_mfu else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def remarks(recipe: Recipe) -> list[str]:
    """Return what a reader must know of a row: why there is no figure, what stands in, what we say wrongly of its memory."""
    return [
        *([recipe.skipped] if recipe.skipped else []),
        *([f"stands in: {', '.join(recipe.approximated)}"] if recipe.approximated else []),
        *(["we say that it does not fit"] if recipe.fits is False else []),
        *([recipe.not_planned] if recipe.not_planned else []),
        *([recipe.planned.search.verdict] if recipe.planned and recipe.planned.search else []),
    ]
