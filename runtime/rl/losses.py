"""Advantages and losses of GRPO and PPO, per token.

    GRPO   A_i = (r_i - mean r of the prompt) / (std r of the prompt + EPS), the same for every token of response i
    PPO    A_t = sum_k (gamma lambda)^k d_(t+k),  d_t = r_t + gamma V_(t+1) - V_t, whitened over the step; r is at the last token
    taught A_t + teacher_weight (t - p_old),  t: of the teacher; its mean is less the divergence of the actor from the teacher
    policy -min(rho A, clip(rho, 1 - c, 1 + c) A) + w (exp(q - p) - (q - p) - 1),  rho = exp(p - p_old)
    value  1/2 max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2),  R = A + V before whitening

with p, p_old, q: log-probabilities of the actor, of the actor when the step began, and of the reference. A token of a response of n
tokens weighs 1 / n, a response 1 / responses of the update: a loss does not depend on how responses are dealt over ranks.

Sources: PPO arXiv:1707.06347, GAE arXiv:1506.02438, GRPO arXiv:2402.03300, teachers arXiv:2306.13649.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...schema.rl import RlLoss

EPS = 1e-6


def group_advantages(rewards: Sequence[float], responses: int) -> list[float]:
    """Return the advantage of each response over the others to its prompt; those of a prompt stand together."""
    values = torch.tensor(rewards, dtype=torch.float64).view(-1, responses)
    centred = values - values.mean(dim=1, keepdim=True)
    result: list[float] = (centred / (values.std(dim=1, keepdim=True) + EPS)).flatten().tolist()
    return result


def token_advantages(
    rewards: Sequence[float], values: Sequence[Sequence[float]], loss: RlLoss
) -> tuple[list[list[float]], list[list[float]]]:
    """Return the whitened advantages and the returns of every token of each response."""
    advantages: list[list[float]] = []
    for reward, of_response in zip(rewards, values, strict=True):
        row, following, next_value = [0.0] * len(of_response), 0.0, 0.0
        for t in reversed(range(len(of_response))):
            gained = reward if t == len(of_response) - 1 else 0.0
            delta = gained + loss.discount * next_value - of_response[t]
            following = delta + loss.discount * loss.trace * following
            row[t], next_value = following, of_response[t]
        advantages.append(row)
    returns = [[a + v for a, v in zip(row, known, strict=True)] for row, known in zip(advantages, values, strict=True)]
    every = torch.tensor([a for row in advantages for a in row], dtype=torch.float64)
    mean, deviation = float(every.mean()), float(every.std(unbiased=False)) + EPS
    return [[(a - mean) / deviation for a in row] for row in advantages], returns


def taught(advantages: Sequence[float], old: Sequence[float], teacher: Sequence[float], loss: RlLoss) -> list[float]:
    """Return advantages of tokens that a teacher has log-probabilities of."""
    return [a + loss.teacher_weight * (t - p) for a, p, t in zip(advantages, old, teacher, strict=True)]


def importance_ratios(now: Sequence[float], drawn: Sequence[float], cap: float) -> list[float]:
    """Return min(p_now / p_drawn, cap) of each token, given log-probabilities."""
    return [math.exp(min(a - b, math.log(cap))) for a, b in zip(now, drawn, strict=True)]


def policy_losses(
    log_probs: Tensor, old: Tensor, advantages: Tensor, loss: RlLoss, reference: Tensor | None = None
) -> Tensor:
    """Return the loss of each token, with a gradient for ``log_probs``; all of one shape."""
    ratio = (log_probs - old).exp()
    clipped = ratio.clamp(1 - loss.clip, 1 + loss.clip)
    result = -torch.minimum(ratio * advantages, clipped * advantages)
    if reference is not None and loss.reference_weight:
        apart = reference - log_probs
        result = result + loss.reference_weight * (apart.exp() - apart - 1)
    return result


def value_losses(values: Tensor, old: Tensor, returns: Tensor, loss: RlLoss) -> Tensor:
    """Return the loss of each token's value, weighed; all of one shape."""
    near = old + (values - old).clamp(-loss.value_clip, loss.value_clip)
    return loss.value_weight * 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)
