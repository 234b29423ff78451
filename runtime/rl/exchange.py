"""Responses that islands share: each trains a model of its own, and a part of a step's prompts is answered by the others.

    FOLDER/island-I/S.json      the prompts of island I's step S with the responses to each, all tokens: what its actor drew

The folder is one that every island sees, or copies of it that the user's own tool brings up to date. A file comes into place in one
piece. Nobody waits for another island but in the first step: responses that have not been trained on here come first, the newest of
all islands in turn, and where there are too few of them the newest are taken once more (arXiv:2509.08721 samples from all that is
there). The log-probabilities at which their ratios begin are the actor's here, as if it had drawn them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...schema.base import read_json, shown
from ...schema.errors import ConfigError, MeshwrightError
from ...schema.rl import RlWorkload
from .prompts import prompt_of

STEPS = 4
"""Of each island that stay in the folder."""

_LOOK_S = 0.05
_STEP = re.compile("0|[1-9][0-9]{0,17}")


@dataclass(frozen=True)
class Answered:
    """A prompt of another island: its line for the reward function, and the tokens of each response."""

    line: dict[str, Any]
    responses: tuple[tuple[int, ...], ...]


class Exchange:
    """The folder that the islands of a workload share responses through, as one of them sees it.

    Attributes:
        num_new: of the prompts that were taken last, those that had not been trained on here.
    """

    def __init__(self, folder: str | Path, island: int, workload: RlWorkload, *, timeout_s: float) -> None:
        """Make this island's part of the folder, without what an earlier run left there.

        Raises:
            ConfigError: the folder cannot be written.
        """
        self._folder, self._island, self._work, self._timeout_s = Path(folder), island, workload, timeout_s
        self._used: set[tuple[int, int, int]] = set()
        self.num_new = 0
        place = self._path(island)
        try:
            place.mkdir(parents=True, exist_ok=True)
            if place.is_symlink():
                raise ConfigError(
                    f"cannot share responses in {place}: it is a link, and files are deleted there",
                    help="give the folder that it leads to as --exchange, or remove the link",
                )
            # Others may put a link in its place later: files are written and deleted in the folder that it is now.
            self._place = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            for step in _steps(place):
                os.unlink(f"{step}.json", dir_fd=self._place)
        except OSError as error:
            raise ConfigError(f"cannot share responses in {place}: {error.strerror}") from None

    def give(self, step: int, answered: Sequence[Answered]) -> None:
        """Share what this island answered in a step.

        Raises:
            ConfigError: the folder cannot be written.
        """
        rows = [{"line": each.line, "responses": each.responses} for each in answered]
        partial = f".{step}.json.partial"
        try:
            self._remove(partial)
            handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666, dir_fd=self._place)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(json.dumps(rows))
            os.replace(partial, f"{step}.json", src_dir_fd=self._place, dst_dir_fd=self._place)
            self._remove(f"{step - STEPS}.json")
        except OSError as error:
            raise ConfigError(f"cannot share responses in {self._path(self._island)}: {error.strerror}") from None

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._place)

    def take(self, count: int) -> list[Answered]:
        """Return so many prompts that other islands answered.

        Raises:
            MeshwrightError: the others have shared nothing for the limit of time.
            ConfigError: a file is none of theirs.
        """
        end = time.monotonic() + self._timeout_s
        while not (answered := list(self._newest_first())):
            if time.monotonic() > end:
                raise MeshwrightError(
                    f"no other island has shared a response in {self._folder} for {self._timeout_s:g} s",
                    help=f"start all {self._work.islands} islands, each with its own --island, on the same folder",
                )
            time.sleep(_LOOK_S)
        fresh = [(key, each) for key, each in answered if key not in self._used]
        used = [(key, each) for key, each in answered if key in self._used]
        taken = list(itertools.islice(itertools.cycle([*fresh, *used]), count))
        self.num_new = min(len(fresh), count)
        self._used = {key for key, _ in answered} & (self._used | {key for key, _ in taken})
        return [each for _, each in taken]

    def _path(self, island: int) -> Path:
        return self._folder / f"island-{island}"

    def _newest_first(self) -> Iterator[tuple[tuple[int, int, int], Answered]]:
        """Yield what is there of others with (island, step, place): the newest step of each, islands in turn, then older ones."""
        others = [island for island in range(self._work.islands) if island != self._island]
        steps = {island: sorted(map(int, _steps(self._path(island))), reverse=True) for island in others}
        for age in range(STEPS):
            files = [(island, steps[island][age]) for island in others if age < len(steps[island])]
            rows = [[((*file, place), each) for place, each in enumerate(self._read(*file))] for file in files]
            for same_place in itertools.zip_longest(*rows):
                yield from (entry for entry in same_place if entry is not None)

    def _read(self, island: int, step: int) -> list[Answered]:
        path = self._path(island) / f"{step}.json"
        try:
            rows = read_json(path)
        except ConfigError:
            if not path.exists():  # its island has just removed it
                return []
            raise
        if not isinstance(rows, list):
            raise ConfigError(f"{path}: {shown(rows)} is no list of prompts with responses")
        return [_answered(row, self._work, f"{path}, prompt {place}") for place, row in enumerate(rows)]


def _steps(folder: Path) -> list[str]:
    """Return the steps of which a folder has files; pipes and devices, which nobody may wait for, are none."""
    files = folder.glob("*.json") if folder.exists() else ()
    return [path.stem for path in files if _STEP.fullmatch(path.stem) and path.is_file()]


def _answered(row: Any, workload: RlWorkload, where: str) -> Answered:
    """Return a prompt with its responses.

    Raises:
        ConfigError: it is none for this workload.
    """
    line, responses = (row.get("line"), row.get("responses")) if isinstance(row, dict) else (None, None)
    vocabulary = workload.model_of("actor").vocab_size
    prompt_of(line, vocabulary, where)
    if not isinstance(responses, list) or len(responses) != workload.responses:
        raise ConfigError(f"{where}: {shown(responses)} are not {workload.responses} responses")
    for tokens in responses:
        is_response = isinstance(tokens, list) and 0 < len(tokens) <= workload.max_len
        if not is_response or not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
            raise ConfigError(
                f"{where}: {shown(tokens)} is no response",
                help=f"1 to {workload.max_len} tokens of a vocabulary of {vocabulary}: islands run the same workflow",
            )
    return Answered(line, tuple(map(tuple, responses)))


def spread(ours: Sequence[int], others: Sequence[int]) -> list[int]:
    """Return the numbers of both, each evenly over the other, so that every update of a step has its part of both."""
    positions = [
        ((idx + 0.5) / len(numbers), number) for numbers in (ours, others) for idx, number in enumerate(numbers)
    ]
    return [number for _, number in sorted(positions)]
