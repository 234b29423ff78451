"""The host beside the devices: copies in either direction and in both, and AdamW of parameters that lie in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from ...schema.units import MIB, format_bytes

if TYPE_CHECKING:
    import torch

    from .timing import Bench

Copy = Literal["to_device", "to_host", "both"]

COPY_BYTES = (64 * MIB, 512 * MIB, 1 * MIB)
ADAM_PARAMETERS = (2**22, 2**24, 2**26)

_ADAM_BYTES = 20
"""Of one parameter with its gradient and two states in fp32, and what the update needs besides."""

_CALLS = 6
_UNKNOWN_COPY_BYTES_PER_S, _UNKNOWN_ADAM_BYTES_PER_S = 1e9, 2e9
"""Before anything was measured."""


def measure_copies(bench: Bench, local_rank: int, ranks_per_node: int) -> list[dict[str, Any]]:
    """Fields of HostCopyPoint: every direction and kind of memory, all devices of the host at once and one alone."""
    points: list[dict[str, Any]] = []
    slowest_s_per_byte = 1 / _UNKNOWN_COPY_BYTES_PER_S
    for size in COPY_BYTES:
        for host_memory in ("pinned", "pageable"):
            if not (bench.has_memory(2 * size) and bench.has_memory(2 * size, on_host=True)):
                continue
            calls = copy_calls(bench.device, size, pinned=host_memory == "pinned")
            for devices in dict.fromkeys((ranks_per_node, 1)):
                for direction, call in calls.items():
                    what = f"{direction} of {format_bytes(size)}, {host_memory}, {devices} at once"
                    if not bench.has_time(_CALLS * slowest_s_per_byte * size, what):
                        continue
                    bench.say(what)
                    takes_part = devices > 1 or local_rank == 0
                    timing = bench.measure(call if takes_part else _nothing, calls=1)
                    seen = bench.agree(timing.time_s) / size
                    slowest_s_per_byte = max(slowest_s_per_byte, seen) if points else seen
                    fields = {"direction": direction, "host_memory": host_memory, "size_bytes": size}
                    time_s = timing.time_s if takes_part else None
                    points.append({**fields, "devices_at_once": devices, "time_s": time_s, "spread": timing.spread})
    return points


def copy_calls(device: torch.device, size: int, *, pinned: bool) -> dict[Copy, Callable[[], Any]]:
    """A copy of so many bytes in each direction, and one in each direction at once on streams of their own."""
    import torch

    host = [torch.ones(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    there = [torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def both() -> None:
        current = torch.cuda.current_stream(device)
        for stream in streams:
            stream.wait_stream(current)
        with torch.cuda.stream(streams[0]):
            there[0].copy_(host[0], non_blocking=pinned)
        with torch.cuda.stream(streams[1]):
            host[1].copy_(there[1], non_blocking=pinned)
        for stream in streams:
            current.wait_stream(stream)

    return {
        "to_device": lambda: there[0].copy_(host[0], non_blocking=pinned),
        "to_host": lambda: host[1].copy_(there[1], non_blocking=pinned),
        "both": both,
    }


def measure_cpu_adam(bench: Bench, local_rank: int, ranks_per_node: int) -> list[dict[str, Any]]:
    """Fields of CpuAdamPoint: torch's fused AdamW in fp32 on the host, by all ranks of a node at once and by one alone."""
    import torch

    points: list[dict[str, Any]] = []
    parameter_s = _ADAM_BYTES / _UNKNOWN_ADAM_BYTES_PER_S
    for number in ADAM_PARAMETERS:
        if not bench.has_memory(_ADAM_BYTES * number, on_host=True):
            break
        made_s = _ADAM_BYTES * number / _UNKNOWN_ADAM_BYTES_PER_S
        what = f"AdamW of {number} parameters"
        if not bench.has_time(made_s + _CALLS * parameter_s * number, what):
            continue
        parameter = torch.nn.Parameter(torch.ones(number))
        parameter.grad = torch.ones(number)
        optimizer = torch.optim.AdamW([parameter], lr=1e-4, fused=True)
        step = torch.no_grad()(optimizer.step)
        for ranks in dict.fromkeys((ranks_per_node, 1)):
            if ranks != ranks_per_node and not bench.has_time(_CALLS * parameter_s * number, f"{what} by one rank"):
                continue
            bench.say(what)
            takes_part = ranks > 1 or local_rank == 0
            timing = bench.measure(step if takes_part else _nothing, calls=1)
            parameter_s = bench.agree(timing.time_s) / number
            fields = {"num_parameters": number, "threads": torch.get_num_threads(), "ranks_at_once": ranks}
            points.append({**fields, "time_s": timing.time_s if takes_part else None, "spread": timing.spread})
    return points


def _nothing() -> None:
    """What ranks do that take no part."""
