"""Every family of catalogue/families.toml against transformers: parameters of default and of random small configs, windows."""

from __future__ import annotations

import json
import warnings
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from meshwright.schema.errors import ConfigError
from meshwright.schema.hf import families
from meshwright.schema.layers import Block, MoE, SoftmaxAttention
from meshwright.schema.model import ModelSpec

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

NAMED = sorted(name for name, family in families().items() if family.text_model is None)

REFUSED_DEFAULTS = {
    "deepseek_v2": "top_k = None",  # the class has no default for how many experts a token visits
    "glm4_moe": "must divide hidden_size",  # 96 heads of 42.67
}
"""Default configs that are no model, and what is said of them."""

UNBUILT_DEFAULTS = {"dbrx", "dots1", "hunyuan_v1_dense", "hunyuan_v1_moe", "lfm2_moe", "ministral", "nemotron"}
"""Default configs of which transformers itself builds no model: a size is None."""

SIZES = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
SMALL = {
    "glm4_moe": {"head_dim": 16, "first_k_dense_replace": 1},
    "dots1": {"head_dim": 16, "n_shared_experts": 1},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 24, "use_bias": True},
    "mamba": {"state_size": 8, "time_step_rank": 5, "use_bias": True},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 5},
    "jamba": {"mamba_d_state": 8, "mamba_dt_rank": 5, "attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "attn_layer_indices": [1]},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "shared_intermediate_size": 40},
    "kimi_linear": {"linear_num_heads": 2, "linear_head_dim": 24},
    "lfm2": {"full_attn_idxs": [0, 2], "block_multiple_of": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "conv"], "num_hidden_layers": 4},
    "recurrent_gemma": {"lru_width": 96},
    "olmo_hybrid": {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "qwen3_next": {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 24},
    "qwen3_5_text": {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 24},
    "qwen3_5_moe_text": {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 24},
}
"""What a small config of a family needs besides the sizes."""

NAMES = {  # of sizes in families that call them otherwise
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads"),
    "num_key_value_heads": ("num_kv_heads",),
    "intermediate_size": ("ffn_dim", "n_inner", "ffn_hidden_size"),
    "num_experts": ("n_routed_experts", "num_local_experts", "moe_num_experts"),
    "num_experts_per_tok": ("moe_k", "moe_topk", "num_experts_per_token"),
}


@cache
def default_config(model_type: str) -> dict[str, object]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoConfig.for_model(model_type).to_dict()


def built(config: object) -> object:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def small_config(model_type: str, sizes: dict[str, int]) -> object:
    """Return a config of transformers' class with those of ``sizes`` that the family has, under its names."""
    known = default_config(model_type)
    stated = {}
    for name, value in {**sizes, **SMALL.get(model_type, {})}.items():
        own = next((other for other in (*NAMES.get(name, ()), name) if other in known), None)
        if own is not None and not (own == "num_key_value_heads" and known[own] is None):
            stated[own] = value
    if model_type == "nemotron":
        stated["num_key_value_heads"] = sizes["num_key_value_heads"]
    if model_type == "gpt_neo":
        stated["attention_types"] = [[["global"], sizes["num_hidden_layers"]]]
    if model_type == "dbrx":
        stated = {
            name: value for name, value in stated.items() if name not in ("num_key_value_heads", "tie_word_embeddings")
        }
        stated["attn_config"] = {"kv_n_heads": sizes["num_key_value_heads"], "rope_theta": 1e4}
        experts = {"moe_num_experts": sizes["num_experts"], "moe_top_k": sizes["num_experts_per_tok"]}
        stated["ffn_config"] = {"ffn_hidden_size": sizes["intermediate_size"], **experts}
    return transformers.AutoConfig.for_model(model_type, **stated, pad_token_id=0)


def content_of(config: object) -> dict[str, object]:
    """Return the config as its file has it."""
    content = json.loads(json.dumps(config.to_dict(), default=str))
    return {name: value for name, value in content.items() if name != "architectures"}


@pytest.mark.parametrize("model_type", sorted(set(NAMED) - UNBUILT_DEFAULTS))
def test_default_config_has_the_parameters_of_its_model(model_type):
    config = transformers.AutoConfig.for_model(model_type)
    if model_type in REFUSED_DEFAULTS:
        with pytest.raises(ConfigError, match=REFUSED_DEFAULTS[model_type]):
            ModelSpec.from_hf(content_of(config))
        return
    spec, model = ModelSpec.from_hf(content_of(config)), built(config)
    assert spec.architecture == type(model).__name__
    assert spec.num_params == sum(parameter.numel() for parameter in model.parameters())


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sizes=st.fixed_dictionaries({
    "vocab_size": st.integers(64, 200),
    "num_hidden_layers": st.integers(1, 7),
    "intermediate_size": st.integers(1, 12).map(lambda n: 8 * n),
    "moe_intermediate_size": st.integers(1, 12).map(lambda n: 8 * n),
    "num_key_value_heads": st.sampled_from([1, 2, 4]),
    "num_experts": st.integers(3, 9),
    "max_position_embeddings": st.integers(64, 200),
    "tie_word_embeddings": st.booleans(),
    "attention_bias": st.booleans(),
}))  # fmt: skip
@pytest.mark.parametrize("model_type", NAMED)
def test_small_config_has_the_parameters_of_its_model(model_type, sizes):
    latent = LATENT if "kv_lora_rank" in default_config(model_type) else {}
    small = SIZES | sizes | latent | {"num_experts_per_tok": 2, "head_dim": 16}
    if latent:
        small["num_key_value_heads"] = 4
        small.pop("head_dim")
    if model_type == "kimi_linear":
        small["tie_word_embeddings"] = False  # it refuses to be tied, and transformers would leave it untied
    config = small_config(model_type, small)
    spec, model = ModelSpec.from_hf(content_of(config)), built(config)
    assert spec.num_params == sum(parameter.numel() for parameter in model.parameters())


PUBLISHED = [  # model_type, sizes of its config.json, parameters in billions, active ones; from the papers and model cards
    ("bloom", {"hidden_size": 14336, "n_layer": 70, "n_head": 112, "vocab_size": 250880}, 176.247271424, None),
    (
        "gemma3_text",
        {"hidden_size": 5376, "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128}
        | {"intermediate_size": 21504, "sliding_window": 1024},
        27.0, None,
    ),
    (
        "dbrx",
        {"d_model": 6144, "n_layers": 40, "n_heads": 48, "vocab_size": 100352, "attn_config": {"kv_n_heads": 8}}
        | {"ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}},
        132, 36,
    ),
    (
        "cohere",
        {"hidden_size": 12288, "num_hidden_layers": 64, "num_attention_heads": 96, "num_key_value_heads": 8}
        | {"intermediate_size": 33792, "vocab_size": 256000, "use_qk_norm": True},
        104, None,
    ),
    (
        "glm4_moe",
        {"hidden_size": 5120, "num_hidden_layers": 92, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128}
        | {"intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160, "num_experts_per_tok": 8}
        | {"first_k_dense_replace": 3, "attention_bias": True, "use_qk_norm": True, "vocab_size": 151552},
        355, 32,
    ),
    (
        "falcon",
        {"hidden_size": 14848, "num_hidden_layers": 80, "num_attention_heads": 232, "num_kv_heads": 8, "vocab_size": 65024}
        | {"new_decoder_architecture": True},
        180, None,
    ),
    (
        "olmo2",
        {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8}
        | {"intermediate_size": 27648, "vocab_size": 100352},
        32.2, None,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "config", "billions", "active"), PUBLISHED, ids=lambda value: str(value)[:12])
def test_published_sizes_are_met(model_type, config, billions, active):
    spec = ModelSpec.from_hf({"model_type": model_type, **config})
    tolerance = 1e-12 if billions % 1 and billions > 100 else 0.01  # an exact count, or one that was rounded
    assert spec.num_params / 1e9 == pytest.approx(billions, rel=tolerance)
    if active is not None:
        assert spec.num_active_params / 1e9 == pytest.approx(
            active, rel=0.06
        )  # says the whole part, with or without embeddings


def windows_and_turns(model_type, **changes):
    spec = ModelSpec.from_hf({**content_of(transformers.AutoConfig.for_model(model_type)), **changes})
    layers = [layer.attention for layer in spec.iter_layers() if isinstance(layer, Block)]
    assert all(isinstance(attention, SoftmaxAttention) for attention in layers)
    return [(attention.window, attention.rope_fraction) for attention in layers]


@pytest.mark.parametrize("model_type", ["cohere2", "exaone4", "exaone_moe"])
def test_layers_without_a_window_do_not_turn_queries(model_type):
    assert windows_and_turns(model_type)[:4] == [(4096, 1.0)] * 3 + [(None, 0.0)]
    assert windows_and_turns(model_type, layer_types=None)[:4] == [(4096, 1.0)] * 3 + [(None, 0.0)]


@pytest.mark.parametrize(("model_type", "window", "every"), [("gemma3_text", 4096, 6), ("olmo3", 4096, 4)])
def test_every_nth_layer_sees_all_tokens(model_type, window, every):
    expected = [(None if (idx + 1) % every == 0 else window, 1.0) for idx in range(24)]
    assert windows_and_turns(model_type)[:24] == expected
    assert windows_and_turns(model_type, layer_types=None)[:24] == expected


def test_smollm3_turns_queries_in_three_layers_of_four():
    assert windows_and_turns("smollm3")[:8] == [(None, 1.0), (None, 1.0), (None, 1.0), (None, 0.0)] * 2


def test_first_layers_are_dense_and_the_rest_has_shared_experts():
    spec = ModelSpec.from_hf(content_of(transformers.AutoConfig.for_model("ernie4_5_moe")))
    (dense, first), (sparse, rest) = spec.block_runs
    assert (first, rest, dense.mlp.ffn_dim) == (1, 27, 12288)
    assert isinstance(sparse.mlp, MoE)
    assert (sparse.mlp.shared_ffn_dim, sparse.mlp.top_k) == (3072, 6)


def test_multimodal_gemma_is_its_text_model():
    text = content_of(transformers.AutoConfig.for_model("gemma3_text"))
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    assert ModelSpec.from_hf(whole, name="it") == ModelSpec.from_hf({**text, "model_type": "gemma3_text"}, name="it")


def states_of(model_type, **changes):
    content = {"model_type": model_type, **content_of(transformers.AutoConfig.for_model(model_type)), **changes}
    return [
        layer.attention.passes_state for layer in ModelSpec.from_hf(content).iter_layers() if isinstance(layer, Block)
    ]


@pytest.mark.parametrize(
    ("model_type", "absent", "expected"),
    [
        ("qwen3_next", {"layer_types": None}, [True, True, True, False]),
        ("jamba", {}, [True] * 4 + [False] + [True] * 3),
        ("minimax", {"layer_types": None}, [False, True]),
        ("bamba", {"attn_layer_indices": [1, 3]}, [True, False, True, False, True]),
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 16}, [True, False]),
        ("recurrent_gemma", {}, [True, True, False]),
        (
            "kimi_linear",
            {"layer_types": None, "linear_attn_config": {"kda_layers": [1, 3]}},
            [True, False, True, False],
        ),
        ("mamba", {}, [True] * 32),
        ("granitemoehybrid", {"layer_types": ["mamba", "attention"] * 16}, [True, False]),
    ],
)
def test_layers_with_a_state_are_where_the_config_says(model_type, absent, expected):
    assert states_of(model_type, **absent)[: len(expected)] == expected


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("jamba", {"attn_layer_period": 0}, "attn_layer_period = 0: must be a positive integer"),
        ("bamba", {"attn_layer_indices": "all"}, "attn_layer_indices = 'all': must be a list of integers"),
        ("recurrent_gemma", {"block_types": []}, r"block_types = \[\]: must be a list"),
        ("mamba2", {"num_heads": 12}, "num_heads 12 is not a multiple of num_key_heads 8"),
        ("qwen3_next", {"linear_key_head_dim": "x"}, "key_dim = 'x'"),
        ("lfm2", {"block_ffn_dim_multiplier": -1}, "block_ffn_dim_multiplier = -1"),
        ("lfm2", {"layer_types": ["conv"]}, "layer_types has 1 entries but num_hidden_layers = 32"),
        ("qwen3_next", {"layer_types": ["rwkv"] * 48}, r"layer_types\.0 = 'rwkv'"),
    ],
)
def test_wrong_state_is_refused_with_field_and_value(model_type, changes, message):
    with pytest.raises(ConfigError, match=message):
        states_of(model_type, **changes)
