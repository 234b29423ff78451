"""Seconds of a step in two nano-batches: one half of the rows sends to experts while the other computes (docs/serving.md).

    t = min(C(b) + W(b),  C2 + W2 - e min(C2, W2))        X2 = 2 X(b / 2): halves read the same weights twice

C: products and experts; W: rows to experts and back; e: of what could be hidden, what is (`exchange` of coefficients.toml). Both
halves are as the step is: rows that decode and tokens of prompts. A step is split from the rows on at which that is quicker;
attention of two halves takes as long as of one batch, or a little longer, and hides nothing. The head is computed once.

Source: arXiv:2408.12757 (NanoFlow: nano-batches that overlap compute, memory and network), of which engines have the network's
part for experts: vLLM's dual batch overlap, SGLang's two-batch overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...schema.serving import ServingLayout
from ...schema.units import FloatArray
from .step import StepCosts
from .tables import ROWS

HALVED = ("products", "experts", "communication", "decode_attention", "prefill_attention")


@dataclass(frozen=True, eq=False)
class NanoBatchedCosts(StepCosts):
    """Steps that are two nano-batches from ``split_rows`` rows of an attention rank on."""

    split_rows: float = np.inf

    def parts(
        self,
        decode_rows: Any,
        cached_tokens: Any,
        prefill_tokens: Any = 0,
        prefill_context: Any = 0,
        *,
        prompts: Any = 0,
    ) -> dict[str, FloatArray]:
        """Return the seconds of one pass by part, of communication what is not hidden."""
        sizes = decode_rows, cached_tokens, prefill_tokens, prefill_context
        batch = super().parts(*sizes, prompts=prompts)
        rows = self.queries * np.asarray(decode_rows, dtype=np.float64) + prefill_tokens
        if not np.any(rows >= self.split_rows):
            return batch
        decoding, cached, tokens = (np.asarray(size) / 2 for size in sizes[:3])
        half = super().parts(decoding, cached, tokens, prefill_context, prompts=prompts)
        halves = {name: 2 * half[name] for name in HALVED}
        halves["communication"] = halves["communication"] - self._hidden_s(halves)
        return {
            name: np.where(rows >= self.split_rows, halves.get(name, seconds), seconds)
            for name, seconds in batch.items()
        }

    def _hidden_s(self, halves: dict[str, FloatArray]) -> FloatArray:
        """Return what of the exchange passes beside products and experts of the other half."""
        share = float(self.instance.coefficients["overlap"]["exchange"])
        return share * np.minimum(halves["communication"], halves["products"] + halves["experts"])


def with_nano_batches(step: StepCosts) -> StepCosts:
    """Return the costs of steps that are split where that is quicker; the same where it never is."""
    fields = {name: getattr(step, name) for name in StepCosts.__dataclass_fields__}
    batch, halves = step.parts(ROWS, 0 * ROWS), NanoBatchedCosts(**fields, split_rows=0.0).parts(ROWS, 0 * ROWS)
    gain = sum(batch[name] - halves[name] for name in HALVED[:3])
    slower = np.flatnonzero((gain <= 0) | (ROWS < 2))
    first = int(slower[-1]) + 1
    return NanoBatchedCosts(**fields, split_rows=float(ROWS[first])) if first < len(ROWS) else step


def split_rows_of(step: StepCosts) -> int | None:
    """Return the rows of an attention rank from which steps are split; None where none is."""
    return round(step.split_rows) if isinstance(step, NanoBatchedCosts) else None


def can_split(layout: ServingLayout) -> bool:
    """Return whether engines split the steps of a layout: attention ranks that send rows to experts, and nothing else."""
    return layout.attention_dp > 1 and layout.tp == 1 and layout.ep > 1
