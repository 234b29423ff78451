"""torchtitan: a Python module with a configuration function, its form since 0.3."""

from __future__ import annotations

from typing import Any

from ..schema.layout import Layout
from ..schema.model import Block, Embedding, Head
from ..schema.plan import Plan
from . import limits
from .documents import Exported, Limit, require_expressible
from .launching import placement_not_expressed, reduction_not_expressed, torchrun

VERSION = "0.3.0"
MODULE = "meshwright_plan"
ORDER = "pipeline_order.csv"

MODELS = {
    "llama-3.1-8b": ("llama3", "llama3_8b"),
    "llama-3.1-70b": ("llama3", "llama3_70b"),
    "llama-3.1-405b": ("llama3", "llama3_405b"),
    "qwen3-32b": ("qwen3", "qwen3_32b"),
    "qwen3-30b-a3b": ("qwen3", "qwen3_30b_a3b"),
    "deepseek-v3": ("deepseek_v3", "deepseek_v3_671b"),
    "gpt-oss-20b": ("gpt_oss", "gpt_oss_20b"),
    "gpt-oss-120b": ("gpt_oss", "gpt_oss_120b"),
}
"""Catalogue name -> package of torchtitan.models and function of its config_registry."""

SCHEDULES = {
    ("gpipe", False): "GPipe",
    ("1f1b", False): "1F1B",
    ("1f1b", True): "Interleaved1F1B",
    ("zb-h1", True): "InterleavedZeroBubble",
    ("zb-v", True): "ZBVZeroBubble",
}
"""(ours, with chunks) -> torch.distributed.pipelining's name; the others go through a table of the order."""

PRECISION = {"bf16-mixed": ("float32", "bfloat16"), "bf16": ("bfloat16", "bfloat16"), "fp32": ("float32", "float32")}

LIMITS = (
    Limit(
        "torchtitan_models",
        lambda p: p.model.name in MODELS,
        lambda p: f"model {p.model.name}: torchtitan has configurations of {', '.join(MODELS)}",
        "add the model to torchtitan, or export to another engine",
    ),
    limits.NO_LEVELS,
    limits.NO_ULYSSES,
    limits.VOCABULARY_AT_ENDS,
    limits.FULL_TRAINING,
    limits.one_recompute("plan again with --fix recompute=full"),
    Limit(
        "experts_over_ep",
        lambda p: p.layout.etp == 1 and (not p.model.is_moe or p.layout.tp == 1 or p.layout.ep > 1),
        lambda p: (
            f"ep {p.layout.ep}, etp {p.layout.etp} with tp {p.layout.tp}: torchtitan splits experts over ep alone"
        ),
        "--fix etp=1, and ep above 1 where tp is",
    ),
    Limit(
        "torchtitan_offload",
        lambda p: p.layout.offload in ("none", "parameters") and not p.layout.offload_activations,
        lambda p: (
            f"offload={p.layout.offload}: training.enable_cpu_offload moves parameters, gradients and states together"
        ),
        "--fix offload=none",
    ),
    Limit(
        "torchtitan_precision",
        lambda p: p.workload.precision in PRECISION,
        lambda p: f"precision {p.workload.precision}: fp8 is a converter of the model in torchtitan, fp16 it has not",
        "plan again with --precision bf16-mixed",
    ),
)


def export(plan: Plan) -> Exported:
    """The plan as a module: `--module meshwright_plan --config plan`.

    Raises:
        ConfigError: torchtitan cannot run it as it is.
    """
    require_expressible(plan, "torchtitan", VERSION, LIMITS)
    package, function = MODELS[plan.model.name]
    checkpointing = {"full": "FullAC", "selective": "SelectiveAC"}.get(plan.layout.recompute)
    settings = {
        f"{section}.{name}": value for section, fields in _settings(plan).items() for name, value in fields.items()
    }
    lines = [
        f'"""torchtitan {VERSION}: {plan.model.name} on {plan.cluster.num_devices} devices, {plan.layout}"""',
        "",
        *([f"from torchtitan.distributed.activation_checkpoint import {checkpointing}"] if checkpointing else []),
        f"from torchtitan.models.{package}.config_registry import {function}",
        "from torchtitan.trainer import Trainer",
        "",
        "",
        "def plan() -> Trainer.Config:",
        f"    config = {function}()",
        *(f"    config.{name} = {value!r}" for name, value in settings.items()),
        f"    config.activation_checkpoint = {f'{checkpointing}.Config()' if checkpointing else None}",
        "    return config",
        "",
    ]
    order = _order(plan)
    return Exported(
        engine="torchtitan",
        version=VERSION,
        files=((f"{MODULE}.py", "\n".join(lines)), *(((ORDER, order),) if order else ())),
        not_expressed=(*placement_not_expressed(plan), *reduction_not_expressed(plan)),
        to_set=("hf_assets_path (tokenizer), dataloader, optimizer, steps: as the function of torchtitan has them",),
        command=f"PYTHONPATH=. {torchrun(plan)} -m torchtitan.train --module {MODULE} --config plan",
    )


def _settings(plan: Plan) -> dict[str, dict[str, Any]]:
    layout, work = plan.layout, plan.workload
    dtype, products = PRECISION[work.precision]
    pipelined = layout.pp > 1
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": layout.dp_replicate,
        "data_parallel_shard_degree": layout.dp_shard,
        "tensor_parallel_degree": layout.tp,
        "enable_sequence_parallel": layout.sequence_parallel or layout.tp == 1,
        "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp,
        "expert_parallel_degree": layout.ep,
        "fsdp_reshard_after_forward": "always" if layout.zero_stage == 3 else "never",
    }
    if pipelined:
        parallelism |= {
            "pipeline_parallel_schedule": SCHEDULES.get(_named(layout), "_PipelineScheduleRuntime"),
            "pipeline_parallel_microbatch_size": layout.micro_batch_size,
            "module_fqns_per_model_part": _module_names(plan),
        }
        if _named(layout) not in SCHEDULES:
            parallelism["pipeline_parallel_schedule_csv"] = ORDER
    return {
        "training": {
            "local_batch_size": layout.micro_batch_size * (plan.num_microbatches if pipelined else 1),
            "global_batch_size": work.global_batch_size,
            "seq_len": work.seq_len,
            "dtype": dtype,
            "mixed_precision_param": products,
            "enable_cpu_offload": layout.offload == "parameters",
            # Graphs take neither pipelines nor experts that are sent to other ranks, and the plan was not made for them.
            "disable_cuda_graphs": not work.cuda_graphs or pipelined or layout.ep > 1,
        },
        "parallelism": parallelism,
    }


def _named(layout: Layout) -> tuple[str, bool]:
    return layout.schedule, layout.num_model_chunks > 1


def _module_names(plan: Plan) -> list[list[str]]:
    """Modules of each stage, in the order of the model."""
    layers = tuple(plan.model.iter_layers())
    names = []
    for stage in plan.stages:
        part: list[str] = []
        for idx in stage.layer_idxs:
            if isinstance(layers[idx], Embedding):
                part.append("tok_embeddings")
            elif isinstance(layers[idx], Block):
                part.append(f"layers.{idx - 1}")
            elif isinstance(layers[idx], Head):
                part += ["norm", "lm_head"]
        names.append(part)
    return names


def _order(plan: Plan) -> str:
    """The order of the passes as torch's table, where the schedule has no name in torch."""
    if plan.layout.pp == 1 or _named(plan.layout) in SCHEDULES:
        return ""
    from ..runtime.pipeline_order import pipeline_order
    from ..solvers.pipeline_csv import to_torch_csv

    return to_torch_csv(pipeline_order(plan))
