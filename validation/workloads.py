"""A row's workload: batch, precision, optimizer, adapters and kernels, as stated or as its framework does by default."""

from __future__ import annotations

import re

from ..schema import Layout, ModelSpec, Workload
from ..schema.task import Fusion, Gradients, LowRank, Optimizer, Precision
from .rows import FrameworkDefaults, RunRow

PRECISIONS: dict[str, Precision] = {
    "bf16": "bf16-mixed", "fp16": "fp16-mixed", "fp8": "fp8", "mxfp8": "fp8", "fp32": "fp32", "nvfp4": "nvfp4",
}  # fmt: skip

_SPELLINGS = {
    "mxfp4": "nvfp4",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "tf32": "fp32",
    "float32": "fp32",
}

_PREFIX_TUNING = LowRank(rank=1, targets=("qkv", "out", "mlp"), dropout=False)
"""Prefix vectors, or a scale and a bias on every product: a rank-1 adapter has as many parameters and kernels."""


def workload_of(
    row: RunRow, model: ModelSpec, layout: Layout, defaults: FrameworkDefaults, *, has_bf16: bool
) -> Workload:
    """Return the workload of a row.

    Args:
        row: the measured run.
        model: tells whether its time had fused attention.
        layout: says how many sequences one pass takes, where the row states no batch.
        defaults: the framework's choices; records those that the row does not state.
        has_bf16: the device has bf16 units.

    Raises:
        ConfigError: sizes contradict one another.
    """
    batch = row.global_batch
    if batch is None:
        batch = layout.dp * layout.micro_batch_size * (row.grad_accum or 1)
        defaults.assumed.append("global_batch=one pass")
    precision = base_precision(row)
    if precision in ("", "unknown"):
        precision = defaults.assume("precision")
        if precision == "bf16" and not has_bf16:
            precision = "fp16"
    adapters = adapters_of(row, defaults)
    trained = "adapters" if adapters else "all"
    # Parameters, gradients and states without fp32 copies.
    is_pure_bf16 = re.search(r"bf16-true|pure.?bf16", row.precision.lower()) or "PURE" in row.sharding
    # torchtitan's selective_ac_option = "op", which its model configurations set: every second product is repeated.
    is_per_operator = row.framework.startswith("torchtitan") and "layer" not in row.recompute
    return Workload(
        seq_len=row.seq_len or 1,
        global_batch_size=batch,
        precision="bf16" if precision == "bf16" and is_pure_bf16 else PRECISIONS[precision],
        optimizer=_optimizer(row),
        document_len=defaults.value("packed_document") if row.task in ("sft", "lora") else None,
        adapters=adapters,
        engine=defaults.value("engine"),
        flash_generation=defaults.value("flash_generation"),
        gradients=_gradients(row, precision, defaults),
        overlap=defaults.value("overlap") and "overlap disabled" not in row.notes.lower(),
        tp_overlap=layout.sequence_parallel and defaults.value("tp_overlap"),
        selective="alternate_products" if is_per_operator else "products",
        dropout=defaults.value("dropout"),
        fusion=_fusion(row, defaults),
        fp8_activation_input=defaults.value("fp8_activation_input", f": {trained}, cp {layout.cp}"),
        attention="math" if keeps_scores(row, model, defaults) else "flash",
    )


def base_precision(row: RunRow) -> str:
    """Return the class of the precision that products run in: of a quantised frozen model, what it is dequantised to."""
    name = row.precision_class.lower()
    if re.search(r"nf4|int4|int8|bit", name):
        return "fp16" if "fp16" in row.precision.lower() else "bf16"
    if name in ("", "unknown"):
        return name
    known = re.search(r"nvfp4|mxfp4|mxfp8|fp8|bf16|bfloat16|fp16|float16|half|tf32|fp32|float32", name)
    if known:
        return _SPELLINGS.get(known[0], known[0])
    return "unknown" if "lora" in name else name


def adapters_of(row: RunRow, defaults: FrameworkDefaults) -> LowRank | None:
    """Return the adapters that a row trains next to a frozen model, recorded as assumed; None where all parameters are trained."""
    words = " ".join((row.task, row.sharding_class, row.precision_class, row.precision, row.optimizer)).lower()
    if not re.search(r"lora|adapter|peft|prefix", words):
        return None
    is_prefix = re.search(r"adapter|prefix", row.task.lower())
    adapters = _PREFIX_TUNING if is_prefix else LowRank(**defaults.value("adapters"))
    stored = f"{row.precision} {row.precision_class} {row.task}".lower()
    if re.search(r"nf4|int4|4.?bit|qlora", stored):
        adapters = adapters.replace(frozen="nf4")
    elif re.search(r"int8|8.?bit", stored) or row.precision_class in ("fp8", "mxfp8", "nvfp4"):
        adapters = adapters.replace(frozen="8-bit")
    defaults.assumed.append(f"adapters=rank {adapters.rank} on {'+'.join(adapters.targets)}")
    return adapters


def keeps_scores(row: RunRow, model: ModelSpec, defaults: FrameworkDefaults) -> bool:
    """Return whether attention ran without a fused kernel: as the row says, else on Volta and in engines of its time."""
    if stated := re.search(r"flash_attn=(true|false)", row.notes.lower()):
        return stated[1] == "false"
    # Gated feed-forward layers came after FlashAttention, and the scripts for such models turn it on where it runs.
    is_recent = model.block_runs[-1][0].norm == "rmsnorm"
    unfused = bool(defaults.value("unfused_attention")) and not is_recent
    return unfused or row.gpu_type.startswith("V100")


def _gradients(row: RunRow, precision: str, defaults: FrameworkDefaults) -> Gradients:
    if re.search(r"fp32 (main )?grad", row.precision.lower()):
        return "fp32"
    if precision == "fp16":
        return "compute"  # Megatron-LM turns accumulate_allreduce_grads_in_fp32 on for bf16 only
    choice: Gradients = defaults.value("gradients")
    return choice


def _optimizer(row: RunRow) -> Optimizer:
    """AdamW unless another one is named that is modelled."""
    name = row.optimizer.lower()
    return "muon" if "muon" in name else "sgd" if re.match(r"sgd\b", name) else "adamw"


def _fusion(row: RunRow, defaults: FrameworkDefaults) -> Fusion:
    """Return whether the run was compiled: as its notes say; torchtitan's quantised linears are cast by compiled kernels.

    torchtitan's pages on quantised training compile every run of their tables, those in bf16 too (components/quantization).
    """
    is_quantised = row.precision_class in ("fp8", "mxfp8", "nvfp4") or "components/quantization" in row.source
    is_stated = re.search(r"\bcompile\b", row.notes) and not re.search(r"\bNo torch\.compile", row.notes)
    is_compiled = is_stated or (row.framework.startswith("torchtitan") and is_quantised)
    choice: Fusion = defaults.value("compiled", f": {row.source}") if is_compiled else defaults.value("fusion")
    return choice
