"""Overlap modes of kinds of layers: the least of each is the least of all combinations, and what must hold of any."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cost_cases import cost_inputs
from meshwright.cost_models.layer.layer import within_layer_cost
from meshwright.cost_models.layer.overlap import shared_link, supported
from meshwright.cost_models.layer.passes import layer_passes, passes_in_mode
from meshwright.planner.plan import estimate
from meshwright.planner.request import PlanRequest
from meshwright.planner.space import build_space
from meshwright.schema import ClusterSpec, Layout, ModelSpec, Workload
from meshwright.schema.layers import Block, DenseMLP, Head, MoE, SoftmaxAttention
from meshwright.schema.layout_table import LayoutTable
from plans import cpu_cluster

CLUSTERS = ("8xH100-SXM-80GB", "8xL40S", "2x8xA100-SXM-80GB/ib200", "8xB200-180GB")
LLAMA = ModelSpec.named("llama-3.1-70b")
EIGHT = ClusterSpec.parse("8xH100-SXM-80GB")
WORKLOAD = Workload(seq_len=4096, global_batch_size=64)


def random_layers(rng: np.random.Generator) -> tuple[tuple[Block | Head, ...], int]:
    """A dense kind, one with experts, and the head, of a random width."""
    heads, head_dim = int(rng.choice([8, 16, 32, 64])), 128
    attention = SoftmaxAttention(kind="mha", num_heads=heads, num_kv_heads=heads, head_dim=head_dim)
    width = heads * head_dim
    dense = Block(attention=attention, mlp=DenseMLP(ffn_dim=int(width * rng.choice([2, 4]))))
    experts = dense.replace(mlp=MoE(num_experts=8, top_k=2, ffn_dim=width))
    return (dense, experts, Head(vocab_size=32000)), width


def random_layouts(rng: np.random.Generator, size: int) -> LayoutTable:
    tp = rng.choice([2, 4, 8], size)
    columns = {"tp": tp, "dp_replicate": 8 // tp, "micro_batch_size": rng.choice([2, 4, 6], size), "tp_halves": tp > 0}
    columns |= {"recompute": rng.integers(0, 3, size), "sequence_parallel": rng.integers(0, 2, size)}
    return LayoutTable.filled(size, **{name: np.asarray(column, dtype=np.int64) for name, column in columns.items()})


def test_the_best_of_each_kind_is_the_best_of_all_combinations() -> None:
    rng = np.random.default_rng(0)
    chosen = []
    for case in range(50):
        layers, width = random_layers(rng)
        layouts = random_layouts(rng, 4)
        workload = Workload(seq_len=int(rng.choice([256, 1024, 4096])), global_batch_size=64)
        inputs = cost_inputs(width, layouts, workload, ClusterSpec.parse(CLUSTERS[case % len(CLUSTERS)]))
        counts = rng.integers(1, 40, len(layers))
        seconds, taken = [], np.zeros(len(layouts))
        for layer, count in zip(layers, counts, strict=True):
            modes = [count * passes_in_mode(layer, inputs).busy_s]
            if supported(layer, inputs).all():
                modes.append(count * passes_in_mode(layer, inputs, by_halves=True).busy_s)
            seconds.append(modes)
            best = layer_passes(layer, inputs)
            taken = taken + count * best.busy_s
            chosen += list(best.by_halves) if len(modes) == 2 else []
        exhaustive = np.min([np.sum(one, axis=0) for one in itertools.product(*seconds)], axis=0)
        assert taken == pytest.approx(exhaustive, rel=1e-12)
    assert 0.1 < np.mean(chosen) < 0.9  # of 200 layouts either mode is the best of some


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_quicker_link_never_makes_a_layer_slower(recompute: str, sequence_parallel: bool) -> None:
    layout = Layout(tp=8, micro_batch_size=4, tp_halves=True, recompute=recompute, sequence_parallel=sequence_parallel)  # type: ignore[arg-type]
    table, block = LayoutTable.from_layouts([layout], 64), LLAMA.block_runs[0][0]
    seconds = []
    for factor in (0.25, 0.5, 1, 2, 4, 16):
        (level,) = EIGHT.levels
        link = level.link.replace(bandwidth_bytes_per_s=factor * level.link.bandwidth_bytes_per_s)
        cluster = EIGHT.replace(levels=(level.replace(link=link),))
        cost = within_layer_cost(block, cost_inputs(LLAMA.hidden_dim, table, WORKLOAD, cluster))
        seconds.append(float(cost.busy_s[0]))
    assert seconds == sorted(seconds, reverse=True)


def test_halves_keep_bytes_and_parameters() -> None:
    block, layout = LLAMA.block_runs[0][0], Layout(tp=8, micro_batch_size=4)
    tables = [LayoutTable.from_layouts([layout.replace(tp_halves=on)], 64) for on in (False, True)]
    off, on = (within_layer_cost(block, cost_inputs(LLAMA.hidden_dim, table, WORKLOAD, EIGHT)) for table in tables)
    assert on.by_halves == 1 and on.tp_hidden_s > 0 == off.tp_hidden_s
    for name in ("activation_bytes", "working_bytes", "num_params", "pending_bytes"):
        assert getattr(on, name) == getattr(off, name)


def test_what_runs_with_products_takes_the_links_from_collectives_over_data() -> None:
    """Only where both move over one level (V5): tp that fills the domain of the fastest link leaves the others to data."""
    hidden, sixteen = np.array([1.0, 1.0]), ClusterSpec.parse("2x8xH100-SXM-80GB/ib400")
    layouts = LayoutTable.filled(2, tp=np.array([4, 8]))
    assert shared_link(hidden, cost_inputs(8192, layouts, WORKLOAD, sixteen)).tolist() == [1.0, 0.0]
    layout, over_pcie = Layout(tp=4, dp_shard=2, micro_batch_size=4), ClusterSpec.parse("8xL40S")
    whole, halved = (estimate(LLAMA, over_pcie, WORKLOAD, layout.replace(tp_halves=on)) for on in (False, True))
    assert halved.breakdown_s.tp < 0.8 * whole.breakdown_s.tp
    assert halved.breakdown_s.dp > 1.1 * whole.breakdown_s.dp


def test_without_streams_nothing_is_gained_and_no_plan_has_halves() -> None:
    cluster, model = cpu_cluster(8), ModelSpec.named("llama-3.2-1b")
    workload = Workload(seq_len=512, global_batch_size=64, precision="fp32")
    for layout in (Layout(tp=4, dp_shard=2, micro_batch_size=4), Layout(tp=2, dp_shard=4, micro_batch_size=2)):
        whole, halved = (estimate(model, cluster, workload, layout.replace(tp_halves=on)) for on in (False, True))
        assert halved.step_time_s > whole.step_time_s
    assert not build_space(PlanRequest(model, cluster, workload)).batch.tp_halves.any()


def test_experts_and_ends_stay_whole() -> None:
    layouts = LayoutTable.from_layouts([Layout(tp=8, micro_batch_size=4, tp_halves=True)], 64)
    for name in ("mixtral-8x7b", "deepseek-v3"):
        model = ModelSpec.named(name)
        for run in model.layers:
            cost = within_layer_cost(run.layer, cost_inputs(model.hidden_dim, layouts, WORKLOAD, EIGHT))
            assert cost.by_halves == 0
