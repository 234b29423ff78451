"""Batch limits as variables: how many requests run at once, how many tokens a step takes, how long a part of a prompt is.

A kind of instance stands for all of its limits until its family is opened; its bound is of the loosest of them (`loosest`). Few
values are left of each (`choices`):

max_batched_tokens   the engine's own budget and BUDGETS; an instance that only decodes has no prompts to cut: the engine's own
max_batch            the engine's own; where it lets tokens take longer than the limit on them, the most rows that meet it: with
                     fewer requests wait for nothing, with more a burst breaks the limit
chunk                what the engine does; cut or whole prompts where it lets one choose (TensorRT-LLM); a quarter of the budget
                     where prompts are unlike and the engine limits one prompt (vLLM, ours): equal ones gain nothing by sharing

on_host              where experts on the host are asked for without a share, of none and SHARES of each layer's the smallest that
                     fits and the next ones, MAX_SHARES in all
drafted              where speculation is asked for without a number, none and DRAFTED tokens
micro_batches        of instances with feed-forward devices of their own, 1 to 4 (cost_models/serving/attention_ffn.py)
prefixes             where those of the load lie: on the device; where they take more than SMALL of its cache also with the host, on
                     its drives, or nowhere; a pool that only decodes has them on the device or a copy for each request

A simulation that fails and never touched its limits fails with all looser ones too (`Touched`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...cost_models.serving.instance import InstanceUse
from ...schema import ConfigError
from ...schema.serving import EngineLimits, PrefixTier, Serving

BUDGETS = (2048, 8192, 16384)
"""vLLM's defaults of small and large devices, and SGLang's of the largest (their engine_profiles)."""

SMALL = 0.02
"""Share of the cache that prefixes may take without another place for them being tried."""

DRAFTED = (1, 2, 3, 5)
"""Tokens of a draft that are tried: each further one is accepted less often."""

SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8, 1.0)
"""Of each layer's experts that are tried in the host's memory: what they leave is cache, and so batches that share the copies."""

MAX_SHARES = 4
"""Of these an instance tries: the smallest whose weights fit, and those after it."""

UNLIKE = 4.0
"""Prompts are unlike where the longest class is so many times the shortest."""

CHUNKED_ENGINES = ("vllm", "meshwright")
"""Engines that limit the tokens of one prompt in a step apart from the step's (vLLM's --long-prefill-token-threshold)."""


@dataclass(frozen=True)
class LimitChoice:
    """What an instance is told: limits, None for the engine's own, chunk 0 for prompts that are not cut; tokens of a draft; where
    prefixes lie, None where there are none; the share of each layer's experts with the host; micro-batches, None where all parts
    are on the same devices.
    """

    max_batch: int | None = None
    max_batched_tokens: int | None = None
    chunk: int | None = None
    drafted: int = 0
    prefixes: PrefixTier | None = None
    on_host: float = 0.0
    micro_batches: int | None = None

    def chunk_of(self, limits: EngineLimits) -> int | None:
        """Return the tokens of a prompt that enter a step at most, under limits that the engine set for this choice."""
        if self.chunk is None:
            return limits.chunk
        return min(self.chunk, limits.max_batched_tokens) or None

    def with_least_budget(self) -> LimitChoice:
        """Return the limits with the fewest tokens a step, and so the least workspace, where they may be chosen."""
        return self if self.max_batched_tokens is not None else replace(self, max_batched_tokens=min(BUDGETS))


def fixed_choice(fixed: Mapping[str, Any], serving: Serving) -> LimitChoice:
    """Return the limits that were asked for.

    Raises:
        ConfigError: a chunk that the engine has no words for, or drafts that it does not make.
    """
    drafted = (serving.speculate.draft_tokens or 0) if serving.speculate else 0
    choice = LimitChoice(
        fixed.get("max_batch"), fixed.get("max_batched_tokens"), fixed.get("chunk"), drafted,
        micro_batches=fixed.get("micro_batches"),
    )  # fmt: skip
    if serving.speculate is not None and serving.engine == "meshwright":
        raise ConfigError("--speculate: our own engine drafts no tokens", help="--engine vllm, sglang or trtllm")
    if choice.chunk and choice.chunk != choice.max_batched_tokens and serving.engine not in CHUNKED_ENGINES:
        raise ConfigError(
            f"chunk {choice.chunk}: {serving.engine} cuts prompts where a step's tokens end",
            help=f"--fix max_batched_tokens={choice.chunk}, or --engine vllm",
        )
    if (choice.chunk or 0) > (max_tokens := choice.max_batched_tokens or max(BUDGETS)):
        raise ConfigError(
            f"chunk {choice.chunk}: a step takes at most {max_tokens} tokens",
            help=f"--fix max_batched_tokens={choice.chunk}",
        )
    return choice


def choices(
    role: str,
    engine: EngineLimits,
    serving: Serving,
    fixed: LimitChoice,
    max_rows: float,
    tiers: Sequence[PrefixTier | None] = (),
    shares: Sequence[float] = (),
    micro_batches: Sequence[int] = (),
) -> Iterator[LimitChoice]:
    """Yield the limits of an instance that may be best in a role, the engine's own first.

    Args:
        tiers: where prefixes may lie; shares: of each layer's experts that may lie with the host; micro_batches: that may be in
            flight, of an instance with feed-forward devices.
        engine: its own limits; max_rows: requests of an attention rank at which the limit on a token is reached, or infinite.
    """
    classes = serving.requests.classes
    budgets: list[int | None] = [fixed.max_batched_tokens]
    if fixed.max_batched_tokens is None and role != "decode":
        longest = max(entry.prompt_len for entry in classes)
        budgets += [
            size
            for size in BUDGETS
            if size != engine.max_batched_tokens and (engine.chunk is not None or size >= longest + engine.max_batch)
        ]
    batches: list[int | None] = [fixed.max_batch]
    if fixed.max_batch is None and role != "prefill" and max_rows < engine.max_batch:
        batches.append(max(math.floor(max_rows), 1))
    chunks: list[int | None] = [fixed.chunk]
    lengths = [entry.prompt_len for entry in classes]
    if fixed.chunk is None and role != "decode":
        if serving.engine in CHUNKED_ENGINES and engine.chunk and max(lengths) >= UNLIKE * min(lengths):
            chunks.append(engine.chunk // 4)
        elif serving.engine == "trtllm" and engine.chunk is None:
            chunks.append(2**30)
    drafts = [fixed.drafted]
    if serving.speculate is not None and serving.speculate.draft_tokens is None and role != "prefill":
        max_drafted = len(serving.speculate.lengths) or max(DRAFTED)
        drafts += [drafted for drafted in DRAFTED if drafted <= max_drafted]
    of_prefixes = dict.fromkeys((fixed.prefixes, *tiers))
    of_shares = dict.fromkeys((fixed.on_host, *shares))
    in_flight = dict.fromkeys((fixed.micro_batches, *micro_batches))
    for place, drafted, m, chunk, tokens, batch, share in itertools.product(
        of_prefixes, drafts, in_flight, chunks, budgets, batches, of_shares
    ):
        yield LimitChoice(batch, tokens, chunk, drafted, place, share, m)


def shares_of(serving: Serving) -> tuple[float, ...]:
    """Return the shares of each layer's experts that may lie with the host, none first where the share is open."""
    requested = serving.experts_on_host
    if requested is None:
        return (0.0,)
    return (0.0, *SHARES) if requested.share is None else (requested.share,)


FULL = 0.98
"""Share of a cache from which on requests may have waited for it."""


@dataclass(frozen=True)
class Touched:
    """What the instances of a pool reached of their limits: running requests, tokens of a step, share of the cache."""

    rows: int
    tokens: int
    cache: float

    @classmethod
    def of(cls, uses: Sequence[InstanceUse]) -> Touched:
        """Return the most of any instance."""
        return cls(*(max(getattr(use, name) for use in uses) for name in ("max_rows", "max_tokens", "max_cache")))

    def same_under(self, now: EngineLimits, other: EngineLimits) -> bool:
        """Return whether a simulation under ``now`` would be the same under ``other``, of which it touched nothing."""
        if now == other:
            return True
        return not self.reached(now) and (
            self.rows <= other.max_batch
            and self.tokens <= min(other.max_batched_tokens, other.chunk or math.inf)
            and self.cache * now.cache_blocks < FULL * other.cache_blocks
        )

    def reached(self, limits: EngineLimits) -> bool:
        """Return whether another limit may have changed what happened."""
        return (
            self.rows >= limits.max_batch
            or self.tokens >= min(limits.max_batched_tokens, limits.chunk or math.inf)
            or self.cache >= FULL
        )
