"""How many machines a training holds over time, on demand and of a spot pool, as a document (`meshwright scale`)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from .base import CountOrNone, Document, Frozen, NonNegativeFloat, PositiveFloat, PositiveInt
from .errors import ConfigError

HoldingRule = Literal["policy", "uniform progress", "greedy", "on demand"]
HOLDING_RULES: tuple[HoldingRule, ...] = get_args(HoldingRule)

Part = Annotated[float, Field(ge=0, le=1)]


class RuleReplay(Frozen):
    """A rule over the starts of a recording.

    Attributes:
        met: part of the starts from which the deadline was met; usd: mean, of those that ended late until they ended.
        to_hindsight: mean USD over that of whoever knows the recording, and of each period the most machines.
    """

    rule: HoldingRule
    met: Part
    usd: NonNegativeFloat
    to_hindsight: NonNegativeFloat


class ScaleReplay(Frozen):
    """Rules over a recording, with a policy of its first half from starts in the second."""

    pool: str
    starts: PositiveInt
    rules: tuple[RuleReplay, ...]


class ScalePolicy(Document):
    """What to hold is worked out anew from this, by dynamic programming (solvers/spot_policy.py).

    Attributes:
        units: machines of the plan: nodes, or devices of a single one.
        tokens_per_step: of the plan; tokens: of the training, by ``deadline_s``; period_s: between decisions.
        move: probability that the pool has so many machines a period later, by how many it has.
        rate: tokens a second that stay, by number of machines; spot_usd_per_hour: of a machine of the pool; demand_usd_per_hour: of
            so many on demand.
        lost_s, joined_s, restart_s: that a loss, machines that come or go, and a start where none is left take.
        expected_usd, bound_usd: of the training by the policy and of any, from a pool that has as many machines as usual.
        replay: on the recording.
        begun_unix_s, begun_steps: of a training that follows it, next to its checkpoints: when it began to, and the steps before.
    """

    document_kind: ClassVar[str] = "scale policy"

    spot_offer: str = ""
    demand_offers: tuple[str, ...] = ()
    units: PositiveInt
    tokens_per_step: PositiveInt
    tokens: PositiveFloat
    deadline_s: PositiveFloat
    period_s: PositiveFloat
    move: tuple[tuple[Part, ...], ...]
    rate: tuple[NonNegativeFloat, ...]
    spot_usd_per_hour: NonNegativeFloat
    demand_usd_per_hour: tuple[NonNegativeFloat, ...]
    lost_s: NonNegativeFloat
    joined_s: NonNegativeFloat
    restart_s: NonNegativeFloat
    usual_available: CountOrNone
    expected_usd: NonNegativeFloat
    bound_usd: NonNegativeFloat
    replay: ScaleReplay | None = None
    begun_unix_s: NonNegativeFloat = 0.0
    begun_steps: CountOrNone = 0

    @model_validator(mode="after")
    def _require_sizes(self) -> ScalePolicy:
        states = len(self.move)
        sizes = {len(self.rate) == self.units + 1, all(len(row) == states for row in self.move)}
        rows = all(abs(sum(row) - 1) < 1e-6 for row in self.move)
        if sizes != {True} or not rows or not 0 < states <= self.units + 1:
            raise ConfigError(f"a policy for {self.units} machines has rates of {len(self.rate)} and {states} states")
        if not 0 < len(self.demand_usd_per_hour) <= self.units + 1 or self.usual_available >= states:
            raise ConfigError("a policy whose prices and pool are not of its machines")
        return self
