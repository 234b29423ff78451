"""Every search on the largest inputs that are allowed, under a limit of time: what it takes of processor and memory all the same.

    python benchmarks/time_limits.py --time-limit-s 5

Each command line is a process of its own. Processor seconds count, not those of the clock: a search looks at the clock, and on a
busy machine ends with less. What is more than the limit is what is done without a look at it, and the start (a second). Written to
benchmarks/time_limits.md; the exit code is the number of lines above ``--most-cpu-s`` or ``--most-gib``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from itertools import permutations
from pathlib import Path

import numpy as np

LLAMA = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 512, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
MOE = LLAMA | {
    "model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "head_dim": 128,
    "num_key_value_heads": 4, "num_experts": 64, "num_experts_per_tok": 8, "mlp_only_layers": list(range(0, 512, 3)),
}  # fmt: skip
WORKFLOW = """
algorithm = "ppo"
[actor]
model = "dense.json"
[critic]
model = "actor"
[reference]
model = "dense.json"
[teacher]
model = "dense.json"
[reward]
function = "rewards.py:f"
[batch]
prompts = 100000
responses = 100
prompt_len = 1000
lengths = "lengths.txt"
max_len = 131072
updates = 100
[policy]
staleness = 1
"""
ALL, BATCH = "--cluster 9979200xH100-SXM-80GB", "--global-batch-size 735134400"
"""Of what is allowed the numbers with most divisors."""
SOME = "--cluster 4096xH100-SXM-80GB --global-batch-size 10080 --seq-len 4096"
PROMPTS = "--prompt-len 4096 --generate-len 4096"
CASES = f"""
plan dense.json {ALL} {BATCH} --seq-len 131072
plan dense.json {ALL} {BATCH} --seq-len 131072 --space full
plan wide.json {ALL} {BATCH} --seq-len 4096
plan moe.json {SOME} --space full
plan moe.json {SOME} --pareto
plan dense.json {SOME} --offload auto --host-memory-gib 2000
plan dense.json {SOME} --tolerate 64
plan dense.json {SOME} --batch-tolerance 50%
plan dense.json {SOME} --fix schedule=synthesised
plan dense.json {SOME} --engine megatron
plan dense.json --cluster mixed.toml --global-batch-size 5040 --seq-len 4096
plan dense.json --cluster 2048xH100-SXM-80GB --global-batch-size 100000 --lengths lengths.txt --max-len 131072
plan dense.json --cluster regions.toml --global-batch-size 5040 --seq-len 4096 --sync auto --max-local-steps 1000
plan dense.json --offers offers.toml --objective cost --global-batch-size 5040 --seq-len 4096
plan dense.json --cluster 160000xH100-SXM-80GB --objective cost {BATCH} --seq-len 4096
plan dense.json --serve {ALL} --requests requests.csv --tpot 50ms@p90
plan dense.json --serve --cluster mixed.toml --requests isl=4096,osl=512,rate=20000,cv=1.5,prefix=0.4 --ttft 1s@p90
plan moe.json --serve --offers offers.toml --requests isl=4096,osl=512,rate=20000 --ttft 1s@p90
plan dense.json --serve --cluster 64xH100-SXM-80GB --requests isl=100000,osl=30000 --concurrency 1000000 --tpot 50ms@p99
plan dense.json --infer --cluster 64xH100-SXM-80GB {PROMPTS} --batch-size 735134400 --host-memory-gib 2000
plan moe.json --infer --cluster 64xH100-SXM-80GB {PROMPTS} --batch-size 735134400 --nvme /tmp --nvme-gib 10000
plan-rl rl.toml --cluster 4096xH100-SXM-80GB
experts place loads.npz --num-gpus 1600 --num-slots 1600 --effort exact --out made.npz
experts place loads.npz --num-gpus 1600 --num-slots 1600 --effort search --out made.npz
experts place --trace trace.npz --num-gpus 64 --num-nodes 8 --objective traffic --effort search --out made.npz
"""


def write_inputs(folder: Path) -> None:
    """Write the files that the cases name."""
    chosen, drawn = random.Random(0), np.random.default_rng(0)
    (folder / "dense.json").write_text(json.dumps(LLAMA))
    (folder / "moe.json").write_text(json.dumps(MOE))
    (folder / "wide.json").write_text(json.dumps(MOE | {"num_experts": 65536}))
    (folder / "rl.toml").write_text(WORKFLOW)
    lengths = (min(131072, 1 + int(chosen.lognormvariate(6.5, 1.3))) for _ in range(1_000_000))
    (folder / "lengths.txt").write_text("\n".join(map(str, lengths)))
    requests = (
        f"{i / 50:.2f},{1 + int(chosen.lognormvariate(6, 1))},{1 + int(chosen.lognormvariate(5, 1))}"
        for i in range(10**6)
    )
    (folder / "requests.csv").write_text("\n".join(("arrival_s,prompt_tokens,output_tokens", *requests)))
    kinds = ("H100-SXM-80GB", "A100-SXM-80GB", "A100-SXM-40GB", "H200")
    groups = (
        f'[[groups]]\ndevice = "{kind}"\nnum_nodes = {300 + 7 * i}\ndevices_per_node = 8\n'
        for i, kind in enumerate(kinds)
    )
    (folder / "mixed.toml").write_text("".join(groups))
    zones = range(12)
    groups = (f'[[groups]]\nregion = "r{i}"\ndevice = "A100-SXM-80GB"\nnum_nodes = {2 + i}\n' for i in zones)
    (folder / "regions.toml").write_text('[regions]\ntable = "pairs.csv"\n' + "".join(groups))
    pairs = (f"r{i},r{j},{1 + (7 * i + j) % 9},{20 + i * j % 90}" for i, j in permutations(zones, 2))
    (folder / "pairs.csv").write_text("\n".join(("src,dst,throughput_gbit_per_s,min_rtt_ms", *pairs)))
    offers = (
        f'[[offers]]\nname = "o{i}"\ncluster = "{8 * 2 ** (i % 9)}x{kinds[i % 4]}"\nprice_per_device_hour = {1 + i / 10}\n'
        for i in range(40)
    )
    (folder / "offers.toml").write_text("".join(offers))
    np.savez(folder / "loads.npz", load=drawn.lognormal(size=(61, 1024)))
    routed = drawn.integers(0, 32, size=(20_000, 58, 8)) + 32 * np.arange(8)  # no expert twice
    np.savez(folder / "trace.npz", routed_experts=routed.astype(np.int16))


def measured(words: list[str], folder: Path) -> tuple[float, float, int, str]:
    """Return processor seconds, GiB, exit code and the last line of what a command said."""
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "meshwright.cli", *words], cwd=folder, stdout=said, stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    _, status, used = os.wait4(process.pid, 0)
    lines = (folder / "said").read_text(errors="replace").splitlines()
    answer = next((line for line in lines if line.startswith("error")), lines[-1] if lines else "")
    code = os.waitstatus_to_exitcode(status)
    process.returncode = code
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20, code, answer


def main() -> int:
    """Run the cases and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time-limit-s", type=float, default=5.0)
    parser.add_argument("--most-cpu-s", type=float, default=20.0)
    parser.add_argument("--most-gib", type=float, default=1.0)
    parser.add_argument("--only", default="", help="command lines that have this text")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    options = parser.parse_args()
    rows, above = [], 0
    with tempfile.TemporaryDirectory() as name:
        write_inputs(Path(name))
        for line in filter(None, CASES.splitlines()):
            if options.only not in line:
                continue
            cpu_s, gib, code, answer = measured(
                [*line.split(), "--time-limit-s", str(options.time_limit_s)], Path(name)
            )
            is_above = cpu_s > options.most_cpu_s or gib > options.most_gib or code not in (0, 1, 2)
            above += is_above
            rows.append(f"| `{line}` | {cpu_s:.1f} | {gib:.2f} | {code} | {'above' if is_above else ''} |")
            print(f"{cpu_s:6.1f} s {gib:5.2f} GiB  {code}  {line}\n    {answer[:160]}", flush=True)
    if not options.only:
        head = [
            "# Searches on the largest inputs, under a limit of time\n",
            f"`python benchmarks/time_limits.py --time-limit-s {options.time_limit_s:g}`; with exit code 1 the limit came first.\n",
            "| command | CPU s | GiB | exit code | |",
            "|---|--:|--:|--:|---|",
        ]
        options.out.write_text("\n".join([*head, *rows]) + "\n")
    return above


if __name__ == "__main__":
    sys.exit(main())
