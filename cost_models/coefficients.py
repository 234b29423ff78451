"""Coefficients of the cost model, immutable; coefficients.toml holds the packaged ones with their sources.

They are an argument: a `Scenario` joins them with the workload and the cluster that costs are computed for.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, reduce
from importlib.resources import files
from operator import getitem
from typing import Any

from ..schema import ClusterSpec, Workload
from ..schema.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Coefficients:
    """Values by section and name; sections may nest. Compared by identity, so that they can be the key of a cache."""

    sections: Mapping[str, Any]

    def __getitem__(self, section: str) -> Any:
        return self.sections[section]

    def value(self, path: str) -> Any:
        """Return the coefficient called ``section.name``, sections nested by more dots.

        Raises:
            ConfigError: there is no such coefficient.
        """
        value: Any = self.sections
        for key in path.split("."):
            if not isinstance(value, Mapping) or key not in value:
                raise ConfigError(f"no coefficient {path}", help="names are those of cost_models/coefficients.toml")
            value = value[key]
        return value

    def replaced(self, values: Mapping[str, Any]) -> Coefficients:
        """Return a copy in which the coefficients at these paths have these values.

        Raises:
            ConfigError: there is no such coefficient.
        """
        changed = deepcopy(dict(self.sections))
        for path, value in values.items():
            self.value(path)
            *sections, name = path.split(".")
            reduce(getitem, sections, changed)[name] = value
        return Coefficients(changed)


@cache
def packaged_coefficients() -> Coefficients:
    """Return the coefficients of coefficients.toml."""
    return Coefficients(tomllib.loads(files(__package__).joinpath("coefficients.toml").read_text(encoding="utf-8")))


@dataclass(frozen=True, eq=False)
class Scenario:
    """What every cost depends on besides model and layout. Compared by identity, so that it can be the key of a cache."""

    workload: Workload
    cluster: ClusterSpec
    coefficients: Coefficients

    @classmethod
    def build(cls, workload: Workload, cluster: ClusterSpec, coefficients: Coefficients | None = None) -> Scenario:
        """Return the scenario with these coefficients, or the packaged ones."""
        return cls(workload, cluster, coefficients or packaged_coefficients())
