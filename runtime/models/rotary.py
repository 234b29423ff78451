"""Rotary position embedding: cos and sin tables, and the rotation. Shapes: B batch, H heads, S sequence, C head_dim."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...schema.errors import RuntimeMismatchError
from ...schema.layers import Rope


class Rotary:
    """Tables of one rope, stored for the last sequence length.

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

    @property
    def softmax_factor(self) -> float:
        """Return the factor of latent attention on its scores where the rope says so (DeepSeek-V2's modeling file)."""
        rope = self.rope
        return 1.0 if rope.mscale_all_dim is None else _mscale(rope.factor, rope.mscale_all_dim) ** 2

    @property
    def made_tables(self) -> tuple[Tensor, ...]:
        """Return the tables as they were last requested; they live on."""
        return self._tables or ()

    def tables(self, seq_len: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin [S, C] in ``dtype``; the angles are computed in fp32."""
        key = (seq_len, device, dtype)
        if self._tables is None or self._key != key:
            with torch.no_grad():
                positions = torch.arange(seq_len, device=device) if self.positions is None else self.positions
                angles = positions.float()[:, None] * inverse_frequencies(self.rope, self.head_dim, device)
                angles = torch.cat((angles, angles), dim=-1)
                factor = attention_factor(self.rope)
                self._tables = (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
            self._key = key
        return self._tables


def inverse_frequencies(rope: Rope, head_dim: int, device: torch.device) -> Tensor:
    """Return the angles of one position step [C/2], fp32.

    Source: theta^(-2i/C) (arXiv:2104.09864); linear divides by the factor (arXiv:2306.15595); llama3 divides long wavelengths by
    the factor and blends between the two bounds (`_compute_llama3_parameters` of transformers).
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    frequencies: Tensor = 1.0 / rope.theta**exponents
    if rope.scaling == "none":
        return frequencies
    if rope.scaling == "linear":
        return frequencies.div(rope.factor)
    if rope.scaling == "yarn":
        return _yarn_frequencies(rope, frequencies)
    if rope.scaling != "llama3":
        raise RuntimeMismatchError(f"this version cannot run rope scaling {rope.scaling}")
    if rope.original_max_seq_len is None:
        raise RuntimeMismatchError("llama3 rope scaling needs original_max_seq_len, which the plan does not have")
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_seq_len / wavelengths
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    scaled: Tensor = blend * frequencies + (1 - blend) * frequencies / rope.factor
    return scaled


def _yarn_frequencies(rope: Rope, frequencies: Tensor) -> Tensor:
    """Divide slow pairs by the factor, keep fast ones, blend between (arXiv:2309.00071 section 3.2)."""
    if rope.original_max_seq_len is None:
        raise RuntimeMismatchError("yarn rope scaling needs original_max_seq_len, which the plan does not have")
    last = 2 * len(frequencies) - 1

    def pair(turns: float) -> float:
        """Return the pair that turns this often within the original length."""
        assert rope.original_max_seq_len is not None
        wavelength = rope.original_max_seq_len / (2 * math.pi * turns)
        return len(frequencies) * math.log(wavelength) / math.log(rope.theta)

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, last)
    pairs = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
    slowed = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies * (1 - slowed) + frequencies / rope.factor * slowed


def attention_factor(rope: Rope) -> float:
    """Return the factor on cos and sin (arXiv:2309.00071 section 3.4; with mscale as in DeepSeek-V2): 1 but for yarn."""
    if rope.scaling != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotate(x_BHSC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # noqa: N803
    """Each head's pairs (i, i + C/2) turned by the angle of their position; cos and sin are [S, C]."""
    first, second = x_BHSC.chunk(2, dim=-1)
    return x_BHSC * cos + torch.cat((-second, first), dim=-1) * sin
