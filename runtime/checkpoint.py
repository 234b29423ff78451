"""Checkpoints of a training run: model, optimizer states and step, readable under any other layout.

torch.distributed.checkpoint writes one file per rank and an index by parameter name and offset; because the names are
those of the unsplit model, a checkpoint of tp=2 loads into pp=4. A checkpoint is written to a hidden folder that is renamed
when it is whole, so what is called ``step-...`` can always be loaded.

Loading runs no code from the files. torch reads the index with plain ``pickle`` and non-tensor values with
``torch.load(weights_only=False)``, and both would run whatever a forged file says: here the index goes through an
unpickler that admits only the classes an index is made of, and no non-tensor values are stored at all (hyper-parameters
come from the run's options, the step from a JSON file).
"""

from __future__ import annotations

import io
import pickle
import re
import shutil
import tempfile
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ..schema import ConfigError, MeshwrightError, ModelSpec
from ..schema.base import Document

if TYPE_CHECKING:
    from .parallel_model import ParallelModel

KEPT_CHECKPOINTS = 2
"""The newest checkpoints that stay; older ones are deleted once a newer one is whole."""

_INFO_FILE = "checkpoint.json"
_STEP_FOLDER = re.compile(r"step-(\d{8})")
_TIED_NAMES = ("lm_head.weight", "model.embed_tokens.weight")
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

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


class CheckpointInfo(Document):
    """What is known of a checkpoint without reading its tensors.

    Attributes:
        step: steps done; the run goes on with ``step + 1``.
        seed: of the data; another one would not continue the same stream.
    """

    step: int
    seed: int
    model: ModelSpec


def list_checkpoints(root: str | Path) -> tuple[Path, ...]:
    """Whole checkpoints under ``root``, oldest first; none where the folder does not exist."""
    root = Path(root)
    if not root.is_dir():
        return ()
    found = (path for path in root.iterdir() if _STEP_FOLDER.fullmatch(path.name) and (path / _INFO_FILE).is_file())
    return tuple(sorted(found, key=lambda path: path.name))


def check_writable(root: str | Path) -> None:
    """Make the folder of the checkpoints and write in it, before a run depends on it.

    Raises:
        ConfigError: it cannot be made or written.
    """
    try:
        Path(root).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root) as file:
            file.write(b"checkpoints fit")
    except OSError as error:
        raise ConfigError(f"cannot write checkpoints to {root}: {error.strerror}") from None


def save_checkpoint(
    root: str | Path, model: ParallelModel, optimizer: torch.optim.Optimizer, *, step: int, seed: int
) -> Path:
    """Write a checkpoint and delete all but the newest `KEPT_CHECKPOINTS`; every rank calls it.

    Raises:
        MeshwrightError: the folder cannot be written.
    """
    root = Path(root)
    folder, partial = root / f"step-{step:08d}", root / f".step-{step:08d}.partial"
    is_first = dist.get_rank() == 0
    if is_first:
        _prepare(partial)
    dist.barrier()
    try:
        save(_state(model, optimizer), storage_writer=FileSystemWriter(partial))
    except CheckpointException as error:
        raise _describe(f"cannot write the checkpoint {folder}", error) from None
    if is_first:
        CheckpointInfo(step=step, seed=seed, model=model.plan.model).save(partial / _INFO_FILE)
        _publish(partial, folder)
    dist.barrier()
    return folder


def load_checkpoint(folder: str | Path, model: ParallelModel, optimizer: torch.optim.Optimizer) -> CheckpointInfo:
    """Read a checkpoint of any layout into a model and its optimizer; every rank calls it.

    Raises:
        ConfigError: the checkpoint is damaged, is of another model, or holds what is not an index of tensors.
    """
    folder = Path(folder)
    info = CheckpointInfo.load(folder / _INFO_FILE)
    if info.model != model.plan.model:
        raise ConfigError(
            f"the checkpoint {folder} is of another model: {info.model.name} with {info.model.num_params} parameters; "
            f"the plan's is {model.plan.model.name} with {model.plan.model.num_params}",
        )
    current, state = _current(model, optimizer), _state(model, optimizer)
    try:
        load(state, storage_reader=SafeReader(folder), planner=_TensorsOnly())
    except CheckpointException as error:
        raise _describe(f"cannot read the checkpoint {folder}", error) from None
    loaded = {
        part: {name: _loaded_value(name, value, state[part], model) for name, value in values.items()}
        for part, values in current.items()
    }
    set_model_state_dict(model.model_part, loaded["model"])
    set_optimizer_state_dict(model.model_part, optimizer, loaded["optimizer"], options=_FLAT)
    return info


def _current(model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Parameters, optimizer states and hyper-parameters of this rank by name."""
    return {
        "model": get_model_state_dict(model.model_part),
        "optimizer": get_optimizer_state_dict(model.model_part, optimizer, options=_FLAT),
    }


def _state(model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """What is stored of `_current`: the tensors, under the names of the model without a pipeline."""
    return {
        part: {_stored_name(name, model): value for name, value in values.items() if isinstance(value, torch.Tensor)}
        for part, values in _current(model, optimizer).items()
    }


def _loaded_value(name: str, current: Any, state: dict[str, Any], model: ParallelModel) -> Any:
    """What was read for a name, or the current value of what is not stored.

    The two copies of a tied embedding may be on one rank: each gets values of its own, or the optimizer would update one tensor
    for both.
    """
    stored = _stored_name(name, model)
    value = state.get(stored, current)
    return value.clone() if stored != name and isinstance(value, torch.Tensor) else value


def _stored_name(name: str, model: ParallelModel) -> str:
    """A tied output projection is the embedding, which the last pipeline stage holds under the projection's name."""
    return name.replace(*_TIED_NAMES) if model.plan.model.tie_embeddings else name


def _prepare(partial: Path) -> None:
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"cannot write checkpoints to {partial.parent}: {error.strerror}") from None


def _publish(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
        for old in list_checkpoints(folder.parent)[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(old)
    except OSError as error:
        raise MeshwrightError(f"cannot finish the checkpoint {folder}: {error.strerror}") from None


def _describe(message: str, error: CheckpointException) -> MeshwrightError:
    """The first rank's cause of a checkpoint that failed, as one of our errors."""
    rank, (cause, _) = min(error.failures.items())
    if isinstance(cause, MeshwrightError):
        return cause
    lines = str(cause).strip().splitlines() or [""]
    return MeshwrightError(message, details=(f"rank {rank}: {type(cause).__name__}: {lines[-1]}",))


class SafeReader(FileSystemReader):
    """Reads a checkpoint from files whose content is not trusted.

    Raises:
        ConfigError: the index is missing, damaged, names classes an index has no use for, or points outside the folder.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self._index = _read_index(Path(folder))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index; torch's own method would unpickle anything."""
        if self._index.storage_meta is None:
            self._index.storage_meta = StorageMeta()
        self._index.storage_meta.load_id = self.load_id
        return self._index


class _TensorsOnly(DefaultLoadPlanner):
    """Refuses non-tensor values: torch would unpickle them without restriction."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise ConfigError(f"the checkpoint stores {read_item.dest_index.fqn!r} as a Python object, not as a tensor")


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if global_name in _INDEX_CLASSES.get(module_name, ()):
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")


def _read_index(folder: Path) -> Metadata:
    path = folder / ".metadata"
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
