"""A plan in the words of Megatron-Core (megatron/training/arguments.py of core_v0.19), and back: model, layout and workload."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from ..schema.base import shown
from ..schema.errors import ConfigError
from ..schema.layers import Block, DenseMLP, LatentAttention, MoE, SoftmaxAttention
from ..schema.layout import Layout
from ..schema.model import ModelSpec
from ..schema.training_plan import Stage, TrainingPlan
from . import limits
from .documents import positive_integer, remaining_devices
from .limits import Limit

Settings = dict[str, Any]
"""Option name with underscores -> value; True is a bare flag, False and None are not written."""


ORIGINAL_YARN_LEN = 4096
"""MLATransformerConfig.original_max_position_embeddings, which has no option."""


def model_settings(model: ModelSpec, seq_len: int) -> Settings:
    """Return every option that describes the model.

    Raises:
        ConfigError: the model has something that Megatron's GPT has not.
    """
    blocks = [block for block, _ in model.block_runs]
    attentions = {block.attention for block in blocks}
    dense = {block.mlp for block in blocks if isinstance(block.mlp, DenseMLP)}
    experts = {block.mlp for block in blocks if isinstance(block.mlp, MoE)}
    missing = [
        *(["attention that differs from layer to layer"] if len(attentions) > 1 else []),
        *(["dense parts of several widths"] if len(dense) > 1 else []),
        *(["experts of several kinds"] if len(experts) > 1 else []),
        *(reason for block in blocks for reason in _missing(block)),
        *_missing_rope(model),
        *(["heads for further tokens"] if model.num_layers > model.num_blocks + 2 else []),
    ]
    if missing:
        raise ConfigError(
            f"Megatron's GPT model has no {missing[0]}, which {model.name} needs",
            details=tuple(dict.fromkeys(missing[1:])),
        )
    settings: Settings = {
        "num_layers": model.num_blocks,
        "hidden_size": model.hidden_dim,
        **_attention(blocks[0].attention),
        "normalization": "RMSNorm" if blocks[0].norm == "rmsnorm" else "LayerNorm",
        "norm_epsilon": model.norm_eps,
        **_positions(model, seq_len),
        "vocab_size": model.vocab_size,
        "make_vocab_size_divisible_by": 1,
        "untie_embeddings_and_output_weights": not model.tie_embeddings,
    }
    mlp: DenseMLP | MoE = next(iter(dense)) if dense else next(iter(experts))
    settings |= _feed_forward(mlp) | {"ffn_hidden_size": mlp.ffn_dim}
    if experts:
        settings |= _experts(model, next(iter(experts)))
    return settings


def _missing(block: Block) -> list[str]:
    attention, mlp = block.attention, block.mlp
    reasons = {
        f"blocks with {block.num_norms} norms": block.num_norms != 2,
        "attention and feed-forward part side by side": block.parallel_residual,
        "ReLU": mlp.activation == "relu",
        "gated squared ReLU": mlp.activation == "relu2" and mlp.gated,
    }
    if isinstance(attention, SoftmaxAttention):
        biases = "biases in q, k, v and the feed-forward part but not after attention"
        reasons |= {
            "attention in chunks": attention.chunked,
            "capped attention scores": bool(attention.logit_softcap),
            "attention sinks": attention.sinks,
            f"query and key norm of the kind {attention.qk_norm}": attention.qk_norm in ("full", "weightless"),
            biases: attention.qkv_bias and not attention.out_bias and mlp.bias,
        }
    if isinstance(mlp, MoE):
        reasons["bias in the router"] = mlp.router_bias
        reasons["sigmoid router without normalisation"] = mlp.router == "sigmoid" and not mlp.normalize
    return [reason for reason, holds in reasons.items() if holds]


def _missing_rope(model: ModelSpec) -> list[str]:
    rope = model.rope
    if rope is None or rope.scaling == "none":
        return []
    latent = any(isinstance(block.attention, LatentAttention) for block, _ in model.block_runs)
    if rope.scaling == "llama3" and (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0):
        return [] if rope.original_max_seq_len == 8192 else ["llama3 rope from another length than 8192"]
    if rope.scaling == "yarn" and latent:
        return [] if rope.original_max_seq_len == ORIGINAL_YARN_LEN else ["yarn from another length than 4096"]
    return [f"rope scaling {rope.scaling} with these factors"]


def _attention(attention: SoftmaxAttention | LatentAttention) -> Settings:
    if isinstance(attention, LatentAttention):
        return {
            "num_attention_heads": attention.num_heads,
            "multi_latent_attention": True,
            "q_lora_rank": attention.q_lora_rank or None,
            "kv_lora_rank": attention.kv_lora_rank,
            "qk_head_dim": attention.qk_nope_head_dim,
            "qk_pos_emb_head_dim": attention.qk_rope_head_dim,
            "v_head_dim": attention.v_head_dim,
            "qk_layernorm": True,
        }
    is_grouped = attention.num_kv_heads != attention.num_heads
    return {
        "num_attention_heads": attention.num_heads,
        "kv_channels": attention.head_dim,
        "group_query_attention": is_grouped,
        "num_query_groups": attention.num_kv_heads if is_grouped else None,
        "add_qkv_bias": attention.qkv_bias and not attention.out_bias,
        "qk_layernorm": attention.qk_norm == "per_head",
        "window_size": f"{attention.window - 1},0" if attention.window else None,
    }


def _positions(model: ModelSpec, seq_len: int) -> Settings:
    length = {"max_position_embeddings": max(seq_len, model.embedding.num_positions)}
    rope = model.rope
    if rope is None:
        return length | {"position_embedding_type": "learned_absolute"}
    attention = model.block_runs[0][0].attention
    settings = length | {"position_embedding_type": "rope", "rotary_base": int(rope.theta)}
    if isinstance(attention, SoftmaxAttention) and attention.rope_fraction < 1:
        settings["rotary_percent"] = attention.rope_fraction
    if rope.scaling == "llama3":
        settings |= {"use_rope_scaling": True, "rope_scaling_factor": rope.factor}
    if isinstance(attention, LatentAttention):
        settings["rope_type"] = "yarn" if rope.scaling == "yarn" else "rope"
    if rope.scaling == "yarn":
        settings |= {"rotary_scaling_factor": rope.factor, "mscale": rope.mscale or 1.0}
        settings["mscale_all_dim"] = rope.mscale_all_dim or 0.0
    return settings


def _feed_forward(mlp: DenseMLP | MoE) -> Settings:
    return {
        "swiglu": mlp.gated and mlp.activation == "silu",
        "squared_relu": mlp.activation == "relu2",
        "openai_gelu": mlp.activation == "gelu_tanh" and not mlp.gated,
        "disable_bias_linear": not mlp.bias,
    }


def _experts(model: ModelSpec, moe: MoE) -> Settings:
    is_moe = [isinstance(layer.mlp, MoE) for layer in model.iter_layers() if isinstance(layer, Block)]
    pattern = "+".join(f"[{int(kind)}]*{len(list(run))}" for kind, run in groupby(is_moe))
    return {
        "num_experts": moe.num_experts,
        "moe_layer_freq": f"({pattern})",
        "moe_ffn_hidden_size": moe.ffn_dim,
        "moe_router_topk": moe.top_k,
        "moe_router_score_function": "sigmoid" if moe.router == "sigmoid" else "softmax",
        "moe_router_pre_softmax": moe.router == "softmax" and not moe.normalize,
        "moe_router_enable_expert_bias": moe.router == "sigmoid",
        "moe_router_topk_scaling_factor": moe.scale if moe.scale != 1 else None,
        "moe_router_num_groups": moe.num_groups if moe.num_groups > 1 else None,
        "moe_router_group_topk": moe.top_groups if moe.num_groups > 1 else None,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_dim or None,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_dtype": "fp32",
    }


VERSION = "core_v0.19"

_PRECISION: dict[str, Settings] = {
    "bf16-mixed": {"bf16": True},
    "fp16-mixed": {"fp16": True},
    "fp8": {"bf16": True, "fp8_format": "hybrid"},
    "fp32": {},
}

LIMITS = (
    limits.rules_of("megatron"),
    limits.NO_LEVELS,
    limits.FULL_TRAINING,
    Limit(
        "leading_blocks_recompute",
        lambda p: p.layout.recompute != "mixed" or _leading(p) is not None,
        lambda p: (
            "recompute=mixed: Megatron recomputes the same number of leading blocks, fully, in every stage (method block)"
        ),
        "plan again with --fix recompute=full",
    ),
    Limit(
        "selective_of_all_blocks",
        lambda p: p.layout.recompute != "selective" or p.layout.recompute_fraction == 1,
        lambda p: f"selective recompute of {p.layout.recompute_fraction:g} of the blocks: Megatron's is of all of them",
        "plan again with --fix recompute=full",
    ),
    limits.offload_of("megatron", ("none", "optimizer"), "Megatron moves optimizer states only"),
    limits.precisions_of("megatron", tuple(_PRECISION), "Megatron keeps fp32 master parameters"),
)


def plan_settings(plan: TrainingPlan) -> Settings:
    """Return the options of layout and workload; what Megatron takes by default anyway is said too."""
    layout, work = plan.layout, plan.workload
    return {
        "seq_length": work.seq_len,
        "micro_batch_size": layout.micro_batch_size,
        "global_batch_size": work.global_batch_size,
        **_PRECISION[work.precision],
        "optimizer": {"adamw": "adam"}.get(work.optimizer, work.optimizer),
        "attention_backend": "flash" if work.attention == "flash" else "unfused",
        "attention_dropout": 0.1 if work.dropout else 0.0,
        "hidden_dropout": 0.1 if work.dropout else 0.0,
        **_parallel(layout, overlap=work.overlap, tp_overlap=work.tp_overlap, is_moe=plan.model.is_moe),
        **_stages(plan),
        **_recompute(plan),
        **(
            {"optimizer_cpu_offload": True, "optimizer_offload_fraction": layout.offload_fraction}
            if layout.offload == "optimizer"
            else {}
        ),
    }


def _parallel(layout: Layout, *, overlap: bool, tp_overlap: bool, is_moe: bool) -> Settings:
    sharded = layout.zero_stage == 1
    settings: Settings = {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "use_distributed_optimizer": sharded,
        "overlap_grad_reduce": overlap and layout.dp > 1,
        "overlap_param_gather": overlap and sharded and layout.dp > 1,
        "tp_comm_overlap": tp_overlap,
    }
    if sharded and layout.dp_replicate > 1:
        settings["num_distributed_optimizer_instances"] = layout.dp_replicate
    if layout.cp > 1:
        settings |= _exchange(layout.cp, layout.cp_ulysses)
    if is_moe:
        settings |= {
            "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": layout.expert_tp,
        }
    return settings


def _exchange(cp: int, ulysses: int) -> Settings:
    if ulysses == 1:
        return {"cp_comm_type": "p2p"}
    if ulysses == cp:
        return {"cp_comm_type": "a2a"}
    return {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [ulysses, cp // ulysses]}


def _stages(plan: TrainingPlan) -> Settings:
    """Return an even pipeline by its number of chunks, any other by its layout: stages in the order of the model, E embedding, t
    block, L head and loss.
    """
    layout = plan.layout
    if layout.pp == 1:
        return {}
    blocks = [_num_blocks(plan.model, stage) for stage in plan.stages]
    if len(set(blocks)) == 1:
        chunks = layout.num_model_chunks
        return {"num_virtual_stages_per_pipeline_rank": chunks} if chunks > 1 else {}
    last = len(blocks) - 1
    texts = [f"{'E' * (s == 0)}{f't*{n}' if n else ''}{'L' * (s == last)}" for s, n in enumerate(blocks)]
    return {"pipeline_model_parallel_layout": "|".join(texts)}


def _num_blocks(model: ModelSpec, stage: Stage) -> int:
    layers = tuple(model.iter_layers())
    return sum(isinstance(layers[idx], Block) for idx in stage.layer_idxs)


def _leading(plan: TrainingPlan) -> int | None:
    """Return how many blocks at the beginning of each stage recompute, where it is those and fully; None otherwise."""
    layers, numbers = tuple(plan.model.iter_layers()), set()
    for stage in plan.stages:
        choices = [stage.recompute_of(idx) for idx in stage.layer_idxs if isinstance(layers[idx], Block)]
        count = choices.count("full")
        if choices != ["full"] * count + ["none"] * (len(choices) - count):
            return None
        numbers.add((count, len(choices)))
    largest = max(count for count, _ in numbers)
    return largest if all(count == min(largest, blocks) for count, blocks in numbers) else None


def _recompute(plan: TrainingPlan) -> Settings:
    layout = plan.layout
    if layout.recompute == "none":
        return {}
    if layout.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": _modules(plan)}
    if layout.recompute == "full" and layout.recompute_fraction == 1:
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    largest = max(_num_blocks(plan.model, stage) for stage in plan.stages)
    count = _leading(plan) if layout.recompute == "mixed" else math.ceil(layout.recompute_fraction * largest)
    return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": count}


def _modules(plan: TrainingPlan) -> list[str]:
    """Return what selective recompute runs again: the core of unfused attention, or what lies between the products."""
    if plan.workload.attention == "math":
        return ["core_attn"]
    return ["layernorm", *(["moe_act"] if plan.model.is_moe else [])]


def recompute_not_expressed(plan: TrainingPlan) -> tuple[str, ...]:
    """Say how Megatron's selective recompute differs from the plan's."""
    if plan.layout.recompute != "selective" or plan.workload.attention == "math":
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
        return default if value is None else positive_integer(value, name)

    tp, pp, cp = (number(f"{axis}_parallel_size") for axis in ("tensor_model", "pipeline_model", "context"))
    dp = remaining_devices(num_devices, tp=tp, pp=pp, cp=cp)
    sharded = bool(settings.get("use_distributed_optimizer"))
    instances = number("num_distributed_optimizer_instances") if sharded else dp
    if dp % instances:
        raise ConfigError(f"num_distributed_optimizer_instances {instances} does not divide {dp} data-parallel ranks")
    ep, assumed = number("expert_model_parallel_size"), []
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
    }  # fmt: skip
    if settings.get("optimizer_cpu_offload"):
        fields |= {"offload": "optimizer", "offload_fraction": float(settings.get("optimizer_offload_fraction", 1.0))}
    return Layout(**fields), tuple(assumed)


def _chunks(settings: Mapping[str, Any], pp: int, model: ModelSpec | None) -> tuple[int, bool]:
    """Return the model chunks of a rank, and whether the stages are said one by one."""
    if text := settings.get("pipeline_model_parallel_layout"):
        stages = str(text).count("|") + 1
        if stages % pp:
            raise ConfigError(f"pipeline_model_parallel_layout has {stages} stages, not a multiple of pp {pp}")
        return stages // pp, True
    if value := settings.get("num_virtual_stages_per_pipeline_rank"):
        return positive_integer(value, "num_virtual_stages_per_pipeline_rank"), False
    if value := settings.get("num_layers_per_virtual_pipeline_stage"):
        layers = settings.get("num_layers") or (model.num_blocks if model else None)
        if layers is None:
            raise ConfigError("num_layers_per_virtual_pipeline_stage needs the number of layers", help="give --model")
        per_stage = positive_integer(value, "num_layers_per_virtual_pipeline_stage")
        return max(positive_integer(layers, "num_layers") // (pp * per_stage), 1), False
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
        return positive_integer(sizes[0], "hierarchical_context_parallel_sizes")
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
    count = positive_integer(settings.get("recompute_num_layers", 1), "recompute_num_layers")
    layers = settings.get("num_layers") or (model.num_blocks if model else None)
    if layers is None:
        raise ConfigError("recompute_method block needs the number of layers", help="give --model")
    return {
        "recompute": "full",
        "recompute_fraction": min(1.0, count * stages / positive_integer(layers, "num_layers")),
    }
