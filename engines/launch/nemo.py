"""NeMo and Megatron Bridge: YAML of a recipe or of overrides, and overrides on the command line (``model.name=value``)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from ...schema.errors import ConfigError
from ..adapter import optional_integer
from . import megatron
from .command import Launch, devices_of
from .job import Given, Job, complete, model_called
from .megatron_model import model_of
from .settings import Entry, Settings, given, scalar
from .shell_values import Place

ALIASES = {
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "sequence_length": "seq_length",
    "encoder_seq_length": "seq_length",
    "activations_checkpoint_granularity": "recompute_granularity",
    "activations_checkpoint_method": "recompute_method",
    "activations_checkpoint_num_layers": "recompute_num_layers",
    "num_layers_per_virtual_stage": "num_layers_per_virtual_pipeline_stage",
    "devices": "nproc_per_node",
    "num_nodes": "nnodes",
    "num_moe_experts": "num_experts",
    "num_gpus_per_node": "nproc_per_node",
    "tp_comm_overlap_cfg": "",
    "ub_tp_comm_overlap": "tp_comm_overlap",
}
"""Name in NeMo 1, NeMo 2 or Megatron Bridge -> Megatron's option."""

DECIDING = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "micro_batch_size",
    "global_batch_size",
    "seq_length",
)
"""What a recipe decides where neither a file nor an override does."""

_RECIPES = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "sequence_parallel")
"""What recipes turn on."""

_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)")


def is_started(launch: Launch) -> bool:
    """Return whether a command has overrides of a recipe."""
    return bool(megatron.TYPICAL & _overrides(launch).keys())


def read_launch(launch: Launch, known: Given, source: str) -> Job:
    """Read overrides on the command line, and the YAML that it names."""
    _, assumed = devices_of(launch, known)
    entries: dict[str, Entry] = {}
    for option in ("config_file", "config_name", "config"):
        named = launch.options.get(option)
        table = launch.table_named(str(named)) if named else None
        entries |= megatron.leaves(table) if table is not None else {}
    recipe = str(launch.options.get("recipe") or launch.options.get("recipe_name") or "")
    entries |= _overrides(launch)
    model = known.model or (model_called(recipe) if recipe else None)
    return _job(entries, known, source, assumed=assumed, model=model, undecided=tuple(launch.script.undecided))


def read_table(settings: Settings, known: Given, source: str) -> Job:
    """Read the YAML of a recipe or of overrides."""
    return _job(megatron.leaves(settings), known, source, assumed=[], model=known.model)


def _overrides(launch: Launch) -> dict[str, Entry]:
    settings_by_name = {}
    for word in launch.words:
        match = _OVERRIDE.fullmatch(word.text)
        if match and not word.text.startswith("--"):
            main = word.pieces[-1]
            variable = main.variable if main.place != word.place else ""
            entry = Entry(scalar(match[2]), match[1], main.place, variable, word.unknown)
            settings_by_name[match[1].rpartition(".")[2]] = entry
    return settings_by_name


def _job(
    entries: dict[str, Entry],
    known: Given,
    source: str,
    *,
    assumed: list[str],
    model: Any,
    undecided: tuple[str, ...] = (),
) -> Job:
    named = {ALIASES.get(name, name): entry for name, entry in entries.items() if entry.value not in (None, "null")}
    settings = Settings(_as_options(named) | given(known.sets))
    missing = [name for name in DECIDING if name not in settings]
    if known.seq_len:
        missing = [name for name in missing if name != "seq_length"]
    if known.global_batch_size:
        missing = [name for name in missing if name != "global_batch_size"]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} the recipe's own, which is not in the file",
            help="add " + " ".join(f"--set {name}=N" for name in missing),
        )
    if model is None:
        if "num_layers" not in settings:
            raise ConfigError(
                "the model is the recipe's, which is not in the file", help="add --model, e.g. --model llama-3.1-8b"
            )
        model, more = model_of(settings)
        assumed += more
    for name in _RECIPES[:3]:
        if name not in settings:
            assumed.append(f"{name} on, as recipes have it")
            settings.entries[name] = Entry(True, "", Place("", 0))
    if "sequence_parallel" not in settings and settings["tensor_model_parallel_size"] != 1:
        assumed.append("sequence_parallel on with tensor parallelism, as recipes have it")
        settings.entries["sequence_parallel"] = Entry(True, "", Place("", 0))
    imported = megatron.imported_from(settings, known.num_devices, model)
    precision = str(settings.get("mixed_precision") or settings.get("precision") or "bf16_mixed")
    optional_integer(settings, "nnodes"), optional_integer(settings, "nproc_per_node")
    settings.read |= {name: None for name in megatron.ALSO_READ if name in settings}
    return complete(
        imported.replace(engine="nemo", precision=_precision(precision)),
        known,
        source=source,
        model=model,
        switches=megatron.switches(settings, fuses_loss=True) | {"dropout": False},
        engine="nemo",
        facts=tuple(settings.facts()),
        assumed=(*assumed, *_defaults(settings)),
        unmodelled=megatron.unmodelled(settings),
        unread=tuple(settings.ignored()),
        undecided=undecided,
    )


def _as_options(entries: dict[str, Entry]) -> dict[str, Entry]:
    """Return settings as Megatron's options have them: what NeMo says the other way round is turned."""
    settings_by_name = dict(entries)

    def turn(name: str, option: str, value: Any, *, when: Any) -> None:
        if name in entries and entries[name].value in when:
            settings_by_name[option] = replace(entries[name], value=value)

    turn("bias", "disable_bias_linear", True, when=(False,))
    turn("add_bias_linear", "disable_bias_linear", True, when=(False,))
    turn("share_embeddings_and_output_weights", "untie_embeddings_and_output_weights", True, when=(False,))
    turn("activation", "swiglu", True, when=("swiglu", "fast-swiglu"))
    turn("gated_linear_unit", "swiglu", True, when=(True,))
    turn("normalization", "normalization", "RMSNorm", when=("rmsnorm", "RMSNorm"))
    if "num_query_groups" in entries:
        settings_by_name["group_query_attention"] = replace(entries["num_query_groups"], value=True)
    return settings_by_name


def _precision(text: str) -> str:
    text = text.lower()
    return "fp8" if "fp8" in text else "fp16-mixed" if "16" in text and "bf16" not in text else "bf16-mixed"


def _defaults(settings: Settings) -> tuple[str, ...]:
    names = ("context_parallel_size", "recompute_granularity")
    return tuple(f"{name} {megatron.DEFAULTS[name]} (no override)" for name in names if name not in settings)
