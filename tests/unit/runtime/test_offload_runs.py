"""Offload in whole runs: what is reported, what is refused, and faults that leave the last checkpoint whole."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from meshwright.runtime.job.machine import check_machine
from meshwright.runtime.parallelize_model import parallelize
from meshwright.runtime.training.options import TrainOptions, list_checkpoints
from meshwright.runtime.training.train import TrainingRun
from meshwright.schema import Layout, MeshwrightError, OffloadSchedule, RuntimeMismatchError, TrainingPlan
from meshwright.schema.offload import LayerOffload, why_not_offloadable
from meshwright.schema.task import LowRank
from plans import with_offload
from small_jobs import losses, small_plan, train_here

ACTIVATIONS: tuple[LayerOffload, ...] = ("none", "activations", "boundary", "none")


def plans(tmp_path: Path, **fields: Any) -> tuple[TrainingPlan, TrainingPlan]:
    schedule = {
        "host_optimizer_layers": (0,),
        "streamed_optimizer_layers": (1, 2),
        "storage_optimizer_layers": (0, 2),
        "storage_path": str(tmp_path / "states"),
    }
    return with_offload(small_plan(Layout(micro_batch_size=2)), OffloadSchedule(**{**schedule, **fields}), ACTIVATIONS)


@pytest.fixture
def file_size_limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_run_reports_what_it_moves_beside_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without, with_ = plans(tmp_path, to_host_bytes=123, to_device_bytes=456)
    options = TrainOptions(steps=3)
    records = train_here(monkeypatch, with_, options, tmp_path / "with.jsonl")
    expected = train_here(monkeypatch, without, options, tmp_path / "without.jsonl")
    assert losses(records) == losses(expected)
    moved = [record["offload"] for record in records if "step" in record]
    assert moved[1] == moved[2]  # the first one also copies the parameters that the host updates
    parameters = {layer: layer_bytes(with_, layer) for layer in range(4)}
    activations = moved[2]["to_host_bytes"] - parameters[0] - 2 * (parameters[1] + parameters[2])
    hidden = 2 * 32 * with_.model.hidden_dim * 4  # bytes of one micro-batch's hidden states, of which there are two
    assert 2 * hidden < activations < 40 * hidden
    assert moved[2]["to_device_bytes"] == moved[2]["to_host_bytes"]
    assert moved[2]["read_bytes"] == moved[2]["stored_bytes"] == 2 * (parameters[0] + parameters[2])
    assert moved[0]["to_host_bytes"] == moved[2]["to_host_bytes"] + parameters[0]
    assert (moved[2]["planned_to_host_bytes"], moved[2]["planned_to_device_bytes"]) == (123, 456)
    assert not moved[2]["warnings"]
    assert not any("offload" in record for record in expected if "step" in record)


def layer_bytes(plan: TrainingPlan, layer: int) -> int:
    return 4 * list(plan.model.iter_layers())[layer].num_params(plan.model.hidden_dim)


@pytest.mark.usefixtures("file_size_limit")
@pytest.mark.long
def test_a_full_drive_ends_the_run_and_its_checkpoint_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without, with_ = plans(tmp_path)
    expected = losses(train_here(monkeypatch, without, TrainOptions(steps=3), tmp_path / "reference.jsonl"))
    folder = tmp_path / "checkpoints"
    options = TrainOptions(steps=3, checkpoint_dir=str(folder), checkpoint_every=1, resume=True)
    save = TrainingRun.checkpoint

    def save_and_fill(run: TrainingRun) -> None:
        save(run)
        if run.steps == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "checkpoint", save_and_fill)
        with pytest.raises(MeshwrightError, match="cannot be read or written any more"):
            train_here(monkeypatch, with_, options, tmp_path / "full.jsonl")
    dist.destroy_process_group()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    assert [path.name for path in list_checkpoints(folder)][-1] == "step-00000002"
    assert not list((tmp_path / "states").iterdir())
    resumed = losses(train_here(monkeypatch, without, options, tmp_path / "resumed.jsonl"))
    assert resumed == expected[2:]


def test_too_little_host_memory_is_said_before_anything_starts(tmp_path: Path) -> None:
    _, with_ = plans(tmp_path, host_bytes=2**60)
    with pytest.raises(RuntimeMismatchError, match=r"host memory; .* are missing"):
        check_machine(with_, with_.cluster.groups[0])


@pytest.mark.parametrize(
    ("layout", "fields", "rule"),
    [
        (Layout(dp_shard=2, zero_stage=1), {"streamed_parameter_layers": (1,)}, "streamed_parameters_zero_stage"),
        (Layout(pp=2, schedule="zb-h1"), {"streamed_parameter_layers": (1,)}, "streamed_parameters_split_backward"),
        (Layout(), {"streamed_parameter_layers": (0, 1)}, "streamed_parameters_tied"),
    ],
)
def test_what_cannot_be_executed_is_refused_by_name(layout: Layout, fields: dict[str, Any], rule: str) -> None:
    plan = small_plan(layout, tied=True)
    _, with_ = with_offload(plan, OffloadSchedule(**fields), ("none",) * 4)
    assert any(f"[{rule}]" in reason for reason in why_not_offloadable(with_))
    with pytest.raises(RuntimeMismatchError) as error:
        parallelize(None, with_)
    assert any(f"[{rule}]" in detail for detail in error.value.details)


def test_only_states_of_adamw_leave_the_device() -> None:
    plan = small_plan()
    plan = plan.replace(workload=plan.workload.replace(optimizer="sgd"))
    _, with_ = with_offload(plan, OffloadSchedule(host_optimizer_layers=(1,)), ("none",) * 4)
    assert any("[offload_optimizer]" in reason for reason in why_not_offloadable(with_))


def test_a_run_saves_its_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small_plan()
    plan = plan.replace(workload=plan.workload.replace(adapters=LowRank(rank=2, dropout=False)))
    options = TrainOptions(steps=2, save_adapters=str(tmp_path / "adapters"), save_weights=str(tmp_path / "merged"))
    train_here(monkeypatch, plan, options, tmp_path / "run.jsonl")
    assert {path.name for path in (tmp_path / "adapters").iterdir()} == {
        "adapter_model.safetensors",
        "adapter_config.json",
    }
    assert (tmp_path / "merged" / "config.json").is_file()
