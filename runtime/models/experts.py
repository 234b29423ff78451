"""Mixture of experts: a router, the experts a token visits, and a shared expert for every token.

Dropless: every token reaches all of its top_k experts, however unevenly they are chosen. Rows stand sorted by expert in one
matrix, and one grouped product multiplies each expert's rows with its weights.

Shapes: T tokens of this rank, k experts of a token, M = T k rows, D hidden_dim, F ffn_dim, E experts. Under expert parallelism
this rank holds E / ep experts, each cut to F / etp, and the rows are those that all ranks send to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement

from ...schema.model import DenseMLP, MoE
from .init import local_tensor
from .swiglu import SwiGLU, silu_product


@dataclass(frozen=True)
class ExpertRanks:
    """Where the experts of a layer are.

    Attributes:
        exchange: ranks among which the experts are shared out; None where each has all.
        cut: ranks that share each expert; None where experts are whole.
        tokens: how tokens are spread over the ranks of ``cut``: each has its own, Shard(0), or all have the same, Replicate().
    """

    exchange: dist.ProcessGroup | None
    cut: DeviceMesh | None
    tokens: Placement

    def gather(self, tokens: Tensor) -> Tensor:
        """Tokens [T, D] of this rank to those of all ranks that share its experts."""
        if self.cut is None:
            return tokens
        whole = DTensor.from_local(tokens, self.cut, [self.tokens], run_check=False).full_tensor(
            grad_placements=[Partial()]
        )
        return whole

    def reduce(self, outputs: Tensor) -> Tensor:
        """Sum of the parts of all ranks that share these experts: for the tokens of this rank."""
        if self.cut is None:
            return outputs
        parts = DTensor.from_local(outputs, self.cut, [Partial()], run_check=False)
        return parts.redistribute(placements=[self.tokens]).to_local()


class WholeLinear(nn.Module):
    """``x W'`` with a small weight that every rank has whole.

    Attributes:
        weight_grad: how the gradient of a DTensor weight is spread over tp, as in RMSNorm.
    """

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim))
        self.weight_grad: Sequence[Placement] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_dim] to [..., out_dim]."""
        weight: Tensor = self.weight
        if isinstance(weight, DTensor):
            weight = weight.to_local(grad_placements=self.weight_grad)
        return F.linear(x, weight)


class Router(WholeLinear):
    """Which experts a token visits, and with which weight."""

    def __init__(self, hidden_dim: int, spec: MoE) -> None:
        super().__init__(hidden_dim, spec.num_experts)
        self.top_k, self.normalize, self.scale = spec.top_k, spec.normalize, spec.scale

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """[T, D] to weights and experts [T, k]; the softmax over all experts is fp32."""
        scores = self(tokens).softmax(dim=-1, dtype=torch.float32)
        chosen, experts = scores.topk(self.top_k, dim=-1)
        if self.normalize:
            chosen = chosen / chosen.sum(dim=-1, keepdim=True)
        return (chosen * self.scale).to(tokens.dtype), experts


class Experts(nn.Module):
    """E feed-forward parts ``down(silu(gate(x)) * up(x))`` as three stacked matrices.

    Attributes:
        gradient_ratio: factor on the gradients of the weights: what the ranks that average them over fewer or more of their
            kind than other weights leave to be made up.
    """

    def __init__(self, hidden_dim: int, num_experts: int, spec: DenseMLP) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(num_experts, spec.ffn_dim, hidden_dim))
        self.up_proj = nn.Parameter(torch.empty(num_experts, spec.ffn_dim, hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_dim, spec.ffn_dim))
        self.gradient_ratio = 1.0

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows [M, D] sorted by expert, ``counts`` [E] of them for each; to [M, D]."""
        ends = counts.cumsum(0).to(torch.int32)
        gate, up, down = (self._weight(p) for p in (self.gate_proj, self.up_proj, self.down_proj))
        product = silu_product(F.grouped_mm(rows, gate, offs=ends), F.grouped_mm(rows, up, offs=ends))
        return F.grouped_mm(product, down, offs=ends)

    def _weight(self, parameter: Tensor) -> Tensor:
        """[E, out, in] to this rank's [E, in, out]."""
        weight = local_tensor(parameter)
        if self.gradient_ratio != 1:
            weight = _ScaleGradient.apply(weight, self.gradient_ratio)  # type: ignore[no-untyped-call]
        return weight.transpose(1, 2)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ratio: float) -> Tensor:
        ctx.ratio = ratio
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output * ctx.ratio, None


class MixtureOfExperts(nn.Module):
    """Routed experts and, where the model has one, a shared expert (behind a gate in Qwen2-MoE).

    Attributes:
        ranks: where the experts are; None where this rank has all of them.
    """

    def __init__(self, hidden_dim: int, spec: MoE) -> None:
        super().__init__()
        self.num_experts = spec.num_experts
        self.gate = Router(hidden_dim, spec)
        self.experts = Experts(hidden_dim, spec.num_experts, spec.expert)
        self.shared_expert = SwiGLU(hidden_dim, spec.shared) if spec.shared is not None else None
        self.shared_expert_gate = WholeLinear(hidden_dim, 1) if spec.shared_gate else None
        self.ranks: ExpertRanks | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        tokens = hidden.flatten(0, 1)
        routed = self._routed(tokens if self.ranks is None else self.ranks.gather(tokens))
        if self.ranks is not None:
            routed = self.ranks.reduce(routed)
        routed = routed.view(hidden.shape)
        if self.shared_expert is None:
            return routed
        shared = self.shared_expert(hidden)
        if self.shared_expert_gate is not None:
            shared = torch.sigmoid(self.shared_expert_gate(hidden)) * shared
        return routed + shared

    def _routed(self, tokens: Tensor) -> Tensor:
        """[T, D] to the weighted sum of each token's experts [T, D]."""
        weights, experts = self.gate.route(tokens)
        # Sorted by expert; a stable order keeps the sums of a run the same each time.
        order = experts.flatten().argsort(stable=True)
        token_of_row = order // experts.shape[1]
        counts = torch.bincount(experts.flatten(), minlength=self.num_experts)
        outputs = self._through_experts(tokens[token_of_row], counts)
        weighted = outputs * weights.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, token_of_row, weighted)

    def _through_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows [M, D] sorted by expert with ``counts`` [E] of them each: to their experts and back."""
        group = None if self.ranks is None else self.ranks.exchange
        if group is None:
            result: Tensor = self.experts(rows, counts)
            return result
        arriving = _Arriving.of(counts, group)
        received = _all_to_all(rows, arriving.received, arriving.sent, group)
        by_expert = arriving.expert_of_row.argsort(stable=True)
        outputs = self.experts(received[by_expert], arriving.counts)
        back = torch.empty_like(by_expert).scatter_(0, by_expert, torch.arange(len(by_expert), device=by_expert.device))
        return _all_to_all(outputs[back], arriving.sent, arriving.received, group)


class _Arriving(NamedTuple):
    """Rows between the ranks of a group: how many this one sends to and receives from each, and what it receives."""

    sent: list[int]
    received: list[int]
    expert_of_row: Tensor
    counts: Tensor

    @classmethod
    def of(cls, counts: Tensor, group: dist.ProcessGroup) -> _Arriving:
        """From the rows [E] this rank has for each expert; every rank holds E / ranks experts in a row."""
        num_ranks = group.size()
        by_rank = counts.view(num_ranks, -1)
        theirs = torch.empty_like(by_rank)
        dist.all_to_all_single(theirs, by_rank.contiguous(), group=group)
        # Both lists go to the host at once: there a GPU waits for the router, as every dropless exchange of uneven parts must.
        sent, received = torch.stack((by_rank.sum(1), theirs.sum(1))).tolist()
        local = torch.arange(by_rank.shape[1], device=counts.device).repeat(num_ranks)
        return cls(sent, received, local.repeat_interleave(theirs.flatten()), theirs.sum(0))


def _all_to_all(rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    result: Tensor = all_to_all_single_autograd(rows, received, sent, group)
    return result
