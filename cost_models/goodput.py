"""Goodput: the part of the time in which a job that devices interrupt makes progress that stays.

    (G1) restarting   goodput = T / (M e^(R/M) (e^((T + s)/M) - 1))
    (G2) continuing   goodput = sum_f PI[f] RATE[f]/RATE[0] (1 - c) - sum_f PI[f] (LOSS[f] LOST[f] + BACK[f] MOVE[f])

M seconds between faults of the job, s of a save that stops the step, R from a fault to the first step after it, T of useful work
between saves. (G1) is Daly's complete form (Future Generation Computer Systems 22(3), 2006, eq. 13): faults are a Poisson process,
and may come during saves and restarts. R does not move the best T, which solves e^-((T + s)/M) = 1 - T/M:

    T* = M (1 + W(-e^(-1 - s/M)))        W: the principal branch of Lambert's function

(G2): f = 0..F of N units are lost; each is lost at 1 / MTBF and back at 1 / REPAIR, so that PI is the stationary distribution of a
birth-death chain with LOSS[f] = (N - f) / MTBF, BACK[f] = f / REPAIR. While f are lost the job runs at RATE[f] and spends a part c
of its time on copies; a loss takes LOST[f] seconds (detection, new groups, states, work done again), a return MOVE[f]. A loss
beyond F ends in a restart from a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import lambertw

from ..schema.units import FloatArray

MTBF_HOURS_PER_DEVICE = 50_000.0
"""Llama 3 (arXiv:2407.21783, table 5): 419 unexpected interruptions of 16,384 H100 in 54 days, one in 50,700 hours of each."""

SAVE_S, RESTART_S = 30.0, 300.0
"""Of a checkpoint and of a restart, where nothing says what they take; `meshwright goodput` takes measured ones."""


def restart_goodput(interval_s: float, *, mtbf_s: float, save_s: float, restart_s: float) -> float:
    """Return (G1): the goodput of saving after every ``interval_s`` seconds of work and restarting from the last save."""
    exponent = (interval_s + save_s) / mtbf_s
    if exponent > 700 or restart_s / mtbf_s > 700:  # no interval is ever completed
        return 0.0
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(exponent))


def best_interval_s(*, mtbf_s: float, save_s: float) -> float:
    """Return the seconds of work between saves that maximise (G1)."""
    ratio = save_s / mtbf_s
    if ratio < 1e-5:  # the series of W at its branch point, where the function itself loses digits
        p = math.sqrt(-2 * math.expm1(-ratio))
        return mtbf_s * (p - p**2 / 3 + 11 * p**3 / 72)
    return mtbf_s * (1 + float(lambertw(-math.exp(-1 - ratio)).real))


def steps_to_save(remaining: int, *, step_s: float, mtbf_s: float, save_s: float) -> int:
    """Return after how many steps to save, of those that remain until the save at the end.

    The rest is divided into K equal intervals, each of which takes M (e^((T + s)/M) - 1) by (G1): the cheaper of the two K next to
    the best interval, so that none ends shortly before the end.
    """
    best = max(round(best_interval_s(mtbf_s=mtbf_s, save_s=save_s) / step_s), 1)
    fewer = max(remaining // best, 1)

    def cost(count: int) -> float:
        exponent = (remaining / count * step_s + save_s) / mtbf_s
        return count * math.expm1(exponent) if exponent < 700 else math.inf

    return math.ceil(remaining / min(fewer, fewer + 1, key=cost))


MAX_COPY_SHARE, LITTLE_COPY_SHARE, FEW_STEPS = 0.03, 0.005, 20
"""Part of the time that copies of states take at most; less than the second is too little to do more steps again for, and so are
copies after fewer steps than the third.
"""


def copy_steps(*, copy_s: float, step_s: float, mtbf_s: float) -> int:
    """Return after how many steps to copy the states to a peer: by (G1) for faults that rare, within the limits."""
    best = best_interval_s(mtbf_s=mtbf_s, save_s=max(copy_s, 1e-9)) / step_s
    quickest, slowest = (math.ceil(copy_s / (share * step_s)) for share in (MAX_COPY_SHARE, LITTLE_COPY_SHARE))
    return max(quickest, min(round(best), max(slowest, FEW_STEPS)), 1)


def lost_units(*, units: int, unit_mtbf_s: float, repair_s: float, tolerated: int) -> FloatArray:
    """Return PI [F + 1]: the part of the time in which f units are lost, where at most ``tolerated`` are."""
    weights = [1.0]
    for lost in range(tolerated):
        weights.append(weights[-1] * (units - lost) / unit_mtbf_s * repair_s / (lost + 1))
    return np.array(weights) / sum(weights)


def continuing_goodput(
    rates: Sequence[float],
    *,
    units: int,
    unit_mtbf_s: float,
    repair_s: float,
    lost_s: Sequence[float],
    move_s: Sequence[float],
    beyond_s: float,
    copies: float = 0.0,
) -> float:
    """Return (G2).

    Args:
        rates: of work with f = 0..F units lost; the first is that of the entire job.
        units: nodes or devices that are lost one at a time; ``unit_mtbf_s``: between the faults of one.
        repair_s: until a lost unit is back.
        lost_s, move_s: seconds that a loss in state f takes, a return in state f; [F + 1] each.
        beyond_s: of a restart, which a loss in the last state takes.
        copies: part of the time that copies for the others take.
    """
    tolerated = len(rates) - 1
    states = np.arange(tolerated + 1)
    shares = lost_units(units=units, unit_mtbf_s=unit_mtbf_s, repair_s=repair_s, tolerated=tolerated)
    relative = np.array(rates) / rates[0]
    losses = shares * (units - states) / unit_mtbf_s
    returns = shares * states / repair_s
    seconds = np.where(states < tolerated, np.array(lost_s), beyond_s)
    away = losses * seconds * relative + returns * np.array(move_s) * relative
    return max(float((shares * relative).sum() * (1 - copies) - away.sum()), 0.0)
