"""A command that a script starts, as the readers of the engines get it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...schema.base import is_file, read_text
from ..adapter import TF32_VARIABLE
from ..tables import parse_table
from .job import Given
from .settings import Entry, Settings, from_options, from_table, given
from .shell import Script
from .shell_values import Field, options_of

TABLES = (".toml", ".json", ".yaml", ".yml")
"""Ends of the names of configuration files that are tables."""


@dataclass(frozen=True)
class Launch:
    """A command that starts a job, as a reader of an engine gets it.

    Attributes:
        options: by name with underscores; what the user gave with --set has won.
        words: all words, for what is no option.
        script: where it stands; ``folder``: of that file.
    """

    options: Settings
    words: tuple[Field, ...]
    script: Script
    folder: Path

    @property
    def texts(self) -> tuple[str, ...]:
        """The words as texts."""
        return tuple(word.text for word in self.words)

    def named(self, option: str) -> str:
        """Return a name that an option gives, as it is written where it is not known; empty: the option is not there."""
        entry = self.options.entries.get(option)
        if entry is None or entry.value is True:
            return ""
        self.options.read[option] = None
        return str(entry.value[0] if isinstance(entry.value, list) else entry.value)

    def table_named(self, name: str) -> Settings | None:
        """Return a configuration file that the command names: one that the script writes, or one beside it; None: neither."""
        if name in self.script.files:
            text, place = self.script.files[name]
            return from_table(
                parse_table(Path(name).suffix or ".json", text), "\n" * (place.line - 1) + text, place.file
            )
        path = self.folder / name
        if not is_file(path):  # $(pwd)/ds.json, ${HERE}/ds.json
            path = self.folder / Path(name).name
        if path.suffix in TABLES and is_file(path):
            text = read_text(path)
            return from_table(parse_table(path.suffix, text), text, path.name)
        return None


def launch_of(words: Sequence[Field], script: Script, sets: Mapping[str, str], folder: Path) -> Launch:
    """Return a command with its options."""
    entries: dict[str, Entry] = from_options(options_of(words))
    of_engine = {name: value for name, value in sets.items() if name not in script.used}
    return Launch(Settings(entries | given(of_engine)), tuple(words), script, folder)


def allows_tf32(script: Script) -> bool:
    """Return whether a script sets the variable by which torch multiplies fp32 matrices as TF32."""
    values = script.variables.get(TF32_VARIABLE, [])
    return bool(values) and "".join(piece.text for piece in values[-1]) == "1"


def devices_of(launch: Launch, known: Given) -> tuple[int, list[str]]:
    """Return the devices of the job, which are the cluster's, and what the launch line says otherwise."""
    per_node = _number(launch, "nproc_per_node", "num_gpus", "gpus_per_node", slurm="gpus-per-node")
    nodes = _number(launch, "nnodes", "num_nodes", "num_machines", slurm="nodes")
    processes = _number(launch, "num_processes")
    if isinstance(nodes, str) or isinstance(per_node, str):
        unknown = nodes if isinstance(nodes, str) else per_node
        return known.num_devices, [f"{known.num_devices} devices, as the cluster has: the file says {unknown}"]
    total = processes if isinstance(processes, int) else per_node * (nodes or 1) if per_node else None
    if total is None or total == known.num_devices:
        return known.num_devices, []
    return known.num_devices, [f"{known.num_devices} devices, as the cluster has: the file starts {total}"]


def _number(launch: Launch, *names: str, slurm: str = "") -> int | str | None:
    """Return the first of some options as a number, as a text where it is not known, or what Slurm was asked for."""
    for name in names:
        entry = launch.options.entries.get(name)
        if entry is None:
            continue
        value: Any = entry.value[0] if isinstance(entry.value, list) else entry.value
        if isinstance(value, int) and not isinstance(value, bool):
            launch.options.read[name] = None
            return value
        return f"{entry.setting} {value}"
    requested = launch.script.slurm.get(slurm)
    return requested[0] if requested else None
