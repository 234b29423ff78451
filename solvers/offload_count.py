"""The count form: the linear program of offload_instance.py with layers of a kind and all slots of a pass taken together.

Every row is a sum of rows of the whole program or weaker than one of them, so its optimum is a bound on every schedule; it has some
twenty variables and takes milliseconds, which the search over layouts needs.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from .backend import solve_rows
from .linear_program import FloatArray, IntArray, LinearProgram, Term
from .offload_fluid import Fluid
from .offload_instance import OPTIONS, Instance, Worth
from .status import Status

SCALE = 1e9


def solve(instance: Instance) -> tuple[Status, Fluid | None]:
    """The optimum, spread evenly over the layers of each kind; a bound on every schedule."""
    return _solve(instance, "seconds")


def lower_bound_s(instance: Instance) -> float:
    """(O) that no schedule is below; infinite where none fits."""
    status, fluid = _solve(instance, "seconds")
    return fluid.objective_s if fluid is not None else np.inf if status is Status.INFEASIBLE else 0.0


def least_host_bytes(instance: Instance) -> float:
    """Host memory that every schedule needs, were there enough of it; infinite where none fits on the device even so."""
    status, fluid = _solve(instance, "host_bytes")
    return fluid.objective_s * SCALE if fluid is not None else np.inf if status is Status.INFEASIBLE else 0.0


def _solve(i: Instance, objective: Literal["seconds", "host_bytes"]) -> tuple[Status, Fluid | None]:
    lp, m, timed = LinearProgram(), i.num_microbatches, objective == "seconds"
    kinds, first, counts = np.unique(i.kind, return_index=True, return_counts=True)
    n = counts.astype(np.float64)
    z = lp.variables(len(OPTIONS) * len(kinds), most=(i.allowed[:, first] * n).reshape(-1)).reshape(-1, len(kinds))
    p = lp.variables(len(kinds), most=(i.streamable & i.may.parameters)[first] * n)
    may = np.array([i.may.host_optimizer, i.may.streamed_optimizer]) * i.total_state_bytes / SCALE
    states = lp.variables(4, most=np.concatenate([may, may * (i.storage_cap_bytes > 0)]))
    passes, idle = lp.variables(2, cost=m * timed), lp.variables(3, cost=m * timed)
    update = lp.variables(1, cost=timed)
    u, early, a, c, g = (lp.variables(1) for _ in range(5))
    working = lp.variables(1)

    def of(values: FloatArray) -> list[Term]:
        """Sum over layers of a value by option."""
        return [(z.reshape(-1), (values[:, first] / SCALE).reshape(-1))]

    lp.rows("C1", [(z[k], 1.0) for k in range(len(OPTIONS))], lower=n, upper=n)
    total = i.total_state_bytes / SCALE
    lp.row("C1", [(p, i.state_bytes[first] / SCALE), (states[:2], 1.0)], upper=total * (1 + 1e-9) + 1e-12)
    lp.rows("C1", [(states[2:], 1.0), (states[:2], -1.0)], upper=0.0)
    lp.row("copies", [(u, -1.0), *of(i.moved_bytes)], lower=0.0, upper=0.0)
    lp.row("C4", [(early, 1.0), (u, -1.0)], upper=0.0)
    for copies, bytes_ in ((a, i.parameter_bytes), (c, i.parameter_bytes), (g, i.gradient_bytes)):
        lp.row("copies", [(copies, -1.0), (p, bytes_[first] / SCALE)], lower=0.0, upper=0.0)
    again: list[Term] = [(z.reshape(-1), -i.repeated_s[:, first].reshape(-1))]
    _passes(lp, i, again, (passes, idle), (u, early, a, c, g))
    _update(lp, i, update, states, (p, first))
    room = (i.cap_bytes - i.fixed_bytes) / SCALE
    accumulated = i.gradient_bytes * i.gradients_accumulate
    leaves = (i.parameter_bytes + i.copy_bytes + i.state_bytes + accumulated)[first] / SCALE
    there: list[Term] = [(p, -leaves), (states[:2], -1.0), (working, 1.0)]
    in_use: list[Term] = [(z[k], -i.working_bytes[k, first] / n / SCALE) for k in range(len(OPTIONS))]
    lp.rows("working", [(working[0], 1.0), *in_use], lower=0.0)
    resident = i.resident_bytes / SCALE
    lp.row("C6", [*there, *of(i.kept_bytes), (u, 1.0), (early, -1.0)], upper=room - resident - i.turn_bytes / SCALE)
    gradients = i.gradient_bytes * (not i.gradients_accumulate) / SCALE
    in_update: list[Term] = [*there, (p, (i.copy_bytes[first] / SCALE) - gradients[first])]
    free = room - resident + float(i.copy_bytes.sum()) / SCALE
    lp.row("C6", in_update, upper=free - float(gradients.sum()) - i.update_bytes / SCALE)
    master, gradient = i.beside_states
    away = (i.parameter_bytes + i.gradient_bytes + i.state_bytes)[first] / SCALE
    held: list[Term] = [
        (states[0], 1 + master + gradient), (states[1], 1.0), (states[2:], -1.0), (p, away), (u, 1.0),
    ]  # fmt: skip
    if timed and np.isfinite(i.host_cap_bytes):
        lp.row("C7", held, upper=i.host_cap_bytes / SCALE)
    elif not timed:
        host = lp.variables(1, cost=1.0)
        lp.row("C7", [*held, (host, -1.0)], upper=0.0)
    if i.storage_cap_bytes > 0:
        lp.row("C8", [(states[2:], 1.0)], upper=i.storage_cap_bytes / SCALE)
    status, answer = solve_rows(lp)
    if answer is None:
        return status, None
    of_kind = np.searchsorted(kinds, i.kind)
    where = answer.values[states] * SCALE
    return status, Fluid(
        objective_s=answer.objective,
        options=(answer.values[z] / n)[:, of_kind],
        parameters=(answer.values[p] / n)[of_kind],
        host_bytes=float(where[0]),
        streamed_bytes=float(where[1]),
        storage_bytes=float(where[2] + where[3]),
        worth=Worth(),
    )


def _passes(
    lp: LinearProgram, i: Instance, again: list[Term], slots: tuple[IntArray, IntArray], copies: tuple[IntArray, ...]
) -> None:
    """(C2), (C3) of all forward passes, and of all backward passes."""
    (forward, backward), (start, turn, tail) = slots
    u, early, a, c, g = copies
    links = i.links
    down, up = SCALE / links.to_host_bytes_per_s, SCALE / links.to_device_bytes_per_s

    def late(rate: float) -> list[Term]:
        """Copies down that are left for the backward passes."""
        return [(u, rate), (early, -rate)]

    # What the passes alone do not hide runs in the idle slots, where it costs no compute.
    lp.row("C2", [(forward, 1.0)], lower=float(i.forward_s.sum()))
    lp.row("C2", [(backward, 1.0), *again], lower=float(i.backward_s.sum()))
    lost = links.compute_lost_to_host * down, links.compute_lost_to_device * up
    begins: list[Term] = [(forward, 1.0), (start, 1.0), (turn, 1.0), (early, -lost[0]), (a, -lost[1])]
    lp.row("C2", begins, lower=float(i.forward_s.sum()))
    ends: list[Term] = [(backward, 1.0), (turn, 1.0), (tail, 1.0)]
    lp.row(
        "C2",
        [*ends, *again, (u, -lost[1]), (c, -lost[1]), (g, -lost[0]), *late(-lost[0])],
        lower=float(i.backward_s.sum()),
    )
    lp.row("C3", [(early, down), (forward, -1.0), (turn, -1.0)], upper=0.0)
    lp.row("C3", [(a, up), (forward, -1.0), (start, -1.0)], upper=0.0)
    lp.row("C3", [(u, up), (c, up), (backward, -1.0), (turn, -1.0)], upper=0.0)
    lp.row("C3", [(g, down), *late(down), (backward, -1.0), (tail, -1.0)], upper=0.0)
    both = -1.0 - links.duplex
    lp.row("C3", [(early, down), (a, up), (forward, both), (start, both), (turn, both)], upper=0.0)
    in_both: list[Term] = [(u, up), (c, up), (g, down), *late(down)]
    lp.row("C3", [*in_both, (backward, both), (turn, both), (tail, both)], upper=0.0)


def _update(
    lp: LinearProgram, i: Instance, update: IntArray, states: IntArray, streamed: tuple[IntArray, IntArray]
) -> None:
    """(C9)."""
    total, links, (p, first) = i.total_state_bytes, i.links, streamed
    if total == 0:
        return
    on_device, on_host, unit = float(i.device_update_s.sum()), float(i.host_update_s.sum()), SCALE / total
    share = i.state_bytes[first] / total
    host, kept = states[:1], states[1:2]
    lp.row("C9", [(update, 1.0), (host, on_device * unit), (p, on_device * share)], lower=on_device)
    lp.row("C9", [(update, 1.0), (host, -on_host * unit), (p, -on_host * share)], lower=0.0)
    master, gradient = i.beside_states
    down, up = SCALE / links.to_host_bytes_per_s, SCALE / links.to_device_bytes_per_s
    lp.row("C9", [(host, gradient * down), (kept, down), (update, -1.0)], upper=0.0)
    lp.row("C9", [(host, master * up), (kept, up), (update, -1.0)], upper=0.0)
    lp.row("C9", [(host, gradient * down + master * up), (kept, down + up), (update, -1.0 - links.duplex)], upper=0.0)
    if i.storage_cap_bytes > 0:
        each = SCALE / links.read_bytes_per_s + SCALE / links.write_bytes_per_s
        lp.row("C9", [(states[2:], each), (update, -1.0)], upper=0.0)
