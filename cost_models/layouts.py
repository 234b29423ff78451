"""LayoutBatch: many layouts as arrays, so that every cost is computed for all of them in one pass."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ..schema import Layout
from ..schema.layout import Recompute, Schedule

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b")


@dataclass(frozen=True, kw_only=True)
class LayoutBatch:
    """One entry per layout in every array [N]; ``recompute`` and ``schedule`` index RECOMPUTES and SCHEDULES."""

    dp_replicate: IntArray
    dp_shard: IntArray
    tp: IntArray
    cp: IntArray
    pp: IntArray
    ep: IntArray
    etp: IntArray
    num_model_chunks: IntArray
    micro_batch_size: IntArray
    num_microbatches: IntArray
    zero_stage: IntArray
    sequence_parallel: IntArray
    recompute: IntArray
    schedule: IntArray

    def __len__(self) -> int:
        return len(self.tp)

    def tokens(self, seq_len: int) -> IntArray:
        """Tokens of one micro-batch on a tensor-parallel group: sequences are cut over cp, rounded up where they do not divide."""
        return np.asarray(-(-self.micro_batch_size * seq_len // self.cp))

    @cached_property
    def num_shards(self) -> IntArray:
        """Ranks over which the sharded states of what is no expert are spread: the context ranks share in it."""
        return np.asarray(np.where(self.zero_stage > 0, self.dp_shard * self.cp, self.dp_shard))

    @cached_property
    def num_replicas(self) -> IntArray:
        """Groups of ``num_shards`` ranks that hold the same shards."""
        return np.asarray(np.where(self.zero_stage > 0, self.dp_replicate, self.dp_replicate * self.cp))

    @cached_property
    def stage_ranks(self) -> IntArray:
        """Ranks of one pipeline stage: tp counts fastest, then cp, dp_shard, dp_replicate."""
        return np.asarray(self.tp * self.cp * self.dp_shard * self.dp_replicate)

    @cached_property
    def experts_follow_tp(self) -> NDArray[np.bool_]:
        """Whether experts are split over tp like every feed-forward part (ep = 1 and etp unset or tp)."""
        return np.asarray((self.ep == 1) & ((self.etp == 1) | (self.etp == self.tp)))

    @cached_property
    def expert_tp(self) -> IntArray:
        """Ranks that share one expert: they count fastest, then ep, then the copies of the experts."""
        return np.asarray(np.where(self.experts_follow_tp, self.tp, self.etp))

    @cached_property
    def expert_shards(self) -> IntArray:
        """Ranks over which the sharded states of an expert are spread: those of a replica that hold the same experts."""
        copies = self.stage_ranks // (self.ep * self.expert_tp)
        wanted = np.maximum(self.num_shards * self.tp // (self.ep * self.expert_tp), 1)
        return np.asarray(np.where(self.zero_stage > 0, np.gcd(wanted, np.maximum(copies, 1)), self.dp_shard))

    @cached_property
    def expert_replicas(self) -> IntArray:
        """Groups of ``expert_shards`` ranks that hold the same shards of the same experts."""
        return np.asarray(np.maximum(self.stage_ranks // (self.ep * self.expert_tp * self.expert_shards), 1))

    @classmethod
    def of(cls, layouts: list[Layout], global_batch_size: int) -> Self:
        """From Layout objects."""
        columns = {
            **{
                name: [getattr(layout, name) for layout in layouts]
                for name in (
                    "dp_replicate",
                    "dp_shard",
                    "tp",
                    "cp",
                    "pp",
                    "ep",
                    "etp",
                    "num_model_chunks",
                    "micro_batch_size",
                    "zero_stage",
                )
            },
            "num_microbatches": [layout.num_microbatches(global_batch_size) for layout in layouts],
            "sequence_parallel": [int(layout.sequence_parallel) for layout in layouts],
            "recompute": [RECOMPUTES.index(layout.recompute) for layout in layouts],
            "schedule": [SCHEDULES.index(layout.schedule) for layout in layouts],
        }
        return cls(**{name: np.array(column, dtype=np.int64) for name, column in columns.items()})

    def layout(self, idx: int) -> Layout:
        """One entry as a Layout."""
        return Layout(
            dp_replicate=int(self.dp_replicate[idx]),
            dp_shard=int(self.dp_shard[idx]),
            tp=int(self.tp[idx]),
            cp=int(self.cp[idx]),
            pp=int(self.pp[idx]),
            ep=int(self.ep[idx]),
            etp=int(self.etp[idx]),
            num_model_chunks=int(self.num_model_chunks[idx]),
            micro_batch_size=int(self.micro_batch_size[idx]),
            schedule=SCHEDULES[self.schedule[idx]],
            zero_stage=int(self.zero_stage[idx]),  # type: ignore[arg-type]
            sequence_parallel=bool(self.sequence_parallel[idx]),
            recompute=RECOMPUTES[self.recompute[idx]],
        )

    def degrees(self, idx: int) -> tuple[int, int, int, int]:
        """(dp_replicate, dp_shard, tp, pp) of one entry."""
        return int(self.dp_replicate[idx]), int(self.dp_shard[idx]), int(self.tp[idx]), int(self.pp[idx])

    def select(self, keep: IntArray | NDArray[np.bool_]) -> Self:
        """The entries of a mask or of indices."""
        return type(self)(**{field.name: getattr(self, field.name)[keep] for field in fields(self)})
