"""Published facts shipped with the package: devices and links (TOML), models (their real configs, JSON), each with its source."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from ..base import did_you_mean, shown
from ..errors import ConfigError, UnknownModelError

_ROOT = files(__package__)


@cache
def device_entries() -> dict[str, dict[str, Any]]:
    """Read devices.toml: canonical name -> fields."""
    return tomllib.loads(_ROOT.joinpath("devices.toml").read_text(encoding="utf-8"))


@cache
def link_entries() -> dict[str, dict[str, Any]]:
    """Read links.toml: key -> fields."""
    return tomllib.loads(_ROOT.joinpath("links.toml").read_text(encoding="utf-8"))


@cache
def family_entries() -> dict[str, dict[str, Any]]:
    """Read families.toml: model_type -> what `hf.Family` needs to read its config.json."""
    return tomllib.loads(_ROOT.joinpath("families.toml").read_text(encoding="utf-8"))


def find_family(content: Mapping[str, Any]) -> str:
    """Return the model_type of ``architectures[0]`` (it names the head as well) or, without it, of ``model_type``."""
    listed, model_type = content.get("architectures"), content.get("model_type")
    if listed is not None and not (isinstance(listed, list) and all(isinstance(item, str) for item in listed)):
        raise ConfigError(f"architectures = {shown(listed)}: must be a list of names")
    if model_type is not None and not isinstance(model_type, str):
        raise ConfigError(f"model_type = {shown(model_type)}: must be a name")
    if not listed and model_type is None:
        raise ConfigError("neither `architectures` nor `model_type` is there", help="is this a model's config.json?")
    by_architecture = {entry["architecture"]: known for known, entry in family_entries().items()}
    first = listed[0] if listed else None
    known = model_type if first is None else by_architecture.get(first)
    if known not in family_entries():
        near = did_you_mean(str(first or model_type), [*(by_architecture if first else family_entries())])
        known_ones = (
            f"the {len(by_architecture)} known families are in docs/models.md; a model of another one can be traced"
        )
        hint = f"{near} {known_ones}".strip()
        what = f"model_type {shown(model_type)}" if first is None else f"architecture {shown(first)}"
        raise UnknownModelError(f"{what} is not supported", help=hint)
    if model_type not in (None, known):
        # transformers has model_types that run the code of another one; what we know must agree with itself.
        kind = ConfigError if model_type in family_entries() else UnknownModelError
        raise kind(f"architecture {first} is of model_type {known}, but model_type = {shown(model_type)}")
    return known


@cache
def model_names() -> tuple[str, ...]:
    """Return the names of the shipped models, sorted."""
    return tuple(
        sorted(p.name.removesuffix(".json") for p in _ROOT.joinpath("models").iterdir() if p.name.endswith(".json"))
    )


def device_names() -> tuple[str, ...]:
    """Return the names of the devices that a cluster can be named with."""
    return tuple(device_entries())


def num_mtp_modules(name: str) -> int:
    """Return the multi-token-prediction modules that a shipped model's checkpoint has beside its layers; 0 of others."""
    config = load_model(name)["config"] if name in model_names() else {}
    return int(next((config[key] for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers") if key in config), 0))


def load_model(name: str) -> dict[str, Any]:
    """Load a shipped model: ``{"name", "source", "config"}`` where config is the published ``config.json``.

    Raises:
        ConfigError: there is no such name.
    """
    key = name.lower()
    if key not in model_names():
        hint = did_you_mean(name, model_names()) or "give a path to a config.json, or one of `meshwright models`"
        raise ConfigError(f"unknown model {name!r}", help=hint)
    data: dict[str, Any] = json.loads(_ROOT.joinpath("models", f"{key}.json").read_text(encoding="utf-8"))
    return data


def find_device(name: str) -> tuple[str, dict[str, Any]]:
    """Return the canonical name and fields of a device named by its name or an alias, in any case.

    Raises:
        ConfigError: there is no such device.
    """
    entries = device_entries()
    by_alias = {alias.lower(): key for key, entry in entries.items() for alias in (key, *entry["aliases"])}
    key = by_alias.get(name.lower())
    if key is None:
        hint = did_you_mean(name, by_alias) or "describe it in a cluster TOML, or one of `meshwright devices`"
        raise ConfigError(f"unknown device {name!r}", help=hint)
    return key, entries[key]


def find_link(name: str) -> tuple[str, dict[str, Any]]:
    """Return the key and fields of a link kind.

    Raises:
        ConfigError: there is no such link.
    """
    entries = link_entries()
    if name.lower() not in entries:
        hint = did_you_mean(name, [*entries]) or "one of " + ", ".join(entries)
        raise ConfigError(f"unknown link {name!r}", help=hint)
    return name.lower(), entries[name.lower()]
