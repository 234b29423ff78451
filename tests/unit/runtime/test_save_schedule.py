"""How often an automatic schedule saves: by the faults that were given, that were seen, and what a save took."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist
from meshwright.cost_models.goodput import best_interval_s
from meshwright.runtime.training.options import TrainOptions
from meshwright.runtime.training.save_schedule import (
    FIRST_STEPS,
    MTBF_HOURS_PER_DEVICE,
    PAST,
    SaveSchedule,
    expected_mtbf_s,
)

DAY_S = 86_400.0


def test_what_was_given_is_believed_until_faults_speak_against_it() -> None:
    assert expected_mtbf_s(10 * DAY_S, faults=0, seconds=0, devices=8) == 10 * DAY_S
    assert expected_mtbf_s(10 * DAY_S, faults=1, seconds=5 * DAY_S, devices=8) == 7.5 * DAY_S
    assert expected_mtbf_s(10 * DAY_S, faults=4, seconds=2 * DAY_S, devices=8) == 0.5 * DAY_S  # chance 1 in 17,000
    assert expected_mtbf_s(1e9, faults=1, seconds=60, devices=8) == 60


def test_without_a_word_a_job_lasts_as_long_as_it_has_at_most_as_its_devices_usually_do() -> None:
    assert expected_mtbf_s(None, faults=0, seconds=100, devices=2) == 200
    assert expected_mtbf_s(None, faults=2, seconds=100, devices=2) == 40
    usual_s = MTBF_HOURS_PER_DEVICE * 3600 / 16_384
    assert expected_mtbf_s(None, faults=0, seconds=1e9, devices=16_384) == usual_s


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(dist, "broadcast", lambda tensor, source: None)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("restarts", [0, 9])
def test_a_run_that_goes_on_saves_by_what_a_save_took_before(restarts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No probe after a restart; the nine of them, not the starts, say how frequent faults are."""
    now_s = time.time()
    monkeypatch.setenv(PAST, f"{restarts} {now_s - 100 - 10 * (1 + restarts)} {now_s - 10}")
    options = TrainOptions(steps=1000, checkpoint_dir="d", checkpoint_every="auto")
    schedule, times = SaveSchedule(options, done=40, begun_s=now_s, save_s=0.5), [0.1] * 60
    due = next(step for step in range(41, 500) if schedule.is_due(step, times[: step - 40]))
    expected = best_interval_s(mtbf_s=100 / (0.5 + restarts), save_s=0.5) / 0.1
    assert due == pytest.approx(40 + expected, abs=1.5)
    first = SaveSchedule(options, done=0)
    assert [first.is_due(step, times[:step]) for step in range(1, FIRST_STEPS + 1)] == [False] * (FIRST_STEPS - 1) + [
        True
    ]
