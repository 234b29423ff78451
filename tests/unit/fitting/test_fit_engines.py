"""Constants of engines' profiles, fitted to load tests that were made with known ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from meshwright.cost_models.coefficients import packaged_coefficients
from meshwright.fitting.__main__ import main
from meshwright.fitting.engines import FITS, Fit, Rows, fitted, mean_error, rows_of
from meshwright.validation.serving import ServingRow, profile_of, serve_row

ROW = ServingRow(
    id="0", model="llama-3.1-8b", gpu="H100-SXM-80GB", engine="vllm", version="0.12", isl=128, osl=16, concurrency=4, gpus=1, tp=1,
    ttft_ms=1.0, tpot_ms=1.0,
)  # fmt: skip


def measured(row: ServingRow, section: str, name: str, value: float) -> ServingRow:
    profile = profile_of(row)
    profile = profile.replace(**{section: getattr(profile, section).replace(**{name: value})})
    served, _, _ = serve_row(row, profile)
    return replace(row, ttft_ms=float(served.ttft_s.mean() * 1e3), tpot_ms=float(served.tpot_s.mean() * 1e3))


@pytest.mark.parametrize(
    ("section", "name", "value", "metric"),
    [("overhead", "row_s", 2e-4, "tpot_ms"), ("request", "way_s", 0.02, "ttft_ms")],
)
def test_the_constant_that_load_tests_were_made_with_is_recovered(
    section: str, name: str, value: float, metric: str
) -> None:
    rows = [measured(replace(ROW, concurrency=float(n)), section, name, value) for n in (2, 6)]
    anything = Rows((("llama-3.1-8b", "H100"),))
    fit = Fit("vllm", "0.8", f"{section}.{name}", metric, value / 30, value * 10, anything, anything)
    assert rows_of(rows, fit, anything) == rows
    best = fitted(fit, rows, {})
    assert best == pytest.approx(value, rel=0.2)  # ten evaluations of a factor of 300
    assert mean_error(rows, fit, {fit: value}) < 1e-9
    assert mean_error(rows, fit, {fit: best}) < 0.3 * mean_error(rows, fit, {})


def test_every_constant_is_packaged_within_its_bounds() -> None:
    for fit in FITS:
        section, _, name = fit.constant.partition(".")
        row = replace(ROW, engine=fit.engine, version=fit.version)
        value = (
            packaged_coefficients().value(fit.constant)
            if fit.is_cost
            else getattr(getattr(profile_of(row), section), name)
        )
        assert fit.low < value < fit.high
        assert not set(fit.fitted.of) & set(fit.checked.of) or fit.fitted.isl != fit.checked.isl


def test_the_command_names_what_it_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "points.csv"
    path.write_text(
        "model,gpu,engine,version,mode,gemm_dtype,isl,osl,concurrency,gpus,tp,ttft_ms,tpot_ms,layout\n"
        "gpt-oss-120b,B200-SXM-180GB,vllm,0.14,agg,nvfp4,8192,4,2,1,1,200,4,given\n"
    )
    main(["engines", str(path), "--names", "request.token_s"])
    words = capsys.readouterr().out.splitlines()[-1].split()
    assert words[:2] == ["vllm", "request.token_s"] and 1e-7 < float(words[3]) < 1e-4
    with pytest.raises(SystemExit):
        main(["engines", str(path), "--names", "request.nothing"])
