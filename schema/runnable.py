"""What the runtime of this version lacks for a model or a workload; what it lacks for a layout stands in rules.py."""

from __future__ import annotations

from .model import Block, ModelSpec, MoE, SoftmaxAttention
from .workload import Workload


def why_not_runnable(model: ModelSpec, workload: Workload | None = None) -> tuple[str, ...]:
    """What the runtime of this version lacks for a model, and where given for a workload; empty when it can train it."""
    reasons = [*_of_workload(workload), *_of_model(model)]
    for block, _ in model.block_runs:
        reasons += [*_of_attention(block, workload), *_of_block(block)]
    return tuple(dict.fromkeys(reasons))


def _of_workload(workload: Workload | None) -> list[str]:
    if workload is None:
        return []
    reasons: list[str] = []
    if workload.precision in ("fp8", "nvfp4", "bf16"):
        reasons.append("bf16 without fp32 masters" if workload.precision == "bf16" else workload.precision)
    if workload.adapters is not None:
        reasons.append("low-rank adapters beside a frozen model")
    if workload.optimizer == "muon":
        reasons.append("muon")
    return reasons


def _of_model(model: ModelSpec) -> list[str]:
    reasons: list[str] = []
    if model.rope is None or model.rope.scaling not in ("none", "linear", "llama3", "yarn"):
        reasons.append(f"position embedding {model.rope.scaling if model.rope else 'learned'}")
    if any(run.layer.kind == "mtp" for run in model.layers):
        reasons.append("multi-token-prediction heads")
    if model.head.norm != "rmsnorm" or model.head.bias:
        reasons.append("a head with layernorm or bias")
    return reasons


def _of_attention(block: Block, workload: Workload | None) -> list[str]:
    attention = block.attention
    if not isinstance(attention, SoftmaxAttention):
        return ["latent attention with biases"] if attention.bias else []
    reasons: list[str] = []
    odd = attention.sinks or attention.logit_softcap or attention.qk_norm == "weightless"
    if odd or attention.rope_fraction != 1:
        reasons.append("attention sinks, soft caps, partial rotary or query/key norms without weights")
    if workload is not None and attention.window is not None and attention.window < workload.seq_len:
        reasons.append(f"an attention window of {attention.window} below the sequence length {workload.seq_len}")
    return reasons


def _of_block(block: Block) -> list[str]:
    mlp, reasons = block.mlp, []
    if isinstance(mlp, MoE):
        if mlp.router == "top_k_softmax" or mlp.router_bias or mlp.bias:
            reasons.append(f"a router by {mlp.router}, or experts with biases")
        mlp = mlp.expert
    if not mlp.gated or mlp.activation != "silu":
        reasons.append(f"a feed-forward part other than SwiGLU ({mlp.activation})")
    if block.norm != "rmsnorm" or block.num_norms != 2 or block.parallel_residual:
        reasons.append("blocks other than two RMSNorms in sequence")
    return reasons
