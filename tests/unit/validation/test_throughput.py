"""A rate in FLOPs says the time of a step as soon as it is known what its publisher counted."""

from __future__ import annotations

import pytest
from meshwright.cost_models.stage.step import forward_flops_per_token, step_flops_per_token
from meshwright.validation.throughput import counted_flops_per_token
from run_rows import a_row, inputs_of

TFLOPS = 150.0


def counted(kind: str, **changes: object) -> float:
    """Return the FLOPs of a token over those of the plain count (3 F + 3 A)."""
    row = a_row(tflops_kind=kind, **changes)
    run = inputs_of(tflops_kind=kind, **changes)
    flops = counted_flops_per_token(row, run.model, run.workload, run.layout)
    return flops / step_flops_per_token(run.model, run.workload)


def of_products_and_attention(weights: tuple[float, float], *, of_blocks: float = 0.0) -> float:
    """Return weights[0] F + weights[1] A + of_blocks (F + 2 A of the blocks), over 3 F + 3 A."""
    run = inputs_of()
    layers = tuple((layer.layer, layer.count) for layer in run.model.layers)
    products, attention = forward_flops_per_token(layers, run.model.hidden_dim, run.workload.seq_len)
    blocks = forward_flops_per_token(layers[1:2], run.model.hidden_dim, run.workload.seq_len)
    flops = weights[0] * products + weights[1] * attention + of_blocks * (blocks[0] + 2 * blocks[1])
    return flops / (3 * products + 3 * attention)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("model, causal attention counted", (3.0, 3.0)),
        ("model (6N + 12*L*h*s per token, full non-causal attention)", (3.0, 6.0)),
        ("6*N a token", (3.0, 0.0)),
        ("", (3.0, 6.0)),
    ],
)
def test_attention_counts_as_the_kind_says(kind: str, expected: tuple[float, float]) -> None:
    assert counted(kind) == pytest.approx(of_products_and_attention(expected), rel=1e-12)


def test_a_framework_that_halves_attention_is_known() -> None:
    assert counted("model", framework="Megatron-Bridge") == pytest.approx(1.0, rel=1e-12)
    assert counted("model", framework="Megatron-Core") == pytest.approx(1.0, rel=1e-12)
    assert counted("model", framework="Megatron-Core", date="2024-09") > 1


def test_hardware_flops_count_what_was_recomputed() -> None:
    kind = "HARDWARE FLOPs incl. recompute"
    every = of_products_and_attention((3.0, 6.0), of_blocks=1.0)
    assert counted(kind, recompute_class="full") == pytest.approx(every, rel=1e-12)
    half = of_products_and_attention((3.0, 6.0), of_blocks=0.5)
    assert counted(kind, recompute_class="full", recompute="12 layers") == pytest.approx(half, rel=1e-12)
    assert counted(kind, recompute_class="none") == pytest.approx(of_products_and_attention((3.0, 6.0)), rel=1e-12)
    # Megatron's 96 B s L h^2 counts a fourth pass in any case.
    assert counted("96*B*s*l*h^2 formula", recompute_class="none") == pytest.approx(every, rel=1e-12)


def test_step_time_of_a_rate_gives_the_rate_back() -> None:
    run = inputs_of(iter_time_s=None, tflops_per_gpu=TFLOPS, tflops_kind="model, causal attention counted")
    assert run.measured_s is not None
    flops = step_flops_per_token(run.model, run.workload) * run.workload.tokens_per_step
    assert flops / run.measured_s / 16 == pytest.approx(TFLOPS * 1e12, rel=1e-12)
    # Of an A100, whose peak is 312 TFLOP/s.
    of_peak = inputs_of(iter_time_s=None, mfu=TFLOPS / 312, tflops_kind="model, causal attention counted")
    assert of_peak.measured_s == pytest.approx(run.measured_s, rel=1e-9)


def test_rate_of_stated_micro_batches_is_that_of_one_pass_without_a_pipeline() -> None:
    open_batch = {"iter_time_s": None, "global_batch": None, "tokens_per_s_per_gpu": 1000.0}
    run = inputs_of(**open_batch, pp=1, dp=8)
    assert run.measured_s == pytest.approx(8 * 2048 / (1000 * 16))
    assert inputs_of(**open_batch).measured_s is None
    assert inputs_of(**open_batch, pp=1, dp=8, micro_batch=None).measured_s is None


def test_a_printed_time_counts_before_a_rate() -> None:
    assert inputs_of(iter_time_s=2.0, tflops_per_gpu=TFLOPS).measured_s == 2.0


@pytest.mark.parametrize("changes", [{"global_batch": None}, {"status": "oom"}, {"tflops_per_gpu": None}])
def test_nothing_to_measure_by(changes: dict[str, object]) -> None:
    run = inputs_of(**{"iter_time_s": None, "tflops_per_gpu": TFLOPS, **changes})
    assert run.measured_s is None
