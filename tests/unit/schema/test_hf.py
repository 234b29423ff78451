"""config.json -> ModelSpec: every family against transformers, every wrong file a ConfigError."""

import copy
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from meshwright.schema.errors import ConfigError
from meshwright.schema.hf import SLIDES, PublishedConfig, families
from meshwright.schema.layers import Block, DenseMLP, LatentAttention, MoE, SoftmaxAttention
from meshwright.schema.model import ModelSpec

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "intermediate_size": 96,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}

# Nothing but the sizes: everything else has to be the default of transformers' config class.
MINIMAL = {
    "llama": SIZES,
    "mistral": {**SIZES, "num_attention_heads": 8},
    "mixtral": {**SIZES, "num_attention_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2": {**SIZES, "num_attention_heads": 32},
    "qwen2_moe": {**SIZES, **EXPERTS, "num_attention_heads": 16},
    "qwen3": {**SIZES, "num_attention_heads": 32},
    "qwen3_moe": {**SIZES, **EXPERTS},
    "gemma2": SIZES,
    "olmoe": {**SIZES, "num_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {**SIZES, "num_attention_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v2": {**SIZES, **LATENT, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "deepseek_v3": {**SIZES, **LATENT, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt2": {"n_embd": 64, "n_layer": 6, "n_head": 4, "vocab_size": 128},
    "opt": {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": 128, "ffn_dim": 96},
    "gpt_neox": SIZES,
    "nemotron": {**SIZES, "num_key_value_heads": 4},  # transformers' default, None, does not build a model
    "phi3": SIZES,
    "llama4_text": {**SIZES, "num_attention_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 1},
}

# (model_type, changes to the minimal config): every switch that changes parameters, windows or the rotary embedding.
VARIANTS = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    ("llama", {"head_dim": 32, "num_key_value_heads": None, "rope_theta": 5e5, "rms_norm_eps": 1e-5}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 20000.0}}),
    ("mistral", {"sliding_window": None, "head_dim": 16, "num_key_value_heads": 2}),
    ("mixtral", {"sliding_window": 64}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}),
    ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 3}),
    ("qwen2_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3], "shared_expert_intermediate_size": 48}),
    ("qwen2_moe", {"qkv_bias": False, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}),
    ("qwen3", {"attention_bias": True, "head_dim": 16, "use_sliding_window": True, "max_window_layers": 4}),
    ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [1], "attention_bias": True, "head_dim": 32}),
    ("gemma2", {"attention_bias": True, "tie_word_embeddings": False, "head_dim": 32}),
    ("olmoe", {"attention_bias": True, "num_key_value_heads": 2}),
    ("gpt_oss", {"attention_bias": False, "layer_types": ["full_attention"] * 6}),
    ("deepseek_v2", {"q_lora_rank": None, "first_k_dense_replace": 2, "n_shared_experts": 1, "attention_bias": True}),
    ("deepseek_v3", {"q_lora_rank": 24, "first_k_dense_replace": 0, "attention_bias": True}),
    ("gpt2", {"n_inner": 100, "n_positions": 77, "tie_word_embeddings": False}),
    ("opt", {"enable_bias": False, "activation_function": "gelu", "max_position_embeddings": 77}),
    ("gpt_neox", {"attention_bias": False, "rotary_pct": 0.5, "rotary_emb_base": 25000, "tie_word_embeddings": True}),
    ("nemotron", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2, "head_dim": 8}),
    ("phi3", {"num_key_value_heads": 2, "sliding_window": 2047}),
    ("llama4_text", {"interleave_moe_layer_step": 2, "attention_bias": True, "no_rope_layer_interval": 3}),
    ("llama4_text", {"moe_layers": [0, 5], "no_rope_layers": [1, 0, 1, 0, 1, 0], "use_qk_norm": False}),
]


def blocks_of(spec):
    return [layer for layer in spec.iter_layers() if isinstance(layer, Block)]


def config_of(model_type, **changes):
    return {"model_type": model_type, **copy.deepcopy(MINIMAL[model_type]), **changes}


@pytest.mark.parametrize(
    ("model_type", "changes"), [*((kind, {}) for kind in MINIMAL), *VARIANTS], ids=lambda value: str(value)[:60]
)
def test_parsed_config_agrees_with_transformers(model_type, changes):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = config_of(model_type, **changes)
    spec = ModelSpec.from_hf(copy.deepcopy(config))
    config.pop("model_type")
    # token ids of the full vocabulary mean nothing in this small one
    hf_config = transformers.AutoConfig.for_model(model_type, **config, pad_token_id=0)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(hf_config)

    assert spec.architecture == type(model).__name__
    assert spec.num_params == sum(parameter.numel() for parameter in model.parameters())
    assert spec.max_seq_len == hf_config.max_position_embeddings
    assert spec.tie_embeddings == hf_config.tie_word_embeddings
    eps_names = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps")
    stated = (getattr(hf_config, name) for name in eps_names if hasattr(hf_config, name))
    assert spec.norm_eps == next(stated, 1e-5)  # OPT's layers take torch's default
    rope = getattr(hf_config, "rope_parameters", None)
    if rope:
        assert spec.rope.theta == rope["rope_theta"]
        assert spec.rope.scaling == rope["rope_type"].replace("default", "none")
        assert spec.rope.factor == rope.get("factor", 1.0)
        assert spec.rope.original_max_seq_len == rope.get("original_max_position_embeddings")
        rotated = {getattr(block.attention, "rope_fraction", 1.0) for block in blocks_of(spec)}
        assert max(rotated) == rope.get("partial_rotary_factor", 1.0)
    types = getattr(hf_config, "layer_types", None)
    window = getattr(hf_config, "sliding_window", None)
    widths = {"sliding_attention": window, "chunked_attention": getattr(hf_config, "attention_chunk_size", None)}
    expected = [widths.get(kind) for kind in types] if types else [window] * spec.num_blocks
    assert [block.attention.window for block in blocks_of(spec)] == expected


def test_gpt_neox_block_is_parallel_and_rotates_a_quarter():
    ((block, count),) = ModelSpec.from_hf(config_of("gpt_neox")).block_runs
    assert (count, block.parallel_residual, block.attention.rope_fraction) == (6, True, 0.25)
    assert block.mlp == DenseMLP(ffn_dim=96, gated=False, activation="gelu", bias=True)


def test_gemma2_has_four_norms_and_capped_logits():
    blocks = blocks_of(ModelSpec.from_hf(config_of("gemma2", attn_logit_softcapping=30.0)))
    assert {(block.num_norms, block.attention.logit_softcap, block.mlp.activation) for block in blocks} == {
        (4, 30.0, "gelu_tanh")
    }


def test_llama4_takes_the_text_model_of_a_multimodal_config():
    text = config_of("llama4_text")
    whole = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": text}
    spec = ModelSpec.from_hf({**whole, "vision_config": {"hidden_size": 1}}, name="scout")
    assert spec == ModelSpec.from_hf(text, name="scout")
    assert spec.architecture == "Llama4ForCausalLM"
    assert [block.attention.rope_fraction for block in blocks_of(spec)] == [1, 1, 1, 0, 1, 1]
    assert [block.attention.qk_norm for block in blocks_of(spec)][2:4] == ["weightless", "none"]


def test_deepseek_leaves_out_multi_token_prediction():
    spec = ModelSpec.from_hf(config_of("deepseek_v3", num_nextn_predict_layers=1))
    assert [run.layer.kind for run in spec.layers] == ["embedding", "block", "block", "head"]
    assert isinstance(blocks_of(spec)[0].attention, LatentAttention)
    assert isinstance(blocks_of(spec)[-1].mlp, MoE)


def test_old_and_new_rope_spellings_are_the_same():
    numbers = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
    old = config_of("llama", rope_theta=5e5, rope_scaling={"rope_type": "llama3", **numbers})
    older = config_of("llama", rope_theta=5e5, rope_scaling={"type": "llama3", **numbers})
    new = config_of("llama", rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **numbers})
    nested = config_of("llama", rope_parameters={"full_attention": new["rope_parameters"]})
    specs = [ModelSpec.from_hf(config) for config in (old, older, new, nested)]
    assert all(spec == specs[0] for spec in specs)
    assert specs[0].rope.scaling == "llama3"
    assert (specs[0].rope.theta, specs[0].rope.factor, specs[0].rope.original_max_seq_len) == (5e5, 8.0, 1024)


def test_factor_of_longrope_is_the_ratio_of_lengths():
    config = config_of("phi3", max_position_embeddings=8192, original_max_position_embeddings=2048)
    scaling = {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}
    rope = ModelSpec.from_hf({**config, "rope_scaling": scaling}).rope
    assert (rope.scaling, rope.factor, rope.original_max_seq_len) == ("longrope", 4.0, 2048)


def test_file_and_folder_and_content_are_read_alike(tmp_path):
    folder = tmp_path / "my-llama"
    folder.mkdir()
    config = config_of("llama", architectures=["LlamaForCausalLM"])
    (folder / "config.json").write_text(json.dumps(config))
    specs = [ModelSpec.from_hf(source) for source in (folder, str(folder), folder / "config.json")]
    assert {spec.name for spec in specs} == {"my-llama"}
    assert ModelSpec.resolve(str(folder)) == specs[0]
    assert ModelSpec.from_hf(config).name == "LlamaForCausalLM"
    assert ModelSpec.from_hf({**config, "_name_or_path": "org/tiny"}).name == "org/tiny"
    assert ModelSpec.from_hf(folder, name="mine").name == "mine"
    (tmp_path / "tiny.json").write_text(json.dumps(config))
    assert ModelSpec.from_hf(tmp_path / "tiny.json").name == "tiny"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(MINIMAL["llama"])[:40], "not valid JSON"),
        ("", "is empty"),
        ("[1, 2]", "holds a list, not an object"),
        ("null", "holds a NoneType, not an object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"model_type": "llama", "hidden_size": ' + "1" * 5000 + "}", "not usable JSON"),
    ],
)
def test_damaged_file_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        ModelSpec.from_hf(path)
    assert str(path) in caught.value.message


@pytest.mark.parametrize("path", ["/no/such/config.json", "x" * 5000, "nul\0byte", "/proc/self/mem"])
def test_path_that_cannot_be_read_is_refused(path):
    with pytest.raises(ConfigError, match="cannot read"):
        ModelSpec.from_hf(path)


def test_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json"):
        ModelSpec.from_hf(tmp_path)


@pytest.mark.parametrize(
    "value",
    ["abc", "64", -64, 0, 64.0, None, True, [64], {}, 10**12, pytest.param(10**5000, id="5001 digits")],
)
def test_wrong_size_is_refused_with_field_and_value(value):
    with pytest.raises(ConfigError, match=r"hidden_size = .*: (Input should be|Unable to parse)") as caught:
        ModelSpec.from_hf(config_of("llama", hidden_size=value))
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        (
            "llama",
            {"num_hidden_layers": 513},
            "num_hidden_layers = 513: Input should be less than or equal to 512",
        ),
        ("llama", {"num_attention_heads": 5}, "num_attention_heads = 5 must divide hidden_size = 64"),
        ("llama", {"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ("llama", {"head_dim": "x"}, "head_dim = 'x'"),
        ("llama", {"hidden_act": "cube"}, "hidden_act = 'cube': Input should be 'silu'"),
        ("llama", {"tie_word_embeddings": None}, "tie_word_embeddings = None: Input should be a valid boolean"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps = nan"),
        ("llama", {"rope_theta": float("inf")}, "rope_theta = inf"),
        ("llama", {"rope_theta": 10**400}, "rope_theta = an integer of"),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling = 'linear': Input should be a valid dictionary"),
        ("llama", {"rope_scaling": {"type": "mrope"}}, r"rope_scaling\.type = 'mrope': Input should be 'default'"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": -1}}, r"rope_scaling\.factor = -1"),
        ("mixtral", {"num_experts_per_tok": 9}, "top_k 9 exceeds num_experts 8"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types has 1 entries but num_hidden_layers = 6"),
        ("gemma2", {"layer_types": ["mamba"] * 6}, r"layer_types\.0 = 'mamba'"),
        ("gemma2", {"layer_types": "full_attention"}, "layer_types = 'full_attention': Input should be a valid list"),
        ("qwen3_moe", {"mlp_only_layers": [True]}, r"mlp_only_layers\.0 = True: Input should be a valid integer"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias = True: biases of DeepSeek"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention = True: only decoders"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before = False: only the sizes"),
        ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim = 32"),
        ("gpt2", {"n_head": 5}, "num_attention_heads = 5 must divide hidden_size = 64"),
        ("gpt_neox", {"rotary_pct": 1.5}, "rotary_pct = 1.5: Input should be less than or equal to 1"),
        ("llama4_text", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries"),
    ],
)
def test_impossible_value_is_refused_with_field_and_value(model_type, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        ModelSpec.from_hf(config_of(model_type, **changes))
    assert caught.value.message.startswith("config: ")


@pytest.mark.parametrize("model_type", MINIMAL)
def test_missing_size_is_named(model_type):
    # the dense width of a model whose layers all route to experts is not used
    unused = {"intermediate_size"} if "moe_intermediate_size" in MINIMAL[model_type] else set()
    for field in MINIMAL[model_type].keys() - unused - {"num_key_value_heads"}:
        config = config_of(model_type)
        del config[field]
        with pytest.raises(ConfigError, match=f"field `{field}` is missing"):
            ModelSpec.from_hf(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "bert"}, "model_type 'bert' is not supported"),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "T5ForConditionalGeneration"),
        ({"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"}, "is not supported"),
        ({"model_type": "llama4_vision_model"}, "is not supported"),
    ],
)
def test_unsupported_architecture_is_refused_and_says_where_the_known_ones_are(config, message):
    with pytest.raises(ConfigError, match=message) as caught:
        ModelSpec.from_hf({**SIZES, **config})
    assert f"{len(families())} known families" in caught.value.help


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"architectures": []},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": [["LlamaForCausalLM"]]},
        {"model_type": 7},
        {"architectures": ["LlamaForCausalLM"], "model_type": "mistral"},
        {"model_type": "llama4"},
        {"model_type": "llama4", "text_config": [1]},
        {"model_type": "llama", **SIZES, "_name_or_path": "\ud800"},
    ],
)
def test_config_without_a_usable_family_or_name_is_refused(config):
    with pytest.raises(ConfigError):
        ModelSpec.from_hf(config)


FIELDS = sorted(
    {field for config in MINIMAL.values() for field in config}
    | {field for _, changes in VARIANTS for field in changes}
    | {"architectures", "model_type", "_name_or_path", "text_config", "rope_scaling", "hidden_act", "moe_layer_freq"}
    | {"max_position_embeddings", "hidden_activation", "attn_logit_softcapping", "original_max_position_embeddings"}
)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 130)
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["llama", "llama3", "yarn", "sliding_attention", "full_attention", "silu", *MINIMAL]),
    lambda inner: (
        st.lists(inner, max_size=7)
        | st.dictionaries(
            st.sampled_from(["rope_type", "type", "factor", "rope_theta", "full_attention", *FIELDS])
            | st.text(max_size=4),
            inner,
            max_size=5,
        )
    ),
    max_leaves=8,
)


def accept_or_refuse(config):
    try:
        spec = ModelSpec.from_hf(config)
    except ConfigError as error:
        assert error.message
    else:
        assert 0 < spec.num_active_params <= spec.num_params
        assert spec.num_blocks <= 10_000


@pytest.mark.long
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=6), json_values, max_size=12))
def test_any_json_object_is_a_model_or_a_config_error(config):
    accept_or_refuse(config)


@pytest.mark.long
@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(sorted(MINIMAL)),
    st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=3),
    st.lists(st.sampled_from(FIELDS), max_size=1),
)
def test_any_mutation_of_a_valid_config_is_a_model_or_a_config_error(model_type, changes, removed):
    config = {**config_of(model_type), **changes}
    for field in removed:
        config.pop(field, None)
    accept_or_refuse(config)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(MINIMAL)), st.data())
def test_any_truncation_of_a_file_is_refused(tmp_path_factory, model_type, data):
    text = json.dumps(config_of(model_type))
    path = tmp_path_factory.getbasetemp() / "truncated.json"
    path.write_text(text[: data.draw(st.integers(0, len(text) - 1))])
    with pytest.raises(ConfigError, match=r"not valid JSON|is empty"):
        ModelSpec.from_hf(path)


@pytest.mark.parametrize(
    "family",
    [family for family in families().values() if not family.text_model],
    ids=lambda family: family.architecture,
)
def test_family_names_only_fields_that_are_read(family):
    aliases = [info.validation_alias for info in PublishedConfig.model_fields.values()]
    known = set(PublishedConfig.model_fields) | {name for alias in aliases if alias for name in alias.choices}
    sizes = [name for size in (*family.base_sizes, *family.sizes) for name in size.split("|")]
    assert {*family.defaults, *family.reads, *sizes} - {*family.refuses} <= known
    assert family.slides in SLIDES
    for part, fields in ((SoftmaxAttention, family.attention), (DenseMLP, family.mlp), (MoE, family.moe)):
        assert fields.keys() <= part.model_fields.keys()
