"""Megatron-LM's and Megatron-DeepSpeed's options as a job: its model, its batch, its layout and its switches."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from ...schema.errors import ConfigError
from ...schema.task import Module
from .. import adapter
from ..adapter import Imported
from ..megatron_settings import layout_from_settings
from .command import Launch, devices_of
from .job import Given, Job, complete
from .megatron_model import model_of
from .settings import Entry, Settings, from_options, given, scalar
from .shell import assigned_words, read_script
from .shell_values import options_of

TYPICAL = frozenset({
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size", "num_layers", "hidden_size",
    "num_attention_heads", "use_distributed_optimizer", "sequence_parallel", "seq_length",
})  # fmt: skip
"""Some options by which Megatron's command line is recognised."""

KNOWN = TYPICAL | {
    "context_parallel_size",
    "expert_model_parallel_size",
    "recompute_granularity",
    "global_batch_size",
    "cp_comm_type",
}

UNMODELLED = {
    "rampup_batch_size": "costed at the full batch",
    "step_batch_size_schedule": "costed at the full batch",
    "moe_expert_capacity_factor": "costed without dropped or padded tokens",
    "moe_shared_expert_overlap": "shared experts are costed one after the other",
    "moe_parallel_folding": "costed as expert_model_parallel_size says",
    "delay_wgrad_compute": "costed as --overlap-moe-expert-parallel-comm alone",
    "use_megatron_fsdp": "costed as the distributed optimizer",
    "use_torch_fsdp2": "costed as the distributed optimizer; torchtitan's configuration is costed as FSDP2",
    "use_custom_fsdp": "costed as the distributed optimizer",
    "mtp_num_layers": "costed without heads for further tokens",
    "use_precision_aware_optimizer": "costed with states in fp32",
    "main_grads_dtype": "costed as the precision says",
    "exp_avg_dtype": "costed with states in fp32",
    "fp8_param_gather": "parameters are gathered in 16 bits",
    "fp8_param": "parameters are gathered in 16 bits",
    "decoder_first_pipeline_num_layers": "costed with stages as even as can be",
    "decoder_last_pipeline_num_layers": "costed with stages as even as can be",
    "num_layers_in_first_pipeline_stage": "costed with stages as even as can be",
    "num_layers_in_last_pipeline_stage": "costed with stages as even as can be",
    "fine_grained_activation_offloading": "costed without activations on the host",
    "cpu_offloading_num_layers": "costed without activations on the host",
    "window_size": "costed with attention to the entire sequence",
}
"""Options that change the cost and that the model of Megatron's GPT here does not have, and what it does instead."""

DEFAULTS = {
    "tensor_model_parallel_size": "1", "pipeline_model_parallel_size": "1", "context_parallel_size": "1",
    "use_distributed_optimizer": "off: every rank keeps all optimizer states", "recompute_granularity": "none",
    "overlap_grad_reduce": "off", "tp_comm_overlap": "off",
}  # fmt: skip
"""Options whose absence decides something, and what Megatron does then."""


ALSO_READ = (
    "bf16", "overlap_param_gather", "sequence_parallel", "recompute_method", "recompute_num_layers", "recompute_modules",
    "moe_flex_dispatcher_backend", "cuda_graph_scope", "cuda_graph_modules", "te_rng_tracker",
    "deepspeed", "deepspeed_config", "zero_stage", "tokenizer_type", "swiglu", "moe_grouped_gemm", "cross_entropy_fusion_impl",
)  # fmt: skip
"""Options that are known, and decide nothing where another one does."""


def assumed_defaults(settings: Mapping[str, Any], *, is_deepspeed: bool = False) -> Iterator[str]:
    """Yield what the engine does where options are absent."""
    for name, text in DEFAULTS.items():
        if is_deepspeed and name == "use_distributed_optimizer":
            continue
        if name == "recompute_granularity" and {"checkpoint_activations", "recompute_activations"} & settings.keys():
            continue
        if name not in settings and not (
            name == "tp_comm_overlap" and settings.get("tensor_model_parallel_size", 1) == 1
        ):
            yield f"{name} {text} (Megatron's default)"


def switches(
    settings: Mapping[str, Any], *, has_flash_attention: bool = True, fuses_loss: bool = False
) -> dict[str, Any]:
    """Return how the engine executes the step; ``has_flash_attention`` and ``fuses_loss``: unless an option says otherwise."""
    backend = str(settings.get("attention_backend") or "")
    is_local = settings.get("transformer_impl") == "local" or not has_flash_attention
    is_math = backend in ("unfused", "local") or (is_local and not settings.get("use_flash_attn"))
    has_experts = bool(settings.get("num_experts")) or (settings.get("expert_model_parallel_size") or 1) != 1
    sends_copies = has_experts and settings.get("moe_token_dispatcher_type") != "flex"
    is_fused = settings.get("cross_entropy_loss_fusion", fuses_loss)
    is_in_place = is_fused and settings.get("cross_entropy_fusion_impl") == "te"
    optimizer = settings.get("optimizer") or "adam"
    dropouts = [settings.get(name, 0.1) for name in ("attention_dropout", "hidden_dropout")]
    return {
        "optimizer": "adamw" if optimizer == "adam" else optimizer,
        "attention": "math" if is_math else "flash",
        **({"token_dispatch": "copies"} if sends_copies else {}),
        "overlap": bool(settings.get("overlap_grad_reduce") or settings.get("overlap_param_gather")),
        "fp8_activation_input": bool(settings.get("activation_func_fp8_input_store")),
        "recompute_modules": recompute_modules(settings),
        **({"loss": "in_place"} if is_in_place else {}),
        "dropout": any(isinstance(value, int | float) and value > 0 for value in dropouts),
    }


def recompute_modules(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the modules that selective recompute runs again, as far as they are modelled."""
    stated = settings.get("recompute_modules") if settings.get("recompute_granularity") == "selective" else None
    names = stated if isinstance(stated, list) else str(stated or "").split()
    return tuple(str(name) for name in names if name in get_args(Module))


def unmodelled(settings: Settings) -> tuple[str, ...]:
    """Return what of the settings changes the cost and is not modelled."""
    said = [name for name in UNMODELLED if name in settings and settings[name] not in (0, False, None, "none")]
    return tuple(f"{settings.entries[name].setting}: {UNMODELLED[name]}" for name in said)


def is_started(launch: Launch) -> bool:
    """Return whether a command has Megatron's options."""
    return len(TYPICAL & launch.options.keys()) >= 2


def is_table(settings: Settings) -> bool:
    """Return whether a table has Megatron's options, spelled as on the command line or by their names."""
    names = {name.removeprefix("--").replace("-", "_") for name in leaves(settings)}
    return any(name.startswith("--") for name in leaves(settings)) and len(TYPICAL & names) > 1


def settings_of(text: str) -> Settings:
    """Return the options of the command with most of Megatron's, or of all words of a text that has no such command.

    Raises:
        ConfigError: it has none of them.
    """
    script = read_script(text, Path("script.sh"))
    commands = [*(each.words for each in script.commands), assigned_words(script)]
    settings = [Settings(from_options(options_of(words))) for words in commands]
    settings_of_launch = max(settings, key=lambda each: len(KNOWN & each.keys()))
    if not KNOWN & settings_of_launch.keys():
        raise ConfigError("no option of Megatron-LM was found", help="e.g. --tensor-model-parallel-size 8")
    return settings_of_launch


def leaves(settings: Settings) -> dict[str, Entry]:
    """Return all settings of a table and of the tables within by their last names."""
    by_name: dict[str, Entry] = {}
    for name, entry in settings.entries.items():
        by_name |= leaves(entry.value) if isinstance(entry.value, Settings) else {name: entry}
    return by_name


def read_table(settings: Settings, known: Given, source: str) -> Job:
    """Read a table of options, ``--name: value``; false ones are not said."""
    entries = {
        name.removeprefix("--").replace("-", "_"): replace(entry, value=_words(entry.value))
        for name, entry in leaves(settings).items()
        if entry.value not in (False, None)
    }
    return _job(Settings(entries | given(known.sets)), known, known.num_devices, source=source, assumed=[])


def _words(value: Any) -> Any:
    """Return a value of a table as the command line would say it: several words, or a list as a text, are a list."""
    if not isinstance(value, str) or not re.search(r"[\s\[]", value):
        return value
    return [scalar(word) for word in re.split(r"[\s,\[\]]+", value) if word]


def read_launch(launch: Launch, known: Given, source: str) -> Job:
    """Read a command line, and the DeepSpeed configuration that it names."""
    devices, assumed = devices_of(launch, known)
    settings = launch.options
    if "deepspeed" not in settings and "deepspeed_config" not in settings:
        return _job(settings, known, devices, source=source, assumed=assumed, undecided=launch.script.undecided)
    named = launch.named("deepspeed_config")
    config = launch.table_named(named)
    if config is None:
        assumed.append(f"DeepSpeed's configuration {named} is not here: --zero-stage is taken")
        config = Settings({})
    return _job(
        settings, known, devices, source=source, assumed=assumed, undecided=launch.script.undecided, deepspeed=config
    )


def precision_of(settings: Mapping[str, Any]) -> str:
    """Return the precision of the products."""
    if settings.get("fp8_format") or settings.get("fp8"):
        return "fp8"
    if settings.get("fp4_format") or settings.get("fp4"):
        return "nvfp4"
    return "bf16-mixed" if settings.get("bf16") else "fp16-mixed" if settings.get("fp16") else "fp32"


def _job(
    settings: Settings,
    known: Given,
    devices: int,
    *,
    source: str,
    assumed: list[str],
    undecided: list[str] | None = None,
    deepspeed: Settings | None = None,
) -> Job:
    model = known.model
    if model is None:
        model, more = model_of(settings)
        assumed += more
    imported = imported_from(settings, devices, model)
    is_deepspeed = deepspeed is not None
    zero_stage = _zero_stage(settings, deepspeed, imported, assumed) if deepspeed is not None else None
    if zero_stage is not None:
        dp = imported.layout.dp
        shards = dp if zero_stage else 1
        sharded = {"dp_replicate": dp // shards, "dp_shard": shards, "zero_stage": zero_stage if shards > 1 else 0}
        imported = imported.replace(layout=imported.layout.replace(**sharded))
    switched = switches(settings, has_flash_attention=not is_deepspeed)
    settings.read |= {name: None for name in ALSO_READ if name in settings}
    return complete(
        imported,
        known,
        source=source,
        model=model,
        switches=switched,
        engine="deepspeed" if is_deepspeed else "megatron",
        facts=(*settings.facts(), *(deepspeed.facts() if deepspeed else ())),
        assumed=(*assumed, *assumed_defaults(settings, is_deepspeed=is_deepspeed)),
        unmodelled=unmodelled(settings),
        unread=(*settings.ignored(), *(deepspeed.ignored() if deepspeed else ())),
        undecided=tuple(undecided or ()),
    )


def imported_from(settings: Settings, devices: int, model: Any) -> Imported:
    """Return layout and batch of Megatron's options.

    Raises:
        ConfigError: the degrees do not divide the devices.
    """
    entries = dict(settings.entries)
    if "checkpoint_activations" in entries and "recompute_granularity" not in entries:  # before core_v0.2
        entries["recompute_granularity"] = replace(entries["checkpoint_activations"], value="full")
    both = Settings(entries)
    try:
        layout, assumed = layout_from_settings(both, devices, model)
    except ConfigError as error:
        help_ = f"the layout is for another number of devices than the cluster's {devices}: change --cluster"
        raise ConfigError(error.message, help=help_ if "divide" in error.message else error.help) from None
    imported = Imported(
        engine="megatron",
        layout=layout,
        num_devices=devices,
        global_batch_size=adapter.optional_integer(both, "global_batch_size"),
        seq_len=adapter.optional_integer(both, "seq_length"),
        precision=precision_of(both),
        assumed=assumed,
    )
    settings.read |= {name: None for name in both.read if name in settings} | (
        {"checkpoint_activations": None} if "checkpoint_activations" in settings else {}
    )
    return imported


def _zero_stage(settings: Settings, config: Settings, imported: Imported, assumed: list[str]) -> int:
    """Return what DeepSpeed shards: under a pipeline in bf16 its own optimizer shards states whatever the stage."""
    zero = config.table("zero_optimization")
    stage = zero.get("stage", settings.get("zero_stage", 0))
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"ZeRO stage {stage}: must be 0, 1, 2 or 3")
    if stage == 0 and imported.precision == "bf16-mixed" and imported.layout.pp > 1:
        assumed.append(
            "zero_stage 1: under a pipeline in bf16 DeepSpeed's BF16_Optimizer shards states, whatever the stage says"
        )
        return 1
    return int(stage)
