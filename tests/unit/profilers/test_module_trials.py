"""What is found out of a module by trial: which cannot be stages, which cannot be sharded, and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from meshwright.planner import plan
from meshwright.profilers import profile_module
from meshwright.profilers.module.structure import find_structure
from meshwright.profilers.module.trials import why_not_staged
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
    return why_not_staged(model, find_structure(model), inputs or {"input_ids": TOKENS})


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GemmaForCausalLM", "Phi3ForCausalLM", "MixtralForCausalLM"])
def test_decoders_can_be_stages(name: str) -> None:
    assert reason(build(name, num_key_value_heads=2)) == ""


def test_models_that_are_no_decoder_say_why_they_have_no_stages() -> None:
    assert "second of two stages of BertForMaskedLM does not run" in reason(build("BertForMaskedLM"))
    assert "names no head" in reason(build("BertForTokenClassification"))
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
    }
    text = transformers.LlamaConfig(**SIZES)
    config = transformers.LlavaConfig(
        text_config=text, vision_config=transformers.CLIPVisionConfig(**vision, patch_size=8)
    )
    with torch.device("meta"):
        llava = transformers.LlavaForConditionalGeneration(config)
    assert "model.vision_tower.embeddings of LlavaForConditionalGeneration would be on every stage" in reason(llava)
    assert "tokens only, and it takes pixel_values" in reason(llava, input_ids=TOKENS, pixel_values=torch.zeros(2, 3))


class Twice(transformers.LlamaModel):
    """Multiplies whatever goes into its first block."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **others: Any) -> Any:
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return super().forward(inputs_embeds=5.6 * hidden, **others)


def test_factor_that_every_stage_would_apply_is_seen_without_weights() -> None:
    model = build("LlamaForCausalLM")
    assert reason(model) == ""
    model.model.__class__ = Twice
    assert "MulBackward0 more often" in reason(model)


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
