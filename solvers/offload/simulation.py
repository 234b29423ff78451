"""A step as a runtime executes it: whole copies on streams, events between them, a window of blocks ahead.

The streams are compute, to_host, to_device, host (its processors) and storage. Each works on one job at a time, the first of its
list whose conditions hold; jobs are not interrupted (`run_jobs`). Copies of both directions at once share (1 + DUPLEX) of one rate;
compute next to a copy loses the instance's share of it. A run that is known to last too long can be given up early.

    microbatch_jobs   forward and backward passes of one micro-batch with their copies      choice -> jobs
    update_jobs       the update, layer by layer and in pieces                              choice -> jobs
    simulate          both, and the bytes in use over time                                  choice -> SimulatedStep
    check             the step recomputed, every copy after what makes its bytes; memory within its caps
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from ...schema.units import BoolArray, FloatArray
from ..tolerances import ROUNDING, SUMMED
from .instance import Links, OffloadChoice, OffloadInstance

COMPUTE, TO_HOST, TO_DEVICE, HOST, STORAGE = STREAMS = range(5)

_MIN_RATE = 0.05
"""Share of full speed that compute keeps next to copies, whatever was measured: with none a job would never end."""

MAX_PIECES = 3
"""Pieces of states on the device at once: one that comes, one being updated, one that leaves (runtime/offload/optimizer.py)."""

MANY_PIECES = 160
"""Pieces of an update that are simulated; of more, one is so little of the update that undivided layers take as long."""


class Job(NamedTuple):
    """Work of one stream; ``after`` are jobs that end before it starts, ``begun`` ones that have at least started."""

    stream: int
    seconds: float
    after: tuple[int, ...] = ()
    begun: tuple[int, ...] = ()


def run_jobs(jobs: list[Job], instance: OffloadInstance, *, within_s: float = np.inf) -> tuple[FloatArray, FloatArray]:
    """Return start and end of each job [J]; of a stream's jobs whose conditions hold the first of the list is taken.

    As soon as what a stream still has to do ends after ``within_s`` even at full speed, the run is given up: jobs that have not
    ended then have infinite ends.
    """
    start, end = [np.inf] * len(jobs), [np.inf] * len(jobs)
    missing = [len(job.after) + len(job.begun) for job in jobs]  # how many others each job still waits for
    by_start, by_end = dict[int, list[int]](), list[list[int]]([] for _ in jobs)  # the jobs that wait for each one
    ready: list[list[int]] = [[] for _ in STREAMS]
    to_do, used = [0.0] * len(STREAMS), sorted({job.stream for job in jobs})
    for idx, job in enumerate(jobs):
        for other in job.after:
            by_end[other].append(idx)
        for other in job.begun:
            by_start.setdefault(other, []).append(idx)
        to_do[job.stream] += job.seconds
        if not missing[idx]:
            ready[job.stream].append(idx)  # in order, so a heap
    # The job of each stream, and its seconds at full speed.
    working, remaining = [-1] * len(STREAMS), [np.inf] * len(STREAMS)
    now, done, rates = 0.0, 0, _rates(instance.links)
    while done < len(jobs):
        freed: list[int] = []
        for stream in used:
            if working[stream] < 0 and ready[stream]:
                if now + to_do[stream] > within_s:
                    return np.array(start), np.array(end)
                first = heappop(ready[stream])
                start[first], working[stream], remaining[stream] = now, first, jobs[first].seconds
                to_do[stream] -= remaining[stream]
                freed += by_start.get(first, ())
        if not freed:
            rate = rates[2 * (working[TO_HOST] >= 0) + (working[TO_DEVICE] >= 0)]
            step = np.inf
            for stream in used:
                if remaining[stream] < step * rate[stream]:
                    step = remaining[stream] / rate[stream]
            assert step < np.inf, "a job waits for one that never runs"
            now += step
            for stream in used:
                remaining[stream] -= step * rate[stream]
                if remaining[stream] <= ROUNDING * now:
                    idx = working[stream]
                    working[stream], remaining[stream], end[idx], done = -1, np.inf, now, done + 1
                    freed += by_end[idx]
        for idx in freed:
            missing[idx] -= 1
            if not missing[idx]:
                heappush(ready[jobs[idx].stream], idx)
    return np.array(start), np.array(end)


def _rates(links: Links) -> list[list[float]]:
    """Return the rates of all streams as shares of full speed [4, 5], by 2 (to the host works) + (to the device works)."""
    rates = list[list[float]]()
    for down, up in itertools.product((False, True), repeat=2):
        lost = links.compute_lost_to_host * down + links.compute_lost_to_device * up
        copy = (1.0 + links.duplex) / 2 if down and up else 1.0
        rates.append([max(1.0 - lost, _MIN_RATE), copy, copy, 1.0, 1.0])
    return rates


@dataclass(frozen=True)
class SimulatedStep:
    """Seconds of a step and of its parts; the most bytes on the device until the backward pass of a micro-batch begins, in it, and
    in the update; what lies elsewhere and what moves in a step, bytes.
    """

    step_s: float
    microbatch_s: float
    update_s: float
    forward_bytes: float
    backward_bytes: float
    update_bytes: float
    host_bytes: float
    storage_bytes: float
    to_host_bytes: float
    to_device_bytes: float

    @property
    def microbatch_bytes(self) -> float:
        """The most on the device in a micro-batch."""
        return max(self.forward_bytes, self.backward_bytes)

    @property
    def peak_bytes(self) -> float:
        """The most on the device."""
        return max(self.microbatch_bytes, self.update_bytes)


def simulate(instance: OffloadInstance, choice: OffloadChoice, *, prefetch: int = 1) -> SimulatedStep:
    """Run one micro-batch and the update; micro-batches repeat."""
    simulated = simulate_within(instance, choice, np.inf, {}, prefetch=prefetch)
    assert simulated is not None
    return simulated


def simulate_within(
    instance: OffloadInstance, choice: OffloadChoice, within_s: float, updates: dict[bytes, float], *, prefetch: int = 1
) -> SimulatedStep | None:
    """Run `simulate` until a step is known to take longer; ``updates`` remembers updates of the same problem."""
    masks = (choice.host_optimizer, choice.streamed_optimizer, choice.parameters, choice.storage)
    key = np.concatenate(masks).tobytes()
    if key not in updates:
        updates[key] = float(run_jobs(update_jobs(instance, choice), instance)[1].max(initial=0.0))
    m, update_s = instance.num_microbatches, updates[key]
    jobs, indices = microbatch_jobs(instance, choice, prefetch)
    start, end = run_jobs(jobs, instance, within_s=(within_s - update_s) / m)
    microbatch_s = float(end.max(initial=0.0))
    if m * microbatch_s + update_s > within_s:
        return None
    forward_bytes, backward_bytes = _peak_bytes(instance, choice, indices, start, end)
    moved, p = choice.take(instance.moved_bytes).sum(), choice.parameters
    streamed, host = instance.state_bytes[choice.streamed_optimizer].sum(), choice.host_optimizer
    gradients, masters = instance.gradient_bytes, instance.parameter_bytes
    return SimulatedStep(
        step_s=m * microbatch_s + update_s,
        microbatch_s=microbatch_s,
        update_s=update_s,
        forward_bytes=forward_bytes,
        backward_bytes=backward_bytes,
        update_bytes=update_bytes(instance, choice),
        host_bytes=host_bytes(instance, choice),
        storage_bytes=float(instance.state_bytes[choice.storage].sum()),
        to_host_bytes=float(m * (moved + gradients[p].sum()) + gradients[host].sum() + streamed),
        to_device_bytes=float(m * (moved + 2 * masters[p].sum()) + masters[host].sum() + streamed),
    )


@dataclass(frozen=True)
class JobIndices:
    """Jobs of each layer: passes [L]; copies where there are some: activations, parameters before each pass, gradients."""

    forward: list[int]
    backward: list[int]
    down: dict[int, int]
    up: dict[int, int]
    gathered: list[tuple[int, int, int]]  # layer, copy, the pass that waits for it
    reduced: list[tuple[int, int]]  # layer, copy


def microbatch_jobs(i: OffloadInstance, choice: OffloadChoice, prefetch: int) -> tuple[list[Job], JobIndices]:
    """Return passes in order; activations leave after a forward pass and come back in a window before the backward pass."""
    size, links, moved = i.num_layers, i.links, choice.take(i.moved_bytes).tolist()
    streamed = (i.parameter_bytes * choice.parameters).tolist()
    # Indices of the passes: forward 0..L-1, backward L..2L-1 from the last layer on.
    forward, backward = list(range(size)), [2 * size - 1 - idx for idx in range(size)]
    seconds = [*i.forward_s.tolist(), *(i.backward_s + choice.take(i.repeated_s)).tolist()[::-1]]
    jobs = [Job(COMPUTE, pass_s, (idx - 1,) if idx else ()) for idx, pass_s in enumerate(seconds)]
    down, up, copy_for = dict[int, int](), dict[int, int](), dict[int, int]()
    gathered, reduced = list[tuple[int, int, int]](), list[tuple[int, int]]()
    for idx in range(size):
        if moved[idx] > 0:
            down[idx] = len(jobs)
            jobs.append(Job(TO_HOST, moved[idx] / links.to_host_bytes_per_s, (forward[idx],)))
    waiting: list[int] = []  # passes that wait for a copy up, in order
    for pass_idx, idx in enumerate([*range(size), *reversed(range(size))]):
        is_backward = pass_idx >= size
        bytes_ = streamed[idx] + is_backward * moved[idx]
        if bytes_ <= 0:
            continue
        opens = (waiting[-prefetch],) if len(waiting) >= prefetch else ()
        after = (forward[-1], *((down[idx],) if idx in down else ())) if is_backward else ()
        copy_for[pass_idx] = len(jobs)
        if streamed[idx]:
            gathered.append((idx, len(jobs), pass_idx))
        if is_backward:
            up[idx] = len(jobs)
        jobs.append(Job(TO_DEVICE, bytes_ / links.to_device_bytes_per_s, after, opens))
        waiting.append(pass_idx)
    for pass_idx, copy in copy_for.items():
        jobs[pass_idx] = Job(COMPUTE, jobs[pass_idx].seconds, (*jobs[pass_idx].after, copy))
    gradients_s = i.gradient_bytes / links.to_host_bytes_per_s
    for idx in map(int, reversed(np.flatnonzero(choice.parameters))):
        reduced.append((idx, len(jobs)))
        jobs.append(Job(TO_HOST, float(gradients_s[idx]), (backward[idx],)))
    return jobs, JobIndices(forward, backward, down, up, gathered, reduced)


def _peak_bytes(
    i: OffloadInstance, choice: OffloadChoice, indices: JobIndices, start: FloatArray, end: FloatArray
) -> tuple[float, float]:
    """Return the most bytes on the device until backward passes begin, and from then on."""
    moved, retained, working = choice.take(i.moved_bytes), choice.take(i.retained_bytes), choice.take(i.working_bytes)
    away = choice.host_optimizer | choice.streamed_optimizer
    gone = i.layer_bytes[choice.parameters].sum() + i.state_bytes[away].sum()
    gradients, fixed = i.gradient_bytes, i.resident_bytes - gone + i.fixed_bytes + working.max(initial=0.0)
    moves, down = np.array([*indices.down], dtype=np.int64), np.array([*indices.down.values()], dtype=np.int64)
    back = np.array([indices.up[idx] for idx in indices.down], dtype=np.int64)
    made, last = choice.parameters | (not i.gradients_accumulate), np.array(indices.backward)
    is_resident = ~choice.parameters
    # Parameters of a block that runs are among the fixed bytes.
    gathered, copy, pass_idx = np.array(indices.gathered, dtype=np.int64).reshape(-1, 3).T
    reduced, sent = np.array(indices.reduced, dtype=np.int64).reshape(-1, 2).T
    turn = end[indices.forward[-1]]
    comes = [
        (start[indices.forward], retained + moved),
        (start[back], moved[moves]),
        (start[last[made]], gradients[made]),
        (start[copy], i.parameter_bytes[gathered]),
        (np.array([turn]), np.array([i.turn_bytes])),
    ]
    goes = [
        (end[last], retained + moved),
        (end[down], moved[moves]),
        (start[pass_idx], i.parameter_bytes[gathered]),
        (end[sent], gradients[reduced]),
        (end[last[is_resident]], i.freed_bytes[is_resident]),
        (end[last[-1:]], np.array([i.turn_bytes])),
    ]
    times = np.concatenate([when for when, _ in [*comes, *goes]])
    bytes_ = np.concatenate([*(size for _, size in comes), *(-size for _, size in goes)])
    going = np.arange(len(times)) >= sum(len(when) for when, _ in comes)
    sorted_ = np.lexsort((~going, times))  # what goes makes room for what comes
    in_use, early = np.cumsum(bytes_[sorted_]), times[sorted_] <= turn
    return float(fixed + in_use[early].max(initial=0.0)), float(fixed + in_use[~early].max(initial=0.0))


def host_bytes(i: OffloadInstance, choice: OffloadChoice) -> float:
    """Return the bytes on the host: of layers that it updates, states that are streamed, activations; less what lies on storage."""
    away = choice.parameters | choice.host_optimizer
    updated = (i.parameter_bytes + i.gradient_bytes + i.state_bytes)[away].sum()
    streamed, stored = i.state_bytes[choice.streamed_optimizer].sum(), i.state_bytes[choice.storage].sum()
    return float(updated + streamed + choice.take(i.moved_bytes).sum() - stored)


def update_bytes(i: OffloadInstance, choice: OffloadChoice) -> float:
    """Return the bytes on the device while parameters are updated."""
    resident = ~choice.parameters
    states = i.state_bytes[resident & ~choice.host_optimizer & ~choice.streamed_optimizer].sum()
    streamed = i.state_bytes[choice.streamed_optimizer]
    working = choice.take(i.working_bytes).max(initial=0.0)
    static = (i.parameter_bytes + i.gradient_bytes)[resident].sum() + states
    return float(static + 2 * streamed.max(initial=0.0) + i.fixed_bytes + working + i.update_bytes)


def update_jobs(i: OffloadInstance, choice: OffloadChoice) -> list[Job]:
    """Return jobs of host layers: gradient down, update, parameters up; of streamed ones: states up, update, down; in pieces."""
    links, jobs = i.links, list[Job]()
    moved = choice.host_optimizer | choice.parameters | choice.streamed_optimizer
    pieces = np.broadcast_to(np.minimum(i.pieces, max(1, MANY_PIECES // max(1, int(moved.sum())))), i.num_layers)
    part = 1.0 / pieces
    states = (part * i.state_bytes).tolist()
    gradient_s = (part * i.gradient_bytes / links.to_host_bytes_per_s).tolist()
    parameters_s = (part * i.parameter_bytes / links.to_device_bytes_per_s).tolist()
    on_device_s, on_host_s = (part * i.device_update_s).tolist(), (part * i.host_update_s).tolist()

    def add(stream: int, seconds: float, *after: int) -> int:
        jobs.append(Job(stream, seconds, after))
        return len(jobs) - 1

    def in_pieces(mask: BoolArray) -> list[int]:
        return np.repeat(np.arange(i.num_layers), pieces * mask).tolist()

    def read(idx: int) -> tuple[int, ...]:
        return (add(STORAGE, states[idx] / links.read_bytes_per_s),) if choice.storage[idx] else ()

    def write(idx: int, updated: int) -> None:
        if choice.storage[idx]:
            add(STORAGE, states[idx] / links.write_bytes_per_s, updated)

    for idx in in_pieces(choice.parameters | choice.host_optimizer):
        stays = not choice.parameters[idx]
        before = (add(TO_HOST, gradient_s[idx]),) if stays else ()
        updated = add(HOST, on_host_s[idx], *before, *read(idx))
        if stays:
            add(TO_DEVICE, parameters_s[idx], updated)
        write(idx, updated)
    gone, buffers = list[tuple[float, int]](), 2 * float(i.state_bytes[choice.streamed_optimizer].max(initial=0.0))
    for idx in in_pieces(choice.streamed_optimizer):
        buffer = _buffer_of(gone, states[idx], buffers)
        up = add(TO_DEVICE, states[idx] / links.to_device_bytes_per_s, *read(idx), *buffer)
        updated = add(COMPUTE, on_device_s[idx], up)
        gone.append((states[idx], add(TO_HOST, states[idx] / links.to_host_bytes_per_s, updated)))
        write(idx, gone[-1][1])
    for seconds in i.device_update_s[~moved & (i.device_update_s > 0)].tolist():
        add(COMPUTE, seconds)
    return jobs


def _buffer_of(gone: list[tuple[float, int]], bytes_: float, buffers: float) -> tuple[int, ...]:
    """Return the copy down that must have ended before the next states come: they share the buffers with those just before."""
    in_use = bytes_
    for before in range(1, min(len(gone), MAX_PIECES) + 1):
        in_use += gone[-before][0]
        if before == MAX_PIECES or in_use > buffers * (1 + SUMMED):
            return (gone[-before][1],)
    return ()


def broken_constraints(instance: OffloadInstance, choice: OffloadChoice, simulated: SimulatedStep) -> list[str]:
    """Return what is wrong with a choice, by the labels of offload/instance.py; empty when nothing is."""
    broken = []
    if not instance.allowed[choice.option, np.arange(instance.num_layers)].all():
        broken.append("C1: a layer has an option that is not allowed")
    locations = choice.host_optimizer * 1 + choice.streamed_optimizer + choice.parameters
    if (locations > 1).any() or (choice.storage & ~(choice.host_optimizer | choice.streamed_optimizer)).any():
        broken.append("C1: states of a layer lie in two places")
    if simulated.peak_bytes > instance.cap_bytes * (1 + SUMMED):
        broken.append(f"C6: {simulated.peak_bytes:.0f} bytes on a device with {instance.cap_bytes:.0f}")
    if simulated.host_bytes > instance.host_cap_bytes * (1 + SUMMED):
        broken.append(f"C7: {simulated.host_bytes:.0f} bytes on a host with {instance.host_cap_bytes:.0f}")
    if simulated.storage_bytes > instance.storage_cap_bytes * (1 + SUMMED):
        broken.append(f"C8: {simulated.storage_bytes:.0f} bytes on storage with {instance.storage_cap_bytes:.0f}")
    return broken


def check(instance: OffloadInstance, choice: OffloadChoice, *, prefetch: int = 1) -> float:
    """Recompute the seconds of a step by simulation, which none of the programs knows.

    Raises:
        ValueError: the choice breaks (C1), (C6), (C7) or (C8); the message names which.
    """
    simulated = simulate(instance, choice, prefetch=prefetch)
    broken = broken_constraints(instance, choice, simulated)
    if broken:
        raise ValueError("; ".join(broken))
    return simulated.step_s
