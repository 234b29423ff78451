"""What export makes, what import finds, and the form of a file of this folder: one adapter an engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..schema.base import Count, Frozen, shown, write_atomically
from ..schema.errors import ConfigError
from ..schema.layout import Layout
from ..schema.model import ModelSpec
from ..schema.training_plan import TrainingPlan

if TYPE_CHECKING:
    from .limits import Limit


class Exported(Frozen):
    """A plan in an engine's own form.

    Attributes:
        engine: of whose form the files are.
        version: of the engine whose options these are.
        files: (name, text) of each file.
        not_expressed: what of the plan the engine's configuration has no words for; it changes speed, never what fits.
        to_set: what the user still says: data, tokenizer, learning rate.
        command: starts the job in the folder of the files.
    """

    engine: str
    version: str
    files: tuple[tuple[str, str], ...]
    not_expressed: tuple[str, ...] = ()
    to_set: tuple[str, ...] = ()
    command: str

    def write(self, folder: str | Path) -> tuple[Path, ...]:
        """Write the files, each in full or not at all.

        Raises:
            ConfigError: the folder cannot be made or written.
        """
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from None
        for name, text in self.files:
            write_atomically(folder / name, text)
        return tuple(folder / name for name, _ in self.files)


class Imported(Frozen):
    """The layout that a configuration of an engine stands for.

    Attributes:
        num_devices: ranks of the job.
        global_batch_size, seq_len, precision: of the workload, where the configuration says them.
        ignored: settings that say nothing about layout or workload.
        assumed: what the configuration leaves open, and what was taken for it.
    """

    engine: str
    layout: Layout
    num_devices: Count
    global_batch_size: Count | None = None
    seq_len: Count | None = None
    precision: str | None = None
    ignored: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()


Table = Mapping[str, Any]
"""The settings of a TOML, JSON or YAML file."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An engine whose configuration is written, and mostly read: ``ADAPTER`` of its file. Registered in registry.py.

    Attributes:
        version: of the engine whose options these are.
        limits: what it cannot do; `write` is called for plans within them only.
        write: a plan in the engine's form.
        is_own_table: say whether a table of settings is this engine's; None: it has no such files.
        read_table: the layout of one, given the ranks of the job and the model where they are known.
        read_text: the same for a script; ``suffixes`` are those of its files, empty: any.
    """

    name: str
    version: str
    limits: tuple[Limit, ...]
    write: Callable[[TrainingPlan], Exported]
    is_own_table: Callable[[Table], bool] | None = None
    read_table: Callable[[Table, int | None, ModelSpec | None], Imported] | None = None
    read_text: Callable[[str, int | None, ModelSpec | None], Imported] | None = None
    suffixes: tuple[str, ...] = ()


def require_num_devices(num_devices: int | None) -> int:
    """Return the ranks of a job whose configuration does not say them.

    Raises:
        ConfigError: the user did not either.
    """
    if num_devices is None:
        raise ConfigError("the number of devices is not in the configuration", help="give --num-devices")
    return num_devices


def remaining_devices(num_devices: int, **degrees: int) -> int:
    """Return the devices that remain for data parallelism.

    Raises:
        ConfigError: the other degrees do not divide the devices.
    """
    product = math.prod(degrees.values())
    if num_devices % product:
        text = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
        raise ConfigError(f"{text} = {product} does not divide {num_devices} devices", help="give --num-devices")
    return num_devices // product


def positive_integer(value: Any, name: str) -> int:
    """Return a positive whole number of a configuration.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(value, str) and value.strip().isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**9:
        raise ConfigError(f"{name} = {shown(value)}: must be a whole number above 0")
    return value


def optional_integer(table: Table, name: str) -> int | None:
    """Return a positive whole number of a table; None where it has none of that name."""
    return positive_integer(table[name], name) if name in table else None


def tables_in(content: Table, *names: str) -> list[Table]:
    """Return the tables of these names in a table; an absent one is empty.

    Raises:
        ConfigError: one of them is no table.
    """
    tables = [content.get(name) or {} for name in names]
    for name, table in zip(names, tables, strict=True):
        if not isinstance(table, Mapping):
            raise ConfigError(f"{name} must be a table")
    return tables
