"""`meshwright plan-rl`: what it writes and shows, the page, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from meshwright.cli.main import app
from rl_plans import rl_plan
from typer.testing import CliRunner

RUN = CliRunner()
WORKFLOW = """
[actor]
model = "llama-3.2-1b"
[reward]
function = "rewards.py:exact"
[batch]
prompts = 16
responses = 4
prompt_len = 64
mean_len = 100
max_len = 256
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rl")
    (folder / "grpo.toml").write_text(WORKFLOW)
    files = [f"--out={folder}/rl.json", f"--report={folder}/rl.html"]
    answer = RUN.invoke(app, ["plan-rl", str(folder / "grpo.toml"), "--cluster", "2xH100-SXM-80GB", *files])
    assert answer.exit_code == 0, answer.output
    (folder / "shown.txt").write_text(answer.stdout)
    return folder


def test_the_answer_has_pools_calls_and_why(folder: Path) -> None:
    shown = (folder / "shown.txt").read_text()
    for words in ("pool 1", "generator", "actor", "generate", "update actor", "why", "runner-ups", "optimal"):
        assert words in shown


def test_the_page_draws_every_call_and_loads_nothing(folder: Path) -> None:
    page = (folder / "rl.html").read_text()
    plan = json.loads((folder / "rl.json").read_text())
    assert page.count("<rect") == len(plan["calls"]) + len(plan["moves"])
    assert "src=" not in page and "http" not in page.replace("http-equiv", "")
    again = RUN.invoke(app, ["report", str(folder / "rl.json"), "--report", str(folder / "again.html")])
    assert again.exit_code == 0 and (folder / "again.html").read_text() == page


def test_json_is_the_document(folder: Path) -> None:
    files = ["--cluster", "2xH100-SXM-80GB", "--json", f"--out={folder}/other.json"]
    answer = RUN.invoke(app, ["plan-rl", str(folder / "grpo.toml"), *files])
    assert json.loads(answer.stdout)["post_training"]["prompts"] == 16


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "no [actor]"), (WORKFLOW + "[polcy]\n", "did you mean policy?"), ("[actor\n", "not valid TOML")],
)
def test_a_wrong_workflow_ends_with_two_and_writes_nothing(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "w.toml").write_text(text)
    files = ["--cluster", "2xH100-SXM-80GB", "--out", str(tmp_path / "rl.json")]
    answer = RUN.invoke(app, ["plan-rl", str(tmp_path / "w.toml"), *files])
    assert answer.exit_code == 2 and says in answer.output and "Traceback" not in answer.output
    assert not (tmp_path / "rl.json").exists()


@pytest.mark.usefixtures("warm_ranks")
def test_apply_rl_runs_a_plan_and_says_what_its_steps_gave(tmp_path: Path) -> None:
    rl_plan([(1, ("generator", "actor"))], {}).save(tmp_path / "rl.json")
    (tmp_path / "rewards.py").write_text("def even(sample):\n    return sum(t % 2 for t in sample['response']) / 6\n")
    (tmp_path / "prompts.jsonl").write_text("\n".join(f'{{"prompt": [{idx}]}}' for idx in range(4)))
    files = [
        "--prompts",
        str(tmp_path / "prompts.jsonl"),
        "--reward",
        f"{tmp_path / 'rewards.py'}:even",
        "--steps",
        "2",
    ]
    answer = RUN.invoke(app, ["apply-rl", str(tmp_path / "rl.json"), *files, "--json"])
    assert answer.exit_code == 0, answer.output
    assert [record["step"] for record in json.loads(answer.stdout)] == [1, 2]
    answer = RUN.invoke(app, ["apply-rl", str(tmp_path / "rl.json"), *files[:-3], "none.py:f", "--steps", "2"])
    assert answer.exit_code == 2 and "no file none.py" in answer.output


def test_other_commands_say_what_a_plan_is_for(folder: Path) -> None:
    for command in ("apply", "explain", "rehearse"):
        answer = RUN.invoke(app, [command, str(folder / "rl.json")])
        assert answer.exit_code == 2 and "post-training" in answer.output, (command, answer.output)
