"""Seconds of fused attention: five physical terms per kernel, times a learned residual.

    seconds = (launch + F/P (product + softmax * 64/d) + tail * S * 4*B*L*d / P + traffic * bytes / W) * exp(residual)

F FLOPs (2.5 times the forward's in the backward pass), P peak, d head width, S processors of the device, L most tokens a query
attends to, B = 128 queries a thread block, W memory bandwidth. ``product`` is the inverse of what the matrix units reach,
``softmax`` the exponentials next to them (their number does not grow with d), ``tail`` the last thread blocks of a launch that
find the other processors idle. A kernel is a generation of code on a generation of hardware (`kernel_name`). Coefficients,
residual and scores: attention.npz, written by fitting/attention.py. One device's kernels without a table take the median of all.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ...schema.arrays import FloatArray
from .trees import ResidualModel

TERMS = ("launch_s", "product", "softmax", "tail", "traffic")
QUERIES_A_BLOCK = 128
REFERENCE_WIDTH = 64

PROCESSORS = {
    "volta": 80, "turing": 68, "ampere": 108, "ada": 142, "hopper": 132, "blackwell": 148, "cdna2": 110, "cdna3": 304, "cdna4": 256,
}  # fmt: skip
"""Streaming multiprocessors (compute units) of the largest part of each architecture. Source: data sheets."""


class AttentionShape(NamedTuple):
    """Calls of one kernel; every entry broadcasts to [N].

    Attributes:
        rows: sequences times query heads; group: query heads of one key/value head.
        seq_len: queries of a sequence; context: keys a query sees on average; longest: at most.
        width: mean of query/key and value head width.
        element_bytes: of one element.
    """

    rows: FloatArray
    group: FloatArray
    seq_len: FloatArray
    context: FloatArray
    longest: FloatArray
    width: FloatArray
    element_bytes: FloatArray


class AttentionDevice(NamedTuple):
    """The device side: FLOP/s of the peak, bytes/s of its memory, number of processors. Floats or arrays [N]."""

    peak_flops_per_s: FloatArray | float
    bytes_per_s: FloatArray | float
    processors: FloatArray | float


class AttentionKernel(NamedTuple):
    """Coefficients of the five terms [5], forward and backward."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]


def kernel_name(architecture: str, *, uses_hopper_attention: bool) -> str:
    """Return the name of the kernel that runs on an architecture.

    On Hopper Transformer Engine takes FlashAttention-3 or cuDNN; torch and others take FlashAttention-2, which does not use its
    matrix instructions (``uses_hopper_attention``). On Blackwell all of them take cuDNN or its like (torch ranks it first there).
    """
    if architecture == "hopper":
        return "hopper" if uses_hopper_attention else "hopper_fa2"
    return architecture if architecture in ("ampere", "ada", "blackwell") else "other"


@cache
def kernel(name: str) -> AttentionKernel:
    """Return the coefficients of a kernel."""
    terms: dict[str, Any] = ResidualModel.load("attention").provenance["kernels"][name]
    return AttentionKernel(tuple(terms["forward"]), tuple(terms["backward"]))


def term_columns(shape: AttentionShape, silicon: AttentionDevice, *, backward: bool) -> FloatArray:
    """Return what the coefficients multiply [N, 5], in seconds (the launch in units of one)."""
    passes = 2.5 if backward else 1.0
    product = 4 * passes * shape.rows * shape.seq_len * shape.context * shape.width / silicon.peak_flops_per_s
    longest_block = 4 * passes * QUERIES_A_BLOCK * shape.longest * shape.width / silicon.peak_flops_per_s
    columns = (
        np.ones_like(product),
        product,
        product * REFERENCE_WIDTH / shape.width,
        longest_block * silicon.processors,
        attention_bytes(shape, backward=backward) / silicon.bytes_per_s,
    )
    return np.stack(np.broadcast_arrays(*columns), axis=-1)


def attention_bytes(shape: AttentionShape, *, backward: bool) -> FloatArray:
    """Return the bytes [N] read and written at least: q, k, v and output; the backward pass adds gradients and reads twice."""
    once = 2 * shape.element_bytes * shape.rows * shape.seq_len * shape.width * (1 + 1 / shape.group)
    return np.asarray(once * (2.0 if backward else 1.0), dtype=np.float64)


def residual_features(
    shape: AttentionShape, silicon: AttentionDevice, columns: FloatArray, terms: FloatArray
) -> dict[str, FloatArray]:
    """Return the features of the residual [N]: sizes, waves of thread blocks, and the share of each term in the roofline."""
    weighted = columns * terms
    share = weighted / weighted.sum(axis=-1, keepdims=True)
    blocks = shape.rows * shape.seq_len / QUERIES_A_BLOCK
    return {
        "log_seq_len": np.log2(shape.seq_len),
        "log_rows": np.log2(shape.rows),
        "width": np.asarray(shape.width, dtype=np.float64),
        "log_group": np.log2(shape.group),
        "log_waves": np.log2(blocks / silicon.processors),
        "launch_share": share[..., 0],
        "tail_share": share[..., 3],
        "traffic_share": share[..., 4],
    }


def attention_seconds(
    name: str,
    shape: AttentionShape,
    silicon: AttentionDevice,
    *,
    backward: bool,
    arithmetic_ratio: float = 1.0,
    reference: AttentionDevice | None = None,
) -> FloatArray:
    """Return the seconds [N] of kernel ``name``; the residual, learned on forward passes, applies to them alone.

    ``arithmetic_ratio`` slows what is not traffic: kernels of an earlier generation move the same bytes. The residual takes the
    device for ``reference`` (unset: for what it is), so that it does not change with a device's rates alone.
    """
    chosen = kernel(name)
    columns = term_columns(shape, silicon, backward=backward)
    slower = np.array([1.0, arithmetic_ratio, arithmetic_ratio, arithmetic_ratio, 1.0])
    terms = np.asarray(chosen.backward if backward else chosen.forward) * slower
    roofline = columns @ terms
    if backward:
        return np.asarray(roofline, dtype=np.float64)
    if reference is not None:
        silicon, columns = reference, term_columns(shape, reference, backward=False)
    features = residual_features(shape, silicon, columns, terms)
    return np.asarray(roofline * np.exp(ResidualModel.load("attention").log_residual(features)), dtype=np.float64)
