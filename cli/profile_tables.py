"""What a profile says, on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from ..schema.units import GB, TFLOP, format_bytes, format_seconds

if TYPE_CHECKING:
    from ..schema import Profile


def show_profile(profile: Profile) -> None:
    """Parts with their points and time, the figures that matter most, and what is slow, on stdout."""
    console = Console(soft_wrap=True)
    machine = profile.machine
    nodes = f", {machine.num_nodes} nodes" if machine.num_nodes > 1 else ""
    console.print(
        f"{machine.device}: {machine.num_devices} ranks{nodes}, {machine.backend}, torch {machine.torch}",
        highlight=False,
    )
    console.print(_parts(profile))
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


def _parts(profile: Profile) -> Table:
    table = Table(
        title=f"measured in {format_seconds(profile.duration_s)}", title_justify="left", box=box.SIMPLE, pad_edge=False
    )
    for name in ("part", "points", "time", ""):
        table.add_column(name, justify="left" if name in ("part", "") else "right")
    for part in profile.parts:
        said = part.state if not part.reason else f"{part.state}: {part.reason}"
        table.add_row(
            part.name, str(part.num_points), format_seconds(part.duration_s) if part.num_points else "-", said
        )
    return table


def _figures(profile: Profile) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
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
