"""Expert parallelism: experts shared out over ep and cut over etp, folded onto the other ranks of a stage.

| layout          | a rank holds                          | tokens                                                          |
|-----------------|---------------------------------------|-----------------------------------------------------------------|
| tp, no ep, etp  | all experts, each cut over tp         | gathered over tp (sequence parallel), outputs summed over it    |
| ep              | E / ep experts, whole                 | sent to their experts and back by all-to-all over ep            |
| ep, etp         | E / ep experts, each cut over etp     | gathered over etp, then all-to-all over ep, outputs summed      |

The other ranks of a stage hold copies, sharded and replicated like other weights, over groups of their own.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from ..schema.layout import Layout
from ..schema.plan import Plan
from .mesh import ParallelMesh
from .models.decoder import Decoder, DecoderBlock
from .models.experts import ExpertRanks, Experts, MixtureOfExperts


def apply_expert_parallel(stage: Decoder, mesh: ParallelMesh, plan: Plan) -> None:
    """Spread the experts of a stage, in place; nothing to do without experts or with all of them on one rank."""
    ranks = _ranks(mesh, plan)
    if ranks is None:
        return
    weights = mesh.tp if mesh.expert_mesh is None else _weight_mesh(mesh.expert_mesh)
    assert weights is not None
    for experts in _experts_of(stage, ranks):
        _distribute(experts, weights)
        experts.gradient_ratio = gradient_ratio(plan.layout)


def gradient_ratio(layout: Layout) -> float:
    """Copies of an expert over the ranks that see different data.

    The gradient of the mean loss is the sum over all tokens divided by the latter; fully_shard divides by the former.
    """
    return 1.0 if layout.experts_follow_tp else layout.expert_copies / (layout.dp * layout.cp)


def sharded_experts(stage: Decoder, mesh: ParallelMesh) -> list[Experts]:
    """Experts whose states are sharded or replicated over groups of their own."""
    if mesh.expert_mesh is None:
        return []
    return [block.mlp.experts for block in stage.model.layers.values() if isinstance(block.mlp, MixtureOfExperts)]


def _ranks(mesh: ParallelMesh, plan: Plan) -> ExpertRanks | None:
    if mesh.expert_mesh is not None:
        axes = mesh.expert_mesh.mesh_dim_names or ()
        exchange = mesh.expert_mesh["ep"].get_group() if "ep" in axes else None
        return ExpertRanks(exchange, mesh.expert_mesh["etp"] if "etp" in axes else None, Shard(0))
    if mesh.tp is None:
        return None
    return ExpertRanks(None, mesh.tp, Shard(0) if plan.layout.sequence_parallel else Replicate())


def _weight_mesh(expert_mesh: DeviceMesh) -> DeviceMesh:
    used = tuple(axis for axis in ("ep", "etp") if axis in (expert_mesh.mesh_dim_names or ()))
    return expert_mesh[used]


def _experts_of(stage: Decoder, ranks: ExpertRanks) -> list[Experts]:
    found = []
    for block in stage.model.layers.values():
        assert isinstance(block, DecoderBlock)
        if isinstance(block.mlp, MixtureOfExperts):
            block.mlp.ranks = ranks
            found.append(block.mlp.experts)
    return found


def _distribute(experts: Experts, mesh: DeviceMesh) -> None:
    """Rows of the stack over ep; of each expert the width F over etp (or tp)."""
    names = mesh.mesh_dim_names or ()
    for name, width in (("gate_proj", 1), ("up_proj", 1), ("down_proj", 2)):
        placements: list[Placement] = [Shard(0) if axis == "ep" else Shard(width) for axis in names]
        whole = getattr(experts, name).data
        setattr(experts, name, nn.Parameter(distribute_tensor(whole, mesh, placements, src_data_rank=None)))
