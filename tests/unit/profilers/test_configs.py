"""A config.json of no known family: traced from transformers' code, counted as a real run counts, refused with the reason."""

from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from meshwright.planner import estimate, plan
from meshwright.profilers.module import fakes
from meshwright.profilers.module.configs import (
    _without_code,
    build_model,
    default_model_types,
    trace_config,
    trace_model,
)
from meshwright.schema import ClusterSpec, ConfigError, Layout, ModelSpec, Workload
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "apertus": {}, "arcee": {}, "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "attn_layer_indices": [1]},
    "bloom": {"n_layer": 2, "n_head": 4}, "codegen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64},
    "diffllama": {}, "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64},
    "helium": {}, "lfm2": {"layer_types": ["conv", "full_attention"]},
    "nemotron": {}, "persimmon": {}, "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
}  # fmt: skip
SEQ_LEN = 32


def content(model_type: str) -> dict[str, Any]:
    """A tiny config.json."""
    return {"model_type": model_type, **SIZES, **OTHERS.get(model_type, {})}


def forward_flops(spec: ModelSpec) -> float:
    """Of one sequence: products, and attention with all scores, as torch counts it."""
    total = 0.0
    for run in spec.layers:
        traced = run.layer.counted
        assert traced is not None
        products = sum(2 * p.rows * p.n * p.k * p.count for p in traced.products)
        attention = sum(
            2 * a.num_heads * a.query_len * a.kv_len * (a.head_dim + a.v_head_dim) * a.count for a in traced.attentions
        )
        total += run.count * (products + attention)
    return total


def counted_by_torch(model_type: str) -> tuple[int, int]:
    """Parameters, and FLOPs of a real forward pass, of the model on the CPU."""
    config = transformers.CONFIG_MAPPING[model_type].from_dict(content(model_type))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # not counted by torch up to 2.14
    counter = FlopCounterMode(
        display=False, custom_mapping={fused: lambda q, k, v, *_, **__: int(sdpa_flop_count(q, k, v))}
    )
    with counter:
        model(torch.zeros((1, SEQ_LEN), dtype=torch.long), use_cache=False)
    return sum(parameter.numel() for parameter in model.parameters()), counter.get_total_flops()


@pytest.mark.parametrize("model_type", OTHERS)
def test_traced_parameters_and_flops_are_those_of_a_real_run(model_type: str) -> None:
    spec = trace_model(build_model(content(model_type)), seq_len=SEQ_LEN, name=model_type)
    params, flops = counted_by_torch(model_type)
    assert spec.num_params == params
    assert forward_flops(spec) == flops


def test_config_of_no_known_family_is_planned_from_its_path(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(content("diffllama") | {"architectures": ["DiffLlamaForCausalLM"]})
    )
    found = plan(str(tmp_path), "4xA100-SXM-80GB", global_batch_size=8, seq_len=SEQ_LEN)
    assert found.model.name == tmp_path.name
    assert found.model.code is not None
    assert found.model.code.class_name == "DiffLlamaForCausalLM"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_type": "unheard-of"}, "'unheard-of' is no known family; transformers .* does not have it"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "a.B"}}, "code of its own .auto_map., which is never run"),
        ({"model_type": "vit"}, "'vit' is no language model"),
        ({"architectures": ["BertForMaskedLM"]}, "'BertForMaskedLM' is not supported; of model_type helium Helium"),
        ({"model_type": "helium", "hidden_size": -1}, "cannot build helium"),
        ({"model_type": "helium", "num_hidden_layers": 2**53 + 1}, "9007199254740993 layers are more than 512"),
        ({"model_type": None, "architectures": ["Xyz"]}, "there is no model_type"),
    ],
)
def test_what_cannot_be_traced_is_refused_with_the_reason(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in (content("helium") | changes).items() if v is not None}))
    with pytest.raises(ConfigError, match=why):
        trace_config(path, seq_len=SEQ_LEN)


def test_longer_sequences_than_the_model_has_positions_for_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="64 positions, the sequences 128 tokens"):
        trace_model(build_model(content("bert") | {"is_decoder": True}), seq_len=128, name="bert")


def test_without_transformers_the_fix_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    imports = builtins.__import__

    def missing(name: str, *others: Any) -> Any:
        if name.partition(".")[0] == "transformers":
            raise ImportError(name)
        return imports(name, *others)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match="is not installed") as raised:
        build_model(content("helium"))
    assert "pip install" in str(raised.value)


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "each",
    [pytest.param(15, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.nightly)],
    ids=["some", "all"],
)
def test_default_configurations_are_known_traced_or_refused_with_a_reason(each: int) -> None:
    sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
    from model_coverage import try_type

    outcomes = [try_type(model_type, 64) for model_type in default_model_types()[::each]]
    assert all(found.is_exact for found in outcomes)
    assert all(found.remark for found in outcomes if found.outcome not in ("known", "traced"))
    planned = sum(found.outcome in ("known", "traced") for found in outcomes)
    assert planned >= (0.8 if each == 1 else 0.7) * len(outcomes)


# --- tensor parallelism as base_model_tp_plan says ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def llamas() -> tuple[ModelSpec, ModelSpec]:
    """Of one model: traced, and as the catalogue would have it."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1024,
        "max_position_embeddings": 512, "tie_word_embeddings": False,
    }  # fmt: skip
    return trace_model(build_model(config), seq_len=256, name="llama"), ModelSpec.from_hf(config)


def test_products_of_a_block_are_split_as_those_of_the_catalogue(llamas: tuple[ModelSpec, ModelSpec]) -> None:
    traced, known = (spec.block_runs[0][0] for spec in llamas)
    assert traced.traced is not None
    split = traced.traced.split
    assert split is not None
    assert {(p.n, p.k, p.shard): p.count for p in traced.traced.products} == {
        (256, 256, "column"): 1, (128, 256, "column"): 2, (512, 256, "column"): 2, (256, 256, "row"): 1, (256, 512, "row"): 1,
    }  # fmt: skip
    assert split.num_sums == 2
    norms = 2 * 256
    assert split.num_params == known.num_params(256) - norms
    (attention,) = traced.traced.attentions
    assert attention.split


def test_tensor_parallelism_divides_what_the_catalogue_says_it_divides(llamas: tuple[ModelSpec, ModelSpec]) -> None:
    """Parameters of blocks exactly; activations within what eager norms keep beside a fused one's (a third, as unsplit)."""
    cluster, workload = ClusterSpec.parse("8xH100-SXM-80GB"), Workload(seq_len=256, global_batch_size=16)
    whole, halves = (
        [
            estimate(spec, cluster, workload, Layout(dp_shard=8 // tp, tp=tp, zero_stage=3)).memory_bytes
            for spec in llamas
        ]
        for tp in (1, 4)
    )
    ratios = [half.activations / one.activations for half, one in zip(halves, whole, strict=True)]
    assert ratios[0] == pytest.approx(ratios[1], rel=0.35)
    assert ratios[0] < 0.5


def test_heads_that_tp_does_not_divide_and_models_without_a_plan_are_refused(
    llamas: tuple[ModelSpec, ModelSpec],
) -> None:
    cluster, workload = ClusterSpec.parse("8xH100-SXM-80GB"), Workload(seq_len=256, global_batch_size=16)
    with pytest.raises(ConfigError, match="tp 8 does not divide 4: heads or widths"):
        estimate(llamas[0], cluster, workload, Layout(tp=8))
    bloom = trace_model(build_model(content("bloom")), seq_len=256, name="bloom")
    with pytest.raises(ConfigError, match="BloomForCausalLM has no base_model_tp_plan"):
        estimate(bloom, cluster, workload, Layout(dp_shard=4, tp=2))
    mixed = trace_model(build_model(content("lfm2")), seq_len=32, name="lfm2")
    assert mixed.code is not None
    assert "lfm2" in (mixed.code.not_split + mixed.code.not_along_sequence).lower()


def test_recurrence_in_python_is_refused_and_leaves_no_mode_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "MAX_CALLS", 500)
    tiny = content("falcon_mamba") | {"state_size": 4}
    with pytest.raises(ConfigError, match=r"FalconMambaForCausalLM .* a recurrence token by token"):
        trace_model(build_model(tiny), seq_len=64, name="mamba")
    assert torch.is_grad_enabled()
    monkeypatch.undo()
    assert trace_model(build_model(tiny), seq_len=8, name="mamba").num_blocks == 2


def test_settings_that_name_code_are_not_read() -> None:
    named = {
        "auto_map": {"AutoConfig": "evil.Config"}, "attn_implementation": "evil/kernels", "_attn_implementation": "evil/kernels",
        "experts_implementation": "evil/kernels",
    }  # fmt: skip
    parts = _without_code(content("helium") | named | {"parts": [{"text_config": {"a": 1, **named}}]})
    assert "evil" not in str(parts) and parts["parts"] == [{"text_config": {"a": 1}}]
    assert build_model(content("helium") | named).config._attn_implementation in ("sdpa", "eager")
