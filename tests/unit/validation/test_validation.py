"""Validation against measured runs: reading tables, rows as nouns, scores and regret by hand."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
from meshwright.cost_models.stage.table import CostTable
from meshwright.planner import estimate
from meshwright.schema import ClusterSpec, ConfigError, Layout, ModelSpec, Workload
from meshwright.schema.layers import Block, DenseMLP, Embedding, Head, LayerRun, SoftmaxAttention
from meshwright.schema.layout_table import LayoutTable
from meshwright.schema.units import GIB
from meshwright.validation import (
    RunInputs,
    Skip,
    predict,
    read_groups,
    read_runs,
    run_inputs,
    score_groups,
    score_sources,
)
from meshwright.validation.clusters import network_link
from meshwright.validation.predict import boundaries
from meshwright.validation.rows import RunRow
from meshwright.validation.score import log_bias, memory_kind, rank_correlation, regret, relative_error

SHARED = Path(__file__).resolve().parents[4] / "shared/data/measured_runs"

HEADER = (
    "id,source_set,decision_group,framework,gpu_type,gpus_per_node,inter_interconnect,n_gpus,model,"
    "model_family,layers,hidden,heads,kv_heads,ffn,vocab,params_b,seq_len,global_batch,micro_batch,dp,tp,pp,"
    "vpp,sharding_class,recompute_class,precision_class,iter_time_s,peak_mem_gib,mem_kind,status,quality,flag"
)
GPT = "Megatron-LM,A100-SXM-80GB,8,,8,gpt,GPT,24,2048,16,16,8192,51200,1.3"
GOOD = (
    f"a,s,g,{GPT},2048,64,2,4,2,1,1,none,none,fp16,2.0,20,max_allocated,ok,A,",
    f"b,s,g,{GPT},2048,64,1,8,1,1,1,zero1,full,fp16,3.0,,,ok,A,",
    f"c,s,g,{GPT},2048,64,64,8,1,1,1,none,none,fp16,,,,oom,B,",
    f"d,s,g,{GPT},2048,64,1,8,1,1,1,none,none,fp16,1.0,,,ok,C,",
)


def table(tmp_path: Path, *lines: str, header: str = HEADER) -> Path:
    path = tmp_path / "runs.csv"
    path.write_text("\n".join((header, *lines)) + "\n")
    return path


def a_row(**changes: object) -> RunRow:
    values = {
        "line": 2, "id": "x", "framework": "Megatron-LM", "gpu_type": "A100-SXM-80GB", "gpus_per_node": 8, "n_gpus": 16,
        "model": "gpt", "model_family": "GPT-3", "layers": 24, "hidden": 2048, "heads": 16, "kv_heads": 16, "ffn": 8192,
        "vocab": 51200, "seq_len": 2048,
        "global_batch": 64, "micro_batch": 1, "dp": 4, "tp": 2, "pp": 2, "sharding_class": "zero1", "recompute_class": "full",
        "precision_class": "bf16", "seq_parallel": "no",
    }  # fmt: skip
    return RunRow(**{**values, **changes})  # type: ignore[arg-type]


def inputs_of(**changes: object) -> RunInputs:
    found = run_inputs(a_row(**changes))
    assert isinstance(found, RunInputs), found
    return found


def test_rows_are_typed_and_empty_cells_are_unknown(tmp_path) -> None:
    rows = read_runs(table(tmp_path, *GOOD))
    assert [row.id for row in rows] == ["a", "b", "c", "d"]
    assert (rows[0].hidden, rows[0].iter_time_s, rows[0].inter_interconnect) == (2048, 2.0, "")
    assert rows[1].peak_mem_gib is None
    assert [row.is_scored for row in rows] == [True, True, True, False]
    assert rows[2].is_oom


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        (HEADER, "no rows"),
        ("id;model\n1;2\n", "line 1: no column"),
        (HEADER.replace("n_gpus", "gpus") + "\n" + GOOD[0], "no column n_gpus"),
        (HEADER.replace("n_gpus", "n_gpus,n_gpus") + "\n" + GOOD[0], "n_gpus appears more than once"),
        (HEADER + "\n" + GOOD[0] + ",1,2", "line 2: 35 cells, the header has 33"),
        (
            HEADER + "\n" + GOOD[0].replace(",2048,16,16,", ",wide,16,16,"),
            "line 2 column hidden: 'wide' is not a number",
        ),
        (HEADER + "\n" + GOOD[0].replace(",24,2048", ",2.5,2048"), "line 2 column layers: '2.5' is not a whole number"),
        (HEADER + "\n" + GOOD[0].replace(",2.0,20,", ",-2,20,"), "column iter_time_s: '-2' is not a positive number"),
        (HEADER + "\n" + GOOD[0].replace(",2.0,20,", ",nan,20,"), "column iter_time_s: 'nan' is not a positive number"),
        (HEADER + "\n" + GOOD[0] + "\n" + GOOD[0], "line 3 column id: 'a' is already on line 2"),
        (HEADER + '\n"a', "is not CSV"),
    ],
)
def test_malformed_table_is_named_by_line_and_column(tmp_path, content, message) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_runs(path)
    assert str(path) in str(caught.value)


def test_binary_or_missing_file_is_a_config_error(tmp_path) -> None:
    (tmp_path / "runs.csv").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "runs.csv", tmp_path / "none.csv", tmp_path):
        with pytest.raises(ConfigError):
            read_runs(path)


def test_model_is_built_from_the_columns_and_its_head_from_the_parameters() -> None:
    tied = 16 * (4 * 2048**2 + 3 * 2048 * 8192) + 131072 * 2048
    columns = {
        "model": "nanotron-1B",
        "model_family": "nanotron-1B",
        "layers": 16,
        "heads": 32,
        "kv_heads": 32,
        "vocab": 131072,
    }
    model = inputs_of(**columns, params_b=1.342).model
    assert model.tie_embeddings
    assert model.num_params == pytest.approx(tied, rel=1e-3)  # the norms
    untied = inputs_of(**columns, params_b=1.61).model
    assert not untied.tie_embeddings


def test_published_shape_is_taken_from_the_catalogue_even_truncated() -> None:
    llama = {
        "model": "x",
        "model_family": "Llama-3",
        "hidden": 8192,
        "heads": 64,
        "kv_heads": 8,
        "ffn": 28672,
        "vocab": 128256,
    }
    assert inputs_of(**llama, layers=80).model.name == "llama-3.1-70b"
    assert inputs_of(**llama, layers=12).model.num_blocks == 12


def test_wrong_parameter_count_is_named() -> None:
    assert "parameters" in inputs_of(params_b=9.0).approximated
    assert "parameters" not in inputs_of(params_b=1.3).approximated


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
    found = run_inputs(a_row(**changes))
    assert isinstance(found, Skip)
    assert reason in found.reason


def test_stand_ins_and_defaults_are_named() -> None:
    unstated = {"recompute_class": "unknown", "sharding_class": "", "seq_parallel": ""}
    found = inputs_of(cp=2, seq_len=1024, dp=2, vpp="4", framework="NeMo/Megatron-Core", **unstated)
    assert found.approximated == ()
    assert found.layout.num_model_chunks == (4 if found.layout.pp > 1 else 1)
    assert set(found.assumed) == {"sharding=zero1", "sequence_parallel=True", "recompute=none"}
    assert (found.layout.zero_stage, found.layout.sequence_parallel, found.layout.recompute) == (1, True, "none")


def test_context_and_expert_parallelism_are_axes_of_the_layout() -> None:
    found = inputs_of(cp=2, dp=2, seq_len=2048)
    assert (found.workload.seq_len, found.workload.global_batch_size) == (2048, 64)
    assert (found.layout.dp, found.layout.cp, found.layout.world_size) == (2, 2, 16)
    experts = {"experts": 8, "topk": 2, "ep": 4, "seq_parallel": "yes"}
    # Megatron cuts experts over tp unless told otherwise, where the ranks of a stage allow it.
    assert inputs_of(**experts).layout.etp == 2
    assert inputs_of(**experts, framework="torchtitan").layout.etp == 1
    assert inputs_of(**{**experts, "ep": 8}).layout.etp == 1
    assert inputs_of(**experts, etp=1).layout.etp == 1


def test_shared_experts_of_a_family_are_added_to_the_columns() -> None:
    """Qwen1.5-MoE-A2.7B: 14.3 B parameters, 2.7 B of them active."""
    shape = {"layers": 24, "hidden": 2048, "heads": 16, "kv_heads": 16, "ffn": 1408, "vocab": 151936}
    found = inputs_of(model="Qwen1.5-MoE-A2.7B", model_family="Qwen", experts=60, topk=4, params_b=14.3, **shape)
    assert found.approximated == ()
    assert found.model.num_active_params == pytest.approx(2.7e9, rel=0.01)


def test_deepseek_is_built_from_the_columns() -> None:
    """V2's published sizes: 236 B parameters, 21 B of them active."""
    shape = {"layers": 60, "hidden": 5120, "heads": 128, "kv_heads": 128, "ffn": 1536, "vocab": 102400}
    model = inputs_of(model="deepseek-v2", model_family="DeepSeek", experts=160, topk=6, **shape).model
    assert model.num_params == pytest.approx(236e9, rel=0.01)
    assert model.num_active_params == pytest.approx(21.4e9, rel=0.03)


def test_sharding_inside_a_group_is_hybrid() -> None:
    found = inputs_of(sharding_class="hybrid", sharding="FSDP group 8 + DP", tp=1, pp=1, dp=16)
    assert (found.layout.dp_shard, found.layout.dp_replicate, found.layout.zero_stage) == (8, 2, 3)


@pytest.mark.parametrize(
    ("text", "link", "gbit"),
    [
        ("InfiniBand NDR 400Gb/s per GPU (reference; not stated in table)", "ib400", 400),
        ("4x HDR InfiniBand = 800 Gb/s per node (config inter_node_bandwidth=800)", "ib200", 100),
        ("8x 200Gb/s HDR InfiniBand per node", "ib200", 200),
        ("4x Omni-Path 100 Gb/s per node (tr11 README)", "opa100", 50),
        ("4x100Gb RoCE per node", "roce100", 50),
        ("RoCE 1600 Gbps per node", "roce200", 200),
        ("EFA (AWS p5; 3200 Gb/s per node nominal)", "efa-v2", 400),
        ("EFA 400 Gb/s per node", "efa-v1", 50),
        ("GCP A3: 4x200 Gb/s TCP(X) (weak)", "tcpx", 100),
        ("100 Gbps Ethernet (not stated in repo)", "eth100", 100),
        (
            "Storage: 2x ConnectX-7 IB NDR 400Gb/s, Compute: 8x ConnectX-7 IB NDR 400Gb/s, Management: 100Gb/s NIC",
            "ib400",
            400,
        ),
        ("InfiniBand; Data bandwidth for GPU-PCIe: 504 GB/s; PCIe-NIC: 500 GB/s", "ib400", 400),
        ("not stated", "ib400", 400),
        ("Management: 1x Ethernet 10GB/Sec", "ib400", 400),
        ("1x Ethernet 100Gb/Sec, 8x NVIDIA Quantum-2 CX7 InfiniBand (400Gb/s)", "ib400", 400),
        ("6 x BCM57508 NetXtreme-E 10Gb/25Gb/100Gb/200Gb Ethernet, 2 x X710 for 10GBASE-T", "roce200", 150),
        ("10G Ethernet", "eth10", 10),
        ("25GbE", "eth25", 25),
        ("100GbE InfiniBand", "ib400", 400),
        ("InfiniBand 25 GB/s per GPU", "ib200", 200),
        ("AWS p4d.24xlarge", "efa-v1", 50),
        ("EFA v3 (p5en)", "efa-v3", 400),
        ("GCP A3 Mega, GPUDirect-TCPXO", "tcpxo", 200),
        ("JUWELS Booster, 4 x HDR200", "ib200", 200),
        ("Alps", "slingshot11", 200),
        ("Frontier (4 x Slingshot-11 for 8 GCDs)", "slingshot11-gcd", 100),
    ],
)
def test_network_text_gives_a_link_and_the_rate_of_one_device(text, link, gbit) -> None:
    found = network_link(text, devices_per_node=8, default="ib400")
    assert found.name == link
    assert found.bandwidth_bytes_per_s * 8 / 1e9 == pytest.approx(gbit)


def test_prediction_equals_the_estimator_where_our_rules_hold() -> None:
    row = a_row()
    inputs = inputs_of()
    found = predict([row])[0].estimate
    assert found is not None
    expected = estimate(inputs.model, inputs.cluster, inputs.workload, inputs.layout)
    # Even stages here, balanced ones there: embedding and head make them differ a little.
    assert found.step_time_s == pytest.approx(expected.step_time_s, rel=0.1)
    assert found.step_time_s >= expected.step_time_s * (1 - 1e-12)


def test_predictions_keep_the_order_of_rows_of_many_batches() -> None:
    sizes = [(2048, 1), (1024, 1), (2048, 2), (1024, 2)]
    rows = [a_row(id=str(n), seq_len=seq, micro_batch=micro) for n, (seq, micro) in enumerate(sizes)]
    together = predict(rows)
    assert [p.estimate for p in together] == [predict([row])[0].estimate for row in rows]


def test_scores_by_hand() -> None:
    assert relative_error([2.0, 1.0], [1.0, 2.0]) == pytest.approx(0.75)
    assert log_bias([2.0, 1.0], [1.0, 2.0]) == pytest.approx(0.0)
    assert log_bias([2.0, 8.0], [1.0, 1.0]) == pytest.approx(3.0)
    assert rank_correlation([1.0, 2.0, 3.0], [10.0, 30.0, 20.0]) == pytest.approx(0.5)
    assert rank_correlation([1.0, 1.0, 2.0, 2.0], [1.0, 1.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert rank_correlation([1.0, 2.0], [1.0, 2.0]) is None
    assert rank_correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None


def test_nanotron_cuts_stages_where_the_weights_pass_their_share() -> None:
    """Blocks of 12 h^2 and a head of 32 h^2 on 4 stages: 128 h^2 in all, a stage ends with the block that passes 32, 64, 96."""
    attention = SoftmaxAttention(kind="mha", num_heads=4, num_kv_heads=4, head_dim=16, rope_fraction=0.0)
    block = Block(attention=attention, mlp=DenseMLP(ffn_dim=256, gated=False))
    vocab = 32 * 64
    spec = ModelSpec(
        name="test",
        architecture="decoder",
        hidden_dim=64,
        layers=(
            LayerRun(layer=Embedding(vocab_size=vocab)),
            LayerRun(layer=block, count=8),
            LayerRun(layer=Head(vocab_size=vocab)),
        ),
        tie_embeddings=False,
        max_seq_len=4096,
    )
    batch = LayoutTable.from_layouts([Layout(pp=4)], 8)
    workload = Workload(seq_len=64, global_batch_size=8, engine="nanotron")
    costs = CostTable.from_layouts(spec, workload, ClusterSpec.parse("4xH100-SXM-80GB"), batch)
    assert boundaries(costs, 0, balanced=True) == (0, 4, 7, 9, 10)
    assert boundaries(costs, 0, balanced=False) == (0, 3, 5, 7, 10)


def test_regret_is_of_the_fastest_prediction_that_fits() -> None:
    assert regret([3.0, 1.0, 2.0], [True, False, True], [4.0, 1.0, 2.0], 1.0) == (2, 0.5)
    assert regret([3.0, 1.0, 2.0], [False, False, False], [4.0, 1.0, 2.0], 1.0) == (1, 0.0)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("max_allocated (max over ranks)", "allocated"),
        ("peak reserved (torchtitan log; max over ranks)", "reserved"),
        ("nvidia-smi style, integer GiB of 80", "nvidia-smi"),
        ("allocated vs reserved not stated", "unstated"),
        ('peak memory "GB" as printed, max over stages', "peak"),
        ("GPU memory as printed", "unstated"),
        ("", "unstated"),
    ],
)
def test_memory_kind_of_a_description(text, kind) -> None:
    assert memory_kind(text) == kind


def test_source_score_counts_every_row_once(tmp_path) -> None:
    rows = read_runs(table(tmp_path, *GOOD))
    predictions = predict(rows)
    groups = score_groups(rows, predictions, ["g", "absent"])
    score = score_sources(rows, predictions, groups)["s"]
    assert (score.rows, score.scored, score.unscored, score.skipped) == (4, 2, 1, {"layout: batch does not divide": 1})
    assert score.time is not None
    assert score.time.count == 2
    known = [p.estimate for p in predictions if p.estimate]
    assert score.time.mape == pytest.approx((abs(known[0].step_time_s / 2 - 1) + abs(known[1].step_time_s / 3 - 1)) / 2)
    assert score.memory["allocated"].bias == pytest.approx(known[0].peak_allocated_bytes / (20 * GIB) - 1)
    assert (score.fit.failed, score.fit.recall, score.fit.ran, score.fit.false_alarms) == (0, None, 2, 0.0)
    chosen = {"a": 2.0, "b": 3.0}[groups["g"].chosen or ""]
    assert groups["g"].regret == pytest.approx(1 - 2.0 / chosen)
    assert list(groups) == ["g"]


def test_groups_table_is_read_strictly(tmp_path) -> None:
    path = tmp_path / "groups.csv"
    path.write_text("decision_group,n_rows\ng,3\nh,2\n")
    assert read_groups(path) == ["g", "h"]
    path.write_text("decision_group\ng\ng\n")
    with pytest.raises(ConfigError, match="line 3 column decision_group: repeated"):
        read_groups(path)


@pytest.mark.skipif(not SHARED.exists(), reason=f"the measured runs are not beside the repository ({SHARED})")
def test_measured_runs_are_read_whole_and_mostly_predicted() -> None:
    rows = read_runs(SHARED / "training_runs.csv")
    with (SHARED / "training_runs.csv").open(newline="") as file:
        assert len(rows) == sum(1 for _ in csv.DictReader(file))
    rows = rows[::4]
    predictions = predict(rows)
    assert sum(p.estimate is not None for p in predictions) > 1000
    assert all((p.estimate is None) == (p.skipped is not None) for p in predictions)
    scores = score_sources(
        rows, predictions, score_groups(rows, predictions, read_groups(SHARED / "decision_groups.csv"))
    )
    assert sum(score.rows for score in scores.values()) == len(rows)
    assert all(math.isfinite(score.time.mape) for score in scores.values() if score.time)
    assert sum(score.regret.count for score in scores.values() if score.regret) > 50


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
        ({"framework": "torchtitan (FSDP2)", "source": "components/quantization/mxfp8.md bf16"}, "compiled", 2, False),
        ({"framework": "llm-foundry/Composer FSDP1"}, "engine", 1, False),
        ({"framework": "Megatron-DeepSpeed"}, "engine", 2, True),
        ({"framework": "NeMo/Megatron-Core"}, "engine", 2, False),
    ],
)
def test_kernels_follow_the_framework_and_what_the_row_states(changes, fusion, generation, dropout) -> None:
    workload = inputs_of(**changes).workload
    assert (workload.fusion, workload.flash_generation, workload.dropout) == (fusion, generation, dropout)
