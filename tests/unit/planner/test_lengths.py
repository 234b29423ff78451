"""Plans over batches of unequal lengths: the layout with the least mean, and the distribution that it is a mean over."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from meshwright.cli.main import app
from meshwright.planner import estimate, explain, plan
from meshwright.planner.batch import instance_of_plan, length_costs
from meshwright.planner.lengths import NUM_BATCHES, SEED
from meshwright.planner.planned_stages import reestimate
from meshwright.schema import ClusterSpec, ConfigError, InfeasibleError, Layout, ModelSpec, TrainingPlan, Workload
from meshwright.schema.batch import Lengths
from meshwright.solvers.batch_groups import BatchInstance, check_batch, schedule_batch
from typer.testing import CliRunner

SAMPLES = [*range(200, 3000, 40), 9_000, 14_000, 30_000]


def test_a_distribution_keeps_tokens_and_its_longest() -> None:
    samples = np.random.default_rng(0).lognormal(7, 1.3, 20_000).astype(int) + 1
    lengths = Lengths.of(samples, max_len=16_384)
    assert len(lengths.lengths) <= 256
    cut = np.concatenate([np.full((samples // 16_384).sum(), 16_384), samples[samples % 16_384 > 0] % 16_384])
    assert lengths.mean == pytest.approx(cut.mean(), rel=2e-3)
    assert lengths.attended_len(16_384) == pytest.approx((cut.astype(float) ** 2).sum() / cut.sum(), rel=5e-3)
    assert lengths.lengths[-1] == 16_384
    assert Lengths.of([5, 5, 9]).draw(1000, 1).count(9) == pytest.approx(333, abs=60)
    assert Lengths.of([1, 1, 1]).mean == 1
    for wrong in ([], [3, 0], [-1], ["a"], [[1]]):
        with pytest.raises(ConfigError):
            Lengths.of(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the longest of the lengths"):
        Workload(seq_len=8, global_batch_size=4, lengths=Lengths.of([9]))


@pytest.mark.nightly
def test_the_plan_has_the_least_mean_of_its_layouts(tmp_path: Path) -> None:
    lengths = Lengths.of(SAMPLES)
    workload = Workload(seq_len=30_000, global_batch_size=32, lengths=lengths)
    answer = plan("smollm2-135m", "4xH100-SXM-80GB", workload, fixed={"tp": 1})
    assert isinstance(answer, TrainingPlan)
    assert answer.workload == workload
    assert answer.batches is not None
    batches = [lengths.draw(32, SEED + idx) for idx in range(NUM_BATCHES)]

    def mean_s(layout: Layout) -> float:
        costs = length_costs(answer.model, answer.cluster, workload, layout, shortest=200, longest=30_000)
        instances = [BatchInstance.under(costs, batch) for batch in batches]
        return costs.step_s + float(np.mean([schedule_batch(instance).seconds for instance in instances]))

    assert answer.estimate.step_time_s == pytest.approx(mean_s(answer.layout))
    assert answer.estimate.breakdown_s.total == pytest.approx(answer.estimate.step_time_s)
    assert answer.estimate.step_time_s * answer.estimate.tokens_per_s == pytest.approx(workload.tokens_per_step)
    # Others, among them ones that the search has ruled out by their bounds.
    for text in ("dp_shard=4,zero_stage=3,recompute=full", "dp_replicate=4,zero_stage=0,recompute=selective"):
        assert mean_s(Layout.parse(text)) >= answer.estimate.step_time_s * 0.994
    # What explains the plan estimates batches too, not sequences that are all as long as the longest.
    for again in (
        reestimate(answer, answer.cluster),
        estimate(answer.model, answer.cluster, workload, answer.layout),
    ):
        assert again.step_time_s == pytest.approx(answer.estimate.step_time_s)
    explained = explain(answer)
    assert all(0 <= value.kept_s < answer.estimate.step_time_s for value in explained.worth)
    assert any("not searched over lengths" in note for note in explained.notes)
    assert not any("this version predicts" in note for note in explained.notes)
    answer.save(tmp_path / "plan.json")
    again = TrainingPlan.load(tmp_path / "plan.json")
    assert again == answer
    instance = instance_of_plan(again, batches[0])
    assert instance.tokens_per_rank == answer.batches.tokens_per_rank
    assert check_batch(instance, schedule_batch(instance)) == []
    with pytest.raises(InfeasibleError, match=r"\(C2\)"):
        plan(
            "llama-3.1-8b",
            "8xH100-SXM-80GB",
            Workload(seq_len=10**8, global_batch_size=32, lengths=Lengths.of([10**8])),
        )


@pytest.mark.long
def test_slow_links_between_nodes_make_a_pipeline_of_packs() -> None:
    cluster = ClusterSpec.parse("2x4xA100-SXM-80GB")
    inside, between = cluster.levels
    ethernet = between.link.replace(bandwidth_bytes_per_s=6.25e8, group_bandwidth_bytes_per_s=None)
    slow = cluster.replace(levels=(inside, between.replace(link=ethernet)))
    lengths = Lengths.of(SAMPLES, max_len=4_096)
    workload = Workload(seq_len=4_096, global_batch_size=64, lengths=lengths)
    fixed = {"tp": 1, "num_model_chunks": 1, "recompute": "full", "zero_stage": 1, "dp_replicate": 1}
    free, single = (plan("llama-3.1-8b", slow, workload, fixed={**fixed, **pp}) for pp in ({}, {"pp": 1}))
    assert free.layout.pp == 2
    assert free.estimate.step_time_s < single.estimate.step_time_s
    assert free.estimate.breakdown_s.total == pytest.approx(free.estimate.step_time_s)
    assert free.estimate.breakdown_s.bubble > 0
    assert free.batches is not None
    assert free.batches.pipeline is not None
    for again in (reestimate(free, free.cluster), estimate(free.model, free.cluster, workload, free.layout)):
        assert again.step_time_s == pytest.approx(free.estimate.step_time_s)
    assert TrainingPlan.model_validate_json(free.model_dump_json()) == free


def test_the_command_reads_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lengths.txt").write_text("300\n40\n40\n900\n")
    arguments = [
        "plan",
        "smollm2-135m",
        "--cluster",
        "2xH100-SXM-80GB",
        "--global-batch-size",
        "8",
        "--lengths",
        "lengths.txt",
    ]
    fixed = ["--fix", "tp=1,recompute=none", "--max-len", "512", "--json"]
    result = CliRunner().invoke(app, [*arguments, *fixed])
    assert result.exit_code == 0, result.output
    document = json.loads(Path("plan.json").read_text())
    assert document["workload"]["lengths"] == {"lengths": [40, 300, 388, 512], "counts": [2, 1, 1, 1]}
    assert document["workload"]["seq_len"] == 512
    assert document["batches"]["tokens_per_rank"] > 512
    for wrong in ("0", "-4", "many", "1e3", ""):
        Path("lengths.txt").write_text(f"300\n{wrong}\n" if wrong else "")
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2
        assert "error" in result.output
    result = CliRunner().invoke(app, [*arguments, "--seq-len", "7"])
    assert result.exit_code == 2
    assert "--seq-len with --lengths" in result.output


def test_plans_of_one_length_say_nothing_of_lengths() -> None:
    workload = Workload(seq_len=512, global_batch_size=4)
    assert "lengths" not in workload.model_dump()
    assert ModelSpec.resolve("smollm2-135m").name
