"""Low-rank adapters on the products of a frozen model (LoRA, arXiv:2106.09685).

With W [n, k] go A [r, k] and B [n, r]: ``y = x W' + x A' B'``. A starts as weights do, B at zero, so that a new model is the frozen
one; the paper's factor alpha / r is 1. Under tensor parallelism A and B are sharded as W is: where W is cut by rows, so is B
and A is unsharded; where it is cut by columns, so is A and B is unsharded. Query, key and value have adapters of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from ..schema.base import write_atomically
from ..schema.errors import ConfigError
from ..schema.training_plan import TrainingPlan
from .data_parallel import compute_dtype
from .models.decoder import ADAPTER_DOWN as DOWN
from .models.decoder import ADAPTER_UP as UP
from .models.decoder import Decoder
from .models.layers import full_tensor, local_part, local_tensor
from .parallel_model import ParallelModel
from .weights.save import write_safetensors

_PRODUCTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "mlp": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
}


def apply_adapters(stage: Decoder, plan: TrainingPlan) -> None:
    """Freeze a stage and give its products adapters, in place; after `apply_tensor_parallel`, before what wraps blocks.

    The frozen parameters take the dtype that they are computed in: no update needs more digits of them.
    """
    adapters = plan.workload.adapters
    if adapters is None:
        return
    frozen = compute_dtype(plan)
    for parameter in stage.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(frozen)
    for linear in _products(stage, plan):
        _add(linear, adapters.rank)


@torch.no_grad()
def merge_adapters(model: ParallelModel) -> None:
    """Add every adapter to its product and start it again at zero; every rank calls it. What is saved then needs no adapters."""
    for linear in _products(model.module, model.plan):
        down, up = (full_tensor(getattr(linear, name)) for name in (DOWN, UP))
        weight = linear.weight
        change = local_part(up @ down, weight)
        local_tensor(weight).add_(change.to(weight.device))
        local_tensor(getattr(linear, UP)).zero_()


def save_adapters(model: ParallelModel, folder: str | Path) -> Path:
    """Write the adapters where peft's ``PeftModel.from_pretrained`` reads them; every rank calls it."""
    adapters, folder = model.plan.workload.adapters, Path(folder)
    if adapters is None:
        raise ConfigError("the plan trains no adapters", help="plan with --train lora:r=16")
    local = {
        f"base_model.model.{name.removesuffix(kind)}{kind}.weight": full_tensor(parameter.detach()).float().cpu()
        for name, parameter in model.named_parameters()
        for kind in (DOWN, UP)
        if name.endswith(f".{kind}")
    }
    by_rank: list[dict[str, Tensor] | None] = [None] * dist.get_world_size() if dist.get_rank() == 0 else []
    dist.gather_object(local, by_rank or None)
    problem: list[str | None] = [None]
    if dist.get_rank() == 0:
        tensors = {name: value for part in by_rank for name, value in (part or {}).items()}
        names = sorted({name.split(".")[-3] for name in tensors})
        config = {"peft_type": "LORA", "r": adapters.rank, "lora_alpha": adapters.rank, "target_modules": names}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_safetensors(folder / "adapter_model.safetensors", tensors)
            write_atomically(folder / "adapter_config.json", json.dumps({**config, "bias": "none"}, indent=2) + "\n")
        except OSError as error:
            problem[0] = str(error.strerror)
        except ConfigError as error:
            problem[0] = error.message
    dist.broadcast_object_list(problem)
    if problem[0] is not None:
        raise ConfigError(f"cannot write adapters to {folder}: {problem[0]}")
    return folder


def _products(stage: Decoder, plan: TrainingPlan) -> Iterator[nn.Linear]:
    assert plan.workload.adapters is not None
    names = [name for target in plan.workload.adapters.targets for name in _PRODUCTS[target]]
    for block in stage.model.layers.values():
        modules = dict(block.named_modules())
        yield from (modules[name] for name in names if isinstance(modules.get(name), nn.Linear))


def _add(linear: nn.Linear, rank: int) -> None:
    weight = linear.weight
    device = local_tensor(weight).device
    down = torch.empty(rank, linear.in_features, dtype=torch.float32, device=device)
    up = torch.empty(linear.out_features, rank, dtype=torch.float32, device=device)
    for name, full, dim in ((DOWN, down, 1), (UP, up, 0)):
        sharded: Tensor = full
        if isinstance(weight, DTensor):
            placements = [placement if placement.is_shard(dim) else Replicate() for placement in weight.placements]
            sharded = distribute_tensor(full, weight.device_mesh, placements, src_data_rank=None)
        linear.register_parameter(name, nn.Parameter(sharded))

    def forward(x: Tensor) -> Tensor:
        adapted = F.linear(F.linear(x, getattr(linear, DOWN)), getattr(linear, UP))
        return F.linear(x, linear.weight, linear.bias) + adapted

    linear.forward = forward  # type: ignore[method-assign]
