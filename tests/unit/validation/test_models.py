"""Models of rows: from the catalogue, from columns, from a name or a size."""

from __future__ import annotations

import pytest
from meshwright.schema import ModelSpec
from meshwright.validation.models import published_shapes, shape_named, shape_of_size
from run_rows import inputs_of


def test_model_is_built_from_the_columns_and_its_head_from_the_parameters() -> None:
    tied = 16 * (4 * 2048**2 + 3 * 2048 * 8192) + 131072 * 2048
    columns = {
        "model": "nanotron-1B",
        "model_family": "nanotron-1B",
        "layers": 16,
        "heads": 32,
        "kv_heads": 32,
        "vocab": 131072,
    }
    model = inputs_of(**columns, params_b=1.342).model
    assert model.tie_embeddings
    assert model.num_params == pytest.approx(tied, rel=1e-3)  # the norms
    untied = inputs_of(**columns, params_b=1.61).model
    assert not untied.tie_embeddings


def test_published_shape_is_taken_from_the_catalogue_even_truncated() -> None:
    llama = {
        "model": "x",
        "model_family": "Llama-3",
        "hidden": 8192,
        "heads": 64,
        "kv_heads": 8,
        "ffn": 28672,
        "vocab": 128256,
    }
    assert inputs_of(**llama, layers=80).model.name == "llama-3.1-70b"
    assert inputs_of(**llama, layers=12).model.num_blocks == 12


def test_truncated_model_keeps_the_blocks_that_its_size_says() -> None:
    """DeepSeek-V3 starts with three dense blocks of 0.6 B; one with experts has 11.5 B."""
    full = ModelSpec.named("deepseek-v3")
    embedding = (full.num_params - sum(count * block.num_params(7168) for block, count in full.block_runs)) / 1e9
    for num_dense, params_b in ((3, 3 * 0.58 + 11.5), (1, 0.58 + 3 * 11.5), (0, 4 * 11.5)):
        model = inputs_of(model="DeepSeek-V3", layers=4, hidden=None, params_b=embedding + params_b).model
        dense = sum(count for block, count in model.block_runs if not block.experts)
        assert (model.num_blocks, dense) == (4, num_dense)
    assert inputs_of(model="DeepSeek-V3", layers=4, hidden=None, params_b=None).model.block_runs[0][1] == 3


def test_family_that_no_name_tells_follows_from_the_shape() -> None:
    shape = {"model": "Zephyr-7", "model_family": "", "params_b": None}
    assert inputs_of(**shape).model.block_runs[0][0].norm == "layernorm"
    modern = inputs_of(**shape, ffn=5632, kv_heads=4).model.block_runs[0][0]
    assert (modern.norm, modern.mlp.gated) == ("rmsnorm", True)
    assert inputs_of(**shape, experts=8).model.block_runs[0][0].mlp.gated


def test_wrong_parameter_count_is_named() -> None:
    assert "parameters" in inputs_of(params_b=9.0).approximated
    assert "parameters" not in inputs_of(params_b=1.3).approximated


def test_shared_experts_of_a_family_are_added_to_the_columns() -> None:
    """Qwen1.5-MoE-A2.7B: 14.3 B parameters, 2.7 B of them active."""
    shape = {"layers": 24, "hidden": 2048, "heads": 16, "kv_heads": 16, "ffn": 1408, "vocab": 151936}
    inputs = inputs_of(model="Qwen1.5-MoE-A2.7B", model_family="Qwen", experts=60, topk=4, params_b=14.3, **shape)
    assert inputs.approximated == ()
    assert inputs.model.num_active_params == pytest.approx(2.7e9, rel=0.01)


def test_deepseek_is_built_from_the_columns() -> None:
    """V2's published sizes: 236 B parameters, 21 B of them active."""
    shape = {"layers": 60, "hidden": 5120, "heads": 128, "kv_heads": 128, "ffn": 1536, "vocab": 102400}
    model = inputs_of(model="deepseek-v2", model_family="DeepSeek", experts=160, topk=6, **shape).model
    assert model.num_params == pytest.approx(236e9, rel=0.01)
    assert model.num_active_params == pytest.approx(21.4e9, rel=0.03)


def test_published_names_have_their_published_size() -> None:
    published = {
        "GPT3-20B": 20.2, "Nemotron-22B": 21.3, "Llama-3.2-3b": 3.2, "phi-2": 2.8, "gemma-2b": 2.5, "falcon-7b": 6.9,
        "Yi-34B": 34.4, "DeepSeek-V2": 235.7, "bloom-176b": 176.2, "opt-66b": 65.7, "qwen3-0.6b": 0.596, "qwen3-4b": 4.02,
    }  # fmt: skip
    for name, size in published.items():
        blank = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"))
        inputs = inputs_of(model=name, model_family="", tp=1, pp=1, dp=16, **blank)
        assert inputs.model.num_params / 1e9 == pytest.approx(size, rel=0.03), name


def test_shapes_are_whole_heads_and_a_size_alone_gives_its_parameters() -> None:
    assert shape_named("meta-llama/Llama-2-7b-hf") is None  # of the catalogue
    assert all(shape.heads % shape.kv_heads == 0 for shape, _ in published_shapes().values())
    for params in (1e9, 24e9, 175e9):
        shape = shape_of_size(params, 51200)
        assert 12 * shape.layers * shape.hidden**2 + 51200 * shape.hidden == pytest.approx(params, rel=0.15)
