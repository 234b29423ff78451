"""What other engines than ours execute besides `ENGINE_RULES`: rules for layouts, each with its reason.

The record of an engine (engine_facts.py) names its rules.
"""

from __future__ import annotations

import numpy as np

from .layout import SWITCHES
from .layout_rules import FSDP2_RULES, GRAPHS_BEFORE_EXPERTS, VOCABULARY_AT_ENDS, Rule, lacks
from .layout_table import MIXED, OFFLOADS, RECOMPUTES
from .schedules import SCHEDULES

# fmt: off
MEGATRON_EXCHANGE = Rule("megatron_exchange_of_latent", "cp cp_ulysses",
    lambda t, p: (t.cp_ulysses == 1) | (t.cp_ulysses < t.cp) | (not p.latent_attention),
    "cp_ulysses = cp = {t.cp} with latent attention: Transformer Engine takes keys and values of two widths only where they "
    "go round a ring (cp_comm_type p2p or a2a+p2p)")

MEGATRON_SEQUENCE = Rule("megatron_experts_split_sequence", "tp sequence_parallel",
    lambda t, p: (t.tp == 1) | (t.sequence_parallel != 0) | (len(p.expert_counts) == 0),
    "experts with tp {t.tp}: Megatron trains them with sequence_parallel only (MoELayer raises without)")

DEEPSPEED_EXCHANGE = Rule("deepspeed_exchange", "cp cp_ulysses tp",
    lambda t, p: (t.cp == 1) | ((t.cp_ulysses == t.cp) & (t.tp == 1)),
    "cp {t.cp} with cp_ulysses {t.cp_ulysses}, tp {t.tp}: DeepSpeed's sequence parallelism is Ulysses over all of cp, "
    "without tensor parallelism")


def _schedules_of(engine: str) -> Rule:
    runs = np.array([engine in schedule.engines for schedule in SCHEDULES.values()])
    return Rule("schedule_of_engine", "pp schedule", lambda t, p: (t.pp == 1) | runs[t.schedule],
        "the engine's pipelines run 1f1b only")


def _only(name: str, reason: str, **values: int) -> Rule:
    return Rule(name, " ".join(values),
        lambda t, p: np.logical_and.reduce([np.equal(getattr(t, field), value) for field, value in values.items()]),
        f"{', '.join(f'{field} {{t.{field}}}' for field in values)}: {reason}")


def _offload_of(engine: str, kinds: tuple[str, ...], reason: str) -> Rule:
    moved = [OFFLOADS.index(kind) for kind in kinds]
    return Rule(f"offload_of_{engine}", "offload offload_activations",
        lambda t, p: np.isin(t.offload, moved) & (t.offload_activations == 0),
        lambda t, p: f"offload={OFFLOADS[int(t.offload)]}, offload_activations={t.offload_activations:g}: {reason}")


_NO_LEVELS = _only("no_levels", "every state is sharded alike", gradient_shard=1, optimizer_shard=1)
_ONE_RECOMPUTE = Rule("recompute_of_all_blocks", "recompute recompute_fraction",
    lambda t, p: np.not_equal(t.recompute, MIXED) & (t.recompute_fraction == 1),
    lambda t, p: ("recompute=mixed" if t.recompute == MIXED else f"recompute of {t.recompute_fraction:g} of the blocks")
        + ": the engine has one choice for all blocks")
NO_ULYSSES = _only("no_ulysses", "context parallelism of the engine is a ring", cp_ulysses=1)

_OF_FSDP2 = {rule.name: rule for rule in FSDP2_RULES if not rule.name.endswith("_of_fsdp2")}

_GATHERED = Rule("zero_under_pipeline", "pp zero_stage", lambda t, p: (t.pp == 1) | (t.zero_stage <= 1),
    "zero_stage {t.zero_stage} with pp {t.pp}: torch's PipelineStage keeps gathered parameters and whole gradients until the "
    "last micro-batch, so only the optimizer states are sharded (zero_stage 1)")

TORCHTITAN_RULES: tuple[Rule, ...] = (
    *(_OF_FSDP2 | {_GATHERED.name: _GATHERED}).values(),
    *lacks("torchtitan", *(name for name in SWITCHES if name != "tp_overlap")),
    Rule("tp_overlap_of_torchtitan", "tp_overlap", lambda t, p: np.equal(t.tp_overlap, 0),
        "tp_overlap=true: parallelism.enable_async_tensor_parallel fuses products with gathers where torch.compile matches them, "
        "and runs without a word where not; the kernels are CUDA's: an export cannot check that a compiled graph has them"),
    _NO_LEVELS,
    NO_ULYSSES,
    _ONE_RECOMPUTE,
    _offload_of("torchtitan", ("none", "parameters"),
        "training.enable_cpu_offload moves parameters, gradients and states together"),
    Rule("experts_over_ep", "ep etp tp",
        lambda t, p: (len(p.expert_counts) == 0) | ((t.etp == 1) & ((t.tp == 1) | (t.ep > 1))),
        "ep {t.ep}, etp {t.etp} with tp {t.tp}: torchtitan splits experts over ep only (etp 1, and ep above 1 where tp is)"),
    Rule("torchtitan_reduces_in_every_pass", "zero_stage pp dp micro_batch_size",
        lambda t, p: (t.pp > 1) | (t.zero_stage >= 2) | (np.equal(t.zero_stage, 0) & ((t.dp == 1) | (p.num_microbatches(t) <= 1))),
        lambda t, p: (
            f"zero_stage {t.zero_stage} with {p.num_microbatches(t)} micro-batches: outside a pipeline torchtitan reduces "
            "gradients in every one, as zero_stage 2 and 3 say"
        )),
)
"""What torchtitan 0.3.0 executes besides ENGINE_RULES: fully_shard, DTensor and torch.distributed.pipelining, as our own runtime;
one checkpointing policy for all blocks (activation_checkpoint) and one mesh of shards for all states.
"""

ACCELERATE_RULES: tuple[Rule, ...] = (
    VOCABULARY_AT_ENDS,
    GRAPHS_BEFORE_EXPERTS,
    *lacks("accelerate", *SWITCHES),
    _OF_FSDP2["tp_in_scaleup_domain"],
    _only("no_pipeline", "the configuration has no pipeline", pp=1),
    _only("no_expert_axes", "the configuration has no expert parallelism", ep=1, etp=1),
    _only("no_sequence_parallel", "tensor parallelism of transformers keeps the sequence whole", sequence_parallel=0),
    NO_ULYSSES,
    _NO_LEVELS,
    _ONE_RECOMPUTE,
    Rule("full_recompute_only", "recompute", lambda t, p: np.not_equal(t.recompute, RECOMPUTES.index("selective")),
        "recompute=selective: fsdp_activation_checkpointing recomputes entire blocks"),
    _offload_of("accelerate", ("none", "parameters"), "fsdp_offload_params moves parameters, gradients and states together"),
    Rule("sharded_data", "dp_replicate dp_shard cp tp pp",
        lambda t, p: (t.dp_shard > 1) | (t.dp_shard * t.cp * t.tp * t.pp == 1),
        "dp_shard 1 with tp {t.tp}, cp {t.cp}: Accelerate composes them with FSDP2 only"),
    Rule("accelerate_zero_stage", "zero_stage", lambda t, p: np.not_equal(t.zero_stage, 1),
        "zero_stage 1: FSDP2 shards gradients with the states (zero_stage 2, or 3)"),
)
"""What Accelerate 1.15 executes besides ENGINE_RULES: FSDP2 over dp_shard x cp with the tensor parallelism of transformers
(ParallelismConfig), and plain data parallelism. Gradients are reduced in every micro-batch where the training script says
GradientAccumulationPlugin(sync_each_batch=True); otherwise Accelerator.no_sync keeps all of them unsharded.
"""

MEGATRON_RULES: tuple[Rule, ...] = (
    VOCABULARY_AT_ENDS,
    GRAPHS_BEFORE_EXPERTS,
    Rule("megatron_zero_stage", "zero_stage", lambda t, p: t.zero_stage <= 1,
        "zero_stage {t.zero_stage}: Megatron's distributed optimizer shards optimizer states only (zero_stage 1)"),
    *lacks("megatron", "tp_halves"),
    MEGATRON_EXCHANGE,
    MEGATRON_SEQUENCE,
    Rule("megatron_switches_on_nvidia", "tp_overlap cuda_graphs",
        lambda t, p: p.is_nvidia | (np.equal(t.tp_overlap, 0) & np.equal(t.cuda_graphs, 0)),
        "tp_overlap and cuda_graphs on other devices than NVIDIA's: userbuffers and CUDA graphs are theirs"),
    Rule("megatron_overlap_in_domain", "tp tp_overlap", lambda t, p: np.equal(t.tp_overlap, 0) | (p.scaleup_domain % t.tp == 0),
        "tp_overlap with tp {t.tp} beyond the {p.scaleup_domain} devices that share the fastest link: userbuffers write into each "
        "other's memory"),
    Rule("megatron_graphs_recompute", "cuda_graphs recompute",
        lambda t, p: np.equal(t.cuda_graphs, 0) | (t.recompute <= RECOMPUTES.index("selective")),
        "cuda_graphs with full recompute of blocks: Megatron captures a layer as it runs forward and backward "
        "(transformer_config.py)"),
    Rule("megatron_ep_overlap_exchanges", "ep ep_overlap", lambda t, p: np.equal(t.ep_overlap, 0) | (t.ep > 1),
        "ep_overlap with ep {t.ep}: no tokens travel that another micro-batch could hide"),
    Rule("megatron_ep_overlap_chunks", "pp num_model_chunks ep_overlap",
        lambda t, p: np.equal(t.ep_overlap, 0) | (t.pp == 1) | (t.num_model_chunks > 1),
        "ep_overlap with pp {t.pp} and one model chunk: under a pipeline --overlap-moe-expert-parallel-comm needs virtual stages"),
    Rule("megatron_ep_overlap_micro_batches", "dp micro_batch_size ep_overlap",
        lambda t, p: np.equal(t.ep_overlap, 0) | (p.num_microbatches(t) > 1),
        "ep_overlap with one micro-batch: there is no other one whose passes could run beside"),
    Rule("megatron_ep_overlap_recompute", "ep_overlap recompute",
        lambda t, p: np.equal(t.ep_overlap, 0) | (t.recompute <= RECOMPUTES.index("selective")),
        "ep_overlap with full recompute of blocks: --overlap-moe-expert-parallel-comm takes none (transformer_config.py)"),
    Rule("megatron_offload_activations", "offload_activations pp recompute cuda_graphs",
        lambda t, p: (t.offload_activations == 0) | ((t.pp == 1) & ~t.recomputes & np.equal(t.cuda_graphs, 0)),
        "offload_activations with pp {t.pp}, recompute or cuda_graphs: Megatron's --cpu-offloading takes none of them"),
    Rule("offload_of_megatron", "offload",
        lambda t, p: np.isin(t.offload, [OFFLOADS.index(kind) for kind in ("none", "optimizer")]),
        lambda t, p: f"offload={OFFLOADS[int(t.offload)]}: Megatron moves optimizer states only"),
    Rule("selective_of_all_blocks", "recompute recompute_fraction",
        lambda t, p: np.not_equal(t.recompute, RECOMPUTES.index("selective")) | (t.recompute_fraction == 1),
        "selective recompute of {t.recompute_fraction:g} of the blocks: Megatron's is of all of them"),
    _schedules_of("megatron"),
)
"""What Megatron-Core executes besides ENGINE_RULES: DistributedOptimizer shards states over the data-parallel ranks or, with
num_distributed_optimizer_instances, over groups of them; schedules.py has 1f1b, plain (with fewer micro-batches than stages
too) and interleaved (micro-batches in multiples of pp: ENGINE_RULES); uneven stages through pipeline_model_parallel_layout;
no levels of their own for states (Megatron-FSDP, which has them with outer_dp_sharding_strategy=optim, is another engine);
cp_comm_type p2p (a ring), a2a (Ulysses) and a2a+p2p (hierarchical_context_parallel_sizes: Ulysses inside, a ring of those outside).
"""

DEEPSPEED_RULES: tuple[Rule, ...] = (
    VOCABULARY_AT_ENDS,
    GRAPHS_BEFORE_EXPERTS,
    *lacks("deepspeed", *(name for name in SWITCHES if name != "gradients")),
    Rule("deepspeed_zero_under_pipeline", "pp zero_stage", lambda t, p: (t.pp == 1) | (t.zero_stage <= 1),
        "zero_stage {t.zero_stage} with pp {t.pp}: DeepSpeed's PipelineEngine takes zero_stage 0 and 1 only"),
    Rule("deepspeed_axes", "ep etp num_model_chunks",
        lambda t, p: (t.ep == 1) & (t.etp == 1) & (t.num_model_chunks == 1),
        "ep {t.ep}, etp {t.etp}, num_model_chunks {t.num_model_chunks}: planned with 1 of each for DeepSpeed"),
    DEEPSPEED_EXCHANGE,
    Rule("deepspeed_exchange_without_pipeline", "cp pp", lambda t, p: (t.cp == 1) | (t.pp == 1),
        "cp {t.cp} with pp {t.pp}: DeepSpeed's sequence parallelism takes no pipeline"),
    Rule("deepspeed_shards_over_all", "zero_stage dp_replicate cp optimizer_shard",
        lambda t, p: (t.zero_stage == 0) | (t.dp_replicate == 1) | ((t.zero_stage == 3) & (t.cp == 1) & (t.optimizer_shard > 1)),
        "dp_replicate {t.dp_replicate} with zero_stage {t.zero_stage}, cp {t.cp}, optimizer_shard {t.optimizer_shard}: ZeRO shards "
        "over all data-parallel ranks; only parameters stay within fewer of them, in stage 3 (hpZ: --fix optimizer_shard=N); "
        "islands that shard everything (MiCS) were removed in 0.19"),
    Rule("deepspeed_levels", "dp_replicate dp_shard gradient_shard optimizer_shard zero_stage",
        lambda t, p: np.logical_not(t.has_levels) | ((t.zero_stage == 3) & (t.gradient_level == t.dp) &
            (t.gradient_level == t.optimizer_level)),
        "gradients over {t.gradient_level}, optimizer states over {t.optimizer_level} of {t.dp} ranks "
        "under zero_stage {t.zero_stage}: ZeRO++ keeps parameters within dp_shard ranks (zero_hpz_partition_size) and "
        "everything else over all, in stage 3"),
    _offload_of("deepspeed", ("none", "optimizer", "parameters"), "DeepSpeed moves optimizer states and parameters"),
    Rule("deepspeed_recompute_of_blocks", "recompute_fraction", lambda t, p: t.recompute_fraction == 1,
        "recompute_fraction {t.recompute_fraction:g}: it does not say of which blocks, which the training script has to"),
    Rule("deepspeed_partial_offload", "offload_fraction zero_stage",
        lambda t, p: (t.offload_fraction == 1) | (t.zero_stage == 3),
        "offload of {t.offload_fraction:g} of the states with zero_stage {t.zero_stage}: DeepSpeed moves a part of them in stage 3 "
        "only (Twin-Flow; DeepSpeedZeroConfig refuses it elsewhere)"),
    _schedules_of("deepspeed"),
)
"""What DeepSpeed executes besides ENGINE_RULES: runtime/pipe/engine.py asserts a ZeRO stage below 2 (gradients are summed over
micro-batches) and has one schedule (TrainSchedule, 1f1b); tp is Megatron-DeepSpeed's, whose parallel_state asserts tp = pp = 1
with sequence parallelism (--ds-sequence-parallel-size). In stage 3 mics_shard_size shards everything over islands and sums over
them when the step ends; zero_hpz_partition_size keeps a second copy of the parameters within islands for the backward pass.
"""
