"""Passes that are alike, run once: of many micro-batches the first three and the last go through a stage, the others are copies.

What a pass writes to the log is a template: entries that it begins, and entries that it ends, each named by the pass that began it.
The templates of the second and the third micro-batch must be equal, entry by entry, message by message; a rank of which they are
not is rehearsed in full (`NotPeriodicError`). A pass that is copied takes and gives tensors of the right shapes, so that the
schedule, its transfers and what it keeps for later are its own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...cost_models.pipeline.orders import Action, Kind
from ..parallel_model import ParallelModel
from .recorder import Log, Message, Recorder

FIRST = 3
"""Micro-batches that run: the first makes gradients, the next two are compared."""


class NotPeriodicError(Exception):
    """Two passes that should be alike are not."""


class _Origin(NamedTuple):
    """The pass that began an entry, over the same micro-batch: of which stage and kind, and the entry's number there."""

    stage: int
    kind: Kind
    number: int


class _Template(NamedTuple):
    """What a pass does, whichever micro-batch it is of: its events, the entries that it begins, what it sends and computes."""

    events: list[_Origin | int]
    entries: list[tuple[int, str]]
    messages: dict[Message, tuple[int, int]]
    flops: Counter[str]


@dataclass
class _Pass:
    """What one pass did: entries that it began (-1: a copy's that is left out), all events, entries that it gives to others."""

    entries: list[int] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    excluded: set[int] = field(default_factory=set)
    messages: dict[Message, tuple[int, int]] = field(default_factory=dict)
    flops: Counter[str] = field(default_factory=Counter)


class Repetition:
    """Tells which passes run, and copies the others into a recorder's log."""

    def __init__(self, recorder: Recorder, num_microbatches: int, is_alike: Callable[[int], bool]) -> None:
        self._recorder, self._count, self._is_alike = recorder, num_microbatches, is_alike
        self._passes: dict[Action, _Pass] = {}
        self._owners: dict[int, tuple[Action, int]] = {}
        self._copied: dict[int, int] = {}
        self._ended_in: dict[int, Action] = {}
        self._late: dict[tuple[int, str], set[int]] = {}
        self._pending: list[int] = []
        self._starts: list[tuple[int, Action]] = []
        self._templates: dict[tuple[int, str], _Template] = {}
        self.copies_on_begin = False  # copied where they begin; else where the stage's module would run
        self._current: Action | None = None
        self.action: Action | None = None
        self._snapshot: tuple[dict[Message, tuple[int, int]], Counter[str]] = ({}, Counter())
        self._start = 0

    def is_copied(self, action: Action | None) -> bool:
        """Tell whether a pass is a copy of the one of the third micro-batch."""
        if action is None:
            return False
        return FIRST <= action.micro_batch < self._count - 1 and self._is_alike(action.micro_batch)

    # Passes that run

    def begin(self, action: Action) -> None:
        """Note that a pass begins; what happened since the last one belongs to that."""
        self.settle()
        self._recorder.log.events += [~entry for entry in self._pending]
        self._pending.clear()
        self._starts.append((len(self._recorder.log.events), action))
        self.action = action
        if not self.is_copied(action):
            self._current, self._start, self._snapshot = (
                action,
                len(self._recorder.log.events),
                _counts(self._recorder.log),
            )

    def end(self) -> None:
        """Note that the pass that began has ended; what follows, until the next, still counts to its events."""
        action, log = self._current, self._recorder.log
        if action is None:
            return
        messages, flops = _counts(log)
        before_messages, before_flops = self._snapshot
        one = self._passes.setdefault(action, _Pass())
        one.messages = {
            key: (count - before_messages.get(key, (0, 0))[0], size - before_messages.get(key, (0, 0))[1])
            for key, (count, size) in messages.items()
            if (count, size) != before_messages.get(key, (0, 0))
        }
        one.flops = flops - before_flops
        one.entries = [event for event in log.events[self._start :] if event >= 0]
        for number, entry in enumerate(one.entries):
            self._owners[entry] = action, number

    def exclude(self, tensors: Sequence[Any]) -> None:
        """Leave what a pass gives to others out of its template: a copy makes these tensors itself."""
        assert self._current is not None
        one = self._passes.setdefault(self._current, _Pass())
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                one.excluded.add(self._recorder.entry_of(tensor))

    def settle(self) -> None:
        """Close the pass that ended last."""
        action, self._current = self._current, None
        if action is None:
            return
        log = self._recorder.log
        one = self._passes[action]
        one.events = log.events[self._start :]

    # Passes that are copied

    def copy(self) -> None:
        """Write into the log what the pass at hand does, which is alike to earlier ones.

        Raises:
            NotPeriodicError: the earlier ones differ.
        """
        action = self.action
        assert action is not None
        key = action.stage, action.kind
        if key not in self._templates:
            alike = [action._replace(micro_batch=idx) for idx in (1, 2)]
            if not all(
                one in self._passes for one in alike
            ):  # backward passes over chunks under gpipe begin with the last one
                raise NotPeriodicError
            second, third = (self._template(one) for one in alike)
            if second != third:
                raise NotPeriodicError
            self._templates[key] = third
            second_action = action._replace(micro_batch=1)
            entries = self._passes[second_action].entries
            self._late[key] = {
                number
                for number, entry in enumerate(entries)
                if _is_leftover(second_action, self._ended_in.get(entry, second_action))
            }
        recorder, log = self._recorder, self._recorder.log
        source = self._passes[action._replace(micro_batch=FIRST - 1)]
        made = list[int]()
        for item in self._templates[key].events:
            if isinstance(item, int):
                entry = source.entries[item]
                made.append(-1 if entry in source.excluded else recorder.copy_entry(entry))
                if made[-1] >= 0:
                    self._copied[made[-1]] = entry
                continue
            origin = Action(item.stage, item.kind, action.micro_batch)
            entry = (made if origin == action else self._passes[origin].entries)[item.number]
            if entry >= 0:
                log.events.append(~entry)
        self._passes[action] = _Pass(entries=made)
        self._pending += [made[number] for number in self._late[key] if made[number] >= 0]
        for message, (count, size) in source.messages.items():
            log.messages[message][0] += count
            log.messages[message][1] += size
        log.flops.update(source.flops)
        if log.trace is not None:
            log.trace.copy(action._replace(micro_batch=FIRST - 1), action)

    def on_end(self, entry: int) -> None:
        """Note in which pass a tensor's storage ended."""
        if self.action is not None:
            self._ended_in[entry] = self.action

    def finish(self) -> None:
        """Say of copies what was said of their sources, and let what a pass leaves to the next one to free end there."""
        log = self._recorder.log
        for copied, source in self._copied.items():
            if source in log.marks:
                log.marks[copied] = log.marks[source]
        moved = dict[int, int]()
        run = [idx for idx, (_, action) in enumerate(self._starts) if not self.is_copied(action)]
        for idx, following in pairwise(run):
            action, (start, _) = self._starts[idx][1], self._starts[idx + 1]
            late = self._late.get((action.stage, action.kind), set()) if action.micro_batch else None
            soon = {passed for _, passed in self._starts[idx + 1 : following + 1]}
            for number, entry in enumerate(self._passes[action].entries if following > idx + 1 else ()):
                ended_in = self._ended_in.get(entry, action)
                is_late = number in late if late is not None else ended_in in soon
                if is_late and _is_leftover(action, ended_in):
                    moved[entry] = start
        self._move(moved)

    def _move(self, ends: dict[int, int]) -> None:
        """Let entries end at earlier positions of the log."""
        log, moved = self._recorder.log, defaultdict[int, list[int]](list)
        for entry, position in ends.items():
            moved[position].append(~entry)
        events, positions = list[int](), list[int]()
        for idx, event in enumerate(log.events):
            events += moved.get(idx, ())
            positions.append(len(events))
            if event >= 0 or ~event not in ends:
                events.append(event)
        positions.append(len(events))
        log.events[:] = events
        for phase in log.phase_list:
            phase.start = positions[phase.start]
            phase.end = positions[phase.end] if phase.end >= 0 else phase.end

    def _template(self, action: Action) -> _Template:
        """Return what a pass does. Entries of others than its micro-batch's passes are left out."""
        one, log = self._passes[action], self._recorder.log
        numbers, template = {entry: number for number, entry in enumerate(one.entries)}, list[_Origin | int]()
        sizes = list[tuple[int, str]]()
        for event in one.events:
            if event in numbers:
                template.append(numbers[event])
                sizes.append((log.num_bytes[event], log.ops[event]))
            elif event < 0 and ~event in self._owners:
                origin, number = self._owners[~event]
                if ~event not in self._passes[origin].excluded and not _is_leftover(origin, action):
                    template.append(_Origin(origin.stage, origin.kind, number))
        return _Template(template, sizes, one.messages, one.flops)


def _is_leftover(action: Action, ended_in: Action) -> bool:
    """Tell whether what a pass began, which another ended, served no other pass over the micro-batch but was not yet let go."""
    return ended_in != action and (ended_in.micro_batch != action.micro_batch or action.kind in ("W", "BW"))


def _counts(log: Log) -> tuple[dict[Message, tuple[int, int]], Counter[str]]:
    return {key: (count, size) for key, (count, size) in log.messages.items()}, log.flops.copy()


def repeat_passes(model: ParallelModel, recorder: Recorder) -> None:
    """Let a recorder copy what is alike of a model's passes from now on; none where the micro-batches are few or uneven."""
    share, plan = model.share, model.plan
    count = len(share.shape)
    if count <= FIRST + 1 or plan.offload is not None or not plan.workload.has_backward:
        return
    alike = [(size, share.passes[idx]) == (share.shape[1], share.passes[1]) for idx, size in enumerate(share.shape)]
    if not alike[2]:
        return
    repetition = recorder.repetition = Repetition(recorder, count, alike.__getitem__)
    schedule = model._schedule
    if schedule is None:
        loss_fn = model._loss_fn
        model._loss_fn = lambda module, inputs, targets: (
            torch.zeros((), requires_grad=True)
            if repetition.is_copied(repetition.action)
            else loss_fn(module, inputs, targets)
        )
        repetition.copies_on_begin = True
        return
    for stage in getattr(schedule, "_stages", None) or [schedule._stage]:  # type: ignore[union-attr]
        _repeat_stage(stage, repetition)


def _repeat_stage(stage: Any, repetition: Repetition) -> None:
    forward, backward = stage.forward_maybe_with_nosync, stage.backward_maybe_with_nosync

    def forward_or_copy(*args: Any, **kwargs: Any) -> Any:
        if not repetition.is_copied(repetition.action):
            output = forward(*args, **kwargs)
            repetition.exclude([output])
            return output
        repetition.copy()
        (shape,) = stage._stage_meta.outputs
        return torch.empty(tuple(shape.shape), dtype=shape.dtype, requires_grad=True)

    def backward_or_copy(kind: str, given: dict[str, Any], last_backward: bool = False) -> Any:
        if not repetition.is_copied(repetition.action):
            result = backward(kind, given, last_backward=last_backward)
            repetition.exclude(result[0])
            return result
        repetition.copy()
        inputs = given["input_values"] if kind != "weight" else ()
        gradients = tuple(torch.empty_like(value) if value.requires_grad else None for value in inputs)
        if kind == "input":  # the received tensors keep theirs
            for value, gradient in zip(inputs, gradients, strict=True):
                value.grad = gradient
        return gradients, None

    stage.forward_maybe_with_nosync, stage.backward_maybe_with_nosync = forward_or_copy, backward_or_copy
