"""Fine-tuning in the steps that serve: what it takes and gets, within the limits, less the more is served."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from meshwright.cost_models.serving.fine_tuning import fine_tuning_bytes, with_fine_tuning
from meshwright.cost_models.serving.step import StepCosts
from meshwright.planner import plan
from meshwright.schema import ClusterSpec, ConfigError, ModelSpec, ServingPlan
from meshwright.schema.adapters import FineTuning, parse_fine_tuning
from meshwright.schema.requests_file import parse_limit, parse_requests
from meshwright.schema.serving import Serving, ServingLayout

EIGHT_B, TUNING = ModelSpec.named("llama-3.1-8b"), FineTuning(rank=16)
ONE = ClusterSpec.parse("1xA100-SXM-80GB")


def served(rate: float, **fields: object) -> ServingPlan:
    given: dict[str, object] = {
        "requests": parse_requests(f"isl=220,osl=180,rate={rate}"),
        "limits": (parse_limit("tpot", "50ms@p90"),),
        "modes": ("agg",),
        "fine_tuning": TUNING,
    }
    task = Serving(**{**given, **fields})  # type: ignore[arg-type]
    made = plan(EIGHT_B, "4xA100-SXM-80GB", task, fixed={"tp": 1, "pp": 1})
    assert isinstance(made, ServingPlan)
    return made


def step() -> StepCosts:
    return StepCosts.build(EIGHT_B, ONE, ServingLayout(), weights="bf16", cache="bf16")


def test_steps_without_tokens_are_what_they_were_and_a_token_is_two_of_a_prompt() -> None:
    plain, rows, prompts = step(), np.array([1.0, 8.0, 64.0]), np.array([0.0, 300.0, 2000.0])
    sizes = (rows, rows * 500, prompts, prompts / 2)
    np.testing.assert_allclose(with_fine_tuning(plain, TUNING, 0).seconds(*sizes), plain.seconds(*sizes), rtol=1e-12)
    tuned = with_fine_tuning(plain, TUNING, 512).parts(*sizes)
    beside = plain.parts(rows, rows * 500, prompts + 512, 1792)
    # Of 512 tokens half a sequence of 2,048 forward and 2.5 times that backward, over two passes: 1,792 each.
    attended = plain.parts(0, 0, 512, 1792)["prefill_attention"]
    np.testing.assert_allclose(tuned["products"], beside["products"] + attended, rtol=1e-12)
    np.testing.assert_allclose(tuned["prefill_attention"], plain.parts(*sizes)["prefill_attention"], rtol=1e-12)


def test_bytes_are_the_adapter_with_its_states_and_what_a_backward_pass_reads() -> None:
    hidden, keys, ffn = 4096, 1024, 14336
    width = 2 * hidden + hidden + 2 * keys + hidden + 2 * ffn
    products = [(hidden, hidden + 2 * keys), (hidden, hidden), (hidden, 2 * ffn), (ffn, hidden)]
    parameters = 16 * sum(k + n for k, n in products)
    assert fine_tuning_bytes(step(), TUNING) == pytest.approx(32 * (18 * parameters + 2 * 2048 * width), rel=1e-9)
    assert fine_tuning_bytes(step(), FineTuning(rank=16, on="attention")) < fine_tuning_bytes(step(), TUNING)


@pytest.mark.parametrize("rates", [(2.0, 60.0), pytest.param((2.0, 20.0, 60.0), marks=pytest.mark.long)])
def test_more_is_served_and_less_is_fine_tuned_within_the_limits(rates: tuple[float, ...]) -> None:
    plans = [served(rate) for rate in rates]
    costs = [made.estimate.fine_tuning for made in plans]
    assert all(cost is not None for cost in costs)
    on_all = [cost.pools[-1] for cost in costs if cost is not None]
    assert [one.replicas for one in on_all] == [4] * len(rates)
    assert all(one.tokens_per_s > other.tokens_per_s > 0 for one, other in itertools.pairwise(on_all))
    assert all(limit.is_met for one in on_all for limit in one.limits)
    assert all(0 < cost.share_of_peak < 1 for cost in costs if cost is not None)
    # A plan does not change by it, and its document carries it.
    bare = served(rates[1], fine_tuning=None)
    assert bare.estimate.fine_tuning is None and bare.pools == plans[1].pools
    assert ServingPlan.model_validate_json(plans[1].model_dump_json()).estimate == plans[1].estimate


def test_what_it_does_not_apply_to_is_refused() -> None:
    for fields in (
        {"modes": ("agg", "disagg")},
        {"limits": ()},
        {"requests": parse_requests("isl=220,osl=180", concurrency=4)},
    ):
        with pytest.raises(ConfigError, match="--modes agg"):
            served(2.0, **fields)
    for text in ("seq_len=2", "rank=0", "rank=16,to=all", "rank=16,on=some", "rank"):
        with pytest.raises(ConfigError, match="--finetune"):
            parse_fine_tuning(text)
