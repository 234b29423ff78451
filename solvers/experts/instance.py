"""Where the experts of a mixture-of-experts model live: the problem that the files of this folder solve together.

Sets
    d = 0..D-1   workloads (scenarios) that one placement must serve
    l = 0..L-1   layers, independent of one another
    e = 0..E-1   experts of a layer
    g = 0..G-1   GPUs, in nodes of equal size
    s = 0..S-1   slots, those of GPU 0 first
Data
    LOAD[d,l,e]  tokens routed to an expert
    SLOTS[g]     experts that a GPU holds; sum_g SLOTS[g] = S
    SPEED[g]     relative speed of a GPU, 1 where all are alike
Variables
    x[l,s]       expert in a slot (`physical_to_logical`); r[l,e] = number of slots that hold it
    y[l,s]       share of its expert's tokens that a slot takes: 1 / r[l,e] under the uniform split, free under the
                 weighted one
Objective
    (O)  min  max_d max_g  sum_{s on g} y[l,s] LOAD[d,l,x[l,s]] / SPEED[g]  over its mean, for each layer
         The mean is sum_e LOAD[d,l,e] / sum_g SPEED[g]: 1 is perfect balance, and no placement is below it.
Constraints
    (C1) present: r[l,e] >= 1
    (C2) distinct: the slots of a GPU hold different experts (two replicas on one GPU waste a slot)
    (C3) shares: y >= 0, and the shares of an expert sum to 1
    (C4) group: with groups of experts, an expert stays on the node of its group

Read it in six steps, the first three of which are EPLB's (balance.py), each a pure function over all layers at once:

    1. how many replicas each expert gets              packing.greedy_counts        loads -> r [L, E]
    2. which GPU each replica goes to                  packing.largest_first        r -> grid of slots [L, G, K]
    3. exchanges between pairs of GPUs                 packing.improve_grid         grid -> grid, the fullest GPU lower
    4. where a gap to the bound remains, other r       replicas.vary_replicas       x -> x, r changed while packing
    5. shares of the replicas, weighted split          shares.split_loads           x -> y [L, S]
    6. from one placement to the next                  moves.rebalance_within_budget, moves.plan_transfers

Around them: bounds.py (what no placement can beat, and CP-SAT on small cases), traffic.py (experts near their tokens, on few
nodes), sources.py (GPUs near those that send to them), placement.py (the public functions). Arrays of slots are x [L, S] or
grids [L, G, K], K the slots of the largest GPU.

Routing data with known structure: loads and token traces for tests, benchmarks and first trials.

A layer's router gives expert e the logit

    popularity[l,e] + affinity * topic[l,t,e] + noise        popularity ~ N(0, sigma^2), topic ~ N(0, 1), noise ~ Gumbel

for a token of topic t, and a token takes its top_k experts. Loads of a router without topics are close to log-normal,
exp(N(0, sigma^2)), which `synthetic_loads` draws directly; sigma 0.5 is a router trained with a balancing loss, 1.3 one
without. Group-limited routing (DeepSeek-V3, arXiv:2412.19437, section 2.1.2): of `num_groups` groups of neighbours the
token keeps the `top_groups` with the largest sum of their two best logits. Topics are as frequent as 1 / rank. Drift
multiplies every expert's load by exp(N(0, drift^2)) at each step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ...schema.errors import ConfigError
from ...schema.limits import MAX_EXCHANGES, MAX_EXPERT_GPUS, MAX_LOADS
from ...schema.units import BoolArray, FloatArray, IntArray
from ..tolerances import SUMMED


@dataclass(frozen=True)
class ExpertInstance:
    """LOAD [D, L, E], SLOTS [G], SPEED [G] and the number of nodes that share the GPUs evenly; validated by `make_instance`."""

    load: FloatArray
    slots_per_gpu: IntArray
    gpu_speed: FloatArray
    num_nodes: int = 1

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.load.shape[1])

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.load.shape[2])

    @property
    def num_gpus(self) -> int:
        """G."""
        return len(self.slots_per_gpu)

    @property
    def num_slots(self) -> int:
        """S."""
        return int(self.slots_per_gpu.sum())

    @cached_property
    def weight(self) -> FloatArray:
        """LOAD over its mean for a GPU of speed 1 [L, E, D]: utilisations are sums of these, 1 on average."""
        mean = self.load.sum(axis=2, keepdims=True) / self.gpu_speed.sum()
        return np.ascontiguousarray(np.moveaxis(self.load / mean, 0, 2))

    @cached_property
    def gpu_of_slot(self) -> IntArray:
        """[S]."""
        return np.repeat(np.arange(self.num_gpus), self.slots_per_gpu)

    @cached_property
    def node_of_gpu(self) -> IntArray:
        """[G]."""
        return np.arange(self.num_gpus) // (self.num_gpus // self.num_nodes)


def validate_loads(load: Any) -> FloatArray:
    """Return finite, not negative loads [D, L, E] of an array [E], [L, E] or [D, L, E] (numpy, nested lists or a torch tensor)."""
    try:
        array = np.asarray(_to_numpy(load), dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a load is an array of numbers [layers, experts]: {error}") from None
    if not 1 <= array.ndim <= 3 or array.size == 0 or array.size > MAX_LOADS:
        raise ConfigError(
            f"a load has shape [experts], [layers, experts] or [scenarios, layers, experts]; this one {array.shape}"
        )
    array = array.reshape((1,) * (3 - array.ndim) + array.shape)
    wrong = ~np.isfinite(array) | (array < 0)
    if wrong.any():
        d, layer, expert = (int(idx) for idx in np.argwhere(wrong)[0])
        raise ConfigError(
            f"load of expert {expert} in layer {layer} is {array[d, layer, expert]}",
            details=(f"{int(wrong.sum())} of {array.size} loads are negative, NaN or infinite",),
            help="loads are counts of tokens: finite and not negative",
        )
    empty = array.sum(axis=2) <= 0
    if empty.any():
        d, layer = (int(idx) for idx in np.argwhere(empty)[0])
        where = f"layer {layer}" + (f" of scenario {d}" if len(array) > 1 else "")
        raise ConfigError(
            f"{where} has no load at all", details=(f"{int(empty.sum())} such layers",), help="leave that layer out"
        )
    return array


def _to_numpy(array: Any) -> Any:
    if hasattr(array, "detach"):
        return array.detach().cpu().double().numpy()
    return array


def make_instance(
    load: Any,
    *,
    num_gpus: int,
    num_slots: int,
    num_nodes: int = 1,
    gpu_speed: Any = None,
    slots_per_gpu: Any = None,
) -> ExpertInstance:
    """Return a validated instance; ``slots_per_gpu`` [G] sum to ``num_slots``, ``gpu_speed`` [G] is relative."""
    loads = validate_loads(load)
    num_experts = loads.shape[2]
    for name, count in (("num_gpus", num_gpus), ("num_nodes", num_nodes), ("num_slots", num_slots)):
        if not isinstance(count, (int, np.integer)) or isinstance(count, bool) or count < 1:
            raise ConfigError(f"{name} is {count!r}; it is a count, 1 or more")
    if num_gpus > MAX_EXPERT_GPUS:
        raise ConfigError(
            f"{num_gpus:,} GPUs for the experts of a layer are more than the {MAX_EXPERT_GPUS:,} that make sense"
        )
    if loads[:, :, 0].size * max(num_experts * num_gpus, num_slots) > MAX_LOADS:
        raise ConfigError(
            f"{num_experts} experts in {num_slots} slots on {num_gpus} GPUs, in each of {loads[:, :, 0].size} layers of all loads: "
            f"together more than {MAX_LOADS:.0e} places",
            help="place fewer layers at a time",
        )
    if num_gpus % num_nodes:
        raise ConfigError(f"{num_gpus} GPUs cannot be divided among {num_nodes} nodes")
    if num_slots < num_experts:
        raise ConfigError(
            f"{num_slots} slots for {num_experts} experts: (C1) each needs one", help=f"use {num_experts} slots or more"
        )
    if slots_per_gpu is None and num_slots % num_gpus:
        more, fewer = -(-num_slots // num_gpus) * num_gpus, num_slots // num_gpus * num_gpus or num_gpus
        raise ConfigError(
            f"{num_slots} slots do not divide among {num_gpus} GPUs",
            help=f"use {fewer} or {more} slots, or say slots_per_gpu",
        )
    given = np.full(num_gpus, num_slots // num_gpus) if slots_per_gpu is None else np.asarray(_to_numpy(slots_per_gpu))
    if given.shape != (num_gpus,) or np.any(given < 1) or np.any(given != np.floor(given)):
        raise ConfigError(f"slots_per_gpu needs {num_gpus} whole numbers, 1 or more")
    slots = given.astype(np.int64)
    if int(slots.sum()) != num_slots:
        raise ConfigError(f"slots_per_gpu sums to {int(slots.sum())}, num_slots is {num_slots}")
    if num_gpus * int(slots.max()) ** 2 * len(loads) > MAX_EXCHANGES and num_gpus > 1:
        raise ConfigError(
            f"{num_gpus} GPUs of up to {slots.max():,} slots: more than {MAX_EXCHANGES:,} exchanges of two slots in one layer",
            help="use more GPUs, or fewer slots and workloads",
        )
    if int(slots.max()) > num_experts:
        raise ConfigError(
            f"more replicas than GPUs: a GPU with {int(slots.max())} slots cannot fill them with "
            f"{num_experts} different experts (C2)",
            help=f"use at most {num_experts * num_gpus} slots on {num_gpus} GPUs, {num_experts} on each",
        )
    speed = np.ones(num_gpus) if gpu_speed is None else np.asarray(_to_numpy(gpu_speed), dtype=np.float64)
    if speed.shape != (num_gpus,) or not np.all(np.isfinite(speed) & (speed > 0)):
        raise ConfigError(f"gpu_speed needs {num_gpus} positive numbers, one for each GPU")
    return ExpertInstance(loads, slots, speed, num_nodes)


def trace_loads(trace: IntArray, num_experts: int) -> FloatArray:
    """Return the loads [L, E] of a trace [tokens, L, top_k]."""
    return np.array([np.bincount(layer.ravel(), minlength=num_experts) for layer in np.moveaxis(trace, 1, 0)], float)


def replica_counts(placed: IntArray, num_experts: int) -> IntArray:
    """Return r [L, E] of x [L, S]."""
    num_layers = len(placed)
    flat = placed + np.arange(num_layers)[:, None] * num_experts
    return np.bincount(flat.ravel(), minlength=num_layers * num_experts).reshape(num_layers, num_experts)


def uniform_shares(placed: IntArray, num_experts: int) -> FloatArray:
    """Return y [L, S] = 1 / r."""
    counts = replica_counts(placed, num_experts)
    return np.asarray(1.0 / np.take_along_axis(counts, placed, axis=1))


def utilisation(instance: ExpertInstance, placed: IntArray, share: FloatArray) -> FloatArray:
    """Return the load of each GPU over its mean [D, L, G]; its largest over g (and d) is (O)."""
    slots = np.take_along_axis(instance.weight, placed[:, :, None], axis=1) * share[:, :, None]
    starts = np.concatenate([[0], np.cumsum(instance.slots_per_gpu)[:-1]])
    return np.moveaxis(np.add.reduceat(slots, starts, axis=1), 2, 0) / instance.gpu_speed


def check(instance: ExpertInstance, placed: IntArray, share: FloatArray) -> FloatArray:
    """Recompute (O) of each layer [L] from the definition, one slot at a time; layers are independent problems.

    Raises:
        ValueError: the placement breaks (C1), (C2) or (C3), with the layer.
    """
    objective = np.zeros(instance.num_layers)
    for layer in range(instance.num_layers):
        on_gpus = [[int(e) for e in placed[layer, instance.gpu_of_slot == gpu]] for gpu in range(instance.num_gpus)]
        if {e for gpu in on_gpus for e in gpu} != set(range(instance.num_experts)):
            raise ValueError(f"present (C1): layer {layer} lacks an expert or names one that does not exist")
        if any(len(set(gpu)) < len(gpu) for gpu in on_gpus):
            raise ValueError(f"distinct (C2): layer {layer} has an expert twice on one GPU")
        total = np.zeros(instance.num_experts)
        for slot in range(instance.num_slots):
            total[placed[layer, slot]] += share[layer, slot]
        if np.any(share[layer] < -SUMMED) or np.any(np.abs(total - 1) > SUMMED):
            raise ValueError(f"shares (C3): in layer {layer} they do not sum to 1")
        for d in range(len(instance.load)):
            mean = sum(instance.load[d, layer]) / sum(instance.gpu_speed)
            for gpu in range(instance.num_gpus):
                slots = np.flatnonzero(instance.gpu_of_slot == gpu)
                tokens = sum(share[layer, s] * instance.load[d, layer, placed[layer, s]] for s in slots)
                objective[layer] = max(objective[layer], tokens / instance.gpu_speed[gpu] / mean)
    return objective


@dataclass(frozen=True)
class SlotAssignment:
    """Slots x [L, S], and what a method knows of them.

    Attributes:
        share: y [L, S] where a trace gave it; proved: bounds [L] of a proof.
        home: home node of each expert [L, E]; node_part: part of its tokens served on other nodes [L, E, N].
        visits: nodes that all tokens of a trace together visit [L].
    """

    placed: IntArray
    share: FloatArray | None = None
    proved: FloatArray | None = None
    home: IntArray | None = None
    node_part: FloatArray | None = None
    visits: FloatArray | None = None


def uniform_objective(instance: ExpertInstance, placed: IntArray) -> FloatArray:
    """Return (O) [L] under the uniform split."""
    return np.asarray(utilisation(instance, placed, uniform_shares(placed, instance.num_experts)).max(axis=(0, 2)))


class BestSlots:
    """The best slots x [L, S] so far of each layer, and their (O) [L] under the uniform split."""

    def __init__(self, instance: ExpertInstance, placed: IntArray) -> None:
        """Begin with some slots."""
        self.instance, self.placed, self.objective = instance, placed, uniform_objective(instance, placed)

    def offer(self, placed: IntArray, layers: IntArray | slice = slice(None)) -> None:
        """Take slots of ``layers`` that are better."""
        reached = uniform_objective(select_layers(self.instance, layers), placed)
        is_better = reached < self.objective[layers]
        better = np.arange(self.instance.num_layers)[layers][is_better]
        self.placed[better], self.objective[better] = placed[is_better], reached[is_better]


def select_layers(instance: ExpertInstance, layers: IntArray | slice) -> ExpertInstance:
    """Return the same problem for a subset of the layers."""
    return replace(instance, load=instance.load[:, layers])


def experts_on_gpus(placed: IntArray, gpu_of_slot: IntArray, num_experts: int) -> BoolArray:
    """Return whether a GPU holds an expert [L, G, E]."""
    has = np.zeros((len(placed), int(gpu_of_slot[-1]) + 1, num_experts), dtype=bool)
    has[np.arange(len(placed))[:, None], gpu_of_slot, placed] = True
    return has


_CHUNK = 4096
"""Tokens drawn together, which bounds the memory."""


@dataclass(frozen=True, kw_only=True)
class Router:
    """Parameters of `synthetic_trace`; the formula is the module's."""

    num_layers: int
    num_experts: int
    top_k: int
    sigma: float = 0.5
    num_topics: int = 16
    affinity: float = 1.0
    num_groups: int = 1
    top_groups: int = 1


def synthetic_loads(
    num_layers: int, num_experts: int, *, sigma: float, steps: int = 1, drift: float = 0.0, seed: int = 0
) -> FloatArray:
    """Draw loads [T, L, E], log-normal with `sigma`, each step drifted from the one before by `drift`."""
    if min(num_layers, num_experts, steps) < 1 or not (0 <= sigma < 20 and 0 <= drift < 20):
        raise ConfigError("layers, experts and steps are 1 or more, sigma and drift between 0 and 20")
    if steps * num_layers * num_experts > MAX_LOADS:
        raise ConfigError(
            f"{steps} x {num_layers} x {num_experts} loads are more than {MAX_LOADS:,}", help="fewer --steps"
        )
    rng = np.random.default_rng(seed)
    first = rng.lognormal(0.0, sigma, (1, num_layers, num_experts))
    factors = np.exp(drift * rng.standard_normal((steps - 1, num_layers, num_experts)))
    return np.asarray(np.concatenate([first, first * np.cumprod(factors, axis=0)]))


def synthetic_trace(
    router: Router, num_tokens: int, *, seed: int = 0, topic_weight: FloatArray | None = None
) -> IntArray:
    """Draw the experts of each token [tokens, L, top_k]; `topic_weight` [topics] for another mix of topics than 1 / rank."""
    counts = (router.num_layers, router.num_experts, router.top_k, router.num_topics, router.num_groups, num_tokens)
    if min(counts) < 1 or router.top_k > router.num_experts:
        raise ConfigError("a router has at least one layer, expert, topic and token, and top_k of its experts at most")
    largest = max(router.num_topics * router.num_experts, num_tokens * router.top_k) * router.num_layers
    if max(counts) > MAX_LOADS or largest > MAX_LOADS or not (0 <= router.sigma < 20 and 0 <= router.affinity < 20):
        raise ConfigError(
            "sigma and affinity are between 0 and 20, and layers x topics x experts and layers x tokens x top_k at most "
            f"{MAX_LOADS:,}"
        )
    if router.num_experts % router.num_groups or not 1 <= router.top_groups <= router.num_groups:
        raise ConfigError(
            f"{router.num_experts} experts in {router.num_groups} groups, of which a token keeps {router.top_groups}"
        )
    if router.top_groups * (router.num_experts // router.num_groups) < router.top_k:
        raise ConfigError(f"{router.top_groups} groups have fewer experts than top_k {router.top_k}")
    rng = np.random.default_rng(seed)
    shape = (router.num_layers, router.num_experts)
    popularity = router.sigma * rng.standard_normal(shape)
    topics = router.affinity * rng.standard_normal((router.num_topics, *shape))
    weight = 1 / np.arange(1, router.num_topics + 1) if topic_weight is None else np.asarray(topic_weight, float)
    topic = rng.choice(router.num_topics, num_tokens, p=weight / weight.sum())
    trace = np.empty((num_tokens, router.num_layers, router.top_k), dtype=np.int64)
    for start in range(0, num_tokens, _CHUNK):
        part = slice(start, start + _CHUNK)
        for layer in range(router.num_layers):
            logits = popularity[layer] + topics[topic[part], layer]
            logits = logits + rng.gumbel(size=logits.shape)
            if router.num_groups > 1:
                grouped = logits.reshape(
                    len(logits), router.num_groups, -1
                )  # a view: what is closed is so in the logits
                best = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
                closed = np.argsort(-best, axis=1)[:, router.top_groups :]
                grouped[np.arange(len(logits))[:, None], closed] = -np.inf
            trace[part, layer] = np.argpartition(-logits, router.top_k - 1, axis=1)[:, : router.top_k]
    return trace
