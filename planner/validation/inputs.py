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
from typing import Any, NamedTuple

from ...schema import ClusterSpec, ConfigError, Layout, ModelSpec, Workload
from ...schema.layout import Recompute
from ...schema.workload import Precision
from .machines import cluster_of
from .models import model_of
from .rows import RunRow


class Default(NamedTuple):
    """What a framework does where nobody says otherwise, and why that is known."""

    frameworks: str
    choice: Any
    why: str


RECOMPUTE: tuple[Default, ...] = (
    Default("torchtitan", "selective", "activation_checkpoint.mode defaults to selective"),
    Default("MaxText", "full", "remat_policy: full in base.yml"),
    Default("Pax|PAX", "full", "checkpoint_policy SAVE_NOTHING of the GPT configs"),
    Default("Megatron|NeMo|Primus|Pai|FlagScale", "none", "recompute_granularity is None unless set"),
    Default("nanotron", "none", "recompute_layer: false"),
    Default("", "none", "autograd keeps what it needs unless told otherwise"),
)
SHARDING: tuple[Default, ...] = (
    Default("Megatron-Bridge|Megatron-Core|NeMo", "zero1", "the recipes turn the distributed optimizer on"),
    Default("torchtitan|llm-foundry|fms-fsdp|.*FSDP", "zero3", "FSDP shards everything unless told otherwise"),
    Default("", "none", "plain data parallelism keeps everything whole"),
)
SEQUENCE_PARALLEL: tuple[Default, ...] = (
    Default("Megatron-Bridge|Megatron-Core|NeMo|Pai|Primus|FlagScale", True, "the recipes turn it on with tp"),
    Default("nanotron", True, "tp_mode REDUCE_SCATTER in scripts/scaling_benchmarks.py"),
    Default("torchtitan", True, "its tensor-parallel plans shard the sequence"),
    Default("", False, "all-reduce, as Megatron-LM did first"),
)
PRECISION: tuple[Default, ...] = (
    Default("Megatron-DeepSpeed|Megatron-LM|LiBai|Aceso", "fp16", "their example scripts pass --fp16"),
    Default("", "bf16", "what current engines train in"),
)
UNFUSED_ATTENTION: tuple[Default, ...] = (
    Default(r"Megatron-LM \((SC21|Jan 2021|MLSys23)", True, "written before FlashAttention"),
    Default("Megatron-DeepSpeed|HF Transformers|LiBai|Aceso", True, "unfused scores unless --use-flash-attn"),
    Default("", False, "fused attention is the default of its time"),
)
FLASH_GENERATION: tuple[Default, ...] = (
    Default("llm-foundry", 1, "scripts/train/benchmarking/submit_benchmarks.py: --attn_impl triton"),
    Default("", 2, "FlashAttention-2 or what the engine has newer"),
)
DROPOUT: tuple[Default, ...] = (
    Default(
        r"Megatron-LM \((SC21|Jan 2021|MLSys23)|Megatron-DeepSpeed$",
        True,
        "hidden_dropout is 0.1 in their arguments.py",
    ),
    Default("", False, "current recipes train without"),
)
FUSION: tuple[Default, ...] = (
    Default("torchtitan", "composite_norm", "compile is off unless set; RMSNorm is one kernel from torch 2.8 on"),
    Default("fms-fsdp", "compiled", "use_torch_compile: true"),
    Default("", "engine", "kernels the engine brings"),
)
BALANCED_STAGES: tuple[Default, ...] = (
    Default("nanotron", True, "blocks are placed by get_block_compute_costs"),
    Default("", False, "layers / pp blocks on every stage, embedding and head on top"),
)

EXPERTS_FOLLOW_TP: tuple[Default, ...] = (
    Default(
        "Megatron-Bridge|Megatron-Core/NeMo", False, "Megatron-Bridge's recipes set expert_tensor_parallel_size = 1"
    ),
    Default(
        "Megatron|NeMo|Pai|Primus|FlagScale",
        True,
        "expert_tensor_parallel_size is tensor_model_parallel_size unless set",
    ),
    Default("", False, "whole experts: expert_tensor_parallel_degree is 1 in torchtitan, others have no such axis"),
)

PRECISIONS: dict[str, Precision] = {
    "bf16": "bf16-mixed", "fp16": "fp16-mixed", "fp8": "fp8", "mxfp8": "fp8", "fp32": "fp32",
}  # fmt: skip

ENGINE: tuple[Default, ...] = (
    Default(
        "torchtitan|llm-foundry|fms-fsdp|.*FSDP|LitGPT", "fsdp2", "torch's fully sharded data parallelism and kernels"
    ),
    Default(".*DeepSpeed|HF Transformers|ColossalAI", "deepspeed", "Python hooks around every module"),
    Default("", "megatron", "Megatron's kernels, Python modules and distributed optimizer, or descended from them"),
)

SKIP: tuple[tuple[str, Callable[[RunRow], bool]], ...] = (
    ("not modelled: LoRA", lambda r: "lora" in (r.task + r.sharding_class + r.precision_class + r.optimizer).lower()),
    ("not modelled: adapters", lambda r: r.task.startswith(("adapter", "finetune-peft"))),
    ("not modelled: offload", lambda r: r.offload not in ("", "none")),
    ("not modelled: recompute that differs by layer", lambda r: r.recompute_class == "custom"),
    ("not modelled: schedule", lambda r: bool(r.vpp) and not r.vpp.isdigit()),
    ("not modelled: optimizer", lambda r: r.optimizer.lower() == "muon"),
    ("precision without a rate", lambda r: r.precision_class not in ("", "unknown", *PRECISIONS)),
    ("mapping not stated", lambda r: r.seq_len is None or r.micro_batch is None or r.tp is None or r.pp is None),
)
"""Reason and condition; a feature that the cost model learns loses its line here (and gains one in `_layout`)."""

APPROXIMATE: tuple[tuple[str, Callable[[RunRow], bool]], ...] = (
    ("pure bf16", lambda r: "PURE" in r.sharding or (r.task.startswith("finetune") and "LitGPT" in r.framework)),
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
        assumed: choices the row does not state, as "name=value".
        approximated: features that something nearby stands in for.
    """

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    layout: Layout
    balanced_stages: bool
    assumed: tuple[str, ...] = ()
    approximated: tuple[str, ...] = ()


@dataclass
class _Assumed:
    """Looks defaults up and remembers which were taken."""

    framework: str
    taken: list[str] = field(default_factory=list)

    def default(self, name: str, table: tuple[Default, ...]) -> Any:
        choice = default_of(self.framework, table)
        self.taken.append(f"{name}={choice}")
        return choice


def default_of(framework: str, table: tuple[Default, ...]) -> Any:
    """The choice of the first line of a table that matches the start of the framework's name."""
    return next(line.choice for line in table if re.match(line.frameworks, framework))


def run_inputs(row: RunRow) -> RunInputs | Skip:
    """What the estimator needs for a row, or why it cannot have it."""
    reason = next((reason for reason, applies in SKIP if applies(row)), None)
    if reason is not None:
        return Skip(reason)
    model, cluster = model_of(row), cluster_of(row)
    if isinstance(model, str):
        return Skip(model)
    if isinstance(cluster, str):
        return Skip(cluster)
    assumed = _Assumed(row.framework, list(model.assumed))
    try:
        layout = _layout(row, assumed)
        workload = _workload(row, layout, assumed)
        layout.num_microbatches(workload.global_batch_size)
    except ConfigError as error:
        return Skip(
            "layout: batch does not divide" if "multiple of dp" in error.message else f"layout: {error.message}"
        )
    if layout.world_size != cluster.spec.num_devices:
        return Skip("layout: degrees do not multiply to the number of devices")
    if layout.stage_ranks % (layout.ep * layout.expert_tp):
        return Skip("layout: experts do not divide over the ranks of a stage")
    if layout.pp > model.spec.num_blocks:
        return Skip("layout: fewer blocks than stages")
    approximated = tuple(name for name, applies in APPROXIMATE if applies(row))
    return RunInputs(
        model=model.spec,
        cluster=cluster.spec,
        workload=workload,
        layout=layout,
        balanced_stages=default_of(row.framework, BALANCED_STAGES),
        assumed=tuple(assumed.taken),
        approximated=(*model.approximated, *cluster.approximated, *approximated),
    )


def _layout(row: RunRow, assumed: _Assumed) -> Layout:
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
        num_model_chunks=int(row.vpp or 1) if pp > 1 else 1,
        micro_batch_size=row.micro_batch or 1,
        zero_stage=stage if group * cp > 1 else 0,
        sequence_parallel=tp > 1 and _sequence_parallel(row, assumed),
        recompute=_recompute(row, assumed),
    )


def _zero_stage(row: RunRow, assumed: _Assumed) -> Any:
    name = row.sharding_class
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


def _recompute(row: RunRow, assumed: _Assumed) -> Recompute:
    choice: Recompute
    if row.recompute_class not in ("none", "selective", "full"):
        choice = assumed.default("recompute", RECOMPUTE)
        return choice
    # Megatron's "selective" drops the attention scores only, which fused attention never keeps (arXiv:2205.05198 section 5).
    is_scores_only = re.match("Megatron|NeMo", row.framework) and "+" not in row.recompute and "(l" not in row.recompute
    if row.recompute_class == "selective" and is_scores_only and ":m" not in row.recompute:
        return "none"
    choice = row.recompute_class  # type: ignore[assignment]
    return choice


def _workload(row: RunRow, layout: Layout, assumed: _Assumed) -> Workload:
    batch = row.global_batch
    if batch is None:
        batch = layout.dp * layout.micro_batch_size * (row.grad_accum or 1)
        assumed.taken.append("global_batch=one pass")
    precision = row.precision_class
    if precision in ("", "unknown"):
        precision = assumed.default("precision", PRECISION)
    keeps_scores = default_of(row.framework, UNFUSED_ATTENTION) or row.gpu_type.startswith("V100")
    return Workload(
        seq_len=row.seq_len or 1,
        global_batch_size=batch,
        precision=PRECISIONS[precision],
        engine=default_of(row.framework, ENGINE),
        flash_generation=default_of(row.framework, FLASH_GENERATION),
        dropout=default_of(row.framework, DROPOUT),
        fusion=_fusion(row),
        attention="math" if keeps_scores and row.recompute_class != "selective" else "flash",
    )


def _fusion(row: RunRow) -> Any:
    """Whether the run was compiled: as its notes say; torchtitan's quantised linears are cast by compiled kernels."""
    quantised = row.framework.startswith("torchtitan") and row.precision_class in ("fp8", "mxfp8")
    stated = re.search(r"\bcompile\b", row.notes)
    if quantised or (stated and not re.search(r"\bNo torch\.compile", row.notes)):
        return "compiled"
    return default_of(row.framework, FUSION)
