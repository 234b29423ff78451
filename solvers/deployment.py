"""How many engine instances of each kind serve a load, and which requests go to which: the least cost.

Sets
    w = 0..W-1   classes of requests
    e            kinds of instances: those that prefill and decode (agg), that prefill, that decode
    t            types of devices
Data
    RATE[w]      requests a second of a class
    s[w,e]       seconds of an instance of kind e that a request of class w takes at the limits; infinite: it does not serve them
    SENT[w,e]    seconds of the link of a prefill or decode instance for the keys and values of a prompt
    SIZE[e], TYPE[e], COST[e]   devices of an instance, their type, what it costs
    STOCK[t], MOST[e]           devices of a type and instances of a kind that there are
Variables
    n[e]         instances, whole numbers
    x[w,e] >= 0  share of a class that goes to a kind; of prefill and decode the shares of each
Objective
    (O)  min  sum_e COST[e] n[e]
Constraints
    (E1) served:  sum_agg x[w,e] + sum_prefill x[w,e] = 1
    (E2) time:    sum_w RATE[w] s[w,e] x[w,e] <= n[e]
    (E3) devices: sum_(e of type t) SIZE[e] n[e] <= STOCK[t]
    (E4) flow:    sum_prefill x[w,e] = sum_decode x[w,e], and over the link sum_w RATE[w] SENT[w,e] x[w,e] <= n[e]
    (E5) stock:   n[e] <= MOST[e]

Seconds of classes on one instance add up, as in Griggs et al., arXiv:2404.14527 (Melange); its slices are fractions here.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..schema.units import FloatArray, IntArray
from .backend import RowSolver, Solution, Status
from .linear_program import LinearProgram

Role = Literal["agg", "prefill", "decode"]

CHECKED = 1e-5
"""Rows of a solver's answer may miss their sides by this part."""


@dataclass(frozen=True, kw_only=True)
class DeploymentInstance:
    """The data of the problem, checked when made; arrays [W], [E], [W, E] and [T]."""

    rates: FloatArray
    seconds: FloatArray
    cost: FloatArray
    size: IntArray
    device_type: IntArray
    stock: FloatArray
    roles: tuple[Role, ...]
    sent_s: FloatArray | None = None
    max_count: FloatArray | None = None

    def __post_init__(self) -> None:
        shape = len(self.rates), len(self.roles)
        if self.seconds.shape != shape or len(self.cost) != shape[1] or len(self.size) != shape[1]:
            raise ValueError(f"seconds of {self.seconds.shape}, cost of {self.cost.shape}: {shape} classes and kinds")
        if not (np.all(self.rates >= 0) and np.all(self.seconds > 0) and np.all(self.cost > 0)):
            raise ValueError("rates are from 0 up, seconds and costs positive")

    def of(self, *roles: Role) -> IntArray:
        """Return the kinds of these roles."""
        return np.array([e for e, role in enumerate(self.roles) if role in roles], dtype=np.int64)


@dataclass(frozen=True)
class Counts:
    """Instances [E] and shares of classes [W, E]."""

    instances: IntArray
    shares: FloatArray


def solve(instance: DeploymentInstance, *, time_limit_s: float = 10.0, rel_gap: float = 1e-6) -> Solution[Counts]:
    """Return the cheapest counts and routes."""
    start = time.perf_counter()
    program, counts, shares = _program(instance)
    status, answer = RowSolver(program, time_limit_s=time_limit_s, rel_gap=rel_gap).solve()
    solve_s = time.perf_counter() - start
    if answer is None:
        return Solution(status=status, choice=None, solve_s=solve_s, backend="highs")
    integers = np.round(answer.values[counts]).astype(np.int64)
    parts = np.zeros(instance.seconds.shape)
    parts[shares >= 0] = np.clip(answer.values[shares[shares >= 0]], 0, 1)
    choice = Counts(integers, parts)
    bound = min(answer.bound, float(instance.cost @ integers))
    return Solution(
        status=status if status is not Status.UNKNOWN else Status.FEASIBLE,
        choice=choice,
        objective=check(instance, choice),
        bound=bound,
        solve_s=solve_s,
        backend="highs",
    )


def relaxed_bound(instance: DeploymentInstance) -> float:
    """Return what no counts cost less than, in parts of instances."""
    program, _, _ = _program(instance)
    program.integer.clear()
    _, answer = RowSolver(program).solve()
    return math.inf if answer is None else answer.objective


def _program(instance: DeploymentInstance) -> tuple[LinearProgram, IntArray, IntArray]:
    """Return the program, the indices of the counts [E], and of the shares [W, E] (-1: the kind does not serve the class)."""
    program = LinearProgram("deployment")
    num_classes, num_kinds = instance.seconds.shape
    max_count = np.full(num_kinds, np.inf) if instance.max_count is None else instance.max_count
    counts = program.add_variables(num_kinds, x_max=max_count, cost=instance.cost)  # (E5), (O)
    program.integer.extend(counts.tolist())
    shares = np.full((num_classes, num_kinds), -1, dtype=np.int64)
    served = np.isfinite(instance.seconds)
    shares[served] = program.add_variables(int(served.sum()))
    _add_served_E1(program, instance, shares)
    _add_time_E2(program, instance, shares, counts)
    for device_type, stock in enumerate(instance.stock.tolist()):
        of_type = np.flatnonzero(instance.device_type == device_type)
        if len(of_type) and math.isfinite(stock):
            program.add_row("E3", [(counts[of_type], instance.size[of_type].astype(np.float64))], upper=stock)
    _add_flow_E4(program, instance, shares, counts)
    return program, counts, shares


def _add_served_E1(program: LinearProgram, instance: DeploymentInstance, shares: IntArray) -> None:
    first = instance.of("agg", "prefill")
    for row in shares[:, first]:
        program.add_row("E1", [(row[row >= 0], 1.0)], lower=1.0, upper=1.0)


def _add_time_E2(program: LinearProgram, instance: DeploymentInstance, shares: IntArray, counts: IntArray) -> None:
    for e, count in enumerate(counts.tolist()):
        served = np.flatnonzero(shares[:, e] >= 0)
        busy = instance.rates[served] * instance.seconds[served, e]
        program.add_row("E2", [(shares[served, e], busy), (np.array([count]), -1.0)], upper=0.0)


def _add_flow_E4(program: LinearProgram, instance: DeploymentInstance, shares: IntArray, counts: IntArray) -> None:
    prefill, decode = instance.of("prefill"), instance.of("decode")
    if not len(prefill) and not len(decode):
        return
    for row in shares:
        into, out = row[prefill], row[decode]
        program.add_row("E4", [(into[into >= 0], 1.0), (out[out >= 0], -1.0)], lower=0.0, upper=0.0)
    if instance.sent_s is None:
        return
    for e in (*prefill.tolist(), *decode.tolist()):
        served = np.flatnonzero(shares[:, e] >= 0)
        sent = instance.rates[served] * instance.sent_s[served, e]
        program.add_row("E4", [(shares[served, e], sent), (counts[e : e + 1], -1.0)], upper=0.0)


def check(instance: DeploymentInstance, choice: Counts) -> float:
    """Return the cost of a choice from the definition.

    Raises:
        ValueError: with the label of the constraint that it breaks.
    """
    counts, shares = choice.instances, choice.shares
    busy = np.where(np.isfinite(instance.seconds), instance.seconds, 0.0) * instance.rates[:, None] * shares
    _require("E1", np.abs(shares[:, instance.of("agg", "prefill")].sum(axis=1) - 1))
    if np.any(shares[~np.isfinite(instance.seconds)] > CHECKED):
        raise ValueError("(E1): a class goes to a kind that does not serve it")
    _require("E2", busy.sum(axis=0) - counts, np.maximum(counts, 1))
    for device_type, stock in enumerate(instance.stock.tolist()):
        used = instance.size @ np.where(instance.device_type == device_type, counts, 0)
        _require("E3", np.array([used - stock]))
    flow = shares[:, instance.of("prefill")].sum(axis=1) - shares[:, instance.of("decode")].sum(axis=1)
    _require("E4", np.abs(flow))
    if instance.sent_s is not None:
        sent = (instance.sent_s * instance.rates[:, None] * shares).sum(axis=0)
        _require("E4", np.where([role == "agg" for role in instance.roles], 0.0, sent - counts), np.maximum(counts, 1))
    if instance.max_count is not None:
        _require("E5", counts - instance.max_count)
    return float(instance.cost @ counts)


def _require(label: str, excess: FloatArray, scale: FloatArray | float = 1.0) -> None:
    if len(excess) and float(np.max(excess / scale)) > CHECKED:
        raise ValueError(f"({label}) is broken by {float(np.max(excess)):.3g}")
