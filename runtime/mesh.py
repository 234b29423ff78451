"""The ranks of a plan as one DeviceMesh with named axes.

The ranks that differ only in one axis form its process groups. Axes of size 1 are left out of the mesh, so that they cost nothing,
except ``dp_shard``: `fully_shard` works over it also where it only casts or replicates. Ranks of cp hold the same parameters as
their neighbours in dp_shard: in the mesh they are part of that axis (of ``dp_replicate`` at zero_stage 0), and attention has groups
of its own over cp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..schema.errors import RuntimeMismatchError
from ..schema.layout import Layout
from ..schema.training_plan import TrainingPlan
from .reshard import Reshard

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes, slowest first: the order in which a plan counts its ranks."""

EXPERT_AXES = ("expert_replicate", "expert_shard", "ep", "etp")
"""Axes of the same ranks of a stage, in the same order, for experts."""


@dataclass(frozen=True)
class ParallelMesh:
    """Position of this process in the plan.

    Attributes:
        device_mesh: the used axes; its entries are ranks of the default process group (devices of the plan).
        rank: the plan's rank that this process runs (not its rank in the default group: ``plan.rank_map`` lies between).
        stage_idxs: the stages of the plan that this process holds, in the order of the model.
        exchange: the ranks of cp among which tokens are exchanged for heads; None where there is one.
        ring: the ranks of cp among which keys and values go round; None where there is one.
        expert_mesh: the ranks of this stage by EXPERT_AXES, those of size 1 left out but expert_shard; None where experts have no
            axes of their own.
        layouts: of every stage; ``layout`` is that of this process's.
        pipelines: the ranks by stage and place, where stages differ in their axes; then ``device_mesh`` is this stage's.
        reshard: what deals out the hidden states that arrive from a stage of another tp; None where they are in place.
        tied_group: the ranks of the first and of the last stage of this process's column, where both hold a tied embedding and
            are not the same.
    """

    device_mesh: DeviceMesh
    layout: Layout
    rank: int
    stage_idxs: tuple[int, ...] = (0,)
    num_stages: int = 1
    exchange: dist.ProcessGroup | None = None
    ring: dist.ProcessGroup | None = None
    expert_mesh: DeviceMesh | None = None
    tied_group: dist.ProcessGroup | None = None
    layouts: tuple[Layout, ...] = ()
    pipelines: DeviceMesh | None = None
    reshard: Reshard | None = None

    @cached_property
    def coordinates(self) -> dict[str, int]:
        """Return the position along every axis, also those of size 1."""
        rest, result = self.rank, {}
        for axis in reversed(AXES):
            rest, result[axis] = divmod(rest, getattr(self.layout, axis))
        rest = self.rank % int(self.layout.stage_ranks)
        for axis, degree in reversed(_expert_degrees(self.layout).items()):
            rest, result[axis] = divmod(rest, degree)
        return result

    @property
    def tp_rank(self) -> int:
        """Return the position among the ranks that share each layer."""
        return self.coordinates["tp"]

    @property
    def dp_rank(self) -> int:
        """Return which share of the global batch this process reads, of ``layout.dp``."""
        return self.coordinates["dp_replicate"] * int(self.layout.dp_shard) + self.coordinates["dp_shard"]

    @property
    def data_degree(self) -> int:
        """Return the number of ranks that hold the same parameters and see different tokens."""
        return int(self.layout.dp * self.layout.cp)

    @property
    def is_first_stage(self) -> bool:
        """Tell whether this process embeds tokens."""
        return 0 in self.stage_idxs

    @property
    def is_last_stage(self) -> bool:
        """Tell whether this process computes the loss."""
        return self.num_stages - 1 in self.stage_idxs

    @cached_property
    def fsdp(self) -> DeviceMesh:
        """Return the mesh of `fully_shard`: (dp_shard), or with replicas (dp_replicate, dp_shard)."""
        return _with_replicas(self.device_mesh, "dp_replicate", "dp_shard")

    @cached_property
    def expert_fsdp(self) -> DeviceMesh:
        """Return the ranks that hold the same part of the same experts: (expert_shard), or (expert_replicate, expert_shard)."""
        assert self.expert_mesh is not None
        return _with_replicas(self.expert_mesh, "expert_replicate", "expert_shard")

    @cached_property
    def tp(self) -> DeviceMesh | None:
        """Return the ranks that share each layer; None without tensor parallelism."""
        return self.device_mesh["tp"] if self.layout.tp > 1 else None

    @cached_property
    def pp(self) -> DeviceMesh | None:
        """Return the ranks that hold the stages of one pipeline; None without one. Its groups count by rank, not by position."""
        return (self.pipelines or self.device_mesh)["pp"] if self.layout.pp > 1 else None

    @cached_property
    def pipeline_ranks(self) -> tuple[int, ...]:
        """Return the ranks of this process's pipeline in the default group, by position along pp."""
        return () if self.pp is None else tuple(self.pp.mesh.tolist())


def _with_replicas(mesh: DeviceMesh, replicas: str, shards: str) -> DeviceMesh:
    return mesh[replicas, shards] if replicas in (mesh.mesh_dim_names or ()) else mesh[shards]


def build_mesh(plan: TrainingPlan, device_type: str) -> ParallelMesh:
    """Create the process groups of a plan; to be called by all ranks of an initialised default group of the plan's size.

    Raises:
        RuntimeMismatchError: the plan's rank_map orders devices in a way that torch cannot.
    """
    layout = plan.layout
    if plan.degrees_by_stage:
        return _build_by_stage(plan, device_type)
    require_ascending(layout, plan.rank_map)
    devices = _by_axis(layout, plan.rank_map)
    # The ranks of cp count in the axis that holds their parameters.
    cp_replicas, cp_shards = (1, layout.cp) if layout.zero_stage else (layout.cp, 1)
    degrees = (layout.pp, layout.dp_replicate * cp_replicas, layout.dp_shard * cp_shards, layout.tp)
    names = ("pp", "dp_replicate", "dp_shard", "tp")
    device_mesh = _used(dict(zip(names, degrees, strict=True)), devices, device_type, always=("dp_shard",))
    holders = plan.rank_of_stage
    first, last, tied_group = holders[0], holders[-1], None
    if plan.model.tie_embeddings and first != last:
        columns = devices.flatten(1)
        tied_group = _local_group([[int(columns[first, i]), int(columns[last, i])] for i in range(columns.shape[1])])
    rank = plan.rank_map.index(dist.get_rank())
    stage_idxs = tuple(idx for idx, holder in enumerate(holders) if holder == rank // layout.stage_ranks)
    expert_mesh = _expert_mesh(layout, devices, device_type)
    by_cp = devices.movedim(AXES.index("cp"), -1).reshape(-1, layout.cp // layout.cp_ulysses, layout.cp_ulysses)
    exchange, ring = (
        _local_group(ranks.flatten(0, 1).tolist()) if ranks.shape[2] > 1 else None for ranks in (by_cp, by_cp.mT)
    )
    return ParallelMesh(
        device_mesh, layout, rank, stage_idxs, len(holders), exchange, ring, expert_mesh, tied_group,
        layouts=(layout,) * len(holders),
    )  # fmt: skip


def _build_by_stage(plan: TrainingPlan, device_type: str) -> ParallelMesh:
    """Create the groups of a plan whose stages have a tp each: a mesh for each stage, and one of the pipelines through them."""
    layouts = tuple(plan.layout_of_stage(idx) for idx in range(len(plan.stages)))
    devices = torch.tensor(plan.rank_map).reshape(plan.layout.pp, -1)
    rank = plan.rank_map.index(dist.get_rank())
    stage_idx = rank // devices.shape[1]
    pipelines = DeviceMesh(device_type, devices, mesh_dim_names=("pp", "place"))
    local_mesh, reshard = None, None
    for idx, layout in enumerate(layouts):
        if (devices[idx].diff() < 0).any():
            raise RuntimeMismatchError(
                f"the devices of stage {idx} must ascend where stages differ in tp",
                help="sort the devices of each stage",
            )
        degrees = {axis: getattr(layout, axis) for axis in ("dp_replicate", "dp_shard", "tp")}
        mesh = _used(degrees, devices[idx], device_type, always=("dp_shard",))
        local_mesh = mesh if idx == stage_idx else local_mesh
        before = layouts[max(idx - 1, 0)].tp
        if before != layout.tp:
            group = _local_group(devices[idx].reshape(-1, max(before, layout.tp)).tolist())
            reshard = Reshard(group, before, layout.tp) if group is not None else reshard
    tied_group = None
    if plan.model.tie_embeddings:
        tied_group = _local_group(
            [[int(first), int(last)] for first, last in zip(devices[0], devices[-1], strict=True)]
        )
    assert local_mesh is not None
    return ParallelMesh(
        local_mesh, layouts[stage_idx], rank, (stage_idx,), len(layouts), tied_group=tied_group, layouts=layouts,
        pipelines=pipelines, reshard=reshard,
    )  # fmt: skip


def _used(degrees: dict[str, int], devices: torch.Tensor, device_type: str, *, always: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh of the axes that have more than one rank, and of some in any case."""
    used = {axis: size for axis, size in degrees.items() if size > 1 or axis in always}
    return DeviceMesh(device_type, devices.reshape(list(used.values())), mesh_dim_names=tuple(used))


def _expert_degrees(layout: Layout) -> dict[str, int]:
    """Return the sizes of EXPERT_AXES; none where experts have no axes of their own."""
    if layout.experts_follow_tp:
        return {}
    sizes = (layout.expert_copies // layout.expert_shards, layout.expert_shards, layout.ep, layout.etp)
    return dict(zip(EXPERT_AXES, sizes, strict=True))


def _expert_mesh(layout: Layout, devices: torch.Tensor, device_type: str) -> DeviceMesh | None:
    degrees = _expert_degrees(layout)
    if not degrees:
        return None
    devices = devices.reshape([layout.pp, *degrees.values()])
    for axis in EXPERT_AXES[1:]:
        if (devices.diff(dim=1 + EXPERT_AXES.index(axis)) < 0).any():
            raise RuntimeMismatchError(
                f"devices must ascend along {axis}; the plan's rank_map orders them otherwise",
                help="sort the devices of each stage",
            )
    return _used({"pp": layout.pp, **degrees}, devices, device_type, always=("pp", "expert_shard"))


def _by_axis(layout: Layout, rank_map: tuple[int, ...]) -> torch.Tensor:
    """Return ranks in the default group by AXES."""
    return torch.tensor(rank_map).reshape([getattr(layout, axis) for axis in AXES])


def require_ascending(layout: Layout, rank_map: tuple[int, ...]) -> None:
    """Refuse maps in which devices do not ascend along dp_shard, cp or tp.

    torch sorts the ranks of every group, so that DTensor would place shards by mesh position but gather them by rank. Which axis
    is innermost is free, and so is the order of pipeline stages and of replicas.
    """
    devices = _by_axis(layout, rank_map)
    sharded = devices.flatten(AXES.index("dp_shard"), AXES.index("cp")).diff(dim=AXES.index("dp_shard"))
    for axis, steps in {"dp_shard": sharded, "tp": devices.diff(dim=AXES.index("tp"))}.items():
        if (steps < 0).any():
            raise RuntimeMismatchError(
                f"rank_map {rank_map}: devices must ascend along {axis}{' and cp' if layout.cp > 1 and axis != 'tp' else ''}",
                help=f"sort the devices of each {axis} group; the ranks of a group are interchangeable",
            )


def group_of_stages(plan: TrainingPlan, stage_idxs: Sequence[int]) -> dist.ProcessGroup | None:
    """Return the group of this process's ranks of some stages, one a stage; None where it is in none, or all are on one rank."""
    columns = _by_axis(plan.layout, plan.rank_map).flatten(1)
    holders = sorted({plan.rank_of_stage[idx] for idx in stage_idxs})
    if len(holders) == 1:
        return None
    return _local_group([[int(columns[holder, i]) for holder in holders] for i in range(columns.shape[1])])


def _local_group(ranks: list[list[int]]) -> dist.ProcessGroup | None:
    """Return the group of ``ranks`` that this process is in; every process creates all of them, as torch requires."""
    groups = [(members, dist.new_group(members)) for members in ranks]
    return next((group for members, group in groups if dist.get_rank() in members), None)
