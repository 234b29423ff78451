"""Valid lines of every command, with the documents that they read: `{plan}` stands for a file of the documents of that name."""

from __future__ import annotations

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
estimate {{config}} {_TRAIN} --layout dp_shard=8
estimate {{config}} {_SMALL} --layout tp=2,micro_batch_size=2,recompute=full
estimate {{config}} {_SMALL} --layout dp_shard=2 --offload auto --host-memory-gib 64 --json
estimate {{moe}} {_SMALL} --layout dp_shard=2,ep=2
explain {{plan}} {_LIMIT}
explain {{plan}} {_LIMIT} --why-not tp=2 --json
report {{plan}} --report page.html --trace trace.json --explain-limit-s 1
rehearse {{plan}} --rank 0
replay {{serving}} --requests {{requests}}
replay {{serving}} --requests {{requests}} --concurrency 4 --json
replay {{plan}} --trace {{machines}}
apply {{trainable}} --steps 1
serve {{serving}} --host 256.0.0.1 --port 0 --tokenizer .
goodput {{plan}} --mtbf-hours-per-device 5000 --save-s 20 --restart-s 60
goodput {{sharded}} --mtbf-hours-per-device 500 --save-s 20 --restart-s 60 --repair-hours 3 --tolerate 1 --json
batch {{sharded}} --lengths {{lengths}}
batch {{batches}} --plot picture.svg
batch {{lengths}} --pack 4096
export {{plan}} --to torchtitan --out made
export {{plan-megatron}} --to megatron --out made
export {{plan-megatron}} --to nemo --out made
export {{plan}} --to deepspeed --out made
export {{sharded}} --to accelerate --out made
export {{plan}} --to kubernetes --out made
export {{serving}} --to vllm --out made
export {{serving}} --to dynamo --out made
import {{engine-sh}} --model {{config}} --num-devices 8
import {{engine-yaml}} --num-devices 8
import {{engine-json}} --num-devices 2 --json
import {{engine-toml}} --num-devices 8
import {{engine-py}} --num-devices 8
compare {{engine-sh}} {_TRAIN} --model {{config}} {_LIMIT}
compare {{engine-toml}} --cluster 8xH100-SXM-80GB --global-batch-size 8 --seq-len 64 --model {{config}} {_LIMIT}
recipes --only 405B
calibrate {{measured}} {{metrics}} --out made.json
validate {{runs}}
validate {{runs}} --groups {{groups}} --by tp --json
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
_SERVE = "--serve --cluster 2xH100-SXM-80GB --requests isl=32,osl=16,rate=2 --ttft 1s@p90 --time-limit-s 5"


def documents(run: Callable[[Sequence[str], Path], Any]) -> dict[str, Document]:
    """Return the documents by name; ``run`` runs a command line in a folder, for plans that commands write."""
    found = {name: Document(target.suffix, target.documents(), target.form) for name, target in TARGETS.items()}
    found |= {
        "moe": Document(".json", [found["config"].variants[1]], mutations.JSON),
        "plain": Document(".json", [json.dumps(LLAMA | {"rope_scaling": None}).encode()], mutations.JSON),
        "loads-moe": Document(".npz", [npz(load=np.arange(1, 25, dtype=np.float64).reshape(3, 8))], mutations.ZIP),
        "requests": Document(".csv", [_REQUESTS], mutations.CSV),
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
        run(("plan", f"{name}.json", *_SERVE.split(), "--out", f"{name}-serving.json"), folder)
    train = f"{_SMALL} --precision bf16-mixed --engine megatron --out megatron.json"
    run(("plan", "plain.json", *train.split()), folder)
    run(("experts", "place", "loads.csv", "--num-gpus", "2", "--num-slots", "8", "--out", "made.npz"), folder)
    serving = [path.read_bytes() for path in sorted(folder.glob("*-serving.json"))]
    found["serving"] = Document(".json", serving, mutations.JSON)
    found["plan-megatron"] = Document(".json", [(folder / "megatron.json").read_bytes()], mutations.JSON)
    found["made-npz"] = Document(".npz", [(folder / "made.npz").read_bytes()], mutations.ZIP)
    shutil.rmtree(folder)
    return found
