"""What the runtime of this version lacks for a model, a workload or an offload schedule; for a layout it stands in rules.py."""

from __future__ import annotations

import os

from .layout_facts import SPLIT_SCHEDULES
from .model import Block, ModelSpec, MoE, SoftmaxAttention
from .offload import OffloadSchedule
from .plan import Plan
from .workload import Workload


def why_not_runnable(model: ModelSpec, workload: Workload | None = None) -> tuple[str, ...]:
    """What the runtime of this version lacks for a model, and where given for a workload; empty when it can train it."""
    if model.traced_len is not None:
        return ("a model traced from code, which has a training loop of its own", *_of_workload(workload))
    reasons = [*_of_workload(workload), *_of_model(model)]
    learned = model.embedding.num_positions
    if workload is not None and 0 < learned < workload.seq_len:
        reasons.append(f"a sequence length of {workload.seq_len} beyond the {learned} learned positions")
    for block, _ in model.block_runs:
        reasons += [*_of_attention(block, workload, rotated=model.rope is not None), *_of_block(block)]
        reasons += _of_adapters(block, workload)
    return tuple(dict.fromkeys(reasons))


def why_not_trainable(workload: Workload) -> tuple[str, ...]:
    """What the runtime lacks for a workload, whatever the model."""
    return tuple(_of_workload(workload))


def why_not_offloadable(plan: Plan) -> tuple[str, ...]:
    """``reason [name]`` of everything in a plan's offload schedule that the installed torch or this version cannot execute."""
    schedule = plan.offload
    if schedule is None:
        return ()
    reasons = [*_of_states(plan, schedule), *_of_streamed_parameters(plan, schedule)]
    return tuple(dict.fromkeys(reasons))


def _of_states(plan: Plan, schedule: OffloadSchedule) -> list[str]:
    reasons: list[str] = []
    optimizer, away = plan.workload.optimizer, schedule.host_optimizer_layers + schedule.streamed_optimizer_layers
    if optimizer != "adamw" and away + schedule.storage_optimizer_layers:
        reasons.append(f"states of {optimizer} away from the device, where AdamW's can be   [offload_optimizer]")
    if schedule.storage_optimizer_layers and not hasattr(os, "posix_fallocate"):
        reasons.append(
            "states in a file on a system that cannot reserve its space (posix_fallocate)   [offload_storage]"
        )
    return reasons


def _of_streamed_parameters(plan: Plan, schedule: OffloadSchedule) -> list[str]:
    streamed, layout, reasons = {*schedule.streamed_parameter_layers}, plan.layout, []
    if not streamed:
        return []
    if layout.zero_stage not in (0, 3):
        reasons.append(
            f"streamed parameters under zero_stage {layout.zero_stage}, which gathers them once a step: they would never leave; "
            "use zero_stage 3   [streamed_parameters_zero_stage]"
        )
    if layout.pp > 1 and layout.schedule in SPLIT_SCHEDULES:
        reasons.append(
            f"streamed parameters under schedule {layout.schedule}: between a backward pass and its weight pass they must stay "
            "gathered   [streamed_parameters_split_backward]"
        )
    ends = {0, plan.model.num_layers - 1}
    if plan.model.tie_embeddings and len(streamed & ends) == 1:
        reasons.append(
            "the embedding or the head streamed without the other, which has the same parameter   [streamed_parameters_tied]"
        )
    return reasons


def _of_workload(workload: Workload | None) -> list[str]:
    if workload is None:
        return []
    reasons: list[str] = []
    if workload.precision in ("fp8", "nvfp4", "bf16"):
        reasons.append("bf16 without fp32 masters" if workload.precision == "bf16" else workload.precision)
    if workload.adapters is not None and workload.adapters.frozen != "16-bit":
        reasons.append(f"adapters beside a model frozen in {workload.adapters.frozen}")
    if workload.adapters is not None and workload.adapters.dropout:
        reasons.append("adapters with dropout")
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


def _of_adapters(block: Block, workload: Workload | None) -> list[str]:
    targets = () if workload is None or workload.adapters is None else workload.adapters.targets
    reasons: list[str] = []
    if not isinstance(block.attention, SoftmaxAttention) and {"qkv", "out"} & {*targets}:
        reasons.append("adapters beside the products of latent attention")
    if isinstance(block.mlp, MoE) and "mlp" in targets:
        reasons.append("adapters beside the products of experts")
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
