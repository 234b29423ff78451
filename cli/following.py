"""`apply --scale`: the policy of `meshwright scale`, asked while a training runs."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..schema import ConfigError, TrainingPlan

if TYPE_CHECKING:
    from ..runtime.supervision.supervisor import Scale
    from ..schema.scaling import ScalePolicy


FOLLOWED_FILE = "scale.json"
"""Next to the checkpoints: the policy that the training follows, and since when."""


def following(
    path: Path, plan: TrainingPlan, available: Path | None, *, checkpoints: Path | None = None, resumes: bool = False
) -> Scale:
    """Return what says how many machines to hold, by the policy in a file.

    Its time and its work begin now, or where a training that ``resumes`` began to follow the same policy.

    Args:
        available: file with the number of machines that the spot pool has, which changes; None: it has those that are there.
        checkpoints: folder of the training's.

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
    saved_steps = _saved_steps(checkpoints) if checkpoints is not None and resumes else 0
    followed = _followed(policy, checkpoints, saved_steps, resumes=resumes)
    decisions, per_unit = solved(policy), plan.cluster.num_devices // units
    before, seen = 0, policy.usual_available

    def hold(steps: int, num_devices: int) -> Hold:
        nonlocal before, seen
        if available is None:
            seen = num_devices // per_unit
        else:
            with suppress(OSError, ValueError):  # while it is written anew what it said before holds
                seen = max(int(available.read_text(encoding="utf-8")), 0)
        # Ranks tell of no step before the first one after their checkpoint.
        done = max(steps, saved_steps) - followed.begun_steps
        remaining = max(policy.tokens - done * policy.tokens_per_step, 0.0)
        now = min(seen, len(policy.move) - 1)
        elapsed_s = max(time.time() - followed.begun_unix_s, 0.0)
        before = decisions.decide(elapsed_s, remaining, now, before)
        spot, demand = decisions.instance.machines(before, now)
        before = decisions.instance.index(before, now)
        return Hold(spot, demand, (spot + demand) * per_unit)

    return hold


def _saved_steps(checkpoints: Path) -> int:
    """Return the steps of the last checkpoint."""
    from ..runtime.training.options import list_checkpoints

    return max((int(path.name.removeprefix("step-")) for path in list_checkpoints(checkpoints)), default=0)


def _followed(policy: ScalePolicy, checkpoints: Path | None, saved_steps: int, *, resumes: bool) -> ScalePolicy:
    """Return the policy with when the training began to follow it, and note that next to its checkpoints."""
    noted = None if checkpoints is None else checkpoints / FOLLOWED_FILE
    if noted is not None and resumes and noted.is_file():
        known = type(policy).load(noted)
        if known.replace(begun_unix_s=0.0, begun_steps=0) == policy:
            return known
    followed = policy.replace(begun_unix_s=time.time(), begun_steps=saved_steps)
    if noted is not None:
        noted.parent.mkdir(parents=True, exist_ok=True)
        followed.save(noted)
    return followed
