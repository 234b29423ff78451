"""Pipeline orders in the table format that torch.distributed.pipelining loads (`compute_only`).

One row a rank, one action a cell: stage, letter, micro-batch, as in `0F0,0F1,0I0,0W0`. The letters are torch's: F forward,
I gradient of the input (our B), W gradient of the weights, B both at once (our BW). Empty cells are idle steps of torch's tables.
Source: torch 2.13, `_Action.from_str` and `_PipelineScheduleRuntime._load_csv` in torch/distributed/pipelining/schedules.py.
"""

from __future__ import annotations

import csv
import io
import re

from ...cost_models.pipeline.simulation import Action, Kind, Order
from ...schema import Plan
from ...schema.base import shown
from ...schema.errors import ConfigError

_LETTERS: dict[Kind, str] = {"F": "F", "B": "I", "W": "W", "BW": "B"}
_KINDS: dict[str, Kind] = {letter: kind for kind, letter in _LETTERS.items()}
_CELL = re.compile(r"([0-9]{1,9})([FIWB])([0-9]{1,9})")


def to_torch_csv(order: Order) -> str:
    """Return the order as text; load it with `_PipelineScheduleRuntime(...)._load_csv(path, format="compute_only")`."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([f"{a.stage}{_LETTERS[a.kind]}{a.micro_batch}" for a in actions] for actions in order)
    return out.getvalue()


def planned_order(plan: Plan) -> Order | None:
    """Return the order that a plan of the synthesised schedule brings along; None under a named one."""
    return from_torch_csv("\n".join(plan.pipeline_order)) if plan.pipeline_order else None


def from_torch_csv(text: str) -> Order:
    """Return the order in such a text; pairs in brackets, `(0F1;3B0)OVERLAP_F_B`, are read one after the other.

    Raises:
        ConfigError: a cell that is not a pass, such as a transfer of torch's other format.
    """
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise ConfigError(f"the schedule is not CSV: {error}") from None
    return tuple(
        tuple(action for cell in row for action in _actions(cell.strip(), rank)) for rank, row in enumerate(rows)
    )


def _actions(cell: str, rank: int) -> list[Action]:
    inner = cell.removeprefix("(").partition(")")[0] if cell.endswith(")OVERLAP_F_B") else cell
    actions = []
    for part in filter(None, inner.split(";")):
        match = _CELL.fullmatch(part.strip())
        if match is None:
            raise ConfigError(
                f"schedule row {rank}: {shown(cell)} is not a pass",
                details=("expected a cell like 0F3, 0I3, 0W3 or 0B3 (compute_only)",),
            )
        actions.append(Action(int(match[1]), _KINDS[match[2]], int(match[3])))
    return actions
