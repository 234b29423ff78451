"""Tensors that are sharded over ranks: the part a rank holds, and how activations and parameters change their placement.

Modules work on local tensors, because dispatching every activation through DTensor costs more than a norm. Where a tensor changes
its placement it is a DTensor for that step only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor


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


def shard_parameters(module: nn.Module, mesh: DeviceMesh, placements_of: Callable[[str], Sequence[Placement]]) -> None:
    """Make a module's own parameters DTensors, in place, each of the placements of its name.

    Without a source rank each rank cuts its own copy: nothing is sent, and it works on the meta device.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        sharded = distribute_tensor(parameter.data, mesh, placements_of(name), src_data_rank=None)
        setattr(module, name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def full_tensor(tensor: Tensor) -> Tensor:
    """Return all of a DTensor on every rank; a plain tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_weight(weight: Tensor, weight_grad: Sequence[Placement] | None) -> Tensor:
    """Return this rank's part of a weight, for arithmetic on local tensors.

    Args:
        weight_grad: placements of the gradient over tp; None where it is split as the weight is.
    """
    return weight.to_local(grad_placements=weight_grad) if isinstance(weight, DTensor) else weight


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
        dim = getattr(
            target.placements[axis], "dim", None
        )  # strided shards are no Shard in every version; both have dim
        if dim is None:
            continue
        first, stop = region[dim].start, region[dim].stop
        width = -(-(stop - first) // mesh.size(axis))
        start = min(first + width * mesh.get_local_rank(axis), stop)
        region[dim] = slice(start, min(start + width, stop))
    return tuple(region)
