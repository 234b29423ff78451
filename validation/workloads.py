"""A row's workload: batch, precision, optimizer and kernels, as stated or as its framework does unless told otherwise."""

from __future__ import annotations

import re

from ..schema import Layout, ModelSpec, Workload
from ..schema.task import Fusion, Gradients, Optimizer
from .defaults import (
    COMPILED,
    DROPOUT,
    ENGINE,
    FLASH_GENERATION,
    FP8_ACTIVATION_INPUT,
    FUSION,
    GRADIENTS,
    OVERLAP,
    PACKED_DOCUMENT,
    PRECISION,
    PRECISIONS,
    TP_OVERLAP,
    UNFUSED_ATTENTION,
    Assumed,
    default_of,
)
from .features import adapters_of, base_precision, is_pure_bf16
from .rows import RunRow


def workload_of(row: RunRow, model: ModelSpec, layout: Layout, assumed: Assumed, *, has_bf16: bool) -> Workload:
    """The workload of a row.

    Args:
        row: the measured run.
        model: tells whether its time had fused attention.
        layout: says how many sequences one pass takes, where the row states no batch.
        assumed: collects what the row does not state.
        has_bf16: the device has bf16 units.

    Raises:
        ConfigError: sizes contradict one another.
    """
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
        overlap=default_of(row.framework, OVERLAP) and "overlap disabled" not in row.notes.lower(),
        tp_overlap=layout.sequence_parallel and default_of(row.framework, TP_OVERLAP),
        selective="alternate_products" if _is_per_operator(row) else "products",
        dropout=default_of(row.framework, DROPOUT),
        fusion=_fusion(row),
        fp8_activation_input=default_of(
            f"{row.framework}: {'adapters' if found else 'all'}, cp {layout.cp}", FP8_ACTIVATION_INPUT
        ),
        attention="math" if keeps_scores(row, model) else "flash",
    )


def keeps_scores(row: RunRow, model: ModelSpec) -> bool:
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


def _fusion(row: RunRow) -> Fusion:
    """Whether the run was compiled: as its notes say; torchtitan's quantised linears are cast by compiled kernels.

    torchtitan's pages on quantised training compile every run of their tables, those in bf16 too (components/quantization).
    """
    quantised = row.precision_class in ("fp8", "mxfp8", "nvfp4") or "components/quantization" in row.source
    stated = re.search(r"\bcompile\b", row.notes)
    choice: Fusion = default_of(row.framework, FUSION)
    if (row.framework.startswith("torchtitan") and quantised) or (
        stated and not re.search(r"\bNo torch\.compile", row.notes)
    ):
        choice = default_of(f"{row.framework}: {row.source}", COMPILED)
    return choice
