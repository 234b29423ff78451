"""One engine instance of a simulation: its attention ranks with queue, prompts, decoding requests and cache, step by step.

All ranks of an instance step together. A step serves prompts, or only decodes: then nothing changes but seconds and counts until a
request ends, the cache is full or a request arrives, and those steps are one stretch, worked out as arrays.

    blocks    a request holds ceil(tokens / block_size); of the decoding ones those take another block at step c whose join clock
              less their length then is c modulo block_size, so that a histogram of that remainder tells when the cache is full
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from ...schema.serving import EngineLimits, PrefixTier
from ...schema.units import FloatArray
from .engine import EngineProfile
from .step_table import EngineTable

MAX_STRETCH = 4096
_RESERVED_STRETCH = 64
"""Steps after which a queue is looked at again where the reserve shrinks with every token."""


@dataclass
class RequestStates:
    """What requests are and how far they are, lists by request."""

    prompt: list[int]
    output: list[int]
    prefix: list[int]
    has_cache: list[bool]
    made: list[int]
    queued_s: list[float]
    admitted_s: list[float]
    first_s: list[float]
    preemptions: list[int]


class Rank:
    """An attention rank: requests that wait, whose prompts are computed, that decode, and the free blocks of its cache."""

    def __init__(
        self, profile: EngineProfile, limits: EngineLimits, states: RequestStates, *, hands_over: bool = False,
        prefixes: PrefixTier = "device",
    ) -> None:  # fmt: skip
        self.limits, self.states, self.size, self.hands_over = limits, states, limits.block_size, hands_over
        self.shares_prefixes, self.has_prefixes = prefixes == "device", prefixes != "none"
        self.mixed = profile.scheduler.policy == "mixed"
        self.reserve_new, self.reserve_running = profile.admission.reserve_new, profile.admission.reserve_running
        self.reserves_all = self.reserve_new == 1 and self.reserve_running == 1
        self.waiting: deque[int] = deque()
        self.prompts: list[list[int]] = []  # request, tokens computed, tokens to compute
        self.ends: list[tuple[int, int]] = []  # heap of (clock of its last token, request)
        self.end_of: dict[int, int] = {}
        self.joined: dict[int, tuple[int, int]] = {}  # clock and cached tokens when it began to decode
        self.blocks_of: dict[int, int] = {}  # blocks of its own at that time, or all of them where they are reserved
        self.order: list[int] = []
        self.clock = self.num = self.cached = self.end_sum = self.coming = 0
        self.free = limits.cache_blocks
        self.phases = [0] * self.size
        self.now: list[tuple[int, int]] = []  # tokens of each prompt in this step
        self.max_rows = self.max_tokens = 0

    @property
    def load(self) -> int:
        """Return the requests that it has."""
        return self.coming + len(self.waiting) + len(self.prompts) + self.num

    @property
    def running(self) -> int:
        """Return the requests that it serves."""
        return len(self.prompts) + self.num

    def _tokens_of(self, request: int) -> int:
        """Return the tokens to have in the cache before its next token; those made before it was preempted among them."""
        return self.states.prompt[request] + self.states.made[request]

    def _admit(self, request: int) -> bool:
        """Take the blocks that a request starts with; return False where they are not free."""
        states, size = self.states, self.size
        shared = states.prefix[request] // size if self.shares_prefixes else 0
        tokens = self._tokens_of(request) - states.has_cache[request]
        remaining = 0 if self.hands_over else states.prompt[request] + states.output[request] - 1 - tokens
        if self.reserves_all:
            needed = -(-(tokens + remaining) // size) - shared
            if needed > self.free:
                return False
        else:
            needed = -(-tokens // size) - shared
            running = self.end_sum - self.num * self.clock
            if not self.hands_over:
                running += sum(states.output[entry[0]] for entry in self.prompts)
            ahead = self.reserve_new * remaining + self.reserve_running * running
            if needed > self.free or (self.running and needed + ahead / size > self.free):
                return False
        self.free -= needed
        self.blocks_of[request] = needed
        self.order.append(request)
        self.waiting.popleft()
        self.max_rows = max(self.max_rows, self.running + 1)
        return True

    def select(self, now_s: float, *, hold: bool = False) -> tuple[int, float, int]:
        """Choose the prompts of the next step; return their tokens, the sum of what each attends to, and how many end.

        ``hold``: no further request begins.
        """
        limits, states = self.limits, self.states
        preempted = self._make_room()
        budget = limits.max_batched_tokens - (self.num if self.mixed else 0)
        self.now = []
        for idx, (_, done, total) in enumerate(self.prompts):
            if budget <= 0:
                break
            take = min(total - done, budget, limits.chunk or budget)
            self.now.append((idx, take))
            budget -= take
        while self.waiting and not (preempted or hold) and self.running < limits.max_batch:
            request = self.waiting[0]
            if states.has_cache[request]:
                if not self._admit(request):
                    break
                states.admitted_s[request] = now_s
                self._join(request)
                states.first_s[request] = now_s
                continue
            done, total = states.prefix[request] if self.has_prefixes else 0, self._tokens_of(request)
            is_first = not self.now and not (self.mixed and self.num)
            if budget <= 0 or (limits.chunk is None and total - done > budget and not is_first):
                break
            if not self._admit(request):
                break
            if not states.made[request]:
                states.admitted_s[request] = now_s
            take = min(total - done, budget, limits.chunk) if limits.chunk is not None else total - done
            self.prompts.append([request, done, total])
            self.now.append((len(self.prompts) - 1, take))
            budget -= take
        tokens, attended, ending = 0, 0.0, 0
        for idx, take in self.now:
            _, done, total = self.prompts[idx]
            tokens, attended, ending = (
                tokens + take,
                attended + take * (done + take / 2),
                ending + (done + take == total),
            )
        if tokens:
            self.max_tokens = max(self.max_tokens, tokens + self.num * self.mixed)
        return tokens, attended, ending

    def _join(self, request: int) -> None:
        """Let a request decode: its cache is complete, and its last token so far is the next one to enter."""
        states = self.states
        end = self.clock + states.output[request] - states.made[request]
        length = self._tokens_of(request) - 1  # the newest token is not in the cache yet
        self.joined[request] = self.clock, length
        self.end_of[request] = end
        heapq.heappush(self.ends, (end, request))
        self.num, self.cached, self.end_sum = self.num + 1, self.cached + length, self.end_sum + end
        self.phases[(self.clock - length) % self.size] += 1

    def _leave(self, request: int) -> None:
        """Take a decoding request and its blocks out."""
        clock, length = self.joined.pop(request)
        tokens = length + self.clock - clock
        self.num, self.cached, self.end_sum = (
            self.num - 1,
            self.cached - tokens,
            self.end_sum - self.end_of.pop(request),
        )
        self.phases[(clock - length) % self.size] -= 1
        taken = self.blocks_of.pop(request)
        self.free += taken if self.reserves_all else -(-tokens // self.size) - (-(-length // self.size) - taken)

    def _make_room(self) -> bool:
        """Preempt the youngest requests until every decoding one has room for a token; return whether any was."""
        if self.reserves_all:
            return False
        any_preempted = False
        while self.phases[self.clock % self.size] > self.free:
            any_preempted |= self._preempt(self.order.pop())
        return any_preempted

    def _preempt(self, request: int) -> bool:
        """Take the cache of a request; return False where it ended long ago."""
        if request in self.end_of:
            self.states.made[request] = self.states.output[request] - (self.end_of[request] - self.clock)
            self._leave(request)
        else:
            idx = next((i for i, entry in enumerate(self.prompts) if entry[0] == request), None)
            if idx is None:
                return False
            del self.prompts[idx]
            self.free += self.blocks_of.pop(request)
        self.states.preemptions[request] += 1
        self.states.has_cache[request] = False
        self.waiting.appendleft(request)
        return True

    def steps_to_change(self) -> int:
        """Return how many steps decode as this one: until a request ends or the cache is full."""
        while self.end_of.get(self.ends[0][1]) != self.ends[0][0]:
            heapq.heappop(self.ends)  # preempted
        steps = self.ends[0][0] - self.clock
        if self.reserves_all:
            return steps
        if self.waiting and self.reserve_running:
            steps = min(steps, _RESERVED_STRETCH)
        cycles, free = divmod(self.free, max(self.num, 1))
        room = cycles * self.size
        if room >= steps:
            return steps
        for step in range(self.size):
            free -= self.phases[(self.clock + room + step) % self.size]
            if free < 0:
                return max(min(steps, room + step), 1)
        return steps

    def decode(self, steps: int) -> list[int]:
        """Decode so many tokens of every request; return those that end."""
        if not self.num:
            return []
        if not self.reserves_all:
            cycles, rest = divmod(steps, self.size)
            self.free -= cycles * self.num + sum(self.phases[(self.clock + step) % self.size] for step in range(rest))
        self.clock += steps
        self.cached += self.num * steps
        ended = []
        while self.ends and self.ends[0][0] <= self.clock:
            end, request = heapq.heappop(self.ends)
            if self.end_of.get(request) == end:
                ended.append(request)
                self._leave(request)
        return ended

    def compute_prompts(self, now_s: float) -> list[int]:
        """Compute the chosen tokens of prompts, each ending one giving a token; return requests that end with it."""
        states, ended = self.states, []
        for idx, take in self.now:
            entry = self.prompts[idx]
            entry[1] += take
            if entry[1] < entry[2]:
                continue
            request = entry[0]
            if not states.made[request]:
                states.first_s[request] = now_s
            states.made[request] += 1
            if self.hands_over or states.made[request] >= states.output[request]:
                ended.append(request)
                self.free += self.blocks_of.pop(request)
            else:
                self._join(request)
        if self.now:
            self.prompts = [entry for entry in self.prompts if entry[1] < entry[2]]
        self.now = []
        return ended


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
