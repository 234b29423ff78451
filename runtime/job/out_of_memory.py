"""A rank that has no memory left says so itself: which rank, at what, what was predicted and what there is."""

from __future__ import annotations

import contextlib
import re
import resource
from collections.abc import Iterator

import psutil
import torch
import torch.distributed as dist

from ...schema import MeshwrightError, Plan
from ...schema.units import format_bytes

_CPU_ALLOCATOR = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes|not enough memory")
HELP = "plan again with a smaller memory budget, or with recompute=full or a smaller micro_batch_size fixed"


@contextlib.contextmanager
def naming_rank(plan: Plan, device: torch.device) -> Iterator[None]:
    """Turn what torch and Python raise for want of memory into one message.

    Raises:
        MeshwrightError: instead of them.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise _describe(plan, device, str(error).splitlines()[:1]) from None
    except RuntimeError as error:
        if not _CPU_ALLOCATOR.search(str(error)):
            raise
        raise _describe(plan, device, str(error).splitlines()[:1]) from None


def _describe(plan: Plan, device: torch.device, said: list[str]) -> MeshwrightError:
    rank = plan.rank_map.index(dist.get_rank())
    return MeshwrightError(
        f"rank {rank} of {plan.layout.world_size} is out of memory on {device}",
        details=(*said, memory_line(plan, device), *_limit()),
        help=HELP,
    )


def _limit() -> tuple[str, ...]:
    """The process's own limit, where there is one (ulimit -v, -d)."""
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    finite = [limit for limit in limits if limit != resource.RLIM_INFINITY]
    return (f"the process may take {format_bytes(min(finite))} (ulimit)",) if finite else ()


def memory_line(plan: Plan, device: torch.device) -> str:
    """Predicted against available memory."""
    predicted = format_bytes(plan.estimate.peak_reserved_bytes)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_reserved(device)
        return (
            f"predicted peak {predicted}; the device has {format_bytes(total)}, of which this rank holds {format_bytes(own)} and "
            f"{format_bytes(free)} are free"
        )
    memory = psutil.virtual_memory()
    return (
        f"predicted peak {predicted} a rank; this machine has {format_bytes(memory.total)}, of which "
        f"{format_bytes(memory.available)} are free now"
    )
