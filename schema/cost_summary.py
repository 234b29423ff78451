"""What a plan costs in money: the size that was chosen, those that were tried, and how sure it is that none is cheaper."""

from __future__ import annotations

from typing import Literal

from .base import Frozen, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from .layout import Layout

Outcome = Literal["chosen", "on the front", "dearer", "too slow", "does not fit", "no layout", "not examined"]


class SizeTried(Frozen):
    """One size of one offer, and what became of it.

    Attributes:
        bound_s: no layout of this size has a faster step; unset where no bound was worked out.
        step_time_s: of the fastest layout; unset where the bounds alone decided, or nothing fits.
        usd_per_million_tokens: at that step time, or (``is_bound``) at the bound: no layout of this size is cheaper.
        host_bytes: of a node, where the fastest layout has an offload schedule.
    """

    offer: str
    num_nodes: PositiveInt
    num_devices: PositiveInt
    price_per_hour: PositiveFloat
    outcome: Outcome
    reason: str = ""
    layouts: NonNegativeInt = 0
    bound_s: PositiveFloat | None = None
    step_time_s: PositiveFloat | None = None
    usd_per_million_tokens: PositiveFloat | None = None
    is_bound: bool = False
    host_bytes: NonNegativeInt = 0


class CostSummary(Frozen):
    """Money, in USD; devices are paid for as long as the training takes.

    Attributes:
        offer, num_nodes: what is rented; price_per_hour: all of it.
        min_tokens_per_s: the floor that every size had to reach.
        tokens, hours, total: the whole run, where its tokens are given.
        bound_usd_per_million_tokens: no size of any offer that reaches the floor is cheaper, within the cost model.
        gap: (usd - bound) / usd; above zero where a simpler layout was taken over a faster one, or a time limit came first.
        status: optimal: every size was bounded; feasible: a time limit stopped that.
        sizes: every size of every offer, in the order of the offers.
    """

    offer: str
    num_nodes: PositiveInt
    price_per_hour: PositiveFloat
    usd_per_step: PositiveFloat
    usd_per_million_tokens: PositiveFloat
    usd_per_billion_tokens: PositiveFloat
    min_tokens_per_s: NonNegativeFloat = 0.0
    tokens: PositiveFloat | None = None
    hours: PositiveFloat | None = None
    total: PositiveFloat | None = None
    status: Literal["optimal", "feasible"]
    bound_usd_per_million_tokens: NonNegativeFloat
    gap: NonNegativeFloat
    search_s: NonNegativeFloat
    sizes: tuple[SizeTried, ...] = ()


class ParetoPoint(Frozen):
    """A layout that no other one beats in both time and memory.

    Attributes:
        cap_bytes: the point is the fastest layout that requires at most this much of a device.
        bound_s: no such layout of the space is faster.
        layers_of_stage: how many layers each stage holds, in order: one layout may be cut in several ways.
        host_bytes: of a node, where the layout has an offload schedule.
    """

    layout: Layout
    step_time_s: PositiveFloat
    bound_s: PositiveFloat
    required_bytes: PositiveInt
    peak_allocated_bytes: PositiveInt
    cap_bytes: PositiveInt
    tokens_per_s: PositiveFloat
    layers_of_stage: tuple[PositiveInt, ...] = ()
    host_bytes: NonNegativeInt = 0
