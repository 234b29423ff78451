"""Tables of load tests: read, predicted and scored."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from meshwright.cli.main import app
from meshwright.schema.errors import ConfigError
from meshwright.schema.serving import ServingLayout
from meshwright.validation.serving import (
    SPARE_TOKENS,
    ServingPrediction,
    ServingRow,
    _pool,
    _row_steps,
    load_of,
    predict_serving,
    profile_of,
    read_serving,
)
from meshwright.validation.serving_score import score_serving
from typer.testing import CliRunner

HEADER = "id,model,gpu,engine,version,mode,gemm_dtype,isl,osl,concurrency,gpus,tp,ttft_ms,tpot_ms,layout,dump"
AGG = "a,Llama-3.1-8B,H100-SXM-80GB,vllm,0.12.0,agg,bf16,512,64,8,2,2,60,7,given,2026-01-01"
DISAGG = (
    "model,gpu,engine,mode,gemm_dtype,isl,osl,concurrency,prefill_workers,prefill_tp,decode_workers,decode_tp\n"
    "Llama-3.1-8B,H100-SXM-80GB,trtllm,disagg,fp8,512,64,16,1,1,2,1\n"
)


def table(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "points.csv"
    path.write_text(text)
    return path


def row(**values: object) -> ServingRow:
    usual = {"id": "1", "model": "Llama-3.1-8B", "gpu": "H100-SXM-80GB", "engine": "vllm", "isl": 1024, "osl": 128}
    return ServingRow(**{**usual, **values})


def test_a_row_is_served_and_scored(tmp_path: Path) -> None:
    rows = read_serving(table(tmp_path, f"{HEADER}\n{AGG}\n"))
    (found,) = predict_serving(rows)
    assert found.refused is None
    assert found.fits
    assert 3 < found.tpot_ms < 15
    assert 15 < found.ttft_ms < 200
    # 8 requests of at most 64 tokens in flight on two devices.
    assert found.output_tokens_per_s_per_gpu == pytest.approx(
        8 * 64 / (found.ttft_ms / 1e3 + 63 * found.tpot_ms / 1e3) / 2
    )
    score = score_serving(rows, [found])["agg"]
    assert score.answered == 1
    assert score.tpot.mean == pytest.approx(abs(found.tpot_ms / 7 - 1))


def test_a_disaggregated_row_is_served(tmp_path: Path) -> None:
    (found,) = predict_serving(read_serving(table(tmp_path, DISAGG)))
    assert found.refused is None
    assert found.tpot_ms > 0
    assert found.ttft_ms > 0


def test_what_is_not_known_is_refused_with_its_reason(tmp_path: Path) -> None:
    unknown = [row(model="no-such-model"), row(gpu="no-such-gpu"), row(engine="none"), row(mode="disagg")]
    for entry, word in zip(predict_serving(unknown), ("model", "device", "engine", "workers"), strict=True):
        assert entry.tpot_ms is None
        assert word in entry.refused


def test_unreadable_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no column model"):
        read_serving(table(tmp_path, "a,b\n1,2\n"))
    with pytest.raises(ConfigError, match="not a number"):
        read_serving(table(tmp_path, f"{HEADER}\n{AGG.replace(',512,', ',many,')}\n"))
    with pytest.raises(ConfigError, match="isl is empty"):
        read_serving(table(tmp_path, f"{HEADER}\n{AGG.replace(',512,', ',,')}\n"))
    with pytest.raises(ConfigError, match="gpu is empty"):
        read_serving(table(tmp_path, f"{HEADER}\n{AGG.replace('H100-SXM-80GB', ' ')}\n"))


def test_the_profile_is_that_of_the_version_or_of_the_day() -> None:
    assert profile_of(row(version="0.12.0")).version == "0.8"
    assert profile_of(row(container="vllm-openai:v0.15.1")).version == "0.14"
    assert profile_of(row(measured="2025-12-24")).version == "0.8"
    assert profile_of(row(version="0.8.0", container="vllm-runtime:0.8.0")).version == profile_of(row()).version
    assert profile_of(row(engine="sglang", version="nightly-dev-20260216")).engine == "sglang"


def test_requests_are_drawn_where_the_client_is_described() -> None:
    drawn, equal = (load_of(row(described=described), 16) for described in (True, False))
    assert drawn.prompt_len.min() >= 0.8 * 1024
    assert drawn.prompt_len.max() <= 1024
    assert len(set(drawn.output_len)) > 5
    assert set(equal.prompt_len) == {1024}
    assert equal.output_len.min() == 128


def test_servers_with_generated_settings_have_their_token_budget() -> None:
    asked = row(engine="trtllm", version="1.0.0", tp=1, gpus=1, concurrency=8.0)
    budgets = []
    for entry in (asked, replace(asked, described=True), replace(asked, engine="vllm", version="0.12.0")):
        layout = ServingLayout(tp=1)
        pool, _ = _pool(
            entry,
            _row_steps(entry, layout, kernels=profile_of(entry).kernels, coefficients=None),
            profile_of(entry),
            1,
            8,
            None,
        )
        budgets.append(pool.limits.max_batched_tokens)
    assert budgets == [1024 + SPARE_TOKENS + 8, 8192, 2048]


def test_the_client_is_that_of_a_row_with_a_day_or_of_one_with_the_same_load(tmp_path: Path) -> None:
    again, other = (
        AGG.replace("2026-01-01", "elsewhere"),
        AGG.replace(",512,64,", ",256,64,").replace("2026-01-01", "elsewhere"),
    )
    rows = read_serving(table(tmp_path, "\n".join([HEADER, AGG, again, other]) + "\n"))
    assert [entry.described for entry in rows] == [True, True, False]


def test_choices_are_judged_by_what_was_measured() -> None:
    rows = [
        row(id=str(idx), tpot_ms=tpot, ttft_ms=100.0, output_tokens_per_s_per_gpu=rate)
        for idx, (tpot, rate) in enumerate([(10.0, 50.0), (18.0, 80.0), (40.0, 120.0)])
    ]

    def choices(*predicted: tuple[float, float]) -> object:
        found = [ServingPrediction(100.0, tpot, rate, True) for tpot, rate in predicted]
        return score_serving(rows, found)["agg"].choices

    exact = choices((10, 50), (18, 80), (40, 120))
    assert (exact.count, exact.met, exact.lost_mean) == (6, 1.0, 0.0)
    slow = choices((10, 50), (35, 80), (60, 120))  # takes the first row under every limit
    assert slow.met == 1.0
    # The first row within 15, 20 and 30 ms, the second within 50, the third within 75 and 100.
    assert slow.lost_mean == pytest.approx((2 * (1 - 50 / 80) + (1 - 80 / 120)) / 6)
    fast = choices((10, 50), (14, 80), (19, 120))
    assert fast.met == pytest.approx(3 / 6)


def test_a_cautious_choice_goes_by_the_errors_of_other_models() -> None:
    """Others were measured at 1 to 1.2 times the predicted TPOT: a point 5 % below the limit is not worth the most tokens."""
    pairs = [(9.0, 50.0, 9.0), (14.6, 70.0, 15.2), (10.0, 60.0, 10.0)]
    rows = [
        row(id=str(idx), tpot_ms=measured, ttft_ms=100.0, output_tokens_per_s_per_gpu=rate)
        for idx, (_, rate, measured) in enumerate(pairs)
    ]
    predicted = [ServingPrediction(100.0, tpot, rate, True) for tpot, rate, _ in pairs]
    alone = score_serving(rows, predicted)["agg"]
    assert alone.cautious is None
    assert alone.choices.met == pytest.approx(5 / 6)  # all but 15 ms
    assert len(alone.tpot.measured_ratios) == 19 and alone.tpot.measured_ratios[9] == pytest.approx(1.0)
    ratios = [1.0, 1.04, 1.08, 1.12, 1.16, 1.2]
    others = [
        row(id=f"o{idx}", model="llama-3.1-8b", isl=idx + 1, tpot_ms=10 * ratio, ttft_ms=100.0)
        for idx, ratio in enumerate(ratios)
    ]
    scores = score_serving([*rows, *others], [*predicted, *(ServingPrediction(100.0, 10.0, 1.0, True) for _ in others)])
    assert scores["agg"].cautious.met == 1.0
    assert scores["agg"].cautious.lost_mean == pytest.approx(0.0, abs=1e-9)


def test_the_command_prints_rows_and_scores(tmp_path: Path) -> None:
    path = table(tmp_path, f"{HEADER}\n{AGG}\n")
    result = CliRunner().invoke(app, ["validate", str(path), "--serve", "--json"])
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["rows"][0]["id"] == "a"
    assert {"tpot_ms", "ttft_ms", "output_tokens_per_s_per_gpu", "fits"} <= set(document["rows"][0])
    shown = CliRunner().invoke(app, ["validate", str(path), "--serve"])
    assert shown.exit_code == 0
    assert "TPOT mean" in shown.stdout
    refused = CliRunner().invoke(app, ["validate", str(path), "--serve", "--split", "x"])
    assert refused.exit_code == 2


def test_servers_of_known_sweeps_draft_as_do_rows_that_list_them_again(tmp_path: Path) -> None:
    header = "id,model,gpu,engine,version,mode,gemm_dtype,isl,osl,concurrency,gpus,tp,attention_dp,ep,measured,dump,speculate"
    again = "b,DeepSeek-R1,B200-SXM-180GB,trtllm,1.2,agg,nvfp4,1024,1024,8,8,8,1,1"
    lines = [
        f"{again},2026-02-06,2026-03-25,".replace("b,", "a,", 1),
        f"{again},,gap analysis,",
        f"{again},2026-02-03,2026-03-25,".replace("b,", "c,", 1).replace(",8,8,8,1,1", ",8,4,4,1,1"),
        "d,DeepSeek-R1,B200-SXM-180GB,trtllm,1.2,agg,nvfp4,1024,1024,64,8,1,8,8,2026-02-06,2026-03-25,",
        f'{again},2026-02-03,2026-03-25,"mtp:1,accept=0.8"'.replace("b,", "e,", 1).replace(",8,8,8,1,1", ",8,2,2,1,1"),
    ]
    rows = read_serving(table(tmp_path, "\n".join([header, *lines]) + "\n"))
    assert [entry.speculate.partition(",")[0] for entry in rows] == ["mtp:3", "mtp:3", "", "mtp:1", "mtp:1"]
    drafts, plain = predict_serving([rows[0], replace(rows[0], speculate="")])
    assert 0.5 * plain.tpot_ms < drafts.tpot_ms < 0.9 * plain.tpot_ms
