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


def test_a_recomputed_block_finds_and_leaves_its_buffers_as_they_were() -> None:
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        block = Remembers()
        if recompute:
            checkpoint_block(block, "full")
        sum(block(OUT + i).square().sum() for i in range(2)).backward()  # type: ignore[union-attr]
        results.append((block.linear.weight.grad, block.mean))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
