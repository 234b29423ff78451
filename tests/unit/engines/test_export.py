"""A plan as the configuration of an engine, and back."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_options import megatron_parser
from meshwright.engines import ENGINES, TARGETS, Exported, export, exportable, read_configuration
from meshwright.engines.launch.megatron import settings_of, switches
from meshwright.schema import ClusterSpec, ConfigError, Layout, ModelSpec, TrainingPlan, Workload
from meshwright.schema.layers import Block, LayerRun, MTPHead
from meshwright.schema.stages import LayerSlots
from plans import make_plan

LLAMA = ModelSpec.named("llama-3.1-8b")
DEEPSEEK = ModelSpec.named("deepseek-v3")


def plan_of(layout: Layout, model: ModelSpec = LLAMA, **workload: Any) -> TrainingPlan:
    """A plan with 16 micro-batches and even stages."""
    batch = workload.pop("global_batch_size", 16 * layout.dp * layout.micro_batch_size)
    plan = make_plan(model, layout, workload=Workload(seq_len=4096, global_batch_size=batch, **workload))
    of_nvidia = layout.tp_overlap or layout.cuda_graphs
    return plan.replace(cluster=ClusterSpec.parse(f"{layout.world_size}xH100-SXM-80GB")) if of_nvidia else plan


def back(made: Exported, folder: Path, plan: TrainingPlan) -> Layout:
    """What the written configuration is read as."""
    path = made.write(folder)[0]
    return read_configuration(path, num_devices=plan.cluster.num_devices, model=plan.model).layout


MEGATRON = [
    Layout(tp=8, pp=4, dp_shard=2, micro_batch_size=2, recompute="full"),
    Layout(dp_replicate=4),
    Layout(dp_replicate=2, dp_shard=2, tp=2, sequence_parallel=False),
    Layout(pp=4, num_model_chunks=2, dp_shard=2, recompute="selective"),
    Layout(cp=8, cp_ulysses=2, dp_shard=2),
    Layout(cp=4, cp_ulysses=4, tp=2),
    Layout(cp=2, dp_replicate=2, zero_stage=1),
    Layout(dp_shard=2, offload="optimizer", offload_fraction=0.5, zero_stage=1),
    Layout(pp=2, recompute="full", recompute_fraction=0.5),
    Layout(tp=2, dp_shard=2, gradients="compute", tp_overlap=True, cuda_graphs=True, recompute="selective"),
    Layout(dp_shard=2, offload_activations=0.25),
]


def keeps_states_whole(layout: Layout) -> Layout:
    """Megatron shards optimizer states alone."""
    return layout.replace(zero_stage=min(layout.zero_stage, 1))


@pytest.mark.parametrize("engine", ["megatron", "nemo"])
@pytest.mark.parametrize("layout", MEGATRON, ids=str)
def test_megatron_and_back(engine: str, layout: Layout, tmp_path: Path) -> None:
    plan = plan_of(keeps_states_whole(layout))
    assert back(export(plan, engine), tmp_path, plan) == plan.layout


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, ep=4, dp_shard=8, zero_stage=1, pp=2),
        Layout(tp=4, ep=1, dp_shard=2, zero_stage=1, pp=2),
        Layout(tp=2, ep=2, etp=2, dp_shard=4, zero_stage=1),
        Layout(ep=8, dp_shard=8, zero_stage=1, ep_overlap=True, cuda_graphs=True),
    ],
    ids=str,
)
def test_experts_in_megatron_and_back(layout: Layout, tmp_path: Path) -> None:
    plan = plan_of(layout, DEEPSEEK)
    assert back(export(plan, "megatron"), tmp_path, plan) == layout


@pytest.mark.parametrize(("num_nodes", "dispatcher"), [(1, "alltoall"), (2, "flex")])
def test_tokens_go_once_to_each_node_where_experts_span_nodes(num_nodes: int, dispatcher: str) -> None:
    """As such a layout is costed; both engines are told."""
    layout = Layout(ep=8 * num_nodes, dp_shard=8 * num_nodes, zero_stage=1)
    plan = plan_of(layout, DEEPSEEK, engine="megatron").replace(
        cluster=ClusterSpec.parse(f"{num_nodes}x8xH100-SXM-80GB/ib400")
    )
    assert f"--moe-token-dispatcher-type {dispatcher}" in export(plan, "megatron").files[0][1]
    assert f"moe_token_dispatcher_type: {dispatcher}" in export(plan, "nemo").files[0][1]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=8, tp=2, recompute="full"),
        Layout(dp_replicate=2, dp_shard=4, recompute="selective"),
        Layout(dp_shard=2, cp=2, tp=2),
        Layout(pp=4, dp_shard=2, micro_batch_size=2),
        Layout(pp=4, num_model_chunks=2, dp_shard=2),
        Layout(pp=2, num_model_chunks=2, schedule="zb-v"),
        Layout(pp=2, num_model_chunks=2, schedule="zb-h1"),
        Layout(pp=2, schedule="gpipe"),
        Layout(dp_shard=8, offload="parameters"),
    ],
    ids=str,
)
def test_torchtitan_and_back(layout: Layout, tmp_path: Path) -> None:
    plan = plan_of(layout)
    made = export(plan, "torchtitan")
    assert back(made, tmp_path, plan) == layout
    (_, text), *rest = made.files
    compile(text, "meshwright_plan.py", "exec")
    assert not rest


def test_torchtitan_takes_other_orders_as_a_table() -> None:
    plan = plan_of(Layout(pp=2, schedule="zb-h1"))
    made = export(plan, "torchtitan")
    name, table = made.files[1]
    assert f"pipeline_parallel_schedule_csv = '{name}'" in made.files[0][1]
    assert table.splitlines()[0].startswith("0F0,") and len(table.splitlines()) == 2


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=8, tp=2, recompute="full", sequence_parallel=False),
        Layout(dp_replicate=2, dp_shard=4, zero_stage=2),
        Layout(dp_replicate=8),
        Layout(dp_shard=8, offload="parameters"),
        Layout(dp_shard=4, cp=2),
    ],
    ids=str,
)
def test_accelerate_and_back(layout: Layout, tmp_path: Path) -> None:
    plan = plan_of(layout)
    assert back(export(plan, "accelerate"), tmp_path, plan) == layout


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=8, micro_batch_size=4),
        Layout(dp_replicate=8),
        Layout(dp_shard=4, tp=2, sequence_parallel=False, zero_stage=1),
        Layout(dp_shard=8, zero_stage=2, offload="optimizer"),
        Layout(dp_shard=8, offload="optimizer", offload_fraction=0.25),
        Layout(dp_shard=8, offload="parameters", offload_to="storage"),
        Layout(dp_replicate=2, dp_shard=4, gradient_shard=8, optimizer_shard=8),
        Layout(dp_shard=4, cp=2, cp_ulysses=2),
    ],
    ids=str,
)
def test_deepspeed_and_back(layout: Layout, tmp_path: Path) -> None:
    plan = plan_of(layout)
    assert back(export(plan, "deepspeed"), tmp_path, plan) == layout


def test_deepspeeds_script_is_told_which_blocks_recompute() -> None:
    plan = plan_of(Layout(dp_shard=8, recompute="mixed"))
    choices = ("none", "full", "full", "selective", *["none"] * (plan.model.num_layers - 4))
    stages = (plan.stages[0].replace(layer_recompute=choices),)
    lines = export(plan.replace(stages=stages), "deepspeed").not_expressed
    assert any("recompute of blocks 0-1 (full), blocks 2-2 (selective):" in line for line in lines)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-7b", "qwen3-32b", "mistral-7b", "mixtral-8x7b", "gpt2-xl",
                                  "qwen3-235b-a22b", "deepseek-v2-lite", "deepseek-v3", "smollm2-135m"])  # fmt: skip
def test_every_option_is_megatrons(name: str, tmp_path: Path) -> None:
    """The script as bash reads it, through a parser with Megatron's own options."""
    model = ModelSpec.named(name)
    layout = Layout(pp=2, dp_shard=2, recompute="selective", **({"ep": 2} if model.is_moe else {}))
    workload = Workload(seq_len=1024, global_batch_size=32)
    script = export(make_plan(model, layout, workload=workload), "megatron").files[0][1]
    shown = re.sub(r"\ntorchrun.*", '\nprintf "%s\\\\0" "${MODEL_ARGS[@]}" "${PLAN_ARGS[@]}"', script)
    words = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    found = megatron_parser().parse_args(words)
    assert found.num_layers == model.num_blocks and found.hidden_size == model.hidden_dim
    assert found.pipeline_model_parallel_size == 2 and found.untie_embeddings_and_output_weights != model.tie_embeddings
    assert (found.num_experts is not None) == model.is_moe


def test_prediction_of_further_tokens_stands_before_the_loss() -> None:
    layout = Layout(pp=2, dp_shard=2, zero_stage=1)
    plan = make_plan(LLAMA, layout, workload=Workload(seq_len=1024, global_batch_size=32), blocks_per_stage=(17, 15))
    block = next(run.layer for run in LLAMA.layers if isinstance(run.layer, Block))
    model = LLAMA.replace(layers=(*LLAMA.layers, LayerRun(layer=MTPHead(block=block))))
    first, last = plan.stages
    last = last.replace(num_layers=last.num_layers + 1)
    plan = plan.replace(model=model, stages=(first, last))
    script = export(plan, "megatron").files[0][1]
    assert "--pipeline-model-parallel-layout 'Et*17|t*15mL'" in script and "--mtp-num-layers 1" in script
    overrides = yaml.safe_load(export(plan, "nemo").files[0][1])["model"]
    assert overrides["mtp_num_layers"] == 1 and overrides["pipeline_model_parallel_layout"] == "Et*17|t*15mL"


def test_uneven_stages_are_said() -> None:
    layout = Layout(pp=2, dp_shard=2)
    plan = make_plan(LLAMA, layout, workload=Workload(seq_len=1024, global_batch_size=32), blocks_per_stage=(17, 15))
    script = export(plan, "megatron").files[0][1]
    assert "--pipeline-model-parallel-layout 'Et*17|t*15L'" in script
    module = export(plan, "torchtitan").files[0][1]
    assert "'layers.16'], ['layers.17'" in module and "['tok_embeddings', 'layers.0'" in module


@pytest.mark.parametrize(
    ("layout", "engine", "limit"),
    [
        (Layout(dp_shard=8), "megatron", "megatron_zero_stage"),
        (Layout(pp=2, schedule="zb-h1"), "megatron", "schedule_of_engine"),
        (Layout(pp=2, recompute="mixed"), "megatron", "leading_blocks_recompute"),
        (Layout(pp=2), "accelerate", "no_pipeline"),
        (Layout(cp=2, cp_ulysses=2), "accelerate", "no_ulysses"),
        (Layout(dp_shard=2, recompute="selective"), "accelerate", "full_recompute_only"),
        (Layout(dp_shard=4, pp=2, zero_stage=1, num_model_chunks=2), "deepspeed", "deepspeed_axes"),
        (Layout(dp_replicate=2, dp_shard=4), "deepspeed", "deepspeed_shards_over_all"),
        (
            Layout(dp_shard=2, zero_stage=2, offload="optimizer", offload_fraction=0.5),
            "deepspeed",
            "deepspeed_partial_offload",
        ),
        (Layout(dp_shard=2, cp=2, cp_ulysses=2), "torchtitan", "no_ulysses"),
        (Layout(dp_shard=2, gradient_shard=4, optimizer_shard=4, dp_replicate=2), "torchtitan", "no_levels"),
    ],
)
def test_what_an_engine_cannot_run_is_refused_by_name(layout: Layout, engine: str, limit: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"[{limit}]")):
        export(plan_of(layout), engine)


@pytest.mark.parametrize("layout", [Layout(dp_shard=8), Layout(pp=2, dp_shard=2, zero_stage=1), Layout(cp=2)], ids=str)
@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-20b", "mistral-7b"])
def test_what_is_exportable_is_written(name: str, layout: Layout) -> None:
    plan = plan_of(layout, ModelSpec.named(name))
    answers = exportable(plan)
    assert tuple(answers) == TARGETS
    for target, reason in answers.items():
        if reason is None:
            assert export(plan, target).files
        else:
            with pytest.raises(ConfigError) as caught:
                export(plan, target)
            assert caught.value.details[0].startswith(reason)


def test_models_that_megatron_has_not_are_refused() -> None:
    with pytest.raises(ConfigError, match="attention sinks"):
        export(plan_of(Layout(), ModelSpec.named("gpt-oss-20b").replace(rope=None)), "megatron")
    with pytest.raises(ConfigError, match="torchtitan_trains"):
        export(plan_of(Layout(), ModelSpec.named("mistral-7b")), "torchtitan")


def test_placement_is_listed_and_not_dropped() -> None:
    layout = Layout(ep=2, dp_shard=2, zero_stage=1)
    model = ModelSpec.named("olmoe-1b-7b")
    slots = LayerSlots(experts=tuple(range(64)), shares=(1.0,) * 64)
    plan = make_plan(
        model, layout, workload=Workload(seq_len=1024, global_batch_size=8), rank_map=(1, 0), expert_slots=(slots,) * 16
    )
    plan = plan.replace(model=ModelSpec.named("qwen3-30b-a3b").replace(layers=_experts_of(plan.model)))
    listed = export(plan, "megatron").not_expressed
    assert any(line.startswith("rank_map") for line in listed) and any(
        line.startswith("expert_slots") for line in listed
    )


def _experts_of(model: ModelSpec) -> Any:
    """The blocks of OLMoE with query and key norms of each head, which Megatron has."""
    runs = []
    for run in model.layers:
        layer = run.layer
        if layer.kind == "block":
            layer = layer.replace(attention=layer.attention.replace(qk_norm="per_head"))
        runs.append(run.replace(layer=layer))
    return tuple(runs)


@given(st.text(max_size=300))
@settings(max_examples=20, deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    """No traceback, whatever the file holds."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for suffix in (".sh", ".py", ".toml", ".json", ".yaml"):
            path = Path(folder) / f"configuration{suffix}"
            path.write_text(text, encoding="utf-8", errors="ignore")
            for engine in (None, *ENGINES):
                try:
                    read_configuration(path, engine=engine, num_devices=8)
                except ConfigError:
                    continue


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**12) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "zero_optimization",
        "stage",
        "offload_param",
        "device",
        "tensor_parallel",
        "autotp_size",
        "sequence_parallel_size",
        "gradient_accumulation_steps",
        "bf16",
        "distributed_type",
        "fsdp_config",
        "parallelism_config",
        "num_processes",
        "parallelism_config_tp_size",
        "model",
        "ddp",
        "train",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "cp_comm_type",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "parallelism",
        "training",
        "data_parallel_shard_degree",
        "pipeline_parallel_degree",
        "pipeline_parallel_schedule",
        "activation_checkpoint",
        "local_batch_size",
        "optimizer",
        "ratio",
    ]
)


@pytest.mark.long
@given(st.dictionaries(KEYS, VALUES | st.dictionaries(KEYS, VALUES, max_size=4), max_size=6))
@settings(max_examples=80, deadline=None)
def test_any_values_are_read_or_refused(content: dict[str, Any]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "configuration.yaml"
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        for engine in (None, "torchtitan", "nemo", "deepspeed", "accelerate"):
            try:
                read_configuration(path, engine=engine, num_devices=8)
            except ConfigError:
                continue


def test_a_users_script_is_read(tmp_path: Path) -> None:
    """Variables, equals signs, comments and options of other things."""
    path = tmp_path / "train.sh"
    path.write_text(
        "TP=4; PP=2\nexport GBS=512 # sequences\n"
        'ARGS="--tensor-model-parallel-size $TP"\n'
        "torchrun --nproc_per_node=8 --nnodes 4 pretrain_gpt.py \\\n"
        "  --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size=2 --sequence-parallel \\\n"
        "  --micro-batch-size 1 --global-batch-size $GBS --bf16 --lr 3e-4 --use-distributed-optimizer\n"
    )
    found = read_configuration(path)
    assert found.layout == Layout(tp=4, pp=2, dp_shard=4, zero_stage=1)
    assert (found.global_batch_size, found.precision, found.num_devices) == (512, "bf16-mixed", 32)
    assert "lr" in found.ignored


def test_reading_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (tmp_path / "a.sh").write_text(f"touch {shlex.quote(str(mark))}\n--tensor-model-parallel-size $(touch {mark})\n")
    (tmp_path / "a.py").write_text(f"open({str(mark)!r}, 'w')\nconfig.parallelism.tensor_parallel_degree = 2\n")
    (tmp_path / "a.yaml").write_text(f"model: !!python/object/apply:os.system ['touch {mark}']\n")
    for name in ("a.sh", "a.py", "a.yaml"):
        try:
            read_configuration(tmp_path / name, num_devices=8)
        except ConfigError:
            continue
    assert not mark.exists()


def test_plans_are_no_configurations() -> None:
    documents = Path(__file__).parents[2] / "golden" / "documents"
    for name in ("offload.json", "generation.json"):
        with pytest.raises(ConfigError, match="is a plan"):
            read_configuration(documents / name)


def test_torchtitan_toml(tmp_path: Path) -> None:
    path = tmp_path / "current.toml"
    path.write_text(
        "[training]\nlocal_batch_size = 2\nseq_len = 8192\n[parallelism]\ntensor_parallel_degree = 2\n"
        "data_parallel_shard_degree = -1\n[activation_checkpoint]\nmode = 'full'\n[metrics]\nlog_freq = 1\n"
    )
    found = read_configuration(path, num_devices=16)
    assert found.layout == Layout(tp=2, dp_shard=8, micro_batch_size=2, recompute="full")
    assert found.global_batch_size == 16 and found.ignored == ("metrics",)
    with pytest.raises(ConfigError, match="--num-devices"):
        read_configuration(path)


@pytest.mark.long
def test_commands(tmp_path: Path) -> None:
    """export, import and compare as a user runs them."""
    plan = tmp_path / "plan.json"
    plan_of(
        Layout(dp_shard=4, tp=2, recompute="full", sequence_parallel=False), precision="fp32", engine="accelerate"
    ).save(plan)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "meshwright.cli", *words], capture_output=True, text=True, cwd=tmp_path
        )

    made = run("export", "plan.json", "--to", "accelerate")
    assert made.returncode == 0 and (tmp_path / "accelerate/accelerate.yaml").exists(), made.stderr
    read = run("import", "accelerate/accelerate.yaml")
    assert read.stdout.strip() == "dp_shard=4,tp=2,zero_stage=3,sequence_parallel=false,recompute=full"
    beside = run("compare", "accelerate/accelerate.yaml", "plan.json", "--json")
    assert beside.returncode == 0 and json.loads(beside.stdout)["fields"] == []
    plan_of(Layout(dp_shard=8), precision="fp32", engine="accelerate").save(tmp_path / "other.json")
    beside = run("compare", "other.json", "plan.json", "--json")
    assert beside.returncode == 0, beside.stderr
    fields = {name for name, *_ in json.loads(beside.stdout)["fields"]}
    assert fields == {"dp_shard", "tp", "recompute"}
    switched = Layout(dp_shard=8, ep=8, zero_stage=1, cuda_graphs=True, ep_overlap=True)
    plan_of(switched, ModelSpec.named("qwen3-30b-a3b"), engine="megatron").save(tmp_path / "switched.json")
    assert run("export", "switched.json", "--to", "megatron").returncode == 0
    assert Layout.parse(run("import", "megatron/pretrain.sh").stdout) == switched
    shutil.rmtree(tmp_path / "megatron")
    refused = run("import", "plan.json")
    assert refused.returncode == 2 and "is a plan" in refused.stderr
    refused = run("export", "plan.json", "--to", "megatron")
    assert refused.returncode == 2 and "megatron_zero_stage" in refused.stderr and not (tmp_path / "megatron").exists()


def test_modules_that_recompute_and_the_fused_loss_reach_megatron_and_are_read_again(tmp_path: Path) -> None:
    layout = Layout(dp_shard=8, ep=8, zero_stage=1, recompute="selective")
    modules = ("layernorm", "moe_act")
    plan = plan_of(
        layout, ModelSpec.named("qwen3-30b-a3b"), engine="megatron", recompute_modules=modules, loss="in_place"
    )
    made = export(plan, "megatron")
    text = dict(made.files)["pretrain.sh"]
    assert "--recompute-modules layernorm moe_act\n" in text.replace(" \\\n", "\n")
    assert "--cross-entropy-fusion-impl te" in text
    overrides = yaml.safe_load(export(plan.replace(workload=plan.workload.replace(engine="nemo")), "nemo").files[0][1])
    assert overrides["model"]["cross_entropy_fusion_impl"] == "te"
    assert overrides["model"]["recompute_modules"] == list(modules)
    assert not any("recompute=selective" in line for line in made.not_expressed)
    launch = complete_launch(made.write(tmp_path)[0])
    assert launch == {"recompute_modules": modules, "loss": "in_place"}


@pytest.mark.parametrize(
    ("settings", "fuses_loss", "expected"),
    [
        ({"cross_entropy_fusion_impl": "te"}, False, {}),
        ({"cross_entropy_fusion_impl": "te"}, True, {"loss": "in_place"}),
        ({"cross_entropy_fusion_impl": "te", "cross_entropy_loss_fusion": True}, False, {"loss": "in_place"}),
        (
            {"expert_model_parallel_size": 8, "moe_token_dispatcher_type": "alltoall"},
            True,
            {"token_dispatch": "copies"},
        ),
        ({"expert_model_parallel_size": 8, "moe_token_dispatcher_type": "flex"}, True, {}),
        ({"expert_model_parallel_size": 1}, True, {}),
    ],
)
def test_loss_and_dispatcher_are_those_that_the_settings_together_name(
    settings: dict[str, Any], fuses_loss: bool, expected: dict[str, str]
) -> None:
    read = switches(settings, fuses_loss=fuses_loss)
    assert {name: read[name] for name in ("loss", "token_dispatch") if name in read} == expected


def complete_launch(script: Path) -> dict[str, Any]:
    """What the engine executes, as the written script is read as a launch."""
    found = switches(settings_of(script.read_text()))
    return {name: found[name] for name in ("recompute_modules", "loss")}


OF_FP32 = {
    "megatron": Layout(dp_replicate=4),
    "torchtitan": Layout(dp_shard=4, recompute="full"),
    "deepspeed": Layout(dp_replicate=4, sequence_parallel=False),
    "accelerate": Layout(dp_shard=4),
}


@pytest.mark.parametrize("engine", OF_FP32)
def test_products_of_fp32_are_said(engine: str, tmp_path: Path) -> None:
    """tf32 is set, and read back where the file says it; fp32 is said against containers that have TF32 on; bf16 says nothing."""
    for precision, value in (("tf32", 1), ("fp32", 0), ("bf16-mixed", None)):
        plan = plan_of(OF_FP32[engine], precision=precision, engine=engine)
        plan = plan.replace(cluster=ClusterSpec.parse("4xH100-SXM-80GB"))
        made = export(plan, engine)
        text = "\n".join((made.command, *(content for _, content in made.files)))
        by_call = engine == "torchtitan" and precision == "tf32"
        assert ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE" in text) == (value is not None and not by_call)
        assert by_call or value is None or f"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE={value}" in text
        read = read_configuration(made.write(tmp_path / precision)[0], num_devices=4, model=LLAMA)
        says = engine in ("megatron", "torchtitan") or precision != "tf32"
        assert read.precision == (precision if says else "fp32")
        assert says or any("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1" in line for line in read.assumed)


def test_other_nodes_of_deepspeed_get_the_variable() -> None:
    plan = plan_of(Layout(dp_replicate=16, sequence_parallel=False), precision="tf32", engine="deepspeed")
    made = export(plan.replace(cluster=ClusterSpec.parse("2x8xH100-SXM-80GB")), "deepspeed")
    assert dict(made.files)[".deepspeed_env"] == "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1\n"


def test_megatron_bridge_has_no_tf32() -> None:
    with pytest.raises(ConfigError, match="tf32"):
        export(plan_of(Layout(dp_replicate=4), precision="tf32"), "nemo")
