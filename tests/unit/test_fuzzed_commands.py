"""Command lines over mutated files and words: none ends in a traceback, runs long or takes much memory.

For minutes, and by the thousand: tests/fuzz/fuzz_commands.py, which the long test runs for a few.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from meshwright.cli.main import app
from meshwright.planner.expert_files import write_placement
from meshwright.schema import Layout, Workload
from meshwright.solvers.experts.placement import place_experts
from plans import make_plan, tiny_model
from targets import small_profile
from typer.testing import CliRunner

FUZZER = Path(__file__).parents[1] / "fuzz" / "fuzz_commands.py"

REFUSED = [
    "plan smollm2-135m --serve --cluster 2xH100-SXM-80GB --requests isl=3" + "NaN" * 2000,
    "experts synth --out x.npz --num-tokens 9223372036854775808",
    "experts synth --out x.npz --num-tokens 64 --num-topics 9223372036854775807",
    "experts synth --out x.npz --num-layers 1000 --num-experts 10000 --steps 10000",
    "experts synth --out x.npz --num-tokens 64 --affinity 1e308",
    "experts synth --out x.npz --sigma nan",
    "batch damaged.gz --pack 64",
    "apply plan.json --nnodes 2 --rdzv-endpoint host:1",
    "plan smollm2-135m --cluster [/bold] --global-batch-size 8 --seq-len 64",
    "profile merge profile.json profile.json --out " + "x" * 300,
    "experts bench loads.csv --num-gpus 9223372036854775807",
    "experts bench loads.csv --num-gpus 50000000",
    "experts bench loads.csv --num-gpus 0",
    "experts evaluate split.npz loads.csv",
    "export surrogate.json --to kubernetes",
    "plan smollm2-135m --cluster region.toml --global-batch-size 8 --seq-len 64",
    "plan smollm2-135m --infer --cluster 2xH100-SXM-80GB --prompt-len 16 --generate-len 1000000000",
    "experts evaluate placed.npz loads.csv",
    "experts evaluate idle.json loads.csv",
    "experts evaluate slots.json loads.csv --num-gpus 2 --num-nodes 0",
    "plan smollm2-135m --cluster zones.toml --global-batch-size 8 --seq-len 64",
    "plan smollm2-135m --cluster matrix.toml --global-batch-size 8 --seq-len 64",
    "validate --serve load_tests.csv",
    "plan smollm2-135m --serve --cluster 2xH100-SXM-80GB --requests long.csv",
    "batch blank.txt.gz --pack 64",
    "compare train.sh --cluster 2xH100-SXM-80GB --model smollm2-135m",
    "compare half.yaml --cluster 2xH100-SXM-80GB --global-batch-size 8 --seq-len 64 --model smollm2-135m",
    "apply job.json --steps 1 --weights " + "-" * 300,
    "plan smollm2-135m --cluster 2xH100-SXM-80GB --global-batch-size 8 --min-tokens-per-s 16 --host-attention-gb-per-s 3",
    "experts place wide.npz --num-gpus 2 --num-slots 32770 --out x.npz",
]
"""Lines that once ended in a traceback, or took all memory."""

GROUPS = '[[groups]]\ndevice = "H100-SXM-80GB"\nnum_nodes = 1\n' * 2
MEGATRON = (
    "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1"
    " --global-batch-size 8 --optimizer adam sgd\n"
)


def with_a_dead_gpu(path: str) -> None:
    """Write a placement of which a GPU has no speed."""
    placed = place_experts(np.array([[1, 2, 3], [4, 5, 6]]), num_gpus=2, num_slots=4)
    write_placement(replace(placed, gpu_speed=np.array([0.0, 2.0])), Path(path), "npz")


@pytest.mark.parametrize("line", REFUSED, ids=lambda line: line[:60])
def test_refused(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MESHWRIGHT_SECRET", raising=False)
    Path("damaged.gz").write_bytes(b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03" + b"\xff" * 40)
    Path("loads.csv").write_text("1,2,3\n4,5,6\n")
    Path("profile.json").write_text(small_profile().model_dump_json())
    Path("train.sh").write_text(MEGATRON)
    Path("zones.toml").write_text(GROUPS.replace("[[groups]]", "[[groups]]\nzone = [1]"))
    Path("matrix.toml").write_text(f"bandwidth_matrix = []\n{GROUPS}")
    Path("load_tests.csv").write_text(
        "model,gpu,engine,mode,gemm_dtype,isl,osl\nllama-3.1-8b,H200,vllm,agg,bf16,128,-1\n"
    )
    Path("long.csv").write_text("arrival_s,prompt_tokens,output_tokens\n1,2," + "3" * 200_000)
    Path("blank.txt.gz").write_bytes(gzip.compress(b"\n" * 5_000_000))
    Path("surrogate.json").write_text('{"name": "\\ud800"}')
    Path("half.yaml").write_text('dataset:\n  sequence_length: 64\n"a\\ud800": 1\n')
    Path("region.toml").write_text(f"regions = true\n{GROUPS}")
    make_plan(tiny_model(), Layout(), workload=Workload(seq_len=8, global_batch_size=1)).save("job.json")
    np.savez("wide.npz", loads=np.ones((1, 32770)))
    with_a_dead_gpu("placed.npz")
    devices = [{"device_id": 0, "device_expert": [0, 1]}, {"device_id": 1, "device_expert": {}}]
    Path("idle.json").write_text(json.dumps({"layer_list": [{"layer_id": 0, "device_list": devices}]}))
    Path("slots.json").write_text("[[0, 1, 2, 0], [0, 1, 2, 1]]")
    np.savez("split.npz", **(dict(np.load("placed.npz")) | {"solve_s": np.ones(2)}))
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert not Path("x.npz").exists()


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="it forks, and watches processes by descriptors")
def test_some_mutated_command_lines(tmp_path: Path) -> None:
    command = [sys.executable, str(FUZZER), "--inputs", "25", "--seed", "5", "--out", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith("25 command lines")
