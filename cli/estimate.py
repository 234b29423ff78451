"""`meshwright estimate`: what one given layout costs."""

from __future__ import annotations

from typing import Annotated

import typer

from .errors import exit_on_error
from .inputs import (
    AttentionOption,
    BatchOption,
    CalibrateOption,
    ClusterOrProfileOption,
    EngineOption,
    ForeignOption,
    HostMemoryOption,
    JsonOption,
    ModelArgument,
    NvmeOption,
    NvmeSizeOption,
    OffloadOption,
    OptimizerOption,
    PrecisionOption,
    ProfileOption,
    SeqLenOption,
    TrainOption,
    offload_request,
    read_cluster,
    read_inputs,
)


def estimate(
    model: ModelArgument,
    global_batch_size: BatchOption,
    seq_len: SeqLenOption,
    layout: Annotated[
        str, typer.Option(metavar="A=B,...", help="e.g. tp=8,pp=4,dp_shard=8,micro_batch_size=1,recompute=full")
    ],
    cluster: ClusterOrProfileOption = None,
    profile: ProfileOption = None,
    allow_foreign_profile: ForeignOption = False,
    precision: PrecisionOption = None,
    optimizer: OptimizerOption = "adamw",
    attention: AttentionOption = "flash",
    engine: EngineOption = "fsdp2",
    calibrate: CalibrateOption = None,
    train: TrainOption = "full",
    offload: OffloadOption = "none",
    host_memory_gib: HostMemoryOption = None,
    nvme: NvmeOption = None,
    nvme_gib: NvmeSizeOption = None,
    json: JsonOption = False,
) -> None:
    """Predict step time and memory of one layout, whether it fits or not; with --offload, of its best offload schedule."""
    with exit_on_error():
        from ..planner import not_executed
        from ..planner.planning import estimate_with_schedule
        from ..schema import Layout
        from .tables import add_offload, estimate_table, show

        wanted = Layout.parse(layout)
        request = offload_request(offload, host_memory_gib=host_memory_gib, nvme=nvme, nvme_gib=nvme_gib)
        if request is not None:
            wanted = wanted.replace(offload="scheduled")
        spec, machine, workload = read_inputs(
            model,
            read_cluster(cluster, profile, allow_foreign=allow_foreign_profile),
            global_batch_size=global_batch_size,
            seq_len=seq_len,
            precision=precision,
            optimizer=optimizer,
            attention=attention,
            engine=engine,
            calibrate=calibrate,
            train=train,
        )
        found, scheduled = estimate_with_schedule(spec, machine, workload, wanted, offload=request)
        if json:
            typer.echo(found.model_dump_json(indent=2))
        else:
            table = estimate_table(spec, machine, workload, wanted, found)
            if scheduled is not None:
                add_offload(table, scheduled.stage, scheduled.schedule)
            show(table)
        for reason in not_executed(spec, machine, workload, wanted):
            typer.echo(f"note: `meshwright plan` and `apply` do not use this layout: {reason}", err=True)
        typer.echo(
            "next: meshwright plan with the same model, cluster and batch finds the fastest layout that fits", err=True
        )
