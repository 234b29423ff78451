"""Read a launch file of any engine as a job: a script is followed to the command it starts, a configuration is read as it is.

Nothing is executed. What a script leaves open (a variable that the scheduler sets, the output of a command) and the job needs is
an error that names the line and the option that supplies it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...schema.base import read_text
from ...schema.errors import ConfigError
from ..tables import parse_table
from . import huggingface, megatron, nemo, torchtitan
from .command import TABLES, Launch, allows_tf32, launch_of
from .job import Given, Job
from .settings import Settings, from_table
from .shell import assigned_words, read_script

COMMANDS: tuple[tuple[str, Callable[[Launch], bool], Callable[[Launch, Given, str], Job]], ...] = (
    ("torchtitan", torchtitan.is_started, torchtitan.read_launch),
    ("megatron", megatron.is_started, megatron.read_launch),
    ("nemo", nemo.is_started, nemo.read_launch),
    ("accelerate", huggingface.is_accelerate, huggingface.read_accelerate),
    ("deepspeed", huggingface.is_deepspeed, huggingface.read_deepspeed),
)
"""Engine, whether a command starts it, and its reader; the first that does is taken."""

FILES: tuple[tuple[str, Callable[[Settings], bool], Callable[[Settings, Given, str], Job]], ...] = (
    ("torchtitan", lambda settings: "parallelism" in settings, torchtitan.read_table),
    (
        "accelerate",
        lambda settings: bool({"distributed_type", "fsdp_config"} & settings.keys()),
        huggingface.accelerate_table,
    ),
    (
        "deepspeed",
        lambda settings: bool(
            {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"} & settings.keys()
        ),
        huggingface.deepspeed_table,
    ),
    ("megatron", megatron.is_table, megatron.read_table),
    ("nemo", lambda settings: bool({"model", "ddp", "trainer"} & settings.keys()), nemo.read_table),
)
"""Engine, whether a table of settings is its configuration, and its reader."""


def read_job(path: str | Path, known: Given, *, engine: str | None = None) -> Job:
    """Return the job that a launch file starts; nothing of it is run.

    Args:
        engine: whose it is; None finds out.

    Raises:
        ConfigError: it cannot be read, starts no engine known here, or leaves open what the job needs; with the line.
    """
    path = Path(path)
    text = read_text(path)
    try:
        if path.suffix in TABLES:
            settings = from_table(parse_table(path.suffix, text), text, path.name)
            for name, is_engines, reader in FILES:
                if engine == name or (engine is None and is_engines(settings)):
                    return reader(settings, known, str(path))
            raise ConfigError(
                "no engine is recognised by its content",
                help="give --from: one of " + ", ".join(name for name, *_ in FILES),
            )
        if path.suffix == ".py":
            return torchtitan.read_module(text, known, path)
        return _read_script(text, known, engine, path)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", details=error.details, help=error.help) from None


def _read_script(text: str, known: Given, engine: str | None, path: Path) -> Job:
    script = read_script(text, path, known.sets)
    started = [each.words for each in script.commands]
    launches = [launch_of(words, script, known.sets, path.parent) for words in (*started, assigned_words(script))]
    for name, starts, reader in COMMANDS:
        candidates = [launch for launch in launches if engine in (None, name) and starts(launch)]
        if candidates:
            job = reader(max(candidates, key=lambda launch: len(launch.options)), known, str(path))
            is_tf32 = known.precision is None and job.workload.precision == "fp32" and allows_tf32(script)
            return job.replace(workload=job.workload.replace(precision="tf32")) if is_tf32 else job
    programs = [" ".join(launch.texts[:2]) for launch in launches[:-1] if len(launch.texts) > 1]
    raise ConfigError(
        "starts no engine that is known here" + (f"; its last command is {programs[-1]}" if programs else ""),
        details=tuple(script.undecided),
        help="give the file with the engine's options, or --from: one of " + ", ".join(name for name, *_ in COMMANDS),
    )
