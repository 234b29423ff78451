"""What rows say beside their degrees: adapters, offloading, partial recompute, open mappings, names of models and devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from meshwright.schema.catalogue import device_entries, link_entries
from meshwright.schema.layout import Layout
from meshwright.validation import RunInputs, predict, read_runs, run_inputs
from meshwright.validation.clusters import device_named
from meshwright.validation.layouts import stage_fractions
from meshwright.validation.lookups import FrameworkDefaults, framework_choices, read_table
from meshwright.validation.models import published_shapes, shape_named, shape_of_size
from meshwright.validation.rows import RunRow

SHARED = Path(__file__).resolve().parents[4] / "shared/data/measured_runs"

MIST = (
    "strategy: enabled: true layer_partitions: - 4 - 8 device_assignment: - - 1 - 2 - - 1 - 2 "
    "gradient_checkpointing: - 3 - 0 gradient_accumulation_steps: 8 stage_strategies: "
    "- - 2 - 2 - 1 - 0 - 0 - 1 - 0.0 - 0.0 - 0.25 - 0.0 - - 2 - 2 - 1 - 0 - 0 - 1 - 0.0 - 0.0 - 0.75 - 0.5 pre_post"
)


def a_row(**changes: object) -> RunRow:
    values = {
        "line": 2, "id": "x", "framework": "Megatron-LM", "gpu_type": "A100-SXM-80GB", "gpus_per_node": 8, "n_gpus": 16,
        "model": "gpt", "model_family": "GPT-3", "layers": 24, "hidden": 2048, "heads": 16, "kv_heads": 16, "ffn": 8192,
        "vocab": 51200, "seq_len": 2048, "global_batch": 64, "micro_batch": 1, "dp": 4, "tp": 2, "pp": 2,
        "sharding_class": "zero1", "recompute_class": "full", "precision_class": "bf16", "seq_parallel": "no",
    }  # fmt: skip
    return RunRow(**{**values, **changes})  # type: ignore[arg-type]


def inputs_of(**changes: object) -> RunInputs:
    found = run_inputs(a_row(**changes))
    assert isinstance(found, RunInputs), found
    return found


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


def test_drives_give_the_node_its_storage() -> None:
    groups = inputs_of(offload="params to NVMe, 2 SSDs", sharding_class="zero3", pp=1, dp=8).cluster.groups
    assert groups[0].storage_bytes_per_s == 2 * 4.5e9


def test_partial_recompute_is_the_part_of_the_blocks() -> None:
    layout = inputs_of(
        recompute="op-level: fraction of ops recomputed per stage [0.6, 0.2]", recompute_class="custom"
    ).layout
    assert (layout.recompute, layout.recompute_fraction) == ("full", pytest.approx(0.4))
    assert inputs_of(recompute="first 6 layers", recompute_class="custom").layout.recompute_fraction == 0.25
    assert inputs_of(recompute="[not numbers]", recompute_class="custom").layout.recompute_fraction == 1.0


def test_a_printed_plan_fills_the_mapping_and_each_stage() -> None:
    row = a_row(
        layers=12, n_gpus=4, pp=2, tp=None, dp=None, micro_batch=None, sharding_class="unknown", offload="Mist mixed",
        recompute="Mist per-stage", recompute_class="custom", notes=MIST,
    )  # fmt: skip
    assert stage_fractions(row) == ((0.75, 0.0), (0.25, 0.75))
    found = run_inputs(row)
    assert isinstance(found, RunInputs)
    assert (found.layout.dp_shard, found.layout.zero_stage, found.layout.micro_batch_size) == (2, 1, 2)
    assert found.layout.recompute_fraction == 0.25
    assert [layout.recompute for layout in found.stage_layouts] == ["full", "none"]
    assert predict([row])[0].estimate is not None


def test_open_degrees_follow_from_the_others_and_are_named_where_they_do_not() -> None:
    assert inputs_of(tp=None).layout.tp == 2
    assert inputs_of(dp=None).layout.dp == 4
    found = inputs_of(micro_batch=None, grad_accum=4)
    assert (found.layout.micro_batch_size, "micro_batch" in found.assumed) == (4, True)
    assert "micro_batch=1" in inputs_of(micro_batch=None).assumed


def test_stages_without_layers_are_predicted() -> None:
    row = a_row(layers=3, pp=16, tp=1, dp=1)
    estimate = predict([row])[0].estimate
    assert estimate is not None
    assert sum(stage.forward_s > 0 for stage in estimate.stages) == 5


def test_published_names_have_their_published_size() -> None:
    published = {
        "GPT3-20B": 20.2, "Nemotron-22B": 21.3, "Llama-3.2-3b": 3.2, "phi-2": 2.8, "gemma-2b": 2.5, "falcon-7b": 6.9,
        "Yi-34B": 34.4, "DeepSeek-V2": 235.7, "bloom-176b": 176.2, "opt-66b": 65.7, "qwen3-0.6b": 0.596, "qwen3-4b": 4.02,
    }  # fmt: skip
    for name, size in published.items():
        blank = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"))
        found = inputs_of(model=name, model_family="", tp=1, pp=1, dp=16, **blank)
        assert found.model.num_params / 1e9 == pytest.approx(size, rel=0.03), name


def test_shapes_are_whole_heads_and_a_size_alone_gives_its_parameters() -> None:
    assert shape_named("meta-llama/Llama-2-7b-hf") is None  # of the catalogue
    assert all(shape.heads % shape.kv_heads == 0 for shape, _ in published_shapes().values())
    for params in (1e9, 24e9, 175e9):
        shape = shape_of_size(params, 51200)
        assert 12 * shape.layers * shape.hidden**2 + 51200 * shape.hidden == pytest.approx(params, rel=0.15)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"), ("A100 40GB PCIe", "A100-PCIe-40GB"),
        ("NVIDIA GeForce RTX 4090", "RTX4090-24GB"),
        ("AMD Instinct MI300X", "MI300X-192GB"), ("GB200 NVL72", "GB200-186GB"), ("H200 NVL", "H200-NVL-141GB"),
        ("TPU v5p", "TPU-v5p"), ("Intel Gaudi 3", "Gaudi3-128GB"), ("abacus", None), ("", None),
    ],
)  # fmt: skip
def test_device_spellings(text: str, name: str | None) -> None:
    assert device_named(text) == name


def test_tables_name_what_the_catalogue_has_and_state_their_sources() -> None:
    assert {line["device"] for line in read_table("devices")} <= set(device_entries())
    links = {name for line in read_table("networks") for name in line["links"].split()}
    assert links | {line["scaleup"] for line in read_table("devices")} - {""} <= set(link_entries())
    for name in ("devices", "networks", "families", "shapes"):
        assert all(line["source"] for line in read_table(name)), name


def test_every_choice_of_a_framework_has_a_last_resort_and_sources() -> None:
    for choice, lines in framework_choices().items():
        assert lines[-1]["framework"] == "", choice
        assert all(line["source"] for line in lines), choice
    defaults = FrameworkDefaults("nobody's engine")
    assert defaults.assume("precision") == "bf16"
    assert defaults.value("packed_document") is None
    assert defaults.assumed == ["precision=bf16"]


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


def test_layout_text_round_trips_what_is_predicted_only() -> None:
    layout = Layout.parse("dp_shard=8,offload=optimizer,offload_fraction=0.5,recompute=full,recompute_fraction=0.25")
    assert (layout.offload_fraction, layout.recompute_fraction) == (0.5, 0.25)
    assert "offload=optimizerx0.5" in str(layout)
