"""What a serving engine does beside its kernels, by engine and version: data of engine_profiles/, one file a version.

A version that has no file of its own follows the newest one before it.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources

from packaging.version import InvalidVersion, Version
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from ...schema.base import Frozen
from ...schema.errors import ConfigError
from ...schema.serving import EngineLimits, KernelEngine, PrefixTier, SchedulerPolicy, ServingEngine
from ...schema.units import GIB


class Scheduler(Frozen):
    """Which requests a step serves.

    Attributes:
        policy: mixed: a token of every decoding request, and prompts in what is left of the token budget; prefill_first: a step has
            prompts alone while there are any that may start.
        policies: others that it can be told.
        chunks_prompts: a prompt is cut where the budget ends; else it waits for a step that holds all of it.
        lookahead_steps: steps that are decided ahead of the one that runs (scheduling beside the device).
        balance_steps: steps for which prompts wait until every attention rank has one, so that none idles (TensorRT-LLM's
            attention_dp_config.timeout_iters).
        poll_steps: decoding steps between two looks at what has arrived (SGLang's --scheduler-recv-interval).
        max_batched_tokens, max_batch: defaults of the server; small_*: on devices below ``small_device_gib``; embedded_*: where the
            engine is called from another server's process.
    """

    policy: SchedulerPolicy
    policies: tuple[SchedulerPolicy, ...] = ()
    chunks_prompts: bool
    lookahead_steps: NonNegativeInt = 0
    poll_steps: PositiveInt = 1
    balance_steps: NonNegativeInt = 0
    max_batched_tokens: PositiveInt
    max_batch: PositiveInt
    small_device_gib: NonNegativeFloat = 0.0
    small_batched_tokens: PositiveInt = 2048
    small_batch: PositiveInt = 256
    embedded_batched_tokens: PositiveInt | None = None


class Admission(Frozen):
    """Cache that must be free for a request to start.

    Attributes:
        reserve_new: of its output, as a share; reserve_running: of what running ones have yet to put out. Where less than all is
            reserved the cache may run out: the request that started last gives its blocks back and is computed again (preemption).
    """

    reserve_new: float = Field(ge=0, le=1)
    reserve_running: float = Field(ge=0, le=1)


class MemoryUse(Frozen):
    """Device memory.

    Attributes:
        fraction: that the engine may use, of all memory, or (``of_free``) for the cache of what weights and workspace leave.
        prefix_tiers: where it can have prefixes beside the device's memory.
    """

    fraction: float = Field(gt=0, le=1)
    of_free: bool
    block_size: PositiveInt
    prefix_tiers: tuple[PrefixTier, ...] = ()


class Graphs(Frozen):
    """Rows for which a step of decoding is captured: ``first`` and ranges (from, to, by), both ends included.

    Attributes:
        with_prompts: steps with prompts are replayed too, where all their rows are so few.
    """

    with_prompts: bool = False
    first: tuple[PositiveInt, ...]
    steps: tuple[tuple[PositiveInt, PositiveInt, PositiveInt], ...]

    def sizes(self, max_batch: int) -> tuple[int, ...]:
        """Return the captured sizes that a batch may need."""
        every = {*self.first, *(size for start, end, by in self.steps for size in range(start, end + 1, by))}
        below = sorted(size for size in every if size < max_batch)
        return (
            *below,
            *([min(size for size in every if size >= max_batch)] if max(every, default=0) >= max_batch else []),
        )


class Overhead(Frozen):
    """Of a step, on the host: scheduling, preparing inputs, sampling, handing tokens on.

    Attributes:
        overlapped: beside the device's work, so that only what is longer counts.
        step_s: a step; row_s: a sequence in it; device_s: of a step between two of the device's, however much is overlapped.
        eager_kernel_s: launch of a kernel where no graph holds the step, whose time is at least that of its launches.
        draft_row_s: of a sequence in a step that checks drafts, which nothing overlaps.
    """

    overlapped: bool
    step_s: NonNegativeFloat
    row_s: NonNegativeFloat
    device_s: NonNegativeFloat = 0.0
    eager_kernel_s: NonNegativeFloat
    draft_row_s: NonNegativeFloat = 0.0


class Kernels(Frozen):
    """Kernels of a step that differ between engines.

    Attributes:
        attention: engine whose timed kernels rows that decode attend with.
        all_reduce: engines whose all-reduces within a node it has, of which it takes the fastest.
        fuses_casts: inputs are cast to 8 bits by the kernel that puts them out (a norm, attention, an activation).
        cutlass_experts: experts are multiplied by CUTLASS's kernels (TensorRT-LLM's moe_config.backend), not by the fastest ones.
    """

    attention: KernelEngine = "vllm"
    all_reduce: tuple[KernelEngine, ...] = ("vllm",)
    fuses_casts: bool = False
    cutlass_experts: bool = False


USUAL_KERNELS = Kernels()
"""Of an engine that is not named."""


class RequestCost(Frozen):
    """Of a request, in the server's front end.

    Attributes:
        fixed_s: accept, parse, hand on; token_s: tokenise a token of the prompt: both one request after the other.
        way_s: from the client to the front end, and from the engine back to the client: beside other requests'.
    """

    fixed_s: NonNegativeFloat
    token_s: NonNegativeFloat
    way_s: NonNegativeFloat


class EngineProfile(Frozen):
    """An engine of one version; released: the day, as 2025-12-03."""

    engine: ServingEngine
    version: str
    released: str
    scheduler: Scheduler
    admission: Admission
    memory: MemoryUse
    graphs: Graphs
    kernels: Kernels
    overhead: Overhead
    request: RequestCost

    @classmethod
    def named(cls, engine: str, version: str | None = None) -> EngineProfile:
        """Return the profile of an engine's version: the newest that is not newer; the newest of all where none is asked for.

        Raises:
            ConfigError: no such engine, or a version that cannot be read.
        """
        known = sorted((p for p in profiles() if p.engine == engine), key=lambda p: Version(p.version))
        if not known:
            names = sorted({profile.engine for profile in profiles()})
            raise ConfigError(f"no profile of a serving engine called {engine!r}", help=f"one of {', '.join(names)}")
        if version is None:
            return known[-1]
        try:
            version_asked_for = Version(version)
        except InvalidVersion as error:
            raise ConfigError(
                f"{engine} version {version!r} cannot be read", help=f"known: {', '.join(p.version for p in known)}"
            ) from error
        return next((p for p in reversed(known) if Version(p.version).release <= version_asked_for.release), known[0])

    def scheduled(self, policy: SchedulerPolicy | None) -> EngineProfile:
        """Return the profile under a policy; None: its own.

        Raises:
            ConfigError: the engine cannot be told so.
        """
        scheduler = self.scheduler
        if policy in (None, scheduler.policy):
            return self
        if policy not in scheduler.policies:
            raise ConfigError(
                f"--scheduler {policy}: {self.engine} {self.version} has {scheduler.policy} alone",
                help="leave it out, or --engine sglang, which has both",
            )
        return self.replace(scheduler=scheduler.replace(policy=policy))

    def limits(
        self,
        *,
        device_bytes: float,
        cache_tokens: float,
        max_batch: int | None = None,
        max_batched_tokens: int | None = None,
        longest_prompt: int = 0,
    ) -> EngineLimits:
        """Return the limits that the server sets by itself on a device, for a cache of so many tokens, but for those given.

        A server that does not cut prompts is told a budget that holds the longest one beside a token of every request.
        """
        s = self.scheduler
        small = device_bytes < s.small_device_gib * GIB
        batch = max_batch or (s.small_batch if small else s.max_batch)
        tokens = max_batched_tokens or (s.small_batched_tokens if small else s.max_batched_tokens)
        if not s.chunks_prompts and max_batched_tokens is None:
            tokens = max(tokens, longest_prompt + min(batch, 512))
        return EngineLimits(
            max_batch=batch,
            max_batched_tokens=tokens,
            chunk=tokens if s.chunks_prompts else None,
            block_size=self.memory.block_size,
            cache_blocks=max(int(cache_tokens // self.memory.block_size), 1),
            graph_sizes=self.graphs.sizes(batch),
            cache_fraction=self.memory.fraction,
        )


@cache
def profiles() -> tuple[EngineProfile, ...]:
    """Return all profiles."""
    folder = resources.files(__package__) / "engine_profiles"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    return tuple(EngineProfile.model_validate(tomllib.loads(file.read_text("utf-8"))) for file in files)
