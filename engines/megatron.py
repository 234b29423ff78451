"""Megatron-LM: a shell script of options for pretrain_gpt.py."""

from __future__ import annotations

from typing import Any

from ..schema.errors import ConfigError
from ..schema.model import ModelSpec
from ..schema.plan import Plan
from .documents import Exported, Imported, require_expressible, whole
from .launching import placement_not_expressed, torchrun
from .megatron_model import model_settings
from .megatron_plan import LIMITS, VERSION, layout_of, plan_settings, recompute_not_expressed
from .options import bash_array, read_options

SCRIPT = "pretrain.sh"
_LAUNCHER = frozenset({"nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint"})
_USED = _LAUNCHER | {
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
    "cp_comm_type",
    "hierarchical_context_parallel_sizes",
    "use_distributed_optimizer",
    "num_distributed_optimizer_instances",
    "sequence_parallel",
    "micro_batch_size",
    "global_batch_size",
    "seq_length",
    "num_layers",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "recompute_activations",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "bf16",
    "fp16",
    "fp8_format",
}


def export(plan: Plan) -> Exported:
    """The plan as options.

    Raises:
        ConfigError: Megatron cannot run it as it is.
    """
    require_expressible(plan, "megatron", VERSION, LIMITS)
    text = "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# Megatron-LM {VERSION}: {plan.model.name} on {plan.cluster.num_devices} devices, {plan.layout}",
            "# Run on every node. What you add on the command line goes to pretrain_gpt.py:",
            "# data, tokenizer, learning rate, --train-iters, checkpoints.",
            "set -euo pipefail",
            *(["export CUDA_DEVICE_MAX_CONNECTIONS=1"] if plan.layout.tp * plan.layout.cp > 1 else []),
            "",
            bash_array("MODEL_ARGS", model_settings(plan.model, plan.workload.seq_len)),
            "",
            bash_array("PLAN_ARGS", plan_settings(plan)),
            "",
            f'{torchrun(plan)} pretrain_gpt.py "${{MODEL_ARGS[@]}}" "${{PLAN_ARGS[@]}}" "$@"',
            "",
        ]
    )
    return Exported(
        engine="megatron",
        version=VERSION,
        files=((SCRIPT, text),),
        not_expressed=(*placement_not_expressed(plan), *recompute_not_expressed(plan)),
        to_set=(
            "data, tokenizer, learning rate and its schedule, --train-iters, checkpoints: after the script's name",
        ),
        command=f"bash {SCRIPT} --train-iters 1000 --lr 3e-4 --mock-data --tokenizer-type NullTokenizer",
    )


def read(text: str, num_devices: int | None, model: ModelSpec | None) -> Imported:
    """A script or a command line with Megatron's options.

    Raises:
        ConfigError: it has none of them, or its numbers do not fit together.
    """
    settings = read_options(text)
    used = {name: value for name, value in settings.items() if name in _USED}
    if not used.keys() - _LAUNCHER:
        raise ConfigError("no option of Megatron-LM was found", help="e.g. --tensor-model-parallel-size 8")
    devices = num_devices or _world_size(settings)
    layout, assumed = layout_of(used, devices, model)
    return Imported(
        engine="megatron",
        layout=layout,
        num_devices=devices,
        global_batch_size=_optional(settings, "global_batch_size"),
        seq_len=_optional(settings, "seq_length"),
        precision=_precision(settings),
        ignored=tuple(sorted(settings.keys() - used.keys())),
        assumed=assumed,
    )


def _world_size(settings: dict[str, Any]) -> int:
    def first(name: str) -> Any:
        value = settings.get(name)
        return value[0] if isinstance(value, list) else value

    if first("nproc_per_node") is None:
        raise ConfigError("the number of devices is not in the configuration", help="give --num-devices")
    return whole(first("nproc_per_node"), "nproc-per-node") * whole(first("nnodes") or 1, "nnodes")


def _optional(settings: dict[str, Any], name: str) -> int | None:
    return whole(settings[name], name) if name in settings else None


def _precision(settings: dict[str, Any]) -> str:
    if settings.get("fp8_format"):
        return "fp8"
    return "bf16-mixed" if settings.get("bf16") else "fp16-mixed" if settings.get("fp16") else "fp32"
