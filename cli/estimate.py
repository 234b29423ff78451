"""`meshwright estimate`: what one given layout costs."""

from __future__ import annotations

from typing import Annotated

import typer

from .complete import complete_layout
from .options import JsonOption, ModelArgument, command
from .plan_options import ClusterOptions, OffloadOptions, PrecisionOptions, TrainingOptions
from .terminal import show_answer


@command()
def estimate(
    model: ModelArgument,
    step: TrainingOptions,
    layout: Annotated[
        str,
        typer.Option(
            metavar="A=B,...",
            autocompletion=complete_layout,
            help="e.g. tp=8,pp=4,dp_shard=8,micro_batch_size=1,recompute=full",
        ),
    ],
    cluster: ClusterOptions,
    precision: PrecisionOptions,
    offload: OffloadOptions,
    as_listed: Annotated[
        bool, typer.Option(help="ranks on the nodes in the order of the cluster's file, not in the best one.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Predict step time and memory of one layout, whether it fits or not; with --offload, of its best offload schedule."""
    from ..planner import not_executed
    from ..planner.plan import estimate_with_schedule
    from ..planner.request import PlanRequest, resolve_model
    from ..schema import ConfigError, Layout
    from .show.plan import add_offload, estimate_table

    given = Layout.parse(layout)
    allowed = offload.request()
    if allowed is not None:
        if as_listed:
            raise ConfigError("--as-listed is of layouts without --offload", help="leave one of them out")
        given = given.replace(offload="scheduled")
    spec = resolve_model(model, step.seq_len, step.sample_batch)
    machine = step.calibrated(cluster.read(), spec, precision.precision)
    workload = step.workload(spec, machine, precision.precision)
    cluster.require_layers(machine, spec, workload)
    costs, scheduled = estimate_with_schedule(
        PlanRequest(spec, machine, workload, offload=allowed), given, as_listed=as_listed
    )
    table = estimate_table(spec, machine, workload, given, costs)
    if scheduled is not None:
        add_offload(table, scheduled.stage, scheduled.schedule)
    show_answer(costs, table, as_json=json)
    for reason in not_executed(spec, machine, workload, given):
        typer.echo(f"note: `meshwright plan` and `apply` do not use this layout: {reason}", err=True)
    typer.echo(
        "next: meshwright plan with the same model, cluster and batch finds the fastest layout that fits", err=True
    )
