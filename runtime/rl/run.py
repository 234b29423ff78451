"""The steps of a post-training run on one rank: weights, generation, rewards, scores, updates, in the order of the plan's levels.

Every process runs the same steps. A call is done by the ranks of its copy's pool; what it gave is then shared with all processes
(`Everyone.share_rows`), which waits for it: so calls of different pools run side by side within a level, and a level waits for the
one before it.

With weights that may be a step old the generator's pool answers the prompts of the next step while the others score and update this
one. Tokens that older weights drew have importance ratios: the advantage of a token counts min(p_old / p_drawn, ratio_cap) times,
with p_old of the actor when the step begins.
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
from .exchange import Answered, Exchange, spread
from .generation import Generator, Response
from .losses import group_advantages, importance_ratios, taught, token_advantages
from .pools import Circle, Everyone, pool_starts
from .prompts import read_prompts
from .rewards import RewardProcess
from .weights import WeightMover

Responses = dict[int, list[int]]
Rows = dict[int, list[float]]
"""Of samples, by their numbers in the run, in order."""


FIRST_RECEIVED = 1 << 40
"""Number of the first prompt of another island in a step: none of ours."""


class RlOptions(Frozen):
    """A run of a post-training plan, besides the plan.

    Attributes:
        prompts: file of prompts; reward: the function, as ``file.py:name``; reward_timeout_s: for one sample.
        steps: to do; learning_rate, critic_learning_rate: of AdamW.
        seed: of initial weights, of the order of prompts and of what is drawn.
        end_id: token that ends a response; None: they end at max_len alone.
        weights: folder of safetensors to start from; teacher_weights: the teacher's, which else has made weights of another seed;
            save_weights: where the actor's weights go at the end.
        exchange: folder that islands share responses through; island: which of them this is, from 0.
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
    teacher_weights: str | None = None
    save_weights: str | None = None
    exchange: str | None = None
    island: NonNegativeInt = 0

    def weights_of(self, role: Role) -> Path | None:
        """Return the folder that a copy starts from; None: made weights."""
        name = self.teacher_weights if role == "teacher" else self.weights
        return None if name is None else Path(name)


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
        rates = {"critic": options.critic_learning_rate}
        self._copies: dict[Role, ModelCopy] = {
            copy.role: ModelCopy(
                copy,
                seed=options.seed + (copy.role == "teacher"),
                weights=options.weights_of(copy.role),
                learning_rate=rates.get(copy.role, options.learning_rate),
                loss=self._work.loss,
            )
            for copy in plan.copies
            if copy.pool == self._everyone.pool and copy.training is not None
        }
        self._generator = None
        if plan.copy_of("generator").pool == self._everyone.pool:
            self._generator = Generator(plan, seed=options.seed, end_id=options.end_id)
        actor = self._copies.get("actor")
        self._mover = WeightMover(self._everyone, self._work.model_of("actor"), None if actor is None else actor.model)
        self._is_stale = self._work.staleness > 0
        self._logs = self._is_stale or self._work.oversample > 1 or self._work.log_probs == "generator"
        self._circle: Circle | None = self._everyone
        if self._is_stale:
            self._circle = self._everyone.without(plan.copy_of("generator").pool, pool_starts(plan))
        self._tells = self._circle is not None and self._circle.position == 0
        self._report = Path(report) if report is not None and self._tells else None
        self._seconds: dict[str, float] = {}
        self._orders: dict[int, list[int]] = {}
        self._received: dict[int, dict[str, Any]] = {}
        self._exchange: Exchange | None = None
        if options.exchange is not None and self._tells:
            self._exchange = Exchange(options.exchange, options.island, self._work, timeout_s=timeout_s)
        self._ratios: list[list[float]] = []
        self._teacher_gap = math.nan
        self._engine_steps, self._used_s = 0, time.process_time()
        self._cpu_s: list[float] = []

    def run(self) -> None:
        """Do all steps."""
        with self._rewards() as rewards:
            made = self._generate(0)
            for step in range(self._options.steps):
                start_s = time.perf_counter()
                responses, drawn = self._shared(made)
                is_last = step + 1 == self._options.steps
                if self._is_stale and not is_last:
                    made = self._generate(step + 1)
                if self._circle is not None:
                    self._train(step, responses, drawn, rewards, start_s)
                if not self._is_stale and not is_last:
                    made = self._generate(step + 1)
        if self._options.save_weights is not None and "actor" in self._copies:
            save_weights(self._copies["actor"].model, self._options.save_weights, origin=self._options.weights)

    @contextmanager
    def _rewards(self) -> Iterator[RewardProcess | None]:
        if not self._tells:
            yield None
            return
        with RewardProcess(self._options.reward, timeout_s=self._options.reward_timeout_s) as process:
            yield process

    def _train(
        self, step: int, responses: Responses, drawn: Rows, rewards: RewardProcess | None, start_s: float
    ) -> None:
        """Score the responses of a step, update on them, and report; the next step's generation counts in the next step."""
        if self._work.shared:
            with self._timed("exchange"):
                responses = self._exchanged(step, responses)
        with self._timed("reward"):
            values = self._reward(responses, rewards)
        samples = self._scored(responses, values, drawn)
        with self._timed("update"):
            losses = self._update(samples)
        seconds, self._seconds = self._seconds, {}
        if self._report is None:
            return
        step_s = time.perf_counter() - start_s + (0.0 if self._is_stale else seconds.get("generate", 0.0))
        given = zip(responses, values, strict=True)
        ours = {number: value for number, value in given if number < FIRST_RECEIVED}
        record = {
            "step": step + 1,
            "mean_reward": sum(ours.values()) / len(ours),
            "mean_len": sum(len(responses[number]) for number in ours) / len(ours),
            "engine_steps": self._engine_steps,
            "responses_crc32": zlib.crc32(json.dumps(list(responses.values())).encode()),
            "step_time_s": step_s,
            "cpu_s": self._cpu_s,
            "samples_per_s": len(values) / step_s,
            "parts_s": seconds,
            **losses,
        }
        if "teacher" in self._scoring():
            record["teacher_gap"] = self._teacher_gap
        if self._exchange is not None:
            record |= {"received": self._work.received_prompts, "received_new": self._exchange.num_new}
        if self._ratios:
            record["mean_ratio"] = sum(map(sum, self._ratios)) / max(sum(map(len, self._ratios)), 1)
        with self._report.open("a") as file:
            file.write(json.dumps(record) + "\n")

    @contextmanager
    def _timed(self, name: str, *, adds: bool = False) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        before = self._seconds.get(name, 0.0) if adds else 0.0
        self._seconds[name] = before + time.perf_counter() - start_s

    def _row(self, number: int) -> dict[str, Any]:
        """Return the line of a prompt by its number in the run: each epoch has an order of its own, and islands answer in turn."""
        if number in self._received:
            return self._received[number]
        step, place = divmod(number, self._work.generated_prompts)
        number = (step * self._work.islands + self._options.island) * self._work.generated_prompts + place
        count = len(self._prompts)
        if number // count not in self._orders:
            shuffled = random.Random(f"{self._options.seed}/{number // count}").sample(range(count), count)
            self._orders[number // count] = shuffled
        return self._prompts[self._orders[number // count][number % count]]

    def _line(self, sample: int) -> dict[str, Any]:
        return self._row(sample // self._work.responses)

    def _generate(self, step: int) -> list[Response]:
        """Move the weights, and answer the prompts of a step where this is a generator's rank."""
        with self._timed("generate"):
            if self._generator is None:
                self._mover.move(None)
                return []
            return self._generator.generate(
                lambda number: self._row(number)["prompt"], step, self._mover, logs=self._logs
            )

    def _shared(self, made: Sequence[Response]) -> tuple[Responses, Rows]:
        """Return all responses of a step, and the log-probabilities of their tokens where they are noted."""
        with self._timed("generate", adds=True):
            shared = self._everyone.share_rows([(one.number, one.tokens) for one in made])
            drawn = self._everyone.share_rows([(one.number, one.log_probs) for one in made]) if self._logs else {}
            num_steps = 0 if self._generator is None else self._generator.num_steps
            before, self._used_s = self._used_s, time.process_time()
            counts = torch.tensor([num_steps, self._used_s - before], dtype=torch.float64)
            steps, seconds = zip(*(row.tolist() for row in self._everyone.gather(counts)), strict=True)
            self._engine_steps, self._cpu_s = int(max(steps)), list(seconds)
        return {number: [int(token) for token in tokens] for number, tokens in shared.items()}, drawn

    def _exchanged(self, step: int, responses: Responses) -> Responses:
        """Give the responses of a step to the other islands; return them with as many of theirs as the step takes."""
        assert self._circle is not None
        size, taken = self._work.responses, list[tuple[int, list[int]]]()
        groups = sorted({number // size for number in responses})
        if self._exchange is not None:
            lines = [
                Answered(self._row(group), tuple(tuple(responses[group * size + idx]) for idx in range(size)))
                for group in groups
            ]
            self._exchange.give(step, lines)
            for group, each in enumerate(self._exchange.take(self._work.received_prompts), start=FIRST_RECEIVED):
                taken += [(group * size + idx, list(tokens)) for idx, tokens in enumerate(each.responses)]
                # Numbers are what processes share: the line's text, character by character.
                taken.append((-group, list(json.dumps(each.line).encode())))
        shared = self._circle.share_rows(taken)
        self._received = {-number: json.loads(bytes(map(int, row))) for number, row in shared.items() if number < 0}
        received = {number: [int(token) for token in row] for number, row in shared.items() if number >= 0}
        every = {**responses, **received}
        return {
            group * size + idx: every[group * size + idx]
            for group in spread(groups, sorted(self._received))
            for idx in range(size)
        }

    def _reward(self, responses: Responses, rewards: RewardProcess | None) -> list[float]:
        assert self._circle is not None
        given: list[float] = []
        if rewards is not None:
            given = rewards.rewards(
                [{**self._line(number), "response": tokens} for number, tokens in responses.items()]
            )
        return self._circle.share_rows([(0, given)] if rewards is not None else [])[0]

    def _scored(self, responses: Responses, rewards: Sequence[float], drawn: Rows) -> list[Sample]:
        """Return the samples with log-probabilities, values and advantages of every token."""
        assert self._circle is not None
        samples = [
            Sample(number, tuple(self._line(number)["prompt"]), tuple(tokens), [], [], [], [], [])
            for number, tokens in responses.items()
        ]
        known: dict[Role, Rows] = {}
        with self._timed("score"):
            for role in self._scoring():
                copy = self._copies.get(role)
                score = None if copy is None else copy.values if role == "critic" else copy.log_probs
                known[role] = self._circle.share_rows([] if score is None else score(samples))
        values, old = known.get("critic", {}), known.get("actor", drawn)
        advantages, returns = self._advantages(samples, rewards, values)
        if teacher := known.get("teacher"):
            self._teacher_gap = _mean_gap(old, teacher)
            advantages = [
                taught(row, old[one.number], teacher[one.number], self._work.loss)
                for row, one in zip(advantages, samples, strict=True)
            ]
        if drawn and "actor" in known:
            cap = self._work.loss.ratio_cap
            # What other islands drew counts as this actor's.
            self._ratios = [
                importance_ratios(old[one.number], drawn.get(one.number, old[one.number]), cap) for one in samples
            ]
            advantages = [
                [a * ratio for a, ratio in zip(row, ratios, strict=True)]
                for row, ratios in zip(advantages, self._ratios, strict=True)
            ]
        reference = known.get("reference", {})
        return [
            replace(
                one, old=old[one.number], advantages=advantage, returns=of_values,
                old_values=values.get(one.number, []), reference=reference.get(one.number, []),
            )
            for one, advantage, of_values in zip(samples, advantages, returns, strict=True)
        ]  # fmt: skip

    def _advantages(
        self, samples: Sequence[Sample], rewards: Sequence[float], values: Rows
    ) -> tuple[list[list[float]], list[list[float]]]:
        """Return the advantages of every token, and the returns that a critic learns."""
        if values:
            return token_advantages(rewards, [values[one.number] for one in samples], self._work.loss)
        each = group_advantages(rewards, self._work.responses)
        return [[a] * len(one.response) for a, one in zip(each, samples, strict=True)], [[] for _ in samples]

    def _scoring(self) -> tuple[Role, ...]:
        """Return the copies that score; reference and teacher where the loss reads them."""
        work = self._work
        scores = {
            "actor": work.log_probs == "actor",
            "critic": True,
            "reference": work.loss.reference_weight > 0,
            "teacher": work.loss.teacher_weight > 0,
        }
        return tuple(role for role in work.roles if scores.get(role, False))

    def _update(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Do the updates of a step, each with an equal part of the samples; return losses and norms."""
        assert self._circle is not None
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
            shared = self._circle.share_rows(results)
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


def _mean_gap(old: Rows, teacher: Rows) -> float:
    """Return the mean log-probability of tokens by the actor less by the teacher: an estimate of its divergence from it."""
    gaps = [p - t for number, row in old.items() for p, t in zip(row, teacher[number], strict=True)]
    return sum(gaps) / len(gaps)


def train(job: RlJob) -> None:
    """Run as the rank that the environment describes.

    Raises:
        ConfigError, RuntimeMismatchError, RewardError: prompts, layouts or rewards are not what the run takes.
    """
    torch.manual_seed(0)
    plan = RlPlan.load(job.plan)
    RlRun(plan, job.options, report=job.report, timeout_s=job.timeout_s).run()
    dist.destroy_process_group()
