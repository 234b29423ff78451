"""A post-training workflow as a TOML file: [actor] and other models, [reward], [batch], [policy], [loss], [engines]."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .base import did_you_mean, located, read_toml, shown
from .batch import Lengths, read_lengths
from .errors import ConfigError
from .model import ModelSpec
from .rl import RlModel, RlWorkload, lengths_of_mean

_FIELDS: dict[str, frozenset[str]] = {
    "actor": frozenset({"model"}),
    "critic": frozenset({"model"}),
    "reference": frozenset({"model"}),
    "teacher": frozenset({"model"}),
    "reward": frozenset({"model", "function"}),
    "batch": frozenset({"prompts", "responses", "prompt_len", "mean_len", "lengths", "max_len", "updates"}),
    "policy": frozenset({"staleness", "oversample", "fetches", "islands", "shared", "log_probs", "placement"}),
    "loss": frozenset(
        {
            "clip",
            "reference_weight",
            "teacher_weight",
            "value_weight",
            "value_clip",
            "discount",
            "trace",
            "temperature",
            "ratio_cap",
        }
    ),
    "engines": frozenset({"training", "generation", "precision"}),
}
"""Tables of the file and their fields."""


def read_workflow(path: str | Path) -> RlWorkload:
    """Read a workflow; files that it names are next to it.

    Raises:
        ConfigError: it cannot be read, a table or field is missing or unknown, or the step that it describes is none.
    """
    data = read_toml(path)
    with located(str(path)):
        tables = _tables(data)
        return workflow(tables, data.get("algorithm"), Path(path).parent)


def _tables(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    for name, value in data.items():
        if name == "algorithm":
            continue
        if name not in _FIELDS:
            known = ", ".join(("algorithm", *_FIELDS))
            raise ConfigError(f"unknown table [{name}]", help=did_you_mean(name, list(_FIELDS)) or f"known: {known}")
        if not isinstance(value, dict):
            raise ConfigError(f"{name} = {shown(value)} is no table", help=f"[{name}], and its fields below it")
        for field in value:
            if field not in _FIELDS[name]:
                known = ", ".join(sorted(_FIELDS[name]))
                raise ConfigError(
                    f"[{name}] has no field {field!r}", help=did_you_mean(field, _FIELDS[name]) or f"known: {known}"
                )
    for name in ("actor", "reward", "batch"):
        if name not in data:
            raise ConfigError(f"there is no [{name}]", help=_EXAMPLES[name])
    return {name: dict(value) for name, value in data.items() if name != "algorithm"}


_EXAMPLES = {
    "actor": '[actor] model = "qwen3-8b"',
    "reward": '[reward] function = "rewards.py:exact", or model = a name',
    "batch": "[batch] prompts = 512, responses = 16, prompt_len = 300, mean_len = 1000, max_len = 4096",
}


def workflow(tables: Mapping[str, dict[str, Any]], algorithm: str | None, folder: Path) -> RlWorkload:
    """Return the workload of the tables of a file in a folder."""
    actor = _named(tables["actor"], "actor", folder, None)
    models = [RlModel(role="actor", model=actor)]
    others = ("critic", "reference", "teacher", *(["reward"] if "model" in tables["reward"] else []))
    models += [RlModel(role=role, model=_named(tables[role], role, folder, actor)) for role in others if role in tables]  # type: ignore[arg-type]
    engines = {
        {"training": "engine", "generation": "generation_engine"}.get(name, name): value
        for name, value in tables.get("engines", {}).items()
    }
    function = tables["reward"].get("function", "")
    if not isinstance(function, str):
        raise ConfigError(f"[reward] function = {shown(function)} is no text", help=_EXAMPLES["reward"])
    fields: dict[str, Any] = {
        "algorithm": algorithm or ("ppo" if "critic" in tables else "grpo"),
        "models": tuple(models),
        "reward_function": function,
        **_batch(tables["batch"], folder),
        **tables.get("policy", {}),
        **engines,
    }
    if "loss" in tables:
        fields["loss"] = tables["loss"]
    return RlWorkload(**fields)


def _named(table: Mapping[str, Any], role: str, folder: Path, actor: ModelSpec | None) -> ModelSpec:
    name = table.get("model")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"[{role}] has no model", help=f'model = "qwen3-8b"{"" if actor is None else ", or actor"}')
    if name == "actor" and actor is not None:
        return actor
    if (folder / name).exists():
        name = str(folder / name)
    with located(f"[{role}]"):
        return ModelSpec.resolve(name)


def _batch(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the fields of a batch, with the distribution of its lengths."""
    fields = dict(table)
    mean, file, longest = fields.pop("mean_len", None), fields.pop("lengths", None), fields.get("max_len")
    if not isinstance(longest, int) or isinstance(longest, bool) or longest < 1:
        raise ConfigError(
            f"[batch] max_len = {shown(longest)}: tokens at which responses are cut", help="max_len = 4096"
        )
    if (mean is None) == (file is None):
        raise ConfigError("[batch] needs one of mean_len and lengths", help=_EXAMPLES["batch"])
    if file is not None:
        if not isinstance(file, str):
            raise ConfigError(f"[batch] lengths = {shown(file)} names no file", help="one length in each line")
        read = read_lengths(folder / file)
        return {**fields, "lengths": Lengths.of([min(length, longest) for length in read])}
    if not isinstance(mean, int | float) or isinstance(mean, bool):
        raise ConfigError(f"[batch] mean_len = {shown(mean)} is no number")
    return {**fields, "lengths": lengths_of_mean(float(mean), longest)}
