"""Copies between the device, the host's memory and the node's drives.

Device and host: on CUDA one stream for each direction, overlapping with compute, and pinned buffers that are used again. On a CPU
the same code copies into a second allocation at once: what "the device" may forget is then really freed, so that schedules can be
tested without a GPU.

Drives: one file of optimizer states a rank, read before an update and written after it. Its space is taken at the start, so that
a full drive is noticed before the first step. Reads and writes name their positions (``pread``, ``pwrite``) and run on threads of
their own: unlike a page of a memory map that cannot be written, a write that fails raises. The file has no name once it is open:
whatever ends the process, nothing remains of it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ...profilers.machine import available_memory
from ...schema.errors import ConfigError, MeshwrightError
from ...schema.units import format_bytes

_CLASSES_PER_OCTAVE = 8
"""Sizes of buffers between a size and its double: at most an eighth of a buffer is not used, and uneven sizes share buffers."""

Pin = Callable[[Tensor], bool]


@dataclass
class Traffic:
    """What moved over the link and to and from files since it was last taken.

    ``unpinned_bytes`` are of buffers that could not be pinned: copies to and from them wait for the compute stream.
    """

    to_host_bytes: int = 0
    to_device_bytes: int = 0
    stored_bytes: int = 0
    read_bytes: int = 0
    unpinned_bytes: int = 0

    def take(self) -> Traffic:
        """Return the counts so far; those of copies start again."""
        taken = replace(self)
        self.to_host_bytes = self.to_device_bytes = self.stored_bytes = self.read_bytes = 0
        return taken


def pin_memory(buffer: Tensor) -> bool:
    """Lock the pages of a host tensor, so that copies to and from it overlap with compute; return False where that is refused.

    Not ``pin_memory=True``, whose allocator rounds up to powers of two: half of the host's memory could be lost to that.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    refused = int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
    if refused:
        with contextlib.suppress(RuntimeError):  # the next launch would report the refusal as its own
            torch.zeros(1, device="cuda")
    return not refused


@dataclass(eq=False)
class HostBuffer:
    """Bytes of host memory, and when the last copy from them is over (CUDA)."""

    data: Tensor
    read: torch.cuda.Event | None = None


class _Pages(mmap.mmap):
    """Pages of their own, as tensors see them; where they are locked, they are unlocked before they are gone."""

    pinned_address = 0

    def __del__(self) -> None:
        if self.pinned_address and torch.cuda.is_available():
            torch.cuda.cudart().cudaHostUnregister(self.pinned_address)  # type: ignore[no-untyped-call]


class Copies:
    """Both directions of one rank's link, what moved over it, and the host's buffers of what comes and goes, used again by size.

    Args:
        pin: what pins a new buffer; unset, on CUDA `pin_memory`. After one refusal no more are tried.
    """

    def __init__(self, device: torch.device, *, pin: Pin | None = None) -> None:
        is_cuda = device.type == "cuda"
        self.device, self.traffic, self.host_bytes = device, Traffic(), 0
        self.down, self.up = (torch.cuda.Stream(device) if is_cuda else None for _ in range(2))
        self._pin, self._refused = pin or (pin_memory if is_cuda else None), False
        self._free: dict[int, list[HostBuffer]] = {}
        self._lock = threading.RLock()  # buffers come back when tensors are collected, which may be inside `take`

    def take(self, num_bytes: int) -> HostBuffer:
        """Return a buffer of at least so many bytes.

        Raises:
            MeshwrightError: the host has no more memory.
        """
        step = 1 << max(0, num_bytes.bit_length() - _CLASSES_PER_OCTAVE.bit_length())
        size = -(-num_bytes // step) * step
        with self._lock:
            free = self._free.get(size)
            if free:
                return free.pop()
        return HostBuffer(self.allocate(size))

    def give_back(self, buffer: HostBuffer) -> None:
        """Let a buffer be used again, once the copy from it is over."""
        with self._lock:
            self._free.setdefault(buffer.data.numel(), []).append(buffer)

    def allocate(self, num_bytes: int) -> Tensor:
        """Return bytes of the host's memory from the start of a page, pinned where possible; `take` never hands them out."""
        available = available_memory()
        if num_bytes > available:
            raise MeshwrightError(
                f"the host has no memory for another {format_bytes(num_bytes)} of what is offloaded: "
                f"{format_bytes(num_bytes - available)} are missing",
                details=(f"this rank has {format_bytes(self.host_bytes)} there already",),
                help="plan with a smaller --host-memory-gib",
            )
        self.host_bytes += num_bytes
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        pages = _Pages(-1, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        buffer = torch.frombuffer(pages, dtype=torch.uint8)
        if self._pin is not None and not self._refused and self._pin(buffer):
            pages.pinned_address = buffer.data_ptr()
        elif self._pin is not None:
            self._refused = True
            self.traffic.unpinned_bytes += num_bytes
        return buffer[:num_bytes]

    def to_host(
        self, source: Tensor, target: Tensor, *, after: torch.cuda.Event | None = None
    ) -> torch.cuda.Event | None:
        """Copy a device tensor down during compute; return the event (CUDA) when the host may read it and the device forget it.

        Args:
            after: what else has to be over first: the last copy from ``target``.
        """
        self.traffic.to_host_bytes += source.nbytes
        return self._copy(self.down, source, target, after)

    def to_device(self, source: Tensor, target: Tensor) -> torch.cuda.Event | None:
        """Copy a host tensor up during compute; return the event (CUDA) after which ``target`` may be read."""
        self.traffic.to_device_bytes += source.nbytes
        return self._copy(self.up, source, target, None)

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Let the compute stream wait for a copy."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def _copy(
        self, stream: torch.cuda.Stream | None, source: Tensor, target: Tensor, after: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        if stream is None:
            target.copy_(source)
            return None
        # Device memory comes from the compute stream: what was queued there may still write the source or read the target.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return event


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
            free = shutil.disk_usage(self._folder).free
            raise ConfigError(
                f"optimizer states of {format_bytes(num_bytes)} do not fit in {self._folder}: {error.strerror}",
                details=(
                    f"{format_bytes(free)} are free, {format_bytes(max(0, num_bytes - free))} are missing for this rank",
                ),
                help="give --nvme a larger drive, or plan with fewer states on storage",
            ) from None
        finally:
            Path(path).unlink()
        self._view = torch.frombuffer(mmap.mmap(number, max(num_bytes, mmap.PAGESIZE)), dtype=torch.uint8)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="states")  # one reads ahead, one writes behind

    def view(self, start: int, num_bytes: int) -> Tensor:
        """Return the bytes as a tensor over the file, for what reads or fills them outside a step: checkpoints."""
        return self._view[start : start + num_bytes]

    def read(self, start: int, target: Tensor) -> Future[None]:
        """Begin to read ``target.nbytes`` bytes from there; the future raises a MeshwrightError where that fails."""
        self._traffic.read_bytes += target.nbytes
        number = self._file.fileno()
        return self._threads.submit(self._all, lambda part, offset: os.preadv(number, [part], offset), start, target)

    def write(self, start: int, source: Tensor) -> Future[None]:
        """Begin to write the bytes; they must not change until it is over."""
        self._traffic.stored_bytes += source.nbytes
        number = self._file.fileno()
        return self._threads.submit(self._all, lambda part, offset: os.pwrite(number, part, offset), start, source)

    def _all(self, move: Callable[[memoryview, int], int], start: int, tensor: Tensor) -> None:
        """Move all bytes: one call moves at most 2 GiB, and fewer where a drive or a limit says so."""
        view, done = memoryview(tensor.numpy()).cast("B"), 0
        try:
            while done < len(view):
                moved = move(view[done:], start + done)
                if not moved:
                    raise OSError(0, "the file has ended")
                done += moved
        except OSError as error:
            raise MeshwrightError(
                f"optimizer states in {self._folder} cannot be read or written any more: {error.strerror}",
                details=("the update of this step was not finished; checkpoints written before it are whole",),
                help="free the drive, or give another --nvme PATH, and go on with --resume",
            ) from None
