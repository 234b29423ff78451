"""Checkpoints of a training run: model, optimizer states and step, readable under any other layout.

torch.distributed.checkpoint writes one file per rank and an index by parameter name and offset; because the names are those of the
unsplit model, a checkpoint of tp=2 loads into pp=4. A checkpoint is written to a hidden folder that is renamed when it is complete,
so what is called ``step-...`` can always be loaded: at once, or alongside the steps that follow from a copy in host memory, by a
thread that has a process group of its own.

Loading runs no code from the files. torch reads the index with plain ``pickle`` and non-tensor values with
``torch.load(weights_only=False)``: here the index goes through an unpickler that admits only the classes an index is made of, and
no non-tensor values are stored (hyper-parameters come from the run's options, what else a run knows from a JSON file).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import pickle
import shutil
from collections.abc import Sequence
from concurrent.futures import Future
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, Self

import torch
import torch.distributed as dist
from pydantic import Field
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.storage import StorageReader

from ...schema import ConfigError, MeshwrightError, ModelSpec
from ...schema.base import Document, Frozen
from ...schema.units import format_bytes
from ..models.decoder import is_adapter
from ..parallel_model import ParallelModel
from .checkpoint_files import INDEX_FILE, CheckedWriter, damage_of, first_of_all, set_aside
from .options import INFO_FILE, list_checkpoints

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_ABANDON_S = 2.0
"""How long the thread of such a checkpoint may take to notice."""

_TIED_NAMES = ("lm_head.weight", "model.embed_tokens.weight")


class TrainingProgress(Frozen):
    """The progress of a run, stored with its tensors.

    Attributes:
        step: steps done; the run goes on with ``step + 1``.
        seed: of the data; another one would not continue the same order.
        samples: sequences seen; None in checkpoints of older versions.
        data: fingerprint of the data; empty where it is not known.
        loss_scale: under fp16-mixed, and the steps since it last changed.
        save_s: for how long the save before stopped the training; 0 where there was none.
    """

    step: int
    seed: int = 0
    samples: int | None = None
    data: str = ""
    loss_scale: float | None = None
    scale_steps: int = 0
    save_s: float = 0.0


class CheckpointInfo(TrainingProgress, Document):
    """What is known of a checkpoint without reading its tensors.

    Attributes:
        files: the SHA-256 of each file; empty in checkpoints of older versions, which are read unchecked.
        content_sha256: of everything else here; as old, empty.
    """

    model: ModelSpec
    files: dict[str, str] = Field(default_factory=dict)
    content_sha256: str = ""

    def sealed(self) -> Self:
        """Return it with the hash of its content."""
        return self.replace(content_sha256=self._computed_sha256())

    @property
    def is_altered(self) -> bool:
        """True if it was changed after it was sealed; one of an older version cannot tell."""
        return bool(self.files or self.content_sha256) and self.content_sha256 != self._computed_sha256()

    def _computed_sha256(self) -> str:
        return hashlib.sha256(self.model_dump_json(exclude={"content_sha256"}).encode()).hexdigest()


class DamagedCheckpointError(ConfigError):
    """A file of a checkpoint is not what was written; the message names it."""


def load_checkpoint(folder: str | Path, model: ParallelModel, optimizer: torch.optim.Optimizer) -> CheckpointInfo:
    """Read a checkpoint of any layout into a model and its optimizer; every rank calls it.

    Raises:
        DamagedCheckpointError: a file of it is not what was written; nothing was loaded.
        ConfigError: the checkpoint is of another model, or holds what is not an index of tensors.
    """
    folder = Path(folder)
    info = _read_info_together(folder)
    if info.model != model.plan.model:
        raise ConfigError(
            f"the checkpoint {folder} is of another model: {info.model.name} with {info.model.num_params} parameters; "
            f"the plan's is {model.plan.model.name} with {model.plan.model.num_params}"
        )
    if damage := damage_of(folder, info.files):
        raise DamagedCheckpointError(damage)
    try:
        read_states(model, optimizer, SafeReader(folder), planner=TensorsOnly())
    except CheckpointException as error:
        raise _explained(f"cannot read the checkpoint {folder}", error) from None
    return info


def load_newest(
    folders: Sequence[Path], model: ParallelModel, optimizer: torch.optim.Optimizer
) -> tuple[Path | None, CheckpointInfo | None, list[str]]:
    """Read the newest checkpoint that is what was written; every rank calls it.

    Args:
        folders: checkpoints, newest first, the same on every rank.

    Returns:
        Its folder and what is known of it, None where there is no checkpoint; and what is to be said of those that were set aside.

    Raises:
        DamagedCheckpointError: there are checkpoints, and all are damaged.
    """
    notes: list[str] = []
    for folder in folders:
        try:
            return folder, load_checkpoint(folder, model, optimizer), notes
        except DamagedCheckpointError as error:
            damage = error
        notes.append(f"{damage.message}; {folder.name} is set aside as {set_aside(folder)}")
    if notes:
        raise DamagedCheckpointError(
            f"no checkpoint under {folders[0].parent} can be read",
            details=tuple(notes),
            help="start anew, in another --checkpoint-dir",
        )
    return None, None, notes


def _read_info_together(folder: Path) -> CheckpointInfo:
    """Read what is known of a checkpoint; where one rank cannot, none does."""
    info, damage = None, None
    try:
        info = CheckpointInfo.load(folder / INFO_FILE)
        if info.is_altered:
            damage = f"{folder / INFO_FILE} is not what was written: its content has another SHA-256"
    except ConfigError as error:
        damage = "; ".join((error.message, *error.details))
    if damage := first_of_all(damage):
        raise DamagedCheckpointError(damage)
    assert info is not None
    return info


def read_states(
    model: ParallelModel, optimizer: torch.optim.Optimizer, reader: StorageReader, *, planner: LoadPlanner,
    is_collective: bool = True,
) -> None:  # fmt: skip
    """Fill a model and its optimizer from a reader of torch.distributed.checkpoint, whatever layout it has them in.

    Args:
        is_collective: every rank calls it and all fail together; otherwise each plans and reads by itself.
    """
    current, state = _current(model, optimizer), checkpoint_state(model, optimizer)
    load(state, storage_reader=reader, planner=planner, no_dist=not is_collective)
    loaded = {
        part: {name: _loaded_value(name, value, state[part], model) for name, value in values.items()}
        for part, values in current.items()
    }
    set_model_state_dict(model.module, loaded["model"], options=StateDictOptions(strict=False))
    set_optimizer_state_dict(model.module, optimizer, loaded["optimizer"], options=_FLAT)


def _current(model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Return the parameters, optimizer states and hyper-parameters of this rank by name."""
    values = get_model_state_dict(model.module)
    if model.plan.workload.adapters is not None:  # the frozen model is where it came from
        values = {name: value for name, value in values.items() if is_adapter(name)}
    return {"model": values, "optimizer": get_optimizer_state_dict(model.module, optimizer, options=_FLAT)}


def checkpoint_state(model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Return what is stored of `_current`: the tensors, under the names of the model without a pipeline."""
    spec = model.plan.model
    state = {
        part: {stored_name(name, spec): value for name, value in values.items() if isinstance(value, torch.Tensor)}
        for part, values in _current(model, optimizer).items()
    }
    if model.local_updates is not None:
        state["islands"] = model.local_updates.state()
    return state


def _loaded_value(name: str, current: Any, state: dict[str, Any], model: ParallelModel) -> Any:
    """Return the tensor that was read for a name, or the current value of what is not stored.

    The two copies of a tied embedding may be on one rank: each gets values of its own, or the optimizer would update one tensor
    for both.
    """
    stored = stored_name(name, model.plan.model)
    value = state.get(stored, current)
    return value.clone() if stored != name and isinstance(value, torch.Tensor) else value


def stored_name(name: str, model: ModelSpec) -> str:
    """Return the name in files: a tied output projection, which the last stage holds under its own name, is the embedding."""
    return name.replace(*_TIED_NAMES) if model.tie_embeddings else name


class CheckpointWriter:
    """Saves a run's checkpoints; every rank has one and calls it at the same steps.

    Args:
        keep: how many of the newest stay.
        in_background: write alongside the steps that follow; takes host memory of the size of a checkpoint.
    """

    def __init__(
        self,
        root: str | Path,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        *,
        keep: int = 2,
        in_background: bool = False,
    ) -> None:
        self._root, self._model, self._optimizer, self._keep = Path(root), model, optimizer, keep
        # Named, or a thread that is late would meet ranks of a later generation of the job in its group.
        self._ranks = dist.group.WORLD
        self._group = dist.new_group(backend="gloo") if in_background else None
        self._present: Path | None = self._root
        self._pending: tuple[Future[Any], CheckedWriter, Path, TrainingProgress] | None = None

    def save(self, progress: TrainingProgress) -> Path:
        """Write a checkpoint, or begin to; return its folder.

        Raises:
            MeshwrightError: this one or the one before cannot be written.
        """
        self.finish()
        folder = self._root / f"step-{progress.step:08d}"
        partial = _partial(folder)
        try:
            if dist.get_rank(self._ranks) == 0:
                self._remove_partial()
                partial.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"cannot write checkpoints to {self._root}: {error.strerror}") from None
        dist.barrier(self._ranks)
        state, files = checkpoint_state(self._model, self._optimizer), CheckedWriter(partial)
        if self._group is not None:
            pending = async_save(state, storage_writer=files, process_group=self._group)
            assert isinstance(pending, Future)
            self._pending = pending, files, folder, progress
            return folder
        try:
            save(state, storage_writer=files, process_group=self._ranks)
        except CheckpointException as error:
            raise self._failure(folder, error) from None
        self._publish(files, folder, progress)
        dist.barrier(self._ranks)
        return folder

    def poll(self) -> str | None:
        """Between two steps: finish what has been written meanwhile; return what must be said at once.

        Raises:
            MeshwrightError: it could not be written.
        """
        if self._pending is not None and self._pending[0].done():
            self.finish()
        if self._present is None or self._present.is_dir():
            return None
        gone, self._present = self._present, None
        return f"{gone} has vanished: until the next checkpoint is written there is nothing to go back to"

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, and give it its name."""
        if self._pending is None:
            return
        (pending, files, folder, progress), self._pending = self._pending, None
        try:
            pending.result()  # of the thread's save: all ranks have written
        except CheckpointException as error:
            raise self._failure(folder, error) from None
        self._publish(files, folder, progress)

    def abandon(self) -> None:
        """Let a checkpoint be that cannot be finished, because a rank is gone."""
        if self._pending is not None:
            with contextlib.suppress(CheckpointException, RuntimeError, TimeoutError):
                self._pending[0].result(_ABANDON_S)
            self._pending = None

    def _publish(self, files: CheckedWriter, folder: Path, progress: TrainingProgress) -> None:
        """Give a checkpoint that every rank has written its name, and delete all but the newest; the first rank does it."""
        if dist.get_rank(self._ranks) != 0:
            return
        partial = _partial(folder)
        try:
            info = CheckpointInfo(model=self._model.plan.model, files=dict(files.checksums), **progress.model_dump())
            info.sealed().save(partial / INFO_FILE)
            if (folder / INFO_FILE).is_file():  # by a rank that died after it had given it its name
                shutil.rmtree(partial)
                return
            partial.rename(folder)
            self._present = folder
            for old in list_checkpoints(folder.parent)[: -self._keep]:
                (old / INFO_FILE).unlink()  # first of all: what is deleted halfway is no checkpoint
                shutil.rmtree(old)
        except OSError as error:
            raise MeshwrightError(f"cannot finish the checkpoint {folder}: {error.strerror}") from None

    def _failure(self, folder: Path, error: CheckpointException) -> MeshwrightError:
        """Return the error of a checkpoint that could not be written, with the space there is; delete what was written."""
        failure = _explained(f"cannot write the checkpoint {folder}", error)
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(self._root)
            room = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} are free there"
            failure = MeshwrightError(
                failure.message,
                details=(*failure.details, room),
                help="make room, or keep fewer with --keep-checkpoints; those written before are whole",
            )
        self._remove_partial()
        return failure

    def _remove_partial(self) -> None:
        """Delete what saves that were cut short have left."""
        for folder in self._root.glob(".step-*.partial"):
            shutil.rmtree(folder, ignore_errors=True)


def _partial(folder: Path) -> Path:
    """Return where a checkpoint is until it is complete."""
    return folder.with_name(f".{folder.name}.partial")


def _explained(message: str, error: CheckpointException) -> MeshwrightError:
    """Return the first rank's cause of a checkpoint that failed, as one of our errors."""
    rank, (cause, _) = min(error.failures.items())
    if isinstance(cause, MeshwrightError):
        return cause
    lines = str(cause).strip().splitlines() or [""]
    return MeshwrightError(message, details=(f"rank {rank}: {type(cause).__name__}: {lines[-1]}",))


_INDEX_CLASSES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}


class SafeReader(FileSystemReader):
    """Reads a checkpoint from files whose content is not trusted.

    Raises:
        ConfigError: the index is missing, damaged, names classes an index has no use for, or points outside the folder.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self._index = _read_index(Path(folder))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index; torch's own method would unpickle anything."""
        if self._index.storage_meta is None:
            self._index.storage_meta = StorageMeta()
        self._index.storage_meta.load_id = self.load_id
        return self._index


class TensorsOnly(DefaultLoadPlanner):
    """Refuses non-tensor values: torch would unpickle them without restriction."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse: nothing of ours is stored so."""
        raise ConfigError(f"the checkpoint stores {read_item.dest_index.fqn!r} as a Python object, not as a tensor")


def _enum_member(kind: Any, name: str) -> Enum:
    """Stand in for getattr, by which Python before 3.11.4 pickles the members of an enum."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError("it names builtins.getattr")


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == ("builtins", "getattr"):
            return _enum_member
        if global_name in _INDEX_CLASSES.get(module_name, ()):
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")


def _read_index(folder: Path) -> Metadata:
    path = folder / INDEX_FILE
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a regular file")
    try:
        index = _IndexUnpickler(io.BytesIO(path.read_bytes())).load()
        names = [entry.relative_path for entry in index.storage_data.values()]
        if not isinstance(index, Metadata) or any(PurePath(name).name != name for name in names):
            raise pickle.UnpicklingError("it points outside its folder")
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", help="a checkpoint must be on storage that all nodes share"
        ) from None
    except Exception as error:  # a forged or damaged pickle can fail in any way
        raise ConfigError(f"{path} is not the index of a checkpoint: {error}") from None
    return index
