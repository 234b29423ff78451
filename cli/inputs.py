"""Turn what the user typed into the objects that several commands start from: model, cluster, workload, offers, offload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from ..planner.request import OffloadRequest
    from ..planner.tasks.generation import GenerationRequest
    from ..schema import ClusterSpec, ModelSpec, Offer, Workload


def complete_models(incomplete: str) -> list[str]:
    """Models that begin so; where none does, the shell offers files."""
    from ..schema.catalogue import model_names

    return [name for name in model_names() if name.startswith(incomplete)]


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A catalogue name (`meshwright models`), a config.json, or a folder that holds one.",
        autocompletion=complete_models,
    ),
]


CLUSTER_HELP = (
    "GPUSxDEVICE (256xH100-SXM-80GB), NODESxGPUSxDEVICE[/LINK], a cluster.toml, "
    "local (this machine, measured) or local:RANKS."
)


def complete_clusters(incomplete: str) -> list[str]:
    """`local`, or devices behind a count: 64xH1 becomes 64xH100-SXM-80GB."""
    from ..schema.catalogue import device_entries

    count, times, begun = incomplete.rpartition("x")
    if times and all(part.isdecimal() for part in count.split("x")):
        return [f"{count}x{name}" for name in device_entries() if name.lower().startswith(begun.lower())]
    return [name for name in ("local",) if name.startswith(incomplete)]


ClusterOrProfileOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="CLUSTER",
        help=CLUSTER_HELP + " Needed unless --profile is given.",
        autocompletion=complete_clusters,
    ),
]


ClusterOrOffersOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="CLUSTER",
        help=CLUSTER_HELP + " Needed unless --offers or --profile is given.",
        autocompletion=complete_clusters,
    ),
]


BatchOption = Annotated[
    int, typer.Option("--global-batch-size", metavar="N", help="Sequences of one step over the whole cluster.")
]


SeqLenOption = Annotated[int, typer.Option("--seq-len", metavar="N", help="Tokens of one sequence.")]


OptionalBatchOption = Annotated[
    int | None,
    typer.Option("--global-batch-size", metavar="N", help="Sequences of one step over the whole cluster. Needed."),
]


OptionalSeqLenOption = Annotated[
    int | None, typer.Option("--seq-len", metavar="N", help="Tokens of one sequence. Needed.")
]


PrecisionOption = Annotated[
    str | None,
    typer.Option(metavar="P", help="bf16-mixed, fp16-mixed, fp8 or fp32. Default: the best that the device trains in."),
]


OptimizerOption = Annotated[str, typer.Option(metavar="NAME", help="adamw or sgd.")]


AttentionOption = Annotated[str, typer.Option(metavar="KIND", help="flash (fused) or math (keeps the score matrix).")]


EngineOption = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="Who runs it: fsdp2 (`meshwright apply`), or megatron or deepspeed, for their own layouts."
    ),
]


CalibrateOption = Annotated[
    Path | None,
    typer.Option(
        metavar="RUNS.csv",
        help="Measured runs of this cluster (columns: docs/accuracy.md); a handful corrects the model's rates.",
    ),
]


OffloadOption = Annotated[
    Literal["none", "auto", "activations", "optimizer", "params"],
    typer.Option(
        help="What may lie on the host: nothing, whatever is fastest, or of one kind only (docs/offload.md). The default is none: "
        "what the host has is not known of most clusters."
    ),
]


HostMemoryOption = Annotated[
    float | None,
    typer.Option(
        metavar="G",
        min=0,
        help="For --offload and --infer: memory of one node that may be used. Default: as the cluster says.",
    ),
]


NvmeOption = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="A folder on each node's drives: for --offload it may hold optimizer states, for --infer all that is moved.",
    ),
]


NvmeSizeOption = Annotated[
    float | None,
    typer.Option(
        metavar="G", min=0, help="For --nvme: what may be written there. Default: what is free on this machine."
    ),
]


TrainOption = Annotated[
    str,
    typer.Option(
        metavar="HOW",
        help="full; lora:r=16,targets=qkv+out+mlp[,frozen=nf4][,dropout=false]: adapters beside a frozen model; zeroth-order: two "
        "forward passes and no backward one.",
    ),
]


ProfileOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="What `meshwright profile` measured: the cluster, or with --cluster its devices."
    ),
]


ForeignOption = Annotated[
    bool,
    typer.Option(
        "--allow-foreign-profile", help="Use a profile of other hardware or software, or one that was edited."
    ),
]


JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout instead of a table.")]


def read_cluster(cluster: str | None, profile: Path | None, *, allow_foreign: bool) -> str | ClusterSpec:
    """The cluster that was typed, that a profile describes, or that was typed with devices as a profile measured them.

    Raises:
        ConfigError: neither is given.
        ProfileError: the profile is not of this machine or not of this cluster's devices.
    """
    from ..schema import ClusterSpec, ConfigError
    from .terminal import reading_cluster

    if profile is None:
        if allow_foreign:
            raise ConfigError("--allow-foreign-profile is for --profile")
        if cluster is None:
            raise ConfigError("no cluster is given", help="add --cluster or --profile")
        return cluster
    from ..profilers.files import load_profile
    from ..profilers.profiled_cluster import profiled_cluster, with_measured_devices

    found, problems = load_profile(profile, allow_foreign=allow_foreign)
    for problem in problems:
        typer.echo(f"foreign profile {profile}: {problem}", err=True)
    measured = profiled_cluster(found)
    if cluster is None:
        return measured
    with reading_cluster(cluster):
        return with_measured_devices(ClusterSpec.parse(cluster), measured)


def read_inputs(
    model: str,
    cluster: str | ClusterSpec,
    *,
    global_batch_size: int,
    seq_len: int,
    precision: str | None,
    optimizer: str,
    attention: str,
    engine: str = "fsdp2",
    calibrate: Path | None = None,
    train: str = "full",
) -> tuple[ModelSpec, ClusterSpec, Workload]:
    """Parse what the user typed.

    Raises:
        ConfigError: a name, number or file does not mean anything, or the sequence is longer than the model allows.
    """
    from ..planner import default_precision
    from ..schema import ClusterSpec, ConfigError, ModelSpec, Workload
    from .terminal import reading_cluster

    spec = ModelSpec.resolve(model)
    if spec.embedding.num_positions and seq_len > spec.embedding.num_positions:
        raise ConfigError(
            f"seq_len {seq_len} exceeds the {spec.embedding.num_positions} learned positions of {spec.name}",
            help=f"use --seq-len {spec.embedding.num_positions} or less",
        )
    if isinstance(cluster, str):
        with reading_cluster(cluster):
            machine = ClusterSpec.parse(cluster)
    else:
        machine = cluster
    if calibrate is not None:
        from ..validation.table_calibration import calibration_from_table

        machine = machine.replace(calibration=calibration_from_table(calibrate, machine))
        typer.echo(f"calibration of {machine.weakest_device.name}: {machine.calibration}", err=True)
    from ..schema.task import parse_training

    workload = Workload(
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        precision=precision or default_precision(machine),  # type: ignore[arg-type]
        optimizer=optimizer,  # type: ignore[arg-type]
        attention=attention,  # type: ignore[arg-type]
        engine=engine,  # type: ignore[arg-type]
        **parse_training(train),
    )
    return spec, machine, workload


def offload_request(
    kinds: str, *, host_memory_gib: float | None, nvme: Path | None, nvme_gib: float | None
) -> OffloadRequest | None:
    """What the user lets leave the devices; None without --offload.

    Raises:
        ConfigError: an option without the one that it belongs to, or a folder of unknown size.
    """
    from ..schema import ConfigError

    if kinds == "none":
        given = {"--host-memory-gib": host_memory_gib, "--nvme": nvme, "--nvme-gib": nvme_gib}
        alone = [name for name, value in given.items() if value is not None]
        if alone:
            raise ConfigError(f"{', '.join(alone)} without --offload", help="add --offload auto")
        return None
    if nvme is None and nvme_gib is not None:
        raise ConfigError("--nvme-gib without --nvme", help="say which folder: --nvme PATH")
    from ..planner.request import OffloadRequest

    return OffloadRequest(
        kinds=kinds,  # type: ignore[arg-type]
        host_memory_bytes=None if host_memory_gib is None else host_memory_gib * 2**30,
        storage_path=None if nvme is None else str(nvme),
        storage_bytes=0.0 if nvme is None else _free_bytes(nvme, nvme_gib),
    )


def inference_request(
    *,
    batch_size: int | None,
    host_memory_gib: float | None,
    nvme: Path | None,
    nvme_gib: float | None,
    host_attention_gb_per_s: float | None,
    latency_limit_s: float | None,
) -> GenerationRequest:
    """What the user fixes of a plan for generation.

    Raises:
        ConfigError: a folder of unknown size, or a size without a folder.
    """
    from ..planner.tasks.generation import GenerationRequest

    places = offload_request("auto", host_memory_gib=host_memory_gib, nvme=nvme, nvme_gib=nvme_gib)
    assert places is not None
    rate = host_attention_gb_per_s
    return GenerationRequest(
        batch_size=batch_size,
        host_memory_bytes=places.host_memory_bytes,
        storage_bytes=places.storage_bytes,
        host_attention_bytes_per_s=None if rate is None else rate * 1e9,
        latency_limit_s=latency_limit_s,
    )


def _free_bytes(path: Path, size_gib: float | None) -> float:
    import shutil

    from ..schema import ConfigError

    if size_gib is not None:
        return size_gib * 2**30
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder of this machine", help="say what may be written there: --nvme-gib G")
    return float(shutil.disk_usage(path).free)


_PREFERENCE = ("bf16-mixed", "fp16-mixed", "fp32")


def read_offers(cluster: str | None, offers: Path | None, *, calibrate: Path | None) -> tuple[Offer, ...]:
    """The offers of a file; none where a cluster is given instead.

    Raises:
        ConfigError: neither or both are given, or the file does not hold offers with prices.
    """
    from ..schema import ConfigError
    from ..schema.offers import offers_from_file

    if (cluster is None) == (offers is None):
        given = "neither is" if cluster is None else "both are"
        raise ConfigError(
            f"a plan needs --cluster, or --objective cost with --offers: {given} given",
            help="for one kind of machine: --cluster 64xH100-SXM-80GB",
        )
    if offers is None:
        return ()
    if calibrate is not None:
        raise ConfigError("--calibrate corrects one cluster, not offers of several", help="use --cluster")
    return offers_from_file(str(offers))


def common_cluster(offers: Sequence[Offer]) -> ClusterSpec:
    """The cluster that decides the precision: the first one whose best precision is the least of all, so that all have it."""
    from ..planner import default_precision

    return max((offer.cluster for offer in offers), key=lambda cluster: _PREFERENCE.index(default_precision(cluster)))


def require_cost(**options: object) -> None:
    """Options that only mean something for --objective cost.

    Raises:
        ConfigError: one of them is given.
    """
    from ..schema import ConfigError

    for name, value in options.items():
        if value:
            raise ConfigError(f"--{name.replace('_', '-')} is for --objective cost", help="add --objective cost")
