"""Published post-training runs: what a run says of its policy, and how much of a column others explain."""

from __future__ import annotations

import numpy as np
import pytest
from meshwright.validation.post_training import Run, explainable, r_squared, staleness_of, unseen_r_squared


@pytest.mark.parametrize(
    ("placement", "note", "steps"),
    [("colocated", "", 0), ("split", "half of the nodes generate", 1), ("split", "staleness 0.5, 4 updates", 0.5),
     ("split", "FSDP2; staleness 0", 0)],
)  # fmt: skip
def test_staleness_is_what_a_run_says_or_a_step_where_pools_are_split(placement: str, note: str, steps: float) -> None:
    assert staleness_of(Run({"placement": placement, "note": note})) == steps


@pytest.mark.parametrize("noise", [0.2, 1.0])
def test_what_is_explained_ends_at_the_noise_whatever_the_function(noise: float) -> None:
    rng = np.random.default_rng(0)
    columns = rng.uniform(-1, 1, (2, 600))
    signal = np.sin(3 * columns[0]) + columns[1] ** 2
    values = signal + rng.normal(0, noise, 600)
    share = float(signal.var() / (signal.var() + noise**2))
    assert explainable(columns, values) == pytest.approx(share, abs=0.12)
    assert unseen_r_squared(columns, values) < share + 0.05
    assert r_squared(columns, values) < share + 0.05
