"""Which models and workloads an engine trains: what is asked of it and it has not, as `EngineFacts.lacks` says.

`plan` refuses these before it searches, so that a plan that is made for an engine can be exported to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .layers import Block, DenseMLP, LatentAttention, MoE, SoftmaxAttention

if TYPE_CHECKING:
    from .model import ModelSpec
    from .task import Workload

Lacks = Callable[["ModelSpec", "Workload"], tuple[str, ...]]

ORIGINAL_YARN_LEN = 4096
"""MLATransformerConfig.original_max_position_embeddings of Megatron, which has no option."""

TORCHTITAN_MODELS = (
    "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "qwen3-32b", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b", "gpt-oss-120b",
)  # fmt: skip
"""Names in the catalogue of the models that torchtitan 0.3.0 has configurations of."""


def full_training(*precisions: str, reason: str, also: Lacks | None = None, script_trains: bool = False) -> Lacks:
    """Return what an engine lacks that trains all parameters, in these precisions, of every model but for what ``also`` says.

    ``script_trains``: loss and optimizer are those of the user's script, and not of the engine.
    """

    def lacks(model: ModelSpec, workload: Workload) -> tuple[str, ...]:
        # Who trains in fp32 does so in tf32 too: torch takes it from a variable (engines/adapter.py).
        reasons = [
            (workload.precision.replace("tf32", "fp32") not in precisions, f"precision {workload.precision}: {reason}"),
            (workload.adapters is not None, "adapters, which are set in the training script of the engine"),
            (not workload.has_backward, "training without a backward pass"),
            *((True, text) for text in workload.library_parts if not script_trains),
        ]
        return (*(text for holds, text in reasons if holds), *(also(model, workload) if also else ()))

    return lacks


def of_torchtitan(model: ModelSpec, _workload: Workload) -> tuple[str, ...]:
    """Return that torchtitan has no configuration of the model, where it has none."""
    if model.name in TORCHTITAN_MODELS:
        return ()
    return (f"model {model.name}: torchtitan has configurations of {', '.join(TORCHTITAN_MODELS)}",)


def of_megatron(model: ModelSpec, _workload: Workload) -> tuple[str, ...]:
    """Return what the model has and Megatron's GPT has not."""
    blocks = [block for block, _ in model.block_runs]
    dense = {block.mlp for block in blocks if isinstance(block.mlp, DenseMLP)}
    experts = {block.mlp for block in blocks if isinstance(block.mlp, MoE)}
    missing = [
        *model.also,
        *(["a norm of embeddings"] if model.embedding.layernorm else []),
        *(["attention that differs from layer to layer"] if len({block.attention for block in blocks}) > 1 else []),
        *(["dense parts of several widths"] if len(dense) > 1 else []),
        *(["experts of several kinds"] if len(experts) > 1 else []),
        *(reason for block in blocks for reason in _missing(block)),
        *_missing_rope(model),
    ]
    return tuple(f"{reason}, which {model.name} has" for reason in dict.fromkeys(missing))


def _missing(block: Block) -> list[str]:
    attention, mlp = block.attention, block.mlp
    if not isinstance(attention, SoftmaxAttention | LatentAttention) or not isinstance(mlp, DenseMLP | MoE):
        return [f"blocks of the kind {attention.kind}"]
    reasons = {
        f"blocks with {block.num_norms} norms": block.num_norms != 2,
        "attention and feed-forward part side by side": block.parallel_residual,
        "ReLU": mlp.activation == "relu",
        "xIELU": mlp.activation == "xielu",
        "a state in place of keys and values": attention.passes_state,
        "norms without weights": not block.norm_weight,
        "a norm within the feed-forward part": isinstance(mlp, DenseMLP) and mlp.inner_norm,
        "gated squared ReLU": mlp.activation == "relu2" and mlp.gated,
    }
    if isinstance(attention, SoftmaxAttention):
        biases = "biases in q, k, v and the feed-forward part but not after attention"
        reasons |= {
            "attention in chunks": attention.chunked,
            "capped attention scores": bool(attention.logit_softcap),
            "attention sinks": attention.sinks,
            "a gate on attention, or a norm after it": attention.gate != "none" or attention.out_norm,
            f"query and key norm of the kind {attention.qk_norm}": attention.qk_norm not in ("none", "per_head"),
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
