"""In which form each operator of a unit works on its values, so that computing, converting and keeping parameters cost least.

Sets
    v            operators, parameters and inputs of the unit
    s            signatures of v: forms of its inputs and of its outputs
    u            values: an output of an operator
    e            reads: operator v reads value u as its input a
    t, t'        forms
Data
    SECONDS[v,s]     forward and backward, with what kept bytes are worth
    MOVE[u,t,t']     of a conversion, forward and backward
Variables
    y[v,s] in {0,1}      v works so
    z[e,t,t'] >= 0       what v reads is made in form t and read in form t'
    c[u,t,t'] >= 0       u is converted, once for all that read it so
Objective
    (O)  min  sum SECONDS y + sum MOVE c
Constraints
    (C1) one signature: sum_s y[v,s] = 1
    (C2) leaves producer: sum_t' z[e,t,t'] = sum of y[u,s] whose output has form t
    (C3) enters consumer: sum_t z[e,t,t'] = sum of y[v,s] whose input a has form t'
    (C4) converted once: z[e,t,t'] <= c[u,t,t']
    (C5) boundary: what the unit is given and puts out is whole with whole gradients: those operators have one signature

Each read is a flow from the forms of its producer to those of its reader, and only the costs are shared among readers. So the
linear relaxation was integral wherever it was solved; with conversions that readers share in one flow its gap was 6.6 %.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .backend import RowSolver, Solution, Status
from .linear_program import LinearProgram
from .tolerances import ROUNDING

Form = str
Value = tuple[int, int]
"""An operator and which of its outputs."""


class Choice(NamedTuple):
    """One way in which an operator can work: forms of its inputs and outputs, seconds."""

    ins: tuple[Form, ...]
    outs: tuple[Form, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PlacementInstance:
    """Operators in order.

    Attributes:
        reads: of each operator the values it reads; choices: its signatures.
        move_s: seconds of a conversion of a value between two forms, forward and backward.
        num_ends: of the last operators, that stand for what the unit puts out.
    """

    reads: Sequence[Sequence[Value]]
    choices: Sequence[Sequence[Choice]]
    move_s: Callable[[Value, Form, Form], float]
    num_ends: int = 0

    @cached_property
    def forms(self) -> dict[Value, list[Form]]:
        """The forms in which each value can be made."""
        forms: dict[Value, dict[Form, None]] = defaultdict(dict)
        for idx, choices in enumerate(self.choices):
            for choice in choices:
                for output, form in enumerate(choice.outs):
                    forms[idx, output][form] = None
        return {value: list(forms) for value, forms in forms.items()}


class _Read(NamedTuple):
    """A read: who reads what as which input, and its flow from one form to another."""

    reader: int
    position: int
    value: Value
    flow: dict[tuple[Form, Form], int]


def build_model(instance: PlacementInstance) -> tuple[LinearProgram, list[range]]:
    """Return the program (O), and the variables y of each operator."""
    program, scale = LinearProgram(name="placements"), _scale(instance)
    y: list[range] = []
    for choices in instance.choices:
        idxs = program.add_variables(len(choices), x_max=1.0, cost=[c.seconds / scale for c in choices])
        y.append(range(int(idxs[0]), int(idxs[-1]) + 1))
    program.integer = [idx for of in y for idx in of]
    reads = []
    for reader, values in enumerate(instance.reads):
        for position, value in enumerate(values):
            read_forms = dict.fromkeys(choice.ins[position] for choice in instance.choices[reader])
            pairs = [(made, form) for made in instance.forms[value] for form in read_forms]
            flow = {
                pair: int(idx) for pair, idx in zip(pairs, program.add_variables(len(pairs), x_max=1.0), strict=True)
            }
            reads.append(_Read(reader, position, value, flow))
    for of in y:
        program.add_row("C1", [(of, 1.0)], lower=1.0, upper=1.0)
    for read in reads:
        _add_leaves_producer_C2(program, instance, y, read)
        _add_enters_consumer_C3(program, instance, y, read)
    _add_converted_once_C4(program, instance, reads, scale)
    return program, y


def _add_leaves_producer_C2(
    program: LinearProgram, instance: PlacementInstance, y: Sequence[range], read: _Read
) -> None:
    producer, output = read.value
    for made in instance.forms[read.value]:
        ways = [y[producer][i] for i, c in enumerate(instance.choices[producer]) if c.outs[output] == made]
        flows = [idx for (source, _), idx in read.flow.items() if source == made]
        program.add_row("C2", [(flows, 1.0), (ways, -1.0)], lower=0.0, upper=0.0)


def _add_enters_consumer_C3(
    program: LinearProgram, instance: PlacementInstance, y: Sequence[range], read: _Read
) -> None:
    for form in dict.fromkeys(target for _, target in read.flow):
        ways = [y[read.reader][i] for i, c in enumerate(instance.choices[read.reader]) if c.ins[read.position] == form]
        flows = [idx for (_, target), idx in read.flow.items() if target == form]
        program.add_row("C3", [(flows, 1.0), (ways, -1.0)], lower=0.0, upper=0.0)


def _add_converted_once_C4(
    program: LinearProgram, instance: PlacementInstance, reads: Sequence[_Read], scale: float
) -> None:
    shared: dict[tuple[Value, Form, Form], int] = {}
    for read in reads:
        for (source, target), idx in read.flow.items():
            key = read.value, source, target
            if source == target or not (seconds := instance.move_s(*key)):
                continue
            if key not in shared:
                shared[key] = int(program.add_variables(1, x_max=1.0, cost=seconds / scale)[0])
            program.add_row("C4", [([idx], 1.0), ([shared[key]], -1.0)], upper=0.0)


def solve(instance: PlacementInstance, *, time_limit_s: float = 30.0) -> Solution[list[int]]:
    """Return the index of each operator's signature.

    The linear relaxation is solved first; where it is not integral, the program with integers.
    """
    start = time.monotonic()
    program, y = build_model(instance)
    integers, program.integer = program.integer, []
    status, answer = RowSolver(program, time_limit_s=time_limit_s).solve()
    bound, choice = -np.inf, None
    if answer is not None:
        bound = answer.objective
        choice = [int(np.argmax(answer.values[list(of)])) for of in y]
        is_integral = all(answer.values[of[i]] > 1 - ROUNDING for of, i in zip(y, choice, strict=True))
        if not is_integral:
            program.integer = integers
            status, answer = RowSolver(program, time_limit_s=time_limit_s, rel_gap=1e-6).solve()
            if answer is not None:
                bound = answer.bound
                choice = [int(np.argmax(answer.values[list(of)])) for of in y]
    spent, scale = time.monotonic() - start, _scale(instance)
    if answer is None or choice is None:
        return Solution(status=status, choice=None, objective=np.inf, bound=-np.inf, backend="highs", solve_s=spent)
    objective = check(instance, choice)
    proved = objective - bound * scale <= 1e-6 * max(objective, ROUNDING)
    return Solution(
        status=Status.OPTIMAL if proved else Status.FEASIBLE, choice=choice, objective=objective,
        bound=min(objective, bound * scale), backend="highs", solve_s=spent,
    )  # fmt: skip


def check(instance: PlacementInstance, choice: Sequence[int]) -> float:
    """Return the seconds of a choice (O), from the definition alone.

    What was chosen says in which form each value is made and read, so conversions (C2) to (C4) follow from it.

    Raises:
        ValueError: it has not one signature for each operator (C1), or an end of the unit has several (C5).
    """
    if len(choice) != len(instance.choices) or not all(
        0 <= i < len(c) for i, c in zip(choice, instance.choices, strict=True)
    ):
        raise ValueError("(C1): not one of each operator's signatures")
    if any(len(choices) > 1 for choices in instance.choices[len(instance.choices) - instance.num_ends :]):
        raise ValueError("(C5): what the unit puts out can be read in several forms")
    chosen = [choices[i] for i, choices in zip(choice, instance.choices, strict=True)]
    return sum(c.seconds for c in chosen) + sum(seconds for *_, seconds in conversions(instance, choice))


def conversions(instance: PlacementInstance, choice: Sequence[int]) -> list[tuple[Value, Form, Form, float]]:
    """Return the conversions of a choice, each once, with their seconds."""
    chosen = [choices[i] for i, choices in zip(choice, instance.choices, strict=True)]
    needed = {
        (value, chosen[value[0]].outs[value[1]], form): None
        for reader, reads in enumerate(instance.reads)
        for value, form in zip(reads, chosen[reader].ins, strict=True)
        if chosen[value[0]].outs[value[1]] != form
    }
    return [(value, source, target, instance.move_s(value, source, target)) for value, source, target in needed]


def _scale(instance: PlacementInstance) -> float:
    """Return what seconds are divided by, so that coefficients are near 1."""
    return max((c.seconds for choices in instance.choices for c in choices), default=1.0) or 1.0
