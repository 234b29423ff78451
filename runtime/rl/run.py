"""The steps of a post-training run on one rank: weights, generation, rewards, scores, updates, in the order of the plan's levels.

Every process runs the same steps. A call is done by the ranks of its copy's pool; what it gave is then shared with all processes
(`Everyone.share_rows`), which waits for it: so calls of different pools run side by side within a level, and a level waits for the
one before it.
"""

from __future__ import annotations

import json
import math
import random
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import Field

from ...schema.base import Document, Frozen, NonNegativeInt, PositiveFloat
from ...schema.errors import MeshwrightError
from ...schema.rl import Role
from ...schema.rl_plan import RlPlan
from ..weights.save import save_weights
from .copies import ModelCopy, Sample
from .generation import Generator, Response
from .losses import group_advantages, token_advantages
from .pools import Everyone
from .prompts import read_prompts
from .rewards import RewardProcess
from .weights import WeightMover


class RlOptions(Frozen):
    """A run of a post-training plan, besides the plan.

    Attributes:
        prompts: file of prompts; reward: the function, as ``file.py:name``; reward_timeout_s: for one sample.
        steps: to do; learning_rate, critic_learning_rate: of AdamW.
        seed: of initial weights, of the order of prompts and of what is drawn.
        end_id: token that ends a response; None: they end at max_len alone.
        weights: folder of safetensors to start from; save_weights: where the actor's weights go at the end.
    """

    prompts: str
    reward: str
    reward_timeout_s: PositiveFloat = 30.0
    steps: int = Field(gt=0, le=10**9)
    learning_rate: PositiveFloat = 1e-5
    critic_learning_rate: PositiveFloat = 1e-5
    seed: NonNegativeInt = 0
    end_id: NonNegativeInt | None = None
    weights: str | None = None
    save_weights: str | None = None


class RlJob(Document):
    """What the ranks of a job read: the plan's file, what is to be done, and where steps are reported."""

    plan: str
    options: RlOptions
    report: str | None = None
    timeout_s: PositiveFloat = 600.0


class RlRun:
    """A rank's part of a run."""

    def __init__(self, plan: RlPlan, options: RlOptions, *, report: str | None, timeout_s: float) -> None:
        """Join the job and build the copies of this rank's pool."""
        self._plan, self._options, self._work = plan, options, plan.post_training
        self._everyone = Everyone(plan, timeout_s)
        self._prompts = read_prompts(options.prompts, self._work)
        weights = None if options.weights is None else Path(options.weights)
        rates = {"critic": options.critic_learning_rate}
        self._copies: dict[Role, ModelCopy] = {
            copy.role: ModelCopy(
                copy, seed=options.seed, weights=weights, learning_rate=rates.get(copy.role, options.learning_rate),
                loss=self._work.loss,
            )
            for copy in plan.copies
            if copy.pool == self._everyone.pool and copy.training is not None
        }  # fmt: skip
        self._generator = None
        if plan.copy_of("generator").pool == self._everyone.pool:
            self._generator = Generator(plan, seed=options.seed, end_id=options.end_id)
        actor = self._copies.get("actor")
        self._mover = WeightMover(self._everyone, self._work.model_of("actor"), None if actor is None else actor.model)
        self._report = None if report is None or self._everyone.position else Path(report)
        self._seconds: dict[str, float] = {}

    def run(self) -> None:
        """Do all steps."""
        with self._rewards() as rewards:
            for step in range(self._options.steps):
                self._step(step, rewards)
        if self._options.save_weights is not None and "actor" in self._copies:
            save_weights(self._copies["actor"].model, self._options.save_weights, origin=self._options.weights)

    @contextmanager
    def _rewards(self) -> Iterator[RewardProcess | None]:
        if self._everyone.position:
            yield None
            return
        with RewardProcess(self._options.reward, timeout_s=self._options.reward_timeout_s) as process:
            yield process

    def _step(self, step: int, rewards: RewardProcess | None) -> None:
        self._seconds, start_s = {}, time.perf_counter()
        rows = self._chosen(step)
        with self._timed("generate"):
            responses = self._generate([row["prompt"] for row in rows], step)
        with self._timed("reward"):
            values = self._reward(rows, responses, rewards)
        samples = self._scored(rows, responses, values)
        with self._timed("update"):
            losses = self._update(samples)
        if self._report is not None:
            record = {
                "step": step + 1,
                "mean_reward": sum(values) / len(values),
                "mean_len": sum(len(tokens) for tokens in responses.values()) / len(responses),
                "responses_crc32": zlib.crc32(json.dumps(list(responses.values())).encode()),
                "step_time_s": time.perf_counter() - start_s,
                "samples_per_s": len(values) / (time.perf_counter() - start_s),
                "parts_s": self._seconds,
                **losses,
            }
            with self._report.open("a") as file:
                file.write(json.dumps(record) + "\n")

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - start_s

    def _chosen(self, step: int) -> list[dict[str, Any]]:
        """Return the prompts of a step: each epoch has an order of its own."""
        count, chosen = len(self._prompts), []
        for idx in range(step * self._work.prompts, (step + 1) * self._work.prompts):
            order = random.Random(f"{self._options.seed}/{idx // count}").sample(range(count), count)
            chosen.append(self._prompts[order[idx % count]])
        return chosen

    def _generate(self, prompts: Sequence[Sequence[int]], step: int) -> dict[int, list[int]]:
        made: list[Response] = []
        if self._generator is not None:
            made = self._generator.generate(prompts, step, self._mover)
        else:
            self._mover.move(None)
        shared = self._everyone.share_rows([(one.number, one.tokens) for one in made])
        return {number: [int(token) for token in shared[number]] for number in sorted(shared)}

    def _reward(
        self, rows: Sequence[dict[str, Any]], responses: dict[int, list[int]], rewards: RewardProcess | None
    ) -> list[float]:
        given: list[float] = []
        if rewards is not None:
            per_prompt = self._work.responses
            given = rewards.rewards(
                [{**rows[number // per_prompt], "response": tokens} for number, tokens in responses.items()]
            )
        return self._everyone.share_rows([(0, given)] if rewards is not None else [])[0]

    def _scored(
        self, rows: Sequence[dict[str, Any]], responses: dict[int, list[int]], rewards: Sequence[float]
    ) -> list[Sample]:
        """Return the samples with log-probabilities, values and advantages of every token."""
        samples = [
            Sample(number, tuple(rows[number // self._work.responses]["prompt"]), tuple(tokens), [], [], [], [], [])
            for number, tokens in responses.items()
        ]
        known: dict[Role, dict[int, list[float]]] = {}
        with self._timed("score"):
            for role in self._scoring():
                copy = self._copies.get(role)
                score = None if copy is None else copy.values if role == "critic" else copy.log_probs
                known[role] = self._everyone.share_rows([] if score is None else score(samples))
        values = known.get("critic", {})
        if values:
            advantages, returns = token_advantages(rewards, [values[one.number] for one in samples], self._work.loss)
        else:
            each = group_advantages(rewards, self._work.responses)
            advantages = [[a] * len(one.response) for a, one in zip(each, samples, strict=True)]
            returns = [[] for _ in samples]
        reference = known.get("reference") or known.get("teacher") or {}
        return [
            replace(
                one, old=known["actor"][one.number], advantages=advantage, returns=of_values,
                old_values=values.get(one.number, []), reference=reference.get(one.number, []),
            )
            for one, advantage, of_values in zip(samples, advantages, returns, strict=True)
        ]  # fmt: skip

    def _scoring(self) -> tuple[Role, ...]:
        """Return the copies that score; reference and teacher where the loss reads them."""
        reads_others = self._work.loss.reference_weight > 0
        return tuple(
            role
            for role in self._work.roles
            if role in ("actor", "critic") or (reads_others and role in ("reference", "teacher"))
        )

    def _update(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Do the updates of a step, each with an equal part of the samples; return losses and norms."""
        count = len(samples) // self._work.updates
        report: dict[str, Any] = {"loss": [], "grad_norm": []}
        if "critic" in self._work.roles:
            report |= {"critic_loss": [], "critic_grad_norm": []}
        for idx in range(self._work.updates):
            part = [
                replace(one, weight=1 / (len(one.response) * count)) for one in samples[idx * count : (idx + 1) * count]
            ]
            results: list[tuple[int, tuple[float, ...]]] = []
            for number, role in enumerate(("actor", "critic")):
                if (copy := self._copies.get(role)) is not None:  # type: ignore[call-overload]
                    values = copy.update(part)
                    results += [(number, values)] if dist.get_rank() == 0 else []
            shared = self._everyone.share_rows(results)
            for number, prefix in enumerate(("", "critic_")[: 2 if "critic" in self._work.roles else 1]):
                if not all(map(math.isfinite, shared[number])):
                    role, (loss, norm) = prefix.strip("_") or "actor", shared[number]
                    raise MeshwrightError(
                        f"the {role}'s loss is {loss} and its gradient norm {norm}",
                        help="use a lower --learning-rate",
                    )
                report[f"{prefix}loss"].append(shared[number][0])
                report[f"{prefix}grad_norm"].append(shared[number][1])
        return report


def train(job: RlJob) -> None:
    """Run as the rank that the environment describes.

    Raises:
        ConfigError, RuntimeMismatchError, RewardError: prompts, layouts or rewards are not what the run takes.
    """
    torch.manual_seed(0)
    plan = RlPlan.load(job.plan)
    RlRun(plan, job.options, report=job.report, timeout_s=job.timeout_s).run()
    dist.destroy_process_group()
