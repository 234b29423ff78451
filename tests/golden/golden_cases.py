"""Cases of the golden answers: command lines, how they run in this process, and what of their documents is kept.

`cases.toml` has the command lines by group, `answers/<group>.json` what they answered. Where a document takes another form, only
`answer_of` and what it calls are to be adapted, never the answers.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.cli.main import app
from typer.testing import CliRunner

FOLDER = Path(__file__).parent
RELATIVE_TOLERANCE = 1e-12
"""Sums may be taken in another order; nothing else may change."""

VOLATILE = {
    "created",
    "meshwright",
    "inputs_sha256",
    "search_s",
    "solve_s",
    "schema_version",
    "sha256",
    "torch",
    "python",
}
"""Keys, anywhere in a document, whose values differ from run to run or from version to version."""

EMBEDDED_PLAN = re.compile(r"(?<=^  plan\.json: ).*?(?=^---$)", re.DOTALL | re.MULTILINE)


class Case(NamedTuple):
    """Commands in order; the answer is that of the last one (of "cat FILE" the file's), the others must succeed."""

    group: str
    name: str
    commands: tuple[str, ...]

    @property
    def label(self) -> str:
        return f"{self.group}: {self.name}"


def cases() -> list[Case]:
    """All cases, in the order of `cases.toml`."""
    groups = tomllib.loads((FOLDER / "cases.toml").read_text())
    return [
        Case(group, name, (commands,) if isinstance(commands, str) else tuple(commands))
        for group, named in groups.items()
        for name, commands in named.items()
    ]


def stored_answers() -> dict[str, dict[str, Any]]:
    """Answers by group and case."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((FOLDER / "answers").glob("*.json"))}


def run(case: Case) -> dict[str, Any]:
    """Run a case in an empty folder that holds `inputs` and `documents`; return exit code and answer, or the error."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("inputs", "documents"):
            shutil.copytree(FOLDER / name, Path(folder) / name)
        os.chdir(folder)
        try:
            *preparing, last = case.commands
            shown = last.removeprefix("cat ") if last.startswith("cat ") else None
            for command in preparing:
                result = CliRunner().invoke(app, shlex.split(command))
                assert result.exit_code == 0, f"{command}\n{result.stderr}"
            if shown is not None:
                return {"exit_code": 0, "answer": answer_of(json.loads(Path(shown).read_text()))}
            result = CliRunner().invoke(app, [*shlex.split(last), "--json"])
            if result.exception is not None and not isinstance(result.exception, SystemExit):
                raise result.exception
            if result.exit_code:
                return {"exit_code": result.exit_code, "error": result.stderr.splitlines()}
            document = json.loads(result.stdout)
            return json.loads(json.dumps({"exit_code": 0, "answer": answer_of(document)}))
        finally:
            os.chdir(before)


def cpu_seconds(case: Case) -> tuple[dict[str, Any], float]:
    """Answer of a case, and the CPU seconds it took."""
    start = time.process_time()
    return run(case), time.process_time() - start


def answer_of(document: Any) -> Any:
    """Return what is compared of the JSON that a command prints."""
    return _compact(_stable(document))


def _stable(node: Any) -> Any:
    """Drop what varies; of model and cluster in a plan only the name stays, their content is the input."""
    if isinstance(node, dict):
        stable = {key: _stable(value) for key, value in node.items() if key not in VOLATILE}
        for name in ("model", "cluster"):
            if isinstance(node.get(name), dict) and "name" in node[name]:
                stable[name] = node[name]["name"]
        return stable
    if isinstance(node, list):
        return [_stable(item) for item in node]
    return node


def _compact(node: Any) -> Any:
    """Write long lists of integers or words as runs ("0..63" counts up, "full x 30" repeats), a text by lines, equal items once."""
    if isinstance(node, dict):
        return {key: _compact(value) for key, value in node.items()}
    if isinstance(node, str) and "\n" in node:
        return EMBEDDED_PLAN.sub("(the plan)\n", node).splitlines()
    if not isinstance(node, list):
        return node
    words = all(isinstance(item, str) and item and " " not in item for item in node)
    if len(node) > 4 and (words or all(type(item) is int for item in node)):
        return " ".join(_runs(node))
    items = [_compact(item) for item in node]
    if len(items) > 2 and all(item == items[0] for item in items):
        return {"times": len(items), "each": items[0]}
    return items


def _runs(items: list[Any]) -> Iterator[str]:
    idx = 0
    while idx < len(items):
        end = idx + 1
        step = 0 if end < len(items) and items[end] == items[idx] else 1
        if isinstance(items[idx], str) and step:
            yield items[idx]
        else:
            while end < len(items) and (
                items[end] == items[end - 1] if step == 0 else items[end] == items[end - 1] + 1
            ):
                end += 1
            count = end - idx
            if count == 1:
                yield str(items[idx])
            else:
                yield f"{items[idx]}..{items[end - 1]}" if step else f"{items[idx]} x {count}"
        idx = end


def differences(
    expected: Any, actual: Any, path: str = "", slack: float = 0.0, *, rel_tol: float = RELATIVE_TOLERANCE
) -> Iterator[str]:
    """Yield ``path: expected -> actual`` of everything that differs.

    Numbers may differ by ``rel_tol`` of themselves. Some are differences of larger ones: parts of a step, seconds that a change
    saves and gaps are compared relative to the step, to the largest number of their table or list, and to 1.
    """
    if isinstance(expected, dict) and isinstance(actual, dict):
        inner = max(slack, _slack(list(expected.values()), rel_tol), _slack([expected.get("step_time_s")], rel_tol))
        for key in {**expected, **actual}:
            where = f"{path}.{key}" if path else key
            if key not in actual:
                yield f"{where}: {_short(expected[key])} -> missing"
            elif key not in expected:
                yield f"{where}: missing -> {_short(actual[key])}"
            else:
                yield from differences(
                    expected[key], actual[key], where, rel_tol if key == "gap" else inner, rel_tol=rel_tol
                )
    elif isinstance(expected, list) and isinstance(actual, list):
        if len(expected) != len(actual):
            yield f"{path}: {len(expected)} items -> {len(actual)}: {_short(expected)} -> {_short(actual)}"
            return
        inner = max(slack, _slack(expected, rel_tol))
        for idx, pair in enumerate(zip(expected, actual, strict=True)):
            yield from differences(*pair, f"{path}[{idx}]", inner, rel_tol=rel_tol)
    elif _is_number(expected) and _is_number(actual):
        if not math.isclose(expected, actual, rel_tol=rel_tol, abs_tol=slack):
            yield f"{path}: {expected!r} -> {actual!r}"
    elif expected != actual or type(expected) is not type(actual):
        yield f"{path}: {_short(expected)} -> {_short(actual)}"


def _slack(values: list[Any], rel_tol: float) -> float:
    """Return so much of the largest, where all are numbers."""
    if not all(map(_is_number, values)):
        return 0.0
    return rel_tol * max(map(abs, values), default=0.0)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 300 else text[:300] + "..."
