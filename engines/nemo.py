"""NeMo: the overrides of a Megatron Bridge recipe (NVIDIA-NeMo/Megatron-Bridge 0.3, ConfigContainer) as YAML."""

from __future__ import annotations

from typing import Any

import yaml

from ..schema.model import ModelSpec
from ..schema.training_plan import TrainingPlan
from . import adapter, megatron_settings
from .adapter import Adapter, Exported, Imported, Table, comment
from .megatron_settings import layout_from_settings, plan_settings, recompute_not_expressed

VERSION = "Megatron Bridge 0.3"
OVERRIDES = "overrides.yaml"

SECTIONS: dict[str, dict[str, Any]] = {
    "model": {
        "seq_length": None, "tensor_model_parallel_size": 1, "sequence_parallel": False, "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None, "pipeline_model_parallel_layout": None,
        "num_layers_in_first_pipeline_stage": None, "num_layers_in_last_pipeline_stage": None,
        "account_for_embedding_in_pipeline_split": False, "account_for_loss_in_pipeline_split": False, "mtp_num_layers": None,
        "context_parallel_size": 1, "cp_comm_type": "p2p", "hierarchical_context_parallel_sizes": None,
        "expert_model_parallel_size": 1, "expert_tensor_parallel_size": None, "moe_token_dispatcher_type": "alltoall",
        "moe_flex_dispatcher_backend": None,
        "recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None, "recompute_modules": None,
        "cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native",
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "cuda_graph_impl": "none",
        "cuda_graph_scope": [], "use_te_rng_tracker": False, "cpu_offloading": False, "cpu_offloading_num_layers": 0,
    },
    "rng": {"te_rng_tracker": False},
    "train": {"micro_batch_size": None, "global_batch_size": None},
    "ddp": {
        "use_distributed_optimizer": False, "num_distributed_optimizer_instances": 1, "overlap_grad_reduce": False,
        "overlap_param_gather": False, "use_megatron_fsdp": False,
    },
    "optimizer": {
        "optimizer": "adam", "optimizer_cpu_offload": False, "optimizer_offload_fraction": 0.0,
        "use_distributed_optimizer": False, "use_precision_aware_optimizer": False, "main_grads_dtype": "torch.float32",
        "main_params_dtype": "torch.float32", "exp_avg_dtype": "torch.float32", "exp_avg_sq_dtype": "torch.float32",
    },
    "comm_overlap": {
        "tp_comm_overlap": False, "tp_comm_overlap_cfg": None, "overlap_grad_reduce": False, "overlap_param_gather": False,
        "align_param_gather": False, "overlap_moe_expert_parallel_comm": False, "delay_wgrad_compute": False,
    },
}  # fmt: skip
"""Section of ConfigContainer -> its fields that a plan decides and what they are where it says nothing: each is written, so that no
choice of the recipe remains beside the plan's."""

_COMM_OVERLAP = "megatron.bridge.training.comm_overlap.CommOverlapConfig"
_MIXED_PRECISION = "megatron.bridge.training.mixed_precision.MixedPrecisionConfig"
_FP8 = {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
_PRECISION: dict[str, tuple[str, Table]] = {
    "bf16-mixed": ("bfloat16", {"bf16": True, "fp8": None}),
    "fp16-mixed": ("float16", {"fp16": True, "fp8": None}),
    "fp8": ("bfloat16", {"bf16": True, **_FP8}),
}
"""Compute dtype, and fields of MixedPrecisionConfig."""

_RECIPES = {"bf16_mixed": "bf16-mixed", "fp16_mixed": "fp16-mixed"}
"""Names of megatron/bridge/training/mixed_precision.py; with fp8 in them they are fp8."""


def write(plan: TrainingPlan) -> Exported:
    """Return the plan as overrides of the model's own recipe."""
    settings = plan_settings(plan)
    stages = settings.pop("num_virtual_stages_per_pipeline_rank", None), plan.layout.num_model_chunks
    settings["virtual_pipeline_model_parallel_size"] = next((n for n in stages if n and n > 1), None)
    settings["align_param_gather"] = settings["overlap_param_gather"] and plan.layout.num_model_chunks > 1
    settings["use_te_rng_tracker"] = settings.get("te_rng_tracker", False)
    settings["cpu_offloading"] = "cpu_offloading_num_layers" in settings
    content: dict[str, Any] = {
        section: {name: settings.get(name, default) for name, default in fields.items()}
        for section, fields in SECTIONS.items()
    }
    content["comm_overlap"] = {"_target_": _COMM_OVERLAP, **content["comm_overlap"]}
    content["dataset"] = {"sequence_length": plan.workload.seq_len}
    content["mixed_precision"] = _mixed_precision(plan.workload.precision, settings)
    head = comment(f"{VERSION}: {plan.model.name} on {plan.cluster.num_devices} devices, {plan.layout}")
    return Exported(
        engine="nemo",
        version=VERSION,
        files=((OVERRIDES, head + yaml.safe_dump(content, sort_keys=False)),),
        not_expressed=(*adapter.placement_not_expressed(plan), *recompute_not_expressed(plan)),
        to_set=("the recipe of the model (it holds the architecture), data, tokenizer, learning rate",),
        command=f"{adapter.torchrun(plan)} your_recipe.py --config-file {OVERRIDES}",
    )


def _mixed_precision(precision: str, settings: Table) -> dict[str, Any]:
    """Return a MixedPrecisionConfig in full: a recipe may have one of its own, which a name would not replace field by field."""
    dtype, fields = _PRECISION[precision]
    of_torch = {"_target_": f"torch.{dtype}", "_call_": False}
    return {
        "_target_": _MIXED_PRECISION,
        "fp32": False, "bf16": False, "fp16": False,
        **fields,
        "params_dtype": dict(of_torch), "pipeline_dtype": dict(of_torch), "autocast_enabled": False,
        "grad_reduce_in_fp32": not settings.get("grad_reduce_in_bf16"),
        "fp8_param": False, "fp8_param_gather": False,
    }  # fmt: skip


def _precision(said: Any) -> str | None:
    """Return the precision of a recipe's name or of a MixedPrecisionConfig."""
    if isinstance(said, dict):
        return (
            "fp8"
            if said.get("fp8")
            else "bf16-mixed"
            if said.get("bf16")
            else "fp16-mixed"
            if said.get("fp16")
            else None
        )
    return _RECIPES.get(str(said), "fp8" if "fp8" in str(said) else None)


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
    mixed = content.get("mixed_precision")
    settings["grad_reduce_in_bf16"] = isinstance(mixed, dict) and mixed.get("grad_reduce_in_fp32") is False
    num_devices = adapter.require_num_devices(num_devices)
    layout, assumed = layout_from_settings(settings, num_devices, model)
    seq_len = sections["dataset"].get("sequence_length") or sections["model"].get("seq_length")
    known = {"_target_", *(name for fields in SECTIONS.values() for name in fields)}
    others = [f"{name}.{field}" for name in SECTIONS for field in sections[name] if field not in known]
    return Imported(
        engine="nemo",
        layout=layout,
        num_devices=num_devices,
        global_batch_size=adapter.optional_integer(settings, "global_batch_size"),
        seq_len=adapter.positive_integer(seq_len, "sequence_length") if seq_len else None,
        precision=_precision(mixed),
        ignored=(*others, *(name for name in content if name not in (*names, "mixed_precision"))),
        assumed=assumed,
    )


ADAPTER = Adapter(
    version=VERSION,
    limits=(*adapter.limits_of("nemo"), *megatron_settings.LIMITS),
    write=write,
    is_own_table=lambda content: isinstance(content.get("model"), dict) or "ddp" in content,
    read_table=read,
)
