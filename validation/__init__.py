"""Our predictions against published measurements: read a table of runs, predict every row, score.

rows.py reads; inputs.py turns a row into our nouns (models.py, clusters.py, layouts.py, workloads.py; where a row is silent, the
tables of data/ through rows.py); predict.py estimates in batches; score.py compares. table_calibration.py and run_calibration.py
correct the model by measured runs.
"""

from .inputs import RunInputs, run_inputs
from .predict import Prediction, predict
from .rows import RunRow, read_groups, read_runs
from .score import score_groups, score_sources

__all__ = [
    "Prediction", "RunInputs", "RunRow", "predict", "read_groups", "read_runs", "run_inputs",
    "score_groups", "score_sources",
]  # fmt: skip
