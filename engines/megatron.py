"""Megatron-LM: a shell script of options for pretrain_gpt.py, written and read back without running anything."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from ..schema.errors import ConfigError
from ..schema.model import ModelSpec
from ..schema.training_plan import TrainingPlan
from .documents import Adapter, Exported, Imported, optional_integer, positive_integer, require_num_devices
from .limits import placement_not_expressed, torchrun
from .megatron_settings import (
    LIMITS,
    VERSION,
    layout_from_settings,
    model_settings,
    plan_settings,
    recompute_not_expressed,
)

SCRIPT = "pretrain.sh"

_LAUNCHER = frozenset({"nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint"})

_USED = _LAUNCHER | {
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout", "cp_comm_type", "hierarchical_context_parallel_sizes", "use_distributed_optimizer",
    "num_distributed_optimizer_instances", "sequence_parallel", "micro_batch_size", "global_batch_size", "seq_length",
    "num_layers", "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules",
    "recompute_activations", "optimizer_cpu_offload", "optimizer_offload_fraction", "bf16", "fp16", "fp8_format",
}  # fmt: skip


def write(plan: TrainingPlan) -> Exported:
    """Return the plan as options."""
    text = "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# Megatron-LM {VERSION}: {plan.model.name} on {plan.cluster.num_devices} devices, {plan.layout}",
            "# Run on every node. What you add on the command line goes to pretrain_gpt.py:",
            "# data, tokenizer, learning rate, --train-iters, checkpoints.",
            "set -euo pipefail",
            *(["export CUDA_DEVICE_MAX_CONNECTIONS=1"] if plan.layout.tp * plan.layout.cp > 1 else []),
            "",
            bash_array("MODEL_ARGS", model_settings(plan.model, plan.workload.seq_len)),
            "",
            bash_array("PLAN_ARGS", plan_settings(plan)),
            "",
            f'{torchrun(plan)} pretrain_gpt.py "${{MODEL_ARGS[@]}}" "${{PLAN_ARGS[@]}}" "$@"',
            "",
        ]
    )
    return Exported(
        engine="megatron",
        version=VERSION,
        files=((SCRIPT, text),),
        not_expressed=(*placement_not_expressed(plan), *recompute_not_expressed(plan)),
        to_set=(
            "data, tokenizer, learning rate and its schedule, --train-iters, checkpoints: after the script's name",
        ),
        command=f"bash {SCRIPT} --train-iters 1000 --lr 3e-4 --mock-data --tokenizer-type NullTokenizer",
    )


def read(text: str, num_devices: int | None, model: ModelSpec | None) -> Imported:
    """Read a script or a command line with Megatron's options.

    Raises:
        ConfigError: it has none of them, or its numbers do not fit together.
    """
    settings = read_options(text)
    used = {name: value for name, value in settings.items() if name in _USED}
    if not used.keys() - _LAUNCHER:
        raise ConfigError("no option of Megatron-LM was found", help="e.g. --tensor-model-parallel-size 8")
    devices = num_devices or _world_size(settings)
    layout, assumed = layout_from_settings(used, devices, model)
    return Imported(
        engine="megatron",
        layout=layout,
        num_devices=devices,
        global_batch_size=optional_integer(settings, "global_batch_size"),
        seq_len=optional_integer(settings, "seq_length"),
        precision=_precision(settings),
        ignored=tuple(sorted(settings.keys() - used.keys())),
        assumed=assumed,
    )


def _world_size(settings: dict[str, Any]) -> int:
    first = {name: value[0] if isinstance(value, list) else value for name, value in settings.items()}
    if first.get("nproc_per_node") is None:
        return require_num_devices(None)
    nodes = positive_integer(first.get("nnodes") or 1, "nnodes")
    return nodes * positive_integer(first["nproc_per_node"], "nproc-per-node")


def _precision(settings: dict[str, Any]) -> str:
    if settings.get("fp8_format"):
        return "fp8"
    return "bf16-mixed" if settings.get("bf16") else "fp16-mixed" if settings.get("fp16") else "fp32"


_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)

_SEPARATORS = re.compile(r"[();&|\n]+")

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::?[-=?][^}]*)?\}|\$([A-Za-z_][A-Za-z0-9_]*)")


def option_words(settings: Mapping[str, Any]) -> list[str]:
    """Return ``--name value`` of each setting; True is a bare flag, False and None say nothing."""
    lines = []
    for name, value in settings.items():
        if value is None or value is False:
            continue
        words = [] if value is True else [str(v) for v in value] if isinstance(value, list) else [str(value)]
        lines.append(" ".join([f"--{name.replace('_', '-')}", *map(shlex.quote, words)]))
    return lines


def bash_array(name: str, settings: Mapping[str, Any]) -> str:
    """Return ``NAME=(`` one option a line ``)``."""
    return "\n".join([f"{name}=(", *(f"    {line}" for line in option_words(settings)), ")"])


def read_options(text: str) -> dict[str, Any]:
    """Return the options of a script or of a command line by their names with underscores; variables that it sets are put in.

    A value is True (a bare flag), a number, a text, or a list of those.

    Raises:
        ConfigError: a quote is not closed.
    """
    variables: dict[str, str] = {}
    options: dict[str, list[str]] = {}
    current: list[str] | None = None
    for word in _expanded(_words(text), variables):
        if _SEPARATORS.fullmatch(word) or _ASSIGNMENT.fullmatch(word):
            current = None
        elif word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            current = options[name.replace("-", "_")] = [value] if equals else []
        elif current is not None:
            current.append(word)
    return {name: _value(values) for name, values in options.items()}


def _words(text: str) -> list[str]:
    """Split a shell script into words; the ends of commands are words too."""
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=";&|\n")
    lexer.whitespace, lexer.whitespace_split = " \t\r", True
    try:
        return list(lexer)
    except ValueError as error:
        raise ConfigError(f"not a shell script: {error}") from None


def _expanded(words: list[str], variables: dict[str, str]) -> Iterator[str]:
    """Yield the words with variables of the text put in; one that is only a variable is taken apart, as the shell does."""
    for word in words:
        match = _ASSIGNMENT.fullmatch(word)
        if match and not match[2].startswith("("):
            variables[match[1]] = _filled(match[2], variables)
            yield word
        elif _VARIABLE.fullmatch(word):
            yield from _filled(word, variables).split()
        else:
            yield _filled(word, variables)


def _filled(word: str, variables: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda m: variables.get(m[1] or m[2], m[0]), word)


def _value(words: list[str]) -> Any:
    values = [_scalar(word) for word in words]
    return True if not values else values[0] if len(values) == 1 else values


def _scalar(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


ADAPTER = Adapter(name="megatron", version=VERSION, limits=LIMITS, write=write, read_text=read)
