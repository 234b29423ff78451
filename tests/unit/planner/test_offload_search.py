"""`plan` with offload: fits what does not fit without, never slower than without, says what the host lacks."""

from __future__ import annotations

from pathlib import Path

import pytest
from meshwright.cli.main import app
from meshwright.planner import estimate, plan
from meshwright.planner.request import OffloadRequest, PlanRequest
from meshwright.planner.space import build_space
from meshwright.schema import ClusterSpec, ConfigError, InfeasibleError, ModelSpec, TrainingPlan, Workload
from meshwright.schema.task import parse_training
from meshwright.schema.units import GIB
from typer.testing import CliRunner

MODEL = ModelSpec.named("llama-3.1-8b")
ONE = ClusterSpec.parse("1xH100-SXM-80GB")
STEP = Workload(seq_len=4096, global_batch_size=4)


@pytest.fixture(scope="module")
def offloaded() -> TrainingPlan:
    """8 B parameters need 128 GB for states alone."""
    return plan(MODEL, ONE, STEP, offload=OffloadRequest(host_memory_bytes=200 * GIB))


def test_a_model_larger_than_memory_fits_with_offload(offloaded: TrainingPlan) -> None:
    with pytest.raises(InfeasibleError):
        plan(MODEL, ONE, STEP, time_limit_s=5)
    found = offloaded.estimate
    assert found.fits and found.required_bytes <= found.budget_bytes
    assert offloaded.offload is not None and offloaded.layout.offload == "scheduled"
    assert offloaded.offload.host_bytes <= 200 * GIB
    assert found.breakdown_s.total == pytest.approx(found.step_time_s)
    assert found.memory_bytes.total == found.peak_allocated_bytes
    # The simulated step is the estimate; the schedule's own bound is below it, and the search's is below that of any layout.
    assert offloaded.offload.simulated_s == pytest.approx(found.step_time_s, rel=1e-6)
    assert offloaded.offload.bound_s <= found.step_time_s and offloaded.search is not None
    assert offloaded.search.bound_s <= found.step_time_s
    assert TrainingPlan.model_validate_json(offloaded.model_dump_json()) == offloaded


def test_states_on_the_host_are_what_the_devices_lack(offloaded: TrainingPlan) -> None:
    schedule = offloaded.offload
    assert schedule is not None
    trained = MODEL.num_params
    on_device = offloaded.estimate.memory_bytes
    # Every parameter has 16 bytes of master, gradient and states somewhere; a layer in flight may have some twice.
    held = schedule.host_bytes + on_device.parameters + on_device.optimizer + on_device.gradients
    assert held >= 0.75 * 16 * trained


def test_a_space_of_plain_layouts_refuses_schedules() -> None:
    with pytest.raises(ConfigError, match="does not search offload schedules"):
        build_space(PlanRequest(MODEL, ONE, STEP, {"offload": "scheduled"}))


def test_a_small_host_is_named_with_what_it_lacks() -> None:
    with pytest.raises(InfeasibleError, match="GiB a node too small") as caught:
        plan(MODEL, ONE, STEP, offload=OffloadRequest(host_memory_bytes=20 * GIB))
    assert "host memory (C7)" in str(caught.value) and "--host-memory-gib" in str(caught.value)


def test_storage_takes_what_the_host_cannot() -> None:
    request = OffloadRequest(host_memory_bytes=54 * GIB, storage_path="/drives", storage_bytes=500 * GIB)
    found = plan(MODEL, ONE, STEP, offload=request).offload
    assert found is not None and found.storage_optimizer_layers and found.storage_path == "/drives"
    assert found.host_bytes <= 54 * GIB and found.storage_bytes > 0


def test_offload_is_not_chosen_where_it_is_slower() -> None:
    small = ModelSpec.named("llama-3.2-1b")
    without = plan(small, ONE, STEP)
    found = plan(small, ONE, STEP, offload=OffloadRequest())
    assert found.layout == without.layout and found.offload is None
    assert found.estimate.step_time_s == without.estimate.step_time_s


@pytest.mark.parametrize(("kinds", "memory_gib", "seq_len"), [("optimizer", 22, 4096), ("activations", 44, 32768)])
def test_only_what_was_asked_for_leaves(kinds: str, memory_gib: int, seq_len: int) -> None:
    small = ModelSpec.named("llama-3.2-1b")
    tight = ONE.replace(reserved_bytes=ONE.weakest_device.memory_bytes - memory_gib * GIB)
    request = OffloadRequest(kinds=kinds, host_memory_bytes=500 * GIB)  # type: ignore[arg-type]
    found = plan(small, tight, STEP.replace(seq_len=seq_len), offload=request)
    assert found.offload is not None
    stage = found.stages[0]
    moved = any(stage.offload_of(idx) != "none" for idx in stage.layer_idxs)
    assert not found.offload.streamed_parameter_layers
    assert moved == (kinds == "activations")
    assert bool(found.offload.off_device_layers) == (kinds == "optimizer")


def test_a_layout_with_a_schedule_has_an_estimate(offloaded: TrainingPlan) -> None:
    again = estimate(MODEL, ONE, STEP, offloaded.layout)
    # The plan's host memory was limited, the estimate's is not: it may be a little faster.
    assert 0.9 * offloaded.estimate.step_time_s <= again.step_time_s <= 1.05 * offloaded.estimate.step_time_s


def test_what_offload_cannot_be_combined_with_is_said() -> None:
    with pytest.raises(ConfigError, match="one pipeline stage"):
        plan(MODEL, ClusterSpec.parse("2xH100-SXM-80GB"), STEP, fixed={"pp": 2}, offload=OffloadRequest())
    runner = CliRunner()
    base = ["plan", "llama-3.2-1b", "--cluster", "1xH100-SXM-80GB", "--global-batch-size", "1", "--seq-len", "512"]
    alone = runner.invoke(app, [*base, "--host-memory-gib", "10"])
    assert alone.exit_code == 2 and "without --offload" in alone.stderr
    for of in (["--pareto"], ["--objective", "cost"]):
        other = runner.invoke(app, [*base, "--engine", "megatron", "--offload", "auto", *of])
        assert other.exit_code == 2 and "planned for fsdp2" in other.stderr
    nowhere = runner.invoke(app, [*base, "--offload", "auto", "--nvme", "/nowhere/at/all"])
    assert nowhere.exit_code == 2 and "--nvme-gib" in nowhere.stderr


def test_the_command_shows_the_schedule(tmp_path: Path) -> None:
    base = ["plan", "llama-3.1-8b", "--cluster", "1xH100-SXM-80GB", "--global-batch-size", "4", "--seq-len", "4096"]
    out = str(tmp_path / "plan.json")
    result = CliRunner().invoke(app, [*base, "--offload", "auto", "--host-memory-gib", "200", "--out", out])
    assert result.exit_code == 0, result.stderr
    assert "offload=scheduled" in result.stdout and "more of each device" in result.stdout
    assert TrainingPlan.load(out).offload is not None


@pytest.mark.parametrize(
    ("text", "said"),
    [("half", "unknown"), ("lora:q=3", "unknown"), ("lora:r=1,r=2", "twice"), ("lora:targets=up", "targets")],
)
def test_unknown_training_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_training(text)


def test_adapters_are_read_as_written() -> None:
    adapters = parse_training("lora:r=64,targets=qkv+mlp,frozen=nf4,dropout=false")["adapters"]
    assert (adapters.rank, adapters.targets, adapters.frozen, adapters.dropout) == (64, ("qkv", "mlp"), "nf4", False)
    assert parse_training("full") == {}
