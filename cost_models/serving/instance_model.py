"""An engine instance as the steady state sees it: seconds of a step with what the host adds, and the limits of one lane.

A lane is an attention rank; of pipeline stages each has a pp-th of the requests, whose steps are in flight together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ...schema.units import FloatArray


class Steps(Protocol):
    """What steps cost: `StepCosts`."""

    def seconds(
        self,
        decode_rows: Any,
        cached_tokens: Any,
        prefill_tokens: Any = 0,
        prefill_context: Any = 0,
        *,
        prompts: Any = 0,
    ) -> FloatArray:
        """Return the seconds of a pass."""
        ...


@dataclass(frozen=True, kw_only=True)
class Host:
    """What the engine's host adds to a step (`EngineProfile.overhead`), and to a request before its first step.

    Attributes:
        overlapped: beside the device's work; step_s, row_s: of a step and of a row of it; device_s: between two steps of it.
        draft_row_s: of a row whose draft is checked.
        eager_s: least time of a step that no captured graph holds; graph_rows: rows of the largest graph.
        request_s, token_s: of a request and a token of its prompt.
    """

    overlapped: bool = True
    step_s: float = 0.0
    row_s: float = 0.0
    device_s: float = 0.0
    eager_s: float = 0.0
    graph_rows: float = 0.0
    draft_row_s: float = 0.0
    request_s: float = 0.0
    token_s: float = 0.0

    def with_step(self, seconds: FloatArray, rows: Any, tokens: Any, prompts: Any) -> FloatArray:
        """Return the seconds of steps with what the host adds."""
        host = self.step_s + self.row_s * (np.asarray(rows) + prompts)
        seconds = np.maximum(seconds, np.where(np.asarray(rows) + tokens > self.graph_rows, self.eager_s, 0.0))
        seconds = seconds + self.device_s
        seconds = np.maximum(seconds, host) if self.overlapped else seconds + host
        return seconds + self.draft_row_s * np.asarray(rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class Sharing:
    """Prompts that run at once with rows that decode, in steps of their own on a part of the same devices (shares.py).

    Attributes:
        prefill: what those steps cost; shared: seconds of steps of both phases on what they draw on together.
    """

    prefill: Steps
    shared: tuple[Steps, ...]


@dataclass(frozen=True, kw_only=True)
class InstanceModel:
    """An engine instance as the steady state sees it; limits and cache are of one lane.

    Attributes:
        steps: what they cost; host: what it adds.
        lanes: attention ranks times pipeline stages.
        max_batch, max_batched_tokens: limits of a step; chunk: of a prompt's tokens in it; cache_tokens: that fit.
        prefill_first: prompts have steps of their own, before others decode; else they join the steps of those.
        reserves_output: a request has the cache of its last token from its first one.
        tokens_per_step: of a row, where drafts are checked (speculation.py): seconds below are those between two tokens.
        fetch_s_per_token: of a prefix that is copied from the host, for which the requests of a lane wait in turn.
        sharing: prompts have steps of their own at the same time; else they share those of ``steps``.
        others: instances of which the quickest is taken for each step, in a bound on all of them.
    """

    steps: Steps
    host: Host = Host()
    lanes: int = 1
    max_batch: float = 1024
    max_batched_tokens: float = 8192
    chunk: float = np.inf
    cache_tokens: float = np.inf
    prefill_first: bool = False
    reserves_output: bool = False
    tokens_per_step: float = 1.0
    fetch_s_per_token: float = 0.0
    sharing: Sharing | None = None
    others: tuple[InstanceModel, ...] = ()

    @property
    def prompts_apart(self) -> bool:
        """Return whether rows that decode take nothing of a step's tokens from prompts."""
        return self.prefill_first or self.sharing is not None

    def pass_s(self, rows: Any, cached: Any, tokens: Any = 0.0, context: Any = 0.0, prompts: Any = 0.0) -> FloatArray:
        """Return the seconds between two steps of the same lane, if all steps are alike."""
        if self.others:
            return np.minimum.reduce([other.pass_s(rows, cached, tokens, context, prompts) for other in self.others])
        seconds = self.steps.seconds(rows, cached, tokens, context, prompts=prompts)
        seconds = self.host.with_step(seconds, rows, tokens, prompts)
        if self.tokens_per_step == 1:
            return seconds
        if not np.any(tokens):
            return np.asarray(seconds / self.tokens_per_step)
        # Of the step with prompts a token is due what they add, and its part of the rest.
        unmixed_s = self.host.with_step(self.steps.seconds(rows, cached), rows, 0.0, 0.0)
        return np.where(np.asarray(rows) > 0, seconds - (1 - 1 / self.tokens_per_step) * unmixed_s, seconds)

    def prompt_s(self, rows: Any, cached: Any, tokens: Any, context: Any, prompts: Any) -> FloatArray:
        """Return the seconds of a step with tokens of prompts, beside rows that decode where they may."""
        if self.sharing is not None:
            none = 0.0 * np.asarray(tokens)
            seconds = self.sharing.prefill.seconds(none, none, tokens, context, prompts=prompts)
            return self.host.with_step(seconds, none, tokens, prompts)
        if self.prefill_first:
            return self.pass_s(0.0 * np.asarray(rows), 0.0, tokens, context, prompts)
        return self.pass_s(rows, cached, tokens, context, prompts)

    def step_s(self, rows: Any, cached: Any, tokens: Any, context: float, prompts: Any, part: Any) -> FloatArray:
        """Return the mean seconds between two tokens of a request; ``part`` of the steps have prompts (S4)."""
        plain = self.pass_s(rows, cached)
        share = np.maximum(part, 1e-12)
        mixed = self.prompt_s(rows, cached, tokens / share, context, prompts / share)
        return np.asarray(plain + part * mixed if self.prefill_first else (1 - part) * plain + part * mixed)
