"""Tokens from logits: the likeliest, or drawn by temperature, top-k and top-p.

A draw is the inverse of the cumulated probabilities at one number that follows from the request's seed and the token's position
alone: no generator has a state, so that layouts, preemptions and other requests of a step change nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from .requests import Sampling


def sample(logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """Return a token for each row of logits [B, V], which will stand at these positions of its sequence."""
    chosen: list[int] = logits.argmax(dim=-1).tolist()
    drawn = [i for i, sampling in enumerate(samplings) if sampling.temperature > 0]
    if not drawn:
        return chosen
    options = [samplings[i] for i in drawn]
    numbers = [uniform(option.seed, positions[i]) for i, option in zip(drawn, options, strict=True)]
    for i, token in zip(drawn, _draw(logits[drawn].double(), options, numbers), strict=True):
        chosen[i] = token
    return chosen


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that is as good as drawn."""
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def _draw(logits: Tensor, options: Sequence[Sampling], numbers: Sequence[float]) -> list[int]:
    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=logits.dtype, device=logits.device)[:, None]

    # Stable: equal logits (there are many in bf16) keep the order of the vocabulary on every layout.
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = (ordered / column([option.temperature for option in options])).softmax(dim=-1)
    ranks = torch.arange(logits.shape[1], device=logits.device)[None]
    outside = ranks >= column([option.top_k or logits.shape[1] for option in options])
    probabilities = probabilities.masked_fill(outside, 0.0)
    before = probabilities.cumsum(-1) - probabilities
    # A token is kept while those before it have less than top_p, of what top_k has left.
    is_candidate = before < column([option.top_p for option in options]) * probabilities.sum(-1, keepdim=True)
    totals = (probabilities * is_candidate).cumsum(-1)
    rank = (totals <= column(list(numbers)) * totals[:, -1:]).sum(-1, keepdim=True)
    last = is_candidate.sum(-1, keepdim=True) - 1
    result: list[int] = tokens.gather(1, torch.minimum(rank, last))[:, 0].tolist()
    return result
