"""Laws of the seconds of a serving step, on models and layouts of every kind."""

from __future__ import annotations

import numpy as np
import pytest
from meshwright.cost_models.layer.operators import OperatorRules, layer_operators
from meshwright.cost_models.serving.attention import state_element_bytes
from meshwright.cost_models.serving.engine import EngineProfile
from meshwright.cost_models.serving.operators import KERNELS, operators
from meshwright.cost_models.serving.simulation import EnginePool
from meshwright.cost_models.serving.step import StepCosts, decoding_plane, prompts_plane
from meshwright.cost_models.serving.tables import Plane
from meshwright.schema import ClusterSpec, ConfigError, ModelSpec
from meshwright.schema.serving import ServingLayout, WeightDtype

LAYOUTS = [
    ("llama-3.1-8b", {}, "bf16"),
    ("qwen3-32b", {"tp": 4}, "fp8"),
    ("qwen3-32b", {"tp": 2, "pp": 2}, "int4"),
    ("deepseek-v3", {"attention_dp": 8, "ep": 8}, "fp8"),
    ("gpt-oss-120b", {"tp": 4, "ep": 2}, "mxfp4"),
    ("gemma-2-9b", {"tp": 2}, "bf16"),
]


def costs(
    name: str, layout: dict[str, int], weights: WeightDtype = "bf16", cluster: str = "8xH100-SXM-80GB"
) -> StepCosts:
    return StepCosts.build(
        ModelSpec.named(name), ClusterSpec.parse(cluster), ServingLayout(**layout), weights=weights, cache="bf16"
    )


@pytest.mark.parametrize(("name", "layout", "weights"), LAYOUTS)
def test_more_rows_tokens_and_prompts_are_never_faster(name: str, layout: dict[str, int], weights: WeightDtype) -> None:
    step = costs(name, layout, weights)
    # A wave of tiles that becomes full may save what the interpolation rounds off.
    grows = lambda values: np.all(np.diff(values) >= -0.01 * values[:-1])  # noqa: E731
    rows = 2.0 ** np.arange(0, 12)
    assert grows(step.seconds(rows, rows * 1000))
    assert grows(step.seconds(16, 16 * 2.0 ** np.arange(4, 17)))
    assert grows(step.seconds(16, 16_000, 2.0 ** np.arange(6, 14), 500))
    assert grows(step.seconds(16, 16_000, 4096, 2.0 ** np.arange(5, 15)))
    assert step.seconds(16, 16_000, 512, 256, prompts=8) > step.seconds(16, 16_000, 512, 256)


@pytest.mark.parametrize(("name", "layout", "weights"), LAYOUTS)
def test_parts_sum_to_the_seconds_and_arrays_broadcast(name: str, layout: dict[str, int], weights: WeightDtype) -> None:
    step = costs(name, layout, weights)
    rows, tokens = np.array([[1.0], [7.0], [64.0]]), np.array([0.0, 100.0, 3000.0])
    seconds, parts = (
        step.seconds(rows, rows * 500, tokens, tokens / 2),
        step.parts(rows, rows * 500, tokens, tokens / 2),
    )
    assert seconds.shape == (3, 3)
    np.testing.assert_allclose(seconds, sum(parts.values()))
    np.testing.assert_allclose(seconds[1, 2], step.seconds(7, 3500, 3000, 1500))


def test_a_step_without_rows_costs_nothing() -> None:
    assert costs("qwen3-8b", {"tp": 2}).seconds(0, 0) == 0


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3", "qwen3-30b-a3b", "gpt-oss-20b", "gemma-2-9b"])
def test_weights_of_one_device_are_the_parameters(name: str) -> None:
    model = ModelSpec.named(name)
    of_mtp = sum(run.count * run.layer.num_params(model.hidden_dim) for run in model.layers if run.layer.kind == "mtp")
    step = costs(name, {}, cluster="1xH200-SXM-141GB")
    assert step.weight_bytes == pytest.approx(2 * (model.num_params - of_mtp))


@pytest.mark.parametrize("layout", [{"tp": 8}, {"attention_dp": 8, "ep": 8}, {"tp": 2, "attention_dp": 4, "ep": 4}])
def test_experts_are_divided_over_all_devices_of_a_stage(layout: dict[str, int]) -> None:
    model = ModelSpec.named("qwen3-30b-a3b")
    experts = sum(
        run.count * run.layer.experts.num_experts * run.layer.experts.expert.num_params(model.hidden_dim)
        for run in model.layers
        if run.layer.experts
    )
    one, many = costs(model.name, {}), costs(model.name, layout)
    assert many.weight_bytes - 2 * experts / 8 <= (one.weight_bytes - 2 * experts) * (
        1 if layout.get("tp", 1) == 1 else 0.6
    )
    assert many.weight_bytes >= 2 * experts / 8


def test_tensor_parallelism_halves_weights_and_cache() -> None:
    one, two = costs("llama-3.1-70b", {"tp": 4}), costs("llama-3.1-70b", {"tp": 8})
    assert two.weight_bytes == pytest.approx(one.weight_bytes / 2, rel=0.01)
    assert two.cache_bytes_per_token == one.cache_bytes_per_token / 2
    few = (
        costs("llama-3.1-70b", {"tp": 4}).parts(1, 100)["products"]
        / costs("llama-3.1-70b", {"tp": 8}).parts(1, 100)["products"]
    )
    assert 1.3 < few < 2.0


def test_fewer_bytes_of_weights_decode_faster() -> None:
    bf16, fp8, int4 = (
        costs("llama-3.1-70b", {"tp": 8}, dtype).parts(1, 100)["products"] for dtype in ("bf16", "fp8", "int4")
    )
    assert int4 < fp8 < bf16


def test_windows_bound_what_a_row_reads_and_states_do_not_grow() -> None:
    step = costs("gpt-oss-20b", {})
    assert [window for window, _ in step.window_cache_bytes] == [128]
    all_of_it, half = step.cache_bytes_per_token, sum(size for _, size in step.window_cache_bytes)
    assert half == pytest.approx(all_of_it / 2)


def test_a_filled_pipeline_moves_with_its_slowest_stage() -> None:
    """The last of llama-3.1-8b's two stages has the head, and the first waits for it."""
    step = costs("llama-3.1-8b", {"pp": 2})
    totals = [float(sum(stage.parts(step.queries, *np.array([16.0, 16e3, 0, 0, 0])).values())) for stage in step.stages]
    assert totals[1] > totals[0]
    filled = step.filled().parts(16, 16e3)
    assert float(sum(filled.values())) == pytest.approx(2 * totals[1])
    profile = EngineProfile.named("vllm")
    limits = profile.limits(device_bytes=80e9, cache_tokens=100_000, max_batch=64)
    pool = EnginePool.of(step, profile, limits, lanes=2)
    assert pool.table.decode_s(16, 16e3) > float(step.seconds(16, 16e3)) + 0.5 * float(filled["imbalance"])


def test_scales_of_blocks_and_gates_cost_kernels() -> None:
    """Mixtures of 8 bits have scales by blocks; gates of shared experts and of delta rules are products of their own."""
    block = next(b for b, _ in ModelSpec.named("qwen3.5-397b-a17b").block_runs if getattr(b.attention, "delta", False))
    instance = costs("qwen3.5-397b-a17b", {"tp": 8}, "fp8").instance
    assert instance.block_s > 0 == costs("qwen3-32b", {"tp": 8}, "fp8").instance.block_s
    listed = {op.name: op for op in operators(instance, block)}
    plain = {op.name: op for op in layer_operators(block, OperatorRules(hidden_dim=4096, kernels=KERNELS))}
    assert {"shared_gate", "state_gates", "state_split"} == listed.keys() - plain.keys()
    assert listed["shared_sum"].forward_elements > 0 == plain["shared_sum"].forward_elements
    assert listed["state_in"].n + listed["state_gates"].n == plain["state_in"].n
    assert state_element_bytes(block, 2) == 4


def test_an_indexer_costs_its_scores_and_bounds_what_is_read() -> None:
    """Sparse attention (DeepSeek-V3.2) is slower than all of it for few tokens, and faster for many."""
    instance = costs("glm-5", {}, "fp8").instance
    sparse = instance.model.block_runs[-1][0].halves[0]
    dense = sparse.replace(attention=sparse.attention.replace(index_heads=0, index_dim=0, index_top_k=0))
    assert {op.name for op in operators(instance, sparse)} - {op.name for op in operators(instance, dense)} == {
        "index_q", "index_k", "index_weights", "index_rotation"
    }  # fmt: skip
    for plane, size in ((decoding_plane, 64.0), (prompts_plane, 16384.0)):
        few, many = (
            [float(Plane.of(plane(instance, block))(size, tokens)) for block in (sparse, dense)]
            for tokens in (1024.0, 2.0**18)
        )
        assert few[0] > few[1]
        assert many[0] < many[1]


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="tp 3 does not divide the 32 heads"):
        costs("llama-3.1-8b", {"tp": 3})
    with pytest.raises(ConfigError, match="ep 5 does not divide the 128 experts"):
        costs("qwen3-30b-a3b", {"attention_dp": 5, "ep": 5})
