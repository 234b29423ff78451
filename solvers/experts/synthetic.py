"""Routing data with known structure: loads and token traces for tests, benchmarks and first trials.

A layer's router gives expert e the logit

    popularity[l,e] + affinity * topic[l,t,e] + noise        popularity ~ N(0, sigma^2), topic ~ N(0, 1), noise ~ Gumbel

for a token of topic t, and a token takes its top_k experts. Loads of a router without topics are close to log-normal,
exp(N(0, sigma^2)), which `synthetic_loads` draws directly; sigma 0.5 is a router trained with a balancing loss, 1.3 one
without. Group-limited routing (DeepSeek-V3, arXiv:2412.19437, section 2.1.2): of `num_groups` groups of neighbours the
token keeps the `top_groups` with the largest sum of their two best logits. Topics are as frequent as 1 / rank. Drift
multiplies every expert's load by exp(N(0, drift^2)) at each step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...schema.arrays import FloatArray, IntArray
from ...schema.errors import ConfigError

_CHUNK = 4096
"""Tokens drawn together, which bounds the memory."""


@dataclass(frozen=True, kw_only=True)
class Router:
    """Parameters of `synthetic_trace`; the formula is the module's."""

    num_layers: int
    num_experts: int
    top_k: int
    sigma: float = 0.5
    num_topics: int = 16
    affinity: float = 1.0
    num_groups: int = 1
    top_groups: int = 1


def synthetic_loads(
    num_layers: int, num_experts: int, *, sigma: float, steps: int = 1, drift: float = 0.0, seed: int = 0
) -> FloatArray:
    """Draw loads [T, L, E], log-normal with `sigma`, each step drifted from the one before by `drift`."""
    if min(num_layers, num_experts, steps) < 1 or not (0 <= sigma < 20 and 0 <= drift < 20):
        raise ConfigError("layers, experts and steps are 1 or more, sigma and drift between 0 and 20")
    rng = np.random.default_rng(seed)
    first = rng.lognormal(0.0, sigma, (1, num_layers, num_experts))
    factors = np.exp(drift * rng.standard_normal((steps - 1, num_layers, num_experts)))
    return np.asarray(np.concatenate([first, first * np.cumprod(factors, axis=0)]))


def synthetic_trace(
    router: Router, num_tokens: int, *, seed: int = 0, topic_weight: FloatArray | None = None
) -> IntArray:
    """Draw the experts of each token [tokens, L, top_k]; `topic_weight` [topics] for another mix of topics than 1 / rank."""
    _require_possible(router, num_tokens)
    rng = np.random.default_rng(seed)
    shape = (router.num_layers, router.num_experts)
    popularity = router.sigma * rng.standard_normal(shape)
    topics = router.affinity * rng.standard_normal((router.num_topics, *shape))
    weight = 1 / np.arange(1, router.num_topics + 1) if topic_weight is None else np.asarray(topic_weight, float)
    topic = rng.choice(router.num_topics, num_tokens, p=weight / weight.sum())
    trace = np.empty((num_tokens, router.num_layers, router.top_k), dtype=np.int64)
    for start in range(0, num_tokens, _CHUNK):
        part = slice(start, start + _CHUNK)
        for layer in range(router.num_layers):
            logits = popularity[layer] + topics[topic[part], layer]
            logits = logits + rng.gumbel(size=logits.shape)
            if router.num_groups > 1:
                logits = _within_groups(logits, router)
            trace[part, layer] = np.argpartition(-logits, router.top_k - 1, axis=1)[:, : router.top_k]
    return trace


def _within_groups(logits: FloatArray, router: Router) -> FloatArray:
    """Return the logits [B, E], -inf outside the token's groups."""
    grouped = logits.reshape(len(logits), router.num_groups, -1)
    best = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
    keep = np.argsort(-best, axis=1)[:, : router.top_groups]
    allowed = np.zeros(best.shape, dtype=bool)
    np.put_along_axis(allowed, keep, True, axis=1)
    return np.asarray(np.where(allowed[:, :, None], grouped, -np.inf).reshape(logits.shape))


def _require_possible(router: Router, num_tokens: int) -> None:
    counts = (router.num_layers, router.num_experts, router.top_k, router.num_topics, router.num_groups, num_tokens)
    if min(counts) < 1 or router.top_k > router.num_experts:
        raise ConfigError("a router has at least one layer, expert, topic and token, and top_k of its experts at most")
    if router.num_experts % router.num_groups or not 1 <= router.top_groups <= router.num_groups:
        raise ConfigError(
            f"{router.num_experts} experts in {router.num_groups} groups, of which a token keeps {router.top_groups}"
        )
    if router.top_groups * (router.num_experts // router.num_groups) < router.top_k:
        raise ConfigError(f"{router.top_groups} groups have fewer experts than top_k {router.top_k}")
