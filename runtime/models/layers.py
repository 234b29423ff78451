"""Small layers of a block: norms, feed-forward parts, learned positions, linear layers that tensor parallelism leaves unsharded.

Shapes: B micro-batch, S sequence, D hidden_dim, F ffn_dim.

Modules work on local tensors, a rank's share where ranks share one, because dispatching every activation through DTensor costs
more than a norm. Where a tensor changes its placement it is a DTensor for that step only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from ...schema.layers import DenseMLP, NormKind


class LocalModule(nn.Module):
    """A module that computes with this rank's part of its own parameters, which may be DTensors. Abstract.

    ``weight_grad`` are placements over tp of their gradients; None where these are split as the parameters are.
    """

    weight_grad: Sequence[Placement] | None = None

    def local(self, parameter: Tensor) -> Tensor:
        """Return this rank's part of a parameter, for arithmetic on local tensors."""
        return parameter.to_local(grad_placements=self.weight_grad) if isinstance(parameter, DTensor) else parameter


class RMSNorm(LocalModule):
    """``x / rms(x) * weight`` over the last dimension, which may be split over ``tp``."""

    tp: DeviceMesh | None = None

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., dim] to the same shape."""
        weight = self.local(self.weight)
        if self.tp is None:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        normed: Tensor = _SplitNorm.apply(x, self.eps, self.tp.get_group())  # type: ignore[no-untyped-call]
        return normed * weight


class _SplitNorm(torch.autograd.Function):
    """``x / rms(x)`` over a dimension of which each rank of a group has an equal part.

    It saves what it puts out, as the product with the weight does: autograd would save its input twice as well, in fp32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, group: dist.ProcessGroup) -> Tensor:
        wide = x.float()
        mean = wide.square().mean(dim=-1, keepdim=True) / group.size()
        dist.all_reduce(mean, group=group)
        inverse = torch.rsqrt(mean + eps)
        normed = (wide * inverse).to(x.dtype)
        ctx.group = group
        ctx.save_for_backward(normed, inverse)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        normed, inverse = ctx.saved_tensors
        # The mean over all parts of the gradient times what it is the gradient of.
        mean = (grad_output * normed).sum(dim=-1, keepdim=True, dtype=torch.float32)
        mean /= normed.shape[-1] * ctx.group.size()
        dist.all_reduce(mean, group=ctx.group)
        return ((grad_output - normed * mean) * inverse).to(normed.dtype), None, None


class LayerNorm(LocalModule):
    """``(x - mean(x)) / std(x) * weight + bias`` over the last dimension."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., dim] to the same shape."""
        weight = self.local(self.weight)
        return F.layer_norm(x, weight.shape, weight, self.local(self.bias), self.eps)


def build_norm(kind: NormKind, dim: int, eps: float) -> RMSNorm | LayerNorm:
    """Build a norm over the hidden dimension."""
    return RMSNorm(dim, eps) if kind == "rmsnorm" else LayerNorm(dim, eps)


class ReplicatedLinear(LocalModule):
    """``x W'`` without bias."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_dim] to [..., out_dim]."""
        return F.linear(x, self.local(self.weight))


class FeedForward(nn.Module):
    """``down(silu(gate(x)) * up(x))``; without a gate ``down(gelu(up(x)))``, exact or approximated by tanh (GPT-2)."""

    def __init__(self, hidden_dim: int, spec: DenseMLP) -> None:
        super().__init__()
        self.approximate = "tanh" if spec.activation == "gelu_tanh" else "none"
        self.gate_proj = nn.Linear(hidden_dim, spec.ffn_dim, bias=spec.bias) if spec.gated else None
        self.up_proj = nn.Linear(hidden_dim, spec.ffn_dim, bias=spec.bias)
        self.down_proj = nn.Linear(spec.ffn_dim, hidden_dim, bias=spec.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, S, D] to [B, S, D]."""
        if self.gate_proj is not None:
            inner = silu_product(self.gate_proj(hidden), self.up_proj(hidden))
        else:
            inner = F.gelu(self.up_proj(hidden), approximate=self.approximate)
        result: Tensor = self.down_proj(inner)
        return result


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``, keeping the inputs only; autograd would also keep silu(gate), a quarter of the activations."""
    product: Tensor = _SiluProduct.apply(gate, up)  # type: ignore[no-untyped-call]
    return product


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad_output * up, gate), grad_output * F.silu(gate)


class PositionEmbedding(LocalModule):
    """Adds to each token the vector of its place in the sequence.

    ``positions`` (None for 0, 1, 2...) are of all ranks that share a sequence by tp; ``share``: this one's part, of how many.
    """

    positions: Tensor | None = None
    share = (0, 1)

    def __init__(self, num_positions: int, hidden_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_positions, hidden_dim))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, S, D] to the same shape."""
        idx, count = self.share
        positions = self.positions
        if positions is None:
            positions = torch.arange(hidden.shape[1] * count, device=hidden.device)
        return hidden + F.embedding(positions.chunk(count)[idx], self.local(self.weight))


def redistribute(
    x: Tensor, mesh: DeviceMesh, source: Placement, target: Placement, *, gradient: Placement | None = None
) -> Tensor:
    """Return a local tensor of placement ``source`` as one of placement ``target``.

    Args:
        gradient: placement of the gradient that comes back, where that is not ``target``.
    """
    tensor = DTensor.from_local(x, mesh, [source], run_check=False)
    if source != target:
        tensor = tensor.redistribute(placements=[target])
    return tensor.to_local(grad_placements=None if gradient is None else [gradient])


def gathered(x: Tensor, mesh: DeviceMesh, placement: Placement) -> Tensor:
    """Return x in full, of which every rank has all or a part; each rank's gradient of it is a part of a sum."""
    return redistribute(x, mesh, placement, Replicate(), gradient=Partial())


def shard_parameters(module: nn.Module, mesh: DeviceMesh, placements_of: Callable[[str], Sequence[Placement]]) -> None:
    """Make a module's own parameters DTensors, in place, each of the placements of its name.

    Without a source rank each rank cuts its own copy: nothing is sent, and it works on the meta device.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        sharded = distribute_tensor(parameter.data, mesh, placements_of(name), src_data_rank=None)
        setattr(module, name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def even_shard(parameter: Tensor, num_ranks: int) -> Shard | None:
    """Return the dimension along which a parameter is shared out where its first one would leave more than a tenth empty.

    None: the first one, also where no other divides evenly, as torch demands of others. 64 experts over 128 ranks, say, would fill
    half of what is gathered.
    """
    sizes = local_tensor(parameter).shape
    if not sizes or -(-sizes[0] // num_ranks) * num_ranks <= 1.1 * sizes[0]:
        return None
    taken = {getattr(placement, "dim", None) for placement in getattr(parameter, "placements", ())}
    free = [dim for dim, size in enumerate(sizes) if dim and dim not in taken and size % num_ranks == 0]
    return Shard(free[0]) if free else None


def full_tensor(tensor: Tensor) -> Tensor:
    """Return all of a DTensor on every rank; a plain tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor (sharing its storage); a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_part(full: Tensor, target: Tensor) -> Tensor:
    """Return the part of ``full`` that this rank holds of ``target``."""
    return full[local_region(target)]


def local_region(target: Tensor) -> tuple[slice, ...]:
    """Return the ranges of the full tensor that are this rank's part, one for each dimension.

    Cut in the order in which a parameter was sharded: by the innermost mesh axis (tp) first, then by dp_shard; each cut in parts of
    equal width, rounded up, as torch.chunk makes them.
    """
    region = [slice(0, size) for size in target.shape]
    if not isinstance(target, DTensor):
        return tuple(region)
    mesh = target.device_mesh
    for axis in reversed(range(mesh.ndim)):
        # Strided shards are no Shard in every version; both have dim.
        dim = getattr(target.placements[axis], "dim", None)
        if dim is None:
            continue
        first, stop = region[dim].start, region[dim].stop
        width = -(-(stop - first) // mesh.size(axis))
        start = min(first + width * mesh.get_local_rank(axis), stop)
        region[dim] = slice(start, min(start + width, stop))
    return tuple(region)
