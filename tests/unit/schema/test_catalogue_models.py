"""Every model of the catalogue against what transformers builds from the same config, and against published totals."""

import functools

import pytest
from loops import for_each
from meshwright.schema.catalogue import load_model, model_names
from meshwright.schema.layers import Block, SoftmaxAttention
from meshwright.schema.model import ModelSpec

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

# Parameters as published with the weights (safetensors headers count them), unless said otherwise.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "pythia-70m": 70_426_624,  # EleutherAI/pythia README, table of models
    "pythia-1b": 1_011_781_632,  # same table
    "pythia-12b": 11_846_072_320,  # same table
    "smollm2-135m": 134_515_008,
    "smollm2-1.7b": 1_711_376_384,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "gpt-j-6b": 6_050_882_784,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma-2-9b": 9_241_705_984,
    "olmoe-1b-7b": 6_919_161_856,
    "gpt-oss-20b": 20_914_757_184,  # parameter_size of the MXFP4 files
    "gpt-oss-120b": 116_829_156_672,  # the same
    "deepseek-v2-lite": 15_706_484_224,
    # The checkpoint holds 671,026,419,200 without MTP: e_score_correction_bias (256 in each of 58 MoE layers) is among
    # its tensors, but it is set by a rule and not by a gradient, and transformers has it as a buffer.
    "deepseek-v3": 671_026_419_200 - 58 * 256,
    "kimi-k2.5": 1_026_408_232_448 - 60 * 384,  # of Kimi-K2's checkpoint, the same buffer
    "minimax-m2.5": 228_689_764_864 - 62 * 256,  # the same
    "mistral-large-2407": 122_610_069_504,
}

# Totals that are published in rounded form: (billions, tolerance of the rounding).
ROUNDED = {
    "glm-5": (744.0, 1.0),  # model card, with the indexer that is left out here
    "qwen3.5-397b-a17b": (397.0, 0.8),  # model card, with a vision encoder that is left out here
    "gpt3-175b": (175.0, 0.5),  # Brown et al. 2020, table 2.1
    "llama-4-scout": (109.0, 1.5),  # model card, with a vision encoder of 0.9 B that is left out here
    "llama-4-maverick": (400.0, 1.5),  # the same
    "gpt-oss-20b": (20.91, 0.005),  # arXiv:2508.10925, table 1
    "gpt-oss-120b": (116.83, 0.005),  # arXiv:2508.10925, table 1
    "opt-6.7b": (6.7, 0.05),  # Zhang et al. 2022 (arXiv:2205.01068), table 1, as the others
    "opt-13b": (13.0, 0.2),
    "opt-30b": (30.0, 0.1),
    "opt-175b": (175.0, 0.5),
    "nemotron-4-340b": (9.4 + 331.6, 0.1),  # arXiv:2406.11704, section 2: embedding and non-embedding parameters
}

# Active parameters, rounded as published; the conventions differ (with or without embeddings), hence the width.
ACTIVE = {
    "mixtral-8x7b": (12.9, 0.05),  # arXiv:2401.04088
    "mixtral-8x22b": (39.1, 0.1),  # https://mistral.ai/news/mixtral-8x22b
    "llama-4-scout": (17.0, 0.5),  # model card
    "llama-4-maverick": (17.0, 0.5),  # model card
    "kimi-k2.5": (32.0, 1.0),  # arXiv:2507.20534
    "qwen3.5-397b-a17b": (17.0, 0.5),  # model card
    "minimax-m2.5": (10.0, 1.1),  # model card
    "qwen3-30b-a3b": (3.3, 0.1),  # model card
    "qwen3-235b-a22b": (22.0, 0.3),  # model card
    "olmoe-1b-7b": (1.3, 0.05),  # arXiv:2409.02060
    "deepseek-v2-lite": (2.4, 0.3),  # arXiv:2405.04434, without the output projection
    "deepseek-v3": (37.0, 0.6),  # arXiv:2412.19437
}


@functools.cache
def reference(name: str):
    """transformers' config and model of a catalogue entry, on the meta device."""
    config = dict(load_model(name)["config"])
    architecture = config["architectures"][0]
    if "text_config" in config:
        config, architecture = dict(config["text_config"]), architecture.replace("ConditionalGeneration", "CausalLM")
    model_class = getattr(transformers, architecture, None)
    if model_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {architecture}")
    hf_config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    with torch.device("meta"):
        return hf_config, model_class(hf_config)


def check_parameters(name):
    spec, (hf_config, model) = ModelSpec.named(name), reference(name)
    # parameters() yields a tied matrix once
    assert spec.num_params == sum(parameter.numel() for parameter in model.parameters())
    assert spec.num_blocks == hf_config.num_hidden_layers
    assert spec.architecture == type(model).__name__


def check_parameters_of_blocks(name):
    spec, (_, model) = ModelSpec.named(name), reference(name)
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    layers = next(module for module in lists if len(module) == spec.num_blocks)
    blocks = [layer for layer in spec.iter_layers() if isinstance(layer, Block)]
    expected = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    assert [block.num_params(spec.hidden_dim) for block in blocks] == expected


def check_settings(name):
    spec, (hf_config, _) = ModelSpec.named(name), reference(name)
    assert spec.vocab_size == hf_config.vocab_size
    assert spec.max_seq_len == hf_config.max_position_embeddings
    assert spec.tie_embeddings == hf_config.tie_word_embeddings
    parameters = getattr(hf_config, "rope_parameters", None)
    if spec.rope is None:
        assert not parameters
        return
    if parameters is None:  # GPT-J's code fixes them
        assert (spec.rope.theta, spec.rope.scaling) == (10000.0, "none")
        return
    assert spec.rope.theta == parameters["rope_theta"]
    assert spec.rope.scaling == parameters["rope_type"].replace("default", "none")
    assert spec.rope.original_max_seq_len == parameters.get("original_max_position_embeddings")


def check_windows(name):
    spec, (hf_config, _) = ModelSpec.named(name), reference(name)
    blocks = [layer for layer in spec.iter_layers() if isinstance(layer, Block)]
    types = getattr(hf_config, "layer_types", None)
    if types is None:
        width = getattr(hf_config, "sliding_window", None)
        assert {block.attention.window for block in blocks} == {width}
        return
    widths = {
        "full_attention": None,
        "sliding_attention": getattr(hf_config, "sliding_window", None),
        "chunked_attention": getattr(hf_config, "attention_chunk_size", None),
    }
    windows = [getattr(block.attention, "window", None) for block in blocks]
    assert windows == [widths.get(kind) for kind in types]
    chunked = [isinstance(b.attention, SoftmaxAttention) and b.attention.chunked for b in blocks]
    assert chunked == [kind == "chunked_attention" for kind in types]


@pytest.mark.parametrize("name", model_names())
def test_catalogue_model_is_that_of_transformers(name):
    """Parameters in total and block by block, settings, and which layers have windows."""
    for check in (check_parameters, check_parameters_of_blocks, check_settings, check_windows):
        check(name)


@for_each(PUBLISHED)
def test_catalogue_model_has_the_published_total(name):
    assert ModelSpec.named(name).num_params == PUBLISHED[name]


@for_each(ROUNDED)
def test_catalogue_model_rounds_to_the_published_total(name):
    billions, tolerance = ROUNDED[name]
    assert ModelSpec.named(name).num_params / 1e9 == pytest.approx(billions, abs=tolerance)


@for_each(ACTIVE)
def test_catalogue_model_rounds_to_the_published_active_parameters(name):
    billions, tolerance = ACTIVE[name]
    assert ModelSpec.named(name).num_active_params / 1e9 == pytest.approx(billions, abs=tolerance)


def test_every_catalogue_model_has_a_published_total():
    assert set(model_names()) == set(PUBLISHED) | set(ROUNDED)


@for_each(model_names())
def test_catalogue_file_names_its_model_and_source(name):
    entry = load_model(name)
    assert set(entry) == {"name", "source", "config"}
    assert entry["name"] == name
    assert entry["source"]
    assert ModelSpec.named(name).source == entry["source"]
