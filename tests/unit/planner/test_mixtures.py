"""Mixtures of offers: the cheapest equals a search of every mixture; what is spot costs what it loses; the bound holds."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.cost_models.goodput import RESTART_S, SAVE_S, best_interval_s, restart_goodput
from meshwright.planner import cheapest
from meshwright.planner import mixtures as planner_mixtures
from meshwright.planner.cheapest import enumerate_sizes
from meshwright.planner.mixtures import Mixtures
from meshwright.planner.request import PlanRequest
from meshwright.planner.search import REL_GAP, search
from meshwright.planner.sizes import OBJECTIVES, goodput
from meshwright.planner.space import build_space
from meshwright.schema import ClusterSpec, ConfigError, ModelSpec, Offer, Workload
from meshwright.schema.offers import mixture, mixture_name

MODEL = ModelSpec.named("gpt2")
WORKLOAD = Workload(seq_len=1024, global_batch_size=64, precision="fp16-mixed")
KINDS = {"a100": ("A100-SXM-40GB", 1.5), "v100": ("V100-SXM2-32GB", 0.6), "l4": ("L4", 0.3)}
OFFERS = tuple(
    Offer.from_cluster(ClusterSpec.parse(f"2x2x{device}/eth100"), name=name, price_per_device_hour=price)
    for name, (device, price) in KINDS.items()
)


@functools.cache
def step_s(counts: tuple[int, ...]) -> float:
    """Seconds of the fastest step on a mixture or a size, by searching it whole; infinite where nothing fits."""
    used = [(offer, count) for offer, count in zip(OFFERS, counts, strict=True) if count]
    cluster = used[0][0].with_size(used[0][1]) if len(used) == 1 else mixture(OFFERS, counts)
    request = PlanRequest.create(MODEL, cluster, WORKLOAD)
    try:
        found = search(request, build_space(request))
    except ConfigError:
        return float("inf")
    return found.feasible[0].step_time_s if found.feasible else float("inf")


def usd(counts: tuple[int, ...]) -> float:
    prices = (offer.with_size(1).price_per_hour or 0.0 for offer in OFFERS)
    return sum(n * price for n, price in zip(counts, prices, strict=True)) / 3600 * step_s(counts)


def every_mixture() -> list[tuple[int, ...]]:
    return [counts for counts in itertools.product(range(3), repeat=3) if any(counts)]


@pytest.mark.long
@pytest.mark.parametrize("part", [pytest.param(0.6, marks=pytest.mark.nightly), 0.97])
def test_cheapest_mixture_equals_a_search_of_every_mixture(part: float) -> None:
    fastest = min(map(step_s, every_mixture()))
    floor = part * WORKLOAD.tokens_per_step / fastest
    reach = [counts for counts in every_mixture() if step_s(counts) <= fastest / part * (1 + 1e-9)]
    found = cheapest(MODEL, OFFERS, WORKLOAD, min_tokens_per_s=floor, mix=3, prefer="fastest", time_limit_s=600)
    assert found.cost is not None
    assert found.cost.usd_per_step == pytest.approx(min(map(usd, reach)), rel=3 * REL_GAP)
    assert found.cost.num_mixtures == 20
    assert found.cost.gap <= 0.02
    best = min(reach, key=usd)
    if sum(n > 0 for n in best) > 1:
        assert found.cost.offer == mixture_name([offer.name for offer in OFFERS], best)
        assert found.cluster.num_nodes == sum(best)


@pytest.mark.long
def test_of_many_mixtures_the_answer_is_between_the_bound_and_the_best_single_offer(monkeypatch) -> None:
    monkeypatch.setattr(planner_mixtures, "EXACT_MIXTURES", 0)
    fastest = min(map(step_s, every_mixture()))
    for part in (0.6, 0.97):
        reach = [counts for counts in every_mixture() if step_s(counts) <= fastest / part * (1 + 1e-9)]
        floor = part * WORKLOAD.tokens_per_step / fastest
        cost = cheapest(MODEL, OFFERS, WORKLOAD, min_tokens_per_s=floor, mix=3, prefer="fastest", time_limit_s=600).cost
        assert cost is not None
        best, alone = min(map(usd, reach)), [usd(counts) for counts in reach if sum(n > 0 for n in counts) == 1]
        assert (cost.bound_usd_per_million_tokens or 0) * WORKLOAD.tokens_per_step / 1e6 <= best * (1 + 1e-9)
        assert best * (1 - 1e-9) <= (cost.usd_per_step or 0) <= min(alone, default=np.inf) * (1 + 2 * REL_GAP)
        assert (cost.usd_per_step or 0) <= best * 1.05


@pytest.mark.long
def test_no_mixture_is_faster_than_its_bound_says() -> None:
    request = PlanRequest.create(MODEL, OFFERS[0].with_size(1), WORKLOAD)
    sizes = enumerate_sizes(OFFERS, request, np.inf, OBJECTIVES["cost"])
    mixtures = Mixtures(OFFERS, sizes, 3, np.inf)
    for o in range(3):
        mixtures._bound_rates(o)
    values = mixtures.values()
    for counts, bound in zip(mixtures.counts.tolist(), values, strict=True):
        assert bound <= usd(tuple(counts)) * (1 + 1e-9)


def test_two_offers_of_one_device_are_one_pool() -> None:
    spot = OFFERS[0].model_copy(update={"name": "spot"})
    cluster = mixture((OFFERS[0], spot), (1, 2))
    assert not cluster.is_mixed
    assert cluster.num_nodes == 3
    assert cluster.levels[-1].link.name == "eth100"
    assert cluster.name == "1 a100 + 2 spot"


@given(losses=st.floats(0.01, 50), nodes=st.integers(1, 64))
@settings(max_examples=50)
def test_goodput_of_spot_nodes_is_that_of_a_job_that_restarts(losses: float, nodes: int) -> None:
    part, more = goodput(np.array([losses * nodes, losses * (nodes + 1)]))
    mtbf_s = 86_400 / (losses * nodes)
    interval_s = best_interval_s(mtbf_s=mtbf_s, save_s=SAVE_S)
    expected = restart_goodput(interval_s, mtbf_s=mtbf_s, save_s=SAVE_S, restart_s=RESTART_S)
    assert part == pytest.approx(max(expected, 1e-9))
    assert more <= part <= 1
    assert goodput(np.zeros(2)).tolist() == [1.0, 1.0]


def test_spot_is_dearer_by_what_it_loses_and_misses_a_floor_sooner() -> None:
    spot = OFFERS[1].model_copy(update={"name": "spot", "losses_per_node_day": 8.0})
    plain, lossy = (cheapest(MODEL, [offer], WORKLOAD, tokens=1e9).cost for offer in (OFFERS[1], spot))
    assert plain is not None and lossy is not None
    assert lossy.goodput < 1 == plain.goodput
    assert lossy.num_nodes <= plain.num_nodes
    same = next(size for size in lossy.sizes if size.num_nodes == plain.num_nodes)
    part = goodput(np.array([8.0 * plain.num_nodes]))[0]
    assert same.usd_per_million_tokens == pytest.approx((plain.usd_per_million_tokens or 0) / part, rel=0.01)
    assert lossy.hours is not None and plain.hours is not None and lossy.hours > plain.hours


def test_mixtures_need_several_offers_and_the_objective_cost() -> None:
    with pytest.raises(ConfigError, match="mix 3"):
        cheapest(MODEL, OFFERS[:1], WORKLOAD, mix=3)
    with pytest.raises(ConfigError, match="mix 2"):
        cheapest(MODEL, OFFERS, WORKLOAD, objective="energy", mix=2)
