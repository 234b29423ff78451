"""`meshwright models`, `devices` and `doctor`: what can be named, and what this machine has."""

from __future__ import annotations

import json as json_module

import typer

from .inputs import JsonOption
from .terminal import exit_on_error


def models(json: JsonOption = False) -> None:
    """List the models of the catalogue."""
    with exit_on_error():
        from rich.table import Table

        from ..schema import ModelSpec
        from ..schema.catalogue import model_names
        from ..schema.units import format_count
        from .show.plan import show

        specs = [ModelSpec.named(name) for name in model_names()]
        if json:
            typer.echo(json_module.dumps([_model_row(spec) for spec in specs], indent=2))
            return
        table = Table("model", "parameters", "active", "layers", "width", "longest sequence", box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for spec in specs:
            counts = (format_count(spec.num_params), format_count(spec.num_active_params))
            table.add_row(spec.name, *counts, str(spec.num_blocks), str(spec.hidden_dim), str(spec.max_seq_len))
        show(table)


def _model_row(spec: object) -> dict[str, object]:
    names = ("name", "num_params", "num_active_params", "num_blocks", "hidden_dim", "max_seq_len", "source")
    return {name: getattr(spec, name) for name in names}


def devices(json: JsonOption = False) -> None:
    """List the devices of the catalogue."""
    with exit_on_error():
        from rich.table import Table

        from ..schema.catalogue import device_entries
        from ..schema.units import GB, TFLOP, format_bytes
        from .show.plan import show

        entries = device_entries()
        if json:
            typer.echo(json_module.dumps(entries, indent=2))
            return
        table = Table(
            "device",
            "memory",
            "GB/s",
            "bf16 TFLOP/s",
            "fp16",
            "fp8",
            "in node",
            "between nodes",
            box=None,
            pad_edge=False,
        )
        for column in table.columns[1:6]:
            column.justify = "right"
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


SIGNS = {"ok": "[green]ok[/]", "limited": "[yellow]limited[/]", "broken": "[red]broken[/]"}


def doctor(json: JsonOption = False) -> None:
    """Look at this installation and machine: packages, solvers, devices, backends, links, and what will not work and why.

    Exit code 1 where something is broken; what is merely limited is 0.
    """
    with exit_on_error():
        from rich import box
        from rich.markup import escape
        from rich.table import Table

        from ..profilers.doctor import examine
        from .show.plan import show

        findings = examine()
        if json:
            typer.echo("[" + ",\n".join(finding.model_dump_json() for finding in findings) + "]")
        else:
            table = Table("", "", "found", "means", box=box.SIMPLE)
            for finding in findings:
                means = finding.means + (f"; {finding.help}" if finding.help and finding.status != "ok" else "")
                table.add_row(finding.subject, SIGNS[finding.status], escape(finding.found), escape(means))
            show(table)
        if any(finding.status == "broken" for finding in findings):
            raise typer.Exit(1)
