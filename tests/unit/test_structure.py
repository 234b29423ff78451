"""The repository's structure: imports point one way, nothing heavy at import, no print outside cli/."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MAY_IMPORT = {
    "schema": set(),
    "profilers": {"schema"},
    "cost_models": {"schema"},
    "solvers": {"schema", "cost_models"},
    "planner": {"schema", "profilers", "cost_models", "solvers"},
    # Of cost models and solvers only the orders of pipelines and their text form.
    "runtime": {"schema", "profilers", "cost_models", "solvers"},
    # Of the runtime only the order of a plan's pipeline.
    "engines": {"schema", "solvers", "runtime"},
    # Offline: tables of measured runs against predictions, and the fits of coefficients and learned models.
    "validation": {"schema", "cost_models", "solvers", "planner", "fitting"},
    "fitting": {"schema", "cost_models", "planner", "validation"},
    "cli": {"schema", "profilers", "cost_models", "solvers", "planner", "engines", "runtime", "validation"},
}

FILES = [path for folder in MAY_IMPORT for path in sorted((ROOT / folder).rglob("*.py"))]


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def folders_imported(path: Path) -> set[str]:
    """Top-level folders of ours that a file imports, wherever in the file."""
    package = path.relative_to(ROOT).parent.parts
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ("meshwright", *package)[: len(package) + 2 - node.level]
            target = (*base, *(node.module or "").split("."))
            found.add(target[1] if len(target) > 1 else "")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("meshwright"):
            pytest.fail(f"{path}: siblings are imported relatively, not as {node.module}")
    return found & MAY_IMPORT.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    assert folders_imported(path) <= MAY_IMPORT[folder] | {folder}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_cli_prints(path: Path) -> None:
    if path.relative_to(ROOT).parts[0] == "cli":
        return
    calls = [n.func.id for n in nodes(path) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    assert "print" not in calls


def test_every_folder_is_installed() -> None:
    """A folder that pyproject.toml forgets would be missing from the wheel."""
    text = (ROOT / "pyproject.toml").read_text()
    packages = {p.parent.relative_to(ROOT).as_posix() for p in FILES if p.name == "__init__.py"}
    missing = {folder for folder in packages if f'"meshwright.{folder.replace("/", ".")}" = "{folder}"' not in text}
    assert not missing
