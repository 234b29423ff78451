"""An adapter's fine-tuning in the steps of a deployment: as many tokens as the limits on latency leave (docs/serving.md).

For a plan's own instances, and for as many of them as the cluster holds, the tokens of fine-tuning a step that give most of them a
second while the steady state carries the load within the limits. They are then simulated, with fewer until the limits are met.
Beside them stands the same cluster apart: the plan's instances serve, and the rest does nothing but fine-tune.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ...cost_models.serving.fine_tuning import PASSES, fine_tuning_bytes, model_with_fine_tuning, with_fine_tuning
from ...cost_models.serving.instance_model import InstanceModel
from ...cost_models.serving.memory import cached_token_bytes
from ...cost_models.serving.mix import Mix
from ...cost_models.serving.steady_state import largest_per_step, largest_rate, operating_points
from ...schema import ConfigError
from ...schema.adapters import FineTuning
from ...schema.serving_plan import FineTuned, FineTuningEstimate
from ..tasks.serving import ServingProblem
from .checks import Deployment, Served, serve
from .kinds import InstanceKind
from .space import mix_of

SIZES = 40
"""Numbers of tokens a step that are tried, up to the engine's limit."""

CURVE = 64
TRIES = 8
"""Simulations, each with ``FEWER`` times the tokens of the one before."""

FEWER = 0.85


def fine_tuning_of(problem: ServingProblem, served: Served) -> FineTuningEstimate | None:
    """Return what fine-tuning fits in; None where none is asked for.

    Raises:
        ConfigError: the deployment is of several pools, or its steps were measured.
    """
    tuning, deployment = problem.serving.fine_tuning, served.deployment
    if tuning is None:
        return None
    if len(deployment.kinds) > 1 or deployment.kinds[0].measured is not None:
        raise ConfigError(
            "--finetune: the plan has several pools, or steps that were measured without it",
            help="plan for one kind of device, without --profile",
        )
    kind, (count,) = deployment.kinds[0], deployment.counts
    work = _Tuned(problem, kind, tuning)
    pools = tuple(work.best(replicas, served.requests_per_s) for replicas in dict.fromkeys((count, kind.max_count)))
    return FineTuningEstimate(
        state_bytes=round(work.taken_bytes),
        pools=pools,
        apart_tokens_per_s=(kind.max_count - count) * work.peak_tokens_per_s,
        share_of_peak=pools[-1].tokens_per_s / (kind.max_count * work.peak_tokens_per_s),
    )


class _Tuned:
    """Fine-tuning on one kind of instance."""

    def __init__(self, problem: ServingProblem, kind: InstanceKind, tuning: FineTuning) -> None:
        self._problem, self._kind, self._tuning, self._mix = (
            problem,
            kind,
            tuning,
            mix_of(problem.serving, kind.prefixes),
        )
        self.taken_bytes = fine_tuning_bytes(kind.step, tuning)
        token = cached_token_bytes(kind.step, float(problem.serving.requests.longest))
        self._cache_tokens = kind.model.cache_tokens - self.taken_bytes / token if token else kind.model.cache_tokens

    @property
    def peak_tokens_per_s(self) -> float:
        """Return the tokens a second of an instance that does nothing else, with steps as full as they may be."""
        tokens = self._kind.model.max_batched_tokens
        model = self._kind.model
        seconds = float(with_fine_tuning(self._kind.step, self._tuning, tokens).seconds(0.0, 0.0))
        return model.lanes * tokens / PASSES / float(model.host.with_step(np.asarray(seconds), 0, tokens, 0))

    def best(self, replicas: int, rate: float) -> FineTuned:
        """Return the most tokens of fine-tuning that so many instances take within the limits, as simulated."""
        choices = [(self._tokens_per_s(tokens, replicas, rate), tokens) for tokens in self._sizes(replicas, rate)]
        _, tokens = max(choices, default=(0.0, 0.0))
        for _ in range(TRIES):
            if tokens < 1:
                break
            served = self._serve(tokens, replicas, rate)
            if served.meets_limits:
                return FineTuned(
                    replicas=replicas, tokens_per_step=tokens, tokens_per_s=self._tokens_per_s(tokens, replicas, rate),
                    limits=served.limits,
                )  # fmt: skip
            tokens = float(int(FEWER * tokens))
        return FineTuned(replicas=replicas, tokens_per_step=0.0, tokens_per_s=0.0)

    def _sizes(self, replicas: int, rate: float) -> Iterator[float]:
        """Yield tokens a step with which the steady state carries the load within the limits."""
        if self._cache_tokens <= self._problem.serving.requests.longest:
            return
        limits = self._problem.serving.limits
        limit = self._kind.model.max_batched_tokens - 1
        for tokens in np.unique(np.geomspace(PASSES, limit, SIZES).round()).tolist():
            carried = largest_rate(self._model(tokens), self._mix, limits, replicas=replicas).requests_per_s
            if carried * replicas < rate:
                return
            yield tokens

    def _model(self, tokens: float) -> InstanceModel:
        kind = self._kind
        return model_with_fine_tuning(kind.model, kind.step, self._tuning, tokens, self._cache_tokens)

    def _tokens_per_s(self, tokens: float, replicas: int, rate: float) -> float:
        """Return the tokens a second of all instances: two of a step are one, a step follows the other."""
        model, mix = self._model(tokens), self._mix
        step_s = _step_s(model, mix, rate / replicas)
        return replicas * model.lanes * tokens / PASSES / step_s

    def _serve(self, tokens: float, replicas: int, rate: float) -> Served:
        """Simulate instances whose every step has such tokens."""
        kind, limits = self._kind, self._kind.limits
        of_prefixes = limits.cache_blocks - kind.free_limits.cache_blocks
        blocks = of_prefixes + max(int(self._cache_tokens // limits.block_size), 1)
        largest = max(limits.max_batched_tokens - int(tokens), 1)
        remaining = limits.replace(
            cache_blocks=min(limits.cache_blocks, blocks), max_batched_tokens=largest,
            chunk=None if limits.chunk is None else min(limits.chunk, largest),
        )  # fmt: skip
        changed = replace(kind, step=with_fine_tuning(kind.step, self._tuning, tokens), limits=remaining)
        in_flight = rate * _life_s(self._model(tokens), self._mix, rate / replicas)
        return serve(Deployment((changed,), (replicas,)), self._problem.serving, rate=rate, in_flight=in_flight)


def _step_s(model: InstanceModel, mix: Mix, rate: float) -> float:
    """Return the mean seconds between two steps of a lane at a rate."""
    curve = operating_points(model, mix, np.geomspace(1e-4, 1.0, CURVE) * largest_per_step(model, mix))
    return float(np.interp(rate, curve.requests_per_s, curve.step_s))


def _life_s(model: InstanceModel, mix: Mix, rate: float) -> float:
    return _step_s(model, mix, rate) * (mix.decode_steps + 1)
