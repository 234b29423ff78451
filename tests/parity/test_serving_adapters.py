"""Adapters of requests: tokens are those of a model into which the adapter was merged, whatever else is in the step."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from meshwright.runtime.serving.adapters import read_adapter
from meshwright.runtime.serving.deployment import open_engine
from meshwright.runtime.serving.engine import ServingEngine
from meshwright.runtime.serving.requests import Request
from meshwright.schema.errors import ConfigError
from meshwright.schema.serving import ServingLayout
from safetensors.torch import save_file
from serving_models import answers, generated, make_pool, make_prompts, save_model

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
COUNT = 8


def save_adapter(model: Any, folder: Path, *, seed: int, rank: int, targets: tuple[str, ...], **config: Any) -> Any:
    """Write an adapter as peft does; return the model with it merged in."""
    torch.manual_seed(seed)
    merged, tensors = copy.deepcopy(model), {}
    with torch.no_grad():
        for name, linear in merged.named_modules():
            if name.rpartition(".")[2] in targets:
                down, up = torch.randn(rank, linear.in_features), torch.randn(linear.out_features, rank)
                tensors[f"base_model.model.{name}.lora_A.weight"] = 0.1 * down
                tensors[f"base_model.model.{name}.lora_B.weight"] = up
                linear.weight += 2.0 * 0.1 * up @ down
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**fields, **config}))
    return merged


@pytest.fixture
def case(tmp_path: Path) -> tuple[Path, dict[str, Path], list[Request], list[list[int]]]:
    """A model's folder, adapters of unlike ranks and targets, requests that mix them, and what merged models generate."""
    model = save_model("Llama", tmp_path)
    folders = {"all": tmp_path / "all", "queries": tmp_path / "queries"}
    models = {
        None: model,
        "all": save_adapter(model, folders["all"], seed=3, rank=4, targets=TARGETS),
        "queries": save_adapter(model, folders["queries"], seed=4, rank=2, targets=("q_proj", "down_proj")),
    }
    prompts = make_prompts((5, 17, 9, 12, 17, 3))
    prompts[4] = prompts[1]  # the same tokens under another adapter have another cache
    names = (None, "all", "queries", "all", "queries", None)
    requests = [Request(prompt=p, max_tokens=COUNT, adapter=n) for p, n in zip(prompts, names, strict=True)]
    told = [generated(models[name], [prompt], COUNT)[0] for prompt, name in zip(prompts, names, strict=True)]
    assert told[1] != told[4]
    return tmp_path, folders, requests, told


def test_requests_of_several_adapters_share_steps(case: Any) -> None:
    folder, adapters, requests, told = case
    engine = ServingEngine.build(folder, make_pool(max_batch=6, max_batched_tokens=24), adapters=adapters)
    assert answers(engine, requests) == told
    assert max(record.running for record in engine.stats().records) > 3
    assert answers(engine, requests) == told  # from the prefixes that are cached now
    with pytest.raises(ConfigError, match="no adapter french"):
        engine.submit(Request(prompt=(1,), max_tokens=1, adapter="french"))


@pytest.mark.long
@pytest.mark.parametrize("layout", [ServingLayout(tp=2), ServingLayout(pp=2)], ids=["tp", "pp"])
def test_ranks_have_their_part_of_an_adapter(case: Any, layout: ServingLayout) -> None:
    folder, adapters, requests, told = case
    with open_engine(folder, make_pool(layout=layout), adapters=adapters) as engine:
        assert answers(engine, requests) == told


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias=all"),
        ({"peft_type": "IA3"}, "not of LoRA"),
        ({"r": 3}, "no A and B of rank 3"),
    ],
)
def test_what_is_more_than_a_low_rank_adapter_is_refused(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    model = save_model("Llama", tmp_path)
    save_adapter(model, tmp_path / "a", seed=1, rank=2, targets=("q_proj",), **config)
    with pytest.raises(ConfigError, match=said):
        read_adapter(tmp_path / "a")


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    save_model("Llama", tmp_path)
    (tmp_path / "other").mkdir()
    other = save_model("Qwen3", tmp_path / "other")
    save_adapter(other, tmp_path / "a", seed=1, rank=2, targets=("o_proj", "embed_tokens_"))
    tensors = {
        f"base_model.model.model.layers.0.self_attn.q_proj.lora_{kind}.weight": torch.zeros(shape)
        for kind, shape in (("A", (2, 32)), ("B", (64, 2)))
    }
    save_file(tensors, tmp_path / "a" / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="32 inputs and 64 outputs"):
        ServingEngine.build(tmp_path, make_pool(), adapters={"a": tmp_path / "a"})
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(ConfigError, match="cannot be read"):
        ServingEngine.build(tmp_path, make_pool(), adapters={"a": tmp_path / "a"})
    with pytest.raises(ConfigError, match="nowhere"):
        ServingEngine.build(tmp_path, make_pool(), adapters={"a": tmp_path / "nowhere"})
