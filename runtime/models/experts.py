"""Mixture of experts: a router, the experts a token visits, and a shared expert for every token.

Dropless: every token reaches all of its top_k experts, however unevenly they are chosen. Rows are sorted by expert in one matrix,
and one grouped product multiplies each expert's rows with its weights. An expert may be in several slots, each of which takes a
share of its rows: weights stay where they are stored, sharded by expert in order, and for each pass a rank fetches the weights of
its slots from the ranks that store them; the backward pass brings the gradients of all replicas back and adds them.

Shapes: T tokens of this rank, k experts of a token, M = T k rows, D hidden_dim, F ffn_dim, E experts, S slots, R replicas of an
expert at most. Under expert parallelism this rank stores E / ep experts, each cut to F / etp, it has S / ep slots, and the rows are
those that all ranks send to them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement

from ...schema.layers import DenseMLP, MoE
from .hot_experts import HotExperts
from .layers import FeedForward, ReplicatedLinear, gathered, local_tensor, redistribute, silu_product

_MIN_SUM = 1e-20
"""Beside the sum of the chosen scores, against division by zero (DeepSeek-V3's modeling file)."""


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks of the experts of a layer.

    Attributes:
        exchange: ranks among which the experts are shared out; None where each has all.
        cut: ranks that share each expert; None where experts are not cut.
        tokens: placement of tokens on the ranks of ``cut``: each has its own, Shard(0), or all have the same, Replicate().
    """

    exchange: dist.ProcessGroup | None
    cut: DeviceMesh | None
    tokens: Placement


class Router(ReplicatedLinear):
    """The choice of the experts that a token visits, and of their weights.

    Attributes:
        e_score_correction_bias: added to sigmoid scores for the choice only (DeepSeek-V3, arXiv:2412.19437 section 2.1.2); kept as
            it is loaded, zero in a new model, unless training moves it (training/optimizer.py).
        load: tokens each expert was chosen for since somebody set it to zero; None: not counted.
    """

    load: Tensor | None = None

    def __init__(self, hidden_dim: int, spec: MoE) -> None:
        super().__init__(hidden_dim, spec.num_experts)
        self.spec = spec
        if spec.router == "sigmoid":
            self.e_score_correction_bias = nn.Buffer(torch.zeros(spec.num_experts))

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Route [T, D] to weights and experts [T, k]; scores are fp32."""
        logits = self(tokens).float()
        scores = logits.sigmoid() if self.spec.router == "sigmoid" else logits.softmax(dim=-1)
        experts = self._choice_scores(scores.detach()).topk(self.spec.top_k, dim=-1).indices
        chosen = scores.gather(1, experts)
        if self.spec.normalize:
            chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + _MIN_SUM)
        return (chosen * self.spec.scale).to(tokens.dtype), experts

    def _choice_scores(self, scores: Tensor) -> Tensor:
        """Return the scores [T, E] to choose by: corrected, and minus infinity outside the best groups of experts.

        A group counts as its two best experts (sigmoid), or as its best one (softmax, arXiv:2405.04434 section 2.2.2).
        """
        is_sigmoid = self.spec.router == "sigmoid"
        if is_sigmoid:
            scores = scores + self.e_score_correction_bias
        if self.spec.top_groups == self.spec.num_groups:
            return scores
        by_group = scores.unflatten(-1, (self.spec.num_groups, -1))
        group_scores = by_group.topk(2 if is_sigmoid else 1, dim=-1).values.sum(-1)
        best = group_scores.topk(self.spec.top_groups, dim=-1).indices
        is_best = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, best, value=True)
        return by_group.masked_fill(~is_best[..., None], -torch.inf).flatten(-2)


class Experts(nn.Module):
    """E feed-forward parts ``down(silu(gate(x)) * up(x))`` as three stacked matrices.

    Attributes:
        gradient_ratio: factor on the gradients of the weights: what the ranks that average them over fewer or more of their
            kind than other weights leave to be made up.
        fetch: from the weights this rank stores to those of the slots it holds; None where these are the same.
    """

    def __init__(self, hidden_dim: int, num_experts: int, spec: DenseMLP) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(num_experts, spec.ffn_dim, hidden_dim))
        self.up_proj = nn.Parameter(torch.empty(num_experts, spec.ffn_dim, hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_dim, spec.ffn_dim))
        self.gradient_ratio = 1.0
        self.fetch: Callable[[Tensor], Tensor] | None = None

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Map rows [M, D] sorted by expert (or slot), ``counts`` [E] of them for each, to [M, D]."""
        ends = counts.cumsum(0).to(torch.int32)
        gate, up, down = (self._weight(p) for p in (self.gate_proj, self.up_proj, self.down_proj))
        product = silu_product(F.grouped_mm(rows, gate, offs=ends), F.grouped_mm(rows, up, offs=ends))
        return F.grouped_mm(product, down, offs=ends)

    def _weight(self, parameter: Tensor) -> Tensor:
        """Return this rank's weight [E, in, out] of a parameter [E, out, in]."""
        weight = local_tensor(parameter)
        if self.gradient_ratio != 1:
            weight = _ScaleGradient.apply(weight, self.gradient_ratio)  # type: ignore[no-untyped-call]
        if self.fetch is not None:
            weight = self.fetch(weight)
        return weight.transpose(1, 2)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ratio: float) -> Tensor:
        ctx.ratio = ratio
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output * ctx.ratio, None


@dataclass(frozen=True)
class ExpertSlots:
    """The expert of each slot of a layer [S], slots counted rank by rank, and the part of its expert's rows that it takes [S]."""

    experts: tuple[int, ...]
    shares: tuple[float, ...]
    num_experts: int

    @cached_property
    def _of_expert(self) -> tuple[Tensor, Tensor]:
        """Return the slots of each expert [E, R], unused ones repeating the last, and the share up to and with each [E, R]."""
        slots: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.experts):
            slots[expert].append(slot)
        num_replicas = torch.tensor([len(replicas) for replicas in slots])
        width = int(num_replicas.max())
        table = torch.tensor([replicas + [replicas[-1]] * (width - len(replicas)) for replicas in slots])
        taken = torch.tensor(self.shares, dtype=torch.float64)[table]
        taken = taken.masked_fill(torch.arange(width)[None] >= num_replicas[:, None], 0.0).cumsum(1)
        return table, taken / taken[:, -1:]

    def slot_of_rows(self, expert_of_row: Tensor, counts: Tensor) -> Tensor:
        """Return the slot of each row [M], rows sorted by expert with ``counts`` [E] of them each, cut by the shares."""
        table, taken = (tensor.to(counts.device) for tensor in self._of_expert)
        first = counts.cumsum(0) - counts
        position = torch.arange(len(expert_of_row), device=counts.device) - first[expert_of_row]
        middle = (position + 0.5) / counts[expert_of_row]
        replica = (middle[:, None] > taken[expert_of_row]).sum(1).clamp(max=table.shape[1] - 1)
        return table[expert_of_row, replica]

    def weights(self, stored: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the weights [S / ep, ...] of this rank's slots, from those [E / ep, ...] that each rank of the group stores."""
        ranks, rank = group.size(), group.rank()
        slots_of_rank = [list(part) for part in torch.tensor(self.experts).view(ranks, -1).tolist()]
        num_stored = self.num_experts // ranks
        stored_here = range(rank * num_stored, (rank + 1) * num_stored)
        sent = [[expert - stored_here.start for expert in slots if expert in stored_here] for slots in slots_of_rank]
        owners = [expert // num_stored for expert in slots_of_rank[rank]]
        received = [owners.count(owner) for owner in range(ranks)]
        rows = stored.flatten(1)[
            torch.tensor([row for rows in sent for row in rows], dtype=torch.long, device=stored.device)
        ]
        arrived: Tensor = all_to_all_single_autograd(rows, received, [len(part) for part in sent], group)
        # They arrive by owner, each owner's in the order of this rank's slots.
        by_owner = torch.tensor(owners, device=stored.device).argsort(stable=True)
        return arrived[_inverse(by_owner)].view(-1, *stored.shape[1:])


class MixtureOfExperts(nn.Module):
    """Routed experts and, where the model has one, a shared expert (behind a gate in Qwen2-MoE).

    ``ranks`` have the experts, None: this one has all; ``slots``: which are where, None: each once and in order; ``assumed_rows``:
    of this rank's rows those to each rank and those from each, where no router computes (rehearsal/); None: as it chooses.
    """

    def __init__(self, hidden_dim: int, spec: MoE) -> None:
        super().__init__()
        self.num_experts, self.hidden_dim = spec.num_experts, hidden_dim
        self.gate = Router(hidden_dim, spec)
        self.experts = Experts(hidden_dim, spec.num_experts, spec.expert)
        self.shared_expert = FeedForward(hidden_dim, spec.shared) if spec.shared is not None else None
        self.shared_expert_gate = ReplicatedLinear(hidden_dim, 1) if spec.shared_gate else None
        self.ranks: ExpertRanks | None = None
        self.slots: ExpertSlots | HotExperts | None = None
        self.assumed_rows: Callable[[int], tuple[list[int], list[int]]] | None = None

    def place(self, slots: ExpertSlots | HotExperts | None) -> None:
        """Put experts into these slots of the ranks that exchange rows; None: each once and in order."""
        assert self.ranks is not None
        assert self.ranks.exchange is not None
        self.slots = slots
        self.experts.fetch = None if slots is None else functools.partial(slots.weights, group=self.ranks.exchange)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, S, D] to [B, S, D]."""
        tokens, ranks = hidden.flatten(0, 1), self.ranks
        if ranks is None or ranks.cut is None:
            routed = self._routed(tokens)
        else:
            # Tokens of all ranks that share these experts; the parts of the outputs are summed for those of this rank.
            routed = self._routed(gathered(tokens, ranks.cut, ranks.tokens))
            routed = redistribute(routed, ranks.cut, Partial(), ranks.tokens)
        routed = routed.view(hidden.shape)
        if self.shared_expert is None:
            return routed
        shared = self.shared_expert(hidden)
        if self.shared_expert_gate is not None:
            shared = torch.sigmoid(self.shared_expert_gate(hidden)) * shared
        return routed + shared

    def _routed(self, tokens: Tensor) -> Tensor:
        """Map [T, D] to the weighted sum of each token's experts [T, D]."""
        weights, experts = self.gate.route(tokens)
        # Sorted by expert; a stable order keeps the sums of a run the same each time.
        order = experts.flatten().argsort(stable=True)
        counts = torch.bincount(experts.flatten(), minlength=self.num_experts)
        if self.gate.load is not None:
            self.gate.load += counts
        if self.slots is not None:
            slot_of_row = self.slots.slot_of_rows(experts.flatten()[order], counts)
            counts = torch.bincount(slot_of_row, minlength=len(self.slots.experts))
            order = order[slot_of_row.argsort(stable=True)]
        token_of_row = order // experts.shape[1]
        outputs = self._through_experts(tokens[token_of_row], counts)
        # Back in the order of tokens: index_add would keep the weighted rows for its backward pass, which needs none.
        of_token = outputs[_inverse(order)].view(*experts.shape, -1)
        return (of_token * weights[..., None]).sum(1)

    def _through_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Send rows [M, D] sorted by expert with ``counts`` [E] of them each to their experts and back."""
        group = None if self.ranks is None else self.ranks.exchange
        if group is None:
            result: Tensor = self.experts(rows, counts)
            return result
        by_rank = counts.view(group.size(), -1)  # every rank holds as many experts in a row
        theirs = torch.empty_like(by_rank)
        dist.all_to_all_single(theirs, by_rank.contiguous(), group=group)
        if self.assumed_rows is None:
            # Both lists go to the host at once: there a GPU waits for the router, as every dropless exchange of uneven parts must.
            sent, received = torch.stack((by_rank.sum(1), theirs.sum(1))).tolist()
        else:
            sent, received = self.assumed_rows(len(rows))
        local = torch.arange(by_rank.shape[1], device=counts.device).repeat(group.size())
        by_expert = local.repeat_interleave(theirs.flatten(), output_size=sum(received)).argsort(stable=True)
        arrived = all_to_all_single_autograd(rows, received, sent, group)
        outputs = self.experts(arrived[by_expert], theirs.sum(0))
        result = all_to_all_single_autograd(outputs[_inverse(by_expert)], sent, received, group)
        return result


def _inverse(order: Tensor) -> Tensor:
    """Return the permutation [M] that undoes another."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
