"""Facts of engines: one record for each engine that a prediction can be for.

A new engine is a record here (and its rules in layout_rules.py, where it has some), its section in cost_models/coefficients.toml
and its exporter in engines/. Formulas ask a fact by name, so that they say why they differ, and never compare names of engines.
Facts are those of the engine's code; what is measured stands in coefficients.toml.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from .engine_kernels import (
    COPIED_CONTEXT,
    FUSED_GATED,
    FUSED_NORM,
    FUSED_ROTARY,
    RUNTIME_KERNELS,
    STEPWISE_LOSS,
    TORCH_KERNELS,
    EngineKernels,
    KernelTraffic,
)
from .engine_models import Lacks, full_training, of_megatron, of_torchtitan
from .engine_rules import (
    ACCELERATE_RULES,
    DEEPSPEED_EXCHANGE,
    DEEPSPEED_RULES,
    MEGATRON_EXCHANGE,
    MEGATRON_RULES,
    MEGATRON_SEQUENCE,
    NO_ULYSSES,
    TORCHTITAN_RULES,
)
from .errors import ConfigError
from .layout import LayoutRecompute
from .layout_rules import EXCHANGE_RULES, FSDP2_RULES, TOKENS_OF_EXPERTS, Rule
from .layout_table import LAYOUT_RECOMPUTES
from .units import MIB


class DataParallelFacts(NamedTuple):
    """Data parallelism of one engine.

    Attributes:
        reduction_hides_from: lowest ZeRO stage at which reductions run during the (last) backward pass.
        gather_hides_from: the same for gathers of parameters and the forward pass.
        hides_in_chunks: with model chunks the communication of one runs during the compute of the others.
        zero1_by_tensor: ZeRO-1 runs collectives tensor by tensor instead of on flat buckets.
        bucket_bytes: parameters in the compute dtype whose unsharded gradients are reduced at once; infinite for a layer's.
        gathers_from_owners: parameters that are sharded over fewer ranks than the optimizer states are gathered from the owners of
            the states in every forward pass (and from the fewer in the backward pass), instead of once a step.
        defers_replica_sums: gradients that are sharded are summed over the replicas of the shards once a step.
        sums_shards: under ZeRO-2 every backward pass reduces; otherwise whole gradients add up, and are reduced once a step.
    """

    reduction_hides_from: int
    gather_hides_from: int
    hides_in_chunks: bool = False
    zero1_by_tensor: bool = False
    bucket_bytes: float = math.inf
    gathers_from_owners: bool = False
    defers_replica_sums: bool = False
    sums_shards: bool = False


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """How an engine's kernels and buffers differ from those of our own runtime.

    Attributes:
        logit_bytes: of one logit with everything the loss makes of it at its peak.
        glu_tensors: tensors of the feed-forward width that a gated activation keeps with its output.
        qkv_copies: packed outputs of the query-key-value product besides what attention keeps: 1 where values are a view of
            them, so that all of it stays.
        kv_copies: further copies of keys and values.
        unfused_rmsnorm: an RMSNorm is several kernels and keeps its input in fp32 and normalised besides.
        keeps_all_outputs: of every operator of a block, also of those whose backward pass does not read them.
        keeps_fp32_gradients: of this rank's shard, from one step to the next.
        bucket_bytes: of the buffers gradients are reduced in.
        live_elements: of the parameters gathered at once under zero 3.
        keeps_expert_output: experts' results are weighted by themselves, which needs them again for the gradient of the weights;
            Megatron weights inside the activation instead.
    """

    logit_bytes: float
    glu_tensors: float
    qkv_copies: int = 0
    kv_copies: int = 0
    unfused_rmsnorm: bool = False
    keeps_all_outputs: bool = False
    keeps_fp32_gradients: bool = False
    bucket_bytes: float = 0.0
    live_elements: float = 0.0
    keeps_expert_output: bool = True


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """One engine.

    Attributes:
        is_own_runtime: `meshwright apply` runs its plans; profiled layers are its own.
        cuts_blocks: a stage may end between attention and feed-forward part of a block (Layout.half_blocks).
        has_stage_degrees: stages may have a tp each (Stage.tp).
        rules: what it executes besides ENGINE_RULES; None: layouts are predicted for it and not planned.
        exchange_rules, sequence_rules: of both those that look at tp, cp and cp_ulysses only, and those that require sequence
            parallelism with some degrees.
        exporter: name of the exporter in engines/ that writes a plan as its configuration; empty: none.
        lacks: why it does not train a model under a workload, whatever the layout; None: `apply` says so itself.
        calibrated_as: engine whose section of coefficients.toml it has; empty: its own.
        uses_fully_shard: it is made of torch's parts, as our own runtime: fully_shard, DTensor, torch.distributed.pipelining.
        takes_uneven_shares: data-parallel ranks may take different numbers of sequences; others stop unless the batch is a multiple
            of data-parallel ranks times micro-batch (Megatron-Core's num_microbatches_calculator, DeepSpeed's
            _batch_assertion, torchtitan's trainer).
        splits_sequence: tensor parallelism may split activations along the sequence.
        recompute: what blocks may recompute; mixed: each something else.
        loss_chunks: pieces of a micro-batch's tokens for which the loss makes logits one after the other; 0: as ours, of a fixed
            size (runtime/loss.py).
        code: whose kernels and saved tensors "engine" stands for in `EngineOptions.fusion`: its own, or plain model code.
        optional_loss: the one that an option of its turns on.
        selective: what its selective recompute keeps besides attention, where a workload does not say otherwise.
        zero_stages: those that the search enumerates.
        switches: those of SWITCHES (layout.py) that the search sets; gradients only where they are worth more than the difference
            that simplicity is (tasks/training.py).
        plans_whole_sequence: tp without sequence parallelism is searched where layers may take less by that.
        keeps_parameters_closer: under zero 3 parameters may stay within fewer ranks than gradients and optimizer states.
        update_copy_bytes: read and written for one parameter in the update besides the optimizer's own: copies in the compute
            dtype, cleared gradients.
        clip_bytes: the same to clip fp32 gradients: read for the norm, read and written for the scale.
        sums_gradients: who adds up the gradients of micro-batches: the products themselves, or a pass in the compute dtype or fp32;
            "shards": fully_shard, in what it reduces.
        is_eager_like_megatron: it runs Megatron's layers and pipeline, or something as eager.
        sends_tokens_once_per_node: experts that span nodes: a token is sent once to each node and copied there (DeepEP, HybridEP).
        hides_reduction_in_weight_gradient: the gradient of a column-parallel product's input is reduced while that of its weight
            is computed.
        saves_fp8_inputs: under fp8 products keep their inputs in fp8.
        gathers_before_exchange: ranks that share an expert gather their tokens before these are routed, and each sends the rows of
            all; else the rows that reach them.
        scales_expert_gradients: gradients of experts with ranks of their own are multiplied in a pass of their own, so that
            fully_shard, which divides by an expert's copies, gives what the ranks that see other tokens share.
        groups_expert_products: the products of experts are one grouped product, instead of one for each.
        multiplies_apart: q, k and v, and gate and up, are products of their own, each with its weight as checkpoints have it;
            else one product whose weights lie together.
        uses_hopper_attention: attention uses Hopper's own matrix instructions (FlashAttention-3 or cuDNN).
        recomputes_first_blocks: the same number of blocks recomputes on every stage, the first ones, and those fully.
            Megatron-Core: recompute_granularity is one for the entire model; with full and recompute_method block the first
            recompute_num_layers of every (virtual) stage are recomputed.
        recomputes_cores_first: operators recompute one by one: blocks that do not recompute entirely repeat their cores (Aceso).
        offloads_compute_gradients: gradients go to the host in the compute dtype, otherwise as they were summed.
        offloads_in_backward: gradients go there during the backward pass, otherwise in the update.
        updates_in_backward: the host updates a parameter once its gradient is there, beside the rest of the backward pass.
        host_copy_bytes: read and written by the host for one parameter in the update besides the optimizer's own.
        reduces_after_pipeline: under a pipeline parameters stay gathered and gradients are reduced once, after the last backward
            pass, when nothing is left to hide behind (torch.distributed.pipelining).
        receives_by_stage: every stage of a rank has receive buffers of its own.
    """

    name: str
    is_own_runtime: bool = False
    cuts_blocks: bool = False
    has_stage_degrees: bool = False
    rules: tuple[Rule, ...] | None = None
    exchange_rules: tuple[Rule, ...] = EXCHANGE_RULES
    sequence_rules: tuple[Rule, ...] = (TOKENS_OF_EXPERTS,)
    exporter: str = ""
    lacks: Lacks | None = None
    calibrated_as: str = ""
    uses_fully_shard: bool = False
    takes_uneven_shares: bool = False
    splits_sequence: bool = True
    recompute: tuple[LayoutRecompute, ...] = LAYOUT_RECOMPUTES
    loss_chunks: int = 0
    code: Literal["engine", "eager"] = "engine"
    optional_loss: str = "engine"
    selective: Literal["products", "alternate_products"] = "products"
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    switches: tuple[str, ...] = ()
    plans_whole_sequence: bool = True
    keeps_parameters_closer: bool = False
    kernels: EngineKernels
    data_parallel: DataParallelFacts
    memory: MemoryFacts | None = None
    update_copy_bytes: float
    clip_bytes: float = 12.0
    sums_gradients: Literal["products", "compute", "fp32", "shards"] = "compute"
    is_eager_like_megatron: bool = False
    sends_tokens_once_per_node: bool = False
    hides_reduction_in_weight_gradient: bool = False
    saves_fp8_inputs: bool = False
    gathers_before_exchange: bool = False
    scales_expert_gradients: bool = False
    groups_expert_products: bool = False
    multiplies_apart: bool = False
    uses_hopper_attention: bool = False
    recomputes_first_blocks: bool = False
    recomputes_cores_first: bool = False
    offloads_compute_gradients: bool = False
    offloads_in_backward: bool = False
    updates_in_backward: bool = False
    host_copy_bytes: float = 0.0
    reduces_after_pipeline: bool = False
    receives_by_stage: bool = False


_RECORDS = (
    EngineFacts(
        name="fsdp2",
        is_own_runtime=True,
        cuts_blocks=True,
        has_stage_degrees=True,
        rules=FSDP2_RULES,
        exporter="torchtitan",
        uses_fully_shard=True,
        takes_uneven_shares=True,
        switches=("tp_halves",),
        keeps_parameters_closer=True,
        kernels=RUNTIME_KERNELS,
        # Prefetches the next layer's parameters, reduces during the next layer's backward pass: runtime/data_parallel.py.
        # reshard_after_forward=N keeps what a forward pass gathered within N ranks.
        data_parallel=DataParallelFacts(0, 0, gathers_from_owners=True, sums_shards=True),
        update_copy_bytes=0.0,  # fully_shard casts when it gathers, and gradients are dropped, not zeroed
        sums_gradients="shards",
        gathers_before_exchange=True,
        scales_expert_gradients=True,
        groups_expert_products=True,
        multiplies_apart=True,
        # FSDPParam copies a reduced gradient to the host without waiting; what is clipped is there: read, read and written.
        offloads_in_backward=True,
        host_copy_bytes=12.0,
        reduces_after_pipeline=True,
        receives_by_stage=True,
    ),
    EngineFacts(
        name="megatron",
        rules=MEGATRON_RULES,
        exchange_rules=(*EXCHANGE_RULES, MEGATRON_EXCHANGE),
        sequence_rules=(TOKENS_OF_EXPERTS, MEGATRON_SEQUENCE),
        exporter="megatron",
        lacks=full_training(
            "bf16-mixed", "fp16-mixed", "fp8", "fp32", reason="Megatron keeps fp32 master parameters", also=of_megatron
        ),
        optional_loss="in_place",  # cross_entropy_fusion_impl te
        zero_stages=(0, 1),
        switches=("gradients", "tp_overlap", "cuda_graphs", "ep_overlap"),
        plans_whole_sequence=False,
        # Transformer Engine's norms; apply_rope_fusion, bias_swiglu_fusion, bias_gelu_fusion, fused cross entropy, as its recipes
        # set them; the gradients of q, k and v are concatenated. Loss: maximum of the fp32 copy, exponentials, sum and quotient
        # in place; backward scales and casts the softmax.
        kernels=TORCH_KERNELS._replace(
            norm=FUSED_NORM,
            rotary=FUSED_ROTARY,
            gated=FUSED_GATED,
            loss=KernelTraffic(7.5, 3.5, 4, 2),
            qkv=KernelTraffic(0, 2, 0, 1),
            bias=KernelTraffic(0, 0, 0, 0),
            # TEGroupedMLP._apply_bias: t + b * p of each expert in fp32, as the weights p of the router are, joined and cast back;
            # backward two products and two sums of them in fp32 and a cast.
            expert_bias=KernelTraffic(14, 18, 2, 5),
        ),
        # Megatron-Core's recipes: overlap_grad_reduce during the last backward pass, overlap_param_gather during the first
        # forward pass, chunk by chunk with align_param_gather; overlap_p2p_comm where there are model chunks.
        data_parallel=DataParallelFacts(0, 0, hides_in_chunks=True),
        # Logits next to the fp32 copy that becomes their softmax, later that and their gradient (fused_cross_entropy.py); fused
        # SwiGLU; rotary embedding makes new q and k, v stays a view.
        memory=MemoryFacts(logit_bytes=6.0, glu_tensors=3, qkv_copies=1, keeps_expert_output=False),
        update_copy_bytes=6.0,  # the compute dtype's copy is written; the gradient buffer is zeroed
        sums_gradients="products",  # gradient_accumulation_fusion
        is_eager_like_megatron=True,
        sends_tokens_once_per_node=True,
        # arXiv:2205.05198 section 4.2.2 and LinearWithGradAccumulationAndAsyncCommunication
        hides_reduction_in_weight_gradient=True,
        saves_fp8_inputs=True,
        uses_hopper_attention=True,
        recomputes_first_blocks=True,
    ),
    EngineFacts(
        name="deepspeed",
        rules=DEEPSPEED_RULES,
        exchange_rules=(*EXCHANGE_RULES, DEEPSPEED_EXCHANGE),
        exporter="deepspeed",
        lacks=full_training(
            "bf16-mixed", "fp16-mixed", "fp32", reason="DeepSpeed's configuration has bf16, fp16 and fp32"
        ),
        keeps_parameters_closer=True,
        # Megatron-DeepSpeed: fused norms and bias-gelu; rotary and gated parts as torch.
        kernels=TORCH_KERNELS._replace(norm=FUSED_NORM, loss=STEPWISE_LOSS, qkv=COPIED_CONTEXT),
        # overlap_comm is false unless stage 3, and updated parameters are gathered in the step itself.
        # ZeRO++ reads its second partition (hpZ) in the backward pass only; MiCS sums over islands at the step's end. Partitioned
        # gradients are reduced in every pass (reduce_ready_partitions_and_remove_grads).
        data_parallel=DataParallelFacts(3, 3, gathers_from_owners=True, defers_replica_sums=True, sums_shards=True),
        # Megatron's vocab_parallel_cross_entropy: logits, their fp32 copy, softmax; eager activations;
        # reduce_bucket_size 5e8 twice (overlap_comm), max_live_parameters 1e9.
        # [fitted: 20 bytes a parameter and 3.7 GiB besides are what the runs of `meshwright validate --source sailor` hold]
        memory=MemoryFacts(
            logit_bytes=10.0,
            glu_tensors=4,
            unfused_rmsnorm=True,
            keeps_fp32_gradients=True,
            bucket_bytes=2 * 5e8 * 4,
            live_elements=1e9,
        ),
        # step_fused_adam flattens 2-byte gradients and takes their norm; Adam scales and clips. Measured (fp16, A100): 33 in all.
        update_copy_bytes=6.0,
        clip_bytes=0.0,
        is_eager_like_megatron=True,
        offloads_compute_gradients=True,
        # stage3.py: partition_grads copies during the backward pass; unscale_and_clip_grads scales in place (8 bytes), and the
        # updated fp32 parameters are cast on the host before they go up (6).
        offloads_in_backward=True,
        host_copy_bytes=14.0,
    ),
    EngineFacts(
        name="nanotron",
        # flash-attn's Triton norm and rotary kernels; gated part as torch.
        kernels=TORCH_KERNELS._replace(norm=FUSED_NORM, rotary=FUSED_ROTARY, loss=STEPWISE_LOSS),
        # v0.5 reduces after the backward pass: unsharded gradients in DistributedDataParallel's buckets (bucket_cap_mb = 25), under
        # ZeRO-1 every tensor by itself (reduce_scatter_coalesced and all_gather_coalesced in optim/zero.py).
        data_parallel=DataParallelFacts(3, 3, zero1_by_tensor=True, bucket_bytes=25 * MIB),
        # sharded_cross_entropy: logits, fp32 copy, less their maximum, exponentials; torch's silu and product; k and v joined.
        memory=MemoryFacts(logit_bytes=14.0, glu_tensors=4, qkv_copies=1, kv_copies=1),
        update_copy_bytes=10.0,  # as megatron, the copy in a pass of its own
        sums_gradients="fp32",  # FP32GradientAccumulator
    ),
    EngineFacts(
        name="internevo",
        # Fused norm, flash-attn's rotary, silu and product fused.
        kernels=TORCH_KERNELS._replace(norm=FUSED_NORM, rotary=FUSED_ROTARY, gated=FUSED_GATED),
        # hybrid_zero_optim.py: overlap_sync_grad, but ZeRO-1 deals out entire tensors: reduced to the owner, broadcast afterwards.
        data_parallel=DataParallelFacts(0, 3, zero1_by_tensor=True),
        # Megatron's kernels under its own optimizer.
        memory=MemoryFacts(logit_bytes=8.0, glu_tensors=3, qkv_copies=1, keeps_expert_output=False),
        update_copy_bytes=24.0,  # as deepspeed
        is_eager_like_megatron=True,
    ),
    # As Megatron before it overlapped anything (Aceso, EuroSys 2024, on a fork of 2021).
    EngineFacts(
        name="aceso",
        kernels=TORCH_KERNELS._replace(norm=FUSED_NORM, loss=STEPWISE_LOSS, qkv=COPIED_CONTEXT),
        data_parallel=DataParallelFacts(3, 3),
        # Megatron's operators, one module each, so that any of them can be recomputed: inputs and outputs of all of them stay.
        # [fitted: 0.19 GiB a layer and sequence of OPT-350M at tp 4, `meshwright validate --source libai_sailor2`]
        memory=MemoryFacts(logit_bytes=10.0, glu_tensors=4, qkv_copies=1, keeps_all_outputs=True),
        update_copy_bytes=6.0,  # as megatron
        is_eager_like_megatron=True,
        recomputes_cores_first=True,
    ),
)

_BY_NAME = {engine.name: engine for engine in _RECORDS}

# Engines that differ from a measured one in what their code says.
_DERIVED = (
    # torchtitan 0.3.0 with the configuration that export writes: no compilation, ChunkedLossWrapper of 8 chunks (every model's
    # function has it), SelectiveAC saves every second product, one mesh of shards for parameters, gradients and states.
    replace(
        _BY_NAME["fsdp2"],
        name="torchtitan",
        kernels=TORCH_KERNELS,
        scales_expert_gradients=False,  # its experts' divide factor is set instead
        is_own_runtime=False,
        cuts_blocks=False,
        has_stage_degrees=False,
        calibrated_as="fsdp2",
        rules=TORCHTITAN_RULES,
        switches=(),
        exchange_rules=(*EXCHANGE_RULES, NO_ULYSSES),
        keeps_parameters_closer=False,
        lacks=full_training(
            "bf16-mixed",
            "bf16",
            "fp32",
            reason="fp8 is a converter of the model in torchtitan, fp16 it has not",
            also=of_torchtitan,
        ),
        recompute=("none", "selective", "full"),
        loss_chunks=8,
        selective="alternate_products",
    ),
    # Accelerate 1.15 with transformers 5: plain model code, logits of all tokens at once, which the loss takes in fp32
    # (ForCausalLMLoss); prefetches and reduces as fully_shard does. Its policy reduces gradients in the compute dtype, which is
    # not counted: the costs are those of fp32.
    replace(
        _BY_NAME["fsdp2"],
        name="accelerate",
        kernels=TORCH_KERNELS,
        is_own_runtime=False,
        cuts_blocks=False,
        has_stage_degrees=False,
        calibrated_as="fsdp2",
        rules=ACCELERATE_RULES,
        switches=(),
        exchange_rules=(*EXCHANGE_RULES, NO_ULYSSES),
        keeps_parameters_closer=False,
        exporter="accelerate",
        lacks=full_training(
            "bf16-mixed",
            "fp16-mixed",
            "fp32",
            reason="Accelerate is planned with no, fp16 and bf16, and fp32 master parameters",
            script_trains=True,
        ),
        splits_sequence=False,
        recompute=("none", "full"),
        loss_chunks=1,
        code="eager",
        zero_stages=(0, 2, 3),
    ),
    # group_sharded_stage2.py: every backward pass reduces each tensor to its owner; comm_overlap is off unless set, and so is
    # enable_mp_async_allreduce (PaddleNLP, trainer/training_args.py).
    replace(
        _BY_NAME["megatron"],
        name="paddlenlp",
        calibrated_as="megatron",
        rules=None,
        data_parallel=DataParallelFacts(3, 3, sums_shards=True),
        hides_reduction_in_weight_gradient=False,
    ),
    # DeepSpeed's super_offload (arXiv:2509.21271) and systems like it (LoHan, arXiv:2403.06504): gradients leave in buckets, and
    # the host updates each while the device goes on; the norm is speculated upon, not waited for.
    replace(
        _BY_NAME["deepspeed"],
        name="superoffload",
        calibrated_as="deepspeed",
        rules=None,
        exporter="",
        updates_in_backward=True,
    ),
    # NeMo: Megatron-Core under a recipe of Megatron Bridge 0.3, which holds the model; its overrides leave the recipe's kernels.
    replace(
        _BY_NAME["megatron"],
        name="nemo",
        calibrated_as="megatron",
        exporter="nemo",
        lacks=full_training(
            "bf16-mixed", "fp16-mixed", "fp8", reason="Megatron Bridge has no MixedPrecisionConfig of it"
        ),
    ),
)

ENGINES: dict[str, EngineFacts] = _BY_NAME | {engine.name: engine for engine in _DERIVED}
PLANNED_ENGINES = tuple(name for name, engine in ENGINES.items() if engine.rules is not None)
OWN_ENGINE = next(name for name, engine in ENGINES.items() if engine.is_own_runtime)

if TYPE_CHECKING:
    Engine = str
else:
    Engine = Literal[tuple(ENGINES)]


def require_our_engine(engine: str) -> None:
    """Raise unless plans for an engine are run by our own runtime.

    Raises:
        ConfigError: they are not.
    """
    if engine != OWN_ENGINE:
        raise ConfigError(
            f"the plan is for {engine}: `meshwright apply` runs plans for its own runtime ({OWN_ENGINE}) only",
            help=f"start {engine} with the plan's layout, or plan again without --engine",
        )
