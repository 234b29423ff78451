"""Rules that any engine sets for a layout: named predicates on numbers or arrays, each with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .layers import DenseMLP, LatentAttention
from .layout import INTEGER_FIELDS, Layout
from .model import ModelSpec
from .schedules import SCHEDULE_NAMES, V_SCHEDULES, ScheduleName
from .task import Workload

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
    has_backward: bool = True
    vocabulary_is_split: IntLike = 0
    predicts_further_tokens: bool = False
    latent_attention: bool = False
    traced_len: int = 0

    @property
    def dp(self) -> IntLike:
        """Ranks that see different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def stage_ranks(self) -> IntLike:
        """Ranks of one pipeline stage."""
        return self.dp * self.cp * self.tp

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
        return self.global_batch_size // (self.dp * self.micro_batch_size)


class Undecided(Exception):  # noqa: N818
    """A rule looks at a field that is not chosen yet."""


@dataclass(frozen=True, kw_only=True)
class PartialFacts(Facts):
    """Facts of layouts of which some fields are chosen: whoever looks at one of ``unknown`` is `Undecided`.

    How many ranks see different sequences may be known, ``whole_dp``, where their split into dp_replicate and dp_shard is not.
    """

    unknown: frozenset[str]
    whole_dp: IntLike | None = None

    def __getattribute__(self, name: str) -> Any:
        """The field, if it is known."""
        if name in object.__getattribute__(self, "unknown"):
            raise Undecided(name)
        return object.__getattribute__(self, name)

    @property
    def dp(self) -> IntLike:
        """Ranks that see different sequences."""
        return super().dp if self.whole_dp is None else self.whole_dp


class Rule(NamedTuple):
    """``holds`` on numbers or arrays; ``reason`` on numbers."""

    name: str
    holds: Callable[[Facts], Any]
    reason: Callable[[Facts], str]


def all_divide(dims: tuple[int, ...], degree: IntLike) -> Any:
    """Whether ``degree`` divides each of ``dims``."""
    holds = degree == degree  # True, or an array of it
    for dim in dims:
        holds = holds & (dim % degree == 0)
    return holds


def not_dividing(dims: tuple[int, ...], degree: int) -> str:
    """Those it does not divide, for a message."""
    return ", ".join(str(dim) for dim in dims if dim % degree)


def as_array(value: Any) -> Any:
    """Numpy booleans: ``~`` of a Python one is not its negation."""
    return np.asarray(value, dtype=bool)


def runs(f: Facts, *schedules: ScheduleName) -> Any:
    """Whether the schedule is one of these, as numpy booleans (``~`` of a Python one is not its negation)."""
    return np.isin(f.schedule, [SCHEDULE_NAMES.index(schedule) for schedule in schedules])


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
        "traced_len": model.traced_len or 0,
    }


def layout_facts(
    model: ModelSpec, workload: Workload, layout: Layout, *, world_size: int, scaleup_domain: int
) -> Facts:
    """The facts of one layout, as numbers."""
    return Facts(
        **{name: getattr(layout, name) for name in INTEGER_FIELDS},
        sequence_parallel=int(layout.sequence_parallel),
        offloads=int(layout.offload not in ("none", "scheduled") or layout.offload_activations > 0),
        recomputes=int(layout.recompute != "none"),
        recompute_fraction=layout.recompute_fraction,
        schedule=SCHEDULE_NAMES.index(layout.schedule),
        world_size=world_size,
        scaleup_domain=scaleup_domain,
        seq_len=workload.seq_len,
        global_batch_size=workload.global_batch_size,
        fused_attention=workload.attention == "flash",
        has_backward=workload.has_backward,
        vocabulary_is_split=int(layout.vocabulary == "split"),
        **model_facts(model),
    )


TOKENS_OF_EXPERTS = Rule(
    "tokens_of_experts",
    lambda f: f.experts_follow_tp | (f.tp == 1) | (f.sequence_parallel != 0),
    lambda f: (
        f"ep {f.ep}, etp {f.etp} with tp {f.tp}: without sequence_parallel each token would reach its experts tp times"
    ),
)


EXCHANGE_RULES: tuple[Rule, ...] = (
    Rule(
        "ulysses_divides_cp",
        lambda f: f.cp % f.cp_ulysses == 0,
        lambda f: f"cp_ulysses {f.cp_ulysses} does not divide cp {f.cp}",
    ),
    Rule(
        "heads_per_ulysses",
        lambda f: all_divide(f.head_counts + f.kv_head_counts, f.tp * f.cp_ulysses) | (f.cp_ulysses == 1),
        lambda f: (
            f"{not_dividing(f.head_counts + f.kv_head_counts, f.tp * f.cp_ulysses)} query or key/value heads do not divide by "
            f"tp x cp_ulysses = {f.tp} x {f.cp_ulysses}: each rank attends with whole heads"
        ),
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
        "traced_blocks_whole",
        lambda f: (f.traced_len == 0) | ((f.tp == 1) & (f.cp == 1) & (f.ep == 1)),
        lambda f: (
            f"tp {f.tp}, cp {f.cp}, ep {f.ep}: the blocks were traced from code, which says what they cost and not how their "
            "matrices, sequences or experts may be split; data and pipeline parallelism, sharding and recompute are planned"
        ),
    ),
    Rule(
        "traced_length",
        lambda f: (f.tp > 0) & ((f.traced_len == 0) | (f.traced_len == f.seq_len)),
        lambda f: f"the model was traced with sequences of {f.traced_len} tokens, the workload has {f.seq_len}",
    ),
    Rule(
        "world_size",
        lambda f: f.dp * f.cp * f.tp * f.pp == f.world_size,
        lambda f: (
            f"dp_replicate x dp_shard x cp x tp x pp = {f.dp_replicate} x {f.dp_shard} x {f.cp} x {f.tp} x {f.pp} = "
            f"{f.dp_replicate * f.dp_shard * f.cp * f.tp * f.pp} ranks, the cluster has {f.world_size} devices"
        ),
    ),
    Rule(
        "batch_divides",
        lambda f: f.global_batch_size % (f.dp * f.micro_batch_size) == 0,
        lambda f: (
            f"global_batch_size {f.global_batch_size} is not a multiple of dp x micro_batch_size = "
            f"{f.dp_replicate * f.dp_shard} x {f.micro_batch_size}"
        ),
    ),
    Rule(
        "heads_per_tp",
        lambda f: all_divide(f.head_counts, f.tp),
        lambda f: f"{not_dividing(f.head_counts, f.tp)} attention heads do not divide by tp {f.tp}",
    ),
    Rule(
        "kv_heads_per_tp",
        lambda f: all_divide(f.kv_head_counts, f.tp),
        lambda f: f"{not_dividing(f.kv_head_counts, f.tp)} key/value heads do not divide by tp {f.tp}",
    ),
    Rule(
        "ffn_per_tp",
        lambda f: all_divide(f.ffn_dims, f.tp),
        lambda f: f"feed-forward width {not_dividing(f.ffn_dims, f.tp)} does not divide by tp {f.tp}",
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
    *EXCHANGE_RULES,
    Rule(
        "vocabulary_over_stages",
        lambda f: (
            ~as_array(f.vocabulary_is_split)
            | (runs(f, "1f1b") & (f.pp > 1) & (f.num_model_chunks == 1) & (not f.predicts_further_tokens))
        ),
        lambda f: (
            f"vocabulary=split with pp {f.pp}, num_model_chunks {f.num_model_chunks}, {SCHEDULE_NAMES[f.schedule]}: "
            "known for 1f1b over several stages of one chunk, without heads for further tokens"
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
            (f.num_model_chunks == 1)
            | ((f.pp > 1) & ((f.num_microbatches % f.pp == 0) | runs(f, *V_SCHEDULES, "synthesised")))
        ),
        lambda f: (
            f"num_model_chunks {f.num_model_chunks} needs pp > 1 and micro-batches in multiples of it; there are "
            f"{f.num_microbatches} for pp {f.pp}"
        ),
    ),
    Rule(
        "v_schedule_chunks",
        lambda f: ~runs(f, *V_SCHEDULES) | ((f.num_model_chunks == 2) & (f.pp > 1)),
        lambda f: (
            f"{SCHEDULE_NAMES[f.schedule]} runs two model chunks a rank over several stages; num_model_chunks is "
            f"{f.num_model_chunks}, pp {f.pp}"
        ),
    ),
    Rule(
        "zb_h2_chunks",
        lambda f: ~runs(f, "zb-h2") | (f.num_model_chunks == 1),
        lambda f: f"zb-h2 runs one stage a rank; num_model_chunks is {f.num_model_chunks}",
    ),
    Rule(
        "experts_per_ep",
        lambda f: all_divide(f.expert_counts, f.ep) & ((f.ep * f.etp == 1) | bool(f.expert_counts)),
        lambda f: (
            f"{not_dividing(f.expert_counts, f.ep)} experts do not divide by ep {f.ep}"
            if f.expert_counts
            else f"ep {f.ep}, etp {f.etp}: the model has no experts"
        ),
    ),
    Rule(
        "expert_ffn_per_etp",
        lambda f: all_divide(f.expert_ffn_dims, f.expert_tp),
        lambda f: (
            f"expert width {not_dividing(f.expert_ffn_dims, f.expert_tp)} does not divide over {f.expert_tp} ranks"
        ),
    ),
    Rule(
        "expert_ranks",
        lambda f: f.experts_follow_tp | (f.stage_ranks % (f.ep * f.etp) == 0),
        lambda f: f"ep x etp = {f.ep} x {f.etp} does not divide the {f.stage_ranks} ranks of a stage",
    ),
    TOKENS_OF_EXPERTS,
)
"""What any engine needs."""
