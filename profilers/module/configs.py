"""The config.json of a model that is no known family, traced: the architecture from the installed transformers, without weights.

Only code of the installed package runs: what a config.json says of code of its own (`auto_map`), or of kernels that the package
would fetch (`attn_implementation`), is not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from ...schema.base import read_json, shown
from ...schema.errors import ConfigError
from ...schema.limits import MAX_LAYERS
from ...schema.model import ModelSpec
from ..modules import profile_module
from .trials import first_line

NAMES_OF_CODE = frozenset({
    "auto_map", "attn_implementation", "attn_implementation_internal", "experts_implementation", "experts_implementation_internal",
    "kernel_config", "use_kernels",
})  # fmt: skip
"""Settings that name a module next to the file, or a repository of kernels, whose code transformers may fetch and run."""

INSTALL = "pip install 'transformers>=5' 'meshwright[run]'"


def trace_config(path: str | Path, *, seq_len: int) -> ModelSpec:
    """Return what a model of transformers costs for sequences of ``seq_len`` tokens, in bf16.

    Args:
        path: of a config.json, or of the folder that holds it.

    Raises:
        ConfigError: transformers is not installed, does not have the architecture, or the model cannot be traced; the message says
            why.
    """
    place = Path(path)
    place = place / "config.json" if place.is_dir() else place
    content = read_json(place)
    label = content.get("_name_or_path") or (
        place.absolute().parent.name if place.name == "config.json" else place.stem
    )
    return trace_model(build_model(content, where=str(path)), seq_len=seq_len, name=label)


def build_model(content: dict[str, Any], *, where: str = "config") -> Any:
    """Return the causal language model of a config.json on the meta device."""
    try:
        import transformers
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    except ImportError:
        raise ConfigError(
            f"{where}: {_described(content)} is no known family; its code in transformers would be traced, which is not installed",
            help=INSTALL,
        ) from None
    version = transformers.__version__

    model_type = content.get("model_type")
    if model_type is None:
        raise ConfigError(
            f"{where}: {_described(content)} is not supported, and there is no model_type by which transformers knows it"
        )
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        remote = " and code of its own (auto_map), which is never run" if "auto_map" in content else ""
        raise ConfigError(
            f"{where}: {_described(content)} is no known family{remote}; transformers {version} does not have it either",
            help="`meshwright models` lists known ones; any module can be traced with profile_module (docs/models.md)",
        )
    kind = CONFIG_MAPPING[model_type]
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"{where}: {_described(content)} is no language model that continues a text",
            help="trace it from Python with profile_module and inputs of its own (docs/models.md)",
        )
    mapped = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
    names = [cls.__name__ for cls in (mapped if isinstance(mapped, tuple) else (mapped,))]
    listed = (content.get("architectures") or names)[0]
    if listed not in names and hasattr(transformers, listed):
        raise ConfigError(
            f"{where}: architecture {shown(listed)} is not supported; of model_type {model_type} {names[0]} would be traced",
            help="trace it from Python with profile_module and inputs of its own (docs/models.md)",
        )
    try:
        config = kind.from_dict(_without_code(content))
        _check_layers(config, where)
        with _quiet(), torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    except ConfigError:
        raise
    except Exception as error:  # transformers checks its settings as it builds a model, with errors of any kind
        raise ConfigError(f"{where}: transformers {version} cannot build {model_type}: {first_line(error)}") from None


def _check_layers(config: Any, where: str) -> None:
    """Raise ConfigError where a part of a configuration has more layers than can be made one by one."""
    parts = [config, *(getattr(config, name) for name in getattr(config, "sub_configs", {}) if hasattr(config, name))]
    for part in parts:
        count = getattr(part, "num_hidden_layers", None)
        if isinstance(count, int) and count > MAX_LAYERS:
            raise ConfigError(f"{where}: num_hidden_layers: {count} layers are more than {MAX_LAYERS}")


def _without_code(value: Any) -> Any:
    """Return a configuration without the settings, of it and of its parts, that name code."""
    if isinstance(value, list):
        return [_without_code(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_code(each) for key, each in value.items() if str(key).lstrip("_") not in NAMES_OF_CODE}


def default_model_types() -> list[str]:
    """Return the model_types of which the installed transformers has a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def trace_model(model: Any, *, seq_len: int, name: str) -> ModelSpec:
    """Return the spec of a causal language model of transformers."""
    tokens = torch.zeros((1, seq_len), dtype=torch.long, device="meta")
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    is_too_long = longest is not None and seq_len > longest
    why = f"; the model has {longest} positions, the sequences {seq_len} tokens" if is_too_long else ""
    try:
        with _quiet():
            return profile_module(model, {"input_ids": tokens}, name=name)
    except ConfigError as error:
        message = f"{type(model).__name__} cannot be traced: {error.message}{why}"
        raise ConfigError(message, error.details, error.help) from None
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigError(
            f"{type(model).__name__} cannot be traced: what it computes depends on the values of its input ({error.func})",
            help="plan a model of a known family of its size (`meshwright models`)",
        ) from None
    except Exception as error:  # the model's own code, which may raise anything
        raise ConfigError(f"{type(model).__name__} cannot be traced: {first_line(error)}{why}") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Let transformers not say which kernels are not installed here: that says nothing about where the plan will run."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _described(content: dict[str, Any]) -> str:
    listed = content.get("architectures")
    return shown(listed[0] if listed else content.get("model_type"))
