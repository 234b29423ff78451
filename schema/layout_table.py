"""LayoutTable: many layouts as arrays, so that every cost is computed for all of them in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from . import ConfigError, Layout
from .arrays import FloatArray, IntArray
from .layout import INTEGER_FIELDS, LayoutRecompute, Offload, Recompute, Vocabulary
from .schedules import SCHEDULE_NAMES

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
MIXED = len(RECOMPUTES)
"""Of a layout whose blocks each recompute what is best for them: costed under every one of RECOMPUTES (option_costs.py)."""
LAYOUT_RECOMPUTES: tuple[LayoutRecompute, ...] = (*RECOMPUTES, "mixed")
VOCABULARIES: tuple[Vocabulary, ...] = ("ends", "split")
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "parameters")
_FRACTIONS = ("recompute_fraction", "offload_fraction", "offload_activations")


def not_searched(size: int) -> dict[str, Any]:
    """Columns of ``size`` layouts without what is predicted for other engines only: partial recompute and offloading."""
    zero = np.zeros(size, dtype=np.int64)
    one = np.ones(size)
    return {
        "recompute_fraction": one,
        "offload": zero,
        "offload_fraction": one,
        "offload_activations": np.zeros(size),
        "offload_to_storage": zero,
        "vocabulary": zero,
    }


class DistinctRows(NamedTuple):
    """One row for each combination of values that occurs, and for every row [N] which of them is like it."""

    rows: IntArray
    like: IntArray


def distinct_rows(columns: Sequence[NDArray[Any]]) -> DistinctRows:
    """The first row of each combination of values of ``columns`` [N]."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    largest = 0
    for column in columns:
        if len(column) == 0 or np.all(column == column[0]):
            continue
        is_count = column.dtype != np.float64
        codes = (
            np.asarray(column, dtype=np.int64) if is_count else np.unique(column, return_inverse=True)[1].reshape(-1)
        )
        size = int(codes.max()) + 1
        if (largest + 1) * size > np.iinfo(np.int64).max // 2:
            key = np.unique(key, return_inverse=True)[1].reshape(-1)
            largest = int(key.max())
        key, largest = key * size + codes, largest * size + size - 1
    _, rows, like = np.unique(key, return_index=True, return_inverse=True)
    return DistinctRows(rows, like.reshape(-1))


@dataclass(frozen=True, kw_only=True)
class LayoutTable:
    """One entry per layout in every array [N]; ``recompute``, ``schedule``, ``offload`` index LAYOUT_RECOMPUTES, SCHEDULES and
    OFFLOADS.
    """

    dp_replicate: IntArray
    dp_shard: IntArray
    tp: IntArray
    cp: IntArray
    cp_ulysses: IntArray
    pp: IntArray
    ep: IntArray
    etp: IntArray
    num_model_chunks: IntArray
    micro_batch_size: IntArray
    num_microbatches: IntArray
    zero_stage: IntArray
    gradient_shard: IntArray
    optimizer_shard: IntArray
    sequence_parallel: IntArray
    recompute: IntArray
    schedule: IntArray
    recompute_fraction: FloatArray
    offload: IntArray
    offload_fraction: FloatArray
    offload_activations: FloatArray
    offload_to_storage: IntArray
    vocabulary: IntArray

    @property
    def dp(self) -> IntArray:
        """Ranks that see different sequences."""
        return self.dp_replicate * self.dp_shard

    @cached_property
    def is_replicated(self) -> NDArray[np.bool_]:
        """Whether ranks hold whole replicas of one stage and nothing more (runtime/replicated.py)."""
        once = (self.pp == 1) & (self.tp == 1) & (self.ep == 1) & (self.expert_tp == 1) & (self.offload == 0)
        return np.asarray(once & (self.zero_stage == 0) & (self.cp == 1) & (self.dp > 1))

    def __len__(self) -> int:
        return len(self.tp)

    @cached_property
    def is_mixed(self) -> bool:
        """Whether layouts leave recompute to each block."""
        return bool(np.any(self.recompute == MIXED))

    def tokens(self, seq_len: int) -> IntArray:
        """Tokens of one micro-batch on a tensor-parallel group: sequences are cut over cp, rounded up where they do not divide."""
        return np.asarray(-(-self.micro_batch_size * seq_len // self.cp))

    @cached_property
    def num_shards(self) -> IntArray:
        """Ranks over which the sharded states of what is no expert are spread, parameters at least: context ranks share in it.

        Gradients and optimizer states may be sharded over more of them: `num_gradient_shards`, `num_optimizer_shards`.
        """
        return np.asarray(np.where(self.zero_stage > 0, self.dp_shard * self.cp, self.dp_shard))

    @cached_property
    def num_gradient_shards(self) -> IntArray:
        """Ranks over which sharded gradients are spread, a multiple of ``num_shards``."""
        return np.asarray(self.num_shards * np.maximum(self.gradient_shard // self.dp_shard, 1))

    @cached_property
    def num_optimizer_shards(self) -> IntArray:
        """Ranks over which sharded optimizer states are spread, a multiple of ``num_gradient_shards``."""
        wider = self.num_shards * np.maximum(self.optimizer_shard // self.dp_shard, 1)
        return np.asarray(np.maximum(wider, self.num_gradient_shards))

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
    def expert_gradient_shards(self) -> IntArray:
        """Ranks over which gradients of an expert are spread, a multiple of ``expert_shards``."""
        return self._wider_expert_shards(self.num_gradient_shards, self.expert_shards)

    @cached_property
    def expert_optimizer_shards(self) -> IntArray:
        """Ranks over which optimizer states of an expert are spread, a multiple of ``expert_gradient_shards``."""
        return self._wider_expert_shards(self.num_optimizer_shards, self.expert_gradient_shards)

    def _wider_expert_shards(self, num_shards: IntArray, inner: IntArray) -> IntArray:
        """As many ranks of those that hold the same experts as ``num_shards`` of all ranks have, in multiples of ``inner``."""
        expert_ranks = self.ep * self.expert_tp * inner
        copies = np.maximum(self.stage_ranks // expert_ranks, 1)
        wanted = np.maximum(num_shards * self.tp // expert_ranks, 1)
        return np.asarray(np.where(self.zero_stage > 0, inner * np.gcd(wanted, copies), inner))

    @cached_property
    def expert_replicas(self) -> IntArray:
        """Groups of ``expert_shards`` ranks that hold the same shards of the same experts."""
        return np.asarray(np.maximum(self.stage_ranks // (self.ep * self.expert_tp * self.expert_shards), 1))

    @cached_property
    def within_layer(self) -> DistinctRows:
        """Rows that differ in what the work of one layer on one micro-batch depends on."""
        names = ("ep", "etp", "recompute", "recompute_fraction")
        return distinct_rows([*self._inside_columns, *(getattr(self, name) for name in names)])

    @cached_property
    def within_dense_layer(self) -> DistinctRows:
        """The same for layers without experts."""
        names = ("recompute", "recompute_fraction")
        return distinct_rows([*self._inside_columns, *(getattr(self, name) for name in names)])

    @cached_property
    def operators(self) -> DistinctRows:
        """Rows that differ in the shapes of a layer's operators."""
        names = ("tp", "cp", "ep", "etp", "micro_batch_size", "sequence_parallel")
        return distinct_rows([getattr(self, name) for name in names])

    @property
    def _inside_columns(self) -> list[NDArray[Any]]:
        names = ("tp", "cp", "cp_ulysses", "micro_batch_size", "sequence_parallel")
        offload = ("offload", "offload_fraction", "offload_activations", "offload_to_storage")
        return [
            *(getattr(self, name) for name in names + offload),
            self.vocabulary,
            self.pp > 1,
            self.dp > 1,
            self.is_replicated,
        ]

    @cached_property
    def across_data(self) -> DistinctRows:
        """Rows that differ in what the data-parallel collectives of one layer depend on."""
        names = ("tp", "cp", "ep", "etp", "dp_shard", "dp_replicate", "zero_stage", "gradient_shard", "optimizer_shard")
        offload = ("offload", "offload_to_storage")
        return distinct_rows([*(getattr(self, name) for name in names + offload), self.vocabulary, self.pp > 1])

    @classmethod
    def of(cls, layouts: list[Layout], global_batch_size: int) -> Self:
        """From Layout objects.

        Raises:
            ConfigError: one has an offload schedule, whose costs are its own (planner/tasks/offload.py).
        """
        if any(layout.offload == "scheduled" for layout in layouts):
            raise ConfigError("what a layout with an offload schedule costs is known for the plan's own schedule only")
        columns: dict[str, list[Any]] = {
            **{name: [getattr(layout, name) for layout in layouts] for name in INTEGER_FIELDS},
            "num_microbatches": [layout.num_microbatches(global_batch_size) for layout in layouts],
            "sequence_parallel": [int(layout.sequence_parallel) for layout in layouts],
            "recompute": [LAYOUT_RECOMPUTES.index(layout.recompute) for layout in layouts],
            "schedule": [SCHEDULE_NAMES.index(layout.schedule) for layout in layouts],
            "offload": [OFFLOADS.index(layout.offload) for layout in layouts],
            "offload_to_storage": [int(layout.offload_to == "storage") for layout in layouts],
            "vocabulary": [VOCABULARIES.index(layout.vocabulary) for layout in layouts],
        }
        arrays: dict[str, Any] = {name: np.array(column, dtype=np.int64) for name, column in columns.items()}
        fractions: dict[str, Any] = {
            name: np.array([getattr(layout, name) for layout in layouts], dtype=np.float64) for name in _FRACTIONS
        }
        return cls(**arrays, **fractions)

    def layout(self, idx: int) -> Layout:
        """One entry as a Layout."""
        return Layout(
            dp_replicate=int(self.dp_replicate[idx]),
            dp_shard=int(self.dp_shard[idx]),
            tp=int(self.tp[idx]),
            cp=int(self.cp[idx]),
            cp_ulysses=int(self.cp_ulysses[idx]),
            pp=int(self.pp[idx]),
            ep=int(self.ep[idx]),
            etp=int(self.etp[idx]),
            num_model_chunks=int(self.num_model_chunks[idx]),
            micro_batch_size=int(self.micro_batch_size[idx]),
            schedule=SCHEDULE_NAMES[self.schedule[idx]],
            zero_stage=int(self.zero_stage[idx]),  # type: ignore[arg-type]
            gradient_shard=int(self.gradient_shard[idx]),
            optimizer_shard=int(self.optimizer_shard[idx]),
            sequence_parallel=bool(self.sequence_parallel[idx]),
            recompute=LAYOUT_RECOMPUTES[self.recompute[idx]],
            recompute_fraction=float(self.recompute_fraction[idx]),
            offload=OFFLOADS[self.offload[idx]],
            offload_fraction=float(self.offload_fraction[idx]),
            offload_activations=float(self.offload_activations[idx]),
            offload_to="storage" if self.offload_to_storage[idx] else "host",
            vocabulary=VOCABULARIES[self.vocabulary[idx]],
        )

    def degrees(self, idx: int) -> tuple[int, ...]:
        """(dp_replicate, dp_shard, tp, pp, cp, ep, etp) of one entry."""
        columns = (self.dp_replicate, self.dp_shard, self.tp, self.pp, self.cp, self.ep, self.etp)
        return tuple(int(column[idx]) for column in columns)

    def select(self, keep: IntArray | NDArray[np.bool_]) -> Self:
        """The entries of a mask or of indices."""
        return type(self)(**{field.name: getattr(self, field.name)[keep] for field in fields(self)})
