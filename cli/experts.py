"""`meshwright experts`: where the experts of a mixture-of-experts model go, from routing data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ..schema.errors import ConfigError
from .options import JsonOption, Mode, OptionModel, command, option
from .terminal import show

experts_app = typer.Typer(
    help="Where experts go: replicas, GPUs and shares from routing data, each with a bound on how far from optimal it is.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

FormatName = Literal["npz", "sglang", "vllm", "vllm-ascend", "tensorrt-llm"]

LoadsArgument = Annotated[
    list[Path] | None,
    typer.Argument(metavar="LOAD...", help="Files of loads (docs/experts.md); each is a workload that must be served."),
]
PlacementArgument = Annotated[
    Path, typer.Argument(metavar="PLACEMENT", help="A placement of any format that convert writes.")
]


class RoutingOptions(OptionModel):
    """Routing data, and the nodes."""

    key: str = option("", "arrays of a file to read, globs allowed; several are several workloads.", metavar="NAME,...")
    trace: Path | None = option(
        None, "experts of each token [tokens, layers, top_k]; visits of tokens to nodes are counted on it."
    )
    num_nodes: int = option(1, "nodes that the GPUs are divided among.")


class PlacementOptions(OptionModel):
    """What a placement is to be."""

    num_gpus: int = option(8, "GPUs that share the experts of a layer.", metavar="G")
    num_slots: int | None = option(None, "experts that all GPUs hold. Default: no replicas.", metavar="S")
    num_groups: int | None = option(None, "groups of experts that stay on one node each.")
    previous: Path | None = option(None, "placement to start from.")
    move_budget: float | None = option(
        None, "experts GPUs may fetch, a layer; below 1 a part of the slots.", metavar="M", needs=("previous",)
    )
    split: Literal["uniform", "weighted"] = option("uniform", "shares of the replicas of an expert.")
    objective: Literal["balance", "traffic", "pareto"] = option(
        "balance", "balance: GPUs only; traffic, pareto: few nodes for each token of --trace."
    )
    effort: Literal["fast", "search", "exact"] = option("fast", "exact proves small cases.", barred_by=("move_budget",))
    time_limit_s: float = option(
        10.0, "for search, exact and traffic.", ge=0, metavar="S", needs=("effort", "objective")
    )
    seed: int = option(0, "of random choices.", ge=0)
    out: Path | None = option(None, "where the placement is written.")
    to: FormatName = option("npz", "format of --out.", needs=("out",))
    plot: Path | None = option(None, "GPU loads before and after, as a picture.", metavar="FILE.svg")


@experts_app.command()
@command()
def place(
    routing: RoutingOptions, options: PlacementOptions, loads: LoadsArgument = None, json: JsonOption = False
) -> None:
    """Place the experts of every layer; balance, bound and gap of each."""
    from ..planner.expert_files import read_loads, read_placement, read_trace, write_placement
    from ..solvers.experts.placement import place_experts
    from .show.experts import placement_json, placement_table, require_svg, save_heat_map

    if not loads and routing.trace is None:
        raise ConfigError("nothing to place for: name a file of loads, or --trace")
    if options.plot:
        require_svg(options.plot)
    scenarios = read_loads(loads, routing.key) if loads else None
    trace = None if routing.trace is None else read_trace(routing.trace, "" if loads else routing.key)
    before = None
    if options.previous is not None:
        before = read_placement(options.previous, num_gpus=options.num_gpus, num_nodes=routing.num_nodes)
    num_experts = scenarios.shape[2] if scenarios is not None else int(trace.max()) + 1  # type: ignore[union-attr]
    chosen = options.model_dump(exclude={"previous", "num_slots", "out", "to", "plot"})
    result = place_experts(
        None, scenarios=scenarios, trace=trace, previous=before, num_nodes=routing.num_nodes,
        num_slots=options.num_slots or num_experts, **chosen,
    )  # fmt: skip
    if options.plot:
        save_heat_map(options.plot, result, before)
    if options.out is not None:
        write_placement(result, options.out, options.to)
    if json:
        typer.echo(placement_json(result))
    else:
        show(placement_table(result))
    typer.echo(f"wrote {options.out}" if options.out else "add --out placement.npz to keep it", err=True)


@experts_app.command()
@command()
def evaluate(
    placement: PlacementArgument,
    routing: RoutingOptions,
    loads: LoadsArgument = None,
    num_gpus: Annotated[
        int | None, typer.Option("--num-gpus", metavar="G", help="Where the file does not say.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Say what other loads or tokens make of a placement, with uniform shares and with the shares that suit them best."""
    from ..planner.expert_files import read_loads, read_placement, read_trace
    from ..solvers.experts.instance import trace_loads, validate_loads
    from ..solvers.experts.traffic import validate_trace
    from .show.experts import evaluation_json, evaluation_table

    placed = read_placement(placement, num_gpus=num_gpus, num_nodes=routing.num_nodes)
    if not loads and routing.trace is None:
        raise ConfigError("nothing to evaluate on: name a file of loads, or --trace")
    trace = None
    if routing.trace is not None:
        trace = validate_trace(read_trace(routing.trace), len(placed.physical_to_logical), placed.num_experts)
    counted = validate_loads(trace_loads(trace, placed.num_experts)) if trace is not None else None
    result = placed.evaluate(read_loads(loads, routing.key) if loads else counted)
    visits = None if trace is None else placed.evaluate_trace(trace)
    if json:
        typer.echo(evaluation_json(result, visits))
    else:
        show(evaluation_table(result, visits))


@experts_app.command()
@command()
def convert(
    placement: PlacementArgument,
    to: Annotated[FormatName, typer.Option(help="What to write.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where.")],
    num_gpus: Annotated[
        int | None, typer.Option("--num-gpus", metavar="G", help="Where the file does not say.")
    ] = None,
    num_nodes: Annotated[int, typer.Option(metavar="N", help="Nodes that the GPUs are divided among.")] = 1,
    first_layer_idx: Annotated[
        int, typer.Option(metavar="N", min=0, help="Index in the model of the first layer with experts.")
    ] = 0,
) -> None:
    """Write a placement in the format of a serving engine, or one of theirs in ours."""
    from ..planner.expert_files import read_placement, write_placement

    placed = read_placement(placement, num_gpus=num_gpus, num_nodes=num_nodes)
    write_placement(placed, out, to, first_layer_idx=first_layer_idx)
    typer.echo(f"wrote {out}", err=True)


class SyntheticOptions(OptionModel):
    """Synthetic loads, or the router of a synthetic trace."""

    num_layers: int = option(4, "layers with experts", ge=1, le=1000, metavar="L")
    num_experts: int = option(64, "experts of a layer.", ge=1, le=10000, metavar="E")
    sigma: float = option(0.9, "of the log-normal popularity.")
    seed: int = option(0, "of random choices.", ge=0)
    steps: int = option(1, "steps of time of the loads.", ge=1, le=10000, metavar="T", barred_by=("num_tokens",))
    drift: float = option(0.0, "log-normal change of every load at a step.", needs=("steps",))
    num_tokens: int = option(0, "write a trace of so many tokens instead of loads.", ge=0)
    top_k: int = option(8, "experts of a token", ge=1, metavar="K", needs=("num_tokens",))
    num_topics: int = option(16, "topics of the tokens", ge=1, needs=("num_tokens",))
    affinity: float = option(1.0, "of topics to experts.", needs=("num_tokens",))
    num_groups: int = option(1, "group-limited routing", ge=1, needs=("num_tokens",))
    top_groups: int = option(1, "groups that a token keeps.", ge=1, needs=("num_groups",))


_OF_LOADS, _OF_TRACES = (
    {"steps", "drift"},
    {"num_tokens", "top_k", "num_topics", "affinity", "num_groups", "top_groups"},
)


@experts_app.command()
@command()
def synth(
    out: Annotated[Path, typer.Option(metavar="FILE.npz", help="Where the data is written.")], options: SyntheticOptions
) -> None:
    """Make routing data with known structure (docs/experts.md has the formulas): loads, or with --num-tokens a trace."""
    import io

    import numpy as np

    from ..schema.base import write_atomically
    from ..solvers.experts.instance import Router, synthetic_loads, synthetic_trace

    if out.suffix != ".npz":
        raise ConfigError(f"{out}: synthetic data is written as .npz")
    if options.num_tokens:
        router = Router(**options.model_dump(exclude={*_OF_LOADS, "num_tokens", "seed"}))
        name, array = "routed_experts", synthetic_trace(router, options.num_tokens, seed=options.seed)
    else:
        name, array = "load", synthetic_loads(**options.model_dump(exclude=_OF_TRACES))
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{name: array})
    write_atomically(out, buffer.getvalue())
    typer.echo(f"wrote {out}: {name} {list(array.shape)}", err=True)


class BenchOptions(OptionModel):
    """The cases of a comparison."""

    num_gpus: int = option(32, "GPUs that share the experts of a layer.", metavar="G")
    num_slots: int | None = option(None, "experts that all GPUs hold. Default: 9 for every 8 experts.", metavar="S")
    key: str = option("", "arrays of a file to read, globs allowed; several are several workloads.", metavar="NAME,...")
    seed: int = option(0, "of random choices.", ge=0)


FILES = Mode(
    name="files of loads",
    when=lambda values: bool(values["loads"]),
    takes=(BenchOptions,),
    without=frozenset({"seed"}),
    why="are not random",
)


@experts_app.command()
@command(FILES, Mode(takes=(BenchOptions,), without=frozenset({"key"}), name="no files of loads"))
def bench(cases: BenchOptions, loads: LoadsArgument = None, json: JsonOption = False) -> None:
    """Compare with EPLB's algorithm on these loads, else on 58 layers of 256 experts with log-normal loads."""
    from ..planner.expert_files import read_loads
    from ..solvers.experts.instance import synthetic_loads
    from .show.experts import comparison, comparison_table

    loads_by_name = (
        {path.stem: read_loads([path], cases.key) for path in loads}
        if loads
        else {
            f"log-normal {sigma}": synthetic_loads(58, 256, sigma=sigma, seed=cases.seed) for sigma in (0.5, 0.9, 1.3)
        }
    )
    sizes = {"num_gpus": cases.num_gpus, "num_slots": cases.num_slots}
    rows = [comparison(name, load, **sizes) for name, load in loads_by_name.items()]
    if json:
        import json as json_module

        typer.echo(json_module.dumps(rows, indent=1))
    else:
        show(comparison_table(rows))
