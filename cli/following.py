"""`apply --scale`: the policy of `meshwright scale`, asked while a training runs."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..schema import ConfigError, TrainingPlan

if TYPE_CHECKING:
    from ..runtime.supervision.supervisor import Scale


def following(path: Path, plan: TrainingPlan, available: Path | None) -> Scale:
    """Return what says how many machines to hold, by the policy in a file; its time begins with the first question.

    Args:
        available: file with the number of machines that the spot pool has, which changes; None: it has those that are there.

    Raises:
        ConfigError: the policy is for other machines or another batch, or the file is not there.
    """
    from ..planner.fallbacks import num_units
    from ..planner.scaling import solved
    from ..runtime.supervision.supervisor import Hold
    from ..schema.scaling import ScalePolicy

    policy, units = ScalePolicy.load(path), num_units(plan.cluster)
    if (policy.units, policy.tokens_per_step) != (units, plan.workload.tokens_per_step):
        raise ConfigError(
            f"{path} is for {policy.units} machines and {policy.tokens_per_step:,} tokens a step, the plan has {units} and "
            f"{plan.workload.tokens_per_step:,}",
            help="meshwright scale PLAN",
        )
    if available is not None and not available.is_file():
        raise ConfigError(
            f"no such file: {available}", help="write the number of machines that the spot pool has into it"
        )
    decisions, per_unit = solved(policy), plan.cluster.num_devices // units
    begun_s: float | None = None
    before, seen = 0, policy.usual_available

    def hold(steps: int, num_devices: int) -> Hold:
        nonlocal begun_s, before, seen
        begun_s = time.monotonic() if begun_s is None else begun_s
        if available is None:
            seen = num_devices // per_unit
        else:
            with suppress(OSError, ValueError):  # while it is written anew what it said before holds
                seen = max(int(available.read_text(encoding="utf-8")), 0)
        remaining = max(policy.tokens - steps * policy.tokens_per_step, 0.0)
        now = min(seen, len(policy.move) - 1)
        before = decisions.decide(time.monotonic() - begun_s, remaining, now, before)
        spot, demand = decisions.instance.machines(before, now)
        before = decisions.instance.index(before, now)
        return Hold(spot, demand, (spot + demand) * per_unit)

    return hold
