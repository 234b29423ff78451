"""When a run saves: at once, or beside the steps that follow.

Beside them, the state is copied to host memory and written from there by a thread that has a process group of its own. The folder
gets its name when all ranks have written, between two later steps or at the end of the run; until then the checkpoint before it is
the newest one.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from ..parallel_model import ParallelModel
from .checkpoint import (
    CheckpointInfo,
    Progress,
    checkpoint_folders,
    checkpoint_state,
    prepare,
    publish,
    remove_partial,
    save_checkpoint,
    write_failure,
)


class CheckpointWriter:
    """Saves a run's checkpoints; every rank has one and calls it at the same steps.

    Args:
        root: folder of the checkpoints.
        keep: how many of the newest stay.
        beside: write beside the steps that follow; takes host memory of the size of a checkpoint.
    """

    def __init__(
        self, root: str | Path, model: ParallelModel, optimizer: torch.optim.Optimizer, *, keep: int, beside: bool
    ) -> None:
        self._root = Path(root)
        self._model = model
        self._optimizer = optimizer
        self._keep = keep
        self._group = dist.new_group(backend="gloo") if beside else None
        self._pending: Future[Any] | None = None
        self._progress: Progress | None = None

    def save(self, progress: Progress) -> None:
        """Write a checkpoint, or begin to.

        Raises:
            MeshwrightError: this one or the one before cannot be written.
        """
        self.finish()
        if self._group is None:
            save_checkpoint(self._root, self._model, self._optimizer, progress, keep=self._keep)
            return
        _, partial = checkpoint_folders(self._root, progress.step)
        prepare(partial)
        state = checkpoint_state(self._model, self._optimizer)
        pending = async_save(state, storage_writer=FileSystemWriter(partial), process_group=self._group)
        assert isinstance(pending, Future)
        self._pending, self._progress = pending, progress

    def poll(self) -> None:
        """Between two steps: finish what has been written meanwhile.

        Raises:
            MeshwrightError: it could not be written.
        """
        if self._pending is not None and self._pending.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, and give it its name.

        Raises:
            MeshwrightError: it could not be written.
        """
        if self._pending is None or self._progress is None:
            return
        folder, partial = checkpoint_folders(self._root, self._progress.step)
        pending, self._pending = self._pending, None
        try:
            pending.result()  # of the thread's save: all ranks have written
        except CheckpointException as error:
            failure = write_failure(folder, error)
            remove_partial(self._root)
            raise failure from None
        publish(
            partial,
            folder,
            CheckpointInfo(model=self._model.plan.model, **self._progress.model_dump()),
            keep=self._keep,
        )
