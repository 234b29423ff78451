"""Robust means: what counts and what does not, against numpy; and jobs whose ranks send wrong gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rank_with_faults
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.runtime.job import machine
from meshwright.runtime.job.launch import launch
from meshwright.runtime.job.worker import Job
from meshwright.runtime.robust_sum import flag_weights, middle
from meshwright.runtime.training.options import TrainOptions, prepare_options, require_robust_sum
from meshwright.schema import Layout, RuntimeMismatchError, TrainingPlan, Workload
from plans import make_plan, tiny_model
from small_jobs import losses, read_lines, train_here

STEPS = 8
LEARNING = {"learning_rate": 3e-3, "warmup_steps": 1, "steps": STEPS}


def plan_of(*, batch: int = 8, precision: Any = "fp32", **layout: Any) -> TrainingPlan:
    workload = Workload(seq_len=32, global_batch_size=batch, precision=precision)
    return make_plan(tiny_model(num_blocks=2, vocab_size=256), Layout(**layout), workload=workload)


@st.composite
def gradients(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Rows that share a direction, and how many of the first ones are to be made wrong.

    Up to the square root of 3 in noise, twice as many right rows pull harder along it than wrong ones that are all alike.
    """
    count, noise, seed = draw(st.integers(4, 16)), draw(st.floats(0.1, 1.4)), draw(st.integers(0, 99))
    generator = torch.Generator().manual_seed(seed)
    common, own = torch.randn(200, generator=generator), torch.randn(count, 200, generator=generator)
    return common + noise * own, draw(st.integers(0, (count - 1) // 3))


@settings(max_examples=60, deadline=None)
@given(drawn=gradients(), kind=st.sampled_from(["-10 x", "noise", "turned", "nan"]))
def test_wrong_ranks_do_not_count_and_the_others_do_alike(drawn: tuple[torch.Tensor, int], kind: str) -> None:
    rows, wrong = drawn
    noise = torch.randn(wrong, rows.shape[1], generator=torch.Generator().manual_seed(1))
    rows[:wrong] = {
        "-10 x": -10 * rows[:wrong], "noise": noise * 40, "turned": -rows.mean(dim=0).expand(wrong, -1),
        "nan": torch.full_like(noise, torch.nan),
    }[kind]  # fmt: skip
    weights = flag_weights((rows @ rows.T).double())
    count = len(rows) - wrong
    expected = torch.cat([torch.zeros(wrong), torch.full((count,), 1 / count)]).double()
    assert torch.allclose(weights, expected)


def test_ranks_without_gradients_count_where_all_have_none_or_some() -> None:
    assert flag_weights(torch.zeros(4, 4).double()).tolist() == [0.25] * 4
    rows = torch.ones(4, 3)
    rows[0] = 0
    assert flag_weights((rows @ rows.T).double()).tolist() == [0.25] * 4


@pytest.mark.parametrize("count", [4, 5, 8])
def test_middle_is_that_of_numpy(count: int) -> None:
    rows = torch.randn(count, 50, generator=torch.Generator().manual_seed(count))
    np.testing.assert_allclose(middle(rows, (count - 1) // 2), np.median(rows.numpy(), axis=0), rtol=1e-6)
    trimmed = np.sort(rows.numpy(), axis=0)[1:-1].mean(axis=0)
    np.testing.assert_allclose(middle(rows, 1), trimmed, rtol=1e-5, atol=1e-6)
    rows[0] = torch.nan
    assert middle(rows, 1).isfinite().all()


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (plan_of(dp_replicate=2), "at least 4 ranks"),
        (plan_of(dp_replicate=2, tp=2), "differ in their data alone"),
        (plan_of(dp_shard=4, zero_stage=3), "zero_stage 3"),
        (plan_of(dp_replicate=4, precision="bf16-mixed"), "in fp32"),
        (plan_of(dp_replicate=4, batch=9), "unlike shares"),
    ],
)
def test_plans_that_it_does_not_suit_are_refused(plan: TrainingPlan, reason: str) -> None:
    with pytest.raises(RuntimeMismatchError) as caught:
        require_robust_sum(plan)
    assert any(reason in text for text in caught.value.details)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one rank with the plain mean."""
    with pytest.MonkeyPatch.context() as patch:
        return losses(train_here(patch, plan_of(), TrainOptions(**LEARNING), tmp_path_factory.mktemp("one") / "report"))


@pytest.mark.long
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("layout", "kind", "wrong"),
    [
        ({"dp_replicate": 4}, "flag", ()),
        ({"dp_shard": 4, "zero_stage": 1}, "flag", ()),
        ({"dp_replicate": 4}, "flag", ("wrong-3",)),
        ({"dp_shard": 4, "zero_stage": 1}, "trimmed", ("wrong-0",)),
    ],
)
def test_a_job_with_a_wrong_rank_trains_and_one_without_does_as_with_the_plain_mean(
    layout: dict[str, int], kind: Any, wrong: tuple[str, ...], expected: list[float], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The wrong rank sends -10 times its gradients, by which the plain mean would go the other way."""
    faults, plan = tmp_path / "faults", plan_of(**layout)
    faults.mkdir()
    rank_with_faults.use(faults, monkeypatch)
    monkeypatch.setattr(machine, "num_cores", lambda: 4)
    for name in wrong:
        (faults / name).touch()
    plan.save(tmp_path / "plan.json")
    options = prepare_options(plan, TrainOptions(robust_sum=kind, **LEARNING))
    launch(plan, Job(plan=str(tmp_path / "plan.json"), options=options, report=str(tmp_path / "report")))
    trained = losses(read_lines(tmp_path / "report"))
    # The mean of three ranks of four is another one; with the sign of the fourth losses would rise.
    assert trained == pytest.approx(expected, rel=0.03 if wrong else 1e-5)
    assert expected[-1] < 0.95 * expected[0]
