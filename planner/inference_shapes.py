"""Shapes of batches for generation, and their instances of solvers/inference_instance.py."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..cost_models.host_links import host_rates
from ..cost_models.host_memory import host_link_bytes_per_s
from ..cost_models.inference import (
    KindOfLayer,
    PassCosts,
    host_attention_bytes_per_s,
    kinds_of,
    pass_costs,
    phases_of,
)
from ..cost_models.inference import Phase as Phase
from ..schema import ClusterSpec, ModelSpec, Workload
from ..schema.inference import Generation
from ..schema.model import Block
from ..solvers.inference_instance import Capacity, Instance, Rates

BATCH_SIZES = tuple(sorted({2**i for i in range(11)} | {3 * 2**i for i in range(9)}))
"""Sequences at once that are tried: 1, 2, 3, 4, 6, 8, 12, ... 1024."""

NUM_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Batches in a block that are tried."""

WINDOW = 2
"""Layers whose weights may be on the device at once while they come from elsewhere: the one in use and the next."""


@dataclass(frozen=True, kw_only=True)
class InferenceRequest:
    """What a user fixes.

    Attributes:
        batch_size: sequences in a block on each replica; None: whatever generates most.
        host_memory_bytes: of one node; None: as the cluster says.
        storage_bytes: of one node's drives.
        host_attention_bytes_per_s: of one node's processors; None: the default coefficient.
        latency_limit_s: from the prompts to the last token of a block.
    """

    batch_size: int | None = None
    host_memory_bytes: float | None = None
    storage_bytes: float = 0.0
    host_attention_bytes_per_s: float | None = None
    latency_limit_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Shape:
    """``num_batches`` batches of ``batch_size`` sequences on ``replicas`` groups of ``tp`` devices.

    ``num_tokens`` generates a block of all replicas; with nothing but the device's compute ``most_tokens_per_s``.
    """

    tp: int
    replicas: int
    batch_size: int
    num_batches: int
    streams: bool
    num_tokens: int
    most_tokens_per_s: float


@dataclass(frozen=True)
class Shapes:
    """All shapes of one request."""

    model: ModelSpec
    cluster: ClusterSpec
    generation: Generation
    request: InferenceRequest

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Prefill and parts of the decoding."""
        return phases_of(self.generation)

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """Devices that may hold the model together: within a node, and as many as divide all heads."""
        node = int(np.gcd.reduce([*self.cluster.node_sizes]))
        heads = [block.attention.num_heads for block, _ in self.model.block_runs]
        return tuple(tp for tp in range(1, node + 1) if node % tp == 0 and all(h % tp == 0 for h in heads))

    @cached_property
    def batches(self) -> np.ndarray:
        """Sequences at once."""
        total = self.request.batch_size
        sizes = BATCH_SIZES if total is None else [b for b in range(1, total + 1) if total % b == 0]
        return np.array(sizes, dtype=np.int64)

    @cached_property
    def _costs(self) -> dict[int, tuple[tuple[KindOfLayer, ...], PassCosts]]:
        size = self.generation.element_bytes
        return {
            tp: (
                kinds_of(self.model, tp, size),
                pass_costs(self.model, self.cluster, self.generation, tp, self.batches),
            )
            for tp in self.degrees
        }

    @cached_property
    def _passes(self) -> np.ndarray:
        return np.array([float(len(phase.lengths)) for phase in self.phases])

    def all(self) -> list[Shape]:
        """Every shape, with what it generates at most by compute alone."""
        return self._all

    @cached_property
    def _all(self) -> list[Shape]:
        found = []
        for tp, (kinds, costs) in self._costs.items():
            counts = np.array([len(kind.idxs) for kind in kinds], dtype=np.float64)
            compute = np.einsum("p,c,cpb->b", self._passes, counts, costs.compute_s)
            for j, b in enumerate(self.batches.tolist()):
                for k in self._num_batches(b):
                    replicas = self.cluster.num_devices // tp
                    tokens = replicas * b * k * self.generation.generate_len
                    found += [
                        Shape(
                            tp=tp, replicas=replicas, batch_size=b, num_batches=k, streams=streams, num_tokens=tokens,
                            most_tokens_per_s=tokens / (k * float(compute[j])),
                        )
                        for streams in (False, True)
                    ]  # fmt: skip
        return found

    def _num_batches(self, batch_size: int) -> tuple[int, ...]:
        total = self.request.batch_size
        return NUM_BATCHES if total is None else (total // batch_size,)

    @cached_property
    def _rates(self) -> Rates:
        workload = Workload(seq_len=1, global_batch_size=1, precision=self.generation.rates_precision)
        host = host_rates(workload, self.cluster)
        line = float(host_link_bytes_per_s(np.zeros(1), self.cluster)[0])
        return Rates(
            to_device=line,
            to_host=line,
            duplex=host.duplex,
            storage=host.storage_bytes_per_s if self.request.storage_bytes > 0 else 0.0,
            host_attention=self.host_attention,
        )

    @property
    def host_attention(self) -> float:
        """Bytes per second of one rank."""
        own = self.request.host_attention_bytes_per_s
        return host_attention_bytes_per_s(self.cluster) if own is None else own / self.cluster.largest_node

    @cached_property
    def host_bytes(self) -> float:
        """Of one rank; infinite where it is not known."""
        workload = Workload(seq_len=1, global_batch_size=1, precision=self.generation.rates_precision)
        return host_rates(workload, self.cluster, memory_bytes=self.request.host_memory_bytes).memory_bytes

    def instance(self, shape: Shape) -> Instance:
        """The problem of one rank."""
        kinds, costs = self._costs[shape.tp]
        j, k = int(np.searchsorted(self.batches, shape.batch_size)), shape.num_batches
        moved = np.array([kind.moved_bytes for kind in kinds])
        slot, largest = float(costs.slot_bytes[j]), float(moved.max())
        hidden = k * costs.hidden_bytes[:, j]
        stores = self.request.storage_bytes > 0
        return Instance(
            counts=np.array([len(kind.idxs) for kind in kinds]),
            weight_bytes=np.array([kind.weight_bytes for kind in kinds]),
            moved_bytes=moved,
            may_store=np.array([kind.may_store and stores for kind in kinds]),
            passes=self._passes,
            compute_s=k * costs.compute_s[:, :, j],
            attend_s=k * costs.attend_s[:, j],
            read_bytes=k * costs.read_bytes[:, j],
            new_bytes=k * costs.new_bytes[:, j],
            hidden_bytes=hidden,
            ask_bytes=k * costs.ask_bytes[:, j],
            cache_bytes=k * float(costs.cache_bytes[j]),
            states_bytes=float(hidden.max()),
            hidden_steps=sum(len(kind.idxs) for kind in kinds if isinstance(kind.layer, Block)),
            num_batches=k,
            rates=self._rates,
            capacity=Capacity(
                device=float(self.cluster.memory_budget_bytes),
                host=self.host_bytes,
                storage=self.request.storage_bytes / self.cluster.largest_node,
                working=float(costs.working_bytes[j]),
                buffer=WINDOW * largest if shape.streams else 0.0,
                slot=slot,
                staging=WINDOW * (largest + slot) if stores else 0.0,
            ),
            streams=shape.streams,
        )
