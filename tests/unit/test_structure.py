"""The repository's structure: imports point one way and never in circles, nothing heavy at import, no print outside cli/."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

MAY_IMPORT = {
    "schema": set(),
    "profilers": {"schema"},
    "cost_models": {"schema"},
    "solvers": {"schema", "cost_models"},
    # Of the runtime only rehearsals, by the file of that name.
    "planner": {"schema", "profilers", "cost_models", "solvers", "runtime"},
    # Of cost models only the orders of pipelines and their text form, the best interval between checkpoints, and in rehearsals
    # bytes of collectives and the seconds of operators.
    # Of solvers only that of batches, which schedules while a run goes on.
    "runtime": {"schema", "profilers", "cost_models", "solvers"},
    "engines": {"schema", "cost_models"},
    # Offline: tables of measured runs against predictions, and the fits of coefficients and learned models.
    "validation": {"schema", "cost_models", "solvers", "planner"},
    "fitting": {"schema", "cost_models", "validation"},
    "cli": {"schema", "profilers", "cost_models", "solvers", "planner", "engines", "runtime", "validation"},
}

FILES = [path for folder in MAY_IMPORT for path in sorted((ROOT / folder).rglob("*.py"))]
MODULES = {path.relative_to(ROOT).with_suffix("").as_posix().removesuffix("/__init__") for path in FILES}


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of a file but those that only type checkers read."""

    found, ahead = list[ast.AST](), list[ast.AST]([ast.parse(path.read_text())])
    while ahead:
        node = ahead.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        found.append(node)
        ahead.extend(reversed(list(ast.iter_child_nodes(node))))
    return found


@functools.cache
def modules_imported(path: Path) -> frozenset[str]:
    """Return the modules of ours that a file imports, wherever in the file, as paths without suffix."""
    package = path.relative_to(ROOT).parent.parts
    modules = set()
    for node in nodes(path):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        # A file of a top-level folder reaches the others through `..`, which is the package meshwright.
        base = "/".join((*package[: len(package) + 1 - node.level], *(node.module or "").split("."))).strip("/")
        for name in node.names:
            submodule = f"{base}/{name.name}".strip("/")
            modules.add(submodule if submodule in MODULES else base)
    return frozenset(modules)


def own_name(path: Path) -> str:
    """Return a file as `modules_imported` names it."""
    return path.relative_to(ROOT).with_suffix("").as_posix().removesuffix("/__init__")


def test_siblings_are_imported_relatively() -> None:
    absolute = [
        f"{own_name(path)}: {node.module}"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("meshwright")
    ]
    assert not absolute


def names_imported(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of everything of ours that a file imports, within functions and for type checkers too."""
    package = ".".join(("meshwright", *path.relative_to(ROOT).parent.parts))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from ((module, alias.name) for alias in node.names)


def test_names_imported_anywhere_exist() -> None:
    """An import within a function is not seen before the function runs."""
    missing = [
        f"{own_name(path)}: {module}.{name}"
        for path in FILES
        for module, name in names_imported(path)
        if f"{module}.{name}".removeprefix("meshwright.").replace(".", "/") not in MODULES
        and not hasattr(importlib.import_module(module), name)
    ]
    assert not missing


def test_imports_point_one_way() -> None:
    wrong = [
        f"{own_name(path)} imports {module}"
        for path in FILES
        for module in modules_imported(path)
        if module.split("/")[0] not in MAY_IMPORT[own_name(path).split("/")[0]] | {own_name(path).split("/")[0]}
    ]
    assert not wrong


def test_only_a_rehearsal_takes_the_planner_to_the_runtime() -> None:
    takes = {
        own_name(path)
        for path in FILES
        if own_name(path).startswith("planner")
        for module in modules_imported(path)
        if module.startswith("runtime")
    }
    assert takes == {"planner/rehearse"}


def test_files_import_each_other_in_no_circle() -> None:
    graph = {own_name(path): set(modules_imported(path)) - {own_name(path)} for path in FILES}
    circles = []
    while True:
        try:
            TopologicalSorter(graph).prepare()
            break
        except CycleError as error:
            circle = error.args[1]  # each imports, or is imported by, the next one
            circles.append(" - ".join(circle))
            graph[circle[1]].discard(circle[0])
    assert not circles


def test_only_cli_prints() -> None:
    prints = [
        own_name(path)
        for path in FILES
        if own_name(path).split("/")[0] != "cli"
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not prints


def test_every_folder_is_installed() -> None:
    """A folder that pyproject.toml forgets would be missing from the wheel."""
    text = (ROOT / "pyproject.toml").read_text()
    packages = {own_name(path) for path in FILES if path.name == "__init__.py"}
    missing = {folder for folder in packages if f'"meshwright.{folder.replace("/", ".")}" = "{folder}"' not in text}
    assert not missing


def test_names_in_the_glossary_exist() -> None:
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| [^|]+ \|$", (ROOT / "docs/glossary.md").read_text(), flags=re.MULTILINE)
    names = {
        name for row in rows for code in re.findall(r"`([^`]+)`", row) for name in re.findall(r"[A-Za-z_]{2,}", code)
    }
    words = {word for path in FILES for word in re.findall(r"\w+", path.read_text())}
    missing = {name for name in names if not any(name in word if "_" in name else name == word for word in words)}
    assert names
    assert not missing
