"""The search sets the switches of an engine; gradients in 16 bits only where they are worth it, and never unsaid."""

from __future__ import annotations

import pytest
from meshwright.engines import export
from meshwright.planner import plan
from meshwright.planner.explain.report import explain
from meshwright.planner.request import PlanRequest
from meshwright.planner.space import build_space
from meshwright.schema import ClusterSpec, ModelSpec, TrainingPlan, Workload
from meshwright.schema.errors import ConfigError


def plan_of(model: str, cluster: str, batch: int, seq_len: int = 8192, **changes: object) -> TrainingPlan:
    fixed, precision = changes.pop("fixed", None), changes.pop("precision", "bf16-mixed")
    workload = Workload(seq_len=seq_len, global_batch_size=batch, engine="megatron", precision=precision)  # type: ignore[arg-type]
    return plan(ModelSpec.named(model), ClusterSpec.parse(cluster), workload, fixed=fixed)  # type: ignore[arg-type]


@pytest.mark.long
def test_nvidias_recipe_for_405b_is_found() -> None:
    """tp 8, pp 8 in 8 chunks, cp 2, chunks of products, gradients in bf16: 326 to 328 tokens a second and GPU were measured."""
    found = plan_of("llama-3.1-405b", "1024xH100-SXM-80GB", 512, precision="fp8")
    tokens_per_s = found.workload.tokens_per_step / found.estimate.step_time_s / found.layout.world_size
    assert tokens_per_s > 320
    assert found.layout.tp_overlap and found.layout.sequence_parallel
    without = {"tp_overlap": False, "gradients": "fp32"}
    slower = plan_of("llama-3.1-405b", "1024xH100-SXM-80GB", 512, precision="fp8", fixed=without)
    assert slower.estimate.step_time_s > 1.1 * found.estimate.step_time_s
    assert slower.layout.gradients == "fp32" and not slower.layout.tp_overlap


def test_gradients_stay_in_fp32_where_16_bits_gain_nothing() -> None:
    found = plan_of("llama-3.1-8b", "8xH100-SXM-80GB", 128)
    assert found.layout.gradients == "fp32"
    assert not any("16 bits" in note for note in found.notes)
    assert found.search is not None
    assert found.estimate.step_time_s <= 1.01 * found.search.objective_s


def test_gradients_in_16_bits_are_said_with_their_worth_and_can_be_forbidden() -> None:
    found = plan_of("llama-3.1-70b", "64xH100-SXM-80GB", 128)
    assert found.layout.gradients == "compute"
    note = next(note for note in found.notes if "16 bits" in note)
    assert "--fix gradients=fp32" in note
    said = [text for text in explain(found, time_limit_s=0.1).notes if text.startswith("without ")]
    assert [text.split()[1] for text in said] == ["gradients=compute", "tp_overlap=true"]
    kept = plan_of("llama-3.1-70b", "64xH100-SXM-80GB", 128, fixed={"gradients": "fp32"})
    assert kept.layout.gradients == "fp32"
    assert kept.estimate.step_time_s > found.estimate.step_time_s
    asked = plan_of("llama-3.1-70b", "64xH100-SXM-80GB", 128, fixed={"gradients": "compute"})
    assert not any("16 bits" in note for note in asked.notes)


def test_short_passes_are_planned_as_graphs() -> None:
    found = plan_of("llama-3.2-1b", "8xH100-SXM-80GB", 8, seq_len=1024)
    eager = plan_of("llama-3.2-1b", "8xH100-SXM-80GB", 8, seq_len=1024, fixed={"cuda_graphs": False})
    assert found.layout.cuda_graphs
    assert found.estimate.step_time_s < 0.95 * eager.estimate.step_time_s


def test_experts_exchange_beside_another_micro_batch_where_it_is_worth_it() -> None:
    """Over two nodes: the plan says what it gains, and its overrides and options turn it on."""
    found = plan_of("qwen3-30b-a3b", "2x8xH100-SXM-80GB/ib400", 256, seq_len=4096, fixed={"ep": 16, "tp": 1})
    assert found.layout.ep_overlap
    forbidden = {"ep": 16, "tp": 1, "ep_overlap": False}
    without = plan_of("qwen3-30b-a3b", "2x8xH100-SXM-80GB/ib400", 256, seq_len=4096, fixed=forbidden)
    assert without.estimate.step_time_s > 1.03 * found.estimate.step_time_s
    said = [text for text in explain(found, time_limit_s=0.1).notes if text.startswith("without ep_overlap=true")]
    assert len(said) == 1 and "% longer" in said[0]
    assert "--overlap-moe-expert-parallel-comm" in export(found, "megatron").files[0][1]
    assert "overlap_moe_expert_parallel_comm: true" in export(found, "nemo").files[0][1]


@pytest.mark.parametrize("model", ["llama-3.2-1b", "mixtral-8x7b"])
def test_sequences_are_split_with_tp_and_chunks_only_then(model: str) -> None:
    request = PlanRequest(
        ModelSpec.named(model),
        ClusterSpec.parse("2x8xH100-SXM-80GB/ib400"),
        Workload(seq_len=2048, global_batch_size=16, engine="megatron"),
    )
    batch = build_space(request).batch
    assert ((batch.sequence_parallel == 1) == (batch.tp > 1)).all()
    assert (batch.tp_overlap <= batch.sequence_parallel).all()
    assert batch.tp_overlap.any()


def test_other_devices_and_engines_have_none() -> None:
    model, workload = ModelSpec.named("llama-3.2-1b"), Workload(seq_len=1024, global_batch_size=8, engine="megatron")
    of_amd = build_space(PlanRequest(model, ClusterSpec.parse("8xMI300X"), workload)).batch
    assert not of_amd.tp_overlap.any() and not of_amd.cuda_graphs.any()
    for engine in ("fsdp2", "deepspeed"):
        batch = build_space(
            PlanRequest(model, ClusterSpec.parse("8xH100-SXM-80GB"), workload.replace(engine=engine))
        ).batch
        assert engine == "fsdp2" or not batch.tp_halves.any()
        assert not (batch.tp_overlap.any() or batch.cuda_graphs.any() or batch.gradients.any())
        assert not batch.ep_overlap.any()
        with pytest.raises(ConfigError, match="can be executed") as error:
            plan(
                model,
                ClusterSpec.parse("8xH100-SXM-80GB"),
                workload.replace(engine=engine),
                fixed={"cuda_graphs": True},
            )
        assert f"[cuda_graphs_of_{engine}]" in str(error.value)


SIXTY_FOUR = ClusterSpec.parse("8x8xH100-SXM-80GB/ib400")


@pytest.mark.long
def test_half_batches_are_planned_where_a_short_batch_needs_tensor_parallelism() -> None:
    """Half a sequence for each GPU: tp has to share them, and its communication is what the step waits for."""
    model, workload = ModelSpec.named("llama-3.1-70b"), Workload(seq_len=4096, global_batch_size=32)
    found = plan(model, SIXTY_FOUR, workload)
    without = plan(model, SIXTY_FOUR, workload, fixed={"tp_halves": False})
    # What a layer recomputes may make the host, which launches twice as many collectives, the slower one.
    unhalved = found.unhalved_layers
    assert found.layout.tp_halves and all(found.stages[0].recompute_of(idx) == "selective" for idx in unhalved)
    assert found.estimate.step_time_s < 0.98 * without.estimate.step_time_s
    assert all(found.is_by_halves(idx) == (0 < idx <= 80 and idx not in unhalved) for idx in range(82))
    (said,) = [text for text in explain(found, time_limit_s=0.1).notes if text.startswith("overlap: ")]
    assert f"{80 - len(unhalved)} x" in said and "by half-batches" in said


def test_explain_says_what_a_mode_that_loses_would_cost() -> None:
    model, workload = ModelSpec.named("llama-3.2-1b"), Workload(seq_len=512, global_batch_size=16)
    fixed = {"tp": 8, "micro_batch_size": 2, "tp_halves": False}
    found = plan(model, ClusterSpec.parse("8xH100-SXM-80GB"), workload, fixed=fixed)
    (said,) = [text for text in explain(found, time_limit_s=0.1).notes if text.startswith("overlap: ")]
    assert "with tp_halves=true it would take" in said
    odd = plan(model, ClusterSpec.parse("8xH100-SXM-80GB"), workload, fixed=fixed | {"micro_batch_size": 1})
    (said,) = [text for text in explain(odd, time_limit_s=0.1).notes if text.startswith("overlap: ")]
    assert "tp_halves=true cannot be" in said and "[rows_divide]" in said


def test_layers_that_lose_by_half_batches_are_named_as_whole() -> None:
    """A thousand tokens: two products of half as many rows take longer than what they hide."""
    model, workload = ModelSpec.named("llama-3.1-8b"), Workload(seq_len=1024, global_batch_size=16)
    fixed = {"tp": 2, "pp": 1, "cp": 1, "micro_batch_size": 2, "tp_halves": True}
    found = plan(model, ClusterSpec.parse("8xH100-SXM-80GB"), workload, fixed=fixed)
    assert found.unhalved_layers == tuple(range(1, 33))
    assert TrainingPlan.model_validate_json(found.model_dump_json()) == found
    plain = plan(model, ClusterSpec.parse("8xH100-SXM-80GB"), workload, fixed=fixed | {"tp_halves": False})
    assert found.estimate.step_time_s == pytest.approx(plain.estimate.step_time_s)
