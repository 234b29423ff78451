"""Bytes of a rank's collectives in a step of our runtime, by axis and kind: what a rehearsal counts, by formula.

Of whole tensors: what an all-gather puts out, what a reduction or an exchange reads. With P parameters of the rank's layers (per tp
rank), those of experts with axes of their own apart, b bytes of the compute dtype, m passes over T tokens of width D, L blocks, and
r = 1 where a block is recomputed:

    dp_shard      all-gather of b P: once a step under zero 1, once a pass under zero 2; under zero 3 twice a pass, but for the head
                  (once); reduce-scatter of 4 P once a step below zero 2 or under a pipeline, else once a pass
    dp_replicate  all-reduce of 4 P / shards as often
    tp            each part of a block (attention, feed-forward, experts without axes of their own, shared ones) 2 + r all-gathers
                  and 2 + r reduce-scatters of b T D, of the last part 2 (no backward pass reads what it puts out); embedding and
                  head one of each a pass; without sequence parallelism all-reduces in place of both. Latent attention 1 + r
                  reduce-scatters, and backward all-reduces of b T times the widths that its heads read. All-reduces of gradients
                  of what every rank has all of, 4 bytes each as often as gradients are reduced; of 3 numbers a token of the loss,
                  of 1 a token, forward and backward, of a norm over all heads
    cp            exchange for heads: (2 + r) b T (2 q + 2 k) of widths q of queries and k of keys; ring of R ranks: 2 b T k
                  R - 1 times forward and 2 R - 1 times backward, and R - 1 times again under full recompute
    ep            rows to their experts and back: 4 + 2 r of b T k D, each rank's own, and how many there are for each expert
    etp           2 + r all-gathers and 2 + r reduce-scatters of b D times the tokens of its ranks, of the last part 2
    pp            hidden states to and from each neighbour on another rank, gradients the other way; once a step the gradient of a
                  tied embedding

Norms of gradients and votes of all ranks have no formula here, nor have plans whose experts have slots or whose stages differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...schema.layers import Attention, Block, Embedding, Head, LatentAttention, MoE, SoftmaxAttention
from ...schema.layout import Recompute
from ...schema.layout_table import LayoutTable
from ...schema.training_plan import TrainingPlan
from ..layer.memory import tp_params
from ..layer.operators import Layer
from ..layer.parallel import expert_params


def collective_bytes(plan: TrainingPlan, stages: Sequence[int]) -> dict[tuple[str, str], float]:
    """Return the bytes by (axis, operator) of a rank that holds these stages; nothing where there is no formula."""
    workload = plan.workload
    if plan.degrees_by_stage or workload.adapters is not None or plan.offload is not None or not workload.has_backward:
        return {}
    layers = list(plan.staged_model.iter_layers())
    members = [
        _Member(layers[idx], plan.stages[stage].recompute_of(idx) if layers[idx].is_block else "none")
        for stage in stages
        for idx in plan.stages[stage].layer_idxs
    ]
    traffic = _Traffic(plan, members)
    traffic.over_shards()
    if plan.layout.tp > 1:
        traffic.over_tp()
    if plan.layout.cp > 1:
        traffic.over_cp()
    if not plan.expert_slots:
        traffic.over_experts()
    if plan.layout.pp > 1:
        traffic.over_stages(stages)
    return {message: size for message, size in traffic.sent.items() if size}


@dataclass(frozen=True)
class _Member:
    """A layer of the rank, and what it recomputes."""

    layer: Layer
    recompute: Recompute

    @property
    def again(self) -> int:
        """Return how often its forward pass runs in its backward pass."""
        return int(self.recompute != "none")


class _Traffic:
    """Bytes by (axis, operator), added up axis by axis."""

    def __init__(self, plan: TrainingPlan, members: list[_Member]) -> None:
        self.plan, self.layout, self.members = plan, plan.layout, members
        self.sent: dict[tuple[str, str], float] = {}
        self.b, self.width, self.passes = (
            float(plan.workload.compute_bytes),
            plan.model.hidden_dim,
            plan.num_microbatches,
        )
        self.tokens = self.layout.micro_batch_size * plan.workload.seq_len / self.layout.cp
        self.blocks = [(one.layer, one) for one in members if isinstance(one.layer, Block)]
        self.num_ends = sum(isinstance(one.layer, Embedding | Head) for one in members)
        self.waits = self.layout.zero_stage < 2 or (self.layout.pp > 1 and self.layout.zero_stage < 3)
        self.reductions = 1 if self.waits else self.passes

    def add(self, axis: str, op: str, size: float) -> None:
        """Count bytes of a step."""
        self.sent[axis, op] = self.sent.get((axis, op), 0.0) + size

    def over_shards(self) -> None:
        """Count gathers of parameters and reductions of gradients."""
        plan, layout = self.plan, self.layout
        table = LayoutTable.from_layouts([layout], plan.workload.global_batch_size)
        is_plain = plan.workload.is_full_precision and layout.world_size == layout.dp_replicate > 1
        tied_ends = plan.model.tie_embeddings and layout.pp == 1
        for one in self.members:
            params = float(tp_params(one.layer, self.width, table)[0])
            routed = 0.0 if layout.experts_follow_tp else float(expert_params(one.layer, self.width, table)[0])
            again = layout.zero_stage == 3 and (tied_ends or not isinstance(one.layer, Head))
            gathers = 1 if self.waits else self.passes * (1 + again)
            for axes, size, shards, replicas in (
                (("dp_shard", "dp_replicate"), params - routed, layout.num_shards, layout.num_replicas),
                (("expert_shard", "expert_replicate"), routed, layout.expert_shards, layout.expert_replicas),
            ):
                if shards > 1:
                    self.add(axes[0], "all_gather", gathers * self.b * size)
                    self.add(axes[0], "reduce_scatter", self.reductions * 4.0 * size)
                if replicas > 1:
                    self.add(axes[1], "all_reduce", (1 if is_plain else self.reductions) * 4.0 * size / int(shards))

    def over_tp(self) -> None:
        """Count what the parts of blocks and the ends gather and reduce, and gradients of what is on every rank."""
        hidden = self.passes * self.b * self.tokens * self.width
        self._gather_and_reduce("tp", hidden, self.num_ends, self.num_ends)
        for block, one in self.blocks:
            if isinstance(block.attention, LatentAttention):
                self._over_tp_latent(block.attention, hidden, one.again, repeats=one.again * (block.num_parts == 2))
            elif isinstance(block.attention, SoftmaxAttention):
                self._over_tp_part(hidden, one.again, is_last=block.num_parts == 1)
                if block.attention.qk_norm == "full":
                    self.add("tp", "all_reduce", (4 + 2 * one.again) * self.passes * 4 * self.tokens)
            mlp = block.mlp
            if isinstance(mlp, MoE):
                if self.layout.experts_follow_tp:
                    self._over_tp_part(hidden, one.again, is_last=mlp.shared is None)
                if mlp.shared is not None:
                    self._over_tp_part(hidden, one.again, is_last=not mlp.shared_gate)
            elif mlp.ffn_dim:
                self._over_tp_part(hidden, one.again, is_last=True)
        if any(isinstance(one.layer, Head) for one in self.members):  # largest; sums and logits of the targets
            self.add("tp", "all_reduce", self.passes * 3 * 4 * self.tokens)
        # Gradients add up in fp32 over the passes of a step, under a pipeline from the first one on.
        adds_up = (self.layout.pp > 1 and self.waits) or self.reductions < self.passes
        in_parts = sum(self._in_parts(one.layer) for one in self.members)
        self.add("tp", "all_reduce", self.reductions * (4 if adds_up else self.b) * in_parts)

    def _over_tp_part(self, hidden: float, again: int, *, is_last: bool) -> None:
        self._gather_and_reduce("tp", hidden, 2 + again, 2 + again * (not is_last))

    def _over_tp_latent(self, attention: LatentAttention, hidden: float, again: int, *, repeats: int) -> None:
        """Count latent attention: its gathered input has the same gradient on every rank, but for what the heads read."""
        compressed = (attention.q_lora_rank or self.width) + attention.kv_lora_rank + attention.qk_rope_head_dim
        self.add("tp", "all_reduce", hidden / self.width * compressed)
        if self.layout.sequence_parallel:
            self.add("tp", "all_gather", (2 + again) * hidden)
            self.add("tp", "reduce_scatter", (1 + repeats) * hidden)
        else:
            self.add("tp", "all_reduce", (1 + repeats) * hidden)

    def _gather_and_reduce(self, axis: str, size: float, gathers: int, reductions: int) -> None:
        """Count as many of both; without sequence parallelism half of them are sums on every rank, the others nothing."""
        if self.layout.sequence_parallel:
            self.add(axis, "all_gather", gathers * size)
            self.add(axis, "reduce_scatter", reductions * size)
        else:
            self.add(axis, "all_reduce", reductions * size)

    def _in_parts(self, layer: Layer) -> float:
        """Return the parameters that every rank of tp has, and whose gradients are parts of a sum: of other tokens or heads."""
        along, norm = bool(self.layout.sequence_parallel), self.width
        if isinstance(layer, Head):
            return along * norm * _vectors(layer.norm)
        if isinstance(layer, Embedding):
            return along * norm * layer.num_positions
        assert isinstance(layer, Block)
        params: float = along * norm * layer.num_norms * _vectors(layer.norm)
        if isinstance(layer.attention, SoftmaxAttention) and layer.attention.qk_norm == "per_head":
            params += 2 * layer.attention.head_dim
        if isinstance(layer.attention, SoftmaxAttention) and layer.attention.out_bias:
            params += along * norm
        if isinstance(layer.mlp, MoE):
            params += norm * (layer.mlp.num_experts + layer.mlp.shared_gate * along)
        elif layer.mlp.bias and layer.mlp.ffn_dim:
            params += along * norm
        return params

    def over_cp(self) -> None:
        """Count exchanges of tokens for heads, and keys and values that go round."""
        among = int(self.layout.cp_ulysses)
        ring = int(self.layout.cp) // among
        for block, one in self.blocks:
            query, key = _attended(block.attention)
            each = self.passes * self.b * self.tokens / self.layout.tp
            if among > 1:
                self.add("cp", "all_to_all", (2 + one.again) * each * (2 * query + 2 * key))
            times = ring - 1 + 2 * ring - 1 + (ring - 1) * (one.recompute == "full") if ring > 1 else 0
            for op in ("send", "recv"):
                self.add("cp", op, times * each * 2 * key)

    def over_experts(self) -> None:
        """Count rows to experts with axes of their own and back, and tokens of ranks that share an expert."""
        layout = self.layout
        if layout.experts_follow_tp:
            return
        tokens = self.tokens / layout.tp * layout.expert_tp
        for block, one in self.blocks:
            if not isinstance(block.mlp, MoE):
                continue
            size = self.passes * self.b * tokens * self.width
            if layout.ep > 1:
                self.add("ep", "all_to_all", (4 + 2 * one.again) * size * block.mlp.top_k)
                self.add("ep", "all_to_all", (1 + one.again) * self.passes * 8 * block.mlp.num_experts)
            if layout.expert_tp > 1:
                self.add("etp", "all_gather", (2 + one.again) * size)
                self.add("etp", "reduce_scatter", (2 + one.again * (block.mlp.shared is not None)) * size)

    def over_stages(self, stages: Sequence[int]) -> None:
        """Count hidden states and their gradients, and the gradient of a tied embedding that two ranks have."""
        layout, holders = self.layout, self.plan.rank_of_stage
        if self.plan.model.tie_embeddings and self.num_ends == 1:
            vocabulary = self.plan.model.vocab_size * self.width
            self.add("pp", "all_reduce", 4.0 * vocabulary / layout.tp / int(layout.num_shards))
        boundary = self.b * self.tokens * self.width / (layout.tp if layout.sequence_parallel else 1)
        others = sum(
            0 <= other < len(holders) and holders[other] != holders[stage]
            for stage in stages
            for other in (stage - 1, stage + 1)
        )
        for op in ("send", "recv"):
            self.add("pp", op, self.passes * boundary * others)


def _vectors(norm: str) -> int:
    return 2 if norm == "layernorm" else 1


def _attended(attention: Attention) -> tuple[int, int]:
    """Return the widths of queries (and outputs) and of keys (and values) as kernels read them."""
    if isinstance(attention, LatentAttention):
        return attention.q_dim, attention.q_dim
    return (attention.q_dim, attention.kv_dim) if isinstance(attention, SoftmaxAttention) else (0, 0)
