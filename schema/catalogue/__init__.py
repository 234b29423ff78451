"""Published facts shipped with the package: devices and links (TOML), models (their real configs, JSON), each with its source."""

from __future__ import annotations

import json
import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from ..base import did_you_mean
from ..errors import ConfigError

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


@cache
def model_names() -> tuple[str, ...]:
    """Return the names of the shipped models, sorted."""
    return tuple(
        sorted(p.name.removesuffix(".json") for p in _ROOT.joinpath("models").iterdir() if p.name.endswith(".json"))
    )


def device_names() -> tuple[str, ...]:
    """Return the names of the devices that a cluster can be named with."""
    return tuple(device_entries())


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
