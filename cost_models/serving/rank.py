"""An attention rank of a simulation: requests that wait, whose prompts are computed and that decode, and the blocks of its cache.

blocks    a request holds ceil(tokens / block_size); of the decoding ones those take another block at step c whose join clock
less their length then is c modulo block_size, so that a histogram of that remainder tells when the cache is full
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from ...schema.serving import EngineLimits, PrefixTier
from .engine import EngineProfile

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
