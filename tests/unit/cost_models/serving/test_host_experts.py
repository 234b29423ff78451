"""Experts in the host's memory: closed forms against draws and brute force, laws of rates and memory, published figures."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.cost_models.learned.serving_kernels import reached_fraction
from meshwright.cost_models.serving.engine import EngineProfile
from meshwright.cost_models.serving.host_experts import (
    HOST_PARTS,
    LayerTimes,
    balanced,
    buffered_experts,
    exact_share,
    experts_off_device,
    experts_s,
    host_reached,
    layer_times,
    num_routed_params,
    resident_hits,
    spread,
    with_experts_on_host,
)
from meshwright.cost_models.serving.operators import expert_bytes
from meshwright.cost_models.serving.step import StepCosts
from meshwright.cost_models.serving.step_table import StepTable
from meshwright.schema import ClusterSpec, ConfigError, ModelSpec, Serving
from meshwright.schema.adapters import FineTuning
from meshwright.schema.host_experts import ExpertsOnHost, experts_title, parse_experts_on_host
from meshwright.schema.requests_file import parse_limit, parse_requests
from meshwright.schema.serving import BYTES_OF, EngineLimits, ServingLayout
from meshwright.schema.speculation import parse_speculation

MIXTRAL, CV, ALONE = ModelSpec.named("mixtral-8x7b"), 0.7, ServingLayout()
ROWS = np.array([1.0, 3.0, 16.0, 256.0, 4096.0])


def cluster(name: str = "1xRTX4090", **rates: Any) -> ClusterSpec:
    parsed = ClusterSpec.parse(name)
    return parsed.replace(groups=tuple(group.replace(**rates) for group in parsed.groups))


@cache
def costs(model: str = "mixtral-8x7b", layout: ServingLayout = ALONE, name: str = "1xRTX4090") -> StepCosts:
    return StepCosts.build(ModelSpec.named(model), ClusterSpec.parse(name), layout, weights="bf16", cache="bf16")


def on(machine: ClusterSpec) -> StepCosts:
    """Return the steps of a machine whose host alone is another."""
    return replace(costs(), instance=replace(costs().instance, cluster=machine))


def test_hits_and_reached_experts_are_those_of_drawn_popularity() -> None:
    rng = np.random.default_rng(4)
    popularity = np.sort(rng.gamma(1 / CV**2, CV**2, 400_000))
    for share in (0.1, 0.5, 0.9):
        off = popularity[: round(share * len(popularity))]
        assert resident_hits(share, CV) == pytest.approx(1 - off.sum() / popularity.sum(), abs=2e-3)
        for rows in (0.05, 1.0, 20.0):
            drawn = (1 - np.exp(-rows * off)).sum() / len(popularity)
            assert float(host_reached(np.asarray(rows), share, CV)) == pytest.approx(drawn, abs=2e-3)
    assert resident_hits(1.0, CV) == 0 and resident_hits(0.0, CV) == 1
    rows = np.geomspace(1e-3, 1e3, 9)
    assert host_reached(rows, 1.0, CV) == pytest.approx(reached_fraction(rows, CV), rel=1e-12)
    assert np.all(host_reached(rows, 0.0, CV) == 0)


@given(st.floats(0.01, 30), st.floats(0.01, 60), st.integers(2, 256))
def test_numbers_that_steps_reach_have_the_mean_and_the_variance_of_draws_without_return(
    off: float, others: float, experts: int
) -> None:
    reached = min(off + others, float(experts))
    off = min(off, reached)
    weights, ratios = spread(np.asarray(off), np.asarray(reached), float(experts))
    variance = off * (1 - off / reached) * (1 - reached / experts) * experts / (experts - 1)
    assert np.all(weights >= 0) and np.all(ratios >= -1e-12)
    assert float(weights.sum()) == pytest.approx(1) and float((weights * ratios).sum()) == pytest.approx(1)
    assert float((weights * (off * ratios - off) ** 2).sum()) == pytest.approx(variance, rel=1e-6, abs=1e-9)


seconds = st.floats(0, 10)
layers = st.builds(
    lambda resident, more, copy, ahead, room, predicted, compute, handed: LayerTimes(
        resident_s=np.asarray(resident), all_s=np.asarray(resident + more), copy_s=np.asarray(copy),
        ahead_s=np.asarray(ahead), room_s=np.asarray(room), predicted=predicted, compute_s=np.asarray(compute),
        handed_s=np.asarray(handed), spread=spread(np.asarray(2.0), np.asarray(4.0), 16.0),
    ),
    seconds, seconds, seconds, seconds, seconds, st.floats(0, 1), seconds, st.floats(0, 1),
)  # fmt: skip


@given(layers)
def test_the_balanced_split_is_the_best_of_a_fine_grid(times: LayerTimes) -> None:
    grid = np.linspace(0, 1, 4001)
    best = float(times.seconds(grid).min())
    chosen = float(times.seconds(balanced(times)))
    assert chosen <= best + 1e-9
    # Between two points of the grid no line changes by more.
    steepest = float(times.copy_s + times.compute_s + times.all_s)
    assert chosen >= best - steepest / 4000


@given(layers)
def test_parts_of_a_layer_sum_and_no_way_is_quicker_than_balance(times: LayerTimes) -> None:
    totals = {}
    for by in ("balance", "copy", "compute"):
        parts = experts_s(times, ExpertsOnHost(share=0.5, by=by))
        assert all(float(part) >= -1e-12 for part in parts)
        totals[by] = float(sum(parts))
    assert totals["balance"] <= min(totals["copy"], totals["compute"]) + 1e-9


def test_a_layer_with_all_experts_on_the_device_is_the_plain_one() -> None:
    step = costs()
    block = next(block for block, _ in MIXTRAL.block_runs)
    times = layer_times(step.instance, block, ROWS, 0, np.zeros_like(ROWS), ExpertsOnHost(share=0.5))
    assert sum(experts_s(times, ExpertsOnHost(share=0.5))) == pytest.approx(times.all_s, rel=1e-13)
    assert 32 * times.all_s == pytest.approx(step.parts(ROWS, 0 * ROWS)["experts"], rel=1e-9)
    assert exact_share(MIXTRAL, ServingLayout(), 0.0) == 0.0


@pytest.mark.parametrize(
    "layout", [ServingLayout(), ServingLayout(tp=2), ServingLayout(tp=2, ep=2), ServingLayout(pp=2)]
)
def test_bytes_leave_the_device_for_the_host_but_for_the_room_of_copies(layout: ServingLayout) -> None:
    step = costs("mixtral-8x7b", layout, f"{layout.num_devices}xRTX4090")
    block = next(block for block, _ in MIXTRAL.block_runs)
    size = expert_bytes(step.instance, block)
    for by in ("copy", "compute"):
        spec = ExpertsOnHost(share=0.5, by=by)
        placed = with_experts_on_host(step, spec)
        assert block.experts is not None
        off = experts_off_device(block.experts, layout, 0.5)
        room = buffered_experts(block.experts, layout, off, spec) * size
        assert (room > 0) == (by == "copy")
        assert placed.host_weight_bytes == pytest.approx(32 / layout.pp * off * size)
        assert placed.weight_bytes == pytest.approx(step.weight_bytes - placed.host_weight_bytes + room)
    everything = with_experts_on_host(step, ExpertsOnHost(share=1.0)).host_weight_bytes
    assert everything * layout.num_devices == pytest.approx(num_routed_params(MIXTRAL) * BYTES_OF["bf16"])


def total(step: StepCosts, spec: ExpertsOnHost) -> Any:
    placed = with_experts_on_host(step, spec)
    return placed.seconds(ROWS, 100 * ROWS)


@settings(max_examples=6, deadline=None)
@given(st.sampled_from(["balance", "copy", "compute"]), st.sampled_from([0.25, 0.625, 1.0]), st.floats(0, 1))
def test_quicker_links_hosts_and_predictions_are_never_slower(by: Any, share: float, predicted: float) -> None:
    spec = ExpertsOnHost(share=share, by=by, predicted=predicted)
    rates = {"host_link_bytes_per_s": 2e10, "host_bandwidth_bytes_per_s": 1e11, "host_flops_per_s": 3e12}
    before = total(on(cluster(**rates)), spec)
    for name, rate in rates.items():
        assert np.all(total(on(cluster(**rates | {name: 1.7 * rate})), spec) <= before * (1 + 1e-12))
    assert np.all(total(on(cluster(**rates)), spec.replace(predicted=1.0)) <= before * (1 + 1e-12))


@pytest.mark.parametrize("predicted", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("model", ["mixtral-8x7b", "deepseek-v2-lite"])
def test_more_experts_on_the_device_are_never_slower_where_the_others_are_copied(model: str, predicted: float) -> None:
    step = costs(model)
    times = [total(step, ExpertsOnHost(share=share, by="copy", predicted=predicted)) for share in (1, 0.75, 0.5, 0.25)]
    times.append(step.seconds(ROWS, 100 * ROWS))
    for more_on_host, fewer in pairwise(times):
        assert np.all(fewer <= more_on_host * (1 + 1e-9))


def test_the_simulation_has_the_seconds_of_the_steady_state() -> None:
    placed = with_experts_on_host(costs(), ExpertsOnHost(share=0.75))
    limits = EngineLimits(max_batch=64, max_batched_tokens=2048, cache_blocks=2000, graph_sizes=())
    profile = EngineProfile.named("vllm")
    host_free = profile.overhead.replace(step_s=0, row_s=0, device_s=0, eager_kernel_s=0, draft_row_s=0)
    table = StepTable(placed, profile.replace(overhead=host_free), limits)
    parts = placed.parts(16, 16 * 1024)
    assert sum(float(parts[name]) for name in HOST_PARTS) > 0.3 * float(sum(parts.values()))
    assert table.decode_s(16, 16 * 1024) == pytest.approx(float(sum(parts.values())), rel=5e-3)
    prompt = float(placed.seconds(0, 0, 1024, 512, prompts=1))
    assert table.prompt_s(0, 0, 1024, 512, 1) == pytest.approx(prompt, rel=0.03)  # tables lie over unlike sizes


@pytest.mark.parametrize(
    ("top_k", "sockets", "cached", "prompt", "published"),
    [(6, 2, 1930, 0, 15.4), (8, 1, 500, 0, 8.73), (6, 1, 500, 0, 10.3), (8, 2, 0, 4096, 253), (6, 2, 0, 2048, 287)],
)
def test_published_rates_of_ktransformers_are_met(
    top_k: int, sockets: int, cached: int, prompt: int, published: float
) -> None:
    """DeepSeek-V3 with its experts in 4 bits, one RTX 4090, Xeon 6454S (docs/serving.md); none of these fitted a rate."""
    model = ModelSpec.named("deepseek-v3")
    runs = tuple(
        run
        if run.layer.experts is None
        else run.replace(layer=run.layer.replace(mlp=run.layer.experts.replace(top_k=top_k)))
        for run in model.layers
    )
    host = cluster(host_bandwidth_bytes_per_s=sockets * 1.125e11, host_flops_per_s=sockets * 5.5e12)
    step = StepCosts.build(
        model.replace(layers=runs), host, ServingLayout(), weights="fp8", cache="bf16", experts="int4"
    )
    placed = with_experts_on_host(step, ExpertsOnHost(share=1.0, by="compute"))
    rows = 1 if cached else 0
    per_s = (rows + prompt) / float(placed.seconds(rows, cached, prompt, prompt / 2, prompts=1 - rows))
    assert per_s == pytest.approx(published, rel=0.15)


def test_texts_are_read_and_meaningless_ones_refused() -> None:
    assert parse_experts_on_host("off") is None
    assert parse_experts_on_host("on") == ExpertsOnHost()
    read = parse_experts_on_host("0.75,by=copy,predicted=0.9")
    assert read == ExpertsOnHost(share=0.75, by="copy", predicted=0.9)
    assert experts_title(read) == " with 75 % of the experts on the host" and experts_title(ExpertsOnHost()) == ""
    for text in ("0", "1.5", "many", "on,by=both", "on,predicted=2", "on,speed=3", "on,by=copy,by=copy", "off,by=copy"):
        with pytest.raises(ConfigError, match="--experts-on-host"):
            parse_experts_on_host(text)


def test_what_has_no_experts_or_no_host_is_refused() -> None:
    dense = StepCosts.build(
        ModelSpec.named("llama-3.1-8b"), ClusterSpec.parse("1xRTX4090"), ServingLayout(), weights="bf16", cache="bf16"
    )
    with pytest.raises(ConfigError, match=r"llama-3\.1-8b has no routed experts"):
        with_experts_on_host(dense, ExpertsOnHost(share=0.5))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"engine": "meshwright"}, "our own engine has all of them"),
        ({"speculate": parse_speculation("eagle3:2,accept=0.8")}, "without --speculate"),
        ({"nano_batches": True}, "without --nano-batches"),
        (
            {"fine_tuning": FineTuning(rank=8), "modes": ("agg",), "limits": (parse_limit("tpot", "1s@p90"),)},
            "--finetune",
        ),
    ],
)
def test_what_steps_of_such_experts_have_not_is_refused(other: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Serving(requests=parse_requests("isl=64,osl=64,rate=1"), experts_on_host=ExpertsOnHost(), **other)
