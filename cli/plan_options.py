"""What is asked of a plan, in options: the machines, the step, its numbers, what may lie off the devices, search, money.

Planning commands take these groups: `plan` all of them, `estimate`, `compare` and `explain` some.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import typer
from pydantic import model_validator

from ..schema.base import Count
from ..schema.batch import Lengths, read_lengths
from ..schema.engine_facts import ENGINES, OWN_ENGINE, Engine
from ..schema.errors import ConfigError
from ..schema.local_updates import MAX_STEPS, SyncLimits
from ..schema.serving import ServingEngine
from ..schema.task import Workload
from ..schema.units import GIB, parse_count, parse_decimal
from .complete import complete_clusters, complete_engine_names, complete_layout
from .options import OptionModel, ProfileOptions, SolverOptions, option
from .terminal import spinner

if TYPE_CHECKING:
    from ..planner.request import OffloadRequest
    from ..schema import ClusterSpec, ModelSpec

    Runner = str
else:
    Runner = Literal[(*ENGINES, *get_args(ServingEngine))]


class TokensOfBatch(int):
    """A global batch given in tokens; how many sequences that is follows from their length."""


def parse_batch(text: str) -> int:
    """Read a global batch: sequences (512, 1k), or tokens (4M-tokens).

    Raises:
        ValueError: it is neither.
    """
    count, dash, _ = text.partition("-tokens")
    return TokensOfBatch(parse_count(count)) if dash else parse_count(text)


class ClusterOptions(ProfileOptions):
    """The machines."""

    profile: tuple[Path, ...] = option(
        (), "what `meshwright profile` measured: the cluster, or with --cluster its devices; repeat for each kind of them.",
        metavar="FILE",
    )  # fmt: skip
    cluster: str | None = option(
        None,
        "GPUSxDEVICE (256xH100-SXM-80GB), NODESxGPUSxDEVICE[/LINK], a cluster.toml, local (this machine, measured) or "
        "local:RANKS. Needed unless --profile (or, for cost, --offers) is given.",
        metavar="CLUSTER", complete=complete_clusters,
    )  # fmt: skip

    headroom: str = option(
        "0%", "memory of each device to leave free, beyond what context and collectives take.", metavar="PERCENT"
    )

    @property
    def free_fraction(self) -> float:
        """Return the headroom as a part of a device's memory.

        Raises:
            ConfigError: it is no percentage from 0 to 90.
        """
        return _fraction("--headroom", self.headroom, 90)

    def read(self) -> ClusterSpec:
        """Return the cluster that was named, with the headroom that was asked for; raises like `_named`."""
        return self._named().with_headroom(self.free_fraction)

    def _named(self) -> ClusterSpec:
        """Return the cluster that was named, that the profile describes, or that was named with devices as the profile has them.

        Raises:
            ConfigError: neither is given, or the name means nothing.
            ProfileError: the profile is not of this machine or not of this cluster's devices.
        """
        from ..schema import ClusterSpec

        if self.cluster is None:
            measured = self.profiled_cluster()
            if measured is None:
                raise ConfigError("no cluster is given", help="add --cluster or --profile")
            return measured
        of_kinds = self.profiled_clusters()
        if self.cluster == "local" and len(of_kinds) == 1:
            return of_kinds[0]
        with spinner(f"cluster {self.cluster}: a machine is measured once, in about ten seconds"):
            named = ClusterSpec.parse(self.cluster)
        if not of_kinds:
            return named
        from ..profilers.profiled_cluster import with_measured_devices

        return with_measured_devices(named, *of_kinds)


def _fraction(name: str, text: str, limit: int) -> float:
    """Read a percentage as a part of one.

    Raises:
        ConfigError: it is no percentage from 0 to ``limit``.
    """
    number, sign, rest = text.partition("%")
    try:
        percent = float(number)
    except ValueError:
        percent = math.nan
    if not 0 <= percent <= limit or not sign or rest.strip():
        raise ConfigError(f"{name} {text}: not a percentage from 0% to {limit}%", help=f"e.g. {name} 5%")
    return percent / 100


class StepOptions(OptionModel):
    """One training step, without who runs it."""

    mirrors = Workload

    global_batch_size: int = option(
        ..., "sequences in a step, or tokens: 512, 4M-tokens (k is 1024, M is 1024 x 1024).", ge=1, parse=parse_batch
    )  # fmt: skip
    seq_len: int
    optimizer: str
    update: str
    paged_states: bool
    attention: str
    loss: str
    token_dispatch: str
    recompute_modules: tuple[str, ...] = option(
        (), "what selective recompute of megatron and nemo makes again: layernorm, moe_act, mlp, moe, ...; repeat.", metavar="NAME"
    )  # fmt: skip
    train: str = option(
        "full",
        "full; lora:r=16,targets=qkv+out+mlp[,frozen=nf4][,dropout=false]: adapters next to a frozen model; zeroth-order: "
        "two forward passes and no backward one.",
        metavar="HOW",
    )
    sample_batch: str | None = option(
        None, "what MODEL, given as module:name, is called with: FILE.py that defines sample_batch, or module:name.",
        metavar="BATCH",
    )  # fmt: skip
    calibrate: Path | None = option(
        None, "measured runs of this cluster (columns: docs/accuracy.md); a handful corrects the model's rates.", metavar="RUNS.csv"
    )  # fmt: skip

    @model_validator(mode="before")
    @classmethod
    def _batch_in_sequences(cls, data: Any) -> Any:
        batch, seq_len = data.get("global_batch_size"), data.get("seq_len")
        if not isinstance(batch, TokensOfBatch) or not isinstance(seq_len, int) or seq_len < 1:
            return data
        if batch % seq_len or not batch:
            nearest = max(1, round(batch / seq_len))
            raise ConfigError(
                f"--global-batch-size: {batch:,} tokens are no whole number of sequences of {seq_len:,}",
                help=f"use --global-batch-size {nearest}: {nearest * seq_len:,} tokens",
            )
        return {**data, "global_batch_size": batch // seq_len}

    def calibrated(
        self, cluster: ClusterSpec, model: ModelSpec, precision: str | None, engine: str | None = None
    ) -> ClusterSpec:
        """Return a cluster with the correction that the runs of --calibrate make of its device's rates."""
        if self.calibrate is None:
            return cluster
        from ..validation.table_calibration import calibration_from_table

        workload = self.workload(model, cluster, precision, engine)
        cluster = cluster.replace(calibration=calibration_from_table(self.calibrate, cluster, model, workload))
        typer.echo(f"calibration of {cluster.weakest_device.name}: {cluster.calibration}", err=True)
        return cluster

    def workload(
        self, model: ModelSpec, cluster: ClusterSpec, precision: str | None, engine: str | None = None
    ) -> Workload:
        """Return the workload, of an engine where one is named; without a precision in the best one that the devices train in.

        Raises:
            ConfigError: a name or number means nothing, or the sequence is longer than the model allows.
        """
        from ..planner import default_precision
        from ..schema.task import parse_training

        if model.embedding.num_positions and self.seq_len > model.embedding.num_positions:
            raise ConfigError(
                f"seq_len {self.seq_len} exceeds the {model.embedding.num_positions} learned positions of {model.name}",
                help=f"use --seq-len {model.embedding.num_positions} or less",
            )
        typed, changes = self.model_dump(include={*Workload.model_fields} - {"lengths"}), parse_training(self.train)
        typed |= {} if engine is None else {"engine": engine}
        if "passes" in changes and self.optimizer != Workload.model_fields["optimizer"].default:
            raise ConfigError(
                f"--optimizer {self.optimizer} with --train {self.train}, which has none", help="leave it out"
            )
        return Workload(**typed, precision=precision or default_precision(cluster), **changes)


class PlannedStepOptions(StepOptions):
    """One training step, whose sequences may differ in length, and the faults that the training is to outlast."""

    lengths: Path | None = option(
        None,
        "tokens of sequences, one in each line (.gz is read too): batches are of such lengths, each scheduled by itself "
        "(docs/batch.md).",
        metavar="FILE",
    )
    max_len: int | None = option(None, "longer ones are cut to pieces of so many tokens. Default: the longest.", ge=1)
    mtbf_hours_per_device: float = option(
        50_000.0, "mean hours between faults of one device.", ge=1e-6, metavar="H", needs=("tolerate",)
    )
    tolerate: int = option(
        0, "lost nodes (devices of a single node) after which the training is to go on; the plan has a fallback for each.",
        ge=0, le=64,
    )  # fmt: skip
    sync: Literal["step", "auto"] = option(
        "step",
        "between regions: a sum of gradients each step, or local updates where these are faster (docs/regions.md); losses may then "
        "differ.",
    )
    max_local_steps: int = option(
        64, "steps of a region by itself between two sums.", ge=1, le=MAX_STEPS, needs=("sync",)
    )
    max_delay_steps: int = option(
        0,
        "steps after which a sum is taken over at the latest, while training goes on.",
        ge=0,
        le=MAX_STEPS,
        needs=("sync",),
    )
    spares: int = option(0, "nodes that stand by besides those of the plan.", ge=0, le=10_000, needs=("tolerate",))

    @model_validator(mode="before")
    @classmethod
    def _longest(cls, data: Any) -> Any:
        if data.get("lengths") is None:
            return data
        if isinstance(data.get("global_batch_size"), TokensOfBatch):
            raise ConfigError(
                "--global-batch-size in tokens with --lengths: a batch is of so many sequences", help="e.g. 512"
            )
        longest = data.get("max_len") or max(read_lengths(data["lengths"]))
        return {**data, "seq_len": longest}

    def workload(
        self, model: ModelSpec, cluster: ClusterSpec, precision: str | None, engine: str | None = None
    ) -> Workload:
        """Return the workload, with the distribution of lengths where there is one."""
        workload = super().workload(model, cluster, precision, engine)
        if self.lengths is None:
            return workload
        return workload.replace(lengths=Lengths.of(read_lengths(self.lengths), max_len=self.seq_len))

    def sync_limits(self) -> SyncLimits | None:
        """Return how far regions may go by themselves; None: not at all."""
        if self.sync == "step":
            return None
        return SyncLimits(max_local_steps=self.max_local_steps, max_delay_steps=self.max_delay_steps)


class TrainingOptions(StepOptions):
    """One training step."""

    engine: Engine = option(
        OWN_ENGINE, "who runs it: fsdp2 (`meshwright apply`), or megatron or deepspeed, for their own layouts.", metavar="NAME"
    )  # fmt: skip


class PrecisionOptions(OptionModel):
    """The numbers."""

    precision: str | None = option(
        None, "bf16-mixed, fp16-mixed, fp8, tf32 or fp32; with --infer bf16, fp16, tf32, fp32. Default: the best of the device.",
        metavar="P",
    )  # fmt: skip


class OffloadOptions(SolverOptions):
    """What may lie off the devices, and the memory next to them."""

    offload: Literal["none", "auto", "activations", "optimizer", "params"] = option(
        "none",
        "what may lie on the host: nothing, whatever is fastest, or of one kind only (docs/offload.md). The default is none: "
        "what the host has is not known of most clusters.",
    )
    host_memory_gib: float | None = option(
        None, "memory of one node that may be used. Default: as the cluster says.", ge=0, metavar="G", needs=("offload",)
    )  # fmt: skip
    nvme: Path | None = option(
        None, "a folder on each node's drives: for --offload it may hold optimizer states, for --infer all that is moved.",
        metavar="PATH", needs=("offload",),
    )  # fmt: skip
    nvme_gib: float | None = option(
        None, "what may be written there. Default: what is free on this machine.", ge=0, metavar="G", needs=("nvme",)
    )

    def request(self, **limits: Any) -> OffloadRequest | None:
        """Return what the planner may move off the devices, with further fields of the request; None: nothing.

        Raises:
            ConfigError: the folder is not one of this machine, so that its free space is unknown.
        """
        from ..planner.request import OffloadRequest

        fields = {"kinds": self.offload} | limits
        if fields["kinds"] == "none":
            return None
        storage_bytes = 0.0 if self.nvme_gib is None else self.nvme_gib * GIB
        if self.nvme is not None and self.nvme_gib is None:
            if not self.nvme.is_dir():
                raise ConfigError(
                    f"{self.nvme} is not a folder of this machine", help="say what may be written there: --nvme-gib G"
                )
            storage_bytes = float(shutil.disk_usage(self.nvme).free)
        return OffloadRequest(
            host_memory_bytes=None if self.host_memory_gib is None else self.host_memory_gib * GIB,
            storage_path=None if self.nvme is None else str(self.nvme),
            storage_bytes=storage_bytes,
            **fields,
        )


class SearchOptions(OptionModel):
    """Who runs what is planned, what a search keeps to, and what it finds next to the plan."""

    engine: Runner | None = option(
        None,
        "who runs it: fsdp2 (`meshwright apply`, the default), megatron or deepspeed, for their own layouts; with --serve vllm "
        "(the default), sglang, trtllm or meshwright.",
        metavar="NAME", complete=complete_engine_names,
    )  # fmt: skip

    fix: str = option(
        "", "layout fields to keep, e.g. tp=8,recompute=full.", metavar="A=B,...", complete=complete_layout
    )
    space: Literal["runnable", "full"] | None = option(
        None,
        "layouts to search: what meshwright apply executes, or all of the engine. Default: runnable where apply trains the model.",
    )
    prefer: Literal["plain", "fastest"] = option(
        "plain", "of layouts that may be as fast as the fastest one the simplest, or always the fastest by prediction."
    )
    batch_tolerance: str = option(
        "0%",
        "round the global batch by up to so much, up or down, where a sequence then takes less time.",
        metavar="PERCENT",
    )
    pareto: bool = option(
        False, "also find every layout (for cost: every size) that no other beats in both time and memory (money)."
    )
    expert_load: Path | None = option(
        None, "measured tokens of each expert (docs/experts.md): decide ep and where experts go."
    )
    report: Path | None = option(
        None, "a self-contained page: where the step goes, what binds it, groups on nodes and links, timeline, memory.",
        metavar="FILE.html",
    )  # fmt: skip
    trace: Path | None = option(
        None, "the predicted step for chrome://tracing or ui.perfetto.dev.", metavar="FILE.json"
    )
    explain_limit_s: float = option(
        30.0, "for what binds the plan in the page of --report; what was not reached is left out, with 0 all of it.",
        ge=0, metavar="S", needs=("report",),
    )  # fmt: skip

    @property
    def tolerance(self) -> float:
        """Return the batch tolerance as a part of the batch; raises like `_fraction`."""
        return _fraction("--batch-tolerance", self.batch_tolerance, 90)


class CostOptions(OptionModel):
    """What the cheapest plan is chosen from and must reach."""

    offers: Path | None = option(None, "what can be rented, with prices (docs/cluster.md).")
    min_tokens_per_s: float = option(0.0, "sizes that are slower do not count.", ge=0)
    tokens: float | None = option(
        None, "tokens of the whole run, e.g. 15T or 15e12.", ge=1, metavar="T", parse=parse_decimal
    )
    deadline_h: float | None = option(None, "hours the run may take.", ge=0.001, metavar="H", needs=("tokens",))
    mix: int = option(1, "offers that may be rented together.", ge=1, le=3, metavar="K")


class GenerationOptions(OptionModel):
    """What is generated, and what limits it."""

    prompt_len: Count = option(..., "tokens of each prompt.")
    generate_len: Count = option(..., "tokens to generate after each prompt.")
    batch_size: int | None = option(None, "sequences of a block on each replica. Default: what generates most.", ge=1)
    tp: int | None = option(None, "devices that hold the model together. Default: what generates most.", ge=1)
    across_nodes: bool = option(False, "devices of several nodes may hold the model together.")
    latency_limit_s: float | None = option(None, "from the prompts to the last token of a block.", ge=0, metavar="S")
    host_attention_gb_per_s: float | None = option(
        None, "keys and values that a node's processors attend to in a second.", ge=0.001, metavar="R"
    )
    storage_attention_gb_per_s: float | None = option(
        None, "keys and values that a node's drives attend to within themselves. Default: drives only store.",
        ge=0.001, metavar="R", needs=("nvme",),
    )  # fmt: skip
