"""How near predictions must be for choices under a limit on TPOT: ``python benchmarks/choice_errors.py POINTS.csv``.

Every measured load test is "predicted" as measured, times an error that is drawn: independent of all others, log-normal. Choices by
such predictions, plain and cautious, are scored as those of `meshwright validate POINTS.csv --serve` are, so that a row says what a
model with errors of that size and no pattern would meet and lose. Means of SEEDS draws.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from meshwright.validation.serving import ServingPrediction, ServingRow, read_serving
from meshwright.validation.serving_score import ChoiceScore, score_serving

DEVIATIONS = (0.03, 0.05, 0.08, 0.1, 0.12)
SEEDS = 3
_MODE = "agg"


def drawn(rows: list[ServingRow], deviation: float, seed: int) -> list[ServingPrediction]:
    """Return measured figures with errors of TPOT, and of the tokens a second that follow from it."""
    errors = np.exp(deviation * np.random.default_rng(seed).standard_normal(len(rows)))
    return [
        ServingPrediction(
            ttft_ms=row.ttft_ms, tpot_ms=(row.tpot_ms or 0.0) * float(error),
            output_tokens_per_s_per_gpu=(row.output_tokens_per_s_per_gpu or 0.0) / float(error), fits=True,
        )
        for row, error in zip(rows, errors, strict=True)
    ]  # fmt: skip


def figures(choices: list[ChoiceScore]) -> str:
    """Return the share that meets its limit, and what these lose on average and by one in ten, in percent."""
    parts = np.mean([(score.met, score.lost_mean, score.lost_p90) for score in choices], axis=0)
    return "; ".join(f"{100 * part:.1f}" for part in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("points", type=Path)
    rows = [row for row in read_serving(parser.parse_args().points) if row.is_scored and row.mode == _MODE]
    print("| mean error of TPOT, % | limit met; lost on average, by one in ten, % | cautious |\n|--:|--:|--:|")
    for deviation in DEVIATIONS:
        scores = [score_serving(rows, drawn(rows, deviation, seed))[_MODE] for seed in range(SEEDS)]
        error = np.mean([score.tpot.mean for score in scores if score.tpot is not None])
        plain = figures([score.choices for score in scores if score.choices is not None])
        cautious = figures([score.cautious for score in scores if score.cautious is not None])
        print(f"| {100 * error:.1f} | {plain} | {cautious} |")


if __name__ == "__main__":
    main()
