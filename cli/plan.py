"""`meshwright plan`: the best layout for a model on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .errors import INTERRUPTED, exit_on_error
from .inference import (
    BlockOption,
    GenerateOption,
    HostAttentionOption,
    InferOption,
    LatencyOption,
    PromptOption,
    plan_generation,
    refuse_inference_options,
    refuse_training_options,
    require_training_sizes,
)
from .inputs import (
    AttentionOption,
    CalibrateOption,
    ClusterOrOffersOption,
    EngineOption,
    ForeignOption,
    HostMemoryOption,
    JsonOption,
    ModelArgument,
    NvmeOption,
    NvmeSizeOption,
    OffloadOption,
    OptimizerOption,
    OptionalBatchOption,
    OptionalSeqLenOption,
    PrecisionOption,
    ProfileOption,
    TrainOption,
    inference_request,
    offload_request,
    read_cluster,
    read_inputs,
)
from .report import HtmlOption, TraceOption, write_report


def plan(
    model: ModelArgument,
    global_batch_size: OptionalBatchOption = None,
    seq_len: OptionalSeqLenOption = None,
    cluster: ClusterOrOffersOption = None,
    profile: ProfileOption = None,
    allow_foreign_profile: ForeignOption = False,
    precision: PrecisionOption = None,
    optimizer: OptimizerOption = "adamw",
    attention: AttentionOption = "flash",
    engine: EngineOption = "fsdp2",
    fix: Annotated[str, typer.Option(metavar="A=B,...", help="Layout fields to keep, e.g. tp=8,recompute=full.")] = "",
    space: Annotated[
        Literal["runnable", "full"] | None,
        typer.Option(
            help="Layouts to search: what meshwright apply executes, or all of the engine. Default: runnable where apply trains "
            "the model."
        ),
    ] = None,
    time_limit_s: Annotated[
        float, typer.Option(metavar="S", min=0.1, help="Stop the search then, with the best so far.")
    ] = 60.0,
    top: Annotated[int, typer.Option(metavar="K", min=0, max=50, help="Runner-ups to report.")] = 4,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the plan is written.")] = Path("plan.json"),
    calibrate: CalibrateOption = None,
    objective: Annotated[
        Literal["throughput", "cost"],
        typer.Option(
            help="The fastest layout on the cluster, or the cheapest of all sizes up to it (and of all offers)."
        ),
    ] = "throughput",
    offers: Annotated[
        Path | None, typer.Option(metavar="FILE", help="For cost: what can be rented, with prices (docs/cluster.md).")
    ] = None,
    min_tokens_per_s: Annotated[
        float, typer.Option(metavar="X", min=0, help="For cost: sizes that are slower do not count.")
    ] = 0.0,
    tokens: Annotated[
        float | None, typer.Option(metavar="T", min=1, help="For cost: tokens of the whole run, e.g. 1e12.")
    ] = None,
    deadline_h: Annotated[
        float | None, typer.Option(metavar="H", min=0.001, help="For cost, with --tokens: hours the run may take.")
    ] = None,
    pareto: Annotated[
        bool,
        typer.Option(
            "--pareto",
            help="Also find every layout (for cost: every size) that no other beats in both time and memory (money).",
        ),
    ] = False,
    expert_load: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Measured tokens of each expert (docs/experts.md): decide ep and places.",
        ),
    ] = None,
    offload: OffloadOption = "none",
    host_memory_gib: HostMemoryOption = None,
    nvme: NvmeOption = None,
    nvme_gib: NvmeSizeOption = None,
    train: TrainOption = "full",
    infer: InferOption = False,
    prompt_len: PromptOption = None,
    generate_len: GenerateOption = None,
    batch_size: BlockOption = None,
    latency_limit_s: LatencyOption = None,
    host_attention_gb_per_s: HostAttentionOption = None,
    report: HtmlOption = None,
    trace: TraceOption = None,
    json: JsonOption = False,
) -> None:
    """Find the fastest layout that fits, say why it won, and write plan.json. Needs no GPU.

    Ctrl-C ends the search with the best so far, which is shown and written; the exit code is then 130, so that no command chained
    after this one runs. Where nothing was found yet, nothing is written.

    With --infer the plan is for generating text: a batch, and where weights and keys and values lie (docs/inference.md).

    With --engine megatron or deepspeed the search is over what that engine executes; `meshwright apply` does not run such a plan.
    """
    with exit_on_error():
        from ..planner import cheapest
        from ..planner import pareto as pareto_front
        from ..planner import plan as make_plan
        from ..planner.deadline import Deadline
        from ..planner.expert_files import read_loads
        from ..schema import ConfigError, Offer
        from ..schema.layout import parse_assignments
        from .cost_inputs import common_cluster, read_offers, require_cost
        from .cost_tables import cost_table, pareto_table
        from .interrupt import stopping_on_interrupt
        from .progress import search_progress
        from .tables import plan_table, show

        if infer:
            refuse_training_options(
                {
                    "--global-batch-size": global_batch_size,
                    "--seq-len": seq_len,
                    "--fix": fix or None,
                    "--space": space,
                    "--calibrate": calibrate,
                    "--objective": None if objective == "throughput" else objective,
                    "--offers": offers,
                    "--pareto": pareto,
                    "--expert-load": expert_load,
                    "--offload": None if offload == "none" else offload,
                    "--train": None if train == "full" else train,
                    "--engine": None if engine == "fsdp2" else engine,
                    "--report": report,
                    "--trace": trace,
                }
            )
            plan_generation(
                model,
                read_cluster(cluster, profile, allow_foreign=allow_foreign_profile),
                lengths=(prompt_len, generate_len),
                precision=precision,
                request=inference_request(
                    batch_size=batch_size,
                    host_memory_gib=host_memory_gib,
                    nvme=nvme,
                    nvme_gib=nvme_gib,
                    host_attention_gb_per_s=host_attention_gb_per_s,
                    latency_limit_s=latency_limit_s,
                ),
                top=top,
                out=out,
                json=json,
            )
            return
        refuse_inference_options(
            {
                "--prompt-len": prompt_len,
                "--generate-len": generate_len,
                "--batch-size": batch_size,
                "--latency-limit-s": latency_limit_s,
                "--host-attention-gb-per-s": host_attention_gb_per_s,
            }
        )
        global_batch_size, seq_len = require_training_sizes(global_batch_size, seq_len)
        fixed = parse_assignments(fix)
        is_cost = objective == "cost"
        if not is_cost:
            require_cost(offers=offers, min_tokens_per_s=min_tokens_per_s, tokens=tokens, deadline_h=deadline_h)
        if profile is not None and offers is not None:
            raise ConfigError("--profile is of one machine, not of offers of several", help="use --cluster")
        rentable = () if profile is not None else read_offers(cluster, offers, calibrate=calibrate)
        inputs = read_inputs(
            model,
            common_cluster(rentable)
            if rentable
            else read_cluster(cluster, profile, allow_foreign=allow_foreign_profile),
            global_batch_size=global_batch_size,
            seq_len=seq_len,
            precision=precision,
            optimizer=optimizer,
            attention=attention,
            engine=engine,
            calibrate=calibrate,
            train=train,
        )
        loads = None if expert_load is None else read_loads([expert_load])
        request = offload_request(offload, host_memory_gib=host_memory_gib, nvme=nvme, nvme_gib=nvme_gib)
        if is_cost and loads is not None:
            raise ConfigError("--expert-load is for one cluster, not for --objective cost")
        deadline = Deadline(time_limit_s)
        with search_progress(quiet=json) as on_progress, stopping_on_interrupt(deadline):
            runnable = None if space is None else space == "runnable"
            common: dict[str, Any] = {
                "fixed": fixed,
                "runnable": runnable,
                "on_progress": on_progress,
                "deadline": deadline,
                "offload": request,
            }
            if is_cost:
                spec, machine, workload = inputs
                found = cheapest(
                    spec,
                    rentable or (Offer.of(machine),),
                    workload,
                    min_tokens_per_s=min_tokens_per_s,
                    tokens=tokens,
                    deadline_s=deadline_h and 3600 * deadline_h,
                    front=pareto,
                    top=top,
                    **common,
                )
            else:
                found = make_plan(*inputs, top=top, expert_load=loads, **common)
            if pareto and not is_cost:
                found = found.replace(pareto=pareto_front(*inputs[:2], found.workload, **common))
        found.save(out)
        if json:
            typer.echo(found.model_dump_json(indent=2))
        else:
            show(plan_table(found))
            if found.cost is not None:
                show(cost_table(found.cost, found.workload.tokens_per_step))
            if found.pareto:
                show(pareto_table(found.pareto))
        write_report(found, report, trace)
        is_here = profile is not None or str(cluster).startswith("local")
        typer.echo(f"wrote {out}; next: {_next_command(out, engine, is_here=is_here)}", err=True)
        if deadline.is_stopped:
            raise typer.Exit(INTERRUPTED)


def _next_command(out: Path, engine: str, *, is_here: bool) -> str:
    """What a plan is taken to: this machine, the cluster it is for, or another engine."""
    if engine != "fsdp2":
        return f"meshwright export {out} --to {engine}"
    return (
        f"meshwright apply {out}" if is_here else f"meshwright explain {out}, and on the cluster meshwright apply {out}"
    )
