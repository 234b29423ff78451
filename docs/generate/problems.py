"""docs/reference/problems.md: the optimisation problems, read off the docstrings of the files that state them.

A statement is a line "(C1) name: equation" with the lines indented below it. The functions named beside it are those whose text has
the label, in the file that states the problem and in the other files of its sub-folder that state none.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

from markdown import code, one_line, table

ROOT = Path(__file__).resolve().parents[2]

TITLES = {
    "solvers/stages/splits.py": "Stages of a pipeline",
    "solvers/stages/stage_program.py": "Stages, and what each layer recomputes",
    "solvers/stages/split_bound.py": "What no split into stages can beat",
    "solvers/pipeline/schedule.py": "Order of the passes of a pipeline",
    "solvers/rank_mapping.py": "Which node holds which ranks",
    "solvers/offload/instance.py": "What lies on the host, and what is recomputed",
    "solvers/generation/instance.py": "Where weights, keys and values lie while text is generated",
    "solvers/deployment.py": "Engine instances that serve a load",
    "solvers/experts/instance.py": "Where experts stand",
    "solvers/experts/bounds.py": "Where experts stand, exactly",
    "solvers/experts/shares.py": "Shares of the replicas of an expert",
    "solvers/experts/traffic.py": "Home nodes of experts, and replicas on other nodes",
    "solvers/islands.py": "How regions train together",
    "planner/regions.py": "Which regions train together",
    "solvers/pools.py": "Pools of models in post-training",
    "planner/cheapest.py": "The cheapest size of a cluster",
    "cost_models/layer/overlap.py": "Overlap modes of the kinds of layers",
}
"""Titles, in the order of the page; files without one come last, under the first line of their docstring."""

INTRO = """# Optimisation problems

Each is stated in the file named below it: sets, data, variables, (O) the objective, (C1), (C2), ... the
constraints. The labels are the same in the code, in `check` functions, which recompute an answer from the definition, and
in error messages. How they work together: [method](../method.md)."""

_LABEL = re.compile(r"""[("'_](O'?|[CEV]\d+)[)"'_:]""")
_STATEMENT = re.compile(r"^(\s*)\((O'?|[CEV]\d+)\)\s+(.*)$")
_HEADING = re.compile(r"^(Sets|Data|Variables?|Objective|Constraints)\b\s*(.*)$")
_NAME = re.compile(r"^([a-z][a-z_ ,-]{1,30}): +(.*)$")


class Statement(NamedTuple):
    """One objective or constraint; what stands far behind an equation is a remark."""

    label: str
    name: str
    equation: str
    remark: str


class Problem(NamedTuple):
    """A docstring taken apart."""

    title: str
    setting: str
    statements: tuple[Statement, ...]
    functions: dict[str, tuple[str, ...]]


@functools.cache
def stated_in() -> list[str]:
    """Files whose docstring has an objective."""
    paths = [path for folder in ("solvers", "planner") for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [
        str(path.relative_to(ROOT))
        for path in paths
        if re.search(r"^(Objective)? *\(O\) ", ast.get_docstring(_parsed(path)) or "", flags=re.MULTILINE)
    ]
    return [*TITLES, *(file for file in found if file not in TITLES)]


def page() -> str:
    """All problems, each with its symbols and a table of statements."""
    lines = [INTRO]
    for file in stated_in():
        problem = problem_of(file)
        rows = [
            [f"({s.label})", s.name, _shown(s), ", ".join(code(name) for name in problem.functions[s.label])]
            for s in problem.statements
        ]
        lines += [
            "",
            f"## {TITLES.get(file, problem.title.rstrip('.'))}",
            "",
            f"{problem.title} (`{file}`)",
            "",
            "```",
            problem.setting,
            "```",
            "",
        ]
        lines += table(["label", "name", "statement", "function"], rows)
    return "\n".join(lines)


def _shown(statement: Statement) -> str:
    remark = code(statement.remark) if "=" in statement.remark else statement.remark
    return code(statement.equation) + (f"; {remark}" if remark else "")


def problem_of(file: str) -> Problem:
    """The problem that a file states."""
    docstring = ast.get_docstring(_parsed(ROOT / file)) or ""
    statements, setting = _taken_apart(docstring.splitlines()[1:])
    return Problem(docstring.splitlines()[0], setting, statements, _functions(file, [s.label for s in statements]))


def _taken_apart(lines: list[str]) -> tuple[tuple[Statement, ...], str]:
    """Statements; and what stands below Sets, Data and Variables, as written."""
    found: list[list[str]] = []
    setting: list[str] = []
    section, indent = "", -1
    for line in lines:
        heading = _HEADING.match(line)
        statement = _STATEMENT.match(line)
        if heading and _STATEMENT.match(heading[2]) and not statement:  # "Objective (O) min T"
            statement = _STATEMENT.match(heading[2])
        if statement:
            section, indent = "statements", len(statement[1])
            first, *more = re.split(r";\s+(?=\([CEV]\d+\))", f"({statement[2]}) {statement[3]}")
            found += [list(_STATEMENT.match(part).groups()[1:]) for part in (first, *more)]  # type: ignore[union-attr]
        elif heading:
            section = "setting" if heading[1] not in ("Objective", "Constraints") else "statements"
            indent = -1
            if section == "setting":
                setting.append(line)
        elif not line.strip():
            section = ""
        elif section == "statements" and indent >= 0 and len(line) - len(line.lstrip()) > indent:
            is_remark = len(line) - len(line.lstrip()) > indent + 20
            found[-1][1] += (" " * 8 if is_remark else " ") + line.strip()
        elif section == "setting":
            setting.append(line)
    return tuple(_statement(label, text) for label, text in found), "\n".join(setting)


def _statement(label: str, text: str) -> Statement:
    equation, _, remark = text.partition(" " * 6)
    named = _NAME.match(equation)
    name, equation = named.groups() if named else ("objective" if label.startswith("O") else "", equation)
    return Statement(label, name, one_line(equation), one_line(remark))


def _functions(file: str, labels: list[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {label: [] for label in labels}
    for path in (ROOT / file, *_companions(file)):
        lines = path.read_text().splitlines()
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.FunctionDef):
                text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                for label in _labels(text) & found.keys():
                    found[label].append(f"{path.stem}.{node.name}")
    return {label: tuple(dict.fromkeys(names)) for label, names in found.items()}


def _companions(file: str) -> list[Path]:
    """Files of the same sub-folder that solve the problem too: they state none of their own."""
    if len(Path(file).parts) < 3:
        return []
    stating = {ROOT / other for other in stated_in()}
    return [path for path in sorted((ROOT / file).parent.glob("*.py")) if path not in stating]


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _labels(text: str) -> set[str]:
    """Labels in a text, also as "C1" and row_C1_0; "(C1)-(C4)" are four."""
    ranges = re.findall(r"\(C(\d+)\)-\(C(\d+)\)", text)
    return set(_LABEL.findall(text)) | {f"C{n}" for low, high in ranges for n in range(int(low), int(high) + 1)}
