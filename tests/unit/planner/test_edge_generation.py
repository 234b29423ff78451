"""Generation on small devices without a host apart, joined by a slow network: closed forms, laws, refusals."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from meshwright.cost_models.stage.generation import copy_bytes_per_s, layer_groups, pass_costs
from meshwright.planner import plan
from meshwright.planner.request import OffloadRequest
from meshwright.schema import ClusterSpec, ConfigError, InfeasibleError, ModelSpec
from meshwright.schema.generation import GenerationPlan
from meshwright.schema.task import Generation
from meshwright.schema.units import GIB

EDGE = ClusterSpec.parse(str(Path(__file__).parents[3] / "docs" / "examples" / "edge-devices.toml"))
LLAMA = ModelSpec.named("llama-2-7b")
TASK = Generation(prompt_len=16, generate_len=8, precision="fp32", across_nodes=True)


def made(
    cluster: ClusterSpec = EDGE,
    task: Generation = TASK,
    model: ModelSpec = LLAMA,
    *,
    tp: int | None = 8,
    batch_size: int | None = 1,
    latency_limit_s: float | None = None,
    **offload: float,
) -> GenerationPlan:
    fixed = {name: value for name, value in (("tp", tp), ("batch_size", batch_size)) if value is not None}
    request = OffloadRequest(**{"storage_bytes": 100 * GIB, **offload})
    return plan(model, cluster, task, fixed=fixed, offload=request, latency_limit_s=latency_limit_s)


def with_device(cluster: ClusterSpec = EDGE, **changes: float) -> ClusterSpec:
    group = cluster.groups[0]
    return cluster.replace(groups=(group.replace(device=group.device.replace(**changes)),))


def with_link(**changes: float) -> ClusterSpec:
    level = EDGE.levels[0]
    return EDGE.replace(levels=(level.replace(link=level.link.replace(**changes)),))


def algorithms(answer: GenerationPlan) -> list[str]:
    return [phase.all_reduce.algorithm for phase in answer.estimate.phases if phase.all_reduce is not None]


SMALL = with_device(memory_bytes=2_000_000_000)


def test_pass_waits_for_storage_or_for_compute_and_sums() -> None:
    """With two gigabytes a device, a pass reads what does not stay, and takes that long or as long as products and all-reduces."""
    answer = made(SMALL)
    away = {*answer.storage_layers}
    assert away and not answer.host_layers and answer.cache.device == pytest.approx(1.0)
    kinds = layer_groups(LLAMA, 8, 4)
    read = sum(kind.moved_bytes for kind in kinds for idx in kind.idxs if idx in away)
    costs = pass_costs(LLAMA, SMALL, TASK, 8, np.array([1]))
    counts = np.array([len(kind.idxs) for kind in kinds])
    for p, phase in enumerate(answer.estimate.phases):
        compute = float(counts @ costs.compute_s[:, p, 0] + costs.attend_s[p, 0])
        assert phase.seconds_per_pass == pytest.approx(max(compute, read / 1.4e9), rel=1e-6)
        assert phase.busy_s["storage"] == pytest.approx(read / 1.4e9)
        assert phase.busy_s["link to device"] == pytest.approx(read / copy_bytes_per_s(SMALL, TASK))
        assert phase.all_reduce is not None and phase.all_reduce.algorithm == "exchange"
        rows = 16 if p == 0 else 1
        of_blocks, of_head = (3 * (4e-3 + tokens * LLAMA.hidden_dim * 4 / 37.5e6) for tokens in (rows, 1))
        assert phase.all_reduce.seconds_per_pass == pytest.approx((2 * 32 + 1) * of_blocks + of_head)
        assert phase.all_reduce.seconds_per_pass < compute
    assert answer.estimate.device_bytes <= 1_500_000_000
    assert answer.estimate.host_bytes == 0 and answer.estimate.host_budget_bytes is None


def test_sums_of_a_pass_are_those_of_the_network() -> None:
    """All-reduces of a row of the hidden states: what a slower network adds to a pass, by hand."""
    counts = np.array([len(kind.idxs) for kind in layer_groups(LLAMA, 8, 4)])
    size = LLAMA.hidden_dim * 4

    def decode_s(cluster: ClusterSpec) -> float:
        return float(counts @ pass_costs(LLAMA, cluster, TASK, 8, np.array([1])).compute_s[:, 1, 0])

    slow = with_link(latency_s=20e-3)  # a star of two such hops is quicker than an exchange of three
    star, exchange = 2 * 20e-3 + 14 * size / 37.5e6, 3 * (4e-3 + size / 37.5e6)
    sums = 2 * 32 + 2  # of each block two, of the embedding and the head one each
    assert decode_s(slow) - decode_s(EDGE) == pytest.approx(sums * (star - exchange), rel=1e-9)
    assert algorithms(made(slow))[1:] == ["star"] * 3
    assert algorithms(made(task=TASK.replace(prompt_len=2048))) == ["ring", *["exchange"] * 3]


def test_better_devices_and_networks_are_never_slower() -> None:
    base = made(SMALL).estimate.tokens_per_s
    group = SMALL.groups[0]
    level = SMALL.levels[0]
    better = {
        "storage": SMALL.replace(groups=(group.replace(storage_bytes_per_s=2.8e9),)),
        "memory": with_device(SMALL, memory_bytes=3_000_000_000),
        "bandwidth": with_device(SMALL, memory_bandwidth_bytes_per_s=2e10),
        "latency": SMALL.replace(levels=(level.replace(link=level.link.replace(latency_s=1e-3)),)),
        "network": SMALL.replace(levels=(level.replace(link=level.link.replace(bandwidth_bytes_per_s=1e9)),)),
    }
    rates = {name: made(cluster).estimate.tokens_per_s for name, cluster in better.items()}
    assert all(rate >= base * (1 - 2e-3) for rate in rates.values()), rates
    assert max(rates.values()) > 1.1 * base


def test_more_devices_together_read_less_each_and_answer_sooner() -> None:
    latencies = [made(SMALL, tp=tp).estimate.latency_s for tp in (4, 8)]
    assert latencies[1] < 0.7 * latencies[0]
    limited = made(SMALL, tp=None, latency_limit_s=latencies[1] * 1.02)
    assert limited.tp == 8 and limited.estimate.latency_s <= latencies[1] * 1.02
    assert made(SMALL, tp=None, batch_size=None).tp in (1, 2, 4, 8)


def test_plan_across_nodes_round_trips_and_says_what_it_asked(tmp_path) -> None:
    answer = made()
    answer.save(tmp_path / "plan.json")
    assert GenerationPlan.load(tmp_path / "plan.json") == answer
    assert answer.generation.across_nodes and answer.provenance.fixed == "tp=8,batch_size=1"
    assert "across_nodes" not in made(task=TASK.replace(across_nodes=False), tp=1).model_dump_json()


def test_devices_of_several_nodes_of_gpus_hold_a_model_together() -> None:
    cluster = ClusterSpec.parse("4x1xT4-16GB")
    task = Generation(prompt_len=128, generate_len=16, precision="fp16")
    alone = made(cluster, task, tp=None, host_memory_bytes=64 * GIB)
    together = made(cluster, task.replace(across_nodes=True), tp=4, host_memory_bytes=64 * GIB)
    assert alone.tp == 1 and together.tp == 4 and together.replicas == 1
    assert {phase.all_reduce for phase in together.estimate.phases} == {None}  # NCCL chooses its own
    assert not together.host_layers


def test_bound_of_the_search_holds_for_every_degree() -> None:
    free = made(SMALL, tp=None)
    assert free.search is not None
    for tp in (2, 4, 8):
        assert made(SMALL, tp=tp).estimate.tokens_per_s <= free.search.bound * (1 + 1e-6)


@pytest.mark.parametrize(
    ("changes", "said", "helped"),
    [
        ({"tp": 3}, "3 devices cannot hold llama-2-7b together on edge-devices: 1, 2, 4, 8 can", "--tp 8"),
        ({"tp": 8, "task": TASK.replace(across_nodes=False)}, "8 devices cannot hold", "--across-nodes"),
        ({"cluster": ClusterSpec.parse("1xT4-16GB"), "tp": None}, "1xT4-16GB has one node", "leave out --across-nodes"),
        ({"host_memory_bytes": 1e9}, "--host-memory-gib: edge-devices has no host apart", "reserved_gib"),
        ({"host_attention_bytes_per_s": 1e9}, "--host-attention-gb-per-s: edge-devices has no host", "leave it out"),
        ({"tp": 0}, "tp = 0", ""),
    ],
)
def test_what_does_not_apply_is_refused(changes, said: str, helped: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        made(**changes)
    assert helped in (caught.value.help or "")


def test_nodes_of_different_sizes_do_not_hold_a_model_together() -> None:
    groups = (EDGE.groups[0], EDGE.groups[0].replace(num_nodes=4, devices_per_node=2))
    uneven = EDGE.replace(groups=groups, levels=(EDGE.levels[0].replace(domain_size=16),))
    with pytest.raises(ConfigError, match="nodes of 1, 2 devices"):
        made(uneven)


def test_device_that_is_too_small_is_told_to_join_others() -> None:
    tiny = with_device(memory_bytes=1_000_000_000)
    with pytest.raises(InfeasibleError, match=r"elsewhere on storage.*C7") as caught:
        made(tiny, tp=1)
    assert "--across-nodes" in caught.value.help


def test_storage_that_is_too_small_is_told_what_it_lacks() -> None:
    with pytest.raises(InfeasibleError, match=r"of storage, 0 B may be used .*C9") as caught:
        made(SMALL, storage_bytes=0.0)
    gib = int(caught.value.help.split("--nvme-gib ")[1])
    made(SMALL, storage_bytes=gib * GIB)
    with pytest.raises(InfeasibleError, match="C9"):
        made(SMALL, storage_bytes=(gib - 2) * GIB)


def test_window_on_a_smaller_device_reads_more() -> None:
    counts = [len(made(with_device(memory_bytes=size * 10**9)).storage_layers) for size in (2, 3, 4, 8)]
    assert all(more >= fewer for more, fewer in itertools.pairwise(counts))
    assert counts[0] > 10 and counts[-1] == 0
