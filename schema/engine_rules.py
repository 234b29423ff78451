"""What each engine executes besides, and what our own runtime of this version lacks."""

from __future__ import annotations

from .layout_rules import ENGINE_RULES, Rule, all_divide, as_array, not_dividing, runs
from .schedules import SCHEDULE_NAMES, SPLIT_SCHEDULES
from .task import Engine

MEGATRON_EXCHANGE = Rule(
    "megatron_exchange_of_latent",
    lambda f: (f.cp_ulysses == 1) | (f.cp_ulysses < f.cp) | (not f.latent_attention),
    lambda f: (
        f"cp_ulysses = cp = {f.cp} with latent attention: Transformer Engine takes keys and values of two widths only where they "
        "go round a ring (cp_comm_type p2p or a2a+p2p)"
    ),
)

MEGATRON_SEQUENCE = Rule(
    "megatron_experts_split_sequence",
    lambda f: (f.tp == 1) | (f.sequence_parallel != 0) | (len(f.expert_counts) == 0),
    lambda f: f"experts with tp {f.tp}: Megatron trains them with sequence_parallel only (MoELayer raises without)",
)

DEEPSPEED_EXCHANGE = Rule(
    "deepspeed_exchange",
    lambda f: (f.cp == 1) | ((f.cp_ulysses == f.cp) & (f.tp == 1)),
    lambda f: (
        f"cp {f.cp} with cp_ulysses {f.cp_ulysses}, tp {f.tp}: DeepSpeed's sequence parallelism is Ulysses over all of cp, "
        "without tensor parallelism"
    ),
)


_VOCABULARY_AT_ENDS = Rule(
    "vocabulary_at_ends",
    lambda f: ~as_array(f.vocabulary_is_split),
    lambda f: (
        "vocabulary=split: the engine's schedules have no passes between which all stages exchange a micro-batch's sums; it is "
        "predicted only"
    ),
)

FSDP2_RULES: tuple[Rule, ...] = (
    _VOCABULARY_AT_ENDS,
    Rule(
        "zeroth_order",
        lambda f: f.has_backward | ((f.pp == 1) & (f.recomputes == 0) & (f.offloads == 0)),
        lambda f: (
            f"pp {f.pp}, recompute or offload in zeroth-order training: it has no backward pass that a pipeline could interleave, "
            "and nothing to recompute or to move away"
        ),
    ),
    Rule(
        "schedule_in_chunks",
        lambda f: ~runs(f, "zb-h2") | (f.num_model_chunks == 1),
        lambda f: f"schedule {SCHEDULE_NAMES[f.schedule]} has no form with {f.num_model_chunks} model chunks a rank",
    ),
    Rule(
        "tp_in_scaleup_domain",
        lambda f: (f.tp == 1) | (f.scaleup_domain % f.tp == 0),
        lambda f: f"tp {f.tp} does not divide the {f.scaleup_domain} devices that share the fastest link",
    ),
    Rule(
        "microbatches_fill_pipeline",
        lambda f: ~runs(f, "1f1b") | (f.pp == 1) | (f.num_microbatches >= f.pp),
        lambda f: f"1f1b over {f.pp} stages needs as many micro-batches; there are {f.num_microbatches}",
    ),
    Rule(
        "zero_under_pipeline",
        lambda f: (f.pp == 1) | (f.zero_stage <= 1),
        lambda f: (
            f"zero_stage {f.zero_stage} with pp {f.pp}: under a pipeline torch keeps gathered parameters and whole gradients "
            "until the last micro-batch, so only the optimizer states are sharded (zero_stage 1)"
        ),
    ),
    Rule(
        "split_backward_keeps_activations",
        lambda f: ~runs(f, *SPLIT_SCHEDULES) | (f.recomputes == 0),
        lambda f: (
            f"schedule {SCHEDULE_NAMES[f.schedule]} with recompute: a backward pass in two parts would run what operator-level "
            "recompute made again twice (torch refuses), and keep what full recompute made until the second part"
        ),
    ),
    Rule(
        "levels_of_fully_shard",
        lambda f: ~as_array(f.has_levels) | ((f.zero_stage == 3) & (f.gradient_level == f.optimizer_level)),
        lambda f: (
            f"gradients over {f.gradient_level}, optimizer states over {f.optimizer_level} ranks under zero_stage {f.zero_stage}: "
            "fully_shard reduces gradients into the shards of the states; only parameters stay within fewer ranks between the "
            "passes (reshard_after_forward=N, zero_stage 3)"
        ),
    ),
)
"""What torch's parts execute, and execute well, besides."""

VERSION_RULES: tuple[Rule, ...] = (
    Rule(
        "levels_of_this_version",
        lambda f: ~as_array(f.has_levels),
        lambda f: (
            f"gradient_shard {f.gradient_shard}, optimizer_shard {f.optimizer_shard}: this version shards every state over dp_shard"
        ),
    ),
    Rule(
        "expert_width_alignment",
        lambda f: all_divide(f.expert_ffn_dims, 8 * f.expert_tp),
        lambda f: (
            f"expert width {not_dividing(f.expert_ffn_dims, 8 * f.expert_tp)} over {f.expert_tp} ranks: torch's grouped "
            "product takes rows of whole 16 bytes, 8 elements of bf16"
        ),
    ),
    Rule(
        "offload",
        lambda f: f.offloads == 0,
        lambda f: (
            "offloading is executed as a plan's schedule says (offload=scheduled); other forms are predicted only"
        ),
    ),
    Rule(
        "recompute_of_all_blocks",
        lambda f: f.recompute_fraction == 1,
        lambda f: f"recompute of {f.recompute_fraction:g} of the blocks: this version recomputes all of them or none",
    ),
)
"""What the runtime of this version lacks."""

RULES = (*ENGINE_RULES, *FSDP2_RULES, *VERSION_RULES)
"""What `apply` and `parallelize` need."""

_ONE_F_ONE_B = Rule(
    "schedule_of_engine",
    lambda f: (f.pp == 1) | runs(f, "1f1b"),
    lambda f: "the engine's pipelines run 1f1b only",
)

MEGATRON_RULES: tuple[Rule, ...] = (
    _VOCABULARY_AT_ENDS,
    Rule(
        "megatron_zero_stage",
        lambda f: f.zero_stage <= 1,
        lambda f: (
            f"zero_stage {f.zero_stage}: Megatron's distributed optimizer shards optimizer states only (zero_stage 1)"
        ),
    ),
    MEGATRON_EXCHANGE,
    MEGATRON_SEQUENCE,
    _ONE_F_ONE_B,
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
        lambda f: (f.pp == 1) | (f.zero_stage <= 1),
        lambda f: f"zero_stage {f.zero_stage} with pp {f.pp}: DeepSpeed's PipelineEngine takes zero_stage 0 and 1 only",
    ),
    Rule(
        "deepspeed_axes",
        lambda f: (f.ep == 1) & (f.etp == 1) & (f.num_model_chunks == 1),
        lambda f: (
            f"ep {f.ep}, etp {f.etp}, num_model_chunks {f.num_model_chunks}: planned with 1 of each for DeepSpeed"
        ),
    ),
    DEEPSPEED_EXCHANGE,
    Rule(
        "deepspeed_exchange_without_pipeline",
        lambda f: (f.cp == 1) | (f.pp == 1),
        lambda f: f"cp {f.cp} with pp {f.pp}: DeepSpeed's sequence parallelism takes no pipeline",
    ),
    Rule(
        "deepspeed_shards_over_all",
        lambda f: (f.zero_stage == 0) | (f.dp_replicate == 1) | ((f.zero_stage == 3) & (f.cp == 1)),
        lambda f: (
            f"dp_replicate {f.dp_replicate} with zero_stage {f.zero_stage}, cp {f.cp}: ZeRO shards over all data-parallel ranks; "
            "over fewer of them in stage 3 only (MiCS, hpZ), planned without sequence parallelism"
        ),
    ),
    Rule(
        "deepspeed_levels",
        lambda f: (
            ~as_array(f.has_levels)
            | (
                (f.zero_stage == 3)
                & (f.gradient_level == f.dp_replicate * f.dp_shard)
                & (f.gradient_level == f.optimizer_level)
            )
        ),
        lambda f: (
            f"gradients over {f.gradient_level}, optimizer states over {f.optimizer_level} of {f.dp_replicate * f.dp_shard} ranks "
            f"under zero_stage {f.zero_stage}: ZeRO++ keeps parameters within dp_shard ranks (zero_hpz_partition_size) and "
            "everything else over all, in stage 3"
        ),
    ),
    _ONE_F_ONE_B,
)
"""What DeepSpeed executes besides ENGINE_RULES: runtime/pipe/engine.py asserts a ZeRO stage below 2 (gradients are summed over
micro-batches) and has one schedule (TrainSchedule, 1f1b); tp is Megatron-DeepSpeed's, whose parallel_state asserts tp = pp = 1
beside sequence parallelism (--ds-sequence-parallel-size). In stage 3 mics_shard_size shards everything over islands and sums over
them when the step ends; zero_hpz_partition_size keeps a second copy of the parameters within islands for the backward pass.
"""


RULES_OF_ENGINE: dict[Engine, tuple[Rule, ...]] = {
    "fsdp2": FSDP2_RULES,
    "megatron": MEGATRON_RULES,
    "deepspeed": DEEPSPEED_RULES,
}
"""What each engine that can be planned for needs besides ENGINE_RULES."""
