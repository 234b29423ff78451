"""The named pipeline schedules as orders: what each rank runs, in which sequence.

Every generator takes the number of ranks R and of micro-batches M (and of model chunks v) and returns an `Order` for the placement
that the schedule is defined on: `loop` for all but the V schedules, whose placement is `wave` with two chunks.

Sources: GPipe arXiv:1811.06965; 1F1B and its interleaved form arXiv:2104.04473; ZB-H1, ZB-H2 arXiv:2401.10241; ZBV
arXiv:2405.15362; DualPipeV, the V form of arXiv:2412.19437 section 3.2. The interleaved orders, ZB-H1, ZBV and DualPipeV are
those that torch 2.13 runs.

`to_torch_csv` and `from_torch_csv` are the table format that torch.distributed.pipelining loads (`compute_only`): one row a rank,
one action a cell, as in `0F0,0F1,0I0,0W0`: stage, letter, micro-batch. The letters are torch's: F forward, I gradient of the input
(our B), W gradient of the weights, B both at once (our BW); empty cells are idle. Source: torch 2.13, `_Action.from_str` and
`_PipelineScheduleRuntime._load_csv` in torch/distributed/pipelining/schedules.py.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ...schema import TrainingPlan
from ...schema.base import shown
from ...schema.errors import ConfigError
from ...schema.schedules import SCHEDULES
from .simulation import Action, Kind, Order, Pipeline, simulate


@dataclass
class _Row:
    """The actions of one rank; micro-batches of each (stage, kind) are handed out in order, those past the last are left out."""

    num_microbatches: int
    actions: list[Action] = field(default_factory=list)
    counts: dict[tuple[int, str], int] = field(default_factory=dict)
    pending: deque[tuple[int, int]] = field(default_factory=deque)

    def add(self, kind: Kind, stage: int) -> None:
        """Add the next micro-batch of F, B or BW on a stage; B makes a W pending."""
        key = (stage, "F" if kind == "F" else "B")
        i = self.counts.get(key, 0)
        self.counts[key] = i + 1
        if i < self.num_microbatches:
            self.actions.append(Action(stage, kind, i))
            if kind == "B":
                self.pending.append((stage, i))

    def add_weight(self, stage: int | None = None) -> None:
        """Add the oldest pending W, of one stage or of any; nothing when none is pending."""
        oldest = next((waiting for waiting in self.pending if stage in (None, waiting[0])), None)
        if oldest:
            self.pending.remove(oldest)
            self.actions.append(Action(oldest[0], "W", oldest[1]))

    def finished(self) -> tuple[Action, ...]:
        """Return all actions, the pending W last."""
        while self.pending:
            self.add_weight()
        return tuple(self.actions)


def gpipe(num_ranks: int, num_microbatches: int) -> Order:
    """Run all forward, then all backward passes."""
    m = num_microbatches
    return tuple(
        (*(Action(r, "F", i) for i in range(m)), *(Action(r, "BW", i) for i in range(m))) for r in range(num_ranks)
    )


def looped_bfs(num_ranks: int, num_microbatches: int, num_model_chunks: int) -> Order:
    """Run GPipe chunk by chunk: all micro-batches of one chunk before the next; backward in reverse of everything."""
    rows = []
    for r in range(num_ranks):
        stages = range(r, num_ranks * num_model_chunks, num_ranks)
        forward = [Action(s, "F", i) for s in stages for i in range(num_microbatches)]
        rows.append((*forward, *(Action(a.stage, "BW", a.micro_batch) for a in reversed(forward))))
    return tuple(rows)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Order:
    """Run R - r forward passes, then backward and forward in turn: at most R - r micro-batches stored on rank r."""
    rows = []
    for r in range(num_ranks):
        row = _Row(num_microbatches)
        for _ in range(num_ranks - 1 - r):
            row.add("F", r)
        for _ in range(num_microbatches):
            row.add("F", r)
            row.add("BW", r)
        rows.append(row.finished())
    return tuple(rows)


def interleaved(num_ranks: int, num_microbatches: int, num_model_chunks: int) -> Order:
    """Run 1F1B over v chunks a rank, micro-batches in rounds of R: the bubble of 1F1B over v."""

    def row(r: int, in_round: int) -> tuple[Action, ...]:
        warm_up = (num_model_chunks - 1) * in_round + 2 * (num_ranks - 1 - r)
        return _rounds(r, num_ranks, num_microbatches, num_model_chunks, in_round, warm_up, None)

    return _in_rounds(row, num_ranks, num_microbatches)


def interleaved_zero_bubble(num_ranks: int, num_microbatches: int, num_model_chunks: int) -> Order:
    """Interleave with split backward: rank r postpones r weight passes into its drain; memory stays that of 1F1B."""

    def row(r: int, in_round: int) -> tuple[Action, ...]:
        warm_up = (num_model_chunks - 1) * in_round + num_ranks - 1 - r
        return _rounds(r, num_ranks, num_microbatches, num_model_chunks, in_round, warm_up, r)

    if num_model_chunks == 1:  # one chunk is one round, of any length
        return tuple(row(r, num_microbatches) for r in range(num_ranks))
    return _in_rounds(row, num_ranks, num_microbatches)


def zb_h1(num_ranks: int, num_microbatches: int) -> Order:
    """Run 1F1B whose weight passes fill the drain: a third of its bubble at its memory."""
    return interleaved_zero_bubble(num_ranks, num_microbatches, 1)


def zb_h2(num_ranks: int, num_microbatches: int) -> Order:
    """Run 2 (R - r) - 1 forward passes first, postpone 2 r weight passes: no bubble with equal F, B, W, at twice the memory."""
    rows = []
    for r in range(num_ranks):
        row = _Row(num_microbatches)
        for _ in range(2 * (num_ranks - r) - 1):
            row.add("F", r)
        for i in range(num_microbatches):
            row.add("B", r)
            if i >= 2 * r:
                row.add_weight()
            row.add("F", r)
        rows.append(row.finished())
    return tuple(rows)


def zb_v(num_ranks: int, num_microbatches: int) -> Order:
    """Run ZBV: two chunks a rank in a V, the last stage next to the first; 1F1B's memory on every rank."""
    return tuple(_zb_v_row(r, num_ranks, num_microbatches) for r in range(num_ranks))


def _zb_v_row(r: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    down, up = r, 2 * num_ranks - 1 - r
    row = _Row(num_microbatches)

    def backward(stage: int) -> None:
        row.add("B", stage)
        row.add_weight(stage)

    for _ in range(2 * (num_ranks - r) - 1):
        row.add("F", down)
    for _ in range(r):
        row.add("F", up)
        row.add("F", down)
    for _ in range(num_ranks - r):
        row.add("F", up)
        backward(up)
    steady = max(2 * num_ranks - 1, num_microbatches) - num_ranks
    for _ in range(steady):
        row.add("F", down)
        backward(down)
        row.add("F", up)
        backward(up)
    for _ in range(r):
        row.add("B", down)
        row.add("B", up)
    for _ in range(num_ranks - r):
        backward(down)
    for _ in range(num_microbatches):
        row.add_weight(up)
    return row.finished()


def v_half(num_ranks: int, num_microbatches: int) -> Order:
    """Run V-half: two chunks a rank in a V, about half of 1F1B's memory; down steps take twice the time of up steps."""
    return _periodic_v(num_ranks, num_microbatches, down=2, up=1)


def v_min(num_ranks: int, num_microbatches: int) -> Order:
    """Run V-min: two chunks a rank in a V, about a third of 1F1B's memory."""
    return _periodic_v(num_ranks, num_microbatches, down=1, up=1)


def _periodic_v(num_ranks: int, num_microbatches: int, *, down: int, up: int) -> Order:
    """Repeat one micro-batch's block of F, B, W every six slots (its six passes on each rank).

    Neighbours run it `down` slots apart towards rank R-1 and `up` towards rank 0; the waits at the three turns are the least
    with which no rank has two passes in one slot. What a rank holds is proportional to the slots between F and B.
    Source: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv:2405.15362, section 3.
    """
    period, descent, ascent = 6, down * (num_ranks - 1), up * (num_ranks - 1)
    for turns in sorted(itertools.product(range(1, period + 1), repeat=3), key=lambda waits: (sum(waits), waits)):
        up_again, back, down_again = itertools.accumulate(
            (descent + turns[0], ascent + turns[1], descent + turns[2]), lambda a, b: a + b
        )
        slots = [
            (down * r, up_again + up * (num_ranks - 1 - r), back + down * r, down_again + up * (num_ranks - 1 - r))
            for r in range(num_ranks)
        ]
        if all(len({slot % period for slot in of_rank}) == len(of_rank) for of_rank in slots):
            break
    return tuple(_block_row(r, 2 * num_ranks - 1 - r, slots[r], num_microbatches, period) for r in range(num_ranks))


def _block_row(
    lower: int, upper: int, slots: tuple[int, ...], num_microbatches: int, period: int
) -> tuple[Action, ...]:
    """Return the actions of one rank by slot; each W takes a free slot soon after its B."""
    first, second = sorted(set(range(period)) - {slot % period for slot in slots})
    up_backward, low_backward = slots[2], slots[3]

    def after(slot: int, residue: int) -> int:
        return slot + 1 + (residue - slot - 1) % period

    weights = min(
        ((after(up_backward, a), after(low_backward, b)) for a, b in ((first, second), (second, first))), key=sum
    )
    passes: tuple[tuple[int, Kind], ...] = (
        (lower, "F"),
        (upper, "F"),
        (upper, "B"),
        (lower, "B"),
        (upper, "W"),
        (lower, "W"),
    )
    timed = [
        (slot + period * i, Action(stage, kind, i))
        for slot, (stage, kind) in zip((*slots, *weights), passes, strict=True)
        for i in range(num_microbatches)
    ]
    return tuple(action for _, action in sorted(timed))


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Order:
    """Run DualPipeV, its paired forward and backward passes written one after the other."""
    if num_microbatches < 2 * num_ranks:
        raise ConfigError(f"DualPipeV needs 2 x {num_ranks} micro-batches or more, got {num_microbatches}")
    return tuple(_dualpipe_v_row(r, num_ranks, num_microbatches) for r in range(num_ranks))


def _dualpipe_v_row(r: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    down, up, behind = r, 2 * num_ranks - 1 - r, num_ranks - 1 - r
    row = _Row(num_microbatches)

    def add(count: int, *passes: tuple[Kind, int]) -> None:
        for _ in range(count):
            for kind, stage in passes:
                row.add(kind, stage)

    add(2 * behind, ("F", down))
    add(r + 1, ("F", down), ("F", up))
    for _ in range(behind):
        row.add("B", up)
        row.add_weight()
        row.add("F", up)
    add(num_microbatches - 2 * num_ranks + r + 1, ("F", down), ("BW", up), ("F", up), ("BW", down))
    add(behind, ("BW", up), ("F", up), ("BW", down))
    turns = [stage for _ in range(r + 1) for stage in (up, down)]
    split_from = 2 * ((r + 1) // 2) + (0 if r % 2 else 1)  # the second half keeps its weight passes for the end
    for k, stage in enumerate(turns):
        row.add("B" if k >= split_from else "BW", stage)
    for _ in range(behind):
        row.add_weight()
        row.add("B", down)
    return row.finished()


def _in_rounds(row: Callable[[int, int], tuple[Action, ...]], num_ranks: int, num_microbatches: int) -> Order:
    rounds = max(1, num_microbatches // num_ranks)
    if num_microbatches % rounds:
        raise ConfigError(
            f"interleaved schedules need micro-batches in equal rounds: {num_microbatches} over {num_ranks} ranks",
            help=f"use {num_microbatches // num_ranks * num_ranks} or {(num_microbatches // num_ranks + 1) * num_ranks}",
        )
    return tuple(row(r, num_microbatches // rounds) for r in range(num_ranks))


def _rounds(
    r: int, num_ranks: int, num_microbatches: int, chunks: int, in_round: int, warm_up: int, postponed: int | None
) -> tuple[Action, ...]:
    """Run warm-up, then F and backward in turn, then backward; `postponed` weight passes (None: backward is not split)."""
    row = _Row(num_microbatches)
    total = chunks * num_microbatches
    warm_up = min(warm_up, total)
    for step in range(total + warm_up):
        if step < total:
            row.add("F", (step // in_round) % chunks * num_ranks + r)
        if step >= warm_up:
            done = step - warm_up
            row.add("BW" if postponed is None else "B", (chunks - 1 - (done // in_round) % chunks) * num_ranks + r)
            if postponed is not None and done >= postponed:
                row.add_weight()
    return row.finished()


ORDERS: dict[str, Callable[[int, int, int], Order]] = {
    "gpipe": lambda p, m, v: gpipe(p, m) if v == 1 else looped_bfs(p, m, v),
    "1f1b": lambda p, m, v: one_f_one_b(p, m) if v == 1 else interleaved(p, m, v),
    "zb-h1": lambda p, m, v: zb_h1(p, m) if v == 1 else interleaved_zero_bubble(p, m, v),
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


def pipeline_order(plan: TrainingPlan) -> Order:
    """Return the passes of each rank of a plan's pipeline, in its order: that of the schedule, or the one the plan brings along.

    Raises:
        ConfigError: the schedule is not defined for these numbers, or a synthesised order lacks passes, would wait for ever, or
            takes the micro-batches of the last stage out of turn (torch finds the losses by their position).
    """
    order, layout = planned_order(plan), plan.layout
    if order is None:
        order = order_of_schedule(layout.schedule, layout.pp, plan.num_microbatches, layout.num_model_chunks)
    ones, zeros = (1.0,) * len(plan.stages), (0.0,) * len(plan.stages)
    of_a_second = Pipeline(
        num_microbatches=plan.num_microbatches, rank_of_stage=plan.rank_of_stage, forward_s=ones, backward_s=ones,
        weight_s=ones, transfer_s=zeros[1:], held_bytes=ones, backward_freed_bytes=zeros, weight_freed_bytes=ones,
    )  # fmt: skip
    simulate(of_a_second, order)  # raises where passes are missing or wait for ever
    last = len(plan.stages) - 1
    turns = [action.micro_batch for row in order for action in row if (action.stage, action.kind) == (last, "F")]
    if turns != sorted(turns):
        raise ConfigError(f"the plan's pipeline_order takes the micro-batches of the last stage in the order {turns}")
    return order


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
