"""`meshwright experts`: where the experts of a mixture-of-experts model go, from routing data."""

from __future__ import annotations

import io
import json as json_module
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import typer

from ..schema.base import write_atomically
from ..schema.errors import ConfigError
from ..schema.limits import MAX_DEVICES, MAX_LAYERS
from ..schema.units import counted, format_percent, format_seconds
from .options import JsonOption, Mode, OptionModel, SolverOptions, command, option
from .terminal import Table, headed_table, show

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..solvers.experts.placement import Evaluation, ExpertPlacement, TraceEvaluation

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
GpusOption = Annotated[
    int | None, typer.Option("--num-gpus", metavar="G", min=1, max=MAX_DEVICES, help="Where the file does not say.")
]

_KEY_HELP = "arrays of a file to read, globs allowed; several are several workloads."


class RoutingOptions(OptionModel):
    """Routing data, and the nodes."""

    key: str = option("", _KEY_HELP, metavar="NAME,...")
    trace: Path | None = option(
        None, "experts of each token [tokens, layers, top_k]; visits of tokens to nodes are counted on it."
    )
    num_nodes: int = option(1, "nodes that the GPUs are divided among.")


class PlacementOptions(OptionModel):
    """What a placement is to be."""

    num_gpus: int = option(8, "GPUs that share the experts of a layer.", metavar="G", ge=1)
    num_slots: int | None = option(None, "experts that all GPUs hold. Default: no replicas.", metavar="S")
    num_groups: int | None = option(None, "groups of experts that stay on one node each.")
    sources: Path | None = option(
        None, "loads [ranks, layers, experts] by source rank, in place of LOAD: GPUs go to nodes near their tokens."
    )
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


class TrafficSolverOptions(SolverOptions):
    """The same of placements, which have such programs where traffic counts."""

    solver: str = option("highs", "solver of integer programs, as of `plan`.", metavar="NAME", needs=("objective",))
    write_lp: Path | None = option(
        None, "write every integer program there, as an .lp file.", metavar="FOLDER", needs=("objective",)
    )


@experts_app.command()
@command()
def place(
    routing: RoutingOptions,
    options: PlacementOptions,
    solver: TrafficSolverOptions,
    loads: LoadsArgument = None,
    json: JsonOption = False,
) -> None:
    """Place the experts of every layer; balance, bound and gap of each."""
    from ..planner.expert_files import read_loads, read_placement, read_sources, read_trace, write_placement
    from ..solvers.experts.placement import place_experts

    if not loads and routing.trace is None and options.sources is None:
        raise ConfigError("nothing to place for: name a file of loads, --sources or --trace")
    if options.plot and options.plot.suffix != ".svg":
        raise ConfigError(f"{options.plot}: the heat map is written as .svg")
    scenarios = read_loads(loads, routing.key) if loads else None
    trace = None if routing.trace is None else read_trace(routing.trace, "" if loads else routing.key)
    before = None
    if options.previous is not None:
        before = read_placement(options.previous, num_gpus=options.num_gpus, num_nodes=routing.num_nodes)
    sources = None if options.sources is None else read_sources(options.sources, routing.key)
    given = scenarios if sources is None else sources
    num_experts = given.shape[2] if given is not None else int(trace.max()) + 1  # type: ignore[union-attr]
    chosen = options.model_dump(exclude={"previous", "sources", "num_slots", "out", "to", "plot"})
    result = place_experts(
        None, scenarios=scenarios, sources=sources, trace=trace, previous=before, num_nodes=routing.num_nodes,
        num_slots=options.num_slots or num_experts, **chosen,
    )  # fmt: skip
    if options.plot:
        _save_heat_map(options.plot, result, before)
    if options.out is not None:
        write_placement(result, options.out, options.to)
    if json:
        typer.echo(json_module.dumps(_plain_fields(result)))
    else:
        show(_placement_table(result))
    typer.echo(f"wrote {options.out}" if options.out else "add --out placement.npz to keep it", err=True)


def _plain_fields(document: Any) -> dict[str, Any]:
    fields = {name: getattr(document, name) for name in document.__dataclass_fields__}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in fields.items()}


def _placement_table(placement: ExpertPlacement) -> Table:
    """Show a row for each layer and one for their mean."""
    table = headed_table(
        f"{counted(len(placement.balance), 'layer')} of {counted(placement.num_experts, 'expert')} in "
        f"{counted(placement.physical_to_logical.shape[1], 'slot')} on {counted(placement.num_gpus, 'GPU')}, "
        f"{placement.split} shares, placed in {format_seconds(placement.solve_s)}",
        "layer", "max / mean", "lower bound", "gap", "most replicas", "moves", "off-node tokens",
    )  # fmt: skip

    def figures(balance: float, bound: float, gap: float) -> tuple[str, ...]:
        return f"{balance:.4f}", f"{bound:.4f}", format_percent(gap, 2)

    p = placement
    for layer, measured in enumerate(zip(p.balance, p.lower_bound, p.gap, strict=True)):
        replicas, moves, tokens = p.replica_count[layer].max(), p.moves[layer], p.off_node_tokens[layer]
        table.add_row(str(layer), *figures(*measured), str(replicas), str(moves), f"{tokens:,.0f}")
    table.add_section()
    means = figures(p.balance.mean(), p.lower_bound.mean(), p.gap.mean())
    moves, tokens = p.moves.mean(), p.off_node_tokens.mean()
    table.add_row("mean", *means, str(p.replica_count.max()), f"{moves:.1f}", f"{tokens:,.0f}")
    return table


CELL_WIDTH = 9
MARGIN = 24


def _save_heat_map(path: Path, placement: ExpertPlacement, before: ExpertPlacement | None) -> None:
    """Draw GPU load over the mean, layers down, GPUs across: before, with no placement the experts in order, and after."""
    if before is not None:
        load = before.evaluate(placement.expert_load).gpu_load[0]
    else:
        pieces = np.array_split(np.arange(placement.num_experts), placement.num_gpus)
        load = np.stack([placement.expert_load[:, piece].sum(axis=1) for piece in pieces], axis=1)
    width = MARGIN * 3 + 2 * CELL_WIDTH * placement.num_gpus
    height = MARGIN * 2 + CELL_WIDTH * len(load)
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-size="11">']
    for column, (title, loads) in enumerate((("before", load), ("after", placement.gpu_load))):
        used = loads / loads.mean(axis=1, keepdims=True)
        start = MARGIN + column * (MARGIN + CELL_WIDTH * placement.num_gpus)
        lines.append(f'<text x="{start}" y="16">{title}: up to {used.max():.2f} x the mean</text>')
        for layer, gpu in np.ndindex(used.shape):
            x, y = start + gpu * CELL_WIDTH, MARGIN + layer * CELL_WIDTH
            faded = round(
                255 * (1 - min(abs(used[layer, gpu] - 1.0), 1.0))
            )  # white at the mean, red above it, blue below
            colour = f"rgb(255,{faded},{faded})" if used[layer, gpu] >= 1 else f"rgb({faded},{faded},255)"
            lines.append(
                f'<rect x="{x}" y="{y}" width="{CELL_WIDTH}" height="{CELL_WIDTH}" fill="{colour}">'
                f"<title>layer {layer}, GPU {gpu}: {used[layer, gpu]:.3f}</title></rect>"
            )
    write_atomically(path, "\n".join([*lines, "</svg>", ""]))


@experts_app.command()
@command()
def evaluate(
    placement: PlacementArgument,
    routing: RoutingOptions,
    loads: LoadsArgument = None,
    num_gpus: GpusOption = None,
    json: JsonOption = False,
) -> None:
    """Say what other loads or tokens make of a placement, with uniform shares and with the shares that suit them best."""
    from ..planner.expert_files import read_loads, read_placement, read_trace
    from ..solvers.experts.instance import trace_loads, validate_loads
    from ..solvers.experts.traffic import validate_trace

    placed = read_placement(placement, num_gpus=num_gpus, num_nodes=routing.num_nodes)
    if not loads and routing.trace is None:
        raise ConfigError("nothing to evaluate on: name a file of loads, or --trace")
    trace = counted = visits = None
    if routing.trace is not None:
        trace = validate_trace(read_trace(routing.trace), len(placed.physical_to_logical), placed.num_experts)
        counted = validate_loads(trace_loads(trace, placed.num_experts))
    result = placed.evaluate(read_loads(loads, routing.key) if loads else counted)
    if trace is not None:
        visits = placed.evaluate_trace(trace)
    if json:
        of_trace = {} if visits is None else {"trace": _plain_fields(visits)}
        typer.echo(json_module.dumps(_plain_fields(result) | of_trace))
    else:
        show(_evaluation_table(result, visits))


def _evaluation_table(result: Evaluation, visits: TraceEvaluation | None) -> Table:
    """Show a row for each workload and layer."""
    columns = ("nodes of a token", "node load of the tokens") if visits is not None else ()
    measured = ("max / mean", "with best shares", "lower bound", "node max / mean")
    table = headed_table("", "workload", "layer", *measured, *columns, num_keys=2)
    for d, layer in np.ndindex(result.balance.shape):
        values = [result.balance, result.weighted_balance, result.lower_bound, result.node_balance]
        row = [f"{value[d, layer]:.4f}" for value in values]
        if visits is not None:
            row += [f"{visits.visits_per_token[layer]:.3f}", f"{visits.node_balance[layer]:.4f}"]
        table.add_row(str(d), str(layer), *row)
    return table


@experts_app.command()
@command()
def convert(
    placement: PlacementArgument,
    to: Annotated[FormatName, typer.Option(help="What to write.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where.")],
    num_gpus: GpusOption = None,
    num_nodes: Annotated[
        int, typer.Option(metavar="N", min=1, max=MAX_DEVICES, help="Nodes that the GPUs are divided among.")
    ] = 1,
    first_layer_idx: Annotated[
        int,
        typer.Option(metavar="N", min=0, max=MAX_LAYERS, help="Index in the model of the first layer with experts."),
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


_OF_TRACES = {"num_tokens", "top_k", "num_topics", "affinity", "num_groups", "top_groups"}


@experts_app.command()
@command()
def synth(
    out: Annotated[Path, typer.Option(metavar="FILE.npz", help="Where the data is written.")], options: SyntheticOptions
) -> None:
    """Make routing data with known structure (docs/experts.md has the formulas): loads, or with --num-tokens a trace."""
    from ..solvers.experts.instance import Router, synthetic_loads, synthetic_trace

    if out.suffix != ".npz":
        raise ConfigError(f"{out}: synthetic data is written as .npz")
    if options.num_tokens:
        router = Router(**options.model_dump(exclude={"steps", "drift", "num_tokens", "seed"}))
        name, array = "routed_experts", synthetic_trace(router, options.num_tokens, seed=options.seed)
    else:
        name, array = "load", synthetic_loads(**options.model_dump(exclude=_OF_TRACES))
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{name: array})
    write_atomically(out, buffer.getvalue())
    typer.echo(f"wrote {out}: {name} {list(array.shape)}", err=True)


class BenchOptions(OptionModel):
    """The cases of a comparison."""

    num_gpus: int = option(32, "GPUs that share the experts of a layer.", metavar="G", ge=1)
    num_slots: int | None = option(None, "experts that all GPUs hold. Default: 9 for every 8 experts.", metavar="S")
    key: str = option("", _KEY_HELP, metavar="NAME,...")
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

    if loads:
        loads_by_name = {path.stem: read_loads([path], cases.key) for path in loads}
    else:
        sigmas = (0.5, 0.9, 1.3)
        loads_by_name = {f"log-normal {s}": synthetic_loads(58, 256, sigma=s, seed=cases.seed) for s in sigmas}
    rows = [_compared(name, load, cases.num_gpus, cases.num_slots) for name, load in loads_by_name.items()]
    if json:
        typer.echo(json_module.dumps(rows, indent=1))
        return
    ours, theirs = ("ours / bound", "worst layer", "s"), ("EPLB / bound", "worst layer", "s")
    table = headed_table("", "loads", "slots", "GPUs", "lower bound", *ours, *theirs, text=("loads",))
    for row in rows:
        figures = ("lower_bound", "mean", "worst", "solve_s", "eplb_mean", "eplb_worst", "eplb_s")
        table.add_row(row["loads"], str(row["slots"]), str(row["gpus"]), *(f"{row[name]:.4f}" for name in figures))
    show(table)


def _compared(name: str, load: NDArray[np.float64], num_gpus: int, num_slots: int | None) -> dict[str, Any]:
    """Compare ours and EPLB's algorithm on the same loads: balance over the bound, mean and worst layer, and seconds."""
    from ..solvers.experts.balance import eplb_placement
    from ..solvers.experts.instance import uniform_shares, utilisation
    from ..solvers.experts.placement import place_experts

    num_experts = load.shape[2]
    slots = num_slots or -(-(num_experts * 9 // 8) // num_gpus) * num_gpus
    ours = place_experts(None, scenarios=load, num_gpus=num_gpus, num_slots=slots)
    start = time.perf_counter()
    theirs = eplb_placement(load.sum(axis=0), num_slots=slots, num_gpus=num_gpus)
    eplb_s = time.perf_counter() - start
    eplb_balance = utilisation(ours.instance(load), theirs, uniform_shares(theirs, num_experts)).max(axis=(0, 2))
    return {
        "loads": name,
        "slots": slots,
        "gpus": num_gpus,
        "lower_bound": float(ours.lower_bound.mean()),
        "mean": float((ours.balance / ours.lower_bound).mean()),
        "worst": float((ours.balance / ours.lower_bound).max()),
        "solve_s": ours.solve_s,
        "eplb_mean": float((eplb_balance / ours.lower_bound).mean()),
        "eplb_worst": float((eplb_balance / ours.lower_bound).max()),
        "eplb_s": eplb_s,
    }
