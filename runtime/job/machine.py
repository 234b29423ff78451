"""Checks of a plan against this machine, before the start and on each rank; and the message of a rank without memory."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Iterator

import psutil
import torch
import torch.distributed as dist

from ...profilers.machine import available_memory, num_cores
from ...profilers.run.faults import is_out_of_memory
from ...schema import MeshwrightError, NodeGroup, RuntimeMismatchError, TrainingPlan
from ...schema.units import format_bytes

_MEMORY_TOLERANCE = 0.03
"""Drivers and ECC settings take a little of the memory that other machines with the same GPU report."""

_VARIANTS = ("pcie", "nvl")


def local_group(plan: TrainingPlan, *, nnodes: int, node_rank: int | None, spares: int = 0) -> NodeGroup:
    """Return the plan's description of this node, by its position in the cluster where the nodes differ.

    Args:
        spares: nodes that stand by, or ranks of a single node.
    """
    cluster = plan.cluster
    if spares and len(cluster.groups) > 1:
        raise RuntimeMismatchError(
            f"the nodes of {cluster.name} differ: a spare one cannot stand in for each", help="leave out --spares"
        )
    if nnodes != cluster.num_nodes + (spares if nnodes > 1 else 0):
        raise RuntimeMismatchError(
            f"the plan is for {plan.layout.world_size} ranks on {cluster.num_nodes} nodes; this job has {nnodes} nodes",
            details=(f"cluster of the plan: {cluster.name}; layout: {plan.layout}",),
            help=f"run `meshwright apply` on {cluster.num_nodes} nodes with --nnodes {cluster.num_nodes}, or plan again"
            + (" with --cluster local" if nnodes == 1 else f" for {nnodes} nodes"),
        )
    if node_rank is None:
        if len(cluster.groups) > 1:
            raise RuntimeMismatchError(
                f"the nodes of {cluster.name} differ, so each must know which one it is", help="add --node-rank"
            )
        return cluster.groups[0]
    if len(cluster.groups) == 1:
        group = cluster.groups[0]
        return group.replace(devices_per_node=group.devices_per_node + spares) if nnodes == 1 and spares else group
    nodes = [group for group in cluster.groups for _ in range(group.num_nodes)]
    return nodes[node_rank]


def check_machine(plan: TrainingPlan, group: NodeGroup) -> None:
    """Refuse a plan whose devices this machine does not have; looks at kind and number, without touching a GPU."""
    planned = f"{group.devices_per_node} x {group.device.name}"
    offloaded, available = 0 if plan.offload is None else plan.offload.host_bytes, available_memory()
    if offloaded > available:
        raise RuntimeMismatchError(
            f"the plan's offload schedule needs {format_bytes(offloaded)} of each node's host memory; "
            f"{format_bytes(offloaded - available)} are missing",
            details=(f"{format_bytes(available)} are available on this machine",),
            help="free host memory, or plan again with --host-memory-gib",
        )
    if group.device.backend.is_host:
        _check_host(plan, group)
        return
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        raise RuntimeMismatchError(
            f"the plan is for {planned} in each node; this machine has no GPU that torch can use",
            details=(f"torch {torch.__version__}, CUDA {torch.version.cuda or 'not built in'}",),
            help="run it on a machine with these GPUs, or plan for this one with --cluster local",
        )
    if num_gpus < group.devices_per_node:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise RuntimeMismatchError(
            f"the plan is for {planned} in each node; this machine has {num_gpus} GPUs",
            details=() if visible is None else (f"CUDA_VISIBLE_DEVICES={visible}",),
            help="run it on larger nodes, or plan again with --cluster local",
        )


def check_device(plan: TrainingPlan, group: NodeGroup, device: torch.device) -> None:
    """Refuse a GPU of another kind, or with less memory than the plan counts on."""
    if device.type != "cuda":
        return
    planned, actual = group.device, torch.cuda.get_device_properties(device)
    if not is_same_chip(planned.name, actual.name):
        raise RuntimeMismatchError(
            f"the plan is for {planned.name}; {device} of this machine is {actual.name}",
            details=("times, memory and the choice of the layout would not hold",),
            help="plan again for this GPU, e.g. with --cluster local",
        )
    if actual.total_memory < planned.memory_bytes * (1 - _MEMORY_TOLERANCE):
        raise RuntimeMismatchError(
            f"the plan counts on {format_bytes(planned.memory_bytes)} of memory on each {planned.name}; "
            f"{device} of this machine ({actual.name}) has {format_bytes(actual.total_memory)}",
            details=(f"predicted peak: {format_bytes(plan.estimate.peak_reserved_bytes)}",),
            help="plan again for this GPU, e.g. with --cluster local",
        )


def is_same_chip(planned: str, actual: str) -> bool:
    """Tell whether torch's name of a GPU is what a plan names: ``H100-SXM-80GB`` is ``NVIDIA H100 80GB HBM3``.

    Compared are the model (the first word with a digit in the plan's name that is not a size) and the words for slower
    variants of it; a plan's name without such a word matches every GPU.
    """
    if planned == actual:
        return True
    planned_words, actual_words = _words(planned), _words(actual)
    chip = next((word for word in planned_words if re.search(r"\d", word)), None)
    same_variant = all((variant in planned_words) == (variant in actual_words) for variant in _VARIANTS)
    return chip is None or (chip in actual_words and same_variant)


def _words(name: str) -> list[str]:
    """Return the lower-case words of a GPU's name; ``RTX4090`` is ``rtx 4090``, sizes in GB are left out."""
    words = re.split(r"[^a-z0-9]+", name.lower().replace("rtx", "rtx "))
    return [word for word in words if word and not re.fullmatch(r"\d+gb", word)]


def _check_host(plan: TrainingPlan, group: NodeGroup) -> None:
    ranks, cores, profile = group.devices_per_node, num_cores(), plan.cluster.profile
    measured = 0 if profile is None else profile.machine.num_devices // profile.machine.num_nodes
    if ranks > max(cores, measured):
        raise RuntimeMismatchError(
            f"the plan runs {ranks} ranks on the CPU of each node; this machine has {cores} cores",
            details=(
                "ranks that share a core wait for each other in every collective; its estimate does not know that",
            ),
            help=f"plan again with --cluster local, or from a profile of them: meshwright profile --ranks {ranks}",
        )
    needed, memory = ranks * plan.estimate.peak_allocated_bytes, psutil.virtual_memory().total
    if needed > memory:
        raise RuntimeMismatchError(
            f"the plan's {ranks} ranks need {format_bytes(needed)}; this machine has {format_bytes(memory)}",
            help="plan again with --cluster local",
        )


@contextlib.contextmanager
def explain_out_of_memory(plan: TrainingPlan, device: torch.device) -> Iterator[None]:
    """Turn what torch and Python raise for want of memory into one message that names the rank."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(f"{type(error).__name__}: {error}"):
            raise
        details = [*str(error).splitlines()[:1], memory_line(plan, device)]
        limits = {resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)}
        if finite := limits - {resource.RLIM_INFINITY}:
            details.append(f"the process may take {format_bytes(min(finite))} (ulimit)")
        raise MeshwrightError(
            f"rank {plan.rank_map.index(dist.get_rank())} of {plan.layout.world_size} is out of memory on {device}",
            details=tuple(details),
            help="plan again with a smaller memory budget, or with recompute=full or a smaller micro_batch_size fixed",
        ) from None


def memory_line(plan: TrainingPlan, device: torch.device) -> str:
    """Return a line with predicted and available memory."""
    predicted = format_bytes(plan.estimate.peak_reserved_bytes)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        return (
            f"predicted peak {predicted}; the device has {format_bytes(total)}, of which this rank holds "
            f"{format_bytes(reserved)} and {format_bytes(free)} are free"
        )
    memory = psutil.virtual_memory()
    return (
        f"predicted peak {predicted} a rank; this machine has {format_bytes(memory.total)}, of which "
        f"{format_bytes(memory.available)} are free now"
    )
