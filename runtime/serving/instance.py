"""The ranks of an engine instance as its driver sees them: `begin` a step, `end` the oldest; and what the other ranks do.

The driver is rank 0 and computes its own part in `begin`. With stages, several steps are under way at a time: the driver starts the
next while later stages work on those before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ...schema.errors import RuntimeMismatchError
from ...schema.layout_rules import why_not_runnable
from ...schema.model import ModelSpec
from ...schema.serving import Pool
from .batch import StepBatch, decode, encode
from .executor import Executor

_WORDS = 4096
"""Words of the first message of a step; what is longer follows in a second one."""

_STEP, _STOP = 1, 2


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
        own = self.executor.forward(full)
        self._under_way.append([arriving.get(source, own or []) for source in samplers])

    def end(self) -> list[list[int]]:
        """Wait for the oldest step; return the tokens sampled for each attention rank."""
        return [part if isinstance(part, list) else part.tokens() for part in self._under_way.popleft()]

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
        tokens = executor.forward(decode(words))
        if tokens:
            executor.outbox.send(torch.tensor(tokens), driver)


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


def require_servable(spec: ModelSpec, pool: Pool) -> None:
    """Refuse what this version cannot serve.

    Raises:
        RuntimeMismatchError: with every reason.
    """
    lacking = why_not_runnable(spec)
    if lacking:
        raise RuntimeMismatchError(f"our engine cannot serve {spec.name}", details=lacking)
    if pool.layout.num_devices > 1 and not dist.is_initialized():
        raise RuntimeMismatchError(
            f"the layout needs {pool.layout.num_devices} ranks, and this process is alone",
            help="start them with `meshwright.runtime.serving.job.open_engine`",
        )
