"""The host's seconds of a step: what made a table's rows is what the fit finds, and a table without a column is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import strategies as st
from meshwright.fitting.__main__ import main
from meshwright.fitting.hosts import decode_s, fitted_host, prefill_s
from meshwright.schema import ClusterSpec, ModelSpec
from meshwright.schema.serving import ServingLayout
from tiers import drawn


@drawn(few=5, many=20, step_s=st.floats(2e-4, 8e-3), row_s=st.floats(2e-6, 2e-4), seed=st.integers(0, 99))
def test_a_host_that_made_the_rows_is_found(step_s: float, row_s: float, seed: int) -> None:
    draw = np.random.default_rng(seed)
    batch, osl = draw.choice([1, 16, 32, 64], 60), draw.choice([128, 512, 2048], 60)
    kernels_s = osl * draw.uniform(4e-3, 3e-2, 60)
    noise = np.exp(draw.normal(0, 0.01, 60))
    rows = pd.DataFrame({"batch": batch, "osl": osl, "kernels_s": kernels_s})
    rows["e2e_s"] = (kernels_s + osl * (step_s + row_s * batch)) * noise
    fitted = fitted_host(rows)
    # A hundredth of noise on steps of up to 30 ms moves the two by a part of a millisecond together.
    batches = np.array([1, 16, 64])
    assert fitted[0] + fitted[1] * batches == pytest.approx(step_s + row_s * batches, abs=6e-4)


def test_seconds_of_a_static_batch_add_up() -> None:
    from meshwright.cost_models.serving.step import StepCosts

    model, cluster = ModelSpec.named("llama-3.1-8b"), ClusterSpec.parse("1xA100-SXM-80GB")
    step = StepCosts.build(model, cluster, ServingLayout(), weights="fp16", cache="fp16")
    assert decode_s(step, 4, 128, 1) == 0
    every = np.mean([float(step.seconds(4, 4 * (128 + token))) for token in range(1, 129)])
    # Sixteen points of a curve that is nearly straight.
    assert decode_s(step, 4, 128, 129) == pytest.approx(128 * every, rel=1e-3)
    assert prefill_s(step, 64, 2048) == pytest.approx(8 * prefill_s(step, 8, 2048))


def test_a_table_without_a_column_is_refused(tmp_path: Path, capsys) -> None:
    table = tmp_path / "table.csv"
    table.write_text("engine,version,gpu\nvLLM,2024,A100-SXM-40GB\n")
    with pytest.raises(SystemExit) as ended:
        main(["hosts", str(table)])
    assert ended.value.code == 2
    assert "no column precision" in capsys.readouterr().err
