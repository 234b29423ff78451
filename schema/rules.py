"""What a layout must satisfy to be executed correctly: named predicates, each with its reason.

The search and the runtime use the same list, so that whatever `plan` can choose, `apply` can run. A predicate is written once
for numbers and for arrays of them: the search evaluates it over its whole space in one pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .errors import ConfigError
from .layout import NUMBERS, SCHEDULES, Layout, Schedule
from .model import DenseMLP, LatentAttention, ModelSpec
from .workload import Engine, Workload

IntLike = Any
"""An int, or an integer array with one entry per layout."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the rules look at: a layout (numbers or arrays) and the numbers of its model, workload and cluster."""

    dp_replicate: IntLike
    dp_shard: IntLike
    cp: IntLike
    cp_ulysses: IntLike = 1
    tp: IntLike
    pp: IntLike
    ep: IntLike
    etp: IntLike
    num_model_chunks: IntLike
    micro_batch_size: IntLike
    zero_stage: IntLike
    gradient_shard: IntLike = 1
    optimizer_shard: IntLike = 1
    sequence_parallel: IntLike
    schedule: IntLike
    world_size: int
    offloads: IntLike = 0
    recomputes: IntLike = 0
    recompute_fraction: IntLike = 1
    scaleup_domain: int
    seq_len: int
    global_batch_size: int
    num_blocks: int
    head_counts: tuple[int, ...]
    kv_head_counts: tuple[int, ...]
    ffn_dims: tuple[int, ...]
    vocab_size: int
    expert_counts: tuple[int, ...] = ()
    expert_ffn_dims: tuple[int, ...] = ()
    fused_attention: bool = True
    vocabulary_is_split: IntLike = 0
    predicts_further_tokens: bool = False
    latent_attention: bool = False

    @property
    def stage_ranks(self) -> IntLike:
        """Ranks of one pipeline stage."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def gradient_level(self) -> IntLike:
        """Data-parallel ranks over which gradients are sharded, under the stages that shard them."""
        return np.maximum(self.gradient_shard, self.dp_shard)

    @property
    def optimizer_level(self) -> IntLike:
        """The same for the optimizer states."""
        return np.maximum(self.optimizer_shard, self.gradient_level)

    @property
    def has_levels(self) -> IntLike:
        """Whether some state is sharded over more ranks than dp_shard."""
        return self.optimizer_level > self.dp_shard

    @property
    def experts_follow_tp(self) -> IntLike:
        """Experts have no axes of their own: they are split over tp."""
        return (self.ep == 1) & ((self.etp == 1) | (self.etp == self.tp))

    @property
    def expert_tp(self) -> IntLike:
        """Ranks that share one expert."""
        return self.etp + self.experts_follow_tp * (self.tp - self.etp)

    @property
    def num_microbatches(self) -> IntLike:
        """Whole micro-batches of one step on each data-parallel rank (rounded down)."""
        return self.global_batch_size // (self.dp_replicate * self.dp_shard * self.micro_batch_size)


V_SCHEDULES: tuple[Schedule, ...] = ("zb-v", "v-half", "v-min")
"""Each rank holds one stage of the way down the model and one of the way back up."""

SPLIT_SCHEDULES: tuple[Schedule, ...] = ("zb-h1", "zb-h2", *V_SCHEDULES, "synthesised")
"""Gradients of weights are passes of their own, which may come later than those of the inputs."""


class Rule(NamedTuple):
    """``holds`` on numbers or arrays; ``reason`` on numbers."""

    name: str
    holds: Callable[[Facts], Any]
    reason: Callable[[Facts], str]


def _all_divide(dims: tuple[int, ...], degree: IntLike) -> Any:
    holds = degree == degree  # True, or an array of it
    for dim in dims:
        holds = holds & (dim % degree == 0)
    return holds


def _not_dividing(dims: tuple[int, ...], degree: int) -> str:
    return ", ".join(str(dim) for dim in dims if dim % degree)


def _as_array(value: Any) -> Any:
    """Numpy booleans: ``~`` of a Python one is not its negation."""
    return np.asarray(value, dtype=bool)


def _runs(f: Facts, *schedules: Schedule) -> Any:
    """Whether the schedule is one of these, as numpy booleans (``~`` of a Python one is not its negation)."""
    return np.isin(f.schedule, [SCHEDULES.index(schedule) for schedule in schedules])


_EXCHANGE_RULES: tuple[Rule, ...] = (
    Rule(
        "ulysses_divides_cp",
        lambda f: f.cp % f.cp_ulysses == 0,
        lambda f: f"cp_ulysses {f.cp_ulysses} does not divide cp {f.cp}",
    ),
    Rule(
        "heads_per_ulysses",
        lambda f: _all_divide(f.head_counts + f.kv_head_counts, f.tp * f.cp_ulysses) | (f.cp_ulysses == 1),
        lambda f: (
            f"{_not_dividing(f.head_counts + f.kv_head_counts, f.tp * f.cp_ulysses)} query or key/value heads do not divide by "
            f"tp x cp_ulysses = {f.tp} x {f.cp_ulysses}: each rank attends with whole heads"
        ),
    ),
)

_MEGATRON_EXCHANGE = Rule(
    "megatron_exchange_of_latent",
    lambda f: (f.cp_ulysses == 1) | (f.cp_ulysses < f.cp) | (not f.latent_attention),
    lambda f: (
        f"cp_ulysses = cp = {f.cp} with latent attention: Transformer Engine takes keys and values of two widths only where they "
        "go round a ring (cp_comm_type p2p or a2a+p2p)"
    ),
)

_DEEPSPEED_EXCHANGE = Rule(
    "deepspeed_exchange",
    lambda f: (f.cp == 1) | ((f.cp_ulysses == f.cp) & (f.tp == 1)),
    lambda f: (
        f"cp {f.cp} with cp_ulysses {f.cp_ulysses}, tp {f.tp}: DeepSpeed's sequence parallelism is Ulysses over all of cp, "
        "without tensor parallelism"
    ),
)


def _shards_are_nested(f: Facts) -> Any:
    if np.all(f.gradient_shard == 1) and np.all(f.optimizer_shard == 1):
        return np.ones(np.shape(f.dp_shard), dtype=bool)
    dp, gradients = f.dp_replicate * f.dp_shard, f.gradient_level
    of_gradients = (f.zero_stage == 3) & (gradients % f.dp_shard == 0) & (dp % gradients == 0)
    of_states = (f.zero_stage >= 2) & (f.optimizer_shard % gradients == 0) & (dp % f.optimizer_shard == 0)
    return ((f.gradient_shard == 1) | of_gradients) & ((f.optimizer_shard == 1) | of_states)


ENGINE_RULES: tuple[Rule, ...] = (
    Rule(
        "world_size",
        lambda f: f.dp_replicate * f.dp_shard * f.cp * f.tp * f.pp == f.world_size,
        lambda f: (
            f"dp_replicate x dp_shard x cp x tp x pp = {f.dp_replicate} x {f.dp_shard} x {f.cp} x {f.tp} x {f.pp} = "
            f"{f.dp_replicate * f.dp_shard * f.cp * f.tp * f.pp} ranks, the cluster has {f.world_size} devices"
        ),
    ),
    Rule(
        "batch_divides",
        lambda f: f.global_batch_size % (f.dp_replicate * f.dp_shard * f.micro_batch_size) == 0,
        lambda f: (
            f"global_batch_size {f.global_batch_size} is not a multiple of dp x micro_batch_size = "
            f"{f.dp_replicate * f.dp_shard} x {f.micro_batch_size}"
        ),
    ),
    Rule(
        "heads_per_tp",
        lambda f: _all_divide(f.head_counts, f.tp),
        lambda f: f"{_not_dividing(f.head_counts, f.tp)} attention heads do not divide by tp {f.tp}",
    ),
    Rule(
        "kv_heads_per_tp",
        lambda f: _all_divide(f.kv_head_counts, f.tp),
        lambda f: f"{_not_dividing(f.kv_head_counts, f.tp)} key/value heads do not divide by tp {f.tp}",
    ),
    Rule(
        "ffn_per_tp",
        lambda f: _all_divide(f.ffn_dims, f.tp),
        lambda f: f"feed-forward width {_not_dividing(f.ffn_dims, f.tp)} does not divide by tp {f.tp}",
    ),
    Rule(
        "vocabulary_per_tp",
        lambda f: (f.tp - 1) * -(-f.vocab_size // f.tp) < f.vocab_size,
        lambda f: (
            f"a vocabulary of {f.vocab_size} in pieces of {-(-f.vocab_size // f.tp)} leaves none for the last of tp {f.tp}"
        ),
    ),
    Rule(
        "sequence_per_tp",
        lambda f: (f.sequence_parallel == 0) | (f.seq_len % (f.cp * f.tp) == 0),
        lambda f: f"seq_len {f.seq_len} does not divide by cp x tp = {f.cp * f.tp} (sequence parallel)",
    ),
    Rule(
        "sequence_per_cp",
        lambda f: (f.cp == 1) | (f.seq_len % (2 * f.cp) == 0),
        lambda f: (
            f"seq_len {f.seq_len} does not divide by 2 x cp = {2 * f.cp} (two pieces a rank, for even causal work)"
        ),
    ),
    Rule(
        "attention_per_cp",
        lambda f: (f.cp == 1) | f.fused_attention,
        lambda f: f"cp {f.cp} needs attention that merges parts by their sums (flash); math keeps whole rows of scores",
    ),
    *_EXCHANGE_RULES,
    Rule(
        "vocabulary_over_stages",
        lambda f: (
            ~_as_array(f.vocabulary_is_split)
            | (_runs(f, "1f1b") & (f.pp > 1) & (f.num_model_chunks == 1) & (not f.predicts_further_tokens))
        ),
        lambda f: (
            f"vocabulary=split with pp {f.pp}, num_model_chunks {f.num_model_chunks}, {SCHEDULES[f.schedule]}: known for 1f1b over "
            "several stages of one chunk, without heads for further tokens"
        ),
    ),
    Rule(
        "nested_shards",
        _shards_are_nested,
        lambda f: (
            f"dp_shard {f.dp_shard}, gradient_shard {f.gradient_shard}, optimizer_shard {f.optimizer_shard} of "
            f"{f.dp_replicate * f.dp_shard} data-parallel ranks under zero_stage {f.zero_stage}: each must be a multiple of "
            "the one before and divide all; gradients have a level of their own under zero_stage 3, optimizer states under 2 and 3"
        ),
    ),
    Rule(
        "layers_per_stage",
        lambda f: f.pp * f.num_model_chunks <= f.num_blocks,
        lambda f: f"{f.pp * f.num_model_chunks} pipeline stages for {f.num_blocks} blocks: each stage needs one",
    ),
    Rule(
        "interleaved_microbatches",
        lambda f: (
            (f.num_model_chunks == 1) | ((f.pp > 1) & ((f.num_microbatches % f.pp == 0) | _runs(f, *V_SCHEDULES)))
        ),
        lambda f: (
            f"num_model_chunks {f.num_model_chunks} needs pp > 1 and micro-batches in multiples of it; there are "
            f"{f.num_microbatches} for pp {f.pp}"
        ),
    ),
    Rule(
        "v_schedule_chunks",
        lambda f: ~_runs(f, *V_SCHEDULES) | ((f.num_model_chunks == 2) & (f.pp > 1)),
        lambda f: (
            f"{SCHEDULES[f.schedule]} runs two model chunks a rank over several stages; num_model_chunks is "
            f"{f.num_model_chunks}, pp {f.pp}"
        ),
    ),
    Rule(
        "zb_h2_chunks",
        lambda f: ~_runs(f, "zb-h2") | (f.num_model_chunks == 1),
        lambda f: f"zb-h2 runs one stage a rank; num_model_chunks is {f.num_model_chunks}",
    ),
    Rule(
        "experts_per_ep",
        lambda f: _all_divide(f.expert_counts, f.ep) & ((f.ep * f.etp == 1) | bool(f.expert_counts)),
        lambda f: (
            f"{_not_dividing(f.expert_counts, f.ep)} experts do not divide by ep {f.ep}"
            if f.expert_counts
            else f"ep {f.ep}, etp {f.etp}: the model has no experts"
        ),
    ),
    Rule(
        "expert_ffn_per_etp",
        lambda f: _all_divide(f.expert_ffn_dims, f.expert_tp),
        lambda f: (
            f"expert width {_not_dividing(f.expert_ffn_dims, f.expert_tp)} does not divide over {f.expert_tp} ranks"
        ),
    ),
    Rule(
        "expert_ranks",
        lambda f: f.experts_follow_tp | (f.stage_ranks % (f.ep * f.etp) == 0),
        lambda f: f"ep x etp = {f.ep} x {f.etp} does not divide the {f.stage_ranks} ranks of a stage",
    ),
    Rule(
        "tokens_of_experts",
        lambda f: f.experts_follow_tp | (f.tp == 1) | (f.sequence_parallel != 0),
        lambda f: (
            f"ep {f.ep}, etp {f.etp} with tp {f.tp}: without sequence_parallel each token would reach its experts tp times"
        ),
    ),
)
"""What any engine needs."""

_VOCABULARY_AT_ENDS = Rule(
    "vocabulary_at_ends",
    lambda f: ~_as_array(f.vocabulary_is_split),
    lambda f: (
        "vocabulary=split: the engine's schedules have no passes between which all stages exchange a micro-batch's sums; it is "
        "predicted only"
    ),
)

FSDP2_RULES: tuple[Rule, ...] = (
    _VOCABULARY_AT_ENDS,
    Rule(
        "schedule_in_chunks",
        lambda f: ~_runs(f, "zb-h2") | (f.num_model_chunks == 1),
        lambda f: f"schedule {SCHEDULES[f.schedule]} has no form with {f.num_model_chunks} model chunks a rank",
    ),
    Rule(
        "tp_in_scaleup_domain",
        lambda f: (f.tp == 1) | (f.scaleup_domain % f.tp == 0),
        lambda f: f"tp {f.tp} does not divide the {f.scaleup_domain} devices that share the fastest link",
    ),
    Rule(
        "microbatches_fill_pipeline",
        lambda f: ~_runs(f, "1f1b") | (f.pp == 1) | (f.num_microbatches >= f.pp),
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
        lambda f: ~_runs(f, *SPLIT_SCHEDULES) | (f.recomputes == 0),
        lambda f: (
            f"schedule {SCHEDULES[f.schedule]} with recompute: a backward pass in two parts would run what operator-level "
            "recompute made again twice (torch refuses), and keep what full recompute made until the second part"
        ),
    ),
    Rule(
        "levels_of_fully_shard",
        lambda f: ~_as_array(f.has_levels) | ((f.zero_stage == 3) & (f.gradient_level == f.optimizer_level)),
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
        lambda f: ~_as_array(f.has_levels),
        lambda f: (
            f"gradient_shard {f.gradient_shard}, optimizer_shard {f.optimizer_shard}: this version shards every state over dp_shard"
        ),
    ),
    Rule(
        "expert_width_alignment",
        lambda f: _all_divide(f.expert_ffn_dims, 8 * f.expert_tp),
        lambda f: (
            f"expert width {_not_dividing(f.expert_ffn_dims, 8 * f.expert_tp)} over {f.expert_tp} ranks: torch's grouped "
            "product takes rows of whole 16 bytes, 8 elements of bf16"
        ),
    ),
    Rule(
        "offload",
        lambda f: f.offloads == 0,
        lambda f: "offloading to the host is predicted, but this version does not execute it",
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
    lambda f: (f.pp == 1) | _runs(f, "1f1b"),
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
    _MEGATRON_EXCHANGE,
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
    _DEEPSPEED_EXCHANGE,
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
            ~_as_array(f.has_levels)
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


def exchange_rules(engine: Engine) -> tuple[Rule, ...]:
    """Of the rules of an engine those that look at tp, cp and cp_ulysses alone."""
    of_engine = {"megatron": (_MEGATRON_EXCHANGE,), "deepspeed": (_DEEPSPEED_EXCHANGE,)}
    return _EXCHANGE_RULES + of_engine.get(engine, ())


def rules_of(engine: Engine, *, runnable: bool = False) -> tuple[Rule, ...]:
    """What a layout must satisfy for an engine; of one that is not in RULES_OF_ENGINE only what any engine needs is known.

    Args:
        runnable: for our own runtime as it is in this version.
    """
    return ENGINE_RULES + RULES_OF_ENGINE.get(engine, ()) + (VERSION_RULES if runnable else ())


def require_our_engine(workload: Workload) -> None:
    """Raise unless a plan is for our own runtime.

    Raises:
        ConfigError: it is for another engine.
    """
    if workload.engine != "fsdp2":
        raise ConfigError(
            f"the plan is for {workload.engine}: `meshwright apply` runs plans for its own runtime (fsdp2) only",
            help=f"start {workload.engine} with the plan's layout, or plan again without --engine",
        )


def model_facts(model: ModelSpec) -> dict[str, Any]:
    """The numbers of a model that rules look at, as fields of `Facts`."""
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
        "predicts_further_tokens": any(run.layer.kind == "mtp" for run in model.layers),
        "latent_attention": any(isinstance(block.attention, LatentAttention) for block in blocks),
    }


def layout_facts(
    model: ModelSpec, workload: Workload, layout: Layout, *, world_size: int, scaleup_domain: int
) -> Facts:
    """The facts of one layout, as numbers."""
    return Facts(
        **{name: getattr(layout, name) for name in NUMBERS},
        sequence_parallel=int(layout.sequence_parallel),
        offloads=int(layout.offload != "none" or layout.offload_activations > 0),
        recomputes=int(layout.recompute != "none"),
        recompute_fraction=layout.recompute_fraction,
        schedule=SCHEDULES.index(layout.schedule),
        world_size=world_size,
        scaleup_domain=scaleup_domain,
        seq_len=workload.seq_len,
        global_batch_size=workload.global_batch_size,
        fused_attention=workload.attention == "flash",
        vocabulary_is_split=int(layout.vocabulary == "split"),
        **model_facts(model),
    )


def broken_rules(facts: Facts, rules: tuple[Rule, ...] = RULES) -> tuple[str, ...]:
    """``reason [name]`` of every rule the facts (numbers) break; empty when the layout can be executed."""
    return tuple(f"{rule.reason(facts)}   [{rule.name}]" for rule in rules if not rule.holds(facts))


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
    facts = layout_facts(model, workload, layout, world_size=world_size, scaleup_domain=scaleup_domain)
    broken = broken_rules(facts, rules)
    if broken:
        raise ConfigError(f"layout {layout} cannot run {model.name} on {world_size} devices", details=broken)
