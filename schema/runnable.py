"""What the runtime of this version lacks for a model or a workload, whatever the layout: `layout_rules` are those of layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .layers import Attention, Block, DenseMLP, LatentAttention, MoE, SoftmaxAttention

if TYPE_CHECKING:
    from .model import ModelSpec
    from .task import Workload


def why_not_runnable(model: ModelSpec, workload: Workload | None = None) -> tuple[str, ...]:
    """Return what the runtime of this version lacks for a model, and for a workload where given; empty when it can train it."""
    of_workload = () if workload is None else why_not_trainable(workload)
    if model.traced_len is not None:
        return ("a model traced from code, which has a training loop of its own", *of_workload)
    learned, head = model.embedding.num_positions, model.head
    scaling = "" if model.rope is None else model.rope.scaling
    odd_rope = scaling not in ("", "none", "linear", "llama3", "yarn")
    lacks = [
        (
            odd_rope or (scaling and learned),
            f"position embedding {scaling}{', and learned positions' if learned else ''}",
        ),
        (not scaling and not learned, "a model without positions"),
        (any(run.layer.kind == "mtp" for run in model.layers), "multi-token-prediction heads"),
        (model.embedding.layernorm, "a norm of embeddings"),
        *((True, text) for text in model.also),
        (
            (head.norm == "layernorm") != head.norm_bias or not head.norm_weight or head.bias,
            "a head with a bias, or a last norm other than RMSNorm and LayerNorm with bias",
        ),
    ]
    if workload is not None and 0 < learned < workload.seq_len:
        lacks.append((True, f"a sequence length of {workload.seq_len} beyond the {learned} learned positions"))
    for block, _ in model.block_runs:
        lacks += _lacks_for_attention(block.attention, workload, rotated=bool(scaling)) + _lacks_for_block(
            block, workload
        )
    return (*of_workload, *dict.fromkeys(text for is_lacking, text in lacks if is_lacking))


def why_not_trainable(workload: Workload) -> tuple[str, ...]:
    """Return what the runtime lacks for a workload, whatever the model."""
    lacks = [
        (workload.precision in ("fp8", "nvfp4"), workload.precision),
        (workload.precision == "bf16", "bf16 without fp32 masters"),
        (workload.optimizer == "muon", "muon"),
        *((True, text) for text in workload.library_parts),
    ]
    if workload.adapters is not None:
        frozen = workload.adapters.frozen
        lacks.append((frozen != "16-bit", f"adapters next to a model frozen in {frozen} (leave frozen out of --train)"))
        lacks.append((workload.adapters.dropout, "adapters with dropout (add dropout=false to --train)"))
    return tuple(text for is_lacking, text in lacks if is_lacking)


def _lacks_for_attention(attention: Attention, workload: Workload | None, *, rotated: bool) -> list[tuple[Any, str]]:
    adapted = workload is not None and workload.adapters is not None and {"qkv", "out"} & {*workload.adapters.targets}
    if isinstance(attention, LatentAttention):
        return [
            (not rotated, "latent attention without rotary positions"),
            (rotated and attention.bias, "latent attention with biases"),
            (adapted, "adapters beside the products of latent attention"),
        ]
    if attention.passes_state:
        return [(True, f"a state in place of keys and values ({attention.kind.replace('_', ' ')})")]
    if not isinstance(attention, SoftmaxAttention):
        return []
    odd = attention.sinks or attention.logit_softcap or attention.qk_norm == "weightless"
    lacks: list[tuple[Any, str]] = [
        (
            odd or (rotated and attention.rope_fraction != 1),
            "attention sinks, soft caps, partial rotary or query/key norms without weights",
        ),
        (attention.gate != "none" or attention.out_norm, "a gate on the output of attention, or a norm of it"),
        (attention.qk_norm == "per_head_bias", "LayerNorm of queries and keys"),
    ]
    if workload is not None and attention.window is not None and attention.window < workload.seq_len:
        lacks.append((True, f"an attention window of {attention.window} below the sequence length {workload.seq_len}"))
    return lacks


def _lacks_for_block(block: Block, workload: Workload | None) -> list[tuple[Any, str]]:
    mlp, lacks = block.mlp, []
    if isinstance(mlp, MoE):
        odd_router = mlp.router == "top_k_softmax" or mlp.router_bias or mlp.bias
        adapted = workload is not None and workload.adapters is not None and "mlp" in workload.adapters.targets
        lacks += [
            (odd_router, f"a router by {mlp.router}, or experts with biases"),
            (adapted, "adapters beside the products of experts"),
        ]
    if isinstance(mlp, DenseMLP):
        lacks.append((mlp.inner_norm, "a norm within the feed-forward part"))
    is_odd_norm = (block.norm == "layernorm") != block.norm_bias or not block.norm_weight
    known = ("silu",) if mlp.gated else ("gelu", "gelu_tanh") if isinstance(mlp, DenseMLP) else ()
    return [
        *lacks,
        (
            mlp.activation not in known,
            f"a feed-forward part other than SwiGLU and GELU ({'gated ' * mlp.gated}{mlp.activation})",
        ),
        (
            is_odd_norm or block.num_norms != 2 or block.parallel_residual,
            "blocks other than two norms in sequence (RMSNorm, or LayerNorm with bias)",
        ),
    ]
