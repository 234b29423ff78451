"""Expert parallelism: experts shared out over ep and cut over etp, folded onto the other ranks of a stage.

| layout          | a rank holds                          | tokens                                                          |
|-----------------|---------------------------------------|-----------------------------------------------------------------|
| tp, no ep, etp  | all experts, each cut over tp         | gathered over tp (sequence parallel), outputs summed over it    |
| ep              | E / ep experts, each entire           | sent to their experts and back by all-to-all over ep            |
| ep, etp         | E / ep experts, each cut over etp     | gathered over etp, then all-to-all over ep, outputs summed      |

A plan may put experts into slots of its own choice, some into several (models/experts.py); a run may have the hottest ones stand on
every rank for a step (models/hot_experts.py).

The other ranks of a stage hold copies, sharded and replicated like other weights, over groups of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from ..schema.errors import RuntimeMismatchError
from ..schema.layers import Block, MoE
from ..schema.training_plan import TrainingPlan
from .mesh import ParallelMesh
from .models.decoder import Decoder
from .models.experts import ExpertRanks, ExpertSlots, MixtureOfExperts
from .models.layers import even_shard


def apply_expert_parallel(stage: Decoder, mesh: ParallelMesh, plan: TrainingPlan) -> None:
    """Distribute the experts of a stage, in place; nothing to do without experts or with all of them on one rank."""
    if mesh.expert_mesh is not None:
        axes = mesh.expert_mesh.mesh_dim_names or ()
        exchange = mesh.expert_mesh["ep"].get_group() if "ep" in axes else None
        ranks = ExpertRanks(exchange, mesh.expert_mesh["etp"] if "etp" in axes else None, Shard(0))
        weights = mesh.expert_mesh[tuple(axis for axis in ("ep", "etp") if axis in axes)]
    elif mesh.tp is not None:
        ranks = ExpertRanks(None, mesh.tp, Shard(0) if plan.layout.sequence_parallel else Replicate())
        weights = mesh.tp
    else:
        return
    # The gradient of the mean loss is the sum over all tokens divided by the ranks that see different data; `fully_shard`
    # divides by an expert's copies.
    layout = plan.layout
    gradient_ratio = 1.0 if layout.experts_follow_tp else layout.expert_copies / (layout.dp * layout.cp)
    for mixture in _mixtures(stage).values():
        mixture.ranks, mixture.experts.gradient_ratio = ranks, gradient_ratio
        # The rows of the stack are sharded over ep, and of each expert the width F over etp (or tp).
        for name, width in (("gate_proj", 1), ("up_proj", 1), ("down_proj", 2)):
            placements: list[Placement] = [Shard(0 if axis == "ep" else width) for axis in weights.mesh_dim_names or ()]
            full = getattr(mixture.experts, name).data
            sharded = distribute_tensor(full, weights, placements, src_data_rank=None)
            setattr(mixture.experts, name, nn.Parameter(sharded))
    if plan.expert_slots:
        # Blocks are counted as in the entire model.
        blocks = [layer for layer in plan.model.iter_layers() if isinstance(layer, Block)]
        with_experts = [str(idx) for idx, block in enumerate(blocks) if isinstance(block.mlp, MoE)]
        slots_of_block = dict(zip(with_experts, plan.expert_slots, strict=True))
        for name, mixture in _mixtures(stage).items():
            slots = slots_of_block[name]
            mixture.place(ExpertSlots(slots.experts, slots.shares, mixture.num_experts))


def _mixtures(stage: Decoder) -> dict[str, MixtureOfExperts]:
    return {name: block.mlp for name, block in stage.model.layers.items() if isinstance(block.mlp, MixtureOfExperts)}


def expert_placement(stage: Decoder, mesh: ParallelMesh) -> Callable[[nn.Parameter], Any] | None:
    """Return what tells `fully_shard` that the experts of a block have groups of their own; None where they have not.

    Not a `fully_shard` of their own: its hooks would run inside a block that is recomputed.
    """
    if mesh.expert_mesh is None:
        return None
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
    except ImportError:
        raise RuntimeMismatchError(
            f"torch {torch.__version__} cannot shard experts over ranks of their own",
            help="use torch 2.13, or a plan with ep=1",
        ) from None
    ranks = mesh.expert_fsdp
    info = FSDPMeshInfo(ranks, 0) if ranks.ndim == 1 else HSDPMeshInfo(ranks, shard_mesh_dim=1, replicate_mesh_dim=0)
    num_shards = ranks.size(ranks.ndim - 1)
    of_experts = {id(parameter) for mixture in _mixtures(stage).values() for parameter in mixture.experts.parameters()}

    def placement(parameter: nn.Parameter) -> Any:
        if id(parameter) not in of_experts:
            return None
        return ShardPlacementResult(even_shard(parameter, num_shards), info)

    return placement
