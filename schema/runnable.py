"""What the runtime of this version lacks for a model or a workload; what it lacks for a layout stands in rules.py."""

from __future__ import annotations

from .model import Block, ModelSpec, MoE, SoftmaxAttention
from .workload import Workload


def why_not_runnable(model: ModelSpec, workload: Workload | None = None) -> tuple[str, ...]:
    """What the runtime of this version lacks for a model, and where given for a workload; empty when it can train it."""
    reasons = [*_of_workload(workload), *_of_model(model)]
    learned = model.embedding.num_positions
    if workload is not None and 0 < learned < workload.seq_len:
        reasons.append(f"a sequence length of {workload.seq_len} beyond the {learned} learned positions")
    for block, _ in model.block_runs:
        reasons += [*_of_attention(block, workload, rotated=model.rope is not None), *_of_block(block)]
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
    learned = model.embedding.num_positions
    if model.rope is not None and (model.rope.scaling not in ("none", "linear", "llama3", "yarn") or learned):
        reasons.append(f"position embedding {model.rope.scaling}{', and learned positions' if learned else ''}")
    if model.rope is None and not learned:
        reasons.append("a model without positions")
    if any(run.layer.kind == "mtp" for run in model.layers):
        reasons.append("multi-token-prediction heads")
    if (model.head.norm == "layernorm") != model.head.norm_bias or model.head.bias:
        reasons.append("a head with a bias, or a last norm other than RMSNorm and LayerNorm with bias")
    return reasons


def _of_attention(block: Block, workload: Workload | None, *, rotated: bool) -> list[str]:
    attention = block.attention
    if not isinstance(attention, SoftmaxAttention):
        if not rotated:
            return ["latent attention without rotary positions"]
        return ["latent attention with biases"] if attention.bias else []
    reasons: list[str] = []
    odd = attention.sinks or attention.logit_softcap or attention.qk_norm == "weightless"
    if odd or (rotated and attention.rope_fraction != 1):
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
        known = mlp.gated and mlp.activation == "silu"
    else:
        known = mlp.activation == "silu" if mlp.gated else mlp.activation in ("gelu", "gelu_tanh")
    if not known:
        reasons.append(f"a feed-forward part other than SwiGLU and GELU ({'gated ' * mlp.gated}{mlp.activation})")
    if (block.norm == "layernorm") != block.norm_bias or block.num_norms != 2 or block.parallel_residual:
        reasons.append("blocks other than two norms in sequence (RMSNorm, or LayerNorm with bias)")
    return reasons
