"""Accuracy of parts of a source that `meshwright validate` does not list by themselves.

    python benchmarks/accuracy_splits.py training_runs.csv decision_groups.csv

vTrain on one node and on several, for each half; table 5 of Korthikanti et al. (arXiv:2205.05198); regret over all groups
but vTrain's.
"""

from __future__ import annotations

import statistics
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

from meshwright.validation import RunRow, predict, read_groups, read_runs, score_groups
from meshwright.validation.score import log_bias, rank_correlation, relative_error

NODE = 8
SPLITS: dict[str, Callable[[RunRow], bool]] = {
    "vtrain, one node": lambda row: row.source_set == "vtrain" and (row.n_gpus or 0) <= NODE,
    "vtrain, several nodes": lambda row: row.source_set == "vtrain" and (row.n_gpus or 0) > NODE,
    "table 5": lambda row: "arXiv:2205.05198" in row.source,
}


def main() -> None:
    """Print one line for each split and half, then the regret."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("groups", type=Path)
    options = parser.parse_args()
    rows, names = read_runs(options.runs), read_groups(options.groups)
    predictions = predict(rows)
    known = [
        (row, p.estimate.step_time_s, p.measured_s)
        for row, p in zip(rows, predictions, strict=True)
        if row.is_scored and p.measured_s is not None and p.estimate is not None
    ]
    for name, belongs in SPLITS.items():
        for parts in (("fit",), ("held-out",), ("fit", "held-out")):
            pairs = [(ours, measured) for row, ours, measured in known if belongs(row) and row.part in parts]
            ours, measured = zip(*pairs, strict=True)
            rank = rank_correlation(ours, measured)
            print(
                f"{name} ({' and '.join(parts)}): {len(pairs)} rows, MAPE {100 * relative_error(ours, measured):.1f} %, "
                f"bias {100 * log_bias(ours, measured):+.1f} %, rank correlation {'-' if rank is None else f'{rank:.3f}'}"
            )
    groups = score_groups(rows, predictions, names).values()
    regrets = [group.regret for group in groups if group.regret is not None and group.source_set != "vtrain"]
    mean, median = statistics.mean(regrets), statistics.median(regrets)
    print(f"regret of {len(regrets)} other groups: mean {100 * mean:.1f} %, median {100 * median:.1f} %")


if __name__ == "__main__":
    main()
