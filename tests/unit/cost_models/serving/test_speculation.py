"""Drafts: tokens of a step, what checking and drafting cost, and plans that choose how many."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from meshwright.cost_models.serving.engine import EngineProfile
from meshwright.cost_models.serving.speculation import SpeculativeCosts, with_drafts
from meshwright.cost_models.serving.step import StepCosts
from meshwright.cost_models.serving.step_table import StepTable
from meshwright.planner import plan
from meshwright.schema import ClusterSpec, ConfigError, ModelSpec, ServingPlan
from meshwright.schema.requests_file import parse_limit, parse_requests
from meshwright.schema.serving import Serving, ServingLayout
from meshwright.schema.speculation import Speculation, parse_speculation

MEASURED = Path(__file__).resolve().parents[5] / "shared" / "data" / "serving" / "acceptance_lengths.csv"


def test_tokens_of_a_step_are_the_sum_of_the_chances_that_a_draft_lives_so_long() -> None:
    spoken = Speculation(method="mtp", accept=0.6)
    for drafted in (1, 2, 5):
        assert spoken.tokens_per_step(drafted) == pytest.approx(sum(0.6**n for n in range(drafted + 1)))
    measured = parse_speculation("eagle3,lengths=1.8/2.4/2.9")
    assert [measured.tokens_per_step(k) for k in (1, 2, 3)] == [1.8, 2.4, 2.9]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("medusa,accept=0.5", "a method"),
        ("mtp", "either accept"),
        ("mtp,accept=1.5", "less than 1"),
        ("mtp:4,lengths=1.8/2.4", "lengths tells up to 2"),
        ("mtp,lengths=2.5", "at most k"),
        ("draft:3,accept=0.7", "model names"),
        ("mtp:3,accept=x", "could not convert"),
    ],
)
def test_what_means_nothing_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_speculation(text)


@pytest.mark.skipif(not MEASURED.exists(), reason="measured lengths lie beside the repository")
def test_equal_chances_overrate_long_drafts_as_docs_say() -> None:
    """Fitted to drafts of one token, the law is 3 % too high for two, 8 % for three and a third for eight."""
    lengths: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    with MEASURED.open() as file:
        for row in csv.DictReader(file):
            lengths[row["file"], row["thinking"]][int(row["draft_tokens"])] = float(row["accepted_length"])
    errors = defaultdict(list)
    for measured in lengths.values():
        law = Speculation(method="mtp", accept=measured[1] - 1)
        for drafted, value in measured.items():
            errors[drafted].append(law.tokens_per_step(drafted) / value - 1)
    means = {drafted: float(np.mean(np.abs(values))) for drafted, values in errors.items()}
    assert means[2] < 0.04 and means[3] < 0.09 and 0.3 < means[8] < 0.4


def steps_of(model: str = "llama-3.1-8b", **layout: int) -> StepCosts:
    cluster = ClusterSpec.parse("2xH100-SXM-80GB")
    return StepCosts.build(ModelSpec.named(model), cluster, ServingLayout(**layout), weights="bf16", cache="bf16")


def test_checking_reads_weights_and_cache_once_and_drafts_add_a_block_each() -> None:
    plain = steps_of()
    one, three = (with_drafts(plain, Speculation(method="eagle3", accept=0.7), k) for k in (1, 3))
    for rows in (1, 8, 64):
        alone, first, third = (float(each.seconds(rows, rows * 1000)) for each in (plain, one, three))
        assert alone < first < third < (1.8 if rows < 64 else 2.2) * alone
    # No rows: a block more for the prompts, nothing to draft or to check.
    prompts = float(three.seconds(0, 0, 2048, 1024, prompts=1)) / float(plain.seconds(0, 0, 2048, 1024, prompts=1))
    assert 1.0 < prompts < 1.0 + 1.1 / 32
    assert three.weight_bytes == pytest.approx(plain.weight_bytes * (1 + 1 / 32))
    assert three.cache_bytes_per_token == pytest.approx(plain.cache_bytes_per_token * (1 + 1 / 32))


def test_a_model_that_drafts_takes_its_steps_and_memory() -> None:
    plain, small = steps_of(tp=2), steps_of("llama-3.2-1b", tp=2)
    drafting = with_drafts(plain, parse_speculation("draft:4,model=llama-3.2-1b,accept=0.7"), 4)
    checked = with_drafts(plain, Speculation(method="eagle3", accept=0.7), 4)
    assert drafting.weight_bytes == pytest.approx(plain.weight_bytes + small.weight_bytes)
    without = SpeculativeCosts(**{**vars(checked), "drafted": 0})
    of_drafts = float(drafting.seconds(8, 8000)) - float(without.seconds(8, 8000))
    assert of_drafts == pytest.approx(4 * float(small.seconds(8, 8000)), rel=1e-6)


def test_the_table_of_a_simulation_and_the_steady_state_agree_on_a_token() -> None:
    profile = EngineProfile.named("vllm")
    limits = profile.limits(device_bytes=80e9, cache_tokens=300_000, max_batch=64)
    plain = steps_of()
    drafting = with_drafts(plain, Speculation(method="eagle3", accept=0.7), 3)
    table, before = StepTable(drafting, profile, limits), StepTable(plain, profile, limits)
    host = profile.overhead.device_s
    assert table.decode_s(8, 8000) == pytest.approx(
        (float(drafting.seconds(8, 8000)) + host) / drafting.tokens_per_step, rel=0.02
    )
    # A step with prompts gives every row a token, and takes what the prompts add.
    added = table.prompt_s(8, 8000, 2048, 1024, 1) - table.decode_s(8, 8000)
    assert added == pytest.approx(before.prompt_s(8, 8000, 2048, 1024, 1) - before.decode_s(8, 8000), rel=0.15)
    assert table.prompt_s(0, 0, 2048, 1024, 1) == pytest.approx(before.prompt_s(0, 0, 2048, 1024, 1), rel=0.07)


def test_what_the_host_does_for_each_draft_comes_on_top_of_a_step() -> None:
    plain = StepCosts.build(
        ModelSpec.named("deepseek-v3"),
        ClusterSpec.parse("8xH200-SXM-141GB"),
        ServingLayout(tp=8),
        weights="fp8",
        cache="fp8",
    )
    profile = EngineProfile.named("sglang")
    limits = profile.limits(device_bytes=141e9, cache_tokens=1e6)
    drafts = with_drafts(plain, parse_speculation("mtp:3,lengths=1.8/2.3/2.5"), 3)
    without = profile.replace(overhead=profile.overhead.replace(draft_row_s=0.0))
    with_host, alone = (StepTable(drafts, entry, limits).decode_s(64, 64_000) for entry in (profile, without))
    assert with_host - alone == pytest.approx(64 * profile.overhead.draft_row_s / 2.5)
    assert StepTable(plain, profile, limits).decode_s(64, 64_000) == StepTable(plain, without, limits).decode_s(
        64, 64_000
    )


def test_stages_of_a_pipeline_check_drafts_too() -> None:
    plain = steps_of(pp=2)
    drafting = with_drafts(plain, Speculation(method="eagle3", accept=0.7), 3)
    filled = drafting.filled()
    parts, alone = filled.parts(8, 8000), drafting.parts(8, 8000)
    assert filled.tokens_per_step == drafting.tokens_per_step and filled.queries == 4
    assert float(parts.pop("imbalance")) >= 0
    assert {name: float(value) for name, value in parts.items()} == {
        name: float(value) for name, value in alone.items()
    }
    assert float(parts["products"]) > float(plain.filled().parts(8, 8000)["products"])


def served(text: str | None, tpot: str = "5ms@p90", rate: int = 4, **fields: object) -> ServingPlan:
    task = Serving(
        requests=parse_requests(f"isl=1024,osl=128,rate={rate}"), limits=(parse_limit("tpot", tpot),),
        speculate=None if text is None else parse_speculation(text), **fields,  # type: ignore[arg-type]
    )  # fmt: skip
    return plan("llama-3.1-8b", "4xH100-SXM-80GB", task, fixed={"pp": 1})


@pytest.mark.long
def test_drafts_save_devices_where_few_decode_and_are_left_where_they_save_none() -> None:
    without, chosen, three = served(None), served("eagle3,accept=0.7"), served("eagle3:3,accept=0.7")
    assert chosen.num_devices <= three.num_devices < without.num_devices
    assert chosen.search is not None and chosen.search.bound <= chosen.num_devices
    drafting = chosen.pools[-1].speculate
    assert drafting is not None and drafting.draft_tokens in (1, 2, 3, 5)
    assert any("tokens of a draft" in note for note in chosen.notes)
    hopeless = served("eagle3,accept=0.01", modes=("agg",), tpot="15ms@p90")
    assert hopeless.pools[-1].speculate is None
    assert any("no tokens are drafted" in note for note in hopeless.notes)


@pytest.mark.parametrize(
    ("text", "fields", "words"),
    [
        ("mtp:1,accept=0.8", {}, "no multi-token-prediction heads"),
        ("draft:2,model=qwen3-8b,accept=0.8", {}, "151936 words"),
        ("eagle3:2,accept=0.8", {"engine": "meshwright"}, "our own engine drafts no tokens"),
    ],
)
def test_drafts_that_the_model_or_the_engine_has_not_are_refused(text: str, fields: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        served(text, **fields)
