"""Written configurations through the engines' own parsers, where those are installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from meshwright.engines import export
from meshwright.schema import Layout, ModelSpec, Workload
from plans import make_plan

LLAMA = ModelSpec.named("llama-3.1-8b")
WORKLOAD = Workload(seq_len=4096, global_batch_size=64)


def test_accelerate_takes_the_file(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate.commands.config.config_args import load_config_from_file

    layout = Layout(dp_replicate=2, dp_shard=2, tp=2, recompute="full")
    path = export(make_plan(LLAMA, layout, workload=WORKLOAD), "accelerate").write(tmp_path)[0]
    found = load_config_from_file(str(path))
    assert found.num_processes == 8 and found.mixed_precision == "bf16"
    assert found.fsdp_config["fsdp_version"] == 2 and found.parallelism_config["parallelism_config_tp_size"] == 2


DEEPSPEED = """
import sys, torch
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
import deepspeed
deepspeed.comm.init_distributed(dist_backend="fake", verbose=False)
from deepspeed.runtime.config import DeepSpeedConfig
found = DeepSpeedConfig(sys.argv[1])
assert (found.zero_optimization_stage, found.gradient_accumulation_steps) == (3, 4), vars(found)
"""


def test_deepspeed_takes_the_file(tmp_path: Path) -> None:
    """In a process of its own with eight made-up ranks: DeepSpeed compares the batch with the world's size."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    layout = Layout(dp_shard=8, micro_batch_size=2)
    path = export(make_plan(LLAMA, layout, workload=WORKLOAD), "deepspeed").write(tmp_path)[0]
    done = subprocess.run([sys.executable, "-c", DEEPSPEED, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


TORCHTITAN = """
import sys
sys.path.insert(0, sys.argv[1])
from torchtitan.config.manager import ConfigManager
found = ConfigManager().parse_args(["--module", "meshwright_plan", "--config", "plan"])
found.__post_init__()
assert found.parallelism.pipeline_parallel_degree == 2 and found.training.local_batch_size == 32, found
assert len(found.parallelism.module_fqns_per_model_part) == 2
"""


def test_torchtitan_takes_the_module(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    layout = Layout(pp=2, dp_shard=2, tp=2, recompute="selective")
    export(make_plan(LLAMA, layout, workload=WORKLOAD), "torchtitan").write(tmp_path)
    done = subprocess.run([sys.executable, "-c", TORCHTITAN, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
