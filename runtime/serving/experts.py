"""Experts of a serving stage: each rank computes what its experts (or its part of each) add to every token, and the parts are
summed.

With attention ranks the tokens of all of them are gathered first (padded to the longest), and each takes its own from the sum. Two
collectives a layer, whatever ep and moe_tp are; for few tokens a step, as in decoding, less than exchanging rows and counts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..models.experts import MixtureOfExperts
from .paged_attention import StepState
from .ranks import InstanceRanks


def place_experts(mixture: MixtureOfExperts, ranks: InstanceRanks, state: StepState) -> None:
    """Let a mixture, whose experts are cut to this rank's, work with the other ranks of the stage."""
    if ranks.stage is None:
        return
    num_local = mixture.experts.gate_proj.shape[0]
    first = (ranks.rank % ranks.layout.stage_devices) // ranks.layout.moe_tp * num_local

    def forward(hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        everyone = _gathered(tokens, ranks, state.widest)
        out = _through_local(mixture, everyone, first, num_local)
        place = slice(0, len(tokens))
        if ranks.attention is not None:
            start = ranks.attention_rank * state.widest
            place = slice(start, start + len(tokens))
        shared_gate = mixture.shared_expert_gate
        if mixture.shared_expert is not None:  # cut over tp: this rank's part of the sum for its own tokens
            shared = mixture.shared_expert(tokens)
            out[place] += shared if shared_gate is None else torch.sigmoid(shared_gate(tokens)) * shared
        dist.all_reduce(out, group=ranks.stage)
        return out[place].view(hidden.shape)

    mixture.forward = forward  # type: ignore[method-assign]


def _gathered(tokens: Tensor, ranks: InstanceRanks, width: int) -> Tensor:
    """Return the tokens of all attention ranks, those of each in as many rows."""
    if ranks.attention is None:
        return tokens
    padded = tokens.new_zeros(width, tokens.shape[1])
    padded[: len(tokens)] = tokens
    parts = [torch.empty_like(padded) for _ in range(ranks.layout.attention_dp)]
    dist.all_gather(parts, padded, group=ranks.attention)
    return torch.cat(parts)


def _through_local(mixture: MixtureOfExperts, tokens: Tensor, first: int, num_local: int) -> Tensor:
    """Return what the experts first..first + held - 1 add to each token [T, D]."""
    weights, experts = mixture.gate.route(tokens)
    local = experts.flatten() - first
    chosen = ((local >= 0) & (local < num_local)).nonzero()[:, 0]
    chosen = chosen[local[chosen].argsort(stable=True)]
    counts = torch.bincount(local[chosen], minlength=num_local)
    token_of_row = chosen // experts.shape[1]
    rows = mixture.experts(tokens[token_of_row], counts) * weights.flatten()[chosen, None]
    return torch.zeros_like(tokens).index_add_(0, token_of_row, rows)
