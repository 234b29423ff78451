"""LayoutTable: many layouts as arrays, so that every cost is computed for all of them in one pass.

Its columns are made from the fields of `Layout`, with the same names: a formula or a rule does not know whether it gets one row of
numbers (`LayoutRow`) or a table of arrays. A choice among names is its position in `layout.choices(name)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from .errors import ConfigError
from .layout import LAYOUT_FIELDS, Degrees, Layout, LayoutRecompute, Recompute, Scope, choices
from .schedules import SCHEDULE_NAMES, SCHEDULES, Schedule, by_schedule
from .units import BoolArray, IntArray, Numbers

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
MIXED = len(RECOMPUTES)
"""Of a layout whose blocks each recompute what is best for them: costed under every one of RECOMPUTES."""
LAYOUT_RECOMPUTES: tuple[LayoutRecompute, ...] = (*RECOMPUTES, "mixed")
OFFLOADS = choices("offload")
VOCABULARIES = choices("vocabulary")

_COMPUTE, _SCHEDULED, _SPLIT, _STORAGE = (
    choices("gradients").index("compute"),
    OFFLOADS.index("scheduled"),
    VOCABULARIES.index("split"),
    choices("offload_to").index("storage"),
)

Column = NDArray[Any]


class DistinctRows(NamedTuple):
    """One row for each combination of values that occurs, and for every row [N] which of these cases it shares."""

    rows: IntArray
    case_idx: IntArray


def distinct_rows(columns: Sequence[Column]) -> DistinctRows:
    """Return the first row of each combination of values of ``columns`` [N]."""
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
    _, rows, case_idx = np.unique(key, return_index=True, return_inverse=True)
    return DistinctRows(rows, case_idx.reshape(-1))


class _Choices(Degrees):
    """Quantities that follow from the choices, for numbers and arrays; conditions are numpy booleans."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def schedule_fact(self, attribute: str) -> Numbers:
        """Return an attribute of the schedule's record (schedules.py)."""
        return by_schedule(attribute)[self.schedule]

    @property
    def reduces_in_compute_dtype(self) -> Numbers:
        """Gradients add up and are reduced in the dtype of the products."""
        return np.equal(self.gradients, _COMPUTE)

    @property
    def splits_vocabulary(self) -> Numbers:
        """Embedding and head are split over all stages."""
        return np.equal(self.vocabulary, _SPLIT)

    @property
    def offload_to_storage(self) -> Numbers:
        """1 where what is offloaded lies on storage, else 0."""
        return 1 * np.equal(self.offload_to, _STORAGE)

    @property
    def offloads(self) -> Numbers:
        """Something is offloaded otherwise than by a schedule of the plan."""
        return (np.not_equal(self.offload, 0) & np.not_equal(self.offload, _SCHEDULED)) | (self.offload_activations > 0)

    @property
    def recomputes(self) -> Numbers:
        """Some block recomputes."""
        return np.not_equal(self.recompute, 0)

    @cached_property
    def is_replicated(self) -> Numbers:
        """Ranks hold replicas of an unsharded stage and nothing more (runtime/data_parallel.py)."""
        has_one = (self.pp == 1) & (self.tp == 1) & (self.ep == 1) & (self.expert_tp == 1) & (self.offload == 0)
        return has_one & (self.zero_stage == 0) & (self.cp == 1) & (self.dp > 1)

    def tokens(self, seq_len: int) -> Numbers:
        """Return the tokens of one micro-batch on a tensor-parallel group: sequences are cut over cp, rounded up."""
        return -(-self.micro_batch_size * seq_len // self.cp)


class LayoutRow(_Choices):
    """One layout as numbers: what the reason of a rule prints."""

    def __init__(self, values: Mapping[str, int | float]) -> None:
        """Take the number of each field."""
        self.__dict__.update(values)

    @property
    def schedule_name(self) -> str:
        """Name of the schedule."""
        return SCHEDULE_NAMES[self.schedule]

    @classmethod
    def from_layout(cls, layout: Layout) -> Self:
        """Return the numbers of a layout."""
        return cls({name: _code(name, getattr(layout, name)) for name in LAYOUT_FIELDS})


class LayoutTable(_Choices):
    """Layouts as columns [N]: all fields of `Layout` and ``num_microbatches``, or a subset while layouts are enumerated.

    ``dp`` may be a column where its split into dp_replicate and dp_shard is not known yet. A table does not change.
    """

    def __init__(self, **columns: Column) -> None:
        """Take the columns that are known."""
        self.columns: dict[str, Column] = columns
        self.__dict__.update(columns)

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def known(self) -> frozenset[str]:
        """Names of the columns; ``dp`` too where its factors are known."""
        names = self.columns.keys()
        return frozenset((*names, "dp")) if {"dp_replicate", "dp_shard"} <= names else frozenset(names)

    @classmethod
    def from_layouts(cls, layouts: Sequence[Layout], global_batch_size: int) -> Self:
        """Return the table of some layouts.

        Raises:
            ConfigError: one has an offload schedule, whose costs are its own (planner/offload.py).
        """
        if any(layout.offload == "scheduled" for layout in layouts):
            raise ConfigError("what a layout with an offload schedule costs is known for the plan's own schedule only")
        columns = {
            name: np.array([_code(name, getattr(layout, name)) for layout in layouts], dtype=_dtype(name))
            for name in LAYOUT_FIELDS
        }
        counts = [layout.num_microbatches(global_batch_size) for layout in layouts]
        return cls(**columns, num_microbatches=np.array(counts, dtype=np.int64))

    @classmethod
    def filled(cls, size: int, **columns: Column) -> Self:
        """Return ``size`` layouts with these columns and defaults in all others: one rank, nothing sharded, split or offloaded."""
        rest = {name: np.full(size, value) for name, value in _defaults().items() if name not in columns}
        return cls(**rest, **columns)

    @classmethod
    def concatenate(cls, tables: Iterable[LayoutTable]) -> Self:
        """Return the rows of all tables, which have the same columns."""
        tables = list(tables)
        return cls(**{name: np.concatenate([table.columns[name] for table in tables]) for name in tables[0].columns})

    def replace(self, **columns: Column) -> Self:
        """Return the table with some columns added or changed."""
        return type(self)(**{**self.columns, **columns})

    def select(self, rows: IntArray | BoolArray) -> Self:
        """Return the rows of a mask or of indices."""
        return type(self)(**{name: column[rows] for name, column in self.columns.items()})

    def row(self, idx: int) -> LayoutRow:
        """Return one row as numbers."""
        return LayoutRow({name: column[idx].item() for name, column in self.columns.items()})

    def layout(self, idx: int) -> Layout:
        """Return one row as a Layout."""
        return Layout(**{name: _value(name, self.columns[name][idx]) for name in LAYOUT_FIELDS})

    def schedule_of_row(self, idx: int) -> Schedule:
        """Return the schedule of one row."""
        return SCHEDULES[SCHEDULE_NAMES[self.schedule[idx]]]

    def degrees(self, idx: int) -> tuple[int, ...]:
        """Return the degrees of one row, in the order of their fields."""
        return tuple(int(self.columns[name][idx]) for name, field in LAYOUT_FIELDS.items() if field.is_degree)

    @cached_property
    def is_mixed(self) -> bool:
        """Layouts leave recompute to each block."""
        return bool(np.any(self.recompute == MIXED))

    @cached_property
    def within_layer(self) -> DistinctRows:
        """Rows that differ in what the work of one layer on one micro-batch depends on."""
        return distinct_rows([*self._layer_columns, *self._in_scope("expert_layer")])

    @cached_property
    def within_dense_layer(self) -> DistinctRows:
        """Rows that differ in what the work of a layer without experts depends on."""
        return distinct_rows(self._layer_columns)

    @cached_property
    def operators(self) -> DistinctRows:
        """Rows that differ in the shapes of a layer's operators."""
        return distinct_rows(self._in_scope("operators"))

    @cached_property
    def across_data(self) -> DistinctRows:
        """Rows that differ in what the data-parallel collectives of one layer depend on."""
        return distinct_rows([*self._in_scope("data"), self.pp > 1])

    @property
    def _layer_columns(self) -> list[Column]:
        return [*self._in_scope("layer"), self.pp > 1, self.dp > 1, self.is_replicated]

    def _in_scope(self, scope: Scope) -> list[Column]:
        return [self.columns[name] for name, field in LAYOUT_FIELDS.items() if scope in field.scopes]


def _dtype(name: str) -> type[np.generic]:
    return np.float64 if Layout.model_fields[name].annotation is float else np.int64


def _code(name: str, value: Any) -> int | float:
    names = choices(name)
    return names.index(value) if names else int(value) if isinstance(value, bool) else value


def _value(name: str, code: Any) -> Any:
    names = choices(name)
    if names:
        return names[code]
    return bool(code) if Layout.model_fields[name].annotation is bool else code.item()


@cache
def _defaults() -> dict[str, Any]:
    defaults = LayoutRow.from_layout(Layout()).__dict__
    return {name: _dtype(name)(value) for name, value in defaults.items()} | {"num_microbatches": np.int64(1)}


def column_of(name: str, value: Any, size: int) -> Column:
    """Return the column of ``size`` layouts that have one value of a field."""
    return np.full(size, _code(name, value), dtype=_dtype(name))
