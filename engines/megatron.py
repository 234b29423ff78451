"""Megatron-LM: a shell script of options for pretrain_gpt.py, written and read back without running anything."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from ..schema.errors import ConfigError
from ..schema.layers import Block, DenseMLP, LatentAttention, MoE, SoftmaxAttention
from ..schema.model import ModelSpec
from ..schema.training_plan import TrainingPlan
from . import adapter
from .adapter import Adapter, Exported, Imported, Limit
from .megatron_settings import (
    LIMITS,
    VERSION,
    Settings,
    layout_from_settings,
    plan_settings,
    recompute_not_expressed,
)

SCRIPT = "pretrain.sh"
ORIGINAL_YARN_LEN = 4096
"""MLATransformerConfig.original_max_position_embeddings, which has no option."""

_LAUNCHER = frozenset({"nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint"})

_USED = _LAUNCHER | {
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout", "cp_comm_type", "hierarchical_context_parallel_sizes", "use_distributed_optimizer",
    "num_distributed_optimizer_instances", "sequence_parallel", "micro_batch_size", "global_batch_size", "seq_length",
    "num_layers", "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules",
    "recompute_activations", "optimizer_cpu_offload", "optimizer_offload_fraction", "bf16", "fp16", "fp8_format",
}  # fmt: skip


def write(plan: TrainingPlan) -> Exported:
    """Return the plan as options."""
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
    """Return every option that describes a model that lacks nothing of Megatron's GPT (`missing_of`)."""
    blocks = [block for block, _ in model.block_runs]
    dense = {block.mlp for block in blocks if isinstance(block.mlp, DenseMLP)}
    experts = {block.mlp for block in blocks if isinstance(block.mlp, MoE)}
    mlp: DenseMLP | MoE = next(iter(dense)) if dense else next(iter(experts))
    return {
        "num_layers": model.num_blocks,
        "hidden_size": model.hidden_dim,
        **_attention(blocks[0].attention),
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


def missing_of(model: ModelSpec) -> tuple[str, ...]:
    """Return what the model has and Megatron's GPT has not."""
    blocks = [block for block, _ in model.block_runs]
    dense = {block.mlp for block in blocks if isinstance(block.mlp, DenseMLP)}
    experts = {block.mlp for block in blocks if isinstance(block.mlp, MoE)}
    missing = [
        *(["attention that differs from layer to layer"] if len({block.attention for block in blocks}) > 1 else []),
        *(["dense parts of several widths"] if len(dense) > 1 else []),
        *(["experts of several kinds"] if len(experts) > 1 else []),
        *(reason for block in blocks for reason in _missing(block)),
        *_missing_rope(model),
    ]
    return tuple(dict.fromkeys(missing))


MODEL = Limit(
    "megatron_model",
    lambda p: not missing_of(p.model),
    lambda p: f"Megatron's GPT model has no {', no '.join(missing_of(p.model))}, which {p.model.name} needs",
    "plan without --engine megatron, or add it to Megatron's model",
)


def _missing(block: Block) -> list[str]:
    attention, mlp = block.attention, block.mlp
    if not isinstance(attention, SoftmaxAttention | LatentAttention) or not isinstance(mlp, DenseMLP | MoE):
        return [f"blocks of the kind {attention.kind}"]
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


def read(text: str, num_devices: int | None, model: ModelSpec | None) -> Imported:
    """Read a script or a command line with Megatron's options.

    Raises:
        ConfigError: it has none of them, or its numbers do not fit together.
    """
    settings = read_options(text)
    used = {name: value for name, value in settings.items() if name in _USED}
    if not used.keys() - _LAUNCHER:
        raise ConfigError("no option of Megatron-LM was found", help="e.g. --tensor-model-parallel-size 8")
    devices = num_devices or _world_size(settings)
    layout, assumed = layout_from_settings(used, devices, model)
    return Imported(
        engine="megatron",
        layout=layout,
        num_devices=devices,
        global_batch_size=adapter.optional_integer(settings, "global_batch_size"),
        seq_len=adapter.optional_integer(settings, "seq_length"),
        precision=_precision(settings),
        ignored=tuple(sorted(settings.keys() - used.keys())),
        assumed=assumed,
    )


def _world_size(settings: Settings) -> int:
    first = {name: value[0] if isinstance(value, list) else value for name, value in settings.items()}
    per_node = adapter.require_num_devices(first.get("nproc_per_node"))
    return adapter.positive_integer(first.get("nnodes") or 1, "nnodes") * adapter.positive_integer(
        per_node, "nproc-per-node"
    )


def _precision(settings: Settings) -> str:
    if settings.get("fp8_format"):
        return "fp8"
    return "bf16-mixed" if settings.get("bf16") else "fp16-mixed" if settings.get("fp16") else "fp32"


_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)

_SEPARATORS = re.compile(r"[();&|\n]+")

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::?[-=?][^}]*)?\}|\$([A-Za-z_][A-Za-z0-9_]*)")


def read_options(text: str) -> Settings:
    """Return the options of a script or of a command line by their names with underscores; variables that it sets are put in.

    A value is True (a bare flag), a number, a text, or a list of those.

    Raises:
        ConfigError: a quote is not closed.
    """
    lexer = shlex.shlex(
        text.replace("\\\n", " "), posix=True, punctuation_chars=";&|\n"
    )  # ends of commands are words too
    lexer.whitespace, lexer.whitespace_split = " \t\r", True
    try:
        words = list(lexer)
    except ValueError as error:
        raise ConfigError(f"not a shell script: {error}") from None
    options: dict[str, list[Any]] = {}
    current: list[Any] | None = None
    for word in _expanded(words):
        if _SEPARATORS.fullmatch(word) or _ASSIGNMENT.fullmatch(word):
            current = None
        elif word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            current = options[name.replace("-", "_")] = [_scalar(value)] if equals else []
        elif current is not None:
            current.append(_scalar(word))
    return {name: True if not values else values[0] if len(values) == 1 else values for name, values in options.items()}


def _expanded(words: list[str]) -> Iterator[str]:
    """Yield the words with variables of the text put in; one that is only a variable is taken apart, as the shell does."""
    variables: dict[str, str] = {}

    def filled(word: str) -> str:
        return _VARIABLE.sub(lambda m: variables.get(m[1] or m[2], m[0]), word)

    for word in words:
        match = _ASSIGNMENT.fullmatch(word)
        if match and not match[2].startswith("("):
            variables[match[1]] = filled(match[2])
            yield word
        elif _VARIABLE.fullmatch(word):
            yield from filled(word).split()
        else:
            yield filled(word)


def _scalar(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


ADAPTER = Adapter(version=VERSION, limits=(MODEL, *LIMITS), write=write, read_text=read)
