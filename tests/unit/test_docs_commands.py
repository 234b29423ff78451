"""The commands of the documents run as written, and the pages made from the code are what the code says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import NamedTuple

import pytest
from meshwright.cli.main import app
from typer.main import get_command
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
GENERATE = ROOT / "docs" / "generate"
sys.path.insert(0, str(GENERATE))

import annotated_plan  # noqa: E402
import pages  # noqa: E402
import picture  # noqa: E402
import problems  # noqa: E402
import tour  # noqa: E402

SHORT = [
    "docs/errors.md",
    "docs/inference.md",
    "docs/serving.md",
    *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/howto/*.md"))),
]
"""Pages whose commands take about a second each. Those of README and tutorial measure and train too: .ci/run runs them."""

HEREDOC = re.compile(r"^cat > (\S+) <<'EOF'\n(.*?)^EOF\n", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """Commands of a page; ``code`` is the exit code of the last one, ``says`` a part of what it prints on stderr."""

    text: str
    code: int
    says: str


def blocks(page: str) -> list[Block]:
    """Blocks marked bash; "bash exit=2 says=..." ends with an error."""
    found = re.findall(r"^```bash *([^\n]*)\n(.*?)^```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    made = []
    for about, text in found:
        code, says = re.search(r"exit=(\d+)", about), re.search(r'says="(.*?)"', about)
        made.append(Block(text, int(code[1]) if code else 0, says[1] if says else ""))
    return made


def commands(text: str) -> list[list[str]]:
    """Words of the lines of a block; `cat > FILE <<'EOF'` is a command of its own, with the text as its last word."""
    files = {f"cat-{at}": match.groups() for at, match in enumerate(HEREDOC.finditer(text))}
    names = iter(files)
    lines = HEREDOC.sub(lambda _: next(names) + "\n", text).replace("\\\n", " ").splitlines()
    found = [shlex.split(line, comments=True) for line in lines]
    return [["cat", *files[words[0]]] if words[0] in files else words for words in found if words]


def run(words: list[str]) -> tuple[int, str]:
    """Exit code and stderr of a command as a shell would run it here."""
    match words:
        case ["meshwright", *rest]:
            answer = CliRunner().invoke(app, rest)
            return answer.exit_code, answer.stderr
        case ["cat", name, text]:
            Path(name).write_text(text)
        case ["echo", text, ">", name]:
            Path(name).write_text(text)
        case ["mkdir", "-p", name]:
            Path(name).mkdir(parents=True, exist_ok=True)
        case _:
            pytest.fail(f"this test has no shell for: {shlex.join(words)}")
    return 0, ""


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[] if page in SHORT[:2] else [pytest.mark.long]) for page in SHORT]
)
def test_commands_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        *before, last = [(words, *run(words)) for words in commands(block.text)]
        assert all(code == 0 for _, code, _ in before), before
        assert last[1] == block.code, last
        assert block.says in last[2]
        assert ("error: " in last[2]) == bool(block.code), last


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_options_of_a_page_exist(page: str) -> None:
    for block in blocks(page):
        for words in commands(block.text):
            if words[0] != "meshwright":
                assert words[0] in ("pip", "mkdir", "cat", "export", "wait"), words
                continue
            command, rest = get_command(app).commands[words[1]], words[2:]
            command.make_context(words[1], [word for word in rest if word != "&"]).close()


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md", "docs/python.md", "docs/solvers.md"])
def test_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for text in re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE):
        exec(compile(text, page, "exec"), names)
    assert "mw" in names


@pytest.mark.parametrize("page", pages.PAGES)
def test_page_made_from_the_code_is_up_to_date(page: str) -> None:
    assert not pages.is_stale(page), f"{page} is not what the code says; run `make docs`"


@pytest.mark.parametrize("file", problems.stated_in())
def test_every_constraint_has_a_name_and_a_function(file: str) -> None:
    problem = problems.problem_of(file)
    labels = [statement.label for statement in problem.statements]
    assert labels[0].startswith("O")
    assert len(labels) > 1
    assert len(set(labels)) == len(labels)
    for statement in problem.statements:
        assert statement.name
        assert problem.functions[statement.label], f"no function of {file} says that it is about ({statement.label})"


def test_every_page_has_a_place_in_the_site() -> None:
    placed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1])
    assert sorted(placed) == sorted(str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md"))


@pytest.mark.long
def test_parts_of_a_printed_plan_are_numbered_as_their_page_explains_them() -> None:
    drawn = ET.fromstring(annotated_plan.drawing())
    numbers = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text") if text.get("class") == "number"]
    explained = re.findall(r"^(\d)\. \*\*(.*?)\*\*", (ROOT / "docs/reading-a-plan.md").read_text(), flags=re.MULTILINE)
    assert explained == list(zip(numbers, annotated_plan.PARTS, strict=True))


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


def asked(instruction: str, words: str = "") -> str:
    """What the command answers to a shell."""
    place = str(len(words.split(" ")) - 1)
    env = {"_MESHWRIGHT_COMPLETE": instruction, "COMP_WORDS": words, "COMP_CWORD": place}
    answer = CliRunner().invoke(app, [], env=env, prog_name="meshwright")
    assert answer.exit_code == 0, answer.stderr
    return answer.stdout


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("meshwright es", "estimate"),
        ("meshwright plan --glob", "--global-batch-size"),
        ("meshwright plan llama-3.1-7", "llama-3.1-70b"),
        ("meshwright plan gpt2 --cluster 64xH100-SXM-8", "64xH100-SXM-80GB"),
        ("meshwright experts pl", "place"),
    ],
)
def test_shell_completes(words: str, offered: str) -> None:
    assert asked("complete_bash", words).split() == [offered]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_shown_for_each_shell(shell: str) -> None:
    assert f"_MESHWRIGHT_COMPLETE=complete_{shell}" in asked(f"source_{shell}")


def test_completion_is_installed_for_the_shell_that_asks(tmp_path: Path) -> None:
    command = tmp_path / "meshwright"
    command.write_text(f"#!{sys.executable}\nfrom meshwright.cli.main import main\n\nmain()\n")
    command.chmod(0o755)
    # Were the command the last word, bash would become it, and the shell that asks would be another one.
    asking = ["bash", "-c", f"{command} --install-completion; exit $?"]
    env = {**os.environ, "HOME": str(tmp_path)}
    answer = subprocess.run(asking, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert answer.returncode == 0, answer.stderr
    assert (tmp_path / ".bash_completions" / "meshwright.sh").exists()
    assert ".bash_completions/meshwright.sh" in (tmp_path / ".bashrc").read_text()


def test_tour_is_read_in_an_afternoon() -> None:
    assert len({stop.path for stop in tour.STOPS}) == len(tour.STOPS) <= tour.MAX_FILES
    assert sum(map(tour.num_lines, tour.STOPS)) <= tour.MAX_LINES
