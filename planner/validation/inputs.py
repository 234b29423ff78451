"""A row as our nouns: model, cluster, workload, layout; or why not.

Other engines' runs need not satisfy schema/rules.py, which is about what our own runtime executes. Where a row does not
state a choice, a default of its framework is assumed (one table per choice, each with its reason). Where the cost model
lacks a feature, the nearest layout it has stands in and the row names the approximation (APPROXIMATE), or the row is
skipped (SKIP).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...schema import ClusterSpec, ConfigError, Layout, ModelSpec, Workload
from ...schema.layout import Recompute
from ...schema.model import LatentAttention
from ...schema.workload import Gradients, Optimizer
from .defaults import (
    BALANCED_STAGES,
    DROPOUT,
    ENGINE,
    EXPERTS_FOLLOW_TP,
    FLASH_GENERATION,
    FP8_ACTIVATION_INPUT,
    FUSION,
    GRADIENTS,
    OVERLAP,
    PACKED_DOCUMENT,
    PRECISION,
    PRECISIONS,
    RECOMPUTE,
    SEQUENCE_PARALLEL,
    SHARDING,
    UNFUSED_ATTENTION,
    Default,
    default_of,
)
from .features import (
    DRIVE_BYTES_PER_S,
    adapters_of,
    base_precision,
    differs_by_stage,
    is_pure_bf16,
    num_chunks,
    offload_of,
    recompute_part,
    stage_cuts,
    stage_parts,
)
from .machines import cluster_of, with_drives
from .mapping import completed_mapping
from .models import model_of
from .rows import RunRow

SKIP: tuple[tuple[str, Callable[[RunRow], bool]], ...] = (
    ("mapping: stages have different numbers of devices", differs_by_stage),
    ("precision not known", lambda r: base_precision(r) not in ("", "unknown", *PRECISIONS)),
    ("mapping: sequence length not stated", lambda r: r.seq_len is None),
)
"""Reason and condition; a feature that the cost model learns loses its line here (and gains one in `_layout`)."""

APPROXIMATE: tuple[tuple[str, Callable[[RunRow], bool]], ...] = (
    ("adapter", lambda r: r.task.startswith(("adapter", "finetune-peft"))),  # prefix or scales as an adapter of rank 1
    (
        "schedule",
        lambda r: not r.vpp.isdigit() and num_chunks(r) > 1,
    ),  # a zero-bubble schedule as two interleaved chunks
    ("recompute by operator", lambda r: r.recompute_class == "custom"),  # as the same part of the blocks
    ("mxfp4", lambda r: "mxfp4" in r.precision_class.lower()),  # as nvfp4
    ("mxfp8", lambda r: r.precision_class == "mxfp8"),  # the rate of fp8
)
"""Name and condition of what stands in for something else."""


@dataclass(frozen=True)
class Skip:
    """Why a row cannot be predicted."""

    reason: str


@dataclass(frozen=True)
class RunInputs:
    """A row as nouns.

    Attributes:
        balanced_stages: stages are cut by cost; otherwise every stage has the same number of blocks.
        stage_cuts: where stages begin and end, as far as the row says it.
        stage_layouts: where stages recompute or offload different parts, the layout of each; `layout` has their mean.
        assumed: choices the row does not state, as "name=value".
        approximated: features that something nearby stands in for.
    """

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    layout: Layout
    balanced_stages: bool
    stage_cuts: tuple[int, ...] = ()
    stage_layouts: tuple[Layout, ...] = ()
    assumed: tuple[str, ...] = ()
    approximated: tuple[str, ...] = ()


@dataclass
class _Assumed:
    """Looks defaults up and remembers which were taken."""

    framework: str
    taken: list[str] = field(default_factory=list)

    def default(self, name: str, table: tuple[Default, ...], detail: str = "") -> Any:
        choice = default_of(self.framework + detail, table)
        self.taken.append(f"{name}={choice}")
        return choice


def run_inputs(row: RunRow) -> RunInputs | Skip:
    """What the estimator needs for a row, or why it cannot have it."""
    reason = next((reason for reason, applies in SKIP if applies(row)), None)
    if reason is not None:
        return Skip(reason)
    completed = completed_mapping(row)
    if isinstance(completed, str):
        return Skip(completed)
    row, derived = completed
    model, cluster = model_of(row), cluster_of(row)
    if isinstance(model, str):
        return Skip(model)
    if isinstance(cluster, str):
        return Skip(cluster)
    assumed = _Assumed(row.framework, [*model.assumed, *derived])
    try:
        layout = _layout(row, model.spec, assumed)
        has_bf16 = cluster.spec.weakest_device.peak_flops_per_s.bf16 is not None
        workload = _workload(row, model.spec, layout, assumed, has_bf16=has_bf16)
        layout.num_microbatches(workload.global_batch_size)
    except ConfigError as error:
        return Skip(
            "layout: batch does not divide" if "multiple of dp" in error.message else f"layout: {error.message}"
        )
    if layout.world_size != cluster.spec.num_devices:
        return Skip("layout: degrees do not multiply to the number of devices")
    if layout.stage_ranks % (layout.ep * layout.expert_tp):
        return Skip("layout: experts do not divide over the ranks of a stage")
    approximated = tuple(name for name, applies in APPROXIMATE if applies(row))
    return RunInputs(
        model=model.spec,
        cluster=_with_storage(cluster.spec, row),
        workload=workload,
        layout=layout,
        balanced_stages=default_of(row.framework, BALANCED_STAGES) or row.recompute_class == "custom",
        stage_cuts=stage_cuts(row),
        stage_layouts=_stage_layouts(row, layout),
        assumed=tuple(assumed.taken),
        approximated=(*model.approximated, *cluster.approximated, *approximated),
    )


def _layout(row: RunRow, model: ModelSpec, assumed: _Assumed) -> Layout:
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


def _recompute_fields(row: RunRow, model: ModelSpec, assumed: _Assumed) -> dict[str, Any]:
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


def _stage_layouts(row: RunRow, layout: Layout) -> tuple[Layout, ...]:
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


def _with_storage(cluster: ClusterSpec, row: RunRow) -> ClusterSpec:
    drives = offload_of(row).num_drives
    return with_drives(cluster, drives * DRIVE_BYTES_PER_S) if drives else cluster


def _zero_stage(row: RunRow, assumed: _Assumed) -> Any:
    name = row.sharding_class
    if name == "lora":
        return 0  # the frozen model is whole on every rank
    if name not in ("none", "zero1", "zero2", "zero3", "hybrid"):
        name = assumed.default("sharding", SHARDING)
    if name == "hybrid":
        return 1 if "zero-1" in row.sharding.lower() else 3
    return {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3}[name]


def _expert_tp(row: RunRow, stage_ranks: int, assumed: _Assumed) -> int:
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


def _sequence_parallel(row: RunRow, assumed: _Assumed) -> bool:
    if row.seq_parallel in ("yes", "no"):
        return row.seq_parallel == "yes"
    return bool(assumed.default("sequence_parallel", SEQUENCE_PARALLEL))


def _recompute(row: RunRow, model: ModelSpec, assumed: _Assumed) -> Recompute:
    choice: Recompute
    if row.recompute_class not in ("none", "selective", "full"):
        latent = ": latent" if isinstance(model.block_runs[-1][0].attention, LatentAttention) else ""
        choice = assumed.default("recompute", RECOMPUTE, f": {row.sharding}{latent}")
        return choice
    # Megatron's "selective" drops the attention scores only, which fused attention never keeps (arXiv:2205.05198 section 5).
    if _keeps_scores(row, model) and row.recompute_class == "selective":
        return "selective"
    is_scores_only = re.match("Megatron|NeMo", row.framework) and "+" not in row.recompute and "(l" not in row.recompute
    if row.recompute_class == "selective" and is_scores_only and ":m" not in row.recompute:
        return "none"
    if row.recompute_class == "selective" and row.framework.startswith("fms-fsdp"):
        return "full"  # selective_checkpointing there is the part of the blocks that run again as a whole; 1 unless told otherwise
    choice = row.recompute_class  # type: ignore[assignment]
    return choice


def _workload(row: RunRow, model: ModelSpec, layout: Layout, assumed: _Assumed, *, has_bf16: bool) -> Workload:
    batch = row.global_batch
    if batch is None:
        batch = layout.dp * layout.micro_batch_size * (row.grad_accum or 1)
        assumed.taken.append("global_batch=one pass")
    precision = base_precision(row)
    if precision in ("", "unknown"):
        precision = assumed.default("precision", PRECISION)
        if precision == "bf16" and not has_bf16:
            precision = "fp16"  # the device has no bf16 units
    found = adapters_of(row)
    assumed.taken.extend(found[1] if found else ())
    return Workload(
        seq_len=row.seq_len or 1,
        global_batch_size=batch,
        precision="bf16" if precision == "bf16" and is_pure_bf16(row) else PRECISIONS[precision],
        optimizer=_optimizer(row),
        document_len=default_of(row.framework, PACKED_DOCUMENT) if row.task in ("sft", "lora") else None,
        adapters=found[0] if found else None,
        engine=default_of(row.framework, ENGINE),
        flash_generation=default_of(row.framework, FLASH_GENERATION),
        gradients=_gradients(row, precision),
        overlap=default_of(row.framework, OVERLAP),
        selective="alternate_products" if _is_per_operator(row) else "products",
        dropout=default_of(row.framework, DROPOUT),
        fusion=_fusion(row),
        fp8_activation_input=default_of(
            f"{row.framework}: {'adapters' if found else 'all'}, cp {layout.cp}", FP8_ACTIVATION_INPUT
        ),
        attention="math" if _keeps_scores(row, model) else "flash",
    )


def _keeps_scores(row: RunRow, model: ModelSpec) -> bool:
    """Whether attention ran without a fused kernel: as the row says, else none for Volta and none in engines of its time."""
    if stated := re.search(r"flash_attn=(true|false)", row.notes.lower()):
        return stated[1] == "false"
    # Gated feed-forward layers came after FlashAttention, and the scripts for such models turn it on where it runs.
    is_recent = model.block_runs[-1][0].norm == "rmsnorm"
    unfused = bool(default_of(row.framework, UNFUSED_ATTENTION)) and not is_recent
    return unfused or row.gpu_type.startswith("V100")


def _is_per_operator(row: RunRow) -> bool:
    """Torchtitan's selective_ac_option = "op", which its model configurations set: every second product is repeated."""
    return row.framework.startswith("torchtitan") and "layer" not in row.recompute


def _gradients(row: RunRow, precision: str) -> Gradients:
    if re.search(r"fp32 (main )?grad", row.precision.lower()):
        return "fp32"
    if precision == "fp16":
        return "compute"  # Megatron-LM turns accumulate_allreduce_grads_in_fp32 on for bf16 only
    choice: Gradients = default_of(row.framework, GRADIENTS)
    return choice


def _optimizer(row: RunRow) -> Optimizer:
    """AdamW unless another one is named that is modelled."""
    name = row.optimizer.lower()
    return "muon" if "muon" in name else "sgd" if re.match(r"sgd\b", name) else "adamw"


def _fusion(row: RunRow) -> Any:
    """Whether the run was compiled: as its notes say; torchtitan's quantised linears are cast by compiled kernels."""
    quantised = row.framework.startswith("torchtitan") and row.precision_class in ("fp8", "mxfp8", "nvfp4")
    stated = re.search(r"\bcompile\b", row.notes)
    if quantised or (stated and not re.search(r"\bNo torch\.compile", row.notes)):
        return "compiled"
    return default_of(row.framework, FUSION)
