"""Rules of single engines for layouts, and what our own runtime lacks in this version."""

from __future__ import annotations

import numpy as np

from .layout_rules import ENGINE_RULES, Rule, all_divide, not_dividing
from .schedules import run_by

MEGATRON_EXCHANGE = Rule(
    "megatron_exchange_of_latent",
    "cp cp_ulysses",
    lambda t, p: (t.cp_ulysses == 1) | (t.cp_ulysses < t.cp) | (not p.latent_attention),
    "cp_ulysses = cp = {t.cp} with latent attention: Transformer Engine takes keys and values of two widths only where they "
    "go round a ring (cp_comm_type p2p or a2a+p2p)",
)

MEGATRON_SEQUENCE = Rule(
    "megatron_experts_split_sequence",
    "tp sequence_parallel",
    lambda t, p: (t.tp == 1) | (t.sequence_parallel != 0) | (len(p.expert_counts) == 0),
    "experts with tp {t.tp}: Megatron trains them with sequence_parallel only (MoELayer raises without)",
)

DEEPSPEED_EXCHANGE = Rule(
    "deepspeed_exchange",
    "cp cp_ulysses tp",
    lambda t, p: (t.cp == 1) | ((t.cp_ulysses == t.cp) & (t.tp == 1)),
    "cp {t.cp} with cp_ulysses {t.cp_ulysses}, tp {t.tp}: DeepSpeed's sequence parallelism is Ulysses over all of cp, "
    "without tensor parallelism",
)

_VOCABULARY_AT_ENDS = Rule(
    "vocabulary_at_ends",
    "vocabulary",
    lambda t, p: np.logical_not(t.splits_vocabulary),
    "vocabulary=split: the engine's schedules have no passes between which all stages exchange a micro-batch's sums; it is "
    "predicted only",
)

FSDP2_RULES: tuple[Rule, ...] = (
    _VOCABULARY_AT_ENDS,
    Rule(
        "zeroth_order",
        "pp recompute offload offload_activations",
        lambda t, p: p.has_backward | ((t.pp == 1) & ~t.recomputes & ~t.offloads),
        "pp {t.pp}, recompute or offload in zeroth-order training: it has no backward pass that a pipeline could interleave, "
        "and nothing to recompute or to move away",
    ),
    Rule(
        "schedule_in_chunks",
        "schedule num_model_chunks",
        lambda t, p: (t.schedule_fact("chunks") != "one") | (t.num_model_chunks == 1),
        "schedule {t.schedule_name} has no form with {t.num_model_chunks} model chunks a rank",
    ),
    Rule(
        "tp_in_scaleup_domain",
        "tp",
        lambda t, p: (t.tp == 1) | (p.scaleup_domain % t.tp == 0),
        "tp {t.tp} does not divide the {p.scaleup_domain} devices that share the fastest link",
    ),
    Rule(
        "microbatches_fill_pipeline",
        "schedule pp dp micro_batch_size",
        lambda t, p: ~t.schedule_fact("needs_full_pipeline") | (t.pp == 1) | (p.num_microbatches(t) >= t.pp),
        lambda t, p: f"1f1b over {t.pp} stages needs as many micro-batches; there are {p.num_microbatches(t)}",
    ),
    Rule(
        "zero_under_pipeline",
        "pp zero_stage",
        lambda t, p: (t.pp == 1) | (t.zero_stage <= 1),
        "zero_stage {t.zero_stage} with pp {t.pp}: under a pipeline torch keeps gathered parameters and whole gradients "
        "until the last micro-batch, so only the optimizer states are sharded (zero_stage 1)",
    ),
    Rule(
        "split_backward_keeps_activations",
        "schedule recompute",
        lambda t, p: ~t.schedule_fact("splits_backward") | ~t.recomputes,
        "schedule {t.schedule_name} with recompute: a backward pass in two parts would run what operator-level "
        "recompute made again twice (torch refuses), and keep what full recompute made until the second part",
    ),
    Rule(
        "levels_of_fully_shard",
        "dp_shard gradient_shard optimizer_shard zero_stage",
        lambda t, p: np.logical_not(t.has_levels) | ((t.zero_stage == 3) & (t.gradient_level == t.optimizer_level)),
        "gradients over {t.gradient_level}, optimizer states over {t.optimizer_level} ranks under zero_stage {t.zero_stage}: "
        "fully_shard reduces gradients into the shards of the states; only parameters stay within fewer ranks between the "
        "passes (reshard_after_forward=N, zero_stage 3)",
    ),
)
"""What torch's parts execute, and execute well, besides."""

VERSION_RULES: tuple[Rule, ...] = (
    Rule(
        "levels_of_this_version",
        "dp_shard gradient_shard optimizer_shard",
        lambda t, p: np.logical_not(t.has_levels),
        "gradient_shard {t.gradient_shard}, optimizer_shard {t.optimizer_shard}: this version shards every state over dp_shard",
    ),
    Rule(
        "expert_width_alignment",
        "ep etp tp",
        lambda t, p: all_divide(p.expert_ffn_dims, 8 * t.expert_tp),
        lambda t, p: (
            f"expert width {not_dividing(p.expert_ffn_dims, 8 * t.expert_tp)} over {t.expert_tp} ranks: torch's grouped "
            "product takes rows of whole 16 bytes, 8 elements of bf16"
        ),
    ),
    Rule(
        "offload",
        "offload offload_activations",
        lambda t, p: ~t.offloads,
        "offloading is executed as a plan's schedule says (offload=scheduled); other forms are predicted only",
    ),
    Rule(
        "recompute_of_all_blocks",
        "recompute_fraction",
        lambda t, p: t.recompute_fraction == 1,
        "recompute of {t.recompute_fraction:g} of the blocks: this version recomputes all of them or none",
    ),
)
"""What the runtime of this version lacks."""

RULES = (*ENGINE_RULES, *FSDP2_RULES, *VERSION_RULES)
"""What `apply` and `parallelize` need."""


def _schedules_of(engine: str) -> Rule:
    return Rule(
        "schedule_of_engine",
        "pp schedule",
        lambda t, p: (t.pp == 1) | run_by(engine)[t.schedule],
        lambda t, p: "the engine's pipelines run 1f1b only",
    )


MEGATRON_RULES: tuple[Rule, ...] = (
    _VOCABULARY_AT_ENDS,
    Rule(
        "megatron_zero_stage",
        "zero_stage",
        lambda t, p: t.zero_stage <= 1,
        "zero_stage {t.zero_stage}: Megatron's distributed optimizer shards optimizer states only (zero_stage 1)",
    ),
    MEGATRON_EXCHANGE,
    MEGATRON_SEQUENCE,
    _schedules_of("megatron"),
)
"""What Megatron-Core executes besides ENGINE_RULES: DistributedOptimizer shards states over the data-parallel ranks or, with
num_distributed_optimizer_instances, over groups of them; schedules.py has 1f1b, plain (with fewer micro-batches than stages
too) and interleaved (micro-batches in multiples of pp: ENGINE_RULES); uneven stages through pipeline_model_parallel_layout;
no levels of their own for states (Megatron-FSDP, which has them with outer_dp_sharding_strategy=optim, is another engine);
cp_comm_type p2p (a ring), a2a (Ulysses) and a2a+p2p (hierarchical_context_parallel_sizes: Ulysses inside, a ring of those outside).
"""

DEEPSPEED_RULES: tuple[Rule, ...] = (
    _VOCABULARY_AT_ENDS,
    Rule(
        "deepspeed_zero_under_pipeline",
        "pp zero_stage",
        lambda t, p: (t.pp == 1) | (t.zero_stage <= 1),
        "zero_stage {t.zero_stage} with pp {t.pp}: DeepSpeed's PipelineEngine takes zero_stage 0 and 1 only",
    ),
    Rule(
        "deepspeed_axes",
        "ep etp num_model_chunks",
        lambda t, p: (t.ep == 1) & (t.etp == 1) & (t.num_model_chunks == 1),
        "ep {t.ep}, etp {t.etp}, num_model_chunks {t.num_model_chunks}: planned with 1 of each for DeepSpeed",
    ),
    DEEPSPEED_EXCHANGE,
    Rule(
        "deepspeed_exchange_without_pipeline",
        "cp pp",
        lambda t, p: (t.cp == 1) | (t.pp == 1),
        "cp {t.cp} with pp {t.pp}: DeepSpeed's sequence parallelism takes no pipeline",
    ),
    Rule(
        "deepspeed_shards_over_all",
        "zero_stage dp_replicate cp",
        lambda t, p: (t.zero_stage == 0) | (t.dp_replicate == 1) | ((t.zero_stage == 3) & (t.cp == 1)),
        "dp_replicate {t.dp_replicate} with zero_stage {t.zero_stage}, cp {t.cp}: ZeRO shards over all data-parallel ranks; "
        "over fewer of them in stage 3 only (MiCS, hpZ), planned without sequence parallelism",
    ),
    Rule(
        "deepspeed_levels",
        "dp_replicate dp_shard gradient_shard optimizer_shard zero_stage",
        lambda t, p: (
            np.logical_not(t.has_levels)
            | ((t.zero_stage == 3) & (t.gradient_level == t.dp) & (t.gradient_level == t.optimizer_level))
        ),
        "gradients over {t.gradient_level}, optimizer states over {t.optimizer_level} of {t.dp} ranks "
        "under zero_stage {t.zero_stage}: ZeRO++ keeps parameters within dp_shard ranks (zero_hpz_partition_size) and "
        "everything else over all, in stage 3",
    ),
    _schedules_of("deepspeed"),
)
"""What DeepSpeed executes besides ENGINE_RULES: runtime/pipe/engine.py asserts a ZeRO stage below 2 (gradients are summed over
micro-batches) and has one schedule (TrainSchedule, 1f1b); tp is Megatron-DeepSpeed's, whose parallel_state asserts tp = pp = 1
with sequence parallelism (--ds-sequence-parallel-size). In stage 3 mics_shard_size shards everything over islands and sums over
them when the step ends; zero_hpz_partition_size keeps a second copy of the parameters within islands for the backward pass.
"""
