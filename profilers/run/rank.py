"""One rank of a measurement: joins the others, measures step by step, and the first rank keeps the profile."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...schema.errors import MeshwrightError, ProfileError
from ...schema.profile import (
    Machine,
    PartName,
    PartRecord,
    Profile,
    Provenance,
)
from ...schema.units import GIB, format_bytes
from ..machine import (
    busy_fraction,
    gpu_state,
    identify,
    total_memory,
)
from ..measure.kernels import stream_bandwidth
from ..measure.pairs import node_matrix
from ..measure.timing import Bench, Points
from .budget import Budget
from .merging import joined, merged
from .slow import reports
from .task import Place, Progress, Step, Task

MIN_FREE_BYTES = GIB // 2
"""Of a rank, beyond what the interpreter already holds: buffers out of cache need some hundred MiB."""

_RESERVE_S = 0.5
"""Of the budget, for gathering and writing the profile."""

FIELDS_OF_PART: dict[PartName, tuple[str, ...]] = {
    "compute": ("matmuls", "grouped_matmuls", "attention", "elementwise"),
    "memory": ("layer_memory", "step_memory", "allocator"),
    "layers": ("layers",),
    "links": ("collectives", "pairs"),
    "host": ("host_copies", "cpu_adam"),
    "storage": ("storage",),
    "overlap": ("overlaps",),
}

MakeSteps = Callable[[Task, Place, bool], Sequence[Step]]
Tell = Callable[[Progress], None]


def run_rank(task: Task, make_steps: MakeSteps, tell: Tell) -> Profile | None:
    """Measure as one rank of a job that torchrun, Slurm or `launch` started; the first rank returns the profile.

    Raises:
        MeshwrightError: too little memory is free on some rank, or nodes differ in their number of ranks.
        ProfileError: the profile to resume is of another machine.
    """
    place, device = _join(task)
    bench = Bench(device, task.sample_s, ranks_per_node=place.ranks_per_node)
    _require_memory(bench)
    session = _Session(task, place, bench, tell)
    with torch.no_grad():
        session.run(make_steps(task, place, device.type == "cuda"))
    profile = session.finish()
    bench.agree(0.0)  # nobody leaves while another rank still measures
    return profile


def _join(task: Task) -> tuple[Place, torch.device]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
    on_gpu = task.backend == "nccl"
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(task.backend, timeout=timedelta(seconds=300), device_id=device if on_gpu else None)
    bench = Bench(device, task.sample_s)
    node_key = os.environ.get("GROUP_RANK", os.environ.get("SLURM_NODEID", socket.gethostname()))
    nodes = [(key, len(list(same))) for key, same in groupby(bench.gather(node_key))]
    if len({count for _, count in nodes}) > 1 or len({key for key, _ in nodes}) < len(nodes):
        raise MeshwrightError(
            f"the {size} ranks are not spread evenly over the nodes, node by node: "
            + ", ".join(f"{count} on node {key}" for key, count in nodes),
            help="start the same number on each node, one for each device",
        )
    each = nodes[0][1]
    if not on_gpu:
        from ..machine import num_cores

        torch.set_num_threads(task.threads or max(1, num_cores() // each))
    place = Place(rank=rank, local_rank=local_rank, node=rank // each, num_nodes=len(nodes), ranks_per_node=each)
    return place, device


def _require_memory(bench: Bench) -> None:
    """Refuse to begin where memory is nearly full.

    Raises:
        MeshwrightError: with the rank that has least.
    """
    free = [int(value) for value in bench.gather(bench.free_bytes())]
    if min(free) < MIN_FREE_BYTES:
        kind = "device" if bench.device.type == "cuda" else "host"
        raise MeshwrightError(
            f"too little memory is free to measure: {format_bytes(min(free))} of {kind} memory for rank "
            f"{free.index(min(free))}, {format_bytes(MIN_FREE_BYTES)} are needed",
            help="end what uses the memory, or measure with fewer ranks (--ranks)",
        )


class _Session:
    """The points so far and the parts that are finished, on every rank; the first one keeps what all have measured. Final."""

    def __init__(self, task: Task, place: Place, bench: Bench, tell: Tell) -> None:
        self._task, self._place, self._bench, self._tell = task, place, bench, tell
        self._started_s = time.perf_counter() - (0.0 if task.started_at is None else time.time() - task.started_at)
        load = task.foreign_load_fraction
        self._load = bench.agree(busy_fraction() if load is None else load)
        self._facts = bench.gather(self._own_facts())
        self._old = self._to_resume()
        self._kept = _kept_points(self._old)
        self._points: Points = {}
        self._by_rank: list[Points] = [{} for _ in range(place.world_size)]
        self._records: list[PartRecord] = list(self._old.parts) if self._old else []

    def run(self, steps: Sequence[Step]) -> None:
        """Measure part by part; every rank makes the same decisions."""
        done = {record.name for record in self._records}
        rounds = [step for _ in range(self._task.num_rounds) for step in steps if step.part in self._task.parts]
        planned = [step for step in rounds if step.part not in done]
        skipped = [0.0 if step.skipped else step.value for step in planned]
        budget = Budget(self._task.budget_s, skipped, started_s=self._started_s, reserve_s=_RESERVE_S)
        idx = 0
        for part, same in groupby(planned, key=lambda step: step.part):
            begin, reasons = time.perf_counter(), []
            for step in same:
                reasons.append(self._run(step, budget.share_s(idx)))
                idx += 1
            self._keep(part, time.perf_counter() - begin, reasons)

    def _run(self, step: Step, share_s: float) -> tuple[str, int]:
        """Why a step ended early or was skipped, and how many points it has."""
        if step.skipped:
            return step.skipped, 0
        bench = self._bench
        bench.start_budget(share_s)
        bench.say = lambda what: self._say(step, what)
        self._say(step, step.what)
        if not (bench.has_time() or step.is_needed):
            return f"no time was left of {self._task.budget_s:g} s", 0
        new = step.measure(bench, joined([self._kept, self._points]))
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
        self._points = joined([self._points, new])
        return bench.ran_out, sum(map(len, new.values()))

    def _say(self, step: Step, what: str) -> None:
        if self._place.rank == 0:
            self._tell(Progress(step.part, what, time.perf_counter() - self._started_s, self._task.budget_s))

    def _keep(self, part: Any, duration_s: float, reasons: Sequence[tuple[str, int]]) -> None:
        """Note a finished part and write what there is."""
        why = "; ".join(dict.fromkeys(reason for reason, _ in reasons if reason))
        count = sum(number for _, number in reasons)
        state = "skipped" if not count else "shortened" if why else "complete"
        known = [record for record in self._records if record.name != part]
        record = PartRecord(name=part, state=state, duration_s=duration_s, num_points=count, reason=why)
        self._records = [*known, record]
        self._by_rank = self._bench.gather(self._points)
        if self._place.rank == 0 and self._task.out:
            self._profile().save(self._task.out)

    def finish(self) -> Profile | None:
        """The whole profile on the first rank, written and sealed."""
        self._by_rank = self._bench.gather(self._points)
        if self._place.rank:
            return None
        profile = self._profile().sealed()
        for path in filter(None, (self._task.out, self._task.folder and str(Path(self._task.folder) / "profile.json"))):
            profile.save(path)
        return profile

    def _profile(self) -> Profile:
        place, own = self._place, self._facts[0]
        everything = [self._kept, *self._by_rank]
        names = dict.fromkeys(name for points in everything for name in points)
        fields: dict[str, Any] = {name: merged(points.get(name, ()) for points in everything) for name in names}
        allocator = fields.pop("allocator", ())
        hosts = [facts["host"] for facts in self._facts[:: place.ranks_per_node]]
        nodes = [rank // place.ranks_per_node for rank in range(place.world_size)]
        ranks, slow = reports(self._by_rank, [facts["device"] for facts in self._facts], nodes, hosts)
        profile = Profile(
            machine=_machine(self._facts, place),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            duration_s=time.perf_counter() - self._started_s + (self._old.duration_s if self._old else 0.0),
            budget_s=self._task.budget_s,
            foreign_load_fraction=min(1.0, self._load),
            provenance=Provenance(hosts=tuple(hosts), **own["software"], **gpu_state()),
            parts=tuple(self._records),
            memory_bandwidth_bytes_per_s=stream_bandwidth(fields["elementwise"]),
            device_memory_bytes=min(facts["device_memory_bytes"] for facts in self._facts),
            allocator=allocator[0] if allocator else None,
            ranks=ranks,
            slow=slow or (self._old.slow if self._old else ()),
            **fields,
        )
        matrix = node_matrix(profile.pairs, place.num_nodes, place.ranks_per_node)
        return profile.replace(node_bandwidth_bytes_per_s=matrix)

    def _own_facts(self) -> dict[str, Any]:
        device = self._bench.device
        on_gpu = device.type == "cuda"
        memory = (
            torch.cuda.get_device_properties(device).total_memory
            if on_gpu
            else total_memory() // self._place.ranks_per_node
        )
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else ""
        software = {"meshwright": version("meshwright"), "nccl": nccl, "cuda": str(torch.version.cuda or "")}
        identity = identify(self._place.ranks_per_node)
        name = torch.cuda.get_device_name(device) if on_gpu else identity.device
        return {
            "host": socket.gethostname(),
            "device": name,
            "device_memory_bytes": memory,
            "machine": identity.model_dump(mode="json"),
            "software": software,
        }

    def _to_resume(self) -> Profile | None:
        """The profile to go on with, the same for all ranks; None where there is none."""
        path, text = Path(self._task.out), ""
        if self._place.rank == 0 and self._task.resume and self._task.out and path.exists():
            text = Profile.load(path).model_dump_json()
        text = self._bench.gather(text)[0]
        if not text:
            return None
        old, machine = Profile.model_validate_json(text), _machine(self._facts, self._place)
        require_same_machine(old, machine, path)
        # A finished profile is resumed to get more of what its budget cut short.
        kept = [part for part in old.parts if part.state == "complete" or not old.content_sha256]
        return old.replace(parts=tuple(kept), content_sha256="")


def require_same_machine(profile: Profile, machine: Machine, path: Path) -> None:
    """Refuse to go on with measurements of something else.

    Raises:
        ProfileError: with what differs.
    """
    differences = [
        f"{name}: {getattr(profile.machine, name)} there, {getattr(machine, name)} here"
        for name in Machine.model_fields
        if getattr(profile.machine, name) != getattr(machine, name)
    ]
    if differences:
        help_ = "measure again without --resume, or into another file"
        raise ProfileError(f"{path} is of another machine", details=tuple(differences), help=help_)


def _kept_points(old: Profile | None) -> Points:
    """Points of the parts that a resumed profile keeps."""
    if old is None:
        return {}
    names = [name for part in old.parts for name in FIELDS_OF_PART[part.name]]
    fields = old.model_dump(mode="json", include=set(names))
    return {name: points if isinstance(points, list) else [points] for name, points in fields.items() if points}


def _machine(facts: Sequence[dict[str, Any]], place: Place) -> Machine:
    """Identity of all nodes together."""
    nodes = [Machine(**facts[rank]["machine"]) for rank in range(0, place.world_size, place.ranks_per_node)]
    devices = dict.fromkeys(node.device for node in nodes)
    return nodes[0].replace(
        device=", ".join(devices),
        num_devices=place.world_size,
        num_nodes=place.num_nodes,
        host_memory_bytes=min(node.host_memory_bytes for node in nodes),
    )
