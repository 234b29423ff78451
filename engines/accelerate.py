"""Accelerate (Hugging Face): the YAML file that `accelerate launch --config_file` reads, with FSDP2 and its parallelism_config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from ..schema.errors import ConfigError
from ..schema.layout import Layout
from ..schema.model import ModelSpec
from ..schema.plan import Plan
from . import limits
from .documents import Exported, Imported, positive_integer, remaining_devices
from .limits import Limit, num_nodes, placement_not_expressed, reduction_not_expressed, require_expressible

VERSION = "1.15"
CONFIG = "accelerate.yaml"
_PREFIX = "parallelism_config_"
_PRECISION = {"bf16-mixed": "bf16", "fp16-mixed": "fp16", "fp8": "fp8", "fp32": "no"}

LIMITS = (
    limits.NO_PIPELINE,
    limits.NO_EXPERT_AXES,
    limits.NO_ULYSSES,
    limits.NO_LEVELS,
    limits.VOCABULARY_AT_ENDS,
    limits.FULL_TRAINING,
    limits.one_recompute("plan again with --fix recompute=full"),
    Limit(
        "full_recompute_only",
        lambda p: p.layout.recompute != "selective",
        lambda p: "recompute=selective: fsdp_activation_checkpointing recomputes whole blocks",
        "plan again with --fix recompute=full (or none)",
    ),
    Limit(
        "accelerate_offload",
        lambda p: p.layout.offload in ("none", "parameters") and not p.layout.offload_activations,
        lambda p: f"offload={p.layout.offload}: fsdp_offload_params moves parameters, gradients and states together",
        "--fix offload=none",
    ),
    Limit(
        "accelerate_precision",
        lambda p: p.workload.precision in _PRECISION,
        lambda p: (
            f"precision {p.workload.precision}: Accelerate has no, fp16, bf16 and fp8, with fp32 master parameters"
        ),
        "plan again with --precision bf16-mixed",
    ),
    Limit(
        "sharded_data",
        lambda p: p.layout.dp_shard > 1 or p.layout.world_size == p.layout.dp_replicate,
        lambda p: f"dp_shard 1 beside tp {p.layout.tp}, cp {p.layout.cp}: Accelerate composes them with FSDP2 only",
        "plan again with --fix dp_replicate=1",
    ),
)

BLOCK_CLASSES = {
    "LlamaForCausalLM": "LlamaDecoderLayer",
    "MistralForCausalLM": "MistralDecoderLayer",
    "MixtralForCausalLM": "MixtralDecoderLayer",
    "Qwen2ForCausalLM": "Qwen2DecoderLayer",
    "Qwen3ForCausalLM": "Qwen3DecoderLayer",
    "Qwen3MoeForCausalLM": "Qwen3MoeDecoderLayer",
    "OlmoeForCausalLM": "OlmoeDecoderLayer",
    "DeepseekV2ForCausalLM": "DeepseekV2DecoderLayer",
    "DeepseekV3ForCausalLM": "DeepseekV3DecoderLayer",
    "GPT2LMHeadModel": "GPT2Block",
    "GPTNeoXForCausalLM": "GPTNeoXLayer",
    "Gemma2ForCausalLM": "Gemma2DecoderLayer",
    "GptOssForCausalLM": "GptOssDecoderLayer",
}
"""Class of one block in transformers 5, which FSDP wraps."""


def export(plan: Plan) -> Exported:
    """The plan as a configuration file.

    Raises:
        ConfigError: Accelerate cannot run it as it is.
    """
    require_expressible(plan, "accelerate", VERSION, LIMITS)
    layout = plan.layout
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if layout.zero_stage or layout.world_size > layout.dp_replicate else "MULTI_GPU",
        "mixed_precision": _PRECISION[plan.workload.precision],
        "num_machines": num_nodes(plan),
        "num_processes": layout.world_size,
        "rdzv_backend": "c10d" if num_nodes(plan) > 1 else "static",
        "main_training_function": "main",
    }
    if content["distributed_type"] == "FSDP":
        content |= {"fsdp_config": _fsdp(plan), "parallelism_config": _axes(layout)}
    head = f"# Accelerate {VERSION}: {plan.model.name} on {layout.world_size} devices, {layout}\n"
    batch = (
        f"per_device_train_batch_size {layout.micro_batch_size}, gradient_accumulation_steps {plan.num_microbatches}"
    )
    recompute = (
        ("recompute=full: call model.gradient_checkpointing_enable()",)
        if layout.recompute == "full" and content["distributed_type"] != "FSDP"
        else ()
    )
    return Exported(
        engine="accelerate",
        version=VERSION,
        files=((CONFIG, head + yaml.safe_dump(content, sort_keys=False)),),
        not_expressed=(*placement_not_expressed(plan), *reduction_not_expressed(plan)),
        to_set=(f"in the training script: {batch}", *recompute, "data, optimizer, learning rate"),
        command=f"accelerate launch --config_file {CONFIG} your_script.py",
    )


def _fsdp(plan: Plan) -> dict[str, Any]:
    block = BLOCK_CLASSES.get(plan.model.architecture)
    wrap: dict[str, Any] = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": plan.layout.zero_stage == 3,
        **wrap,
        # Without a name Accelerate takes the model's own _no_split_modules.
        **({"fsdp_transformer_layer_cls_to_wrap": block} if block else {}),
        "fsdp_activation_checkpointing": plan.layout.recompute == "full",
        "fsdp_offload_params": plan.layout.offload == "parameters",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _axes(layout: Layout) -> dict[str, Any]:
    axes = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard, "tp": layout.tp, "cp": layout.cp}
    return {f"{_PREFIX}{name}_size": degree for name, degree in axes.items()}


def read(content: Mapping[str, Any], num_devices: int | None, model: ModelSpec | None) -> Imported:
    """A configuration file of Accelerate with FSDP (1 or 2), plain data parallelism or Megatron-LM degrees.

    Raises:
        ConfigError: it is for another kind of job, or its numbers do not fit together.
    """
    devices = num_devices or positive_integer(content.get("num_processes", 1), "num_processes")
    kind = str(content.get("distributed_type", "NO"))
    if kind not in ("FSDP", "MULTI_GPU", "NO"):
        raise ConfigError(
            f"distributed_type {kind}: FSDP and MULTI_GPU are read", help="give its own configuration file"
        )
    fsdp, axes = (content.get(name) or {} for name in ("fsdp_config", "parallelism_config"))
    if not isinstance(fsdp, Mapping) or not isinstance(axes, Mapping):
        raise ConfigError("fsdp_config and parallelism_config must be tables")
    names = {value: name for name, value in _PRECISION.items()}
    layout, assumed = _layout(kind, fsdp, axes, devices)
    known = {"distributed_type", "num_processes", "fsdp_config", "parallelism_config", "mixed_precision"}
    return Imported(
        engine="accelerate",
        layout=layout,
        num_devices=devices,
        precision=names.get(str(content.get("mixed_precision", "no"))),
        ignored=tuple(sorted(str(name) for name in content if name not in known)),
        assumed=("micro_batch_size 1: Accelerate's is in the training script", *assumed),
    )


def _layout(
    kind: str, fsdp: Mapping[str, Any], axes: Mapping[str, Any], devices: int
) -> tuple[Layout, tuple[str, ...]]:
    if kind != "FSDP":
        return Layout(dp_replicate=devices), ()

    def degree(name: str) -> int:
        return positive_integer(axes.get(f"{_PREFIX}{name}_size", 1), f"{_PREFIX}{name}_size")

    tp, cp, replicate = degree("tp"), degree("cp"), degree("dp_replicate")
    shard = remaining_devices(devices, tp=tp, cp=cp, dp_replicate=replicate)
    keeps = fsdp.get("fsdp_reshard_after_forward")
    zero = 3 if keeps in (None, True, "true", "FULL_SHARD", "HYBRID_SHARD") else 2
    fields: dict[str, Any] = {
        "tp": tp, "cp": cp, "dp_replicate": replicate, "dp_shard": shard,
        "zero_stage": zero if shard * cp > 1 else 0,
        "recompute": "full" if fsdp.get("fsdp_activation_checkpointing") else "none",
        "offload": "parameters" if fsdp.get("fsdp_offload_params") else "none",
    }  # fmt: skip
    assumed = ("zero_stage 3: its offload needs it",) if fields["offload"] != "none" and zero != 3 else ()
    if assumed:
        fields["zero_stage"] = 3
    return Layout(**fields), assumed
