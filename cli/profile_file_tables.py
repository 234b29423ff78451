"""Tables of profiles."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table

from ..profilers.files.merge import point_lists
from ..schema import Profile
from ..schema.units import GB, format_seconds


def summary_table(profile: Profile, rates: dict[str, float]) -> Group:
    """Where it was measured, the rates, and how many points of each kind there are."""
    machine = profile.machine
    where = Table(title=f"{machine.device}, {machine.num_devices} x {machine.backend}", **_STYLE)
    for _ in range(2):
        where.add_column("")
    rows = {
        "nodes": str(machine.num_nodes),
        "torch, python": f"{machine.torch}, {machine.python}",
        "driver": machine.driver,
        "hosts": ", ".join(profile.provenance.hosts),
        "measured": f"{profile.created} in {format_seconds(profile.duration_s)}",
        "other work on the cores": f"{100 * profile.foreign_load_fraction:.0f} %",
        "runs folded in": str(profile.calibration.num_runs) if profile.calibration.num_runs else "",
        "content": "altered since" if profile.is_altered else "as measured" if profile.content_sha256 else "not sealed",
    }
    for name, value in rows.items():
        if value:
            where.add_row(name, value)
    table = Table(title="rates", **_STYLE)
    table.add_column("")
    table.add_column("measured", justify="right")
    for name, value in rates.items():
        table.add_row(*_named(name, value))
    points = Table(title="points", **_STYLE)
    points.add_column("")
    points.add_column("points", justify="right")
    points.add_column("median spread", justify="right")
    for name, values in point_lists(profile).items():
        spread = sorted(value.spread for value in values)[len(values) // 2]
        points.add_row(name.replace("_", " "), str(len(values)), f"{100 * spread:.0f} %")
    return Group(where, table, points)


def difference_table(found: dict[str, Any]) -> Group:
    """Machines, rates and points of two profiles side by side."""
    machines = Table(title="machine" if found["machine"] else "the same machine", **_STYLE)
    for name in ("", "first", "second"):
        machines.add_column(name)
    for name, (a, b) in found["machine"].items():
        machines.add_row(name.replace("_", " "), str(a), str(b))
    rates = Table(title="rates", **_STYLE)
    for name in ("", "first", "second", "second / first"):
        rates.add_column(name, justify="right" if name else "left")
    for name, (a, b) in found["rates"].items():
        ratio = f"{b / a:.2f}" if a and b else ""
        first, second = (_named(name, value)[1] if value else "" for value in (a, b))
        rates.add_row(_named(name, a or b)[0], first, second, ratio)
    points = Table(title="points", **_STYLE)
    for name in ("", "in both", "only first", "only second", "seconds, second / first"):
        points.add_column(name, justify="right" if name else "left")
    for name, row in found["points"].items():
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        points.add_row(name.replace("_", " "), str(row["both"]), str(row["first"]), str(row["second"]), ratio)
    return Group(machines, rates, points)


_STYLE: dict[str, Any] = {"title_justify": "left", "box": box.SIMPLE, "pad_edge": False}


def _named(name: str, value: float) -> tuple[str, str]:
    """A rate's title and its value in a unit that people use."""
    if name.endswith("_flops_per_s"):
        return f"{name.removesuffix('_flops_per_s')} products", f"{value / 1e12:.3g} TFLOP/s"
    if name.endswith("_bytes_per_s"):
        return name.removesuffix("_bytes_per_s").replace("_", " "), f"{value / GB:.3g} GB/s"
    return name.removesuffix("_s").replace("_", " "), format_seconds(value)
