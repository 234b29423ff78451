"""The cheapest size equals searching every size of every offer; what cannot be reached is said with the best there is."""

from __future__ import annotations

import functools

import pytest
from meshwright.cost_models.stage.step import step_energy_j
from meshwright.planner import cheapest, plan
from meshwright.planner.choice import MAX_PRICE
from meshwright.planner.request import PlanRequest
from meshwright.planner.search import REL_GAP, search
from meshwright.planner.space import build_space
from meshwright.schema import (
    ClusterSpec,
    ConfigError,
    InfeasibleError,
    ModelSpec,
    Offer,
    SolverLimitError,
    TrainingPlan,
    Workload,
)

MODEL = ModelSpec.named("llama-2-13b")
OFFERS = (
    Offer.from_cluster(ClusterSpec.parse("5x4xA100-SXM-80GB/ib200"), name="a100"),
    Offer.from_cluster(ClusterSpec.parse("4x8xH100-SXM-80GB"), name="h100", price_per_device_hour=4.0),
    Offer.from_cluster(ClusterSpec.parse("3x8xA100-SXM-40GB/eth25"), name="slow", price_per_device_hour=0.9),
)

Answers = dict[tuple[str, int], float]


@functools.cache
def every_size(workload: Workload) -> Answers:
    """Seconds of the fastest step of every size on which something fits, by searching each of them whole."""
    times: Answers = {}
    for offer in OFFERS:
        for nodes in offer.sizes:
            cluster = offer.with_size(nodes)
            try:
                space = build_space(PlanRequest(MODEL, cluster, workload, runnable=workload.engine == "fsdp2"))
            except ConfigError:
                continue
            found = search(PlanRequest(MODEL, cluster, workload), space)
            if found.feasible:
                times[offer.name, nodes] = found.feasible[0].estimate.step_time_s
    return times


@functools.cache
def energy_of_every_size(workload: Workload) -> Answers:
    """Joules of the fastest step of every size, by searching each of them whole."""
    joules: Answers = {}
    for offer in OFFERS:
        for nodes in offer.sizes:
            cluster = offer.with_size(nodes)
            request = PlanRequest(MODEL, cluster, workload)
            try:
                found = search(request, build_space(request))
            except ConfigError:
                continue
            if found.feasible:
                joules[offer.name, nodes] = step_energy_j(found.feasible[0].estimate, cluster)
    return joules


@pytest.mark.nightly
def test_size_of_least_energy_equals_exhaustive_search_and_needs_no_price() -> None:
    workload = Workload(seq_len=2048, global_batch_size=48)
    joules = energy_of_every_size(workload)
    unpriced = [
        offer.model_copy(update={"cluster": offer.cluster.replace(groups=tuple(
            group.replace(device=group.device.replace(price_per_hour=None)) for group in offer.cluster.groups
        ))})
        for offer in OFFERS
    ]  # fmt: skip
    made = cheapest(MODEL, unpriced, workload, objective="energy")
    assert made.cost is not None
    chosen = made.cost.offer, made.cost.num_nodes
    assert joules[chosen] == pytest.approx(min(joules.values()), rel=2 * REL_GAP)
    reached = step_energy_j(made.estimate, made.cluster) / workload.tokens_per_step
    assert made.cost.joules_per_token == pytest.approx(reached)
    assert made.cost.bound_joules_per_token <= min(joules.values()) / workload.tokens_per_step
    assert made.cost.usd_per_step is None
    with pytest.raises(ConfigError, match="has no price"):
        cheapest(MODEL, unpriced, workload)


def usd(offer: str, nodes: int, step_time_s: float) -> float:
    price = next(o.with_size(nodes).price_per_hour for o in OFFERS if o.name == offer)
    return price / 3600 * step_time_s


@pytest.mark.long
@pytest.mark.parametrize("engine", [pytest.param("fsdp2", marks=pytest.mark.nightly), "deepspeed"])
def test_cheapest_size_equals_exhaustive_search_of_all_sizes(engine: str) -> None:
    workload = Workload(seq_len=2048, global_batch_size=48, engine=engine)
    times = every_size(workload)
    assert len(times) >= 8
    rates = sorted(workload.tokens_per_step / seconds for seconds in times.values())
    for floor in (0.0, rates[len(rates) // 3], rates[-1]):
        reach = {key: usd(*key, s) for key, s in times.items() if workload.tokens_per_step / s >= floor}
        found = cheapest(MODEL, OFFERS, workload, min_tokens_per_s=floor)
        cost = found.cost
        assert cost.status == ("optimal" if cost.gap < 1e-3 else "complete")
        chosen = (cost.offer, cost.num_nodes)
        assert usd(*chosen, times[chosen]) <= min(reach.values()) * (1 + 2 * REL_GAP)
        assert cost.bound_usd_per_million_tokens * workload.tokens_per_step / 1e6 <= min(reach.values()) * (1 + 1e-9)
        assert cost.usd_per_step == pytest.approx(usd(*chosen, found.estimate.step_time_s))
        assert cost.usd_per_step <= usd(*chosen, times[chosen]) * (1 + MAX_PRICE)
        assert found.estimate.tokens_per_s >= floor * (1 - 1e-9)
        others = [s.usd_per_million_tokens for s in cost.sizes if s.outcome == "dearer" and s.step_time_s]
        assert cost.usd_per_million_tokens <= min(others, default=1e9) * (1 + 1e-9)
        assert found.cluster.price_per_hour == cost.price_per_hour


@pytest.mark.long
def test_another_objective_chooses_another_size() -> None:
    workload = Workload(seq_len=2048, global_batch_size=48)
    times = every_size(workload)
    fastest = cheapest(MODEL, OFFERS, workload, objective="throughput").cost
    assert times[fastest.offer, fastest.num_nodes] <= min(times.values()) * (1 + 2 * REL_GAP)


def test_unknown_objective_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown objective 'speed'"):
        cheapest(MODEL, OFFERS, Workload(seq_len=2048, global_batch_size=48), objective="speed")


@pytest.mark.long
def test_what_was_said_of_each_size_is_true() -> None:
    workload = Workload(seq_len=2048, global_batch_size=48)
    times = every_size(workload)
    floor = workload.tokens_per_step / sorted(times.values())[len(times) // 2]
    cost = cheapest(MODEL, OFFERS, workload, min_tokens_per_s=floor).cost
    assert [(s.offer, s.num_nodes) for s in cost.sizes] == [(o.name, n) for o in OFFERS for n in o.sizes]
    assert len({size.outcome for size in cost.sizes}) >= 3
    for size in cost.sizes:
        seconds = times.get((size.offer, size.num_nodes))
        if size.bound_s is not None and seconds is not None:
            assert size.bound_s <= seconds * (1 + 1e-9)
        if size.outcome in ("does not fit", "no layout"):
            assert seconds is None
        elif size.outcome == "too slow":
            assert seconds is None or workload.tokens_per_step / seconds < floor
        elif size.outcome == "dearer":
            assert seconds is None or usd(size.offer, size.num_nodes, seconds) >= cost.usd_per_step * (1 - 0.011)


@pytest.mark.long
def test_front_of_sizes_equals_pairwise_comparison() -> None:
    workload = Workload(seq_len=2048, global_batch_size=48)
    times = every_size(workload)
    points = {key: (seconds, usd(*key, seconds)) for key, seconds in times.items()}
    front = {
        key
        for key, (s, d) in points.items()
        if not any(t <= s * (1 + REL_GAP) and c <= d * (1 + REL_GAP) for k, (t, c) in points.items() if k != key)
    }
    cost = cheapest(MODEL, OFFERS, workload, front=True).cost
    found = {(s.offer, s.num_nodes) for s in cost.sizes if s.outcome in ("chosen", "on the front")}
    assert front <= found
    assert len(found) >= 2
    for key in found:
        s, d = points[key]
        assert not any(t < s * (1 - 1e-9) and c < d * (1 - 1e-9) for t, c in points.values())


def test_whole_run_adds_up() -> None:
    workload = Workload(seq_len=2048, global_batch_size=48)
    found = cheapest(MODEL, OFFERS, workload, tokens=1e10, deadline_s=48 * 3600.0)
    cost = found.cost
    assert cost.min_tokens_per_s == pytest.approx(1e10 / (48 * 3600))
    assert cost.hours == pytest.approx(1e10 / found.estimate.tokens_per_s / 3600)
    assert cost.hours <= 48
    assert cost.total == pytest.approx(cost.hours * cost.price_per_hour)
    assert cost.total == pytest.approx(1e4 * cost.usd_per_million_tokens)
    assert cost.total == pytest.approx(1e10 / workload.tokens_per_step * cost.usd_per_step)


def test_plan_with_its_cost_survives_a_json_round_trip(tmp_path) -> None:
    found = cheapest(MODEL, OFFERS[:1], Workload(seq_len=2048, global_batch_size=48), tokens=1e9)
    found.save(tmp_path / "plan.json")
    assert TrainingPlan.load(tmp_path / "plan.json") == found


@pytest.mark.long
def test_answer_is_the_same_every_time() -> None:
    workload = Workload(seq_len=2048, global_batch_size=48)
    first, second = (cheapest(MODEL, OFFERS[:2], workload, fixed={"micro_batch_size": 1}) for _ in range(2))
    assert first.layout == second.layout
    assert first.cost.sizes == second.cost.sizes


def test_floor_out_of_reach_names_the_fastest_size() -> None:
    workload = Workload(seq_len=2048, global_batch_size=48)
    fastest = max(workload.tokens_per_step / seconds for seconds in every_size(workload).values())
    with pytest.raises(InfeasibleError, match=r"floor \(C1\)") as caught:
        cheapest(MODEL, OFFERS, workload, min_tokens_per_s=3 * fastest)
    advised = int(caught.value.help.split("tokens/s")[0].split()[-1].replace(",", ""))
    assert advised == pytest.approx(fastest, rel=1e-3)
    assert cheapest(MODEL, OFFERS, workload, min_tokens_per_s=advised).estimate.tokens_per_s >= advised


@pytest.mark.long
def test_nothing_that_fits_is_explained_as_by_plan() -> None:
    offer = Offer.from_cluster(ClusterSpec.parse("2x1xA100-SXM-40GB"))
    with pytest.raises(InfeasibleError, match=r"memory \(C2\)"):
        cheapest(ModelSpec.named("llama-3.1-70b"), (offer,), Workload(seq_len=2048, global_batch_size=8))


def test_deadline_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="number of tokens"):
        cheapest(MODEL, OFFERS, Workload(seq_len=2048, global_batch_size=48), deadline_s=3600.0)


@pytest.mark.long
def test_time_limit_leaves_an_honest_certificate() -> None:
    workload = Workload(seq_len=2048, global_batch_size=48)
    whole = cheapest(MODEL, OFFERS, workload).cost
    try:
        hurried = cheapest(MODEL, OFFERS, workload, time_limit_s=whole.search_s / 3).cost
    except SolverLimitError:  # on a slow machine the limit may come before any answer
        return
    assert hurried.bound_usd_per_million_tokens <= whole.bound_usd_per_million_tokens * (1 + 1e-9)
    assert hurried.usd_per_million_tokens >= whole.bound_usd_per_million_tokens * (1 - 1e-9)


@pytest.mark.long
def test_one_size_is_the_plan_of_that_cluster() -> None:
    cluster = ClusterSpec.parse("8xH100-SXM-80GB")
    workload = Workload(seq_len=2048, global_batch_size=48)
    found = cheapest(MODEL, (Offer.from_cluster(cluster),), workload)
    assert found.layout == plan(MODEL, cluster, workload).layout
