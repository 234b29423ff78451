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
    JsonOption,
    ModelArgument,
    OptimizerOption,
    PrecisionOption,
    ProfileOption,
    SeqLenOption,
    TrainOption,
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
    json: JsonOption = False,
) -> None:
    """Predict step time and memory of one layout, whether it fits or not."""
    with exit_on_error():
        from ..planner import estimate as make_estimate
        from ..planner import not_executed
        from ..schema import Layout
        from .tables import estimate_table, show

        wanted = Layout.parse(layout)
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
        found = make_estimate(spec, machine, workload, wanted)
        if json:
            typer.echo(found.model_dump_json(indent=2))
        else:
            show(estimate_table(spec, machine, workload, wanted, found))
        for reason in not_executed(spec, machine, workload, wanted):
            typer.echo(f"note: `meshwright plan` and `apply` do not use this layout: {reason}", err=True)
        typer.echo(
            "next: meshwright plan with the same model, cluster and batch finds the fastest layout that fits", err=True
        )
