"""What was counted of a layer that no catalogue describes: its operators, parameters and what it keeps, for one sequence."""

from __future__ import annotations

from .base import Frozen, NonNegativeFloat, NonNegativeInt, PositiveInt


class TracedProduct(Frozen):
    """``count`` products [rows, k] x [k, n] of one sequence; those of attention without a fused kernel are products, too."""

    rows: PositiveInt
    n: PositiveInt
    k: PositiveInt
    count: PositiveInt = 1


class TracedAttention(Frozen):
    """``count`` fused attentions of one sequence; a query sees ``context`` of ``kv_len`` keys on average."""

    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    v_head_dim: PositiveInt
    query_len: PositiveInt
    kv_len: PositiveInt
    context: NonNegativeFloat
    count: PositiveInt = 1


class Traced(Frozen):
    """One layer and one sequence of ``seq_len`` tokens; elements are those of the compute dtype.

    Attributes:
        products, attentions: of the forward pass; the backward pass follows from them.
        forward_elements, backward_elements: read and written by all other kernels; *_kernels: how many there are.
        saved_elements: kept from the forward to the backward pass; selective_elements, full_elements: the same where all but
            products and attention, and where everything is computed again.
    """

    seq_len: PositiveInt
    num_params: NonNegativeInt
    products: tuple[TracedProduct, ...] = ()
    attentions: tuple[TracedAttention, ...] = ()
    forward_elements: NonNegativeInt = 0
    backward_elements: NonNegativeInt = 0
    forward_kernels: NonNegativeInt = 0
    backward_kernels: NonNegativeInt = 0
    saved_elements: NonNegativeInt = 0
    selective_elements: NonNegativeInt = 0
    full_elements: NonNegativeInt = 0

    @property
    def forward_flops(self) -> float:
        """Of products and attention, 2 for a multiplication and an addition."""
        products = sum(2 * p.count * p.rows * p.n * p.k for p in self.products)
        return products + sum(
            2 * a.count * a.num_heads * a.query_len * a.context * (a.head_dim + a.v_head_dim) for a in self.attentions
        )
