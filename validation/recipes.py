"""Published runs beside our prediction of the same layout, and beside the plan that we would make.

Rows of data/recipes.csv are facts of the sources that they name; how they were chosen stands in docs/recipes.md. A row is read like
any measured run (rows.py), what it leaves open is its framework's default, and nothing of the model is fitted to it here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import Field

from ..planner import plan
from ..planner.request import Deadline, RequestOptions
from ..planner.step_parts import step_parts
from ..schema.base import Frozen, PositiveFloat, PositiveInt
from ..schema.engine_facts import PLANNED_ENGINES
from ..schema.errors import MeshwrightError
from ..schema.layout import SWITCHES, Layout
from ..schema.plan import Certificate
from ..schema.training_plan import TrainingPlan
from .predict import Prediction, RunInputs, predict, step_parts_of_run
from .rows import RunRow, read_runs, read_table

FILE = Path(__file__).parent / "data" / "recipes.csv"


PARTS = {
    "waiting for the host": ("dispatch",),
    "exchange of tokens": ("ep",),
    "products": ("products_ideal", "products_loss"),
    "attention": ("attention_ideal", "attention_loss"),
    "memory-bound kernels": ("memory_bound",),
    "copies": ("parameter_copies", "host_copies"),
    "recompute": ("recompute",),
    "tensor and context parallelism": ("tp", "cp"),
    "data parallelism": ("dp", "optimizer"),
    "bubble and transfers": ("bubble", "pp"),
    "offload": ("offload",),
}
"""The terms of a step that a gain is told apart by, and their parts."""


class PlannedRecipe(Frozen):
    """The plan for the model, batch, machine and engine of a recipe.

    Attributes:
        tokens_per_s_per_device, mfu: of all devices, those that stay idle among them.
        gains: seconds of the published layout less those of the plan, by term, over the plan's step; they sum to its gain.
        switches_as_published_s: the step of the best layout whose switches are those of the run: what the axes alone give.
    """

    layout: Layout
    step_time_s: PositiveFloat
    tokens_per_s_per_device: PositiveFloat
    mfu: PositiveFloat
    search: Certificate | None
    gains: dict[str, float] = Field(default_factory=dict)
    switches_as_published_s: PositiveFloat | None = None


class Recipe(Frozen):
    """A published run, what we predict of it, and what we would plan.

    Attributes:
        measured: tokens a second on each device, or the fraction of the peak (MFU) where its publisher says only that.
        is_mfu: it is an MFU.
        predicted: the same of our estimate of the published layout; None: why is in ``skipped``.
        fits: what we say of its memory; the run fitted.
        assumed: what the publication leaves open, and what was taken for it.
        approximated: what something nearby stands in for.
        planned: None before it was asked for, or where there is none, for the reason in ``not_planned``.
    """

    id: str
    title: str
    source: str
    engine: str
    num_devices: PositiveInt
    device: str
    precision: str
    measured: PositiveFloat
    is_mfu: bool = False
    predicted: PositiveFloat | None = None
    layout: Layout | None = None
    fits: bool | None = None
    skipped: str = ""
    assumed: tuple[str, ...] = ()
    approximated: tuple[str, ...] = ()
    planned: PlannedRecipe | None = None
    not_planned: str = ""

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1."""
        return None if self.predicted is None else self.predicted / self.measured - 1

    @property
    def gain(self) -> float | None:
        """Gain of the plan over our prediction of the published layout."""
        if self.planned_figure is None or self.predicted is None:
            return None
        return self.planned_figure / self.predicted - 1

    @property
    def axes_gain(self) -> float | None:
        """The gain that is there with the switches of the published run."""
        if self.planned is None or self.gain is None or self.planned.switches_as_published_s is None:
            return None
        return (1 + self.gain) * self.planned.step_time_s / self.planned.switches_as_published_s - 1

    @property
    def planned_figure(self) -> float | None:
        """Figure that the plan is predicted to give, in the unit of the measurement."""
        if self.planned is None:
            return None
        return self.planned.mfu if self.is_mfu else self.planned.tokens_per_s_per_device


def recipes() -> tuple[tuple[Recipe, Prediction], ...]:
    """Return every published run with our prediction, in the order of the file."""
    rows = read_runs(FILE)
    cells = {line["id"]: line for line in read_table("recipes")}
    pairs = zip(rows, predict(rows), strict=True)
    return tuple((_recipe(row, cells[row.id], prediction), prediction) for row, prediction in pairs)


def _recipe(row: RunRow, cells: dict[str, str], prediction: Prediction) -> Recipe:
    mfu, inputs, estimate = cells["mfu"], prediction.inputs, prediction.estimate
    seconds = row.measured_s
    tokens = (row.global_batch or 0) * (row.seq_len or 0)
    measured = float(mfu) if mfu else tokens / (seconds or 1.0) / (row.n_gpus or 1)
    predicted = None if estimate is None else estimate.mfu if mfu else estimate.tokens_per_s_per_device
    return Recipe(
        id=row.id,
        title=cells["title"],
        source=cells["source"],
        engine=inputs.workload.engine if inputs else "",
        num_devices=row.n_gpus or 1,
        device=row.gpu_type,
        precision=inputs.workload.precision if inputs else row.precision,
        measured=measured,
        is_mfu=bool(mfu),
        predicted=predicted,
        layout=inputs.layout if inputs else None,
        fits=estimate.fits if estimate else None,
        skipped=prediction.skipped or "",
        assumed=inputs.assumed if inputs else (),
        approximated=inputs.approximated if inputs else (),
    )


def with_plans(
    pairs: Sequence[tuple[Recipe, Prediction]], *, time_limit_s: float, deadline: Deadline
) -> Iterator[Recipe]:
    """Yield the recipes with the best plan of each, as they are found; after the deadline without."""
    for recipe, prediction in pairs:
        if prediction.inputs is None:
            yield recipe
        elif deadline.is_over:
            yield recipe.replace(not_planned="stopped")
        else:
            yield _with_plan(recipe, prediction.inputs, Deadline(time_limit_s, within=deadline))


def _with_plan(recipe: Recipe, inputs: RunInputs, deadline: Deadline) -> Recipe:
    """Plan freely, with the switches on that the run had, and with its switches and no others; the fastest is what there is."""
    if inputs.workload.engine not in PLANNED_ENGINES:
        return recipe.replace(not_planned=f"no plans are made for {inputs.workload.engine}")
    fields = Layout.model_fields
    as_published = {name: getattr(inputs.layout, name) for name in SWITCHES}
    switched_on = {name: value for name, value in as_published.items() if value != fields[name].default}
    plans: dict[str, TrainingPlan] = {}
    reasons: list[str] = []
    for name, fixed in {"free": {}, "switched on": switched_on, "as published": as_published}.items():
        try:
            options: RequestOptions = {"fixed": fixed, "runnable": False, "deadline": deadline}
            plans[name] = plan(inputs.model, inputs.cluster, inputs.workload, top=0, **options)
        except MeshwrightError as error:
            reasons.append(error.message)
    if not plans:
        return recipe.replace(not_planned=reasons[0])
    best = min(plans.values(), key=lambda each: each.estimate.step_time_s)
    alike = plans.get("as published")
    used = best.cluster.num_devices / inputs.cluster.num_devices
    planned = PlannedRecipe(
        layout=best.layout,
        step_time_s=best.estimate.step_time_s,
        tokens_per_s_per_device=used * best.estimate.tokens_per_s_per_device,
        mfu=used * best.estimate.mfu,
        search=best.search,
        gains=_gains(step_parts_of_run(inputs), step_parts(best)),
        switches_as_published_s=None if alike is None else alike.estimate.step_time_s,
    )
    return recipe.replace(planned=planned)


def _gains(published: dict[str, float], planned: dict[str, float]) -> dict[str, float]:
    """Return what each term of `PARTS` gains; one of nothing on both sides is left out."""
    step_s = sum(planned.values())
    saved = {term: sum(published[name] - planned[name] for name in names) / step_s for term, names in PARTS.items()}
    return {term: part for term, part in saved.items() if part}
