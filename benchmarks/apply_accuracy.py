"""Entire training steps: predicted against measured step time and peak memory, layout by layout.

    python benchmarks/apply_accuracy.py local OUT.json             # this machine's CPUs
    python benchmarks/apply_accuracy.py 1xH200-SXM-141GB OUT.json  # one GPU, planned from its data sheet

Plans each case, runs it with `meshwright apply` for some steps and writes the last records with versions. Models that do not
fit are cut to fewer layers. Cases run one after another, so a neighbour's load on the machine shows as noise between them.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from meshwright.schema.catalogue import load_model

STEPS = 12


class Case(NamedTuple):
    """A model (cut to ``num_layers``), a batch, and the fixed choices of the layout."""

    model: str
    num_layers: int | None
    global_batch_size: int
    seq_len: int
    fixed: str


SMALL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1408,
    "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 16384,
    "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
"""35 M parameters that divide by every axis."""

LOCAL_CASES = [
    Case("small", None, 8, 128, fixed)
    for fixed in (
        "dp_replicate=2",
        "dp_shard=2,zero_stage=1",
        "dp_shard=2,zero_stage=3",
        "tp=2",
        "pp=2,micro_batch_size=2",
        "dp_replicate=2,recompute=full",
    )
]
GPU_CASES = [
    Case("smollm2-135m", None, 32, 2048, "micro_batch_size=16,recompute=none"),
    Case("smollm2-1.7b", None, 16, 2048, "micro_batch_size=4,recompute=none"),
    Case("llama-3.2-1b", None, 16, 4096, "micro_batch_size=4,recompute=none"),
    Case("llama-3.2-1b", None, 16, 4096, "micro_batch_size=4,recompute=selective"),
    Case("llama-3.2-1b", None, 16, 4096, "micro_batch_size=4,recompute=full"),
    Case("llama-3.1-8b", 12, 8, 8192, "micro_batch_size=1,recompute=none"),
    Case("llama-3.1-8b", 12, 8, 8192, "micro_batch_size=2,recompute=full"),
    Case("qwen3-8b", 10, 8, 4096, "micro_batch_size=2,recompute=selective"),
]


def run_case(case: Case, cluster: str, folder: Path) -> dict[str, object]:
    """Plan and run one case; return its last record with the predicted time and memory terms, or the error."""
    model, plan = folder / "config.json", folder / "plan.json"
    config = SMALL if case.model == "small" else load_model(case.model)["config"]
    model.write_text(json.dumps({**config, "num_hidden_layers": case.num_layers or config["num_hidden_layers"]}))
    command = [sys.executable, "-m", "meshwright.cli"]
    batch = ["--global-batch-size", str(case.global_batch_size), "--seq-len", str(case.seq_len)]
    choices = ["--cluster", cluster, *batch, "--fix", case.fixed, "--out", str(plan)]
    planned = subprocess.run([*command, "plan", str(model), *choices], capture_output=True, text=True)
    if planned.returncode:
        return {**case._asdict(), "error": planned.stderr}
    run = [*command, "apply", str(plan), "--steps", str(STEPS), "--json"]
    applied = subprocess.run(run, capture_output=True, text=True)
    if applied.returncode:
        return {**case._asdict(), "error": applied.stderr}
    records = [json.loads(line) for line in applied.stdout.splitlines()]
    estimate = json.loads(plan.read_text())["estimate"]
    terms = {name: estimate[name] for name in ("breakdown_s", "memory_bytes")}
    return {
        **case._asdict(),
        **records[-1],
        **terms,
        "losses": [record["loss"] for record in records if "step" in record],
    }


def main() -> None:
    """Run every case and write the results."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("cluster")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    cases = LOCAL_CASES if options.cluster.startswith("local") else GPU_CASES
    results = []
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            results.append(run_case(case, options.cluster, Path(folder)))
        print(case.model, case.fixed, json.dumps(results[-1].get("ratio", results[-1].get("error"))), flush=True)
        versions = {"cluster": options.cluster, "torch": version("torch"), "python": platform.python_version()}
        options.out.write_text(json.dumps({**versions, "steps": STEPS, "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
