"""The `meshwright` command with `models` and `devices`; other subcommands have files of their own.

Heavy imports happen inside the commands, so that --help is quick.
"""

from __future__ import annotations

import json as json_module

import typer

from .apply import ApplyCommand, apply, tokens
from .apply_rl import apply_rl
from .batch import batch
from .compare import compare
from .doctor import doctor
from .estimate import estimate
from .experts import experts_app
from .explain import explain, export, import_configuration, report
from .goodput import goodput
from .options import CommandGroup, JsonOption, command
from .plan import plan
from .plan_rl import plan_rl
from .profile import profile_app
from .recipes import recipes
from .rehearse import rehearse
from .replay import replay
from .scale import scale
from .serve import serve
from .studio import studio
from .terminal import begin, headed_table, show
from .validate import calibrate, validate

app = typer.Typer(
    cls=CommandGroup,
    name="meshwright",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.callback()(begin)
app.command(short_help="The fastest layout that fits, and why it won; writes plan.json.")(plan)
app.command(short_help="Pools and layouts of GRPO or PPO: who shares devices, and why.")(plan_rl)
app.command(short_help="What one given layout costs, whether it fits or not.")(estimate)
app.command(short_help="What binds a plan, what more of each resource is worth, why not.")(explain)
app.command(short_help="Draw a plan: a page for a browser, a trace for Perfetto.")(report)
app.command(short_help="Plan in a browser, as controls move.")(studio)
app.command(cls=ApplyCommand, short_help="A plan's step on every kind of rank, without a device.")(rehearse)
app.command(short_help="A serving plan under recorded requests, simulated one by one.")(replay)
app.command(cls=ApplyCommand, short_help="Run a plan: train its model, or your own script under it.")(apply)
app.command(short_help="Run a post-training plan: generate, reward, score, update.")(apply_rl)
app.command(short_help="Serve a plan's model here, and measure.")(serve)
app.command()(tokens)
app.command(short_help="How often to save, and what faults leave of a plan's speed.")(goodput)
app.command(short_help="Machines on demand and spot over time, by a deadline.")(scale)
app.command(short_help="Groups of ranks for a batch of unequal lengths.")(batch)
app.command()(export)
app.command("import", short_help="Read an engine's configuration as a layout.")(import_configuration)
app.command(short_help="What the job that runs today loses, and what to change.")(compare)
app.command(short_help="Published runs beside our prediction and our plan.")(recipes)
app.command(short_help="What is installed and here, what will not work and why.")(doctor)
app.command(short_help="Correct a profile by what `apply` measured.")(calibrate)
app.command(short_help="Score predictions against a table of measured runs.")(validate)

_MODEL_FIELDS = ("name", "num_params", "num_active_params", "num_blocks", "hidden_dim", "max_seq_len", "source")


@app.command()
@command()
def models(json: JsonOption = False) -> None:
    """List the models of the catalogue."""
    from ..schema import ModelSpec
    from ..schema.catalogue import model_names
    from ..schema.units import format_count

    specs = [ModelSpec.named(name) for name in model_names()]
    if json:
        rows = [{name: getattr(spec, name) for name in _MODEL_FIELDS} for spec in specs]
        typer.echo(json_module.dumps(rows, indent=2))
        return
    table = headed_table("", "model", "parameters", "active", "layers", "width", "longest sequence", text=("model",))
    for spec in specs:
        counts = (format_count(spec.num_params), format_count(spec.num_active_params))
        table.add_row(spec.name, *counts, str(spec.num_blocks), str(spec.hidden_dim), str(spec.max_seq_len))
    show(table)


@app.command()
@command()
def devices(json: JsonOption = False) -> None:
    """List the devices of the catalogue."""
    from ..schema.catalogue import device_entries
    from ..schema.units import GB, TFLOP, format_bytes

    entries = device_entries()
    if json:
        typer.echo(json_module.dumps(entries, indent=2))
        return
    links = ("in node", "between nodes")
    columns = ("device", "memory", "GB/s", "bf16 TFLOP/s", "fp16", "fp8", *links)
    table = headed_table("", *columns, text=("device", *links))
    for name, entry in entries.items():
        peaks = [entry["peak_flops_per_s"].get(dtype) for dtype in ("bf16", "fp16", "fp8")]
        table.add_row(
            name,
            format_bytes(entry["memory_bytes"]),
            f"{entry['memory_bandwidth_bytes_per_s'] / GB:.0f}",
            *(f"{peak / TFLOP:.0f}" if peak else "-" for peak in peaks),
            f"{entry['devices_per_node']} x {entry['scaleup']}",
            entry["scaleout"],
        )
    show(table)


app.add_typer(experts_app, name="experts")
app.add_typer(profile_app, name="profile")

FROM_START = "from the start of the process"
"""What the context carries where the command may count its time from the start of the process."""


def main() -> None:
    """Run the command line of a process that is this program's own."""
    app(obj=FROM_START)
