"""The commands of the documents run as written, and the pages made from the code are what the code says."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import NamedTuple

import pytest
from meshwright.schema import Plan

ROOT = Path(__file__).resolve().parents[2]
GENERATE = ROOT / "docs" / "generate"
sys.path.append(str(GENERATE))

import picture  # noqa: E402
import problems  # noqa: E402

PAGES = [
    "docs/tutorial.md",
    "docs/errors.md",
    *(str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("docs/howto/*.md"))),
]


class Block(NamedTuple):
    """Commands of a page; ``exit`` is the code of the last one, ``says`` a part of what it prints on stderr."""

    text: str
    exit: int
    says: str


def blocks(page: str) -> list[Block]:
    """Blocks marked bash; "bash exit=2 says=..." ends with an error."""
    found = re.findall(r"^```bash *([^\n]*)\n(.*?)^```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    made = []
    for about, text in found:
        code, says = re.search(r"exit=(\d+)", about), re.search(r'says="(.*?)"', about)
        made.append(Block(text, int(code[1]) if code else 0, says[1] if says else ""))
    return made


@pytest.fixture
def meshwright(tmp_path: Path) -> dict[str, str]:
    """An environment whose `meshwright` is this repository's."""
    command = tmp_path / "bin" / "meshwright"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\nfrom meshwright.cli.main import main\n\nmain()\n")
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}"}


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_run(page: str, tmp_path: Path, meshwright: dict[str, str]) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    for block in blocks(page):
        answer = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=folder, env=meshwright, capture_output=True, text=True, check=False, timeout=240,
        )  # fmt: skip
        assert answer.returncode == block.exit, f"{block.text}\n{answer.stderr}"
        assert block.says in answer.stderr, f"{block.text}\n{answer.stderr}"
        if block.exit:
            assert answer.stderr.startswith("error: ") or "\nerror: " in answer.stderr
    if page == "docs/tutorial.md":
        assert Plan.load(folder / "nodes.json").cluster.num_nodes == 2
        last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
        assert last["predicted"]["step_time_s"] > 0


def test_python_of_the_tutorial_runs() -> None:
    (text,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/tutorial.md").read_text(), flags=re.DOTALL | re.MULTILINE
    )
    exec(compile(text, "docs/tutorial.md", "exec"), {})


def test_pages_made_from_the_code_are_up_to_date() -> None:
    answer = subprocess.run(
        [sys.executable, str(GENERATE), "--check"], capture_output=True, text=True, check=False, timeout=120
    )
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("file", problems.STATED_IN.values())
def test_every_constraint_has_a_name_and_a_function(file: str) -> None:
    problem = problems.problem_of(file)
    labels = [statement.label for statement in problem.statements]
    assert labels[0].startswith("O")
    assert len(labels) > 1
    assert len(set(labels)) == len(labels)
    for statement in problem.statements:
        assert statement.name
        assert problem.functions[statement.label], f"no function of {file} says that it is about ({statement.label})"


def test_every_file_that_states_a_problem_is_on_the_page() -> None:
    stated = set()
    for path in [*ROOT.glob("solvers/*.py"), *ROOT.glob("planner/*.py")]:
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        if re.search(r"^ *\(O\) ", docstring, flags=re.MULTILINE):
            stated.add(str(path.relative_to(ROOT)))
    assert stated == set(problems.STATED_IN.values())


def test_picture_is_drawn_from_a_plan() -> None:
    drawn = picture.drawing()
    image = ET.fromstring(drawn)
    words = [text.text for text in image.iter("{http://www.w3.org/2000/svg}text")]
    assert {"rank 0", "rank 3"} <= set(words)
    committed = ET.parse(ROOT / "docs/picture.svg").getroot()
    assert committed.get("viewBox") == image.get("viewBox")


LINK = re.compile(r"\]\(([^)#\s]+)?(#[^)\s]+)?\)")


def anchors(path: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    return {"#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ["README.md", *(str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("docs/**/*.md")))])
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target, anchor in LINK.findall(text):
        if target.startswith(("http:", "https:")):
            continue
        there = path.parent / target if target else path
        assert there.exists(), f"{page} links to {target}"
        assert not anchor or anchor in anchors(there), f"{page} links to {target}{anchor}"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text()
    pages = {str(p.relative_to(ROOT / "docs")) for p in ROOT.glob("docs/**/*.md")} - {"README.md"}
    assert {page for page in pages if f"({page})" not in index} == set()


def completed(words: str, env: dict[str, str]) -> list[str]:
    """What bash offers behind these words."""
    asked = {"_MESHWRIGHT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    answer = subprocess.run(
        ["meshwright"], env={**env, **asked}, capture_output=True, text=True, check=False, timeout=60
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("meshwright es", "estimate"),
        ("meshwright plan --glob", "--global-batch-size"),
        ("meshwright plan llama-3.1-7", "llama-3.1-70b"),
        ("meshwright plan gpt2 --cluster 64xH100-S", "64xH100-SXM-80GB"),
        ("meshwright experts pl", "place"),
    ],
)
def test_shell_completes(words: str, offered: str, meshwright: dict[str, str]) -> None:
    assert completed(words, meshwright) == [offered]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_shown_for_each_shell(shell: str, meshwright: dict[str, str]) -> None:
    env = {**meshwright, "_MESHWRIGHT_COMPLETE": f"source_{shell}"}
    answer = subprocess.run(["meshwright"], env=env, capture_output=True, text=True, check=False, timeout=60)
    assert answer.returncode == 0
    assert "_MESHWRIGHT_COMPLETE=complete_" + shell in answer.stdout


def test_completion_is_installed_for_the_shell_that_asks(tmp_path: Path, meshwright: dict[str, str]) -> None:
    env = {**meshwright, "HOME": str(tmp_path)}
    # The command must not be the last word: bash would become it, and the shell that asks would be another one.
    answer = subprocess.run(
        ["bash", "-c", "meshwright --install-completion; exit $?"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert answer.returncode == 0, answer.stderr
    assert (tmp_path / ".bash_completions" / "meshwright.sh").exists()
    assert ".bash_completions/meshwright.sh" in (tmp_path / ".bashrc").read_text()
