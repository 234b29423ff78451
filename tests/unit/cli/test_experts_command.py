"""`meshwright experts`: every format in and out, and bad input that leaves nothing behind."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from meshwright.cli.main import app
from meshwright.planner.expert_files import read_loads, read_placement, read_trace
from typer.testing import CliRunner

SHARED = Path(__file__).parents[3].parent / "shared" / "data" / "experts"
LOAD = np.random.default_rng(0).integers(1, 100, (2, 16)).astype(float)
PLACE = ["--num-gpus", "4", "--num-slots", "24"]


def run(*args: str | Path):
    return CliRunner().invoke(app, ["experts", *map(str, args)])


def written(folder: Path) -> Path:
    np.savez(folder / "load.npz", load=LOAD)
    return folder / "load.npz"


@pytest.mark.parametrize("form", ["npz", "sglang", "vllm", "vllm-ascend", "tensorrt-llm"])
def test_every_format_comes_back_as_it_was(tmp_path: Path, form: str) -> None:
    out = tmp_path / ("p.npz" if form == "npz" else "p.yaml" if form == "tensorrt-llm" else "p.json")
    result = run("place", written(tmp_path), *PLACE, "--json", "--out", out, "--to", form)
    assert result.exit_code == 0, result.output
    placed = json.loads(result.stdout)["physical_to_logical"]
    assert read_placement(out, num_gpus=4).physical_to_logical.tolist() == placed
    again = run("convert", out, "--to", "npz", "--out", tmp_path / "again.npz", "--num-gpus", "4")
    assert again.exit_code == 0, again.output
    assert read_placement(tmp_path / "again.npz").physical_to_logical.tolist() == placed


def test_table_has_a_row_with_bound_and_gap_for_every_layer(tmp_path: Path) -> None:
    result = run("place", written(tmp_path), *PLACE, "--plot", tmp_path / "heat.svg")
    assert result.exit_code == 0, result.output
    for word in ("lower bound", "gap", "mean"):
        assert word in result.stdout
    assert (tmp_path / "heat.svg").read_text().count("<rect") == 2 * 2 * 4


def test_a_placement_is_evaluated_and_followed_up(tmp_path: Path) -> None:
    assert run("place", written(tmp_path), *PLACE, "--out", tmp_path / "p.npz").exit_code == 0
    np.save(tmp_path / "drifted.npy", LOAD * np.random.default_rng(1).lognormal(0, 0.2, LOAD.shape))
    result = run("evaluate", tmp_path / "p.npz", tmp_path / "drifted.npy", "--json")
    before = json.loads(result.stdout)["balance"][0]
    follow = ("--previous", tmp_path / "p.npz", "--move-budget", "4", "--json")
    after = json.loads(run("place", tmp_path / "drifted.npy", *PLACE, *follow).stdout)
    assert max(after["moves"]) <= 4
    assert all(new <= old + 1e-9 for new, old in zip(after["balance"], before, strict=True))


def test_a_synthetic_trace_is_placed_near(tmp_path: Path) -> None:
    trace = tmp_path / "trace.npz"
    made = run("synth", "--out", trace, "--num-layers", 1, "--num-experts", 16, "--num-tokens", 500, "--top-k", 4)
    assert made.exit_code == 0, made.output
    near = ("--num-nodes", "2", "--objective", "traffic", "--out", tmp_path / "p.npz")
    assert run("place", "--trace", trace, "--num-gpus", "4", "--num-slots", "20", *near).exit_code == 0
    result = json.loads(run("evaluate", tmp_path / "p.npz", "--trace", trace, "--json").stdout)
    assert result["trace"]["visits_per_token"][0] <= 2


def test_bench_compares_on_given_loads(tmp_path: Path) -> None:
    row = json.loads(run("bench", written(tmp_path), "--num-gpus", 4, "--json").stdout)[0]
    assert 1 <= row["mean"] <= row["eplb_mean"]


def test_loads_of_every_kind_of_file_are_the_same(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    np.save(tmp_path / "a.npy", LOAD)
    np.savetxt(tmp_path / "b.csv", LOAD, delimiter=",")
    (tmp_path / "c.json").write_text(json.dumps({"logical_count": LOAD.tolist(), "rank": 0}))
    torch.save({"logical_count": torch.tensor(LOAD)[None], "rank": 0}, tmp_path / "d.pt")
    torch.save(torch.tensor(LOAD), tmp_path / "e.pt")
    long = ["layer,expert,load"] + [f"{i},{e},{LOAD[i, e]}" for i, e in np.ndindex(LOAD.shape)]
    (tmp_path / "f.csv").write_text("\n".join(long))
    for name in ("a.npy", "b.csv", "c.json", "d.pt", "e.pt", "f.csv"):
        assert np.array_equal(read_loads([tmp_path / name])[0], LOAD), name
    steps = np.stack([LOAD, LOAD])
    np.save(tmp_path / "g.npy", steps)
    assert np.array_equal(read_loads([tmp_path / "g.npy"])[0], 2 * LOAD)
    assert read_loads([tmp_path / "a.npy", tmp_path / "b.csv"]).shape == (2, 2, 16)


def test_routed_expert_logs_are_traces_and_loads(tmp_path: Path) -> None:
    requests = [{"routed_experts": [[[0, 1], [2, 3]]]}, {"routed_experts": [[[0, 2], [2, 1]], [[3, 0], [0, 1]]]}]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, requests)))
    assert read_trace(tmp_path / "log.jsonl").shape == (3, 2, 2)
    assert read_loads([tmp_path / "log.jsonl"])[0].tolist() == [[3, 1, 1, 1], [1, 2, 2, 1]]


class Harmful:
    def __reduce__(self) -> tuple:
        return os.mkdir, ("harm",)


def bad_files(folder: Path) -> dict[str, tuple[Path, str]]:
    """Name -> (file, what the message must say)."""
    torch = pytest.importorskip("torch")
    files = {}

    def add(name: str, said: str) -> Path:
        files[name] = (folder / name, said)
        return folder / name

    np.save(add("negative.npy", "negative"), -LOAD)
    np.save(add("nan.npy", "nan"), LOAD * np.nan)
    np.save(add("empty_layer.npy", "no load at all"), LOAD * [[1], [0]])
    np.save(add("objects.npy", "refused"), np.array([Harmful()], dtype=object), allow_pickle=True)
    (add("harm.pt", "refused")).write_bytes(pickle.dumps(Harmful()))
    torch.save({"logical_count": Harmful()}, add("harm2.pt", "refused"))
    add("cut.npz", "not a usable numpy file").write_bytes(written(folder).read_bytes()[:100])
    add("cut.npy", "not a usable numpy file").write_bytes(b"\x93NUMPY\x01\x00")
    add("cut.pt", "not a usable torch file").write_bytes(b"PK\x03\x04 broken")
    add("cut.json", "not valid json").write_text('{"logical_count": [[1, 2')
    add("text.json", "not an array of numbers").write_text('[["a", "b"]]')
    add("ragged.json", "rectangular").write_text("[[1, 2], [3]]")
    add("words.csv", "not a table").write_text("1,2\n3,x\n")
    add("empty.csv", "shape").write_text("")
    add("line.jsonl", "no routed_experts").write_text("{}\n")
    add("load.txt", "comes as").write_text("1")
    files["missing.npy"] = (folder / "missing.npy", "no such file")
    return files


def test_bad_files_are_refused_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = bad_files(tmp_path)
    before = sorted(tmp_path.iterdir())
    for name, (path, said) in files.items():
        result = run("place", path, *PLACE, "--out", tmp_path / "out.npz")
        assert result.exit_code == 2, (name, result.output)
        assert said in result.stderr.lower(), (name, result.stderr)
        assert "Traceback" not in result.output
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--num-gpus", "4", "--num-slots", "10"], "10 slots for 16 experts"),
        (["--num-gpus", "4", "--num-slots", "68"], "more replicas than gpus"),
        (["--num-gpus", "4", "--num-slots", "24", "--num-nodes", "2", "--num-groups", "3"], "3 groups"),
        (["--num-gpus", "4", "--num-slots", "24", "--plot", "heat.png"], ".svg"),
        (["--num-gpus", "4", "--num-slots", "24", "--objective", "traffic"], "need a trace"),
        (["--num-gpus", "4", "--num-slots", "24", "--key", "other"], "no array named"),
    ],
)
def test_what_cannot_be_placed_is_refused(tmp_path: Path, args: list[str], said: str) -> None:
    result = run("place", written(tmp_path), *args, "--out", tmp_path / "out.npz")
    assert result.exit_code == 2, result.output
    assert said in result.stderr.lower()
    assert not (tmp_path / "out.npz").exists()


@pytest.mark.skipif(not SHARED.exists(), reason="needs the shared data")
def test_real_workloads_are_served_together(tmp_path: Path) -> None:
    keys = ",".join(f"olmoe_expert_counts_{name}" for name in ("arxiv", "book", "c4", "github", "tulu", "wikipedia"))
    stats = SHARED / "olmoe" / "olmoe_routing_stats.npz"
    result = run("place", stats, "--key", keys, "--num-gpus", 8, "--num-slots", 72, "--json")
    assert np.mean(json.loads(result.stdout)["balance"]) <= 1.07


@pytest.mark.skipif(not SHARED.exists(), reason="needs the shared data")
def test_published_patterns_are_read() -> None:
    placement = read_placement(SHARED / "omni_placement" / "DSV3_baseline_16_devices_58_MoE_Layers.npz")
    assert placement.physical_to_logical.shape == (58, 256)
    assert placement.num_gpus == 16
