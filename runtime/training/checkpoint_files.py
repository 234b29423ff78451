"""The files of a checkpoint: each has a checksum, made by the rank that wrote it and compared before anything of it is loaded.

Ranks make the checksums of what they wrote and send them with what torch gathers of every file, so that a checkpoint that is
written beside the next steps has them too. They stand in checkpoint.json, which has one of its own content. Loading, the ranks
share the files out, so that each is read through once more than its tensors need.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path, PurePath
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ...schema import ConfigError
from .options import list_checkpoints

INDEX_FILE = ".metadata"
DAMAGED = ".damaged"
"""Ends the name of a checkpoint that could not be read: it stays for those who would save something of it, and is none."""


class CheckedWriter(FileSystemWriter):
    """Writes the files of a checkpoint; then the first rank knows ``checksums`` of all of them by their names."""

    checksums: Mapping[str, str]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        """Write this rank's files; what torch gathers of the ranks has their checksums at its end."""
        written = super().write_data(plan, planner).wait()
        names = {result.storage_data.relative_path for result in written}
        checked: Future[list[Any]] = Future()
        checked.set_result([*written, {name: checksum(Path(self.path) / name) for name in names}])
        return checked

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write the index of what all ranks wrote."""
        super().finish(metadata, [[entry for entry in each if isinstance(entry, WriteResult)] for each in results])
        checksums = {
            name: value for each in results for sums in each if isinstance(sums, dict) for name, value in sums.items()
        }
        self.checksums = checksums | {INDEX_FILE: checksum(Path(self.path) / INDEX_FILE)}


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damage_of(folder: Path, checksums: Mapping[str, str]) -> str | None:
    """Return which file of a checkpoint is not what was written, and how; None where all are.

    Every rank calls it with the same arguments; each reads its part of the files.
    """
    names = sorted(checksums)[dist.get_rank() :: dist.get_world_size()]
    return first_of_all(_damaged(folder, names, checksums))


def _damaged(folder: Path, names: Iterable[str], checksums: Mapping[str, str]) -> str | None:
    for name in names:
        try:
            if PurePath(name).name != name or not (folder / name).is_file():
                return f"{folder / name} is no file of this checkpoint, or is not there"
            if checksum(folder / name) != checksums[name]:
                return f"{folder / name} is not what was written: its SHA-256 is another"
        except OSError as error:
            return f"cannot read {folder / name}: {error.strerror}"
    return None


def first_of_all(text: str | None) -> str | None:
    """Return the text of the first rank that has one; every rank calls it."""
    texts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return next((each for each in texts if each is not None), None)


def set_aside(folder: Path) -> str:
    """Let a damaged checkpoint be one no more, and return its new name; the first rank does it, the others wait.

    Raises:
        ConfigError: it cannot be renamed.
    """
    failure = name = None
    if dist.get_rank() == 0:
        names = (f"{folder.name}{DAMAGED}{f'-{number}' if number else ''}" for number in count())
        target = next(folder.with_name(name) for name in names if not folder.with_name(name).exists())
        try:
            name = folder.rename(target).name
        except OSError as error:
            failure = f"cannot rename {folder}: {error.strerror}"
    if failure := first_of_all(failure):
        raise ConfigError(failure)
    return first_of_all(name) or ""


def checkpoints_to_resume(root: str | None) -> Sequence[Path]:
    """Return the checkpoints that the first rank sees, newest first: ranks of other nodes may not see the last one yet."""
    listed: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(listed, [str(path) for path in list_checkpoints(root)] if root else [])
    return [Path(path) for path in reversed(listed[0])]
