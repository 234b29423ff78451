"""What export makes and import finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

from ..schema.base import Count, Frozen, shown, write_atomically
from ..schema.errors import ConfigError
from ..schema.layout import Layout

EngineName = Literal["torchtitan", "megatron", "nemo", "deepspeed", "accelerate"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
TargetName = EngineName | Literal["kubernetes"]
TARGETS: tuple[TargetName, ...] = (*ENGINES, "kubernetes")
"""What a plan can be written for: engines, and what starts our own one."""


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

    engine: TargetName
    version: str
    files: tuple[tuple[str, str], ...]
    not_expressed: tuple[str, ...] = ()
    to_set: tuple[str, ...] = ()
    command: str

    def write(self, folder: str | Path) -> tuple[Path, ...]:
        """Write the files, each whole or not at all.

        Raises:
            ConfigError: the folder cannot be made or written.
        """
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from None
        paths = tuple(folder / name for name, _ in self.files)
        for path, (_, text) in zip(paths, self.files, strict=True):
            write_atomically(path, text)
        return paths


class Imported(Frozen):
    """The layout that a configuration of an engine stands for.

    Attributes:
        num_devices: ranks of the job.
        global_batch_size, seq_len, precision: of the workload, where the configuration says them.
        ignored: settings that say nothing about layout or workload.
        assumed: what the configuration leaves open, and what was taken for it.
    """

    engine: EngineName
    layout: Layout
    num_devices: Count
    global_batch_size: Count | None = None
    seq_len: Count | None = None
    precision: str | None = None
    ignored: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()


def remaining_devices(num_devices: int, **degrees: int) -> int:
    """What is left of the devices for data parallelism.

    Raises:
        ConfigError: the other degrees do not divide the devices.
    """
    product = 1
    for degree in degrees.values():
        product *= degree
    if num_devices % product:
        shown = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
        raise ConfigError(f"{shown} = {product} does not divide {num_devices} devices", help="give --num-devices")
    return num_devices // product


def positive_integer(value: Any, name: str) -> int:
    """A positive whole number of a configuration.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(value, str) and value.strip().isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**9:
        raise ConfigError(f"{name} = {shown(value)}: must be a whole number above 0")
    return value
