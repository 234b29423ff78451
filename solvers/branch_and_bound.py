"""Best-first branch and bound: the loop that every search shares; a `Problem` says what a node is and how it opens.

    open      nodes that wait, each with a bound: nothing below the node has a lower objective
    incumbent the lowest objective of the candidates so far
    cutoff    min(BELOW, incumbent - REL_GAP |incumbent|): a node whose bound is not under it is not worth opening

    while the lowest bound of the open nodes is under the cutoff:
        take that node; `Problem.expand` gives nodes, candidates, or both, in its place

Then no candidate of the problem is below the bound of the answer, which is the least of three: the incumbent, the open nodes, and
what each candidate leaves open (a node that was solved to a gap).

What a node is stays with the problem. Four forms are in use:
    a row           one layout, one size, one shape
    a row, again    a node may come back with a higher bound (`Node.raised`): a cheap bound first, a close one when its turn comes
    a block         one node for many rows in the order of their bounds, kept in arrays: expanding it opens its first row, or
                    bounds some more of them at once, and gives the rest back as one node
    a subproblem    ranges of integer variables, for a linear relaxation (generation.py)

Nodes with equal bounds come in the order of their keys, so that a search does not depend on anything but its problem. A search
that has ended can go on: with a wider cutoff, with nodes put back (`Search.push`), or under another rule for runner-ups.

Source: Land and Doig, Econometrica 28(3), 1960; best-first order: Lawler and Wood, Operations Research 14(4), 1966.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, Protocol, TypeVar

S = TypeVar("S")
"""What a problem keeps in a node."""

C = TypeVar("C")
"""A candidate: an answer whose objective is known."""

Ended = Literal["bound", "exhausted", "deadline", "effort", "candidates"]
OnProgress = Callable[[int, float | None, float], None]
"""Called with (candidates evaluated, incumbent or None, bound) after each expansion."""


@dataclass(frozen=True)
class Node(Generic[S]):
    """A node that waits: nothing below it has an objective under ``bound``; ``key`` orders nodes of equal bounds."""

    bound: float
    state: S
    key: Any = 0

    def raised(self, bound: float, *, key: Any = None) -> Node[S]:
        """Return the node with a bound that is never lower."""
        return replace(self, bound=max(bound, self.bound), key=self.key if key is None else key)


@dataclass(frozen=True)
class Leaf(Generic[C]):
    """A candidate with its objective; ``bound``: what was not looked at of its node is not below it; ``key`` orders ties."""

    objective: float
    candidate: C
    bound: float = math.inf
    key: Any = 0


@dataclass(frozen=True)
class Step(Generic[S, C]):
    """What stands in the place of an expanded node.

    Args:
        nodes: open nodes.
        leaves: candidates, feasible ones only.
        evaluated: candidates that were evaluated exactly, those that turned out infeasible included.
        effort: what the step counts against `Stop.max_effort`.
    """

    nodes: Sequence[Node[S]] = ()
    leaves: Sequence[Leaf[C]] = ()
    evaluated: int = 0
    effort: float = 0.0


class Problem(Protocol[S, C]):
    """What is searched: minimise the objective of a candidate."""

    def roots(self) -> Step[S, C]:
        """Return the nodes that hold every candidate, and candidates that are known beforehand."""
        ...

    def expand(self, node: Node[S], incumbent: float) -> Step[S, C]:
        """Return what stands in the place of a node, given the lowest objective so far."""
        ...


class Clock(Protocol):
    """A time limit, or a user who asks to stop."""

    @property
    def is_over(self) -> bool:
        """True once the search should end."""
        ...


@dataclass(frozen=True, kw_only=True)
class Stop:
    """When a search ends.

    Args:
        rel_gap: a node that is not this far under the incumbent, as a part of it, is not opened; below zero also nodes that
            are so much above it are, for ties; None: the incumbent cuts nothing off, as for runner-ups.
        below: objectives from here on are of no use.
        deadline: looked at before each expansion.
        max_effort: sum of `Step.effort` in this run, no further expansion once it is reached.
        max_leaves: candidates in this run.
    """

    rel_gap: float | None = 0.0
    below: float = math.inf
    deadline: Clock | None = None
    max_effort: float = math.inf
    max_leaves: float = math.inf

    def cutoff(self, incumbent: float) -> float:
        """Return the bound from which on nodes stay closed; for an infinite incumbent ``below``."""
        if self.rel_gap is None or math.isinf(incumbent):
            return self.below
        return min(self.below, incumbent * (1 - self.rel_gap if incumbent > 0 else 1 + self.rel_gap))


@dataclass
class Answer(Generic[C]):
    """What one run of a search leaves.

    Attributes:
        leaves: candidates in the order in which they were met.
        best: the first with the lowest objective, None without any.
        bound: no candidate of the problem has a lower objective.
        open_bound: the same of the nodes that were left open, infinite without any.
        ended: bound, exhausted: proved within the gap; deadline, effort, candidates: stopped before.
        evaluated: sum of `Step.evaluated`; ``solve_s``: wall-clock seconds.
    """

    leaves: list[Leaf[C]] = field(default_factory=list)
    best: Leaf[C] | None = None
    bound: float = -math.inf
    open_bound: float = math.inf
    ended: Ended = "exhausted"
    evaluated: int = 0
    solve_s: float = 0.0

    @property
    def objective(self) -> float:
        """The lowest objective, infinite without a candidate."""
        return math.inf if self.best is None else self.best.objective

    @property
    def is_proved(self) -> bool:
        """True where the entire problem was bounded."""
        return self.ended in ("bound", "exhausted")


class Search(Generic[S, C]):
    """Open nodes of a problem and the loop over them; see the module."""

    def __init__(self, problem: Problem[S, C]) -> None:
        """Open the roots."""
        self._problem, self._roots = problem, problem.roots()
        self._heap: list[tuple[float, Any, int, Node[S]]] = []
        self._count = itertools.count()
        self.push(self._roots.nodes)

    @property
    def bound(self) -> float:
        """The lowest bound of the open nodes, infinite without any."""
        return self._heap[0][0] if self._heap else math.inf

    @property
    def open_nodes(self) -> list[Node[S]]:
        """Nodes that wait, in the order in which they would be opened."""
        return [entry[-1] for entry in sorted(self._heap)]

    def push(self, nodes: Iterable[Node[S]]) -> None:
        """Open further nodes, or the same again."""
        for node in nodes:
            heapq.heappush(self._heap, (node.bound, node.key, next(self._count), node))

    def run(
        self,
        stop: Stop,
        *,
        expand: Callable[[Node[S], float], Step[S, C]] | None = None,
        on_progress: OnProgress | None = None,
    ) -> Answer[C]:
        """Open nodes until none may be worth it; a further call goes on where the last one ended, without an incumbent.

        Args:
            stop: when to end.
            expand: in place of the problem's own, to look for something else among the same nodes.
            on_progress: called after every expansion.
        """
        start, expand, answer = time.perf_counter(), expand or self._problem.expand, Answer[C]()
        effort, self._roots = self._add(answer, self._roots), Step()
        while (ended := self._ended(stop, answer, effort)) is None:
            node = heapq.heappop(self._heap)[-1]
            step = expand(node, answer.objective)
            self.push(step.nodes)
            effort += self._add(answer, step)
            if on_progress is not None:
                on_progress(answer.evaluated, None if answer.best is None else answer.objective, node.bound)
        answer.ended, answer.open_bound = ended, self.bound
        answer.bound = min([self.bound, answer.objective, *(leaf.bound for leaf in answer.leaves)])
        answer.solve_s = time.perf_counter() - start
        return answer

    def _ended(self, stop: Stop, answer: Answer[C], effort: float) -> Ended | None:
        if self.bound >= stop.cutoff(answer.objective):
            return "bound" if math.isfinite(self.bound) else "exhausted"
        if stop.deadline is not None and stop.deadline.is_over:
            return "deadline"
        if effort >= stop.max_effort:
            return "effort"
        return "candidates" if len(answer.leaves) >= stop.max_leaves else None

    @staticmethod
    def _add(answer: Answer[C], step: Step[S, C]) -> float:
        answer.evaluated += step.evaluated
        for leaf in step.leaves:
            answer.leaves.append(leaf)
            if answer.best is None or (leaf.objective, leaf.key) < (answer.best.objective, answer.best.key):
                answer.best = leaf
        return step.effort
