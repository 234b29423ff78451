"""Memory-bound kernels of engines: what they read and write, by part of a layer."""

from __future__ import annotations

from typing import NamedTuple


class KernelTraffic(NamedTuple):
    """Memory-bound kernels: elements read and written forward and backward, and kernels launched."""

    forward: float
    backward: float
    forward_kernels: int
    backward_kernels: int


class RoutingKernels(NamedTuple):
    """Copies of tokens to their experts and back.

    Attributes:
        rows: per element of the rows that reach experts; tokens: per element of the tokens that are routed.
        exchanged: what a row takes more where rows are sent over ep.
        shared: per element of the hidden states, where shared experts put out something as well.
    """

    rows: KernelTraffic
    tokens: KernelTraffic = KernelTraffic(0, 0, 0, 0)
    exchanged: KernelTraffic = KernelTraffic(0, 0, 0, 0)
    shared: KernelTraffic = KernelTraffic(0, 0, 0, 0)


class RingKernels(NamedTuple):
    """Copies around attention over a ring of ranks, in elements per element of queries (or outputs), and of keys with values.

    Attributes:
        queries, keys: with this rank's keys and values, and what the ring begins and ends with.
        step_queries, step_keys: more with those of each further rank: its outputs are merged.
        shared: elements read or written by a pass for each head of keys that several of queries read, as often as there are
            queries, beside keys themselves; half in a further step.
    """

    queries: KernelTraffic
    keys: KernelTraffic
    step_queries: KernelTraffic
    step_keys: KernelTraffic
    shared: float


class EngineKernels(NamedTuple):
    """What an engine's memory-bound kernels read and write, in elements per element of the tensor's width.

    Reads that miss the cache twice count twice. A layer norm takes 2.2 elements forward and 6.9 backward, a softmax 2.3 and 6.1, at
    the bandwidth of plain pointwise kernels: 26 and 8 measured sizes each on A100 and H100 (NeuSight traces, MIT), mean error 4 %
    with a launch and a rate fitted to each.

    Attributes:
        norm: per element of the hidden states; rotary: per rotated element of queries and keys.
        gated: per element of the feed-forward width, for silu(gate) * up; plain: for one activation.
        loss: fp32 elements per logit, from logits in the compute dtype to their gradient.
        residual: per element of the hidden states, both additions of a block.
        qkv: copies around attention per element of q, k and v.
        bias: the gradient of one bias, a sum over tokens, per element of the product's output; none where the product does it.
        expert_bias: that of an expert's output where it is added one expert after the other; None: as any bias.
        routing: of tokens to experts, by default gathered, weighted and scattered, read and written.
        ring: of attention over ranks that share a sequence; None: merging kernels of TransformerEngine.
        split_norm: per element what a norm over all heads takes more where tp splits them.
    """

    norm: KernelTraffic
    rotary: KernelTraffic
    gated: KernelTraffic
    plain: KernelTraffic
    loss: KernelTraffic
    residual: KernelTraffic
    qkv: KernelTraffic
    bias: KernelTraffic
    expert_bias: KernelTraffic | None = None
    routing: RoutingKernels = RoutingKernels(KernelTraffic(5, 5, 6, 6))
    ring: RingKernels | None = None
    split_norm: KernelTraffic = KernelTraffic(0, 0, 0, 0)


# Eager torch: F.rms_norm and F.layer_norm are one kernel forward and two backward; rotary embedding, silu and product, and the
# loss's casts are kernels each. Loss: forward cast (1.5) and log-softmax; backward zeros of the picked ones (1), softmax, cast
# back (1.5).
TORCH_KERNELS = EngineKernels(
    norm=KernelTraffic(2.2, 6.9, 1, 2),
    rotary=KernelTraffic(9, 9, 8, 8),
    gated=KernelTraffic(5, 9, 2, 3),
    plain=KernelTraffic(2, 3, 1, 1),
    loss=KernelTraffic(3.8, 8.6, 3, 3),
    residual=KernelTraffic(6, 6, 2, 2),
    qkv=KernelTraffic(0, 0, 0, 0),
    bias=KernelTraffic(0, 1, 0, 1),
)
FUSED_NORM = KernelTraffic(2.2, 4.0, 1, 2)
FUSED_ROTARY = KernelTraffic(2, 2, 2, 2)
FUSED_GATED = KernelTraffic(3, 5, 1, 1)
STEPWISE_LOSS = KernelTraffic(9.5, 3.5, 7, 3)  # Megatron's vocab_parallel_cross_entropy, step by step
_LOSS_IN_PLACE = KernelTraffic(5.5, 9.0, 5, 6)
"""runtime/loss.py: a cast, the largest logit, exponentials and their sum; backward a cast, three passes in place, a copy."""
RUNTIME_KERNELS = TORCH_KERNELS._replace(
    loss=_LOSS_IN_PLACE,
    # Of queries and of keys each: two products, the other half turned and joined, a sum.
    rotary=KernelTraffic(10, 10, 10, 10),
    gated=KernelTraffic(5, 11, 2, 4),  # silu once more in the backward pass instead of its output kept
    # runtime/models/experts.py, rows of D elements, k for each of T tokens. Forward rows are picked twice (2 each), weighted (2)
    # and summed (1 read, T written). Backward the product makes two gradients (1 and 2 rows, T read each), of which one is summed
    # (1); what was picked has a gradient of zeros (1) that is read, added to and written (3), for tokens T, T and T in place of
    # rows but for the read, and is added to the router's (3 T). Over ep rows are sorted by expert and back: picked twice more,
    # with such gradients. Kernels include those of the router's scores and of the order.
    routing=RoutingKernels(
        KernelTraffic(7, 9, 16, 14), KernelTraffic(1, 8, 0, 0), KernelTraffic(4, 8, 10, 4), KernelTraffic(3, 3, 1, 1)
    ),
    # runtime/context_parallel.py, the rank that meets the first half of other ranks' keys with all its queries: it takes longest.
    # Forward queries are laid out (2), the first output and the sum cast (3 each), keys and values stacked (2); in a further step
    # the sum scaled (4), the part cast (3) and added (6), the sum put back (4), besides six kernels on its exponents. Backward
    # zeros (2), both inputs and the output laid out (6), gradients of heads summed (2) and added (5), cast (3) and laid out (2);
    # of keys stacked (2), zeros (1), summed (1), stacked again (2), added (3) and laid out (2); in a further step the output, sums
    # and additions, of half of the keys.
    ring=RingKernels(
        KernelTraffic(8, 20, 3, 11),
        KernelTraffic(2, 11, 1, 6),
        KernelTraffic(17, 8, 10, 5),
        KernelTraffic(0, 3, 0, 2),
        shared=2,
    ),
    # _SplitNorm of runtime/models/layers.py: 18 and 25 elements, half of them in fp32, instead of TORCH_KERNELS.norm.
    split_norm=KernelTraffic(18 - 2.2, 25 - 6.9, 17, 18),
)
COPIED_CONTEXT = KernelTraffic(
    0.67, 2.67, 1, 2
)  # the attended context is copied, the gradients of q, k and v concatenated
