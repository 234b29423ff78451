"""docs/reference/errors.md: every message that a user can meet, read off the places that raise it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from markdown import code, one_line, table
from meshwright.schema import errors

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "cli": "Command line",
    "schema": "Models, clusters, layouts, files",
    "profilers": "Measuring",
    "cost_models": "Predicting",
    "solvers": "Optimising",
    "planner": "Planning and scoring",
    "engines": "Other engines",
    "runtime": "Training",
}
KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, errors.MeshwrightError) and kind is not errors.MeshwrightError
}

INTRO = """# Errors

An error says what is wrong with the numbers, below it the cause (indented), and after `help:` the smallest change that
fixes it. Nothing is written where a command fails, and no traceback is shown: one is a bug. With examples of those that are met
first: [errors](../errors.md). Labels such as (C2) are those of the [optimisation problems](problems.md)."""


def page() -> str:
    """The kinds with their exit codes, then the messages by folder."""
    kinds = [
        [
            code(name),
            "128 + signal" if name == "InterruptedRunError" else str(kind.exit_code),
            one_line((kind.__doc__ or "").split("\n\n")[0]),
        ]
        for name, kind in KINDS.items()
    ]
    lines = [INTRO, "", *table(["error", "exit code", "when"], kinds)]
    lines += ["", "Words in angle brackets stand for what the message fills in; several parts are joined by `...`."]
    for folder, title in FOLDERS.items():
        rows = [row for path in sorted((ROOT / folder).rglob("*.py")) for row in _messages(path)]
        lines += [
            "",
            f"## {title}",
            "",
            *table(["message", "cause, further lines", "help", "raised in"], dict.fromkeys(rows)),
        ]
    return "\n".join(lines)


def _messages(path: Path) -> Iterator[tuple[str, ...]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
            continue
        name = ast.unparse(node.exc.func)
        if name not in KINDS or not node.exc.args:
            continue
        parts = {keyword.arg: keyword.value for keyword in node.exc.keywords}
        yield (
            code(one_line(_text(node.exc.args[0]))),
            _details(parts.get("details")),
            one_line(_text(parts["help"])) if "help" in parts else "",
            code(str(path.relative_to(ROOT))),
        )


def _details(node: ast.expr | None) -> str:
    """The literal lines of a tuple of details; what is computed is left out."""
    if not isinstance(node, ast.Tuple):
        return ""
    return "; ".join(_text(part) for part in node.elts if isinstance(part, ast.Constant | ast.JoinedStr))


def _text(node: ast.expr) -> str:
    """A string expression as it reads: what is filled in stands in angle brackets."""
    if isinstance(node, ast.Constant):
        return "" if node.value is None else str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"<{_name(node.value)}>"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.IfExp):
        return " ... ".join(dict.fromkeys(filter(None, (_text(node.body), _text(node.orelse)))))
    return f"<{_name(node)}>"


def _name(node: ast.expr) -> str:
    """A short word for an expression: the last name in it that says something."""
    if isinstance(node, ast.Name):
        return node.id.strip("_")
    if isinstance(node, ast.Attribute):
        return node.attr.strip("_")
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Call):
        named = [part for part in (*node.args, node.func) if not isinstance(part, ast.Constant)]
        if isinstance(node.func, ast.Attribute) and node.func.attr == "join":
            named = list(node.args)
        return _name(named[0])
    if isinstance(node, ast.Subscript):
        return _name(node.value)
    if isinstance(node, ast.BinOp | ast.BoolOp):
        return _name(node.left if isinstance(node, ast.BinOp) else node.values[0])
    if isinstance(node, ast.IfExp):
        return _name(node.body)
    if isinstance(node, ast.GeneratorExp | ast.ListComp):
        return _name(node.generators[0].iter)
    return "..."
