"""DeepSpeed's JSON and Accelerate's YAML, each with the command that starts a training script of Hugging Face's kind."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from ...schema.errors import ConfigError
from .. import accelerate, deepspeed
from ..adapter import Imported, positive_integer
from .command import Launch, devices_of
from .job import Given, Job, complete, model_called
from .settings import Entry, Settings, given
from .shell_values import Place

LENGTHS = ("max_seq_length", "max_seq_len", "max_length", "model_max_length", "block_size", "cutoff_len", "seq_length")
MODELS = ("model_name_or_path", "model_name", "pretrained_model_name_or_path", "model_id", "model")
BATCHES = ("per_device_train_batch_size", "train_batch_size", "micro_batch_size")
"""Options of training scripts, the usual one first."""

HARMLESS = (
    "fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "fsdp_state_dict_type", "fsdp_cpu_ram_efficient_loading",
    "fsdp_version", "fsdp_use_orig_params", "fsdp_sync_module_states", "fsdp_backward_prefetch", "fsdp_forward_prefetch", "gpu_ids",
    "num_machines", "num_processes", "zero3_init_flag", "zero3_save_16bit_model", "deepspeed_multinode_launcher",
    "stage3_gather_16bit_weights_on_model_save", "contiguous_gradients", "allgather_partitions", "reduce_scatter",
)  # fmt: skip
"""Settings of Accelerate and DeepSpeed that say what an estimate takes for granted, or nothing about a step."""

_NOWHERE = Place("command line", 0)

_YES = (True, "True", "true", 1)


def is_accelerate(launch: Launch) -> bool:
    """Return whether a command is `accelerate launch`."""
    return any(pair == ("accelerate", "launch") for pair in zip(launch.texts, launch.texts[1:], strict=False))


def is_deepspeed(launch: Launch) -> bool:
    """Return whether a command starts a script with DeepSpeed's configuration."""
    is_by_options = "deepspeed" in launch.options and "zero_stage" in launch.options
    return "deepspeed_config" in launch.options or launch.named("deepspeed").endswith(".json") or is_by_options


def read_deepspeed(launch: Launch, known: Given, source: str) -> Job:
    """Read the command and the JSON that it names."""
    name = launch.named("deepspeed_config") or launch.named("deepspeed")
    config = launch.table_named(name) if name else _of_options(launch)
    if config is None:
        return _deepspeed(Settings({}), launch, known, source, [f"DeepSpeed's configuration {name} is not here"])
    return _deepspeed(config, launch, known, source, [])


def _of_options(launch: Launch) -> Settings:
    """Return what scripts that build their configuration themselves take as options: --zero_stage, --offload, --dtype."""
    options = launch.options
    zero: dict[str, Entry] = {"stage": options.entries["zero_stage"]} if "zero_stage" in options else {}
    options.read |= dict.fromkeys(("deepspeed", "zero_stage"))
    if options.get("offload") is True:
        device = replace(options.entries["offload"], value="cpu")
        zero["offload_optimizer"] = Entry(Settings({"device": device}), "--offload", device.place)
    entries = {"zero_optimization": Entry(Settings(zero), "zero_optimization", _NOWHERE)}
    kind = str(options.get("dtype") or "")
    if kind in ("bf16", "fp16"):
        enabled = replace(options.entries["dtype"], value=True)
        entries[kind] = Entry(Settings({"enabled": enabled}), "--dtype", enabled.place)
    return Settings(entries)


def deepspeed_table(settings: Settings, known: Given, source: str) -> Job:
    """Read DeepSpeed's JSON alone: the model and the sequences are the user's to say."""
    return _deepspeed(settings, None, known, source, [])


def read_accelerate(launch: Launch, known: Given, source: str) -> Job:
    """Read the command and the YAML that it names; options win over the file, as Accelerate has it."""
    named = launch.named("config_file")
    table = launch.table_named(named) if named else None
    notes = [f"Accelerate's configuration {named} is not here"] if named and table is None else []
    entries = dict(table.entries) if table is not None else {}
    options = launch.options
    for name in ("mixed_precision", "num_processes"):
        if name in options:
            options.read[name] = None
            entries[name] = options.entries[name]
    if "use_fsdp" in options:
        inner = {name: options.entries[name] for name in options if name.startswith("fsdp_")}
        options.read |= dict.fromkeys([*inner, "use_fsdp"])
        entries["distributed_type"] = Entry("FSDP", "--use_fsdp", options.entries["use_fsdp"].place)
        entries["fsdp_config"] = Entry(Settings(inner), "--fsdp_...", _NOWHERE)
    return _accelerate(Settings(entries), launch, known, source, notes)


def accelerate_table(settings: Settings, known: Given, source: str) -> Job:
    """Read Accelerate's YAML alone."""
    return _accelerate(settings, None, known, source, [])


def _accelerate(config: Settings, launch: Launch | None, known: Given, source: str, notes: list[str]) -> Job:
    if str(config.get("distributed_type")) == "DEEPSPEED":
        return _deepspeed(_of_plugin(config), launch, known, source, notes)
    if "fsdp_config" in config:
        config.entries["fsdp_config"] = replace(
            config.entries["fsdp_config"], value=_second_version(config.table("fsdp_config"))
        )
    imported = accelerate.read(config, known.num_devices, known.model)
    imported = imported.replace(assumed=tuple(a for a in imported.assumed if not a.startswith("micro_batch_size")))
    return _finish(imported, config, launch, known, source, notes)


def _second_version(fsdp: Settings) -> Settings:
    """Return the settings of FSDP with what version 1 called a sharding strategy in the words of version 2."""
    strategy = fsdp.entries.get("fsdp_sharding_strategy")
    if strategy is None or "fsdp_reshard_after_forward" in fsdp:
        return fsdp
    fsdp.read["fsdp_sharding_strategy"] = None
    keeps = str(strategy.value) in ("SHARD_GRAD_OP", "2", "_HYBRID_SHARD_ZERO2", "5")
    fsdp.entries["fsdp_reshard_after_forward"] = replace(strategy, value=not keeps)
    return fsdp


def _of_plugin(config: Settings) -> Settings:
    """Return what Accelerate's plugin for DeepSpeed says as DeepSpeed's own configuration."""
    plugin = config.table("deepspeed_config")
    zero: dict[str, Entry] = {}
    entries: dict[str, Entry] = {"zero_optimization": Entry(Settings(zero), "zero_optimization", _NOWHERE)}
    if "zero_stage" in plugin:
        zero["stage"] = plugin.entries["zero_stage"]
    for name, option in (("offload_optimizer", "offload_optimizer_device"), ("offload_param", "offload_param_device")):
        if plugin.get(option) not in (None, "none"):
            zero[name] = Entry(Settings({"device": plugin.entries[option]}), name, _NOWHERE)
    if "gradient_accumulation_steps" in plugin:
        entries["gradient_accumulation_steps"] = plugin.entries["gradient_accumulation_steps"]
    kind = str(config.get("mixed_precision"))
    if kind in ("bf16", "fp16"):
        enabled = replace(config.entries["mixed_precision"], value=True)
        entries[kind] = Entry(Settings({"enabled": enabled}), kind, _NOWHERE)
    entries["zero_optimization"] = Entry(Settings(zero), "zero_optimization", _NOWHERE)
    return Settings(entries)


def _deepspeed(config: Settings, launch: Launch | None, known: Given, source: str, notes: list[str]) -> Job:
    options = launch.options if launch is not None else Settings(given(known.sets))
    for name, ours in (("train_micro_batch_size_per_gpu", BATCHES[0]), ("gradient_accumulation_steps",) * 2):
        if config.entries.get(name, Entry("auto", "", _NOWHERE)).value == "auto" and ours in options:
            config.entries[name] = options.entries[ours]
            options.read[ours] = None
    if config.entries.get("train_batch_size", Entry("auto", "", _NOWHERE)).value != "auto" and known.global_batch_size:
        config.entries.pop("train_batch_size")
    notes = notes + _fitted_steps(config, known)
    imported = deepspeed.read(config, known.num_devices, known.model)
    if "bf16" not in config and "fp16" not in config:
        kind = next((name for name in ("bf16", "fp16") if options.get(name) is True), None)
        imported = imported.replace(precision=f"{kind}-mixed" if kind else None)
    assumed_else = tuple(line for line in imported.assumed if not line.startswith(("pp 1", "micro_batch_size")))
    return _finish(imported.replace(assumed=assumed_else), config, launch, known, source, notes, cost="deepspeed")


def _fitted_steps(config: Settings, known: Given) -> list[str]:
    """Leave the accumulation open where it is for another number of devices than the cluster's: the batch stays."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    values = [config.entries[name].value for name in names if name in config.entries]
    batch, micro, steps = values if len(values) == len(names) else (0, 0, 0)
    if not all(isinstance(value, int) and value > 0 for value in (batch, micro, steps)):
        return []
    degrees = config.table("tensor_parallel").get("autotp_size") or 1, config.get("sequence_parallel_size", 1)
    tensor, sequence = (positive_integer(value, "tensor_parallel or sequence_parallel_size") for value in degrees)
    ranks = max(known.num_devices // (tensor * sequence), 1)
    if batch == micro * steps * ranks or batch % (micro * ranks):
        return []
    config.entries.pop(names[2])
    return [
        f"gradient_accumulation_steps {batch // (micro * ranks)}: so that train_batch_size stays {batch} on {ranks} ranks"
    ]


def _finish(
    imported: Imported,
    config: Settings,
    launch: Launch | None,
    known: Given,
    source: str,
    notes: list[str],
    *,
    cost: str = "",
) -> Job:
    """Complete what a configuration says by what the training script's options say."""
    options = launch.options if launch is not None else Settings(given(known.sets))
    assumed = list(notes)
    if launch is not None:
        assumed += devices_of(launch, known)[1]
    layout = imported.layout
    micro = _first(options, BATCHES)
    if micro is not None and "train_micro_batch_size_per_gpu" not in config:
        layout = layout.replace(micro_batch_size=positive_integer(micro, BATCHES[0]))
    elif "train_micro_batch_size_per_gpu" not in config and "train_batch_size" not in config:
        assumed.append("micro_batch_size 1: it is the training script's (--set per_device_train_batch_size=N)")
    steps = options.get("gradient_accumulation_steps")
    batch = imported.global_batch_size
    if batch is None and (micro is not None or steps is not None):
        batch = layout.dp * layout.micro_batch_size * positive_integer(steps or 1, "gradient_accumulation_steps")
    recompute = options.get("gradient_checkpointing")
    if recompute in _YES:
        layout = layout.replace(recompute="full")
    elif "fsdp_config" not in config:
        assumed.append("recompute none: it is the training script's (--set gradient_checkpointing=true)")
    length, name = _first(options, LENGTHS), _first(options, MODELS)
    model = known.model or (model_called(str(name)) if name else None)
    if model is None and name:
        raise ConfigError(
            f"the model {name} is not in the catalogue", help="add --model with its config.json, or a name of it"
        )
    attention = str(options.get("attn_implementation") or "flash")
    imported = imported.replace(
        layout=layout,
        global_batch_size=batch,
        seq_len=imported.seq_len or (positive_integer(length, "max_seq_length") if length is not None else None),
    )
    return complete(
        imported,
        known,
        source=source,
        model=model,
        switches=_switches(attention, options, config),
        engine=cost or imported.engine,
        facts=(*options.facts(), *config.facts()),
        assumed=assumed,
        unread=tuple(
            name for name in (*config.ignored(), *options.ignored()) if name.rpartition(".")[2] not in HARMLESS
        ),
        undecided=tuple(launch.script.undecided) if launch is not None else (),
    )


def _switches(attention: str, options: Settings, config: Settings) -> dict[str, Any]:
    zero = config.table("zero_optimization")
    optimizer = str(options.get("optim") or "adamw")
    overlap = bool(zero.get("overlap_comm", zero.get("stage") == 3)) if len(zero) else True
    return {
        "attention": "math" if attention == "eager" else "flash",
        "optimizer": "sgd" if optimizer == "sgd" else "adamw-8bit" if re.search("adam.*8bit", optimizer) else "adamw",
        "paged_states": optimizer.startswith("paged_"),
        **({"loss": "fused", "fusion": "compiled"} if options.get("use_liger_kernel") in _YES else {}),
        "overlap": overlap,
    }


def _first(options: Settings, names: tuple[str, ...]) -> Any:
    """Return the first of some options that is there."""
    return next((options[name] for name in names if name in options), None)
