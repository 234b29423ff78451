"""Plans made by hand: the runtime is tested without the planner. All estimates are made up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from meshwright.schema import (
    ClusterSpec,
    Device,
    Layout,
    Link,
    LinkLevel,
    ModelSpec,
    NodeGroup,
    Stage,
    TrainingEstimate,
    TrainingPlan,
    Workload,
)
from meshwright.schema.cluster import CollectiveLatency, LinkEfficiency, PeakFlops
from meshwright.schema.layers import (
    Block,
    DenseMLP,
    Embedding,
    Head,
    LatentAttention,
    LayerRun,
    MoE,
    SoftmaxAttention,
)
from meshwright.schema.layout import Recompute
from meshwright.schema.offload import LayerOffload, OffloadSchedule
from meshwright.schema.plan import PlanProvenance
from meshwright.schema.rope import Rope
from meshwright.schema.stages import LayerSlots
from meshwright.schema.training_plan import Interval, MemoryBreakdown, StageEstimate, TimeBreakdown


def tiny_model(
    *,
    num_blocks: int = 5,
    vocab_size: int = 97,
    hidden_dim: int = 32,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    ffn_dim: int = 48,
    tied: bool = False,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: Literal["none", "per_head", "full"] = "none",
    rope: Rope | None = None,
    norm_eps: float = 1e-5,
    experts: MoE | None = None,
    latent: LatentAttention | None = None,
) -> ModelSpec:
    """A Llama-like model; by default the vocabulary and the number of blocks divide by nothing."""
    attention = SoftmaxAttention(
        kind="mha" if num_heads == num_kv_heads else "gqa",
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        qk_norm=qk_norm,
    )
    dense = Block(attention=latent or attention, mlp=DenseMLP(ffn_dim=ffn_dim, bias=mlp_bias))
    block = dense if experts is None else dense.replace(mlp=experts)
    return ModelSpec(
        name="tiny",
        architecture="LlamaForCausalLM",
        hidden_dim=hidden_dim,
        layers=(
            LayerRun(layer=Embedding(vocab_size=vocab_size)),
            LayerRun(layer=block, count=num_blocks),
            LayerRun(layer=Head(vocab_size=vocab_size, tied=tied)),
        ),
        tie_embeddings=tied,
        max_seq_len=64,
        norm_eps=norm_eps,
        rope=rope or Rope(),
    )


def gpt2_model(*, num_blocks: int = 3) -> ModelSpec:
    """Learned positions, LayerNorm and biases, a tied head."""
    config = {"n_embd": 32, "n_layer": num_blocks, "n_head": 4, "n_positions": 24, "vocab_size": 97}
    return ModelSpec.from_hf({"model_type": "gpt2", **config})


def cpu_cluster(num_devices: int) -> ClusterSpec:
    """One node of CPU ranks."""
    device = Device(
        name="cpu",
        vendor="cpu",
        memory_bytes=8 * 10**9,
        memory_bandwidth_bytes_per_s=1e10,
        peak_flops_per_s=PeakFlops(fp32=5e10),
    )
    efficiency = LinkEfficiency(p2p=1, all_reduce=1, all_gather=1, reduce_scatter=1, all_to_all=1)
    link = Link(
        name="shm",
        kind="scale-up",
        bandwidth_bytes_per_s=2e9,
        latency_s=1e-4,
        efficiency=efficiency,
        collective_latency_s=CollectiveLatency(base=1e-4, per_hop=1e-4),
    )
    return ClusterSpec(
        name="local",
        groups=(NodeGroup(device=device, num_nodes=1, devices_per_node=num_devices),),
        levels=(LinkLevel(link=link, domain_size=num_devices),),
    )


def make_plan(
    model: ModelSpec,
    layout: Layout,
    *,
    workload: Workload,
    blocks_per_stage: tuple[int, ...] | None = None,
    rank_map: tuple[int, ...] | None = None,
    pipeline_order: tuple[str, ...] = (),
    expert_slots: tuple[LayerSlots, ...] = (),
) -> TrainingPlan:
    """A valid plan; unless given, blocks (or halves) are spread evenly with the rest on the last stages, ranks as devices."""
    num_stages = layout.pp * layout.num_model_chunks
    num_blocks = model.num_blocks * (1 + layout.half_blocks)
    counts = blocks_per_stage or tuple((num_blocks + i) // num_stages for i in range(num_stages))
    return TrainingPlan(
        model=model,
        cluster=cpu_cluster(layout.world_size),
        workload=workload,
        layout=layout,
        stages=_stages(counts, layout),
        expert_slots=expert_slots,
        rank_map=rank_map or tuple(range(layout.world_size)),
        estimate=_estimate(num_stages),
        pipeline_order=pipeline_order,
        provenance=PlanProvenance(meshwright="test", created="2026-01-01T00:00:00Z", inputs_sha256="0" * 64),
    )


def with_offload(
    plan: TrainingPlan, schedule: OffloadSchedule, offloads: Sequence[LayerOffload]
) -> tuple[TrainingPlan, TrainingPlan]:
    """A plan with the recompute that these offloads need (one for each layer), without them and with them."""
    needed: dict[LayerOffload, Recompute] = {"none": "none", "activations": "none", "boundary": "full"}
    mixes = "boundary" in offloads
    fields = {name: getattr(plan, name) for name in TrainingPlan.model_fields}
    layout = plan.layout.replace(recompute="mixed") if mixes else plan.layout
    stages = tuple(
        stage.replace(layer_recompute=tuple(needed[offloads[idx]] for idx in stage.layer_idxs) if mixes else ())
        for stage in plan.stages
    )
    offloading = tuple(
        stage.replace(layer_offload=tuple(offloads[idx] for idx in stage.layer_idxs)) for stage in stages
    )
    scheduled = {"layout": layout.replace(offload="scheduled"), "stages": offloading, "offload": schedule}
    return plan.replace(layout=layout, stages=stages), TrainingPlan(**{**fields, **scheduled})


def _stages(blocks: tuple[int, ...], layout: Layout) -> tuple[Stage, ...]:
    stages, first = [], 0
    for i, count in enumerate(blocks):
        num_layers = count + (i == 0) + (i == len(blocks) - 1)
        stages.append(_stage(first, num_layers, layout))
        first += num_layers
    return tuple(stages)


def _stage(first: int, num_layers: int, layout: Layout) -> Stage:
    """Under mixed recompute one layer after the other takes none, selective, full."""
    if layout.recompute != "mixed":
        return Stage(first_layer_idx=first, num_layers=num_layers, recompute=layout.recompute)
    in_turn = tuple(("none", "selective", "full")[idx % 3] for idx in range(first, first + num_layers))
    return Stage(first_layer_idx=first, num_layers=num_layers, recompute="full", layer_recompute=in_turn)


def _estimate(num_stages: int) -> TrainingEstimate:
    memory = MemoryBreakdown(parameters=1, gradients=1, optimizer=1, unsharded=0, activations=1, logits=1, temporary=1)
    parts: dict[str, Any] = dict.fromkeys(TimeBreakdown.model_fields, 0.0)
    return TrainingEstimate(
        step_time_s=1.0,
        step_time_interval_s=Interval(low=0.5, high=2.0),
        tokens_per_s=1.0,
        tokens_per_s_per_device=1.0,
        mfu=0.1,
        peak_allocated_bytes=6,
        peak_reserved_bytes=7,
        memory_interval_bytes=Interval(low=5, high=8),
        budget_bytes=10,
        fits=True,
        breakdown_s=TimeBreakdown(**{**parts, "compute": 1.0}),
        memory_bytes=memory,
        stages=(StageEstimate(forward_s=0.3, backward_s=0.7, memory_bytes=memory),) * num_stages,
    )
