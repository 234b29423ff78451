"""No option is accepted and ignored: in every mode of every command an option applies, or is refused by its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

import pytest
import typer
from meshwright.cli.main import app
from meshwright.cli.options import CommandOptions, Mode, Option, OptionModel, command, option
from meshwright.schema.base import Count
from pydantic import BaseModel
from small_jobs import small_plan
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[3]

MODES: dict[str, dict[str, list[str]]] = {
    "plan": {
        "": ["gpt2"],
        "--serve": ["gpt2", "--serve"],
        "--infer": ["gpt2", "--infer"],
        "--objective cost": ["gpt2", "--objective", "cost"],
        "--objective energy": ["gpt2", "--objective", "energy"],
        "--lengths": ["gpt2", "--lengths", "lengths.txt"],
    },
    "apply": {"": ["plan.json"], "a script of your own": ["plan.json", "train.py"]},
    "experts bench": {"files of loads": ["loads.npy"], "no files of loads": []},
    "compare": {"PLAN": ["train.sh", "plan.json"], "": ["train.sh"]},
    "profile": {"": [], "torchrun or srun": []},
    "validate": {"": ["runs.csv"], "--serve": ["runs.csv", "--serve"]},
}
"""What chooses each mode of the commands that have several."""

POSITIONALS = {
    "estimate": ["gpt2", "--global-batch-size=8", "--seq-len=64", "--layout=tp=1"],
    "experts synth": ["--out=x.npz"], "calibrate": ["plan.json", "metrics.jsonl"], "validate": ["runs.csv"],
    "batch": ["plan.json"], "experts place": ["loads.npy"], "experts evaluate": ["placement.npz"], "report": ["plan.json"],
    "plan-rl": ["grpo.toml"],
    "apply-rl": ["rl.json", "--prompts=p.jsonl", "--reward=r.py:f", "--steps=1"],
}  # fmt: skip


def commands(group: typer.Typer = app, words: tuple[str, ...] = ()) -> Iterator[tuple[str, CommandOptions]]:
    """Name and options of every command."""
    for entry in group.registered_commands:
        name = " ".join((*words, entry.name or entry.callback.__name__.replace("_", "-")))
        yield name, entry.callback.command_options
    for inner in group.registered_groups:
        if inner.typer_instance.registered_callback is not None:
            yield " ".join((*words, inner.name)), inner.typer_instance.registered_callback.callback.command_options
        yield from commands(inner.typer_instance, (*words, inner.name))


COMMANDS = dict(commands())


def typed(entry: Option) -> list[str]:
    """An entry with a value that is not the default one."""
    if entry.kind is bool:
        return [entry.flag]
    if entry.choices:
        return [entry.flag, next(choice for choice in entry.choices if choice != entry.default)]
    return [entry.flag, "7" if entry.kind in (int, float) else "x"]


CASES = [
    pytest.param(
        name, mode, MODES[name][mode.name] if name in MODES else POSITIONALS.get(name, []), id=f"{name} {mode.name}"
    )
    for name, options in COMMANDS.items()
    for mode in options.modes
]
"""(command, mode, arguments that choose it)."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    small_plan().save(tmp_path / "plan.json")
    (tmp_path / "train.py").touch()
    (tmp_path / "lengths.txt").write_text("5\n")


def refused(name: str, mode: Mode, arguments: list[str], options: list[str], patch: pytest.MonkeyPatch) -> str:
    """What a command says that refuses options; a script ends them, so they stand before it."""
    if mode.name == "torchrun or srun":
        patch.setenv("RANK", "0")
    result = CliRunner().invoke(app, [*name.split(), *arguments[:1], *options, *arguments[1:]])
    assert result.exit_code == 2, (options, result.output)
    assert result.stdout == "" or "--json" in options
    return result.stderr


def test_every_command_states_its_modes() -> None:
    assert {name for name, options in COMMANDS.items() if len(options.modes) > 1} == MODES.keys()
    for name, arguments in MODES.items():
        assert {mode.name for mode in COMMANDS[name].modes} == arguments.keys()


@pytest.mark.parametrize(("name", "mode", "arguments"), CASES)
def test_option_of_another_mode_is_refused_by_name(name, mode, arguments, monkeypatch) -> None:
    for entry in COMMANDS[name].options.values():
        if not mode.takes_option(entry):
            said = refused(name, mode, arguments, typed(entry), monkeypatch)
            assert entry.flag in said
            assert "help: " in said


@pytest.mark.parametrize(("name", "mode", "arguments"), CASES)
def test_option_that_needs_another_is_refused_without_it(name, mode, arguments, monkeypatch) -> None:
    applicable = {entry.name: entry for entry in COMMANDS[name].options.values() if mode.takes_option(entry)}
    for entry in applicable.values():
        needed = [applicable[other].flag for other in entry.spec.needs if other in applicable]
        if needed:
            said = refused(name, mode, arguments, typed(entry), monkeypatch)
            assert f"{entry.flag} without {' or '.join(needed)}" in said
        for other in (applicable[name] for name in entry.spec.barred_by if name in applicable):
            words = [*typed(entry), *typed(other)]
            words += [word for need in other.spec.needs for word in typed(applicable[need])]
            assert entry.flag in refused(name, mode, arguments, words, monkeypatch)


def test_every_option_is_read_somewhere() -> None:
    """An option model is handed over with its fields: each is read by its name, or dumped whole."""
    folders = ("cli", "runtime", "profilers")
    trees = [ast.parse(path.read_text()) for folder in folders for path in (ROOT / folder).rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    read |= {
        node.slice.value for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
    }
    dumped = {"PlacementOptions", "PlannedStepOptions", "StepOptions", "SyntheticOptions", "TrainingOptions"}
    unread = [
        f"{name}: {entry.flag}"
        for name, options in COMMANDS.items()
        for entry in options.options.values()
        if entry.name not in read and entry.model.__name__ not in dumped
    ]
    assert not unread


def test_every_option_has_a_help() -> None:
    for name in COMMANDS:
        text = CliRunner().invoke(app, [*name.split(), "--help"]).stdout
        assert all(entry.flag in text for entry in COMMANDS[name].options.values())
    helpless = [
        f"{name} {parameter.name}"
        for name, function in functions()
        for parameter in function.__signature__.parameters.values()
        if get_origin(parameter.annotation) is Annotated and not parameter.annotation.__metadata__[0].help
    ]
    assert not helpless


def functions(group: typer.Typer = app) -> Iterator[tuple[str, Any]]:
    for entry in group.registered_commands:
        yield entry.callback.__name__, entry.callback
    for inner in group.registered_groups:
        yield from functions(inner.typer_instance)


def test_commands_have_few_parameters() -> None:
    for name, function in functions():
        assert len([p for p in function.__wrapped__.__annotations__ if p != "return"]) <= 9, name


class Source(BaseModel):
    """A model of the product.

    Attributes:
        width: of a thing, at least two.
    """

    width: Count = 3


class Things(OptionModel):
    """Options."""

    mirrors = Source

    width: int
    folder: Path | None = option(None, "where ``things`` go.", metavar="FOLDER")
    kind: Literal["round", "square"] = option("round", "round: or square.")
    sizes: tuple[float, ...] = option((), "of things.", name="--size")
    share: float = option(0.5, "of them.", ge=0, le=1, needs=("folder",))


def invoke(*words: str) -> tuple[int, Any, str]:
    """Exit code, what the command was called with, and stderr."""
    seen: list[Any] = []
    inner = typer.Typer(rich_markup_mode=None)

    @inner.command()
    @command()
    def make(things: Things) -> None:
        """Make."""
        seen.append(things)

    result = CliRunner().invoke(inner, list(words))
    return result.exit_code, seen[0] if seen else None, result.stdout + result.stderr


def test_options_come_from_the_fields() -> None:
    code, things, _ = invoke("--width", "5", "--folder", "here", "--kind", "square", "--size", "1", "--size", "2.5")
    assert code == 0
    assert things == Things(width=5, folder=Path("here"), kind="square", sizes=(1.0, 2.5))
    assert invoke()[1].width == 3, "the default of the mirrored model"


def test_help_says_text_default_and_bounds() -> None:
    text = " ".join(invoke("--help")[2].split())
    for part in (
        "--width N Of a thing, at least two. [default: 3; x>=1]", "--folder FOLDER Where `things` go.",
        "round: or square. [default: round]", "With --folder: ", "0<=x<=1",
    ):  # fmt: skip
        assert part in text, (part, text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--width", "0"], "--width"),
        (["--width", "1" + "0" * 400], "1000000000 or less"),
        (["--kind", "flat"], "--kind"),
        (["--folder", "x", "--share", "2"], "--share"),
        (["--share", "0.5"], "--share without --folder"),
    ],
)
def test_values_outside_the_field_are_refused(words: list[str], said: str) -> None:
    code, things, text = invoke(*words)
    assert (code, things) == (2, None)
    assert said in text
