"""What all layers of one evaluation have in common."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..schema import ClusterSpec, Workload
from .layouts import FloatArray, IntArray, LayoutBatch


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The layouts [N] that are evaluated at once, and the model's width, workload and cluster they share."""

    hidden_dim: int
    batch: LayoutBatch
    workload: Workload
    cluster: ClusterSpec

    def select(self, rows: IntArray) -> Setting:
        """The same for some of the layouts."""
        return replace(self, batch=self.batch.select(rows))

    @property
    def tokens(self) -> IntArray:
        """Tokens of one micro-batch on one rank, before tensor parallelism cuts them [N]."""
        return self.batch.tokens(self.workload.seq_len)

    @property
    def hidden_bytes(self) -> FloatArray:
        """Hidden states of those tokens in the compute dtype [N]."""
        return np.asarray(self.tokens * self.hidden_dim * self.workload.compute_bytes, dtype=np.float64)
