"""Launch files of every engine as jobs; the files are written here, in the forms that users' files have."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.engines import export
from meshwright.engines.launch import Given, Job, read_job
from meshwright.schema import ConfigError, Layout, ModelSpec, Workload
from plans import make_plan

MEGATRON = """#!/bin/bash
#SBATCH --nodes=8
#SBATCH --gres=gpu:8
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-1}
TP=${TP:-2}   # tensor parallel
PP=2
SEQ=4096
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES
    --master_addr $(hostname)
)
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --seq-length $SEQ --max-position-embeddings 8192
    --position-embedding-type rope --swiglu --normalization RMSNorm
    --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0
)
TRAIN="--micro-batch-size 1 \\
    --global-batch-size $((NNODES * 32)) \\
    --lr 3e-4 --train-iters 100 --data-path $1"
PARALLEL_ARGS=(
    --tensor-model-parallel-size ${TP}
    --pipeline-model-parallel-size $PP
    # --context-parallel-size 2
)
if [ $TP -gt 1 ]; then PARALLEL_ARGS+=(--sequence-parallel); fi
if [ "$FP8" = "1" ]; then PARALLEL_ARGS+=("--fp8-format hybrid"); fi
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py "${MODEL_ARGS[@]}" $TRAIN ${PARALLEL_ARGS[@]} \\
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --tokenizer-type HuggingFaceTokenizer \\
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \\
    --rampup-batch-size 32 32 1000 --brand-new-switch 3
"""


def read(folder: Path, text: str, name: str = "launch.sh", *, devices: int = 64, **given: Any) -> Job:
    path = folder / name
    path.write_text(text)
    return read_job(path, Given(num_devices=devices, **given))


def facts(job: Job) -> dict[str, tuple[str, str, str]]:
    return {fact.setting: (fact.value, fact.place, fact.variable) for fact in job.facts}


def test_megatron_script_says_the_entire_job_and_where(tmp_path: Path) -> None:
    job = read(tmp_path, MEGATRON)
    assert (job.engine, job.model, job.num_devices) == ("megatron", ModelSpec.named("llama-3.1-8b"), 64)
    assert job.layout == Layout(tp=2, pp=2, dp_shard=16, zero_stage=1, recompute="full")
    assert job.workload == Workload(seq_len=4096, global_batch_size=256, engine="megatron")
    found = facts(job)
    assert found["--tensor-model-parallel-size"] == ("2", "launch.sh:6", "TP")
    assert found["--micro-batch-size"] == ("1", "launch.sh:21", "")
    assert found["--global-batch-size"][:2] == ("256", "launch.sh:22")
    assert found["--recompute-granularity"] == ("full", "launch.sh:33", "")
    assert "--context-parallel-size" not in found and "--fp8-format" not in found
    assert any(line.startswith("vocabulary 128256") for line in job.assumed)
    assert any(line.startswith("context_parallel_size 1") for line in job.assumed)
    assert job.unmodelled == ("--rampup-batch-size: costed at the full batch",)
    assert job.unknown == ("--brand-new-switch",) and {"--lr", "--data-path"} <= set(job.ignored)


def test_what_is_set_wins_over_the_script(tmp_path: Path) -> None:
    job = read(tmp_path, MEGATRON, sets={"TP": "4", "FP8": "1", "micro_batch_size": "2"})
    assert (job.layout.tp, job.layout.micro_batch_size, job.workload.precision) == (4, 2, "fp8")
    assert facts(job)["--set micro_batch_size"][1] == "command line"
    job = read(tmp_path, MEGATRON, sets={"TP": "4", "TYPO": "2"})
    assert "--set TYPO" in job.unknown and "--set TP" not in job.unknown


def test_the_clusters_devices_count(tmp_path: Path) -> None:
    job = read(tmp_path, MEGATRON, devices=128)
    assert job.layout.dp_shard == 32
    assert job.assumed[0] == "128 devices, as the cluster has: the file starts 64"
    with pytest.raises(ConfigError, match="does not divide 6 devices"):
        read(tmp_path, MEGATRON, devices=6)


@pytest.mark.parametrize(
    ("before", "after", "reason", "help_"),
    [
        ("PP=2", "PP=$STAGES", r"launch.sh:7: --pipeline-model-parallel-size is \$STAGES", "--set STAGES=VALUE"),
        ("PP=2", "PP=$(cat pp)", r"is \$\(cat pp\)", "--set pipeline_model_parallel_size=VALUE"),
        ("--num-layers 32", "", "--num-layers is missing", "--model"),
        ("--num-layers 32", "--num-layers 31", "vocabulary", "--set vocab_size=N"),
        ("torchrun", "echo", "starts no engine", "--from"),
        ("TP=${TP:-2}", "TP='2", "line 6", ""),
    ],
)
def test_what_is_open_is_named(tmp_path: Path, before: str, after: str, reason: str, help_: str) -> None:
    text = MEGATRON.replace(before, after)
    if before == "torchrun":
        text = "echo nothing\npython train.py --lr 1\n"
    with pytest.raises(ConfigError, match=reason) as raised:
        read(tmp_path, text)
    assert help_ in (raised.value.help or "")


def test_megatron_deepspeed_script_with_its_configuration_inside(tmp_path: Path) -> None:
    text = """
        MBS=2; GBS=2048; ZERO=0
        config="./ds.$SLURM_JOB_ID.json"
        cat <<EOT > $config
{ "train_micro_batch_size_per_gpu": $MBS, "zero_optimization": {"stage": $ZERO}, "bf16": {"enabled": true} }
EOT
        LAUNCHER="python -m torch.distributed.run --nproc_per_node 8 --nnodes $NODES"
        CMD="`pwd`/pretrain_gpt.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 12 \\
            --num-layers 70 --hidden-size 14336 --num-attention-heads 112 --seq-length 2048 \\
            --position-embedding-type alibi --checkpoint-activations --pad-vocab-size-to 250880 --bf16 \\
            --micro-batch-size $MBS --global-batch-size $GBS --deepspeed --deepspeed_config ${config} --zero-stage $ZERO"
        srun bash -c "$LAUNCHER --node_rank \\$SLURM_PROCID $CMD" 2>&1 | tee log
    """
    job = read(tmp_path, text, devices=384)
    assert job.layout == Layout(
        tp=4, pp=12, dp_shard=8, micro_batch_size=2, recompute="full", sequence_parallel=False, zero_stage=1
    )
    assert (job.workload.engine, job.workload.attention, job.workload.dropout) == ("deepspeed", "math", True)
    assert round(job.model.num_params / 1e9, 1) == 176.2
    assert any("BF16_Optimizer" in line for line in job.assumed)
    assert any("--nnodes $NODES" in line for line in job.assumed)


def test_experts_of_megatron(tmp_path: Path) -> None:
    model = ModelSpec.named("deepseek-v3")
    layout = Layout(tp=2, ep=4, dp_shard=8, zero_stage=1, pp=2)
    script = export(make_plan(model, layout, workload=Workload(seq_len=4096, global_batch_size=256)), "megatron").files[
        0
    ][1]
    job = read(tmp_path, script, devices=32)
    assert job.model.num_params == model.num_params and job.layout.ep == 4


def test_megatron_yaml_of_arguments(tmp_path: Path) -> None:
    text = (
        "ENV_VARS:\n  NCCL_ALGO: Ring\nMODEL_ARGS:\n  --num-layers: 32\n  --hidden-size: 4096\n  --ffn-hidden-size: 11008\n"
        "  --num-attention-heads: 32\n  --swiglu: true\n  --disable-bias-linear: true\n  --vocab-size: 32000\n"
        "  --position-embedding-type: rope\n  --seq-length: 2048\n  --micro-batch-size: 2\n  --global-batch-size: 64\n"
        "  --tensor-model-parallel-size: 2\n  --sequence-parallel: false\n  --bf16: true\n"
    )
    job = read(tmp_path, text, "model_config.yaml", devices=8)
    assert job.layout == Layout(tp=2, dp_replicate=4, micro_batch_size=2, sequence_parallel=False)
    assert facts(job)["MODEL_ARGS.--tensor-model-parallel-size"][1] == "model_config.yaml:15"


NEMO = """
torchrun --nproc_per_node=8 --nnodes=$N scripts/run.py --recipe llama31_70b_pretrain_config \\
    model.tensor_model_parallel_size=4 model.pipeline_model_parallel_size=4 \\
    model.virtual_pipeline_model_parallel_size=5 +model.context_parallel_size=2 \\
    train.micro_batch_size=1 train.global_batch_size=128 model.seq_length=8192
"""


def test_nemo_overrides(tmp_path: Path) -> None:
    job = read(tmp_path, NEMO)
    assert (job.engine, job.model.name, job.workload.engine) == ("nemo", "llama-3.1-70b", "nemo")
    assert job.layout == Layout(tp=4, pp=4, cp=2, dp_shard=2, num_model_chunks=5, zero_stage=1)
    assert facts(job)["model.tensor_model_parallel_size"] == ("4", "launch.sh:3", "")
    with pytest.raises(ConfigError, match="global_batch_size, seq_length are the recipe's own") as raised:
        read(tmp_path, NEMO.replace("train.global_batch_size=128 model.seq_length=8192", ""))
    assert raised.value.help == "add --set global_batch_size=N --set seq_length=N"


def test_nemo_yaml_of_a_recipe(tmp_path: Path) -> None:
    text = (
        "trainer:\n  devices: 8\n  num_nodes: 8\n  precision: bf16\nmodel:\n  micro_batch_size: 1\n  global_batch_size: 256\n"
        "  tensor_model_parallel_size: 2\n  pipeline_model_parallel_size: 1\n  encoder_seq_length: 4096\n  num_layers: 32\n"
        "  hidden_size: 4096\n  ffn_hidden_size: 11008\n  num_attention_heads: 32\n  activation: fast-swiglu\n  bias: false\n"
        "  position_embedding_type: rope\n  normalization: rmsnorm\n  share_embeddings_and_output_weights: false\n"
        "  vocab_size: 32000\n  activations_checkpoint_granularity: selective\n  optim:\n    name: distributed_fused_adam\n"
    )
    job = read(tmp_path, text, "gpt.yaml")
    assert job.model == ModelSpec.named("llama-2-7b") or job.model.num_params == 6738415616
    assert job.layout == Layout(tp=2, dp_shard=32, zero_stage=1, recompute="selective")


TOML = """
[model]
name = "llama3"
flavor = "70B"
[training]
local_batch_size = 1
seq_len = 8192
[parallelism]
data_parallel_shard_degree = 16
tensor_parallel_degree = 8
[activation_checkpoint]
mode = "full"
[compile]
enable = true
"""


def test_torchtitan_table_and_overrides(tmp_path: Path) -> None:
    job = read(tmp_path, TOML, "llama3_70b.toml")
    assert (job.model.name, job.workload.fusion) == ("llama-3.1-70b", "compiled")
    assert job.layout == Layout(tp=8, dp_shard=8, recompute="full") and job.workload.global_batch_size == 8
    assert facts(job)["parallelism.tensor_parallel_degree"][1] == "llama3_70b.toml:10"
    script = (
        'CONFIG_FILE=${CONFIG_FILE:-"./llama3_70b.toml"}\n'
        "torchrun --nproc_per_node=8 -m torchtitan.train --job.config_file ${CONFIG_FILE} \\\n"
        '  --parallelism.tensor_parallel_degree 4 --training.seq_len=4096 "$@"\n'
    )
    job = read(tmp_path, script, "run_train.sh")
    assert (job.layout.tp, job.layout.dp_shard, job.workload.seq_len, job.layout.recompute) == (4, 16, 4096, "full")


def test_torchtitan_module(tmp_path: Path) -> None:
    folder = tmp_path / "llama3"
    folder.mkdir()
    text = (
        "def llama3_8b() -> Trainer.Config:\n    return Trainer.Config(\n        model_spec=model_registry('8B'),\n"
        "        training=TrainingConfig(local_batch_size=2, seq_len=4096, steps=10),\n"
        "        parallelism=ParallelismConfig(tensor_parallel_degree=2),\n"
        "        activation_checkpoint=FullAC.Config(),\n    )\n\n\n"
        "def wide() -> Trainer.Config:\n    config = llama3_8b()\n    config.parallelism.tensor_parallel_degree = 4\n"
        "    return config\n"
    )
    job = read(folder, text, "config_registry.py", sets={"config": "wide"})
    assert job.model.name == "llama-3.1-8b"
    assert job.layout == Layout(tp=4, dp_shard=16, micro_batch_size=2, recompute="full")
    assert facts(job)["parallelism.tensor_parallel_degree"][1] == "config_registry.py:12"
    with pytest.raises(ConfigError, match="the configurations llama3_8b, wide"):
        read(folder, text, "config_registry.py")


def test_accelerate_with_its_command(tmp_path: Path) -> None:
    yaml = (
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_activation_checkpointing: true\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n"
        "  fsdp_version: 1\nmixed_precision: bf16\nnum_processes: 16\n"
    )
    (tmp_path / "fsdp.yaml").write_text(yaml)
    script = (
        "accelerate launch --config_file fsdp.yaml --num_processes 32 train.py --model_name_or_path meta-llama/Llama-3.1-8B \\\n"
        "  --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --max_seq_length 4096\n"
    )
    job = read(tmp_path, script)
    assert job.layout == Layout(dp_shard=64, zero_stage=2, micro_batch_size=2, recompute="full")
    assert (job.workload.global_batch_size, job.workload.seq_len, job.model.name) == (512, 4096, "llama-3.1-8b")
    plain = job.workload
    assert (plain.optimizer, plain.paged_states, plain.loss) == ("adamw", False, "engine")
    lean = read(tmp_path, script.rstrip() + " --optim paged_adamw_8bit --use_liger_kernel True\n").workload
    assert (lean.optimizer, lean.paged_states, lean.loss, lean.fusion) == ("adamw-8bit", True, "fused", "compiled")
    with pytest.raises(ConfigError, match="which model") as raised:
        read(tmp_path, yaml, "fsdp.yaml")
    assert "--model" in (raised.value.help or "")
    job = read(tmp_path, yaml, "fsdp.yaml", model=ModelSpec.named("qwen3-32b"), seq_len=2048, global_batch_size=128)
    assert job.layout.zero_stage == 2 and job.workload.global_batch_size == 128


def test_deepspeed_with_its_command(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 3, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": "auto"},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config, indent=1))
    script = (
        "deepspeed --num_nodes 8 --num_gpus 8 train.py --deepspeed ds.json --model_name_or_path Qwen/Qwen3-32B \\\n"
        "  --per_device_train_batch_size 1 --gradient_accumulation_steps 16 --gradient_checkpointing True \\\n"
        "  --bf16 True --model_max_length 8192\n"
    )
    job = read(tmp_path, script)
    assert job.layout == Layout(dp_shard=64, recompute="full", offload="optimizer")
    assert (job.workload.global_batch_size, job.workload.engine, job.workload.overlap) == (1024, "deepspeed", True)
    assert facts(job)["zero_optimization.stage"][:2] == ("3", "ds.json:5")
    plugin = (
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n  offload_optimizer_device: none\n"
        "mixed_precision: bf16\nnum_processes: 64\n"
    )
    job = read(tmp_path, plugin, "acc.yaml", model=ModelSpec.named("llama-3.1-8b"), seq_len=4096)
    assert (job.engine, job.layout.zero_stage, job.workload.precision) == ("deepspeed", 2, "bf16-mixed")


def test_deepspeed_scripts_that_build_their_configuration(tmp_path: Path) -> None:
    """Options in the place of a file, a file named through a command's output, and steps for other devices."""
    script = (
        "OUTPUT=$1\nZERO_STAGE=${2:-3}\n"
        "deepspeed main.py --model_name_or_path meta-llama/Llama-2-7b-hf --per_device_train_batch_size 4 --max_seq_len 512 \\\n"
        "  --gradient_accumulation_steps 1 --gradient_checkpointing --zero_stage $ZERO_STAGE --deepspeed --offload \\\n"
        "  --dtype bf16 --output_dir $OUTPUT &> $OUTPUT/training.log\n"
    )
    job = read(tmp_path, script, devices=8)
    assert job.layout == Layout(dp_shard=8, micro_batch_size=4, recompute="full", offload="optimizer")
    assert (job.model.name, job.workload.precision, job.workload.global_batch_size) == ("llama-2-7b", "bf16-mixed", 32)
    assert facts(job)["--zero_stage"] == ("3", "launch.sh:2", "ZERO_STAGE")
    config = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    (tmp_path / "ds.json").write_text(
        json.dumps(config | {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}})
    )
    script = "deepspeed train.py --deepspeed_config $(pwd)/ds.json --model_name_or_path gpt2-xl --block_size 1024\n"
    job = read(tmp_path, script, devices=16)
    assert (job.layout.zero_stage, job.layout.dp_shard, job.workload.global_batch_size) == (2, 16, 64)
    assert any(line.startswith("gradient_accumulation_steps 2") for line in job.assumed)
    with pytest.raises(ConfigError, match="the model acme/odd-13b is not in the catalogue"):
        read(tmp_path, script.replace("gpt2-xl", "acme/odd-13b"), devices=16)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**12) | st.floats() | st.text(max_size=8) | st.just("auto"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from(
    [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "zero_optimization",
        "stage",
        "offload_optimizer",
        "device",
        "tensor_parallel",
        "autotp_size",
        "gradient_accumulation_steps",
        "bf16",
        "enabled",
        "distributed_type",
        "fsdp_config",
        "deepspeed_config",
        "zero_stage",
        "mixed_precision",
        "model",
        "ddp",
        "trainer",
        "train",
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "micro_batch_size",
        "global_batch_size",
        "seq_length",
        "vocab_size",
        "num_experts",
        "moe_layer_freq",
        "recompute_granularity",
        "parallelism",
        "training",
        "data_parallel_shard_degree",
        "tensor_parallel_degree",
        "activation_checkpoint",
        "mode",
        "seq_len",
        "local_batch_size",
        "compile",
        "name",
        "flavor",
        "--num-layers",
        "--hidden-size",
        "--tensor-model-parallel-size",
        "--micro-batch-size",
        "sequence_parallel_size",
        "precision",
    ]
)


@pytest.mark.long
@given(st.dictionaries(KEYS, VALUES | st.dictionaries(KEYS, VALUES, max_size=5), max_size=7), st.booleans())
@settings(max_examples=250, deadline=None)
def test_any_table_is_read_or_refused(content: dict[str, Any], has_model: bool) -> None:
    """No traceback, whatever the file holds."""
    model = ModelSpec.named("llama-3.1-8b") if has_model else None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.yaml"
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        for engine in (None, "torchtitan", "accelerate", "deepspeed", "megatron", "nemo"):
            with contextlib.suppress(ConfigError):
                read_job(path, Given(num_devices=8, model=model, seq_len=1024, global_batch_size=8), engine=engine)


OPTIONS = st.sampled_from(
    [
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--tensor-model-parallel-size",
        "--pipeline-model-parallel-size",
        "--micro-batch-size",
        "--global-batch-size",
        "--seq-length",
        "--vocab-size",
        "--num-experts",
        "--moe-layer-freq",
        "--swiglu",
        "--bf16",
        "--recompute-granularity",
        "--use-distributed-optimizer",
        "--cp-comm-type",
        "--context-parallel-size",
        "--deepspeed",
        "--deepspeed_config",
        "--zero_stage",
        "--config_file",
        "--model_name_or_path",
        "--per_device_train_batch_size",
        "--max_seq_length",
        "--job.config_file",
        "--parallelism.tensor_parallel_degree",
        "model.tensor_model_parallel_size=2",
        "train.micro_batch_size=x",
        "--recipe",
        "--nnodes",
        "--nproc_per_node",
        "-1",
        "0",
        "2",
        "8",
        "64",
        "4096",
        "1e9",
        "full",
        "x",
        "gpt2-xl",
        "$A",
        "$(ls)",
        "''",
        "true",
        "llama3_8b",
        "../ds.json",
    ]
)


@given(
    st.sampled_from(["torchrun", "deepspeed", "accelerate launch", "python -m torchtitan.train"]),
    st.lists(OPTIONS, max_size=24),
)
@settings(max_examples=250, deadline=None)
def test_any_command_is_read_or_refused(program: str, words: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.sh"
        path.write_text(f"{program} {' '.join(words)}\n")
        with contextlib.suppress(ConfigError):
            read_job(path, Given(num_devices=8, seq_len=1024))


def test_a_script_that_allows_tf32_trains_in_it(tmp_path: Path) -> None:
    plain = MEGATRON.replace("--bf16", "")
    for text, precision in (
        (plain, "fp32"),
        (plain.replace("torchrun", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 torchrun"), "tf32"),
        (plain.replace("PP=2", "export TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=0\nPP=2"), "fp32"),
        (MEGATRON.replace("PP=2", "export TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1\nPP=2"), "bf16-mixed"),
    ):
        assert read(tmp_path, text).workload.precision == precision


def test_a_module_that_allows_tf32_trains_in_it(tmp_path: Path) -> None:
    workload = Workload(seq_len=4096, global_batch_size=64, precision="tf32", engine="torchtitan")
    plan = make_plan(ModelSpec.named("llama-3.1-8b"), Layout(dp_shard=8, recompute="full"), workload=workload)
    path = export(plan, "torchtitan").write(tmp_path)[0]
    assert read_job(path, Given(num_devices=8)).workload.precision == "tf32"
