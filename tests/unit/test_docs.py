"""The documents name functions that exist."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from meshwright.planner import plan
from meshwright.schema import ClusterSpec, ModelSpec, Profile, Workload
from meshwright.schema.offers import offers_from_file

ROOT = Path(__file__).resolve().parents[2]

FOLDERS = ("schema", "profilers", "cost_models", "solvers", "planner", "engines", "runtime", "cli")
MODULES = {
    path.stem: path.relative_to(ROOT)
    for folder in ("cost_models", "solvers")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def names(document: str) -> list[str]:
    """Backticked dotted names whose first part is a folder or a module of the cost models or solvers."""
    text = (ROOT / document).read_text()
    found = re.findall(r"`([a-z_]+(?:\.[A-Za-z_]+)+)`", text)
    return sorted(
        {name for name in found if name.split(".")[0] in (*FOLDERS, *MODULES) and not name.endswith((".py", ".toml"))}
    )


@pytest.mark.parametrize("name", names("docs/method.md"))
def test_name_in_method_exists(name: str) -> None:
    parts = name.split(".")
    if parts[0] in MODULES:
        parts = [*MODULES[parts[0]].with_suffix("").parts, *parts[1:]]
    for length in range(len(parts), 0, -1):
        try:
            target = importlib.import_module(".".join(("meshwright", *parts[:length])))
        except ModuleNotFoundError:
            continue
        for attribute in parts[length:]:
            target = getattr(target, attribute)
        return
    pytest.fail(f"nothing of {name} can be imported")


@pytest.mark.parametrize(
    "document",
    ["README.md", *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/**/*.md")) if path.stem != "log")],
)
def test_files_named_in_documents_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    paths = re.findall(
        r"`((?:schema|profilers|cost_models|solvers|planner|runtime|cli|docs|benchmarks)/[\w./]*)`", text
    )
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing


@pytest.mark.long
def test_commands_of_the_page_on_profiles_run(tmp_path: Path) -> None:
    (block,) = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/profile.md").read_text(), flags=re.DOTALL)
    for line in block.splitlines():
        command = [sys.executable, "-m", "meshwright.cli", *shlex.split(line)[1:]]
        answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240)
        assert answer.returncode == 0, answer.stderr
    profile = Profile.load(tmp_path / "profile.json")
    assert profile.matmuls and not profile.is_altered
    assert {part.name for part in profile.parts} >= {"compute", "links", "storage"}


def cluster_files() -> list[str]:
    files = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/cluster.md").read_text(), flags=re.DOTALL)
    return [text for text in files if "[[groups]]" in text]


@pytest.mark.long
@pytest.mark.parametrize("text", cluster_files(), ids=lambda text: text.split('"')[1])
def test_cluster_files_of_the_document_are_read_and_planned_for(text: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    cluster = ClusterSpec.parse(str(path))
    workload = Workload(seq_len=2048, global_batch_size=4 * cluster.num_devices, engine="megatron")
    found = plan(
        ModelSpec.named("llama-3.2-1b"), cluster, workload, fixed={"recompute": "none", "cp": 1, "micro_batch_size": 1}
    )
    assert found.estimate.fits
    assert sorted(found.rank_map) == list(range(found.cluster.num_devices))
    assert found.cluster.num_devices + sum(pool.num_devices for pool in found.left_out) == cluster.num_devices


def test_offers_of_the_document_are_read(tmp_path: Path) -> None:
    (tmp_path / "lab.toml").write_text(cluster_files()[0])
    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/cluster.md").read_text(), flags=re.DOTALL)
    (text,) = (block for block in blocks if "[[offers]]" in block)
    (tmp_path / "offers.toml").write_text(text)
    h100, lab, spot = offers_from_file(str(tmp_path / "offers.toml"))
    assert h100.with_size(2).price_per_hour == pytest.approx(2 * 8 * 2.1)
    assert list(lab.sizes) == [lab.cluster.num_nodes]
    assert spot.losses_per_node_day == 3


def test_the_front_page_has_a_figure_in_every_cell_of_its_accuracies() -> None:
    """Cells of sources without groups of layouts say so; all others are numbers, of the half that was held out."""
    rows = (
        (ROOT / "README.md").read_text().split("<!-- accuracy -->\n")[1].split("<!-- /accuracy -->")[0].splitlines()[2:]
    )
    assert len(rows) >= 8
    for row in rows:
        _, count, error, ratio, inside, regret, rank = (cell.strip() for cell in row.strip("|").split("|"))
        assert int(count) >= 10, row
        assert 0 < float(error.removesuffix(" %")) < 100, row
        assert 0.3 < float(ratio) < 3, row
        assert 0 < float(inside.removesuffix(" %")) <= 100, row
        assert (regret == "-" and rank == "-") or (float(regret.removesuffix(" %")) >= 0 and -1 <= float(rank) <= 1), (
            row
        )
