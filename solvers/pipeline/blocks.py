"""Orders over a V that repeat one micro-batch's block, with the fill and the drain pulled forward under a memory cap.

A block gives each of the six passes of one micro-batch on each rank a slot; repeated every six slots no two collide, and what a
rank holds is the slots between its F and its W (`cost_models.pipeline.orders.block_slots`). Forward passes go down the ranks some
slots at a time: one holds least (V-min), two about half as much as ZBV (V-half), five as much.

A repeated block never waits once it is full, but fills and drains slowly. In slots, from the first pass on, each pass of
    the fill    before the first B of stage 0, and
    the drain   after the last F of stage 0
moves to the earliest free slot behind what it needs that keeps its rank within the cap; passes between stay where they are. Then
slots in which a rank waits for nothing close up; weight passes make way for the drain to move again, and take the slots that are
free at last. Real durations come in where the weight passes are placed anew (`greedy.refill_weight_passes`) and orders compared.
Source: repeating, squeezing and reordering of Qi et al., Pipeline Parallelism with Controllable Memory, arXiv:2405.15362.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ...cost_models.pipeline.orders import KINDS, PERIOD, Action, B, Block, F, Order, Pipeline, W, block_slots
from ...schema.units import IntArray
from ..tolerances import CLOCK

MAX_DOWN = 5
"""Slots between neighbours on the way down with which a block holds as much as ZBV."""

WAITS_TRIED = 2
"""Blocks of one descent that are tried: those whose turns wait least."""


def pulled_orders(pipeline: Pipeline, cap_bytes: Sequence[float], *, max_blocks: int) -> Iterator[Order]:
    """Yield orders over a V, from the first or the last rank: the blocks that fill a memory cap [R] best, pulled forward.

    What an order holds at its fullest may be more than the cap.
    """
    more = [max(0.0, -freed) for freed in pipeline.backward_freed_bytes]
    caps = []
    for r, cap in enumerate(cap_bytes):
        resident, grown = (sum(column[s] for s in pipeline.stages_of(r)) / 2 for column in (pipeline.held_bytes, more))
        caps.append((cap - grown) / max(resident, CLOCK))
    turn = 1 if pipeline.rank_of_stage[0] == 0 else -1
    for block in fitting_blocks(caps[::turn], max_blocks):
        yield pulled_order(pipeline, cap_bytes, block[::turn])


def fitting_blocks(cap_chunks: Sequence[float], max_blocks: int) -> list[Block]:
    """Return blocks that hold so many micro-batches of one stage at most [R]: those that go down slowest, and an even one.

    Of a rank's two stages F and B are as many slots apart as on every other rank, twice the way down and the way up together.
    """
    hops = len(cap_chunks) - 1
    slowest = min(MAX_DOWN * hops, int((PERIOD * min(cap_chunks) - 2 * hops) // 2))
    limit = np.array(cap_chunks) * (1 + CLOCK)
    blocks = list[Block]()
    evens = [(down,) * hops for down in range(slowest // hops, 0, -1)]
    for down in itertools.chain.from_iterable(_descents(hops, way) for way in range(slowest, hops - 1, -1)):
        fitting = (block for block in block_slots(down) if np.all(resident_chunks(block) <= limit))
        blocks += itertools.islice(fitting, WAITS_TRIED)
        if len(blocks) >= max_blocks:
            break
    even = next(
        (block for down in evens for block in block_slots(down) if np.all(resident_chunks(block) <= limit)), None
    )
    if even is None or even in blocks[:max_blocks]:
        return blocks[:max_blocks]
    return [*blocks[: max(1, max_blocks - 1)], even][:max_blocks]


def _descents(hops: int, way: int) -> Iterator[tuple[int, ...]]:
    """Yield slots between neighbours that add up to `way`: one number for all, or one for the first ranks and less for the rest."""
    if way % hops == 0:
        yield (way // hops,) * hops
    for first, rest in itertools.combinations(range(MAX_DOWN, 0, -1), 2):
        num_first, remainder = divmod(way - rest * hops, first - rest)
        if not remainder and 0 < num_first < hops:
            yield (first,) * num_first + (rest,) * (hops - num_first)


def resident_chunks(block: Block) -> IntArray:
    """Return the most micro-batches of one stage that each rank holds under a repeated block [R]."""
    slots = np.array(block)
    kinds = np.full((len(block), PERIOD), "W")
    np.put_along_axis(kinds, slots % PERIOD, np.array([["F", "F", "B", "B"]]), axis=1)
    waiting, peak = np.zeros(len(block), dtype=np.int64), np.zeros(len(block), dtype=np.int64)
    for t in range(2 * PERIOD):  # the second time round what waits for its weight pass repeats
        kind = kinds[:, t % PERIOD]
        waiting = np.maximum(waiting + (kind == "B") - (kind == "W"), 0)
        begun = (t - slots) // PERIOD
        resident = begun[:, :2].sum(axis=1) - begun[:, 2:].sum(axis=1) + waiting
        peak = np.maximum(peak, resident) if t >= PERIOD else peak
    return peak


def pulled_order(pipeline: Pipeline, cap_bytes: Sequence[float], block: Block) -> Order:
    """Return the order of a repeated block with its fill and its drain pulled forward."""
    slots = _Slots(pipeline, cap_bytes, block)
    slots.place_weights()
    slots.pull(fill=True)
    slots.close_up()
    slots.remove_weights()
    slots.pull(fill=False)
    slots.place_weights()
    return tuple(tuple(Action(p.stage, KINDS[p.kind], p.micro_batch) for p in row) for row in slots.rows())


class _Pass(NamedTuple):
    """A pass in its slot; its kind is a position in `KINDS`."""

    slot: int
    kind: int
    stage: int
    micro_batch: int


class _Slots:
    """The slot of every pass: of F, B and, where they have slots, W; a list of each stage's micro-batches each."""

    def __init__(self, pipeline: Pipeline, cap_bytes: Sequence[float], block: Block) -> None:
        self.costs, self.cap = pipeline, cap_bytes
        # As if all that a micro-batch keeps stayed until its weight pass: in slots a B is as long as any pass.
        more = [max(0.0, -freed) for freed in pipeline.backward_freed_bytes]
        freed = [-stored - grown for stored, grown in zip(pipeline.held_bytes, more, strict=True)]
        self.change = (pipeline.held_bytes, more, freed)
        self.slot: list[list[list[int]]] = [[[] for _ in pipeline.held_bytes] for _ in (F, B)]
        for r, of_rank in enumerate(block):
            down, up = pipeline.stages_of(r)
            for kind, stage, slot in zip((F, F, B, B), (down, up, up, down), of_rank, strict=True):
                self.slot[kind][stage] = [slot + PERIOD * i for i in range(pipeline.num_microbatches)]

    def in_turn(self) -> list[_Pass]:
        """Return all passes by slot."""
        slots = np.array(self.slot)
        order = np.argsort(slots, axis=None, kind="stable")
        columns = (slots.ravel()[order], *np.unravel_index(order, slots.shape))
        return list(itertools.starmap(_Pass, zip(*(column.tolist() for column in columns), strict=True)))

    def rows(self) -> list[list[_Pass]]:
        """Return the passes of each rank by slot."""
        rows: list[list[_Pass]] = [[] for _ in range(self.costs.num_ranks)]
        for each in self.in_turn():
            rows[self.costs.rank_of_stage[each.stage]].append(each)
        return rows

    def place_weights(self) -> None:
        """Give weight passes the earliest free slots, those of the later stage first: nothing waits behind its B."""
        weights: list[list[int]] = [[] for _ in self.costs.held_bytes]
        for row in self.rows():
            stage_of_backward, taken = {p.slot: p.stage for p in row if p.kind == B}, {p.slot for p in row}
            waiting = dict.fromkeys(sorted(set(stage_of_backward.values()), reverse=True), 0)
            for slot in itertools.count():
                if slot in stage_of_backward:
                    waiting[stage_of_backward[slot]] += 1
                elif (
                    slot not in taken
                    and (stage := next((s for s, number in waiting.items() if number), None)) is not None
                ):
                    weights[stage].append(slot)
                    waiting[stage] -= 1
                elif slot > row[-1].slot:
                    break
        self.slot.append(weights)

    def remove_weights(self) -> None:
        """Leave the slots of weight passes free."""
        self.slot.pop()

    def close_up(self) -> None:
        """Move every pass, in sequence, to the first slot behind what it needs and the pass before it on its rank."""
        clock = [-1] * self.costs.num_ranks
        for _, kind, stage, i in self.in_turn():
            rank = self.costs.rank_of_stage[stage]
            clock[rank] = self.slot[kind][stage][i] = max(clock[rank], self._needed(kind, stage, i)) + 1

    def pull(self, *, fill: bool) -> None:
        """Move the passes of the drain, and with ``fill`` of the fill too, forward."""
        ranks = [_Rank(self.change, row) for row in self.rows()]
        caps = [max(rank.peak(), cap) + CLOCK for rank, cap in zip(ranks, self.cap, strict=True)]
        first_backward, last_forward = self.slot[B][0][0], self.slot[F][0][-1]
        for slot, kind, stage, i in self.in_turn():
            if (fill and slot < first_backward) or slot > last_forward:
                rank, begin = self.costs.rank_of_stage[stage], self._needed(kind, stage, i) + 1
                if begin < slot:
                    self.slot[kind][stage][i] = ranks[rank].pull(kind, stage, (begin, slot), caps[rank])

    def _needed(self, kind: int, stage: int, i: int) -> int:
        """Return the last slot of what a pass needs: its input, and the micro-batch before."""
        before = self.slot[kind][stage][i - 1] if i else -1
        if kind == F:
            return max(before, self.slot[F][stage - 1][i]) if stage else before
        if kind == W:
            return max(before, self.slot[B][stage][i])
        return max(before, self.slot[F][stage][i] if stage == self.costs.num_stages - 1 else self.slot[B][stage + 1][i])


class _Rank:
    """Which slots of a rank are free, which have a B, and the bytes that its passes add in each."""

    def __init__(self, change: Sequence[Sequence[float]], row: list[_Pass]) -> None:
        self.change, size = change, row[-1].slot + 1
        self.bytes, self.is_backward, self.is_free = (
            np.zeros(size),
            np.zeros(size, dtype=bool),
            np.ones(size, dtype=bool),
        )
        for slot, kind, stage, _ in row:
            self._set(slot, kind, stage)
        # Bytes that the first n weight passes free, which have no slots of their own.
        freed = [] if any(p.kind == W for p in row) else [change[W][p.stage] for p in row if p.kind == B]
        self.freed = np.concatenate([[0.0], np.cumsum(freed)]) if freed else None

    def _set(self, slot: int, kind: int, stage: int) -> None:
        self.bytes[slot], self.is_backward[slot], self.is_free[slot] = self.change[kind][stage], kind == B, False

    def _clear(self, slot: int) -> None:
        self.bytes[slot], self.is_backward[slot], self.is_free[slot] = 0.0, False, True

    def pull(self, kind: int, stage: int, span: tuple[int, int], cap_bytes: float) -> int:
        """Move a pass from the end of a span of slots to the earliest free one that stays within the cap, and return that."""
        begin, slot = span
        free, more = begin + np.flatnonzero(self.is_free[begin:slot]), self.change[kind][stage]
        if self.freed is None and more > 0 and len(free):  # what it adds is there for longer, and nothing else changes
            full = np.flatnonzero(np.cumsum(self.bytes[:slot])[begin:] + more > cap_bytes)
            free = free[free > begin + full[-1]] if len(full) else free
        for earlier in free.tolist():
            self._clear(slot)
            self._set(earlier, kind, stage)
            if self.freed is None or self.peak() <= cap_bytes:
                return int(earlier)
            self._clear(earlier)
            self._set(slot, kind, stage)
        return slot

    def peak(self) -> float:
        """Return the most bytes held; weight passes without slots take the free ones as soon as they may."""
        level = np.cumsum(self.bytes)
        if self.freed is not None:
            come = np.cumsum(self.is_backward)
            ahead = come - np.cumsum(self.is_free)
            waiting = ahead - np.minimum(np.minimum.accumulate(ahead), 0)
            level += self.freed[come - waiting]
        return float(level.max())
