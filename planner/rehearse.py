"""A plan rehearsed: the runtime's own code path under it, without devices (runtime/rehearsal/)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..schema import TrainingPlan
    from ..schema.rehearsal import Rehearsal


def rehearse(
    plan: TrainingPlan,
    *,
    ranks: Sequence[int] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Rehearsal:
    """Let every kind of rank of a plan go through a step on this machine, without devices; return what each holds and sends.

    Args:
        ranks: only the kinds of these ranks.
        progress: told how many kinds are done, of how many.

    Raises:
        ConfigError: a rank that the plan does not have.
        RuntimeMismatchError: this version does not run such a plan.
    """
    from ..runtime.rehearsal.run import rehearse as run

    return run(plan, ranks=ranks, progress=progress)
