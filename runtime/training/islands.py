"""Local updates: islands that train by themselves and sum up what changed around a ring (schema/local_updates.py).

Each island is a job of its own, with a process group, a plan (`plan_of_island`) and checkpoints of its own. Ranks at the same place
of each island form a ring besides (island_ring.py). Anchor: the parameters as all islands had them last, in the host's memory.

    begin     of a fragment:  delta = anchor - parameters, and its sum around the ring, weighted by each island's part of the batch
    take over, delay_steps later:  anchor <- SGD(anchor, sum of delta);  parameters <- anchor + what they changed meanwhile

With a delay the ring runs in a thread while training goes on. Of an island with more replicas of the model than another, the first
ones sum up a part of the fragment each and give it to the others.

The sums go on without an island that is lost, which then weighs nothing. Started again, it gets anchor and momentum from its
neighbour in the ring at the end of a sum, and goes on from there with an optimizer that begins anew.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...schema import MeshwrightError, TrainingPlan
from ...schema.local_updates import ROW, LocalUpdates, WireBits, devices_of_islands, plan_of_island
from ..models.layers import local_tensor
from ..parallel_model import ParallelModel
from ..supervision.membership import Membership
from .checkpoint import TrainingProgress
from .fragments import WIDE_BELOW, Fragment, Piece, flat, spread
from .island_ring import IslandRing
from .options import TrainOptions
from .ring import Ring


@dataclass(frozen=True)
class IslandPlace:
    """The island of this process among those that a job has.

    Attributes:
        plan: of the island.
        first_row: sequences of a global batch before the island's.
    """

    idx: int
    plan: TrainingPlan
    updates: LocalUpdates
    membership: Membership
    ranks: tuple[tuple[int, ...], ...]
    first_row: int
    sequences: int

    @classmethod
    def join(cls, plan: TrainingPlan, *, backend: str, device: torch.device, timeout_s: float) -> IslandPlace | None:
        """Make the process group of this rank's island the default one; None where the job was done before it could come in.

        A rank that was started anew comes back when the others let its island in, at the end of a sum.
        """
        updates = plan.local_updates
        assert updates is not None
        membership = Membership.from_environment(timeout_s, cuts=False)
        if membership.is_too_late:
            return None
        membership.begin()
        ranks = devices_of_islands(plan.cluster)
        idx = next(i for i, of_island in enumerate(ranks) if membership.process in of_island)
        dist.init_process_group(
            backend, store=dist.PrefixStore(f"island/{idx}/{membership.entered}", membership.client()),
            rank=ranks[idx].index(membership.process), world_size=len(ranks[idx]), timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )  # fmt: skip
        first_row = sum(island.sequences for island in updates.islands[:idx])
        batch = plan.workload.global_batch_size
        return cls(idx, plan_of_island(plan, idx), updates, membership, ranks, first_row, batch)

    def options(self, options: TrainOptions) -> TrainOptions:
        """Return the options of the island's job: checkpoints have a folder of their own."""
        folder = options.checkpoint_dir
        island_folder = None if folder is None else str(Path(folder) / f"island-{self.idx}")
        return options.replace(checkpoint_dir=island_folder, sync_every=None)

    def common(self, checkpoints: Sequence[Path]) -> tuple[Path, ...]:
        """Return those of an island's checkpoints that every island has; all ranks of all islands call it."""
        store = self.membership.store
        if dist.get_rank() == 0:
            store.set(f"checkpoints/{self.idx}", json.dumps([path.name for path in checkpoints]))
        names = [f"checkpoints/{idx}" for idx in range(len(self.updates.islands))]
        of_islands = [set(json.loads(store.get(name))) for name in names]
        return tuple(path for path in checkpoints if path.name in set.intersection(*of_islands))


class Vote(IntEnum):
    """What an island wants to happen after a sum; the largest of all is done."""

    GO_ON = 0
    LET_IN = 1
    STOP = 2


class Pace:
    """After which steps a fragment is due, the same on every island.

    One that adapts sums up as many times as seldom as sums take longer than planned, within the plan's limits: a link that drops to
    a tenth costs no more of the time than it did. When it is back, so are the plan's steps.

    Attributes:
        every: steps from one fragment to the next.
    """

    def __init__(self, updates: LocalUpdates, *, adapts: bool) -> None:
        self.adapts, self._planned_s = adapts, updates.exchange_s
        self._planned = self.every = updates.steps // updates.fragments
        self._limit = max(self._planned, updates.limits.max_local_steps // updates.fragments)
        self._due: int | None = None
        self._count = 0

    def is_due(self, step: int) -> bool:
        """Tell whether a fragment is due after this step; a run may begin anywhere."""
        if self._due is None:
            self._count = -(-step // self.every) - 1
            self._due = (self._count + 1) * self.every
        return step >= self._due

    def begin(self, step: int) -> int:
        """Return which fragment it is, counted since the start of the run, and wait for the next one."""
        count, self._count = self._count, self._count + 1
        self._due = step + self.every
        return count

    def state(self) -> tuple[int, int | None, int]:
        """Return what an island that comes later must know to be due with the others."""
        return self.every, self._due, self._count

    def adopt(self, every: int, due: int | None, count: int) -> None:
        """Be due with the island that this state is of."""
        self.every, self._due, self._count = every, due, count

    def follow(self, exchange_s: float) -> None:
        """Take note of the longest of all islands' seconds for the last fragment."""
        if self.adapts and self._planned_s > 0:
            slower = exchange_s / self._planned_s
            before, self.every = self.every, min(max(round(self._planned * slower), self._planned), self._limit)
            if self._due is not None:
                self._due += self.every - before


class LocalUpdater:
    """What a rank does after each inner step.

    Attributes:
        exchanges_s: of every fragment so far, from when all islands were there.
        is_first: no island before this one was there at the last sum.
        start: how far the run is that this island, started anew, comes into; None: at its beginning, or at a checkpoint.

    Args:
        place: its island.
        model: its part, as initialised or loaded: the anchor.
    """

    def __init__(self, place: IslandPlace, model: ParallelModel, options: TrainOptions, *, timeout_s: float) -> None:
        self.place, self._updates, self._model = place, place.updates, model
        self._anchors = {
            name: local_tensor(value).detach().to("cpu", torch.float32, copy=True)
            for name, value in _trained(model).items()
        }
        self._momenta = (
            {name: torch.zeros_like(anchor) for name, anchor in self._anchors.items()} if options.outer_momentum else {}
        )
        self._kinds = _trained(model)
        rate, momentum = options.outer_learning_rate, options.outer_momentum
        self.fragments = [Fragment(pieces, learning_rate=rate, momentum=momentum) for pieces in self._pieces()]
        self._host_meshes: dict[DeviceMesh, DeviceMesh] = {}
        self._lanes = min(island.replicas for island in self._updates.islands)
        self._replicas, self._members, self._ring = self._groups(timeout_s)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ring") if self._updates.delay_steps else None
        self._on_its_way: tuple[Fragment, int, Future[list[Tensor]] | list[Tensor]] | None = None
        self._wants, self._arrived, self.is_stopped = Vote.GO_ON, Vote.GO_ON, False
        self.pace, self._longest_s = Pace(self._updates, adapts=options.sync_every == "auto"), 0.0
        self.exchanges_s: list[float] = []
        self.is_first = False
        self._progress = TrainingProgress(step=0)
        self.start = self._come_in(self._ring.join())

    def _pieces(self) -> list[list[Piece]]:
        """Return the pieces of each fragment: as many numbers in each, in the order of the model."""
        sizes = [anchor.numel() for anchor in self._anchors.values()]
        width = -(-sum(sizes) // (self._updates.fragments * ROW)) * ROW
        pieces: list[list[Piece]] = [[] for _ in range(self._updates.fragments)]
        first = 0
        for name, anchor in self._anchors.items():
            value, size = local_tensor(self._kinds[name]).detach().view(-1), anchor.numel()
            for idx in range(first // width, -(-(first + size) // width)):
                part = slice(max(idx * width - first, 0), min((idx + 1) * width - first, size))
                momentum = self._momenta[name].view(-1)[part] if self._momenta else None
                pieces[idx].append(Piece(value[part], nn.Parameter(anchor.view(-1)[part]), momentum, size < WIDE_BELOW))
            first += size
        return [part for part in pieces if part]

    @property
    def sent_bytes(self) -> int:
        """Return what this rank has sent to other islands."""
        return self._ring.sent_bytes

    @property
    def is_idle(self) -> bool:
        """Tell whether no sum is on its way."""
        return self._on_its_way is None

    def calls_a_halt(self) -> bool:
        """Tell whether islands wait to be let in after the next sum."""
        return self._ring.is_invited()

    def _groups(self, timeout_s: float) -> tuple[dist.ProcessGroup | None, list[int], IslandRing]:
        """Return the ranks of the island at this place of each replica, as a group and in order, and the ring of this one.

        Replicas that another island has not are in no ring: they hear what the first one of their island is told.
        """
        plan, rank = self.place.plan, dist.get_rank()
        by_replica = torch.tensor(plan.rank_map).reshape(plan.layout.pp, plan.layout.dp_replicate, -1)
        stage, lane, place = (int(index) for index in (by_replica == rank).nonzero()[0])
        members, group = by_replica[stage, :, place].tolist(), None
        if len(members) > 1:
            for others in by_replica.transpose(1, 2).flatten(0, 1).tolist():
                made = dist.new_group(others, backend="gloo")
                group = made if rank in others else group
        sends = lane < self._lanes
        ring = IslandRing(
            self.place.membership, self._updates, self.place.ranks, self.place.idx,
            name=f"ring/{stage}/{place}/{lane if sends else 0}", sends=sends,
            state=[*self._anchors.values(), *self._momenta.values()] if lane == 0 else (),
            tell=lambda: {"progress": self._progress.model_dump(), "pace": self.pace.state()}, timeout_s=timeout_s,
        )  # fmt: skip
        return group, members, ring

    def _come_in(self, of_all: Sequence[dict[str, Any]]) -> TrainingProgress | None:
        """Take over anchor and progress of the others, where this island was started anew.

        Raises:
            MeshwrightError: its ranks came in at different sums, as an island was lost meanwhile.
        """
        if not self._ring.is_new:
            return None
        if self._replicas is not None:
            for tensor in (*self._anchors.values(), *self._momenta.values()):
                dist.broadcast(tensor, self._members[0], group=self._replicas)
        for fragment in self.fragments:
            fragment.go_to_anchor()
        known = next(words for words in of_all if not words["is_new"])
        self.pace.adopt(*known["pace"])
        self._ring.num_sums, self._ring.is_new = known["sums"], False
        progress = TrainingProgress(**known["progress"])
        met: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(met, [progress.step, known["sums"], known["pace"]])
        if any(each != met[0] for each in met):
            raise MeshwrightError(
                "another region was lost while this one came back", help="start the same command here again"
            )
        return progress

    def after_step(self, progress: TrainingProgress, *, stop_requested: bool, halt_requested: bool = False) -> None:
        """Begin and take over what is due after an inner step.

        Args:
            stop_requested: every island is to end after the same step.
            halt_requested: islands that wait are to be let in.
        """
        step, self._progress = progress.step, progress
        self._wants = max(self._wants, Vote.STOP if stop_requested else Vote.LET_IN if halt_requested else Vote.GO_ON)
        if self._on_its_way is not None and step >= self._on_its_way[1]:
            self._take_over()
        if not self.pace.is_due(step):
            return
        fragment = self.fragments[self.pace.begin(step) % len(self.fragments)]
        deltas = fragment.begin()
        thread = self._thread
        summed = self._sum(fragment, deltas) if thread is None else thread.submit(self._sum, fragment, deltas)
        self._on_its_way = fragment, step + self._updates.delay_steps, summed
        if self._thread is None:
            self._take_over()

    def is_due(self, step: int) -> bool:
        """Tell whether `after_step` may wait for other islands."""
        is_over = self._on_its_way is not None and step >= self._on_its_way[1]
        return is_over or self.pace.is_due(step)

    def settle(self) -> None:
        """Take over what is on its way."""
        if self._on_its_way is not None:
            self._take_over()

    def finish(self) -> None:
        """Let all islands end with the same parameters: sum up every fragment once more."""
        self.settle()
        for fragment in self.fragments:
            summed = self._sum(fragment, fragment.begin())
            fragment.take_over(self._shared(fragment, summed))

    def _take_over(self) -> None:
        assert self._on_its_way is not None
        (fragment, _, summed), self._on_its_way = self._on_its_way, None
        fragment.take_over(self._shared(fragment, summed.result() if isinstance(summed, Future) else summed))
        # Here, at the same step on every island, and not in the thread.
        self.is_stopped = self._arrived is Vote.STOP
        self.pace.follow(self._longest_s)
        if self._arrived is Vote.LET_IN:
            self._wants = Vote.STOP if self._wants is Vote.STOP else Vote.GO_ON
            self._ring.let_in()

    def _sum(self, fragment: Fragment, deltas: list[Tensor]) -> list[Tensor]:
        """Return the sums around the ring of this replica's part; the rest is what other replicas of the island sum up."""
        if not self._ring.sends:
            self._arrived, self._longest_s = Vote.GO_ON, 0.0
            return deltas
        summed: list[Tensor] = []

        def add_up(ring: Ring, weight: float) -> float:
            self._arrived = Vote(int(ring.maximum(float(self._wants))))
            begin_s = time.perf_counter()  # every island is here
            summed.clear()
            for bits, chosen in self._by_bits(fragment, deltas):
                values = flat(chosen).mul_(weight)
                part = self._part(len(values), self._members.index(dist.get_rank()))
                values[part] = ring.sum(values[part], bits)
                summed.append(values)
            self.exchanges_s.append(time.perf_counter() - begin_s)
            return self.exchanges_s[-1]

        self._longest_s = self._ring.together(add_up)
        for values, (_, chosen) in zip(summed, self._by_bits(fragment, deltas), strict=True):
            spread(values, chosen)
        return deltas

    def _by_bits(self, fragment: Fragment, deltas: list[Tensor]) -> Iterator[tuple[WireBits, list[Tensor]]]:
        """Yield the numbers that are sent in fp32, and the others."""
        for is_wide, bits in ((True, 32), (False, self._updates.bits)):
            chosen = [delta for delta, piece in zip(deltas, fragment.pieces, strict=True) if piece.is_wide == is_wide]
            if chosen:
                yield bits, chosen

    def _part(self, size: int, lane: int) -> slice:
        """Return the part of a flat tensor that a replica sums up."""
        width = -(-size // (self._lanes * ROW)) * ROW
        return slice(min(lane * width, size), min((lane + 1) * width, size))

    def _shared(self, fragment: Fragment, deltas: list[Tensor]) -> list[Tensor]:
        """Return the sums of all parts: each replica gives its part to the others of the island.

        What the rings of an island heard may differ where one of them broke: its ranks follow the largest.
        """
        self.is_first = self._ring.sends and self._ring.is_first
        if dist.get_world_size() > 1:
            heard = (float(self._arrived), self._longest_s, float(self.is_first))
            news = torch.tensor(heard, device=self._model.device)
            dist.all_reduce(news, dist.ReduceOp.MAX)
            self._arrived, self._longest_s, self.is_first = Vote(int(news[0])), float(news[1]), news[2] > 0
        if self._replicas is None:
            return deltas
        for _, chosen in self._by_bits(fragment, deltas):
            values = flat(chosen)
            for lane in range(self._lanes):
                part = values[self._part(len(values), lane)]
                dist.broadcast(part, self._members[lane], group=self._replicas)
            spread(values, chosen)
        return deltas

    def state(self) -> dict[str, Tensor]:
        """Return anchors and momenta by name, as they are stored: parts of the model's tensors, sharing their memory."""
        anchors = {f"anchor.{name}": self._sharded_like_model(name, anchor) for name, anchor in self._anchors.items()}
        return anchors | {
            f"momentum.{name}": self._sharded_like_model(name, momentum) for name, momentum in self._momenta.items()
        }

    def _sharded_like_model(self, name: str, local: Tensor) -> Tensor:
        """Return a part in the host's memory of what is sharded like a parameter."""
        kind = self._kinds[name]
        if not isinstance(kind, DTensor):
            return local
        mesh = kind.device_mesh
        if mesh.device_type != "cpu":
            if mesh not in self._host_meshes:
                self._host_meshes[mesh] = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
            mesh = self._host_meshes[mesh]
        return DTensor.from_local(local, mesh, kind.placements, run_check=False, shape=kind.shape, stride=kind.stride())


def _trained(model: ParallelModel) -> dict[str, Tensor]:
    """Return the tensors that are trained by their names, a tied one once."""
    parameters = [local_tensor(parameter) for parameter in model.parameters() if parameter.requires_grad]
    pointers = {local.data_ptr() for local in parameters if local.numel()}
    chosen = {}
    for name, value in get_model_state_dict(model.module).items():
        if isinstance(value, Tensor) and (pointer := local_tensor(value).data_ptr()) in pointers:
            pointers.discard(pointer)
            chosen[name] = value
    return chosen
