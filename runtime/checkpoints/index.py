"""Reading the index and the tensors of a checkpoint without running code from its files.

torch reads the index with plain ``pickle`` and non-tensor values with ``torch.load(weights_only=False)``, and both would run
whatever a forged file says: here the index goes through an unpickler that admits only the classes an index is made of, and no
non-tensor values are stored at all (hyper-parameters come from the run's options, what else a run knows from a JSON file).
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from ...schema import ConfigError

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
