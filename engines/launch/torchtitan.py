"""torchtitan: TOML (0.1, 0.2), a module of configurations (0.3 and later), and the command that starts either with overrides."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...schema.errors import ConfigError
from ...schema.model import ModelSpec
from .. import torchtitan
from .command import Launch, devices_of
from .job import Given, Job, complete, model_called
from .settings import Entry, Settings, given
from .shell_values import Place

_FLAVORS = {function: name for name, (_, function) in torchtitan.MODELS.items()}
"""``llama3_8b`` -> catalogue name."""

_CHECKPOINTING = {"FullAC": "full", "SelectiveAC": "selective"}


def is_started(launch: Launch) -> bool:
    """Return whether a command starts torchtitan."""
    return any("torchtitan" in text for text in launch.texts) or any(
        name in launch.options for name in ("job.config_file", "job.config-file", "parallelism.tensor_parallel_degree")
    )


def read_launch(launch: Launch, known: Given, source: str) -> Job:
    """Read the command, its configuration file, and what overrides it."""
    _, assumed = devices_of(launch, known)
    options = launch.options
    named = next((str(options[name]) for name in ("job.config_file", "job.config_file_path") if name in options), "")
    config = launch.table_named(named) if named else None
    if named and config is None:
        assumed.append(f"the configuration {named} is not here: what overrides say is taken")
    content = config or Settings({})
    function = str(options.get("config") or "")
    overrides = _nested(
        {name: entry for name, entry in options.entries.items() if "." in name and not name.startswith("job.")}
    )
    _merge(content, overrides)
    for name in overrides.entries:
        options.read |= dict.fromkeys(option for option in options if option.startswith(f"{name}."))
    return _job(content, known, source, assumed, function, options=options, undecided=tuple(launch.script.undecided))


def read_table(settings: Settings, known: Given, source: str) -> Job:
    """Read a TOML file."""
    _merge(settings, _nested(given(known.sets)))
    return _job(settings, known, source, [], "")


def read_module(text: str, known: Given, path: Path) -> Job:
    """Read a module with a function that returns or changes a configuration; nothing of it is run.

    ``--set config=NAME`` says which function, where there are several.

    Raises:
        ConfigError: it is not Python, or has no such function.
    """
    try:
        tree = ast.parse(text)
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        named = [name for name, node in functions.items() if _configures(node)]
        function_name = known.sets.get("config", named[0] if len(named) == 1 else "")
        if function_name not in functions:
            raise ConfigError(
                f"it has the configurations {', '.join(named) or 'none'}",
                help=f"add --set config={named[0]}" if named else "give a module of configurations",
            )
        settings, base = _of_function(function_name, functions, path.name, path.absolute().parent.name)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"not a Python module: {error}") from None
    except (RecursionError, MemoryError):
        raise ConfigError("not a configuration: its expressions are nested too deeply") from None
    _merge(settings, _nested({k: v for k, v in given(known.sets).items() if k != "config"}))
    return _job(settings, known, str(path), [], base)


def settings_of(text: str) -> Settings:
    """Return the settings that the only function of a module makes."""
    functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    return _of_function(next(iter(functions)), functions, "", "")[0]


def _configures(node: ast.FunctionDef) -> bool:
    return node.returns is not None and ast.unparse(node.returns).endswith("Config")


def _of_function(name: str, functions: dict[str, ast.FunctionDef], file: str, package: str) -> tuple[Settings, str]:
    """Return the settings of a function, those of the function it starts from included, and what names its model."""
    settings, base = Settings({}), name
    body, others = functions[name].body, functions.keys() - {name}
    starts = [idx for idx, node in enumerate(body) if _called_for_config(node) in others]
    for node in body[starts[-1] if starts else 0 :]:  # what stood before is given up, and costs nothing to leave out
        called = _called_for_config(node)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and called:
            if called in others:
                settings, base = _of_function(called, functions, file, package)
            elif called.endswith("Config"):
                _merge(settings, _of_call(node.value, file))
            else:
                base = called
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
            _merge(settings, _of_call(node.value, file))
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("config."):
            path = ast.unparse(node.targets[0]).split(".")[1:]
            entry = _entry(node.value, ".".join(path), file)
            _merge(settings, Settings({path[0]: entry}) if len(path) == 1 else _nested({".".join(path): entry}))
        elif torchtitan.sets_tf32(node):
            entry = Entry("tf32", "torch.set_float32_matmul_precision", Place(file, node.lineno))
            _merge(settings, _nested({f"training.{torchtitan.PRODUCTS}": entry}))
    for inner in ast.walk(functions[name]):
        if isinstance(inner, ast.Call) and ast.unparse(inner.func) == "model_registry" and inner.args:
            flavor = ast.unparse(inner.args[0]).strip("'\"")
            base = f"{package}_{flavor.lower().replace('-', '_')}"
    return settings, base


def _called_for_config(node: ast.stmt) -> str:
    """Return what is called in ``config = f(...)``; empty: the statement is another."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and ast.unparse(node.targets[0]) == "config":
        return ast.unparse(node.value.func)
    return ""


def _of_call(call: ast.Call, file: str) -> Settings:
    """Return the keywords of ``Trainer.Config(training=TrainingConfig(...))`` as sections."""
    return Settings({word.arg: _entry(word.value, word.arg, file) for word in call.keywords if word.arg})


def _entry(node: ast.expr, name: str, file: str) -> Entry:
    """Return a value: a literal, a table for a call with keywords, and for kinds of checkpointing their mode."""
    place = Place(file, node.lineno)
    if name.endswith("activation_checkpoint"):
        shown = ast.unparse(node)
        mode = next((mode for kind, mode in _CHECKPOINTING.items() if kind in shown), "none")
        return Entry(Settings({"mode": Entry(mode, f"{name}.mode", place)}), name, place)
    try:
        return Entry(ast.literal_eval(node), name, place)
    except (ValueError, TypeError):
        if isinstance(node, ast.BinOp) and (value := _product(node)):
            return Entry(value, name, place)
        if isinstance(node, ast.Call) and node.keywords:
            inner = _of_call(node, file)
            named = {key: replace(entry, setting=f"{name}.{entry.setting}") for key, entry in inner.entries.items()}
            return Entry(Settings(named), name, place)
        return Entry(ast.unparse(node), name, place)


def _product(node: ast.BinOp) -> int | None:
    sides = (node.left, node.right)
    if isinstance(node.op, ast.Mult) and all(isinstance(s, ast.Constant) and isinstance(s.value, int) for s in sides):
        return int(node.left.value * node.right.value)  # type: ignore[attr-defined]
    return None


def _nested(entries: dict[str, Entry]) -> Settings:
    """Return ``section.name`` settings as tables."""
    tables: dict[str, Entry] = {}
    for name, entry in entries.items():
        section, dot, rest = name.partition(".")
        if not dot:
            continue
        if section not in tables:
            tables[section] = Entry(Settings({}), section, entry.place)
        tables[section].value.entries[rest.replace("-", "_")] = entry
    return Settings(tables)


def _merge(settings: Settings, others: Settings) -> None:
    """Put settings over others, table by table."""
    for name, entry in others.entries.items():
        present = settings.entries.get(name)
        if present is not None and isinstance(present.value, Settings) and isinstance(entry.value, Settings):
            present.value.entries |= entry.value.entries
        else:
            settings.entries[name] = entry


def _job(
    content: Settings,
    known: Given,
    source: str,
    assumed: list[str],
    function: str,
    *,
    options: Settings | None = None,
    undecided: tuple[str, ...] = (),
) -> Job:
    model = known.model or _model(content, function)
    training = content.get("training")
    if not isinstance(training, Settings):
        training = Settings({})
        content.entries["training"] = Entry(training, "training", Place("", 0))
    if not isinstance(content.get("parallelism"), Settings):
        # Without any setting torchtitan shards everything over all devices.
        axes = Settings({"data_parallel_shard_degree": Entry(-1, "", Place("", 0))})
        content.entries["parallelism"] = Entry(axes, "parallelism", Place("", 0))
        assumed.append("every state sharded over all devices (torchtitan's default)")
    _of_tokens(training)
    if known.seq_len is None and "seq_len" not in training:
        assumed.append("sequences of 2048 tokens (torchtitan's default)")
        training.entries["seq_len"] = Entry(2048, "", Place("", 0))
    shard = content["parallelism"].entries.get("data_parallel_shard_degree")
    if shard is not None and shard.value != -1:
        assumed.append(f"{shard.setting} fills the cluster's devices; the file says {shard.value} ({shard.place})")
        shard = replace(shard, value=-1)
        content["parallelism"].entries["data_parallel_shard_degree"] = shard
    imported = torchtitan.read(content, known.num_devices, model)
    if "local_batch_size" not in training:
        assumed.append("local_batch_size 8 (torchtitan's default)")
    if "mode" not in (content.get("activation_checkpoint") or {}):
        assumed.append("activation_checkpoint selective (torchtitan's default)")
    facts = (*content.facts(), *(options.facts() if options else ()))
    return complete(
        imported,
        known,
        source=source,
        model=model,
        switches=_switches(content),
        facts=facts,
        assumed=assumed,
        unmodelled=tuple(_unmodelled(content)),
        unread=(*content.ignored(), *(options.ignored() if options else ())),
        undecided=undecided,
    )


def _of_tokens(training: Settings) -> None:
    """Put sequences and length where a later version counts tokens."""
    tokens, length = (
        training.entries.get(name) for name in ("num_tokens_per_microbatch_per_dp_rank", "max_context_length")
    )
    if length is not None and "seq_len" not in training:
        training.entries["seq_len"] = length
        training.read["max_context_length"] = None
        if tokens is not None and isinstance(tokens.value, int) and isinstance(length.value, int):
            training.entries["local_batch_size"] = replace(tokens, value=max(tokens.value // length.value, 1))
            training.read["num_tokens_per_microbatch_per_dp_rank"] = None


def _model(content: Settings, function: str) -> ModelSpec | None:
    if function:
        name = _FLAVORS.get(function)
        return ModelSpec.named(name) if name else model_called(function)
    table = content.get("model")
    if not isinstance(table, Settings) or "name" not in table or "flavor" not in table:
        return None
    flavor = f"{table['name']}_{table['flavor']}".lower().replace("-", "_")
    return (
        ModelSpec.named(_FLAVORS[flavor]) if flavor in _FLAVORS else model_called(f"{table['name']}-{table['flavor']}")
    )


def _switches(content: Settings) -> dict[str, Any]:
    named = {name: content.get(name) for name in ("training", "compile", "parallelism", "optimizer")}
    tables = {name: table if isinstance(table, Settings) else Settings({}) for name, table in named.items()}
    compiled = tables["training"].get("compile") or tables["compile"].get("enable")
    is_async = any(tables[name].get("enable_async_tensor_parallel") for name in ("parallelism", "training"))
    optimizer = str(tables["optimizer"].get("name") or "AdamW").lower()
    return {
        "fusion": "compiled" if compiled else "engine",
        "tp_overlap": bool(is_async),
        "optimizer": optimizer if optimizer in ("sgd", "muon") else "adamw",
    }


def _unmodelled(content: Settings) -> Iterator[str]:
    converters = content.get("model")
    named = str(converters.get("converters") or "") if isinstance(converters, Settings) else ""
    if "float8" in named or "mx" in named:
        yield f"model.converters {named}: costed in bf16; --precision fp8 costs products in fp8"
