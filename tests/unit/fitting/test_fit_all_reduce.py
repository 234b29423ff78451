"""All-reduces of engines: constants that made a table's rows are what the fit finds."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from meshwright.cost_models.serving.communication import AllReduceKernels, kernels_all_reduce_s
from meshwright.fitting.all_reduce import fitted, mean_error


@pytest.mark.parametrize("true", [AllReduceKernels(4e-6, 4e-6, 0.6, 0.6), AllReduceKernels(6e-6, 8e-6, 0.3, 0.5)])
def test_kernels_that_made_the_rows_are_found(true: AllReduceKernels) -> None:
    sizes, groups = np.meshgrid(2.0 ** np.arange(12, 27), [2.0, 4.0, 8.0])
    rows = pd.DataFrame({"num_bytes": sizes.ravel(), "num_gpus": groups.ravel(), "rate": 4.5e11, "library_s": np.inf})
    rows["seconds"] = kernels_all_reduce_s(sizes.ravel(), groups.ravel(), 4.5e11, true)
    best = fitted(rows)
    assert mean_error(best, rows) < 0.01
    np.testing.assert_allclose(best, true, rtol=0.05)
