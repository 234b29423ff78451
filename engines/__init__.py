"""A plan as the configuration of another engine, and such a configuration as a layout."""

from .documents import EngineName, Exported, Imported
from .registry import export, read_configuration

__all__ = ["EngineName", "Exported", "Imported", "export", "read_configuration"]
