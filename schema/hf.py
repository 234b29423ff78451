"""Hugging Face ``config.json`` -> fields of ModelSpec."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .base import read_json
from .errors import ConfigError
from .hf_families import FAMILIES, Parser
from .hf_fields import Fields, shown

_BY_ARCHITECTURE = {architecture: model_type for model_type, (architecture, _) in FAMILIES.items()}
# The language model inside a multimodal one is what is planned, so this is the class it is.
_TEXT_ARCHITECTURE = {"Llama4ForConditionalGeneration": "Llama4ForCausalLM"}


def model_fields_from_hf(config: str | Path | Mapping[str, Any], *, name: str | None = None) -> dict[str, Any]:
    """Fields for ``ModelSpec(**fields)``.

    Args:
        config: path of a ``config.json``, a folder that holds one, or its parsed content.
        name: name of the model; otherwise ``_name_or_path`` of the file, the folder's name, or the architecture.

    Returns:
        name, architecture, hidden_dim, layers, tie_embeddings, max_seq_len, norm_eps, rope. Vision and audio parts and
        multi-token-prediction modules are not included.

    Raises:
        ConfigError: the file cannot be read, is not a JSON object, lacks a field, has a value that cannot be, or is of
            an architecture that is not supported.
    """
    if isinstance(config, Mapping):
        content, path, where = config, None, "config"
    else:
        path = _config_path(config)
        content, where = read_json(path), str(path)
    if not isinstance(content, Mapping):
        raise ConfigError(f"{where} is not a model's config.json: it holds a {type(content).__name__}, not an object")
    try:
        architecture, parse = _family(content)
        fields = parse(Fields(content))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", details=error.details, help=error.help) from None
    return {"name": name or _name(content, path) or architecture, "architecture": architecture, **fields}


def _config_path(config: str | Path) -> Path:
    path = Path(config)
    try:
        if path.is_dir() and not (path / "config.json").exists():
            raise ConfigError(f"cannot read {shown(str(path / 'config.json'))}: the folder holds no config.json")
        return path / "config.json" if path.is_dir() else path
    except OSError as error:  # a name longer than the file system allows
        raise ConfigError(f"cannot read {shown(str(path))}: {error.strerror}") from None


def _name(content: Mapping[str, Any], path: Path | None) -> str | None:
    stored = content.get("_name_or_path")
    if isinstance(stored, str) and stored:
        return stored
    if path is None:
        return None
    return path.absolute().parent.name if path.name == "config.json" else path.stem


def _family(content: Mapping[str, Any]) -> tuple[str, Parser]:
    """Architecture and parser: by ``architectures[0]`` (it names the head as well) or, without it, ``model_type``."""
    listed, model_type = content.get("architectures"), content.get("model_type")
    if listed is not None and not (isinstance(listed, list) and all(isinstance(item, str) for item in listed)):
        raise ConfigError(f"architectures = {shown(listed)}: must be a list of names")
    if model_type is not None and not isinstance(model_type, str):
        raise ConfigError(f"model_type = {shown(model_type)}: must be a name")
    if not listed and model_type is None:
        raise ConfigError("neither `architectures` nor `model_type` is there", help="is this a model's config.json?")
    first = listed[0] if listed else None
    known = model_type if first is None else _BY_ARCHITECTURE.get(first)
    if known not in FAMILIES:
        raise _unsupported(f"model_type {shown(model_type)}" if first is None else f"architecture {shown(first)}")
    if model_type not in (None, known):
        raise ConfigError(f"architecture {first} is of model_type {known}, but model_type = {shown(model_type)}")
    architecture, parse = FAMILIES[known]
    return _TEXT_ARCHITECTURE.get(architecture, architecture), parse


def _unsupported(what: str) -> ConfigError:
    return ConfigError(f"{what} is not supported", help=f"supported are {', '.join(sorted(_BY_ARCHITECTURE))}")
