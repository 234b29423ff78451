"""Post-training plans: consistent with their costs, exact over their sizes, right about who shares devices, and what is written."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from meshwright.planner import plan_rl
from meshwright.planner.post_training.answer import build_rl_plan
from meshwright.planner.post_training.costs import CostBook, pool_cluster, sizes_of
from meshwright.planner.request import PlanRequest
from meshwright.planner.tasks.post_training import instance_of, search_post_training
from meshwright.runtime.rl.launch import require_runnable
from meshwright.schema import ClusterSpec, ConfigError, InfeasibleError, ModelSpec, Plan, RlPlan, RlWorkload
from meshwright.schema.rl import RlModel, lengths_of_mean
from meshwright.solvers.pools import PlacedPools, check, partitions, period
from plans import cpu_cluster, tiny_model

ONE_B, EIGHT_B = ModelSpec.named("llama-3.2-1b"), ModelSpec.named("llama-3.1-8b")


def workload(*roles: str, model: ModelSpec = ONE_B, **fields: object) -> RlWorkload:
    given = {
        "models": tuple(RlModel(role=role, model=model) for role in ("actor", *roles)),  # type: ignore[arg-type]
        "reward_function": "rewards.py:exact",
        "prompts": 32,
        "responses": 8,
        "prompt_len": 100,
        "lengths": lengths_of_mean(400, 1024),
        "max_len": 1024,
    }
    return RlWorkload(**{**given, **fields})


@pytest.fixture(scope="module")
def planned() -> RlPlan:
    return plan_rl(workload("reference"), "8xH100-SXM-80GB")


def test_calls_of_a_plan_add_up_to_its_step(planned: RlPlan) -> None:
    cost = planned.estimate
    ends = [entry.start_s + entry.seconds for entry in (*planned.calls, *planned.moves)]
    assert max(ends) == pytest.approx(cost.path_s)
    assert planned.search is not None and planned.search.status == "optimal"
    assert cost.step_time_s == pytest.approx(cost.path_s) == pytest.approx(planned.search.objective_s)
    assert cost.samples_per_s == pytest.approx(planned.post_training.samples / cost.step_time_s)
    for one, other in itertools.combinations(planned.calls, 2):
        if one.pool == other.pool:
            assert (
                one.start_s + one.seconds <= other.start_s + 1e-9 or other.start_s + other.seconds <= one.start_s + 1e-9
            )


def test_a_plan_is_the_best_of_all_placements_of_its_costs(planned: RlPlan) -> None:
    cluster = planned.cluster
    request = PlanRequest.create(planned.model, cluster, planned.post_training)
    book, sizes = CostBook(request, planned.post_training), sizes_of(cluster)
    assert sizes == (1, 2, 4, 8)
    every = {(copy, idx) for copy in range(3) for idx in range(len(sizes))}
    instance = instance_of(book, sizes, every)
    best = math.inf
    for partition in partitions(3):
        for idxs in itertools.product(range(len(sizes)), repeat=len(partition)):
            for count in range(4):
                for offloaded in itertools.combinations(range(3), count):
                    answer = PlacedPools(partition, idxs, frozenset(offloaded))
                    if not check(instance, answer):
                        best = min(best, period(instance, answer))
    assert planned.estimate.step_time_s == pytest.approx(best, rel=1e-12)


@pytest.mark.long
def test_weights_that_may_be_a_step_old_let_pools_work_side_by_side() -> None:
    split = plan_rl(workload("reference", staleness=1.0, placement="split"), "4xH100-SXM-80GB", top=0)
    waits = plan_rl(workload("reference", placement="split"), "4xH100-SXM-80GB", top=0)
    assert not split.is_colocated and split.estimate.step_time_s < waits.estimate.step_time_s
    assert split.estimate.step_time_s >= max(split.estimate.busy_s) - 1e-9
    assert split.estimate.step_time_s >= split.estimate.path_s / 2 - 1e-9
    assert any("steps old" in note for note in split.notes)
    free = plan_rl(workload("reference", staleness=1.0), "4xH100-SXM-80GB", top=0)
    assert free.estimate.step_time_s <= split.estimate.step_time_s + 1e-9


@pytest.mark.long
def test_fetches_in_parts_and_noted_log_probabilities_shorten_the_path_of_a_step_that_is_split() -> None:
    together, parts, noted = (
        plan_rl(workload("reference", placement="split", updates=4, **fields), "4xH100-SXM-80GB", top=0)
        for fields in ({}, {"fetches": 4}, {"fetches": 4, "log_probs": "generator"})
    )
    assert max(parts.estimate.busy_s) - 1e-9 <= parts.estimate.path_s < together.estimate.path_s
    assert parts.waiting_s >= parts.estimate.path_s and any("4 parts" in note for note in parts.notes)
    assert "log_probs" not in {call.name for call in noted.calls}
    assert noted.estimate.step_time_s < parts.estimate.step_time_s
    shared = plan_rl(workload(placement="colocated", updates=4, fetches=4), "4xH100-SXM-80GB", top=0)
    assert shared.estimate.path_s == pytest.approx(shared.waiting_s)  # one pool does one thing at a time


@pytest.mark.long
def test_islands_that_share_responses_generate_less_and_score_and_update_as_much() -> None:
    alone = plan_rl(workload(placement="colocated"), "4xH100-SXM-80GB", top=0)
    half = plan_rl(workload(placement="colocated", prompts=16), "4xH100-SXM-80GB", top=0)
    shares = plan_rl(workload(placement="colocated", islands=4, shared=0.5), "4xH100-SXM-80GB", top=0)
    seconds = {
        name: {call.name: call.seconds for call in plan.calls}
        for name, plan in (("a", alone), ("h", half), ("s", shares))
    }
    assert seconds["s"]["generate"] == pytest.approx(seconds["h"]["generate"], rel=1e-12)
    assert seconds["s"]["update_actor"] == seconds["a"]["update_actor"]
    # Sixteen prompts of 100 tokens and eight responses of 400 to each, in words of four bytes.
    assert shares.post_training.received_bytes == pytest.approx(4 * 16 * (100 + 8 * 400), rel=1e-2)
    assert any("128 of 256 responses a step come from 3 other islands" in note for note in shares.notes)


def test_what_does_not_fit_together_lies_on_the_hosts() -> None:
    crowded = plan_rl(
        workload("critic", "reference", model=EIGHT_B, algorithm="ppo", placement="colocated"), "4xH100-SXM-80GB", top=0
    )
    together = {copy.role for copy in crowded.copies if copy.is_offloaded}
    pool = crowded.copy_of("generator").pool
    assert together and crowded.is_colocated
    assert all(move.seconds > 0 for move in crowded.moves)
    budget = crowded.cluster.memory_budget_bytes
    for copy in (copy for copy in crowded.copies if copy.pool == pool):
        others = sum(
            other.state_bytes
            for other in crowded.copies
            if other.pool == pool and not other.is_offloaded and other is not copy
        )
        assert copy.live_bytes + others <= budget
    assert any("on the hosts" in note for note in crowded.notes)


def test_a_document_survives_a_round_trip_and_loads_as_any_plan(planned: RlPlan, tmp_path: Path) -> None:
    path = tmp_path / "rl.json"
    planned.save(path)
    assert Plan.load(path) == RlPlan.load(path) == planned
    generator, actor = planned.copy_of("generator"), planned.copy_of("actor")
    assert generator.serving is not None and actor.training is not None
    assert generator.serving.num_devices == planned.pools[generator.pool].num_devices
    assert actor.training.workload.tokens_per_step >= planned.post_training.tokens_per_step


def test_over_sampling_shortens_a_long_tail() -> None:
    lengths = lengths_of_mean(300, 4096, sigma=1.0)
    plain, over = (
        plan_rl(workload(lengths=lengths, max_len=4096, oversample=oversample), "2xH100-SXM-80GB", top=0)
        for oversample in (1.0, 1.5)
    )
    assert over.estimate.samples_per_s > plain.estimate.samples_per_s


def test_packs_hold_the_tokens_and_are_dealt_evenly() -> None:
    work = workload("reference")
    cluster = ClusterSpec.parse("64xH100-SXM-80GB")
    book = CostBook(PlanRequest.create(ONE_B, cluster, work), work)
    for devices in sizes_of(cluster):
        packed = book.packed(work.samples, devices)
        assert work.tokens_per_step <= packed.tokens_per_step <= 1.2 * work.tokens_per_step
        assert pool_cluster(cluster, devices).num_devices == devices


def test_what_fits_nowhere_is_said_with_the_reason() -> None:
    with pytest.raises(InfeasibleError) as error:
        plan_rl(workload(model=EIGHT_B, precision="bf16-mixed"), "1xRTX4090-24GB")
    assert "(C2)" in str(error.value) and any("actor" in line for line in error.value.details)
    with pytest.raises(ConfigError, match="split on one device"):
        plan_rl(workload(placement="split"), "1xH100-SXM-80GB")


def test_runner_ups_are_other_partitions_and_slower(planned: RlPlan) -> None:
    titles = [other.title for other in planned.alternatives]
    assert len(titles) == len(set(titles)) == 4
    assert all(other.step_time_s >= planned.estimate.step_time_s - 1e-9 for other in planned.alternatives)
    assert planned.reason.startswith(("colocated", "split"))


def test_a_plan_for_cpus_is_one_that_is_run() -> None:
    model = tiny_model(num_blocks=2, hidden_dim=64, ffn_dim=128, head_dim=16).replace(max_seq_len=256)
    for placement in ("colocated", "split"):
        work = workload(
            "critic", "reference", model=model, algorithm="ppo", placement=placement, precision="fp32",
            generation_engine="meshwright", max_len=128, lengths=lengths_of_mean(50, 128),
        )  # fmt: skip
        require_runnable(plan_rl(work, cpu_cluster(4), top=0))


def test_costs_that_are_known_are_not_searched_for_again() -> None:
    work = workload("critic", algorithm="ppo")
    request = PlanRequest.create(ONE_B, ClusterSpec.parse("4xH100-SXM-80GB"), work)
    search = search_post_training(request)
    actor, critic = (search.book.costs(role, 4) for role in ("actor", "critic"))
    assert actor is not None and critic is not None and actor.result is critic.result
    assert set(critic.seconds) == {"values", "update_critic"}
    assert build_rl_plan(request, search, top=0).estimate.step_time_s == pytest.approx(search.answer.objective)
