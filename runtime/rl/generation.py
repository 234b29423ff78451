"""Generation of a step's responses on the engine instances of a pool, with the weights of that step.

Each rollout has a new engine: caches of older weights are of no use. The responses to a prompt are answered by one instance,
which keeps the prompt's cache for them. A token is drawn by the seed of its response and its position alone, so that neither
placement nor layout changes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...schema.rl_plan import RlPlan
from ..serving.engine import ServingEngine
from ..serving.executor import Executor
from ..serving.instance import Instance, follow, require_servable
from ..serving.ranks import join
from ..serving.requests import Request, Sampling
from .weights import WeightMover

BLOCK = 16


@dataclass(frozen=True)
class Response:
    """A response: the number of its sample in the step, and its tokens."""

    number: int
    tokens: tuple[int, ...]


class Generator:
    """A rank's part of the engine instances of its pool."""

    def __init__(self, plan: RlPlan, *, seed: int, end_id: int | None) -> None:
        """Make the groups of all instances of the pool; every rank of it does."""
        pool = plan.copy_of("generator").serving
        assert pool is not None
        workload, spec = plan.post_training, plan.post_training.model_of("generator")
        longest = min(spec.max_seq_len, workload.max_len + max(workload.prompt_len * 8, 64))
        rows = -(-workload.samples // pool.replicas)
        blocks = min(pool.limits.cache_blocks, rows * -(-longest // BLOCK) + 1)
        self._pool = pool.replace(
            limits=pool.limits.replace(cache_blocks=max(blocks, -(-longest // BLOCK)), block_size=BLOCK)
        )
        require_servable(spec, self._pool, is_single=False)
        size = pool.layout.num_devices
        self._ranks = join(pool.layout, [size * idx for idx in range(pool.replicas)], "cpu")[0]
        self._replica, self._replicas = dist.get_rank() // size, pool.replicas
        self._spec, self._workload, self._seed, self._end_id = spec, workload, seed, end_id

    def generate(self, prompts: Sequence[Sequence[int]], step: int, weights: WeightMover) -> list[Response]:
        """Return the responses of this rank's instance, on its first rank; the weights are moved first."""
        executor = Executor(self._spec, self._ranks, self._pool, device=torch.device("cpu"), fill=weights.move)
        if self._ranks.rank:
            follow(executor)
            return []
        engine = ServingEngine(Instance(executor), self._pool)
        names = dict(self._requests(prompts, step, engine))
        tokens: dict[str, list[int]] = {name: [] for name in names}
        while engine.has_work:
            for event in engine.step():
                if event.token is not None:
                    tokens[event.request].append(event.token)
        engine.close()
        return [Response(number, tuple(tokens[name])) for name, number in names.items()]

    def _requests(self, prompts: Sequence[Sequence[int]], step: int, engine: ServingEngine) -> Mapping[str, int]:
        workload, stops = self._workload, frozenset[int]() if self._end_id is None else frozenset({self._end_id})
        names: dict[str, int] = {}
        for idx, prompt in enumerate(prompts):
            if idx % self._replicas != self._replica:
                continue
            for response in range(workload.responses):
                number = idx * workload.responses + response
                sampling = Sampling(temperature=workload.loss.temperature, seed=seed_of(self._seed, step, number))
                request = Request(
                    prompt=tuple(prompt), max_tokens=workload.max_len, sampling=sampling, stop_tokens=stops
                )
                names[engine.submit(request)] = number
        return names


def seed_of(seed: int, step: int, number: int) -> int:
    """Return 63 bits for the draws of a sample."""
    digest = hashlib.blake2b(f"{seed}/{step}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
