"""What cannot be executed: rules for layouts, each with its reason. What our runtime lacks for any layout is in runnable.py.

The search and the runtime use the same rules, so that whatever `plan` can choose, `apply` can run. A rule gets a layout, as one row
of numbers (`LayoutRow`) or as a table of arrays (`LayoutTable`), and the numbers of the problem (`ProblemFacts`). It says which
fields of a layout it needs, so that the enumeration asks it as soon as these are chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .errors import ConfigError
from .layers import DenseMLP, LatentAttention, MoE
from .layout import SWITCHES, Layout, choices
from .layout_table import LayoutRow
from .units import Numbers

if TYPE_CHECKING:
    from .cluster import ClusterSpec
    from .model import ModelSpec
    from .task import Workload

Rows = Any
"""A LayoutRow or a LayoutTable: what they have in common is written once for both."""


@dataclass(frozen=True, kw_only=True)
class ProblemFacts:
    """The numbers of a model, a workload and a cluster that rules look at.

    Attributes:
        head_counts, kv_head_counts, ffn_dims, expert_counts, expert_ffn_dims: those that occur in some block.
        hidden_dim: of a model of known layers, else 0.
        traced_len: tokens of the sequences that a traced model was counted for; 0 for a model of known layers.
        takes_uneven_shares: of the engine (`EngineFacts`).
        not_split, not_along_sequence, split_widths, not_staged, not_sharded, min_samples, placed_degrees: of a traced model
            (`CodeFacts`).
    """

    world_size: int
    scaleup_domain: int
    seq_len: int
    global_batch_size: int
    num_blocks: int
    head_counts: tuple[int, ...]
    kv_head_counts: tuple[int, ...]
    ffn_dims: tuple[int, ...]
    vocab_size: int
    hidden_dim: int = 0
    expert_counts: tuple[int, ...] = ()
    expert_ffn_dims: tuple[int, ...] = ()
    fused_attention: bool = True
    has_backward: bool = True
    is_nvidia: bool = True
    has_mtp_heads: bool = False
    latent_attention: bool = False
    traced_len: int = 0
    not_split: str = ""
    not_along_sequence: str = ""
    split_widths: tuple[int, ...] = ()
    not_staged: str = ""
    not_sharded: str = ""
    min_samples: int = 1
    placed_degrees: tuple[int, ...] = ()
    is_fp32: bool = False
    takes_uneven_shares: bool = True
    has_halves: bool = False
    runs_in_halves: bool = False
    prefetches: bool = False

    def num_microbatches(self, t: Rows) -> Numbers:
        """Return the micro-batches of one step on the data-parallel rank that has most."""
        return -(-self.global_batch_size // (t.dp * t.micro_batch_size))


def problem_facts(
    model: ModelSpec, workload: Workload, *, world_size: int, scaleup_domain: int, is_nvidia: bool = True
) -> ProblemFacts:
    """Return the numbers of a model, a workload and a cluster that rules look at."""
    blocks = [block for block, _ in model.block_runs]
    routed = [block.mlp for block in blocks if isinstance(block.mlp, MoE)]
    known = [block for block in blocks if block.counted is None]  # others have stand-ins
    ffn_dims = {block.mlp.ffn_dim for block in known if isinstance(block.mlp, DenseMLP)}
    merges_parts = [block.attention.is_attention or block.attention.passes_state for block in blocks]
    return ProblemFacts(
        world_size=world_size,
        scaleup_domain=scaleup_domain,
        seq_len=workload.seq_len,
        global_batch_size=workload.global_batch_size,
        num_blocks=model.num_blocks,
        head_counts=tuple(sorted({block.attention.num_heads for block in known})),
        kv_head_counts=tuple(sorted({block.attention.num_kv_heads for block in known})),
        ffn_dims=tuple(sorted(ffn_dims | {moe.shared_ffn_dim for moe in routed if moe.shared_ffn_dim})),
        vocab_size=model.vocab_size,
        hidden_dim=model.hidden_dim if known else 0,
        expert_counts=tuple(sorted({moe.num_experts for moe in routed})),
        expert_ffn_dims=tuple(sorted({moe.ffn_dim for moe in routed})),
        fused_attention=workload.attention == "flash" and all(merges_parts),
        has_backward=workload.has_backward,
        is_nvidia=is_nvidia,
        has_mtp_heads=any(run.layer.kind == "mtp" for run in model.layers),
        latent_attention=any(isinstance(block.attention, LatentAttention) for block in blocks),
        traced_len=model.traced_len or 0,
        **(_UNKNOWN if model.code is None and model.traced_len else {} if model.code is None else model.code.facts),
        is_fp32=workload.is_full_precision,
        takes_uneven_shares=workload.engine_facts.takes_uneven_shares,
        has_halves=workload.engine_facts.cuts_blocks and model.in_halves is not None,
        prefetches=workload.engine_facts.is_own_runtime,
        runs_in_halves=workload.has_backward and any(block.runs_in_halves for block in blocks),
    )


def problem_on(model: ModelSpec, workload: Workload, cluster: ClusterSpec) -> ProblemFacts:
    """Return those numbers where all devices of a cluster take part."""
    return problem_facts(
        model, workload, world_size=cluster.num_devices, scaleup_domain=cluster.scaleup_domain,
        is_nvidia=cluster.is_nvidia,
    )  # fmt: skip


_UNKNOWN = {"not_split": "how the layers of a model are split, and into stages, was not traced by earlier versions"}
_UNKNOWN |= {"not_staged": _UNKNOWN["not_split"]}


class Rule(NamedTuple):
    """A condition on layouts.

    Attributes:
        name: the label that messages and counts show.
        needs: the fields of a layout that it looks at, separated by blanks; ``dp`` stands for dp_replicate x dp_shard.
        holds: the condition, on numbers or arrays.
        reason: why a row breaks it, as a text with fields of the row, ``{t.tp}``, and of the problem, ``{p.seq_len}``; or a
            function of both.
    """

    name: str
    needs: str
    holds: Callable[[Rows, ProblemFacts], Any]
    reason: str | Callable[[LayoutRow, ProblemFacts], str]

    def is_decided(self, known: frozenset[str]) -> bool:
        """Return whether all fields that it needs are ``known``."""
        return known.issuperset(self.needs.split())

    def explain(self, row: LayoutRow, problem: ProblemFacts) -> str:
        """Return why a row breaks the rule, with the rule's name."""
        reason = self.reason.format(t=row, p=problem) if isinstance(self.reason, str) else self.reason(row, problem)
        return f"{reason}   [{self.name}]"


def all_divide(dims: tuple[int, ...], degree: Numbers) -> Numbers:
    """Return whether ``degree`` divides each of ``dims``."""
    holds = degree == degree  # True, or an array of it
    for dim in dims:
        holds = holds & (dim % degree == 0)
    return holds


def not_dividing(dims: tuple[int, ...], degree: int) -> str:
    """Return those of ``dims`` that it does not divide, for a message."""
    return ", ".join(str(dim) for dim in dims if dim % degree)


# fmt: off
TOKENS_OF_EXPERTS = Rule("tokens_of_experts", "ep etp tp sequence_parallel",
    lambda t, p: t.experts_follow_tp | (t.tp == 1) | (t.sequence_parallel != 0),
    "ep {t.ep}, etp {t.etp} with tp {t.tp}: without sequence_parallel each token would reach its experts tp times")

EXCHANGE_RULES: tuple[Rule, ...] = (
    Rule("ulysses_divides_cp", "cp cp_ulysses", lambda t, p: t.cp % t.cp_ulysses == 0,
        "cp_ulysses {t.cp_ulysses} does not divide cp {t.cp}"),
    Rule("heads_per_ulysses", "tp cp_ulysses",
        lambda t, p: all_divide(p.head_counts + p.kv_head_counts, t.tp * t.cp_ulysses) | (t.cp_ulysses == 1),
        lambda t, p: (
            f"{not_dividing(p.head_counts + p.kv_head_counts, t.tp * t.cp_ulysses)} query or key/value heads do not divide by "
            f"tp x cp_ulysses = {t.tp} x {t.cp_ulysses}: each rank attends with whole heads"
        )),
)


def _shards_are_nested(t: Rows, p: ProblemFacts) -> Any:
    if np.all(t.gradient_shard == 1) and np.all(t.optimizer_shard == 1):
        return np.ones(np.shape(t.dp_shard), dtype=bool)
    gradients = t.gradient_level
    gradients_nest = (t.zero_stage == 3) & (gradients % t.dp_shard == 0) & (t.dp % gradients == 0)
    states_nest = (t.zero_stage >= 2) & (t.optimizer_shard % gradients == 0) & (t.dp % t.optimizer_shard == 0)
    return ((t.gradient_shard == 1) | gradients_nest) & ((t.optimizer_shard == 1) | states_nest)


def _needed_micro_batch(t: Rows, p: ProblemFacts) -> Numbers:
    """Return the smallest micro-batches that are as few on the rank with most sequences."""
    largest_share = -(-p.global_batch_size // t.dp)
    return -(-largest_share // p.num_microbatches(t))


ENGINE_RULES: tuple[Rule, ...] = (
    Rule("traced_blocks_whole", "cp ep",
        lambda t, p: (p.traced_len == 0) | ((t.cp == 1) & (t.ep == 1)),
        "cp {t.cp}, ep {t.ep}: the blocks were traced from code, which says what they cost and not how their sequences or "
        "experts may be split; data and pipeline parallelism, sharding and recompute are planned"),
    Rule("traced_layers_split", "tp", lambda t, p: (t.tp == 1) | (len(p.not_split) == 0),
        "tp {t.tp}: {p.not_split}"),
    Rule("traced_widths", "tp", lambda t, p: all_divide(p.split_widths, t.tp),
        lambda t, p: f"tp {t.tp} does not divide {not_dividing(p.split_widths, t.tp)}: heads or widths of layers that are split"),
    Rule("traced_placements", "tp",
        lambda t, p: (t.tp == 1) | (len(p.placed_degrees) == 0) | np.isin(t.tp, p.placed_degrees),
        lambda t, p: f"tp {t.tp}: the operators of the model were placed for tp {', '.join(map(str, p.placed_degrees))}"),
    Rule("traced_length", "tp", lambda t, p: (t.tp > 0) & ((p.traced_len == 0) | (p.traced_len == p.seq_len)),
        "the model was traced with sequences of {p.traced_len} tokens, the workload has {p.seq_len}"),
    Rule("world_size", "dp cp tp pp", lambda t, p: t.dp * t.cp * t.tp * t.pp == p.world_size,
        "dp_replicate x dp_shard x cp x tp x pp = {t.dp_replicate} x {t.dp_shard} x {t.cp} x {t.tp} x {t.pp} = "
        "{t.world_size} ranks, the cluster has {p.world_size} devices"),
    Rule("batch_divides", "dp micro_batch_size",
        lambda t, p: p.takes_uneven_shares | (p.global_batch_size % (t.dp * t.micro_batch_size) == 0),
        "global_batch_size {p.global_batch_size} is not a multiple of dp x micro_batch_size = "
        "{t.dp} x {t.micro_batch_size}: the engine gives every rank as many micro-batches of one size"),
    Rule("batch_for_each", "dp", lambda t, p: p.global_batch_size >= t.dp,
        "global_batch_size {p.global_batch_size} on dp {t.dp}: each data-parallel rank takes one sequence at least"),
    Rule("micro_batch_needed", "pp dp micro_batch_size",
        lambda t, p: (t.pp > 1) | (t.micro_batch_size == _needed_micro_batch(t, p)),
        lambda t, p: (
            f"micro_batch_size {t.micro_batch_size}: {-(-p.global_batch_size // t.dp)} sequences, most of one of dp {t.dp} ranks, "
            f"are as few micro-batches of {_needed_micro_batch(t, p)}"
        )),
    Rule("batch_over_stages", "pp dp micro_batch_size",
        lambda t, p: (t.pp == 1) | ((p.global_batch_size % t.micro_batch_size == 0) &
            (p.global_batch_size >= t.dp * t.micro_batch_size)),
        "global_batch_size {p.global_batch_size} in micro-batches of {t.micro_batch_size} on dp {t.dp}: over pp {t.pp} stages "
        "all have one size, and every data-parallel rank takes one at least"),
    Rule("heads_per_tp", "tp", lambda t, p: all_divide(p.head_counts, t.tp),
        lambda t, p: f"{not_dividing(p.head_counts, t.tp)} attention heads do not divide by tp {t.tp}"),
    Rule("kv_heads_per_tp", "tp", lambda t, p: all_divide(p.kv_head_counts, t.tp),
        lambda t, p: f"{not_dividing(p.kv_head_counts, t.tp)} key/value heads do not divide by tp {t.tp}"),
    Rule("ffn_per_tp", "tp", lambda t, p: all_divide(p.ffn_dims, t.tp),
        lambda t, p: f"feed-forward width {not_dividing(p.ffn_dims, t.tp)} does not divide by tp {t.tp}"),
    Rule("vocabulary_per_tp", "tp", lambda t, p: (p.traced_len > 0) | ((t.tp - 1) * -(-p.vocab_size // t.tp) < p.vocab_size),
        lambda t, p: (
            f"a vocabulary of {p.vocab_size} in pieces of {-(-p.vocab_size // t.tp)} leaves none for the last of tp {t.tp}"
        )),
    Rule("sequence_per_tp", "sequence_parallel cp tp",
        lambda t, p: (t.sequence_parallel == 0) | (p.seq_len % (t.cp * t.tp) == 0),
        lambda t, p: f"seq_len {p.seq_len} does not divide by cp x tp = {t.cp * t.tp} (sequence parallel)"),
    Rule("sequence_per_cp", "cp", lambda t, p: (t.cp == 1) | (p.seq_len % (2 * t.cp) == 0),
        lambda t, p: (
            f"seq_len {p.seq_len} does not divide by 2 x cp = {2 * t.cp} (two pieces a rank, for even causal work)"
        )),
    Rule("attention_per_cp", "cp", lambda t, p: (t.cp == 1) | p.fused_attention,
        "cp {t.cp} needs attention in every block that merges parts by their sums (flash); math keeps whole rows of scores"),
    *EXCHANGE_RULES,
    Rule("vocabulary_over_stages", "vocabulary schedule pp num_model_chunks",
        lambda t, p: np.logical_not(t.splits_vocabulary) | (t.schedule_fact("splits_vocabulary") & (t.pp > 1) &
            (t.num_model_chunks == 1) & (not p.has_mtp_heads)),
        "vocabulary=split with pp {t.pp}, num_model_chunks {t.num_model_chunks}, {t.schedule_name}: known for 1f1b over "
        "several stages of one chunk, without heads for further tokens"),
    Rule("nested_shards", "gradient_shard optimizer_shard dp_replicate dp_shard zero_stage", _shards_are_nested,
        "dp_shard {t.dp_shard}, gradient_shard {t.gradient_shard}, optimizer_shard {t.optimizer_shard} of "
        "{t.dp} data-parallel ranks under zero_stage {t.zero_stage}: each must be a multiple of "
        "the one before and divide all; gradients have a level of their own under zero_stage 3, optimizer states under 2 and 3"),
    Rule("layers_per_stage", "pp num_model_chunks", lambda t, p: t.pp * t.num_model_chunks <= p.num_blocks,
        lambda t, p: f"{t.pp * t.num_model_chunks} pipeline stages for {p.num_blocks} blocks: each stage needs one"),
    Rule("blocks_in_halves", "half_blocks pp num_model_chunks offload offload_activations",
        lambda t, p: np.equal(t.half_blocks, 0) | (p.has_halves & (t.pp > 1) & (t.num_model_chunks == 1) & ~t.offloads),
        "half_blocks with pp {t.pp}, num_model_chunks {t.num_model_chunks}: our runtime ends stages inside blocks, one a rank, if "
        "nothing is offloaded and the parts of a block share neither norm nor input"),
    Rule("interleaved_microbatches", "num_model_chunks pp dp micro_batch_size schedule",
        lambda t, p: (t.num_model_chunks == 1) | ((t.pp > 1) & ((p.num_microbatches(t) % t.pp == 0) |
            t.schedule_fact("any_num_microbatches"))),
        lambda t, p: (
            f"num_model_chunks {t.num_model_chunks} needs pp > 1 and micro-batches in multiples of it; there are "
            f"{p.num_microbatches(t)} for pp {t.pp}"
        )),
    Rule("v_schedule_chunks", "schedule num_model_chunks pp",
        lambda t, p: (t.schedule_fact("chunks") != "two") | ((t.num_model_chunks == 2) & (t.pp > 1)),
        "{t.schedule_name} runs two model chunks a rank over several stages; num_model_chunks is "
        "{t.num_model_chunks}, pp {t.pp}"),
    Rule("zb_h2_chunks", "schedule num_model_chunks",
        lambda t, p: (t.schedule_fact("chunks") != "one") | (t.num_model_chunks == 1),
        "{t.schedule_name} runs one stage a rank; num_model_chunks is {t.num_model_chunks}"),
    Rule("experts_per_ep", "ep etp",
        lambda t, p: all_divide(p.expert_counts, t.ep) & ((t.ep * t.etp == 1) | bool(p.expert_counts)),
        lambda t, p: (
            f"{not_dividing(p.expert_counts, t.ep)} experts do not divide by ep {t.ep}"
            if p.expert_counts
            else f"ep {t.ep}, etp {t.etp}: the model has no experts"
        )),
    Rule("expert_ffn_per_etp", "ep etp tp", lambda t, p: all_divide(p.expert_ffn_dims, t.expert_tp),
        lambda t, p: (
            f"expert width {not_dividing(p.expert_ffn_dims, t.expert_tp)} does not divide over {t.expert_tp} ranks"
        )),
    Rule("expert_ranks", "ep etp dp cp tp", lambda t, p: t.experts_follow_tp | (t.stage_ranks % (t.ep * t.etp) == 0),
        "ep x etp = {t.ep} x {t.etp} does not divide the {t.stage_ranks} ranks of a stage"),
    Rule("overlap_splits_sequence", "tp_overlap sequence_parallel",
        lambda t, p: np.equal(t.tp_overlap, 0) | np.not_equal(t.sequence_parallel, 0),
        "tp_overlap without sequence_parallel (tp {t.tp}): products run in chunks along with the gathers and scatters of a split "
        "sequence"),
    Rule("prefetched_blocks", "pp zero_stage prefetch",
        lambda t, p: (t.prefetch == 1) | (p.prefetches & (t.zero_stage == 3) & (t.pp == 1)),
        "prefetch {t.prefetch} with zero_stage {t.zero_stage}, pp {t.pp}: our runtime gathers blocks further ahead than one, where "
        "zero_stage 3 gathers them in every pass and there is no pipeline"),
    Rule("one_mode", "tp_overlap tp_halves", lambda t, p: np.equal(t.tp_overlap, 0) | np.equal(t.tp_halves, 0),
        "tp_overlap and tp_halves: communication over tp runs with chunks of its own product, or with the other half-batch's"),
    Rule("rows_divide", "micro_batch_size tp_halves", lambda t, p: np.equal(t.tp_halves, 0) | (t.micro_batch_size % 2 == 0),
        "tp_halves with micro-batches of {t.micro_batch_size} sequences: two half-batches need an even number"),
    TOKENS_OF_EXPERTS,
)
"""What every engine needs."""


def lacks(engine: str, *names: str) -> tuple[Rule, ...]:
    """Return the rules that an engine has none of these of SWITCHES, one each."""

    def rule(name: str) -> Rule:
        value = choices(name)[1] if choices(name) else "true"
        reason = f"{name}={value}: {engine} has no such switch"
        return Rule(f"{name}_of_{engine}", name, lambda t, p: np.equal(getattr(t, name), 0), reason)

    return tuple(rule(name) for name in names)


GRAPHS_BEFORE_EXPERTS = Rule("graphs_before_experts", "expert_graphs", lambda t, p: np.equal(t.expert_graphs, 0),
    "expert_graphs=true: plans are written without the fused MXFP8 products whose sizes stay on the device; it is predicted only")

VOCABULARY_AT_ENDS = Rule("vocabulary_at_ends", "vocabulary", lambda t, p: np.logical_not(t.splits_vocabulary),
    "vocabulary=split: the engine's schedules have no passes between which all stages exchange a micro-batch's sums; it is "
    "predicted only")

FSDP2_RULES: tuple[Rule, ...] = (
    VOCABULARY_AT_ENDS,
    GRAPHS_BEFORE_EXPERTS,
    *lacks("fsdp2", *(name for name in SWITCHES if name != "tp_halves")),
    Rule("supported", "tp cp half_blocks tp_halves",
        lambda t, p: np.equal(t.tp_halves, 0) | (p.runs_in_halves & (t.tp > 1) & (t.cp == 1) & np.equal(t.half_blocks, 0)),
        "tp_halves with tp {t.tp}, cp {t.cp}: our runtime takes dense blocks with softmax attention by half-batches, of models "
        "that it builds, over ranks that share no sequence, and in no stage that ends inside a block"),
    Rule("halves_keep_backward", "schedule tp_halves",
        lambda t, p: np.equal(t.tp_halves, 0) | ~t.schedule_fact("splits_backward"),
        "tp_halves with {t.schedule_name}: gradients of weights, which the other half's collectives would run with, come later"),
    Rule("zeroth_order", "pp recompute offload offload_activations",
        lambda t, p: p.has_backward | ((t.pp == 1) & ~t.recomputes & ~t.offloads),
        "pp {t.pp}, recompute or offload in zeroth-order training: it has no backward pass that a pipeline could interleave, "
        "and nothing to recompute or to move away"),
    Rule("schedule_in_chunks", "schedule num_model_chunks",
        lambda t, p: (t.schedule_fact("chunks") != "one") | (t.num_model_chunks == 1),
        "schedule {t.schedule_name} has no form with {t.num_model_chunks} model chunks a rank"),
    Rule("tp_in_scaleup_domain", "tp", lambda t, p: (t.tp == 1) | (p.scaleup_domain % t.tp == 0),
        "tp {t.tp} does not divide the {p.scaleup_domain} devices that share the fastest link"),
    Rule("microbatches_fill_pipeline", "schedule pp dp micro_batch_size",
        lambda t, p: ~t.schedule_fact("needs_full_pipeline") | (t.pp == 1) | (p.num_microbatches(t) >= t.pp),
        lambda t, p: f"1f1b over {t.pp} stages needs as many micro-batches; there are {p.num_microbatches(t)}"),
    Rule("zero_under_pipeline", "pp zero_stage",
        lambda t, p: (t.pp == 1) | (t.zero_stage <= 1) | ((t.zero_stage == 3) & (p.traced_len > 0)),
        "zero_stage {t.zero_stage} with pp {t.pp}: under a pipeline torch keeps gathered parameters and whole gradients "
        "until the last micro-batch, so only the optimizer states are sharded (zero_stage 1); stages of modules traced from code "
        "run zero_stage 3 too"),
    Rule("split_backward_keeps_gathered", "schedule pp zero_stage",
        lambda t, p: (t.pp == 1) | (t.zero_stage < 3) | ~t.schedule_fact("splits_backward"),
        "zero_stage {t.zero_stage} with {t.schedule_name}: the second part of a backward pass needs parameters that the first one "
        "has dropped"),
    Rule("split_backward_keeps_activations", "schedule recompute",
        lambda t, p: ~t.schedule_fact("splits_backward") | ~t.recomputes,
        "schedule {t.schedule_name} with recompute: a backward pass in two parts would run what operator-level "
        "recompute made again twice (torch refuses), and keep what full recompute made until the second part"),
    Rule("levels_of_fully_shard", "dp_shard gradient_shard optimizer_shard zero_stage",
        lambda t, p: np.logical_not(t.has_levels) | ((t.zero_stage == 3) & (t.gradient_level == t.optimizer_level)),
        "gradients over {t.gradient_level}, optimizer states over {t.optimizer_level} ranks under zero_stage {t.zero_stage}: "
        "fully_shard reduces gradients into the shards of the states; only parameters stay within fewer ranks between the "
        "passes (reshard_after_forward=N, zero_stage 3)"),
)
"""What torch's parts execute, and execute well, besides."""

VERSION_RULES: tuple[Rule, ...] = (
    Rule("sequence_of_code", "tp sequence_parallel",
        lambda t, p: (t.tp == 1) | (t.sequence_parallel == 0) | (len(p.not_along_sequence) == 0),
        "tp {t.tp} with sequence_parallel: {p.not_along_sequence}"),
    Rule("stages_of_code", "pp", lambda t, p: (t.pp == 1) | (len(p.not_staged) == 0), "pp {t.pp}: {p.not_staged}"),
    Rule("shards_of_code", "dp_shard dp_replicate tp pp",
        lambda t, p: (len(p.not_sharded) == 0)
        | (p.is_fp32 & (t.dp_shard == 1) & (t.pp == 1) & ((t.tp == 1) | (t.dp_replicate == 1))),
        "dp_shard {t.dp_shard}: {p.not_sharded}; whole replicas run, in fp32"),
    Rule("samples_of_code", "micro_batch_size", lambda t, p: t.micro_batch_size >= p.min_samples,
        "micro_batch_size {t.micro_batch_size}: batch norms of the code normalise over no fewer than {p.min_samples} samples"),
    Rule("levels_of_this_version", "dp_shard gradient_shard optimizer_shard", lambda t, p: np.logical_not(t.has_levels),
        "gradient_shard {t.gradient_shard}, optimizer_shard {t.optimizer_shard}: this version shards every state over dp_shard"),
    Rule("expert_width_alignment", "ep etp tp", lambda t, p: all_divide(p.expert_ffn_dims, 8 * t.expert_tp),
        lambda t, p: (
            f"expert width {not_dividing(p.expert_ffn_dims, 8 * t.expert_tp)} over {t.expert_tp} ranks: torch's grouped "
            "product takes rows of whole 16 bytes, 8 elements of bf16"
        )),
    Rule("shards_of_matrices", "dp_shard cp",
        lambda t, p: (p.hidden_dim == 0) | (t.dp_shard * t.cp <= p.hidden_dim),
        "dp_shard {t.dp_shard} x cp {t.cp} for matrices {p.hidden_dim} wide: fully_shard cuts along one dimension and fills up "
        "what does not divide, a few experts to as many as there are ranks; use dp_replicate"),
    Rule("offload", "offload offload_activations", lambda t, p: ~t.offloads,
        "offloading is executed as a plan's schedule says (offload=scheduled); other forms are predicted only"),
    Rule("recompute_of_all_blocks", "recompute_fraction", lambda t, p: t.recompute_fraction == 1,
        "recompute of {t.recompute_fraction:g} of the blocks: this version recomputes all of them or none"),
)
"""What the runtime of this version lacks."""

RULES = (*ENGINE_RULES, *FSDP2_RULES, *VERSION_RULES)
"""What `apply` and `parallelize` need."""


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
