"""Speculative decoding: a draft of k tokens, checked in one step of the model; how many tokens a step then gives."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .base import Count, Frozen, reason_of
from .errors import ConfigError

SpeculationMethod = Literal["mtp", "eagle3", "draft"]
MAX_DRAFTED = 16
_EXAMPLE = "--speculate mtp:3,accept=0.8, mtp,lengths=1.8/2.3/2.6, eagle3:3,accept=0.7 or draft:4,model=llama-3.2-1b,accept=0.7"


class Speculation(Frozen):
    """How tokens are drafted, and how many of a draft are accepted.

    Attributes:
        method: mtp: the model's own multi-token-prediction head, once for each token; eagle3: a trained head of one block; draft: a
            smaller model of the same vocabulary.
        draft_tokens: in a draft (k); None: as many as are best.
        accept: chance that a drafted token is accepted when all before it were; a step then gives (1 - a^(k+1)) / (1 - a) tokens.
        lengths: in its place, tokens that a step was measured to give with drafts of 1, 2, ... tokens, the model's own among them.
        model: that drafts: of draft by the name of the catalogue, of eagle3 what an engine loads.
    """

    method: SpeculationMethod
    draft_tokens: Annotated[int, Field(ge=1, le=MAX_DRAFTED)] | None = None
    accept: Annotated[float, Field(gt=0, lt=1)] | None = None
    lengths: tuple[Annotated[float, Field(ge=1)], ...] = ()
    model: str | None = None

    @model_validator(mode="after")
    def _says_how_many(self) -> Self:
        if (self.accept is None) == (not self.lengths):
            raise ValueError("either accept (a chance) or lengths (tokens a step, measured)")
        if any(length > idx + 2 for idx, length in enumerate(self.lengths)):
            raise ValueError(f"lengths {self.lengths}: a draft of k tokens gives at most k + 1")
        if self.lengths and (self.draft_tokens or 1) > len(self.lengths):
            raise ValueError(f"drafts of {self.draft_tokens} tokens, of which lengths tells up to {len(self.lengths)}")
        if (self.method == "draft" and self.model is None) or (self.method == "mtp" and self.model is not None):
            raise ValueError(
                "model names what drafts: with draft it must, with eagle3 it may, with mtp the model itself does"
            )
        return self

    def tokens_per_step(self, drafted: Count) -> float:
        """Return the mean tokens that a step gives a row, with drafts of so many (Leviathan et al., arXiv:2211.17192, eq. 1)."""
        if self.lengths:
            return self.lengths[drafted - 1]
        a = self.accept or 0.0
        return (1 - a ** (drafted + 1)) / (1 - a)


def parse_speculation(text: str) -> Speculation:
    """Read ``mtp:3,accept=0.8``.

    Raises:
        ConfigError: no such method, or no number.
    """
    first, *others = (part.strip() for part in text.split(","))
    match = re.fullmatch(r"(mtp|eagle3|draft)(?::([0-9]{1,2}))?", first)
    fields = dict(part.partition("=")[::2] for part in others)
    if match is None or not {*fields} <= {"accept", "lengths", "model"} or len(fields) != len(others):
        raise ConfigError(
            f"--speculate {text!r}: a method, the tokens of a draft, and how many are accepted", help=_EXAMPLE
        )
    try:
        return Speculation(
            method=match[1],  # type: ignore[arg-type]
            draft_tokens=int(match[2]) if match[2] else None,
            accept=float(fields["accept"]) if "accept" in fields else None,
            lengths=tuple(float(value) for value in fields.get("lengths", "").split("/") if value),
            model=fields.get("model"),
        )
    except (ValueError, ConfigError) as error:
        reason = reason_of(error, Speculation)
        raise ConfigError(f"--speculate {text!r}: {reason}", help=_EXAMPLE) from error
