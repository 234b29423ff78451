"""`meshwright models`, `devices` and `doctor`: what can be named, and what this machine has."""

from __future__ import annotations

import json as json_module

import typer

from .options import JsonOption, command
from .terminal import list_table, show

_SIGNS = {"ok": "[green]ok[/]", "limited": "[yellow]limited[/]", "broken": "[red]broken[/]"}
_MODEL_FIELDS = ("name", "num_params", "num_active_params", "num_blocks", "hidden_dim", "max_seq_len", "source")


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
    table = list_table("model", "parameters", "active", "layers", "width", "longest sequence")
    for spec in specs:
        counts = (format_count(spec.num_params), format_count(spec.num_active_params))
        table.add_row(spec.name, *counts, str(spec.num_blocks), str(spec.hidden_dim), str(spec.max_seq_len))
    show(table)


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
    table = list_table("device", "memory", "GB/s", "bf16 TFLOP/s", "fp16", "fp8", *links, text=links)
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


@command()
def doctor(json: JsonOption = False) -> None:
    """Look at this installation and machine: packages, solvers, devices, backends, links, and what will not work and why.

    Exit code 1 where something is broken; what is merely limited is 0.
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from ..profilers.doctor import examine

    findings = examine()
    if json:
        typer.echo("[" + ",\n".join(finding.model_dump_json() for finding in findings) + "]")
    else:
        table = Table("", "", "found", "means", box=box.SIMPLE)
        for finding in findings:
            means = finding.means + (f"; {finding.help}" if finding.help and finding.status != "ok" else "")
            table.add_row(finding.subject, _SIGNS[finding.status], escape(finding.found), escape(means))
        show(table)
    if any(finding.status == "broken" for finding in findings):
        raise typer.Exit(1)
