"""Whatever a file holds, its reader gives a value or one of our errors (for minutes, guided by coverage: tests/fuzz/readers.py).

Each of the small documents below once ended in a traceback, in minutes of work or in all of the memory.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from meshwright.engines.launch.settings import from_table
from meshwright.engines.launch.torchtitan import settings_of
from meshwright.engines.tables import parse_table
from meshwright.planner.expert_files import read_placement
from meshwright.runtime.tokenizer import open_tokenizer
from meshwright.schema import ConfigError, MeshwrightError
from meshwright.schema.base import read_text, shown
from meshwright.validation.noted import listed_fractions
from mutations import mutated
from plans import tiny_model
from targets import (
    LLAMA,
    MOE,
    TARGETS,
    TOKENIZER,
    attempt,
    index_of,
    npy,
    npz,
    pt,
    safetensors,
    small_plans,
    small_profile,
)

EXAMPLES = 8
"""Of each reader; the fuzzer has as many a second."""


@pytest.mark.parametrize("name", TARGETS)
def test_valid_documents_are_read(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    documents = target.documents()
    assert documents
    for data in documents:
        assert attempt(target, data, tmp_path) is None


@pytest.mark.parametrize("name", TARGETS)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(seed=st.integers(0, 2**32))
def test_any_mutation_is_a_value_or_one_of_our_errors(name: str, seed: int, tmp_path: Path) -> None:
    target, random = TARGETS[name], Random(seed)
    documents = target.documents()
    error = attempt(target, mutated(random.choice(documents), target.form, documents, random), tmp_path)
    assert error is None or (error.message and error.exit_code in (1, 2))


# --- documents that once were more than their readers could take --------------------------------------------------


class Runs:
    """Pickled, it makes a folder when it is read by somebody who trusts it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def model_of_runs(count: int) -> bytes:
    """A model of as many runs of as many blocks."""
    tree = json.loads(tiny_model().model_dump_json())
    tree["layers"][1:2] = [{**tree["layers"][1], "count": count}] * count
    return json.dumps(tree).encode()


def plan_with(**changes: Any) -> bytes:
    return json.dumps({**json.loads(small_plans()[1].model_dump_json()), **changes}).encode()


def profile_with(**changes: Any) -> bytes:
    return json.dumps({**json.loads(small_profile().model_dump_json()), **changes}).encode()


def tokenizer_with(**changes: Any) -> bytes:
    return json.dumps({**TOKENIZER, **changes}).encode()


def archive_of(name: str) -> bytes:
    """An archive whose only member unpacks to 4 MiB of zeros."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, bytes(2**22))
    return out.getvalue()


def huge_npy() -> bytes:
    """The header of an array of 2^50 numbers and none of them."""
    return npy(np.zeros(3)).replace(b"(3,), }" + b" " * 15, b"(1125899906842624,), }")


def doubling_calls(depth: int) -> bytes:
    """A script of functions each of which calls the next one twice."""
    return b"".join(b"f%d() { f%d; f%d; }\n" % (n, n + 1, n + 1) for n in range(depth)) + b"f%d() { :; }\nf0\n" % depth


LAUGHS = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 9)}]}}\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)
)
DOUBLED = {"type": "Replace", "pattern": {"String": "o"}, "content": "oo"}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
NESTED = "[" * 400 + "]" * 400
RUNS = b"id,gpu_type,n_gpus,model,seq_len,global_batch,micro_batch,dp,tp,pp,iter_time_s,vpp\n"

REFUSED: list[tuple[str, bytes]] = [
    ("config", b'{"self": 1}'),
    ("config", json.dumps({**LLAMA, "self": 1, "hidden_size": 10**400}).encode()),
    ("config", json.dumps({**LLAMA, "num_hidden_layers": 10**9}).encode()),
    ("config", json.dumps({**MOE, "num_experts": 10**6}).encode()),
    ("config", model_of_runs(1000)),
    ("plan", plan_with(self=1)),
    ("plan", plan_with(stages=[{"first_layer_idx": 0, "num_layers": 10**12}])),
    ("plan", plan_with(stages=[{"first_layer_idx": 0, "num_layers": 6, "layer_offload": [json.loads(NESTED)]}])),
    ("plan", plan_with(rank_map=[10**400, 1])),
    ("plan", plan_with(notes=json.loads(NESTED))),
    ("profile", profile_with(self=1)),
    ("profile", profile_with(duration_s=5e-324)),
    ("profile", profile_with(device_memory_bytes=10**300)),
    ("cluster", b"name = 0x" + b"f" * 6000),
    ("cluster", b"a" + b".a" * 100_000 + b" = 1\n"),
    ("engine-toml", b'"a"' + b' . "a"' * 100_000 + b" = 1\n"),
    ("engine-yaml", b"num_processes: 1" + b":1" * 200_000),
    ("cluster", b'groups = [{ device = "A100-SXM-80GB", num_nodes = 0x' + b"f" * 6000 + b" }]"),
    ("offers", b'[[offers]]\ndevice = "L40S"\nnum_nodes = 1\nprice_per_device_hour = 0x' + b"f" * 6000),
    ("metrics", b"[" * 100_000),
    ("metrics", b'{"measured": {"parts_s": {"compute": 1}}, "predicted": 3}'),
    ("metrics", b'{"measured": {"parts_s": {"x": 1}, "step_time_s": 1, "peak_reserved_bytes": 1}, "predicted": {}}'),
    ("metrics", b'{"measured": {"parts_s": {"compute": NaN}}, "predicted": {}}'),
    ("schedule", "۳F1".encode()),
    ("schedule", b"9" * 5000 + b"F1"),
    ("schedule", b"0F0," * 3 + b'"' + b"x" * 200_000),
    ("runs", RUNS + b"a,A100,1e300,GPT,1,1,1,1,1,1,1,\n"),
    ("runs", RUNS + b"a,A100,1,GPT,1,1,1,1,1,1,1," + b"9" * 5000),
    ("loads-npy", huge_npy()),
    ("loads-npy", npy(np.array([{}], dtype=object), allow_pickle=True)),
    ("loads-npz", npz(routed_experts=np.full((1, 1, 1), 10**12))),
    ("loads-npz", npz(routed_experts=np.full((1, 1, 1), 2**63, dtype=np.uint64))),
    ("loads-csv", b"layer,expert,load\n999999,999999,1\n"),
    ("loads-csv", b"layer,expert,load\nnan,0,1\n"),
    ("loads-json", b'{"routed_experts": [[[1000000000000]]]}'),
    ("loads-json", NESTED.encode()),
    ("loads-jsonl", b'{"routed_experts": 3}'),
    ("loads-jsonl", b'{"routed_experts": ' + b"9" * 5000 + b"}"),
    ("loads-pt", pt(torch.zeros(1).expand(2**20, 2**20))),
    ("loads-pt", pt({"load": torch.zeros(2, 2).to_sparse()})),
    ("loads-pt", pt(torch.zeros(2, 2, dtype=torch.complex64))),
    ("placement-json", b'{"physical_to_logical_map": [[0, 1000000000000]]}'),
    ("placement-yaml", b"x:\n  0: [0, 99999999999999999999999]\n"),
    ("placement-yaml", b"\n" * 100_000 + b"  0: ["),
    ("placement-yaml", b"x:\n  0: [0 1]\n"),
    ("tokens-npy", huge_npy()),
    ("tokenizer", tokenizer_with(pre_tokenizer={"type": "FixedLength", "length": 0})),
    ("tokenizer", tokenizer_with(model={"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]]})),
    ("tokenizer", tokenizer_with(normalizer={"type": "Sequence", "normalizers": [DOUBLED] * 30})),
    ("tokenizer", tokenizer_with(pre_tokenizer={"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 30})),
    ("weights", safetensors({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}})),
    ("weights-index", b'{"weight_map": {"a": "\\u0000.safetensors"}}'),
    ("checkpoint-index", b"\x80\x04\x96" + (2**40).to_bytes(8, "little") + b"."),
    ("checkpoint-index", index_of(storage_data=3)),
    ("engine-yaml", LAUGHS.encode()),
    ("engine-yaml", MERGES.encode()),
    ("engine-yaml", b"distributed_type: FSDP\nnum_processes: 0x" + b"f" * 6000),
    ("engine-yaml", b"distributed_type: FSDP\nnum_processes: &a [*a]"),
    ("engine-yaml", b"x: !!timestamp [1]"),
    ("engine-py", b"config.a.b = {[]: 1}"),
    ("engine-py", b"config.a.b = " + b"(" * 150 + b"1" + b")" * 150),
    ("engine-py", b"config.a.b = " + b"-" * 3000 + b"1"),
    ("engine-json", b'{"zero_optimization": {"stage": [3]}}'),
    ("engine-py", b"config.a.b = 1\n0x" + b"f" * 6000),
    ("engine-yaml", b"distributed_type: FSDP\n? 0x" + b"f" * 6000 + b"\n: 1"),
    ("launch-script", b"#SBATCH --nodes=" + b"9" * 5000),
    ("launch-script", b"A=$((0x" + b"f" * 6000 + b"))"),
    ("launch-script", b"A=(1)\nB=${A[\xc2\xb2]}${A[" + b"9" * 5000 + b"]}"),
    ("launch-script", b"source " + b"a" * 5000),
    ("launch-script", b"torchrun pretrain_gpt.py --deepspeed_config " + b"a" * 400),
    ("launch-script", doubling_calls(30)),
]  # fmt: skip


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("name", "data"), REFUSED, ids=lambda v: v if isinstance(v, str) else repr(v[:30])[2:-1])
def test_refused_with_a_short_message(name: str, data: bytes, tmp_path: Path) -> None:
    target = TARGETS[name]
    path = tmp_path / f"document{target.suffix}"
    error = attempt(target, data, tmp_path)
    if error is None:  # some readers do several things with a document, each of which refuses it
        assert name.startswith(("engine-", "launch-", "placement-")), name
        return
    assert isinstance(error, MeshwrightError) and error.exit_code == 2
    assert max(len(line) for line in str(error).replace(str(path), "").splitlines()) < 600


@pytest.mark.parametrize(
    ("name", "document"),
    [
        ("loads-pt", lambda runs: pickle.dumps(runs)),
        ("loads-pt", lambda runs: pt({"load": runs})),
        ("loads-npy", lambda runs: npy(np.array([runs], dtype=object), allow_pickle=True)),
        ("loads-npz", lambda runs: npz(load=np.array([runs], dtype=object))),
        ("tokens-npy", lambda runs: npy(np.array([runs], dtype=object), allow_pickle=True)),
        ("checkpoint-index", lambda runs: pickle.dumps(runs)),
        ("checkpoint-index", lambda runs: index_of(planner_data=runs)),
        ("engine-yaml", lambda runs: f"a: !!python/object/apply:os.mkdir ['{runs.folder}']".encode()),
        ("engine-py", lambda runs: f"import os\nos.mkdir('{runs.folder}')\nconfig.a.b = os.mkdir('{runs.folder}')".encode()),
        ("engine-sh", lambda runs: f"$(mkdir {runs.folder}) --micro-batch-size $(mkdir {runs.folder})\n".encode()),
    ],
)  # fmt: skip
def test_nothing_that_is_read_runs_code(name: str, document: Callable[[Runs], bytes], tmp_path: Path) -> None:
    runs = Runs(tmp_path / "made")
    attempt(TARGETS[name], document(runs), tmp_path)
    assert not runs.folder.exists()


@pytest.mark.parametrize(("name", "member"), [("loads-npz", "load.npy"), ("loads-pt", "data.pkl"), ("trace", "x.npy")])
def test_archives_that_unpack_to_far_more_are_refused(name: str, member: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("meshwright.planner.expert_files.MAX_UNPACKED_BYTES", 2**20)
    error = attempt(TARGETS[name], archive_of(member), tmp_path)
    assert error is not None and "would unpack to" in error.message


def test_a_list_of_slots_may_go_on_in_further_lines(tmp_path: Path) -> None:
    (tmp_path / "wrapped.yaml").write_text(
        "num_slots: 4\ninitial_global_assignments:\n  0: [0, 1,\n    2, 3]\n  1: [3, 2, 1, 0]\n"
    )
    found = read_placement(tmp_path / "wrapped.yaml", num_gpus=2)
    assert found.physical_to_logical.tolist() == [[0, 1, 2, 3], [3, 2, 1, 0]]


def test_what_never_ends_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.schema.base.MAX_TEXT_BYTES", 2**20)
    with pytest.raises(ConfigError, match="more than 1 MiB"):
        read_text("/dev/zero")


def test_a_padding_that_a_tokenizer_names_is_not_made(tmp_path: Path) -> None:
    padding = {"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
               "pad_type_id": 0, "pad_token": "<eos>"}  # fmt: skip
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_with(padding=padding))
    assert open_tokenizer(tmp_path / "tokenizer.json").encode("ab a").ids == [3, 1]


def test_a_configuration_made_of_another_twice_is_read_once() -> None:
    twice = "".join(
        f"def f{n}():\n config = f{n + 1}()\n config = f{n + 1}()\n config.a.b{n} = {n}\n" for n in range(40)
    )
    settings = settings_of(f"{twice}def f40():\n config.a.c = 1\n")
    assert settings["a"]["c"] == 1 and settings["a"]["b0"] == 0


def test_a_long_hash_is_no_number() -> None:
    assert parse_table(".yaml", f"sha512: {'9a' * 64}") == {"sha512": "9a" * 64}


def test_places_of_many_keys_are_those_of_their_lines() -> None:
    names = [f"key-{n}" for n in range(20_000)]
    found = from_table(dict.fromkeys(names, 1), "".join(f"{name}: 1\n" for name in names), "x.yaml")
    assert [found.entries[name].place.line for name in names] == list(range(1, 20_001))


def test_line_ends_are_those_of_a_text_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"a\r\nb\rc\n")
    assert read_text(tmp_path / "x") == "a\nb\nc\n"


@pytest.mark.parametrize(
    "value",
    [10**5000, [10**5000], "x" * 10**6, [[[[[[1]]]]]] * 9, json.loads(NESTED), float("nan"), None],
    ids=["digits", "digits in a list", "text", "lists", "nested", "nan", "none"],
)
def test_any_value_is_shown_in_a_few_words(value: Any) -> None:
    assert 0 < len(shown(value)) <= 60


def test_a_list_that_never_closes_takes_no_time() -> None:
    assert listed_fractions("[" + "1" * 100_000) == ()
    assert listed_fractions("[0.5, 0.25 1,]") == (0.5, 0.25, 1.0)
    assert listed_fractions("[.5]") == ()
