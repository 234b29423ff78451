"""Mixers with a state of fixed size in place of keys and values: linear attention, Mamba, short convolutions, gated recurrences.

A state passes from a rank to the next under context parallelism, where attention passes keys and values round, and generation keeps
it in place of a cache that grows. Shapes: D hidden_dim, H num_heads.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal, Self

from pydantic import model_validator

from .base import Count, CountOrNone, Mixer


class Recurrence(Mixer):
    """Abstract base of mixers with a state of fixed size.

    Attributes:
        passes_state: context parallelism can cut the sequence: a rank starts from the state that the one before it ends with.
    """

    is_attention: ClassVar[bool] = False
    passes_state: ClassVar[bool] = True

    window: None = None

    @property
    @abstractmethod
    def width(self) -> int:
        """Channels that the mixer puts out before its output projection; tensor parallelism cuts them."""

    @property
    @abstractmethod
    def state_elements(self) -> int:
        """Elements of the state of one sequence."""

    @property
    @abstractmethod
    def scan_flops_per_token(self) -> float:
        """FLOPs of the scan of one token, all channels, forward."""

    @property
    @abstractmethod
    def input_width(self) -> int:
        """Channels that the products of the hidden states make, whichever way tensor parallelism cuts them."""

    @property
    def q_dim(self) -> int:
        """Width of what the output projection reads."""
        return self.width

    @property
    def num_kv_heads(self) -> int:
        """Heads that tensor parallelism has to divide, beside those of the output."""
        return int(getattr(self, "num_heads"))  # noqa: B009


class LinearAttention(Recurrence):
    """H heads with a state [key_dim, value_dim] each: S = decay S + k v^T, read by queries.

    Gated delta nets (Qwen3-Next, arXiv:2412.06464), Kimi delta attention (arXiv:2510.26692), lightning attention (MiniMax,
    arXiv:2501.08313), Mamba-2 (arXiv:2405.21060), whose C, B and x are queries, keys and values, and mLSTM (arXiv:2405.04517).

    Attributes:
        num_key_heads: heads of queries and of keys, each for several heads of values (groups of Mamba-2).
        delta: a key's old value is taken out before the new one goes in.
        chunk: tokens that the scan works on at once, as matrix products.
        conv_kernel: causal convolution over queries, keys and values; 0 for none.
        gate: the output is gated: by a projection of the full width, by one of rank ``gate_rank`` where that is not 0.
        head_gates: scalars that each token makes for each head (decay, strength of the delta rule).
        head_params: learned scalars of each head.
        key_decay: a decay for each element of a key in place of each head (Kimi), by a projection of rank ``gate_rank``.
        norm: of the output, with one weight for each element of a head, or for all heads.
    """

    kind: Literal["linear"] = "linear"
    num_heads: Count
    num_key_heads: Count
    key_dim: Count
    value_dim: Count
    delta: bool = False
    chunk: Count = 64
    conv_kernel: CountOrNone = 0
    conv_bias: bool = False
    gate: bool = True
    gate_rank: CountOrNone = 0
    head_gates: CountOrNone = 1
    head_params: CountOrNone = 0
    key_decay: bool = False
    norm: Literal["none", "per_head", "full"] = "none"
    bias: bool = False

    @model_validator(mode="after")
    def _key_heads_divide(self) -> Self:
        if self.num_heads % self.num_key_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_key_heads {self.num_key_heads}")
        return self

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys; a single one is made by every rank."""
        return self.num_key_heads if self.num_key_heads > 1 else self.num_heads

    @property
    def head_dim(self) -> int:
        """Width of one value."""
        return self.value_dim

    @property
    def width(self) -> int:
        """Channels of the values, H * value_dim."""
        return self.num_heads * self.value_dim

    @property
    def keys_width(self) -> int:
        """Channels of queries and keys."""
        return 2 * self.num_key_heads * self.key_dim

    @property
    def decay_width(self) -> int:
        """Channels of decays of each element of a key."""
        return self.key_decay * self.num_heads * self.key_dim

    @property
    def input_width(self) -> int:
        """Queries, keys, values, a gate and decays of full rank, scalars of heads."""
        of_full_rank = 0 if self.gate_rank else self.gate * self.width + self.decay_width
        return self.keys_width + self.width + of_full_rank + self.head_gates * self.num_heads

    @property
    def low_rank_widths(self) -> tuple[int, ...]:
        """Channels of the projections of rank ``gate_rank``: of the gate, of decays."""
        return tuple(width for width in (self.gate * self.width, self.decay_width) if width and self.gate_rank)

    @property
    def state_elements(self) -> int:
        """Matrices of all heads, and the tokens that the convolution still needs."""
        return self.width * self.key_dim + max(self.conv_kernel - 1, 0) * (self.keys_width + self.width)

    @property
    def scan_flops_per_token(self) -> float:
        """FLOPs of the chunked scan, arXiv:2405.21060 section 6: scores and values of a chunk, its state, and what reads the last.

        With the delta rule, arXiv:2406.06484 section 3: products of keys with keys, the inverse of a triangle, and keys and values
        multiplied by it.
        """
        c, dk, dv = self.chunk, self.key_dim, self.value_dim
        each = 2.0 * c * (dk + dv) + 4 * dk * dv
        if self.delta:
            each += 2 * c * (2 * dk + dv) + 2 * dk * dv + 2 * c * c / 3
        return self.num_heads * each

    def num_params(self, hidden_dim: int) -> int:
        """Return the parameters: input and output projections, convolution, learned scalars, norm."""
        mixed = self.keys_width + self.width
        low_rank = sum(self.gate_rank * (hidden_dim + width) for width in self.low_rank_widths)
        weights = hidden_dim * (self.input_width + self.width) + low_rank
        convolution = mixed * (self.conv_kernel + (self.conv_bias and self.conv_kernel > 0))
        scalars = self.head_params * self.num_heads + self.decay_width
        norm = {"none": 0, "per_head": self.value_dim, "full": self.width}[self.norm]
        return weights + convolution + scalars + norm + self.bias * (self.input_width + hidden_dim)


class ChannelRecurrence(Recurrence):
    """Abstract base of recurrences whose channels do not mix: each is a head of its own."""

    channels: Count

    @property
    def num_heads(self) -> int:
        """Each channel is a head of its own."""
        return self.channels

    @property
    def head_dim(self) -> int:
        """Width of a channel."""
        return 1

    @property
    def width(self) -> int:
        """Channels."""
        return self.channels


class SelectiveScan(ChannelRecurrence):
    """Mamba (arXiv:2312.00752): ``channels`` of state_dim each with a decay that depends on the token.

    Attributes:
        step_rank: rank of the projection that makes the steps; norms: of steps and both state vectors (Jamba).
    """

    kind: Literal["selective_scan"] = "selective_scan"
    state_dim: Count
    step_rank: Count
    conv_kernel: Count = 4
    conv_bias: bool = True
    bias: bool = False
    norms: bool = False

    @property
    def input_width(self) -> int:
        """Input and gate."""
        return 2 * self.channels

    @property
    def state_elements(self) -> int:
        """State of all channels, and the tokens that the convolution still needs."""
        return self.channels * (self.state_dim + self.conv_kernel - 1)

    @property
    def scan_flops_per_token(self) -> float:
        """FLOPs of the scan: 9 for each element of the state (state-spaces/mamba, flops of selective_scan_ref)."""
        return 9.0 * self.channels * self.state_dim

    @property
    def step_width(self) -> int:
        """Channels of the projection from which steps and both state vectors come."""
        return self.step_rank + 2 * self.state_dim

    def num_params(self, hidden_dim: int) -> int:
        """Return the parameters: projections, convolution, steps, decays A, skip D, norms."""
        w = self.channels
        products = 3 * hidden_dim * w + w * self.step_width + self.step_rank * w
        vectors = w * (self.conv_kernel + self.conv_bias) + w + w * self.state_dim + w
        return products + vectors + self.norms * self.step_width + self.bias * (2 * w + hidden_dim)


class ShortConvolution(ChannelRecurrence):
    """Gated causal convolution of a few tokens (LFM2): out(c * conv(b * x)), where b, c and x are projections."""

    kind: Literal["short_convolution"] = "short_convolution"
    conv_kernel: Count
    bias: bool = False

    @property
    def input_width(self) -> int:
        """Input and two gates."""
        return 3 * self.channels

    @property
    def state_elements(self) -> int:
        """The tokens that the convolution still needs."""
        return self.channels * (self.conv_kernel - 1)

    @property
    def scan_flops_per_token(self) -> float:
        """FLOPs of the convolution."""
        return 2.0 * self.channels * self.conv_kernel

    def num_params(self, hidden_dim: int) -> int:
        """Return the parameters: projections and convolution, with biases of all three."""
        w = self.channels
        return 4 * hidden_dim * w + w * self.conv_kernel + self.bias * (3 * w + w + hidden_dim)


class GatedRecurrence(Recurrence):
    """RG-LRU of RecurrentGemma (arXiv:2402.19427 section 2.4): a diagonal recurrence, gated within blocks of channels."""

    kind: Literal["gated_recurrence"] = "gated_recurrence"
    num_heads: Count
    head_dim: Count
    conv_kernel: Count = 4

    @property
    def width(self) -> int:
        """Channels, H * head_dim."""
        return self.num_heads * self.head_dim

    @property
    def input_width(self) -> int:
        """Input and gate."""
        return 2 * self.width

    @property
    def state_elements(self) -> int:
        """One for each channel, and the tokens that the convolution still needs."""
        return self.width * self.conv_kernel

    @property
    def scan_flops_per_token(self) -> float:
        """FLOPs of both gates, which are products within a head, and of the recurrence."""
        return 4.0 * self.width * self.head_dim + 10.0 * self.width

    def num_params(self, hidden_dim: int) -> int:
        """Return the parameters: projections, convolution, gates within heads and decay, with biases."""
        w = self.width
        gates = 2 * (w * self.head_dim + w)
        return 3 * hidden_dim * w + 2 * w + hidden_dim + w * (self.conv_kernel + 1) + gates + w
