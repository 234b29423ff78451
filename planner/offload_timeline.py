"""The step of a plan with an offload schedule as the simulation runs it: passes of each layer, and copies beside them.

The jobs are those of solvers/offload_simulation.py; micro-batches repeat, communication over data that nothing hides follows the
last one, and then the update. The last slice ends when the estimate says the step does.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..schema import Plan
from ..schema.trace import COPIED, DATA_PARALLEL, Slice, StepTimeline, Stream
from ..solvers.offload_events import COMPUTE, HOST, STORAGE, TO_DEVICE, TO_HOST, run
from ..solvers.offload_instance import OPTIONS, Choice
from ..solvers.offload_simulation import Places, microbatch_jobs, update_jobs
from .offload_costs import constant_s
from .offload_plan import Scheduled, scheduled

_STREAMS: dict[int, Stream] = {
    COMPUTE: "compute",
    TO_HOST: "copies to the host",
    TO_DEVICE: "copies to the device",
    HOST: "host processors",
    STORAGE: "storage",
}

_UPDATES = {
    COMPUTE: "update on the device",
    TO_HOST: "gradients and states",
    TO_DEVICE: "parameters and states",
    HOST: "update by the host",
    STORAGE: "states on storage",
}


def offload_timeline(plan: Plan) -> StepTimeline:
    """The jobs of a plan's schedule, which is the same on every rank."""
    found = scheduled(plan)
    passes, microbatch_s = _passes(found)
    slices = [
        piece._replace(start_s=m * microbatch_s + piece.start_s, micro_batch=m)
        for m in range(found.instance.num_microbatches)
        for piece in passes
    ]
    end_s = found.instance.num_microbatches * microbatch_s
    copied_s = float(found.options.under[0].copied_s(0).sum())
    exposed_s = constant_s(found.options, 0) - copied_s
    once: tuple[tuple[Stream, str, float], ...] = (
        ("compute", COPIED, copied_s),
        ("communication", DATA_PARALLEL, exposed_s),
    )
    for stream, kind, seconds in once:
        if seconds > 0:
            slices.append(Slice(0, stream, kind, end_s, seconds))
            end_s += seconds
    slices += _update(found, end_s)
    step_s = max(piece.start_s + piece.seconds for piece in slices)
    return StepTimeline(tuple(slices), (range(plan.layout.world_size),), step_s)


def _passes(found: Scheduled) -> tuple[list[Slice], float]:
    """Of the first micro-batch, and its seconds."""
    jobs, places = microbatch_jobs(found.instance, found.choice, found.prefetch)
    start, end = run(jobs, found.instance)
    slices = [
        Slice(0, _STREAMS[jobs[at].stream], kind, float(start[at]), float(end[at] - start[at]), 0, 0, layer)
        for at, layer, kind in _named(places, found.choice)
        if end[at] > start[at]
    ]
    return slices, float(end.max())


def _named(places: Places, choice: Choice) -> Iterator[tuple[int, int, str]]:
    """Job, layer and kind of everything in a micro-batch."""
    for layer, (forward, backward) in enumerate(zip(places.forward, places.backward, strict=True)):
        yield forward, layer, "F"
        yield backward, layer, "BW"
    boundary = OPTIONS.index("boundary")
    moved = {layer: "block inputs" if choice.option[layer] == boundary else "activations" for layer in places.down}
    for layer, at in places.down.items():
        yield at, layer, moved[layer]
    gathered = {at: layer for layer, at, _ in places.gathered}
    for layer, at in places.up.items():
        if at not in gathered and layer in moved:
            yield at, layer, moved[layer]
    for at, layer in gathered.items():
        also = f" and {moved[layer]}" if places.up.get(layer) == at and layer in moved else ""
        yield at, layer, "parameters" + also
    for layer, at in places.reduced:
        yield at, layer, "gradients"


def _update(found: Scheduled, begin_s: float) -> Iterator[Slice]:
    """The update: pieces of layers in no layer's name."""
    jobs = update_jobs(found.instance, found.choice)
    start, end = run(jobs, found.instance)
    for job, first, last in zip(jobs, start, end, strict=True):
        if last > first:
            stream: Stream = "optimizer" if job.stream == COMPUTE else _STREAMS[job.stream]
            yield Slice(0, stream, _UPDATES[job.stream], begin_s + float(first), float(last - first))
