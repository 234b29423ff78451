"""The answer to a placement problem: where every expert is, how good that is, and what other loads or tokens make of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ..schema.errors import ConfigError
from . import expert_moves, expert_shares
from .expert_balance import uniform_objective
from .expert_bounds import lower_bound
from .expert_instance import (
    FloatArray,
    Instance,
    IntArray,
    as_loads,
    replica_counts,
    uniform_shares,
    utilisation,
)
from .expert_nodes import Routing, Served, serve, serve_by_shares

Split = Literal["uniform", "weighted"]


@dataclass(frozen=True)
class Evaluation:
    """A placement under some loads.

    Attributes:
        balance: largest GPU load over the mean [D, L].
        lower_bound: what no placement on the same slots has below [D, L].
        gpu_load: tokens of each GPU [D, L, G].
        node_balance: the same for nodes [D, L].
        weighted_balance: `balance` with the shares that suit these loads best [D, L].
    """

    balance: FloatArray
    lower_bound: FloatArray
    gpu_load: FloatArray
    node_balance: FloatArray
    weighted_balance: FloatArray


@dataclass(frozen=True)
class TraceEvaluation:
    """A placement under the choices of some tokens: largest node load over the mean [L], distinct nodes of a token on
    average [L].
    """

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
        off_node_tokens: tokens that leave the node they live on, as spread evenly over the nodes [L]: with a trace a token
            counts once for each other node that it visits, without one once for each of its experts.
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
        """The same placement under other loads [L, E] or [D, L, E].

        Raises:
            ConfigError: loads of other layers or experts, or that are no loads.
        """
        instance = self._instance(load)
        used = utilisation(instance, self.physical_to_logical, self.share)
        mean = instance.load.sum(axis=2) / instance.gpu_speed.sum()
        tokens = used * instance.gpu_speed * mean[:, :, None]
        node = tokens.reshape(*tokens.shape[:2], self.num_nodes, -1).sum(axis=3)
        speed = instance.gpu_speed.reshape(self.num_nodes, -1).sum(axis=1)
        single = [replace(instance, load=instance.load[d : d + 1]) for d in range(len(instance.load))]
        weighted = [expert_shares.split(part, self.physical_to_logical).level for part in single]
        return Evaluation(
            balance=used.max(axis=2),
            lower_bound=np.array([lower_bound(part, weighted=self.split == "weighted") for part in single]),
            gpu_load=tokens,
            node_balance=(node / speed).max(axis=2) / mean,
            weighted_balance=np.array(weighted),
        )

    def evaluate_trace(self, trace: IntArray, *, seed: int = 0) -> TraceEvaluation:
        """What the choices [tokens, L, top_k] of some tokens make of the placement.

        A choice goes to a replica by its share, or, with homes, to its home or a replica on a node that the token visits
        anyway.

        Raises:
            ConfigError: choices of other layers or experts.
        """
        served = [self._serve(layer, trace[:, layer], seed) for layer in range(trace.shape[1])]
        nodes = np.array([layer.tokens.sum(axis=0) for layer in served])
        speed = self.gpu_speed.reshape(self.num_nodes, -1).sum(axis=1)
        used = nodes / speed
        return TraceEvaluation(
            node_balance=used.max(axis=1) / (nodes.sum(axis=1) / speed.sum()),
            visits_per_token=np.array([layer.visits for layer in served]) / len(trace),
        )

    def _serve(self, layer: int, tokens: IntArray, seed: int) -> Served:
        if self.home is not None and self.node_part is not None:
            return serve(tokens, Routing(self.home[layer], self.node_part[layer]), seed=seed)
        node_of_slot = np.repeat(np.arange(self.num_gpus) // (self.num_gpus // self.num_nodes), self.slots_per_gpu)
        part = np.zeros((self.num_experts, self.num_nodes))
        np.add.at(part, (self.physical_to_logical[layer], node_of_slot), self.share[layer])
        return serve_by_shares(tokens, part, seed=seed)

    def _instance(self, load: Any) -> Instance:
        loads = as_loads(load)
        expected = self.replica_count.shape
        if loads.shape[1:] != expected:
            raise ConfigError(
                f"loads of {loads.shape[1]} layers x {loads.shape[2]} experts for a placement of {expected[0]} x {expected[1]}"
            )
        return Instance(loads, self.slots_per_gpu, self.gpu_speed, self.num_nodes)


@dataclass(frozen=True)
class Answer:
    """Places x [L, S], and what is known of them: shares, what a proof says, homes and parts of the tokens that a trace
    gave.
    """

    placed: IntArray
    share: FloatArray | None = None
    proved: FloatArray | None = None
    home: IntArray | None = None
    node_part: FloatArray | None = None
    visits: FloatArray | None = None


def finished(
    instance: Instance, answer: Answer, split: Split, before: IntArray | None, start: float
) -> ExpertPlacement:
    """The placement with its objective, bound, shares and moves; `start` as of time.perf_counter."""
    placed = answer.placed
    total = replace(instance, load=instance.load.sum(axis=0, keepdims=True))
    share, balance = _shares(instance, total, answer, split)
    weighted = split == "weighted" or answer.share is not None
    bound = lower_bound(instance, weighted=weighted, reached=balance)
    if answer.proved is not None and not weighted:
        bound = np.maximum(bound, answer.proved)
    bound = np.minimum(bound, balance)
    counts = replica_counts(placed, instance.num_experts)
    moves = np.zeros(len(placed), dtype=np.int64)
    if before is not None:
        moves = expert_moves.moved_slots(before, placed, instance.gpu_of_slot, instance.num_experts)
    tokens = total.load[0].sum(axis=1)
    used = utilisation(total, placed, share)[0] * instance.gpu_speed
    elsewhere = (instance.num_nodes - 1) / instance.num_nodes
    return ExpertPlacement(
        physical_to_logical=placed,
        logical_to_physical=slots_of_experts(placed, counts),
        replica_count=counts,
        share=share,
        expert_load=total.load[0],
        gpu_load=used * tokens[:, None] / instance.gpu_speed.sum(),
        balance=balance,
        lower_bound=bound,
        gap=balance / bound - 1,
        moves=moves,
        off_node_tokens=(tokens if answer.visits is None else answer.visits) * elsewhere,
        slots_per_gpu=instance.slots_per_gpu,
        gpu_speed=instance.gpu_speed,
        num_nodes=instance.num_nodes,
        solve_s=time.perf_counter() - start,
        split="weighted" if weighted else "uniform",
        home=answer.home,
        node_part=answer.node_part,
    )


def _shares(instance: Instance, total: Instance, answer: Answer, split: Split) -> tuple[FloatArray, FloatArray]:
    """Shares [L, S] and (O) [L], of the worst workload; weighted shares suit each workload."""
    if answer.share is not None:
        return answer.share, utilisation(instance, answer.placed, answer.share).max(axis=(0, 2))
    if split == "uniform":
        return uniform_shares(answer.placed, instance.num_experts), uniform_objective(instance, answer.placed)
    whole = expert_shares.split(total, answer.placed)
    if len(instance.load) == 1:
        return whole.share, whole.level
    several = range(len(instance.load))
    return whole.share, np.max([expert_shares.split(instance, answer.placed, d).level for d in several], axis=0)


def slots_of_experts(placed: IntArray, counts: IntArray) -> IntArray:
    """Slots of each expert [L, E, R] in rising order, padded with -1."""
    num_layers, num_slots = placed.shape
    order = np.argsort(placed, axis=1, kind="stable")
    experts = np.take_along_axis(placed, order, axis=1)
    first = np.cumsum(counts, axis=1) - counts
    nth = np.arange(num_slots) - np.take_along_axis(first, experts, axis=1)
    slots = np.full((*counts.shape, int(counts.max())), -1)
    slots[np.arange(num_layers)[:, None], experts, nth] = order
    return slots
