"""Placements of a user's module on the ranks of tensor parallelism: what units compute, in which forms they can, and do.

`UnitWork` is what was found of a unit's kind (profilers/placements/), before any machine is known; `UnitPlacement` what a program
chose of it for one (solvers/placements.py), which the runtime executes.
"""

from __future__ import annotations

from .base import Frozen, NonNegativeFloat, NonNegativeInt, PositiveInt

ValueRef = tuple[str, NonNegativeInt]
"""A node and which of its outputs."""


class OperatorWork(Frozen):
    """A node of a unit's graph.

    Attributes:
        name, op: of the node; ``parameter`` and ``given`` for what comes in.
        ins: the values that it reads.
        elements: of each of its outputs; element_bytes: of the first.
        flops: of products, forward; moves_nothing: a view.
        signatures: forms, as ``R,S0>S2``, with the variant of its numbers behind a ``;`` (profilers/placements/localise.py).
    """

    name: str
    op: str
    ins: tuple[ValueRef, ...] = ()
    elements: tuple[NonNegativeInt, ...]
    element_bytes: PositiveInt = 4
    flops: NonNegativeInt = 0
    moves_nothing: bool = False
    is_trained: bool = False
    signatures: tuple[str, ...]


class UnitWork(Frozen):
    """Units of one kind, for one degree of tensor parallelism.

    Attributes:
        paths: of the units; num_ranks: that share one; num_samples: of the call that was traced.
        operators: parameters and what the unit is called with first, then the operators in order.
        outs: values that the unit puts out, in form I.
        described: the operators with their constants; parameters: node and path in the unit.
        trained_inputs: which of the flattened arguments have a gradient.
        in_evaluation: the units' graph there, where it is another one than in training; the one in training comes before it.
    """

    paths: tuple[str, ...]
    num_ranks: PositiveInt
    num_samples: PositiveInt
    operators: tuple[OperatorWork, ...]
    outs: tuple[ValueRef, ...]
    described: tuple[str, ...]
    parameters: tuple[tuple[str, str], ...]
    trained_inputs: tuple[bool, ...]
    in_evaluation: bool = False


class UnitPlacement(Frozen):
    """What was chosen for units of one kind.

    Attributes:
        described: the operators with their constants, which the unit's graph must have again where it is run.
        signatures: of each operator, in order of ``described``; parameters: path in the unit and form.
        objective_s, bound_s: of the program, forward and backward; compute_s, conversion_s: parts of it.
        conversions: value, forms and seconds of each conversion, the longest first.
        num_params: of one unit; local_params: of these on a rank.
        in_evaluation: of the units' other graph there; their parameters are held as in training.
    """

    paths: tuple[str, ...]
    num_ranks: PositiveInt
    described: tuple[str, ...]
    signatures: tuple[str, ...]
    parameters: tuple[tuple[str, str], ...]
    trained_inputs: tuple[bool, ...]
    num_params: NonNegativeInt
    local_params: NonNegativeInt
    objective_s: NonNegativeFloat = 0.0
    bound_s: NonNegativeFloat = 0.0
    compute_s: NonNegativeFloat = 0.0
    conversion_s: NonNegativeFloat = 0.0
    conversions: tuple[tuple[str, str, str, NonNegativeFloat], ...] = ()
    in_evaluation: bool = False


class WholeUnit(Frozen):
    """A unit that stays whole on every rank, and why."""

    path: str
    why: str
