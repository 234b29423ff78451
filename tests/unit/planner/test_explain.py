"""explain(): every figure is a part or a difference of estimates and searches; why-not is the search it says it is."""

from __future__ import annotations

from functools import cache

import pytest
from meshwright.planner import estimate, explain, plan
from meshwright.planner.explain.marginal_values import MIN_GAIN, with_bandwidth, with_memory
from meshwright.planner.explain.report import Explanation, explain_in_parts
from meshwright.planner.planned_stages import reestimate
from meshwright.planner.request import Deadline, PlanRequest
from meshwright.planner.tasks.training import search_layouts
from meshwright.schema import ClusterSpec, ConfigError, ModelSpec, TrainingPlan, Workload
from meshwright.schema.layout import format_assignments, parse_assignments
from meshwright.schema.units import GB, GIB

MODEL, CLUSTER = ModelSpec.named("llama-2-13b"), ClusterSpec.parse("16xA100-SXM-40GB")
WORKLOAD = Workload(seq_len=4096, global_batch_size=64)


@cache
def made(fixed: str = "", engine: str = "fsdp2") -> TrainingPlan:
    workload = WORKLOAD.replace(engine=engine)
    return plan(MODEL, CLUSTER, workload, fixed=parse_assignments(fixed))


@cache
def explained() -> Explanation:
    return explain(made())


def fastest_s(cluster: ClusterSpec, fixed: str = "") -> float:
    request = PlanRequest.from_plan(made(fixed))
    changed = PlanRequest(request.model, cluster, request.workload, request.fixed, request.runnable)
    return search_layouts(changed).feasible[0].estimate.step_time_s


@pytest.mark.long
def test_lines_of_every_runner_up_add_up() -> None:
    found = explained()
    assert len(found.runner_ups) == len(made().alternatives) > 2
    for other in found.runner_ups:
        assert other.step_time_s == pytest.approx(sum(line[1] for line in other.time_s.values()))
        difference_s = other.step_time_s - found.step_time_s
        assert difference_s == pytest.approx(sum(line[2] for line in other.time_s.values()), rel=1e-6, abs=1e-9)
        assert other.slower_fraction == pytest.approx(difference_s / found.step_time_s)
        memory = estimate(MODEL, CLUSTER, WORKLOAD, other.layout).memory_bytes
        assert sum(line[1] for line in other.memory_bytes.values()) == memory.total
        for name, mine, theirs in other.fields:
            assert str(getattr(made().layout, name)) == mine != theirs == str(getattr(other.layout, name))


@pytest.mark.long
def test_head_room_of_the_fullest_stage_is_that_of_the_estimate() -> None:
    pipelined = made("pp=4")
    found = explain(pipelined, why_not={"pp": 4})
    assert [stage.stage_idx for stage in found.stages] == [0, 1, 2, 3]
    assert max(stage.required_bytes for stage in found.stages) == pipelined.estimate.required_bytes
    assert all(stage.free_bytes == found.budget_bytes - stage.required_bytes >= 0 for stage in found.stages)
    memory = next(binding for binding in found.binds if binding.resource == "memory")
    fullest = max(found.stages, key=lambda stage: stage.required_bytes)
    assert f"stage {fullest.stage_idx} has " in memory.text
    assert memory.seconds is None  # nothing was searched for a why-not


@pytest.mark.long
def test_worth_is_what_searching_again_finds() -> None:
    found = explained()
    worth = {gain.resource: gain for gain in found.worth if gain.resource != "link"}
    assert found.fastest_s == pytest.approx(fastest_s(CLUSTER), rel=1e-12)
    more = fastest_s(CLUSTER) - fastest_s(with_memory(CLUSTER, GIB))
    assert worth["memory"].best_s == pytest.approx(more, abs=MIN_GAIN * found.fastest_s)
    assert worth["unlimited_memory"].best_s >= worth["memory"].best_s >= 0
    assert worth["unlimited_memory"].best_s > 0.01 * found.step_time_s  # 13 B parameters in 40 GB
    assert worth["unlimited_memory"].best is not None
    links = [gain for gain in found.worth if gain.resource == "link"]
    for idx, gain in enumerate(links):
        faster = reestimate(made(), with_bandwidth(CLUSTER, idx, GB))
        assert gain.kept_s == pytest.approx(made().estimate.step_time_s - faster.step_time_s, abs=1e-12)
        assert gain.best_s is not None
        assert gain.best_s >= 0
    assert 0 < worth["compute"].kept_s < found.step_time_s / 11 * 1.001  # at most what a tenth more of everything gives


@pytest.mark.long
def test_parts_grow_into_the_whole_and_a_stop_keeps_those_before_it() -> None:
    deadline = Deadline()
    parts = list(explain_in_parts(made(), deadline=deadline))
    whole = parts[-1].explanation
    assert [part.name for part in parts if part.name != "value"] == ["binds", "runner_ups", "worth"]
    assert [part.done for part in parts] == sorted(part.done for part in parts)
    assert whole == explained()
    for part in parts[1:-1]:
        assert part.explanation.runner_ups == whole.runner_ups
        assert part.explanation.worth == whole.worth[: len(part.explanation.worth)]
    stopped = []
    for part in explain_in_parts(made(), deadline=deadline):
        stopped.append(part)
        if part.explanation.worth:
            deadline.stop()
    left = stopped[-1].explanation
    assert left.stages == whole.stages
    assert left.runner_ups == whole.runner_ups
    assert left.worth[0] == whole.worth[0]
    later = list(zip(left.worth[1:], whole.worth[1:], strict=True))  # what a bound decides needs no search
    assert all(value.best_s in (None, searched.best_s) for value, searched in later)
    assert any(value.best_s is None and searched.best_s is not None for value, searched in later)
    assert [value.kept_s for value in left.worth] == [value.kept_s for value in whole.worth]


def test_a_link_binds_as_far_as_the_step_gains_from_twice_its_rate() -> None:
    found = explain(made(), why_not={"tp": 1})
    assert [link.name for link in found.links] == [level.link.name for level in CLUSTER.levels]
    for idx, link in enumerate(found.links):
        without = reestimate(
            made(), with_bandwidth(CLUSTER, idx, CLUSTER.levels[idx].link.bandwidth_bytes_per_s)
        ).step_time_s
        assert link.seconds == pytest.approx(max(0.0, made().estimate.step_time_s - without), abs=1e-12)
        for axis in link.axes:
            assert getattr(made().layout, axis) > 1
    assert sum(link.seconds for link in found.links) > 0


def test_binding_resources_come_with_the_most_expensive_first() -> None:
    found = explained()
    seconds = [binding.seconds or 0.0 for binding in found.binds]
    assert seconds == sorted(seconds, reverse=True)
    assert {"compute", "memory", "link"} <= {binding.resource for binding in found.binds}


def test_why_not_is_the_best_completion() -> None:
    wanted = {"tp": 8, "recompute": "full"}
    answer = explain(made(), why_not=wanted).why_not
    assert answer is not None
    assert answer.status == "slower"
    assert answer.best is not None
    assert {name: getattr(answer.best.layout, name) for name in wanted} == wanted
    best_s = fastest_s(CLUSTER, "tp=8,recompute=full")
    assert answer.best.step_time_s == pytest.approx(best_s, rel=1e-12)
    assert answer.best.slower_fraction > 0


@pytest.mark.long
def test_why_not_keeps_what_the_plan_had_to_keep() -> None:
    found = explain(made("pp=4,micro_batch_size=1"), why_not={"pp": 2}).why_not
    assert found is not None
    assert found.kept == "micro_batch_size=1"
    assert found.best is not None
    assert (found.best.layout.pp, found.best.layout.micro_batch_size) == (2, 1)


@pytest.mark.parametrize(
    ("wanted", "status", "reason"),
    [
        ({"tp": 3}, "excluded", "[world_size]"),
        ({"tp": 16}, "excluded", "[tp_in_scaleup_domain]"),
        ({"micro_batch_size": 5000}, "excluded", "[micro_batch_needed]"),
        ({"pp": 2, "zero_stage": 3}, "excluded", "without any one of pp=2, zero_stage=3 there are layouts"),
        ({"dp_replicate": 16}, "too_large", "[memory (C2)]"),
        ({"offload": "optimizer"}, None, "[offload]"),
    ],
)
def test_why_not_names_what_excludes(wanted, status, reason) -> None:
    answer = explain(made(), why_not=wanted).why_not
    assert answer is not None
    assert any(reason in line for line in answer.reasons), answer.reasons
    if status is not None:
        assert answer.status == status
    if status == "too_large":
        assert answer.best is not None
        assert not answer.best.fits
        assert answer.best.required_bytes > CLUSTER.memory_budget_bytes
        assert "too much" in answer.reasons[0]
    if status == "excluded":
        assert answer.best is None
    if status is None:  # the engine runs it, this version's runtime does not
        assert answer.best is not None
        assert answer.best.layout.offload == "optimizer"


def test_why_not_of_what_the_plan_has() -> None:
    layout = made().layout
    answer = explain(made(), why_not={"tp": layout.tp, "pp": layout.pp}).why_not
    assert answer is not None
    assert (answer.status, answer.best) == ("same", None)


@pytest.mark.parametrize("wanted", [{"warp": 2}, {"tp": 0}, {"recompute": "most"}])
def test_why_not_with_unknown_fields_is_bad_input(wanted) -> None:
    with pytest.raises(ConfigError):
        explain(made(), why_not=wanted)


def test_plan_that_no_engine_executes_is_bad_input() -> None:
    given = made("pp=1")
    odd = given.replace(
        layout=given.layout.replace(cp=given.layout.dp_shard, dp_shard=1, zero_stage=3, tp=given.layout.tp)
    )
    unfused = odd.replace(workload=WORKLOAD.replace(attention="math"))
    with pytest.raises(ConfigError, match=r"\[attention_per_cp\]"):
        explain(unfused)


def test_time_that_is_over_leaves_searches_out_and_says_so() -> None:
    over = Deadline(600)
    over.stop()
    found = explain(made(), deadline=over)
    assert found.fastest_s is None
    assert all(gain.best_s is None for gain in found.worth)
    assert any("time limit" in note for note in found.notes)
    assert found.runner_ups
    stopped = explain(made(), why_not={"tp": 8}, deadline=over).why_not
    assert stopped is not None
    assert stopped.status == "stopped"


def test_plans_of_older_versions_are_explained_in_the_smallest_space_that_has_them() -> None:
    given = made()
    old = given.replace(provenance=given.provenance.replace(space=None, fixed=""))
    assert PlanRequest.from_plan(old).runnable
    assert PlanRequest.from_plan(given) == PlanRequest.from_plan(old)
    elsewhere = old.replace(workload=WORKLOAD.replace(engine="megatron"))
    assert not PlanRequest.from_plan(elsewhere).runnable
    found = explain(old, why_not={"tp": 2})
    assert any("does not say in which space" in note for note in found.notes)


def test_one_device_has_no_links() -> None:
    alone = plan(
        ModelSpec.named("gpt2"),
        ClusterSpec.parse("1xT4"),
        Workload(seq_len=1024, global_batch_size=8, precision="fp16-mixed"),
    )
    found = explain(alone)
    assert found.links == ()
    assert not any(gain.resource == "link" for gain in found.worth)


def test_stages_of_a_mixed_cluster_have_the_head_room_of_their_own_devices(tmp_path) -> None:
    path = tmp_path / "mixed.toml"
    groups = (
        '[[groups]]\ndevice = "{}"\nnum_nodes = 1\ndevices_per_node = 8\n'.format(f"A100-SXM-{size}GB")
        for size in (80, 40)
    )
    path.write_text('name = "mixed"\n' + "".join(groups))
    given = plan(MODEL, ClusterSpec.parse(str(path)), WORKLOAD, fixed={"tp": 2, "pp": 2})
    found = explain(given, why_not={"tp": 2})
    budgets = {stage.device: stage.required_bytes + stage.free_bytes for stage in found.stages}
    assert budgets["A100-SXM-80GB"] > budgets["A100-SXM-40GB"]
    assert all(stage.free_bytes >= 0 for stage in found.stages)
    assert "tp" in found.links[0].axes
    assert found.links[0].seconds > 0


def test_assignments_survive_a_round_trip() -> None:
    fields = {"tp": 8, "sequence_parallel": False, "recompute": "full", "recompute_fraction": 0.25}
    assert parse_assignments(format_assignments(fields)) == fields
    assert format_assignments({}) == ""
