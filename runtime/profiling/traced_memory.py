"""Memory and FLOPs of layers and of whole training steps, counted on fake tensors: no device and no memory needed.

A step's peaks grow linearly in the number of blocks of each kind, so it is traced with three blocks of each kind, and once more
with four of each kind in turn; each phase is a line of its own, as the peak may move from one phase to another. Logical bytes, on
tensors as a CPU has them: the flash kernels of GPUs save the same tensors.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from ...profilers.measure.live_bytes import LiveBytes
from ...schema.layers import Block, LayerRun
from ...schema.layout import Recompute
from ...schema.model import ModelSpec
from ..models.decoder import Decoder
from ..recompute import apply_recompute
from .model_layers import LayerCase, build_layer

TRACED_DEPTHS = (3, 4)

_aten = torch.ops.aten


class Trace(NamedTuple):
    """Bytes and FLOPs of one training step, or differences of them."""

    parameters: float
    optimizer: float
    forward_peak: float
    backward_peak: float
    optimizer_peak: float
    flops: float

    def plus(self, other: Trace, times: float) -> Trace:
        """Each figure of this one and ``times`` the other's."""
        return Trace(*(mine + times * theirs for mine, theirs in zip(self, other, strict=True)))


def layer_memory(case: LayerCase) -> dict[str, Any]:
    """Fields of a LayerMemory."""
    cpu = torch.device("cpu")
    with FakeTensorMode(), LiveBytes() as live:
        module, make_inputs = build_layer(case, cpu, is_fake=True)
        inputs = make_inputs()
        parameters = sum(p.untyped_storage().nbytes() for p in module.parameters())
        with torch.no_grad():
            module(*inputs)  # tables that all layers share are made once
        before = live.current
        out = module(*inputs)
        saved = live.current - before
        gradient = torch.ones_like(out)
        live.reset_peak()
        out.backward(gradient)
        peak = live.peak - before
    return {
        **case.fields(),
        "parameter_bytes": parameters,
        "saved_bytes": saved,
        "transient_bytes": max(0, peak - saved - parameters),
        "source": "fake",
    }


def step_memory(
    model: ModelSpec, *, micro_batch_size: int, seq_len: int, dtype: str, recompute: Recompute
) -> dict[str, Any]:
    """Fields of a StepMemory: AdamW, everything in ``dtype``, the whole model on one device."""
    low, high = TRACED_DEPTHS
    trace = functools.partial(
        _trace, micro_batch_size=micro_batch_size, seq_len=seq_len, dtype=dtype, recompute=recompute
    )
    kinds = [block for block, _ in model.block_runs]
    shallow = [low] * len(kinds)
    base = trace(_with_counts(model, shallow))
    total = base
    for i, (_, count) in enumerate(model.block_runs):
        deeper = trace(_with_counts(model, [*shallow[:i], high, *shallow[i + 1 :]]))
        total = total.plus(deeper.plus(base, -1.0), float(count - low))
    return {
        "model": model.name,
        "micro_batch_size": micro_batch_size,
        "seq_len": seq_len,
        "dtype": dtype,
        "recompute": recompute,
        "parameter_bytes": round(total.parameters),
        "optimizer_bytes": round(total.optimizer),
        "forward_peak_bytes": round(total.forward_peak),
        "backward_peak_bytes": round(total.backward_peak),
        "optimizer_peak_bytes": round(total.optimizer_peak),
        "flops": round(total.flops),
        "layers_traced": TRACED_DEPTHS,
    }


def _with_counts(model: ModelSpec, counts: list[int]) -> ModelSpec:
    """The model with other numbers of blocks in its runs."""
    left = iter(counts)
    runs = [
        LayerRun(layer=run.layer, count=next(left)) if isinstance(run.layer, Block) else run for run in model.layers
    ]
    return model.replace(layers=tuple(runs))


def _trace(model: ModelSpec, *, micro_batch_size: int, seq_len: int, dtype: str, recompute: Recompute) -> Trace:
    kind = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        counter = FlopCounterMode(display=False, custom_mapping=_UNCOUNTED)
        with FakeTensorMode(), LiveBytes() as live, counter as flops:
            return _traced_step(model, (micro_batch_size, seq_len), recompute, live, flops)
    finally:
        torch.set_default_dtype(before)


def _traced_step(
    model: ModelSpec, shape: tuple[int, int], recompute: Recompute, live: LiveBytes, flops: FlopCounterMode
) -> Trace:
    decoder = Decoder(model)
    apply_recompute(decoder, lambda _: recompute)
    parameters = live.current
    optimizer = torch.optim.AdamW(decoder.parameters(), fused=True)
    tokens, targets = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
    for parameter in decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes the states
    optimizer.zero_grad()
    states = live.current - parameters
    counted = flops.get_total_flops()
    forward, backward, update = _step(decoder, optimizer, tokens, targets, live)
    states -= 2 * tokens.untyped_storage().nbytes()
    return Trace(parameters, states, forward, backward, update, flops.get_total_flops() - counted)


def _step(
    decoder: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor, live: LiveBytes
) -> tuple[int, int, int]:
    """Peaks of the three phases."""
    live.reset_peak()
    loss = decoder(tokens, targets).sum()
    forward = live.peak
    live.reset_peak()
    loss.backward()
    del loss
    backward = live.peak
    live.reset_peak()
    optimizer.step()
    update = live.peak
    optimizer.zero_grad()
    return forward, backward, update


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward_flops(
    grad_out: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return int(sdpa_backward_flop_count(grad_out, query, key, value))


def _grouped_flops(rows: Any, weights: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(
        2 * rows[-2] * rows[-1] * weights[-1]
    )  # of [M, K] with [E, K, N], or of [K, M] with [M, N] by groups of M


_UNCOUNTED: dict[Any, Any] = {
    _aten._grouped_mm: _grouped_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}
"""Attention on CPUs and grouped products count no FLOPs in torch up to 2.14."""
