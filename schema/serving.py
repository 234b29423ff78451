"""Serving: a model under load, as a task of two phases, and what its engine instances are told.

A deployment is a set of pools. A pool is a number of equal engine instances (replicas), each on ``layout.num_devices`` devices. An
aggregated pool prefills and decodes; a disaggregated deployment has a pool for each. An instance that decodes may have its
feed-forward parts on devices of their own (``layout.ffn_devices``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from .adapters import Adapters, FineTuning
from .base import Count, CountOrNone, Frozen
from .host_experts import ExpertsOnHost
from .speculation import Speculation
from .task import Phase, Task

ServingEngine = Literal["vllm", "sglang", "trtllm", "meshwright"]
KernelEngine = Literal["vllm", "sglang", "trtllm"]
"""Engines whose kernels were timed."""

WeightDtype = Literal["bf16", "fp16", "fp8", "nvfp4", "mxfp4", "int8", "int4", "fp32"]
CacheDtype = Literal["bf16", "fp16", "fp8", "fp32"]
Role = Literal["agg", "prefill", "decode"]
LatencyMetric = Literal["ttft", "tpot", "e2e"]
SchedulerPolicy = Literal["mixed", "prefill_first"]
ServingMode = Literal["agg", "disagg", "shared", "afd"]
"""Instances prefill and decode in the same steps; pools of their own for each; instances whose phases run at once, each on a share
of the multiprocessors; pools as of disagg, and those that decode have feed-forward parts on devices of their own (attention/FFN
disaggregation)."""

MODES: Mapping[str, ServingMode] = {
    "agg": "agg", "aggregated": "agg", "disagg": "disagg", "disaggregated": "disagg", "shared": "shared", "afd": "afd",
}  # fmt: skip
"""Modes by what they may be called."""

PrefixTier = Literal["device", "host", "storage", "none"]
"""Where the prefixes lie that requests share: in the device's cache, once for all; in the host's memory or on its drives, from
where each request fetches a copy; or nowhere, so that they are computed again."""

ServingObjective = Literal["gpus", "throughput", "cost", "latency"]

BYTES_OF: dict[str, float] = {
    "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "nvfp4": 0.5 + 1 / 16, "mxfp4": 0.5 + 1 / 32, "int4": 0.5 + 2 / 128,
}  # fmt: skip
"""Bytes of an element with its scales: nvfp4 one of 8 bits for 16 elements, mxfp4 for 32 (OCP MX 1.0), int4 of 16 bits for 128."""


class RequestClass(Frozen):
    """Requests that are alike.

    Attributes:
        share: of all requests; those of a load sum to one.
        prompt_len: tokens of a prompt; output_len: tokens generated, the first included.
        prefix_len: tokens at the start of a prompt that other requests share, so that their keys and values may be there already.
        num_prefixes: different ones, equally frequent.
    """

    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    prompt_len: Count
    output_len: Count
    prefix_len: CountOrNone = 0
    num_prefixes: Count = 1

    @model_validator(mode="after")
    def _has_something_new(self) -> RequestClass:
        if self.prefix_len >= self.prompt_len:
            raise ValueError(f"prefix_len {self.prefix_len} leaves nothing of a prompt of {self.prompt_len} tokens")
        return self


class TraceFile(Frozen):
    """Recorded requests that classes were made of; a replay reads them again.

    Attributes:
        path, sha256: of the file as it was read; num_requests: in it; longest: tokens of prompt and output of the longest.
        prefix_tokens: of blocks that come again, most of them at a time between their first and last use: the least cache that has
            them all.
        rate_scale: arrivals are so much closer together than recorded.
    """

    path: str
    sha256: str
    num_requests: Count
    longest: Count
    prefix_tokens: CountOrNone = 0
    rate_scale: PositiveFloat = 1.0


class Requests(Frozen):
    """A load: classes of requests that arrive by themselves (``rate``) or are kept in flight (``concurrency``).

    Attributes:
        rate: requests a second, of the entire deployment (open loop).
        arrival_cv: standard deviation over mean of the time between arrivals; 1: Poisson.
        concurrency: requests in flight at any time (closed loop), each followed by another.
        trace: where they were recorded; None: they were stated.
    """

    classes: tuple[RequestClass, ...] = Field(min_length=1)
    rate: PositiveFloat | None = None
    arrival_cv: NonNegativeFloat = 1.0
    concurrency: Count | None = None
    trace: TraceFile | None = None

    @model_validator(mode="after")
    def _is_one_load(self) -> Requests:
        if self.rate is not None and self.concurrency is not None:
            raise ValueError("rate (open loop) and concurrency (closed loop) exclude each other")
        total = sum(entry.share for entry in self.classes)
        if abs(total - 1) > 1e-6:
            raise ValueError(f"the shares of the classes sum to {total:g}, not to 1")
        return self

    @property
    def longest(self) -> int:
        """Return the tokens of the longest request."""
        of_classes = max(entry.prompt_len + entry.output_len for entry in self.classes)
        return of_classes if self.trace is None else max(of_classes, self.trace.longest)

    def longest_beside_prefix(self, prefixes: PrefixTier | None) -> int:
        """Return the tokens of the longest request that are its own where prefixes lie there."""
        if prefixes != "device" or self.trace is not None:
            return self.longest
        return max(entry.prompt_len + entry.output_len - entry.prefix_len for entry in self.classes)

    @property
    def stored_tokens(self) -> int:
        """Return the tokens of all prefixes that requests share, of each class its own; of a recording those that come again."""
        if self.trace is not None:
            return self.trace.prefix_tokens
        return sum(entry.num_prefixes * entry.prefix_len for entry in self.classes)

    @property
    def mean_prompt_len(self) -> float:
        """Return the tokens of a prompt, averaged over requests."""
        return sum(entry.share * entry.prompt_len for entry in self.classes)

    @property
    def mean_output_len(self) -> float:
        """Return the generated tokens of a request, averaged over requests."""
        return sum(entry.share * entry.output_len for entry in self.classes)


class LatencyLimit(Frozen):
    """A limit that requests must meet (SLO): ``ttft <= 0.5 s at the 90th percentile``.

    Attributes:
        metric: ttft: arrival to first token; tpot: mean seconds of a token after the first, of one request; e2e: arrival to last.
        quantile: share of requests that must be within it.
    """

    metric: LatencyMetric
    seconds: PositiveFloat
    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.9


class ServingLayout(Frozen):
    """How one engine instance is spread over devices: ``tp * pp * attention_dp + ffn_devices`` of them.

    Attributes:
        tp: tensor parallelism of attention and dense parts; pp: pipeline stages.
        attention_dp: ranks with requests (and caches) of their own, which share the experts; dense parts are replicated.
        ep: ranks over which experts are placed whole, of the tp * attention_dp of a stage; the rest cuts every expert (``moe_tp``).
        ffn_devices: that have the feed-forward parts, and nothing else; experts are then spread over these, and each of the ep
            groups has a copy of the dense parts, cut over its ``moe_tp`` devices. 0: the tp * attention_dp devices have all parts.
    """

    tp: Count = 1
    pp: Count = 1
    attention_dp: Count = 1
    ep: Count = 1
    ffn_devices: CountOrNone = 0

    @model_validator(mode="after")
    def _divides(self) -> ServingLayout:
        if self.ffn_devices and self.pp > 1:
            raise ValueError(f"feed-forward parts on devices of their own go with pp 1, not {self.pp}")
        if self.ffn_devices % self.ep:
            raise ValueError(f"ep {self.ep} does not divide the {self.ffn_devices} feed-forward devices")
        if not self.ffn_devices and self.stage_devices % self.ep:
            raise ValueError(
                f"ep {self.ep} does not divide the {self.stage_devices} devices of a stage (tp * attention_dp)"
            )
        return self

    @property
    def stage_devices(self) -> int:
        """Return the devices of one pipeline stage."""
        return self.tp * self.attention_dp

    @property
    def num_devices(self) -> int:
        """Return the devices of an engine instance."""
        return self.stage_devices * self.pp + self.ffn_devices

    @property
    def moe_tp(self) -> int:
        """Return the ranks that share each expert."""
        return (self.ffn_devices or self.stage_devices) // self.ep


class EngineLimits(Frozen):
    """What an engine instance is told to keep within.

    Attributes:
        max_batch: requests that run at once, per attention rank.
        max_batched_tokens: tokens of one step, per attention rank.
        chunk: tokens of a prompt that enter one step at most; None: prompts are not cut.
        block_size: tokens of a block of the cache; cache_blocks: of one attention rank.
        graph_sizes: rows for which a graph is captured; empty: none is.
        cache_fraction: of the device's memory that the engine may use (vLLM's gpu_memory_utilization and its like).
    """

    max_batch: Count
    max_batched_tokens: Count
    chunk: Count | None = None
    block_size: Count = 16
    cache_blocks: Count
    graph_sizes: tuple[Count, ...] = ()
    cache_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9


class Pool(Frozen):
    """Equal engine instances of a deployment.

    Attributes:
        role: agg: prefills and decodes.
        device: of its nodes, as the cluster names it.
        replicas: engine instances.
        adapters: that its requests name; None: none.
        speculate: what its decoding rows draft with, draft_tokens as chosen; None: they do not.
        nano_batch_rows: of an attention rank from which a step is two halves, one of which sends while the other computes;
            None: none is.
        micro_batches: that a step's rows are cut into, in flight between attention and feed-forward devices; None: where all parts
            are on the same devices. ffn_device: of the latter; None: as ``device``.
        prefill_eighths: of the multiprocessors, that prompts have in steps of their own while rows decode on the rest; None: both
            phases have the same steps.
        prefixes: where those of the load lie; None: it has none; host_prefix_bytes: of a device's part of them with the host.
        experts_on_host: the share of each layer's routed experts that lie with the host, and who computes them; None: none do.
        host_expert_bytes: of a device's part of those experts.
    """

    role: Role = "agg"
    device: str
    replicas: Count
    layout: ServingLayout
    weights: WeightDtype = "bf16"
    cache: CacheDtype = "bf16"
    limits: EngineLimits
    speculate: Speculation | None = None
    adapters: Adapters | None = None
    nano_batch_rows: Count | None = None
    micro_batches: Count | None = None
    ffn_device: str | None = None
    prefill_eighths: Annotated[int, Field(ge=1, le=7)] | None = None
    prefixes: PrefixTier | None = None
    host_prefix_bytes: NonNegativeInt = 0
    experts_on_host: ExpertsOnHost | None = None
    host_expert_bytes: NonNegativeInt = 0

    @model_validator(mode="after")
    def _says_which_experts(self) -> Pool:
        if self.experts_on_host is not None and self.experts_on_host.share is None:
            raise ValueError("experts_on_host: a pool has a share of them, not one that is open")
        return self

    @model_validator(mode="after")
    def _splits_what_decodes(self) -> Pool:
        is_split = self.layout.ffn_devices > 0
        if is_split != (self.micro_batches is not None) or (self.ffn_device is not None and not is_split):
            raise ValueError("micro_batches and ffn_device are those of a pool whose layout has ffn_devices")
        if is_split and self.role != "decode":
            raise ValueError(
                f"feed-forward parts on devices of their own are of pools that decode, not of role {self.role}"
            )
        return self

    @model_validator(mode="after")
    def _shares_plain_steps(self) -> Pool:
        if self.prefill_eighths is not None and (
            self.role != "agg"
            or self.layout.pp > 1
            or self.speculate is not None
            or self.nano_batch_rows is not None
            or self.experts_on_host is not None
        ):
            raise ValueError(
                "prefill_eighths: phases that share devices are those of a pool that prefills and decodes (role agg), with pp 1, "
                "without drafts, nano-batches and experts on the host"
            )
        return self

    @property
    def num_devices(self) -> int:
        """Return the devices of all instances."""
        return self.replicas * self.layout.num_devices


class Serving(Task):
    """A model under load, with limits on latency.

    Attributes:
        engine: whose scheduler, memory and overheads hold.
        engine_version: of its profile; None: the newest that is known.
        modes: ways of deployment that are searched.
        objective: fewest devices that meet the limits at a rate; most tokens a second and device within them; least money; least
            latency. None: gpus where a rate is given, else throughput.
        weights, cache: their types; None: bf16, or fp16 of devices without it.
        scheduler: what a step serves: mixed (decoding rows and prompts) or prefill_first; None: as the engine does by itself.
        prefix_cache: prefixes that requests share are kept where that is best; else every prompt is computed.
        speculate: tokens are drafted and checked; draft_tokens None: as many as are best, none among them.
        nano_batches: steps may be two halves where ranks send rows to experts, and are where that is quicker.
        experts_on_host: routed experts may lie in the host's memory, a given share or as many as are best; None: all are on
            the devices.
        adapters: that requests name, one each; None: none.
        fine_tuning: an adapter that is trained in the same steps, as far as the limits leave room; None: none.
    """

    fixable: ClassVar[frozenset[str] | None] = frozenset(
        {"tp", "pp", "attention_dp", "ep", "ffn_devices", "micro_batches", "prefill_eighths"}
        | {"max_batch", "max_batched_tokens", "chunk"}
    )

    requests: Requests
    limits: tuple[LatencyLimit, ...] = ()
    engine: ServingEngine = "vllm"
    engine_version: str | None = None
    modes: tuple[ServingMode, ...] = ("agg", "disagg")
    objective: ServingObjective | None = None
    weights: WeightDtype | None = None
    cache: CacheDtype | None = None
    prefix_cache: bool = True
    scheduler: SchedulerPolicy | None = None
    speculate: Speculation | None = None
    nano_batches: bool = False
    experts_on_host: ExpertsOnHost | None = None
    adapters: Adapters | None = None
    fine_tuning: FineTuning | None = None

    @model_validator(mode="after")
    def _leaves_room_for_fine_tuning(self) -> Serving:
        if self.fine_tuning is None:
            return self
        if self.modes != ("agg",) or self.requests.rate is None or not self.limits or self.speculate is not None:
            raise ValueError(
                "fine-tuning in the steps that serve is planned for instances that prefill and decode (--modes agg), at a rate, "
                "with a limit on latency (--tpot), without --speculate"
            )
        return self

    @model_validator(mode="after")
    def _separates_plain_steps(self) -> Serving:
        if "afd" not in self.modes:
            return self
        options = {
            "--speculate": self.speculate is not None,
            "--nano-batches on": self.nano_batches,
            "--experts-on-host": self.experts_on_host is not None,
            "--engine meshwright": self.engine == "meshwright",
        }
        if names := [name for name, is_set in options.items() if is_set]:
            raise ValueError(
                f"attention and feed-forward parts on devices of their own (--modes afd) are planned without {' and '.join(names)}"
            )
        return self

    @model_validator(mode="after")
    def _splits_plain_steps(self) -> Serving:
        if self.nano_batches and (self.speculate or self.fine_tuning or self.engine not in ("vllm", "sglang")):
            raise ValueError(
                "steps in two nano-batches are planned for vllm and sglang, without --speculate and --finetune; "
                f"the engine is {self.engine}"
            )
        return self

    @model_validator(mode="after")
    def _has_experts_in_plain_steps(self) -> Serving:
        if self.experts_on_host is None:
            return self
        if self.engine == "meshwright":
            raise ValueError(
                "experts on the host: our own engine has all of them on its devices; plan for vllm, sglang or trtllm"
            )
        options = {
            "--speculate": self.speculate is not None,
            "--nano-batches": self.nano_batches,
            "--finetune": self.fine_tuning is not None,
        }
        if excluded := [name for name, is_given in options.items() if is_given]:
            raise ValueError(f"experts on the host are planned without {' and '.join(excluded)}")
        return self

    @model_validator(mode="after")
    def _shares_devices(self) -> Serving:
        if "shared" not in self.modes:
            return self
        if self.engine == "meshwright":
            raise ValueError("mode shared: our own engine has one stream of steps (--engine vllm, sglang or trtllm)")
        if self.speculate is not None or self.nano_batches or self.experts_on_host is not None:
            raise ValueError(
                "mode shared: steps of phases that share devices are planned without --speculate, --nano-batches and "
                "--experts-on-host"
            )
        if self.modes == ("shared",) and self.scheduler is not None:
            raise ValueError(
                f"mode shared: --scheduler {self.scheduler} says what a step serves of both phases, which have steps of their own"
            )
        return self

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Return prefill and decoding of the mean request."""
        prompt, output = round(self.requests.mean_prompt_len), max(round(self.requests.mean_output_len), 1)
        phases = [Phase(name="prefill", num_passes=1, tokens=prompt, first_context=prompt, state="new_kv_cache")]
        if output > 1:
            phases.append(
                Phase(name="decode", num_passes=output - 1, tokens=1, first_context=prompt + 1, state="kv_cache")
            )
        return tuple(phases)

    @property
    def goal(self) -> ServingObjective:
        """Return the objective that holds."""
        return self.objective or ("gpus" if self.requests.rate is not None else "throughput")
