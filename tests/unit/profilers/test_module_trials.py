"""What is found out of a module by trial: which cannot be stages, which cannot be sharded, and why."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from meshwright.planner import plan
from meshwright.profilers import profile_module
from meshwright.profilers.module.stages import why_not_cut
from meshwright.profilers.module.structure import find_structure
from meshwright.schema import ClusterSpec, ConfigError, Workload
from torch import nn

SIZES: dict[str, Any] = {
    "vocab_size": 98, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
TOKENS = torch.zeros((2, 16), dtype=torch.long)


def build(name: str, **sizes: Any) -> nn.Module:
    """A tiny model of transformers on the meta device."""
    config = getattr(transformers, f"{name.partition('For')[0]}Config")(**{**SIZES, **sizes})
    with torch.device("meta"):
        return getattr(transformers, name)(config)


def reason(model: nn.Module, **inputs: torch.Tensor) -> str:
    return why_not_cut(model, find_structure(model), inputs or {"input_ids": TOKENS})


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GemmaForCausalLM", "BertForMaskedLM", "MambaForCausalLM"])
def test_models_of_tokens_can_be_stages(name: str) -> None:
    assert reason(build(name, num_key_value_heads=2)) == ""


class Looks(nn.Module):
    """Blocks, and code between them that cannot be made again on every stage."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.blocks, self.between = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)]), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.between(self, block(x))
        return x


class Holder:
    """An object that torch's pytree does not know."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize(
    ("between", "why"),
    [
        (lambda _, x: x if x.sum() > 0 else -x, "computes by values"),
        (lambda self, x: self.blocks[1](self.blocks[2](x)), "reads what a later block"),
        (lambda _, x: torch.func.vmap(torch.sin)(x), "no function of torch returned"),
        (lambda _, x: x.long(), "does not run without values|hand on"),
    ],
)
def test_what_no_stage_can_do_says_why(between: Any, why: str) -> None:
    model = Looks(between)
    assert re.search(why, why_not_cut(model, find_structure(model), [torch.zeros(2, 8)]))


def test_a_result_that_is_no_pytree_and_a_module_without_blocks_say_why() -> None:
    model = Looks(lambda _, x: x)
    model.forward = lambda x: Holder(model.blocks[0](x))  # type: ignore[assignment]
    assert "in a Holder" in why_not_cut(model, find_structure(model), [torch.zeros(2, 8)])
    linear = nn.Linear(8, 8)
    assert "no list of two or more blocks" in why_not_cut(linear, find_structure(linear), [torch.zeros(2, 8)])


class Scaled(nn.Module):
    """Blocks, and a temperature without dimensions."""

    def __init__(self, *, peeks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.peeks = peeks
        if not peeks:
            self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.blocks[0].bias if self.peeks else x * self.temperature
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("peeks", "why"),
    [(False, "temperature of Scaled is a scalar"), (True, r"Scaled reads blocks\.0\.bias outside of its block")],
)
def test_what_fully_shard_does_not_take_is_planned_as_whole_fp32_replicas(peeks: bool, why: str) -> None:
    spec = profile_module(Scaled(peeks=peeks), [torch.zeros(2, 4, 8)])
    cluster, workload = ClusterSpec.parse("4xA100-SXM-80GB"), Workload(seq_len=4, global_batch_size=8, precision="fp32")
    layout = plan(spec, cluster, workload).layout
    assert (layout.dp_replicate, layout.dp_shard, layout.zero_stage) == (4, 1, 0)
    for task, fixed in ((workload, {"dp_shard": 2}), (workload.replace(precision="bf16-mixed"), {})):
        with pytest.raises(ConfigError, match=why):
            plan(spec, cluster, task, fixed=fixed)


def test_adapters_beside_code_are_refused() -> None:
    from meshwright.schema.task import LowRank

    spec = profile_module(Scaled(), [torch.zeros(2, 4, 8)])
    workload = Workload(seq_len=4, global_batch_size=8, precision="fp32", adapters=LowRank(rank=4))
    with pytest.raises(ConfigError, match="traced from code"):
        plan(spec, ClusterSpec.parse("4xA100-SXM-80GB"), workload)


def test_blocks_that_share_parameters_are_refused() -> None:
    blocks = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    blocks[1].weight = blocks[0].weight
    with pytest.raises(ConfigError, match=r"0\.weight and 0 more parameters of Sequential are shared"):
        profile_module(nn.Sequential(blocks), [torch.zeros(2, 4, 8)], blocks="0")
