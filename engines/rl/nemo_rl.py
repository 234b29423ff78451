"""NeMo RL: overrides of examples/configs/grpo_math_1B.yaml for examples/run_grpo.py.

Source of the names: that file of NVIDIA-NeMo/RL at 7ea279abf (tests/unit/engines/rl_fields.json has all names of the tables that
are written).
"""

from __future__ import annotations

from typing import Any

from ...schema.rl_plan import RlPlan
from ..adapter import Adapter, Exported, Limit
from .settings import (
    ALL_DEVICES,
    ALL_TOGETHER,
    ENTIRE_NODES,
    NO_ISLANDS,
    NO_TEACHER,
    ONE_OR_TWO_POOLS,
    SCRIPT,
    memory_fraction,
    nodes_of,
    same_layout,
    script,
)

VERSION = "0.5"
PRECISIONS = {"bf16-mixed": "bfloat16", "bf16": "bfloat16", "fp16-mixed": "float16", "fp32": "float32"}

LIMITS = (
    ONE_OR_TWO_POOLS,
    ALL_DEVICES,
    ALL_TOGETHER,
    ENTIRE_NODES,
    Limit(
        "grpo",
        lambda p: p.post_training.algorithm == "grpo",
        lambda p: f"the plan is for {p.post_training.algorithm}",
        "plan grpo",
    ),
    Limit(
        "staleness",
        lambda p: (
            p.post_training.staleness == int(p.post_training.staleness)
            and (len(p.pools) == 2 or not p.post_training.staleness)
        ),
        lambda p: (
            f"staleness {p.post_training.staleness:g} on {len(p.pools)} pools: the age of a sample is a number of entire steps"
        ),
        "plan with entire steps, split",
    ),
    NO_ISLANDS,
    NO_TEACHER,
    Limit(
        "log_probs",
        lambda p: p.post_training.log_probs == "actor",
        lambda p: "log-probabilities are the generator's: it computes them with the actor",
        'plan with log_probs = "actor"',
    ),
    Limit(
        "engine",
        lambda p: p.post_training.generation_engine == "vllm",
        lambda p: f"generation by {p.post_training.generation_engine}",
        "generation = vllm in [engines]",
    ),
    Limit(
        "precision",
        lambda p: p.post_training.precision in PRECISIONS,
        lambda p: f"precision {p.post_training.precision}",
        f"one of {', '.join(PRECISIONS)}",
    ),
    Limit(
        "attention_ranks",
        lambda p: p.copy_of("generator").serving.layout.attention_dp == 1,
        lambda p: f"attention_dp={p.copy_of('generator').serving.layout.attention_dp} of engine instances",
        "plan for verl, or fewer devices",
    ),
)


def write(plan: RlPlan) -> Exported:
    """Return the plan as a script with overrides."""
    work = plan.post_training
    actor, pool = plan.copy_of("actor"), plan.copy_of("generator").serving
    assert actor.training is not None
    assert pool is not None
    loss, longest = work.loss, work.prompt_len + work.max_len
    nodes, devices = plan.cluster.num_nodes, plan.cluster.groups[0].devices_per_node
    settings: dict[str, Any] = {
        "grpo.num_prompts_per_step": work.prompts,
        "grpo.num_generations_per_prompt": work.responses,
        "grpo.async_grpo.enabled": work.staleness > 0,
        "grpo.async_grpo.max_trajectory_age_steps": max(int(work.staleness), 1),
        "loss_fn.reference_policy_kl_penalty": loss.reference_weight,
        "loss_fn.ratio_clip_min": loss.clip,
        "loss_fn.ratio_clip_max": loss.clip,
        "loss_fn.use_importance_sampling_correction": work.staleness > 0,
        "policy.model_name": plan.model.name,
        "policy.train_global_batch_size": work.samples // work.updates,
        "policy.train_micro_batch_size": actor.training.layout.micro_batch_size,
        "policy.max_total_sequence_length": longest,
        "policy.precision": PRECISIONS[work.precision],
        **_training(plan),
        "policy.sequence_packing.enabled": True,
        "policy.generation.backend": "vllm",
        "policy.generation.temperature": loss.temperature,
        "policy.generation.vllm_cfg.async_engine": work.staleness > 0,
        "policy.generation.vllm_cfg.tensor_parallel_size": pool.layout.tp,
        "policy.generation.vllm_cfg.pipeline_parallel_size": pool.layout.pp,
        "policy.generation.vllm_cfg.expert_parallel_size": pool.layout.ep,
        "policy.generation.vllm_cfg.gpu_memory_utilization": memory_fraction(plan),
        "policy.generation.colocated.enabled": len(plan.pools) == 1,
        "cluster.num_nodes": nodes,
        "cluster.gpus_per_node": devices,
    }
    if len(plan.pools) == 2:
        count, on_each = nodes_of(plan, plan.copy_of("generator").pool)
        settings["policy.generation.colocated.resources.num_nodes"] = count if nodes > 1 else None
        settings["policy.generation.colocated.resources.gpus_per_node"] = on_each
    head = f"NeMo RL {VERSION}: {plan.model.name} on {plan.cluster.num_devices} devices"
    command = "uv run examples/run_grpo.py --config examples/configs/grpo_math_1B.yaml"
    return Exported(
        engine="nemo-rl",
        version=VERSION,
        files=((SCRIPT, script(head, command, settings)),),
        not_expressed=(
            *same_layout(plan, "reference"),
            *((f"oversample {work.oversample:g}",) if work.oversample > 1 else ()),
            *(f"the {copy.role}'s states are moved as NeMo RL does it" for copy in plan.copies if copy.is_offloaded),
        ),
        to_set=(
            "the folder of NeMo RL, policy.model_name as a folder or a name of the Hub",
            "data, environment and reward, learning rate",
        ),
        command=f"bash {SCRIPT}",
    )


def _training(plan: RlPlan) -> dict[str, Any]:
    """Return the layout of the policy: by Megatron where it has more axes than DTensor's."""
    training = plan.copy_of("actor").training
    assert training is not None
    layout = training.layout
    is_megatron = training.workload.engine == "megatron" or max(layout.pp, layout.ep) > 1
    recomputes = layout.recompute != "none"
    settings: dict[str, Any] = {
        "policy.megatron_cfg.enabled": is_megatron,
        "policy.dtensor_cfg.enabled": not is_megatron,
        "policy.make_sequence_length_divisible_by": max(layout.tp * layout.cp * (2 if layout.cp > 1 else 1), 1),
    }
    if is_megatron:
        return settings | {
            "policy.megatron_cfg.tensor_model_parallel_size": layout.tp,
            "policy.megatron_cfg.pipeline_model_parallel_size": layout.pp,
            "policy.megatron_cfg.context_parallel_size": layout.cp,
            "policy.megatron_cfg.expert_model_parallel_size": layout.ep,
            "policy.megatron_cfg.expert_tensor_parallel_size": layout.etp if layout.ep > 1 else 1,
            "policy.megatron_cfg.sequence_parallel": layout.sequence_parallel,
            "policy.megatron_cfg.activation_checkpointing": recomputes,
        }
    return settings | {
        "policy.dtensor_cfg.tensor_parallel_size": layout.tp,
        "policy.dtensor_cfg.context_parallel_size": layout.cp,
        "policy.dtensor_cfg.sequence_parallel": layout.sequence_parallel and layout.tp > 1,
        "policy.dtensor_cfg.activation_checkpointing": recomputes,
        "policy.dtensor_cfg.cpu_offload": plan.copy_of("actor").is_offloaded,
    }


ADAPTER = Adapter(version=VERSION, limits=LIMITS, write=write)
