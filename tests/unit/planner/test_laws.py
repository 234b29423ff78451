"""Laws of the planner on random small spaces: a better machine is never slower, freedom never hurts, names and units do not matter.

A search may leave a gap: what it found may be that much slower than the best there is. So of two searches of which the first cannot
be worse, the first one's bound is not above what the second one found, and what it found exceeds that by its own gap at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from meshwright.cost_models import coefficients
from meshwright.cost_models.coefficients import packaged_coefficients
from meshwright.cost_models.hardware import collectives
from meshwright.planner import cheapest, expand, search
from meshwright.planner.request import Deadline, PlanRequest
from meshwright.planner.search import SearchResult
from meshwright.planner.space import Space, build_space
from meshwright.schema import ClusterSpec, ConfigError, InfeasibleError, ModelSpec, Offer, SolverLimitError, Workload
from meshwright.schema.cluster import Device, GemmFit, Link, NodeGroup
from small_spaces import random_instance, shortened
from tiers import drawn

ROUNDING = 1e-9
"""Sums of seconds in another order, or of other units."""

FEW = settings(
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
seeds = st.integers(0, 10_000)


@pytest.fixture(autouse=True)
def no_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches go on to the last layout whose bound is below the incumbent."""
    monkeypatch.setattr(search, "REL_GAP", 0.0)


def found(model: ModelSpec, workload: Workload, cluster: ClusterSpec, space: Space) -> SearchResult:
    return search.search(PlanRequest(model, cluster, workload), space)


def seconds(result: SearchResult) -> float:
    return result.feasible[0].estimate.step_time_s if result.feasible else float("inf")


def assert_no_worse(first: SearchResult, second: SearchResult) -> None:
    """The first search cannot have a worse answer than the second, but for what its certificate leaves open."""
    if not second.feasible:
        return
    assert first.feasible
    assert first.bound_s <= seconds(second) * (1 + ROUNDING)
    assert seconds(first) * (1 - first.certificate().gap) <= seconds(second) * (1 + ROUNDING)


def assert_equal(first: SearchResult, second: SearchResult) -> None:
    assert_no_worse(first, second)
    assert_no_worse(second, first)


# --- changed machines ---------------------------------------------------------------------------------------------


def with_devices(cluster: ClusterSpec, change: Callable[[Device], Device]) -> ClusterSpec:
    return cluster.replace(groups=tuple(group.replace(device=change(group.device)) for group in cluster.groups))


def with_links(cluster: ClusterSpec, change: Callable[[Link], Link], only: int | None = None) -> ClusterSpec:
    levels = (
        level.replace(link=change(level.link)) if only in (None, idx) else level
        for idx, level in enumerate(cluster.levels)
    )
    return cluster.replace(levels=tuple(levels))


def with_peaks(device: Device, factor: float) -> Device:
    peaks = device.peak_flops_per_s
    rates = {name: rate and rate * factor for name, rate in peaks.model_dump().items()}
    return device.replace(peak_flops_per_s=peaks.replace(**rates))


def with_traffic(device: Device, factor: float) -> Device:
    return device.replace(memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s * factor)


def quicker(link: Link, factor: float) -> Link:
    small = link.collective_latency_s
    return link.replace(
        latency_s=link.latency_s / factor,
        ramp_s=link.ramp_s / factor,
        ring_step_s=None if link.ring_step_s is None else link.ring_step_s / factor,
        collective_latency_s=small.replace(base=small.base / factor, per_hop=small.per_hop / factor),
    )


def wider(link: Link, factor: float) -> Link:
    return link.replace(bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor)


BETTER: dict[str, Callable[[ClusterSpec, float], ClusterSpec]] = {
    "memory": lambda c, f: with_devices(c, lambda d: d.replace(memory_bytes=int(d.memory_bytes * f))),
    "reserved": lambda c, f: c.replace(reserved_bytes=int(c.reserved_bytes / f)),
    "links": lambda c, f: with_links(c, lambda link: wider(link, f)),
    "inner link": lambda c, f: with_links(c, lambda link: wider(link, f), 0),
    "outer link": lambda c, f: with_links(c, lambda link: wider(link, f), len(c.levels) - 1),
    "latencies": lambda c, f: with_links(c, lambda link: quicker(link, f)),
    "arithmetic": lambda c, f: with_devices(c, lambda d: with_peaks(d, f)),
    "memory bandwidth": lambda c, f: with_devices(c, lambda d: with_traffic(d, f)),
    "device": lambda c, f: with_devices(c, lambda d: with_traffic(with_peaks(d, f), f)),
}


def described(cluster: ClusterSpec, by: str) -> ClusterSpec:
    """The machine as its users know it: by a name of the catalogue, or by what its own file says."""
    changes = {"catalogue": {}, "own name": {"name": "one"}, "data sheet": {"name": "one", "architecture": ""}}[by]
    return with_devices(cluster, lambda d: d.replace(**changes))


described_by = st.sampled_from(["catalogue", "own name", "data sheet"])


@pytest.mark.long
@settings(FEW, max_examples=14)
@given(
    seed=seeds,
    by=described_by,
    what=st.sampled_from(sorted(BETTER)),
    factor=st.sampled_from([1.01, 1.3, 2.0, 8.0]),
)
def test_a_better_machine_is_never_slower(seed: int, by: str, what: str, factor: float) -> None:
    model, workload, cluster, space = random_instance(seed)
    cluster = described(cluster, by)
    before = found(model, workload, cluster, space)
    assert_no_worse(found(model, workload, BETTER[what](cluster, factor), space), before)


@pytest.mark.long
@settings(FEW, max_examples=6)
@given(seed=seeds, by=described_by, what=st.sampled_from(sorted(BETTER)), factor=st.sampled_from([1.01, 1.3, 2.0, 8.0]))
def test_no_layout_is_slower_on_a_better_machine(seed: int, by: str, what: str, factor: float) -> None:
    """What the search finds follows from its layouts; a choice among others must not hide one that breaks the law."""
    model, workload, cluster, space = random_instance(seed)
    cluster = described(cluster, by)
    better = BETTER[what](cluster, factor)
    for row in range(len(space.batch)):
        one = Space(space.batch.select(np.array([row])), {})
        assert_no_worse(found(model, workload, better, one), found(model, workload, cluster, one))


# --- units and names ----------------------------------------------------------------------------------------------


def in_other_seconds(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """The machine in a unit of time of which ``factor`` are a second."""
    changed = with_devices(cluster, lambda d: with_traffic(with_peaks(d, 1 / factor), 1 / factor))
    changed = with_devices(
        changed, lambda d: d.replace(gemm=d.gemm and d.gemm.replace(launch_s=d.gemm.launch_s * factor))
    )
    group = changed.groups[0]
    host_link = group.host_link_bytes_per_s and group.host_link_bytes_per_s / factor
    changed = changed.replace(groups=(group.replace(host_link_bytes_per_s=host_link),))
    return with_links(changed, lambda link: wider(quicker(link, 1 / factor), 1 / factor))


def times_in(section: Any, path: str = "") -> Iterator[tuple[str, float, bool]]:
    """Path, value and whether it is a rate of every coefficient with a unit of time in its name."""
    for name, value in section.items():
        where = f"{path}.{name}" if path else name
        if isinstance(value, dict):
            yield from times_in(value, where)
        elif name.endswith("_s") and isinstance(value, int | float):
            yield where, value, name.endswith("_per_s")


FIT = GemmFit(launch_s=4e-6, compute_efficiency=0.7, memory_efficiency=0.8, source="")


@drawn(few=3, many=12, under=FEW, seed=seeds, factor=st.sampled_from([0.25, 3.0, 1000.0]))
def test_other_units_of_time_scale_the_answer(seed: int, factor: float) -> None:
    """On CPUs, whose costs have no learned part: that is trained on seconds."""
    model, workload, cluster, space = random_instance(seed)
    cluster = with_devices(cluster, lambda d: d.replace(vendor="cpu", gemm=FIT))
    cluster = with_links(cluster, lambda link: link.replace(curve=""))
    before = found(model, workload, cluster, space)
    units = {
        path: value / factor if is_rate else value * factor
        for path, value, is_rate in times_in(packaged_coefficients().sections)
    }
    step_s = collectives.IN_NODE_RING_STEP_S
    slowed = packaged_coefficients().replaced(units)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coefficients, "packaged_coefficients", lambda: slowed)
        patch.setattr(collectives, "IN_NODE_RING_STEP_S", step_s * factor)
        after = found(model, workload, in_other_seconds(cluster, factor), space)
    assert bool(after.feasible) == bool(before.feasible)
    if before.feasible:
        assert seconds(after) == pytest.approx(factor * seconds(before), rel=1e-9)
        assert after.bound_s == pytest.approx(factor * before.bound_s, rel=1e-9)


@drawn(few=3, many=10, under=FEW, seed=seeds)
def test_names_change_nothing(seed: int) -> None:
    model, workload, cluster, space = random_instance(seed)
    unknown = with_devices(cluster, lambda d: d.replace(name="one"))
    renamed = with_links(
        with_devices(cluster, lambda d: d.replace(name="another", source="y")),
        lambda link: link.replace(name="wire", title="z", source="y"),
    ).replace(name="elsewhere")
    after = found(model.replace(name="m", source="s"), workload, renamed, space)
    before = found(model, workload, unknown, space)
    assert seconds(after) == seconds(before)
    assert [c.idx for c in after.feasible] == [c.idx for c in before.feasible]
    assert after.bound_s == before.bound_s


def listed_as(cluster: ClusterSpec, nodes: list[int]) -> ClusterSpec:
    links = np.array(cluster.bandwidth_matrix)[np.ix_(nodes, nodes)]
    return cluster.replace(bandwidth_matrix=tuple(tuple(map(float, row)) for row in links))


def measured(cluster: ClusterSpec, rng: np.random.Generator) -> ClusterSpec:
    line = cluster.levels[-1].link.bandwidth_bytes_per_s
    rates = line * rng.choice([0.2, 0.5, 0.9], size=(cluster.num_nodes, cluster.num_nodes))
    rates = np.minimum(rates, rates.T)
    return cluster.replace(bandwidth_matrix=tuple(tuple(map(float, row)) for row in rates))


@drawn(few=2, many=6, under=FEW, seed=seeds, num_nodes=st.integers(3, 4))
def test_the_order_in_which_nodes_are_listed_does_not_matter(seed: int, num_nodes: int) -> None:
    rng = np.random.default_rng(seed)
    model = shortened(str(rng.choice(["gpt2", "llama-3.2-1b", "olmoe-1b-7b"])), 4)
    cluster = measured(ClusterSpec.parse(f"{num_nodes}x2xA100-SXM-40GB/ib200"), rng)
    workload = Workload(seq_len=512, global_batch_size=24)
    space = build_space(PlanRequest(model, cluster, workload, {"micro_batch_size": 1, "recompute": "none"}))
    some = Space(space.batch.select(np.sort(rng.permutation(len(space.batch))[:6])), {})
    other = listed_as(cluster, [int(node) for node in rng.permutation(num_nodes)])
    assert_equal(found(model, workload, other, some), found(model, workload, cluster, some))


# --- more freedom -------------------------------------------------------------------------------------------------


class Ticks(Deadline):
    """Over after so many looks at it."""

    def __init__(self, looks: int) -> None:
        super().__init__(float("inf"))
        self.looks = looks

    @property
    def is_over(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@drawn(few=2, many=4, under=FEW, seed=seeds)
def test_a_longer_time_limit_never_gives_a_worse_incumbent(seed: int) -> None:
    model, workload, cluster, space = random_instance(seed)
    last, bound_s = float("inf"), 0.0
    for looks in (0, 3, 6, 9, 13, 18, 25, 40):
        try:
            result = search.search(PlanRequest(model, cluster, workload, deadline=Ticks(looks)), space)
        except SolverLimitError:
            assert last == float("inf")
            continue
        assert seconds(result) <= last
        assert bound_s <= result.bound_s * (1 + ROUNDING)
        last, bound_s = seconds(result), result.bound_s
    assert seconds(found(model, workload, cluster, space)) <= last


@drawn(few=4, many=12, under=FEW, seed=seeds, data=st.data())
def test_a_fixed_field_never_gives_a_better_plan(seed: int, data: st.DataObject) -> None:
    model, workload, cluster, _ = random_instance(seed)
    small = {"recompute": "none", "cp": 1}
    try:
        free = build_space(PlanRequest(model, cluster, workload, small))
    except ConfigError:
        return
    layout = free.batch.layout(data.draw(st.integers(0, len(free.batch) - 1)))
    names = data.draw(
        st.sets(st.sampled_from(["tp", "pp", "dp_shard", "zero_stage", "micro_batch_size"]), min_size=1, max_size=2)
    )
    if "dp_shard" in names:
        names |= {"tp", "pp"}  # with others it may be none of the sizes of shards that a free search looks at
    fixed = small | {name: getattr(layout, name) for name in sorted(names)}
    kept = build_space(PlanRequest(model, cluster, workload, fixed))
    assert len(kept.batch) <= len(free.batch)
    assert_no_worse(found(model, workload, cluster, free), found(model, workload, cluster, kept))


OFFERS = (
    Offer.from_cluster(ClusterSpec.parse("3x4xA100-SXM-80GB/ib200"), name="a100", price_per_device_hour=1.6),
    Offer.from_cluster(ClusterSpec.parse("2x8xH100-SXM-80GB"), name="h100", price_per_device_hour=4.0),
    Offer.from_cluster(ClusterSpec.parse("4x2xL40S"), name="l40s", price_per_device_hour=0.7),
    Offer.from_cluster(ClusterSpec.parse("2x4xA100-SXM-40GB/eth25"), name="slow", price_per_device_hour=0.9),
)
SMALL = {"cp": 1, "ep": 1, "etp": 1, "num_model_chunks": 1, "recompute": "none", "schedule": "1f1b"}


def of_offers(model: str, offers: tuple[Offer, ...], floor: float) -> tuple[float, float, float]:
    """USD of a step of the fastest layout of the cheapest size, its bound, and the least seconds of any size on the front."""
    step = Workload(seq_len=512, global_batch_size=48)
    try:
        plan = cheapest(shortened(model, 4), offers, step, fixed=SMALL, min_tokens_per_s=floor, front=True)
    except InfeasibleError:
        return (float("inf"),) * 3
    assert plan.cost is not None and plan.search is not None
    usd = plan.cost.price_per_hour / 3600 * plan.search.objective_s
    front = [size.step_time_s for size in plan.cost.sizes if size.step_time_s is not None]
    return usd, plan.cost.bound_usd_per_million_tokens * step.tokens_per_step / 1e6, min(front)


@pytest.mark.long
@settings(FEW, max_examples=2)
@given(
    model=st.sampled_from(["gpt2", "llama-3.2-1b", "mixtral-8x7b"]),
    chosen=st.permutations(OFFERS),
    count=st.integers(1, 3),
    floor=st.sampled_from([0.0, 2e5, 1e6]),
)
def test_more_offers_and_more_nodes_are_never_dearer_nor_slower(
    model: str, chosen: list[Offer], count: int, floor: float
) -> None:
    fewer = tuple(chosen[:count])
    usd, _, least_s = of_offers(model, fewer, floor)
    more_usd, more_bound, more_least_s = of_offers(model, tuple(chosen[: count + 1]), floor)
    assert more_usd <= usd * (1 + 2e-4)  # REL_GAP, with which sizes are left out
    assert more_bound <= usd * (1 + ROUNDING)
    assert more_least_s <= least_s * (1 + 2e-4)
    first = fewer[0]
    if first.cluster.num_nodes > 1:
        with_less = Offer(name=first.name, cluster=first.with_size(first.cluster.num_nodes - 1), min_nodes=1)
        usd_less, _, least_less_s = of_offers(model, (with_less, *fewer[1:]), floor)
        assert usd <= usd_less * (1 + 2e-4)
        assert least_s <= least_less_s * (1 + 2e-4)


# --- mixed clusters -----------------------------------------------------------------------------------------------


def nodes_of(device: str, num_nodes: int) -> NodeGroup:
    spec = ClusterSpec.parse(f"{num_nodes}x2x{device}")
    return spec.groups[0].replace(levels=spec.levels)


def joined(groups: list[NodeGroup], network: str = "ib200") -> ClusterSpec:
    levels = ClusterSpec.parse(f"2x2xA100-SXM-40GB/{network}").levels
    total = sum(group.num_devices for group in groups)
    return ClusterSpec(name="mixed", groups=tuple(groups), levels=(levels[0], levels[-1].replace(domain_size=total)))


def some_layouts(model: ModelSpec, workload: Workload, cluster: ClusterSpec, rng: np.random.Generator) -> Space:
    fixed = {"cp": 1, "num_model_chunks": 1, "micro_batch_size": 1, "recompute": "none"}
    space = build_space(PlanRequest(model, cluster, workload, fixed))
    return Space(space.batch.select(np.sort(rng.permutation(len(space.batch))[:8])), {})


@drawn(few=5, many=10, under=FEW, seed=seeds)
def test_equal_groups_are_one_group(seed: int) -> None:
    rng = np.random.default_rng(seed)
    model, workload = (
        shortened(str(rng.choice(["gpt2", "llama-3.2-1b"])), 4),
        Workload(seq_len=512, global_batch_size=24),
    )
    device = str(rng.choice(["A100-SXM-40GB", "H100-SXM-80GB"]))
    split = [nodes_of(device, int(n)) for n in rng.choice([1, 2], size=2)]
    split = [group.replace(levels=()) for group in split]
    whole = split[0].replace(num_nodes=sum(group.num_nodes for group in split))
    one, several = joined([whole]), joined(split)
    space = some_layouts(model, workload, one, rng)
    before, after = (found(model, workload, cluster, space) for cluster in (one, several))
    assert seconds(after) == pytest.approx(seconds(before), rel=ROUNDING)
    assert after.bound_s == pytest.approx(before.bound_s, rel=ROUNDING)


@drawn(few=3, many=8, under=FEW, seed=seeds)
def test_the_order_in_which_groups_are_listed_does_not_matter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    model, workload = (
        shortened(str(rng.choice(["gpt2", "llama-3.2-1b"])), 5),
        Workload(seq_len=512, global_batch_size=24),
    )
    devices = rng.permutation(["A100-SXM-40GB", "H100-SXM-80GB", "L40S"])[: int(rng.choice([2, 3]))]
    groups = [nodes_of(str(device), 1) for device in devices]
    cluster, other = joined(groups), joined(groups[::-1])
    space = some_layouts(model, workload, cluster, rng)
    assert_equal(found(model, workload, other, space), found(model, workload, cluster, space))


@pytest.mark.long
@settings(FEW, max_examples=10)
@given(
    seed=seeds,
    factor=st.sampled_from([1.3, 4.0]),
    what=st.sampled_from(["memory", "links", "arithmetic", "device"]),
)
def test_a_better_part_of_a_mixed_cluster_is_never_slower(seed: int, factor: float, what: str) -> None:
    rng = np.random.default_rng(seed)
    model, workload = (
        shortened(str(rng.choice(["gpt2", "llama-3.2-1b"])), 5),
        Workload(seq_len=512, global_batch_size=24),
    )
    groups = [nodes_of(str(device), 1) for device in rng.permutation(["A100-SXM-40GB", "H100-SXM-80GB", "L40S"])[:2]]
    cluster = joined(groups)
    better = BETTER[what](cluster, factor)
    one_better = cluster.replace(groups=(better.groups[0], *cluster.groups[1:]), levels=better.levels)
    space = some_layouts(model, workload, cluster, rng)
    assert_no_worse(found(model, workload, one_better, space), found(model, workload, cluster, space))


def test_expanding_is_what_searching_finds() -> None:
    """The laws above are about searches; with one layout they are about `expand`."""
    model, workload, cluster, space = random_instance(3)
    result = found(model, workload, cluster, space)
    for candidate in result.feasible:
        alone = expand.expand(result.costs, candidate.idx)
        assert alone.estimate.step_time_s == pytest.approx(candidate.estimate.step_time_s, rel=ROUNDING)
