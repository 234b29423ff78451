"""Low-rank adapters of a load: their seconds, their bytes, how they are typed and told to an engine."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshwright.cost_models.serving.step import StepCosts
from meshwright.engines.serving import vllm
from meshwright.planner import plan
from meshwright.planner.serving.replay import engine_pool
from meshwright.schema import ClusterSpec, ConfigError, ModelSpec, RequestClass, Requests, Serving
from meshwright.schema.adapters import Adapters, parse_adapters
from meshwright.schema.serving import ServingLayout

LLAMA = ModelSpec.named("llama-2-7b")


def costs(adapters: Adapters | None, tp: int = 1) -> StepCosts:
    cluster = ClusterSpec.parse("8xA100-SXM-80GB")
    return StepCosts.build(LLAMA, cluster, ServingLayout(tp=tp), weights="fp16", cache="fp16", adapters=adapters)


@given(st.integers(1, 40), st.floats(0, 3), st.integers(1, 60))
def test_reached_adapters_are_those_of_drawn_requests(count: int, zipf: float, requests: int) -> None:
    adapters = Adapters(count=count, rank=8, zipf=zipf)
    one_by_one = sum(1 - (1 - chance) ** requests for chance in adapters.popularity)
    assert float(adapters.reached(np.array(requests))) == pytest.approx(one_by_one, rel=1e-6)
    assert one_by_one <= min(count, requests) + 1e-9


def test_more_adapters_take_longer_and_more_memory() -> None:
    steps = [costs(each) for each in (None, *(Adapters(count=n, rank=8) for n in (1, 10, 500)))]
    seconds = [float(step.seconds(64, 64 * 512)) for step in steps]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[1]
    # q, k, v, o of 4096, gate, up and down of 4096 x 11008: Llama-2-7B by hand, 16 bits.
    of_one = 32 * 2 * 8 * (4 * (4096 + 4096) + 3 * (4096 + 11008))
    for step, count in zip(steps, (0, 1, 10, 500), strict=True):
        # Queries, keys and values are one product here: they share A, as engines stack them.
        assert step.weight_bytes - steps[0].weight_bytes == pytest.approx(count * of_one, rel=0.2)


def test_tensor_parallelism_cuts_adapters_on_one_side() -> None:
    adapters = Adapters(count=100, rank=16)
    more = [costs(adapters, tp).weight_bytes - costs(None, tp).weight_bytes for tp in (1, 4)]
    assert more[0] / 4 < more[1] < more[0]


def test_a_plan_carries_its_adapters_to_replay_and_export() -> None:
    load = Requests(classes=(RequestClass(prompt_len=256, output_len=64),), concurrency=8)
    given = Adapters(count=100, rank=24)
    answer = plan("llama-2-7b", "1xA100-SXM-80GB", Serving(requests=load, adapters=given, modes=("agg",)))
    (pool,) = answer.pools
    assert pool.adapters == given
    flags = vllm.options(answer, pool)
    assert (flags["max-loras"], flags["max-lora-rank"]) == (100, 32)
    bare = engine_pool(answer, pool.replace(adapters=None)).table
    assert engine_pool(answer, pool).table.decode_s(8, 2048) > bare.decode_s(8, 2048)


@pytest.mark.parametrize(
    "text", ["n=3", "rank=8", "n=0,rank=8", "n=3,rank=8,zipf=-1", "n=3,rank=x", "n=3,rank=8,on=mlp"]
)
def test_adapters_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--adapters"):
        parse_adapters(text)


def test_adapters_are_read() -> None:
    assert parse_adapters("n=2k,rank=8,zipf=0.5,on=attention") == Adapters(count=2048, rank=8, zipf=0.5, on="attention")
