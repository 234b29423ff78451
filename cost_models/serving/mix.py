"""What requests of a load need, by class and on average: tokens that are computed, attended to, and held in a cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ...schema.serving import PrefixTier, Requests
from ...schema.units import FloatArray


@dataclass(frozen=True)
class Mix:
    """Classes of a load as arrays [W], and their moments.

    Attributes:
        prefix_len: tokens of a prompt that are not computed; shared_len: whose cache is there already, for all who share it;
            fetched_len: whose cache is copied from the host.
    """

    share: FloatArray
    prompt_len: FloatArray
    output_len: FloatArray
    prefix_len: FloatArray
    shared_len: FloatArray
    fetched_len: FloatArray
    arrival_cv: float = 1.0

    @classmethod
    def of(cls, requests: Requests, *, only: int | None = None, prefixes: PrefixTier = "device") -> Mix:
        """Return the mix of a load, or of one of its classes alone, with its prefixes at a place."""
        classes = requests.classes if only is None else requests.classes[only : only + 1]
        columns = np.array([(c.share, c.prompt_len, c.output_len, c.prefix_len) for c in classes], dtype=np.float64).T
        share, prompt, output, prefix = columns
        # Under a fixed number in flight a request follows an end: arrivals are as even as ends are.
        cv = requests.arrival_cv if requests.concurrency is None else 0.0
        known = prefix * (prefixes != "none")
        shared, fetched = prefix * (prefixes == "device"), prefix * (prefixes in ("host", "storage"))
        return cls(share / share.sum(), prompt, output, known, shared, fetched, cv)

    @cached_property
    def new_len(self) -> FloatArray:
        """Tokens of a prompt that are computed."""
        return self.prompt_len - self.prefix_len

    @cached_property
    def new_tokens(self) -> float:
        """Mean of those."""
        return float(self.share @ self.new_len)

    @cached_property
    def decode_steps(self) -> float:
        """Steps in which a mean request decodes."""
        return float(self.share @ (self.output_len - 1))

    @cached_property
    def cached_steps(self) -> float:
        """Tokens that a mean request attends to, summed over its steps of decoding."""
        return float(self.share @ ((self.output_len - 1) * (self.prompt_len + self.output_len / 2)))

    def occupied_steps(self, *, reserves_output: bool) -> float:
        """Return the tokens whose cache it holds by itself, summed alike; that of the last one from the first one on, or not."""
        made = self.output_len if reserves_output else self.output_len / 2
        return float(self.share @ ((self.output_len - 1) * (self.prompt_len - self.shared_len + made)))

    @cached_property
    def context(self) -> FloatArray:
        """Tokens that one of a prompt attends to on average, by class."""
        return self.prefix_len + self.new_len / 2

    @cached_property
    def mean_context(self) -> float:
        """The same over all tokens of prompts."""
        return float(self.share @ (self.new_len * self.context)) / self.new_tokens if self.new_tokens else 0.0

    @cached_property
    def prompt_scv(self) -> float:
        """Squared coefficient of variation of computed prompts."""
        return max(float(self.share @ self.new_len**2) / self.new_tokens**2 - 1, 0.0) if self.new_tokens else 0.0

    @property
    def decoding(self) -> Mix:
        """Return what of the load an instance has that only decodes: nothing of a prompt is computed or fetched there."""
        return replace(self, prefix_len=self.prompt_len, fetched_len=0 * self.fetched_len)
