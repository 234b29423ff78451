"""Rotary position embedding: cos and sin tables, and the rotation. Shapes: B batch, H heads, S sequence, C head_dim."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...schema.errors import RuntimeMismatchError
from ...schema.model import Rope


class Rotary:
    """Tables of one rope, kept for the last sequence length.

    Attributes:
        positions: places in the sequence of this rank's tokens [S]; None for 0, 1, 2...

    A plain object and not a module: buffers would be lost when a model that was built on the meta device is materialised.
    """

    def __init__(self, rope: Rope, head_dim: int) -> None:
        self.rope = rope
        self.head_dim = head_dim
        self.positions: Tensor | None = None
        self._key: tuple[int, torch.device, torch.dtype] | None = None
        self._tables: tuple[Tensor, Tensor] | None = None

    def tables(self, seq_len: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cos and sin [S, C] in ``dtype``; the angles are computed in fp32."""
        key = (seq_len, device, dtype)
        if self._tables is None or self._key != key:
            with torch.no_grad():
                positions = torch.arange(seq_len, device=device) if self.positions is None else self.positions
                angles = positions.float()[:, None] * inverse_frequencies(self.rope, self.head_dim, device)
                angles = torch.cat((angles, angles), dim=-1)
                self._tables = angles.cos().to(dtype), angles.sin().to(dtype)
            self._key = key
        return self._tables


def inverse_frequencies(rope: Rope, head_dim: int, device: torch.device) -> Tensor:
    """Angles of one position step [C/2], fp32.

    Source: theta^(-2i/C) (arXiv:2104.09864); linear divides by the factor (arXiv:2306.15595); llama3 divides long wavelengths by
    the factor and blends between the two bounds (`_compute_llama3_parameters` of transformers).
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    frequencies: Tensor = 1.0 / rope.theta**exponents
    if rope.scaling == "none":
        return frequencies
    if rope.scaling == "linear":
        return frequencies.div(rope.factor)
    if rope.scaling != "llama3":
        raise RuntimeMismatchError(f"this version cannot run rope scaling {rope.scaling}")
    if rope.original_max_seq_len is None:
        raise RuntimeMismatchError("llama3 rope scaling needs original_max_seq_len, which the plan does not have")
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_seq_len / wavelengths
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    scaled: Tensor = blend * frequencies + (1 - blend) * frequencies / rope.factor
    return scaled


def rotate(x_BHSC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # noqa: N803
    """Each head's pairs (i, i + C/2) turned by the angle of their position; cos and sin are [S, C]."""
    first, second = x_BHSC.chunk(2, dim=-1)
    return x_BHSC * cos + torch.cat((-second, first), dim=-1) * sin
