"""Rehearsal: what the runtime does of a plan, rank by rank, found without a device (runtime/rehearsal/)."""

from __future__ import annotations

from pydantic import Field

from .base import Frozen, NonNegativeInt, PositiveInt


class CollectiveCount(Frozen):
    """Messages of one kind that a rank takes part in during a step.

    Attributes:
        axis: of the layout, or "world" for all ranks.
        op: all_gather, reduce_scatter, all_reduce, all_to_all, send or recv.
        bytes: of the whole tensors: what an all-gather puts out, what a reduction or an exchange reads.
        predicted_bytes: by the formulas of the cost model; None where it has none for it.
    """

    axis: str
    op: str
    count: NonNegativeInt
    bytes: NonNegativeInt
    predicted_bytes: NonNegativeInt | None = None


class LargestTensors(Frozen):
    """Storages of one size that are present at the peak: ``count`` of ``bytes`` each, made by one operator."""

    category: str
    operator: str
    bytes: NonNegativeInt
    count: PositiveInt


class RehearsedKind(Frozen):
    """Ranks that do the same, of which one was rehearsed.

    Attributes:
        stage: of the pipeline; the first one where a rank has several, which are ``stages``.
        ranks: of the plan; ``rank`` is the one that was rehearsed.
        peak_allocated_bytes: at the fullest moment of a step, of all storages; ``initial_allocated_bytes`` before it, while initial
            weights and optimizer states are made.
        peak_reserved_bytes: the most that torch's caching allocator reserves for the same sequence, as it is by default;
            ``expandable_reserved_bytes`` with expandable segments.
        predicted_allocated_bytes: of the plan; ``off_ratio`` is it over the rehearsed peak, less one.
        worst_allocated_bytes: the peak where every token that may go to this rank's experts does; None without ep.
        memory_bytes, predicted_memory_bytes: at the peak, by category.
        moment, operator, module: when the peak is.
        collectives: one entry for each axis and operator.
        flops: of products and attention in a step.
        allocations: storages that began in what was rehearsed.
    """

    stage: NonNegativeInt
    stages: tuple[NonNegativeInt, ...]
    rank: NonNegativeInt
    ranks: tuple[NonNegativeInt, ...] = Field(min_length=1)
    peak_allocated_bytes: NonNegativeInt
    initial_allocated_bytes: NonNegativeInt = 0
    peak_reserved_bytes: NonNegativeInt
    expandable_reserved_bytes: NonNegativeInt
    predicted_allocated_bytes: NonNegativeInt
    worst_allocated_bytes: NonNegativeInt | None = None
    memory_bytes: dict[str, NonNegativeInt]
    predicted_memory_bytes: dict[str, NonNegativeInt]
    moment: str
    operator: str
    module: str
    largest: tuple[LargestTensors, ...] = ()
    collectives: tuple[CollectiveCount, ...] = ()
    flops: NonNegativeInt
    allocations: NonNegativeInt

    @property
    def off_ratio(self) -> float:
        """Predicted over rehearsed, less one."""
        return self.predicted_allocated_bytes / max(self.peak_allocated_bytes, 1) - 1


class Failure(Frozen):
    """A rank that does not run: what went wrong and where."""

    rank: NonNegativeInt
    stage: NonNegativeInt
    message: str
    details: tuple[str, ...] = ()


class Rehearsal(Frozen):
    """What the runtime does of a plan, found without a device.

    Attributes:
        runs: every kind of rank went through a step.
        fits: and none reserves more than the plan's budget.
        notes: what was not rehearsed as it will be.
        time_parts: seconds of a step by what they are spent on, as its operators are laid out over streams; nothing where not every
            stage was rehearsed, or with another model than the plan's. Products, attention, memory_bound (other kernels),
            recompute, parameter_copies, dispatch, optimizer, bubble, and exposed communication: dp, tp, cp, ep, pp.
        predicted_time_parts: those of the plan's estimate.
    """

    model: str
    cluster: str
    layout: str
    world_size: PositiveInt
    runs: bool
    fits: bool
    budget_bytes: PositiveInt
    kinds: tuple[RehearsedKind, ...] = ()
    failures: tuple[Failure, ...] = ()
    notes: tuple[str, ...] = ()
    time_parts: dict[str, float] = Field(default_factory=dict)
    predicted_time_parts: dict[str, float] = Field(default_factory=dict)

    @property
    def step_s(self) -> float:
        """Seconds of a step as it is laid out; 0 where it is not."""
        return sum(self.time_parts.values())

    @property
    def predicted_step_s(self) -> float:
        """Seconds of a step by the plan's estimate."""
        return sum(self.predicted_time_parts.values())

    @property
    def fullest(self) -> RehearsedKind:
        """The kind of rank with the highest peak."""
        return max(self.kinds, key=lambda kind: kind.peak_allocated_bytes)
