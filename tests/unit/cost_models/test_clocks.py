"""Rates of products by format and by the board's watts."""

from __future__ import annotations

import pytest
from meshwright.planner import estimate
from meshwright.schema import Calibration, ClusterSpec, Layout, ModelSpec, Workload
from meshwright.schema.task import Precision


@pytest.mark.parametrize(
    ("precision", "slowed"), [("bf16-mixed", None), ("fp8", "fp8_products"), ("nvfp4", "fp4_products")]
)
def test_a_ratio_of_one_format_slows_products_in_that_format_only(precision: Precision, slowed: str | None) -> None:
    cluster, model = ClusterSpec.parse("8xB200"), ModelSpec.named("llama-3.1-8b")
    workload, layout = Workload(seq_len=4096, global_batch_size=8, precision=precision), Layout(dp_shard=8)
    plain = estimate(model, cluster, workload, layout).step_time_s
    for name in ("fp8_products", "fp4_products"):
        changed = cluster.replace(calibration=Calibration(**{name: 0.5}))
        seconds = estimate(model, changed, workload, layout).step_time_s
        assert (seconds > 1.1 * plain) == (name == slowed)
        assert seconds > 1.1 * plain or seconds == plain
