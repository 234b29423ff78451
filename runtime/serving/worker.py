"""The program of each rank of a deployment, started by `Deployment.start_ranks`: ``python -m meshwright.runtime.serving.worker
job.json``.

The first rank of an instance drives it and speaks with the deployment over a Unix socket in a folder that only this user can enter:
messages are JSON, both ways. The other ranks follow their driver.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...profilers.run.processes import serve_rank
from ...schema.base import Document
from ...schema.model import ModelSpec
from ...schema.serving import Pool
from .engine import ServingEngine
from .executor import Executor
from .front import Accepted
from .instance import Instance, follow
from .ranks import join_all
from .requests import Request, RequestTimes, Sampling, TokenEvent
from .transfer import Peer, Place

_IDLE_S = 0.5
"""How long a driver without work waits for a message at a time."""

_TIMEOUT = timedelta(days=7)
"""Of collectives: ranks wait for their driver as long as nobody asks for anything. A rank that died is noticed by its launcher."""


class ServingJob(Document):
    """The engine instances of a deployment.

    Attributes:
        pools: with their replicas; ranks are counted pool by pool, replica by replica.
        weights: folder of safetensors; None: made from ``seed``.
        adapters: name and folder of each.
        socket: where drivers meet the deployment.
    """

    model: ModelSpec
    pools: tuple[Pool, ...]
    weights: str | None = None
    seed: int = 0
    device: str = "cpu"
    prefix_cache: bool = True
    adapters: tuple[tuple[str, str], ...] = ()
    socket: str

    def instances(self) -> list[tuple[Pool, Place]]:
        """Return every instance with its place among the ranks."""
        instances: list[tuple[Pool, Place]] = []
        first = 0
        for pool in self.pools:
            for _ in range(pool.replicas):
                instances.append((pool, Place(pool.layout, first)))
                first += pool.layout.num_devices
        return instances


def main() -> None:
    """Serve as the rank that the environment says, until the deployment says stop."""
    job = ServingJob.load(sys.argv[1])
    is_cuda = job.device == "cuda"
    dist.init_process_group("cpu:gloo,cuda:nccl" if is_cuda else "gloo", timeout=_TIMEOUT)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_cuda else torch.device(job.device)
    instances = job.instances()
    sites = [place for _, place in instances]
    ranks = join_all([(place.layout, place.first) for place in sites], device.type)[0]
    idx = next(i for i, place in enumerate(sites) if place.first == ranks.members[0])
    pool = instances[idx][0]
    executor = Executor(
        job.model, ranks, pool, device=device, seed=job.seed, weights=Path(job.weights) if job.weights else None,
        sites=sites if len(sites) > 1 else (), instance=idx, adapters=[Path(folder) for _, folder in job.adapters],
    )  # fmt: skip
    if ranks.rank:
        follow(executor)
        return
    names = [name for name, _ in job.adapters]
    engine = ServingEngine(Instance(executor), pool, reuses_prefixes=job.prefix_cache, adapters=names)
    with Client(job.socket, family="AF_UNIX") as connection, engine:
        connection.send_bytes(json.dumps({"instance": idx}).encode())
        Driver(engine, connection).run()


class Driver:
    """An engine that does what messages say."""

    def __init__(self, engine: ServingEngine, connection: Connection) -> None:
        self.engine, self._connection = engine, connection
        self._num_sent = 0

    def run(self) -> None:
        """Step and answer until a message says stop."""
        while True:
            while self._connection.poll(0 if self.engine.has_work else _IDLE_S):
                if not self._obey(json.loads(self._connection.recv_bytes())):
                    return
            if self.engine.has_work:
                events = self.engine.step()
                self._tell(events)

    def _obey(self, message: dict[str, Any]) -> bool:
        """Do what a message says; False: stop."""
        engine = self.engine
        match message["do"]:
            case "submit":
                request, name = request_of(message), message["id"]
                if message["peer"] is None:
                    engine.submit(request, id=name)
                else:
                    engine.submit_for(Peer(*message["peer"]), request, name)
            case "take":
                request = request_of(message)
                times = RequestTimes(
                    submitted_s=message["now"], scheduled_s=message["now"], prompt_tokens=len(request.prompt)
                )
                accepted = Accepted(message["id"], request, times, None)
                engine.take(accepted, message["token"], Peer(*message["source"]), message["attention_rank"])
            case "cancel":
                engine.cancel(message["id"])
            case "measure":
                bounds = {name: message[name] for name in ("max_context", "budget_s")}
                records = engine.measure(**bounds)[0]
                self._connection.send_bytes(json.dumps([dataclasses.asdict(record) for record in records]).encode())
            case "stop":
                return False
        return True

    def _tell(self, events: list[TokenEvent]) -> None:
        engine = self.engine
        records = engine.last_records(engine.num_records - self._num_sent)
        self._num_sent = engine.num_records
        content = {
            "events": [self._described(event) for event in events],
            "records": [dataclasses.asdict(record) for record in records],
            "counters": dataclasses.asdict(engine.counters()),
        }
        self._connection.send_bytes(json.dumps(content).encode())

    def _described(self, event: TokenEvent) -> dict[str, Any]:
        times = self.engine.times(event.request)
        assert times is not None
        scheduled = None if math.isnan(times.scheduled_s) else times.scheduled_s
        content = dataclasses.asdict(event) | {
            "scheduled_s": scheduled, "cached": times.cached_tokens, "preemptions": times.preemptions,
        }  # fmt: skip
        return content | {"source_rank": self.engine.handed_by(event.request) if event.finish == "handed" else None}


def words_of(request: Request) -> dict[str, Any]:
    """Return a request as JSON takes it."""
    content = dataclasses.asdict(request)
    return content | {"stop_tokens": sorted(request.stop_tokens)}


def request_of(message: dict[str, Any]) -> Request:
    """Return the request that a message carries."""
    content = dict(message["request"])
    content["sampling"] = Sampling(**content["sampling"])
    content["prompt"], content["stop_tokens"] = tuple(content["prompt"]), frozenset(content["stop_tokens"])
    return Request(**content)


if __name__ == "__main__":
    serve_rank(main)
