"""The public functions of expert placement, and the placement with what other loads or tokens make of it.

`place_experts` answers for measured loads: how many replicas each expert gets, on which GPU, and which share of its tokens each
replica takes. `rebalance_experts` is the same behind EPLB's signature, `split_shares` gives the shares for the counts of a batch,
`migrate` the transfers between two placements. The problem: experts/instance.py.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from ...schema.errors import ConfigError
from ...schema.units import FloatArray, IntArray
from .balance import BalanceSearch, balance_gpus, place_groups
from .bounds import lower_bound, solve_exactly
from .instance import (
    BestSlots,
    ExpertInstance,
    SlotAssignment,
    make_instance,
    replica_counts,
    trace_loads,
    uniform_objective,
    uniform_shares,
    utilisation,
    validate_loads,
)
from .moves import Transfer, align_slots, count_moves, plan_transfers, rebalance_within_budget
from .shares import split_loads
from .sources import move_near_sources, off_node_tokens, total_of_sources, validate_sources
from .traffic import Routing, Served, place_near_tokens, serve, serve_by_shares, validate_trace

Split = Literal["uniform", "weighted"]
Objective = Literal["balance", "traffic", "pareto"]
EffortName = Literal["fast", "search", "exact"]

PROVING_RATIO = 4
"""Of an exact answer's time: proofs next to the search, which mostly ends long before."""


@dataclass(frozen=True)
class Evaluation:
    """A placement under some loads.

    Attributes:
        balance: largest GPU load over the mean [D, L]; node_balance: the same of nodes.
        lower_bound: what no placement on the same slots has below [D, L].
        gpu_load: tokens of each GPU [D, L, G].
        weighted_balance: `balance` with the shares that suit these loads best [D, L].
    """

    balance: FloatArray
    lower_bound: FloatArray
    gpu_load: FloatArray
    node_balance: FloatArray
    weighted_balance: FloatArray


@dataclass(frozen=True)
class TraceEvaluation:
    """A placement under the choices of tokens: largest node load over the mean [L], distinct nodes of a token on average [L]."""

    node_balance: FloatArray
    visits_per_token: FloatArray


@dataclass(frozen=True)
class ExpertPlacement:
    """Where the experts of every layer are; D workloads, L layers, E experts, S slots, G GPUs.

    Attributes:
        physical_to_logical: expert in each slot [L, S].
        logical_to_physical: slots of each expert [L, E, R], padded with -1.
        replica_count: [L, E].
        share: part of its expert's tokens that a slot takes [L, S].
        expert_load: the loads that were given [L, E], summed over the workloads; gpu_load: what they make of each GPU [L, G].
        balance: largest GPU load over the mean [L], of the workload that has the worst.
        lower_bound: what no placement is below [L]; gap: balance / lower_bound - 1 [L].
        moves: experts that GPUs must fetch, coming from the previous placement [L]; 0 without one.
        off_node_tokens: tokens that leave the node they are on, spread evenly over the nodes [L]: with a trace a token
            counts once for each other node that it visits, without one once for each of its experts; with loads by source
            those of which it is known.
        solve_s: wall-clock seconds.
        home: node that is home of each expert [L, E], and node_part: part of an expert's tokens that visit another node
            anyway and are served there [L, E, N]; None unless the placement was made for a trace.
    """

    physical_to_logical: IntArray
    logical_to_physical: IntArray
    replica_count: IntArray
    share: FloatArray
    expert_load: FloatArray
    gpu_load: FloatArray
    balance: FloatArray
    lower_bound: FloatArray
    gap: FloatArray
    moves: IntArray
    off_node_tokens: FloatArray
    slots_per_gpu: IntArray
    gpu_speed: FloatArray
    num_nodes: int
    solve_s: float
    split: Split = "uniform"
    home: IntArray | None = None
    node_part: FloatArray | None = None

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.replica_count.shape[1])

    @property
    def num_gpus(self) -> int:
        """G."""
        return len(self.slots_per_gpu)

    def evaluate(self, load: Any) -> Evaluation:
        """Return the same placement under other loads [L, E] or [D, L, E]."""
        instance = self.instance(load)
        used = utilisation(instance, self.physical_to_logical, self.share)
        mean = instance.load.sum(axis=2) / instance.gpu_speed.sum()
        tokens = used * instance.gpu_speed * mean[:, :, None]
        node = tokens.reshape(*tokens.shape[:2], self.num_nodes, -1).sum(axis=3)
        single = [replace(instance, load=instance.load[d : d + 1]) for d in range(len(instance.load))]
        weighted = [split_loads(part, self.physical_to_logical).level for part in single]
        return Evaluation(
            balance=used.max(axis=2),
            lower_bound=np.array([lower_bound(part, weighted=self.split == "weighted") for part in single]),
            gpu_load=tokens,
            node_balance=(node / self._node_speed).max(axis=2) / mean,
            weighted_balance=np.array(weighted),
        )

    def evaluate_trace(self, trace: IntArray, *, seed: int = 0) -> TraceEvaluation:
        """Return the placement under the choices [tokens, L, top_k] of some tokens.

        A choice goes to a replica by its share, or, with homes, to its home or a replica on a node that the token visits anyway.
        """
        problem, served = self.instance(self.expert_load), list[Served]()
        for layer, tokens in enumerate(np.moveaxis(trace, 1, 0)):
            if self.home is not None and self.node_part is not None:
                served.append(serve(tokens, Routing(self.home[layer], self.node_part[layer]), seed=seed))
                continue
            part = np.zeros((self.num_experts, self.num_nodes))
            node_of_slot = problem.node_of_gpu[problem.gpu_of_slot]
            np.add.at(part, (self.physical_to_logical[layer], node_of_slot), self.share[layer])
            served.append(serve_by_shares(tokens, part, seed=seed))
        nodes, speed = np.array([layer.tokens.sum(axis=0) for layer in served]), self._node_speed
        return TraceEvaluation(
            node_balance=(nodes / speed).max(axis=1) / (nodes.sum(axis=1) / speed.sum()),
            visits_per_token=np.array([layer.visits for layer in served]) / len(trace),
        )

    @property
    def _node_speed(self) -> FloatArray:
        return self.gpu_speed.reshape(self.num_nodes, -1).sum(axis=1)

    def instance(self, load: Any) -> ExpertInstance:
        """Return the problem of other loads on the same slots.

        Raises:
            ConfigError: loads of other layers or experts, or that are no loads.
        """
        loads, expected = validate_loads(load), self.replica_count.shape
        if loads.shape[1:] != expected:
            raise ConfigError(
                f"loads of {loads.shape[1]} layers x {loads.shape[2]} experts for a placement of {expected[0]} x {expected[1]}"
            )
        return ExpertInstance(loads, self.slots_per_gpu, self.gpu_speed, self.num_nodes)


def finish_placement(
    instance: ExpertInstance, answer: SlotAssignment, split: Split, before: IntArray | None, start: float
) -> ExpertPlacement:
    """Return the placement with its objective, bound, shares and moves; `start` as of time.perf_counter."""
    placed = answer.placed
    total = replace(instance, load=instance.load.sum(axis=0, keepdims=True))
    share, balance = _shares(instance, total, answer, split)
    weighted = split == "weighted" or answer.share is not None
    bound = lower_bound(instance, weighted=weighted, reached=balance)
    if answer.proved is not None and not weighted:
        bound = np.maximum(bound, answer.proved)
    bound = np.minimum(bound, balance)
    counts = replica_counts(placed, instance.num_experts)
    order = np.argsort(placed, axis=1, kind="stable")  # slots of the first expert first
    experts = np.take_along_axis(placed, order, axis=1)
    nth = np.arange(instance.num_slots) - np.take_along_axis(np.cumsum(counts, axis=1) - counts, experts, axis=1)
    slots = np.full((*counts.shape, int(counts.max())), -1)
    slots[np.arange(len(placed))[:, None], experts, nth] = order
    tokens = total.load[0].sum(axis=1)
    used = utilisation(total, placed, share)[0] * instance.gpu_speed
    elsewhere = (instance.num_nodes - 1) / instance.num_nodes
    return ExpertPlacement(
        physical_to_logical=placed,
        logical_to_physical=slots,
        replica_count=counts,
        share=share,
        expert_load=total.load[0],
        gpu_load=used * tokens[:, None] / instance.gpu_speed.sum(),
        balance=balance,
        lower_bound=bound,
        gap=balance / bound - 1,
        moves=count_moves(placed if before is None else before, placed, instance.gpu_of_slot, instance.num_experts),
        off_node_tokens=(tokens if answer.visits is None else answer.visits) * elsewhere,
        slots_per_gpu=instance.slots_per_gpu,
        gpu_speed=instance.gpu_speed,
        num_nodes=instance.num_nodes,
        solve_s=time.perf_counter() - start,
        split="weighted" if weighted else "uniform",
        home=answer.home,
        node_part=answer.node_part,
    )


def _shares(
    instance: ExpertInstance, total: ExpertInstance, answer: SlotAssignment, split: Split
) -> tuple[FloatArray, FloatArray]:
    """Return shares [L, S] and (O) [L] of the worst workload; weighted shares suit each workload."""
    if answer.share is not None:
        return answer.share, utilisation(instance, answer.placed, answer.share).max(axis=(0, 2))
    if split == "uniform":
        return uniform_shares(answer.placed, instance.num_experts), uniform_objective(instance, answer.placed)
    total_split = split_loads(total, answer.placed)
    several = range(len(instance.load)) if len(instance.load) > 1 else ()
    levels = [split_loads(instance, answer.placed, d).level for d in several] or [total_split.level]
    return total_split.share, np.max(levels, axis=0)


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
    sources: Any = None,
    trace: Any = None,
    gpu_speed: Any = None,
    slots_per_gpu: Any = None,
    split: Split = "uniform",
    objective: Objective = "balance",
    effort: EffortName = "fast",
    time_limit_s: float = 10.0,
    seed: int = 0,
) -> ExpertPlacement:
    """Place the experts so that the fullest GPU has little more than the mean load.

    Args:
        load: tokens of each expert [L, E], or [T, L, E] in steps of time, which are summed; None: those of the trace.
        num_slots: experts that all GPUs hold together, replicas included.
        num_groups: experts are routed in this many groups, each of which stays on one node (where groups divide among nodes).
        previous: placement to start from (or its physical_to_logical); slots of experts that stay on their GPU stay as they are.
        move_budget: experts that GPUs may fetch, a layer: a number, or below 1 a part of the slots. Needs `previous`.
        scenarios: loads [D, L, E] of workloads that the placement must serve; the worst of them counts, and `load` is not used.
        trace: experts of each token [tokens, L, top_k]; for the objectives "traffic" and "pareto".
        gpu_speed, slots_per_gpu: [G], where GPUs differ.
        split: uniform: the replicas of an expert take equal parts; weighted: the parts that balance the loads best.
        objective: balance: GPUs only; traffic: few nodes for each token, nodes balanced, then GPUs; pareto: whichever of several
            of both visits fewest nodes at a load of at most 1.05.
        effort: fast; search: restarts until the time limit; exact: CP-SAT too, which proves small cases.
    """
    start = time.perf_counter()
    instance = make_instance(
        _load_of_inputs(load, scenarios, trace) if sources is None else total_of_sources(sources),
        num_gpus=num_gpus,
        num_slots=num_slots,
        num_nodes=num_nodes,
        gpu_speed=gpu_speed,
        slots_per_gpu=slots_per_gpu,
    )
    for name, value, known in (
        ("split", split, Split),
        ("objective", objective, Objective),
        ("effort", effort, EffortName),
    ):
        _require(value in get_args(known), f"{name} {value!r} is not one of {', '.join(get_args(known))}")
    _require(
        move_budget is None or (num_groups is None and objective == "balance"),
        "a move budget goes with the objective balance and without groups: its exchanges keep no group on its node",
    )
    only_balance = objective == "balance" and split == "uniform" and num_groups is None and previous is None
    _require(
        sources is None or (only_balance and scenarios is None and trace is None),
        "loads by source go with the objective balance and uniform shares, without groups, scenarios, trace and previous placement",
    )
    from_node = None if sources is None else validate_sources(sources, instance)
    before = None if previous is None else _validate_previous(previous, instance)
    searching_s = time_limit_s if effort == "search" else time_limit_s / (1 + PROVING_RATIO)
    search = BalanceSearch(restarts=effort != "fast", time_limit_s=searching_s, seed=seed)
    if move_budget is not None:
        answer = SlotAssignment(_place_within_budget(instance, before, move_budget))
    elif objective != "balance":
        answer = place_near_tokens(instance, _required_trace(trace, instance), objective, num_groups, search)
    elif num_groups is not None:
        answer = SlotAssignment(place_groups(instance, num_groups, search))
    else:
        answer = SlotAssignment(balance_gpus(instance, search))
        if effort == "exact":
            proving_s = time_limit_s - searching_s
            placed, proved = solve_exactly(instance, answer.placed, time_limit_s=proving_s, seed=seed)
            answer = SlotAssignment(placed, proved=proved)
    if before is not None and answer.share is None:
        answer = replace(answer, placed=align_slots(before, answer.placed, instance.gpu_of_slot))
    if from_node is not None:
        answer = replace(answer, placed=move_near_sources(instance, answer.placed, from_node))
    placement = finish_placement(instance, answer, split, before, start)
    if from_node is not None:
        placement = replace(placement, off_node_tokens=off_node_tokens(instance, answer.placed, from_node))
    if trace is not None and answer.visits is None:
        tokens = _required_trace(trace, instance)
        visits = placement.evaluate_trace(tokens, seed=seed).visits_per_token * len(tokens)
        placement = replace(placement, off_node_tokens=visits * (num_nodes - 1) / num_nodes)
    return placement


def _load_of_inputs(load: Any, scenarios: Any, trace: Any) -> FloatArray:
    """Return LOAD [D, L, E] of scenarios, loads, or the counts of a trace."""
    if scenarios is not None:
        return validate_loads(scenarios)
    if load is None and trace is not None:
        tokens = np.asarray(trace)
        return validate_loads(trace_loads(tokens, int(tokens.max(initial=0)) + 1))
    return np.asarray(validate_loads(load).sum(axis=0, keepdims=True))


def _required_trace(trace: Any, instance: ExpertInstance) -> IntArray:
    _require(
        trace is not None,
        "the objectives traffic and pareto need a trace: experts of each token [tokens, layers, top_k]",
    )
    return validate_trace(trace, instance.num_layers, instance.num_experts)


def rebalance_experts(
    weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Any, Any, Any]:
    """Place experts behind EPLB's signature: (phy2log [L, R], log2phy [L, E, most replicas, padded with -1], logcnt [L, E]) of
    loads [L, E].

    Where groups divide among nodes, the experts of a group stay on one node, as with EPLB, unless the GPUs of a node have more
    slots than their experts can fill (C2), as with one GPU a node and replicas. Torch tensors give torch tensors.
    """
    num_experts = np.shape(weight)[-1] if np.ndim(weight) else 0
    _require(num_groups >= 1 and num_nodes >= 1, f"{num_groups} groups on {num_nodes} nodes: 1 or more of each")
    _require(num_experts % num_groups == 0, f"{num_experts} experts do not divide into {num_groups} groups")
    can_fill = num_replicas <= num_experts * (num_gpus // num_nodes)
    hierarchical = num_groups % num_nodes == 0 and num_nodes > 1 and can_fill
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
    """Return the share of its expert's tokens for each slot, [L, S] or [D, L, S], best for the token counts [L, E] or [D, L, E]."""
    instance = placement.instance(counts)
    shares = [split_loads(instance, placement.physical_to_logical, d).share for d in range(len(instance.load))]
    return shares[0] if np.ndim(counts) < 3 else np.array(shares)


def migrate(old: ExpertPlacement, new: ExpertPlacement) -> tuple[Transfer, ...]:
    """Return the transfers that turn one placement into the other; see `moves.plan_transfers` for what a round promises."""
    if old.replica_count.shape != new.replica_count.shape or not np.array_equal(old.slots_per_gpu, new.slots_per_gpu):
        raise ConfigError("the placements differ in layers, experts or slots; transfers need the same of each")
    problem = new.instance(new.expert_load)
    return plan_transfers(old.physical_to_logical, new.physical_to_logical, problem.gpu_of_slot, problem.node_of_gpu)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def _place_within_budget(instance: ExpertInstance, before: IntArray | None, move_budget: float) -> IntArray:
    if before is None:
        raise ConfigError("a move budget needs the previous placement")
    if not np.isfinite(move_budget) or move_budget < 0:
        raise ConfigError(f"move budget {move_budget}: a number of slots, or below 1 a part of them")
    budget = int(move_budget * instance.num_slots) if move_budget < 1 else int(move_budget)
    best = BestSlots(instance, rebalance_within_budget(instance, before, budget))
    if budget >= instance.num_slots:
        best.offer(balance_gpus(instance, BalanceSearch()))
    return best.placed


def _validate_previous(previous: Any, instance: ExpertInstance) -> IntArray:
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
