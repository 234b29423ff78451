"""Stages of users' modules, one behind the other in one process: they make the module's gradients, whatever lies between blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from meshwright.profilers.module.structure import caching_configs, find_structure
from meshwright.profilers.modules import profile_module
from meshwright.runtime.user_stages import UserStages, joined
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

QUICK = ("nanogpt", "t5", "dit", "unet")
"""A tied head, an encoder that every block of the decoder reads, a condition, and what blocks far ahead read."""

NO_STAGES = ("llava", "convnet", "mlp", "lstm", "shared")
"""One that looks at how many of its tokens stand for images, and those without repeated blocks."""


def gradients_in_stages(
    module: nn.Module, blocks: str, batch: Any, num_stages: int, loss: Callable[[Any], Tensor]
) -> dict[str, Tensor]:
    """The gradients of a loss that stages make, copies of a parameter added up."""
    structure = find_structure(module, blocks)
    num_layers = len(structure.blocks_of(module)) + 2
    stage_of_layer = {layer: min(layer * num_stages // num_layers, num_stages - 1) for layer in range(num_layers)}
    stages = UserStages(module, structure, stage_of_layer, batch, torch.float32)
    parts = [stages.part(idx) for idx in range(num_stages)]
    every, last = stages.given(batch, has_targets=False)
    arrived = next(iter(every.values()))
    for idx, part in enumerate(parts):
        stages.run_as_stage(part, idx, lambda output, _: loss(output).reshape(1))
        arrived = part(arrived, **every, **(last if idx == num_stages - 1 else {}))
        assert idx == num_stages - 1 or arrived.shape == stages.boundary(idx).shape
    arrived.sum().backward()
    held: dict[str, dict[int, Tensor]] = {}
    for part in parts:
        for path, parameter in part.named_parameters(remove_duplicate=False):
            if parameter.grad is not None:
                held.setdefault(path, {})[id(parameter)] = parameter.grad
    for _, paths in stages.shared:
        of_all = {key: grad for path in paths for key, grad in held.get(path, {}).items()}
        held |= dict.fromkeys(paths, of_all)
    names = {name for name, _ in joined(parts).named_parameters(remove_duplicate=False)}
    assert names >= {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {path: sum(grads.values(), torch.zeros(())) for path, grads in held.items()}


def require_equal(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    """Fail where a gradient is missing or differs by more than sums in another order do."""
    largest = max(float(grad.abs().max()) for grad in reference.values())
    for path, expected in reference.items():
        assert float((gradients[path] - expected).abs().max()) <= 1e-5 * largest, path


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(n, marks=pytest.mark.long) for n in zoo.MODELS if n not in (*QUICK, *NO_STAGES))]
)
def test_stages_make_the_gradients_of_the_module(name: str) -> None:
    module, inputs = zoo.build(name)
    batch = inputs if hasattr(module, "config") else list(inputs.values())
    blocks = profile_module(module, batch).code.blocks  # type: ignore[union-attr]
    for config in caching_configs(module):
        config.use_cache = False
    reference = zoo.alone(name)
    require_equal(gradients_in_stages(module, blocks, batch, 3, zoo.loss_of), reference)


class Glue(nn.Module):
    """Blocks with all between them that a stage must make right: writes in place, what has no gradient, views, chance, a table,
    and a layer whose weight is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.scale, self.register_table = nn.Parameter(torch.full((8,), 0.7)), torch.arange(8.0)
        self.normed = weight_norm(nn.Linear(8, 8))
        self.register_buffer("table", torch.linspace(0, 1, 8))

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Any]:
        positions = torch.arange(x.shape[1], device=x.device)
        position_first, position_rest = positions[:1], positions[1:]
        noise = F.dropout(x * self.scale, 0.5, self.training)
        kept, x = [], x + self.normed(x)
        with torch.no_grad():
            fixed = self.blocks[0](x).mean() + self.register_table
        for block in self.blocks:
            x = block(x) + self.table
            first = x[:, 0]
            x += noise  # seen through the view as well
            x[:, -1] = first.tanh()
            x = x.masked_fill(mask[..., None], 0.5) + fixed
            kept.append(x)
        a, b = torch.stack(kept[:2])
        return {"out": x * self.scale + a - b, "last": (x[:, position_first], x[:, position_rest].sum()), "none": None}


@pytest.mark.parametrize("num_stages", [2, 4, 6])
def test_glue_of_every_kind_is_made_right(num_stages: int) -> None:
    torch.manual_seed(0)
    module = Glue().eval()
    batch = {"x": torch.randn(4, 6, 8), "mask": torch.rand(4, 6) < 0.3}

    def loss(output: Any) -> Tensor:
        return output["out"].square().mean() + output["last"][0].sum() + output["last"][1]

    loss(module(**batch)).backward()
    reference = {path: parameter.grad for path, parameter in module.named_parameters() if parameter.grad is not None}
    module.zero_grad()
    require_equal(gradients_in_stages(module, "blocks", batch, num_stages, loss), reference)
