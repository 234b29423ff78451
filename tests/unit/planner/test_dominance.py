"""What a space leaves out by a theorem is nowhere better than what it keeps."""

from __future__ import annotations

import numpy as np
import pytest
from meshwright.cost_models.layouts import LayoutBatch
from meshwright.cost_models.space_costs import SpaceCosts
from meshwright.cost_models.step import estimate_step
from meshwright.planner import enumeration
from meshwright.planner.expansion import expand
from meshwright.planner.space import build_space
from meshwright.schema import ClusterSpec, Layout, ModelSpec, Workload

CLUSTERS = ("8xH100-SXM-80GB", "2x4xA100-SXM-40GB/ib200", "8x1xA100-SXM-40GB/eth25")

NO_RECOMPUTE = {"recompute": "none"}  # where blocks choose by themselves, one cut has many times


@pytest.mark.parametrize("seq_len", [2048, 65536])
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("engine", ["fsdp2", "megatron"])
def test_splits_of_cp_left_out_are_no_faster(
    engine: str, cluster: str, seq_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, machine = ModelSpec.named("llama-3.2-1b"), ClusterSpec.parse(cluster)
    workload = Workload(seq_len=seq_len, global_batch_size=8, engine=engine)
    kept = build_space(spec, workload, machine, NO_RECOMPUTE).batch
    monkeypatch.setattr(
        enumeration, "exchanges_worth_trying", lambda c, sizes, *_: np.ones((len(c["tp"]), len(sizes)), dtype=bool)
    )
    whole = build_space(spec, workload, machine, NO_RECOMPUTE).batch
    assert len(kept) < len(whole)
    layouts = [kept.layout(idx) for idx in range(len(kept))]
    left_out = sorted(
        {whole.layout(idx) for idx in range(len(whole))} - set(layouts), key=lambda layout: layout.model_dump_json()
    )
    rng = np.random.default_rng(0)
    for idx in rng.choice(len(left_out), size=min(12, len(left_out)), replace=False):
        like = [layout for layout in layouts if _without_split(layout) == _without_split(left_out[idx])]
        times = _step_times([left_out[idx], *like], spec, machine, workload)
        assert min(times[1:]) <= times[0] * (1 + 1e-9)


def _without_split(layout: Layout) -> Layout:
    return layout.replace(cp_ulysses=1)


def _step_times(layouts: list[Layout], spec: ModelSpec, cluster: ClusterSpec, workload: Workload) -> list[float]:
    """Of all layouts with the stages of the first: with others, the search may find a better cut for one than for another."""
    batch = LayoutBatch.of(layouts, workload.global_batch_size)
    costs = SpaceCosts.of(spec, workload, cluster, batch)
    boundaries = expand(costs, 0).boundaries
    return [estimate_step(costs, idx, boundaries).step_time_s for idx in range(len(layouts))]


def test_every_degree_that_the_engine_takes_stays_reachable() -> None:
    """DeepSpeed has no ring: a split that only the ring would beat stays."""
    spec, machine = ModelSpec.named("llama-3.2-1b"), ClusterSpec.parse("8xH100-SXM-80GB")
    batch = build_space(spec, Workload(seq_len=2048, global_batch_size=8, engine="deepspeed"), machine, {}).batch
    assert set(batch.cp) == {1, 2, 4, 8}
    assert np.array_equal(batch.cp, batch.cp_ulysses)
