"""Accelerate (Hugging Face): the YAML file that `accelerate launch --config_file` reads, with FSDP2 and its parallelism_config."""

from __future__ import annotations

from typing import Any, Literal

import yaml

from ..schema.errors import ConfigError
from ..schema.layout import Layout
from ..schema.model import ModelSpec
from ..schema.training_plan import TrainingPlan
from . import adapter
from .adapter import Adapter, Exported, Imported, Table, comment

VERSION = "1.15"
CONFIG = "accelerate.yaml"
_PREFIX = "parallelism_config_"
_PRECISION = {"bf16-mixed": "bf16", "fp16-mixed": "fp16", "fp8": "fp8", "tf32": "no", "fp32": "no"}


EACH_BATCH = (
    "GradientAccumulationPlugin(sync_each_batch=True): without it gradients of the entire model stay on every device between "
    "micro-batches"
)

_DECODERS = (
    "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "Olmoe", "DeepseekV2", "DeepseekV3", "Gemma2", "GptOss",
)  # fmt: skip
BLOCK_CLASSES = {f"{name}ForCausalLM": f"{name}DecoderLayer" for name in _DECODERS}
BLOCK_CLASSES |= {"GPT2LMHeadModel": "GPT2Block", "GPTNeoXForCausalLM": "GPTNeoXLayer"}
"""Class of one block in transformers 5, which FSDP wraps."""


def write(plan: TrainingPlan) -> Exported:
    """Return the plan as a configuration file."""
    layout, nodes = plan.layout, plan.cluster.num_nodes
    is_sharded = bool(layout.zero_stage)
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if is_sharded else "MULTI_GPU",
        "mixed_precision": _PRECISION[plan.workload.precision],
        "num_machines": nodes,
        "num_processes": layout.world_size,
        "rdzv_backend": "c10d" if nodes > 1 else "static",
        "main_training_function": "main",
    }
    if is_sharded:
        degrees = {name: getattr(layout, name) for name in ("dp_replicate", "dp_shard", "tp", "cp")}
        block = BLOCK_CLASSES.get(plan.model.architecture)
        content["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": layout.zero_stage == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            # Without a name Accelerate takes the model's own _no_split_modules.
            **({"fsdp_transformer_layer_cls_to_wrap": block} if block else {}),
            "fsdp_activation_checkpointing": layout.recompute == "full",
            "fsdp_offload_params": layout.offload == "parameters",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        content["parallelism_config"] = {f"{_PREFIX}{name}_size": degree for name, degree in degrees.items()}
    head = comment(f"Accelerate {VERSION}: {plan.model.name} on {layout.world_size} devices, {layout}")
    batch = (
        f"per_device_train_batch_size {layout.micro_batch_size}, gradient_accumulation_steps {plan.num_microbatches}"
    )
    recompute = "recompute=full: call model.gradient_checkpointing_enable()"
    return Exported(
        engine="accelerate",
        version=VERSION,
        files=((CONFIG, head + yaml.safe_dump(content, sort_keys=False)),),
        not_expressed=adapter.placement_not_expressed(plan),
        to_set=(
            f"in the training script: {batch}",
            *([EACH_BATCH] if is_sharded and plan.num_microbatches > 1 else []),
            *([recompute] if layout.recompute == "full" and not is_sharded else []),
            *(f"in the training script: {part}" for part in plan.workload.library_parts),
            "data, optimizer, learning rate",
        ),
        command=f"{adapter.on_command(plan)}accelerate launch --config_file {CONFIG} your_script.py",
    )


def read(content: Table, num_devices: int | None, model: ModelSpec | None) -> Imported:
    """Read a configuration file with FSDP (1 or 2) or plain data parallelism.

    Raises:
        ConfigError: it is for another kind of job, or its numbers do not fit together.
    """
    devices = num_devices or adapter.positive_integer(content.get("num_processes", 1), "num_processes")
    kind = str(content.get("distributed_type", "NO"))
    if kind not in ("FSDP", "MULTI_GPU", "NO"):
        raise ConfigError(
            f"distributed_type {kind}: FSDP and MULTI_GPU are read", help="give its own configuration file"
        )
    fsdp, axes = adapter.tables_in(content, "fsdp_config", "parallelism_config")
    precisions = {value: name for name, value in _PRECISION.items()}
    layout, assumed = _sharded_layout(fsdp, axes, devices) if kind == "FSDP" else (Layout(dp_replicate=devices), ())
    precision = precisions.get(str(content.get("mixed_precision", "no")))
    plain = (adapter.PLAIN_PRODUCTS,) if precision == "fp32" else ()
    known = {"distributed_type", "num_processes", "fsdp_config", "parallelism_config", "mixed_precision"}
    return Imported(
        engine="accelerate",
        layout=layout,
        num_devices=devices,
        precision=precision,
        ignored=tuple(sorted(str(name) for name in content if name not in known)),
        assumed=("micro_batch_size 1: Accelerate's is in the training script", *assumed, *plain),
    )


def _sharded_layout(fsdp: Table, axes: Table, devices: int) -> tuple[Layout, tuple[str, ...]]:
    """Return the layout of a job with FSDP, and what was assumed."""

    def degree(name: str) -> int:
        return adapter.positive_integer(axes.get(f"{_PREFIX}{name}_size", 1), f"{_PREFIX}{name}_size")

    tp, cp, replicate = degree("tp"), degree("cp"), degree("dp_replicate")
    shard = adapter.remaining_devices(devices, tp=tp, cp=cp, dp_replicate=replicate)
    reshards = fsdp.get("fsdp_reshard_after_forward") in (None, True, "true", "FULL_SHARD", "HYBRID_SHARD")
    offloads = bool(fsdp.get("fsdp_offload_params"))
    zero_stage: Literal[2, 3] = 3 if reshards or offloads else 2
    layout = Layout(
        tp=tp, cp=cp, dp_replicate=replicate, dp_shard=shard, sequence_parallel=False,
        zero_stage=zero_stage if shard * cp > 1 or (offloads and not reshards) else 0,
        recompute="full" if fsdp.get("fsdp_activation_checkpointing") else "none",
        offload="parameters" if offloads else "none",
    )  # fmt: skip
    return layout, ("zero_stage 3: its offload needs it",) if offloads and not reshards else ()


def _of_transformers(plan: TrainingPlan) -> TrainingPlan:
    """Return the plan with gradients that FSDP2 shards, and sequences that tensor parallelism keeps whole."""
    plan = adapter.with_sharded_gradients(plan)
    return plan.replace(layout=plan.layout.replace(sequence_parallel=False))


ADAPTER = Adapter(
    version=VERSION,
    limits=adapter.limits_of("accelerate"),
    write=write,
    adapt=_of_transformers,
    is_own_table=lambda content: "distributed_type" in content or "fsdp_config" in content,
    read_table=read,
)
