"""How a rank joins the others: where it stands among them, and whether there is memory to begin.

How a time budget is spread over the steps of a measurement: by their value, and what one leaves the later ones get.

One rank of a measurement: joins the others, measures step by step, and the first rank keeps the profile.
"""

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

from ...schema.base import write_atomically
from ...schema.errors import MeshwrightError, ProfileError
from ...schema.profile import Machine, Profile, ProfileProvenance, ProfileSection, ProfileSectionName
from ...schema.units import GIB, format_bytes
from ..machine import busy_fraction, gpu_state, identify, num_cores, total_memory
from ..measure.comparison import FIELD, Comparison
from ..measure.kernels import stream_bandwidth
from ..measure.links import node_matrix
from ..measure.timing import Bench, Points
from .across_ranks import merge_points, merge_rounds, rank_reports
from .protocol import MeasurementStep, ProfileProgress, ProfileTask, RankPlace

MIN_FREE_BYTES = GIB // 2
"""Of a rank, beyond what the interpreter already holds: buffers out of cache need some hundred MiB."""


def join(task: ProfileTask) -> tuple[RankPlace, torch.device]:
    """Meet the other ranks.

    Raises:
        MeshwrightError: nodes differ in their number of ranks.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
    on_gpu = task.backend == "nccl"
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    options = (
        {} if not task.folder else {"store": _store(Path(task.folder), rank, size), "rank": rank, "world_size": size}
    )
    timeout = timedelta(seconds=300)
    dist.init_process_group(task.backend, timeout=timeout, device_id=device if on_gpu else None, **options)
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
        torch.set_num_threads(task.threads or max(1, num_cores() // each))
    place = RankPlace(rank=rank, local_rank=local_rank, node=rank // each, num_nodes=len(nodes), ranks_per_node=each)
    return place, device


def _store(folder: Path, rank: int, size: int) -> dist.Store:
    """Where the ranks of one launcher meet: at a free port that the first one has noted in its folder."""
    note = folder / "port.txt"
    if rank == 0:
        store = dist.TCPStore("localhost", 0, size, is_master=True, wait_for_workers=False)
        write_atomically(note, str(store.port))
        return store
    while not note.exists():
        time.sleep(0.01)
    return dist.TCPStore("localhost", int(note.read_text()), size, is_master=False)


def require_memory(bench: Bench) -> None:
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


class Budget:
    """Seconds for each step, asked for in order. Final.

    A step gets ``left * value_i / sum of the values from i on`` of what is left when it begins: a step that ends early gives
    to all later ones, and one that overruns takes from them in proportion, never more than there is.

    Args:
        total_s: seconds for everything.
        values: of the steps in their order; only their ratios count.
        started_s: when it began, on ``clock``; unset, now.
        reserve_s: kept for what comes after the last step.
        clock: seconds of any origin.
    """

    def __init__(
        self,
        total_s: float,
        values: Sequence[float],
        *,
        started_s: float | None = None,
        reserve_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._end_s = (clock() if started_s is None else started_s) + total_s - reserve_s
        self._values = tuple(values)

    def left_s(self) -> float:
        """Seconds until the end, not negative."""
        return max(0.0, self._end_s - self._clock())

    def share_s(self, idx: int) -> float:
        """Seconds for step ``idx``, which begins now."""
        rest = sum(self._values[idx:])
        return self.left_s() * self._values[idx] / rest if rest else 0.0


_RESERVE_S = 0.3
"""Of the budget, for gathering and writing the profile on an idle machine."""


FIELDS_OF_PART: dict[ProfileSectionName, tuple[str, ...]] = {
    "compute": ("matmuls", "grouped_matmuls", "attention", "elementwise"),
    "memory": ("layer_memory", "step_memory", "allocator"),
    "layers": ("layers",),
    "links": ("collectives", "pairs"),
    "host": ("host_copies", "cpu_adam"),
    "storage": ("storage",),
    "overlap": ("overlaps",),
}


MakeSteps = Callable[[ProfileTask, RankPlace, bool], Sequence[MeasurementStep]]


Tell = Callable[[ProfileProgress], None]


def run_rank(task: ProfileTask, make_steps: MakeSteps, tell: Tell) -> Profile | None:
    """Measure as one rank of a job that torchrun, Slurm or `launch` started; the first rank returns the profile.

    Raises:
        MeshwrightError: too little memory is free on some rank, or nodes differ in their number of ranks.
        ProfileError: the profile to resume is of another machine.
    """
    place, device = join(task)
    bench = Bench(device, task.sample_s, ranks_per_node=place.ranks_per_node, pace=task.pace)
    require_memory(bench)
    session = _Session(task, place, bench, tell)
    with torch.no_grad():
        session.run(make_steps(task, place, device.type == "cuda"))
    profile = session.finish()
    bench.agree(0.0)  # nobody leaves while another rank still measures
    return profile


class _Session:
    """The points so far and the parts that are finished, on every rank; the first one keeps what all have measured. Final."""

    def __init__(self, task: ProfileTask, place: RankPlace, bench: Bench, tell: Tell) -> None:
        self._task, self._place, self._bench, self._tell = task, place, bench, tell
        self._started_s = time.perf_counter() - (0.0 if task.started_at is None else time.time() - task.started_at)
        load = task.foreign_load_fraction
        self._load = bench.agree(busy_fraction() if load is None else load)
        self._facts = bench.gather(self._own_facts())
        self._old = self._to_resume()
        self._kept = _kept_points(self._old)
        self._points: Points = {}
        self._by_rank: list[Points] = [{} for _ in range(place.world_size)]
        self._records: list[ProfileSection] = list(self._old.parts) if self._old else []
        is_compared = bench.device.type == "cpu" and place.world_size > 1  # a GPU has no other rank's work
        self._comparison = Comparison(bench, place.local_rank, place.ranks_per_node) if is_compared else None

    def run(self, steps: Sequence[MeasurementStep]) -> None:
        """Measure part by part; every rank makes the same decisions."""
        done = {record.name for record in self._records}
        rounds = [step for _ in range(self._task.num_rounds) for step in steps if step.part in self._task.parts]
        planned = [step for step in rounds if step.part not in done]
        skipped = [0.0 if step.skipped else step.value for step in planned]
        reserve_s = self._task.finish_s + _RESERVE_S * self._task.pace
        budget = Budget(self._task.budget_s, skipped, started_s=self._started_s, reserve_s=reserve_s)
        idx = 0
        for part, same in groupby(planned, key=lambda step: step.part):
            begin, reasons, waiting = time.perf_counter(), [], list(same)
            while waiting:
                self._compare(budget.left_s())
                reasons.append(self._run(waiting.pop(0), budget.share_s(idx)))
                idx += 1
                self._keep(part, time.perf_counter() - begin, reasons, [step.what for step in waiting])

    def _run(self, step: MeasurementStep, share_s: float) -> tuple[str, int]:
        """Why a step ended early or was skipped, and how many points it has."""
        if step.skipped:
            return step.skipped, 0
        bench = self._bench
        bench.start_budget(share_s)
        bench.say = lambda what: self._say(step, what)
        self._say(step, step.what)
        if bench.remaining_s() <= 0 and not step.is_needed:
            return f"no time was left of {self._task.budget_s:g} s", 0
        new = step.measure(bench, merge_rounds([self._kept, self._points]))
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
        self._points = merge_rounds([self._points, new])
        return bench.end_budget(), sum(map(len, new.values()))

    def _compare(self, left_s: float) -> None:
        """Some repetitions of what compares the ranks, while there is time."""
        if self._comparison is not None and self._bench.agree_least(left_s) > 0:
            self._comparison.repeat()

    def _gathered(self) -> list[Points]:
        """What every rank has so far."""
        compared = {} if self._comparison is None else {FIELD: self._comparison.points()}
        return self._bench.gather({**self._points, **compared})

    def _say(self, step: MeasurementStep, what: str) -> None:
        if self._place.rank == 0:
            self._tell(ProfileProgress(step.part, what, time.perf_counter() - self._started_s, self._task.budget_s))

    def _keep(self, part: Any, duration_s: float, reasons: Sequence[tuple[str, int]], waiting: Sequence[str]) -> None:
        """Note a part as far as it is, and write what there is: the launcher takes it where the time is over before the end."""
        late = (f"no time for {', '.join(waiting)}",) if waiting else ()
        why = "; ".join(dict.fromkeys((*(reason for reason, _ in reasons if reason), *late)))
        count = sum(number for _, number in reasons)
        state = "skipped" if not count else "shortened" if why else "complete"
        known = [record for record in self._records if record.name != part]
        record = ProfileSection(name=part, state=state, duration_s=duration_s, num_points=count, reason=why)
        self._records = [*known, record]
        self._by_rank = self._gathered()
        if self._place.rank == 0 and self._has_products():
            self._save(self._profile(), to_user=not waiting)

    def finish(self) -> Profile | None:
        """The whole profile on the first rank, written and sealed."""
        self._by_rank = self._gathered()
        if self._place.rank:
            return None
        profile = self._profile().sealed()
        self._save(profile, to_user=True)
        return profile

    def _save(self, profile: Profile, *, to_user: bool) -> None:
        if self._task.folder:
            profile.save(Path(self._task.folder) / "profile.json")
        if self._task.out and to_user:
            profile.save(self._task.out)

    def _has_products(self) -> bool:
        """Whether there is enough for a profile: memory bandwidth and a product."""
        found = [self._kept, self._by_rank[0]]
        return all(any(points.get(name) for points in found) for name in ("elementwise", "matmuls"))

    def _profile(self) -> Profile:
        place, own = self._place, self._facts[0]
        everything = [self._kept, *self._by_rank]
        names = dict.fromkeys(name for points in everything for name in points)
        fields: dict[str, Any] = {name: merge_points(points.get(name, ()) for points in everything) for name in names}
        allocator, _ = fields.pop("allocator", ()), fields.pop(FIELD, ())
        hosts = [facts["host"] for facts in self._facts[:: place.ranks_per_node]]
        nodes = [rank // place.ranks_per_node for rank in range(place.world_size)]
        ranks, slow = rank_reports(self._by_rank, [facts["device"] for facts in self._facts], nodes, hosts)
        profile = Profile(
            machine=_machine(self._facts, place),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            duration_s=time.perf_counter() - self._started_s + (self._old.duration_s if self._old else 0.0),
            budget_s=self._task.budget_s,
            foreign_load_fraction=min(1.0, self._load),
            provenance=ProfileProvenance(hosts=tuple(hosts), **own["software"], **gpu_state()),
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


def _machine(facts: Sequence[dict[str, Any]], place: RankPlace) -> Machine:
    """Identity of all nodes together."""
    nodes = [Machine(**facts[rank]["machine"]) for rank in range(0, place.world_size, place.ranks_per_node)]
    devices = dict.fromkeys(node.device for node in nodes)
    return nodes[0].replace(
        device=", ".join(devices),
        num_devices=place.world_size,
        num_nodes=place.num_nodes,
        host_memory_bytes=min(node.host_memory_bytes for node in nodes),
    )
