"""Jobs on streams of a device and its host, each stream one job at a time, and when they start and end.

Jobs are not interrupted. Copies of both directions at once share (1 + DUPLEX) of one rate; compute beside a copy loses the
instance's share of it. A run that is known to last too long can be given up early.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from .linear_program import FloatArray
from .offload_instance import Instance

COMPUTE, TO_HOST, TO_DEVICE, HOST, STORAGE = STREAMS = range(5)
_LEAST_RATE = 0.05


class Job(NamedTuple):
    """Work of one stream; ``after`` are jobs that end before it starts, ``begun`` ones that have at least started."""

    stream: int
    seconds: float
    after: tuple[int, ...] = ()
    begun: tuple[int, ...] = ()


def run(jobs: list[Job], instance: Instance, *, within_s: float = np.inf) -> tuple[FloatArray, FloatArray]:
    """Start and end of each job [J]; of the jobs of a stream whose conditions hold the first of the list is taken.

    As soon as what a stream still has to do ends after ``within_s`` even at full speed, the run is given up: jobs that have not
    ended then have infinite ends.
    """
    start, end = [np.inf] * len(jobs), [np.inf] * len(jobs)
    missing, by_start, by_end = _waiting(jobs)
    ready: list[list[int]] = [[] for _ in STREAMS]
    to_do, used = [0.0] * len(STREAMS), sorted({job.stream for job in jobs})
    for idx, job in enumerate(jobs):
        to_do[job.stream] += job.seconds
        if not missing[idx]:
            ready[job.stream].append(idx)  # in order, so a heap
    working, left = [-1] * len(STREAMS), [np.inf] * len(STREAMS)  # the job of each stream and its seconds at full speed
    now, done, rates = 0.0, 0, _rates(instance)
    while done < len(jobs):
        freed: list[int] = []
        for stream in used:
            if working[stream] < 0 and ready[stream]:
                if now + to_do[stream] > within_s:
                    return np.array(start), np.array(end)
                first = heappop(ready[stream])
                start[first], working[stream], left[stream] = now, first, jobs[first].seconds
                to_do[stream] -= left[stream]
                freed += by_start.get(first, ())
        if not freed:
            rate = rates[2 * (working[TO_HOST] >= 0) + (working[TO_DEVICE] >= 0)]
            step = np.inf
            for stream in used:
                if left[stream] < step * rate[stream]:
                    step = left[stream] / rate[stream]
            assert step < np.inf, "a job waits for one that never runs"
            now += step
            for stream in used:
                left[stream] -= step * rate[stream]
                if left[stream] <= 1e-12 * now:
                    idx = working[stream]
                    working[stream], left[stream], end[idx], done = -1, np.inf, now, done + 1
                    freed += by_end[idx]
        for idx in freed:
            missing[idx] -= 1
            if not missing[idx]:
                heappush(ready[jobs[idx].stream], idx)
    return np.array(start), np.array(end)


def _waiting(jobs: list[Job]) -> tuple[list[int], dict[int, list[int]], list[list[int]]]:
    """How many others each job waits for; the jobs that wait for the start of each one, and for its end."""
    missing, by_start, by_end = [0] * len(jobs), dict[int, list[int]](), list[list[int]]([] for _ in jobs)
    for idx, (_, _, after, begun) in enumerate(jobs):
        missing[idx] = len(after) + len(begun)
        for other in after:
            by_end[other].append(idx)
        for other in begun:
            by_start.setdefault(other, []).append(idx)
    return missing, by_start, by_end


def _rates(instance: Instance) -> list[list[float]]:
    """[4, 5]: rates of all streams as shares of full speed, by 2 (to the host works) + (to the device works)."""
    links, rates = instance.links, list[list[float]]()
    for down, up in ((False, False), (False, True), (True, False), (True, True)):
        lost = links.compute_lost_to_host * down + links.compute_lost_to_device * up
        copy = (1.0 + links.duplex) / 2 if down and up else 1.0
        rates.append([max(1.0 - lost, _LEAST_RATE), copy, copy, 1.0, 1.0])
    return rates
