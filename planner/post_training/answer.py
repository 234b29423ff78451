"""Write the answer of a search for a post-training plan: pools, copies, calls and moves in time, runner-ups, reason and notes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

from ...schema import Certificate
from ...schema.rl import CALLS, NUM_LEVELS
from ...schema.rl_plan import RlAlternative, RlCall, RlCopy, RlEstimate, RlMove, RlPlan, RlPool, RlSpan
from ...schema.units import counted, format_bytes, format_seconds
from ...solvers.branch_and_bound import Answer
from ...solvers.pools import PlacedPools, partitions, path_s
from ..request import PlanRequest
from ..tasks.post_training import PostTrainingSearch

GRADIENT_BYTES = 4
"""Of a parameter's gradient, as trainers sum them between machines."""


def build_rl_plan(request: PlanRequest, search: PostTrainingSearch, *, top: int) -> RlPlan:
    """Return the plan of a search that has an answer."""
    assert search.answer.best is not None
    placed, workload = search.answer.best.candidate, search.book.workload
    calls, moves = timeline_of(search, placed)
    spans: tuple[RlSpan, ...] = (*calls, *moves)
    busy = tuple(busy_s(spans, pool) for pool in range(len(placed.partition)))
    path = path_s(search.instance, placed)
    step_s = search.answer.best.objective
    copies = copies_of(search, placed)
    others = _alternatives(search, placed, top)
    return RlPlan(
        model=request.model,
        cluster=request.cluster,
        post_training=workload,
        pools=pools_of(search, placed),
        copies=copies,
        calls=calls,
        moves=moves,
        estimate=RlEstimate(
            step_time_s=step_s,
            path_s=path,
            busy_s=busy,
            samples_per_s=workload.samples / step_s,
            tokens_per_s=workload.tokens_per_step / step_s,
            tokens_per_s_per_device=workload.tokens_per_step / step_s / request.cluster.num_devices,
            weights_s=next((move.seconds for move in moves if move.what == "new weights"), 0.0),
            in_flight=max(path / step_s, 1.0),
        ),
        search=Certificate.proved(
            objective=step_s,
            bound=min(search.answer.bound, step_s),
            finished=search.answer.is_proved,
            evaluated=search.evaluated,
            pruned=search.skipped,
            search_s=search.search_s,
        ),
        reason=_reason(search, placed, step_s),
        alternatives=others,
        notes=tuple(_notes(search, placed)),
        provenance=request.provenance(),
    )


def pools_of(search: PostTrainingSearch, placed: PlacedPools) -> tuple[RlPool, ...]:
    """Return the pools with their devices, one after the other."""
    sizes = [search.instance.sizes[idx] for idx in placed.size_idxs]
    firsts = itertools.accumulate(sizes, initial=0)
    return tuple(
        RlPool(first_device=first, num_devices=size, roles=tuple(search.roles[copy] for copy in block))
        for block, size, first in zip(placed.partition, sizes, firsts, strict=False)
    )


def copies_of(search: PostTrainingSearch, placed: PlacedPools) -> tuple[RlCopy, ...]:
    """Return the copies with their layouts."""
    of = {copy: pool for pool, block in enumerate(placed.partition) for copy in block}
    copies = []
    for copy, role in enumerate(search.roles):
        costs = search.costs(copy, placed.size_idxs[of[copy]])
        copies.append(
            RlCopy(
                role=role,
                pool=of[copy],
                training=costs.training(),
                serving=costs.serving(),
                state_bytes=round(costs.state_bytes),
                live_bytes=round(max(costs.live_bytes.values())),
                is_offloaded=copy in placed.offloaded,
            )
        )
    return tuple(copies)


def timeline_of(search: PostTrainingSearch, placed: PlacedPools) -> tuple[tuple[RlCall, ...], tuple[RlMove, ...]]:
    """Return the calls and moves of a step that waits for itself: level by level, those of a pool one after the other."""
    instance, book = search.instance, search.book
    of = {copy: pool for pool, block in enumerate(placed.partition) for copy in block}
    calls, moves = list[RlCall](), list[RlMove]()
    sender, receiver = of[instance.sender], of[instance.generator]
    begin = float(instance.send_s[placed.size_idxs[sender], placed.size_idxs[receiver]])
    moves += [
        RlMove(what="new weights", pool=pool, start_s=0.0, seconds=begin, size_bytes=round(book.weight_bytes))
        for pool in sorted({sender, receiver})
    ]
    for level in range(NUM_LEVELS):
        ends = [begin]
        for pool in range(len(placed.partition)):
            now = begin
            for name in (name for name in book.workload.calls if CALLS[name][1] == level):
                role = CALLS[name][0]
                copy = search.roles.index(role)
                if of[copy] != pool:
                    continue
                costs = search.costs(copy, placed.size_idxs[pool])
                seconds = costs.seconds[name]
                moved = (
                    ((f"{role} to the devices", -1), (f"{role} to the hosts", 1)) if copy in placed.offloaded else ()
                )
                for what, when in moved:
                    start = now if when < 0 else now + costs.move_s + seconds
                    moves.append(
                        RlMove(
                            what=what,
                            pool=pool,
                            start_s=start,
                            seconds=costs.move_s,
                            size_bytes=round(costs.state_bytes),
                        )
                    )
                shift = costs.move_s if moved else 0.0
                calls.append(RlCall(name=name, role=role, pool=pool, start_s=now + shift, seconds=seconds))
                now += seconds + 2 * shift
            ends.append(now)
        begin = max(ends)
    return tuple(calls), tuple(moves)


def busy_s(spans: Iterable[RlSpan], pool: int) -> float:
    """Return the seconds of a step that the devices of a pool are busy."""
    return sum(span.seconds for span in spans if span.pool == pool)


def _alternatives(search: PostTrainingSearch, placed: PlacedPools, top: int) -> tuple[RlAlternative, ...]:
    """Return the best placement of each other partition, the best first."""
    assert search.answer.best is not None
    chosen_s = search.answer.best.objective
    rows: list[tuple[float, PlacedPools]] = []
    count = len(search.roles)
    every = list(partitions(count))
    taken = [_key(placed)]
    while len(rows) < top:
        rest = [partition for partition in every if frozenset(map(frozenset, partition)) not in taken]
        answer = search.best_of(rest, shares=search.instance.shares)
        if answer.best is None:
            break
        rows.append((answer.objective, answer.best.candidate))
        taken.append(_key(answer.best.candidate))
    return tuple(
        RlAlternative(
            title=title_of(search, other),
            step_time_s=seconds,
            reason=_difference(search, placed, other, seconds / chosen_s),
        )
        for seconds, other in rows
    )


def _key(placed: PlacedPools) -> frozenset[frozenset[int]]:
    return frozenset(map(frozenset, placed.partition))


def title_of(search: PostTrainingSearch, placed: PlacedPools) -> str:
    """Return pools in a line."""
    return "; ".join(f"{pool.num_devices}: {', '.join(pool.roles)}" for pool in pools_of(search, placed))


def _levels(search: PostTrainingSearch, placed: PlacedPools) -> list[float]:
    """Return the seconds of each level of a step that waits for itself, the sending of weights first."""
    calls, moves = timeline_of(search, placed)
    ends = [0.0] * NUM_LEVELS
    for call in calls:
        level = CALLS[call.name][1]
        ends[level] = max(ends[level], call.start_s + call.seconds)
    sent = max((move.seconds for move in moves if move.what == "new weights"), default=0.0)
    return [sent, ends[0] - sent, *(max(b - a, 0.0) for a, b in itertools.pairwise(ends))]


_LEVEL_TITLES = ("new weights take", "generation takes", "scores take", "updates take")


def _difference(search: PostTrainingSearch, chosen: PlacedPools, other: PlacedPools, ratio: float) -> str:
    """Say what another placement loses most by."""
    slower = f"{100 * (ratio - 1):+.1f} %"
    if ratio < 1 + 1e-9:
        return "as fast, and not simpler"
    calls, moves = timeline_of(search, other)
    spans: tuple[RlSpan, ...] = (*calls, *moves)
    seconds, busiest = max((busy_s(spans, idx), idx) for idx in range(len(other.partition)))
    assert search.answer.best is not None
    if seconds > search.answer.best.objective * ratio * (1 - 1e-9):
        pool = pools_of(search, other)[busiest]
        return f"{slower}: {', '.join(pool.roles)} keep {pool.num_devices} devices busy for {format_seconds(seconds)}"
    lost = [b - a for a, b in zip(_levels(search, chosen), _levels(search, other), strict=True)]
    worst = max(range(len(lost)), key=lost.__getitem__)
    return f"{slower}: {_LEVEL_TITLES[worst]} {format_seconds(lost[worst])} more"


def _reason(search: PostTrainingSearch, placed: PlacedPools, step_s: float) -> str:
    """Say why the generator shares the actor's devices, or does not."""
    instance = search.instance
    is_shared = any(instance.sender in block and instance.generator in block for block in placed.partition)
    other: Answer[PlacedPools] = search.best_of(partitions(instance.num_copies), shares=not is_shared)
    names = ("colocated", "split") if is_shared else ("split", "colocated")
    if other.best is None or not math.isfinite(other.objective):
        return f"{names[0]}: no {names[1]} placement fits"
    ratio = other.objective / step_s
    if instance.shares is not None:
        return f"{names[0]}, as asked; the best {names[1]} placement takes {format_seconds(other.objective)}"
    return (
        f"{names[0]}: {format_seconds(step_s)} a step; the best {names[1]} placement ({title_of(search, other.best.candidate)}) "
        f"{format_seconds(other.objective)}, {_difference(search, placed, other.best.candidate, ratio)}"
    )


def _notes(search: PostTrainingSearch, placed: PlacedPools) -> Iterator[str]:
    workload, instance = search.book.workload, search.instance
    used = sum(instance.sizes[idx] for idx in placed.size_idxs)
    if used < instance.num_devices:
        yield f"{instance.num_devices - used} of {instance.num_devices} devices stay idle"
    if workload.staleness:
        yield (
            f"samples are generated with weights up to {workload.staleness:g} steps old: the loss is weighed by importance "
            "ratios; what that does to learning is not planned"
        )
    if workload.shared:
        rate = 8 * workload.received_bytes / search.answer.objective
        gradient = search.book.workload.model_of("actor").num_params * GRADIENT_BYTES
        given = workload.received_prompts * workload.responses
        yield (
            f"{given} of {workload.samples} responses a step come from {counted(workload.islands - 1, 'other island')}: "
            f"{format_bytes(workload.received_bytes)} a step, {rate / 1e6:.2g} Mbit/s (a sum of gradients: "
            f"{format_bytes(gradient)}); what models learn from the responses of others is not planned"
        )
    if workload.fetches > 1:
        yield (
            f"samples are scored and updated on in {workload.fetches} parts, each while others are generated; the calls of a "
            "step are drawn one level after the other"
        )
    if workload.oversample > 1:
        yield (
            f"{workload.oversample:g} responses are under way for each that a step takes; those carried over have tokens of older "
            "weights"
        )
    if placed.offloaded:
        names = ", ".join(search.roles[copy] for copy in sorted(placed.offloaded))
        yield f"on the hosts between calls: {names}"
