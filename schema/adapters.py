"""Low-rank adapters of a load: how many there are, of which rank, how unlike their popularity is."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat

from .base import Count, Frozen, reason_of
from .errors import ConfigError
from .units import FloatArray, parse_count

MAX_ADAPTERS = 100_000
MAX_RANK = 4096
MAX_SEQ_LEN = 1 << 20
_EXAMPLE = "--adapters n=200,rank=16[,zipf=1][,on=attention]"


class Adapters(Frozen):
    """Adapters that requests name, one each (LoRA, arXiv:2106.09685), all of them in the devices' memory.

    Attributes:
        count: of them; rank: of each.
        zipf: the k-th most popular is asked for in proportion to k^-zipf; 0: all alike.
        on: the products that they change: all of every block but routed experts, or those of attention.
    """

    count: Annotated[Count, Field(le=MAX_ADAPTERS)]
    rank: Annotated[Count, Field(le=MAX_RANK)]
    zipf: Annotated[NonNegativeFloat, Field(le=10)] = 1.0
    on: Literal["all", "attention"] = "all"

    @cached_property
    def popularity(self) -> FloatArray:
        """Chance [count] that a request names each of them."""
        weights = np.arange(1, self.count + 1, dtype=np.float64) ** -self.zipf
        return np.asarray(weights / weights.sum())

    def reached(self, requests: FloatArray) -> FloatArray:
        """Return how many different ones so many requests [...] name: sum over adapters of 1 - (1 - q)^requests."""
        flat = np.asarray(requests, dtype=np.float64).ravel()
        missed = np.log1p(-np.minimum(self.popularity, 1 - 1e-12))
        return np.array([-np.expm1(number * missed).sum() for number in flat]).reshape(np.shape(requests))


class FineTuning(Frozen):
    """An adapter that is fine-tuned in the steps that serve (FlexLLM, arXiv:2402.18789).

    Attributes:
        rank: of the adapter; on: the products that it changes; seq_len: tokens of a sequence.
    """

    rank: Annotated[Count, Field(le=MAX_RANK)]
    seq_len: Annotated[Count, Field(le=MAX_SEQ_LEN)] = 2048
    on: Literal["all", "attention"] = "all"


_TUNING_EXAMPLE = "--finetune rank=16[,seq_len=2048][,on=attention]"


def parse_fine_tuning(text: str) -> FineTuning:
    """Read ``rank=16,seq_len=2048,on=attention``.

    Raises:
        ConfigError: a key that is not known, or no number.
    """
    parts = [part.strip().partition("=") for part in text.split(",")]
    fields = {key: value for key, _, value in parts}
    if len(fields) != len(parts) or not {"rank"} <= {*fields} <= {"rank", "seq_len", "on"}:
        raise ConfigError(f"--finetune {text!r}: the rank of an adapter", help=_TUNING_EXAMPLE)
    try:
        given: dict[str, Any] = {key: parse_count(value) for key, value in fields.items() if key != "on"}
        return FineTuning(**given | ({"on": fields["on"]} if "on" in fields else {}))
    except (ValueError, ConfigError) as error:
        reason = reason_of(error, FineTuning)
        raise ConfigError(f"--finetune {text!r}: {reason}", help=_TUNING_EXAMPLE) from error


def parse_adapters(text: str) -> Adapters:
    """Read ``n=200,rank=16,zipf=1,on=attention``.

    Raises:
        ConfigError: a key that is not known, or no number.
    """
    parts = [part.strip().partition("=") for part in text.split(",")]
    fields = {key: value for key, _, value in parts}
    if len(fields) != len(parts) or not {"n", "rank"} <= {*fields} <= {"n", "rank", "zipf", "on"}:
        raise ConfigError(f"--adapters {text!r}: how many, and their rank", help=_EXAMPLE)
    try:
        given: dict[str, Any] = {"zipf": float(fields["zipf"])} if "zipf" in fields else {}
        given |= {"on": fields["on"]} if "on" in fields else {}
        return Adapters(count=parse_count(fields["n"]), rank=parse_count(fields["rank"]), **given)
    except (ValueError, ConfigError) as error:
        reason = reason_of(error, Adapters)
        raise ConfigError(f"--adapters {text!r}: {reason}", help=_EXAMPLE) from error
