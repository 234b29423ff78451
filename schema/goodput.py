"""Faults of a cluster, and what they leave of a plan's speed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from pydantic import Field, NonNegativeFloat, PositiveFloat

from .base import CountOrNone, Frozen, PositiveInt

Hours = Annotated[float, Field(gt=0, le=1e12)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]


class Faults(Frozen):
    """Faults and what they take.

    Attributes:
        mtbf_hours_per_device: mean hours between faults of one device, with its share of the node.
        save_s: seconds that a checkpoint stops the training.
        restart_s: seconds from a fault to the first step after it: detection, start, load, warm-up.
        repair_hours: until a lost node is back.
        tolerate: nodes, or devices of a single one, for whose loss there is a plan.
        spares: nodes, or devices, that stand by besides those of the plan.
    """

    mtbf_hours_per_device: Hours
    save_s: Seconds
    restart_s: Seconds
    repair_hours: Hours = 24.0
    tolerate: Annotated[CountOrNone, Field(le=64)] = 0
    spares: Annotated[CountOrNone, Field(le=10_000)] = 0


class Fallback(Frozen):
    """The plan for a number of lost units.

    Attributes:
        share_of_time: in which so many are lost, those that spares replace besides.
        rerouted_step_s: after the first loss, where the micro-batches of lost stages go to the same stages of other replicas and no
            states move; None where that is not possible.
        rerouted_up_to_s: how long an outage may be for that to make more steps than the plan here; None: however long.
    """

    lost: PositiveInt
    num_devices: PositiveInt
    layout: str
    step_s: PositiveFloat
    share_of_time: NonNegativeFloat
    rerouted_step_s: PositiveFloat | None = None
    rerouted_up_to_s: NonNegativeFloat | None = None


class GoodputReport(Frozen):
    """Goodput of a plan: the part of the time in which it makes progress that stays.

    Attributes:
        mtbf_s: of the job; interval_s: of work between checkpoints, the best; interval_steps: the same as ``--checkpoint-every``.
        goodput: where a lost unit is replaced at once (G1); tokens_per_day: with it.
        second_of_save, second_of_restart: goodput that one second less of each adds; tenth_of_faults: that a tenth fewer adds.
        waiting: goodput where the job stops until a lost unit that no spare replaces is repaired.
        falling_back: where it goes on with the fallbacks (G2); None without fallbacks and spares.
        going_on: where the ranks that are left go on at once (G2); None without fallbacks.
        not_tolerated: why there are no fallbacks for further losses; not_rerouted: why no micro-batches can go to peers.
    """

    faults: Faults
    num_units: PositiveInt
    mtbf_s: PositiveFloat
    step_s: PositiveFloat
    interval_s: PositiveFloat
    interval_steps: PositiveInt
    goodput: NonNegativeFloat
    tokens_per_day: NonNegativeFloat
    second_of_save: NonNegativeFloat
    second_of_restart: NonNegativeFloat
    tenth_of_faults: NonNegativeFloat
    waiting: NonNegativeFloat
    falling_back: NonNegativeFloat | None = None
    going_on: NonNegativeFloat | None = None
    fallbacks: tuple[Fallback, ...] = ()
    not_tolerated: str = ""
    not_rerouted: str = ""


Policy = Literal["wait", "restart", "continue", "join", "leave"]
POLICIES: tuple[Policy, ...] = get_args(Policy)

Lost = Literal["waiting", "restarts", "losses", "returns", "copies", "saves"]
LOST: tuple[Lost, ...] = get_args(Lost)


class PolicyReplay(Frozen):
    """A training over a recording of machines under one policy.

    Attributes:
        fraction: of the tokens that the machines that were there could have made, each number of them under its fastest plan.
        lost: what the rest was lost by, as parts of the same: ``waiting`` for enough machines; ``restarts`` and the work since the
            last checkpoint; ``losses`` that the others went on after; ``returns`` of machines; ``copies`` for peers; ``saves``.
        running_s: seconds in which steps were made; tokens: that stayed.
    """

    policy: Policy
    fraction: NonNegativeFloat
    lost: Mapping[Lost, NonNegativeFloat] = Field(default_factory=dict)
    running_s: NonNegativeFloat
    tokens: NonNegativeFloat
    usd_per_million_tokens: NonNegativeFloat | None = None


class PoolReplay(Frozen):
    """A recording under every policy: its seconds, machines on average (no more than the plan has), and machines lost.

    Attributes:
        bound: what is kept where nothing takes time but restarts after losses of so many that nobody can go on.
    """

    pool: str
    seconds: PositiveFloat
    mean_units: NonNegativeFloat
    losses: CountOrNone
    policies: tuple[PolicyReplay, ...]
    bound: NonNegativeFloat


class MachinesReplay(Frozen):
    """A plan over recordings of machines."""

    num_units: PositiveInt
    pools: tuple[PoolReplay, ...]
