"""Memory and FLOPs of layers and of entire training steps, counted on fake tensors: no device and no memory needed.

A step's peaks grow linearly in the number of blocks of each kind, so it is traced with three blocks of each kind, and once more
with four of each kind in turn; each phase is a line of its own, as the peak may move from one phase to another. Logical bytes:
what tensors hold, without an allocator's rounding and fragments, on tensors as a CPU has them;
the flash kernels of GPUs save the same.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from ...schema.layers import Block, LayerRun
from ...schema.model import ModelSpec

TRACED_DEPTHS = (3, 4)

_aten = torch.ops.aten


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that are alive while code runs; open it inside a FakeTensorMode. Final.

    Attributes:
        current: bytes alive now; ``peak``: most since the last `reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}

    def track(self, tensors: Iterable[Any]) -> None:
        """Count tensors that were made before."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key, size = id(storage), storage.nbytes()
                reference, known = self._alive.get(key) or (weakref.ref(storage, partial(self._free, key)), 0)
                self._alive[key] = reference, size
                self.current += size - known
                self.peak = max(self.peak, self.current)

    def reset_peak(self) -> None:
        """Look for the peak from here on."""
        self.peak = self.current

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = shape_unknown_to_torch(func, args, kwargs or {})
        if result is None:
            result = func(*args, **(kwargs or {}))
        self.track(tree_leaves(result))
        return result

    def _free(self, key: int, _: Any) -> None:
        self.current -= self._alive.pop(key)[1]


def shape_unknown_to_torch(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Return the result of an operator whose shape torch cannot tell of fake tensors; None for all others.

    The length of a count depends on the data, but a router asks for one; torch knows the shape of a grouped product in bf16 only.
    """
    if not args or not isinstance(args[0], FakeTensor):
        return None
    first = args[0]
    if func is _aten.bincount.default:
        min_length = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
        return first.new_empty(min_length, dtype=torch.int64) if min_length else None
    if func is _aten._grouped_mm.default and first.dtype != torch.bfloat16:
        second, ends = args[1], args[2] if len(args) > 2 else kwargs["offs"]
        if first.dim() == second.dim() == 2:
            return first.new_empty(len(ends), first.shape[0], second.shape[1])
        return first.new_empty(first.shape[0], second.shape[-1])
    return None


# --- one layer -------------------------------------------------------------------------------------------------------


def trace_layer(build: Callable[[], tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]]) -> dict[str, Any]:
    """Return the bytes of a LayerMemory; ``build`` makes the layer and what makes its inputs, on fake tensors."""
    with FakeTensorMode(), LiveBytes() as live:
        module, make_inputs = build()
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
    transient = max(0, peak - saved - parameters)
    return {"parameter_bytes": parameters, "saved_bytes": saved, "transient_bytes": transient, "source": "fake"}


# --- a training step -------------------------------------------------------------------------------------------------


class StepTrace(NamedTuple):
    """Bytes and FLOPs of one training step: fields of a StepMemory."""

    parameter_bytes: float
    optimizer_bytes: float
    forward_peak_bytes: float
    backward_peak_bytes: float
    optimizer_peak_bytes: float
    flops: float


def trace_step(
    build: Callable[[ModelSpec], nn.Module],
    model: ModelSpec,
    *,
    micro_batch_size: int,
    seq_len: int,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Return the bytes and FLOPs of a StepMemory: AdamW, everything in ``dtype``, the entire model on one device."""
    low, high = TRACED_DEPTHS
    trace = partial(_trace, build, shape=(micro_batch_size, seq_len), dtype=dtype)
    num_kinds = len(model.block_runs)
    shallow = [low] * num_kinds
    base = total = trace(_with_counts(model, shallow))
    for i, (_, count) in enumerate(model.block_runs):
        deeper = trace(_with_counts(model, [*shallow[:i], high, *shallow[i + 1 :]]))
        pairs = zip(total, deeper, base, strict=True)
        total = StepTrace(*(sum_ + (count - low) * (more - less) for sum_, more, less in pairs))
    return {**{name: round(value) for name, value in total._asdict().items()}, "layers_traced": TRACED_DEPTHS}


def _with_counts(model: ModelSpec, counts: list[int]) -> ModelSpec:
    """Return the model with other numbers of blocks in its runs."""
    remaining = iter(counts)
    runs = [
        LayerRun(layer=run.layer, count=next(remaining)) if isinstance(run.layer, Block) else run
        for run in model.layers
    ]
    return model.replace(layers=tuple(runs))


def _trace(
    build: Callable[[ModelSpec], nn.Module], model: ModelSpec, *, shape: tuple[int, int], dtype: torch.dtype
) -> StepTrace:
    gc.collect()  # checkpoints leave cycles, which the collector then frees at the same layers in every trace
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        counter = FlopCounterMode(display=False, custom_mapping=_UNCOUNTED)
        with FakeTensorMode(), LiveBytes() as live, counter as flops:
            return _trace_phases(build(model), shape, live, flops)
    finally:
        torch.set_default_dtype(before)


def _trace_phases(model: nn.Module, shape: tuple[int, int], live: LiveBytes, flops: FlopCounterMode) -> StepTrace:
    parameters = live.current
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens, targets = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes the states
    optimizer.zero_grad()
    states = live.current - parameters - 2 * tokens.untyped_storage().nbytes()
    flops_before = flops.get_total_flops()
    live.reset_peak()
    loss = model(tokens, targets).sum()
    forward = live.peak
    live.reset_peak()
    loss.backward()
    del loss
    backward = live.peak
    live.reset_peak()
    optimizer.step()
    update = live.peak
    optimizer.zero_grad()
    return StepTrace(parameters, states, forward, backward, update, flops.get_total_flops() - flops_before)


_UNCOUNTED: dict[Any, Any] = {
    # [M, K] with [E, K, N], or [K, M] with [M, N] by groups of M
    _aten._grouped_mm: lambda rows, weights, *_, **__: int(2 * rows[-2] * rows[-1] * weights[-1]),
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: int(sdpa_flop_count(q, k, v)),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_, **__: int(
        sdpa_backward_flop_count(grad, q, k, v)
    ),
}
"""Attention on CPUs and grouped products count no FLOPs in torch up to 2.14."""
