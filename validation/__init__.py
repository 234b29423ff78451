"""Our predictions against published measurements: read a table of runs, predict every row, score.

rows.py reads, and has the tables of data/ that say what words mean and what silent rows leave out; models.py, clusters.py and
layouts.py (with noted.py) turn a row into our nouns; predict.py estimates in batches; score.py compares, decisions.py judges
choices. table_calibration.py and run_calibration.py correct the model by measured runs.
"""

from .decisions import score_groups
from .predict import Prediction, RunInputs, predict, run_inputs
from .rows import RunRow, read_groups, read_runs
from .score import score_by, score_overall, score_sources

__all__ = [
    "Prediction", "RunInputs", "RunRow", "predict", "read_groups", "read_runs", "run_inputs",
    "score_by", "score_groups", "score_overall", "score_sources",
]  # fmt: skip
