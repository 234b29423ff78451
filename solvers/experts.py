"""Experts where they belong: how many replicas each gets, on which GPU, and which share of its tokens each replica takes.

`place_experts` answers for measured loads, `rebalance_experts` is the same behind EPLB's signature, `split_shares` gives the
shares for the counts of a batch, `migrate` the transfers between two placements. The problem: solvers/expert_instance.py.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from ..schema.errors import ConfigError
from . import expert_moves, expert_shares
from .expert_balance import Search, balanced, uniform_objective
from .expert_exact import exact
from .expert_groups import in_groups
from .expert_instance import FloatArray, Instance, IntArray, as_loads, instance_of, replica_counts
from .expert_moves import Transfer
from .expert_placement import Answer, Evaluation, ExpertPlacement, Split, TraceEvaluation, finished
from .expert_traffic import Homes, as_trace, near_tokens

__all__ = [
    "Evaluation",
    "ExpertPlacement",
    "TraceEvaluation",
    "Transfer",
    "migrate",
    "place_experts",
    "rebalance_experts",
    "split_shares",
]

Objective = Literal["balance", "traffic", "pareto"]
EffortName = Literal["fast", "search", "exact"]


def place_experts(
    load: Any,
    *,
    num_gpus: int,
    num_nodes: int = 1,
    num_slots: int,
    num_groups: int | None = None,
    previous: ExpertPlacement | Any = None,
    move_budget: float | None = None,
    scenarios: Any = None,
    trace: Any = None,
    gpu_speed: Any = None,
    slots_per_gpu: Any = None,
    split: Split = "uniform",
    objective: Objective = "balance",
    effort: EffortName = "fast",
    time_limit_s: float = 10.0,
    seed: int = 0,
) -> ExpertPlacement:
    """Where the experts go so that the fullest GPU has little more than the mean.

    Args:
        load: tokens of each expert [L, E], or [T, L, E] in steps of time, which are summed; None: those of the trace.
        num_slots: experts that all GPUs hold together, replicas included.
        num_groups: experts are routed in this many groups, each of which stays on one node (where groups divide among nodes).
        previous: placement to start from (or its physical_to_logical); slots of experts that stay on their GPU stay as
        they are. move_budget: experts that GPUs may fetch, a layer: a number, or below 1 a part of the slots. Needs
        `previous`. scenarios: loads [D, L, E] of workloads that the placement must serve; the worst of them counts, and
        `load` is not used. trace: experts of each token [tokens, L, top_k]; for the objectives "traffic" and "pareto".
        gpu_speed, slots_per_gpu: [G], where GPUs differ.
        split: uniform: the replicas of an expert take equal parts; weighted: the parts that balance the loads best.
        objective: balance: GPUs alone; traffic: few nodes for each token, nodes balanced, then GPUs; pareto: whichever of
            a ladder of both visits fewest nodes at a load of at most 1.05.
        effort: fast; search: further starts until the time limit; exact: CP-SAT too, which proves small cases.

    Raises:
        ConfigError: loads, counts or a previous placement that cannot be meant.
    """
    start = time.perf_counter()
    loads = _loads(load, scenarios, trace)
    instance = instance_of(
        loads,
        num_gpus=num_gpus,
        num_slots=num_slots,
        num_nodes=num_nodes,
        gpu_speed=gpu_speed,
        slots_per_gpu=slots_per_gpu,
    )
    _require(split in ("uniform", "weighted"), f"split {split!r} is neither uniform nor weighted")
    _require(
        objective in ("balance", "traffic", "pareto"), f"objective {objective!r} is not balance, traffic or pareto"
    )
    _require(effort in ("fast", "search", "exact"), f"effort {effort!r} is not fast, search or exact")
    _require(
        move_budget is None or (num_groups is None and objective == "balance"),
        "a move budget goes with the objective balance and without groups: its exchanges keep no group on its node",
    )
    before = None if previous is None else _previous(previous, instance)
    searching_s = (
        time_limit_s if effort == "search" else time_limit_s / 5
    )  # the rest of an exact answer's time is for proofs
    search = Search(further=effort != "fast", time_limit_s=searching_s, seed=seed)
    if move_budget is not None:
        answer = Answer(_few_moves(instance, before, move_budget))
    elif objective != "balance":
        answer = near_tokens(instance, _trace(trace, instance), Homes(num_groups, objective), search)
    elif num_groups is not None:
        answer = Answer(in_groups(instance, num_groups, search))
    elif effort == "exact":
        start_places = balanced(instance, search)
        placed, proved = exact(instance, start_places, time_limit_s=time_limit_s - searching_s, seed=seed)
        answer = Answer(placed, proved=proved)
    else:
        answer = Answer(balanced(instance, search))
    if before is not None and answer.share is None:
        answer = replace(answer, placed=expert_moves.aligned(before, answer.placed, instance.gpu_of_slot))
    placement = finished(instance, answer, split, before, start)
    if trace is not None and answer.visits is None:
        tokens = _trace(trace, instance)
        visits = placement.evaluate_trace(tokens, seed=seed).visits_per_token * len(tokens)
        placement = replace(placement, off_node_tokens=visits * (num_nodes - 1) / num_nodes)
    return placement


def _loads(load: Any, scenarios: Any, trace: Any) -> FloatArray:
    """LOAD [D, L, E] of what was given."""
    if scenarios is not None:
        return as_loads(scenarios)
    if load is None and trace is not None:
        tokens = np.asarray(trace)
        num_experts = int(tokens.max(initial=0)) + 1
        return as_loads([np.bincount(layer.ravel(), minlength=num_experts) for layer in np.moveaxis(tokens, 1, 0)])
    return np.asarray(as_loads(load).sum(axis=0, keepdims=True))


def _trace(trace: Any, instance: Instance) -> IntArray:
    if trace is None:
        raise ConfigError(
            "the objectives traffic and pareto need a trace: experts of each token [tokens, layers, top_k]"
        )
    return as_trace(trace, instance.num_layers, instance.num_experts)


def rebalance_experts(
    weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Any, Any, Any]:
    """EPLB's signature: (phy2log [L, R], log2phy [L, E, most replicas, padded with -1], logcnt [L, E]) of loads [L, E].

    Where groups divide among nodes, the experts of a group stay on one node, as with EPLB. Torch tensors give torch tensors.

    Raises:
        ConfigError: as `place_experts`.
    """
    num_experts = np.shape(weight)[-1] if np.ndim(weight) else 0
    _require(num_groups >= 1 and num_nodes >= 1, f"{num_groups} groups on {num_nodes} nodes: 1 or more of each")
    _require(num_experts % num_groups == 0, f"{num_experts} experts do not divide into {num_groups} groups")
    hierarchical = num_groups % num_nodes == 0 and num_nodes > 1
    placement = place_experts(
        weight,
        num_gpus=num_gpus,
        num_nodes=num_nodes,
        num_slots=num_replicas,
        num_groups=num_groups if hierarchical else None,
    )
    answer = (placement.physical_to_logical, placement.logical_to_physical, placement.replica_count)
    if hasattr(weight, "new_tensor"):
        integers = weight.new_tensor([]).long()
        return tuple(integers.new_tensor(array) for array in answer)
    return answer


def split_shares(placement: ExpertPlacement, counts: Any) -> FloatArray:
    """Share of its expert's tokens for each slot, best for the token counts [L, E] (or [D, L, E]) of a batch: [L, S] ([D,
    L, S]).

    Raises:
        ConfigError: counts of other layers or experts, or that are no counts.
    """
    instance = placement._instance(counts)
    shares = [expert_shares.split(instance, placement.physical_to_logical, d).share for d in range(len(instance.load))]
    return shares[0] if np.ndim(counts) < 3 else np.array(shares)


def migrate(old: ExpertPlacement, new: ExpertPlacement) -> tuple[Transfer, ...]:
    """Transfers that turn one placement into the other; see `expert_moves.transfers` for what a round promises.

    Raises:
        ConfigError: placements of other layers, experts, GPUs or slots.
    """
    if old.replica_count.shape != new.replica_count.shape or not np.array_equal(old.slots_per_gpu, new.slots_per_gpu):
        raise ConfigError("the placements differ in layers, experts or slots; transfers need the same of each")
    node_of_gpu = np.arange(new.num_gpus) // (new.num_gpus // new.num_nodes)
    gpu_of_slot = np.repeat(np.arange(new.num_gpus), new.slots_per_gpu)
    return expert_moves.transfers(old.physical_to_logical, new.physical_to_logical, gpu_of_slot, node_of_gpu)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def _few_moves(instance: Instance, before: IntArray | None, move_budget: float) -> IntArray:
    if before is None:
        raise ConfigError("a move budget needs the previous placement")
    if not np.isfinite(move_budget) or move_budget < 0:
        raise ConfigError(f"move budget {move_budget}: a number of slots, or below 1 a part of them")
    budget = int(move_budget * instance.num_slots) if move_budget < 1 else int(move_budget)
    placed = expert_moves.within_budget(instance, before, budget)
    if budget >= instance.num_slots:
        free = balanced(instance, Search())
        better = uniform_objective(instance, free) < uniform_objective(instance, placed)
        placed[better] = free[better]
    return placed


def _previous(previous: Any, instance: Instance) -> IntArray:
    placed = np.asarray(previous.physical_to_logical if isinstance(previous, ExpertPlacement) else previous)
    expected = (instance.num_layers, instance.num_slots)
    if placed.shape != expected:
        raise ConfigError(f"the previous placement has shape {placed.shape}, the new one {expected} (layers, slots)")
    if np.any(placed != np.floor(placed)) or placed.min() < 0 or placed.max() >= instance.num_experts:
        raise ConfigError(f"the previous placement names experts outside 0..{instance.num_experts - 1}")
    placed = placed.astype(np.int64)
    missing = np.argwhere(replica_counts(placed, instance.num_experts) == 0)
    if len(missing):
        raise ConfigError(f"the previous placement has no slot for expert {missing[0][1]} in layer {missing[0][0]}")
    return placed
