"""The shared search: against brute force on small problems, its ends, its order among ties, and what its answers promise."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshwright.solvers.branch_and_bound import Leaf, Node, Search, Step, Stop

Subset = tuple[int, ...]


@dataclass
class Cover:
    """Cheapest set of items whose sizes reach a need: a node has decided on the first items, taken or not."""

    prices: list[float]
    sizes: list[int]
    need: int
    gap_of_leaves: float = 0.0
    opened: list[Subset] = field(default_factory=list)

    def bound(self, taken: Subset, depth: int) -> float:
        """The rest bought at the best price by size."""
        missing = max(0, self.need - sum(self.sizes[i] for i in taken))
        best = min((self.prices[i] / self.sizes[i] for i in range(depth, len(self.prices))), default=math.inf)
        return sum(self.prices[i] for i in taken) + (missing * best if missing else 0.0)

    def node(self, taken: Subset, depth: int) -> Node[tuple[Subset, int]]:
        return Node(self.bound(taken, depth), (taken, depth), key=(len(taken), taken))

    def roots(self) -> Step[tuple[Subset, int], Subset]:
        return Step([self.node((), 0)])

    def expand(self, node: Node[tuple[Subset, int]], incumbent: float) -> Step[tuple[Subset, int], Subset]:
        taken, depth = node.state
        self.opened.append(taken)
        if sum(self.sizes[i] for i in taken) >= self.need:
            price = sum(self.prices[i] for i in taken)
            return Step(leaves=[Leaf(price, taken, price - self.gap_of_leaves)], evaluated=1, effort=1)
        if depth == len(self.prices):
            return Step(evaluated=1, effort=1)
        return Step([self.node((*taken, depth), depth + 1), self.node(taken, depth + 1)])


def cheapest(cover: Cover) -> float:
    subsets = (s for n in range(len(cover.prices) + 1) for s in itertools.combinations(range(len(cover.prices)), n))
    reach = [s for s in subsets if sum(cover.sizes[i] for i in s) >= cover.need]
    return min((sum(cover.prices[i] for i in s) for s in reach), default=math.inf)


def random_cover(seed: int) -> Cover:
    rng = random.Random(seed)
    count = rng.randint(1, 8)
    return Cover(
        [rng.uniform(1, 9) for _ in range(count)], [rng.randint(1, 6) for _ in range(count)], rng.randint(1, 20)
    )


@given(st.integers(0, 10**6))
def test_small_problems_agree_with_brute_force_and_are_proved(seed: int) -> None:
    cover = random_cover(seed)
    answer = Search(cover).run(Stop())
    assert answer.objective == pytest.approx(cheapest(cover))
    assert answer.is_proved
    assert answer.bound == answer.objective


@given(st.integers(0, 10**6), st.floats(0.0, 0.5))
def test_an_answer_within_a_gap_has_an_honest_bound(seed: int, rel_gap: float) -> None:
    cover = random_cover(seed)
    answer = Search(cover).run(Stop(rel_gap=rel_gap))
    exact = cheapest(cover)
    assert answer.bound <= exact * (1 + 1e-12)
    assert answer.objective == exact == math.inf or answer.objective * (1 - rel_gap) <= exact * (1 + 1e-12)


@given(st.integers(0, 10**6), st.integers(0, 12))
def test_a_search_that_is_cut_short_has_an_honest_bound_and_can_go_on(seed: int, opened: int) -> None:
    cover = random_cover(seed)
    search = Search(cover)
    first = search.run(Stop(deadline=After(opened)))
    assert first.bound <= cheapest(cover) * (1 + 1e-12)
    assert first.ended == "deadline" or first.is_proved
    second = search.run(Stop())
    assert min(first.objective, second.objective) == pytest.approx(cheapest(cover))


@dataclass
class After:
    """A deadline that is over after some looks at it."""

    looks: int

    @property
    def is_over(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def test_nothing_below_a_limit_ends_without_a_candidate() -> None:
    cover = Cover([3.0, 4.0], [1, 1], 2)
    answer = Search(cover).run(Stop(below=7.0))
    assert (answer.best, answer.ended, answer.objective) == (None, "bound", math.inf)
    assert answer.bound == 7.0


def test_an_empty_problem_is_exhausted() -> None:
    answer = Search(Cover([1.0], [1], 2)).run(Stop())
    assert (answer.best, answer.ended, answer.bound, answer.evaluated) == (None, "exhausted", math.inf, 0)


def test_equal_bounds_open_in_the_order_of_their_keys_and_the_smaller_key_wins_a_tie() -> None:
    problem = Rows([2.0, 1.0, 1.0], [5.0, 5.0, 5.0])
    answer = Search(problem).run(Stop())
    assert problem.order == [1, 2, 0]
    assert answer.best is not None
    assert answer.best.candidate == 0


@dataclass
class Rows:
    """Candidates with a bound and an objective each; a row may have a closer bound, which it gets when its turn comes."""

    bounds: list[float]
    objectives: list[float]
    closer: list[float] | None = None
    order: list[int] = field(default_factory=list)

    def roots(self) -> Step[int, int]:
        return Step([Node(bound, row, key=(0, row)) for row, bound in enumerate(self.bounds)])

    def expand(self, node: Node[int], incumbent: float) -> Step[int, int]:
        row = node.state
        if self.closer is not None and node.key[0] == 0:
            return Step([node.raised(self.closer[row], key=(1, row))])
        self.order.append(row)
        return Step(leaves=[Leaf(self.objectives[row], row, node.bound, key=row)], evaluated=1, effort=1)


def test_a_row_with_a_raised_bound_waits_for_its_turn() -> None:
    problem = Rows([1.0, 2.0, 3.0], [6.0, 4.0, 5.0], closer=[5.5, 2.5, 0.0])
    answer = Search(problem).run(Stop())
    assert problem.order == [1, 2]  # row 0 is never evaluated, and no bound falls
    assert (answer.objective, answer.evaluated, answer.open_bound, answer.bound) == (4.0, 2, 5.5, 2.5)


def test_what_a_candidate_leaves_open_is_in_the_bound() -> None:
    answer = Search(Cover([3.0], [1], 1, gap_of_leaves=0.5)).run(Stop())
    assert (answer.objective, answer.bound) == (3.0, 2.5)


def test_effort_and_candidates_end_a_run() -> None:
    rows = Rows([1.0, 2.0, 3.0, 4.0], [9.0, 9.0, 9.0, 9.0])
    search = Search(rows)
    assert search.run(Stop(max_effort=2)).ended == "effort"
    assert rows.order == [0, 1]
    assert search.run(Stop(max_leaves=1)).ended == "candidates"
    assert rows.order == [0, 1, 2]
    assert [node.state for node in search.open_nodes] == [3]


def test_runner_ups_come_from_the_same_nodes_under_another_rule() -> None:
    rows = Rows([1.0, 2.0, 3.0, 4.0], [1.0, 9.0, 9.0, 9.0])
    search = Search(rows)
    assert search.run(Stop()).evaluated == 1

    def even(node: Node[int], incumbent: float) -> Step[int, int]:
        return rows.expand(node, incumbent) if node.state % 2 == 0 else Step()

    answer = search.run(Stop(rel_gap=None, max_leaves=1), expand=even)
    assert [leaf.candidate for leaf in answer.leaves] == [2]


def test_a_negative_gap_keeps_ties_open_where_the_objective_is_maximised() -> None:
    """Minus a rate is minimised: nodes within 10 % of the best rate are still opened."""
    rows = Rows([-100.0, -95.0, -80.0], [-100.0, -95.0, -80.0])
    answer = Search(rows).run(Stop(rel_gap=-0.1))
    assert rows.order == [0, 1]
    assert (answer.objective, answer.bound) == (-100.0, -100.0)


def test_progress_is_told_of_every_expansion() -> None:
    calls: list[tuple[int, float | None, float]] = []
    Search(Rows([1.0, 2.0], [9.0, 3.0])).run(Stop(), on_progress=lambda *state: calls.append(state))
    assert calls == [(1, 9.0, 1.0), (2, 3.0, 2.0)]


def test_candidates_known_beforehand_are_the_first_incumbent() -> None:
    class Known(Rows):
        def roots(self) -> Step[int, int]:
            return Step(super().roots().nodes, [Leaf(1.5, -1)])

    rows = Known([1.0, 2.0], [9.0, 3.0])
    answer = Search(rows).run(Stop())
    assert rows.order == [0]
    assert answer.best is not None
    assert (answer.best.candidate, answer.bound) == (-1, 1.0)
