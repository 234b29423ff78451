"""Bytes of a rank's collectives in a step of our runtime, by axis and kind: what a rehearsal counts, by formula.

Of whole tensors: what an all-gather puts out, what a reduction or an exchange reads. With P parameters of the rank's layers (per tp
rank), those of experts with axes of their own apart, b bytes of the compute dtype, m passes over T tokens of width D, L blocks:

    dp_shard      all-gather of b P: once a step under zero 1, once a pass under zero 2; under zero 3 twice a pass, but for the head
                  (once); reduce-scatter of 4 P once a step below zero 2 or under a pipeline, else once a pass
    dp_replicate  all-reduce of 4 P / shards as often
    tp            each block forward 2 all-gathers and 2 reduce-scatters of b T D, and as many backward; embedding and head one of
                  each a pass; without sequence parallelism an all-reduce for both
    pp            hidden states to and from each neighbour, gradients the other way; once a step the gradient of a tied embedding
    ep            rows to their experts and back, forward and backward: 4 of b T k D, each rank's own

Recomputed passes, latent attention, rings, and sums of a few numbers a token have no formula here.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...schema.layers import Block, Embedding, Head, LatentAttention
from ...schema.layout_table import LayoutTable
from ...schema.training_plan import TrainingPlan
from ..layer.memory import tp_params
from ..layer.parallel import expert_params


def collective_bytes(plan: TrainingPlan, stages: Sequence[int]) -> dict[tuple[str, str], float]:
    """Return the bytes by (axis, operator) of a rank that holds these stages; nothing where there is no formula."""
    layout, workload = plan.layout, plan.workload
    if plan.degrees_by_stage or workload.adapters is not None or plan.offload is not None or not workload.has_backward:
        return {}
    layers, b = list(plan.staged_model.iter_layers()), float(workload.compute_bytes)
    idxs = [idx for stage in stages for idx in plan.stages[stage].layer_idxs]
    members, is_piped = [layers[idx] for idx in idxs], layout.pp > 1
    table = LayoutTable.from_layouts([layout], workload.global_batch_size)
    width = plan.model.hidden_dim
    params = [float(tp_params(layer, width, table)[0]) for layer in members]
    has_axes = not layout.experts_follow_tp
    routed = [float(expert_params(layer, width, table)[0]) if has_axes else 0.0 for layer in members]
    dense = [all_of_them - part for all_of_them, part in zip(params, routed, strict=True)]
    passes = plan.num_microbatches
    sent: dict[tuple[str, str], float] = {}

    def add(axis: str, op: str, size: float) -> None:
        if size:
            sent[axis, op] = sent.get((axis, op), 0.0) + size

    is_plain = workload.is_full_precision and layout.world_size == layout.dp_replicate > 1
    reductions = 1 if layout.zero_stage < 2 or is_piped else passes
    tied_ends = plan.model.tie_embeddings and not is_piped
    for axes, sizes, shards, replicas in (
        (("dp_shard", "dp_replicate"), dense, int(layout.num_shards), int(layout.num_replicas)),
        (("expert_shard", "expert_replicate"), routed, int(layout.expert_shards), int(layout.expert_replicas)),
    ):
        for layer, size in zip(members, sizes, strict=True):
            again = layout.zero_stage == 3 and (tied_ends or not isinstance(layer, Head))
            gathers = 1 if layout.zero_stage < 2 or is_piped else passes * (1 + again)
            if shards > 1:
                add(axes[0], "all_gather", gathers * b * size)
                add(axes[0], "reduce_scatter", reductions * 4.0 * size)
            if replicas > 1:
                add(axes[1], "all_reduce", (1 if is_plain else reductions) * 4.0 * size / shards)
    ends_here = sum(isinstance(layer, Embedding | Head) for layer in members)
    tokens = layout.micro_batch_size * workload.seq_len / layout.cp
    hidden = b * tokens * width
    blocks = [layer for layer in members if isinstance(layer, Block)]
    is_usual = all(plan.stages[s].recompute_of(i) == "none" for s in stages for i in plan.stages[s].layer_idxs)
    is_usual &= not any(isinstance(block.attention, LatentAttention) for block in blocks)
    if layout.tp > 1 and is_usual and not any(block.experts for block in blocks):
        parts = 1 if plan.layout.half_blocks else 2
        for op in ("all_gather", "reduce_scatter") if layout.sequence_parallel else ("all_reduce",):
            add("tp", op, passes * hidden * (2 * parts * len(blocks) + ends_here))
    if layout.ep > 1 and is_usual:
        share = tokens / layout.tp * layout.expert_tp
        rows = sum(block.experts.top_k for block in blocks if block.experts is not None) * share
        add("ep", "all_to_all", passes * 4 * b * rows * width)
    if plan.model.tie_embeddings and is_piped and ends_here == 1:
        add("pp", "all_reduce", 4.0 * plan.model.vocab_size * width / layout.tp / int(layout.num_shards))
    if is_piped:
        boundary = hidden / (layout.tp if layout.sequence_parallel else 1)
        neighbours = sum((stage > 0) + (stage + 1 < len(plan.stages)) for stage in stages)
        for op in ("send", "recv"):
            add("pp", op, passes * boundary * neighbours)
    return sent
