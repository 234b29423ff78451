"""config.json written from a model is read as the same model; tests/parity/test_hf_weights.py has transformers read it."""

from __future__ import annotations

import pytest
from meshwright.schema import ConfigError, ModelSpec
from meshwright.schema.hf_export import hf_config
from meshwright.schema.rope import Rope

WRITTEN = (
    "llama-3.1-8b", "smollm2-135m", "qwen2.5-7b", "qwen3-8b", "qwen3-30b-a3b", "mistral-7b", "mixtral-8x7b", "olmoe-1b-7b",
    "deepseek-v2-lite", "deepseek-v3", "gpt2-xl",
)  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_config_is_read_as_the_same_model(name: str) -> None:
    model = ModelSpec.named(name)
    assert ModelSpec.from_hf(hf_config(model), name=model.name) == model.replace(source="")


def test_family_without_a_writer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no config\.json for Gemma2ForCausalLM"):
        hf_config(ModelSpec.named("gemma-2-9b"))


def test_what_a_config_cannot_say_is_refused_and_not_dropped() -> None:
    model = ModelSpec.named("gpt2").replace(rope=Rope())
    with pytest.raises(ConfigError, match="rope would be lost"):
        hf_config(model)
