"""What of foreign modules is split, found and refused; what they then compute is in tests/parity/test_foreign.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from meshwright.profilers import profile_module
from meshwright.profilers.module.split_rules import derived_regions, transformers_rules
from meshwright.profilers.module.structure import find_structure
from meshwright.runtime.user_modules import parallelize_user_module
from meshwright.runtime.user_tensor_parallel import (
    _compare,
    _trial,
    split_plain,
    split_transformers,
)
from meshwright.schema import Layout, RuntimeMismatchError, Workload
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "parity"))
from foreign_models import SIZES, build, spec_of
from plans import make_plan, tiny_model

CPU = torch.device("cpu")
WORKLOAD = Workload(seq_len=16, global_batch_size=8, precision="fp32")


def refused(name: str, layout: Layout, match: str, **model: Any) -> None:
    plan = make_plan(tiny_model(**model) if model else spec_of(name), layout, workload=WORKLOAD)
    with pytest.raises(RuntimeMismatchError, match=match):
        parallelize_user_module(build(name, "meta"), plan, device=CPU, seed=0)


def test_structure_of_a_decoder() -> None:
    found = find_structure(build("gpt2", "meta"))
    assert (found.base, found.blocks, found.before, found.after) == (
        "transformer", "transformer.h", ("wte", "wpe"), ("ln_f",),
    )  # fmt: skip
    assert (found.embedding, found.head, found.is_transformers) == ("transformer.wte", "lm_head", True)
    assert found.is_tied
    assert not find_structure(build("gpt2").requires_grad_(False).to("meta")).is_tied  # moved: no longer one parameter


def test_blocks_are_the_longest_list_and_not_their_experts() -> None:
    block = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2) for _ in range(8)])})
    module = nn.ModuleDict({"heads": nn.ModuleList([nn.Linear(2, 2)]), "layers": nn.ModuleList([block, block])})
    assert find_structure(module).blocks == "layers"
    assert find_structure(nn.Linear(2, 2)).blocks == ""


def test_rules_of_transformers_are_the_models_own() -> None:
    rules = transformers_rules(build("qwen3", "meta"))
    assert rules["model.layers.3.self_attn.q_proj"] == rules["model.layers.0.mlp.gate_proj"] == "by_output"
    assert rules["model.layers.0.self_attn.o_proj"] == rules["model.layers.0.mlp.down_proj"] == "by_input"
    assert rules["model.layers.0.self_attn.k_norm"] == "heads_norm"
    assert len(rules) == 4 * 9


def test_styles_without_a_rule_are_refused() -> None:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4)
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
    with pytest.raises(RuntimeMismatchError, match="moe_tp_experts"):
        transformers_rules(model)


def test_fused_projections_are_refused_under_tp() -> None:
    model = build("gpt2", "meta")
    with pytest.raises(RuntimeMismatchError, match="c_attn makes queries, keys and values in one product"):
        split_transformers(model, None, blocks="", head=None, sequence_parallel=False)  # type: ignore[arg-type]


def test_rules_of_a_plain_module_are_derived() -> None:
    regions = {region.parent: region for region in derived_regions(build("plain", "meta")) if "0" in region.parent}
    assert dict(regions["blocks.0.attention"].rules) == {
        "blocks.0.attention.query": "by_output",
        "blocks.0.attention.key": "by_output",
        "blocks.0.attention.value": "by_output",
        "blocks.0.attention.out_proj": "by_input",
    }
    assert dict(regions["blocks.0"].rules) == {"blocks.0.up": "by_output", "blocks.0.down": "by_input"}
    assert dict(regions["blocks.0.more"].rules) == {"blocks.0.more.0": "by_output", "blocks.0.more.2": "by_input"}
    assert regions["blocks.0.attention"].is_attention


@pytest.mark.parametrize(
    "between", [nn.LayerNorm(8), nn.Softmax(dim=-1), nn.GLU()], ids=lambda module: type(module).__name__
)
def test_layers_with_more_than_element_wise_work_between_them_are_no_pair(between: nn.Module) -> None:
    assert derived_regions(nn.Sequential(nn.Linear(4, 8), between, nn.Linear(8, 4))) == []


def test_gate_and_up_are_split_with_down() -> None:
    module = nn.ModuleDict({"gate": nn.Linear(4, 8), "up": nn.Linear(4, 8), "act": nn.SiLU(), "down": nn.Linear(8, 4)})
    (region,) = derived_regions(module)
    assert dict(region.rules) == {"gate": "by_output", "up": "by_output", "down": "by_input"}


def test_a_region_that_computes_something_else_is_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    (region,) = derived_regions(module)
    before = _trial(module, region)
    assert isinstance(before, torch.Tensor)
    assert torch.equal(before, _trial(module, region))
    _compare(region, before, before + 1e-7)
    with pytest.raises(RuntimeMismatchError, match=r"outputs differ by up to 1"):
        _compare(region, before, before + 1)


def test_axes_that_need_the_modules_own_code_are_refused() -> None:
    refused("llama", Layout(cp=2), "cp 2: the attention and the experts of LlamaForCausalLM")
    refused("plain", Layout(tp=2), "sequence_parallel: what stands between the layers of PlainModel")
    refused("plain", Layout(micro_batch_size=4), "on the meta device")


def test_model_of_another_plan_is_refused() -> None:
    refused("llama", Layout(micro_batch_size=4), "layers differ", num_blocks=2)


def test_plain_module_of_another_plan_is_refused() -> None:
    refused("plain", Layout(micro_batch_size=4), "with 5 blocks, PlainModel has 3", num_blocks=5)


def test_traced_plan_of_another_class_or_size_is_refused() -> None:
    tokens = torch.zeros((2, 16), dtype=torch.long)
    spec = profile_module(build("plain", "meta"), [tokens])
    plan = make_plan(spec, Layout(micro_batch_size=4), workload=WORKLOAD)
    for other in (build("llama", "meta"), type(build("plain", "meta"))(width=64).to("meta")):
        with pytest.raises(RuntimeMismatchError, match=r"the plan is for PlainModel with [\d,]+ parameters, this is"):
            parallelize_user_module(other, plan, device=CPU, seed=0)


def test_two_layers_that_cannot_be_tried_are_not_split() -> None:
    """A chain of square layers looks like a pair: only a trial could tell, and this module takes a graph as well."""

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = edges @ layer(x)
            return x

    class One:
        def size(self) -> int:
            return 2

    with pytest.raises(RuntimeMismatchError, match=r"layers\.0, layers\.1 .* cannot be tried"):
        split_plain(Graph(), One())  # type: ignore[arg-type]
