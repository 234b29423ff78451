"""A copy of a model on the ranks of its pool: log-probabilities and values of samples, and updates, whatever its layout.

Samples are dealt over data-parallel ranks in turn, in the order of their numbers. A pass has as many rows as the layout's
micro-batch, filled up at the right to its longest, which changes nothing before. Ranks run equally many passes, the last ones empty
where one has fewer samples, because ranks that share parameters gather them together.

A critic's value of a position is the first column of its head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ...schema.errors import RuntimeMismatchError
from ...schema.rl import TRAINED, RlLoss
from ...schema.rl_plan import RlCopy
from ...schema.training_plan import TrainingPlan
from ..loss import token_losses
from ..parallel_model import ParallelModel
from ..parallelize_model import parallelize
from ..training.optimizer import build_optimizer, local_square, update
from .losses import policy_losses, value_losses

Rows = list[tuple[int, list[float]]]
"""Numbers of samples, each with a number for every token of its response."""


@dataclass(frozen=True)
class Sample:
    """A prompt with a response, and what calls have said of each of its tokens.

    Attributes:
        weight: of each token in a loss: 1 / (tokens of the response x responses of the update).
    """

    number: int
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    old: list[float]
    advantages: list[float]
    returns: list[float]
    old_values: list[float]
    reference: list[float]
    weight: float = 0.0

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return prompt and response."""
        return (*self.prompt, *self.response)


@dataclass(frozen=True)
class _Batch:
    """Rows of a pass: tokens [B, S + 1]; where responses are: [B, S], of targets."""

    samples: Sequence[Sample]
    tokens: Tensor
    is_response: Tensor

    def of(self, name: str) -> Tensor:
        """Return a number for every token of a response, at its place [B, S]."""
        result = torch.zeros(self.is_response.shape)
        if self.samples:
            result[self.is_response] = torch.tensor(
                [value for sample in self.samples for value in getattr(sample, name)], dtype=torch.float32
            )
        return result

    @property
    def weights(self) -> Tensor:
        """Return the weight of every target [B, S]."""
        result = torch.zeros(self.is_response.shape)
        for row, sample in enumerate(self.samples):
            result[row, self.is_response[row]] = sample.weight
        return result


class ModelCopy:
    """A copy that scores, and is updated where it is an actor or a critic."""

    def __init__(
        self,
        copy: RlCopy,
        *,
        seed: int,
        weights: Path | None,
        learning_rate: float,
        loss: RlLoss,
        max_grad_norm: float = 1.0,
    ) -> None:
        """Build this rank's part.

        Raises:
            RuntimeMismatchError: this version does not run the layout.
        """
        plan = copy.training
        assert plan is not None
        self.role, self._loss, self._max_grad_norm = copy.role, loss, max_grad_norm
        self.model: ParallelModel = parallelize(None, plan, seed=seed, weights=weights, device=torch.device("cpu"))
        self._optimizer = None
        if copy.role in TRAINED:
            self._optimizer = build_optimizer(self.model, learning_rate=learning_rate, weight_decay=0.0)

    @property
    def tells(self) -> bool:
        """Tell whether this rank says what its data-parallel share gave: one of those that share each sample."""
        return self.model.mesh.tp_rank == 0

    def log_probs(self, samples: Sequence[Sample]) -> Rows:
        """Return the log-probability of each token of this rank's share of the responses."""
        return self._scores(samples, self._token_losses, -1.0)

    def values(self, samples: Sequence[Sample]) -> Rows:
        """Return the value of the position before each token of them."""
        return self._scores(samples, self._values, 1.0)

    def _scores(self, samples: Sequence[Sample], read: Callable[[nn.Module, _Batch], Tensor], sign: float) -> Rows:
        batches = self._batches(samples)
        results = self.model.compute([partial(read, batch=batch) for batch in batches])  # type: ignore[call-arg]
        rows: Rows = []
        for batch, result in zip(batches, results, strict=True):
            for row, sample in enumerate(batch.samples):
                rows.append((sample.number, (sign * result[row][batch.is_response[row]]).tolist()))
        return rows if self.tells else []

    def update(self, samples: Sequence[Sample]) -> tuple[float, float]:
        """Do one optimizer step on samples, all ranks' together; return the loss and the norm of its gradient."""
        assert self._optimizer is not None
        compute = self._policy_loss if self.role == "actor" else self._value_loss
        model, batches = self.model, self._batches(samples)
        share = model.backward_sum([partial(compute, batch=batch) for batch in batches])  # type: ignore[call-arg]
        sums = torch.stack((share.float(), local_square(model), torch.zeros_like(share)))
        model.add_over_ranks(sums)
        update(model, self._optimizer, sums, max_grad_norm=self._max_grad_norm)
        return float(sums[0]), float(sums[1].sqrt())

    def _policy_loss(self, module: nn.Module, batch: _Batch) -> Tensor:
        log_probs = -self._token_losses(module, batch)
        reference = batch.of("reference") if batch.samples and batch.samples[0].reference else None
        losses = _policy(log_probs, batch, self._loss, reference)
        return (losses * batch.weights).sum()

    def _value_loss(self, module: nn.Module, batch: _Batch) -> Tensor:
        values = self._values(module, batch)
        losses = value_losses(values, batch.of("old_values"), batch.of("returns"), self._loss)
        return (losses * batch.weights).sum()

    def _token_losses(self, module: nn.Module, batch: _Batch) -> Tensor:
        targets = batch.tokens[:, 1:].contiguous()
        shard = module.vocab_shard
        losses: Tensor = module(
            batch.tokens[:, :-1].contiguous(), read=lambda logits: token_losses(logits, targets, shard)
        )
        return losses.view(targets.shape)

    def _values(self, module: nn.Module, batch: _Batch) -> Tensor:
        values: Tensor = module(batch.tokens[:, :-1].contiguous(), read=lambda logits: logits[..., 0].float().clone())
        return values

    def _batches(self, samples: Sequence[Sample]) -> list[_Batch]:
        layout = self.model.plan.layout
        rows = layout.micro_batch_size
        ordered = sorted(samples, key=lambda sample: sample.number)
        shares = [ordered[rank :: layout.dp] for rank in range(layout.dp)]
        passes = max(-(-len(share) // rows) for share in shares)
        share = shares[self.model.mesh.dp_rank]
        return [_batch(share[idx * rows : (idx + 1) * rows], layout.tp) for idx in range(passes)]


def _policy(log_probs: Tensor, batch: _Batch, loss: RlLoss, reference: Tensor | None) -> Tensor:
    # Where there is no response the ratio must stay a number: nothing there counts.
    old = torch.where(batch.is_response, batch.of("old"), log_probs.detach())
    return policy_losses(log_probs, old, batch.of("advantages"), loss, reference)


def _batch(samples: Sequence[Sample], multiple: int) -> _Batch:
    """Return the rows of a pass, their length a multiple of what sequence parallelism shares out."""
    longest = max((len(sample.tokens) - 1 for sample in samples), default=1)
    length = -(-longest // multiple) * multiple
    tokens = torch.zeros(max(len(samples), 1), length + 1, dtype=torch.long)
    is_response = torch.zeros(max(len(samples), 1), length, dtype=torch.bool)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample.tokens)] = torch.tensor(sample.tokens)
        is_response[row, len(sample.prompt) - 1 : len(sample.tokens) - 1] = True
    return _Batch(samples, tokens, is_response)


def why_not_run(role: str, plan: TrainingPlan) -> tuple[str, ...]:
    """Return why this version does not run a copy's layout; empty where it does."""
    layout = plan.layout
    degrees = ((axis, getattr(layout, axis)) for axis in ("pp", "cp"))
    wrong = [f"the {role} has {axis}={n}: only tp, dp and experts are run here" for axis, n in degrees if n > 1]
    if role == "critic" and layout.tp > 1:
        wrong.append(f"the critic has tp={layout.tp}: its values are one column of a split head")
    return tuple(wrong)


def require_run(lacking: Sequence[str]) -> None:
    """Refuse a plan that this version does not run.

    Raises:
        RuntimeMismatchError: with every reason.
    """
    if lacking:
        raise RuntimeMismatchError(
            "`meshwright apply-rl` of this version does not run the plan", details=tuple(lacking)
        )
