"""One rank of a measurement: joins the others, measures step by step within the budget, and the first rank keeps the profile.

``python -m meshwright.profilers.run.rank TASK.json``, as `launch_ranks` starts it; or a process that torchrun or Slurm started.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from importlib import import_module
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...schema.base import read_json
from ...schema.errors import MeshwrightError, ProfileError
from ...schema.profile import Machine, Profile, ProfileProvenance, ProfileSection, ProfileSectionName
from ...schema.units import GIB, format_bytes
from ..machine import (
    busy_fraction,
    first_host,
    gpu_state,
    identify,
    interface_of,
    num_cores,
    slurm_number,
    total_memory,
)
from ..measure.kernels import stream_bandwidth
from ..measure.links import node_matrix
from ..measure.timing import Bench, Points
from .across_ranks import COMPARISON, merge_points, merge_rounds, rank_reports
from .comparison import Comparison, allowed_cores, local_cores, product
from .processes import serve_rank
from .protocol import (
    PROFILE_FILE,
    MakeSteps,
    MeasurementStep,
    ProfileProgress,
    ProfileTask,
    RankPlace,
    Tell,
    write_progress,
)

MIN_FREE_BYTES = GIB // 2
"""Of a rank, beyond what the interpreter already holds: buffers out of cache need some hundred MiB."""

_RESERVE_S = 0.3
"""Of the budget, for gathering and writing the profile on an idle machine."""

_TELL_S = 0.1

FIELDS_OF_PART: dict[ProfileSectionName, tuple[str, ...]] = {
    "compute": ("matmuls", "grouped_matmuls", "attention", "elementwise"),
    "memory": ("layer_memory", "step_memory", "allocator"),
    "layers": ("layers",),
    "links": ("collectives", "pairs"),
    "host": ("host_copies", "cpu_adam"),
    "storage": ("storage",),
    "overlap": ("overlaps",),
    "serving": ("serving_steps", "serving_host"),
}


def main() -> None:
    """Measure the task named on the command line, by the steps that it names."""
    task = ProfileTask(**read_json(sys.argv[1]))
    module, _, function = task.steps.partition(":")
    last_s = 0.0

    def tell(progress: ProfileProgress) -> None:
        nonlocal last_s
        if time.perf_counter() - last_s > _TELL_S:
            last_s = time.perf_counter()
            write_progress(task.folder, progress)

    run_rank(task, getattr(import_module(module), function), tell)


def run_rank(task: ProfileTask, make_steps: MakeSteps, tell: Tell) -> Profile | None:
    """Measure as one rank of a job that torchrun, Slurm or `launch_ranks` started; the first rank returns the profile.

    Raises:
        MeshwrightError: too little memory is free on some rank, or nodes differ in their number of ranks.
        ProfileError: the profile to resume is of another machine.
    """
    place, device = _join(task)
    bench = Bench(
        device,
        task.sample_s,
        ranks_per_node=place.ranks_per_node,
        sample_clock=time.process_time if task.cpu_seconds else None,
        pace=task.pace,
    )
    require_memory(bench)
    session = _Session(task, place, bench, tell)
    with torch.no_grad():
        session.run(make_steps(task, place, device.type == "cuda"))
    profile = session.finish()
    bench.agree(0.0)  # nobody leaves while another rank still measures
    return profile


# --- joining the others ----------------------------------------------------------------------------------------------


def _join(task: ProfileTask) -> tuple[RankPlace, torch.device]:
    _take_names_from_slurm()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = task.backend == "nccl"
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    options: dict[str, Any] = {"timeout": timedelta(seconds=300), "device_id": device if on_gpu else None}
    if task.folder:  # one machine, whose ranks nobody else reaches
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of("127.0.0.1") or "lo")
        options |= {"store": dist.FileStore(str(Path(task.folder) / "store"), size), "rank": rank, "world_size": size}
    dist.init_process_group(task.backend, **options)
    node_key = os.environ.get("GROUP_RANK", os.environ.get("SLURM_NODEID", socket.gethostname()))
    nodes = [(key, len(list(same))) for key, same in groupby(Bench(device, task.sample_s).gather(node_key))]
    if len({count for _, count in nodes}) > 1 or len({key for key, _ in nodes}) < len(nodes):
        raise MeshwrightError(
            f"the {size} ranks are not spread evenly over the nodes, node by node: "
            + ", ".join(f"{count} on node {key}" for key, count in nodes),
            help="start the same number on each node, one for each device",
        )
    ranks_per_node = nodes[0][1]
    if not on_gpu:
        torch.set_num_threads(task.threads or max(1, num_cores() // ranks_per_node))
    place = RankPlace(rank=rank, local_rank=local_rank, num_nodes=len(nodes), ranks_per_node=ranks_per_node)
    return place, device


def _take_names_from_slurm() -> None:
    """Set torchrun's variables from srun's, where there are none: the first host of the list is the meeting place."""
    names = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
    for ours, theirs in names.items():
        if theirs in os.environ:
            os.environ.setdefault(ours, os.environ[theirs])
    if "SLURM_JOB_ID" in os.environ:
        hosts = os.environ.get("SLURM_STEP_NODELIST", os.environ.get("SLURM_JOB_NODELIST", "localhost"))
        os.environ.setdefault("MASTER_ADDR", first_host(hosts))
        os.environ.setdefault("MASTER_PORT", str(20000 + slurm_number(os.environ, "SLURM_JOB_ID") % 20000))


def require_memory(bench: Bench) -> None:
    """Refuse to begin where memory is nearly full."""
    free = [int(value) for value in bench.gather(bench.free_bytes())]
    if min(free) < MIN_FREE_BYTES:
        kind = "device" if bench.device.type == "cuda" else "host"
        raise MeshwrightError(
            f"too little memory is free to measure: {format_bytes(min(free))} of {kind} memory for rank "
            f"{free.index(min(free))}, {format_bytes(MIN_FREE_BYTES)} are needed",
            help="end what uses the memory, or measure with fewer ranks (--ranks)",
        )


class Budget:
    """Seconds for each step, taken in order. Final.

    A step gets ``remaining * value_i / sum of the values from i on`` of what remains when it begins: a step that ends early gives
    to all later ones, and one that overruns takes from them in proportion, never more than there is.

    Args:
        started_s: when it began, on ``clock``; unset, now.
        reserve_s: for what comes after the last step.
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

    def remaining_s(self) -> float:
        """Return the seconds until the end."""
        return max(0.0, self._end_s - self._clock())

    def share_s(self, idx: int) -> float:
        """Return the seconds for step ``idx``, which begins now."""
        rest = sum(self._values[idx:])
        return self.remaining_s() * (self._values[idx] / rest) if rest else 0.0


# --- measuring -------------------------------------------------------------------------------------------------------


def _process_bytes(allocator: Any) -> int:
    """Return the growth of a process: in its first round, as in a later one less is new to it."""
    return int(allocator.get("process_bytes", 0))


class _Session:
    """The points so far and the parts that are finished, on every rank; the first one keeps what all have measured. Final."""

    def __init__(self, task: ProfileTask, place: RankPlace, bench: Bench, tell: Tell) -> None:
        self._task, self._place, self._bench, self._tell = task, place, bench, tell
        self._started_s = time.perf_counter() - (0.0 if task.started_at is None else time.time() - task.started_at)
        load = task.foreign_load_fraction
        self._load = bench.agree(busy_fraction() if load is None else load)
        self._facts = bench.gather(_rank_facts(bench.device, place))
        # One machine of all nodes together.
        nodes = [Machine(**one["machine"]) for one in self._facts[:: place.ranks_per_node]]
        self._machine = nodes[0].replace(
            device=", ".join(dict.fromkeys(node.device for node in nodes)),
            num_devices=place.world_size,
            num_nodes=place.num_nodes,
            host_memory_bytes=min(node.host_memory_bytes for node in nodes),
        )
        self._old = self._profile_to_resume()
        # The points of the parts that a resumed profile retains.
        names = {name for part in (self._old.parts if self._old else ()) for name in FIELDS_OF_PART[part.name]}
        fields = self._old.model_dump(mode="json", include=names) if self._old else {}
        self._old_points = {name: p if isinstance(p, list) else [p] for name, p in fields.items() if p}
        self._points: Points = {}
        self._by_rank: list[Points] = []
        self._sections: list[ProfileSection] = list(self._old.parts) if self._old else []
        is_compared = bench.device.type == "cpu" and place.world_size > 1  # a GPU has no other rank's work
        cores = local_cores(allowed_cores(), place.local_rank, place.ranks_per_node)
        self._comparison = Comparison(bench, cores, {"compute": product(bench)}) if is_compared else None

    def run(self, steps: Sequence[MeasurementStep]) -> None:
        """Measure part by part; every rank makes the same decisions."""
        done = {section.name for section in self._sections}
        rounds = [step for _ in range(self._task.num_rounds) for step in steps if step.part in self._task.parts]
        planned = [step for step in rounds if step.part not in done]
        values = [0.0 if step.skipped else step.value for step in planned]
        reserve_s = self._task.finish_s + _RESERVE_S * self._task.pace
        budget = Budget(self._task.budget_s, values, started_s=self._started_s, reserve_s=reserve_s)
        for part, same in groupby(enumerate(planned), key=lambda numbered: numbered[1].part):
            begin, results, waiting = time.perf_counter(), [], list(same)
            while waiting:
                if self._comparison is not None and self._bench.agree_min(budget.remaining_s()) > 0:
                    self._comparison.repeat()
                idx, step = waiting.pop(0)
                results.append(self._run_step(step, budget.share_s(idx)))
                self._store_section(part, time.perf_counter() - begin, results, [step.what for _, step in waiting])

    def finish(self) -> Profile | None:
        """Return the entire profile on the first rank, written and sealed."""
        self._by_rank = self._gather_points()
        if self._place.rank:
            return None
        profile = self._profile().sealed()
        self._save(profile, to_user=True)
        return profile

    def _run_step(self, step: MeasurementStep, share_s: float) -> tuple[str, int]:
        """Return why a step ended early or was skipped, and how many points it has."""
        if step.skipped:
            return step.skipped, 0
        bench, budget_s = self._bench, self._task.budget_s

        def say(what: str) -> None:
            if self._place.rank == 0:
                self._tell(ProfileProgress(step.part, what, time.perf_counter() - self._started_s, budget_s))

        bench.start_budget(share_s)
        bench.say = say
        say(step.what)
        if bench.remaining_s() <= 0 and not step.is_needed:
            return f"no time was left of {budget_s:g} s", 0
        new = step.measure(bench, merge_rounds([self._old_points, self._points]))
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
        self._points = merge_rounds([self._points, new])
        return bench.end_budget(), sum(map(len, new.values()))

    def _gather_points(self) -> list[Points]:
        compared = {} if self._comparison is None else {COMPARISON: self._comparison.points()}
        return self._bench.gather({**self._points, **compared})

    def _store_section(
        self, part: ProfileSectionName, duration_s: float, results: Sequence[tuple[str, int]], waiting: Sequence[str]
    ) -> None:
        """Record a part as far as it is, and write what there is: the launcher takes it where the time is over before the end."""
        late = (f"no time for {', '.join(waiting)}",) if waiting else ()
        reason = "; ".join(dict.fromkeys((*(reason for reason, _ in results if reason), *late)))
        count = sum(number for _, number in results)
        state = "skipped" if not count else "shortened" if reason else "complete"
        section = ProfileSection(name=part, state=state, duration_s=duration_s, num_points=count, reason=reason)
        self._sections = [*(known for known in self._sections if known.name != part), section]
        self._by_rank = self._gather_points()
        both = [self._old_points, self._by_rank[0]]
        has_minimum = all(any(points.get(name) for points in both) for name in ("elementwise", "matmuls"))
        if self._place.rank == 0 and has_minimum:
            self._save(self._profile(), to_user=not waiting)

    def _save(self, profile: Profile, *, to_user: bool) -> None:
        if self._task.folder:
            profile.save(Path(self._task.folder) / PROFILE_FILE)
        if self._task.out and to_user:
            profile.save(self._task.out)

    def _profile(self) -> Profile:
        place, facts = self._place, self._facts
        everything = [self._old_points, *self._by_rank]
        names = dict.fromkeys(name for points in everything for name in points)
        fields: dict[str, Any] = {name: merge_points(points.get(name, ()) for points in everything) for name in names}
        allocator, _ = fields.pop("allocator", ()), fields.pop(COMPARISON, ())
        hosts = [one["host"] for one in facts[:: place.ranks_per_node]]
        nodes = [rank // place.ranks_per_node for rank in range(place.world_size)]
        ranks, slow = rank_reports(self._by_rank, [one["device"] for one in facts], nodes, hosts)
        profile = Profile(
            machine=self._machine,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            duration_s=time.perf_counter() - self._started_s + (self._old.duration_s if self._old else 0.0),
            budget_s=self._task.budget_s,
            foreign_load_fraction=min(1.0, self._load),
            provenance=ProfileProvenance(
                hosts=tuple(hosts), cpu_seconds=self._task.cpu_seconds, **facts[0]["software"], **gpu_state()
            ),
            parts=tuple(self._sections),
            memory_bandwidth_bytes_per_s=stream_bandwidth(fields["elementwise"]),
            device_memory_bytes=min(one["device_memory_bytes"] for one in facts),
            allocator=max(allocator, key=_process_bytes) if allocator else None,
            ranks=ranks,
            slow=slow or (self._old.slow if self._old else ()),
            **fields,
        )
        matrix = node_matrix(profile.pairs, place.num_nodes, place.ranks_per_node)
        return profile.replace(node_bandwidth_bytes_per_s=matrix)

    def _profile_to_resume(self) -> Profile | None:
        """Return the profile to go on with, the same for all ranks; None where there is none."""
        path, text = Path(self._task.out), ""
        if self._place.rank == 0 and self._task.resume and self._task.out and path.exists():
            text = Profile.load(path).model_dump_json()
        text = self._bench.gather(text)[0]
        if not text:
            return None
        old = Profile.model_validate_json(text)
        require_same_machine(old, self._machine, path)
        # A finished profile is resumed to get more of what its budget cut short.
        retained = [part for part in old.parts if part.state == "complete" or not old.content_sha256]
        return old.replace(parts=tuple(retained), content_sha256="")


def require_same_machine(profile: Profile, machine: Machine, path: Path) -> None:
    """Refuse to go on with measurements of something else."""
    pairs = [(name, getattr(profile.machine, name), getattr(machine, name)) for name in Machine.model_fields]
    if unlike := tuple(f"{name}: {theirs} there, {ours} here" for name, theirs, ours in pairs if theirs != ours):
        help_ = "measure again without --resume, or into another file"
        raise ProfileError(f"{path} is of another machine", details=unlike, help=help_)


def _rank_facts(device: torch.device, place: RankPlace) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if on_gpu else total_memory() // place.ranks_per_node
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else ""
    identity = identify(place.ranks_per_node)
    return {
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name(device) if on_gpu else identity.device,
        "device_memory_bytes": memory,
        "machine": identity.model_dump(mode="json"),
        "software": {"meshwright": version("meshwright"), "nccl": nccl, "cuda": str(torch.version.cuda or "")},
    }


if __name__ == "__main__":
    serve_rank(main)
