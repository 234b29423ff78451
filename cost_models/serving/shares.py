"""Two phases at once on an engine instance: prompts on a share of the multiprocessors, rows that decode on the rest.

Each phase has steps of its own, on its part of every device (device_part.py), over the same weights and cache: t_p for prompts,
t_d for rows that decode, with what the host of each adds. Of what both draw on, of the memory's bandwidth and of the links, a
phase by itself has the part u = M / t of the time, M the seconds of its traffic at the entire rate. While both run

    slow-down of both    sigma = max(1, sum u(memory), sum u(links))                    (D1)

so that together they draw what there is and no more. A lane that begins and ends x requests in a step of decoding, whose N rows
follow from x as ever (steady_state.py), has the prompts of x requests beside each:

    seconds between two steps    T = max(t_d(N, S) + x c (sigma - 1), x c sigma)        c: of a prompt by itself        (D2)
    at least                     max(t_d, x c, M_d + x M_p, of links alike)                                             (D3)
    between two tokens           at least t_d

(D3) is the bound's: the phases, the memory and the links each take their time, however they meet. The least seconds of a prompt
are those of the best number of tokens a step.

Sources: arXiv:2504.19867 (semi-PD), arXiv:2507.06608 (Nexus: contention for bandwidth between phases on one device).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...schema.units import FloatArray
from .device_part import LAUNCHES, MEMORY, DevicePart
from .instance_model import InstanceModel, Sharing
from .mix import Mix
from .step import StepCosts

EIGHTHS = 8
SHARES = tuple(range(1, EIGHTHS))
"""Eighths of the multiprocessors that prompts may have: those of a device come in groups of eight (Hopper's, 16 or 18 of them)."""

PROMPT_SIZES = 24
"""Tokens of a step with prompts that are tried, from one prompt or its smallest part to the engine's limit."""


@dataclass(frozen=True, eq=False)
class Traffic:
    """Seconds in which a step's bytes cross the memory at its entire rate, or the links: what another phase waits for."""

    whose: StepCosts
    launches: StepCosts | None

    def parts(self, *sizes: Any, prompts: Any = 0) -> Mapping[str, FloatArray]:
        """Return the seconds by part; without ``launches`` those of the links alone."""
        parts = self.whose.parts(*sizes, prompts=prompts)
        if self.launches is None:
            return {name: seconds if name == "communication" else 0 * seconds for name, seconds in parts.items()}
        none = self.launches.parts(*sizes, prompts=prompts)
        return {
            name: 0 * seconds if name == "communication" else seconds - none[name] for name, seconds in parts.items()
        }

    def seconds(self, *sizes: Any, prompts: Any = 0) -> FloatArray:
        """Return the seconds of all parts."""
        return np.asarray(sum(self.parts(*sizes, prompts=prompts).values()))


@dataclass(frozen=True, eq=False)
class SharedSteps:
    """Steps of an engine instance both of whose phases run at once.

    Attributes:
        prefill_eighths: of the multiprocessors, that prompts have.
        prefill, decode: steps of each phase on its part.
        memory, links: what they draw on together; None: no rank sends anything.
    """

    prefill_eighths: int
    prefill: StepCosts
    decode: StepCosts
    memory: Traffic
    links: Traffic | None

    @classmethod
    def build(cls, step: StepCosts, prefill_eighths: int, *, known: dict[Any, Any] | None = None) -> SharedSteps:
        """Return the steps of phases that share what ``step`` has to itself; ``known`` as of `StepCosts.build`."""
        instance, known = step.instance, {} if known is None else known

        def on(part: DevicePart) -> StepCosts:
            if (key := ("part", instance.layout, part)) not in known:
                known[key] = StepCosts.build(
                    instance.model, instance.cluster, instance.layout, weights=instance.weights, cache=instance.cache,
                    experts=instance.experts, coefficients=instance.coefficients, adapters=instance.adapters, known=known,
                    kernels=instance.kernels, part=part,
                )  # fmt: skip
            steps: StepCosts = known[key]
            return steps

        shares = prefill_eighths / EIGHTHS, 1 - prefill_eighths / EIGHTHS
        prefill, decode = (on(DevicePart.of_share(share, instance.coefficients)) for share in shares)
        links = Traffic(step, None) if instance.layout.stage_devices > 1 else None
        return cls(prefill_eighths, prefill, decode, Traffic(on(MEMORY), on(LAUNCHES)), links)

    @property
    def sharing(self) -> Sharing:
        """Return what the steady state sees beside steps that decode."""
        return Sharing(prefill=self.prefill, shared=(self.memory,) if self.links is None else (self.memory, self.links))


@dataclass(frozen=True)
class PromptSeconds:
    """Seconds of a mean prompt by itself, in steps of the best size: of its phase (c), and of each thing that phases share [R]."""

    phase_s: float
    shared_s: FloatArray

    @classmethod
    def of(cls, instance: InstanceModel, mix: Mix, *, lowest: bool) -> PromptSeconds:
        """Return them of steps of one size, or each at its own best (``lowest``)."""
        assert instance.sharing is not None
        if not mix.new_tokens:
            return cls(0.0, np.zeros(len(instance.sharing.shared)))
        room = instance.max_batched_tokens
        tokens = np.geomspace(min(mix.new_tokens, instance.chunk, room), room, PROMPT_SIZES)
        prompts = tokens / mix.new_tokens
        phase_s = instance.prompt_s(0.0, 0.0, tokens, mix.mean_context, prompts) / prompts
        shared_s = np.stack([
            traffic.seconds(0 * tokens, 0 * tokens, tokens, mix.mean_context, prompts=prompts) / prompts
            for traffic in instance.sharing.shared
        ])  # fmt: skip
        idx = int(phase_s.argmin())
        return cls(float(phase_s[idx]), shared_s.min(axis=1) if lowest else shared_s[:, idx])


def decode_drawn_s(instance: InstanceModel, rows: FloatArray, cached: FloatArray) -> FloatArray:
    """Return the seconds [R, X] of steps that decode on each thing that phases share."""
    assert instance.sharing is not None
    return np.stack([np.broadcast_to(each.seconds(rows, cached), rows.shape) for each in instance.sharing.shared])


def slow_down(instance: InstanceModel, mix: Mix, rows: FloatArray, cached: FloatArray) -> FloatArray:
    """Return how many times longer both phases take while both run (D1), [X]."""
    prompt = PromptSeconds.of(instance, mix, lowest=False)
    if not prompt.phase_s:
        return np.ones(rows.shape)
    decode = decode_drawn_s(instance, rows, cached) / instance.pass_s(rows, cached)
    return np.maximum((decode + (prompt.shared_s / prompt.phase_s)[:, None]).max(axis=0), 1.0)


def mean_cycle_s(instance: InstanceModel, mix: Mix, x: FloatArray, rows: FloatArray, more: Any = 1.0) -> FloatArray:
    """Return the seconds between two steps of a lane whose rows are ``rows`` (D2); more: prompts than x beside each."""
    cached = rows * mix.cached_steps / mix.decode_steps
    prompts_s = more * x * PromptSeconds.of(instance, mix, lowest=False).phase_s
    longer = slow_down(instance, mix, rows, cached)
    return np.maximum(instance.pass_s(rows, cached) + prompts_s * (longer - 1), prompts_s * longer)


def min_cycle_s(instance: InstanceModel, mix: Mix, x: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the least seconds between two steps of a lane (D3), and between two tokens of a request."""
    rows = np.maximum(x * mix.decode_steps, 1.0)
    cached = rows * mix.cached_steps / mix.decode_steps
    prompt, decode_s = PromptSeconds.of(instance, mix, lowest=True), instance.pass_s(rows, cached)
    shared_s = decode_drawn_s(instance, rows, cached) + x * prompt.shared_s[:, None]
    return np.maximum(np.maximum(decode_s, x * prompt.phase_s), shared_s.max(axis=0)), decode_s
