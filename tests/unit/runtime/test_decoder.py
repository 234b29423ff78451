"""The decoder against transformers, and what it does without a process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from meshwright.runtime import Decoder
from meshwright.runtime.models.decoder import init_weights, parameter_seed
from meshwright.runtime.weights.load import load_weights
from meshwright.schema import ModelSpec, RuntimeMismatchError

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.707,
    "mscale_all_dim": 0.8,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "llama with llama3 rope": transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "llama with linear rope": transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    ),
    "llama with yarn rope": transformers.LlamaConfig(**SIZES, rope_parameters=YARN_ROPE),
    "deepseek-v2": transformers.DeepseekV2Config(
        **{**SIZES, **LATENT, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1}, q_lora_rank=None
    ),
    "deepseek-v2 with groups": transformers.DeepseekV2Config(
        **{**SIZES, **LATENT, "num_key_value_heads": 4}, q_lora_rank=12, topk_method="group_limited_greedy"
    ),
    "deepseek-v3": transformers.DeepseekV3Config(
        **{**SIZES, **LATENT, "num_key_value_heads": 4}, q_lora_rank=12, n_shared_experts=1, rope_parameters=YARN_ROPE
    ),
    "llama with biases, tied": transformers.LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "gpt2": transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=3, n_head=4, n_positions=40),
    "gpt2 with its own width and gelu, untied": transformers.GPT2Config(
        vocab_size=97,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=24,
        n_inner=56,
        activation_function="gelu",
        tie_word_embeddings=False,
        layer_norm_epsilon=1e-3,
    ),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=16),
    "mistral": transformers.MistralConfig(**SIZES, head_dim=16),
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=8, num_experts_per_tok=2, sliding_window=None),
    "olmoe": transformers.OlmoeConfig(**SIZES, num_experts=8, num_experts_per_tok=2),
    "qwen2-moe": transformers.Qwen2MoeConfig(
        **SIZES, **EXPERTS, shared_expert_intermediate_size=40, decoder_sparse_step=2
    ),
    "qwen3-moe": transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16, norm_topk_prob=True, mlp_only_layers=[1]),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_agree_with_transformers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = CONFIGS[name]
    theirs = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa", dtype=torch.float32
    ).eval()
    for parameter in theirs.parameters():  # theirs starts with zero biases and unit norms, which would hide mistakes
        torch.nn.init.normal_(parameter, 0.0 if parameter.ndim > 1 else 0.5, 0.2)
    for label, buffer in theirs.named_buffers():
        if label.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, 0.0, 0.3)
    spec = ModelSpec.from_hf({**config.to_dict(), "architectures": [type(theirs).__name__]})
    ours = Decoder(spec)
    theirs.save_pretrained(tmp_path)
    load_weights(ours, spec, tmp_path)
    tokens = torch.randint(0, 97, (2, 24))
    with torch.no_grad():
        expected, actual = theirs(tokens).logits, ours(tokens)
    # Not zero: rms_norm and the rotation are evaluated in another order.
    assert (actual - expected).abs().max() < 2e-5 * expected.abs().max()
    assert sum(parameter.numel() for parameter in ours.parameters()) == spec.num_params


def test_attention_kinds_agree() -> None:
    spec = ModelSpec.from_hf({**CONFIGS["llama"].to_dict(), "architectures": ["LlamaForCausalLM"]})
    flash, math = Decoder(spec), Decoder(spec, attention="math")
    math.load_state_dict(flash.state_dict())
    tokens = torch.randint(0, 97, (2, 24))
    torch.testing.assert_close(flash(tokens), math(tokens))


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    spec = ModelSpec.from_hf({**CONFIGS["qwen2"].to_dict(), "architectures": ["Qwen2ForCausalLM"]})
    whole, stage = Decoder(spec), Decoder(spec)
    stage.keep(range(2, 5))
    init_weights(whole, seed=3)
    init_weights(stage, seed=3)
    names = dict(stage.named_parameters())
    assert set(names) < set(dict(whole.named_parameters()))
    assert {name.split(".")[2] for name in names if "layers" in name} == {"1", "2"}
    for name, parameter in whole.named_parameters():
        if name in names:
            assert torch.equal(parameter, names[name])
    assert parameter_seed(3, "a") != parameter_seed(4, "a") != parameter_seed(4, "b")
    weight = whole.model.layers["0"].mlp.up_proj.weight
    assert abs(weight.std().item() - 0.02) < 2e-3
    assert whole.model.layers["0"].self_attn.q_proj.bias.abs().max() == 0


def test_stages_in_a_row_are_the_model() -> None:
    spec = ModelSpec.from_hf({**CONFIGS["qwen3"].to_dict(), "architectures": ["Qwen3ForCausalLM"]})
    whole, first, last = Decoder(spec), Decoder(spec), Decoder(spec)
    for stage, layers in ((first, range(2)), (last, range(2, 5))):
        stage.keep(layers)
        stage.load_state_dict({name: whole.state_dict()[name] for name in stage.state_dict()})
    tokens = torch.randint(0, 97, (2, 24))
    assert torch.equal(last(first(tokens)), whole(tokens))


def test_model_that_cannot_be_built_is_refused() -> None:
    with pytest.raises(RuntimeMismatchError, match="a router by top_k_softmax"):
        Decoder(ModelSpec.named("gpt-oss-20b"))
