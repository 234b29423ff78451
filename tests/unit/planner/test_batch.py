"""A batch of unequal lengths under a plan: seconds of its layout, memory of its ranks, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from meshwright.cli.main import app
from meshwright.planner import plan
from meshwright.planner.batch import instance_of_plan, length_costs
from meshwright.schema import ClusterSpec, ConfigError, Layout, ModelSpec, TrainingPlan, Workload
from meshwright.schema.batch import Batch, LengthCosts, SequenceCosts, read_lengths
from meshwright.solvers.batch_groups import BatchGroup, PackInstance, check_batch, schedule_batch
from typer.testing import CliRunner

LENGTHS = [700, 1_500, 3_000, 9_000, 2_000, 90_000, 400, 400]


@pytest.fixture(scope="module")
def trained() -> TrainingPlan:
    workload = Workload(seq_len=4_096, global_batch_size=64)
    fixed = {"pp": 1, "tp": 1, "recompute": "full"}
    return plan(ModelSpec.named("llama-3.1-8b"), ClusterSpec.parse("8xH100-SXM-80GB"), workload, fixed=fixed)


def test_seconds_of_a_plan_fall_with_the_group_and_rise_with_the_length(trained: TrainingPlan) -> None:
    instance = instance_of_plan(trained, LENGTHS)
    assert instance.degrees == (1, 2, 4, 8)
    assert (np.diff(instance.seconds, axis=1) < 0).all()
    order = np.argsort(instance.lengths, kind="stable")
    assert (np.diff(instance.seconds[order], axis=0) >= 0).all()
    # Rank seconds: more ranks never make the work less than a hundredth cheaper.
    work = instance.seconds * np.array(instance.degrees)
    assert (work[:, 1:] >= 0.99 * work[:, :1]).all()
    answer = schedule_batch(instance)
    assert check_batch(instance, answer) == []
    assert answer.seconds <= 1.5 * answer.bound_seconds


def test_costs_add_up_as_stated() -> None:
    costs = SequenceCosts(fixed_s=1.0, linear_s=2.0, quadratic_s=0.5, exchange_s={2: 1.0, 8: 4.0})
    lengths = np.array([4.0, 10.0])
    assert costs.seconds(lengths, 1).tolist() == [16.0, 70.0]
    assert costs.seconds(lengths, 2).tolist() == [10.0, 40.0]
    assert costs.seconds(lengths, 4).tolist() == [5.0, 20.0]
    assert costs.seconds(lengths, 8).tolist() == [4.0, 13.75]


def test_the_command_schedules_plans_and_batches(trained: TrainingPlan, tmp_path: Path) -> None:
    path, lengths = tmp_path / "plan.json", tmp_path / "lengths.txt"
    trained.save(path)
    lengths.write_text("\n".join(map(str, LENGTHS)))
    result = CliRunner().invoke(app, ["batch", str(path), "--lengths", str(lengths), "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    members = [idx for groups in answer["micro_batches"] for group in groups for idx in group["sequences"]]
    assert sorted(members) == list(range(len(LENGTHS)))
    assert answer["bound_seconds"] <= answer["seconds"] * (1 + 1e-9)
    batch = Batch(lengths=(5, 6, 7), num_ranks=2, tokens_per_rank=8, costs=SequenceCosts(linear_s=1.0), name="own")
    own = tmp_path / "batch.json"
    own.write_text(batch.model_dump_json())
    result = CliRunner().invoke(app, ["batch", str(own)])
    assert result.exit_code == 0, result.output
    assert "own: 3 sequences, 18 tokens on 2 ranks" in result.output
    assert "besides" not in result.output
    costs = SequenceCosts(linear_s=1.0, fixed_s=0.25)
    own.write_text(Batch(lengths=(8,) * 30, num_ranks=1, tokens_per_rank=8, costs=costs).model_dump_json())
    result = CliRunner().invoke(app, ["batch", str(own)])
    assert "6 further micro-batches" in result.output
    assert "250 ms for each micro-batch" in result.output


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("5\n0\n", "line 2"),
        ("-3\n", "line 1"),
        ("4\nfour\n", "'four'"),
        ("", "no lengths"),
        ("9" * 30, "no length"),
        ("7 9\n", "with parts"),
    ],
)
def test_lengths_that_are_none_are_refused_by_line(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_lengths(path)


def test_what_does_not_go_together_is_refused(trained: TrainingPlan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    trained.save(path)
    refused = CliRunner().invoke(app, ["batch", str(path)])
    assert refused.exit_code == 2
    assert "--lengths" in refused.output


@pytest.mark.long
def test_batches_of_a_pipeline_are_packs_whose_seconds_are_those_of_its_stages() -> None:
    model, cluster = ModelSpec.named("llama-3.1-8b"), ClusterSpec.parse("8xH100-SXM-80GB")
    workload = Workload(seq_len=4_096, global_batch_size=64)
    staged = plan(
        model,
        cluster,
        workload,
        fixed={"pp": 2, "tp": 2, "schedule": "1f1b", "num_model_chunks": 1, "micro_batch_size": 1, "cp": 1},
    )
    instance = instance_of_plan(staged, [700, 1_500, 3_000, 9_000, 2_000, 400] * 8)
    assert isinstance(instance, PackInstance)
    assert instance.num_pipelines == staged.layout.dp
    answer = schedule_batch(instance)
    assert check_batch(instance, answer) == []
    assert len(answer.micro_batches) >= 2
    # Packs of one sequence each, all of one length, take what the plan's estimate says of such micro-batches.
    equal = instance_of_plan(staged, [4_096] * 64)
    dp = staged.layout.dp
    one_by_one = [[BatchGroup(r, 1, (turn * dp + r,), 0.0) for r in range(dp)] for turn in range(64 // dp)]
    assert isinstance(equal, PackInstance)
    seconds = equal.step_s(one_by_one) + equal.costs.step_s
    assert seconds == pytest.approx(staged.estimate.step_time_s, rel=0.03)
    other = plan(model, cluster, workload, fixed={"pp": 2, "schedule": "gpipe"})
    with pytest.raises(ConfigError, match="unequal lengths") as caught:
        instance_of_plan(other, LENGTHS)
    assert "schedule gpipe holds all micro-batches" in str(caught.value)


def test_the_command_draws_a_batch(trained: TrainingPlan, tmp_path: Path) -> None:
    path, lengths, picture = tmp_path / "plan.json", tmp_path / "lengths.txt", tmp_path / "batch.svg"
    trained.save(path)
    lengths.write_text("\n".join(map(str, LENGTHS)))
    result = CliRunner().invoke(app, ["batch", str(path), "--lengths", str(lengths), "--plot", str(picture), "--json"])
    assert result.exit_code == 0, result.output
    groups = [group for groups in json.loads(result.stdout)["micro_batches"] for group in groups]
    drawn = ET.parse(picture).getroot()
    titles = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert [title.split(":")[0] for title in titles if title] == [
        f"ranks {group['first']} to {group['first'] + group['size'] - 1}"
        if group["size"] > 1
        else f"rank {group['first']}"
        for group in groups
    ]
    frame, *bars = list(drawn.iter("{http://www.w3.org/2000/svg}rect"))[1:]
    right = float(frame.get("x", "")) + float(frame.get("width", ""))
    assert all(float(bar.get("x", "")) + float(bar.get("width", "")) <= right + 0.1 for bar in bars[: len(groups)])


def test_the_command_packs_lengths(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("30\n20\n25\n25\n")
    result = CliRunner().invoke(app, ["batch", str(lengths), "--pack", "50", "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert (sorted(map(tuple, answer["packs"])), answer["tokens"], answer["padding"]) == (
        [(0, 1), (2, 3)],
        [50, 50],
        0.0,
    )
    shown = CliRunner().invoke(app, ["batch", str(lengths), "--pack", "50"])
    assert "2 packs" in shown.stdout
    wrong = CliRunner().invoke(app, ["batch", str(lengths), "--pack", "29"])
    assert wrong.exit_code == 2
    assert "longest sequence has 30 tokens" in wrong.output


def test_seconds_between_lengths_are_those_of_attention_and_fewer_tokens_cost_no_less() -> None:
    lengths = np.array([100.0, 150.0, 700.0, 1_999.0, 2_000.0])
    costs = LengthCosts(
        num_ranks=1, tokens_per_rank=2_000, fixed_s=0.0, lengths=(100, 1_000, 2_000), token_s=((1.1e-3, 2e-3, 3e-3),)
    )
    assert costs.seconds(lengths, 1) == pytest.approx(1e-3 * lengths + 1e-6 * lengths**2)
    model, cluster = ModelSpec.named("smollm2-135m"), ClusterSpec.parse("2xH100-SXM-80GB")
    workload, layout = Workload(seq_len=2_048, global_batch_size=64), Layout(dp_shard=2, zero_stage=3)
    free = length_costs(model, cluster, workload, layout, longest=2_048)
    limited = length_costs(model, cluster, workload, layout, longest=2_048, tokens_per_rank=4_096)
    assert limited.tokens_per_rank == 4_096 < free.tokens_per_rank
    assert limited.seconds(lengths, 2).sum() + limited.fixed_s >= free.seconds(lengths, 2).sum()
