"""What files of weights are refused for, what they may hold besides, and how much memory reading them takes."""

from __future__ import annotations

import ctypes
import json
import resource
import signal
import sys
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from meshwright.runtime import Decoder, parallelize, save_weights
from meshwright.runtime.models.decoder import init_weights
from meshwright.runtime.training.memory import MemoryMeter
from meshwright.runtime.weights.load import (
    INDEX_FILE,
    SINGLE_FILE,
    check_weights,
    load_weights,
    pieces_of,
    pieces_of_model,
)
from meshwright.runtime.weights.save import check_weights_target
from meshwright.schema import ConfigError, Layout, MeshwrightError, ModelSpec, Workload
from meshwright.schema.hf_export import hf_config
from meshwright.schema.units import MIB
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[2] / "parity"))
from plans import gpt2_model, make_plan, tiny_model

SPEC = tiny_model(num_blocks=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Weights of the tiny model in one file."""
    decoder = Decoder(SPEC)
    init_weights(decoder, 0)
    save_file(dict(decoder.state_dict()), tmp_path / SINGLE_FILE)
    return tmp_path


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) drop tensors; dots are written as double underscores."""
    tensors = load_file(folder / SINGLE_FILE)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, folder / SINGLE_FILE)


def refused(folder: Path, match: str, spec: ModelSpec = SPEC) -> ConfigError:
    with pytest.raises(ConfigError, match=match) as caught:
        check_weights(spec, folder)
    assert caught.value.exit_code == 2
    return caught.value


def test_whole_files_are_taken_in_any_type_of_float(folder: Path) -> None:
    rewrite(folder, model__norm__weight=torch.full((32,), 2.0, dtype=torch.bfloat16))
    decoder = Decoder(SPEC)
    load_weights(decoder, SPEC, folder)
    assert decoder.model.norm.weight.dtype == torch.float32
    assert decoder.model.norm.weight.eq(2.0).all()


def test_missing_tensor_is_refused(folder: Path) -> None:
    rewrite(folder, model__norm__weight=None)
    assert refused(folder, "lacks 1 tensors of tiny").details == ("model.norm.weight",)


def test_other_shape_is_refused(folder: Path) -> None:
    rewrite(folder, model__norm__weight=torch.zeros(33))
    assert refused(folder, "1 tensors of another shape").details == ("model.norm.weight is [33], the model's [32]",)


def test_quantized_tensor_is_refused(folder: Path) -> None:
    rewrite(folder, lm_head__weight=torch.zeros(97, 32, dtype=torch.int8))
    assert refused(folder, "a type that cannot be trained").details == ("lm_head.weight is I8",)


def test_unknown_tensor_is_refused(folder: Path) -> None:
    rewrite(folder, model__layers__0__self_attn__q_proj__bias=torch.zeros(32))
    refused(folder, "holds 1 tensors that tiny does not have")


def test_tables_and_further_layers_may_be_left(folder: Path) -> None:
    rewrite(
        folder,
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(4),
        model__layers__2__eh_proj__weight=torch.zeros(4, 4),
    )
    check_weights(SPEC, folder)


@pytest.mark.parametrize("length", [0, 5, 40, -1], ids=["empty", "no header", "half a header", "last byte"])
def test_truncated_file_is_refused(folder: Path, length: int) -> None:
    path = folder / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:length])
    refused(folder, f"cannot read {path}")


def test_other_formats_and_nothing_are_refused(tmp_path: Path) -> None:
    refused(tmp_path / "none", "no such folder")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    assert "may run code" in (refused(tmp_path, "holds neither").help or "")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("{", "is not valid JSON"),
        ('{"weight_map": []}', "no weight_map"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "no file of its folder"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "cannot read"),
        ('{"weight_map": {"a": "model.safetensors"}}', "names tensors that its files do not hold"),
    ],
)
def test_wrong_index_is_refused(folder: Path, content: str, match: str) -> None:
    (folder / INDEX_FILE).write_text(content)
    refused(folder, match)


def test_other_settings_are_refused_with_the_field(folder: Path) -> None:
    config = hf_config(SPEC)
    (folder / "config.json").write_text(json.dumps(config))
    check_weights(SPEC, folder)
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert refused(folder, "describes another model").details == ("norm_eps: 0.001 there, 1e-05 in the plan",)


def test_gpt2_without_prefix_and_with_masks_is_taken(tmp_path: Path) -> None:
    spec, decoder = gpt2_model(), Decoder(gpt2_model())
    stored: dict[str, torch.Tensor] = {"h.0.attn.bias": torch.ones(1, 1, 24, 24)}
    for piece in pieces_of_model(spec):
        stored[piece.name.removeprefix("transformer.")] = torch.rand(piece.shape)
    save_file(stored, tmp_path / SINGLE_FILE)
    load_weights(decoder, spec, tmp_path)
    fused = stored["h.1.attn.c_attn.weight"]
    assert torch.equal(decoder.model.layers["1"].self_attn.k_proj.weight, fused[:, 32:64].T)
    assert torch.equal(decoder.model.layers["2"].mlp.up_proj.bias, stored["h.2.mlp.c_fc.bias"])


def test_target_that_holds_something_is_refused(tmp_path: Path) -> None:
    check_weights_target(SPEC, tmp_path / "new" / "weights")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="already exists"):
        check_weights_target(SPEC, tmp_path)
    with pytest.raises(ConfigError, match="cannot write weights"):
        check_weights_target(SPEC, tmp_path / "file" / "weights")


def test_target_without_space_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="are free"):
        check_weights_target(ModelSpec.named("llama-3.1-405b"), tmp_path / "weights")


def test_reading_takes_no_memory_for_more_than_a_tensor(tmp_path: Path) -> None:
    """Below one file and one tensor, not the model."""
    spec = tiny_model(num_blocks=12, hidden_dim=256, head_dim=64, ffn_dim=1024, vocab_size=4096)
    decoder, shapes = Decoder(spec), {piece.name: piece.shape for piece in pieces_of_model(spec)}
    files = {name: f"model-{idx // 6:05d}.safetensors" for idx, name in enumerate(shapes)}
    for file in set(files.values()):
        save_file({name: torch.rand(shapes[name]) for name in shapes if files[name] == file}, tmp_path / file)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": files}))
    load_weights(decoder, spec, tmp_path)  # what is imported and looked up once
    ctypes.CDLL(None).malloc_trim(
        0
    )  # what tests before this one have left to the allocator would be taken without growth
    meter = MemoryMeter(torch.device("cpu"))
    load_weights(decoder, spec, tmp_path)
    largest_file = max(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    largest = 4 * max(prod(shape) for shape in shapes.values())
    bound = largest_file + largest + 4 * MIB
    assert meter.peak_allocated_bytes() < bound < spec.num_params * 4 / 3
    copies = [tensor.clone() for path in tmp_path.glob("*.safetensors") for tensor in load_file(path).values()]
    assert sum(tensor.sum().item() for tensor in copies) > 0
    assert meter.peak_allocated_bytes() > bound  # what reading all of it takes


def test_a_rank_reads_the_rows_and_columns_it_holds() -> None:
    fused = pieces_of("model.layers.0.self_attn.v_proj.weight", (32, 32), gpt2_model())[0]
    assert fused.place((slice(8, 16), slice(0, 32))) == (slice(0, 32), slice(72, 80))
    mixtral = ModelSpec.named("mixtral-8x7b")
    second = pieces_of("model.layers.3.mlp.experts.down_proj", (8, 4096, 14336), mixtral)[1]
    assert second.name == "model.layers.3.block_sparse_moe.experts.1.w2.weight"
    assert second.place((slice(0, 2), slice(0, 4096), slice(512, 1024))) == (slice(0, 4096), slice(512, 1024))
    assert second.place((slice(2, 4), slice(0, 4096), slice(0, 14336))) is None


def test_disk_that_fills_is_reported_and_nothing_stays(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        workload = Workload(seq_len=16, global_batch_size=4, precision="fp32")
        plan = make_plan(SPEC, Layout(micro_batch_size=4), workload=workload)
        model = parallelize(None, plan, device=torch.device("cpu"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        with pytest.raises(MeshwrightError, match="cannot save the weights") as caught:
            save_weights(model, tmp_path / "out" / "weights")
        assert caught.value.details == ("rank 0: File too large",)
        assert list((tmp_path / "out").iterdir()) == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
        dist.destroy_process_group()
