"""One engine instance of a simulation: its attention ranks (rank.py) step by step.

All ranks of an instance step together. A step serves prompts, or only decodes: then nothing changes but seconds and counts until a
request ends, the cache is full or a request arrives, and those steps are one stretch, worked out as arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...schema.serving import EngineLimits, PrefixTier
from ...schema.units import FloatArray
from .engine import EngineProfile
from .rank import Rank, RequestStates
from .step_table import EngineTable

MAX_STRETCH = 4096


@dataclass
class InstanceUse:
    """What an engine instance did: integrals over time, to be divided by the seconds.

    Attributes:
        seconds: that all else is over, but for the largest values, which are those of its life.
        steps, busy_s: where prompts run at once with rows that decode, of those alone; prompt_steps, prompt_busy_s: of steps with
            prompts, the seconds only where those have steps of their own.
        max_rows, max_tokens: requests that ran at once and tokens of a step, of one attention rank.
    """

    seconds: float = 0.0
    steps: int = 0
    busy_s: float = 0.0
    prompt_tokens: int = 0
    decode_tokens: int = 0
    running_s: float = 0.0
    waiting_s: float = 0.0
    cache_s: float = 0.0
    max_running: int = 0
    max_waiting: int = 0
    max_cache: float = 0.0
    max_rows: int = 0
    max_tokens: int = 0
    prompt_steps: int = 0
    prompt_busy_s: float = 0.0

    def between(self, first: InstanceUse, last: InstanceUse) -> InstanceUse:
        """Return the integrals between two looks, with the largest values of all the time."""
        changes = {
            name: value - getattr(first, name) for name, value in vars(last).items() if not name.startswith("max_")
        }
        return replace(self, **changes)


class Instance:
    """An engine instance (or one of the pp lanes of its steps in flight)."""

    def __init__(
        self,
        table: EngineTable,
        profile: EngineProfile,
        limits: EngineLimits,
        states: RequestStates,
        *,
        ranks: int,
        hands_over: bool,
        prefixes: PrefixTier = "device",
    ) -> None:
        self.table, self.lookahead = table, profile.scheduler.lookahead_steps
        self.mixed = profile.scheduler.policy == "mixed"
        self.ranks = [Rank(profile, limits, states, hands_over=hands_over, prefixes=prefixes) for _ in range(ranks)]
        self.states, self.blocks = states, limits.cache_blocks
        self.times: FloatArray | list[float] = []
        self.steps, self.since_s, self.begun_s, self.end_s, self.version = 0, 0.0, 0.0, 0.0, 0
        self.use = InstanceUse()
        self.front_free_s = self.link_free_s = 0.0
        self.host_links_free_s = [0.0] * ranks
        self.poll_steps, self.since_poll = round(profile.scheduler.poll_steps * table.tokens_per_step), 0
        self.inbox: list[tuple[Rank, int]] = []
        self.balance_steps, self.hold_steps, self.holds = profile.scheduler.balance_steps, 0, False
        self.load = 0

    @property
    def idle(self) -> bool:
        """Return whether no step runs."""
        return self.steps == 0

    def account(self, now_s: float) -> None:
        """Add the time since the last change to the integrals."""
        use, passed = self.use, now_s - self.since_s
        running, waiting, taken = 0, 0, 0
        for rank in self.ranks:
            running, waiting = running + rank.running, waiting + rank.coming + len(rank.waiting)
            taken += self.blocks - rank.free
        cache = taken / (self.blocks * len(self.ranks))
        use.seconds += passed
        use.running_s += running * passed
        use.waiting_s += waiting * passed
        use.cache_s += cache * passed
        use.max_running, use.max_waiting = max(use.max_running, running), max(use.max_waiting, waiting)
        use.max_cache = max(use.max_cache, cache)
        self.since_s = now_s

    def look(self, now_s: float) -> InstanceUse:
        """Return a copy of what it did until now."""
        self.account(now_s)
        return replace(self.use)

    def close(self, now_s: float) -> InstanceUse:
        """Return what it did until now."""
        self.account(now_s)
        self.use.max_rows, self.use.max_tokens = (
            max(getattr(rank, name) for rank in self.ranks) for name in ("max_rows", "max_tokens")
        )
        return self.use

    def queue(self, request: int, now_s: float) -> bool:
        """Take a request; return whether the end of the running stretch moved (or one starts)."""
        self.account(now_s)
        rank = self.ranks[0] if len(self.ranks) == 1 else min(self.ranks, key=lambda entry: entry.load)
        rank.coming += 1
        self.inbox.append((rank, request))
        self.states.queued_s[request] = now_s
        if self.idle:
            return self.start(now_s)
        if self.steps == 1 or rank.running >= rank.limits.max_batch:
            return False
        last = int(np.searchsorted(self.times, now_s)) + self.lookahead
        last += -(self.since_poll + last + 1) % self.poll_steps
        if last + 1 >= self.steps:
            return False
        self.steps, self.end_s = last + 1, float(self.times[last])
        self.version += 1
        return True

    def start(self, now_s: float) -> bool:
        """Choose the next steps; return False where there is nothing to do."""
        if self.inbox and (self.since_poll % self.poll_steps == 0 or not any(rank.running for rank in self.ranks)):
            self._poll()
        hold = self.holds = self._waits_for_ranks()
        chosen = [rank.select(now_s, hold=hold) for rank in self.ranks]
        tokens = max(entry[0] for entry in chosen)
        decoding = [rank for rank in self.ranks if rank.num]
        self.version += 1
        self.begun_s = now_s
        if tokens:
            self.steps = 1
            self.end_s = now_s + self._prompt_step_s(chosen)
            return True
        if not decoding:
            self.steps = 0
            return False
        steps = min(MAX_STRETCH, *(rank.steps_to_change() for rank in decoding))
        fullest = max(decoding, key=lambda rank: rank.cached)
        mean = sum(rank.num for rank in decoding) / len(self.ranks)
        if self.inbox:
            steps = min(steps, self.poll_steps - self.since_poll % self.poll_steps)
        if hold:
            steps = min(steps, self.balance_steps - self.hold_steps)
        if steps <= 2:
            self.times, ends = [], now_s
            for step in range(steps):
                ends += self.table.decode_s(fullest.num, fullest.cached + step * fullest.num, mean)
                self.times.append(ends)
        else:
            self.times = now_s + np.cumsum(self.table.decode_steps_s(fullest.num, fullest.cached, steps, mean))
        self.steps, self.end_s = steps, float(self.times[-1])
        return True

    def _waits_for_ranks(self) -> bool:
        """Return whether prompts wait until every rank has one."""
        if not self.balance_steps or len(self.ranks) == 1:
            return False
        without = sum(not (rank.waiting or rank.prompts) for rank in self.ranks)
        if without in (0, len(self.ranks)) or not any(rank.num for rank in self.ranks):
            self.hold_steps = 0
            return False
        if self.hold_steps >= self.balance_steps:
            self.hold_steps = 0
            return False
        return True

    def _poll(self) -> None:
        """Put what has arrived into the queues."""
        for rank, request in self.inbox:
            rank.coming -= 1
            rank.waiting.append(request)
        self.inbox.clear()

    def _prompt_step_s(self, chosen: list[tuple[int, float, int]]) -> float:
        """Return the seconds of a step with prompts: of the slowest rank, with the experts of all."""
        rows = [rank.num if self.mixed or not entry[0] else 0 for rank, entry in zip(self.ranks, chosen, strict=True)]
        mean = (sum(rows) + sum(entry[0] for entry in chosen)) / len(self.ranks)
        slowest = 0.0
        for rank, num, (tokens, attended, ending) in zip(self.ranks, rows, chosen, strict=True):
            if tokens:
                slowest = max(
                    slowest,
                    self.table.prompt_s(num, rank.cached if num else 0, tokens, attended / tokens, ending, mean),
                )
        return slowest

    def finish(self) -> list[int]:
        """End the stretch; return requests that are complete (or whose prompt is, where another instance decodes)."""
        use, ended = self.use, []
        self.account(self.end_s)
        use.busy_s += self.end_s - self.begun_s
        use.steps += self.steps
        use.prompt_steps += any(rank.now for rank in self.ranks)
        self.hold_steps += self.steps if self.holds else 0
        # A step with prompts is followed by a look at what has arrived.
        self.since_poll = 0 if any(rank.now for rank in self.ranks) else self.since_poll + self.steps
        for rank in self.ranks:
            prompts = sum(take for _, take in rank.now)
            use.prompt_tokens += prompts
            decodes = rank.num and (self.mixed or not prompts)
            if decodes:
                use.decode_tokens += rank.num * self.steps
                ended += rank.decode(self.steps)
            if rank.now:
                ended += rank.compute_prompts(self.end_s)
        self.load -= len(ended)
        self.steps = 0
        return ended
