"""A row's layout: degrees, sharding, recompute and offloading, as stated or as its framework does unless told otherwise."""

from __future__ import annotations

import re
from typing import Any

from ..schema import Layout, ModelSpec
from ..schema.layers import LatentAttention
from ..schema.layout import Recompute
from .defaults import EXPERTS_FOLLOW_TP, RECOMPUTE, SEQUENCE_PARALLEL, SHARDING, Assumed
from .features import num_chunks, offload_of, recompute_part, stage_parts
from .rows import RunRow
from .workloads import keeps_scores


def layout_of(row: RunRow, model: ModelSpec, assumed: Assumed) -> Layout:
    """The layout of a row; where stages differ, their mean.

    Raises:
        ConfigError: the degrees contradict one another.
    """
    tp, pp, cp = row.tp or 1, row.pp or 1, row.cp or 1
    dp = row.dp or max((row.n_gpus or 1) // (tp * pp * cp), 1)
    stage = _zero_stage(row, assumed)
    group = _sharding_group(row, dp, cp) if stage else 1
    return Layout(
        dp_replicate=dp // group,
        dp_shard=group,
        cp=cp,
        tp=tp,
        pp=pp,
        ep=row.ep or 1,
        etp=_expert_tp(row, dp * cp * tp, assumed),
        num_model_chunks=num_chunks(row) if pp > 1 else 1,
        micro_batch_size=row.micro_batch or 1,
        zero_stage=stage if group * cp > 1 else 0,
        sequence_parallel=tp > 1 and _sequence_parallel(row, assumed),
        **_recompute_fields(row, model, assumed),
        **_offload_fields(row, stage if group > 1 else 0),
    )


def _recompute_fields(row: RunRow, model: ModelSpec, assumed: Assumed) -> dict[str, Any]:
    """Which recompute, and of which part of the blocks."""
    part = recompute_part(row) if row.recompute_class not in ("none", "unknown", "") else None
    if row.recompute_class == "custom":
        choice: Recompute = "none" if part == 0 else _by_part(row, part or 1.0)[0]
        part = part and _by_part(row, part)[1]
    else:
        choice = _recompute(row, model, assumed)
    if row.recompute_class == "selective" and part is not None:
        choice = "full"  # some whole layers
    return {"recompute": choice, "recompute_fraction": part if part and choice != "none" else 1.0}


def _by_part(row: RunRow, part: float) -> tuple[Recompute, float]:
    """Which recompute stands for a part of a stage: of its blocks, or under Aceso of its operators.

    Aceso recomputes those first that keep most for their seconds: scores, softmax and dropout of unfused attention, 3 of the 13
    operators of a block (its model_ops.py).
    """
    if not row.framework.startswith("Aceso"):
        return "full", part
    core = 3 / 13
    return ("selective", min(part / core, 1.0)) if part < (1 + core) / 2 else ("full", part)


def stage_layouts(row: RunRow, layout: Layout) -> tuple[Layout, ...]:
    """Where stages recompute or offload different parts, the layout of each; otherwise none."""
    parts, states = stage_parts(row)
    if layout.pp == 1 or max(len(parts), len(states)) != layout.pp:
        return ()
    changes: list[dict[str, Any]] = [{} for _ in range(layout.pp)]
    for change, part in zip(changes, parts, strict=False):
        choice, fraction = _by_part(row, part) if part else ("none", 1.0)
        change |= {"recompute": choice, "recompute_fraction": fraction}
    for change, part in zip(changes, states, strict=False):
        change |= {"offload": "optimizer" if part else "none", "offload_fraction": part or 1.0}
    return tuple(layout.replace(**change) for change in changes)


def _offload_fields(row: RunRow, zero_stage: int) -> dict[str, Any]:
    choice = offload_of(row)
    away = choice.offload
    if away == "parameters" and zero_stage in (1, 2):
        away = "optimizer"  # whole parameters are not offloaded
    return {
        "offload": away,
        "offload_fraction": choice.offload_fraction,
        "offload_activations": choice.offload_activations,
        "offload_to": "storage" if choice.num_drives else "host",
    }


def _zero_stage(row: RunRow, assumed: Assumed) -> Any:
    name = row.sharding_class
    if name == "lora":
        return 0  # the frozen model is whole on every rank
    if name not in ("none", "zero1", "zero2", "zero3", "hybrid"):
        name = assumed.default("sharding", SHARDING)
    if name == "hybrid":
        return 1 if "zero-1" in row.sharding.lower() else 3
    return {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3}[name]


def _expert_tp(row: RunRow, stage_ranks: int, assumed: Assumed) -> int:
    """Ranks that share one expert: as stated, else the framework's choice where the ranks of a stage allow it."""
    ep, tp = row.ep or 1, row.tp or 1
    if row.etp is not None or ep == 1 or tp == 1:
        return row.etp or 1
    follow = assumed.default("experts_follow_tp", EXPERTS_FOLLOW_TP) and stage_ranks % (ep * tp) == 0
    return tp if follow else 1


def _sharding_group(row: RunRow, dp: int, cp: int) -> int:
    """Data-parallel ranks over which states are sharded: as printed where the table does, a node for hybrid sharding, else all.

    A printed size counts the context ranks, which share in the sharding.
    """
    match = re.search(r"(?:over|group(?: of)?|degree) (\d+)", row.sharding)
    wanted = int(match[1]) if match else dp
    if not match and row.sharding_class == "hybrid":
        wanted = row.gpus_per_node or 8
    wanted = max(wanted // cp, 1) if match else wanted
    return wanted if wanted < dp and dp % wanted == 0 else dp


def _sequence_parallel(row: RunRow, assumed: Assumed) -> bool:
    if row.seq_parallel in ("yes", "no"):
        return row.seq_parallel == "yes"
    return bool(assumed.default("sequence_parallel", SEQUENCE_PARALLEL))


def _recompute(row: RunRow, model: ModelSpec, assumed: Assumed) -> Recompute:
    choice: Recompute
    if row.recompute_class not in ("none", "selective", "full"):
        latent = ": latent" if isinstance(model.block_runs[-1][0].attention, LatentAttention) else ""
        choice = assumed.default("recompute", RECOMPUTE, f": {row.sharding}{latent}")
        return choice
    # Megatron's "selective" drops the attention scores only, which fused attention never keeps (arXiv:2205.05198 section 5).
    if keeps_scores(row, model) and row.recompute_class == "selective":
        return "selective"
    is_scores_only = re.match("Megatron|NeMo", row.framework) and "+" not in row.recompute and "(l" not in row.recompute
    if row.recompute_class == "selective" and is_scores_only and ":m" not in row.recompute:
        return "none"
    if row.recompute_class == "selective" and row.framework.startswith("fms-fsdp"):
        return "full"  # selective_checkpointing there is the part of the blocks that run again as a whole; 1 unless told otherwise
    choice = row.recompute_class  # type: ignore[assignment]
    return choice
