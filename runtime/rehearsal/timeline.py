"""The second opinion on time: what a rehearsed step runs, laid out over streams by list scheduling.

Every stream works its entries off in order, an entry when those that it waits for have ended (trace.py). Kernels and a collective
that run at once slow each other down by the law of the closed form; collectives over links of one level share these. A second of
the step counts to what the compute stream does in it; while it waits, to the axis of the collective that it waits for, which also
has what it takes from kernels that run next to it. How long kernels wait for the host is told pass by pass, by the formula of the
closed form (hardware.machine.waiting_s), and is dealt out to them by what the host takes for each: collectives go on meanwhile.

Under a pipeline each kind of pass is laid out by itself, and the passes are put together by the schedule's order with the transfers
between stages (cost_models/pipeline/replay.py): T = replay of the passes + max over ranks of what lies outside them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

import numpy as np

from ...cost_models.hardware.collectives import p2p_s, slowdown_law
from ...cost_models.hardware.machine import waiting_s
from ...cost_models.hardware.node_links import Hops
from ...cost_models.pipeline.orders import Action, planned_order
from ...cost_models.pipeline.replay import PipelineShape, makespan_s
from ...schema.training_plan import TrainingPlan
from ...schema.units import FloatArray
from .kinds import RankKind
from .trace import OperatorSeconds, Run, Trace

Parts = dict[str, float]


def lay_out(runs: Sequence[Run], costs: OperatorSeconds, waits_s: Sequence[float] | None = None) -> Parts:
    """Return the seconds from the first start to the last end of entries, by what they are spent on.

    ``waits_s``: how long each waits for the host; None: the entries are one pass.
    """
    waits_s = _host_waits(runs, costs) if waits_s is None else waits_s
    slows_sent = float(slowdown_law(0.0, costs.scenario.coefficients).collective)
    queues: dict[str, deque[int]] = {"compute": deque()}
    for position, run in enumerate(runs):
        queues.setdefault(run.stream, deque()).append(position)
    done, parts = [False] * len(runs), Counter[str]()
    remaining = [run.seconds + wait for run, wait in zip(runs, waits_s, strict=True)]
    idle = [wait / max(run.seconds + wait, 1e-15) for run, wait in zip(runs, waits_s, strict=True)]
    while any(queues.values()):
        heads = [queue[0] for queue in queues.values() if queue]
        active = [idx for idx in heads if all(done[one] for one in runs[idx].waits)]
        assert active, "entries wait for each other"
        first = next((idx for idx in active if runs[idx].stream == "compute"), None)
        sent = max((idx for idx in active if idx != first), key=lambda idx: runs[idx].slows, default=None)
        is_kernel = first is not None and runs[first].level is None
        computing = 1 - idle[first] if first is not None and is_kernel else 0.0
        of_level = Counter(runs[idx].level for idx in active if runs[idx].level is not None)
        rates = {idx: 1 / of_level.get(runs[idx].level, 1) / (1 + slows_sent * computing) for idx in active}
        if first is not None and is_kernel:
            rates[first] = 1 / (1 + (0.0 if sent is None else computing * runs[sent].slows))
        step = min(remaining[idx] / rate for idx, rate in rates.items())
        if first is None:
            parts[_awaited(queues["compute"], runs, done, active)] += step
        else:
            parts[runs[first].part] += step * rates[first] * (1 - idle[first])
            parts["dispatch"] += step * rates[first] * idle[first]
            if sent is not None:
                parts[runs[sent].part] += step * (1 - rates[first])
        for idx, rate in rates.items():
            remaining[idx] -= step * rate
            if remaining[idx] <= 1e-15:
                done[idx] = True
                queues[runs[idx].stream].popleft()
    return dict(parts)


def _awaited(compute: deque[int], runs: Sequence[Run], done: Sequence[bool], active: Sequence[int]) -> str:
    """Return what the compute stream waits for: the last entry that its next one needs, or once it has ended any other."""
    waits = [idx for idx in runs[compute[0]].waits if not done[idx]] if compute else list(active)
    part = runs[waits[-1]].part
    return "dp" if part in ("parameter_copies", "optimizer") else part


def step_time(plan: TrainingPlan, traces: Mapping[RankKind, Trace]) -> Parts:
    """Return the seconds of a step by part, given the entries of every kind of rank: those of the rank that takes longest."""
    if plan.layout.pp == 1:
        return max((_in_passes(trace) for trace in traces.values()), key=lambda parts: sum(parts.values()))
    return _pipelined(plan, traces)


def _in_passes(trace: Trace) -> Parts:
    """Return the seconds of a step without a pipeline: passes overlap, and are laid out together."""
    waits_s = [run.host_s if trace.costs.host.adds else 0.0 for run in trace.runs]
    for begin, end in trace.spans.values():
        waits_s[begin:end] = _host_waits(trace.runs[begin:end], trace.costs)
    parts = lay_out(trace.runs, trace.costs, waits_s)
    parts["optimizer"] = parts.get("optimizer", 0.0) + trace.costs.host.step_s
    return parts


def _host_waits(runs: Sequence[Run], costs: OperatorSeconds) -> list[float]:
    """Return how long each entry of a pass waits for the host; only what is on the kernels' stream does."""
    of_kernels = [run.host_s if run.stream == "compute" else 0.0 for run in runs]
    if costs.host.adds or not sum(of_kernels):
        return of_kernels
    device_s, host_s = sum(run.seconds for run in runs if run.stream == "compute"), sum(run.host_s for run in runs)
    waits_s = float(waiting_s(np.array(device_s), np.array(host_s), costs.host.overlap_norm))
    return [waits_s * one / sum(of_kernels) for one in of_kernels]


def _pipelined(plan: TrainingPlan, traces: Mapping[RankKind, Trace]) -> Parts:
    layout, m = plan.layout, plan.num_microbatches
    shape = PipelineShape(
        schedule=layout.schedule, pp=layout.pp, num_model_chunks=layout.num_model_chunks, num_microbatches=m,
        order=planned_order(plan),
    )  # fmt: skip
    passes: dict[tuple[int, str], Parts] = {}
    after: list[Parts] = []
    sent, first_s = 0, np.zeros(shape.num_stages)
    for kind, trace in traces.items():
        stages, typical = sorted({action.stage for action in trace.spans}), _typical(trace)
        runs = {key: trace.part(*trace.spans[action]) for key, action in typical.items()}
        for (stage, which), of_pass in runs.items():
            # Ahead of a weight pass, few and long kernels, the host launches what comes next: both halves count as one pass.
            halves = [runs[key] for key in ((stage, "B"), (stage, "W")) if which in ("B", "W") and key in runs]
            waits_s = _host_waits([run for half in halves for run in half] or of_pass, trace.costs)
            waits_s = waits_s[-len(of_pass) :] if which == "W" else waits_s[: len(of_pass)]
            passes[kind.stages[stages.index(stage)], which] = lay_out(of_pass, trace.costs, waits_s)
        for stage in stages:  # parameters are gathered in the first pass, and stay
            first = lay_out(trace.part(*trace.spans[Action(stage, "F", 0)]), trace.costs)
            idx = kind.stages[stages.index(stage)]
            first_s[idx] = max(sum(first.values()) - sum(passes[idx, "F"].values()), 0.0)
        parts = lay_out(trace.outside(), trace.costs)
        parts["optimizer"] = parts.get("optimizer", 0.0) + trace.costs.host.step_s
        after.append(parts)
        sent = max(sent, trace.boundary_bytes)
    cluster = plan.cluster
    hops = Hops(np.array([layout.pp]), np.array([layout.stage_ranks]), "chain")
    each_way = float(p2p_s(np.array([float(sent)]), hops, cluster)[0])

    def seconds(which: str, *, other: str = "") -> FloatArray:
        of_stages = (
            passes.get((stage, which)) or passes.get((stage, other)) or {} for stage in range(shape.num_stages)
        )
        return np.array([sum(parts.values()) for parts in of_stages])

    forward, backward, weight = seconds("F"), seconds("B", other="BW"), seconds("W")
    makespan = makespan_s(shape, forward + each_way, backward + each_way, weight)
    busy = np.bincount(shape.rank_of_stage, forward + backward + weight + 2 * each_way, layout.pp)
    slowest, total = int(np.argmax(busy)), Counter[str]()
    for stage in np.flatnonzero(np.array(shape.rank_of_stage) == slowest).tolist():
        for which in ("F", "W", "B" if (stage, "B") in passes else "BW"):
            total.update({name: m * part for name, part in passes.get((stage, which), {}).items()})
        total["pp"] += 2 * m * each_way
    total["bubble"] = makespan - m * float(busy[slowest])
    # The first micro-batch waits for the gathers of all stages on its way through the first chunks.
    others_s = np.bincount(np.array(shape.rank_of_stage)[layout.pp :], first_s[layout.pp :], layout.pp)
    total["dp"] += float(first_s[: layout.pp].sum() + others_s.max())
    total.update(max(after, key=lambda parts: sum(parts.values())))
    return dict(total)


def _typical(trace: Trace) -> dict[tuple[int, str], Action]:
    """Return of each kind of pass of a stage the second one that ran, or the only one: the first makes gradients.

    A stage may run the first backward passes undivided and divide later ones.
    """
    of_kind: dict[tuple[int, str], list[Action]] = {}
    for action in sorted(trace.spans, key=lambda action: action.micro_batch):
        of_kind.setdefault((action.stage, action.kind), []).append(action)
    return {key: actions[min(1, len(actions) - 1)] for key, actions in of_kind.items()}
