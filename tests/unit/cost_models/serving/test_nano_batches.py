"""Steps in two nano-batches: never slower where they are split, never quicker than what computes or what is sent alone."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from meshwright.cost_models.serving.nano_batches import (
    HALVED,
    NanoBatchedCosts,
    can_split,
    split_rows_of,
    with_nano_batches,
)
from meshwright.cost_models.serving.step import StepCosts
from meshwright.planner import plan
from meshwright.planner.serving.replay import engine_pool
from meshwright.schema import ClusterSpec, ConfigError, ModelSpec, Serving, ServingPlan
from meshwright.schema.requests_file import parse_requests
from meshwright.schema.serving import ServingLayout

LAYOUT = ServingLayout(attention_dp=16, ep=16)


@cache
def costs(layout: ServingLayout = LAYOUT) -> StepCosts:
    cluster = ClusterSpec.parse(f"{layout.num_devices}xH100-SXM-80GB")
    return StepCosts.build(ModelSpec.named("deepseek-v3"), cluster, layout, weights="fp8", cache="fp8")


def test_what_is_sent_hides_beside_what_computes_from_some_rows_on() -> None:
    plain, split = costs(), with_nano_batches(costs())
    assert isinstance(split, NanoBatchedCosts)
    first = split_rows_of(split)
    assert first is not None and first > 32
    rows = np.array([1.0, first - 1, first, 2048, 16384])
    before, after = (each.parts(0, 0, rows, 512) for each in (plain, split))
    seconds = {name: sum(parts[name] for name in HALVED[:3]) for name, parts in (("before", before), ("after", after))}
    assert np.all(seconds["after"][:2] == seconds["before"][:2])
    assert np.all(seconds["after"][2:] <= seconds["before"][2:])
    half = plain.parts(0, 0, rows[-1] / 2, 512)
    computes = float(2 * (half["products"] + half["experts"]))
    assert seconds["after"][-1] >= max(computes, float(2 * half["communication"]))
    assert np.all(before["head"] == after["head"])


def test_layouts_that_send_nothing_to_experts_are_not_split() -> None:
    assert can_split(LAYOUT)
    assert not can_split(ServingLayout(tp=8, ep=8))
    assert not can_split(ServingLayout(tp=2, attention_dp=8, ep=16))
    assert split_rows_of(costs()) is None


def test_published_prefill_over_32_devices_is_nearer_with_halves() -> None:
    """SGLang with two-batch overlap: 57,674 tokens a second and node of 8 H100, prompts of 1,024 (large_scale_ep_published.csv)."""
    plain = costs(ServingLayout(attention_dp=32, ep=32))
    rates = [
        8 * 16384 / float(each.seconds(0, 0, 16384, 512, prompts=16)) for each in (plain, with_nano_batches(plain))
    ]
    assert rates[0] < rates[1] < 57_674


def test_a_plan_with_nano_batches_says_from_where_on_and_its_prompts_are_sooner() -> None:
    made = []
    for on in (False, True):
        task = Serving(requests=parse_requests("isl=4096,osl=4,rate=4"), weights="fp8", modes=("agg",), nano_batches=on)
        answer = plan("deepseek-v3", "16xH200-SXM-141GB", task, fixed={"tp": 1, "attention_dp": 16, "ep": 16})
        assert isinstance(answer, ServingPlan)
        made.append(answer)
    assert made[0].pools[0].nano_batch_rows is None and made[1].pools[0].nano_batch_rows is not None
    assert made[1].estimate.overall.ttft.mean_s < made[0].estimate.overall.ttft.mean_s
    plain, split = (engine_pool(each, each.pools[0]).table for each in made)
    assert split.prompt_s(0, 0, 8192, 2048, 2) < plain.prompt_s(0, 0, 8192, 2048, 2)


def test_engines_that_split_no_step_are_refused() -> None:
    with pytest.raises(ConfigError, match="nano-batches are planned for vllm and sglang"):
        Serving(requests=parse_requests("isl=512,osl=64"), engine="trtllm", nano_batches=True)
