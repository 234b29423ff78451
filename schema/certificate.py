"""Certificate: how far from the best of what was searched an answer may be, within the cost model."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import SerializerFunctionWrapHandler, model_serializer, model_validator

from .base import Frozen, NonNegativeFloat, NonNegativeInt, PositiveFloat

Unit = Literal["s", "tokens_per_s", "usd_per_million_tokens"]
_UNITS: tuple[Unit, ...] = ("s", "tokens_per_s", "usd_per_million_tokens")
_MORE_IS_BETTER: frozenset[Unit] = frozenset({"tokens_per_s"})


class Certificate(Frozen):
    """What a search proved. In JSON the unit is part of the names: ``objective_s``, ``bound_s``.

    Attributes:
        status: optimal: everything was bounded; feasible: a time limit stopped that.
        objective: of the best candidate, in ``unit``.
        bound: nothing in the searched space is better.
        gap: what the search leaves open, |objective - bound| over the larger of the two: another candidate, whose bound is better
            than the objective, might be that much better. A plan's own step may be longer than the objective, where a simpler
            layout was taken over the fastest one: `Plan.price_of_simplicity`.
        evaluated: candidates costed exactly.
        pruned: candidates that a bound or the memory excluded, of which pruned_in_groups with all others of the same degrees
            by one bound.
        bounded: candidates whose bound was a linear program of its own.
    """

    status: Literal["optimal", "feasible"]
    objective: PositiveFloat
    bound: NonNegativeFloat
    unit: Unit = "s"
    gap: NonNegativeFloat
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
        status: Any = "optimal" if finished else "feasible"
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
