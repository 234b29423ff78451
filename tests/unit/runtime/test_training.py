"""Training runs of one rank in this process: what the loop itself does."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from meshwright.runtime import loss_scale, parallelize
from meshwright.runtime.job.machine import explain_out_of_memory
from meshwright.runtime.loss_scale import LossScale
from meshwright.runtime.training.optimizer import RouterBalance, build_scheduler
from meshwright.runtime.training.options import TrainOptions, list_checkpoints, require_compilable
from meshwright.schema import ConfigError, Layout, MeshwrightError, RuntimeMismatchError, TrainingPlan
from meshwright.schema.layers import MoE
from plans import make_plan, tiny_model
from small_jobs import WORKLOAD, losses, small_plan, train_here

EXPERTS = MoE(num_experts=8, top_k=2, ffn_dim=16, router="sigmoid")


@pytest.fixture(autouse=True)
def no_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def precision(name: str) -> TrainingPlan:
    plan = small_plan()
    return plan.replace(workload=plan.workload.replace(precision=name))


@pytest.mark.long
def test_overflowed_steps_are_skipped_until_the_scale_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "INITIAL_SCALE", 2.0**30)
    options = TrainOptions(steps=16, learning_rate=1e-2, checkpoint_dir=str(tmp_path / "c"))
    lines = train_here(monkeypatch, precision("fp16-mixed"), options, tmp_path / "m.jsonl")
    records = [record for record in lines if "step" in record]
    skipped = [record["grad_norm"] is None for record in records]
    # Near the limit one step's gradients may overflow after another's did not: that depends on the order of sums in threads.
    assert skipped[:2] == [True, True] and not all(skipped)
    assert [record["loss_scale"] for record in records] == [2.0 ** (30 - sum(skipped[:i])) for i in range(16)]
    exact = train_here(monkeypatch, small_plan(), options.replace(checkpoint_dir=None), tmp_path / "e.jsonl")[:-1]
    # Nothing changed in the skipped steps: each loss is that of the initial weights on the step's data, as in fp32 within fp16.
    assert records[0]["loss"] == pytest.approx(exact[0]["loss"], rel=1e-3)
    info = json.loads((list_checkpoints(tmp_path / "c")[-1] / "checkpoint.json").read_text())
    last_skipped = max(i for i, was_skipped in enumerate(skipped) if was_skipped)
    assert (info["loss_scale"], info["scale_steps"]) == (2.0 ** (30 - sum(skipped)), 15 - last_skipped)


def test_scale_grows_after_a_while_and_is_one_elsewhere() -> None:
    scale = LossScale(8.0, is_dynamic=True)
    for _ in range(loss_scale.GROWTH_STEPS):
        scale.update(overflowed=False)
    assert (scale.value, scale.steps) == (16.0, 0)
    other = LossScale.from_plan(small_plan())
    other.update(overflowed=True)
    assert other.value == 1


@pytest.mark.parametrize("beside", [False, True])
def test_checkpoints_are_whole_and_the_last_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    """Written beside later steps, each holds the state of its own step: a run that goes on from it has the same losses."""
    options = TrainOptions(
        steps=6, learning_rate=1e-2, checkpoint_dir=str(tmp_path / "c"), checkpoint_every=1, keep_checkpoints=3,
        checkpoint_beside=beside,
    )  # fmt: skip
    whole = losses(train_here(monkeypatch, small_plan(), options, tmp_path / "whole.jsonl"))
    kept = list_checkpoints(tmp_path / "c")
    assert [path.name for path in kept] == [f"step-0000000{step}" for step in (4, 5, 6)]
    assert not list((tmp_path / "c").glob(".*"))
    for path in kept[1:]:
        path.rename(path.with_name(f"aside-{path.name}"))
    resumed = train_here(monkeypatch, small_plan(), options.replace(resume=True), tmp_path / "resumed.jsonl")
    assert losses(resumed) == whole[4:]


@pytest.mark.long
def test_other_data_need_to_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        np.save(tmp_path / f"{name}.npy", np.arange(2000) % (50 + len(name)))
    np.save(tmp_path / "b.npy", np.arange(3000) % 40)
    options = TrainOptions(steps=1, data=(str(tmp_path / "a.npy"),), checkpoint_dir=str(tmp_path / "c"))
    train_here(monkeypatch, small_plan(), options, tmp_path / "1.jsonl")
    other = options.replace(steps=2, data=(str(tmp_path / "b.npy"),), resume=True)
    with pytest.raises(ConfigError, match="was trained on other data"):
        train_here(monkeypatch, small_plan(), other, tmp_path / "2.jsonl")
    dist.destroy_process_group()
    records = train_here(monkeypatch, small_plan(), other.replace(restart_data=True), tmp_path / "3.jsonl")
    assert [record["step"] for record in records if "step" in record] == [2]


@pytest.mark.long
def test_measurements_agree_with_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small_plan()
    *steps, last = train_here(monkeypatch, plan, TrainOptions(steps=3), tmp_path / "m.jsonl")
    for record in steps:
        assert record["tokens_per_s"] == pytest.approx(4 * 32 / record["step_time_s"])
        assert record["mfu"] * record["step_time_s"] == pytest.approx(plan.estimate.mfu * plan.estimate.step_time_s)
    assert last["ratio"]["mfu"] == pytest.approx(1 / last["ratio"]["step_time_s"])


def test_learning_rate_after_a_resume_is_that_of_the_whole_run() -> None:
    options = TrainOptions(steps=20, learning_rate=0.5, warmup_steps=4)
    weight = torch.nn.Parameter(torch.ones(1))

    def rates(done: int) -> list[float]:
        optimizer = torch.optim.SGD([weight], lr=options.learning_rate)
        scheduler, found = build_scheduler(optimizer, options, done=done), []
        for _ in range(done, 20):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    assert rates(0)[:4] == pytest.approx([0.125, 0.25, 0.375, 0.5])
    assert rates(0)[-1] == pytest.approx(0.05)
    assert rates(0)[11] == pytest.approx(0.05 + 0.45 * (1 + math.cos(math.pi * 8 / 16)) / 2)
    assert rates(7) == pytest.approx(rates(0)[7:])


@pytest.mark.usefixtures("one_rank")
def test_router_correction_evens_the_loads() -> None:
    """The same tokens again and again: the most chosen expert loses some of them, by the correction alone."""
    spec = tiny_model(vocab_size=256, num_blocks=2, experts=EXPERTS)
    model = parallelize(None, make_plan(spec, small_plan().layout, workload=WORKLOAD), seed=3)
    balance = RouterBalance(model, rate=0.001)
    tokens = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(0))
    router = next(block.mlp.gate for block in model.module.model.layers.values() if hasattr(block.mlp, "gate"))
    spreads = []
    for _ in range(30):
        model.backward(tokens)
        assert router.load is not None
        assert router.load.sum() == 4 * 32 * 2
        spreads.append(int(router.load.max() - router.load.min()))
        before, load = router.e_score_correction_bias.clone(), router.load.float()
        balance.update()
        assert torch.allclose(router.e_score_correction_bias - before, 0.001 * torch.sign(load.mean() - load))
    assert max(spreads[-5:]) < spreads[0] / 2


@pytest.fixture
def one_rank() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.long
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_blocks_give_the_same_gradients(monkeypatch: pytest.MonkeyPatch, recompute: str) -> None:
    """Traced and differentiated ahead of time, but without generated kernels, whose compilation takes minutes."""
    monkeypatch.setattr(
        torch.nn.Module, "compile", functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
    )
    plan = small_plan(Layout(recompute=recompute))
    tokens = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(0))
    models = [parallelize(None, plan, seed=3, compile_blocks=compiled) for compiled in (False, True)]
    eager, compiled = (model.forward_backward(tokens) for model in models)
    assert compiled == pytest.approx(eager, rel=1e-6)
    for (name, mine), (_, theirs) in zip(*(model.named_parameters() for model in models), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-6), name  # sums in another order


def test_plan_that_cannot_be_compiled_is_refused() -> None:
    with pytest.raises(RuntimeMismatchError, match="--compile does not suit") as caught:
        require_compilable(small_plan(Layout(pp=2, schedule="zb-h1")))
    assert "splits backward passes" in caught.value.details[0]


@pytest.mark.usefixtures("one_rank")
def test_rank_without_memory_says_what_was_predicted_and_what_there_is() -> None:
    with pytest.raises(MeshwrightError) as caught, explain_out_of_memory(small_plan(), torch.device("cpu")):
        torch.empty(2**60)
    assert caught.value.message == "rank 0 of 1 is out of memory on cpu"
    assert "allocate" in caught.value.details[0]
    assert caught.value.details[1].startswith("predicted peak 7 B a rank; this machine has ")
    with pytest.raises(RuntimeError, match="of another kind"), explain_out_of_memory(small_plan(), torch.device("cpu")):
        raise RuntimeError("of another kind")
