"""The fit of overlapping streams: a planted law is found again, and the shipped one holds on published measurements."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from meshwright.cost_models.coefficients import packaged_coefficients
from meshwright.fitting.overlap import (
    copies_wait,
    errors,
    fit_law,
    fit_pair,
    is_held_out,
    predict,
    predict_pair,
    read_overlaps,
    without_gpu,
)

TABLE = Path(__file__).resolve().parents[4] / "shared" / "data" / "measured_runs" / "overlap_interference.csv"
LAW = {"channels": 0.2, "traffic": 2.0, "compute": 0.1}

HEADER = "source,gpu_type,nodes,intra_group,inter_group,gemm_n,g2g_allreduce_MB,c2g_MB,g2c_MB,latency_ms"


def test_planted_law_is_found_again(tmp_path: Path) -> None:
    isolated = [f"s,a100-sxm-40gb,1,4,1,{n},0,0,0,{n / 1000}" for n in (2000, 4000, 8000)]
    isolated += [f"s,a100-sxm-40gb,1,4,1,0,{megabytes},0,0,{megabytes / 100}" for megabytes in (100, 400, 1600)]
    both = [f"s,a100-sxm-40gb,1,4,1,{n},{mb},0,0,1" for n in (2000, 4000, 8000) for mb in (100, 400, 1600)]
    path = tmp_path / "overlaps.csv"
    path.write_text("\n".join((HEADER, *isolated, *both, "s,a100-sxm-40gb,1,4,1,2000,7,0,0,1")) + "\n")
    overlaps = read_overlaps(path)
    assert overlaps.isolated_s.shape == (9, 4)  # nothing ran 7 MB on its own
    assert overlaps.isolated_s[0] == pytest.approx([2e-3, 1e-3, 0, 0])
    made = overlaps._replace(together_s=predict_pair(overlaps, list(LAW.values())))
    assert errors(made, predict_pair(made, fit_pair(made))).model < 1e-3
    assert np.all(overlaps.traffic[:, 1] == pytest.approx(1.5 * 100e6 / 1e-3 / 1.555e12))


@pytest.mark.skipif(not TABLE.exists(), reason="the measured overlaps are not part of the repository")
def test_the_law_beats_both_naive_answers_on_held_out_rows() -> None:
    overlaps = read_overlaps(TABLE)
    pairs = overlaps.take(is_held_out(overlaps) & (overlaps.isolated_s[:, 2:] == 0).all(axis=1))
    law = [packaged_coefficients()["overlap"][name] for name in LAW]
    error = errors(pairs, predict_pair(pairs, law))
    assert error.model < 0.05
    assert error.model < 0.6 * min(error.longest, error.total)


@pytest.mark.long
@pytest.mark.skipif(not TABLE.exists(), reason="the measured overlaps are not part of the repository")
def test_the_law_of_a_pair_holds_on_gpus_that_it_was_not_fitted_on() -> None:
    error = errors(*without_gpu(read_overlaps(TABLE)))
    assert error.model < 0.04
    assert error.model < 0.6 * error.longest


@pytest.mark.long
@pytest.mark.skipif(not TABLE.exists(), reason="the measured overlaps are not part of the repository")
def test_the_law_of_all_streams_holds_on_hosts_that_it_was_not_fitted_on() -> None:
    overlaps = read_overlaps(TABLE)
    for host in ("a100-sxm4-40gb-n1-m8", "v100-sxm2-16gb-n1-m8"):
        is_host = np.array([host in name for name in overlaps.host])
        members, others = overlaps.take(is_host), overlaps.take(~is_host & ~is_held_out(overlaps))
        assert copies_wait(members).all() == host.startswith("v100")
        error = errors(members, predict(members, fit_law(others)))
        assert error.model < 0.6 * min(error.longest, error.total)
