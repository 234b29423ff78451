"""What a request that fits nowhere is answered with: which stage lacks what, and changes that do fit, each checked again here."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.planner import estimate, plan
from meshwright.planner.explain import advice
from meshwright.planner.explain.advice import Advice, _first_that_holds, advise, grow_cluster, larger_sizes
from meshwright.planner.request import Deadline, PlanRequest
from meshwright.schema import ClusterSpec, InfeasibleError, ModelSpec, Workload

REQUESTS = {
    "too few devices": PlanRequest(
        ModelSpec.named("llama-3.1-8b"),
        ClusterSpec.parse("2xA100-SXM-40GB"),
        Workload(seq_len=4096, global_batch_size=48),
        {},
        True,
    ),
    "what was fixed": PlanRequest(
        ModelSpec.named("llama-2-7b"),
        ClusterSpec.parse("8xA100-SXM-40GB"),
        Workload(seq_len=4096, global_batch_size=64),
        {"tp": 1, "recompute": "none", "micro_batch_size": 16},
        True,
    ),
    "another engine": PlanRequest(
        ModelSpec.named("mixtral-8x7b"),
        ClusterSpec.parse("8xH100-SXM-80GB"),
        Workload(seq_len=4096, global_batch_size=32, engine="megatron"),
        {},
        False,
    ),
}


@functools.cache
def advised(name: str) -> Advice:
    return advise(REQUESTS[name], num_layouts=1)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "what was fixed" else [pytest.mark.long]) for name in REQUESTS]
)
def test_every_change_fits_and_the_smallest_comes_first(name: str) -> None:
    request, found = REQUESTS[name], advised(name)
    assert found.changes
    assert advise(request, num_layouts=1) == found
    executed = [change.executed for change in found.changes]
    assert executed == sorted(executed, reverse=True)
    for change in found.changes:
        changed, layout = change.request, change.fit.layout
        again = estimate(changed.model, changed.cluster, changed.workload, layout)
        assert again.fits
        assert again == change.fit.estimate
        assert {key: getattr(layout, key) for key in changed.fixed} == dict(changed.fixed)


def test_message_names_the_stage_the_bytes_and_what_was_fixed() -> None:
    request = REQUESTS["what was fixed"]
    with pytest.raises(InfeasibleError) as caught:
        plan(request.model, request.cluster, request.workload, fixed={**request.fixed, "pp": 4})
    text = str(caught.value)
    assert re.search(r"stage \d of 4 needs up to", text)
    assert "too much   [memory (C2)]" in text
    assert "largest: activations" in text
    assert "fixed: tp=1,recompute=none,micro_batch_size=16,pp=4" in text
    assert "do not fix" in str(caught.value.help)


@pytest.mark.long
def test_number_of_devices_need_not_be_a_power_of_two() -> None:
    """A batch of 48 on nodes of 8: what plan() says of every smaller size is checked, and that the one named fits."""
    request, found = REQUESTS["too few devices"], advised("too few devices")
    change = next(change for change in found.changes if change.kind == "devices")
    wanted = change.request.cluster.num_devices
    assert change.text == f"use {wanted} devices"
    for count in [*range(3, wanted), wanted]:
        cluster = ClusterSpec.parse(f"{count}xA100-SXM-40GB")
        try:
            fits = plan(request.model, cluster, request.workload).estimate.fits
        except InfeasibleError:
            fits = False
        assert fits == (count == wanted), count


def test_advice_that_is_stopped_says_so() -> None:
    over = Deadline(600)
    over.stop()
    found = advise(replace(REQUESTS["too few devices"], deadline=over), num_layouts=1)
    assert found.changes == ()
    assert not found.complete


def test_advice_that_looked_at_enough_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "MAX_PROBES", 1)
    given = advise(REQUESTS["what was fixed"], num_layouts=1)
    assert not given.complete


@settings(deadline=None)
@given(st.integers(1, 400), st.data())
def test_least_of_what_only_grows_is_the_least(size: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, size))
    assert _first_that_holds(range(1, size + 1), lambda k: k >= first) == (None if first == size else first)


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_least_of_anything_holds(holds: list[bool]) -> None:
    place = _first_that_holds(range(1, len(holds) + 1), holds.__getitem__)
    assert place is None or holds[place]


@pytest.mark.parametrize(
    ("cluster", "counts"),
    [
        ("1xH100-SXM-80GB", [2, 3, 4, 5, 6, 7, 8, 16, 24]),
        ("6xH100-SXM-80GB", [7, 8, 16, 24, 32]),
        ("16xH100-SXM-80GB", [24, 32, 40, 48]),
        ("2x4xH100-SXM-80GB/ib400", [12, 16, 20, 24]),
    ],
)
def test_a_cluster_grows_by_the_rest_of_a_node_and_by_nodes(cluster: str, counts: list[int]) -> None:
    spec, workload = ClusterSpec.parse(cluster), Workload(seq_len=4096, global_batch_size=5040)
    assert larger_sizes(spec, workload)[: len(counts)] == counts
    for count in counts:
        larger = grow_cluster(spec, count)
        assert larger is not None
        assert larger.num_devices == count
        if not cluster.startswith("2x4"):
            same = ClusterSpec.parse(f"{count}xH100-SXM-80GB")
            assert (larger.groups, larger.levels) == (same.groups, same.levels)


def test_sizes_leave_out_what_the_batch_cannot_use() -> None:
    counts = larger_sizes(ClusterSpec.parse("8xH100-SXM-80GB"), Workload(seq_len=4096, global_batch_size=1))
    assert max(counts) == 64
    assert min(counts) == 16


def test_mixed_groups_grow_in_proportion() -> None:
    a, b = ClusterSpec.parse("2x8xA100-SXM-40GB"), ClusterSpec.parse("4x8xA100-SXM-80GB")
    mixed = a.replace(groups=(a.groups[0], b.groups[0]), levels=(a.levels[0], a.levels[1].replace(domain_size=48)))
    assert larger_sizes(mixed, Workload(seq_len=4096, global_batch_size=720))[:2] == [72, 96]
    larger = grow_cluster(mixed, 72)
    assert larger is not None
    assert [group.num_nodes for group in larger.groups] == [3, 6]


def test_sequences_are_shortened_to_what_fits() -> None:
    model, cluster = ModelSpec.named("smollm2-135m"), ClusterSpec.parse("1x1xRTX4090")
    workload = Workload(seq_len=2**18, global_batch_size=1)
    with pytest.raises(InfeasibleError, match=r"shorten sequences to (131072|196608) tokens") as refused:
        plan(model, cluster, workload)
    advised = int(re.search(r"--seq-len (\d+)", str(refused.value))[1])
    assert plan(model, cluster, workload.replace(seq_len=advised)).estimate.fits
