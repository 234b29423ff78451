"""Runs on gloo ranks: placements and layouts give the same tokens, rewards and losses; a task is learned; what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from meshwright.runtime.rl.exchange import Answered, Exchange, spread
from meshwright.runtime.rl.launch import launch_rl, require_runnable
from meshwright.runtime.rl.run import RlJob, RlOptions
from meshwright.schema import ConfigError, Layout, MeshwrightError, RlPlan, RuntimeMismatchError
from meshwright.schema.batch import Lengths
from meshwright.schema.rl import RlLoss, Role
from rl_plans import VOCABULARY, rl_plan

REWARD = """
def count(sample):
    row = [sample["prompt"][-1], *sample["response"]]
    return sum(b == (a + 1) % 16 for a, b in zip(row, row[1:])) / len(sample["response"])

def mean(sample):
    return sum(sample["response"]) / 16 / len(sample["response"])

def nothing(sample):
    return 0.0

def raises(sample):
    raise ValueError(f"no answer for {sample['prompt']}")
"""


def write_inputs(folder: Path, plan: RlPlan) -> None:
    """Write the plan, its prompts and the reward functions."""
    folder.mkdir(exist_ok=True)
    (folder / "rewards.py").write_text(REWARD)
    rows = [json.dumps({"prompt": [(idx + k) % VOCABULARY for k in range(4)]}) for idx in range(16)]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    plan.save(folder / "rl.json")


def run(folder: Path, plan: RlPlan, *, steps: int = 2, reward: str = "count", **options: Any) -> list[dict[str, Any]]:
    """Run a plan; the records of its steps."""
    write_inputs(folder, plan)
    report = folder / "steps.jsonl"
    fields = {"learning_rate": 3e-3, "critic_learning_rate": 3e-3, **options}
    given = RlOptions(
        prompts=str(folder / "prompts.jsonl"), reward=f"{folder / 'rewards.py'}:{reward}", steps=steps, **fields
    )
    launch_rl(plan, RlJob(plan=str(folder / "rl.json"), options=given, report=str(report), timeout_s=120))
    return [json.loads(line) for line in report.read_text().splitlines()]


def assert_same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    """Tokens and rewards to the last bit, losses and norms as far as sums in another order allow."""
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert (a["responses_crc32"], a["mean_reward"]) == (b["responses_crc32"], b["mean_reward"])
        assert a.keys() == b.keys()
        for name in {"loss", "grad_norm", "critic_loss", "critic_grad_norm"} & a.keys():
            assert a[name] == pytest.approx(b[name], rel=2e-4, abs=1e-6), name


SHORT_SPLIT: list[tuple[int, tuple[Role, ...]]] = [(1, ("generator",)), (1, ("actor",))]
LARGE_PASSES = {role: Layout(micro_batch_size=32) for role in ("actor", "teacher")}
COLOCATED: list[tuple[int, tuple[Role, ...]]] = [(2, ("generator", "actor", "critic", "reference"))]
SPLIT: list[tuple[int, tuple[Role, ...]]] = [(1, ("generator",)), (1, ("actor", "critic", "reference"))]


@pytest.mark.usefixtures("warm_ranks")
def test_colocated_and_split_are_the_same_on_two_ranks(tmp_path: Path) -> None:
    fields = {"loss": RlLoss(temperature=0.0, reference_weight=0.1), "updates": 2}
    together = run(tmp_path / "a", rl_plan(COLOCATED, {}, **fields), reward="mean")
    apart = run(tmp_path / "b", rl_plan(SPLIT, {}, **fields), reward="mean")
    assert_same(together, apart)
    assert len(together[0]["loss"]) == 2 and min(map(abs, together[1]["grad_norm"])) > 1e-3


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.long
def test_layouts_and_placements_are_the_same_on_four_ranks(tmp_path: Path) -> None:
    fields = {"loss": RlLoss(temperature=0.7), "responses": 5}  # drawn by sample; shares that are not even
    alone = run(tmp_path / "one", rl_plan([(1, ("generator", "actor"))], {}, **fields))
    shards = {"actor": Layout(dp_shard=2, tp=2, sequence_parallel=True, micro_batch_size=3)}
    together = run(tmp_path / "a", rl_plan([(4, ("generator", "actor"))], shards, tp=2, **fields))
    apart = run(
        tmp_path / "b", rl_plan([(2, ("generator",)), (2, ("actor",))], {"actor": Layout(dp_shard=2)}, tp=2, **fields)
    )
    assert_same(alone, together)
    assert_same(alone, apart)


@pytest.mark.long
@pytest.mark.usefixtures("warm_ranks")
def test_ppo_is_the_same_in_three_pools_of_four_ranks(tmp_path: Path) -> None:
    roles: tuple[Role, ...] = ("generator", "actor", "critic")
    pools: list[tuple[int, tuple[Role, ...]]] = [(1, ("generator",)), (1, ("actor",)), (2, ("critic",))]
    together = run(tmp_path / "a", rl_plan([(4, roles)], {}), reward="mean")
    apart = run(tmp_path / "b", rl_plan(pools, {"critic": Layout(dp_shard=2)}), reward="mean")
    assert_same(together, apart)
    assert together[0]["critic_loss"][0] > 0


@pytest.mark.usefixtures("warm_ranks")
def test_one_step_off_draws_with_older_weights_and_weighs_them(tmp_path: Path) -> None:
    fields = {"loss": RlLoss(temperature=1.0, ratio_cap=100.0), "prompts": 8}
    waits = run(tmp_path / "a", rl_plan(SHORT_SPLIT, {}, **fields), steps=3, learning_rate=2e-2)
    off = run(tmp_path / "b", rl_plan(SHORT_SPLIT, {}, staleness=1.0, **fields), steps=3, learning_rate=2e-2)
    # Both begin with the weights that there are: the engine's log-probabilities are then those of training.
    assert off[0]["responses_crc32"] == waits[0]["responses_crc32"] and off[0]["mean_ratio"] == pytest.approx(
        1, abs=1e-4
    )
    assert off[0]["loss"] == pytest.approx(waits[0]["loss"], abs=1e-5)
    # The second step was drawn by the first weights, so that ratios are not one; their mean under the older weights is.
    assert abs(off[1]["mean_ratio"] - 1) > 1e-4 and "mean_ratio" not in waits[1]


@pytest.mark.long
@pytest.mark.usefixtures("warm_ranks")
def test_log_probabilities_that_the_generator_notes_are_those_that_the_actor_computes(tmp_path: Path) -> None:
    pools: list[tuple[int, tuple[Role, ...]]] = [(1, ("generator", "actor"))]
    computed, noted = (
        run(tmp_path / who, rl_plan(pools, {}, loss=RlLoss(temperature=1.0), updates=2, log_probs=who))
        for who in ("actor", "generator")
    )
    for a, b in zip(computed, noted, strict=True):
        assert a["responses_crc32"] == b["responses_crc32"]
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-4)
    assert abs(noted[0]["loss"][1]) > 1e-3 and "mean_ratio" not in noted[0]


@pytest.mark.long
@pytest.mark.usefixtures("warm_ranks")
def test_a_teacher_draws_the_actor_to_it_without_rewards(tmp_path: Path) -> None:
    roles: tuple[Role, ...] = ("generator", "actor", "teacher")
    fields = {"prompts": 16, "responses": 8}
    taught = rl_plan([(1, roles[:2])], LARGE_PASSES, loss=RlLoss(temperature=1.0), **fields)
    run(tmp_path / "teacher", taught, steps=16, save_weights=str(tmp_path / "weights"))
    plan = rl_plan([(1, roles)], LARGE_PASSES, loss=RlLoss(temperature=1.0, teacher_weight=1.0), **fields)
    records = run(tmp_path / "actor", plan, steps=16, reward="nothing", teacher_weights=str(tmp_path / "weights"))
    gaps = [record["teacher_gap"] for record in records]
    assert gaps[0] > 0.1 and sum(gaps[-3:]) / 3 < 0.5 * gaps[0]


@pytest.mark.usefixtures("warm_ranks")
def test_over_sampled_responses_are_carried_over_and_none_is_lost(tmp_path: Path) -> None:
    fields = {"loss": RlLoss(temperature=1.0), "prompts": 4, "responses": 2, "oversample": 2.0, "max_len": 24}
    plan = rl_plan([(2, ("generator", "actor"))], {}, lengths=Lengths(lengths=(16,), counts=(1,)), **fields)
    records = run(tmp_path, plan, steps=6, end_id=3, learning_rate=1e-9)
    assert len({record["responses_crc32"] for record in records}) == 6
    assert all(1 <= record["mean_len"] <= 24 for record in records)
    # With weights that hardly move, whoever drew a token: the ratio of each is one.
    assert all(record["mean_ratio"] == pytest.approx(1, abs=1e-3) for record in records)


@pytest.mark.long
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("ppo", marks=pytest.mark.nightly)])
def test_a_counting_task_is_learned_from_chance(tmp_path: Path, algorithm: str) -> None:
    layout = Layout(dp_replicate=2, micro_batch_size=32)
    roles: tuple[Role, ...] = ("generator", "actor", *(["critic"] if algorithm == "ppo" else []))  # type: ignore[assignment]
    plan = rl_plan(
        [(2, roles)], {"actor": layout, "critic": layout}, prompts=16, responses=16, loss=RlLoss(temperature=1.0)
    )
    records = run(tmp_path, plan, steps=60, critic_learning_rate=1e-2)
    rewards = [record["mean_reward"] for record in records]
    assert rewards[0] < 0.2 and max(rewards[-5:]) >= 0.8


def plan_of_two_replicas() -> RlPlan:
    layout = {"actor": Layout(dp_replicate=2, micro_batch_size=32)}
    return rl_plan([(2, ("generator", "actor"))], layout, prompts=16, responses=8, loss=RlLoss(temperature=1.0))


@pytest.mark.long
@pytest.mark.usefixtures("warm_ranks")
def test_a_few_steps_raise_the_reward(tmp_path: Path) -> None:
    records = run(tmp_path, plan_of_two_replicas(), steps=14)
    assert sum(r["mean_reward"] for r in records[-3:]) > 1.5 * sum(r["mean_reward"] for r in records[:3])


@pytest.mark.usefixtures("warm_ranks")
def test_a_failing_function_ends_the_job(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError) as error:
        run(tmp_path, plan_of_two_replicas(), reward="raises")
    text = "\n".join((str(error.value), *error.value.details))
    assert "no answer for [" in text and "Traceback" not in str(error.value.message)


def island_of_command(folder: Path, _: RlPlan, steps: int, island: int) -> list[dict[str, Any]]:
    """Run an island by the command in a process of its own; its records."""
    command = [sys.executable, "-m", "meshwright.cli", "apply-rl", "rl.json", "--prompts", "prompts.jsonl", "--json"]
    command += ["--reward", "rewards.py:count", "--steps", str(steps), "--learning-rate", "3e-3"]
    command += ["--exchange", "shared", "--island", str(island)]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, timeout=240, check=True)
    return json.loads(done.stdout)


def island_here(folder: Path, plan: RlPlan, steps: int, island: int) -> list[dict[str, Any]]:
    """Run an island from a thread of this process; its records."""
    options = RlOptions(
        prompts=str(folder / "prompts.jsonl"), reward=f"{folder / 'rewards.py'}:count", steps=steps, learning_rate=3e-3,
        exchange=str(folder / "shared"), island=island,
    )  # fmt: skip
    report = folder / f"steps-{island}.jsonl"
    launch_rl(plan, RlJob(plan=str(folder / "rl.json"), options=options, report=str(report), timeout_s=120))
    return [json.loads(line) for line in report.read_text().splitlines()]


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("steps", "by_command"),
    [(2, False), pytest.param(2, True, marks=pytest.mark.long), pytest.param(14, True, marks=pytest.mark.nightly)],
)
def test_islands_share_responses_and_each_learns_from_all(tmp_path: Path, steps: int, by_command: bool) -> None:
    layout = {"actor": Layout(micro_batch_size=32)}
    fields = {"prompts": 16, "responses": 8, "updates": 2, "islands": 2, "shared": 0.5, "loss": RlLoss(temperature=1.0)}
    plan = rl_plan([(1, ("generator", "actor"))], layout, **fields)
    write_inputs(tmp_path, plan)
    learn = island_of_command if by_command else island_here
    with ThreadPoolExecutor(2) as pool:
        islands = list(pool.map(learn, (tmp_path,) * 2, (plan,) * 2, (steps,) * 2, range(2)))
    for records in islands:
        assert [record["received"] for record in records] == [8] * steps
        assert steps < 14 or sum(r["mean_reward"] for r in records[-3:]) > 1.5 * sum(
            r["mean_reward"] for r in records[:3]
        )
        assert any(record["received_new"] for record in records)
    rows = [json.loads((tmp_path / "shared" / f"island-{idx}" / f"{steps - 1}.json").read_text()) for idx in range(2)]
    # Eight prompts of each, other ones, with all responses; two updates that both have some of either island.
    assert [[len(row["responses"]) for row in island] for island in rows] == [[8] * 8] * 2
    assert {str(row["line"]) for row in rows[0]}.isdisjoint(str(row["line"]) for row in rows[1])
    assert spread([1, 2, 3, 4], [8, 9]) == [1, 8, 2, 3, 9, 4]


def test_what_other_islands_share_is_checked_and_an_island_alone_says_so(tmp_path: Path) -> None:
    work = rl_plan([(1, ("generator", "actor"))], {}, islands=3, shared=0.5).post_training
    exchange = Exchange(tmp_path, 0, work, timeout_s=0.1)
    with pytest.raises(MeshwrightError, match=r"no other island has shared a response in .* for 0\.1 s"):
        exchange.take(2)
    other, third = (Exchange(tmp_path, idx, work, timeout_s=1) for idx in (1, 2))
    for step in range(6):
        other.give(step, [Answered({"prompt": [step]}, ((1,),) * 4)])
    third.give(0, [Answered({"prompt": [15]}, ((2, 3),) * 4)])
    assert sorted(path.name for path in (tmp_path / "island-1").iterdir()) == ["2.json", "3.json", "4.json", "5.json"]
    # The newest of each first, then older ones that were not taken; where all were, the newest once more.
    taken = [[each.line["prompt"][0] for each in exchange.take(count)] for count in (2, 3, 1)]
    assert taken == [[5, 15], [4, 3, 2], [5]] and exchange.num_new == 0
    for row, says in (
        ({"line": {"prompt": [99]}, "responses": [[1]] * 4}, "token 99"),
        ({"line": {"prompt": [1]}, "responses": [[1]] * 3}, "not 4 responses"),
        ({"line": {"prompt": [1]}, "responses": [[1] * 7] * 4}, "is no response"),
        ([], "no prompt"),
    ):
        (tmp_path / "island-2" / "0.json").write_text(json.dumps([row]))
        with pytest.raises(ConfigError, match=says):
            exchange.take(1)
    plan = rl_plan([(1, ("generator", "actor"))], {}, islands=3, shared=0.5)
    with pytest.raises(ConfigError, match="3 islands, and there is no exchange"):
        run(tmp_path / "run", plan)
    with pytest.raises(ConfigError, match="island 3 of 3"):
        run(tmp_path / "run", plan, exchange=str(tmp_path), island=3)


def test_what_this_version_does_not_run_is_said_in_one_message() -> None:
    plan = rl_plan([(2, ("generator", "actor"))], {"actor": Layout(pp=2)}, staleness=1.0)
    with pytest.raises(RuntimeMismatchError) as error:
        require_runnable(plan)
    text = "\n".join(error.value.details)
    assert "pp=2" in text and "a step old" in text


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{}", "no prompt"),
        ('{"prompt": []}', "no prompt"),
        ('{"prompt": [99]}', "token 99"),
        ("[", "not JSON"),
        ("", "has 0 prompts"),
    ],
)
def test_wrong_prompts_are_refused_by_line(tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "p.jsonl").write_text(line)
    (tmp_path / "rewards.py").write_text(REWARD)
    plan = rl_plan([(1, ("generator", "actor"))], {})
    options = RlOptions(prompts=str(tmp_path / "p.jsonl"), reward=f"{tmp_path / 'rewards.py'}:count", steps=1)
    with pytest.raises(ConfigError, match=says):
        launch_rl(plan, RlJob(plan="rl.json", options=options))
