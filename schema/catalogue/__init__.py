"""Published facts shipped with the package: devices and links (TOML), models (their real configs, JSON), each with its source."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

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


def nearest_models(name: str) -> list[str]:
    """Return shipped models with names like this one, the nearest first."""
    return difflib.get_close_matches(name.lower(), model_names(), n=3, cutoff=0.5)


def load_model(name: str) -> dict[str, Any]:
    """Load a shipped model: ``{"name", "source", "config"}`` where config is the published ``config.json``.

    Raises:
        ConfigError: there is no such name.
    """
    key = name.lower()
    if key not in model_names():
        raise _unknown(
            "model",
            name,
            {known: known for known in model_names()},
            "give a path to a config.json, or one of `meshwright models`",
        )
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
        raise _unknown("device", name, by_alias, "describe it in a cluster TOML, or one of `meshwright devices`")
    return key, entries[key]


def find_link(name: str) -> tuple[str, dict[str, Any]]:
    """Return the key and fields of a link kind.

    Raises:
        ConfigError: there is no such link.
    """
    entries = link_entries()
    if name.lower() not in entries:
        raise _unknown("link", name, {known: known for known in entries}, "one of " + ", ".join(entries))
    return name.lower(), entries[name.lower()]


def _unknown(what: str, name: str, known: Mapping[str, str], otherwise: str) -> ConfigError:
    """``known``: each spelling in lower case, and the name it stands for."""
    near = dict.fromkeys(known[match] for match in difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5))
    hint = f"did you mean {' or '.join(near)}?" if near else otherwise
    return ConfigError(f"unknown {what} {name!r}", help=hint)
