"""Zeroth-order training: the slope along a random direction is the gradient's, and every layout takes the same steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from meshwright.runtime import build_optimizer, parallelize
from meshwright.runtime.training.optimizer import ZerothOrderSGD
from meshwright.runtime.training.options import TrainOptions, prepare_options
from meshwright.schema import Layout, RuntimeMismatchError
from small_jobs import losses, small_plan, train_here


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_the_slope_is_the_gradient_along_the_direction() -> None:
    plan = small_plan(Layout(micro_batch_size=2))
    tokens = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(0))
    model = parallelize(None, plan)
    optimizer = build_optimizer(model, learning_rate=1e-4, zeroth_order=True)
    assert isinstance(optimizer, ZerothOrderSGD)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss = model.forward_backward(tokens)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    halfway = optimizer.losses(tokens).item()
    moved = {name: (p - before[name]).abs().max().item() for name, p in model.named_parameters()}
    assert max(moved.values()) < 1e-6  # there and back, but for rounding
    assert abs(halfway - loss) < 1e-3
    optimizer.param_groups[0]["weight_decay"] = optimizer.param_groups[1]["weight_decay"] = 0.0
    optimizer.step()
    changes = {name: (p.detach() - before[name]).double() for name, p in model.named_parameters()}
    square = sum((change**2).sum() for change in changes.values())
    # change = -lr g z, so |change| / |z| is lr g, and |z| is the root of the number of parameters.
    count = sum(change.numel() for change in changes.values())
    slope = (square / count).sqrt().item() / 1e-4
    along = sum((gradients[name].double() * change).sum() for name, change in changes.items())
    directional = abs(along.item()) / (square / count).sqrt().item()
    assert directional == pytest.approx(slope, rel=0.02)  # third derivatives, and rounding of two losses over 2e-3


def test_a_run_trains_without_a_backward_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backwards: list[int] = []
    monkeypatch.setattr(torch.Tensor, "backward", lambda *_: backwards.append(1))
    options = TrainOptions(steps=3, learning_rate=1e-5, zeroth_order=True)
    records = train_here(monkeypatch, small_plan(), options, tmp_path / "run.jsonl")
    assert len(losses(records)) == 3
    assert len(backwards) <= 1  # the memory meter's own, before the first step


def test_a_plan_that_has_no_backward_pass_trains_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small_plan()
    plan = plan.replace(workload=plan.workload.replace(passes="zeroth_order"))
    planned = train_here(monkeypatch, plan, TrainOptions(steps=2, learning_rate=1e-5), tmp_path / "planned.jsonl")
    asked = TrainOptions(steps=2, learning_rate=1e-5, zeroth_order=True)
    assert losses(planned) == losses(train_here(monkeypatch, small_plan(), asked, tmp_path / "asked.jsonl"))


def test_pipelines_are_refused() -> None:
    with pytest.raises(RuntimeMismatchError, match="does not run over a pipeline"):
        prepare_options(small_plan(Layout(pp=2)), TrainOptions(zeroth_order=True))
