"""Orders of a pipeline's passes: what each rank runs, in which sequence; those of the named schedules, and torch's table of one.

Every generator takes the number of ranks R and of micro-batches M (and of model chunks v) and returns an `Order` for the placement
that the schedule is defined on: `loop` for all but the V schedules, whose placement is `wave` with two chunks.

Sources: GPipe arXiv:1811.06965; 1F1B and its interleaved form arXiv:2104.04473; ZB-H1, ZB-H2 arXiv:2401.10241; ZBV
arXiv:2405.15362; DualPipeV, the V form of arXiv:2412.19437 section 3.2. The interleaved orders, ZB-H1, ZBV and DualPipeV are
those that torch 2.13 runs.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from ...schema import TrainingPlan
from ...schema.base import shown
from ...schema.errors import ConfigError
from ...schema.schedules import SCHEDULES
from ...schema.units import FloatArray, IntArray

Kind = Literal["F", "B", "W", "BW"]
"""Forward pass; gradients of the input; gradients of the weights; both gradients at once."""


class Action(NamedTuple):
    """One kind of pass of one stage over one micro-batch."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Order = tuple[tuple[Action, ...], ...]

Row = IntArray
"""The passes of one rank [3, n]: position in `KINDS`, stage, micro-batch."""

KINDS: tuple[Kind, ...] = ("F", "B", "W", "BW")
F, B, W, BW = range(4)


def as_rows(order: Order) -> list[Row]:
    """Return an order as arrays."""
    return [np.array([(KINDS.index(a.kind), a.stage, a.micro_batch) for a in row], dtype=np.int64).T for row in order]


def as_order(rows: list[Row]) -> Order:
    """Return arrays as an order."""
    return tuple(tuple(Action(stage, KINDS[kind], i) for kind, stage, i in row.T.tolist()) for row in rows)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Stages, where they are, what they cost; arrays over stages [S], transfers [S-1]. Seconds and bytes."""

    num_microbatches: int
    rank_of_stage: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    transfer_s: tuple[float, ...]
    held_bytes: tuple[float, ...]
    backward_freed_bytes: tuple[float, ...]
    weight_freed_bytes: tuple[float, ...]

    def __post_init__(self) -> None:
        freed = (self.held_bytes, self.backward_freed_bytes, self.weight_freed_bytes)
        lengths = {len(column) for column in (self.forward_s, self.backward_s, self.weight_s, *freed)}
        if lengths != {self.num_stages} or len(self.transfer_s) != self.num_stages - 1:
            raise ConfigError(f"pipeline of {self.num_stages} stages has columns of {sorted(lengths)} values")
        if set(self.rank_of_stage) != set(range(self.num_ranks)):
            raise ConfigError(f"ranks {self.rank_of_stage} leave one of 0..{self.num_ranks - 1} without a stage")
        if self.num_microbatches < 1 or any(abs(h - b - w) > 1e-6 * abs(h) for h, b, w in zip(*freed, strict=True)):
            raise ConfigError("a pipeline needs a micro-batch, and B and W must free what F holds, stage by stage")

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.rank_of_stage)

    @property
    def num_ranks(self) -> int:
        """R."""
        return max(self.rank_of_stage) + 1

    @cached_property
    def memory_changes(self) -> dict[Kind, tuple[float, ...]]:
        """Bytes that a pass of each kind adds to those held on its rank [S]."""
        return {
            "F": self.held_bytes,
            "B": tuple(-freed for freed in self.backward_freed_bytes),
            "W": tuple(-freed for freed in self.weight_freed_bytes),
            "BW": tuple(-held for held in self.held_bytes),
        }

    def hop_s(self, stage: int) -> float:
        """Return the seconds from `stage` to the next one; zero when one rank holds both."""
        return 0.0 if self.rank_of_stage[stage] == self.rank_of_stage[stage + 1] else self.transfer_s[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of one rank, in the order of the model."""
        return tuple(s for s, holder in enumerate(self.rank_of_stage) if holder == rank)

    def work_s(self) -> FloatArray:
        """Return the busy seconds of each rank in a step [R]."""
        per_stage = np.array(self.forward_s) + self.backward_s + self.weight_s
        weights = per_stage * self.num_microbatches
        return np.bincount(self.rank_of_stage, weights, self.num_ranks).astype(np.float64)


def no_order_below_s(pipeline: Pipeline, cap_bytes: Sequence[float], *, ranks_apart: bool = False) -> float:
    """Return the seconds that no order is below which holds `cap_bytes` [R] of activations at most.

    The largest over ranks r of

        head(r) + work(r) + idle(r),   idle(r) >= way(r) - F(r),

    head(r) = seconds until its first input can arrive, work(r) = busy seconds. Before the first B, which is way(r) after the first
    F, only F can run there, and the cap admits F(r) seconds of them.

    Args:
        pipeline: stages and what they cost.
        cap_bytes: of each rank.
        ranks_apart: count from each rank's own first pass on, not from the first one of all.
    """
    hops = [pipeline.hop_s(s) for s in range(pipeline.num_stages - 1)]
    heads = np.concatenate([[0.0], np.cumsum(np.array(pipeline.forward_s[:-1]) + hops)])
    tails = np.concatenate([np.cumsum((np.array(pipeline.backward_s[1:]) + hops)[::-1])[::-1], [0.0]])
    down = heads[-1] + pipeline.forward_s[-1]
    work = pipeline.work_s()
    bounds = []
    for rank in range(pipeline.num_ranks):
        stages = pipeline.stages_of(rank)
        first, last = stages[0], stages[-1]
        way = down - heads[first] + tails[last]
        resident, seconds = (
            np.array([column[s] for s in stages]) for column in (pipeline.held_bytes, pipeline.forward_s)
        )
        admitted = math.inf if np.any(resident <= 0) else cap_bytes[rank] * float(np.max(seconds / resident))
        if np.all(resident == resident[0]) and resident[0] > 0:
            admitted = math.floor(cap_bytes[rank] / resident[0]) * float(np.max(seconds))
        idle = max(0.0, way - min(admitted, float(np.sum(seconds)) * pipeline.num_microbatches))
        bounds.append((0.0 if ranks_apart else heads[first]) + work[rank] + idle)
    return float(max(bounds))


# Named schedules


def gpipe(num_ranks: int, num_microbatches: int, num_model_chunks: int = 1) -> Order:
    """Run all forward, then all backward passes; with several chunks one after the other, backward in reverse of everything."""
    rows = []
    for r in range(num_ranks):
        stages = range(r, num_ranks * num_model_chunks, num_ranks)
        forward = [Action(s, "F", i) for s in stages for i in range(num_microbatches)]
        backward = forward if num_model_chunks == 1 else reversed(forward)
        rows.append((*forward, *(a._replace(kind="BW") for a in backward)))
    return tuple(rows)


def one_f_one_b(num_ranks: int, num_microbatches: int, num_model_chunks: int = 1) -> Order:
    """Run R - r forward passes, then backward and forward in turn: at most R - r micro-batches stored on rank r.

    Interleaved over v chunks a rank, micro-batches in rounds of R: the bubble of one chunk over v.
    """
    return as_order(rows_in_rounds(num_ranks, num_microbatches, num_model_chunks, splits_backward=False))


def zb_h1(num_ranks: int, num_microbatches: int, num_model_chunks: int = 1) -> Order:
    """Run 1F1B whose weight passes fill the drain, r of them on rank r: a third of its bubble at its memory."""
    return as_order(rows_in_rounds(num_ranks, num_microbatches, num_model_chunks, splits_backward=True))


def rows_in_rounds(num_ranks: int, num_microbatches: int, num_model_chunks: int, *, splits_backward: bool) -> list[Row]:
    """Return `one_f_one_b`, or `zb_h1`: forward passes; forward and backward in turn; backward, weight passes `r` later.

    Raises:
        ConfigError: the micro-batches are not in equal rounds.
    """
    # One chunk is one round, of any length.
    rounds = max(1, num_microbatches // num_ranks) if num_model_chunks > 1 else 1
    if num_microbatches % rounds:
        raise ConfigError(
            f"interleaved schedules need micro-batches in equal rounds: {num_microbatches} over {num_ranks} ranks",
            help=f"use {num_microbatches // num_ranks * num_ranks} or {(num_microbatches // num_ranks + 1) * num_ranks}",
        )
    in_round, total = num_microbatches // rounds, num_model_chunks * num_microbatches
    step = np.arange(total)
    chunk = step // in_round % num_model_chunks
    micro_batch = step // (in_round * num_model_chunks) * in_round + step % in_round
    # Interleaved 1F1B warms up for the way there and back; with split backward passes one way is enough.
    ways = 2 if num_model_chunks > 1 and not splits_backward else 1
    rows = []
    for r in range(num_ranks):
        warm_up = min((num_model_chunks - 1) * in_round + ways * (num_ranks - 1 - r), total)
        last_chunk_first = (num_model_chunks - 1 - chunk) * num_ranks + r
        forward = np.stack([np.full(total, F), chunk * num_ranks + r, micro_batch, 3 * step])
        backward = np.stack([np.full(total, BW), last_chunk_first, micro_batch, 3 * (step + warm_up) + 1])
        passes = [forward, backward]
        if splits_backward:
            backward[0] = B
            passes.append(backward + np.array([W - B, 0, 0, 3 * r + 1])[:, None])
        in_turn = np.concatenate(passes, axis=1)
        rows.append(in_turn[:3, np.argsort(in_turn[3], kind="stable")])
    return rows


ANY = -1
"""In place of a stage: the one whose weight pass waits the longest."""


class _Row:
    """The actions of one rank; micro-batches of each (stage, kind) are handed out in order, those past the last are left out."""

    def __init__(self, num_microbatches: int) -> None:
        self.num_microbatches = num_microbatches
        self.actions: list[Action] = []
        self.counts: Counter[tuple[int, bool]] = Counter()
        self.pending: list[tuple[int, int]] = []

    def run(self, times: int, *passes: tuple[Kind, int]) -> None:
        """Add these passes so many times: the next F, B or BW of a stage, or the oldest W that waits behind a B of it."""
        for kind, stage in times * passes:
            if kind == "W":
                oldest = next((waiting for waiting in self.pending if stage in (ANY, waiting[0])), None)
                if oldest is not None:
                    self.pending.remove(oldest)
                    self.actions.append(Action(oldest[0], "W", oldest[1]))
                continue
            i = self.counts[stage, kind == "F"]
            self.counts[stage, kind == "F"] += 1
            if i < self.num_microbatches:
                self.actions.append(Action(stage, kind, i))
                if kind == "B":
                    self.pending.append((stage, i))

    def finished(self) -> tuple[Action, ...]:
        """Return all actions, the pending W last."""
        return (*self.actions, *(Action(stage, "W", i) for stage, i in self.pending))


def zb_h2(num_ranks: int, num_microbatches: int) -> Order:
    """Run 2 (R - r) - 1 forward passes first, postpone 2 r weight passes: no bubble with equal F, B, W, at twice the memory."""
    rows = []
    for r in range(num_ranks):
        row, postponed = _Row(num_microbatches), min(2 * r, num_microbatches)
        row.run(2 * (num_ranks - r) - 1, ("F", r))
        row.run(postponed, ("B", r), ("F", r))
        row.run(num_microbatches - postponed, ("B", r), ("W", r), ("F", r))
        rows.append(row.finished())
    return tuple(rows)


def zb_v(num_ranks: int, num_microbatches: int) -> Order:
    """Run ZBV: two chunks a rank in a V, the last stage next to the first; 1F1B's memory on every rank."""
    steady = max(2 * num_ranks - 1, num_microbatches) - num_ranks
    rows = []
    for r in range(num_ranks):
        row, down, up = _Row(num_microbatches), r, 2 * num_ranks - 1 - r
        row.run(2 * (num_ranks - r) - 1, ("F", down))
        row.run(r, ("F", up), ("F", down))
        row.run(num_ranks - r, ("F", up), ("B", up), ("W", up))
        row.run(steady, ("F", down), ("B", down), ("W", down), ("F", up), ("B", up), ("W", up))
        row.run(r, ("B", down), ("B", up))
        row.run(num_ranks - r, ("B", down), ("W", down))
        row.run(num_microbatches, ("W", up))
        rows.append(row.finished())
    return tuple(rows)


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Order:
    """Run DualPipeV, its paired forward and backward passes written one after the other."""
    if num_microbatches < 2 * num_ranks:
        raise ConfigError(f"DualPipeV needs 2 x {num_ranks} micro-batches or more, got {num_microbatches}")
    rows = []
    for r in range(num_ranks):
        row, down, up, behind = _Row(num_microbatches), r, 2 * num_ranks - 1 - r, num_ranks - 1 - r
        row.run(2 * behind, ("F", down))
        row.run(r + 1, ("F", down), ("F", up))
        row.run(behind, ("B", up), ("W", up), ("F", up))
        row.run(num_microbatches - 2 * num_ranks + r + 1, ("F", down), ("BW", up), ("F", up), ("BW", down))
        row.run(behind, ("BW", up), ("F", up), ("BW", down))
        # The second half keeps its weight passes for the end.
        turns, split_from = (r + 1) * (up, down), 2 * ((r + 1) // 2) + (0 if r % 2 else 1)
        row.run(1, *(("BW", stage) for stage in turns[:split_from]), *(("B", stage) for stage in turns[split_from:]))
        row.run(behind, ("W", ANY), ("B", down))
        rows.append(row.finished())
    return tuple(rows)


def v_half(num_ranks: int, num_microbatches: int) -> Order:
    """Run V-half: two chunks a rank in a V, about half of 1F1B's memory; down steps take twice the time of up steps."""
    return _periodic_v(num_ranks, num_microbatches, down=2)


def v_min(num_ranks: int, num_microbatches: int) -> Order:
    """Run V-min: two chunks a rank in a V, about a third of 1F1B's memory."""
    return _periodic_v(num_ranks, num_microbatches, down=1)


PERIOD = 6
"""Slots after which a block over a V repeats: its six passes on each rank."""


def _periodic_v(num_ranks: int, num_microbatches: int, *, down: int) -> Order:
    """Repeat one micro-batch's block of F, B, W every six slots; each W takes a free slot soon after its B."""
    slots = next(block_slots((down,) * (num_ranks - 1)))
    return tuple(_block_row(r, 2 * num_ranks - 1 - r, slots[r], num_microbatches) for r in range(num_ranks))


Block = list[tuple[int, int, int, int]]
"""One micro-batch over a V: slots of F down, F up, B up and B down on each rank."""


def block_slots(down: Sequence[int]) -> Iterator[Block]:
    """Yield blocks that repeat every six slots.

    Neighbours run it ``down`` slots [R-1] apart towards rank R-1 and one towards rank 0; the waits at the three turns are such that
    no rank has two passes in one slot of a period, those with the shortest waits first. What a rank holds is proportional to the
    slots between F and B.
    Source: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv:2405.15362, section 3.
    """
    reached, ranks = np.concatenate([[0], np.cumsum(down, dtype=np.int64)]), np.arange(len(down) + 1)
    turns = sorted(itertools.product(range(1, PERIOD + 1), repeat=3), key=lambda waits: (sum(waits), waits))
    ways = np.array(turns) + np.array([reached[-1], len(down), reached[-1]])
    up, back, down_again = np.cumsum(ways, axis=1).T[:, :, None]
    shape = (len(turns), len(ranks))
    columns = (reached, up + ranks[::-1], back + reached, down_again + ranks[::-1])
    slots = np.stack([np.broadcast_to(column, shape) for column in columns], axis=2)
    clashes = np.any(np.diff(np.sort(slots % PERIOD, axis=2), axis=2) == 0, axis=(1, 2))
    for of_ranks in slots[~clashes].tolist():
        yield [(first, second, third, fourth) for first, second, third, fourth in of_ranks]


def _block_row(lower: int, upper: int, slots: tuple[int, ...], num_microbatches: int) -> tuple[Action, ...]:
    """Return the actions of one rank by slot; each W takes a free slot soon after its B."""
    first, second = sorted(set(range(PERIOD)) - {slot % PERIOD for slot in slots})

    def after(slot: int, residue: int) -> int:
        return slot + 1 + (residue - slot - 1) % PERIOD

    free = ((after(slots[2], a), after(slots[3], b)) for a, b in ((first, second), (second, first)))
    stages = (lower, upper, upper, lower, upper, lower)
    kinds: tuple[Kind, ...] = ("F", "F", "B", "B", "W", "W")
    timed = [
        (slot + PERIOD * i, Action(stage, kind, i))
        for slot, stage, kind in zip((*slots, *min(free, key=sum)), stages, kinds, strict=True)
        for i in range(num_microbatches)
    ]
    return tuple(action for _, action in sorted(timed))


ORDERS: dict[str, Callable[[int, int, int], Order]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb-h1": zb_h1,
    "zb-h2": lambda p, m, v: zb_h2(p, m),
    "zb-v": lambda p, m, v: zb_v(p, m),
    "v-half": lambda p, m, v: v_half(p, m),
    "v-min": lambda p, m, v: v_min(p, m),
}
"""The order of each schedule of schema/schedules.py, of its ranks, micro-batches and model chunks a rank."""


def order_of_schedule(name: str, num_ranks: int, num_microbatches: int, num_model_chunks: int) -> Order:
    """Return the passes of each rank under a named schedule.

    Raises:
        ConfigError: the schedule is not defined for these numbers.
    """
    schedule = SCHEDULES[name]
    if schedule.is_given:
        raise ConfigError(
            f"schedule {name} has no passes of its own: a plan brings its order along",
            help="name one of " + ", ".join(ORDERS),
        )
    if not schedule.takes_chunks(num_model_chunks):
        raise ConfigError(f"schedule {name} is not defined for {num_model_chunks} model chunks a rank")
    return ORDERS[name](num_ranks, num_microbatches, num_model_chunks)


# The table of orders that torch.distributed.pipelining loads (`compute_only`): one row a rank, one action a cell, as in
# `0F0,0F1,0I0,0W0`: stage, letter, micro-batch; empty cells are idle. Source: torch 2.13, `_Action.from_str` and
# `_PipelineScheduleRuntime._load_csv` in torch/distributed/pipelining/schedules.py.

_TORCH_LETTERS: dict[Kind, str] = {"F": "F", "B": "I", "W": "W", "BW": "B"}


_KIND_OF_LETTER: dict[str, Kind] = {letter: kind for kind, letter in _TORCH_LETTERS.items()}


_TORCH_CELL = re.compile(r"([0-9]{1,9})([FIWB])([0-9]{1,9})")


def to_torch_csv(order: Order) -> str:
    """Return the order as text; load it with `_PipelineScheduleRuntime(...)._load_csv(path, format="compute_only")`."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([f"{a.stage}{_TORCH_LETTERS[a.kind]}{a.micro_batch}" for a in actions] for actions in order)
    return out.getvalue()


def planned_order(plan: TrainingPlan) -> Order | None:
    """Return the order that a plan of the synthesised schedule brings along; None under a named one."""
    return from_torch_csv("\n".join(plan.pipeline_order)) if plan.pipeline_order else None


def from_torch_csv(text: str) -> Order:
    """Return the order in such a text; pairs in brackets, `(0F1;3B0)OVERLAP_F_B`, are read one after the other.

    Raises:
        ConfigError: a cell that is not a pass, such as a transfer of torch's other format.
    """
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise ConfigError(f"the schedule is not CSV: {error}") from None
    return tuple(
        tuple(action for cell in row for action in _actions_of_cell(cell.strip(), rank))
        for rank, row in enumerate(rows)
    )


def _actions_of_cell(cell: str, rank: int) -> list[Action]:
    inner = cell.removeprefix("(").partition(")")[0] if cell.endswith(")OVERLAP_F_B") else cell
    actions = []
    for part in filter(None, inner.split(";")):
        match = _TORCH_CELL.fullmatch(part.strip())
        if match is None:
            raise ConfigError(
                f"schedule row {rank}: {shown(cell)} is not a pass",
                details=("expected a cell like 0F3, 0I3, 0W3 or 0B3 (compute_only)",),
            )
        actions.append(Action(int(match[1]), _KIND_OF_LETTER[match[2]], int(match[3])))
    return actions
