"""How many machines a plan's training holds over time, to end by a deadline at the least expected cost (solvers/spot_policy.py).

The pool's changes come from a recording, or from the losses of an offer, whose machines are back a period later. Pools have good
and bad days, which what they have now does not say: in some hours they change less than P to the power of the periods says. Of
chains that change more slowly, P[f] = I + f (P - I), the one whose policy is cheapest over the recording is taken.

Rules that are compared over a recording, each deciding at every change and every period:

    policy             solvers/spot_policy.py
    uniform progress   the pool's machines; where work is behind even progress as many on demand as even progress needs
    greedy             the pool's machines, until only those on demand are in time
    on demand          the fewest machines that are in time

Units are nodes (devices of a single node), all of the plan's kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from ..cost_models.goodput import best_interval_s
from ..schema import ConfigError, InfeasibleError, Offer, TrainingPlan
from ..schema.machines_file import Change
from ..schema.offers import DAY_S
from ..schema.scaling import HOLDING_RULES, HoldingRule, RuleReplay, ScalePolicy, ScaleReplay
from ..schema.units import FloatArray, IntArray, counted
from ..solvers.spot_policy import HOUR_S, SpotInstance, SpotPolicy, bound_usd, hindsight_usd, solve
from .fallbacks import num_units
from .request import Deadline
from .sizes import price_per_hour
from .spot import Costs, going_on, plans_by_units

MIN_PERIOD_S, MAX_PERIODS, MAX_PLANNED = 60.0, 96, 16
"""Seconds between decisions at least, periods at most; numbers of machines that are planned for."""

LATE = 1e3
"""Of the dearest machines' price: what work costs that is not done in time."""

STARTS_S, MIN_STARTS = 6 * 3600.0, 2
"""Between starts of a replay; a recording with fewer is not replayed."""

SPEEDS = (1.0, 0.3, 0.1, 0.03, 0.0)
"""Of changes of the pool, f."""

Machines = tuple[int, int]
Rule = Callable[[float, float, int, Machines], Machines]
"""What to hold of the pool and on demand, given seconds since the start, tokens left, what the pool has and what is held."""


def scale(
    plan: TrainingPlan,
    offers: Sequence[Offer],
    *,
    tokens: float,
    deadline_s: float,
    costs: Costs,
    recording: tuple[str, Sequence[Change]] | None = None,
    deadline: Deadline | None = None,
) -> ScalePolicy:
    """Return the policy of a training, with its replay where there is a recording.

    Args:
        offers: machines of the plan's kind: one spot offer at most, any others on demand.
        recording: name and changes of the pool.
        deadline: of the plans for fewer machines.

    Raises:
        ConfigError: an offer is of other machines, or there is nothing to decide.
        InfeasibleError: all machines on demand do not make the tokens in time.
    """
    units = num_units(plan.cluster)
    spot, demand = _priced(plan, offers)
    if spot is None and not demand:
        raise ConfigError("no offer to hold machines of")
    sizes = sorted({max(1, round(units * i / MAX_PLANNED)) for i in range(1, MAX_PLANNED + 1)})
    plans = plans_by_units(plan, sizes, deadline)
    period_s = max(MIN_PERIOD_S, deadline_s / MAX_PERIODS)
    losses = 0.0 if spot is None else spot[1].losses_per_node_day

    def instance(changes: Sequence[Change]) -> SpotInstance:
        return _instance(plan, plans, spot, demand, changes, costs, tokens, deadline_s, period_s, losses)

    changes = () if recording is None else tuple(recording[1])
    policy = _cheapest(instance(changes), changes)
    data = policy.instance
    maximum = float(data.rate[min(len(demand), units)])
    if demand and maximum * (deadline_s - data.restart_s) < tokens:
        raise InfeasibleError(
            f"{tokens:.3g} tokens by {deadline_s / HOUR_S:.3g} h: {counted(min(len(demand), units), 'machine')} on demand make "
            f"{maximum * max(deadline_s - data.restart_s, 0):.3g}   [late (O)]",
            help=f"a deadline of {tokens / maximum / HOUR_S + data.restart_s / HOUR_S:.3g} h, or more machines on demand",
        )
    usual = int(np.argmax(_visits(data)))
    replay = None if recording is None else _replayed(recording[0], changes, instance)
    return ScalePolicy(
        spot_offer="" if spot is None else spot[1].name,
        demand_offers=tuple(offer.name for offer in offers if not _is_spot(offer)),
        units=units,
        tokens_per_step=plan.workload.tokens_per_step,
        tokens=tokens,
        deadline_s=deadline_s,
        period_s=period_s,
        move=tuple(tuple(map(float, row)) for row in data.move),
        rate=tuple(map(float, data.rate)),
        spot_usd_per_hour=data.spot_usd,
        demand_usd_per_hour=tuple(map(float, data.demand_usd)),
        lost_s=data.lost_s,
        joined_s=data.joined_s,
        restart_s=data.restart_s,
        usual_available=usual,
        expected_usd=float(policy.usd[usual]),
        bound_usd=float(policy.bound_usd[usual]),
        replay=replay,
    )


def solved(policy: ScalePolicy) -> SpotPolicy:
    """Return what a document's policy decides."""
    max_usd = max(policy.demand_usd_per_hour[-1], policy.spot_usd_per_hour * policy.units)
    return solve(
        SpotInstance(
            tokens=policy.tokens, deadline_s=policy.deadline_s, period_s=policy.period_s, move=_normed(np.array(policy.move)),
            rate=np.array(policy.rate), spot_usd=policy.spot_usd_per_hour, demand_usd=np.array(policy.demand_usd_per_hour),
            lost_s=policy.lost_s, joined_s=policy.joined_s, restart_s=policy.restart_s,
            late_usd=_late_usd(max_usd, policy.deadline_s),
        )
    )  # fmt: skip


def _late_usd(usd_per_hour: float, deadline_s: float) -> float:
    return LATE * usd_per_hour * deadline_s / HOUR_S


def _is_spot(offer: Offer) -> bool:
    return offer.losses_per_node_day > 0


def _priced(plan: TrainingPlan, offers: Sequence[Offer]) -> tuple[tuple[float, Offer] | None, list[float]]:
    """Return the price of a unit of the spot offer, if any, and of each one on demand, the cheapest first.

    Raises:
        ConfigError: an offer is of other machines than the plan, or two are spot offers.
    """
    group, are_nodes = plan.cluster.groups[0], plan.cluster.num_nodes > 1
    if len(plan.cluster.groups) > 1:
        raise ConfigError("a plan whose nodes differ is not scaled: it is not known which are held")
    spot, demand = None, list[float]()
    for offer in offers:
        other = offer.cluster.groups[0]
        if other.device.name != group.device.name or (are_nodes and other.devices_per_node != group.devices_per_node):
            raise ConfigError(
                f"offer {offer.name} has nodes of {other.devices_per_node} {other.device.name}, the plan those of "
                f"{group.devices_per_node} {group.device.name}",
                help="scale with offers of the plan's nodes; mixtures: plan --objective cost --mix",
            )
        num = offer.cluster.num_nodes if are_nodes else offer.cluster.num_devices
        usd = price_per_hour(offer.cluster) / num
        if not _is_spot(offer):
            demand += [usd] * num
        elif spot is not None:
            raise ConfigError(f"two spot offers, {spot[1].name} and {offer.name}: one pool is decided about")
        else:
            spot = usd, offer
    return spot, sorted(demand)


def _instance(
    plan: TrainingPlan,
    plans: dict[int, TrainingPlan],
    spot: tuple[float, Offer] | None,
    demand: Sequence[float],
    changes: Sequence[Change],
    costs: Costs,
    tokens: float,
    deadline_s: float,
    period_s: float,
    losses_per_day: float,
) -> SpotInstance:
    units = num_units(plan.cluster)
    size = (
        0
        if spot is None
        else min(units, spot[1].cluster.num_nodes if plan.cluster.num_nodes > 1 else spot[1].cluster.num_devices)
    )
    if changes:
        move = _moves(changes, min(units, max(change.available for change in changes)), period_s)
        seconds = changes[-1].time_s - changes[0].time_s
        lost: float = sum(max(min(a.available, units) - b.available, 0) for a, b in pairwise(changes[:-1]))
        emptied: float = sum(a.available > 0 and b.available == 0 for a, b in pairwise(changes[:-1]))
    else:
        move = _losses(size, -math.expm1(-losses_per_day * period_s / DAY_S))
        seconds, lost = DAY_S, losses_per_day * size
        emptied = lost if size == 1 else 0.0
    effort = going_on(plan, seconds / max(lost, 1e-9))
    interval_s = best_interval_s(mtbf_s=seconds / max(emptied, 1), save_s=costs.save_s)
    interval_s = min(interval_s, deadline_s)
    stays = interval_s / (interval_s + costs.save_s) * (1 - (effort.copies if units > 1 else 0.0))
    rate = np.zeros(units + 1)
    for n in range(1, units + 1):
        known = [each for each in plans if each <= n]
        rate[n] = stays * plans[max(known)].estimate.tokens_per_s if known else 0.0
    demand_usd = np.concatenate([[0.0], np.cumsum(demand[:units])])
    spot_usd = 0.0 if spot is None else spot[0]
    return SpotInstance(
        tokens=tokens, deadline_s=deadline_s, period_s=period_s, move=move, rate=np.maximum.accumulate(rate), spot_usd=spot_usd,
        demand_usd=demand_usd, lost_s=effort.lost_s, joined_s=effort.joined_s, restart_s=costs.restart_s + interval_s / 2,
        late_usd=_late_usd(max(float(demand_usd[-1]), spot_usd * units), deadline_s),
    )  # fmt: skip


def _moves(changes: Sequence[Change], maximum: int, period_s: float) -> FloatArray:
    """Return P of a recording looked at every period; a number that it never leaves stays."""
    times = np.arange(changes[0].time_s, changes[-1].time_s, period_s)
    rows = np.searchsorted([change.time_s for change in changes], times, side="right") - 1
    seen = np.minimum(np.array([change.available for change in changes])[rows], maximum)
    counts = np.zeros((maximum + 1, maximum + 1))
    np.add.at(counts, (seen[:-1], seen[1:]), 1.0)
    return _normed(counts + np.eye(maximum + 1) * (counts.sum(axis=1) == 0))


def _losses(size: int, lost: float) -> FloatArray:
    """Return P of a pool whose machines are lost one by one, and back a period later."""
    row = [math.comb(size, k) * (1 - lost) ** k * lost ** (size - k) for k in range(size + 1)]
    return _normed(np.tile(row, (size + 1, 1)))


def _normed(move: FloatArray) -> FloatArray:
    return np.asarray(move / move.sum(axis=1, keepdims=True))


def _visits(data: SpotInstance) -> FloatArray:
    return np.asarray(np.linalg.matrix_power(data.move, 1 << 12)[-1])


def _cheapest(data: SpotInstance, changes: Sequence[Change]) -> SpotPolicy:
    """Return the policy, of those for pools that change more or less slowly, that is cheapest from all starts of a recording."""
    starts = _starts(changes, data)
    if len(starts) < MIN_STARTS:
        return solve(data)
    windows = [_window(changes, start_s, data) for start_s in starts]

    def usd(policy: SpotPolicy) -> tuple[int, float]:
        ends = [replay_rule(data, holding_rule("policy", policy), spans) for spans in windows]
        return sum(not is_met for is_met, _ in ends), sum(cost for _, cost in ends)

    still = np.eye(len(data.move))
    return min((solve(replace(data, move=still + speed * (data.move - still))) for speed in SPEEDS), key=usd)


def _starts(changes: Sequence[Change], data: SpotInstance) -> list[float]:
    """Return the starts in a recording from which it reaches to the deadline."""
    return np.arange(changes[0].time_s, changes[-1].time_s - data.deadline_s, STARTS_S).tolist() if changes else []


def _replayed(
    name: str, changes: Sequence[Change], instance: Callable[[Sequence[Change]], SpotInstance]
) -> ScaleReplay | None:
    """Replay all rules from every start in the second half, with the policy of the first; None where it has too few starts."""
    middle_s = (changes[0].time_s + changes[-1].time_s) / 2
    first = [change for change in changes if change.time_s < middle_s]
    second = [Change(middle_s, first[-1].available), *changes[len(first) :]]
    if len(first) < 2:
        return None
    known = [*first, second[0]]
    data = instance(known)
    starts = _starts(second, data)
    if len(starts) < MIN_STARTS:
        return None
    policy, hindsight_sum_usd = _cheapest(data, known), 0.0
    ends = {rule: list[tuple[bool, float]]() for rule in HOLDING_RULES}
    for start_s in starts:
        spans = _window(second, start_s, data)
        hindsight_sum_usd += max(
            bound_usd(data, _seconds(spans, data)), hindsight_usd(data, _max_available(spans, data))
        )
        for rule, replays in ends.items():
            replays.append(replay_rule(data, holding_rule(rule, policy), spans))
    rules = (
        (rule, sum(is_met for is_met, _ in replays), sum(cost for _, cost in replays)) for rule, replays in ends.items()
    )
    return ScaleReplay(
        pool=name, starts=len(starts),
        rules=tuple(
            RuleReplay(rule=rule, met=met / len(starts), usd=usd / len(starts), to_hindsight=usd / hindsight_sum_usd)
            for rule, met, usd in rules
        ),
    )  # fmt: skip


def _window(changes: Sequence[Change], start_s: float, data: SpotInstance) -> list[Change]:
    """Return the changes of a pool from a start to the deadline, from 0 on."""
    before = [change for change in changes if change.time_s <= start_s][-1]
    inside = [c for c in changes if start_s < c.time_s < start_s + data.deadline_s]
    return [Change(max(c.time_s - start_s, 0.0), c.available) for c in (before, *inside)]


def _seconds(spans: Sequence[Change], data: SpotInstance) -> FloatArray:
    seconds = np.zeros(len(data.rate))
    for now, later in pairwise([*spans, Change(data.deadline_s, 0)]):
        seconds[min(now.available, len(seconds) - 1)] += later.time_s - now.time_s
    return seconds


def _max_available(spans: Sequence[Change], data: SpotInstance) -> IntArray:
    """Return the most machines that the pool has in each period [K]."""
    maximum = np.zeros(data.num_periods, dtype=np.int64)
    for now, later in pairwise([*spans, Change(data.deadline_s, 0)]):
        periods = slice(int(now.time_s // data.period_s), math.ceil(later.time_s / data.period_s))
        maximum[periods] = np.maximum(maximum[periods], now.available)
    return maximum


def replay_rule(data: SpotInstance, rule: Rule, spans: Iterable[Change]) -> tuple[bool, float]:
    """Return whether the work is done by the deadline, and the USD until it is; what is not is paid for on demand."""
    changes = list(spans)
    marks = {k * data.period_s for k in range(data.num_periods + 1)} | {change.time_s for change in changes}
    times = sorted(time_s for time_s in marks if time_s < data.deadline_s)
    remaining, usd, due_s, machines, next_change = data.tokens, 0.0, 0.0, (0, 0), 0
    available = 0
    for now_s, later_s in pairwise([*times, data.deadline_s]):
        while next_change < len(changes) and changes[next_change].time_s <= now_s:
            available, next_change = changes[next_change].available, next_change + 1
        lost = max(machines[0] - available, 0)
        survivors = (machines[0] - lost, machines[1])
        machines = rule(now_s, remaining, available, survivors)
        if sum(machines) and not sum(survivors):
            due_s = data.restart_s
        elif sum(machines):
            due_s += lost * data.lost_s + (machines != survivors) * data.joined_s
        seconds, rate = later_s - now_s, float(data.rate[sum(machines)])
        away_s = min(due_s, seconds)
        due_s -= away_s
        if rate * (seconds - away_s) >= remaining > 0 and rate:
            return True, usd + data.usd_per_hour(*machines) * (away_s + remaining / rate) / HOUR_S
        remaining -= rate * (seconds - away_s)
        usd += data.usd_per_hour(*machines) * seconds / HOUR_S
    maximum = len(data.demand_usd) - 1
    if maximum:
        usd += data.usd_per_hour(0, maximum) * remaining / float(data.rate[maximum]) / HOUR_S
    return False, usd


def holding_rule(name: HoldingRule, policy: SpotPolicy) -> Rule:
    """Return a rule by name, for one training from its start."""
    data, before = policy.instance, 0
    units, maximum = len(data.rate) - 1, len(data.demand_usd) - 1
    usual_s = data.deadline_s - data.restart_s - data.period_s

    def count_for(rate: float) -> int:
        return next((n for n in range(maximum + 1) if data.rate[n] >= rate), maximum)

    def is_last_call(now_s: float, remaining: float) -> bool:
        needed_s = remaining / float(data.rate[maximum]) if maximum else math.inf
        return bool(maximum) and data.deadline_s - now_s < needed_s + 2 * data.restart_s + data.joined_s

    def by_policy(now_s: float, remaining: float, available: int, _machines: Machines) -> Machines:
        nonlocal before
        h = policy.decide(now_s, remaining, available, before)
        before = data.index(h, available)
        return data.machines(h, available)

    def uniform(now_s: float, remaining: float, available: int, _machines: Machines) -> Machines:
        behind = data.tokens - remaining < data.tokens * now_s / usual_s
        s = min(available, units)
        if is_last_call(now_s, remaining):
            return 0, maximum
        needed = count_for(data.tokens / usual_s)
        return s, (min(max(needed - s, 0), maximum, units - s) if behind else 0)

    def greedy(now_s: float, remaining: float, available: int, _machines: Machines) -> Machines:
        return (0, maximum) if is_last_call(now_s, remaining) else (min(available, units), 0)

    constant = count_for(data.tokens / usual_s)
    rules: dict[HoldingRule, Rule] = {
        "policy": by_policy, "uniform progress": uniform, "greedy": greedy, "on demand": lambda *_: (0, constant),
    }  # fmt: skip
    return rules[name]
