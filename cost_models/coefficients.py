"""The default coefficients, read once from coefficients.toml (which holds their sources)."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, wraps
from importlib.resources import files
from typing import Any, ParamSpec, TypeVar

from ..schema.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


@cache
def _read() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files(__package__).joinpath("coefficients.toml").read_text(encoding="utf-8"))


_overrides: list[dict[str, dict[str, Any]]] = []
_clear: list[Callable[[], None]] = []


def coefficients() -> dict[str, dict[str, Any]]:
    """Section -> name -> value."""
    return _overrides[-1] if _overrides else _read()


def remembered(function: Callable[P, R]) -> Callable[P, R]:
    """`functools.cache` for what depends on coefficients: forgotten where `overridden` begins and ends."""
    found = cache(function)
    _clear.append(found.cache_clear)

    @wraps(function)
    def lookup(*args: P.args, **kwargs: P.kwargs) -> R:
        return found(*args, **kwargs)  # type: ignore[arg-type]  # cache wants hashable arguments

    return lookup


def value_at(path: str) -> Any:
    """The coefficient called ``section.name``, sections nested by more dots.

    Raises:
        ConfigError: there is no such coefficient.
    """
    value: Any = coefficients()
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            raise ConfigError(f"no coefficient {path}", help="names are those of cost_models/coefficients.toml")
        value = value[key]
    return value


@contextmanager
def overridden(values: Mapping[str, Any]) -> Iterator[None]:
    """Within it, coefficients by path have these values; to fit them, not for plans, which say nothing about it.

    Raises:
        ConfigError: there is no such coefficient.
    """
    changed = deepcopy(coefficients())
    for path, value in values.items():
        value_at(path)
        section: Any = changed
        *sections, name = path.split(".")
        for key in sections:
            section = section[key]
        section[name] = value
    _overrides.append(changed)
    try:
        _forget()
        yield
    finally:
        _overrides.pop()
        _forget()


def _forget() -> None:
    for clear in _clear:
        clear()
