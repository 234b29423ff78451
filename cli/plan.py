"""`meshwright plan` and `estimate`: the best layout for a model on a cluster, and what one given layout costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .explain import HtmlOption, TraceOption
from .inputs import (
    AttentionOption,
    BatchOption,
    CalibrateOption,
    ClusterOrOffersOption,
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
    OptionalBatchOption,
    OptionalSeqLenOption,
    PrecisionOption,
    ProfileOption,
    SeqLenOption,
    TrainOption,
    inference_request,
    offload_request,
    read_cluster,
    read_inputs,
)
from .show.report import write_report
from .terminal import INTERRUPTED, exit_on_error

if TYPE_CHECKING:
    from ..schema import ClusterSpec


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
        from .inputs import common_cluster, read_offers, require_cost
        from .show.plan import cost_table, pareto_table, plan_table, show
        from .terminal import search_progress, stopping_on_interrupt

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
        from ..planner.plan import estimate_with_schedule
        from ..schema import Layout
        from .show.plan import add_offload, estimate_table, show

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


InferOption = Annotated[
    bool,
    typer.Option(
        "--infer", help="Plan generation instead of training: batch and places of weights and keys and values."
    ),
]


PromptOption = Annotated[
    int | None, typer.Option("--prompt-len", metavar="N", help="For --infer: tokens of each prompt.")
]


GenerateOption = Annotated[
    int | None, typer.Option("--generate-len", metavar="N", help="For --infer: tokens to generate after each prompt.")
]


BlockOption = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        metavar="N",
        min=1,
        help="For --infer: sequences of a block on each replica. Default: what generates most.",
    ),
]


LatencyOption = Annotated[
    float | None,
    typer.Option(
        "--latency-limit-s", metavar="S", min=0.0, help="For --infer: from the prompts to the last token of a block."
    ),
]


HostAttentionOption = Annotated[
    float | None,
    typer.Option(
        "--host-attention-gb-per-s",
        metavar="R",
        min=1e-3,
        help="For --infer: keys and values that a node's processors attend to in a second.",
    ),
]


def refuse_training_options(given: dict[str, Any]) -> None:
    """Options that mean nothing with --infer, by name; those that are neither None nor False were typed.

    Raises:
        ConfigError: there are some.
    """
    from ..schema import ConfigError

    typed = [name for name, value in given.items() if value is not None and value is not False]
    if typed:
        raise ConfigError(
            f"{', '.join(typed)} with --infer, which plans no training", help=f"leave out {' and '.join(typed)}"
        )


def refuse_inference_options(given: dict[str, Any]) -> None:
    """Options that need --infer, by name.

    Raises:
        ConfigError: there are some.
    """
    from ..schema import ConfigError

    typed = [name for name, value in given.items() if value is not None]
    if typed:
        raise ConfigError(f"{', '.join(typed)} without --infer", help="add --infer")


def require_training_sizes(global_batch_size: int | None, seq_len: int | None) -> tuple[int, int]:
    """Both.

    Raises:
        ConfigError: one is missing.
    """
    from ..schema import ConfigError

    if global_batch_size is None or seq_len is None:
        missing = "--global-batch-size" if global_batch_size is None else "--seq-len"
        raise ConfigError(f"Missing option '{missing}'", help="or plan generation: --infer --prompt-len N")
    return global_batch_size, seq_len


def plan_generation(
    model: str,
    cluster: str | ClusterSpec,
    *,
    lengths: tuple[int | None, int | None],
    precision: str | None,
    request: Any,
    top: int,
    out: Path,
    json: bool,
) -> None:
    """Plan, show and write.

    Raises:
        ConfigError: a length is missing, or what was typed does not mean anything.
        InfeasibleError: nothing fits or is quick enough.
    """
    from ..planner.tasks.generation import plan_generation
    from ..schema import ClusterSpec, ConfigError, ModelSpec
    from .show.generation import inference_table
    from .show.plan import show
    from .terminal import reading_cluster

    prompt_len, generate_len = lengths
    if prompt_len is None or generate_len is None:
        missing = "--prompt-len" if prompt_len is None else "--generate-len"
        raise ConfigError(f"--infer without {missing}", help=f"say how many tokens: {missing} N")
    spec = ModelSpec.resolve(model)
    if isinstance(cluster, str):
        with reading_cluster(cluster):
            machine = ClusterSpec.parse(cluster)
    else:
        machine = cluster
    generation = _generation(machine, prompt_len, generate_len, precision)
    found = plan_generation(spec, machine, generation, request, top=top)
    found.save(out)
    if json:
        typer.echo(found.model_dump_json(indent=2))
    else:
        show(inference_table(found))
    typer.echo(f"wrote {out}; it is an estimate: meshwright runs no generation", err=True)


def _generation(machine: ClusterSpec, prompt_len: int, generate_len: int, precision: str | None) -> Any:
    from ..planner import default_precision
    from ..schema import ConfigError
    from ..schema.task import Generation

    name = (precision or default_precision(machine)).removesuffix("-mixed")
    if name not in ("bf16", "fp16", "fp32"):
        raise ConfigError(
            f"--precision {precision}: generation is planned in bf16, fp16 or fp32", help="use --precision bf16"
        )
    return Generation(prompt_len=prompt_len, generate_len=generate_len, precision=name)
