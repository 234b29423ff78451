"""Layout and workload in the words of Megatron-Core (megatron/training/arguments.py of core_v0.19), and back; NeMo has them too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..schema.base import shown
from ..schema.errors import ConfigError
from ..schema.layout import Layout
from ..schema.model import ModelSpec
from ..schema.training_plan import TrainingPlan
from . import adapter
from .adapter import Limit

Settings = dict[str, Any]
"""Option name with underscores -> value; True is a bare flag, False and None are not written."""

VERSION = "core_v0.19"

_PRECISION: dict[str, Settings] = {
    "bf16-mixed": {"bf16": True},
    "fp16-mixed": {"fp16": True},
    "fp8": {"bf16": True, "fp8_format": "hybrid"},
    "tf32": {},
    "fp32": {},
}

LIMITS = (
    Limit(
        "leading_blocks_recompute",
        lambda p: p.layout.recompute != "mixed" or _leading(p) is not None,
        lambda p: (
            "recompute=mixed: Megatron recomputes the same number of leading blocks, fully, in every stage (method block)"
        ),
        "plan again with --fix recompute=full",
    ),
)
"""Of plans, besides what the engine's rules say of layouts."""


def plan_settings(plan: TrainingPlan) -> Settings:
    """Return the options of layout and workload; what Megatron takes by default anyway is said too."""
    layout, work, sharded = plan.layout, plan.workload, plan.layout.zero_stage == 1
    settings: Settings = {
        "seq_length": work.seq_len,
        "micro_batch_size": layout.micro_batch_size,
        "global_batch_size": work.global_batch_size,
        **_PRECISION[work.precision],
        "optimizer": {"adamw": "adam"}.get(work.optimizer, work.optimizer),
        "attention_backend": "flash" if work.attention == "flash" else "unfused",
        "attention_dropout": 0.1 if work.dropout else 0.0,
        "hidden_dropout": 0.1 if work.dropout else 0.0,
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "use_distributed_optimizer": sharded,
        "overlap_grad_reduce": work.overlap and layout.dp > 1,
        "overlap_param_gather": work.overlap and sharded and layout.dp > 1,
        "tp_comm_overlap": layout.tp_overlap,
        "mtp_num_layers": num_mtp_layers(plan.model) or None,
    }
    if sharded and layout.dp_replicate > 1:
        settings["num_distributed_optimizer_instances"] = layout.dp_replicate
    if work.loss == "in_place":
        settings |= {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
    if layout.cp > 1:
        settings |= _exchange(layout.cp, layout.cp_ulysses)
    if plan.model.is_moe:
        settings |= {"expert_model_parallel_size": layout.ep, "expert_tensor_parallel_size": layout.expert_tp}
        settings |= _dispatcher(plan)
    settings |= _stages(plan) | _recompute(plan)
    settings |= _switches(plan)
    if layout.offload == "optimizer":
        settings |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": layout.offload_fraction}
        settings["use_precision_aware_optimizer"] = True  # whose code the update on the host is
    return settings


def _dispatcher(plan: TrainingPlan) -> Settings:
    """Return how tokens travel: once to each node where experts span nodes, as the plan is costed; HybridEP runs from Ampere on."""
    spans = plan.layout.ep * plan.layout.expert_tp > plan.cluster.scaleup_domain
    if plan.workload.sends_tokens_once_per_node and plan.cluster.is_nvidia and spans:
        return {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
    return {"moe_token_dispatcher_type": "alltoall"}


def _switches(plan: TrainingPlan) -> Settings:
    """Return what a plan turns on: a graph holds a dense layer, and of one with experts what comes before they do."""
    layout, settings = plan.layout, Settings()
    if layout.gradients == "compute":
        settings["grad_reduce_in_bf16"] = True
    if layout.cuda_graphs and plan.model.is_moe:
        settings |= {
            "cuda_graph_impl": "transformer_engine",
            "cuda_graph_scope": ["attn", "moe_router", "moe_preprocess"],
        }
    elif layout.cuda_graphs:
        settings["cuda_graph_impl"] = "local"
    if layout.cuda_graphs:
        settings["te_rng_tracker"] = True
    if layout.ep_overlap:
        settings |= {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True}
    if num_layers := num_offloaded_layers(plan):
        settings["cpu_offloading_num_layers"] = num_layers
    return settings


def num_offloaded_layers(plan: TrainingPlan) -> int:
    """Return the blocks whose activations wait in the host's memory: Megatron moves all of some, and not of every one."""
    num_blocks = plan.model.num_blocks
    return min(round(plan.layout.offload_activations * num_blocks), num_blocks - 1)


def _exchange(cp: int, ulysses: int) -> Settings:
    if ulysses == 1:
        return {"cp_comm_type": "p2p"}
    if ulysses == cp:
        return {"cp_comm_type": "a2a"}
    return {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [ulysses, cp // ulysses]}


def _stages(plan: TrainingPlan) -> Settings:
    """Return an even pipeline by its number of chunks, any other by its layout: stages in the order of the model, E embedding, t
    block, m multi-token prediction, L head and loss.
    """
    if plan.layout.pp == 1:
        return {}
    blocks = [len(choices) for choices in adapter.recompute_by_stage(plan)]
    if len(set(blocks)) == 1:
        chunks = plan.layout.num_model_chunks
        return {"num_virtual_stages_per_pipeline_rank": chunks} if chunks > 1 else {}
    last = len(blocks) - 1
    end = "m" * num_mtp_layers(plan.model) + "L"
    texts = [f"{'E' * (s == 0)}{f't*{n}' if n else ''}{end * (s == last)}" for s, n in enumerate(blocks)]
    return {"pipeline_model_parallel_layout": "|".join(texts)}


def num_mtp_layers(model: ModelSpec) -> int:
    """Return the multi-token-prediction modules, which stand on the last stage."""
    return sum(run.count for run in model.layers if run.layer.kind == "mtp")


def _leading(plan: TrainingPlan) -> int | None:
    """Return how many blocks at the beginning of each stage recompute, where it is those and fully; None otherwise."""
    stages = adapter.recompute_by_stage(plan)
    counts = [choices.count("full") for choices in stages]
    if any(c != ["full"] * n + ["none"] * (len(c) - n) for c, n in zip(stages, counts, strict=True)):
        return None
    alike = all(n == min(max(counts), len(c)) for c, n in zip(stages, counts, strict=True))
    return max(counts) if alike else None


def _recompute(plan: TrainingPlan) -> Settings:
    layout = plan.layout
    if layout.recompute == "none":
        return {}
    if layout.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": _modules(plan)}
    if layout.recompute == "full" and layout.recompute_fraction == 1:
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    largest = max(map(len, adapter.recompute_by_stage(plan)))
    count = _leading(plan) if layout.recompute == "mixed" else math.ceil(layout.recompute_fraction * largest)
    return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": count}


def _modules(plan: TrainingPlan) -> list[str]:
    """Return what selective recompute runs again: the core of unfused attention, or what lies between the products."""
    if plan.workload.recompute_modules:
        return list(plan.workload.recompute_modules)
    if plan.workload.attention == "math":
        return ["core_attn"]
    return ["layernorm", *(["moe_act"] if plan.model.is_moe else [])]


def recompute_not_expressed(plan: TrainingPlan) -> tuple[str, ...]:
    """Say how Megatron's selective recompute differs from the plan's."""
    if plan.layout.recompute != "selective" or plan.workload.recompute_modules or plan.workload.attention == "math":
        return ()
    return (
        "recompute=selective: the plan keeps the outputs of products and of attention only; Megatron runs the modules "
        f"{', '.join(_modules(plan))} again, and its fused kernels keep a little more",
    )


def layout_from_settings(
    settings: Mapping[str, Any], num_devices: int, model: ModelSpec | None
) -> tuple[Layout, tuple[str, ...]]:
    """Return the layout that such settings stand for, and what had to be assumed.

    Raises:
        ConfigError: the degrees do not divide the devices, or a value cannot mean anything.
    """

    def number(name: str, default: int = 1) -> int:
        value = settings.get(name)
        return default if value is None else adapter.positive_integer(value, name)

    tp, pp, cp = (number(f"{axis}_parallel_size") for axis in ("tensor_model", "pipeline_model", "context"))
    dp = adapter.remaining_devices(num_devices, tp=tp, pp=pp, cp=cp)
    sharded = bool(settings.get("use_distributed_optimizer"))
    instances = number("num_distributed_optimizer_instances") if sharded else dp
    if dp % instances:
        raise ConfigError(f"num_distributed_optimizer_instances {instances} does not divide {dp} data-parallel ranks")
    ep, assumed = number("expert_model_parallel_size"), []
    graphs = settings.get("cuda_graph_impl") or settings.get("enable_cuda_graph") or settings.get("external_cuda_graph")
    etp = number("expert_tensor_parallel_size", tp)
    chunks, uneven = _chunks(settings, pp, model)
    if uneven:
        assumed.append("stages as even as can be: a Layout has no stages of its own (pipeline_model_parallel_layout)")
    fields: dict[str, Any] = {
        "tp": tp, "pp": pp, "cp": cp, "dp_replicate": instances, "dp_shard": dp // instances, "ep": ep,
        "etp": 1 if ep == 1 and etp == tp else etp, "num_model_chunks": chunks,
        "cp_ulysses": _ulysses(settings, cp), "micro_batch_size": number("micro_batch_size"),
        "sequence_parallel": tp > 1 and bool(settings.get("sequence_parallel")),
        "zero_stage": 1 if sharded and dp // instances * cp > 1 else 0,
        **_recompute_of(settings, model, pp * chunks),
        "tp_overlap": bool(settings.get("tp_comm_overlap")) and bool(settings.get("sequence_parallel")),
        "gradients": "compute" if settings.get("grad_reduce_in_bf16") else "fp32",
        "cuda_graphs": bool(graphs) and graphs != "none",
        "ep_overlap": ep > 1 and bool(settings.get("overlap_moe_expert_parallel_comm")),
    }  # fmt: skip
    if (moved := number("cpu_offloading_num_layers", 0) if settings.get("cpu_offloading_num_layers") else 0) and model:
        fields["offload_activations"] = moved / model.num_blocks
    if settings.get("optimizer_cpu_offload"):
        fields |= {"offload": "optimizer", "offload_fraction": settings.get("optimizer_offload_fraction", 1.0)}
    return Layout(**fields), tuple(assumed)


def _chunks(settings: Mapping[str, Any], pp: int, model: ModelSpec | None) -> tuple[int, bool]:
    """Return the model chunks of a rank, and whether the stages are said one by one."""
    if text := settings.get("pipeline_model_parallel_layout"):
        stages = str(text).count("|") + 1
        if stages % pp:
            raise ConfigError(f"pipeline_model_parallel_layout has {stages} stages, not a multiple of pp {pp}")
        return stages // pp, True
    if value := settings.get("num_virtual_stages_per_pipeline_rank"):
        return adapter.positive_integer(value, "num_virtual_stages_per_pipeline_rank"), False
    if value := settings.get("num_layers_per_virtual_pipeline_stage"):
        per_stage = adapter.positive_integer(value, "num_layers_per_virtual_pipeline_stage")
        return max(_num_layers(settings, model, "num_layers_per_virtual_pipeline_stage") // (pp * per_stage), 1), False
    return 1, False


def _ulysses(settings: Mapping[str, Any], cp: int) -> int:
    kind = settings.get("cp_comm_type") or "p2p"
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "a2a":
        return cp
    if kind == "a2a+p2p":
        sizes = settings.get("hierarchical_context_parallel_sizes")
        if not isinstance(sizes, list) or not sizes:
            raise ConfigError("cp_comm_type a2a+p2p needs hierarchical_context_parallel_sizes of two numbers")
        return adapter.positive_integer(sizes[0], "hierarchical_context_parallel_sizes")
    if kind in ("p2p", "all_gather", "allgather"):
        return 1
    raise ConfigError(f"cp_comm_type {shown(kind)}: one of p2p, a2a, a2a+p2p")


def _recompute_of(settings: Mapping[str, Any], model: ModelSpec | None, stages: int) -> dict[str, Any]:
    granularity = settings.get("recompute_granularity") or (
        "selective" if settings.get("recompute_activations") else None
    )
    if granularity is None:
        return {"recompute": "none"}
    if granularity not in ("full", "selective"):
        raise ConfigError(f"recompute_granularity {shown(granularity)}: full or selective")
    if granularity == "selective" or settings.get("recompute_method") != "block":
        return {"recompute": granularity}
    count = adapter.positive_integer(settings.get("recompute_num_layers", 1), "recompute_num_layers")
    layers = _num_layers(settings, model, "recompute_method block")
    return {"recompute": "full", "recompute_fraction": min(1.0, count * stages / layers)}


def _num_layers(settings: Mapping[str, Any], model: ModelSpec | None, reader: str) -> int:
    layers = settings.get("num_layers") or (model.num_blocks if model else None)
    if layers is None:
        raise ConfigError(f"{reader} needs the number of layers", help="give --model")
    return adapter.positive_integer(layers, "num_layers")
