"""Losses of batches: a mean over samples is taken, one that couples them is refused by its first micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshwright.runtime.batch_loss import MeanLoss
from meshwright.runtime.recompute import checkpoint_block
from meshwright.runtime.user_modules import _one_number
from meshwright.schema import RuntimeMismatchError
from torch import Tensor, nn

OUT = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
TARGETS = torch.tensor([0, 1, 2, -100])


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, _: out.square().mean(),
        lambda out, batch: F.cross_entropy(out, batch[0].clamp(min=0)),
        lambda out, _: (out * torch.randn(4)).square().mean(),  # draws: no two calls are alike
        lambda out, _: out.view(4, 4).mean(),  # takes no half
    ],
)
def test_means_over_samples_are_taken(loss: Callable[[Tensor, list[Tensor]], Tensor]) -> None:
    assert torch.isfinite(MeanLoss(loss)(OUT, [TARGETS]))


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, _: F.cross_entropy(out, torch.arange(len(out))),  # the other samples are negatives
        lambda out, batch: F.cross_entropy(out, batch[0]),  # of three targets
        lambda out, _: out.sum(),
    ],
)
def test_losses_that_couple_samples_or_are_no_means_are_refused(loss: Callable[[Tensor, list[Tensor]], Tensor]) -> None:
    with pytest.raises(RuntimeMismatchError, match=r"4 samples is .* couples the samples"):
        MeanLoss(loss)(OUT, [TARGETS])


@dataclass
class Outputs:
    """What torch's pytree does not know."""

    logits: Tensor
    extra: Tensor | None = None


def of_pairs(out: Outputs, _: object) -> Tensor:
    return F.cross_entropy(out.logits @ out.logits.T, torch.arange(len(out.logits)))


@pytest.mark.parametrize("outputs", [Outputs(OUT), {"all": [Outputs(OUT), None]}], ids=["dataclass", "with none"])
def test_samples_are_seen_whatever_holds_them(outputs: Any) -> None:
    loss = MeanLoss(lambda out, batch: of_pairs(out if isinstance(out, Outputs) else out["all"][0], batch))
    with pytest.raises(RuntimeMismatchError, match=r"4 samples is .* couples the samples"):
        loss(outputs, [TARGETS])


def test_one_sample_is_compared_with_itself_taken_twice() -> None:
    assert MeanLoss(lambda out, _: out.square().mean())(OUT[:1], [TARGETS[:1]]) > 0
    for loss in (lambda out, _: out.sum(), lambda out, _: of_pairs(Outputs(out), None)):
        with pytest.raises(RuntimeMismatchError, match=r"1 sample is .* that of the sample taken twice"):
            MeanLoss(loss)(OUT[:1], [TARGETS[:1]])


class Remembers(nn.Module):
    """Reads and changes a mean of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        with torch.no_grad():
            self.mean.lerp_(y.detach().mean(0), 0.5)
        return y.sin() * self.mean.clone()


class Normalises(nn.Module):
    """Reads its last output, counts calls, has a batch norm, which writes uncounted by torch, and makes a buffer anew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.calls = nn.Linear(4, 4), nn.BatchNorm1d(4), 0
        self._last: Tensor | None = None
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.linear(x))
        self.calls += 1
        y = y * self.calls if self._last is None else y * self.calls + self._last
        self._last = y.detach()
        y = y.sin() * self.mean
        self.mean = 0.5 * self.mean + 0.5 * y.detach().mean(0)
        return y


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("make", [Remembers, Normalises])
def test_a_recomputed_block_finds_and_leaves_its_state_as_it_was(make: Callable[[], nn.Module], recompute: Any) -> None:
    results = []
    for kind in ("none", recompute):
        torch.manual_seed(0)
        block = make()
        checkpoint_block(block, kind)
        for _ in range(2):
            sum(block(OUT + i).square().sum() for i in range(2)).backward()  # type: ignore[union-attr]
        results.append((*(p.grad for p in block.parameters()), *block.buffers()))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_a_loss_of_each_sample_is_refused() -> None:
    with pytest.raises(RuntimeMismatchError, match=r"batch_loss returns \[4\] numbers"):
        _one_number(OUT[0])
