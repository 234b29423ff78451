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

from ...cost_models.operators import model_flops_per_token
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
    Default(r"Megatron-DeepSpeed \(Sailor\)", "fp32", "its ds_config.json turns neither fp16 nor bf16 on"),
    Default("Megatron-DeepSpeed|Megatron-LM|LiBai|Aceso", "fp16", "their example scripts pass --fp16"),
    Default("", "bf16", "what current engines train in"),
)
UNFUSED_ATTENTION: tuple[Default, ...] = (
    Default(r"Megatron-LM \((SC21|Jan 2021|MLSys23)", True, "written before FlashAttention"),
    Default("Megatron-DeepSpeed|HF Transformers|LiBai|Aceso", True, "unfused scores unless --use-flash-attn"),
    Default("", False, "fused attention is the default of its time"),
)
BALANCED_STAGES: tuple[Default, ...] = (
    Default("nanotron", True, "blocks are placed by get_block_compute_costs"),
    Default("Megatron-LM 1F1B redis", True, "layers redistributed to level the vocabulary layers (arXiv:2411.05288)"),
    Default("", False, "layers / pp blocks on every stage, embedding and head on top"),
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

MAX_HIDDEN_ATTENTION = 0.10
"""Without context parallelism in the model, a sequence is cut into cp shorter ones: at most this share of the FLOPs may vanish."""

SKIP: tuple[tuple[str, Callable[[RunRow], bool]], ...] = (
    ("not modelled: LoRA", lambda r: "lora" in (r.task + r.sharding_class + r.precision_class + r.optimizer).lower()),
    ("not modelled: adapters", lambda r: r.task.startswith(("adapter", "finetune-peft"))),
    ("not modelled: offload", lambda r: r.offload not in ("", "none")),
    ("not modelled: expert parallelism", lambda r: (r.ep or 1) > 1 or (r.etp or 1) > 1),
    ("not modelled: recompute that differs by layer", lambda r: r.recompute_class == "custom"),
    ("not modelled: schedule", lambda r: bool(r.vpp) and not r.vpp.isdigit()),
    ("not modelled: optimizer", lambda r: r.optimizer.lower() == "muon"),
    ("precision without a rate", lambda r: r.precision_class not in ("", "unknown", *PRECISIONS)),
    ("mapping not stated", lambda r: r.seq_len is None or r.micro_batch is None or r.tp is None or r.pp is None),
)
"""Reason and condition; a feature that the cost model learns loses its line here (and gains one in `_layout`)."""

APPROXIMATE: tuple[tuple[str, Callable[[RunRow], bool]], ...] = (
    ("cp", lambda r: (r.cp or 1) > 1),  # taken as data parallelism over cp shorter sequences
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
    if (row.cp or 1) > 1 and _hidden_attention(model.spec, row) > MAX_HIDDEN_ATTENTION:
        return Skip("not modelled: context parallelism where attention weighs")
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
    dp = (row.dp or max((row.n_gpus or 1) // (tp * pp * cp), 1)) * cp
    stage = _zero_stage(row, assumed)
    group = _sharding_group(row, dp) if stage else 1
    return Layout(
        dp_replicate=dp // group,
        dp_shard=group,
        tp=tp,
        pp=pp,
        num_model_chunks=int(row.vpp or 1) if pp > 1 else 1,
        micro_batch_size=row.micro_batch or 1,
        zero_stage=stage if group > 1 else 0,
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


def _sharding_group(row: RunRow, dp: int) -> int:
    """Ranks over which states are sharded: as printed where the table prints it, a node for hybrid sharding, else all."""
    match = re.search(r"(?:over|group(?: of)?|degree) (\d+)", row.sharding)
    wanted = int(match[1]) if match else dp
    if not match and row.sharding_class == "hybrid":
        wanted = row.gpus_per_node or 8
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
    if _keeps_scores(row) and row.recompute_class == "selective":
        return "selective"
    is_scores_only = re.match("Megatron|NeMo", row.framework) and "+" not in row.recompute and "(l" not in row.recompute
    if row.recompute_class == "selective" and is_scores_only and ":m" not in row.recompute:
        return "none"
    choice = row.recompute_class  # type: ignore[assignment]
    return choice


def _workload(row: RunRow, layout: Layout, assumed: _Assumed) -> Workload:
    cp = row.cp or 1
    batch = row.global_batch
    if batch is None:
        batch = layout.dp // cp * layout.micro_batch_size * (row.grad_accum or 1)
        assumed.taken.append("global_batch=one pass")
    precision = row.precision_class
    if precision in ("", "unknown"):
        precision = assumed.default("precision", PRECISION)
    return Workload(
        seq_len=-(-(row.seq_len or 1) // cp),
        global_batch_size=batch * cp,
        precision=PRECISIONS[precision],
        engine=default_of(row.framework, ENGINE),
        attention="math" if _keeps_scores(row) else "flash",
    )


def _keeps_scores(row: RunRow) -> bool:
    """Whether attention ran without a fused kernel: as the row says, else none for Volta and none in engines of its time."""
    if stated := re.search(r"flash_attn=(True|False)", row.notes):
        return stated[1] == "False"
    return bool(default_of(row.framework, UNFUSED_ATTENTION)) or row.gpu_type.startswith("V100")


def _hidden_attention(model: ModelSpec, row: RunRow) -> float:
    """Share of a step's FLOPs that disappears when a sequence is cut into cp independent ones."""
    layers = tuple((run.layer, run.count) for run in model.layers)
    whole, part = (
        model_flops_per_token(layers, model.hidden_dim, n)
        for n in (row.seq_len or 1, (row.seq_len or 1) // (row.cp or 1))
    )
    return 1 - part / whole
