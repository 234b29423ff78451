"""`meshwright experts`: where the experts of a mixture-of-experts model go, from routing data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .inputs import JsonOption
from .terminal import exit_on_error

experts_app = typer.Typer(
    help="Where experts go: replicas, GPUs and shares from routing data, each with a bound on how far from optimal it is.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

LoadsArgument = Annotated[
    list[Path] | None,
    typer.Argument(metavar="LOAD...", help="Files of loads (docs/experts.md); each is a workload that must be served."),
]
KeyOption = Annotated[
    str,
    typer.Option(metavar="NAME,...", help="Arrays of a file to read, globs allowed; several are several workloads."),
]
NodesOption = Annotated[int, typer.Option("--num-nodes", metavar="N", help="Nodes that the GPUs are divided among.")]
TraceOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Experts of each token [tokens, layers, top_k]; visits are counted on it."),
]
FormatName = Literal["npz", "sglang", "vllm", "vllm-ascend", "tensorrt-llm"]


@experts_app.command()
def place(
    loads: LoadsArgument = None,
    num_gpus: Annotated[
        int, typer.Option("--num-gpus", metavar="G", help="GPUs that share the experts of a layer.")
    ] = 8,
    num_slots: Annotated[
        int | None, typer.Option("--num-slots", metavar="S", help="Experts that all GPUs hold. Default: no replicas.")
    ] = None,
    num_nodes: NodesOption = 1,
    num_groups: Annotated[
        int | None, typer.Option("--num-groups", metavar="N", help="Groups of experts that stay on one node each.")
    ] = None,
    key: KeyOption = "",
    previous: Annotated[Path | None, typer.Option(metavar="FILE", help="Placement to start from.")] = None,
    move_budget: Annotated[
        float | None, typer.Option(metavar="M", help="Experts GPUs may fetch, a layer; below 1 a part of the slots.")
    ] = None,
    trace: TraceOption = None,
    split: Annotated[
        Literal["uniform", "weighted"], typer.Option(help="Shares of the replicas of an expert.")
    ] = "uniform",
    objective: Annotated[
        Literal["balance", "traffic", "pareto"],
        typer.Option(help="balance: GPUs alone; traffic, pareto: few nodes for each token of --trace."),
    ] = "balance",
    effort: Annotated[Literal["fast", "search", "exact"], typer.Option(help="exact proves small cases.")] = "fast",
    time_limit_s: Annotated[float, typer.Option(metavar="S", min=0.0, help="For search, exact and traffic.")] = 10.0,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of random choices.")] = 0,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where the placement is written.")] = None,
    to: Annotated[FormatName, typer.Option(help="Format of --out.")] = "npz",
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="GPU loads before and after, as a picture.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Place the experts of every layer; balance, bound and gap of each."""
    with exit_on_error():
        from ..planner.expert_files import read_loads, read_trace
        from ..planner.experts import read_placement, write_placement
        from ..schema.errors import ConfigError
        from ..solvers.experts.placement import place_experts
        from .show.experts import as_json, placement_table, require_svg, save_heat_map
        from .show.plan import show

        if not loads and trace is None:
            raise ConfigError("nothing to place for: name a file of loads, or --trace")
        if plot:
            require_svg(plot)
        scenarios = read_loads(loads, key) if loads else None
        tokens = None if trace is None else read_trace(trace, "" if loads else key)
        before = None if previous is None else read_placement(previous, num_gpus=num_gpus, num_nodes=num_nodes)
        num_experts = scenarios.shape[2] if scenarios is not None else int(tokens.max()) + 1  # type: ignore[union-attr]
        found = place_experts(
            None,
            scenarios=scenarios,
            num_gpus=num_gpus,
            num_nodes=num_nodes,
            num_slots=num_slots or num_experts,
            num_groups=num_groups,
            previous=before,
            move_budget=move_budget,
            trace=tokens,
            split=split,
            objective=objective,
            effort=effort,
            time_limit_s=time_limit_s,
            seed=seed,
        )
        if plot:
            save_heat_map(plot, found, before)
        if out is not None:
            write_placement(found, out, to)
        if json:
            typer.echo(as_json(found))
        else:
            show(placement_table(found))
        typer.echo(f"wrote {out}" if out else "add --out placement.npz to keep it", err=True)


@experts_app.command()
def evaluate(
    placement: Annotated[
        Path, typer.Argument(metavar="PLACEMENT", help="A placement of any format that convert writes.")
    ],
    loads: LoadsArgument = None,
    num_gpus: Annotated[
        int | None, typer.Option("--num-gpus", metavar="G", help="Where the file does not say.")
    ] = None,
    num_nodes: NodesOption = 1,
    key: KeyOption = "",
    trace: TraceOption = None,
    json: JsonOption = False,
) -> None:
    """What other loads or tokens make of a placement, with uniform shares and with the shares that suit them best."""
    with exit_on_error():
        from ..planner.expert_files import counts_of, read_loads, read_trace
        from ..planner.experts import read_placement
        from ..schema.errors import ConfigError
        from ..solvers.experts.homes import validate_trace
        from ..solvers.experts.instance import validate_loads
        from .show.experts import evaluation_json, evaluation_table
        from .show.plan import show

        found = read_placement(placement, num_gpus=num_gpus, num_nodes=num_nodes)
        if not loads and trace is None:
            raise ConfigError("nothing to evaluate on: name a file of loads, or --trace")
        tokens = None
        if trace is not None:
            tokens = validate_trace(read_trace(trace), len(found.physical_to_logical), found.num_experts)
        measured = validate_loads(counts_of(tokens, found.num_experts)) if tokens is not None else None
        result = found.evaluate(read_loads(loads, key) if loads else measured)
        visits = None if tokens is None else found.evaluate_trace(tokens)
        if json:
            typer.echo(evaluation_json(result, visits))
        else:
            show(evaluation_table(result, visits))


@experts_app.command()
def convert(
    placement: Annotated[Path, typer.Argument(metavar="PLACEMENT", help="A placement of any format.")],
    to: Annotated[FormatName, typer.Option(help="What to write.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where.")],
    num_gpus: Annotated[
        int | None, typer.Option("--num-gpus", metavar="G", help="Where the file does not say.")
    ] = None,
    num_nodes: NodesOption = 1,
    first_layer_idx: Annotated[
        int, typer.Option(metavar="N", min=0, help="Index in the model of the first layer with experts.")
    ] = 0,
) -> None:
    """Write a placement in the format of a serving engine, or one of theirs in ours."""
    with exit_on_error():
        from ..planner.experts import read_placement, write_placement

        found = read_placement(placement, num_gpus=num_gpus, num_nodes=num_nodes)
        write_placement(found, out, to, first_layer_idx=first_layer_idx)
        typer.echo(f"wrote {out}", err=True)


@experts_app.command()
def synth(
    out: Annotated[Path, typer.Option(metavar="FILE.npz", help="Where the data is written.")],
    num_layers: Annotated[int, typer.Option("--num-layers", metavar="L", min=1, max=1000)] = 4,
    num_experts: Annotated[int, typer.Option("--num-experts", metavar="E", min=1, max=10000)] = 64,
    sigma: Annotated[float, typer.Option(metavar="X", help="Of the log-normal popularity.")] = 0.9,
    steps: Annotated[int, typer.Option(metavar="T", min=1, max=10000, help="Steps of time of the loads.")] = 1,
    drift: Annotated[float, typer.Option(metavar="X", help="Log-normal change of every load at a step.")] = 0.0,
    num_tokens: Annotated[
        int, typer.Option("--num-tokens", metavar="N", min=0, help="Write a trace of so many tokens instead of loads.")
    ] = 0,
    top_k: Annotated[int, typer.Option("--top-k", metavar="K", min=1)] = 8,
    num_topics: Annotated[int, typer.Option("--num-topics", metavar="N", min=1)] = 16,
    affinity: Annotated[float, typer.Option(metavar="X", help="Of topics to experts.")] = 1.0,
    num_groups: Annotated[int, typer.Option("--num-groups", metavar="N", min=1, help="Group-limited routing.")] = 1,
    top_groups: Annotated[int, typer.Option("--top-groups", metavar="N", min=1)] = 1,
    seed: Annotated[int, typer.Option(metavar="N", min=0)] = 0,
) -> None:
    """Routing data with known structure (docs/experts.md has the formulas): loads, or with --num-tokens a trace."""
    with exit_on_error():
        import io

        import numpy as np

        from ..schema.base import write_atomically
        from ..schema.errors import ConfigError
        from ..solvers.experts.synthetic import Router, synthetic_loads, synthetic_trace

        if out.suffix != ".npz":
            raise ConfigError(f"{out}: synthetic data is written as .npz")
        if num_tokens:
            router = Router(
                num_layers=num_layers,
                num_experts=num_experts,
                top_k=top_k,
                sigma=sigma,
                num_topics=num_topics,
                affinity=affinity,
                num_groups=num_groups,
                top_groups=top_groups,
            )
            name, array = "routed_experts", synthetic_trace(router, num_tokens, seed=seed)
        else:
            name = "load"
            array = synthetic_loads(num_layers, num_experts, sigma=sigma, steps=steps, drift=drift, seed=seed)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **{name: array})
        write_atomically(out, buffer.getvalue())
        typer.echo(f"wrote {out}: {name} {list(array.shape)}", err=True)


@experts_app.command()
def bench(
    loads: LoadsArgument = None,
    num_gpus: Annotated[int, typer.Option("--num-gpus", metavar="G")] = 32,
    num_slots: Annotated[
        int | None, typer.Option("--num-slots", metavar="S", help="Default: 9 for every 8 experts.")
    ] = None,
    key: KeyOption = "",
    seed: Annotated[int, typer.Option(metavar="N", min=0)] = 0,
    json: JsonOption = False,
) -> None:
    """Ours beside EPLB's algorithm on these loads, else on 58 layers of 256 experts with log-normal loads."""
    with exit_on_error():
        from ..planner.expert_files import read_loads
        from ..solvers.experts.synthetic import synthetic_loads
        from .show.experts import comparison, comparison_table
        from .show.plan import show

        cases = (
            {path.stem: read_loads([path], key) for path in loads}
            if loads
            else {f"log-normal {sigma}": synthetic_loads(58, 256, sigma=sigma, seed=seed) for sigma in (0.5, 0.9, 1.3)}
        )
        rows = [comparison(name, load, num_gpus=num_gpus, num_slots=num_slots) for name, load in cases.items()]
        if json:
            import json as json_module

            typer.echo(json_module.dumps(rows, indent=1))
        else:
            show(comparison_table(rows))
