"""The ranks of an engine instance as its driver sees them: `begin` a step, `end` the oldest; and what the other ranks do.

The driver is rank 0 and computes its own part in `begin`. With stages, several steps are under way at a time: the driver starts the
next while later stages work on those before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ...schema.errors import ConfigError, RuntimeMismatchError
from ...schema.model import ModelSpec
from ...schema.runnable import why_not_runnable
from ...schema.serving import Pool
from .batch import StepBatch, decode, encode
from .executor import Executor
from .part import require_divisible, require_dtype
from .transfer import Peer

_WORDS = 4096
"""Words of the first message of a step; what is longer follows in a second one."""

_STEP, _STOP, _GIVE, _EXPECT, _INGEST = range(1, 6)


class Instance:
    """All ranks of an instance, from its rank 0."""

    def __init__(self, executor: Executor) -> None:
        self.executor, self.spec = executor, executor.spec
        self._channel = Channel(executor)
        self._under_way: deque[list[list[int] | Arriving]] = deque()

    def begin(self, batches: Sequence[StepBatch | None]) -> None:
        """Send a step to all ranks and compute this one's part."""
        full = [batch or StepBatch(()) for batch in batches]
        self._channel.send(_STEP, encode(full) if self._channel.is_needed else [])
        driver, samplers = self.executor.ranks.members[0], self.executor.ranks.samplers()
        # Receives are posted before anything else is sent: a rank that sends waits for them.
        arriving = {
            source: Arriving(batch.num_sampled, source)
            for batch, source in zip(full, samplers, strict=True)
            if source != driver
        }
        sampled = self.executor.forward(full)
        self._under_way.append([arriving.get(source, sampled or []) for source in samplers])

    def end(self) -> list[list[int]]:
        """Wait for the oldest step; return the tokens sampled for each attention rank."""
        return [part if isinstance(part, list) else part.tokens() for part in self._under_way.popleft()]

    def give(self, target: Peer, attention_rank: int, blocks: Sequence[int], length: int) -> None:
        """Send the first tokens' cache of a request to another instance."""
        self._transfer(_GIVE, [target.instance, target.attention_rank, attention_rank, length, *blocks])

    def expect(self, ticket: int, source: Peer, attention_rank: int, length: int) -> None:
        """Begin to receive a cache under a number."""
        self._transfer(_EXPECT, [source.instance, source.attention_rank, attention_rank, length, ticket])

    def ingest(self, ticket: int, blocks: Sequence[int], length: int) -> None:
        """Put a cache that was expected into blocks; without blocks it is dropped."""
        self._transfer(_INGEST, [ticket, length, *blocks])

    def _transfer(self, kind: int, words: list[int]) -> None:
        self._channel.send(kind, words)
        transfer(self.executor, kind, words)

    def stop(self) -> None:
        """Let the other ranks return from `follow`."""
        self._channel.send(_STOP, [])


class Arriving:
    """Tokens that a rank will send."""

    def __init__(self, count: int, source: int) -> None:
        self._words = torch.empty(count, dtype=torch.long)
        self._work = dist.irecv(self._words, source) if count else None

    def tokens(self) -> list[int]:
        """Wait for them."""
        if self._work is not None:
            self._work.wait()
        result: list[int] = self._words.tolist()
        return result


def follow(executor: Executor) -> None:
    """Do what the driver of this rank's instance says, until it stops."""
    channel, driver = Channel(executor), executor.ranks.members[0]
    while True:
        kind, words = channel.receive()
        if kind == _STOP:
            return
        if kind != _STEP:
            transfer(executor, kind, words)
            continue
        tokens = executor.forward(decode(words))
        if tokens:
            executor.outbox.send(torch.tensor(tokens), driver)


def transfer(executor: Executor, kind: int, words: Sequence[int]) -> None:
    """Do this rank's part of what the driver says about a cache that moves."""
    caches = executor.transfer
    assert caches is not None
    if kind == _INGEST:
        ticket, length, *blocks = words
        caches.ingest(ticket, blocks, length)
        return
    instance, other_rank, attention_rank, length, *rest = words
    if kind == _GIVE:
        caches.give(Peer(instance, other_rank), attention_rank, rest, length)
    else:
        caches.expect(rest[0], Peer(instance, other_rank), attention_rank, length)


class Channel:
    """Messages from the driver to all ranks of an instance: words of 64 bits, nothing that is unpickled."""

    def __init__(self, executor: Executor) -> None:
        self._group, self._driver = executor.ranks.everyone, executor.ranks.members[0]

    @property
    def is_needed(self) -> bool:
        """Tell whether there are other ranks."""
        return self._group is not None

    def send(self, kind: int, words: Sequence[int]) -> None:
        """Send a message; the driver alone does."""
        if self._group is None:
            return
        first = torch.zeros(_WORDS, dtype=torch.long)
        head = torch.tensor([kind, len(words), *words[: _WORDS - 2]])
        first[: len(head)] = head
        dist.broadcast(first, self._driver, group=self._group)
        if rest := words[_WORDS - 2 :]:
            dist.broadcast(torch.tensor(rest), self._driver, group=self._group)

    def receive(self) -> tuple[int, list[int]]:
        """Return the driver's next message."""
        first = torch.empty(_WORDS, dtype=torch.long)
        dist.broadcast(first, self._driver, group=self._group)
        kind, count = first[:2].tolist()
        words = first[2 : 2 + count].tolist()
        if missing := count - len(words):
            rest = torch.empty(missing, dtype=torch.long)
            dist.broadcast(rest, self._driver, group=self._group)
            words += rest.tolist()
        return kind, words


def require_servable(spec: ModelSpec, pool: Pool, *, is_single: bool = True) -> None:
    """Refuse what this version cannot serve; ``is_single``: this process is the only rank.

    Raises:
        ConfigError: types that our engine lacks, or experts on the host.
        RuntimeMismatchError: with every reason.
    """
    if pool.experts_on_host is not None:
        raise ConfigError(
            "the plan has experts in the host's memory, which our own engine has on its devices",
            help="plan without --experts-on-host",
        )
    lacking = why_not_runnable(spec)
    if pool.prefill_eighths is not None:
        raise RuntimeMismatchError(
            "our engine has one stream of steps, and cannot compute prompts on "
            f"{pool.prefill_eighths}/8 of the multiprocessors while rows decode on the others",
            help="plan with --modes agg,disagg",
        )
    if lacking:
        raise RuntimeMismatchError(f"our engine cannot serve {spec.name}", details=lacking)
    if pool.layout.ffn_devices:
        raise RuntimeMismatchError(
            f"our engine has all parts of a layer on the same devices, and the {pool.role} pool feed-forward parts on "
            f"{pool.layout.ffn_devices} of their own",
            help="plan with --modes agg,disagg",
        )
    require_dtype(pool.weights)
    require_dtype(pool.cache)
    require_divisible(spec, pool.layout)
    if is_single and pool.layout.num_devices > 1:
        raise RuntimeMismatchError(
            f"the layout needs {pool.layout.num_devices} ranks, and this process is alone",
            help="start them with `meshwright.runtime.serving.deployment.open_engine`",
        )
