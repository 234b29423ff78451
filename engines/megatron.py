"""Megatron-LM: a shell script of options for pretrain_gpt.py, written and read back without running anything."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from ..schema.layers import Block, DenseMLP, LatentAttention, MoE, SoftmaxAttention
from ..schema.model import ModelSpec
from ..schema.training_plan import TrainingPlan
from . import adapter
from .adapter import Adapter, Exported, Imported, comment
from .launch import megatron as launch
from .launch.command import allows_tf32
from .launch.shell import read_script
from .megatron_settings import (
    LIMITS,
    VERSION,
    Settings,
    plan_settings,
    recompute_not_expressed,
)

SCRIPT = "pretrain.sh"


def write(plan: TrainingPlan) -> Exported:
    """Return the plan as options."""
    text = "\n".join(
        [
            "#!/usr/bin/env bash",
            comment(
                f"Megatron-LM {VERSION}: {plan.model.name} on {plan.cluster.num_devices} devices, {plan.layout}"
            ).rstrip(),
            "# Run on every node. What you add on the command line goes to pretrain_gpt.py:",
            "# data, tokenizer, learning rate, --train-iters, checkpoints.",
            "set -euo pipefail",
            *(["export CUDA_DEVICE_MAX_CONNECTIONS=1"] if plan.layout.tp * plan.layout.cp > 1 else []),
            *(f"export {variable}" for variable in adapter.environment(plan)),
            "",
            bash_array("MODEL_ARGS", model_settings(plan.model, plan.workload.seq_len)),
            "",
            bash_array("PLAN_ARGS", plan_settings(plan)),
            "",
            f'{adapter.torchrun(plan)} pretrain_gpt.py "${{MODEL_ARGS[@]}}" "${{PLAN_ARGS[@]}}" "$@"',
            "",
        ]
    )
    return Exported(
        engine="megatron",
        version=VERSION,
        files=((SCRIPT, text),),
        not_expressed=(*adapter.placement_not_expressed(plan), *recompute_not_expressed(plan)),
        to_set=(
            "data, tokenizer, learning rate and its schedule, --train-iters, checkpoints: after the script's name",
        ),
        command=f"bash {SCRIPT} --train-iters 1000 --lr 3e-4 --mock-data --tokenizer-type NullTokenizer",
    )


def bash_array(name: str, settings: Settings) -> str:
    """Return ``NAME=(`` one ``--name value`` a line ``)``; True is a bare flag, False and None say nothing."""
    lines = []
    for option, value in settings.items():
        if value is None or value is False:
            continue
        words = [] if value is True else value if isinstance(value, list) else [value]
        lines.append(" ".join([f"    --{option.replace('_', '-')}", *(shlex.quote(str(word)) for word in words)]))
    return "\n".join([f"{name}=(", *lines, ")"])


def model_settings(model: ModelSpec, seq_len: int) -> Settings:
    """Return every option that describes a model that lacks nothing of Megatron's GPT (schema/engine_models.py)."""
    blocks = [block for block, _ in model.block_runs]
    dense = {block.mlp for block in blocks if isinstance(block.mlp, DenseMLP)}
    experts = {block.mlp for block in blocks if isinstance(block.mlp, MoE)}
    attention = blocks[0].attention
    assert isinstance(attention, SoftmaxAttention | LatentAttention), "models of Megatron's GPT have no others"
    mlp: DenseMLP | MoE = next(iter(dense)) if dense else next(iter(experts))
    return {
        "num_layers": model.num_blocks,
        "hidden_size": model.hidden_dim,
        **_attention(attention),
        "normalization": "RMSNorm" if blocks[0].norm == "rmsnorm" else "LayerNorm",
        "norm_epsilon": model.norm_eps,
        **_positions(model, seq_len),
        "vocab_size": model.vocab_size,
        "make_vocab_size_divisible_by": 1,
        "untie_embeddings_and_output_weights": not model.tie_embeddings,
        "swiglu": mlp.gated and mlp.activation == "silu",
        "squared_relu": mlp.activation == "relu2",
        "openai_gelu": mlp.activation == "gelu_tanh" and not mlp.gated,
        "disable_bias_linear": not mlp.bias,
        "ffn_hidden_size": mlp.ffn_dim,
        **(_experts(model, next(iter(experts))) if experts else {}),
    }


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
        "moe_router_dtype": "fp32",
    }


def read(text: str, num_devices: int | None, model: ModelSpec | None) -> Imported:
    """Read a script or a command line with Megatron's options.

    Raises:
        ConfigError: it has none of them, or its numbers do not fit together.
    """
    settings = launch.settings_of(text)
    devices = num_devices or _world_size(settings)
    imported = launch.imported_from(settings, devices, model)
    if imported.precision == "fp32" and allows_tf32(read_script(text, Path(SCRIPT))):
        imported = imported.replace(precision="tf32")
    return imported.replace(ignored=tuple(sorted(name.lstrip("-").replace("-", "_") for name in settings.ignored())))


def _world_size(settings: Mapping[str, Any]) -> int:
    per_node, nodes = (settings.get(name) for name in ("nproc_per_node", "nnodes"))
    per_node, nodes = (value[0] if isinstance(value, list) else value for value in (per_node, nodes))
    per_node = adapter.require_num_devices(per_node)
    return adapter.positive_integer(nodes or 1, "nnodes") * adapter.positive_integer(per_node, "nproc-per-node")


ADAPTER = Adapter(version=VERSION, limits=(*adapter.limits_of("megatron"), *LIMITS), write=write, read_text=read)
