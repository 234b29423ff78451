"""Layouts, rules, documents and errors: validation, round trips, messages."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshwright.schema import (
    ClusterSpec,
    ConfigError,
    InfeasibleError,
    Layout,
    MeshwrightError,
    ModelSpec,
    Profile,
    Workload,
)
from meshwright.schema.base import read_json, write_atomically
from meshwright.schema.engine_rules import DEEPSPEED_RULES, MEGATRON_RULES, TORCHTITAN_RULES
from meshwright.schema.layout import check_fields
from meshwright.schema.layout_rules import FSDP2_RULES, RULES, Rule, broken_rules, problem_facts, require_valid
from meshwright.schema.layout_table import LayoutRow, LayoutTable
from meshwright.schema.profile import CollectivePoint, Machine, MatmulPoint
from meshwright.schema.runnable import why_not_runnable
from meshwright.schema.units import format_bytes, format_count, format_seconds


def test_what_is_written_may_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    script = "import os, sys; os.umask({}); from meshwright.schema.base import write_atomically; write_atomically(sys.argv[1], 'x')"
    for umask, mode in (("0o077", 0o600), ("0o022", 0o644)):
        subprocess.run([sys.executable, "-c", script.format(umask), str(tmp_path / umask)], check=True)
        assert (tmp_path / umask).stat().st_mode & 0o777 == mode


degrees = st.sampled_from([1, 2, 3, 4, 8])
layouts = st.builds(
    Layout,
    dp_replicate=degrees,
    dp_shard=degrees,
    tp=degrees,
    pp=degrees,
    micro_batch_size=degrees,
    recompute=st.sampled_from(["none", "selective", "full"]),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
)


@given(layouts)
def test_layout_survives_json_and_text(layout: Layout) -> None:
    assert Layout.model_validate_json(layout.model_dump_json()) == layout
    fields = layout.model_dump()
    text = ",".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in fields.items())
    assert Layout.parse(text) == layout
    assert layout.replace(tp=layout.tp) == layout


@given(
    layouts,
    st.sampled_from([1, 2, 8]),
    st.sampled_from([0, 1, 2, 3, None]),
    st.sampled_from(
        [
            {},
            {"sequence_parallel": False},
            {"recompute": "full", "recompute_fraction": 0.25},
            {"offload": "optimizer", "offload_fraction": 0.5, "offload_to": "storage"},
            {"offload_activations": 0.125, "vocabulary": "split"},
        ]
    ),
)
def test_layout_is_read_as_it_is_printed(layout: Layout, cp: int, zero: int | None, more: dict[str, Any]) -> None:
    fields = {**layout.model_dump(exclude={"zero_stage", "sequence_parallel"}), "cp": cp, **more}
    if layout.pp == 1:
        fields["schedule"] = "1f1b"  # without a pipeline there is none to print
    if zero is not None and (zero == 0) <= (layout.dp_shard == 1) and (zero > 0) <= (layout.dp_shard * cp > 1):
        fields["zero_stage"] = zero
    printed = Layout(**fields)
    assert Layout.parse(str(printed)) == printed
    assert Layout.parse(str(printed).replace(" ", ", ")) == printed


@pytest.mark.parametrize(
    ("text", "said"),
    [("dp=8", "dp_replicate or dp_shard"), ("zer=1", "zero_stage"), ("micro_batchsize=2", "micro_batch_size")],
)
def test_unknown_field_of_a_layout_names_the_nearest(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {said}"):
        Layout.parse(text)


def test_name_of_the_hub_is_told_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean llama-3.1-8b\? nothing is downloaded"):
        ModelSpec.resolve("meta-llama/Llama-3.1-8B")
    with pytest.raises(ConfigError, match=r"the folder holds no config\.json"):
        ModelSpec.resolve(str(tmp_path))


@given(layouts, st.sampled_from([8, 24, 64, 96]), st.sampled_from([1024, 1000]))
def test_rules_agree_on_numbers_and_arrays(layout: Layout, batch: int, seq_len: int) -> None:
    model, workload = ModelSpec.named("qwen2.5-7b"), Workload(seq_len=seq_len, global_batch_size=batch)
    problem = problem_facts(model, workload, world_size=layout.world_size, scaleup_domain=8)
    row = LayoutRow.from_layout(layout)
    table = LayoutTable.filled(3, **{name: np.array([value] * 3) for name, value in row.__dict__.items()})
    for rule in RULES:
        assert rule.is_decided(table.known), rule.name
        assert np.all(np.asarray(rule.holds(table, problem)) == bool(rule.holds(row, problem))), rule.name
    if broken_rules(layout, problem):
        with pytest.raises(ConfigError):
            require_valid(model, workload, layout, world_size=layout.world_size, scaleup_domain=8)


@pytest.mark.parametrize(
    ("layout", "rule"),
    [
        (Layout(tp=16), "heads_per_tp"),
        (Layout(tp=8), "kv_heads_per_tp"),
        (Layout(pp=32, schedule="gpipe"), "layers_per_stage"),
        (Layout(pp=4, micro_batch_size=32), "microbatches_fill_pipeline"),
        (Layout(pp=2, dp_shard=2, zero_stage=2), "zero_under_pipeline"),
        (Layout(pp=2, dp_shard=2, zero_stage=3), "zero_under_pipeline"),
        (Layout(pp=2, dp_shard=2, zero_stage=3, schedule="zb-h1"), "split_backward_keeps_gathered"),
        (Layout(cp=2, cp_ulysses=2, tp=4), "heads_per_ulysses"),
        (Layout(pp=2, schedule="zb-h1", recompute="full"), "split_backward_keeps_activations"),
        (Layout(pp=2, schedule="zb-h2", num_model_chunks=2), "schedule_in_chunks"),
        (Layout(dp_shard=72), "batch_for_each"),
        (Layout(micro_batch_size=48), "micro_batch_needed"),
        (Layout(pp=2, micro_batch_size=48), "batch_over_stages"),
        (Layout(tp=2, sequence_parallel=False, tp_overlap=True), "overlap_splits_sequence"),
        (Layout(cuda_graphs=True), "cuda_graphs_of_fsdp2"),
        (Layout(gradients="compute"), "gradients_of_fsdp2"),
    ],
)
def test_each_rule_says_its_name_and_reason(layout: Layout, rule: str) -> None:
    model, workload = ModelSpec.named("qwen2.5-7b"), Workload(seq_len=1024, global_batch_size=64)
    problem = problem_facts(model, workload, world_size=layout.world_size, scaleup_domain=16)
    assert any(f"[{rule}]" in reason for reason in broken_rules(layout, problem))


def test_stages_of_traced_modules_gather_in_each_pass_in_our_runtime_only() -> None:
    layout = Layout(pp=2, dp_shard=2, zero_stage=3)
    model, workload = ModelSpec.named("qwen2.5-7b"), Workload(seq_len=1024, global_batch_size=64)
    problem = dataclasses.replace(problem_facts(model, workload, world_size=4, scaleup_domain=4), traced_len=1024)
    assert broken_rules(layout, problem, FSDP2_RULES) == ()
    assert any("[zero_under_pipeline]" in reason for reason in broken_rules(layout, problem, TORCHTITAN_RULES))


@pytest.mark.parametrize(
    ("layout", "is_nvidia", "rule"),
    [
        (Layout(tp=4, tp_overlap=True), False, "megatron_switches_on_nvidia"),
        (Layout(tp=16, tp_overlap=True), True, "megatron_overlap_in_domain"),
        (Layout(cuda_graphs=True, recompute="full"), True, "megatron_graphs_recompute"),
        (Layout(cuda_graphs=True, recompute="mixed"), True, "megatron_graphs_recompute"),
        (Layout(pp=2, offload_activations=0.5), True, "megatron_offload_activations"),
        (Layout(offload_activations=0.5, cuda_graphs=True), True, "megatron_offload_activations"),
        (Layout(tp=4, tp_overlap=True, cuda_graphs=True, recompute="selective", gradients="compute"), True, ""),
        (Layout(offload_activations=0.5), True, ""),
    ],
)
def test_switches_of_megatron(layout: Layout, is_nvidia: bool, rule: str) -> None:
    model, workload = ModelSpec.named("llama-3.1-8b"), Workload(seq_len=1024, global_batch_size=64)
    sizes = {"world_size": layout.world_size, "scaleup_domain": 8}
    problem = problem_facts(model, workload, **sizes, is_nvidia=is_nvidia)
    broken = " ".join(broken_rules(layout, problem, MEGATRON_RULES))
    assert f"[{rule}]" in broken if rule else not broken


def test_experts_in_graphs_without_graphs_are_refused() -> None:
    with pytest.raises(ConfigError, match="expert_graphs needs cuda_graphs"):
        Layout(dp_shard=8, ep=8, expert_graphs=True)


@pytest.mark.parametrize(
    ("layout", "rule"),
    [
        (Layout(dp_shard=8, ep_overlap=True), "megatron_ep_overlap_exchanges"),
        (Layout(dp_shard=8, ep=8, pp=2, ep_overlap=True), "megatron_ep_overlap_chunks"),
        (Layout(dp_shard=64, ep=8, ep_overlap=True), "megatron_ep_overlap_micro_batches"),
        (Layout(dp_shard=8, ep=8, recompute="full", ep_overlap=True), "megatron_ep_overlap_recompute"),
        (Layout(dp_shard=8, ep=8, cuda_graphs=True, expert_graphs=True), "graphs_before_experts"),
        (Layout(dp_shard=8, ep=8, pp=2, num_model_chunks=2, recompute="selective", ep_overlap=True), ""),
    ],
)
def test_what_megatron_takes_beside_the_exchange_of_tokens(layout: Layout, rule: str) -> None:
    model, workload = ModelSpec.named("mixtral-8x7b"), Workload(seq_len=1024, global_batch_size=64)
    layout = layout.replace(zero_stage=1)
    problem = problem_facts(model, workload, world_size=layout.world_size, scaleup_domain=8)
    broken = " ".join(broken_rules(layout, problem, MEGATRON_RULES))
    assert f"[{rule}]" in broken if rule else not broken


@pytest.mark.parametrize("rule", [*RULES, *MEGATRON_RULES, *DEEPSPEED_RULES], ids=lambda rule: rule.name)
def test_rules_say_which_fields_they_need(rule: Rule) -> None:
    """With only the fields that it needs known, a rule holds where it holds with all of them known."""
    model, workload = ModelSpec.named("mixtral-8x7b"), Workload(seq_len=1024, global_batch_size=64)
    problem = problem_facts(model, workload, world_size=8, scaleup_domain=8)
    given = [
        Layout(dp_shard=4, dp_replicate=2, zero_stage=3, gradient_shard=8, optimizer_shard=8),
        Layout(tp=2, pp=2, cp=2),
    ]
    complete = LayoutTable.from_layouts(given, workload.global_batch_size).replace(dp=np.array([8, 1]))
    needed = LayoutTable(**{name: complete.columns[name] for name in rule.needs.split()})
    assert rule.is_decided(needed.known)
    assert not rule.is_decided(needed.known - {rule.needs.split()[-1]})
    assert np.array_equal(rule.holds(needed, problem), rule.holds(complete, problem))


def test_rules_are_undecided_until_a_field_that_they_need_is_chosen() -> None:
    rules = {rule.name: rule for rule in RULES}
    before = LayoutTable(**{name: np.array([4]) for name in ("tp", "cp", "pp", "dp")})
    assert rules["world_size"].is_decided(before.known)
    assert not rules["nested_shards"].is_decided(before.known)
    with pytest.raises(AttributeError):
        _ = before.dp_shard


@pytest.mark.parametrize(
    "fields",
    [{"tp": 0}, {"tp": -1}, {"dp_shard": 2, "zero_stage": 0}, {"zero_stage": 3}, {"recompute": "some"}, {"warp": 1}],
)
def test_impossible_layout_is_a_config_error(fields) -> None:
    with pytest.raises(ConfigError):
        Layout(**fields)


def test_check_fields_allows_what_needs_others() -> None:
    assert check_fields({"zero_stage": 3}) == {"zero_stage": 3}


def test_nouns_are_frozen_and_hashable() -> None:
    layout = Layout(tp=2)
    with pytest.raises(Exception, match="frozen"):
        layout.tp = 4
    assert len({layout, Layout(tp=2), Layout(tp=4)}) == 2
    assert len({ModelSpec.named("gpt2"), ModelSpec.named("gpt2")}) == 1


@pytest.mark.parametrize("name", ["smollm2-135m", "deepseek-v3", "gemma-2-9b"])
def test_models_and_clusters_survive_json(name: str) -> None:
    model, cluster = ModelSpec.named(name), ClusterSpec.parse("2x8xH100-SXM-80GB/ib200")
    assert ModelSpec.model_validate_json(model.model_dump_json()) == model
    assert ClusterSpec.model_validate_json(cluster.model_dump_json()) == cluster


def test_profile_survives_its_file(tmp_path) -> None:
    machine = Machine(device="x", num_devices=2, host_memory_bytes=1, backend="gloo", torch="2.13.0", python="3.11")
    profile = Profile(
        machine=machine,
        created="2026-01-01",
        duration_s=1.0,
        memory_bandwidth_bytes_per_s=1e10,
        device_memory_bytes=10**9,
        matmuls=(MatmulPoint(dtype="fp32", m=1, n=2, k=3, time_s=1e-3),),
        collectives=(CollectivePoint(op="all_reduce", group_size=2, size_bytes=1024, time_s=1e-4),),
    )
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]


def test_files_are_written_whole_or_not_at_all(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        write_atomically(tmp_path / "missing" / "x.json", "{}")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="cannot write"):
        write_atomically(tmp_path / "folder", "{}")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"{", b"", b"[" * 5000, b"1" * 9000])
def test_unreadable_json_is_a_config_error(content: bytes, tmp_path) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ConfigError):
        read_json(tmp_path / "x.json")


def test_error_message_and_pickle_keep_every_part() -> None:
    error = InfeasibleError("no plan fits", details=("needs 2", "largest: 1"), help="use more")
    assert str(error) == "no plan fits\n  needs 2\n  largest: 1\n  help: use more"
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), type(copy), copy.exit_code) == (str(error), InfeasibleError, 1)
    assert issubclass(ConfigError, MeshwrightError)
    assert ConfigError.exit_code == 2


def test_why_not_runnable_names_the_parts() -> None:
    assert why_not_runnable(ModelSpec.named("llama-3.1-8b"), Workload(seq_len=8192, global_batch_size=1)) == ()
    assert why_not_runnable(ModelSpec.named("mixtral-8x7b")) == ()
    assert any("top_k_softmax" in reason for reason in why_not_runnable(ModelSpec.named("gpt-oss-20b")))
    assert why_not_runnable(ModelSpec.named("deepseek-v3")) == ()
    mistral = ModelSpec.named("mistral-7b")
    assert why_not_runnable(mistral, Workload(seq_len=4096, global_batch_size=1)) == ()
    assert any("window" in r for r in why_not_runnable(mistral, Workload(seq_len=8192, global_batch_size=1)))
    assert why_not_runnable(mistral, Workload(seq_len=4096, global_batch_size=1, precision="fp8")) == ("fp8",)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (format_bytes(3 * 2**30), "3.0 GiB"),
        (format_bytes(512), "512 B"),
        (format_seconds(0.0123), "12.3 ms"),
        (format_seconds(4.561), "4.56 s"),
        (format_seconds(7400), "2 h 03 min"),
        (format_count(70_553_706_496), "70.6 B"),
        (format_count(12), "12"),
    ],
)
def test_numbers_for_the_screen(shown: str, expected: str) -> None:
    assert shown == expected
