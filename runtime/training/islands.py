"""Local updates: islands that train by themselves and sum up what changed around a ring (schema/local_updates.py).

Each island is a job of its own, with a process group, a plan (`plan_of_island`) and checkpoints of its own. Ranks at the same place
of each island form a ring besides, over gloo. Anchor: the parameters as all islands had them last, in the host's memory.

    begin     of a fragment:  delta = anchor - parameters, weighted by the island's part of the batch, and its sum around the ring
    take over, delay_steps later:  anchor <- SGD(anchor, sum of delta);  parameters <- anchor + what they changed meanwhile

With a delay the ring runs in a thread while training goes on. Of an island with more replicas of the model than another, the first
ones sum up a part of the fragment each and give it to the others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...schema import TrainingPlan
from ...schema.local_updates import ROW, LocalUpdates, WireBits, devices_of_islands, plan_of_island
from ..models.layers import local_tensor
from ..parallel_model import ParallelModel
from .options import TrainOptions
from .ring import Ring

_WIDE_BELOW = 64 * ROW
"""Smaller tensors (norms, biases, routers) are sent in fp32: they are a thousandth of all bytes, and ranks that share other tensors
have copies of them, which must stay the same."""


@dataclass(frozen=True)
class IslandPlace:
    """The island of this process, and the store that all islands share.

    Attributes:
        plan: of the island.
        first_row: sequences of a global batch before the island's.
    """

    idx: int
    plan: TrainingPlan
    updates: LocalUpdates
    store: dist.Store
    first_row: int
    sequences: int

    @classmethod
    def join(cls, plan: TrainingPlan, *, backend: str, device: torch.device, timeout_s: float) -> IslandPlace:
        """Make the process group of this rank's island the default one, from what torchrun's environment says of all of them."""
        updates = plan.local_updates
        assert updates is not None
        store, rank, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
        islands = devices_of_islands(plan.cluster)
        idx = next(i for i, devices in enumerate(islands) if rank in devices)
        dist.init_process_group(
            backend, store=dist.PrefixStore(f"island/{idx}", store), rank=islands[idx].index(rank),
            world_size=len(islands[idx]), timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )  # fmt: skip
        first_row = sum(island.sequences for island in updates.islands[:idx])
        batch = plan.workload.global_batch_size
        return cls(idx, plan_of_island(plan, idx), updates, dist.PrefixStore("islands", store), first_row, batch)

    def options(self, options: TrainOptions) -> TrainOptions:
        """Return the options of the island's job: checkpoints have a folder of their own, the first one saves weights."""
        folder, weights = options.checkpoint_dir, options.save_weights if self.idx == 0 else None
        island_folder = None if folder is None else str(Path(folder) / f"island-{self.idx}")
        return options.replace(checkpoint_dir=island_folder, save_weights=weights, sync_every=None)

    def common(self, checkpoints: Sequence[Path]) -> tuple[Path, ...]:
        """Return those of an island's checkpoints that every island has; all ranks of all islands call it."""
        if dist.get_rank() == 0:
            self.store.set(f"checkpoints/{self.idx}", json.dumps([path.name for path in checkpoints]))
        names = [f"checkpoints/{idx}" for idx in range(len(self.updates.islands))]
        of_islands = [set(json.loads(self.store.get(name))) for name in names]
        return tuple(path for path in checkpoints if path.name in set.intersection(*of_islands))


class Piece(NamedTuple):
    """Neighbouring numbers of one tensor, flat: in the parameter, the anchor, and the anchor's momentum where there is one."""

    value: Tensor
    anchor: nn.Parameter
    momentum: Tensor | None
    is_wide: bool


class Fragment:
    """Some parameters that are summed up together: their pieces."""

    def __init__(self, pieces: Sequence[Piece], *, learning_rate: float, momentum: float) -> None:
        self.pieces = pieces
        anchors = [piece.anchor for piece in pieces]
        self._optimizer = torch.optim.SGD(anchors, lr=learning_rate, momentum=momentum, nesterov=momentum > 0)
        for piece in pieces:
            if piece.momentum is not None:
                self._optimizer.state[piece.anchor]["momentum_buffer"] = piece.momentum
        self._before: list[Tensor] = []

    @torch.no_grad()
    def begin(self, weight: float) -> list[Tensor]:
        """Return what changed since the anchor, weighted, and remember the parameters as they are."""
        self._before = [piece.value.to("cpu", torch.float32, copy=True) for piece in self.pieces]
        return [(piece.anchor - before) * weight for piece, before in zip(self.pieces, self._before, strict=True)]

    @torch.no_grad()
    def take_over(self, deltas: Sequence[Tensor]) -> None:
        """Move the anchor by the sum of what all islands changed, and the parameters with it."""
        for piece, delta in zip(self.pieces, deltas, strict=True):
            piece.anchor.grad = delta
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        for piece, before in zip(self.pieces, self._before, strict=True):
            since = piece.value.to("cpu", torch.float32) - before
            piece.value.copy_(piece.anchor + since if since.any() else piece.anchor)
        self._before = []


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

    Args:
        place: its island.
        model: its part, as initialised or loaded: the anchor.
    """

    def __init__(self, place: IslandPlace, model: ParallelModel, options: TrainOptions, *, timeout_s: float) -> None:
        self.place, self._updates, self._model = place, place.updates, model
        self._weight = place.updates.islands[place.idx].sequences / place.sequences
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
        self._wants_stop, self._stop_arrived, self.is_stopped = False, False, False
        self.pace, self._longest_s = Pace(self._updates, adapts=options.sync_every == "auto"), 0.0
        self.exchanges_s: list[float] = []

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
                pieces[idx].append(
                    Piece(value[part], nn.Parameter(anchor.view(-1)[part]), momentum, size < _WIDE_BELOW)
                )
            first += size
        return [part for part in pieces if part]

    @property
    def sent_bytes(self) -> int:
        """Return what this rank has sent to other islands."""
        return 0 if self._ring is None else self._ring.sent_bytes

    @property
    def is_idle(self) -> bool:
        """Tell whether no sum is on its way."""
        return self._on_its_way is None

    def _groups(self, timeout_s: float) -> tuple[dist.ProcessGroup | None, list[int], Ring | None]:
        """Return the ranks of the island at this place of each replica, as a group and in order, and the ring of this one.

        Replicas that another island has not are in no ring.
        """
        plan, rank, ring = self.place.plan, dist.get_rank(), self._updates.ring
        by_replica = torch.tensor(plan.rank_map).reshape(plan.layout.pp, plan.layout.dp_replicate, -1)
        stage, lane, place = (int(index) for index in (by_replica == rank).nonzero()[0])
        members, group = by_replica[stage, :, place].tolist(), None
        if len(members) > 1:
            for others in by_replica.transpose(1, 2).flatten(0, 1).tolist():
                made = dist.new_group(others, backend="gloo")
                group = made if rank in others else group
        if lane >= self._lanes:
            return group, members, None
        store = dist.PrefixStore(f"ring/{stage}/{place}/{lane}", self.place.store)
        return group, members, Ring(store, ring.index(self.place.idx), len(ring), timeout_s)

    def after_step(self, step: int, *, stop_requested: bool) -> None:
        """Begin and take over what is due after an inner step; ends with every island at the same step where one was asked to."""
        self._wants_stop |= stop_requested
        if self._on_its_way is not None and step >= self._on_its_way[1]:
            self._take_over()
        if not self.pace.is_due(step):
            return
        fragment = self.fragments[self.pace.begin(step) % len(self.fragments)]
        deltas = fragment.begin(self._weight)
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
            summed = self._sum(fragment, fragment.begin(self._weight))
            fragment.take_over(self._shared(fragment, summed))

    def _take_over(self) -> None:
        assert self._on_its_way is not None
        (fragment, _, summed), self._on_its_way = self._on_its_way, None
        fragment.take_over(self._shared(fragment, summed.result() if isinstance(summed, Future) else summed))
        # Here, at the same step on every island, and not in the thread.
        self.is_stopped = self._stop_arrived
        self.pace.follow(self._longest_s)

    def _sum(self, fragment: Fragment, deltas: list[Tensor]) -> list[Tensor]:
        """Return the sums around the ring of this replica's part; the rest is what other replicas of the island sum up."""
        if self._ring is None:
            return deltas
        self._stop_arrived = self._ring.maximum(float(self._wants_stop)) > 0
        begin_s = time.perf_counter()  # every island is here
        for bits, chosen in self._by_bits(fragment, deltas):
            flat = _flat(chosen)
            part = self._part(len(flat), self._members.index(dist.get_rank()))
            flat[part] = self._ring.sum(flat[part], bits)
            _spread(flat, chosen)
        self.exchanges_s.append(time.perf_counter() - begin_s)
        if self.pace.adapts:
            self._longest_s = self._ring.maximum(self.exchanges_s[-1])
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
        """Return the sums of all parts: each replica gives its part to the others of the island."""
        if self._replicas is None:
            return deltas
        news = torch.tensor([float(self._stop_arrived), self._longest_s])
        dist.broadcast(news, self._members[0], group=self._replicas)
        self._stop_arrived, self._longest_s = bool(news[0]), float(news[1])
        for _, chosen in self._by_bits(fragment, deltas):
            flat = _flat(chosen)
            for lane in range(self._lanes):
                part = flat[self._part(len(flat), lane)]
                dist.broadcast(part, self._members[lane], group=self._replicas)
            _spread(flat, chosen)
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


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors one after another, each filled up to whole rows, so that no row has numbers of two of them."""
    return torch.cat([part for tensor in tensors for part in (tensor, torch.zeros(-tensor.numel() % ROW))])


def _spread(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a flat tensor back."""
    first = 0
    for tensor in tensors:
        tensor.copy_(flat[first : first + tensor.numel()])
        first += -(-tensor.numel() // ROW) * ROW
