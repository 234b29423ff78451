"""Runs that lose their time to messages between nodes, told from their neighbours."""

from __future__ import annotations

import pytest
from meshwright.validation.decisions import decision_groups
from meshwright.validation.predict import predict
from meshwright.validation.stalls import stalled
from run_rows import a_row

PIPELINE = {"n_gpus": 32, "global_batch": 256, "micro_batch": 2, "dp": 4, "tp": 2, "pp": 4}
"""32 micro-batches, 35 with those that fill the pipeline."""


def test_run_that_loses_a_second_at_each_micro_batch_stalls_and_its_neighbours_do_not() -> None:
    healthy = a_row(**PIPELINE, iter_time_s=7.0)
    wider = a_row(**PIPELINE | {"n_gpus": 64, "dp": 8}, iter_time_s=3.9)  # 16 micro-batches: the same seconds each
    lost = a_row(**PIPELINE, iter_time_s=42.0)
    assert stalled([healthy, wider, lost]).tolist() == [False, False, True]


@pytest.mark.parametrize(
    "changes",
    [
        {"iter_time_s": 15.0},  # 0.43 s a micro-batch instead of 0.2: a quarter of a second more is needed
        {"micro_batch": 4, "iter_time_s": 9.0},  # 0.47 s instead of 0.2: twice the sequences may take twice as long
        {"n_gpus": 8, "dp": 1, "iter_time_s": 168.0},  # nothing leaves the node
        {"dp": 16, "pp": 1, "iter_time_s": 42.0},  # a pipeline is no neighbour of a run without
        {"model": "another", "iter_time_s": 42.0},
        {"status": "oom", "iter_time_s": None},
    ],
)
def test_run_does_not_stall(changes) -> None:
    assert not stalled([a_row(**PIPELINE, iter_time_s=7.0), a_row(**PIPELINE | changes)]).any()


def test_sums_of_gradients_between_nodes_stall_by_the_step() -> None:
    plain = {"global_batch": 256, "micro_batch": 2, "tp": 1, "pp": 1}
    small = a_row(**plain | {"n_gpus": 16, "dp": 16}, iter_time_s=2.4)  # 8 micro-batches of 0.3 s
    dear = a_row(**plain | {"n_gpus": 128, "dp": 128}, iter_time_s=0.7)  # one: its sums cost 0.4 s more
    lost = a_row(**plain | {"n_gpus": 128, "dp": 128}, iter_time_s=0.9)
    assert stalled([small, dear, lost]).tolist() == [False, False, True]


def test_stalled_runs_are_no_members_of_a_decision_group() -> None:
    rows = [
        a_row(**PIPELINE | {"id": name, "decision_group": "g"}, iter_time_s=seconds)
        for name, seconds in (("a", 7.0), ("b", 7.1), ("c", 42.0))
    ]
    (group,) = decision_groups(rows, predict(rows))
    assert group.measured_s.tolist() == [7.0, 7.1]
