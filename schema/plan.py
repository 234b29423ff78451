"""Plan: the document that answers a request, whatever its task; with the certificate of its search."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import SerializerFunctionWrapHandler, model_serializer, model_validator

from .base import Document, Frozen, NonNegativeFloat, NonNegativeInt, PositiveFloat
from .cluster import ClusterSpec
from .model import ModelSpec
from .offload import OffloadLimits
from .task import Task
from .units import format_percent

Unit = Literal["s", "tokens_per_s", "usd_per_million_tokens", "devices", "usd_per_hour", "tokens_per_s_per_device"]
_UNITS: tuple[Unit, ...] = get_args(Unit)
_MORE_IS_BETTER: frozenset[Unit] = frozenset({"tokens_per_s", "tokens_per_s_per_device"})

Preference = Literal["plain", "fastest"]
"""Which of the layouts that may be as fast is taken: the simplest, or the fastest by prediction."""

SearchStatus = Literal["optimal", "complete", "stopped"]
"""optimal: everything was bounded, and the gap is below PROVED_GAP; complete: it was bounded, and a larger gap remains; stopped: a
time limit or Ctrl-C ended the search before."""

PROVED_GAP = 1e-3
"""Below it a search is called optimal: a tenth of a percent is less than anyone can measure of a step."""


class Proof(Frozen):
    """Abstract base of what a search proved, and the words for it.

    Attributes:
        status: how far it came.
        gap: what it leaves open, as a part of the objective.
    """

    status: SearchStatus
    gap: NonNegativeFloat

    @staticmethod
    def status_of(*, finished: bool, gap: float) -> SearchStatus:
        """Return the status of a search that bounded everything or was stopped before, with the gap that it leaves."""
        if not finished:
            return "stopped"
        return "optimal" if gap < PROVED_GAP else "complete"

    @property
    def verdict(self) -> str:
        """Return what may be said of the answer: ``optimal``, or ``complete, within 4.8 %`` of the best possible."""
        if self.status == "optimal":
            return "optimal"
        within = f"within {format_percent(self.gap)}" if self.gap < 1 else "nothing proved"
        return f"complete, {within}" if self.status == "complete" else f"stopped early, {within}"

    @model_validator(mode="before")
    @classmethod
    def _read_status(cls, data: Any) -> Any:
        """Read documents of older versions: feasible was stopped, optimal was any search that was not."""
        if (
            isinstance(data, dict)
            and data.get("status") in ("optimal", "feasible")
            and isinstance(data.get("gap"), int | float)
        ):
            return {**data, "status": cls.status_of(finished=data["status"] == "optimal", gap=data["gap"])}
        return data


class Certificate(Proof):
    """What a search proved. In JSON the unit is part of the names: ``objective_s``, ``bound_s``.

    Attributes:
        status: optimal: everything was bounded, and the gap is below 0.1 %; complete: it was bounded, and a larger gap remains;
            stopped: a time limit or Ctrl-C came first.
        objective: of the best candidate, in ``unit``.
        bound: nothing in the searched space is better.
        gap: what the search leaves open, |objective - bound| over the larger of the two: another candidate, whose bound is better
            than the objective, might be that much better. A plan's own step may be longer than the objective, where a simpler
            layout was taken over the fastest one: `TrainingPlan.price_of_simplicity`.
        evaluated: candidates costed exactly.
        pruned: candidates that a bound or the memory excluded, of which pruned_in_groups with all others of the same degrees
            by one bound.
        bounded: candidates whose bound was a linear program of its own.
    """

    objective: PositiveFloat
    bound: NonNegativeFloat
    unit: Unit = "s"
    evaluated: NonNegativeInt
    pruned: NonNegativeInt
    pruned_in_groups: NonNegativeInt = 0
    bounded: NonNegativeInt = 0
    search_s: NonNegativeFloat

    @classmethod
    def proved(cls, *, objective: float, bound: float, finished: bool, unit: Unit = "s", **counts: Any) -> Self:
        """Return the certificate of a search that ``finished`` or was stopped by its time limit, with the gap worked out.

        Args:
            objective, bound: in ``unit``; rounding may have put the bound on the wrong side of the objective.
            finished: everything was bounded.
            unit: of both.
            counts: evaluated, pruned, pruned_in_groups, bounded and search_s.
        """
        low, high = (objective, bound) if unit in _MORE_IS_BETTER else (bound, objective)
        gap = max(0.0, (high - low) / high)
        status = cls.status_of(finished=finished, gap=gap)
        return cls(status=status, objective=objective, bound=bound, unit=unit, gap=gap, **counts)

    @property
    def objective_s(self) -> float:
        """Return the objective of a search for the least seconds."""
        assert self.unit == "s"
        return self.objective

    @property
    def bound_s(self) -> float:
        """Return the bound of a search for the least seconds."""
        assert self.unit == "s"
        return self.bound

    @model_validator(mode="before")
    @classmethod
    def _read_units(cls, data: Any) -> Any:
        unit = next((unit for unit in _UNITS if isinstance(data, dict) and f"bound_{unit}" in data), None)
        if unit is None:
            return data
        fields = {key.removesuffix(f"_{unit}") if key in _names(unit) else key: value for key, value in data.items()}
        if "objective" not in fields:  # documents of older versions about generation
            fields |= {"objective": fields["bound"] * (1 - fields.get("gap", 0)), "status": "optimal"}
        return {**fields, "unit": unit}

    @model_serializer(mode="wrap")
    def _write_units(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = handler(self)
        unit = fields.pop("unit", self.unit)
        if not self.bounded:
            fields.pop("bounded", None)
        return {f"{key}_{unit}" if key in ("objective", "bound") else key: value for key, value in fields.items()}


def _names(unit: Unit) -> tuple[str, str]:
    return f"objective_{unit}", f"bound_{unit}"


class PlanProvenance(Frozen):
    """Origin of a plan: versions, inputs and the space that was searched.

    Attributes:
        fixed: fields that the search had to keep, as in `--fix`: ``tp=8,recompute=full``.
        space: runnable: only layouts that `meshwright apply` executes; full: all of the engine; None in plans of older versions.
        offload: what might leave the devices, also where the plan leaves everything there; None: nothing.
        prefer: which of the layouts that may be as fast was to be taken: the simplest, or the fastest by prediction.
    """

    meshwright: str
    created: str
    inputs_sha256: str
    fixed: str = ""
    space: Literal["runnable", "full"] | None = None
    offload: OffloadLimits | None = None
    prefer: Preference = "plain"


class Estimate(Frozen):
    """Predicted figures of a plan; every task adds those of its own, with the unit at the end of the name."""

    tokens_per_s: PositiveFloat


class Plan(Document):
    """Abstract base of the plans of all tasks. ``Plan.load`` reads any of them and returns the one of its task.

    Attributes:
        estimate: what the plan is predicted to cost and to give.
        search: what was proved of it; None where nothing was searched.
        notes: what the reader should know about assumptions made.
    """

    document_kind: ClassVar[str] = "plan"
    task_field: ClassVar[str] = ""
    """Field of the document that holds the task, different for every kind of task."""
    task_name: ClassVar[str] = "any task"

    model: ModelSpec
    cluster: ClusterSpec
    estimate: Estimate
    search: Certificate | None = None
    notes: tuple[str, ...] = ()
    provenance: PlanProvenance | None = None

    @property
    def task(self) -> Task:
        """Return what the plan is for."""
        task: Task = getattr(self, self.task_field)
        return task

    @property
    def summary(self) -> dict[str, str]:
        """Return what a reader wants to know first, as titles and texts; plans of a task add theirs."""
        return {"model": self.model.name, "cluster": self.cluster.name}

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """Show the summary in place of all fields, which fill pages."""
        return ((title.replace(" ", "_"), text) for title, text in self.summary.items())

    def _repr_html_(self) -> str:
        """Return the summary as a table, which notebooks show."""
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(title)}</th><td style='text-align:left'>{html.escape(text)}</td></tr>"
            for title, text in self.summary.items()
        )
        return f"<table><caption>Plan for {self.task_name}</caption>{rows}</table>"

    @classmethod
    def class_of(cls, data: dict[str, Any]) -> type[Self]:
        """Return the class of plans for the task of a document."""
        kinds = [kind for kind in (cls, *cls.__subclasses__()) if kind.task_field in data]
        return kinds[0] if kinds else cls

    @model_validator(mode="before")
    @classmethod
    def _is_for_its_task(cls, data: Any) -> Any:
        if isinstance(data, dict) and cls.task_field not in data:
            others = [kind for kind in Plan.__subclasses__() if kind.task_field in data]
            if others:
                raise ValueError(f"it is a plan for {others[0].task_name}; one for {cls.task_name} is needed")
            if cls is Plan:
                raise ValueError(f"it names no task: {', '.join(kind.task_field for kind in Plan.__subclasses__())}")
        return data
