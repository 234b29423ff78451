"""Ranks in the middle of a pipeline that hold alike stages: one is rehearsed, the others do its passes in their own order.

Such ranks differ by how far ahead of the backward passes they run, thus by what is alive together. The log of one is cut where a
pass begins, what comes between two passes with the one before, and put together again in the schedule's order for another. An entry
that a pass left for the next one to free ends with whichever is next.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ...cost_models.pipeline.orders import Action, Kind
from ...cost_models.pipeline.simulation import pipeline_order
from ...schema.training_plan import TrainingPlan
from .kinds import RankKind
from .recorder import Log, Phase

Contents = tuple[object, ...]


def contents_in_the_middle(plan: TrainingPlan, kind: RankKind) -> Contents | None:
    """Return what tells ranks apart that do the same passes; None where a rank is at an end or two of its stages are neighbours."""
    last = len(plan.stages) - 1
    is_apart = all(b - a > 1 for a, b in zip(kind.stages, kind.stages[1:], strict=False))
    if plan.layout.pp < 4 or plan.degrees_by_stage or {0, last} & set(kind.stages) or not is_apart:
        return None
    layers = list(plan.staged_model.iter_layers())
    return kind.shape, *(
        tuple((repr(layers[idx]), plan.stages[stage].recompute_of(idx)) for idx in plan.stages[stage].layer_idxs)
        for stage in kind.stages
    )


def reordered(log: Log, plan: TrainingPlan, source: RankKind, target: RankKind) -> Log | None:
    """Return the log of a rank, made of that of another with the same contents; None where it has passes that the other has not."""
    positions = {stage: idx for idx, stage in enumerate(source.stages)}
    pieces, phases = dict[Action, list[int]](), dict[Action, list[int]]()
    marked = [idx for idx, phase in enumerate(log.phase_list) if phase.action is not None]
    first, last = marked[0], marked[-1] + 1
    for idx, following in zip(marked, [*marked[1:], last], strict=True):
        action = log.phase_list[idx].action
        assert action is not None
        action = action._replace(stage=target.stages[positions[action.stage]])
        pieces[action] = log.events[log.phase_list[idx].start : log.phase_list[following].start]
        phases[action] = list(range(idx, following))
    order = [part for action in _order(plan, target) for part in _parts(action, pieces)]
    if sorted(order) != sorted(pieces):
        return None
    start, end = log.phase_list[first].start, log.phase_list[last].start
    events, begun, early = log.events[:start], {event for event in log.events[:start] if event >= 0}, set[int]()
    phase_list, new_idx = list(log.phase_list[:first]), {idx: idx for idx in range(first)}

    def append(piece: Sequence[int]) -> None:
        for event in piece:
            if event >= 0:
                begun.add(event)
            elif ~event not in begun:  # of a pass that comes later here
                early.add(~event)
                continue
            events.append(event)

    for action in order:
        leftover = early & begun
        events += [~entry for entry in leftover]
        early -= leftover
        shift = len(events) - log.phase_list[phases[action][0]].start
        append(pieces[action])
        for idx in phases[action]:
            phase, new_idx[idx] = log.phase_list[idx], len(phase_list)
            of = None if phase.action is None else action
            name = phase.name if of is None else re.sub(r"stage \d+$", f"stage {action.stage}", phase.name)
            phase_list.append(Phase(name, phase.kind, of, phase.start + shift, min(phase.end + shift, len(events))))
    shift = len(events) - end
    append(log.events[end:])
    for idx in range(last, len(log.phase_list)):
        phase, new_idx[idx] = log.phase_list[idx], len(phase_list)
        phase_list.append(replace(phase, start=phase.start + shift, end=phase.end + shift if phase.end >= 0 else -1))
    names = _layer_names(plan, source, target)
    return replace(
        log, events=events, phase_list=phase_list, phases=[new_idx[idx] for idx in log.phases],
        modules=[_renamed(where, names) if isinstance(where, str) else where for where in log.modules],
        passes=[(begins, ends, _renamed(name, names)) for begins, ends, name in log.passes],
    )  # fmt: skip


def _order(plan: TrainingPlan, kind: RankKind) -> Sequence[Action]:
    return pipeline_order(plan)[plan.rank_of_stage[kind.stages[0]]]


def _parts(action: Action, pieces: dict[Action, list[int]]) -> list[Action]:
    """Return a pass, or the two that it is where the other rank has split it."""
    kinds: tuple[Kind, ...] = ("BW",) if action in pieces or action.kind != "BW" else ("B", "W")
    return [action] if kinds == ("BW",) else [action._replace(kind=kind) for kind in kinds]


def _layer_names(plan: TrainingPlan, source: RankKind, target: RankKind) -> dict[str, str]:
    """Return names of blocks, which count after the embedding; both halves of one have its name."""
    pairs, halves = zip(source.stages, target.stages, strict=True), 2 if plan.layout.half_blocks else 1
    return {
        f"layers.{(a - 1) // halves}": f"layers.{(b - 1) // halves}"
        for one, other in pairs
        for a, b in zip(plan.stages[one].layer_idxs, plan.stages[other].layer_idxs, strict=True)
    }


def _renamed(module: str, names: dict[str, str]) -> str:
    return re.sub(r"\blayers\.\d+", lambda match: names.get(match[0], match[0]), module)
