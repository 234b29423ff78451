from __future__ import annotations

from collections import Counter

import pytest
import torch
from meshwright.runtime.serving.requests import Sampling
from meshwright.runtime.serving.sampling import sample, uniform

PROBABILITIES = (0.05, 0.4, 0.3, 0.2, 0.05)
DRAWS = 20_000


def _shares(**options: float) -> list[float]:
    """Return how often each token is drawn over many positions."""
    logits = torch.tensor(PROBABILITIES).log().expand(DRAWS, -1)
    drawn = Counter(sample(logits, [Sampling(seed=3, **options)] * DRAWS, range(DRAWS)))  # type: ignore[arg-type]
    return [drawn[token] / DRAWS for token in range(len(PROBABILITIES))]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 1.0}, PROBABILITIES),
        ({"temperature": 0.5}, [p**2 / sum(q**2 for q in PROBABILITIES) for p in PROBABILITIES]),
        ({"temperature": 1.0, "top_k": 2}, [0, 4 / 7, 3 / 7, 0, 0]),
        ({"temperature": 1.0, "top_p": 0.7}, [0, 4 / 7, 3 / 7, 0, 0]),
        ({"temperature": 1.0, "top_p": 0.71}, [0, 4 / 9, 3 / 9, 2 / 9, 0]),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.5}, [0, 4 / 7, 3 / 7, 0, 0]),
        ({"temperature": 1.0, "top_p": 1e-9}, [0, 1, 0, 0, 0]),
        ({"temperature": 0.0, "top_k": 4}, [0, 1, 0, 0, 0]),
    ],
)
def test_tokens_are_drawn_as_often_as_their_probability_says(options: dict[str, float], expected: list[float]) -> None:
    # Four standard deviations of a share of 20,000 draws.
    assert _shares(**options) == pytest.approx(expected, abs=4 * (0.25 / DRAWS) ** 0.5)


def test_rows_with_options_of_their_own_do_not_disturb_each_other() -> None:
    logits = torch.tensor(PROBABILITIES).log().expand(4, -1)
    options = [
        Sampling(),
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=2.0),
    ]
    together = sample(logits, options, [7, 8, 9, 10])
    alone = [
        sample(logits[:1], [option], [position])[0] for option, position in zip(options, (7, 8, 9, 10), strict=True)
    ]
    assert together == alone
    assert together[0] == together[2] == 1


def test_numbers_of_positions_and_seeds_are_spread_evenly() -> None:
    by_position = torch.tensor([uniform(0, position) for position in range(4000)])
    by_seed = torch.tensor([uniform(seed, 0) for seed in range(4000)])
    for numbers in (by_position, by_seed):
        assert ((numbers * 10).long().bincount(minlength=10) - 400).abs().max() < 4 * 19  # of a binomial, 4 sigma
