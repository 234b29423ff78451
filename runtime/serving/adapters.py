"""Low-rank adapters, one for each request or none (LoRA, arXiv:2106.09685), together in a step (S-LoRA, arXiv:2311.03285).

    y = x W' + s (x A') B'      of the tokens whose request has the adapter; A [r, k], B [n, r], s = alpha / r

Tokens of one adapter are gathered and multiplied together. Under tensor parallelism A and B are cut as W is: B where W is cut by
rows; A where it is cut by columns, before the sum over ranks. Folders are as peft writes them; only safetensors and JSON are read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ...schema.base import read_json, shown
from ...schema.errors import ConfigError
from ...schema.limits import MAX_COUNT
from ..models.decoder import ADAPTER_DOWN as DOWN
from ..models.decoder import ADAPTER_UP as UP
from ..models.decoder import Decoder
from .batch import StepBatch
from .ranks import InstanceRanks

_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_COLUMNS = ("o_proj", "down_proj")
_KEY = re.compile(rf"base_model\.model\.(model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+))\.({DOWN}|{UP})\.weight")
_PLAIN = {
    "use_dora": False, "bias": "none", "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {}, "fan_in_fan_out": False,
    "lora_bias": False,
}  # fmt: skip
"""Fields of adapter_config.json that change what is computed, and the value that leaves it as above."""


class AdapterSet:
    """The adapters of a rank: which tokens of the running step have which, and the products that they change."""

    def __init__(self) -> None:
        self._tokens: list[tuple[int, Tensor]] = []

    def begin(self, batch: StepBatch, device: torch.device) -> None:
        """Note the tokens of each adapter in the next step."""
        tokens_of: dict[int, list[int]] = {}
        first = 0
        for row in batch.rows:
            if row.adapter:
                tokens_of.setdefault(row.adapter, []).extend(range(first, first + len(row.tokens)))
            first += len(row.tokens)
        self._tokens = [(index, torch.tensor(tokens, device=device)) for index, tokens in tokens_of.items()]

    def attach(self, part: Decoder, ranks: InstanceRanks, folders: Sequence[Path], dtype: torch.dtype) -> None:
        """Let a part's linear layers add what the adapters in these folders give, numbered from 1."""
        device = next(part.parameters()).device
        modules = dict(part.named_modules())
        changes: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}
        for index, folder in enumerate(folders, start=1):
            for name, (down, up) in read_adapter(folder).items():
                if int(name.split(".")[2]) >= part.spec.num_blocks:
                    raise ConfigError(f"{folder}: {name} is no layer of {part.spec.name}")
                linear = modules.get(name)
                if linear is None and name.split(".")[2] not in part.model.layers:
                    continue  # another stage's
                if not isinstance(linear, nn.Linear) or name.split(".")[-1] not in (*_BY_ROWS, *_BY_COLUMNS):
                    raise ConfigError(f"{folder}: {name} of {part.spec.name} takes no adapter here")
                if (down.shape[1], up.shape[0]) != (linear.in_features, linear.out_features):
                    raise ConfigError(
                        f"{folder}: {name} has {down.shape[1]} inputs and {up.shape[0]} outputs, in {part.spec.name} "
                        f"{linear.in_features} and {linear.out_features}"
                    )
                if ranks.tp is not None and name.endswith(_BY_ROWS):
                    up = up.chunk(ranks.layout.tp)[ranks.tp_rank]
                elif ranks.tp is not None:
                    down = down.chunk(ranks.layout.tp, dim=1)[ranks.tp_rank]
                pair = tuple(one.to(device, dtype).t().contiguous() for one in (down, up))
                changes.setdefault(name, {})[index] = pair  # type: ignore[assignment]
        for name, by_adapter in changes.items():
            self._wrap(modules[name], by_adapter)

    def _wrap(self, linear: nn.Module, by_adapter: dict[int, tuple[Tensor, Tensor]]) -> None:
        product = linear.forward

        def forward(x: Tensor) -> Tensor:
            out: Tensor = product(x)
            for index, tokens in self._tokens:
                if index in by_adapter:
                    down, up = by_adapter[index]
                    out[0].index_add_(0, tokens, x[0, tokens] @ down @ up)
            return out

        linear.forward = forward


def read_adapter(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B, with the factor s, by the name of the product that they change.

    Raises:
        ConfigError: the folder holds no such adapter, or one that computes something else.
    """
    config: Any = read_json(folder / "adapter_config.json")
    if not isinstance(config, dict):
        raise ConfigError(f"{folder}: adapter_config.json is no object")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if config.get("peft_type") != "LORA" or not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise ConfigError(f"{folder}: adapter_config.json is not of LoRA, with r and lora_alpha")
    unlike = [name for name, plain in _PLAIN.items() if (config.get(name) or plain) != plain]
    if unlike:
        raise ConfigError(f"{folder}: {unlike[0]}={config[unlike[0]]} is more than a low-rank adapter")
    if not (rank <= MAX_COUNT and abs(alpha) <= MAX_COUNT):
        raise ConfigError(
            f"{folder}: adapter_config.json has r={shown(rank)}, lora_alpha={shown(alpha)}; up to {MAX_COUNT}"
        )
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    try:
        tensors = load_file(folder / "adapter_model.safetensors")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder}: adapter_model.safetensors cannot be read: {error}") from None
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None or tensor.ndim != 2:
            raise ConfigError(f"{folder}: {key} is no matrix of a low-rank adapter that this engine applies")
        pairs.setdefault(match[1], {})[match[4]] = tensor.float()
    for name, pair in pairs.items():
        if len(pair) < 2 or (pair[DOWN].shape[0], pair[UP].shape[1]) != (rank, rank):
            raise ConfigError(f"{folder}: {name} has no A and B of rank {rank}")
    return {name: (pair[DOWN], scale * pair[UP]) for name, pair in pairs.items()}
