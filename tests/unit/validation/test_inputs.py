"""Layouts and workloads of rows: as stated, or as the framework does, and why a row cannot be predicted."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from meshwright.schema import ConfigError, Layout
from meshwright.validation import RunInputs, predict, read_runs, run_inputs
from meshwright.validation.noted import stage_fractions
from meshwright.validation.rows import FrameworkDefaults, RunRow, framework_choices
from run_rows import SHARED, a_row, inputs_of, table

MIST = (
    "strategy: enabled: true layer_partitions: - 4 - 8 device_assignment: - - 1 - 2 - - 1 - 2 "
    "gradient_checkpointing: - 3 - 0 gradient_accumulation_steps: 8 stage_strategies: "
    "- - 2 - 2 - 1 - 0 - 0 - 1 - 0.0 - 0.0 - 0.25 - 0.0 - - 2 - 2 - 1 - 0 - 0 - 1 - 0.0 - 0.0 - 0.75 - 0.5 pre_post"
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ep": 16, "experts": 16, "topk": 2}, "experts do not divide"),
        ({"notes": "stage gpus=[1, 1, 2]; tp sets"}, "different numbers of devices"),
        ({"model": "T5-11B"}, "not a plain decoder"),
        ({"gpu_type": "unknown"}, "device not in the catalogue"),
        ({"layers": None}, "shape not stated"),
        ({"n_gpus": 32}, "do not multiply"),
        ({"global_batch": 66}, "batch does not divide"),
        ({"precision_class": "w4a8"}, "precision not known"),
        ({"tp": None, "pp": None, "dp": None}, "tp, pp and dp not stated"),
        ({"seq_len": None}, "sequence length not stated"),
    ],
)
def test_row_that_cannot_be_predicted_says_why(changes, reason) -> None:
    result = run_inputs(a_row(**changes))
    assert isinstance(result, str)
    assert reason in result


@pytest.mark.long
@pytest.mark.skipif(not (SHARED / "training_runs.csv").exists(), reason="needs the measured runs")
def test_measured_rows_are_skipped_for_true_reasons_only() -> None:
    rows = [row for row in read_runs(SHARED / "training_runs.csv") if row.is_scored][::7]
    allowed = (
        "mapping",
        "layout: experts do not divide",
        "model: not a plain decoder",
        "model: shape not stated",
        "cluster: device",
    )
    reasons = {prediction.skipped for prediction in predict(rows) if prediction.skipped}
    assert all(reason.startswith(allowed) for reason in reasons), reasons


def test_stand_ins_and_defaults_are_named() -> None:
    unstated = {"recompute_class": "unknown", "sharding_class": "", "seq_parallel": ""}
    result = inputs_of(cp=2, seq_len=1024, dp=2, vpp="4", framework="NeMo/Megatron-Core", **unstated)
    assert result.approximated == ()
    assert result.layout.num_model_chunks == (4 if result.layout.pp > 1 else 1)
    assert set(result.assumed) == {"sharding=zero1", "sequence_parallel=True", "recompute=none"}
    assert (result.layout.zero_stage, result.layout.sequence_parallel, result.layout.recompute) == (1, True, "none")


def test_a_framework_nobody_knows_makes_the_interval_wider_unless_the_table_states_its_engine() -> None:
    known, unknown = a_row(framework="NeMo/Megatron-Core"), a_row(framework="footrain")
    states = a_row(framework="footrain", behaviour=(("engine", "megatron"),))
    doubts = [p.inputs.doubts["framework"] for p in predict([known, unknown, states]) if p.inputs]
    assert doubts == [False, True, False]
    widths = {}
    for row in (unknown, states):
        (prediction,) = predict([row])
        assert prediction.estimate is not None
        interval = prediction.estimate.step_time_interval_s
        widths[row.behaviour] = interval.high / interval.low, prediction.estimate.step_time_s
    (wide, seconds), (narrow, same) = widths[()], widths[states.behaviour]
    assert seconds == same
    assert wide > 1.4 * narrow


def test_every_choice_of_a_framework_has_a_last_resort_and_sources() -> None:
    for choice, lines in framework_choices().items():
        assert lines[-1]["framework"] == "", choice
        assert all(line["source"] for line in lines), choice
    defaults = FrameworkDefaults(a_row(framework="nobody's engine"))
    assert defaults.assume("precision") == "bf16"
    assert defaults.value("packed_document") is None
    assert defaults.assumed == ["precision=bf16"]


def stating(**cells: str) -> RunRow:
    """Return the row of a file whose columns state how an engine that nobody knows behaves."""
    row = f"x,Zephyr,A100-SXM-80GB,16,gpt,24,2048,16,8192,51200,2048,64,1,4,2,2,,zero1,full,bf16,{','.join(cells.values())}"
    columns = (
        "id,framework,gpu_type,n_gpus,model,layers,hidden,heads,ffn,vocab,seq_len,global_batch,micro_batch,dp,tp,pp"
    )
    header = f"{columns},iter_time_s,sharding_class,recompute_class,precision_class,{','.join(cells)}"
    with TemporaryDirectory() as folder:
        return read_runs(table(Path(folder), row, header=header))[0]


def test_columns_state_how_an_unknown_engine_behaves() -> None:
    cells = {"engine": "nanotron", "dropout": "yes", "unfused_attention": "no", "gradients": "compute", "overlap": "no"}
    run = run_inputs(stating(**cells, cuda_graphs="yes", fusion="compiled_blocks", flash_generation="1"))
    assert isinstance(run, RunInputs), run
    workload = run.workload
    assert (workload.engine, workload.dropout, workload.attention, workload.overlap) == (
        "nanotron",
        True,
        "flash",
        False,
    )
    assert (workload.fusion, workload.flash_generation) == ("compiled_blocks", 1)
    assert (run.layout.gradients, run.layout.cuda_graphs) == ("compute", True)


def test_a_behaviour_that_no_engine_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"line 2 column engine: 'warp' is not one of fsdp2, .*nanotron"):
        stating(engine="warp")
    with pytest.raises(ConfigError, match="'maybe' is not one of yes, no"):
        stating(dropout="maybe")


def test_unknown_engine_is_taken_for_what_its_layout_and_time_suggest() -> None:
    sharded = {"framework": "Zephyr", "n_gpus": 8, "tp": 1, "pp": 1, "dp": 8, "sharding_class": "zero3"}
    assert inputs_of(**sharded).workload.engine == "fsdp2"
    assert inputs_of(framework="Zephyr").workload.engine == "megatron"
    # A GPT with LayerNorm on an A100: as before FlashAttention, unless something dates it.
    assert inputs_of(framework="Zephyr").workload.attention == "math"
    assert inputs_of(framework="Zephyr", gpu_type="H100", gpu_class="H100").workload.attention == "flash"


@pytest.mark.parametrize(
    ("changes", "date"),
    [
        ({"date": "2024-03"}, "2024-03"),
        ({"date": "2023"}, "2023-06"),
        ({"framework": "NeMo24.05"}, "2024-05"),
        ({"source": "arXiv:2205.05198 Table 5"}, "2022-05"),
        ({"source": "org/repo:benchmarks/h100_202412_x.md@feb88fe9bd05"}, "2024-12"),
        ({"notes": "26.02.01 NeMo Container"}, "2026-02"),
        ({"notes": "22.19 sequences/s, torch 2.13"}, ""),
    ],
)
def test_date_of_the_software(changes: dict[str, str], date: str) -> None:
    assert a_row(**changes).software_date == date


def test_software_of_its_time_reduces_after_the_backward_pass() -> None:
    early, late = (inputs_of(framework="Megatron-LM (fork)", date=date).workload for date in ("2021-04", "2025-01"))
    assert (early.overlap, late.overlap) == (False, True)
    assert (early.attention, late.attention) == ("math", "flash")


def test_sizes_in_the_notes_fill_empty_cells() -> None:
    run = inputs_of(seq_len=None, global_batch=None, micro_batch=None, notes="GBS 32, MBS 2; sequence = 1024")
    assert (run.workload.seq_len, run.workload.global_batch_size, run.layout.micro_batch_size) == (1024, 32, 2)
    assert "seq_len=1024 (notes)" in run.assumed
    assert inputs_of(notes="GBS 32").workload.global_batch_size == 64


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("selective:mlp+core_attn", ("core_attn", "mlp")),
        ("selective (layernorm + moe_act)", ("layernorm", "moe_act")),
        ("selective (layernorm + whole MoE)", ("layernorm", "moe")),
        ("selective (RMSNorm, MLA up-proj, SwiGLU)", ("layernorm", "mla_up_proj", "moe_act")),
    ],
)
def test_modules_that_a_row_recomputes_are_read(text: str, modules: tuple[str, ...]) -> None:
    run = inputs_of(recompute_class="selective", recompute=text, framework="Megatron-Bridge")
    assert (run.layout.recompute, run.workload.recompute_modules) == ("selective", modules)
    other = inputs_of(recompute_class="selective", recompute=text, framework="torchtitan").workload
    assert other.recompute_modules == ()


def test_the_core_of_fused_attention_is_nothing_to_recompute() -> None:
    run = inputs_of(recompute_class="selective", recompute="selective:core_attn", framework="Megatron-Bridge")
    assert (run.layout.recompute, run.workload.recompute_modules) == ("none", ())


def test_rows_say_the_loss_and_the_optimizer() -> None:
    fused = inputs_of(notes="Liger fused CE/RMSNorm", optimizer="PagedAdamW8bit, optimizer_in_bwd").workload
    assert (fused.loss, fused.optimizer) == ("fused", "adamw-8bit")
    assert (fused.update, fused.paged_states) == ("in_backward", True)
    late, early = (inputs_of(framework="Megatron-Bridge", date=date).workload.loss for date in ("2026-01", "2025-06"))
    assert (late, early) == ("in_place", "engine")


def test_run_that_shards_everything_and_states_no_degrees_is_data_parallel() -> None:
    run = inputs_of(tp=None, pp=None, dp=None, sharding_class="zero3")
    assert (run.layout.dp_shard, run.layout.tp, run.layout.pp) == (16, 1, 1)
    assert {"tp=1", "pp=1"} <= set(run.assumed)


def test_open_degrees_follow_from_the_others_and_are_named_where_they_do_not() -> None:
    assert inputs_of(tp=None).layout.tp == 2
    assert inputs_of(dp=None).layout.dp == 4
    result = inputs_of(micro_batch=None, grad_accum=4)
    assert (result.layout.micro_batch_size, "micro_batch" in result.assumed) == (4, True)
    assert "micro_batch=1" in inputs_of(micro_batch=None).assumed


def test_context_and_expert_parallelism_are_axes_of_the_layout() -> None:
    result = inputs_of(cp=2, dp=2, seq_len=2048)
    assert (result.workload.seq_len, result.workload.global_batch_size) == (2048, 64)
    assert (result.layout.dp, result.layout.cp, result.layout.world_size) == (2, 2, 16)
    experts = {"experts": 8, "topk": 2, "ep": 4, "seq_parallel": "yes"}
    # Megatron cuts experts over tp unless told otherwise, where the ranks of a stage allow it.
    assert inputs_of(**experts).layout.etp == 2
    assert inputs_of(**experts, framework="torchtitan").layout.etp == 1
    assert inputs_of(**{**experts, "ep": 8}).layout.etp == 1
    assert inputs_of(**experts, etp=1).layout.etp == 1


def test_sharding_inside_a_group_is_hybrid() -> None:
    result = inputs_of(sharding_class="hybrid", sharding="FSDP group 8 + DP", tp=1, pp=1, dp=16)
    assert (result.layout.dp_shard, result.layout.dp_replicate, result.layout.zero_stage) == (8, 2, 3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", {"offload": "none"}),
        ("optimizer->CPU 25%", {"offload": "optimizer", "offload_fraction": 0.25}),
        ("full cpu", {"offload": "parameters", "offload_to": "host"}),
        ("optimizer+params+activations to CPU/NVMe, 2 SSDs", {"offload_activations": 1.0, "offload_to": "storage"}),
        ("activations->CPU 12 layers", {"offload": "none", "offload_activations": 0.5}),
    ],
)  # fmt: skip
def test_offload_is_read_from_its_words(text: str, expected: dict[str, object]) -> None:
    layout = inputs_of(offload=text, sharding_class="zero3", pp=1, dp=8).layout
    assert {name: getattr(layout, name) for name in expected} == expected


def test_partial_recompute_is_the_part_of_the_blocks() -> None:
    layout = inputs_of(
        recompute="op-level: fraction of ops recomputed per stage [0.6, 0.2]", recompute_class="custom"
    ).layout
    assert (layout.recompute, layout.recompute_fraction) == ("full", pytest.approx(0.4))
    assert inputs_of(recompute="first 6 layers", recompute_class="custom").layout.recompute_fraction == 0.25
    assert inputs_of(recompute="[not numbers]", recompute_class="custom").layout.recompute_fraction == 1.0
    by_notes = inputs_of(
        recompute="full", recompute_class="full", notes="recompute block layers=3", pp=2, layers=24
    ).layout
    assert (by_notes.recompute, by_notes.recompute_fraction) == ("full", 0.25)


def test_a_printed_plan_fills_the_mapping_and_each_stage() -> None:
    row = a_row(
        layers=12, n_gpus=4, pp=2, tp=None, dp=None, micro_batch=None, sharding_class="unknown", offload="Mist mixed",
        recompute="Mist per-stage", recompute_class="custom", notes=MIST,
    )  # fmt: skip
    assert stage_fractions(row) == ((0.75, 0.0), (0.25, 0.75))
    result = run_inputs(row)
    assert isinstance(result, RunInputs)
    assert (result.layout.dp_shard, result.layout.zero_stage, result.layout.micro_batch_size) == (2, 1, 2)
    assert result.layout.recompute_fraction == 0.25
    assert [layout.recompute for layout in result.stage_layouts] == ["full", "none"]
    assert predict([row])[0].estimate is not None


def test_adapters_come_from_the_task_and_their_storage_from_the_precision() -> None:
    assert inputs_of().workload.adapters is None
    lora = inputs_of(
        task="finetune-lora", framework="NeMo/Megatron", sharding_class="lora", precision_class="fp8", gpu_type="H100"
    )
    assert lora.workload.adapters is not None
    assert (lora.workload.adapters.rank, lora.workload.adapters.frozen) == (16, "8-bit")
    assert lora.layout.zero_stage == 0
    quantised = inputs_of(
        task="qlora", framework="LitGPT", precision="bf16-true + bnb.nf4", precision_class="qlora-nf4"
    )
    assert quantised.workload.adapters is not None
    assert (quantised.workload.adapters.frozen, quantised.workload.precision) == ("nf4", "bf16")
    assert any(name.startswith("adapters=") for name in quantised.assumed)


@pytest.mark.parametrize(
    ("changes", "fusion", "generation", "dropout"),
    [
        ({"framework": "torchtitan (FSDP2)"}, "composite_norm", 2, False),
        ({"framework": "torchtitan (FSDP2)", "notes": "FSDP + torch.compile."}, "compiled", 2, False),
        ({"framework": "torchtitan (FSDP2)", "notes": "No torch.compile (default)."}, "composite_norm", 2, False),
        ({"framework": "torchtitan (FSDP2)", "precision_class": "fp8"}, "compiled", 2, False),
        (
            {"framework": "torchtitan (FSDP2)", "notes": "torch.compile", "source": "benchmarks/llama3_h100_202412.md"},
            "compiled_blocks",
            2,
            False,
        ),
        ({"framework": "torchtitan (FSDP2)", "precision_class": "mxfp8"}, "compiled", 2, False),
        ({"framework": "llm-foundry/Composer FSDP1"}, "engine", 1, False),
        ({"framework": "Megatron-DeepSpeed"}, "engine", 2, True),
        ({"framework": "NeMo/Megatron-Core"}, "engine", 2, False),
        ({"framework": "DeepSpeed"}, "eager", 2, False),
        ({"framework": "DeepSpeed", "notes": "Liger fused CE"}, "compiled", 2, False),
        ({"framework": "Unsloth"}, "compiled", 2, False),
        ({"framework": "llm-foundry/Composer FSDP1", "notes": "with FlashAttention-3"}, "engine", 3, False),
        ({"framework": "NeMo/Megatron-Core", "notes": "FA3 (H200)/FA4 beta (B200)"}, "engine", 4, False),
        ({"framework": "NeMo/Megatron-Core", "date": "2024-05"}, "engine", "2 only", False),
        ({"framework": "NeMo/Megatron-Core", "date": "2024-09"}, "engine", 2, False),
    ],
)
def test_kernels_follow_the_framework_and_what_the_row_states(changes, fusion, generation, dropout) -> None:
    workload = inputs_of(**changes).workload
    assert (workload.fusion, workload.flash_generation, workload.dropout) == (fusion, generation, dropout)


@pytest.mark.parametrize(
    ("changes", "overlaps"),
    [
        ({"framework": "HF Transformers + DeepSpeed", "gpu_type": "V100-SXM2-32GB"}, False),
        ({"framework": "HF Transformers + DeepSpeed", "gpu_type": "V100-SXM2-32GB", "date": "2023-05"}, True),
        ({"framework": "DeepSpeed", "date": "2021-06"}, False),
        ({"framework": "DeepSpeed", "date": "2022-06"}, True),
        ({"framework": "DeepSpeed"}, True),
        ({"framework": "Megatron-LM"}, False),
        ({"framework": "torchtitan (FSDP2)"}, True),
    ],
)
def test_communication_overlaps_as_the_engine_of_its_time_does(changes, overlaps) -> None:
    assert inputs_of(**changes).workload.overlaps == overlaps


@pytest.mark.parametrize(
    ("changes", "is_blocking"),
    [
        ({"framework": "Any engine"}, False),
        ({"framework": "Any engine", "notes": "ran with CUDA_LAUNCH_BLOCKING=1"}, True),
        ({"framework": "Megatron-DeepSpeed (BigScience)"}, True),
        ({"framework": "Megatron-DeepSpeed (BigScience)", "notes": "async=yes (CUDA_LAUNCH_BLOCKING 0)"}, False),
    ],
)
def test_launches_block_where_the_row_or_the_framework_says_so(changes, is_blocking) -> None:
    workload = inputs_of(**changes).workload
    assert (workload.blocking_launches, workload.overlaps) == (is_blocking, not is_blocking)


def test_context_ranks_exchange_what_the_row_or_its_framework_says() -> None:
    ranks = {"n_gpus": 16, "dp": 1, "tp": 1, "cp": 8, "pp": 2}
    for changes, ulysses in (
        ({"framework": "DeepSpeed"}, 8),
        ({"framework": "EasyContext (HF+DeepSpeed, zigzag ring attention)"}, 1),
        ({"framework": "torchtitan"}, 1),
        ({"framework": "xtuner", "notes": "DeepSpeed-Ulysses"}, 8),
    ):
        assert inputs_of(**ranks, **changes).layout.cp_ulysses == ulysses


def test_scales_of_fp8_are_as_the_precision_says() -> None:
    for precision, scaling in (("fp8 rowwise", "row"), ("fp8 tensorwise", "tensor"), ("FP8 (delayed)", "tensor")):
        assert inputs_of(precision=precision, precision_class="fp8").workload.fp8_scaling == scaling


def test_layout_text_round_trips_what_is_predicted_only() -> None:
    layout = Layout.parse("dp_shard=8,offload=optimizer,offload_fraction=0.5,recompute=full,recompute_fraction=0.25")
    assert (layout.offload_fraction, layout.recompute_fraction) == (0.5, 0.25)
    assert "offload=optimizerx0.5" in str(layout)


@pytest.mark.parametrize(
    ("framework", "changes", "switches", "dispatch"),
    [
        ("Megatron-Core/NeMo", {"gpu_type": "GB200-186GB", "notes": "26.02 NeMo Container"}, {"cuda_graphs"}, "engine"),
        ("Megatron-Core/NeMo", {"gpu_type": "GB200-186GB", "notes": "a run of ours"}, {"cuda_graphs"}, "engine"),
        (
            "Megatron-Bridge",
            {
                "gpu_type": "GB200-186GB",
                "precision": "MXFP8",
                "precision_class": "fp8",
                "notes": "26.08 NeMo Container",
            },
            {"cuda_graphs", "expert_graphs", "ep_overlap"},
            "engine",
        ),
        ("Megatron-Core/NeMo", {"gpu_type": "H100-SXM-80GB"}, set(), "engine"),
        ("Megatron-Core/NeMo", {"gpu_type": "H100-SXM-80GB", "pp": 2, "vpp": "2", "dp": 8}, {"ep_overlap"}, "copies"),
        ("Megatron-Core/NeMo", {"gpu_type": "B200-180GB", "notes": "26.02 NeMo Container"}, set(), "copies"),
        ("Megatron-Core/NeMo", {"gpu_type": "B200-180GB", "notes": "26.04 NeMo Container"}, set(), "engine"),
        (
            "Megatron-Core/NeMo",
            {"gpu_type": "B200-180GB", "precision": "MXFP8", "precision_class": "fp8", "notes": "26.04 NeMo Container"},
            {"cuda_graphs"},
            "engine",
        ),
        (
            "Megatron-Core/NeMo",
            {"gpu_type": "H100-SXM-80GB", "precision": "BF16", "notes": "26.06 NeMo Container"},
            {"cuda_graphs"},
            "engine",
        ),
        ("NeMo/Megatron-Core", {"gpu_type": "GB200-186GB"}, {"cuda_graphs", "expert_graphs"}, "copies"),
        (
            "Megatron-Core/NeMo",
            {"gpu_type": "B200-180GB", "notes": "25.09 NeMo Container"},
            {"cuda_graphs", "expert_graphs"},
            "copies",
        ),
        ("Megatron-LM", {"gpu_type": "H100-SXM-80GB"}, set(), "copies"),
        ("Megatron-LM", {"notes": "EP overlap; DeepEP, no CUDA graphs"}, {"ep_overlap"}, "engine"),
        ("somebody's", {"gpu_type": "GB200-186GB", "notes": "26.08 NeMo Container"}, set(), "copies"),
    ],
)
def test_graphs_and_exchange_of_a_mixture_are_those_of_the_release_for_the_device(
    framework: str, changes: dict[str, object], switches: set[str], dispatch: str
) -> None:
    """What a run's notes say comes first; the model's name and who published it are not looked at."""
    mixture = {"experts": 16, "topk": 2, "ep": 8, "etp": 1, "tp": 1, "pp": 1, "dp": 16, "vpp": "1"}
    result = inputs_of(**{"framework": framework, "recompute_class": "none", **mixture, **changes})
    named = ("cuda_graphs", "expert_graphs", "ep_overlap")
    assert {name for name in named if getattr(result.layout, name)} == switches
    assert result.workload.token_dispatch == dispatch


@pytest.mark.parametrize(
    ("changes", "chunks"),
    [
        ({}, 12),
        ({"vpp": "1"}, 1),
        ({"vpp": "3"}, 3),
        ({"experts": None}, 1),
        ({"layers": 25}, 1),
        ({"framework": "Megatron-Core/NeMo"}, 1),
    ],
)
def test_mixtures_of_megatron_core_have_a_chunk_for_every_block_unless_they_say_otherwise(changes, chunks) -> None:
    mixture = {
        "framework": "Megatron-Core: MCore",
        "experts": 16,
        "topk": 2,
        "ep": 8,
        "etp": 1,
        "tp": 1,
        "pp": 2,
        "dp": 8,
    }
    result = inputs_of(**{"recompute_class": "none", "vpp": "", "layers": 24, **mixture, **changes})
    assert result.layout.num_model_chunks == chunks
    assert ("vpp=12" in result.assumed) == (chunks == 12)


@pytest.mark.parametrize(("framework", "is_tied"), [("LitGPT (Fabric)", False), ("torchtune", True)])
def test_a_framework_may_copy_a_tied_head(framework: str, is_tied: bool) -> None:
    shape = {"layers": None, "hidden": None, "heads": None, "ffn": None, "vocab": None, "params_b": None}
    assert inputs_of(model="llama-3.2-1b", framework=framework, **shape).model.tie_embeddings == is_tied


def test_a_column_comes_before_the_notes() -> None:
    mixture = {"experts": 16, "topk": 2, "ep": 8, "etp": 1, "tp": 1, "pp": 1, "cp": 2, "dp": 8, "vpp": "1"}
    notes = {"notes": "EP overlap; DeepEP; ulysses; Liger; FA-3; forced load balance; CUDA_LAUNCH_BLOCKING=1"}
    columns = {
        "ep_overlap": False, "token_dispatch": "copies", "context": "ring", "loss": "engine", "flash_generation": 2,
        "routing": "learned", "blocking_launches": False,
    }  # fmt: skip
    run = {"framework": "Megatron-LM", "recompute_class": "none", **mixture, **notes}
    noted, stated = (inputs_of(**run, **more) for more in ({}, {"behaviour": tuple(columns.items())}))
    for result, expected in (
        (noted, (True, "engine", 2, "fused", 3, (), True)),
        (stated, (False, "copies", 1, "engine", 2, ((8, 1.12),), False)),
    ):
        layout, work = result.layout, result.workload
        assert (
            layout.ep_overlap, work.token_dispatch, layout.cp_ulysses, work.loss, work.flash_generation,
            work.expert_imbalance, work.blocking_launches,
        ) == expected  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "imbalance"),
    [
        ({"framework": "Megatron-LM"}, ((8, 1.12),)),
        ({"framework": "Megatron-LM", "notes": "forced load balance; alltoall dispatcher"}, ()),
        ({"framework": "Megatron-Bridge"}, ()),
        ({"framework": "Megatron-Bridge", "notes": "NOT force balanced (an experiment)"}, ((8, 1.12),)),
        ({"framework": "Megatron-LM", "ep": 1}, ()),
    ],
)
def test_a_learned_router_sends_the_fullest_rank_more(
    changes: dict[str, object], imbalance: tuple[tuple[int, float], ...]
) -> None:
    mixture = {"experts": 16, "topk": 2, "ep": 8, "etp": 1, "tp": 1, "pp": 1, "dp": 16, "vpp": "1"}
    assert inputs_of(**{**mixture, **changes}).workload.expert_imbalance == imbalance


@pytest.mark.parametrize(
    ("changes", "precision"),
    [
        ({"precision": "TF32", "framework": "torchtune"}, "tf32"),
        ({"precision_class": "tf32", "framework": "torchtune"}, "tf32"),
        ({"precision": "fp32 (no TF32)", "framework": "torchtune"}, "fp32"),
        ({"framework": "torchtune", "date": "2022-03"}, "tf32"),
        ({"framework": "torchtune", "date": "2022-11"}, "fp32"),
        ({"framework": "somebody's"}, "fp32"),
        ({"framework": "somebody's", "date": "2022-03", "gpu_type": "V100-SXM2-32GB"}, "fp32"),
        ({"framework": "MaxText"}, "tf32"),
        ({"framework": "Megatron-LM", "date": "2024-05"}, "tf32"),
    ],
)
def test_fp32_is_multiplied_as_the_framework_of_the_time_did(changes: dict[str, str], precision: str) -> None:
    assert inputs_of(**({"precision_class": "fp32"} | changes)).workload.precision == precision
