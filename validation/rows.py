"""Tables of measured training runs, one strict, typed row per line; and the tables of ``data/`` by which rows are read.

docs/accuracy.md says what each column means. Only the ones in REQUIRED must exist; an empty cell, or an optional column that is
missing, is "not stated". Anything that is stated must be readable.

The tables of ``data/`` say what words mean (words, spellings, devices, networks) and what rows leave unsaid (frameworks, families,
shapes). Every line has its source; its pattern is a regular expression, and the first line that matches counts. They hold facts
about frameworks, recipes and their time; nothing in them is chosen to make a prediction fit.
"""

from __future__ import annotations

import csv
import io
import math
import re
import tomllib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from ..schema import Layout, Workload
from ..schema.base import read_text
from ..schema.errors import ConfigError

REQUIRED = (
    "id", "gpu_type", "n_gpus", "model", "seq_len", "global_batch", "micro_batch", "dp", "tp", "pp", "iter_time_s",
)  # fmt: skip

Part = Literal["fit", "held-out"]

MAX_COUNT = 10**9
"""Of devices, layers, tokens and whatever else a column counts."""

_LONG_NUMBER = re.compile("[0-9]{31}")
_MAY_BE_ZERO = ("experts", "topk")
_OTHER_COLUMNS = (
    "recompute", "sharding", "precision", "adapters", "sequence_parallel", "experts_follow_tp", "compiled",
    "model_chunks", "head",
)  # fmt: skip
"""Choices of frameworks.toml that other columns state; each of the rest may have a column of its name."""

_YES_NO = {"yes": True, "no": False, "true": True, "false": False}
_WORDED = ("sharding_class", "recompute_class", "seq_parallel", "status", "quality")
"""Columns whose cells are one of a few words; words.csv knows other spellings of them."""

_NO_DEFAULT = ("id", "gpu_type", "model")  # the column must exist, the cell may be empty
_FOLDER = Path(__file__).parent / "data"


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One measured run; None or "" where the table does not say. Names are the table's, `line` is the line of the file."""

    line: int
    id: str
    split: str = ""
    source_set: str = ""
    decision_group: str = ""
    source: str = ""
    framework: str = ""
    task: str = ""
    gpu_type: str
    gpu_class: str = ""
    gpus_per_node: int | None = None
    intra_interconnect: str = ""
    inter_interconnect: str = ""
    gpu_mem_gib: float | None = None
    n_gpus: int | None = None
    model: str
    model_family: str = ""
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None  # of one expert for a mixture of experts
    vocab: int | None = None
    experts: int | None = None
    topk: int | None = None
    params_b: float | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    grad_accum: int | None = None
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    vpp: str = ""  # as printed: some schedules are named instead of counted
    cp: int | None = None
    ep: int | None = None
    etp: int | None = None
    sharding: str = ""
    sharding_class: str = ""
    seq_parallel: str = ""
    recompute: str = ""
    recompute_class: str = ""
    precision: str = ""
    precision_class: str = ""
    offload: str = ""
    optimizer: str = ""
    iter_time_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    tflops_kind: str = ""
    mfu: float | None = None
    peak_mem_gib: float | None = None
    mem_kind: str = ""
    status: str = "ok"
    quality: str = "A"
    flag: str = ""
    notes: str = ""
    date: str = ""
    behaviour: tuple[tuple[str, Any], ...] = ()  # from columns that are named like a choice of frameworks.toml

    @property
    def part(self) -> Part:
        """Half of the evidence: coefficients are chosen on ``fit``, accuracy is reported on ``held-out``.

        Rows of one model on one number of one device are together, so that no near-copy of a held-out run was fitted.
        """
        key = f"{self.source_set}/{self.model}/{self.gpu_class or self.gpu_type}/{self.n_gpus}"
        return "held-out" if zlib.crc32(key.encode()) % 2 else "fit"

    @property
    def software_date(self) -> str:
        """Year and month of the software that ran, ``2024-03``: as stated, else of its release or of the publication; or ""."""
        text = "@".join((self.date, self.framework, self.source, self.notes))
        return stated("date", text) or ""

    @property
    def is_scored(self) -> bool:
        """Whether the measurement is good enough to be scored against."""
        return self.quality in ("A", "B") and not self.flag

    @property
    def is_oom(self) -> bool:
        """Whether the run failed for memory (or, where the source mixes them, for memory or another reason)."""
        return self.status in ("oom", "oom_or_crash")

    @property
    def measured_s(self) -> float | None:
        """Seconds of one step, or None: as printed, or from printed tokens. FLOPs say it too: see `throughput.measured_step_s`."""
        if self.status != "ok" or self.global_batch is None:
            return None
        if self.iter_time_s is not None or not (self.tokens_per_s_per_gpu and self.seq_len and self.n_gpus):
            return self.iter_time_s
        return self.global_batch * self.seq_len / (self.tokens_per_s_per_gpu * self.n_gpus)


def read_runs(path: str | Path) -> list[RunRow]:
    """Return all rows of a table of runs.

    Raises:
        ConfigError: no such file, not CSV, a required column is missing, a cell is not what its column holds, an id repeats.
    """
    columns = {field.name: str(field.type) for field in fields(RunRow) if field.name not in ("line", "behaviour")}
    rows: list[RunRow] = []
    first_line: dict[str, int] = {}
    for line, cells in _read_table(path, required=REQUIRED):
        values = {name: _parse(path, line, name, kind, cells[name]) for name, kind in columns.items() if name in cells}
        values |= {name: _spelled(name, str(values[name])) for name in _WORDED if values.get(name)}
        stated: dict[str, Any] = {name: v for name, v in values.items() if v not in (None, "") or name in _NO_DEFAULT}
        row = RunRow(line=line, **stated, behaviour=_behaviour(path, line, cells))
        if not row.id or row.id in first_line:
            problem = f"{row.id!r} is already on line {first_line[row.id]}" if row.id else "empty"
            raise ConfigError(f"{path} line {line} column id: {problem}")
        first_line[row.id] = line
        rows.append(row)
    return rows


def read_groups(path: str | Path) -> list[str]:
    """Return the names of the decision groups that a table lists, in its order.

    Raises:
        ConfigError: no such file, not CSV, no column decision_group, or an empty or repeated name.
    """
    names: list[str] = []
    for line, cells in _read_table(path, required=("decision_group",)):
        name = cells["decision_group"]
        if not name or name in names:
            problem = f"repeated {name!r}" if name else "empty"
            raise ConfigError(f"{path} line {line} column decision_group: {problem}")
        names.append(name)
    return names


def _read_table(path: str | Path, *, required: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (line, cells) of a CSV file with a header; cells are stripped."""
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        header = [name.strip().removeprefix("\ufeff") for name in next(reader, [])]
        if not header:
            raise ConfigError(f"{path} is empty", help="the first line must name the columns")
        if missing := [name for name in required if name not in header]:
            raise ConfigError(
                f"{path} line 1: no column {', '.join(missing)}",
                details=(f"found: {', '.join(header)[:200]}",),
                help=_suggestion(missing, header) or "the file must be comma-separated with a header line",
            )
        if repeated := sorted({name for name in header if header.count(name) > 1 and name}):
            raise ConfigError(f"{path} line 1: column {', '.join(repeated)} appears more than once")
        is_empty = True
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) != len(header):
                raise ConfigError(
                    f"{path} line {reader.line_num}: {len(cells)} cells, the header has {len(header)} columns"
                )
            row = {name: cell.strip() for name, cell in zip(header, cells, strict=True)}
            if long := next((name for name, cell in row.items() if _LONG_NUMBER.search(cell)), None):
                raise ConfigError(f"{path} line {reader.line_num} column {long}: a number of more than 30 digits")
            is_empty = False
            yield reader.line_num, row
    except csv.Error as error:
        raise ConfigError(f"{path} line {reader.line_num} is not CSV: {error}") from None
    if is_empty:
        raise ConfigError(f"{path} has a header but no rows")


def _suggestion(missing: Sequence[str], header: Sequence[str]) -> str:
    """Return which columns of a header may be the missing ones under another name; empty where none is like them."""
    close = {name: get_close_matches(name, header, n=1, cutoff=0.7) for name in missing}
    return ", ".join(f"rename {names[0]!r} to {name}" for name, names in close.items() if names)


def _parse(path: str | Path, line: int, name: str, kind: str, text: str) -> str | int | float | None:
    """Return a cell as what its column holds; None where it is empty."""
    if kind == "str" or not text:
        return text if kind == "str" else None
    place = f"{path} line {line} column {name}: {text[:40]!r}"
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{place} is not a number") from None
    if not math.isfinite(value) or value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
        raise ConfigError(f"{place} is not a positive number")
    if name == "mfu" and value > 1:
        raise ConfigError(f"{place} is more than 1", help="an MFU is a fraction of the peak, 0.45 and not 45")
    if not kind.startswith("int"):
        return value
    if value != int(value) or value > MAX_COUNT:
        raise ConfigError(f"{place} is not a whole number")
    return int(value)


# --- the tables of data/ ---------------------------------------------------------------------------------------------


@cache
def read_table(name: str) -> tuple[dict[str, str], ...]:
    """Return the lines of ``data/NAME.csv`` by column."""
    with (_FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def first_match(name: str, text: str) -> dict[str, str] | None:
    """Return the first line of a table whose pattern occurs in a text."""
    return next((line for line in read_table(name) if re.search(line["pattern"], text)), None)


def stated(choice: str, text: str) -> str | None:
    """Return what words.csv says a text states about a choice; None where it states nothing. A value may name groups."""
    lines = (line for line in read_table("words") if line["choice"] == choice)
    matches = ((line, re.search(line["pattern"], text, re.IGNORECASE)) for line in lines)
    return next((match.expand(line["value"]) for line, match in matches if match), None)


@cache
def framework_choices() -> dict[str, list[dict[str, Any]]]:
    """Return frameworks.toml: by choice, lines with the start of a framework's name, its value and the source."""
    return tomllib.loads((_FOLDER / "frameworks.toml").read_text(encoding="utf-8"))


@cache
def _spelled(column: str, text: str) -> str:
    """Return a cell in the spelling of the table's README, or as it is where no spelling is known."""
    return stated(f"column {column}", text) or text


_NOBODY = "?"
"""A framework that no line is about."""


class FrameworkDefaults:
    """The choices of one framework, and a record of those that had to be assumed, as ``name=value``."""

    def __init__(self, row: RunRow) -> None:
        self.framework, self.date = row.framework, row.software_date
        self.behaviour = dict(row.behaviour)
        self.assumed: list[str] = []

    def value(self, choice: str, detail: str = "") -> Any:
        """Return a choice; ``detail`` follows the framework's name where the table looks at more than that.

        What the row's column of the choice states comes before what frameworks do.
        """
        if choice in self.behaviour:
            return self.behaviour[choice]
        return self._line(choice, detail).get("value")

    def _line(self, choice: str, detail: str, framework: str | None = None) -> dict[str, Any]:
        """Return the first line of a choice that is about a framework, the row's by default, at the row's time."""
        text = (self.framework if framework is None else framework) + detail
        lines = (line for line in framework_choices()[choice] if re.match(line["framework"], text, re.IGNORECASE))
        return next(line for line in lines if not ("until" in line and (self.date or "9") > line["until"]))

    def is_known(self, choice: str, detail: str = "") -> bool:
        """Return whether the row or a line about frameworks of its name states a choice, not one about frameworks nobody knows."""
        return choice in self.behaviour or self._line(choice, detail) is not self._line(choice, detail, _NOBODY)

    def noted(self, choice: str, said: Any, detail: str = "") -> Any:
        """Return a choice as its column states it, else as ``said`` by other words of the row (None: by none), else as `value`."""
        return self.value(choice, detail) if said is None or choice in self.behaviour else said

    def stated(self, choice: str) -> Any:
        """Return what the row's column of a choice states; None where it states nothing."""
        return self.behaviour.get(choice)

    def assume(self, choice: str, detail: str = "") -> Any:
        """Return a choice and record it where the row does not state it."""
        value = self.value(choice, detail)
        if choice not in self.behaviour:
            self.assumed.append(f"{choice}={value}")
        return value


def _behaviour(path: str | Path, line: int, cells: dict[str, str]) -> tuple[tuple[str, Any], ...]:
    """Return (choice, value) of the cells that state what else frameworks.toml would say."""
    names = (name for name in framework_choices() if name not in _OTHER_COLUMNS and cells.get(name))
    return tuple((name, _choice(f"{path} line {line} column {name}", name, cells[name])) for name in names)


def _choice(place: str, choice: str, text: str) -> Any:
    """Return a cell as a value of a choice: one of those that its field of the schema has, else that frameworks.toml has.

    Raises:
        ConfigError: it is none of them.
    """
    fields_of = {**Layout.model_fields, **Workload.model_fields}
    values = get_args(fields_of[choice].annotation) if choice in fields_of else ()
    values = values or tuple(line["value"] for line in framework_choices()[choice] if "value" in line)
    if choice == "packed_document" and text.isdigit() and 0 < int(text) <= MAX_COUNT:
        return int(text)
    known = _YES_NO if any(isinstance(value, bool) for value in values) else {str(value): value for value in values}
    if text.lower() not in known:
        raise ConfigError(f"{place}: {text[:40]!r} is not one of {', '.join(dict.fromkeys(known))}")
    return known[text.lower()]
