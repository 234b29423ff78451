"""Post-training with rewards, as a task: the copies of models that take part in a step, the calls that they get, and its batch.

A step has three levels, each of which waits for the one before it:

    generate      responses to prompts, by the generator: the actor's weights in a serving engine
    score         log-probabilities by the actor, a reference or a teacher, values by a critic, rewards by a model
    update        of the actor, and of the critic
"""

from __future__ import annotations

import itertools
import math
from statistics import NormalDist
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from .base import Count, Frozen
from .batch import Lengths
from .engine_facts import OWN_ENGINE, Engine
from .errors import ConfigError
from .model import ModelSpec
from .serving import ServingEngine
from .task import Phase, Precision, Task

Algorithm = Literal["grpo", "ppo"]
Role = Literal["generator", "actor", "critic", "reference", "reward", "teacher"]
CallName = Literal["generate", "log_probs", "reference", "teacher", "values", "reward", "update_actor", "update_critic"]
RlPlacement = Literal["auto", "colocated", "split"]
LogProbs = Literal["actor", "generator"]

CALLS: dict[CallName, tuple[Role, int]] = {
    "generate": ("generator", 0),
    "log_probs": ("actor", 1),
    "reference": ("reference", 1),
    "teacher": ("teacher", 1),
    "values": ("critic", 1),
    "reward": ("reward", 1),
    "update_actor": ("actor", 2),
    "update_critic": ("critic", 2),
}
"""The copy of a model that each call is of, and its level."""

NUM_LEVELS = 3
TRAINED: frozenset[Role] = frozenset({"actor", "critic"})

LENGTH_SIGMA = 0.5
"""Standard deviation of the logarithm of the lengths of responses where only their mean is known. [fitted:
benchmarks/post_training.py, median over the steps of a published run whose share of cut responses is known]"""

TOKEN_BYTES = 4
"""Of a token that is sent: vocabularies have more than two bytes can name."""

_NUM_LENGTHS, _NUM_HALVES = 128, 10
"""Intervals of equal share in a distribution of lengths, and how often the last is halved: the longest of many responses decides
when a rollout ends."""


class RlModel(Frozen):
    """A model that takes part, besides the generator, which has the actor's weights."""

    role: Literal["actor", "critic", "reference", "reward", "teacher"]
    model: ModelSpec


class RlLoss(Frozen):
    """Weights of the loss; what a plan costs does not depend on them.

    Attributes:
        clip: the ratio of probabilities counts from 1 - clip to 1 + clip (PPO, arXiv:1707.06347).
        reference_weight: of the divergence from the reference, estimated as in GRPO (arXiv:2402.03300).
        teacher_weight: of the teacher's log-probability less the actor's in the advantage of each token: distillation on samples
            of the actor (arXiv:2306.13649).
        value_weight, value_clip: of the critic's loss, and how far its values may move in a step.
        discount, trace: gamma and lambda of the advantages of PPO (arXiv:1506.02438).
        temperature: of generation; 0: the likeliest token.
        ratio_cap: tokens of older weights weigh as likelier as they are now, at most so much (arXiv:2505.24298).
    """

    clip: Annotated[float, Field(gt=0, lt=1)] = 0.2
    reference_weight: NonNegativeFloat = 0.0
    teacher_weight: NonNegativeFloat = 0.0
    value_weight: NonNegativeFloat = 0.5
    value_clip: PositiveFloat = 0.2
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    trace: Annotated[float, Field(ge=0, le=1)] = 0.95
    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    ratio_cap: Annotated[float, Field(ge=1, le=100)] = 2.0


class RlWorkload(Task):
    """One step of GRPO or PPO: generate, score, update.

    Attributes:
        models: the actor first; roles differ.
        reward_function: ``file.py:name`` or ``module:name``, which runs on the host; empty: rewards come from a model.
        prompts, responses: of a step, and to each prompt.
        prompt_len: tokens of a mean prompt; lengths: of responses; max_len: at which they are cut.
        updates: optimizer steps over the samples of a step, each with an equal part of them.
        staleness: steps by which the weights that generate may be behind those that are updated; 0: none.
        oversample: responses under way for each that a step takes; the others are carried over (APRIL, arXiv:2509.18521).
        fetches: equal parts of a step's samples, each scored and updated on as soon as it is generated; 1: all together.
        islands, shared: models that are trained apart, each by a plan like this one, and the share of the prompts of a step whose
            responses come from the other islands (SAPO, arXiv:2509.08721): each is trained on once by an island.
        log_probs: whose log-probabilities of drawn tokens a step's ratios begin at: the actor's, in a call of its own, or those
            that the generator notes as it draws.
        placement: colocated or split: only placements where the generator shares the actor's devices, or where it does not.
        engine, generation_engine: whose costs hold; precision: of training.
    """

    fixable: ClassVar[frozenset[str] | None] = frozenset()

    algorithm: Algorithm = "grpo"
    models: tuple[RlModel, ...] = Field(min_length=1, max_length=5)
    reward_function: str = ""
    prompts: Count
    responses: Count = 1
    prompt_len: Count
    lengths: Lengths
    max_len: Count
    updates: Count = 1
    staleness: Annotated[float, Field(ge=0, le=16)] = 0.0
    oversample: Annotated[float, Field(ge=1, le=8)] = 1.0
    fetches: Count = 1
    islands: Count = 1
    shared: Annotated[float, Field(ge=0, lt=1)] = 0.0
    log_probs: LogProbs = "actor"
    placement: RlPlacement = "auto"
    engine: Engine = OWN_ENGINE
    generation_engine: ServingEngine = "vllm"
    precision: Precision = "bf16-mixed"
    loss: RlLoss = RlLoss()

    @model_validator(mode="after")
    def _is_a_step(self) -> RlWorkload:
        roles = [entry.role for entry in self.models]
        if roles[0] != "actor" or len(set(roles)) != len(roles):
            raise ValueError(f"models are the actor first and each other role once, not {', '.join(roles)}")
        if (self.algorithm == "ppo") != ("critic" in roles):
            raise ValueError("ppo has a critic and grpo has none: add [critic], or take the other algorithm")
        if bool(self.reward_function) == ("reward" in roles):
            raise ValueError("rewards come from a function or from a model: give [reward] one of function and model")
        if self.algorithm == "grpo" and self.responses < 2:
            raise ValueError("grpo compares the responses to one prompt: responses must be at least 2")
        if self.samples % self.updates:
            raise ValueError(f"{self.samples} responses are not dealt evenly over {self.updates} updates")
        if self.updates % self.fetches:
            raise ValueError(f"{self.updates} updates are not dealt evenly over {self.fetches} fetches")
        self._require_sharing()
        if self.lengths.lengths[-1] > self.max_len:
            raise ValueError(f"the longest response has {self.lengths.lengths[-1]} tokens, max_len is {self.max_len}")
        vocabularies = {entry.model.vocab_size for entry in self.models if entry.role != "reward"}
        if len(vocabularies) > 1:
            raise ValueError(f"the models have vocabularies of {sorted(vocabularies)} tokens: one is needed")
        for role, weight in (("reference", self.loss.reference_weight), ("teacher", self.loss.teacher_weight)):
            if weight and role not in roles:
                raise ValueError(f"{role}_weight without a {role}: add [{role}]")
        return self

    def _require_sharing(self) -> None:
        """Refuse islands that share nothing, more than the others generate, or log-probabilities of another model."""
        if (self.islands > 1) != (self.shared > 0):
            raise ValueError(
                f"islands = {self.islands} and shared = {self.shared:g}: islands that share nothing are jobs of their own, and "
                "one island has nobody to share with: set both, or neither"
            )
        if self.shared > 1 - 1 / self.islands + 1e-9:
            raise ValueError(
                f"shared = {self.shared:g}: the other {self.islands - 1} of {self.islands} islands generate at most "
                f"{1 - 1 / self.islands:.3g} of a step's responses"
            )
        if abs(self.prompts * self.shared - round(self.prompts * self.shared)) > 1e-6:
            raise ValueError(f"shared = {self.shared:g} of {self.prompts} prompts is no number of prompts")
        if self.shared and self.log_probs == "generator":
            raise ValueError(
                "log_probs = generator with shared: the models of other islands drew those; take log_probs = actor"
            )

    @property
    def samples(self) -> int:
        """Return the responses that a step is made of."""
        return self.prompts * self.responses

    @property
    def received_prompts(self) -> int:
        """Return the prompts of a step that other islands answer."""
        return round(self.prompts * self.shared)

    @property
    def generated_prompts(self) -> int:
        """Return the prompts of a step that are answered here."""
        return self.prompts - self.received_prompts

    @property
    def generated(self) -> int:
        """Return the responses that the generator gives in a step."""
        return self.generated_prompts * self.responses

    @property
    def received_bytes(self) -> int:
        """Return what arrives from other islands in a step: the tokens of prompts and responses, TOKEN_BYTES each."""
        tokens = self.received_prompts * (self.prompt_len + self.responses * self.lengths.mean)
        return round(TOKEN_BYTES * tokens)

    @property
    def longest(self) -> int:
        """Return the tokens of a mean prompt with the longest response."""
        return self.prompt_len + self.lengths.lengths[-1]

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of all samples of a step, prompts included."""
        return max(1, round(self.samples * (self.prompt_len + self.lengths.mean)))

    @property
    def sequences(self) -> Lengths:
        """Return the lengths of prompts with responses."""
        return Lengths(
            lengths=tuple(self.prompt_len + length for length in self.lengths.lengths), counts=self.lengths.counts
        )

    @property
    def roles(self) -> tuple[Role, ...]:
        """Return the copies of models that are placed, the generator first."""
        return ("generator", *(entry.role for entry in self.models))

    @property
    def calls(self) -> tuple[CallName, ...]:
        """Return the calls of a step, level by level."""
        unused = "log_probs" if self.log_probs == "generator" else ""
        return tuple(name for name, (role, _) in CALLS.items() if role in self.roles and name != unused)

    def model_of(self, role: Role) -> ModelSpec:
        """Return the model of a role; the generator's is the actor's."""
        owner = "actor" if role == "generator" else role
        return next(entry.model for entry in self.models if entry.role == owner)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Return the passes of a mean sample: those of its generation, one for each score, and the update's."""
        length = self.prompt_len + max(round(self.lengths.mean), 1)
        phases = [
            Phase(
                name="prefill",
                num_passes=1,
                tokens=self.prompt_len,
                first_context=self.prompt_len,
                state="new_kv_cache",
            )
        ]
        if length - self.prompt_len > 1:
            num_passes, first = length - self.prompt_len - 1, self.prompt_len + 1
            phases.append(Phase(name="decode", num_passes=num_passes, tokens=1, first_context=first, state="kv_cache"))
        for name in self.calls[1:]:
            state: Literal["none", "activations"] = "activations" if CALLS[name][1] == 2 else "none"
            phases.append(Phase(name=name, num_passes=1, tokens=length, first_context=length, state=state))
        return tuple(phases)


def lengths_of_mean(mean: float, longest: int, *, sigma: float = LENGTH_SIGMA) -> Lengths:
    """Return lengths whose logarithms are normal, cut at the longest, with a given mean.

    E[min(X, c)] = exp(mu + sigma^2 / 2) Phi((ln c - mu) / sigma - sigma) + c (1 - Phi((ln c - mu) / sigma))

    Raises:
        ConfigError: the mean is not between 1 and the longest.
    """
    if not 1 <= mean <= longest:
        raise ConfigError(f"responses of {mean:g} tokens on average, and none of more than {longest}")
    low, high = math.log(mean) - 8 * sigma, math.log(longest) + 8 * sigma
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _cut_mean(middle, sigma, longest) < mean else (low, middle)
    widths = [1 << _NUM_HALVES] * (_NUM_LENGTHS - 1) + [1 << idx for idx in reversed(range(_NUM_HALVES))] + [1]
    ends, total = itertools.accumulate(widths), sum(widths)
    counts: dict[int, int] = {}
    for end, width in zip(ends, widths, strict=True):
        value = math.exp(low + sigma * NormalDist().inv_cdf((end - width / 2) / total))
        length = min(max(1, round(value)), longest)
        counts[length] = counts.get(length, 0) + width
    return Lengths(lengths=tuple(counts), counts=tuple(counts.values()))


def _cut_mean(mu: float, sigma: float, longest: int) -> float:
    z = (math.log(longest) - mu) / sigma
    below = NormalDist().cdf(z)
    return math.exp(mu + sigma**2 / 2) * NormalDist().cdf(z - sigma) + longest * (1 - below)
