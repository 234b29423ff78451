"""Small plans that the runtime's tests run on this machine's CPU."""

from __future__ import annotations

from meshwright.schema import ClusterSpec, Device, Estimate, Layout, Link, LinkLevel, ModelSpec, NodeGroup, Plan, Stage, Workload
from meshwright.schema.cluster import CollectiveLatency, LinkEfficiency, PeakFlops
from meshwright.schema.model import Block, DenseMLP, Embedding, Head, LayerRun, Rope, SoftmaxAttention
from meshwright.schema.plan import Interval, MemoryBreakdown, Provenance, StageEstimate, TimeBreakdown
from meshwright.schema.units import GB, GIB, MIB

CPU = Device(
    name="cpu-core",
    vendor="cpu",
    memory_bytes=4 * GIB,
    memory_bandwidth_bytes_per_s=5 * GB,
    peak_flops_per_s=PeakFlops(fp32=50e9),
)
H100 = CPU.replace(name="H100-SXM-80GB", vendor="nvidia", memory_bytes=79 * GIB)

LOOPBACK = Link(
    name="loopback",
    kind="scale-up",
    bandwidth_bytes_per_s=2 * GB,
    latency_s=1e-4,
    efficiency=LinkEfficiency(p2p=1, all_reduce=1, all_gather=1, reduce_scatter=1, all_to_all=1),
    collective_latency_s=CollectiveLatency(base=1e-4, per_hop=1e-4),
)


def tiny_model(*, vocab_size: int = 256, num_blocks: int = 2) -> ModelSpec:
    """A two-block decoder of about 0.1 M parameters."""
    block = Block(
        attention=SoftmaxAttention(kind="gqa", num_heads=4, num_kv_heads=2, head_dim=16), mlp=DenseMLP(ffn_dim=128)
    )
    return ModelSpec(
        name="tiny",
        architecture="LlamaForCausalLM",
        hidden_dim=64,
        layers=(
            LayerRun(layer=Embedding(vocab_size=vocab_size)),
            LayerRun(layer=block, count=num_blocks),
            LayerRun(layer=Head(vocab_size=vocab_size)),
        ),
        tie_embeddings=False,
        max_seq_len=512,
        rope=Rope(),
    )


def tiny_cluster(num_devices: int, *, num_nodes: int = 1, device: Device = CPU) -> ClusterSpec:
    """``num_devices`` in all, with the memory that a CPU rank may use."""
    group = NodeGroup(device=device, num_nodes=num_nodes, devices_per_node=num_devices // num_nodes)
    level = LinkLevel(link=LOOPBACK, domain_size=num_devices)
    return ClusterSpec(name="test", groups=(group,), levels=(level,), reserved_bytes=0)


def tiny_plan(
    layout: Layout | None = None, *, cluster: ClusterSpec | None = None, model: ModelSpec | None = None, seq_len: int = 64
) -> Plan:
    """A plan of one step of four sequences; its estimate is invented."""
    layout, model = layout or Layout(), model or tiny_model()
    cluster = cluster or tiny_cluster(layout.world_size)
    return Plan(
        model=model,
        cluster=cluster,
        workload=Workload(seq_len=seq_len, global_batch_size=4, precision="fp32"),
        layout=layout,
        stages=_stages(model, layout),
        rank_map=tuple(range(layout.world_size)),
        estimate=_estimate(layout),
        provenance=Provenance(meshwright="test", created="2026-01-01T00:00:00Z", inputs_sha256=""),
    )


def _stages(model: ModelSpec, layout: Layout) -> tuple[Stage, ...]:
    count = layout.pp * layout.num_model_chunks
    edges = [model.num_layers * idx // count for idx in range(count + 1)]
    return tuple(
        Stage(first_layer_idx=first, num_layers=last - first, recompute=layout.recompute)
        for first, last in zip(edges, edges[1:], strict=False)
    )


def _estimate(layout: Layout) -> Estimate:
    memory = MemoryBreakdown(
        parameters=MIB, gradients=MIB, optimizer=2 * MIB, unsharded=0, activations=8 * MIB, logits=MIB, temporary=MIB
    )
    return Estimate(
        step_time_s=0.02,
        step_time_interval_s=Interval(low=0.01, high=0.03),
        tokens_per_s=12800,
        tokens_per_s_per_device=12800 / layout.world_size,
        mfu=0.1,
        peak_allocated_bytes=memory.total,
        peak_reserved_bytes=memory.total,
        memory_interval_bytes=Interval(low=memory.total, high=memory.total),
        budget_bytes=GIB,
        fits=True,
        breakdown_s=TimeBreakdown(compute=0.02, recompute=0, tp=0, dp=0, pp=0, bubble=0, optimizer=0),
        memory_bytes=memory,
        stages=(StageEstimate(forward_s=0.01, backward_s=0.01, memory_bytes=memory),) * (layout.pp * layout.num_model_chunks),
    )
