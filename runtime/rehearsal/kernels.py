"""What a GPU runs where a CPU runs something else, and the memory that its kernels take only while they run.

A rehearsal's tensors are on a fake CPU, for which torch chooses a CPU's kernels. Of a plan for GPUs the norm is therefore one
kernel that saves its input and 1 / rms (a CPU has several, which save more), and attention the flash kernel.

Shapes: B batch, H heads, K kv heads, S tokens, C head_dim.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

_aten, _c10d = torch.ops.aten, torch.ops.c10d
GROUPED_PRODUCT = _aten._grouped_mm.default
FLASH_ON_CPU = _aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BLOCK = 128
_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_backward.default
_TWO_BYTES = (torch.float16, torch.bfloat16)


class _FusedNorm(torch.autograd.Function):
    """What ``aten::_fused_rms_norm`` keeps and returns; it has no fake kernel of its own on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, on_run: Callable[..., None]) -> Tensor:
        x = x.contiguous()
        on_run(x, is_backward=False)
        ctx.on_run = on_run
        out, rstd = torch.empty_like(x), torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:  # type: ignore[override]
        x, weight, _ = ctx.saved_tensors
        ctx.on_run(x, is_backward=True)
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


def _rms_norm(
    x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None, *, on_run: Callable[..., None]
) -> Tensor:
    if len(shape) != 1 or tuple(shape) != tuple(x.shape[-1:]):
        raise RuntimeError(f"rms_norm over {tuple(shape)} of an input of shape {tuple(x.shape)}")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise RuntimeError(f"rms_norm of an input of shape {tuple(x.shape)} with a weight of {tuple(weight.shape)}")
    result: Tensor = _FusedNorm.apply(x, weight, on_run)  # type: ignore[no-untyped-call]
    return result


def _attention(original: Any) -> Any:
    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        is_flash = query.dtype in _TWO_BYTES and attn_mask is None and query.shape[-1] <= 256
        if not torch.backends.cuda.flash_sdp_enabled() or not is_flash:
            result: Tensor = original(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            return result
        width, filled = query.shape[-1], -query.shape[-1] % 8
        if filled:
            query, key, value = (F.pad(x, (0, filled)) for x in (query, key, value))
        out: Tensor = _aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale or 1 / math.sqrt(width)
        )[0]
        return out[..., :width] if filled else out

    return attend


@contextlib.contextmanager
def gpu_kernels(on_norm: Callable[..., None]) -> Iterator[None]:
    """Let norms and attention be a GPU's while inside; ``on_norm`` is told of each norm, which runs as no operator."""
    norm, attention = F.rms_norm, F.scaled_dot_product_attention
    F.rms_norm = partial(_rms_norm, on_run=on_norm)
    F.scaled_dot_product_attention = _attention(attention)  # type: ignore[assignment]
    try:
        yield
    finally:
        F.rms_norm, F.scaled_dot_product_attention = norm, attention  # type: ignore[assignment]


class _Chunks(NamedTuple):
    """Equal parts of a tensor that only their concatenation is asked for."""

    tensor: Tensor
    count: int
    dim: int


class _WithoutChunks:
    """Torch, for `fully_shard`'s copies: it cuts what is sharded along another dimension than the first into a tensor a shard and
    joins them anew, thousands of operators of which one counts.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def chunk(tensor: Tensor, count: int, dim: int = 0) -> Any:
        return _Chunks(tensor, count, dim) if tensor.shape[dim] % count == 0 else torch.chunk(tensor, count, dim)

    @staticmethod
    def cat(parts: Any, dim: int = 0, *, out: Tensor | None = None) -> Tensor:
        if not isinstance(parts, _Chunks):
            return torch.cat(parts, dim=dim, out=out)
        if out is not None:
            return out
        shape = list(parts.tensor.shape)
        shape[parts.dim] //= parts.count
        shape[dim] *= parts.count
        return parts.tensor.new_empty(shape)


@contextlib.contextmanager
def joined_in_one() -> Iterator[None]:
    """Let `fully_shard` join the shards of a parameter by one operator while inside."""
    _fsdp_collectives.torch = _WithoutChunks()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        _fsdp_collectives.torch = torch  # type: ignore[attr-defined]


def flash_on_cpu(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Return what attention's kernel on a CPU does; torch's own fake one is made of others."""
    batch, heads, tokens, _ = query.shape
    out = torch.empty(batch, tokens, heads, value.shape[-1], dtype=query.dtype, device=query.device)
    lse = torch.empty(batch, tokens, heads, dtype=torch.float32, device=query.device)
    return out.transpose(1, 2), lse.transpose(1, 2)


def grouped_product(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Return what a product of groups does in any precision; torch's own fake one knows bf16 only."""
    shape: tuple[int, ...] = (a.shape[-2], b.shape[-1])
    if a.shape[-1] != b.shape[-2]:
        raise RuntimeError(f"_grouped_mm of {list(a.shape)} and {list(b.shape)}: the inner sizes differ")
    if a.dim() == b.dim():
        assert offs is not None or a.dim() == 3
        shape = (len(offs) if a.dim() == 2 and offs is not None else a.shape[0], *shape)
    return torch.empty(shape, dtype=a.dtype, device=a.device)


def reduce_bucket(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce DDP's bucket as its own hook does; the future of a message that nobody sends has no value."""
    tensor, future = bucket.buffer(), torch.futures.Future[Tensor]()
    dist.all_reduce(tensor.div_(group.size()), group=group)
    future.set_result(tensor)
    return future


def _rounded(size: int, to: int) -> int:
    return -(-size // to) * to


def gpu_workspace(func: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes that an operator's kernel on a GPU takes from the allocator while it runs.

    Flash attention, backwards (FlashAttention-2, csrc/flash_attn/flash_api.cpp mha_bwd): gradients of the queries in fp32, one
    number a row, and where kv heads are shared, gradients of keys and values for every query head. logsumexp (ATen,
    ReduceOps.cpp): the exponentials before they are summed.
    """
    if func is _FLASH_BACKWARD:
        query, key = args[1], args[2]
        batch, heads, tokens, width = query.shape
        rows = batch * heads * _rounded(tokens, _FLASH_BLOCK)
        in_fp32 = 4 * rows * (_rounded(width, 32) + 1)
        expanded = 0 if heads == key.shape[1] else 2 * batch * heads * key.shape[2] * width * query.element_size()
        return int(in_fp32 + expanded)
    return _logsumexp_bytes(func, args)


def host_workspace(func: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes that an operator takes on a CPU while it runs; gloo scatters a sum from a copy of its input."""
    if func is _c10d._reduce_scatter_base_.default:
        return int(args[1].numel() * args[1].element_size())
    return _logsumexp_bytes(func, args)


def _logsumexp_bytes(func: Any, args: tuple[Any, ...]) -> int:
    return int(args[0].numel() * args[0].element_size()) if func is _aten.logsumexp.default else 0
