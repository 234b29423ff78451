"""A plan as the configuration of another engine, and such a configuration as a layout."""

from .adapter import Exported, Imported
from .registry import ENGINES, RL_TARGETS, SERVING_TARGETS, TARGETS, as_run_by, export, exportable, read_configuration

__all__ = [
    "ENGINES",
    "RL_TARGETS",
    "SERVING_TARGETS",
    "TARGETS",
    "Exported",
    "Imported",
    "as_run_by",
    "export",
    "exportable",
    "read_configuration",
]
