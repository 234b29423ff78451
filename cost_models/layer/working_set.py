"""What a layer holds beside what it saves: while it runs backward, and between an input and a weight pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from ...schema.layers import Block, DenseMLP, LatentAttention, MoE, NoMixer, SoftmaxAttention
from ...schema.layout_table import RECOMPUTES
from ...schema.units import Array, BoolArray, FloatArray
from .memory import SavedElements, bytes_of
from .operators import CostInputs, Gemm, Layer, OperatorRules, layer_operators
from .parallel import stored_share


def pending_bytes(layer: Layer, inputs: CostInputs) -> FloatArray:
    """Return what waits from the input pass of a layer to its weight pass, next to all that it saved [N]."""
    return bytes_of(pending_elements(layer, inputs.hidden_dim), inputs)


def last_pending_bytes(layer: Layer, inputs: CostInputs) -> FloatArray:
    """Return what waits of the last layer of a stage, less what was saved after its last product and is gone by then [N].

    An input pass lets go of the stage's output, and with it of all that its graph saved above the products: outputs of experts,
    which gradients of their weights read. The gradient that arrives is in its receive buffer, unless it is gathered first.
    """
    layouts, pending = inputs.layouts, pending_bytes(layer, inputs)
    block = layer.inner_block
    if block is None or layer.counted is not None:
        return pending
    is_sequence_cut = (layouts.tp > 1) & (layouts.sequence_parallel == 1)
    ends_in_product = not isinstance(block.mlp, MoE) or block.mlp.shared is not None
    arrives = bytes_of(SavedElements(unsharded=ends_in_product * inputs.hidden_dim), inputs)
    moe = block.mlp if isinstance(block.mlp, MoE) else None
    put_out = bytes_of(SavedElements(routed=0 if moe is None else moe.top_k * inputs.hidden_dim), inputs)
    is_saved = layouts.recompute != RECOMPUTES.index("full")
    return np.maximum(pending - np.where(is_sequence_cut, 0.0, arrives) - np.where(is_saved, put_out, 0.0), 0.0)


@cache
def pending_elements(layer: Layer, hidden_dim: int) -> SavedElements:
    """Return the elements per token at which a weight pass starts: gradients of what products and norms put out.

    Those of logits take their place. Source: torch.distributed.pipelining, stage_backward_input, which keeps the gradients of
    the first nodes that the paths from the parameters and from the input have in common.
    """
    pending = SavedElements()
    for op in layer_operators(layer, OperatorRules(hidden_dim=hidden_dim)):
        if not isinstance(op, Gemm) or op.head_dim is not None or layer.is_head:
            continue
        elements = op.rows_per_token * op.n
        if op.shard == "column":
            pending += SavedElements(tp=elements)
        elif op.routed:
            pending += SavedElements(routed=elements)
        else:
            pending += SavedElements(unsharded=elements)
    block = layer.inner_block
    norms = block.num_norms if block is not None else int(layer.is_head)
    pending += SavedElements(tokens=norms * hidden_dim)
    attention = None if block is None else block.attention
    if isinstance(attention, SoftmaxAttention) and attention.qk_norm != "none":
        pending += SavedElements(tp=attention.q_dim + attention.kv_dim)
    if isinstance(attention, LatentAttention):
        pending += SavedElements(unsharded=(attention.q_lora_rank or 0) + attention.kv_lora_rank)
    return pending


def working_bytes(layer: Layer, inputs: CostInputs) -> tuple[FloatArray, FloatArray] | None:
    """Return what a block of our decoder holds at most in its backward pass, gradients of its weights so far included [N].

    It comes on top of all that the block saves without recompute; the second is of an input pass, on top of that and of what is
    pending. None for other layers.
    """
    if not isinstance(layer, Block) or layer.counted is not None or inputs.workload.engine_facts.memory is not None:
        return None
    if not isinstance(layer.attention, SoftmaxAttention | LatentAttention | NoMixer):
        return None
    entire, split = (_Pass(inputs, frees=frees).run(layer) for frees in (True, False))
    return entire.peak, np.maximum(split.peak - pending_bytes(layer, inputs), 0.0)


class _Pass:
    """The backward pass of a block, tensor by tensor: bytes in use now and at most [N], beside what the forward pass saved.

    Sizes: D hidden states of a rank's tokens, and of all tokens of its tp ranks; R rows of its experts.

    Args:
        frees: what was saved goes when it has been used, as do gradients of what products put out; an input pass keeps these for
            the weight pass, which makes gradients of weights from them.
    """

    def __init__(self, inputs: CostInputs, *, frees: bool) -> None:
        layouts, workload = inputs.layouts, inputs.workload
        self.layouts, self.frees = layouts, frees
        self.b, self.tokens, self.width = float(workload.compute_bytes), inputs.tokens, inputs.hidden_dim
        self.weight = self.b if frees and workload.adapters is None else 0.0
        self.is_split = layouts.tp > 1
        self.along_sequence = self.is_split & (layouts.sequence_parallel == 1)
        self.every = self.b * inputs.tokens * inputs.hidden_dim
        self.hidden = self.every / np.where(self.along_sequence, layouts.tp, 1)
        self.share = stored_share(layouts, workload)
        self.has_flash = inputs.workload.compute_bytes == 2 and not inputs.cluster.weakest_device.backend.is_host
        self.now = np.zeros(len(layouts))
        self.peak = np.zeros(len(layouts))

    def run(self, block: Block) -> _Pass:
        """Go through the block, last operator first."""
        self.make(self.hidden)  # the gradient that comes in
        for part in (block.mlp, block.attention):
            if isinstance(part, DenseMLP) and part.ffn_dim:
                self._feed_forward(part)
                self._norm(keeps=~self.along_sequence)
            elif isinstance(part, MoE):
                self._experts(part)
                self._norm(keeps=~self.along_sequence & (part.shared is not None))
            elif isinstance(part, SoftmaxAttention):
                self._attention(part)
                self._norm(keeps=~self.along_sequence)
            elif isinstance(part, LatentAttention):
                self._latent_attention(part)
                self._norm(keeps=~self.along_sequence)
        return self

    # Tensors

    def make(self, size: Array) -> None:
        """Let a tensor begin."""
        self.now = self.now + size
        self.peak = np.maximum(self.peak, self.now)

    def drop(self, size: Array) -> None:
        """Let a tensor end."""
        self.now = self.now - size

    def use(self, size: Array) -> None:
        """Let a tensor begin and end."""
        self.make(size)
        self.drop(size)

    def drop_saved(self, size: Array) -> None:
        """Let what the forward pass saved end, unless the graph stays."""
        self.drop(size if self.frees else 0.0)

    def _of(self, elements: float) -> FloatArray:
        return np.asarray(self.b * self.tokens * elements / self.layouts.tp)

    # Operators

    def _gather(self) -> None:
        """Gather the gradient of what a row-parallel product put out; other dimensions than the first are joined by a copy."""
        gathered = np.where(self.along_sequence, self.every, 0.0)
        self.make(gathered)
        self.use(np.where(self.layouts.micro_batch_size > 1, gathered, 0.0))

    def _row_product(self, inner: FloatArray, num_params: float) -> None:
        """``y = x W'`` whose input x, saved, has this size and is cut over tp."""
        self._gather()
        self.make(self.weight * num_params / self.layouts.tp)
        self.make(inner)
        self.drop(np.where(self.along_sequence, self.every, 0.0) * self.frees)

    def _column_products(self, outputs: Sequence[FloatArray], num_params: Sequence[float]) -> None:
        """Products with one input, saved, whose gradients add up; their outputs are cut over tp."""
        for idx, (output, count) in enumerate(zip(outputs, num_params, strict=True)):
            self.make(self.weight * count / self.layouts.tp)
            self.make(self.every)
            self.drop_saved(output)
            if idx:
                self.use(self.every)
                self.drop(self.every)
        self.drop_saved(self.every)
        self._scatter()

    def _scatter(self) -> None:
        """Sum the gradient of what was gathered: cut along the sequence, for which it is copied, or a sum on every rank."""
        self.make(np.where(self.is_split, self.every, 0.0))
        self.use(np.where(self.along_sequence, self.hidden, 0.0))
        self.drop(np.where(self.along_sequence, 2 * self.every - self.hidden, np.where(self.is_split, self.every, 0.0)))

    def _norm(self, *, keeps: BoolArray) -> None:
        """Go through a norm and add the gradient that went past; in an input pass ``keeps`` says where that one is pending."""
        self.make(self.hidden)
        self.drop_saved(2 * self.hidden)  # the norm's input, and the gradient of its output
        self.make(self.hidden)
        self.drop(self.hidden)
        self.drop(np.where(keeps & (not self.frees), 0.0, self.hidden))

    def _gated(self, width: FloatArray, *, is_gated: bool) -> None:
        """``silu(gate) * up`` from the gradient of its output to those of its inputs, which were saved."""
        if is_gated:
            self.make(2 * width)
            self.drop(width)
            self.make(2 * width)
            self.drop(width)
        else:
            self.make(width)
        self.drop_saved((1 + is_gated) * width)
        self.drop(width)

    # Parts of a block

    def _feed_forward(self, mlp: DenseMLP) -> None:
        inner, count = self._of(mlp.ffn_dim), 1 + mlp.gated
        matrix = self.width * mlp.ffn_dim
        self._row_product(inner, matrix)
        self.drop_saved(inner)
        self._gated(inner, is_gated=mlp.gated)
        self._column_products([inner] * count, [matrix] * count)

    def _attend(self, query: FloatArray, key: FloatArray, heads: int, width: int, *, shares_heads: bool) -> None:
        """Fused attention from the gradient of its output: it saved queries, keys, values and output.

        The kernel sums in fp32, and expands heads of keys and values (runtime/rehearsal/kernels.py).
        """
        self.make(query + 2 * key)
        rows = self.tokens * heads / self.layouts.tp
        expanded = 2 * query if shares_heads else 0.0
        self.use(4 * rows * (-(-width // 32) * 32 + 1) + expanded if self.has_flash else 0.0)
        self.drop_saved(2 * query + 2 * key)
        self.drop(query)

    def _attention(self, attention: SoftmaxAttention) -> None:
        query, key = self._of(attention.q_dim), self._of(attention.kv_dim)
        of_query, of_key = self.width * attention.q_dim, self.width * attention.kv_dim
        self._row_product(query, of_query)
        self._exchange(query, key)
        shares_heads = attention.num_heads != attention.num_kv_heads
        self._attend(query, key, attention.num_heads, attention.head_dim, shares_heads=shares_heads)
        if attention.rope_fraction:
            self.use(2.5 * query)
        if attention.qk_norm != "none":
            self.make(query + key)
            self.drop_saved(2 * (query + key))
        self._column_products([key, key, query], [of_key, of_key, of_query])

    def _exchange(self, query: FloatArray, key: FloatArray) -> None:
        """Tokens for heads and back (copies before and after), or a ring: keys and values and their gradients go round."""
        layouts = self.layouts
        self.use(np.where(layouts.cp_ulysses > 1, 2 * query + np.maximum(2 * key - query, 0.0), 0.0))
        is_ring = layouts.cp > layouts.cp_ulysses
        self.use(np.where(is_ring, 4 / self.b * query + 2 * query + 8 * key, 0.0))

    def _latent_attention(self, attention: LatentAttention) -> None:
        heads, rank = attention.num_heads, attention.q_lora_rank or 0
        query, value = self._of(attention.q_dim), self._of(heads * attention.v_head_dim)
        expanded = self._of(heads * (attention.qk_nope_head_dim + attention.v_head_dim))
        compressed = self.b * self.tokens * (attention.kv_lora_rank + attention.qk_rope_head_dim)
        of_query = self.b * self.tokens * rank
        self._row_product(value, self.width * heads * attention.v_head_dim)
        self.drop_saved(value)
        self.make(query)  # filled up to the width of queries
        self.drop(value)
        self._exchange(query, query)
        self._attend(query, query, heads, attention.head_dim, shares_heads=False)
        self.make(value)
        self.drop(query)
        self.make(expanded)
        self.drop(value + query)
        self.use(expanded)
        self.make(
            self.weight
            * attention.kv_lora_rank
            * heads
            * (attention.qk_nope_head_dim + attention.v_head_dim)
            / self.layouts.tp
        )
        self.make(2 * compressed)
        self.drop_saved(expanded + 2 * compressed)
        self.drop(0.0 if self.frees else compressed)
        self.use(1.5 * query)
        if rank:
            self.make(self.weight * rank * attention.q_dim / self.layouts.tp)
            self.make(2 * of_query)
            self.drop_saved(query + 2 * of_query)
            self.make(self.weight * rank * self.width)
        self.make(self.weight * self.width * (attention.kv_lora_rank + attention.qk_rope_head_dim))
        if rank:
            self.make(self.every)
            self.drop(of_query)
        else:
            self.make(self.weight * self.width * attention.q_dim / self.layouts.tp)
            self.make(self.every)
            self.drop_saved(query)
        self.make(self.every)
        self.use(self.every)
        self.drop(self.every)
        self.drop_saved(self.every)
        self._scatter()

    def _experts(self, mlp: MoE) -> None:
        if mlp.shared is not None:
            self._feed_forward(mlp.shared)  # its gradient of the input waits to be added
        every = self.b * self.tokens * self.width
        rows = mlp.top_k * every * self.share
        inner = self._of(mlp.top_k * mlp.ffn_dim)
        matrix = self.weight * mlp.num_experts * mlp.ffn_dim * self.width / (self.layouts.ep * self.layouts.expert_tp)
        of_cut = every * self.share
        is_cut, travels = self.layouts.expert_tp > 1, self.layouts.ep > 1
        # Of the forward pass, which may run again: rows as they are sent, arrive, are sorted, put out, sorted back and return; or
        # as they are put out and weighted. Two of them are saved.
        self.use(np.where(travels, 4.0, 2.0) * rows + np.where(is_cut, of_cut, 0.0))
        self.make(np.where(is_cut, of_cut, 0.0))
        self.make(rows)  # weighted outputs
        self.use(rows)  # times outputs, for the gradient of the weights
        self.drop(np.where(is_cut, of_cut, 0.0))
        self.drop_saved(rows)
        self.use(rows)  # in the order of the experts; back to their ranks, and in order there
        self.make(matrix)
        self.make(inner)
        self.drop_saved(inner + rows)
        self._gated(inner, is_gated=mlp.gated)
        for idx in range(1 + mlp.gated):
            self.make(matrix)
            self.make(rows)
            self.drop_saved(inner)
            if idx:
                self.use(rows)
                self.drop(rows)
        self.drop_saved(rows)
        self.use(np.where(travels, rows, 0.0))
        self.make(of_cut)
        self.drop(rows)
        self.make(of_cut)  # of the router
        self.use(of_cut)
        self.drop_saved(of_cut)
        self.drop(of_cut)
        self.use(np.where(is_cut, self.hidden, 0.0))
        self.drop(of_cut - self.hidden)
        if mlp.shared is not None:
            self.use(self.hidden)
            self.drop(self.hidden)
