"""Initial weights that depend on the seed and on a parameter's name only, never on the layout."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import nn

from .sharded import local_part, local_tensor

ADAPTER_DOWN, ADAPTER_UP = "lora_A", "lora_B"
"""Names of the two parameters of a low-rank adapter of a product."""

STD = 0.02
"""Standard deviation of all weights. Source: ``initializer_range`` of the published Llama, Qwen and Mistral configs."""


@torch.no_grad()
def init_weights(
    module: nn.Module,
    seed: int,
    device: torch.device | None = None,
    *,
    aliases: Mapping[str, str] | None = None,
    adapters_only: bool = False,
) -> None:
    """Fill every parameter, sharded or not: weights normal(0, 0.02), norms 1, biases and buffers 0.

    Each weight comes from a generator of its own on its device, and a shard is cut from the full tensor; only one full
    tensor exists at a time. CPU and CUDA generators differ, so equal weights need equal device types.

    Args:
        device: of the generators, where parameters lie elsewhere; unset, each parameter's own.
        aliases: parameters of a user's module that start as another one does, which may be on another rank.
        adapters_only: everything else has its values already.
    """
    # Those of users' modules are tables.
    for buffer in () if adapters_only or aliases is not None else module.buffers():
        buffer.zero_()
    tied = getattr(getattr(module, "spec", None), "tie_embeddings", False)
    for name, parameter in module.named_parameters():
        if adapters_only and not is_adapter(name):
            continue
        if name.endswith(f".{ADAPTER_UP}"):
            local_tensor(parameter).zero_()
            continue
        if parameter.ndim == 1:
            value = 0.0 if name.endswith("bias") else 1.0
            local_tensor(parameter).fill_(value)
            continue
        # A tied head without the embedding, on the last pipeline stage, must start as the embedding does.
        source = "model.embed_tokens.weight" if tied and name == "lm_head.weight" else (aliases or {}).get(name, name)
        generator_device = device or parameter.device
        generator = torch.Generator(generator_device).manual_seed(parameter_seed(seed, source))
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=generator_device)
        full.normal_(0.0, STD, generator=generator)
        local_tensor(parameter).copy_(local_part(full, parameter))


def is_adapter(name: str) -> bool:
    """Tell whether a parameter of a decoder belongs to a low-rank adapter."""
    return name.endswith((f".{ADAPTER_DOWN}", f".{ADAPTER_UP}"))


def parameter_seed(seed: int, name: str) -> int:
    """Return 63 bits from a seed and a parameter's name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
