"""verl: overrides of `ppo_trainer` or `ppo_megatron_trainer`, and of one_step_off_policy where weights may be a step old.

Source of the names: verl/trainer/config/_generated_ppo_trainer.yaml, _generated_ppo_megatron_trainer.yaml and
verl/experimental/one_step_off_policy/config at b178a3cd5 (tests/unit/engines/rl_fields.json has all names of the first two).
"""

from __future__ import annotations

from typing import Any

from ...schema.rl import Role
from ...schema.rl_plan import RlPlan
from ...schema.training_plan import TrainingPlan
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
    tokens_of_pass,
)

VERSION = "0.8"

LIMITS = (
    ONE_OR_TWO_POOLS,
    ALL_DEVICES,
    ALL_TOGETHER,
    ENTIRE_NODES,
    Limit(
        "staleness",
        lambda p: p.post_training.staleness == (1 if len(p.pools) == 2 else 0),
        lambda p: (
            f"staleness {p.post_training.staleness:g} on {len(p.pools)} pools: one pool waits, two are one step off"
        ),
        "plan with placement = colocated and staleness = 0, or split and 1",
    ),
    Limit(
        "mini_batches",
        lambda p: p.post_training.prompts % p.post_training.updates == 0,
        lambda p: (
            f"{p.post_training.prompts} prompts in {p.post_training.updates} updates: a mini-batch has entire prompts"
        ),
        "updates that divide prompts",
    ),
    NO_ISLANDS,
    NO_TEACHER,
    Limit(
        "engine",
        lambda p: p.post_training.generation_engine in ("vllm", "sglang"),
        lambda p: f"generation by {p.post_training.generation_engine}",
        "generation = vllm or sglang in [engines]",
    ),
)


def write(plan: RlPlan) -> Exported:
    """Return the plan as a script with overrides."""
    work = plan.post_training
    actor = plan.copy_of("actor").training
    assert actor is not None
    is_megatron = _is_megatron(actor)
    is_split = len(plan.pools) == 2
    settings = {**_algorithm(plan), **_generation(plan)}
    settings |= _copy(plan, "actor", "actor_rollout_ref.actor", is_megatron=is_megatron)
    settings["actor_rollout_ref.model.path"] = plan.model.name
    if "reference" in work.roles:
        settings |= _offload(plan, "reference", "actor_rollout_ref.ref", is_megatron=is_megatron)
    if "critic" in work.roles:
        settings["critic.model.path"] = work.model_of("critic").name
        settings |= _copy(plan, "critic", "critic", is_megatron=is_megatron)
    nodes, devices = nodes_of(plan, plan.copy_of("actor").pool)
    settings |= {"trainer.nnodes": nodes, "trainer.n_gpus_per_node": devices}
    module, config = "verl.trainer.main_ppo", "ppo_megatron_trainer" if is_megatron else "ppo_trainer"
    if is_split:
        module = "verl.experimental.one_step_off_policy.main_ppo"
        config = "one_step_off_ppo_megatron_trainer" if is_megatron else "one_step_off_ppo_trainer"
        nodes, devices = nodes_of(plan, plan.copy_of("generator").pool)
        settings |= {
            "actor_rollout_ref.hybrid_engine": False,
            "rollout.nnodes": nodes,
            "rollout.n_gpus_per_node": devices,
        }
    head = f"verl {VERSION}: {plan.model.name} on {plan.cluster.num_devices} devices"
    oversample = (f"oversample {work.oversample:g}: responses are not carried over",) if work.oversample > 1 else ()
    return Exported(
        engine="verl",
        version=VERSION,
        files=((SCRIPT, script(head, f"python3 -m {module} --config-name={config}", settings)),),
        not_expressed=(*same_layout(plan, "reference"), *oversample),
        to_set=(
            "model.path of each model: a folder or a name of the Hub",
            "data.train_files, data.val_files, data.max_prompt_length, actor_rollout_ref.actor.optim.lr",
            f"custom_reward_function.path and name: the plan's is {work.reward_function or 'a model'}",
        ),
        command=f"bash {SCRIPT}",
    )


def _is_megatron(plan: TrainingPlan) -> bool:
    layout = plan.layout
    return plan.workload.engine == "megatron" or max(layout.tp, layout.pp, layout.ep) > 1


def _algorithm(plan: RlPlan) -> dict[str, Any]:
    work, loss = plan.post_training, plan.post_training.loss
    has_kl = loss.reference_weight > 0
    return {
        "algorithm.adv_estimator": "gae" if work.algorithm == "ppo" else "grpo",
        "algorithm.gamma": loss.discount,
        "algorithm.lam": loss.trace,
        "data.train_batch_size": work.prompts,
        "data.max_response_length": work.max_len,
        "actor_rollout_ref.actor.ppo_mini_batch_size": work.prompts // work.updates,
        "actor_rollout_ref.actor.clip_ratio": loss.clip,
        "actor_rollout_ref.actor.use_kl_loss": has_kl,
        "actor_rollout_ref.actor.kl_loss_coef": loss.reference_weight,
    }


def _generation(plan: RlPlan) -> dict[str, Any]:
    work, pool = plan.post_training, plan.copy_of("generator").serving
    assert pool is not None
    prefix = "actor_rollout_ref.rollout"
    return {
        f"{prefix}.name": work.generation_engine,
        f"{prefix}.n": work.responses,
        f"{prefix}.temperature": work.loss.temperature,
        f"{prefix}.tensor_model_parallel_size": pool.layout.tp,
        f"{prefix}.pipeline_model_parallel_size": pool.layout.pp,
        f"{prefix}.data_parallel_size": pool.layout.attention_dp,
        f"{prefix}.expert_parallel_size": pool.layout.ep,
        f"{prefix}.max_num_seqs": pool.limits.max_batch,
        f"{prefix}.max_num_batched_tokens": pool.limits.max_batched_tokens,
        f"{prefix}.gpu_memory_utilization": memory_fraction(plan),
        f"{prefix}.calculate_log_probs": work.log_probs == "generator",
        "algorithm.rollout_correction.bypass_mode": work.log_probs == "generator",
    }


def _copy(plan: RlPlan, role: Role, prefix: str, *, is_megatron: bool) -> dict[str, Any]:
    """Return what a copy that is updated is told of its layout."""
    training = plan.copy_of(role).training
    assert training is not None
    layout = training.layout
    settings: dict[str, Any] = {
        f"{prefix}.use_dynamic_bsz": True,
        f"{prefix}.ppo_max_token_len_per_gpu": tokens_of_pass(plan, training),
    }
    if is_megatron:
        settings |= {
            f"{prefix}.megatron.tensor_model_parallel_size": layout.tp,
            f"{prefix}.megatron.pipeline_model_parallel_size": layout.pp,
            f"{prefix}.megatron.virtual_pipeline_model_parallel_size": layout.num_model_chunks
            if layout.num_model_chunks > 1
            else None,
            f"{prefix}.megatron.context_parallel_size": layout.cp,
            f"{prefix}.megatron.expert_model_parallel_size": layout.ep,
            f"{prefix}.megatron.expert_tensor_parallel_size": layout.etp if layout.ep > 1 else None,
            f"{prefix}.megatron.sequence_parallel": layout.sequence_parallel,
        }
    else:
        fsdp = f"{prefix}.fsdp_config" if role == "actor" else f"{prefix}.model.fsdp_config"
        model = "actor_rollout_ref.model" if role == "actor" else f"{prefix}.model"
        settings |= {
            f"{prefix}.strategy": "fsdp2",
            f"{prefix}.ulysses_sequence_parallel_size": layout.cp,
            f"{fsdp}.fsdp_size": layout.dp_shard * layout.cp,
            f"{fsdp}.reshard_after_forward": layout.zero_stage == 3,
            f"{model}.enable_gradient_checkpointing": layout.recompute != "none",
        }
    return settings | _offload(plan, role, prefix, is_megatron=is_megatron)


def _offload(plan: RlPlan, role: Role, prefix: str, *, is_megatron: bool) -> dict[str, Any]:
    """Return whether a copy's states lie on the host between its calls."""
    is_offloaded = plan.copy_of(role).is_offloaded
    place = f"{prefix}.megatron" if is_megatron else f"{prefix}.fsdp_config"
    if role == "critic" and not is_megatron:
        place = f"{prefix}.model.fsdp_config"
    names = ("param_offload",) if role == "reference" else ("param_offload", "optimizer_offload")
    return {f"{place}.{name}": is_offloaded for name in names}


ADAPTER = Adapter(version=VERSION, limits=LIMITS, write=write)
