"""Read how many machines a pool had over time, from a file: columns time_s, available, and of several pools their name, trace."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from .base import shown
from .csv_file import table_rows
from .errors import ConfigError
from .limits import MAX_CHANGES

_HELP = "columns time_s (seconds from the start) and available (machines from then on), and trace where there are several pools"


class Change(NamedTuple):
    """How many machines there are from a moment on."""

    time_s: float
    available: int


def read_pools(path: Path) -> dict[str, tuple[Change, ...]]:
    """Return the changes of each pool, in the order of time; the last one is its end.

    Raises:
        ConfigError: the file cannot be read, or is not such a table.
    """
    pools: dict[str, list[Change]] = {}
    for number, row in table_rows(path, ("time_s", "available"), form=_HELP):
        pools.setdefault(row.get("trace") or path.stem, []).append(_change(path, number, row))
        if number > MAX_CHANGES:
            raise ConfigError(f"{path} has more than {MAX_CHANGES} lines", help="cut it")
    for name, changes in pools.items():
        _require_order(path, name, changes)
    if not pools:
        raise ConfigError(f"{path} has no line", help=_HELP)
    return {name: tuple(changes) for name, changes in pools.items()}


def _change(path: Path, number: int, row: dict[str, str]) -> Change:
    try:
        change = Change(float(row["time_s"]), int(row["available"]))
    except (TypeError, ValueError):
        text = shown(f"{row['time_s']}, {row['available']}")
        raise ConfigError(f"{path} line {number}: {text} is no time and number of machines", help=_HELP) from None
    if not (0 <= change.time_s <= 1e12 and 0 <= change.available <= 10**6):
        raise ConfigError(f"{path} line {number}: {change.time_s:g} s, {change.available} machines", help=_HELP)
    return change


def _require_order(path: Path, name: str, changes: Sequence[Change]) -> None:
    times = [change.time_s for change in changes]
    if len(times) < 2 or any(after <= before for before, after in pairwise(times)):
        raise ConfigError(f"{path}: the times of {shown(name)} do not ascend, or it has one line", help=_HELP)
