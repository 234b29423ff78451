"""The launcher's line, and what of a plan no engine's configuration holds."""

from __future__ import annotations

from ..schema.plan import Plan


def devices_per_node(plan: Plan) -> int:
    """Of the cluster's nodes, where all are equal; of the largest ones otherwise."""
    return max(group.devices_per_node for group in plan.cluster.groups)


def num_nodes(plan: Plan) -> int:
    """All nodes."""
    return sum(group.num_nodes for group in plan.cluster.groups)


def torchrun(plan: Plan) -> str:
    """The beginning of the line that starts the ranks of one node."""
    nodes = num_nodes(plan)
    where = ' --rdzv-backend c10d --rdzv-endpoint "${RDZV_ENDPOINT:?host:port of the first node}"' if nodes > 1 else ""
    return f"torchrun --nnodes {nodes} --nproc-per-node {devices_per_node(plan)}{where}"


def placement_not_expressed(plan: Plan) -> tuple[str, ...]:
    """Where ranks and experts lie, unless it is where every engine puts them."""
    lines = []
    if plan.rank_map != tuple(range(len(plan.rank_map))):
        lines.append(
            "rank_map: the plan runs its ranks on the devices "
            + ", ".join(map(str, plan.rank_map[:8]))
            + (", ..." if len(plan.rank_map) > 8 else "")
            + "; start the nodes in the order that puts them there"
        )
    if plan.expert_slots:
        lines.append("expert_slots: experts stand once and in order; `meshwright experts` says where they should be")
    return tuple(lines)


def stages_not_expressed(plan: Plan, blocks: list[int]) -> tuple[str, ...]:
    """The blocks of each stage, for engines whose model code cuts the pipeline."""
    return (f"stages: blocks of each stage {blocks}: say so where the training script cuts the model",)


def reduction_not_expressed(plan: Plan) -> tuple[str, ...]:
    """FSDP2 has no stage 1 of its own outside a pipeline."""
    if plan.layout.zero_stage != 1 or plan.layout.pp > 1 or plan.num_microbatches == 1:
        return ()
    return ("zero_stage=1: gradients are reduced and sharded in every micro-batch, as under stage 2",)
