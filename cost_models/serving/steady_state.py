"""Steady state of an engine instance under a load: one curve by the requests that a step begins and ends (docs/serving.md).

    x               requests a step; every other figure follows, without a fixed point to iterate
    N = x (o - 1)   rows that decode                                                    (S1)
    S = x sum_w share_w (o_w - 1) (i_w + o_w / 2)   tokens they attend to               (S2)
    p = x i         tokens of prompts, in a part f of the steps: f = 1 - exp(-x chunks)  (S3)
    T = (1 - f) t(N, S, 0) + f t(N, S, p / f); prompts first: t(N, S, 0) + f t(0, 0, p / f); t with what the host
        adds                                                                              (S4)
    rate = x / T                                                                        (S5)
    N <= max_batch, N + p <= max_batched_tokens, S <= cache, of S without shared prefixes (S6)

A request sees its own row besides N. Over its life N varies as a shot noise does: with lives of one length the mean of N over one
life has the variance 2/3 cv^2 N, the prompts met in it (cv^2 + scv) / N of their mean (S7). The first token waits for the step
under way, for prompts before it (Kingman's bound of a server that takes max_batched_tokens a step, with Sakasegawa's factor for
several replicas, S8), and for its own chunks, after the copy of a prefix that lies with the host (S9). ``fluid`` leaves (S7) and
(S8) out and takes the best f (fluid.py).

All counts are of one lane: an attention rank, with pipeline stages a pp-th of its requests, whose steps are in flight together.

Sources: Kingman, Proc. Cambridge Phil. Soc. 57, 1961; Sakasegawa, Ann. Inst. Statist. Math. 29, 1977.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from ...schema.serving import LatencyLimit, LatencyMetric
from ...schema.units import BoolArray, FloatArray, Numbers
from .fluid import chunks, fluid_steps, smallest_part
from .instance_model import InstanceModel
from .mix import Mix
from .shares import mean_cycle_s, min_cycle_s, slow_down

POINTS = 48
"""Points of a curve; the largest rate is looked for between two of them with as many again, twice."""

_START = 1e-3
"""The curve begins at this part of its end."""

_BISECTIONS = 26


@dataclass(frozen=True, kw_only=True)
class OperatingPoints:
    """Points [X] of the curve of an instance, of one attention rank unless said otherwise.

    Attributes:
        per_step: requests that begin and end in a step (x).
        requests_per_s: of the entire instance.
        rows, prompt_tokens, cached_tokens: of a mean step; step_s: between two tokens of a request.
        service_s: of the first token of each class [X, W], from the end of waiting.
        load: share of the prompts' capacity that is used; wait_s: mean seconds before a prompt's first chunk.
        waits_for_step: a prompt begins when the step under way ends; else at once, beside it.
    """

    mix: Mix
    fluid: bool
    per_step: FloatArray
    requests_per_s: FloatArray
    rows: FloatArray
    prompt_tokens: FloatArray
    cached_tokens: FloatArray
    step_s: FloatArray
    slow_step_s: FloatArray
    service_s: FloatArray
    load: FloatArray
    wait_s: FloatArray
    transfer_s: FloatArray
    waits_for_step: bool = True

    @property
    def ttft_s(self) -> FloatArray:
        """Return the mean seconds to the first token."""
        return self.wait_s + self._residual_s + self.service_s @ self.mix.share + self.transfer_s @ self.mix.share

    @property
    def _residual_s(self) -> FloatArray:
        waits = not self.fluid and self.waits_for_step
        return np.asarray(self.step_s / 2 * (self.rows > 0) if waits else 0.0 * self.step_s)

    def quantile_s(self, metric: LatencyMetric, quantile: float) -> FloatArray:
        """Return the seconds [X] of a metric at a quantile of the requests."""
        if metric == "tpot":
            return self.tpot_s(quantile)
        known, scale = self._known_s(metric)
        low, high = known.min(axis=1), known.max(axis=1) + scale * 40
        if known.shape[1] == 1:
            return np.asarray(low + scale * np.log(np.maximum(np.clip(self.load, 0, 1) / (1 - quantile), 1.0)))
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            is_below = self._share_within(known, scale, middle) < quantile
            low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
        return np.asarray(high)

    def breaks(self, limit: LatencyLimit) -> BoolArray:
        """Return where fewer requests [X] than the limit's quantile are within it."""
        if limit.metric == "tpot":
            return np.asarray(self.tpot_s(limit.quantile) > limit.seconds)
        known, scale = self._known_s(limit.metric)
        return np.asarray(self._share_within(known, scale, np.float64(limit.seconds)) < limit.quantile)

    def _known_s(self, metric: LatencyMetric) -> tuple[FloatArray, FloatArray]:
        """Return the seconds [X, W] of a request of each class without waiting, and the mean wait [X] of those that wait."""
        decode_s = self.step_s[:, None] * (self.mix.output_len - 1) if metric == "e2e" else 0.0
        known = self.service_s + self._residual_s[:, None] + self.transfer_s + decode_s
        waits = np.clip(self.load, 0, 1)
        return known, np.where(waits > 0, self.wait_s / np.maximum(waits, 1e-12), 0.0)

    def _share_within(self, known: FloatArray, scale: FloatArray, seconds: Numbers) -> FloatArray:
        """Return the share [X] of requests that take at most so many seconds, where waits beyond none are exponential."""
        beyond = np.reshape(seconds, (-1, 1)) - known
        waits = np.clip(self.load, 0, 1)[:, None]
        tail = waits * np.exp(-np.maximum(beyond, 0) / np.maximum(scale, 1e-12)[:, None])
        return np.asarray(np.where(beyond >= 0, 1 - tail, 0.0) @ self.mix.share)

    def tpot_s(self, quantile: float) -> FloatArray:
        """Return the seconds a token at a quantile (S7): between the mean and one standard deviation more, which is tabulated."""
        if self.fluid:
            return self.step_s
        return np.asarray(self.step_s + max(_normal(quantile), 0.0) * (self.slow_step_s - self.step_s))

    def point_of(self, idx: int) -> OperatingPoints:
        """Return one point, as a curve of one."""
        arrays = {
            name: getattr(self, name)[idx : idx + 1]
            for name in self.__dataclass_fields__
            if isinstance(getattr(self, name), np.ndarray)
        }
        return replace(self, **arrays)


def _normal(quantile: float) -> float:
    return NormalDist().inv_cdf(quantile)


def largest_per_step(instance: InstanceModel, mix: Mix) -> float:
    """Return the requests a step that (S6) allows."""
    needs = mix.new_tokens if instance.prompts_apart else mix.decode_steps + mix.new_tokens
    by_rows = instance.max_batch / mix.decode_steps if mix.decode_steps else np.inf
    cache_need = mix.occupied_steps(reserves_output=instance.reserves_output)
    by_cache = instance.cache_tokens / cache_need if cache_need else np.inf
    by_tokens = instance.max_batched_tokens / needs if needs else np.inf
    if instance.prompts_apart:  # as many steps of prompts as it takes
        by_tokens = np.inf if np.isfinite(min(by_rows, by_cache)) else by_tokens
    return float(min(by_tokens, by_rows, by_cache))


def operating_points(
    instance: InstanceModel, mix: Mix, per_step: FloatArray, *, fluid: bool = False, replicas: int = 1
) -> OperatingPoints:
    """Return points of an aggregated instance, or of one that only decodes where the mix has no prompts to compute."""
    x = np.asarray(per_step, dtype=np.float64)
    rows, cached, tokens = x * mix.decode_steps, x * mix.cached_steps, x * mix.new_tokens
    if fluid and instance.sharing is not None:
        cycle_s, seconds = min_cycle_s(instance, mix, x)
        slow_s = seconds
    elif fluid:
        cycle_s = seconds = slow_s = fluid_steps(instance, mix, x).step_s.min(axis=0)
    else:
        seen = np.minimum(rows + 1, max(instance.max_batch, 1.0)) if mix.decode_steps else rows
        cycle_s = seconds = slow_s = _mean_step_s(instance, mix, x, seen)
        if mix.decode_steps:
            lively = mix.arrival_cv**2
            slow_rows = np.minimum(seen + np.sqrt(2 / 3 * lively * rows), np.maximum(instance.max_batch, seen))
            more = 1 + np.sqrt((lively + mix.prompt_scv) / np.maximum(rows, 1.0))
            slow_s = _mean_step_s(instance, mix, x, slow_rows, more)
    rate = x / cycle_s
    longer = 1.0 if fluid or instance.sharing is None else slow_down(instance, mix, rows, cached)
    capacity = _prompts_per_s(instance, mix, rows, cached) / longer
    load = np.minimum(rate / capacity, 1.0)
    return OperatingPoints(
        mix=mix, fluid=fluid, per_step=x, requests_per_s=rate * instance.lanes, rows=rows, prompt_tokens=tokens,
        cached_tokens=cached, step_s=seconds, slow_step_s=np.maximum(slow_s, seconds),
        service_s=first_token_s(instance, mix, rows, cached, fluid=fluid, longer=longer), load=load,
        wait_s=0 * x if fluid else _wait_s(mix, load, capacity, replicas) + _slot_wait_s(instance, mix, rows, seconds, replicas),
        transfer_s=np.zeros((len(x), len(mix.share))), waits_for_step=instance.sharing is None,
    )  # fmt: skip


def _mean_step_s(instance: InstanceModel, mix: Mix, x: FloatArray, rows: FloatArray, more: Any = 1.0) -> FloatArray:
    """Return the seconds of a step with prompts in a part of them as they fall by chance (S3)."""
    per_row = mix.cached_steps / mix.decode_steps if mix.decode_steps else 0.0
    if not mix.new_tokens:
        return instance.pass_s(rows, rows * per_row)
    if instance.sharing is not None:
        return mean_cycle_s(instance, mix, x, rows, more)
    part = np.maximum(-np.expm1(-more * x * chunks(instance, mix)), smallest_part(instance, x, mix, rows, more))
    part = part if instance.prefill_first else np.minimum(part, 1.0)
    return instance.step_s(rows, rows * per_row, more * x * mix.new_tokens, mix.mean_context, more * x, part)


def _wait_s(mix: Mix, load: FloatArray, capacity: FloatArray, replicas: int) -> FloatArray:
    """Return the mean seconds before a prompt's first chunk (S8)."""
    variation, power = (mix.arrival_cv**2 + mix.prompt_scv) / 2, np.sqrt(2 * (replicas + 1)) - 1
    return np.asarray(variation * load**power / replicas / np.maximum(1 - load, 1e-9) / capacity)


def _slot_wait_s(instance: InstanceModel, mix: Mix, rows: FloatArray, step_s: FloatArray, replicas: int) -> FloatArray:
    """Return the mean seconds until one of max_batch requests has ended (S8): as many servers, whose service is a life."""
    if not mix.decode_steps or not np.isfinite(instance.max_batch):
        return 0 * rows
    slots = instance.max_batch * instance.lanes * replicas
    life_scv = max(float(mix.share @ mix.output_len**2) / float(mix.share @ mix.output_len) ** 2 - 1, 0.0)
    load = np.minimum(rows / instance.max_batch, 1 - 1e-9)
    variation = (mix.arrival_cv**2 + life_scv) / 2
    waits = variation * load ** (np.sqrt(2 * (slots + 1)) - 1) / slots / (1 - load)
    return np.asarray(waits * mix.decode_steps * step_s)


@dataclass(frozen=True)
class Prefill:
    """An instance that only prefills: prompts a second of a lane, and seconds [1, W] of the first token of each class."""

    instance: InstanceModel
    mix: Mix
    fluid: bool
    capacity: FloatArray
    service_s: FloatArray

    @classmethod
    def of(cls, instance: InstanceModel, mix: Mix, *, fluid: bool = False) -> Prefill:
        """Return what an instance does with prompts alone."""
        none = np.zeros(1)
        service_s = first_token_s(instance, mix, none, none, fluid=fluid)
        return cls(instance, mix, fluid, _prompts_per_s(instance, mix, none, none), service_s)

    def points(self, load: FloatArray, *, transfer_s_per_token: float = 0.0, replicas: int = 1) -> OperatingPoints:
        """Return points by the share of its capacity that is used (S8).

        The keys and values of a prompt are sent when it ends: ``transfer_s_per_token`` adds to the first token.
        """
        rho, none, mix = np.asarray(load, dtype=np.float64), np.zeros(len(load)), self.mix
        wait_s = none if self.fluid else _wait_s(mix, rho, self.capacity, replicas)
        rate, service = rho * self.capacity, np.broadcast_to(self.service_s, (len(rho), len(mix.share)))
        step_s = service @ mix.share
        return OperatingPoints(
            mix=mix, fluid=self.fluid, per_step=rate * step_s, requests_per_s=rate * self.instance.lanes, rows=none,
            prompt_tokens=rate * step_s * mix.new_tokens,
            cached_tokens=rate * step_s * float(mix.share @ mix.prompt_len),
            step_s=step_s, slow_step_s=step_s, service_s=service, load=rho, wait_s=wait_s,
            transfer_s=np.broadcast_to(transfer_s_per_token * mix.prompt_len, service.shape),
        )  # fmt: skip


def _prompts_per_s(instance: InstanceModel, mix: Mix, rows: FloatArray, cached: FloatArray) -> FloatArray:
    """Return the prompts a second that steps of ``max_batched_tokens`` take beside the rows that decode."""
    if not mix.new_tokens:
        return np.full(rows.shape, np.inf)
    room = np.full(rows.shape, instance.max_batched_tokens)
    room = room if instance.prompts_apart else np.maximum(room - rows, 1.0)
    # Fewer prompts a step may be quicker for each of them than as many as it takes.
    tokens = np.minimum(np.array([1.0, 2.0, 4.0, np.inf])[:, None] * mix.new_tokens, room)
    prompts = tokens / mix.new_tokens
    return np.asarray((prompts / instance.prompt_s(rows, cached, tokens, mix.mean_context, prompts)).max(axis=0))


def first_token_s(
    instance: InstanceModel,
    mix: Mix,
    rows: FloatArray,
    cached: FloatArray,
    *,
    fluid: bool,
    longer: FloatArray | float = 1.0,
) -> FloatArray:
    """Return the seconds [X, W] of the chunks of one prompt beside the rows that decode (S9), and of the host before.

    Args:
        longer: times that a chunk takes while another phase runs on the same devices (D1), [X].
    """
    if not mix.new_tokens:
        return np.zeros((len(rows), len(mix.share)))
    room = np.full(rows.shape, instance.max_batched_tokens)
    room = room if instance.prompts_apart else np.maximum(room - rows, 1.0)
    room = room if fluid else np.minimum(room, instance.chunk)
    room, new = room[:, None], mix.new_len[None, :]
    full_chunks = np.ceil(new / room) - 1
    sides, context = (rows[:, None] + 0 * new, cached[:, None] + 0 * new), mix.context[None, :] + 0 * room
    last_s = instance.prompt_s(*sides, new - full_chunks * room, context, 1.0 + 0 * new)
    chunk_s = instance.prompt_s(*sides, room + 0 * new, context, 0 * new) if np.any(full_chunks) else last_s
    of_host = instance.host.request_s + instance.host.token_s * mix.prompt_len
    of_host = of_host + instance.fetch_s_per_token * mix.fetched_len
    return np.asarray((full_chunks * chunk_s + last_s) * np.reshape(longer, (-1, 1)) + of_host)


@dataclass(frozen=True)
class Largest:
    """The largest rate of an instance within limits, its point, and what keeps it from more."""

    requests_per_s: float
    point: OperatingPoints | None
    binds: str


def largest_rate(
    instance: InstanceModel,
    mix: Mix,
    limits: Sequence[LatencyLimit],
    *,
    fluid: bool = False,
    replicas: int = 1,
    prefill: bool = False,
    transfer_s_per_token: float = 0.0,
) -> Largest:
    """Return the largest rate of an instance within (S6) and the limits, by bisection on the curve.

    Args:
        prefill: the instance only prefills.
    """
    end = (1.0 if fluid else 1 - 1e-3) if prefill else largest_per_step(instance, mix)
    if not end > 0 or not np.isfinite(end):
        return Largest(0.0, None, "cache")

    prompts_only = Prefill.of(instance, mix, fluid=fluid) if prefill else None

    def points(positions: FloatArray) -> OperatingPoints:
        if prompts_only is not None:
            return prompts_only.points(positions, transfer_s_per_token=transfer_s_per_token, replicas=replicas)
        return operating_points(instance, mix, positions, fluid=fluid, replicas=replicas)

    low, high, best, binds = _START * end, end, Largest(0.0, None, ""), ""
    for spacing in (np.geomspace, np.linspace, np.linspace):
        positions = spacing(low, high, POINTS)
        curve = points(positions)
        broken, names = _broken(instance, curve, limits, prefill=prefill)
        met = np.flatnonzero(~broken)
        if not len(met):
            return best if best.point is not None else Largest(0.0, None, names[0])
        rates = np.where(broken, -np.inf, curve.requests_per_s)
        idx = int(rates.argmax())
        if rates[idx] > best.requests_per_s:
            best = Largest(float(rates[idx]), curve.point_of(idx), "")
        last = int(met[-1])
        if last == len(positions) - 1:
            binds = "prompts" if prefill else _binding_resource(instance, mix)
            break
        low, high, binds = positions[last], positions[last + 1], names[last + 1]
    if fluid and not prefill:
        best = replace(best, requests_per_s=max(best.requests_per_s, _waves_per_s(instance, mix, limits)))
    return replace(best, binds=binds)


def _waves_per_s(instance: InstanceModel, mix: Mix, limits: Sequence[LatencyLimit]) -> float:
    """Return the largest rate of requests that come in waves: as many prompts as one step takes, then steps that only decode.

    No prompt comes between two tokens then, which the mean step of (S3) has. It matters where answers have a few tokens.
    """
    if not (mix.new_tokens and mix.decode_steps):
        return 0.0
    largest = max(min(instance.max_batched_tokens // mix.new_tokens, instance.max_batch), 1.0)
    count = np.arange(1.0, largest + 1)
    none = np.zeros(len(count))
    decode_s = instance.pass_s(count, count * mix.cached_steps / mix.decode_steps)
    prompts_s = instance.prompt_s(none, none, count * mix.new_tokens, mix.mean_context, count)
    seconds = {"ttft": prompts_s, "tpot": decode_s, "e2e": prompts_s + mix.decode_steps * decode_s}
    fits = np.all([seconds[limit.metric] <= limit.seconds for limit in limits] or [none == 0], axis=0)
    return float(np.where(fits, count / seconds["e2e"], 0.0).max()) * instance.lanes


def _binding_resource(instance: InstanceModel, mix: Mix) -> str:
    """Return which of (S6) ends the curve."""
    end = largest_per_step(instance, mix)
    cache_need = mix.occupied_steps(reserves_output=instance.reserves_output)
    if cache_need and end * cache_need >= 0.999 * instance.cache_tokens:
        return "cache"
    if mix.decode_steps and end * mix.decode_steps >= 0.999 * instance.max_batch:
        return "max_batch"
    return "max_batched_tokens"


def _broken(
    instance: InstanceModel, curve: OperatingPoints, limits: Sequence[LatencyLimit], *, prefill: bool
) -> tuple[Any, list[str]]:
    """Return which points break a limit, and the first limit that each of them breaks."""
    broken = np.zeros(curve.per_step.shape, dtype=bool)
    names = [""] * len(broken)
    tests: list[tuple[str, Any]] = [(limit.metric, curve.breaks(limit)) for limit in limits]
    if not prefill and not curve.fluid and curve.mix.new_tokens:
        tests.append(("prompts", curve.load >= 1 - 1e-3))
    if fetch_s := instance.fetch_s_per_token * float(curve.mix.share @ curve.mix.fetched_len):
        tests.append(("host_link", curve.requests_per_s / instance.lanes * fetch_s >= 1))
    for name, beyond in tests:
        for idx in np.flatnonzero(beyond & ~broken).tolist():
            names[idx] = name
        broken |= beyond
    return broken, names
