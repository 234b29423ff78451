"""Find the file that writes or reads the configuration of an engine."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from ..schema.base import read_text
from ..schema.errors import ConfigError
from ..schema.model import ModelSpec
from ..schema.plan import Plan
from . import accelerate, deepspeed, kubernetes, megatron, nemo, torchtitan
from .documents import ENGINES, TARGETS, Exported, Imported, TargetName

_EXPORTS: dict[TargetName, Callable[[Plan], Exported]] = {
    "torchtitan": torchtitan.export,
    "megatron": megatron.export,
    "nemo": nemo.export,
    "deepspeed": deepspeed.export,
    "accelerate": accelerate.export,
    "kubernetes": kubernetes.export,
}


def export(plan: Plan, engine: str) -> Exported:
    """The plan in an engine's own form.

    Raises:
        ConfigError: there is no such engine, or it cannot run the plan as it is: each reason with its numbers.
    """
    if engine not in _EXPORTS:
        raise ConfigError(f"unknown engine {engine!r}", help=f"one of {', '.join(TARGETS)}")
    return next(make for name, make in _EXPORTS.items() if name == engine)(plan)


MAX_YAML_NODES = 100_000
"""Values of a YAML file, those that aliases stand for counted each time."""


def read_configuration(
    path: str | Path, *, engine: str | None = None, num_devices: int | None = None, model: ModelSpec | None = None
) -> Imported:
    """The layout of a configuration file; nothing of the file is run.

    Args:
        engine: whose it is; None finds out from its form and content.
        num_devices: ranks of the job, where the file does not say.
        model: needed where the file counts layers.

    Raises:
        ConfigError: it cannot be read, is of no engine known here, or its numbers do not fit together.
    """
    if engine is not None and engine not in ENGINES:
        raise ConfigError(f"unknown engine {engine!r}", help=f"one of {', '.join(ENGINES)}")
    text = read_text(path)
    try:
        return _read(Path(path), text, engine, num_devices, model)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", details=error.details, help=error.help) from None


def _read(path: Path, text: str, engine: str | None, num_devices: int | None, model: ModelSpec | None) -> Imported:
    if path.suffix == ".py" and engine in (None, "torchtitan"):
        return torchtitan.read_module(text, num_devices)
    if path.suffix not in (".toml", ".json", ".yaml", ".yml"):
        if engine not in (None, "megatron"):
            raise ConfigError(f"not a configuration file of {engine}", help="its name ends in .toml, .json or .yaml")
        return megatron.read(text, num_devices, model)
    content = _parsed(path.suffix, text)
    if {"schema_version", "layout"} <= content.keys():
        raise ConfigError(
            "is a plan, not an engine's configuration", help="meshwright explain, export and compare take it"
        )
    engine = engine or _engine_of(content)
    if engine == "torchtitan":
        return torchtitan.read(content, num_devices)
    if engine == "deepspeed":
        return deepspeed.read(content, num_devices, model)
    if engine == "accelerate":
        return accelerate.read(content, num_devices, model)
    if engine == "nemo":
        return nemo.read(content, num_devices, model)
    raise ConfigError("no engine is recognised by its content", help=f"give --from: one of {', '.join(ENGINES)}")


def _parsed(suffix: str, text: str) -> Mapping[str, Any]:
    try:
        content = tomllib.loads(text) if suffix == ".toml" else json.loads(text) if suffix == ".json" else _yaml(text)
    except (
        ValueError,
        yaml.YAMLError,
        RecursionError,
        KeyError,
        TypeError,
    ) as error:  # as PyYAML raises them for odd tags
        raise ConfigError(f"not valid {suffix[1:]}: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(content, Mapping):
        raise ConfigError("holds no table of settings")
    return content


def _yaml(text: str) -> Any:
    """YAML without code; an alias of what has aliases in it may stand for more than any memory holds, and is refused."""
    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = [(None, 0)]

    def add(size: int) -> None:
        anchor, before = open_nodes[-1]
        open_nodes[-1] = anchor, before + size
        if before + size > MAX_YAML_NODES:
            raise ValueError(f"its aliases stand for more than {MAX_YAML_NODES} values")

    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            add(sizes.get(event.anchor, MAX_YAML_NODES))
        elif isinstance(event, yaml.ScalarEvent):
            sizes[event.anchor] = 1
            add(1)
        elif isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_nodes.pop()
            sizes[str(anchor)] = size
            add(size)
    return yaml.safe_load(text)


def _engine_of(content: Mapping[str, Any]) -> str | None:
    if "distributed_type" in content or "fsdp_config" in content:
        return "accelerate"
    if "zero_optimization" in content or "train_micro_batch_size_per_gpu" in content or "train_batch_size" in content:
        return "deepspeed"
    if "parallelism" in content:
        return "torchtitan"
    if isinstance(content.get("model"), Mapping) or "ddp" in content:
        return "nemo"
    return None
