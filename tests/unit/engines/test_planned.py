"""A plan for an engine goes to it by construction: planned, written, read back, the layout is the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from meshwright.cost_models.stage.passing import loss_bytes
from meshwright.engines import as_run_by, export, exportable, read_configuration
from meshwright.engines.torchtitan import MODELS
from meshwright.planner import plan
from meshwright.schema import ClusterSpec, ConfigError, Layout, ModelSpec, TrainingPlan, Workload
from meshwright.schema.engine_facts import ENGINES, PLANNED_ENGINES
from meshwright.schema.engine_models import TORCHTITAN_MODELS

OTHERS = [engine for engine in PLANNED_ENGINES if not ENGINES[engine].is_own_runtime]
JOBS = [
    ("llama-3.1-8b", "8xH100-SXM-80GB", 64, 8192),
    ("llama-3.1-70b", "256xH100-SXM-80GB", 1024, 8192),  # of the front page
    ("qwen3-30b-a3b", "32xA100-SXM-80GB", 128, 4096),
    ("deepseek-v3", "512xH100-SXM-80GB", 1024, 4096),
    ("mistral-7b", "8xL40S", 32, 16384),
    ("gpt2-xl", "2xA100-SXM-40GB", 16, 1024),
]
OF_THE_SCRIPT = {
    "deepspeed": {"recompute": "none", "recompute_fraction": 1.0, "sequence_parallel": False},
    "accelerate": {"micro_batch_size": 1},
}
"""Fields that the training script of an engine has, and what a reader of its file takes for them."""


def planned(engine: str, model: str, cluster: str, batch: int, seq_len: int, **fixed: Any) -> TrainingPlan:
    work = Workload(seq_len=seq_len, global_batch_size=batch, engine=engine)
    return plan(ModelSpec.named(model), ClusterSpec.parse(cluster), work, fixed=fixed)


def read_back(made: TrainingPlan, engine: str, folder: Path) -> Layout:
    path = export(made, engine).write(folder)[0]
    return read_configuration(path, num_devices=made.cluster.num_devices, model=made.model).layout


@pytest.mark.long
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job[0])
@pytest.mark.parametrize("engine", OTHERS)
def test_plan_for_an_engine_is_what_its_file_says(engine: str, job: tuple[str, str, int, int], tmp_path: Path) -> None:
    """Where the engine does not train the model, `plan` says so and nothing is made."""
    spec, work = ModelSpec.named(job[0]), Workload(seq_len=job[3], global_batch_size=job[2], engine=engine)
    if reasons := ENGINES[engine].lacks(spec, work):  # type: ignore[misc]
        with pytest.raises(ConfigError) as caught:
            planned(engine, *job)
        assert caught.value.details == reasons
        return
    made = planned(engine, *job)
    assert exportable(made)[ENGINES[engine].exporter] is None
    found = read_back(made, ENGINES[engine].exporter, tmp_path)
    layout = made.layout.replace(**OF_THE_SCRIPT.get(engine, {}))
    if ENGINES[engine].recomputes_first_blocks and layout.recompute == "mixed":
        # Leading blocks of each stage, which a layout of its own has as a part of them.
        assert found.recompute == "full"
        found = found.replace(recompute="mixed", recompute_fraction=1.0)
    assert found == layout


@pytest.mark.parametrize("engine", OTHERS)
@pytest.mark.parametrize(
    "fixed",
    [{"pp": 2}, {"tp": 2}, {"tp": 4, "pp": 2, "num_model_chunks": 2}, {"cp": 2}, {"zero_stage": 1}, {"recompute": "full"},
     {"recompute": "selective"}, {"schedule": "zb-h1", "pp": 2}, {"dp_replicate": 2}, {"micro_batch_size": 2}],
    ids=str,
)  # fmt: skip
def test_what_is_fixed_is_exported_or_refused_by_plan(engine: str, fixed: dict[str, Any], tmp_path: Path) -> None:
    try:
        made = planned(engine, "llama-3.1-8b", "16xH100-SXM-80GB", 64, 4096, **fixed)
    except ConfigError as error:
        assert error.details and all("[" in line for line in error.details)  # each reason has its rule's name
        return
    found = read_back(made, ENGINES[engine].exporter, tmp_path)
    layout = made.layout.replace(**OF_THE_SCRIPT.get(engine, {}))
    if ENGINES[engine].recomputes_first_blocks and layout.recompute == "mixed":
        found = found.replace(recompute="mixed", recompute_fraction=1.0)
    assert found == layout


@pytest.mark.long
def test_plan_of_ours_is_costed_again_elsewhere(tmp_path: Path) -> None:
    """The logits of plain code make what fits ours too large; what fits is written with the difference."""
    made = planned(
        "fsdp2", "llama-3.1-8b", "8xH100-SXM-80GB", 64, 8192, recompute="full", zero_stage=3, micro_batch_size=4
    )
    made.save(tmp_path / "plan.json")

    def run(to: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "meshwright.cli", "export", "plan.json", "--to", to]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert made.estimate.fits and exportable(made)["accelerate"] is None
    refused = run("accelerate")
    assert refused.returncode == 2 and "does not fit under accelerate" in refused.stderr and "logits" in refused.stderr
    assert not (tmp_path / "accelerate").exists()
    written = run("torchtitan")
    assert written.returncode == 0 and "costed for torchtitan: step time" in written.stderr, written.stderr
    other = as_run_by(made, "torchtitan")
    assert other is not None and other.workload.engine == "torchtitan" and other.layout == made.layout
    assert as_run_by(made, "kubernetes") is None and as_run_by(other, "torchtitan") is None


def test_what_an_engine_runs_otherwise_is_said() -> None:
    made = planned(
        "fsdp2",
        "llama-3.1-8b",
        "8xH100-SXM-80GB",
        64,
        4096,
        tp=2,
        zero_stage=1,
        recompute="none",
        sequence_parallel=True,
    )
    other = as_run_by(made, "accelerate")
    assert other is not None
    assert other.layout == made.layout.replace(zero_stage=2, sequence_parallel=False)
    lines = export(made, "accelerate").not_expressed
    assert "zero_stage=1: accelerate runs 2" in lines and "sequence_parallel=True: accelerate runs False" in lines


def test_facts_and_exporter_know_the_same_models() -> None:
    assert tuple(MODELS) == TORCHTITAN_MODELS


def test_logits_of_plain_code_are_counted() -> None:
    """14 bytes of each logit instead of two and a chunk of ours; torchtitan's loss has an eighth of them at a time."""
    logits = np.array([128_256.0 * 8192])
    own, plain, chunked = (
        float(loss_bytes(logits, Workload(seq_len=8192, global_batch_size=64, engine=engine))[0])
        for engine in ("fsdp2", "accelerate", "torchtitan")
    )
    assert plain == 14 * 128_256 * 8192 and chunked == plain / 8
    assert chunked < own < plain / 6
