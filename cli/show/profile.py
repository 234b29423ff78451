"""Show profiles as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.table import Table

from ...profilers.files import point_lists
from ...schema import Profile
from ...schema.units import GB, TFLOP, format_bytes, format_seconds
from ..terminal import headed_table


def show_profile(profile: Profile) -> None:
    """Print sections with their points and time, the figures that matter most, and what is slow, on stdout."""
    console = Console(soft_wrap=True)
    machine = profile.machine
    nodes = f", {machine.num_nodes} nodes" if machine.num_nodes > 1 else ""
    console.print(
        f"{machine.device}: {machine.num_devices} ranks{nodes}, {machine.backend}, torch {machine.torch}",
        highlight=False,
    )
    console.print(_sections(profile))
    console.print(_figures(profile))
    if profile.foreign_load_fraction > 0.2:
        load = 100 * profile.foreign_load_fraction
        console.print(f"other work used {load:.0f} % of the cores when it began: rates are too low")
    for slow in profile.slow:
        console.print(
            f"slow: {slow.name}: {slow.what} takes {slow.ratio:.2f} times as long as elsewhere (noise {slow.noise:.2f})",
            highlight=False,
        )
    if len(profile.ranks) > 1 and not profile.slow:
        console.print("no rank or link is slower than its peers beyond noise")


def _sections(profile: Profile) -> Table:
    title = f"measured in {format_seconds(profile.duration_s)}"
    table = headed_table(title, "part", "points", "time", "", text=("part", ""), bold=False)
    for section in profile.parts:
        state = section.state if not section.reason else f"{section.state}: {section.reason}"
        duration = format_seconds(section.duration_s) if section.num_points else "-"
        table.add_row(section.name, str(section.num_points), duration, state)
    return table


def _figures(profile: Profile) -> Table:
    table = headed_table("", "", "rate")
    table.show_header = False
    rates: dict[str, float] = {}
    for point in profile.matmuls:
        rates[point.dtype] = max(rates.get(point.dtype, 0.0), 2 * point.m * point.n * point.k / point.time_s)
    for dtype, rate in rates.items():
        table.add_row(f"{dtype} products, best", f"{rate / TFLOP:.4g} TFLOP/s")
    table.add_row("memory bandwidth", f"{profile.memory_bandwidth_bytes_per_s / GB:.4g} GB/s")
    for op in dict.fromkeys(point.op for point in profile.collectives):
        points = [p for p in profile.collectives if p.op == op and p.group_size == profile.machine.num_devices]
        if points:
            largest = max(points, key=lambda point: point.size_bytes)
            rate = largest.size_bytes / largest.time_s / GB
            table.add_row(f"{op}, all ranks, {format_bytes(largest.size_bytes)}", f"{rate:.4g} GB/s")
    for copy in profile.host_copies:
        if copy.host_memory == "pinned" and copy.size_bytes == max(p.size_bytes for p in profile.host_copies):
            rate = copy.size_bytes / copy.time_s / GB
            table.add_row(f"{copy.direction}, pinned, {copy.devices_at_once} devices", f"{rate:.4g} GB/s each")
    for adam in profile.cpu_adam[-2:]:
        rate = adam.num_parameters / adam.time_s / 1e9
        table.add_row(f"AdamW on the host, {adam.ranks_at_once} ranks at once", f"{rate:.4g} G parameters/s each")
    for point in profile.storage[-2:]:
        rate = point.size_bytes / point.time_s / GB
        table.add_row(f"storage {point.operation}{'' if point.direct else ', not direct'}", f"{rate:.4g} GB/s each")
    for step in profile.step_memory:
        peak = max(step.forward_peak_bytes, step.backward_peak_bytes, step.optimizer_peak_bytes)
        table.add_row(f"{step.model} on one device, {step.recompute} recompute", format_bytes(peak))
    return table


def summary_table(profile: Profile, rates: dict[str, float]) -> Group:
    """Show where a profile was measured, the rates, and how many points of each kind there are."""
    machine = profile.machine
    title = f"{machine.device}, {machine.num_devices} x {machine.backend}"
    origin = headed_table(title, "", " ", text=("", " "), bold=False)
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
            origin.add_row(name, value)
    measured = headed_table("rates", "", "measured", bold=False)
    for name, value in rates.items():
        measured.add_row(*_in_usual_units(name, value))
    points = headed_table("points", "", "points", "median spread", bold=False)
    for name, values in point_lists(profile).items():
        spread = sorted(value.spread for value in values)[len(values) // 2]
        points.add_row(name.replace("_", " "), str(len(values)), f"{100 * spread:.0f} %")
    return Group(origin, measured, points)


def difference_table(differences: dict[str, Any]) -> Group:
    """Show machines, rates and points of two profiles side by side."""
    title = "machine" if differences["machine"] else "the same machine"
    machines = headed_table(title, "", "first", "second", text=("", "first", "second"), bold=False)
    for name, (a, b) in differences["machine"].items():
        machines.add_row(name.replace("_", " "), str(a), str(b))
    rates = headed_table("rates", "", "first", "second", "second / first", bold=False)
    for name, (a, b) in differences["rates"].items():
        ratio = f"{b / a:.2f}" if a and b else ""
        first, second = (_in_usual_units(name, value)[1] if value else "" for value in (a, b))
        rates.add_row(_in_usual_units(name, a or b)[0], first, second, ratio)
    ratio_title = "seconds, second / first"
    points = headed_table("points", "", "in both", "only first", "only second", ratio_title, bold=False)
    for name, row in differences["points"].items():
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        points.add_row(name.replace("_", " "), str(row["both"]), str(row["first"]), str(row["second"]), ratio)
    return Group(machines, rates, points)


def _in_usual_units(name: str, value: float) -> tuple[str, str]:
    """Return a rate's title and its value in a unit that people use."""
    if name.endswith("_flops_per_s"):
        return f"{name.removesuffix('_flops_per_s')} products", f"{value / 1e12:.3g} TFLOP/s"
    if name.endswith("_bytes_per_s"):
        return name.removesuffix("_bytes_per_s").replace("_", " "), f"{value / GB:.3g} GB/s"
    return name.removesuffix("_s").replace("_", " "), format_seconds(value)
