"""Valid lines of every command, with the documents that they read: `{plan}` stands for a file of the documents of that name.

`+pairs.csv={pairs}` is no word of the line: a file of that name lies in the folder, where another document names it.
"""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mutations
import numpy as np
from meshwright.schema import Layout
from plans import make_plan, tiny_model
from targets import LLAMA, STEP, TARGETS, npz, small_plans
from targets import _measured_plan as measured_plan

_TRAIN = "--cluster {cluster} --global-batch-size 8 --seq-len 64"
_SMALL = "--cluster 2xH100-SXM-80GB --global-batch-size 8 --seq-len 64"
_LIMIT = "--time-limit-s 3"
_SMALL_SERVE = "--cluster 2xH100-SXM-80GB --requests isl=32,osl=16,rate=2 --ttft 1s@p90 --time-limit-s 3"
_NOWHERE = "--host 256.0.0.1 --port 0"
_LINES = f"""
plan {{config}} {_TRAIN} {_LIMIT}
plan {{config}} {_SMALL} {_LIMIT}
plan {{plain}} {_SMALL} {_LIMIT} --engine megatron --precision bf16-mixed --out plan.json --report page.html --explain-limit-s 1
plan {{config}} {_SMALL} {_LIMIT} --fix {{layout-text:tp=2}} --precision bf16-mixed
plan {{config}} {_SMALL} {_LIMIT} --train lora:r=16,targets=qkv+out,frozen=nf4,dropout=false
plan {{config}} {_SMALL} {_LIMIT} --offload auto --host-memory-gib 64
plan {{config}} --cluster 2xH100-SXM-80GB --global-batch-size 8 {_LIMIT} --lengths {{lengths}} --max-len 64
plan {{config}} {_SMALL} {_LIMIT} --pareto --json
plan {{config}} {_SMALL} {_LIMIT} --space full --tolerate 1
plan {{config}} --global-batch-size 8 --seq-len 64 --precision fp32 {_LIMIT} --profile {{profile}} --allow-foreign-profile
plan {{moe}} {_SMALL} {_LIMIT} --expert-load {{loads-moe}}
plan {{config}} --global-batch-size 8 --seq-len 64 {_LIMIT} --objective cost --offers {{offers}}
plan {{config}} --infer --cluster 1xH100-SXM-80GB --prompt-len 16 --generate-len 4
plan {{config}} --infer --cluster {{cluster}} --prompt-len 16 --generate-len 4 --json
plan {{config}} --serve --cluster 2xH100-SXM-80GB --requests isl=32,osl=16,rate=2 --ttft 1s@p90 {_LIMIT}
plan {{config}} --serve --cluster {{cluster}} --requests {{requests}} --tpot 1s {_LIMIT}
plan {{config}} --serve --offers {{offers}} --requests isl=32,osl=16,rate=2,cv=1.5,prefix=0.4 {_LIMIT} --json
plan {{config}} --serve --cluster 2xH100-SXM-80GB --requests {{requests-gz}} --e2e 20s@p99 --modes disagg --concurrency 8 {_LIMIT}
plan {{plain}} --serve {_SMALL_SERVE} --speculate eagle3:2,accept=0.7 --engine sglang --objective cost --weights fp8
plan {{config}} {_SMALL} {_LIMIT} --sync auto --max-local-steps 4 --max-delay-steps 2
plan {{config}} --cluster {{regions}} +pairs.csv={{pairs}} --global-batch-size 16 --seq-len 64 --sync auto {_LIMIT}
plan {{config}} {_SMALL} {_LIMIT} --rehearse
plan {{config}} {_SMALL} {_LIMIT} --calibrate {{runs}}
plan {{config}} --global-batch-size 8 --seq-len 64 {_LIMIT} --objective energy --offers {{offers}} --tokens 1e9 --deadline-h 50
plan . +config.json={{config}} {_SMALL} {_LIMIT} --optimizer muon --top 2
plan {{config}} {_SMALL} {_LIMIT} --batch-tolerance 20% --headroom 5% --prefer fastest
plan {{config}} --infer --cluster 1xH100-SXM-80GB --prompt-len 16 --generate-len 4 --host-memory-gib 8 --nvme . --nvme-gib 4
plan {{config}} --infer --cluster 2xT4-16GB --prompt-len 16 --generate-len 4 --nvme . --nvme-gib 4 --storage-attention-gb-per-s 9
plan {{config}} --infer --cluster {{cluster}} --prompt-len 16 --generate-len 4 --across-nodes --tp 2 --batch-size 2
plan-rl {{workflow}} --cluster 2xH100-SXM-80GB {_LIMIT} --report page.html
plan-rl {{workflow-files}} +config.json={{config}} +lengths.txt={{lengths}} --cluster {{cluster}} {_LIMIT} --json
apply-rl {{rl-own}} --prompts {{prompts}} --reward missing.py:count --steps 1
estimate {{config}} {_TRAIN} --layout dp_shard=8
estimate {{config}} {_SMALL} --layout dp_shard=2 --calibrate {{runs}} --optimizer adamw-8bit --update in_backward --loss chunked
estimate {{config}} {_SMALL} --layout tp=2,micro_batch_size=2,recompute=full
estimate {{config}} {_SMALL} --layout dp_shard=2 --offload auto --host-memory-gib 64 --json
estimate {{moe}} {_SMALL} --layout dp_shard=2,ep=2
explain {{plan}} {_LIMIT}
explain {{plan}} {_LIMIT} --why-not tp=2 --json
explain {{serving}} {_LIMIT} --why-not aggregated
explain {{rl-plan}} {_LIMIT}
explain {{generation}} {_LIMIT} --json
report {{plan}} --report page.html --trace trace.json --explain-limit-s 1
report {{serving}} --report page.html --explain-limit-s 1
report {{rl-plan}} --report page.html --explain-limit-s 1
report {{generation}} --report page.html --explain-limit-s 1
rehearse {{sharded}} --report page.html
rehearse {{plan}} --rank 0
replay {{serving}} --requests {{requests}}
replay {{serving}} --requests {{requests}} --concurrency 4 --json
replay {{plan}} --trace {{machines}}
apply {{trainable}} --steps 1
apply {{trainable}} --steps 1 --data {{text}} --tokenizer {{tokenizer}} --documents
apply {{trainable}} --steps 1 --weights . +model.safetensors={{weights}}
serve {{serving}} {_NOWHERE} --tokenizer . +tokenizer.json={{tokenizer}}
serve {{serving}} {_NOWHERE} --weights . +model.safetensors={{weights}} --adapter mine=. +adapter_config.json={{adapter}}
goodput {{plan}} --mtbf-hours-per-device 5000 --save-s 20 --restart-s 60
goodput {{sharded}} --mtbf-hours-per-device 500 --save-s 20 --restart-s 60 --repair-hours 3 --tolerate 1 --json
batch {{sharded}} --lengths {{lengths}}
batch {{batches}} --plot picture.svg
batch {{lengths}} --pack 4096
batch {{lengths-gz}} --pack 4096 --json
export {{plan}} --to torchtitan --out made
export {{plan-megatron}} --to megatron --out made
export {{plan-megatron}} --to nemo --out made
export {{plan}} --to deepspeed --out made
export {{sharded}} --to accelerate --out made
export {{plan}} --to kubernetes --out made
export {{sharded}} --to kubernetes --out made --rdma-resource rdma/hca=2
export {{serving}} --to vllm --out made
export {{serving}} --to sglang --out made
export {{serving}} --to trtllm --out made
export {{serving}} --to llm-d --out made
export {{rl-plan}} --to verl --out made
export {{rl-plan}} --to nemo-rl --out made
export {{serving}} --to dynamo --out made
import {{engine-sh}} --model {{config}} --num-devices 8
import {{engine-yaml}} --num-devices 8
import {{engine-json}} --num-devices 2 --json
import {{engine-toml}} --num-devices 8
import {{engine-py}} --num-devices 8
compare {{engine-sh}} {_TRAIN} --model {{config}} {_LIMIT}
compare {{engine-toml}} --cluster 8xH100-SXM-80GB --global-batch-size 8 --seq-len 64 --model {{config}} {_LIMIT}
compare {{engine-yaml}} --cluster 8xH100-SXM-80GB --global-batch-size 8 --seq-len 64 --model {{config}} {_LIMIT} --json
compare {{engine-json}} --cluster 2xH100-SXM-80GB --global-batch-size 8 --seq-len 64 --model {{config}} --set A=b {_LIMIT}
recipes --only 405B
calibrate {{measured}} {{metrics}} --profile {{profile}} --allow-foreign-profile --out made.json
validate {{runs}}
validate {{runs}} --groups {{groups}} --by tp --json
validate {{runs}} --calibrate {{runs}} --calibration-runs 1
validate {{load-tests}} --serve
profile --model {{config}} --parts storage --nvme . --budget-s 0.01 --ranks 1
profile show {{profile}}
profile diff {{profile}} {{profile}}
profile merge {{profile}} {{profile}} --out made.json
experts place {{loads-csv}} --num-gpus 3 --num-nodes 1 --out made.npz
experts place {{loads-npz}} --num-gpus 2 --effort exact --time-limit-s 2 --json
experts place {{loads-json}} --num-gpus 2 --num-slots 8 --effort search --time-limit-s 1
experts place {{loads-npy}} --num-gpus 3 --trace {{trace}} --objective traffic --time-limit-s 1
experts place {{loads-pt}} --num-gpus 2 --to sglang --out made.json
experts evaluate {{placement-json}} {{loads-npy}} --num-gpus 2
experts evaluate {{made-npz}} {{loads-npy}} --json
experts convert {{placement-yaml}} --to npz --num-gpus 2 --out made.npz
experts synth --out made.npz --num-layers 2 --num-experts 8 --sigma 0.9 --steps 3 --drift 0.1
experts synth --out made.npz --num-layers 2 --num-experts 8 --num-tokens 64 --top-k 2 --num-topics 4 --affinity 1.0
experts bench {{loads-npy}} --num-gpus 2 --json
tokens {{text}} --out made.bin
tokens {{text}} --out made.bin --tokenizer {{tokenizer}} --end-token <eos>
models --json
devices
"""
COMMANDS = [tuple(line.split()) for line in _LINES.strip().splitlines()]
COMMANDS = [tuple(word.replace("{layout-text:tp=2}", "tp=2") for word in words) for words in COMMANDS]


@dataclass
class Document:
    """What a command reads under a name, in some valid variants."""

    suffix: str
    variants: list[bytes]
    form: mutations.Form | None


_REQUESTS = b"arrival_s,prompt_tokens,output_tokens\n" + b"".join(
    b"%d,%d,%d\n" % (i, 20 + i % 7, 5 + i % 3) for i in range(40)
)
_BATCH = {
    "name": "mine", "lengths": [512, 4096, 30000], "multiple": 128, "num_ranks": 8, "tokens_per_rank": 8192,
    "costs": {"fixed_s": 0.63, "linear_s": 1.84e-4, "quadratic_s": 5.1e-9, "exchange_s": {"2": 1.7e-5, "8": 2.1e-5}},
}  # fmt: skip
_CPUS = b"""
[[groups]]
num_nodes = 1
devices_per_node = 2
device = { name = "cpu", vendor = "cpu", memory_gib = 8, memory_bandwidth_bytes_per_s = 1e10, peak_flops_per_s = { fp32 = 5e10 } }
[[levels]]
link = "eth10"
domain_size = 2
"""
_REGIONS = b"""
[regions]
table = "pairs.csv"
[[groups]]
region = "a"
device = "A100-SXM-80GB"
num_nodes = 1
[[groups]]
region = "b"
device = "A100-SXM-80GB"
num_nodes = 1
"""
_PAIRS = b"src,dst,throughput_gbit_per_s,min_rtt_ms,egress_usd_per_gb,streams\na,b,4,50,0.02,\nb,a,5,,0.05,8\n"
_WORKFLOW = """
algorithm = "{algorithm}"
[actor]
model = "{model}"
[reference]
model = "actor"
{critic}[reward]
function = "rewards.py:count"
[batch]
prompts = 8
responses = 4
prompt_len = 15
{lengths}
max_len = 64
[policy]
staleness = {staleness}
placement = "{placement}"
[engines]
precision = "fp32"
generation = "meshwright"
"""
_NAMED = _WORKFLOW.format(
    algorithm="grpo", model="smollm2-135m", critic="", lengths="mean_len = 20", staleness=0, placement="colocated"
)
_FILES = _WORKFLOW.format(
    algorithm="ppo",
    model="config.json",
    critic='[critic]\nmodel = "actor"\n',
    lengths='lengths = "lengths.txt"',
    staleness=1,
    placement="auto",
)
_LOAD_TESTS = (
    b"model,gpu,engine,mode,gemm_dtype,isl,osl,concurrency,gpus,tp,ttft_ms,tpot_ms,output_tokens_per_s_per_gpu\n"
    b"llama-3.1-8b,H100-SXM-80GB,vllm,agg,fp8,128,64,8,1,1,30,8,900\n"
    b"llama-3.1-8b,H200-SXM-141GB,trtllm,agg,bf16,128,64,16,2,2,40,9,800\n"
)
_ADAPTER = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
GZIP_CSV = mutations.Form(
    "gzip",
    lambda data: mutations.CSV.parse(gzip.decompress(data)),
    lambda tree: gzip.compress(mutations.CSV.render(tree)),
)


def documents(run: Callable[[Sequence[str], Path], Any]) -> dict[str, Document]:
    """Return the documents by name; ``run`` runs a command line in a folder, for plans that commands write."""
    found = {name: Document(target.suffix, target.documents(), target.form) for name, target in TARGETS.items()}
    found |= {
        "moe": Document(".json", [found["config"].variants[1]], mutations.JSON),
        "plain": Document(".json", [json.dumps(LLAMA | {"rope_scaling": None}).encode()], mutations.JSON),
        "loads-moe": Document(".npz", [npz(load=np.arange(1, 25, dtype=np.float64).reshape(3, 8))], mutations.ZIP),
        "requests": Document(".csv", [_REQUESTS], mutations.CSV),
        "requests-gz": Document(".csv.gz", [gzip.compress(_REQUESTS)], GZIP_CSV),
        "lengths-gz": Document(".txt.gz", [gzip.compress(b"64\n12\n7\n63\n" * 4)], GZIP_CSV),
        "regions": Document(".toml", [_REGIONS], mutations.TOML),
        "pairs": Document(".csv", [_PAIRS], mutations.CSV),
        "workflow": Document(".toml", [_NAMED.encode()], mutations.TOML),
        "workflow-files": Document(".toml", [_FILES.encode()], mutations.TOML),
        "prompts": Document(
            ".jsonl", [b'{"prompt": [1, 2, 3], "answer": "4"}\n{"prompt": [5]}\n' * 4], mutations.JSON_LINES
        ),
        "load-tests": Document(".csv", [_LOAD_TESTS], mutations.CSV),
        "adapter": Document(".json", [json.dumps(_ADAPTER).encode()], mutations.JSON),
        "lengths": Document(".txt", [b"64\n12\n7\n63\n33\n40\n21\n5\n" * 4], None),
        "batches": Document(
            ".json", [json.dumps(_BATCH).encode(), json.dumps([_BATCH, _BATCH]).encode()], mutations.JSON
        ),
        "machines": Document(".csv", [b"trace,time_s,available\na,0,2\na,3600,1\na,7200,2\na,9000,2\n"], mutations.CSV),
    }
    plans = {
        "sharded": small_plans()[1],
        "measured": measured_plan(),
        "trainable": make_plan(
            tiny_model(num_blocks=2, vocab_size=256), Layout(dp_shard=2, zero_stage=1), workload=STEP
        ),
    }
    found |= {
        name: Document(".json", [plan.model_dump_json().encode()], mutations.JSON) for name, plan in plans.items()
    }
    folder = Path(tempfile.mkdtemp(prefix="documents-"))
    (folder / "loads.csv").write_text("1,2,3,4,5,6\n6,5,4,3,2,1\n")
    for name in ("plain", "moe"):
        (folder / f"{name}.json").write_bytes(found[name].variants[0])
        run(("plan", f"{name}.json", "--serve", *_SMALL_SERVE.split(), "--out", f"{name}-serving.json"), folder)
    train = f"{_SMALL} --precision bf16-mixed --engine megatron --out megatron.json"
    run(("plan", "plain.json", *train.split()), folder)
    run(("experts", "place", "loads.csv", "--num-gpus", "2", "--num-slots", "8", "--out", "made.npz"), folder)
    (folder / "cpus.toml").write_bytes(_CPUS)
    for name, cluster, engine in (("rl-plan", "2xH100-SXM-80GB", "vllm"), ("rl-own", "cpus.toml", "meshwright")):
        # What runs has a model of a few kilobytes: the limit of memory is that of the command.
        model = "plain.json" if name == "rl-own" else "smollm2-135m"
        (folder / "rl.toml").write_text(_NAMED.replace("meshwright", engine).replace("smollm2-135m", model))
        run(("plan-rl", "rl.toml", "--cluster", cluster, "--time-limit-s", "5", "--out", f"{name}.json"), folder)
        found[name] = Document(".json", [(folder / f"{name}.json").read_bytes()], mutations.JSON)
    serving = [path.read_bytes() for path in sorted(folder.glob("*-serving.json"))]
    found["serving"] = Document(".json", serving, mutations.JSON)
    found["plan-megatron"] = Document(".json", [(folder / "megatron.json").read_bytes()], mutations.JSON)
    found["made-npz"] = Document(".npz", [(folder / "made.npz").read_bytes()], mutations.ZIP)
    shutil.rmtree(folder)
    return found
