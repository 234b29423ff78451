"""Option models that several commands share, and the objects they become: model, cluster, workload, offers, offload request."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..schema.engine_facts import OWN_ENGINE, Engine
from ..schema.errors import ConfigError
from ..schema.task import Workload
from ..schema.units import GIB
from .options import OptionModel, option
from .terminal import spinner

if TYPE_CHECKING:
    from ..planner.request import OffloadRequest
    from ..schema import ClusterSpec, ModelSpec, Offer

_PRECISIONS_BY_PREFERENCE = ("bf16-mixed", "fp16-mixed", "fp32")


def complete_models(incomplete: str) -> list[str]:
    """Return the models of the catalogue that begin so; where none does, the shell offers files."""
    from ..schema.catalogue import model_names

    return [name for name in model_names() if name.startswith(incomplete)]


def complete_clusters(incomplete: str) -> list[str]:
    """Return `local`, or devices behind a count: 64xH1 becomes 64xH100-SXM-80GB."""
    from ..schema.catalogue import device_entries

    count, times, begun = incomplete.rpartition("x")
    if times and all(part.isdecimal() for part in count.split("x")):
        return [f"{count}x{name}" for name in device_entries() if name.lower().startswith(begun.lower())]
    return [name for name in ("local",) if name.startswith(incomplete)]


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A catalogue name (`meshwright models`), a config.json, or a folder that holds one.",
        autocompletion=complete_models,
    ),
]
PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json that `meshwright plan` wrote.")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout instead of a table.")]


class ProfileOptions(OptionModel):
    """Measurements of the machines."""

    profile: Path | None = option(None, "what `meshwright profile` measured of this machine.")
    allow_foreign_profile: bool = option(
        False, "use a profile of other hardware or software, or one that was edited.", needs=("profile",)
    )


class ClusterOptions(ProfileOptions):
    """The machines."""

    profile: Path | None = option(
        None, "what `meshwright profile` measured: the cluster, or with --cluster its devices."
    )
    cluster: str | None = option(
        None,
        "GPUSxDEVICE (256xH100-SXM-80GB), NODESxGPUSxDEVICE[/LINK], a cluster.toml, local (this machine, measured) or "
        "local:RANKS. Needed unless --profile (or, for cost, --offers) is given.",
        metavar="CLUSTER", complete=complete_clusters,
    )  # fmt: skip

    def read(self) -> ClusterSpec:
        """Return the cluster that was named, that the profile describes, or that was named with devices as the profile has them.

        Raises:
            ConfigError: neither is given, or the name means nothing.
            ProfileError: the profile is not of this machine or not of this cluster's devices.
        """
        from ..schema import ClusterSpec

        if self.cluster is None and self.profile is None:
            raise ConfigError("no cluster is given", help="add --cluster or --profile")
        measured = read_profiled_cluster(self) if self.profile is not None else None
        if self.cluster is None:
            assert measured is not None
            return measured
        with spinner(f"cluster {self.cluster}: a machine is measured once, in about ten seconds"):
            named = ClusterSpec.parse(self.cluster)
        if measured is None:
            return named
        from ..profilers.profiled_cluster import with_measured_devices

        return with_measured_devices(named, measured)


def read_profiled_cluster(options: ProfileOptions) -> ClusterSpec:
    """Return the cluster of a profile; what is foreign about an allowed one is said on stderr.

    Raises:
        ProfileError: it is not of this machine.
    """
    from ..profilers.files import load_profile
    from ..profilers.profiled_cluster import profiled_cluster

    assert options.profile is not None
    profile, problems = load_profile(options.profile, allow_foreign=options.allow_foreign_profile)
    for problem in problems:
        typer.echo(f"foreign profile {options.profile}: {problem}", err=True)
    return profiled_cluster(profile)


class TrainingOptions(OptionModel):
    """One training step."""

    mirrors = Workload

    global_batch_size: int
    seq_len: int
    optimizer: str
    attention: str
    engine: Engine = option(
        OWN_ENGINE, "who runs it: fsdp2 (`meshwright apply`), or megatron or deepspeed, for their own layouts.", metavar="NAME"
    )  # fmt: skip
    train: str = option(
        "full",
        "full; lora:r=16,targets=qkv+out+mlp[,frozen=nf4][,dropout=false]: adapters next to a frozen model; zeroth-order: "
        "two forward passes and no backward one.",
        metavar="HOW",
    )
    calibrate: Path | None = option(
        None, "measured runs of this cluster (columns: docs/accuracy.md); a handful corrects the model's rates.", metavar="RUNS.csv"
    )  # fmt: skip

    def calibrated(self, cluster: ClusterSpec) -> ClusterSpec:
        """Return a cluster with the correction that the runs of --calibrate make of its device's rates."""
        if self.calibrate is None:
            return cluster
        from ..validation.table_calibration import calibration_from_table

        cluster = cluster.replace(calibration=calibration_from_table(self.calibrate, cluster))
        typer.echo(f"calibration of {cluster.weakest_device.name}: {cluster.calibration}", err=True)
        return cluster

    def workload(self, model: ModelSpec, cluster: ClusterSpec, precision: str | None) -> Workload:
        """Return the workload; without a precision in the best one that the devices train in.

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
        typed, changes = self.model_dump(include={*Workload.model_fields}), parse_training(self.train)
        if "passes" in changes and self.optimizer != Workload.model_fields["optimizer"].default:
            raise ConfigError(
                f"--optimizer {self.optimizer} with --train {self.train}, which has none", help="leave it out"
            )
        return Workload(**typed, precision=precision or default_precision(cluster), **changes)


class PrecisionOptions(OptionModel):
    """The numbers."""

    precision: str | None = option(
        None, "bf16-mixed, fp16-mixed, fp8 or fp32; with --infer bf16, fp16 or fp32. Default: the best that the device has.",
        metavar="P",
    )  # fmt: skip


class OffloadOptions(OptionModel):
    """What may lie off the devices, and where."""

    offload: Literal["none", "auto", "activations", "optimizer", "params"] = option(
        "none",
        "what may lie on the host: nothing, whatever is fastest, or of one kind only (docs/offload.md). The default is none: "
        "what the host has is not known of most clusters.",
    )


class HostOptions(OptionModel):
    """The memory next to the devices."""

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

    @property
    def memory_bytes(self) -> float | None:
        """Return the memory of a node that may be used; None: as the cluster says."""
        return None if self.host_memory_gib is None else self.host_memory_gib * GIB

    def storage_bytes(self) -> float:
        """Return what may be written to the drives of a node; 0 without a folder.

        Raises:
            ConfigError: the folder is not one of this machine, so that its free space is unknown.
        """
        if self.nvme is None:
            return 0.0
        if self.nvme_gib is not None:
            return self.nvme_gib * GIB
        if not self.nvme.is_dir():
            raise ConfigError(
                f"{self.nvme} is not a folder of this machine", help="say what may be written there: --nvme-gib G"
            )
        return float(shutil.disk_usage(self.nvme).free)

    def offload_request(self, kinds: str) -> OffloadRequest | None:
        """Return what the planner may move off the devices; None: nothing.

        Raises:
            ConfigError: as for `storage_bytes`.
        """
        if kinds == "none":
            return None
        from ..planner.request import OffloadRequest

        return OffloadRequest(
            kinds=kinds,  # type: ignore[arg-type]
            host_memory_bytes=self.memory_bytes,
            storage_path=None if self.nvme is None else str(self.nvme),
            storage_bytes=self.storage_bytes(),
        )


def read_offers(cluster: ClusterOptions, step: TrainingOptions, offers: Path | None) -> tuple[Offer, ...]:
    """Return the offers of a file; none where a cluster or a profile is given instead.

    Raises:
        ConfigError: neither or both are given, or the file does not hold offers with prices.
    """
    from ..schema.offers import offers_from_file

    if offers is None:
        if cluster.cluster is None and cluster.profile is None:
            raise ConfigError(
                "--objective cost needs --cluster or --offers: neither is given",
                help="for one kind of machine: --cluster 64xH100-SXM-80GB",
            )
        return ()
    if cluster.profile is not None:
        raise ConfigError("--profile is of one machine, not of offers of several", help="use --cluster")
    if cluster.cluster is not None:
        raise ConfigError("--objective cost needs --cluster or --offers: both are given", help="leave out --cluster")
    if step.calibrate is not None:
        raise ConfigError("--calibrate corrects one cluster, not offers of several", help="use --cluster")
    return offers_from_file(str(offers))


def common_cluster(offers: Sequence[Offer]) -> ClusterSpec:
    """Return the cluster that decides the precision: the first one whose best precision is one that all others have too."""
    from ..planner import default_precision

    return max(
        (offer.cluster for offer in offers),
        key=lambda cluster: _PRECISIONS_BY_PREFERENCE.index(default_precision(cluster)),
    )
