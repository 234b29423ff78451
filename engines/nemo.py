"""NeMo: the overrides of a Megatron Bridge recipe (NVIDIA-NeMo/Megatron-Bridge 0.3, ConfigContainer) as YAML."""

from __future__ import annotations

from typing import Any

import yaml

from ..schema.model import ModelSpec
from ..schema.training_plan import TrainingPlan
from . import adapter, megatron_settings
from .adapter import Adapter, Exported, Imported, Table
from .megatron_settings import layout_from_settings, plan_settings, recompute_not_expressed

VERSION = "Megatron Bridge 0.3"
OVERRIDES = "overrides.yaml"

SECTIONS: dict[str, tuple[str, ...]] = {
    "model": (
        "seq_length", "tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout", "context_parallel_size", "cp_comm_type",
        "hierarchical_context_parallel_sizes", "expert_model_parallel_size", "expert_tensor_parallel_size",
        "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules",
        "attention_dropout", "hidden_dropout",
    ),
    "train": ("micro_batch_size", "global_batch_size"),
    "ddp": (
        "use_distributed_optimizer", "num_distributed_optimizer_instances", "overlap_grad_reduce", "overlap_param_gather",
    ),
    "optimizer": ("optimizer", "optimizer_cpu_offload", "optimizer_offload_fraction", "use_distributed_optimizer"),
    "comm_overlap": ("tp_comm_overlap",),
}  # fmt: skip
"""Section of ConfigContainer -> its fields that a plan decides."""

_PRECISION = {"bf16-mixed": "bf16_mixed", "fp16-mixed": "fp16_mixed", "fp8": "bf16_with_fp8_delayed_scaling_mixed"}
"""Names of megatron/bridge/training/mixed_precision.py."""


LIMITS = (
    *megatron_settings.LIMITS,
    adapter.precisions_of("nemo", tuple(_PRECISION), f"it has no recipe in {VERSION}: bf16-mixed or fp8"),
)


def write(plan: TrainingPlan) -> Exported:
    """Return the plan as overrides of the model's own recipe."""
    settings = plan_settings(plan)
    if chunks := settings.pop("num_virtual_stages_per_pipeline_rank", None):
        settings["virtual_pipeline_model_parallel_size"] = chunks
    content: dict[str, Any] = {
        section: {name: settings[name] for name in names if name in settings} for section, names in SECTIONS.items()
    }
    if not plan.layout.tp_overlap:
        del content["comm_overlap"]
    content["dataset"] = {"sequence_length": plan.workload.seq_len}
    content["mixed_precision"] = _PRECISION[plan.workload.precision]
    head = f"# {VERSION}: {plan.model.name} on {plan.cluster.num_devices} devices, {plan.layout}\n"
    return Exported(
        engine="nemo",
        version=VERSION,
        files=((OVERRIDES, head + yaml.safe_dump(content, sort_keys=False)),),
        not_expressed=(*adapter.placement_not_expressed(plan), *recompute_not_expressed(plan)),
        to_set=("the recipe of the model (it holds the architecture), data, tokenizer, learning rate",),
        command=f"{adapter.torchrun(plan)} your_recipe.py --config-file {OVERRIDES}",
    )


def read(content: Table, num_devices: int | None, model: ModelSpec | None) -> Imported:
    """Read overrides or a full ConfigContainer.

    Raises:
        ConfigError: the number of devices is unknown, or the numbers do not fit together.
    """
    names = (*SECTIONS, "dataset")
    sections = dict(zip(names, adapter.tables_in(content, *names), strict=True))
    settings: dict[str, Any] = {k: v for name in SECTIONS for k, v in sections[name].items() if v is not None}
    if "virtual_pipeline_model_parallel_size" in settings:
        settings["num_virtual_stages_per_pipeline_rank"] = settings["virtual_pipeline_model_parallel_size"]
    num_devices = adapter.require_num_devices(num_devices)
    layout, assumed = layout_from_settings(settings, num_devices, model)
    precisions = {value: name for name, value in _PRECISION.items()}
    seq_len = sections["dataset"].get("sequence_length") or sections["model"].get("seq_length")
    known = {name for fields in SECTIONS.values() for name in fields}
    others = [f"{name}.{field}" for name in SECTIONS for field in sections[name] if field not in known]
    return Imported(
        engine="nemo",
        layout=layout,
        num_devices=num_devices,
        global_batch_size=adapter.optional_integer(settings, "global_batch_size"),
        seq_len=adapter.positive_integer(seq_len, "sequence_length") if seq_len else None,
        precision=precisions.get(str(content.get("mixed_precision"))),
        ignored=(*others, *(name for name in content if name not in (*names, "mixed_precision"))),
        assumed=assumed,
    )


ADAPTER = Adapter(
    version=VERSION,
    limits=LIMITS,
    write=write,
    is_own_table=lambda content: isinstance(content.get("model"), dict) or "ddp" in content,
    read_table=read,
)
