"""Every reader of files that others write: a few valid documents of each, and what is done with one.

A reader gives a value or raises one of our errors; anything else is a bug. What it read is used once as a command would, because a
value that nothing can be computed with is no better than a traceback.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mutations
import numpy as np
import torch
import yaml
from meshwright.cli.show.generation import generation_table
from meshwright.cost_models.pipeline.orders import from_torch_csv, to_torch_csv
from meshwright.cost_models.pipeline.simulation import pipeline_order
from meshwright.engines import ENGINES, export, read_configuration
from meshwright.engines.launch.job import Given
from meshwright.engines.launch.read import read_job
from meshwright.planner import estimate, plan
from meshwright.planner.expert_files import read_loads, read_placement, read_trace
from meshwright.planner.request import PlanRequest
from meshwright.planner.timeline import timeline
from meshwright.profilers.files import compare, merge_profiles, summary
from meshwright.profilers.profiled_cluster import profiled_cluster
from meshwright.runtime.job.rendezvous import slurm_rendezvous
from meshwright.runtime.training.checkpoint import CheckpointInfo, SafeReader
from meshwright.runtime.training.data_files import find_text, make_token_file, open_token_files
from meshwright.runtime.weights.load import find_weights
from meshwright.schema import ClusterSpec, Layout, MeshwrightError, ModelSpec, Plan, TrainingPlan, Workload
from meshwright.schema.generation import GenerationPlan
from meshwright.schema.layout import check_fields, format_assignments, parse_assignments
from meshwright.schema.offers import offers_from_file
from meshwright.schema.offload import OffloadSchedule
from meshwright.schema.profile import CollectivePoint, HostCopyPoint, Machine, MatmulPoint, Profile
from meshwright.schema.task import Generation, parse_training
from meshwright.validation import predict, read_groups, read_runs
from meshwright.validation.run_calibration import calibrate_from_runs, read_run
from plans import cpu_cluster, make_plan, tiny_model, with_offload
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

MOST_DEVICES = 64
"""Larger clusters are read but not planned for."""

STEP = Workload(seq_len=64, global_batch_size=8, precision="fp32")
RULED = "rows and numbers"


@dataclass(frozen=True)
class Target:
    """A reader: documents by their suffix, and what is done with a file of one."""

    suffix: str
    documents: Callable[[], list[bytes]]
    read: Callable[[Path], Any]
    form: mutations.Form | None = None


def attempt(target: Target, data: bytes, folder: Path) -> MeshwrightError | None:
    """Read a document as the target does; the error where it refuses."""
    path = folder / f"document{target.suffix}"
    path.write_bytes(data)
    try:
        target.read(path)
    except MeshwrightError as error:
        str(error).encode("utf-8", "backslashreplace")
        return error
    return None


def refusals(*calls: Callable[[], Any]) -> None:
    """Each of several things done with a value; what one refuses does not keep the others from being tried."""
    for call in calls:
        try:
            call()
        except MeshwrightError as error:
            str(error)


# --- models, clusters, offers -------------------------------------------------------------------------------------

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000, "rope_theta": 1e4,
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 1024},
}  # fmt: skip
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 128,
    "moe_intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8,
    "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 1000, "decoder_sparse_step": 1, "mlp_only_layers": [0],
    "norm_topk_prob": True,
}  # fmt: skip

CLUSTER = b"""
name = "lab"
reserved_gib = 2.5
[[groups]]
device = "H100-SXM-80GB"
num_nodes = 2
devices_per_node = 4
host_memory_gib = 512
[[levels]]
link = "nvlink4"
domain_size = 4
[[levels]]
link = "ib400"
domain_size = 8
"""
OWN_CLUSTER = b"""
bandwidth_matrix = [[1e9, 2e9], [2e9, 1e9]]
reserved_bytes = 1000000
[[groups]]
num_nodes = 2
devices_per_node = 1
[groups.device]
name = "own"
vendor = "other"
memory_gib = 16
memory_bandwidth_bytes_per_s = 1e12
peak_flops_per_s = { bf16 = 1e14, fp32 = 1e13 }
[[levels]]
link = { name = "wire", bandwidth_bytes_per_s = 1e9, latency_s = 1e-5 }
domain_size = 2
"""
MIXED = b"""
[[groups]]
device = "H100-SXM-80GB"
num_nodes = 1
devices_per_node = 4
[[groups]]
device = "A100-SXM-40GB"
num_nodes = 1
devices_per_node = 4
"""
OFFERS = b"""
[[offers]]
device = "A100-SXM-80GB"
num_nodes = 4
link = "ib200"
price_per_device_hour = 1.5
[[offers]]
name = "other"
cluster = "8xH100-SXM-80GB"
price_per_device_hour = 3
"""


def _json(*documents: Any) -> list[bytes]:
    return [json.dumps(document).encode() for document in documents]


def _model(path: Path) -> None:
    model = ModelSpec.resolve(str(path))
    assert 0 < model.num_active_params <= model.num_params
    workload = Workload(seq_len=min(64, model.max_seq_len), global_batch_size=8)
    refusals(lambda: estimate(model, ClusterSpec.parse("1xH100-SXM-80GB"), workload, Layout()))


def _cluster(cluster: ClusterSpec) -> None:
    assert cluster.levels[-1].domain_size == cluster.num_devices
    assert cluster.memory_budget_bytes > 0
    if cluster.num_devices > MOST_DEVICES:
        return
    layout = Layout(dp_shard=cluster.num_devices, zero_stage=3 if cluster.num_devices > 1 else 0)
    work = STEP.replace(global_batch_size=cluster.num_devices)
    for precision in ("fp32", "bf16-mixed"):
        step = work.replace(precision=precision)
        refusals(lambda step=step: estimate(tiny_model(), cluster, step, layout))  # type: ignore[misc]


def _offers(path: Path) -> None:
    for offer in offers_from_file(str(path)):
        sizes = offer.sizes
        _cluster(offer.with_size(sizes[0]))
        _cluster(offer.with_size(sizes[len(sizes) // 2]))


def _text(path: Path) -> None:
    text = _decoded(path)
    if not text.strip().startswith("local"):  # measures this machine
        _cluster(ClusterSpec.parse(text))


# --- plans, profiles, runs ----------------------------------------------------------------------------------------


@cache
def small_plans() -> tuple[TrainingPlan, ...]:
    """A pipeline, a sharded one, one of experts, one with offload, one with an order of its own."""
    model = tiny_model(num_blocks=4)
    pipeline = make_plan(model, Layout(pp=2, dp_shard=2, zero_stage=1, recompute="mixed"), workload=STEP)
    sharded = make_plan(model, Layout(dp_shard=2, zero_stage=3), workload=STEP)
    schedule = OffloadSchedule(host_optimizer_layers=(1, 2), host_bytes=1000, host_budget_bytes=10**9)
    offloads = ("none", "activations", "boundary", "none", "none", "none")
    given = ("0F0,0B0", "1F0,1B0")
    order = make_plan(
        model, Layout(pp=2, schedule="synthesised"), workload=STEP.replace(global_batch_size=1), pipeline_order=given
    )
    return pipeline, sharded, with_offload(sharded, schedule, offloads)[1], order


def _plan(path: Path) -> None:
    plan = TrainingPlan.load(path)
    assert TrainingPlan.model_validate_json(plan.model_dump_json()) == plan
    if plan.cluster.num_devices > MOST_DEVICES or plan.num_microbatches > 100:
        return
    engines = [lambda engine=engine: export(plan, engine) for engine in ENGINES]
    refusals(lambda: timeline(plan), lambda: pipeline_order(plan), lambda: PlanRequest.from_plan(plan), *engines)


@cache
def small_generation() -> GenerationPlan:
    """A plan of generation, of which some layers lie on the host."""
    cluster = ClusterSpec.parse("1xH100-SXM-80GB")
    group = cluster.groups[0]
    device = group.device.replace(memory_bytes=cluster.reserved_bytes + 300 * 2**20)
    cluster = cluster.replace(groups=(group.replace(device=device, host_memory_bytes=2**30),))
    return plan(tiny_model(num_blocks=4), cluster, Generation(prompt_len=16, generate_len=4))


def _generation(path: Path) -> None:
    found = Plan.load(path)
    assert GenerationPlan.model_validate_json(found.model_dump_json()) == found
    generation_table(found)


def _layout_text(path: Path) -> None:
    fields = parse_assignments(_decoded(path))
    assert parse_assignments(format_assignments(fields)) == fields
    check_fields(fields)
    refusals(lambda: estimate(tiny_model(), cpu_cluster(2), STEP, Layout(**fields)))


def _training_text(path: Path) -> None:
    work = STEP.replace(**parse_training(_decoded(path)))
    refusals(lambda: estimate(tiny_model(), cpu_cluster(2), work, Layout(dp_shard=2)))


def _decoded(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "replace")


@cache
def small_profile() -> Profile:
    """Enough of a profile for a cluster of two nodes of two ranks."""
    machine = Machine(
        device="x", num_devices=4, num_nodes=2, host_memory_bytes=2**34, backend="gloo", torch="2", python="3"
    )
    collectives = [
        CollectivePoint(op=op, group_size=2 * nodes, num_nodes=nodes, size_bytes=size, time_s=1e-5 + size / 1e9)
        for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
        for nodes in (1, 2)
        for size in (2**10, 2**20, 2**26)
    ]
    copies = [
        HostCopyPoint(direction=way, host_memory="pinned", size_bytes=2**26, devices_at_once=1, time_s=1e-2)
        for way in ("to_host", "to_device")
    ]
    sizes = [(64, 64, 64), (512, 512, 512), (2048, 2048, 2048)]
    return Profile(
        machine=machine, created="2026-01-01", duration_s=1.0, memory_bandwidth_bytes_per_s=1e10,
        device_memory_bytes=2**33, collectives=tuple(collectives), host_copies=tuple(copies),
        matmuls=tuple(MatmulPoint(dtype="fp32", m=m, n=n, k=k, time_s=1e-6 + 2 * m * n * k / 1e11) for m, n, k in sizes),
        node_bandwidth_bytes_per_s=((0.0, 1e9), (1e9, 0.0)),
    ).sealed()  # fmt: skip


def _profile(path: Path) -> None:
    profile, good = Profile.load(path), small_profile()
    refusals(
        lambda: summary(profile),
        lambda: compare(profile, good),
        lambda: merge_profiles([profile, good]),
        lambda: _cluster(profiled_cluster(profile)),
        lambda: profile.is_altered,
    )


@cache
def _measured_plan() -> TrainingPlan:
    from meshwright.planner.planned_stages import reestimate

    plan = small_plans()[1]
    return plan.replace(cluster=cpu_cluster(2), estimate=reestimate(plan, cpu_cluster(2)))


def _metrics() -> list[bytes]:
    plan = _measured_plan()
    found, parts = plan.estimate, plan.estimate.breakdown_s
    measured = {
        "step_time_s": found.step_time_s,
        "peak_reserved_bytes": found.peak_reserved_bytes,
        "parts_s": {"compute": parts.compute, "communication": parts.dp, "optimizer": parts.optimizer},
    }
    predicted = {"step_time_s": found.step_time_s, "tokens_per_s": plan.workload.tokens_per_step / found.step_time_s}
    return [
        json.dumps({"step": 1, "loss": 2.0}).encode() + b"\n" + _json({"predicted": predicted, "measured": measured})[0]
    ]


def _calibrate(path: Path) -> None:
    plan = path.with_name("measured_plan.json")
    if not plan.exists():
        _measured_plan().save(plan)
    run = read_run(plan, path)
    calibrate_from_runs([run], run.plan.cluster)


_RUNS = (
    "id,gpu_type,n_gpus,model,layers,hidden,heads,kv_heads,ffn,vocab,experts,topk,seq_len,global_batch,micro_batch,dp,tp,pp,vpp,"
    "cp,ep,sharding_class,recompute_class,precision_class,offload,iter_time_s,framework,gpus_per_node,notes\n"
    "a,A100-SXM-80GB,8,GPT-1B,4,512,8,8,2048,50304,,,1024,16,1,2,2,2,1,1,1,zero1,full,bf16,none,1.5,Megatron-LM,8,\n"
    "b,H100-SXM-80GB,4,Mixtral,4,512,8,4,1024,32000,8,2,2048,8,1,4,1,1,2,1,4,zero3,selective,fp8,optimizer,0.5,DeepSpeed,4,x\n"
)


def _runs(path: Path) -> None:
    predict(read_runs(path))


# --- experts ------------------------------------------------------------------------------------------------------


def npy(array: Any, **kwargs: Any) -> bytes:
    """An .npy file."""
    out = io.BytesIO()
    np.save(out, np.asarray(array), **kwargs)
    return out.getvalue()


def npz(**arrays: Any) -> bytes:
    """An .npz file."""
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)
    return out.getvalue()


def pt(value: Any) -> bytes:
    """What torch.save writes."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


LOADS = np.arange(1, 13, dtype=np.float64).reshape(2, 6)
TRACE = np.arange(24).reshape(4, 2, 3) % 6
SLOTS = [[0, 1, 2, 3, 4, 5, 0, 1], [0, 1, 2, 3, 4, 5, 2, 3]]
ASCEND = {
    "moe_layer_count": 1,
    "layer_list": [
        {"layer_id": 0, "device_count": 2, "device_list": [
            {"device_id": 0, "device_expert": [0, 1]}, {"device_id": 1, "device_expert": [1, 2]}]}
    ],
}  # fmt: skip
TENSORRT = (
    b"num_slots: 4\ninitial_global_assignments:\n  0: [0, 1, 2, 3]\n  1: [3, 2, 1, 0]\nlayer_updates_per_iter: 0\n"
)


def _loads(path: Path) -> None:
    read_loads([path])


def _placement(path: Path) -> None:
    refusals(lambda: read_placement(path), lambda: read_placement(path, num_gpus=2))


# --- Slurm's variables --------------------------------------------------------------------------------------------

SLURM = (
    b"SLURM_JOB_ID=12\nSLURM_STEP_ID=0\nSLURM_STEP_NUM_NODES=2\nSLURM_STEP_NUM_TASKS=2\nSLURM_NODEID=1\n"
    b"SLURM_STEP_NODELIST=gpu[003-007,12],login\nMESHWRIGHT_SECRET=what all nodes know\n"
)


def _slurm(path: Path) -> None:
    pairs = (line.partition("=") for line in _decoded(path).splitlines())
    slurm_rendezvous({name: value for name, equals, value in pairs if equals})


# --- launch scripts ----------------------------------------------------------------------------------------------------

LAUNCHES = [
    b"""#!/bin/bash
ARGS=(--tensor-model-parallel-size ${TP:-2} --num-layers 4 --hidden-size "$((64 * 2))")
if [[ $NNODES -gt 1 && -n "$X" ]]; then ARGS+=(--swiglu) ; elif [ -f a ]; then :; else export Y=1; fi
for size in 1 2; do echo "$size" > log; done
case "$1" in a|b) M=1 ;; *) M=2 ;; esac
torchrun --nproc_per_node 8 pretrain_gpt.py ${ARGS[@]} --micro-batch-size $M --seq-length 128 2>&1 | tee log
""",
    b"""set -e
run() { deepspeed --num_gpus=8 train.py --deepspeed <(cat ds.json) "$@"; }
while read -r line; do N=$(wc -l < file); done <<EOF
some $text
EOF
until false; do break; done
run --model_name_or_path gpt2 `echo --bf16` ${N%%.*} {1..3} &
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 128 --num-attention-heads 4 \\
  --micro-batch-size $((4 / 2)) --seq-length 128 &
""",
]


def _launch(path: Path) -> None:
    read_job(path, Given(num_devices=8, model=tiny_model(), seq_len=128, global_batch_size=8))


# --- text, token files, weights, checkpoints ----------------------------------------------------------------------------


def _tokens(path: Path) -> None:
    found = open_token_files([path])
    found.tokens(0, min(8, found.num_tokens))
    assert found.fingerprint


TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None, "decoder": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "added_tokens": [{"id": 0, "content": "<eos>", "special": True, "single_word": False, "lstrip": False, "rstrip": False,
                      "normalized": False}],
    "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
              "fuse_unk": False, "byte_fallback": False, "vocab": {"<eos>": 0, "a": 1, "b": 2, "ab": 3}, "merges": [["a", "b"]]},
}  # fmt: skip


def _tokenizer(path: Path) -> None:
    text, out = path.with_name("corpus.txt"), path.with_name("tokens.bin")
    text.write_text("ab a b\nabab\n", encoding="utf-8")
    make_token_file(find_text([text]), out, tokenizer=path, end_token="<eos>")
    _tokens(out)


def _corpus(path: Path) -> None:
    corpus, out = find_text([path]), path.with_name("tokens.bin")
    assert len(corpus.tokens(0, corpus.num_tokens)) == corpus.num_tokens
    make_token_file(corpus, out)
    _tokens(out)


def _token_file(width: int = 2, count: int = 4, largest: int = 9) -> bytes:
    from meshwright.runtime.training import data_files

    ids = np.arange(count, dtype=f"<u{width}").tobytes()
    return data_files._HEADER.pack(data_files.MAGIC, data_files._VERSION, width, count, largest) + ids


def safetensors(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


_TENSOR = {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}, "__metadata__": {"format": "pt"}}


def _weights(path: Path) -> None:
    folder = path.parent / "weights"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(path.read_bytes())
    find_weights(folder)


def _weights_index(path: Path) -> None:
    folder = path.parent / "indexed"
    folder.mkdir(exist_ok=True)
    (folder / "part-1.safetensors").write_bytes(safetensors(_TENSOR, bytes(16)))
    (folder / "model.safetensors.index.json").write_bytes(path.read_bytes())
    find_weights(folder)


def index_of(**fields: Any) -> bytes:
    """The pickled index of a checkpoint with one tensor."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    chunk = ChunkStorageMetadata(offsets=torch.Size([0]), sizes=torch.Size([4]))
    tensor = TensorStorageMetadata(
        properties=TensorProperties(dtype=torch.float32), size=torch.Size([4]), chunks=[chunk]
    )
    where = {MetadataIndex("w", torch.Size([0]), 0): _StorageInfo("__0_0.distcp", 0, 16)}
    return pickle.dumps(Metadata(**{"state_dict_metadata": {"w": tensor}, "storage_data": where, **fields}))


def _checkpoint_index(path: Path) -> None:
    folder = path.parent / "checkpoint"
    folder.mkdir(exist_ok=True)
    (folder / ".metadata").write_bytes(path.read_bytes())
    SafeReader(folder).read_metadata()


# --- engines' configurations --------------------------------------------------------------------------------------


def _exported(suffix: str) -> Callable[[], list[bytes]]:
    """What export writes for any engine with this suffix."""

    def documents() -> list[bytes]:
        found = []
        step = STEP.replace(precision="bf16-mixed")
        for layout in (
            Layout(dp_shard=2, zero_stage=3),
            Layout(tp=2, dp_shard=2, zero_stage=1, recompute="full"),
            Layout(pp=2),
        ):
            plan = make_plan(tiny_model(num_blocks=4), layout, workload=step)
            for made in _made(plan):
                found += [text.encode() for name, text in made.files if name.endswith(suffix)]
        return found

    return documents


def _made(plan: TrainingPlan) -> Iterator[Any]:
    for engine in ENGINES:
        for fixed in (plan, plan.replace(workload=plan.workload.replace(engine="megatron"))):
            try:
                yield export(fixed, engine)
            except MeshwrightError:
                continue


def _toml() -> list[bytes]:
    axes = "data_parallel_shard_degree = 2\ntensor_parallel_degree = 2\npipeline_parallel_degree = 2\n"
    training = "local_batch_size = 4\nseq_len = 2048\n"
    return [f"[training]\n{training}[parallelism]\n{axes}[activation_checkpoint]\nmode = 'full'\n".encode()]


TITAN = b"""
def plan(config):
    config.training.local_batch_size = 4
    config.training.seq_len = 2048
    config.parallelism.data_parallel_shard_degree = 2
    config.parallelism.tensor_parallel_degree = 2
    config.parallelism.pipeline_parallel_schedule = "1F1B"
    config.activation_checkpoint = FullAC.Config()
"""


def _configuration(path: Path) -> None:
    model = tiny_model(num_blocks=4)
    for devices in (None, 8):
        refusals(lambda devices=devices: read_configuration(path, num_devices=devices, model=model))  # type: ignore[misc]
    for engine in ENGINES:
        refusals(lambda engine=engine: read_configuration(path, engine=engine, num_devices=4))


def _as_yaml(tree: Any) -> bytes:
    return yaml.safe_dump(tree).encode("utf-8", "replace")


def _from_yaml(data: bytes) -> Any:
    try:
        return yaml.safe_load(data)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


YAML = mutations.Form("yaml", _from_yaml, _as_yaml)


def _schedule(path: Path) -> None:
    order = from_torch_csv(_decoded(path))
    assert from_torch_csv(to_torch_csv(order)) == tuple(order)


TARGETS: dict[str, Target] = {
    "engine-yaml": Target(".yaml", _exported(".yaml"), _configuration, YAML),
    "config": Target(".json", lambda: _json(LLAMA, MOE, json.loads(tiny_model().model_dump_json())), _model, mutations.JSON),
    "cluster": Target(
        ".toml",
        lambda: [CLUSTER, OWN_CLUSTER, MIXED],
        lambda path: _cluster(ClusterSpec.parse(str(path))),
        mutations.TOML,
    ),
    "cluster-text": Target(".txt", lambda: [b"8xH100-SXM-80GB", b"2x4xA100-SXM-80GB/ib200", b"64xH200"], _text),
    "offers": Target(".toml", lambda: [OFFERS], _offers, mutations.TOML),
    "plan": Target(
        ".json", lambda: [plan.model_dump_json().encode() for plan in small_plans()], _plan, mutations.JSON
    ),
    "generation": Target(".json", lambda: [small_generation().model_dump_json().encode()], _generation, mutations.JSON),
    "layout-text": Target(
        ".txt",
        lambda: [b"tp=2, zero=1 micro_batch=2 recompute=fullx0.5 1f1b", b"pp=2,sequence_parallel=true,offload=none"],
        _layout_text,
    ),
    "training-text": Target(".txt", lambda: [b"full", b"lora:r=16,targets=qkv+out,frozen=nf4,dropout=false"], _training_text),
    "slurm": Target(".txt", lambda: [SLURM], _slurm),
    "profile": Target(".json", lambda: [small_profile().model_dump_json().encode()], _profile, mutations.JSON),
    "metrics": Target(".jsonl", _metrics, _calibrate, mutations.JSON_LINES),
    "runs": Target(".csv", lambda: [_RUNS.encode()], _runs, mutations.CSV),
    "groups": Target(".csv", lambda: [b"decision_group,x\na,1\nb,2\n"], read_groups, mutations.CSV),
    "schedule": Target(".csv", lambda: [b"0F0,0F1,0B0,0B1\n1F0,1I0,1W0\n", b"(0F1;3B0)OVERLAP_F_B,\n"], _schedule, mutations.CSV),
    "loads-npy": Target(".npy", lambda: [npy(LOADS), npy(LOADS[0].astype(np.int32))], _loads),
    "loads-npz": Target(".npz", lambda: [npz(load=LOADS), npz(routed_experts=TRACE)], _loads, mutations.ZIP),
    "loads-csv": Target(".csv", lambda: [b"1,2,3\n4,5,6\n", b"layer,expert,load\n0,0,5\n0,1,3\n"], _loads, mutations.CSV),
    "loads-json": Target(
        ".json", lambda: _json(LOADS.tolist(), {"logical_count": LOADS.tolist()}, {"routed_experts": TRACE.tolist()}),
        _loads, mutations.JSON,
    ),
    "loads-jsonl": Target(
        ".jsonl", lambda: [_json({"routed_experts": TRACE.tolist()})[0] * 1], _loads, mutations.JSON_LINES
    ),
    "loads-pt": Target(
        ".pt", lambda: [pt(torch.tensor(LOADS)), pt({"logical_count": torch.ones(2, 3, dtype=torch.int64)})], _loads, mutations.ZIP
    ),
    "trace": Target(".npz", lambda: [npz(routed_experts=TRACE), npz(trace=TRACE.astype(np.uint8))], read_trace, mutations.ZIP),
    "placement-npz": Target(
        ".npz", lambda: [npz(x=np.array(SLOTS)), npz(x=np.eye(4, dtype=int)[:, None, :])], _placement, mutations.ZIP
    ),
    "placement-json": Target(".json", lambda: _json({"physical_to_logical_map": SLOTS}, ASCEND), _placement, mutations.JSON),
    "placement-yaml": Target(".yaml", lambda: [TENSORRT], _placement),
    "text": Target(".txt", lambda: [b"some text\nof two lines", "\u00e9".encode()], _corpus),
    "tokenizer": Target(".json", lambda: _json(TOKENIZER), _tokenizer, mutations.JSON),
    "tokens-bin": Target(".bin", lambda: [_token_file(), _token_file(width=4)], _tokens),
    "tokens-npy": Target(".npy", lambda: [npy(np.arange(5, dtype=np.uint16)), npy(np.arange(3))], _tokens),
    "weights": Target(".safetensors", lambda: [safetensors(_TENSOR, bytes(16))], _weights, mutations.SAFETENSORS),
    "weights-index": Target(
        ".json", lambda: _json({"weight_map": {"a": "part-1.safetensors"}}), _weights_index, mutations.JSON
    ),
    "checkpoint": Target(
        ".json",
        lambda: [CheckpointInfo(step=3, samples=4, model=tiny_model()).model_dump_json().encode()],
        CheckpointInfo.load,
        mutations.JSON,
    ),
    "checkpoint-index": Target(".metadata", lambda: [index_of()], _checkpoint_index),
    "engine-toml": Target(".toml", _toml, _configuration, mutations.TOML),
    "engine-py": Target(".py", lambda: [TITAN], _configuration),
    "engine-sh": Target(".sh", _exported(".sh"), _configuration),
    "engine-json": Target(".json", _exported(".json"), _configuration, mutations.JSON),
    "launch-script": Target(".sh", lambda: LAUNCHES, _launch),
}  # fmt: skip
"""Readers by name."""
