"""An engine instance of a simulation both of whose phases run at once: prompts and rows that decode, each in steps of its own.

Both have the same ranks, queue and cache. A step lasts as long as it does by itself on its phase's part of the devices; while both
phases run, each takes (D1) times as long (shares.py), so that a phase's progress is kept in seconds by itself and turned into
time whenever the other begins or ends.

    prompts   begin as soon as one may, in the middle of a step that decodes; the next blocks of rows that decode are not theirs
    decoding  a stretch of steps, as of any instance (instance.py); prompts that ended join its rows when a step of it ends

Where decoding finds no block, the youngest request gives up its cache, but none whose prompt is being computed: where only such
have blocks, rows wait for the end of that step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...schema.serving import EngineLimits, PrefixTier
from ...schema.units import FloatArray
from .engine import EngineProfile, Overhead
from .instance import MAX_STRETCH, Instance
from .rank import Rank, RequestStates
from .shares import SharedSteps
from .step_table import EngineTable, StepTable

_NO_OVERHEAD = Overhead(overlapped=True, step_s=0.0, row_s=0.0, eager_kernel_s=0.0)


@dataclass(frozen=True)
class SharedTables:
    """Tables of what runs beside steps that decode: those with prompts, and both phases' seconds on what they draw on together."""

    prompts: StepTable
    shared: tuple[StepTable, ...]

    @classmethod
    def of(cls, steps: SharedSteps, profile: EngineProfile, limits: EngineLimits, *, num_kernels: int) -> SharedTables:
        """Return the tables of an instance under its limits."""
        no_host = profile.replace(overhead=_NO_OVERHEAD)
        traffic = [steps.memory] if steps.links is None else [steps.memory, steps.links]
        return cls(
            StepTable(steps.prefill, profile, limits, num_kernels=num_kernels),
            tuple(StepTable(each, no_host, limits) for each in traffic),
        )


class SharedRank(Rank):
    """An attention rank whose prompts are computed while its rows decode: those that ended join when a step of these ends."""

    def __init__(
        self, profile: EngineProfile, limits: EngineLimits, states: RequestStates, *, prefixes: PrefixTier = "device"
    ) -> None:
        super().__init__(profile, limits, states, prefixes=prefixes)
        self.mixed = False
        self.joining: list[int] = []
        self.has_preempted = False

    @property
    def load(self) -> int:
        """Return the requests that it has."""
        return super().load + len(self.joining)

    @property
    def running(self) -> int:
        """Return the requests that it serves."""
        return super().running + len(self.joining)

    def _join(self, request: int) -> None:
        self.joining.append(request)

    def join_rows(self) -> None:
        """Let requests decode whose prompts have ended."""
        for request in self.joining:
            super()._join(request)
        self.joining.clear()

    def _make_room(self) -> bool:
        """Return whether rows that decode took a request's cache since prompts were chosen: none begins then, as in one step."""
        preempted, self.has_preempted = self.has_preempted, False
        return preempted

    def next_blocks(self) -> int:
        """Return the blocks that the step under way takes when it ends."""
        return 0 if self.reserves_all else self.phases[self.clock % self.size]

    def make_room_for_rows(self) -> bool:
        """Preempt the youngest requests until every row has room for a token; return False where prompts under way hold it."""
        computed = {self.prompts[idx][0] for idx, _ in self.now}
        spared: list[int] = []
        while self.next_blocks() > self.free and self.order:
            request = self.order.pop()
            if request in computed:
                spared.append(request)
            else:
                self.has_preempted |= self._preempt(request)
        self.order += reversed(spared)
        return self.next_blocks() <= self.free

    def _preempt(self, request: int) -> bool:
        """Take the cache of a request; the prompts under way are found again where one before them is gone."""
        computed = [(self.prompts[idx], take) for idx, take in self.now]
        is_preempted = super()._preempt(request)
        idx_of = {id(entry): idx for idx, entry in enumerate(self.prompts)}
        self.now = [(idx_of[id(entry)], take) for entry, take in computed]
        return is_preempted


@dataclass
class _Phase:
    """Steps under way of one phase.

    Attributes:
        ends: of its steps, in seconds by themselves from the first one's beginning [S]; empty: it does not run.
        passed: of those seconds; drawn: part of the time that it draws on each thing that phases share.
        end_s: of the last step, as things are.
    """

    ends: FloatArray
    drawn: FloatArray
    passed: float = 0.0
    end_s: float = np.inf

    @property
    def runs(self) -> bool:
        return len(self.ends) > 0

    @property
    def remaining(self) -> float:
        """Return the seconds by themselves until the last step ends."""
        return float(self.ends[-1]) - self.passed


_IDLE = np.zeros(0)


class SharedInstance(Instance):
    """An engine instance with two phases at once."""

    def __init__(
        self,
        table: EngineTable,
        profile: EngineProfile,
        limits: EngineLimits,
        states: RequestStates,
        *,
        ranks: int,
        shared: SharedTables,
        prefixes: PrefixTier = "device",
    ) -> None:
        super().__init__(table, profile, limits, states, ranks=ranks, hands_over=False, prefixes=prefixes)
        self.shared_ranks = [SharedRank(profile, limits, states, prefixes=prefixes) for _ in range(ranks)]
        self.ranks = list(self.shared_ranks)
        self.shared = shared
        self.prompts, self.rows = _Phase(_IDLE, _IDLE), _Phase(_IDLE, _IDLE)
        self.longer, self.advanced_s = 1.0, 0.0

    def queue(self, request: int, now_s: float) -> bool:
        """Take a request; return whether the next end was worked out anew."""
        self.account(now_s)
        min(self.shared_ranks, key=lambda rank: rank.load).waiting.append(request)
        self.states.queued_s[request] = now_s
        if self.prompts.runs:
            return False
        self._advance(now_s)
        self._start_prompts(now_s)
        self._set_end(now_s)
        return self.prompts.runs or self.rows.runs

    def start(self, now_s: float) -> bool:
        """Start what does not run; return False where nothing does."""
        if not self.rows.runs:
            self._start_rows()
        if not self.prompts.runs:
            self._start_prompts(now_s)
        if not (self.prompts.runs or self.rows.runs):  # a request that gave up its cache may begin again
            self._start_prompts(now_s)
        self._set_end(now_s)
        return self.prompts.runs or self.rows.runs

    def finish(self) -> list[int]:
        """End the steps that end now; return the requests that are complete."""
        now_s = self.end_s
        self.account(now_s)
        ends_rows, ends_prompts = self.rows.end_s <= now_s, self.prompts.end_s <= now_s
        self._advance(now_s)
        ended: list[int] = []
        if ends_rows:
            ended += self._apply(len(self.rows.ends))
            self.rows = _Phase(_IDLE, _IDLE)
        if ends_prompts:
            self.use.prompt_steps += 1
            for rank in self.ranks:
                self.use.prompt_tokens += sum(take for _, take in rank.now)
                ended += rank.compute_prompts(now_s)
            self.prompts = _Phase(_IDLE, _IDLE)
            if self.rows.runs and any(rank.joining for rank in self.shared_ranks):
                self._settle()
                self.rows.ends = self.rows.ends[: 1 + self.lookahead]
        self.load -= len(ended)
        return ended

    def _advance(self, now_s: float) -> None:
        """Let both phases pass the time since they last did."""
        passed = now_s - self.advanced_s
        if self.rows.runs:
            self.use.busy_s += passed
            self.rows.passed += passed / self.longer
        if self.prompts.runs:
            self.use.prompt_busy_s += passed
            self.prompts.passed += passed / self.longer
        self.advanced_s = now_s

    def _set_end(self, now_s: float) -> None:
        """Work out how much longer both phases take now (D1), and which ends next."""
        both = self.rows.runs and self.prompts.runs
        self.longer = max(float((self.rows.drawn + self.prompts.drawn).max()), 1.0) if both else 1.0
        for phase in (self.rows, self.prompts):
            phase.end_s = now_s + max(phase.remaining, 0.0) * self.longer if phase.runs else np.inf
        self.end_s, self.advanced_s = min(self.rows.end_s, self.prompts.end_s), now_s
        self.version += 1

    def _apply(self, steps: int) -> list[int]:
        """Count so many steps of decoding; return the requests that end with them."""
        ended: list[int] = []
        self.use.steps += steps
        for rank in self.ranks:
            if rank.num:
                self.use.decode_tokens += rank.num * steps
                ended += rank.decode(steps)
        return ended

    def _settle(self) -> None:
        """Count the steps of a stretch that have ended; the one under way is then its first."""
        ended = min(int(np.searchsorted(self.rows.ends, self.rows.passed, side="right")), len(self.rows.ends) - 1)
        if ended:
            self._apply(ended)
            begun = float(self.rows.ends[ended - 1])
            self.rows.ends = self.rows.ends[ended:] - begun
            self.rows.passed -= begun

    def _start_rows(self) -> None:
        """Start a stretch of steps that decode, once prompts that ended have joined."""
        for rank in self.shared_ranks:
            rank.join_rows()
        has_room = [rank.make_room_for_rows() for rank in self.shared_ranks if rank.num]
        decoding = [rank for rank in self.ranks if rank.num]
        if not decoding or not all(has_room):
            return
        steps = min(MAX_STRETCH, *(rank.steps_to_change() for rank in decoding))
        fullest = max(decoding, key=lambda rank: rank.cached)
        mean = sum(rank.num for rank in decoding) / len(self.ranks)
        ends = np.cumsum(self.table.decode_steps_s(fullest.num, fullest.cached, steps, mean))
        middle = fullest.cached + fullest.num * (steps - 1) / 2
        drawn = [table.decode_s(fullest.num, middle, mean) for table in self.shared.shared]
        self.rows = _Phase(ends, np.array(drawn) / self.table.decode_s(fullest.num, middle, mean))

    def _start_prompts(self, now_s: float) -> None:
        """Start a step with prompts where any may begin; blocks that the step of decoding under way takes are not free."""
        if self.rows.runs:
            self._settle()
        for rank in self.shared_ranks:
            rank.free -= rank.next_blocks() * self.rows.runs
        chosen = [rank.select(now_s) for rank in self.ranks]
        for rank in self.shared_ranks:
            rank.free += rank.next_blocks() * self.rows.runs
        if not any(tokens for tokens, _, _ in chosen):
            return
        seconds, drawn = self._prompts_s(chosen)
        self.prompts = _Phase(np.array([seconds]), drawn)
        if self.rows.runs:  # blocks are fewer now
            steps = min(rank.steps_to_change() for rank in self.ranks if rank.num)
            self.rows.ends = self.rows.ends[:steps]

    def _prompts_s(self, chosen: Sequence[tuple[int, float, int]]) -> tuple[float, FloatArray]:
        """Return the seconds of a step with prompts by itself, of the slowest rank, and what it draws of shared things."""
        mean = sum(tokens for tokens, _, _ in chosen) / len(chosen)
        sizes = [(0, 0, tokens, attended / tokens, ending, mean) for tokens, attended, ending in chosen if tokens]
        seconds, slowest = max((self.shared.prompts.prompt_s(*size), size) for size in sizes)
        return seconds, np.array([table.prompt_s(*slowest) for table in self.shared.shared]) / seconds
