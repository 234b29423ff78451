"""Seconds of a measured step: as printed, from tokens a second, or from TFLOP/s or MFU by what its publisher counted.

FLOPs of a token, with F of the products with weights and A of causal attention in a forward pass (the model that we predict):

    products   3 F, 2 F of a frozen model
    attention  3 A counted causally, 6 A counted as if every token saw all others, 0 where it is left out
    recompute  the forward pass of what is executed again: F + A or F + 2 A, the fraction of the blocks that recompute

words.csv reads what column tflops_kind says of it; where it says nothing, frameworks.toml has what the framework's counter does.
"""

from __future__ import annotations

from ..cost_models.hardware.machine import peak_flops_per_s
from ..cost_models.stage.step import forward_flops_per_token
from ..schema import Layout, ModelSpec, Workload
from ..schema.cluster import Device
from .rows import FrameworkDefaults, RunRow, stated

_ATTENTION = {"causal": 1.0, "full": 2.0, "none": 0.0}


def measured_step_s(row: RunRow, model: ModelSpec, workload: Workload, layout: Layout, device: Device) -> float | None:
    """Return the seconds of a step that a row measured; None where it has no rate, or no batch to which a rate could apply.

    A rate of stated micro-batches holds for a step of any length but under a pipeline: then it is that of one pass.
    """
    has_batch = row.global_batch is not None or (row.micro_batch is not None and layout.pp == 1)
    if row.measured_s is not None or row.status != "ok" or not has_batch:
        return row.measured_s
    if row.tokens_per_s_per_gpu:
        return workload.tokens_per_step / (row.tokens_per_s_per_gpu * layout.world_size)
    flops_per_s = (row.tflops_per_gpu or 0.0) * 1e12
    if not flops_per_s and row.mfu is not None:
        flops_per_s = row.mfu * peak_flops_per_s(device, workload.precision)
    if not flops_per_s:
        return None
    flops = workload.tokens_per_step * counted_flops_per_token(row, model, workload, layout)
    return flops / (flops_per_s * layout.world_size)


def counted_flops_per_token(row: RunRow, model: ModelSpec, workload: Workload, layout: Layout) -> float:
    """Return the FLOPs that a row's publisher counts for a token of a training step."""
    layers = tuple((run.layer, run.count) for run in model.layers)
    blocks = tuple(pair for pair in layers if pair[0].is_block)
    of_attention = stated("counted attention", row.tflops_kind) or FrameworkDefaults(row).value("counted_attention")
    weight = _ATTENTION[of_attention]
    products, attention = forward_flops_per_token(layers, model.hidden_dim, workload.attended_len)
    flops = (2 if workload.adapters else 3) * products + 3 * weight * attention
    again = stated("counted recompute", row.tflops_kind)
    if again == "none" or (again == "as run" and layout.recompute == "none"):
        return flops
    fraction = layout.recompute_fraction if again == "as run" else 1.0
    products, attention = forward_flops_per_token(blocks, model.hidden_dim, workload.attended_len)
    if again == "as run" and layout.recompute == "selective":
        products = 0.0  # the core of attention alone
    return flops + fraction * (products + weight * attention)
