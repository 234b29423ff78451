"""Pipeline schedules: one record for each, with everything that other parts need to know of it.

A new schedule is a record here and a function that makes its order (cost_models/pipeline/orders.py). No other file names one:
it asks the record. In formulas m is the number of micro-batches, p that of pipeline ranks, v that of model chunks a rank holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from .units import Numbers

Placement = Literal["loop", "wave"]
InFlight = Callable[[Numbers, Numbers, Numbers], Numbers]
SumsTogether = Callable[[Numbers, Numbers, Numbers], Any]


def _in_rounds(m: Numbers, p: Numbers, v: Numbers) -> Numbers:
    return np.where(v > 1, ((v - 1) * p + 1) / v, 1.0)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The order in which ranks of a pipeline run their passes.

    Attributes:
        chunks: model chunks that a rank may hold.
        placement: which stages two chunks of a rank are: loop, stage r and stage p + r; wave, counted back in the second one, so
            that the first rank holds both ends of the model.
        engines: those that run it.
        splits_backward: gradients of weights are passes of their own, which may come later than those of inputs.
        all_forward_first: every forward pass comes before the first backward pass.
        runs_in_rounds: after a warm-up forward and backward passes in turn; with several chunks in rounds of p micro-batches.
        lookahead: with one chunk a pass waits for none that is lookahead p + 1 micro-batches away, or more.
        bound: which lower bounds of a step hold (cost_models/pipeline/replay.py): those under any order; under orders in
            which each rank starts with forward passes in turn; also those of gpipe and 1f1b, with entire backward passes; or also
            those of 1f1b with gradients of weights deferred.
        is_given: a plan brings the order along.
        any_num_microbatches: with several chunks the micro-batches need not be a multiple of p.
        needs_full_pipeline: torch runs it with m >= p only.
        splits_vocabulary: it is known how a vocabulary split over all stages interleaves with it.
        torch_class: torch's own class for one stage a rank; empty: torch's runtime for tables of orders runs it.
        torch_names: torch's names of it, with one chunk and with several; empty: none.
        min_in_flight: micro-batches that every rank holds at least when it holds most, of (m, p, v); the weakest bound is 1.
        sums_together: every rank holds so many (all but one, where forward passes come first) when gradients of all its chunks
            add up as well, of (m, p, v): its first chunks run forward again after its last one has run backward.
    """

    name: str
    chunks: Literal["any", "one", "two"] = "any"
    placement: Placement = "loop"
    engines: frozenset[str] = frozenset({"fsdp2", "torchtitan"})
    splits_backward: bool = False
    all_forward_first: bool = False
    runs_in_rounds: bool = False
    lookahead: int = 2
    bound: Literal["any_order", "in_turn", "whole_backward", "deferred_weights"] = "any_order"
    is_given: bool = False
    any_num_microbatches: bool = False
    needs_full_pipeline: bool = False
    splits_vocabulary: bool = False
    torch_class: str = ""
    torch_names: tuple[str, str] = ("", "")
    min_in_flight: InFlight = field(default=lambda m, p, v: 1.0, repr=False)
    sums_together: SumsTogether = field(default=lambda m, p, v: m > p, repr=False)

    @property
    def idx(self) -> int:
        """Position in `SCHEDULE_NAMES`, which stands for the schedule in arrays."""
        return SCHEDULE_NAMES.index(self.name)

    def takes_chunks(self, num_model_chunks: int) -> bool:
        """Return whether a rank may hold so many model chunks under it."""
        return {"any": True, "one": num_model_chunks == 1, "two": num_model_chunks == 2}[self.chunks]

    def placement_of(self, num_model_chunks: int) -> Placement:
        """Return how stages lie on the ranks when each holds so many model chunks."""
        return self.placement if num_model_chunks == 2 else "loop"


_V_SHAPED: dict[str, Any] = {
    "chunks": "two",
    "placement": "wave",
    "splits_backward": True,
    "bound": "in_turn",
    "any_num_microbatches": True,
}

_RECORDS = (
    Schedule(
        name="gpipe",
        all_forward_first=True,
        bound="whole_backward",
        torch_class="ScheduleGPipe",
        torch_names=("GPipe", ""),
        min_in_flight=lambda m, p, v: m,
        sums_together=lambda m, p, v: (v == 1) & (m > 1),
    ),
    Schedule(
        name="1f1b",
        engines=frozenset({"fsdp2", "torchtitan", "accelerate", "megatron", "nemo", "deepspeed"}),
        runs_in_rounds=True,
        lookahead=1,
        bound="whole_backward",
        needs_full_pipeline=True,
        splits_vocabulary=True,
        torch_class="Schedule1F1B",
        torch_names=("1F1B", "Interleaved1F1B"),
        min_in_flight=_in_rounds,
        sums_together=lambda m, p, v: np.where(v > 1, m > p, m > 1),
    ),
    Schedule(
        name="zb-h1",
        splits_backward=True,
        runs_in_rounds=True,
        bound="deferred_weights",
        torch_names=("", "InterleavedZeroBubble"),
        min_in_flight=lambda m, p, v: np.where(v > 1, _in_rounds(m, p, v), p),
    ),
    Schedule(
        name="zb-h2",
        chunks="one",
        splits_backward=True,
        bound="in_turn",
        min_in_flight=lambda m, p, v: 2 * p - 1,
        sums_together=lambda m, p, v: m >= 2 * p,
    ),
    # Twice the micro-batches fill the pipeline where a rank holds its first and its last stage.
    Schedule(
        name="zb-v",
        **_V_SHAPED,
        torch_names=("", "ZBVZeroBubble"),
        min_in_flight=lambda m, p, v: np.minimum(p, m / 2),
    ),
    Schedule(name="v-half", **_V_SHAPED, min_in_flight=lambda m, p, v: np.minimum(p, m) / 2),
    Schedule(name="v-min", **_V_SHAPED, min_in_flight=lambda m, p, v: np.minimum(p / 3, m / 2)),
    Schedule(
        name="synthesised",
        placement="wave",
        splits_backward=True,
        is_given=True,
        any_num_microbatches=True,
        sums_together=lambda m, p, v: False,
    ),
)

SCHEDULES: dict[str, Schedule] = {schedule.name: schedule for schedule in _RECORDS}
SCHEDULE_NAMES: tuple[str, ...] = tuple(SCHEDULES)

DEFAULT = SCHEDULES["1f1b"]
FOR_FEW_MICROBATCHES = SCHEDULES["gpipe"]
"""It takes as long as the default and stores no less, but runs with fewer micro-batches than stages."""
GIVEN = SCHEDULES["synthesised"]
OVER_A_V = tuple(schedule for schedule in _RECORDS if schedule.chunks == "two")
SMALLEST_OVER_A_V = SCHEDULES["v-min"]
"""The one of them that stores least."""

if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[SCHEDULE_NAMES]


@cache
def by_schedule(attribute: str) -> NDArray[Any]:
    """Return an attribute of every schedule, for arrays of schedules: ``by_schedule("splits_backward")[table.schedule]``."""
    return np.array([getattr(schedule, attribute) for schedule in SCHEDULES.values()])


def placement(
    num_ranks: int, num_model_chunks: int, style: Literal["loop", "wave", "wave_from_last"]
) -> tuple[int, ...]:
    """Return the rank of each stage: loop 0..R-1 0..R-1, wave 0..R-1 R-1..0 (the V of ZBV), or that from rank R-1."""
    ranks = list(range(num_ranks))
    if style == "wave_from_last":
        ranks.reverse()
    return tuple(
        ranks[::-1][k] if style != "loop" and turn % 2 else ranks[k]
        for turn in range(num_model_chunks)
        for k in range(num_ranks)
    )
