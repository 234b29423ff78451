"""Optimizer states in a file on the node's drives: one file a rank, read before an update and written after it.

Its space is taken at the start, so that a full drive is found before the first step. Reads and writes name their places (``pread``,
``pwrite``) and run on threads of their own: unlike a page of a memory map that cannot be written, a write that fails raises. The
file has no name once it is open: whatever ends the process, nothing is left of it.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from ...schema.errors import ConfigError, MeshwrightError
from ...schema.units import format_bytes
from .copies import Traffic

_THREADS = 2
"""One reads ahead while the other writes behind."""


class StateFile:
    """Bytes of one rank on a drive.

    Args:
        folder: on the drive; made where it does not exist.

    Raises:
        ConfigError: the folder cannot be written, or the drive lacks the space.
    """

    def __init__(self, folder: str | Path, num_bytes: int, traffic: Traffic) -> None:
        self._folder = Path(folder)
        self._traffic = traffic
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            number, path = tempfile.mkstemp(prefix="meshwright-states-", dir=self._folder)
        except OSError as error:
            raise ConfigError(f"cannot write optimizer states to {folder}: {error.strerror}") from None
        self._file = os.fdopen(number, "r+b", buffering=0)
        try:
            os.posix_fallocate(number, 0, max(num_bytes, mmap.PAGESIZE))
        except OSError as error:
            self._file.close()
            raise self._too_large(num_bytes, error) from None
        finally:
            Path(path).unlink()
        self._view = torch.frombuffer(mmap.mmap(number, max(num_bytes, mmap.PAGESIZE)), dtype=torch.uint8)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="states")

    def view(self, start: int, num_bytes: int) -> Tensor:
        """The bytes as a tensor over the file, for what reads or fills them outside a step: checkpoints."""
        return self._view[start : start + num_bytes]

    def read(self, start: int, target: Tensor) -> Future[None]:
        """Begin to read ``target.nbytes`` bytes from there."""
        self._traffic.read_bytes += target.nbytes
        return self._threads.submit(
            self._all, lambda part, at: os.preadv(self._file.fileno(), [part], at), start, target
        )

    def write(self, start: int, source: Tensor) -> Future[None]:
        """Begin to write the bytes there; they must not change until it is over."""
        self._traffic.stored_bytes += source.nbytes
        return self._threads.submit(self._all, lambda part, at: os.pwrite(self._file.fileno(), part, at), start, source)

    def finish(self, transfer: Future[None]) -> None:
        """Wait for a read or write.

        Raises:
            MeshwrightError: it failed.
        """
        try:
            transfer.result()
        except OSError as error:
            raise MeshwrightError(
                f"optimizer states in {self._folder} cannot be read or written any more: {error.strerror}",
                details=("the update of this step was not finished; checkpoints written before it are whole",),
                help="free the drive, or give another --nvme PATH, and go on with --resume",
            ) from None

    @staticmethod
    def _all(move: Callable[[memoryview, int], int], start: int, tensor: Tensor) -> None:
        """One call moves at most 2 GiB, and fewer where a drive or a limit says so."""
        view, done = memoryview(tensor.numpy()).cast("B"), 0
        while done < len(view):
            moved = move(view[done:], start + done)
            if not moved:
                raise OSError(0, "the file has ended")
            done += moved

    def _too_large(self, num_bytes: int, error: OSError) -> ConfigError:
        free = shutil.disk_usage(self._folder).free
        lacking = max(0, num_bytes - free)
        return ConfigError(
            f"optimizer states of {format_bytes(num_bytes)} do not fit in {self._folder}: {error.strerror}",
            details=(f"{format_bytes(free)} are free, {format_bytes(lacking)} are missing for this rank",),
            help="give --nvme a larger drive, or plan with fewer states on storage",
        )
