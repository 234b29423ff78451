"""What changes in an engine's own configuration from one plan to another: its settings, spelled as the engine spells them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ...schema.base import Frozen
from ...schema.errors import ConfigError
from ...schema.training_plan import TrainingPlan
from ..adapter import Adapter, Exported
from ..tables import PARSERS, parse_table
from . import megatron, torchtitan
from .settings import Entry, Fact, Settings, from_table

MAX_SHOWN = 60
"""Characters of a list: longer ones are the modules of every stage."""

_CUTS = ("pipeline_model_parallel_layout", "module_fqns_per_model_part")
"""Settings that cut a model into stages: where both configurations cut it, the blocks of each stage are no change of their own."""


class Change(Frozen):
    """A setting that has another value, or that is there in one of two configurations only (the other value is None).

    Attributes:
        setting: as the engine spells it; without any value: words about what is not said in the configuration.
        place: file and line of the present value, empty where the engine's default is meant; ``variable`` holds it. Of words:
            where they belong.
    """

    setting: str
    before: str | None
    after: str | None
    place: str = ""
    variable: str = ""


def changes_of(
    engine: str, before: TrainingPlan, after: TrainingPlan, facts: Iterable[Fact] = ()
) -> tuple[Change, ...]:
    """Return what changes in the engine's configuration, with the place of each setting that a file says.

    Layouts that the engine cannot run as they are stand in its words as far as these go.
    """
    said = {
        fact.setting.removeprefix("--set ").lstrip("-").replace("-", "_").rpartition(".")[2]: fact for fact in facts
    }
    old, new = _written(engine, before), _written(engine, after)
    if old is None or new is None:
        return _of_layouts(before, after)
    changes = []
    first, second = _settings(old), _settings(new)
    for setting in dict.fromkeys((*first, *second)):
        if first.get(setting) == second.get(setting) or _is_same_cut(setting, first, second):
            continue
        fact = said.get(setting.lstrip("-").replace("-", "_").rpartition(".")[2])
        value = (
            first.get(setting) if fact is None else (fact.value if fact.value and fact.variable else first.get(setting))
        )
        changes.append(
            Change(
                setting=setting,
                before=value,
                after=second.get(setting),
                place=fact.place if fact else "",
                variable=fact.variable if fact else "",
            )
        )
    for where, lines, present in (
        ("your script", new.to_set, old.to_set),
        ("note", (*_refused(engine, after), *new.not_expressed), (*_refused(engine, before), *old.not_expressed)),
    ):
        changes += [Change(setting=line, before=None, after=None, place=where) for line in lines if line not in present]
    dropped = [
        line for line in old.not_expressed if line not in new.not_expressed and not _continues(line, new.not_expressed)
    ]
    changes += [Change(setting=line, before=None, after=None, place="no longer") for line in dropped]
    return tuple(changes) or _of_layouts(before, after)


def _continues(line: str, others: Iterable[str]) -> bool:
    """Return whether another line is about the same: begins with the same word."""
    return any(other.split(" ")[0].partition("=")[0] == line.split(" ")[0].partition("=")[0] for other in others)


def _is_same_cut(setting: str, first: Mapping[str, str], second: Mapping[str, str]) -> bool:
    """Return whether a setting cuts the model into as many stages in both configurations."""
    name = setting.rpartition(".")[2].lstrip("-").replace("-", "_")
    if name not in _CUTS or setting not in first or setting not in second:
        return False
    return first[setting].count("|") == second[setting].count("|")


def _written(engine: str, plan: TrainingPlan) -> Exported | None:
    """Return the configuration of a plan, whether or not the engine can run all of it; None: it has no words for it."""
    adapter: Adapter = import_module(f"..{engine}", __package__).ADAPTER
    try:
        return adapter.write(plan)
    except (ConfigError, KeyError):
        return None


def _refused(engine: str, plan: TrainingPlan) -> tuple[str, ...]:
    """Return what of a plan the engine's configuration cannot say; rules of another engine's search are not meant."""
    adapter: Adapter = import_module(f"..{engine}", __package__).ADAPTER
    return tuple(
        limit.reason(plan) for limit in adapter.limits if not limit.name.endswith("_rules") and not limit.holds(plan)
    )


def _settings(made: Exported) -> dict[str, str]:
    """Return the settings of a written configuration as texts."""
    name, text = made.files[0]
    suffix = Path(name).suffix
    if suffix in PARSERS:
        entries: Mapping[str, Entry] = _paths(from_table(parse_table(suffix, text), text, name))
    elif suffix == ".py":
        entries = _paths(torchtitan.settings_of(text))
    else:
        paths = megatron.settings_of(text).entries
        entries = {entry.setting: entry for entry in paths.values()}
    on = "" if suffix == ".sh" else "True"
    return {setting: on if entry.value is True else _text(entry.value) for setting, entry in entries.items()}


def _paths(settings: Settings) -> dict[str, Entry]:
    paths: dict[str, Entry] = {}
    for entry in settings.entries.values():
        paths |= _paths(entry.value) if isinstance(entry.value, Settings) else {entry.setting: entry}
    return paths


def _text(value: Any) -> str:
    if isinstance(value, list) and len(str(value)) > MAX_SHOWN:
        return f"{len(value)} stages, as the exported file says"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _of_layouts(before: TrainingPlan, after: TrainingPlan) -> tuple[Change, ...]:
    """Return the fields of the layout that differ, in our words."""
    old, new = before.layout.model_dump(), after.layout.model_dump()
    return tuple(
        Change(setting=name, before=str(old[name]), after=str(new[name])) for name in new if old[name] != new[name]
    )
