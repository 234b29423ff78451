"""Checks of a layout, model, workload or offload schedule against what an engine, or our runtime in this version, executes."""

from __future__ import annotations

import os
from typing import Any

from .engine_facts import OWN_ENGINE
from .errors import ConfigError
from .layers import Block, DenseMLP, LatentAttention, MoE, SoftmaxAttention
from .layout import Layout
from .layout_rules import RULES, ProblemFacts, Rule
from .layout_table import LayoutRow
from .model import ModelSpec
from .offload import OffloadSchedule
from .schedules import SCHEDULES
from .task import Workload
from .training_plan import TrainingPlan


def model_facts(model: ModelSpec) -> dict[str, Any]:
    """Return the numbers of a model that rules look at, as fields of `ProblemFacts`."""
    blocks = [block for block, _ in model.block_runs]
    routed = [block.mlp for block in blocks if not isinstance(block.mlp, DenseMLP)]
    ffn_dims = {block.mlp.ffn_dim for block in blocks if isinstance(block.mlp, DenseMLP)}
    ffn_dims |= {moe.shared_ffn_dim for moe in routed if moe.shared_ffn_dim}
    return {
        "num_blocks": model.num_blocks,
        "head_counts": tuple(sorted({block.attention.num_heads for block in blocks})),
        "kv_head_counts": tuple(sorted({block.attention.num_kv_heads for block in blocks})),
        "ffn_dims": tuple(sorted(ffn_dims)),
        "expert_counts": tuple(sorted({moe.num_experts for moe in routed})),
        "expert_ffn_dims": tuple(sorted({moe.ffn_dim for moe in routed})),
        "vocab_size": model.vocab_size,
        "has_mtp_heads": any(run.layer.kind == "mtp" for run in model.layers),
        "latent_attention": any(isinstance(block.attention, LatentAttention) for block in blocks),
        "traced_len": model.traced_len or 0,
    }


def problem_facts(model: ModelSpec, workload: Workload, *, world_size: int, scaleup_domain: int) -> ProblemFacts:
    """Return the numbers of a model, a workload and a cluster that rules look at."""
    return ProblemFacts(
        world_size=world_size,
        scaleup_domain=scaleup_domain,
        seq_len=workload.seq_len,
        global_batch_size=workload.global_batch_size,
        fused_attention=workload.attention == "flash"
        and all(block.attention.is_attention for block, _ in model.block_runs),
        has_backward=workload.has_backward,
        **model_facts(model),
    )


def broken_rules(layout: Layout, problem: ProblemFacts, rules: tuple[Rule, ...] = RULES) -> tuple[str, ...]:
    """Return ``reason [name]`` of every rule that a layout breaks; empty when it can be executed."""
    row = LayoutRow.from_layout(layout)
    return tuple(rule.explain(row, problem) for rule in rules if not rule.holds(row, problem))


def require_valid(
    model: ModelSpec,
    workload: Workload,
    layout: Layout,
    *,
    world_size: int,
    scaleup_domain: int,
    rules: tuple[Rule, ...] = RULES,
) -> None:
    """Raise unless every one of ``rules`` holds.

    Raises:
        ConfigError: names each broken rule with its numbers.
    """
    problem = problem_facts(model, workload, world_size=world_size, scaleup_domain=scaleup_domain)
    broken = broken_rules(layout, problem, rules)
    if broken:
        raise ConfigError(f"layout {layout} cannot run {model.name} on {world_size} devices", details=broken)


def require_our_engine(workload: Workload) -> None:
    """Raise unless a plan is for our own runtime.

    Raises:
        ConfigError: it is for another engine.
    """
    if not workload.engine_facts.is_own_runtime:
        raise ConfigError(
            f"the plan is for {workload.engine}: `meshwright apply` runs plans for its own runtime ({OWN_ENGINE}) only",
            help=f"start {workload.engine} with the plan's layout, or plan again without --engine",
        )


def why_not_runnable(model: ModelSpec, workload: Workload | None = None) -> tuple[str, ...]:
    """Return what the runtime of this version lacks for a model, and for a workload where given; empty when it can train it."""
    if model.traced_len is not None:
        return ("a model traced from code, which has a training loop of its own", *_workload_reasons(workload))
    reasons = [*_workload_reasons(workload), *_model_reasons(model)]
    learned = model.embedding.num_positions
    if workload is not None and 0 < learned < workload.seq_len:
        reasons.append(f"a sequence length of {workload.seq_len} beyond the {learned} learned positions")
    for block, _ in model.block_runs:
        reasons += [*_attention_reasons(block, workload, rotated=model.rope is not None), *_block_reasons(block)]
        reasons += _adapter_reasons(block, workload)
    return tuple(dict.fromkeys(reasons))


def why_not_trainable(workload: Workload) -> tuple[str, ...]:
    """Return what the runtime lacks for a workload, whatever the model."""
    return tuple(_workload_reasons(workload))


def why_not_offloadable(plan: TrainingPlan) -> tuple[str, ...]:
    """Return ``reason [name]`` of everything in a plan's offload schedule that torch or this version cannot execute."""
    schedule = plan.offload
    if schedule is None:
        return ()
    reasons = [*_optimizer_state_reasons(plan, schedule), *_streamed_parameter_reasons(plan, schedule)]
    return tuple(dict.fromkeys(reasons))


def _optimizer_state_reasons(plan: TrainingPlan, schedule: OffloadSchedule) -> list[str]:
    reasons: list[str] = []
    optimizer, away = plan.workload.optimizer, schedule.host_optimizer_layers + schedule.streamed_optimizer_layers
    if optimizer != "adamw" and away + schedule.storage_optimizer_layers:
        reasons.append(f"states of {optimizer} away from the device, where AdamW's can be   [offload_optimizer]")
    if schedule.storage_optimizer_layers and not hasattr(os, "posix_fallocate"):
        reasons.append(
            "states in a file on a system that cannot reserve its space (posix_fallocate)   [offload_storage]"
        )
    return reasons


def _streamed_parameter_reasons(plan: TrainingPlan, schedule: OffloadSchedule) -> list[str]:
    streamed, layout, reasons = {*schedule.streamed_parameter_layers}, plan.layout, []
    if not streamed:
        return []
    if layout.zero_stage not in (0, 3):
        reasons.append(
            f"streamed parameters under zero_stage {layout.zero_stage}, which gathers them once a step: they would never leave; "
            "use zero_stage 3   [streamed_parameters_zero_stage]"
        )
    if layout.pp > 1 and SCHEDULES[layout.schedule].splits_backward:
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


def _workload_reasons(workload: Workload | None) -> list[str]:
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


def _model_reasons(model: ModelSpec) -> list[str]:
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


def _attention_reasons(block: Block, workload: Workload | None, *, rotated: bool) -> list[str]:
    attention = block.attention
    if isinstance(attention, LatentAttention):
        if not rotated:
            return ["latent attention without rotary positions"]
        return ["latent attention with biases"] if attention.bias else []
    if not attention.is_attention:
        return []
    reasons: list[str] = []
    odd = attention.sinks or attention.logit_softcap or attention.qk_norm == "weightless"
    if odd or (rotated and attention.rope_fraction != 1):
        reasons.append("attention sinks, soft caps, partial rotary or query/key norms without weights")
    if workload is not None and attention.window is not None and attention.window < workload.seq_len:
        reasons.append(f"an attention window of {attention.window} below the sequence length {workload.seq_len}")
    return reasons


def _adapter_reasons(block: Block, workload: Workload | None) -> list[str]:
    targets = () if workload is None or workload.adapters is None else workload.adapters.targets
    reasons: list[str] = []
    if not isinstance(block.attention, SoftmaxAttention) and {"qkv", "out"} & {*targets}:
        reasons.append("adapters beside the products of latent attention")
    if isinstance(block.mlp, MoE) and "mlp" in targets:
        reasons.append("adapters beside the products of experts")
    return reasons


def _block_reasons(block: Block) -> list[str]:
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
