"""Generation of responses on the engine instances of a pool, with the weights of a step.

Each rollout has a new engine: caches of older weights are of no use. The responses to a prompt are answered by one instance,
which keeps the prompt's cache for them. A token is drawn by the seed of its response and its position alone, so that neither
placement nor layout changes it.

Prompts are counted over the run and dealt over instances in turn. Where more of them are under way than a step takes, an instance
ends its rollout once it has answered as many as its share, and goes on with the others in the next one, after what they have: their
tokens keep the log-probabilities under the weights that drew them (APRIL, arXiv:2509.18521).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ...schema.rl_plan import RlPlan
from ..serving.engine import ServingEngine
from ..serving.executor import Executor
from ..serving.instance import Instance, follow, require_servable
from ..serving.ranks import join
from ..serving.requests import Request, Sampling
from .weights import WeightMover

BLOCK = 16


@dataclass
class Response:
    """A response, or as much of it as there is: the number of its sample in the run, its tokens, and their log-probabilities."""

    number: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    is_complete: bool = False


class Generator:
    """A rank's part of the engine instances of its pool.

    Attributes:
        num_steps: of this rank's engine in the last rollout; 0 where another rank drives it.
    """

    def __init__(self, plan: RlPlan, *, seed: int, end_id: int | None) -> None:
        """Make the groups of all instances of the pool; every rank of it does."""
        pool = plan.copy_of("generator").serving
        assert pool is not None
        workload, spec = plan.post_training, plan.post_training.model_of("generator")
        longest = min(spec.max_seq_len, workload.max_len + max(workload.prompt_len * 8, 64))
        rows = math.ceil(workload.generated * workload.oversample / pool.replicas) + workload.responses
        blocks = min(pool.limits.cache_blocks, rows * -(-longest // BLOCK) + 1)
        self._pool = pool.replace(
            limits=pool.limits.replace(cache_blocks=max(blocks, -(-longest // BLOCK)), block_size=BLOCK)
        )
        require_servable(spec, self._pool, is_single=False)
        size = pool.layout.num_devices
        self._ranks = join(pool.layout, [size * idx for idx in range(pool.replicas)], "cpu")[0]
        self._replica, self._replicas = dist.get_rank() // size, pool.replicas
        self._spec, self._workload, self._seed, self._end_id = spec, workload, seed, end_id
        self.num_steps = 0
        self._next = self._replica
        self._open: dict[int, list[Response]] = {}

    def generate(
        self, prompt_of: Callable[[int], Sequence[int]], step: int, weights: WeightMover, *, logs: bool
    ) -> list[Response]:
        """Return the responses of a step by this rank's instance, on its first rank; the weights are moved first.

        Args:
            prompt_of: the prompt of a number in the run.
            logs: note the log-probability of each token.
        """
        executor = Executor(self._spec, self._ranks, self._pool, device=torch.device("cpu"), fill=weights.move)
        if self._ranks.rank:
            follow(executor)
            return []
        drawn: list[float] = []
        if logs:
            executor.on_sampled = lambda logits, tokens: drawn.extend(_log_probs(logits, tokens))
        engine = ServingEngine(Instance(executor), self._pool)
        count = self._share(step)
        self._begin(math.ceil(count * self._workload.oversample))
        under_way = {}
        for prompt, responses in self._open.items():
            for one in responses:
                if not one.is_complete:
                    under_way[engine.submit(self._request(prompt_of(prompt), one))] = one
        while self._num_answered() < count:
            drawn.clear()
            events = engine.step()
            for idx, event in enumerate(events):
                assert event.token is not None  # nothing is cancelled here
                one = under_way[event.request]
                one.tokens.append(event.token)
                one.log_probs += drawn[idx : idx + 1]
                one.is_complete = event.finish is not None
        self.num_steps = engine.counters().steps
        engine.close()
        answered = [prompt for prompt in sorted(self._open) if _is_answered(self._open[prompt])][:count]
        return [one for prompt in answered for one in self._open.pop(prompt)]

    def _share(self, step: int) -> int:
        """Return the prompts of a step that are this instance's."""
        prompts = self._workload.generated_prompts
        return sum(number % self._replicas == self._replica for number in range(step * prompts, (step + 1) * prompts))

    def _begin(self, count: int) -> None:
        """Take further prompts until so many are under way."""
        while len(self._open) < count:
            first = self._next * self._workload.responses
            self._open[self._next] = [Response(first + idx) for idx in range(self._workload.responses)]
            self._next += self._replicas

    def _num_answered(self) -> int:
        return sum(map(_is_answered, self._open.values()))

    def _request(self, prompt: Sequence[int], one: Response) -> Request:
        sampling = Sampling(temperature=self._workload.loss.temperature, seed=seed_of(self._seed, one.number))
        return Request(
            prompt=(*prompt, *one.tokens), max_tokens=self._workload.max_len - len(one.tokens), sampling=sampling,
            stop_tokens=frozenset[int]() if self._end_id is None else frozenset({self._end_id}),
        )  # fmt: skip


def _is_answered(responses: Sequence[Response]) -> bool:
    return all(one.is_complete for one in responses)


def _log_probs(logits: Tensor, tokens: Sequence[int]) -> list[float]:
    rows = logits.float().log_softmax(dim=-1)
    result: list[float] = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    return result


def seed_of(seed: int, number: int) -> int:
    """Return 63 bits for the draws of a sample."""
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
