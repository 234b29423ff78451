"""Stages of a pipeline with a tensor-parallel degree each: the layout as one stage has it, and which degrees go together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from .layout import Layout


def layout_with_tp(layout: Layout, tp: int) -> Layout:
    """Return a layout with tp ranks a layer, as many ranks and passes: other data-parallel ranks with other micro-batches."""
    if tp == layout.tp:
        return layout
    axis = "dp_replicate" if layout.dp_replicate > 1 else "dp_shard"
    dp = getattr(layout, axis) * layout.tp // tp
    degrees = {"tp": tp, axis: dp, "micro_batch_size": layout.micro_batch_size * tp // layout.tp}
    zero_stage = max(layout.zero_stage, 1) if axis == "dp_shard" and dp > 1 else 0
    return layout.replace(**degrees, zero_stage=zero_stage, sequence_parallel=tp > 1)


def why_not_by_stage(layout: Layout, degrees: Sequence[int], *, global_batch_size: int, is_tied: bool) -> str:
    """Return why stages cannot have these degrees, the layout that of the smallest one; empty where they can."""
    dp, sizes = max(layout.dp_shard, layout.dp_replicate), f"tp {', '.join(map(str, degrees))} of the stages"
    one_kind = min(layout.dp_shard, layout.dp_replicate) == 1 and (layout.tp == 1 or layout.sequence_parallel)
    is_plain = layout.cp == layout.ep == layout.etp == layout.num_model_chunks == 1 and layout.offload == "none"
    if not (one_kind and is_plain):
        return f"{sizes}: they go with one kind of data parallelism, sequence_parallel and one stage a rank, nothing offloaded"
    if any(tp % layout.tp or dp % (tp // layout.tp) for tp in degrees):
        return f"{sizes}: multiples of tp {layout.tp} by divisors of its {dp} data-parallel ranks"
    if any(max(pair) % min(pair) for pair in itertools.pairwise(degrees)):
        return f"{sizes}: of two in a row one divides the other"
    if is_tied and degrees[0] != degrees[-1]:
        return f"{sizes}: the first and the last share a tied embedding and split it alike"
    if global_batch_size % (layout.dp * layout.micro_batch_size):
        return f"{sizes}: the batch of {global_batch_size} does not divide over {layout.dp} x {layout.micro_batch_size}"
    return ""
