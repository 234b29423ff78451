"""Where weights, keys and values, and hidden states lie while text is generated: for one rank and one block of sequences.

A block is K device batches of b sequences. Each pass goes through the layers once, and through all batches within a layer, so that
weights that come from elsewhere come once a pass.

Sets        kinds of layers c, phases p (the prefill; parts of the decoding, by how much a token attends to)
            places D device, H host, S storage; without H where the device computes in the host's own memory
            ways of keys and values D; HA, SA on the host or on storage, attended by the host's processors; HC, SC copied up;
            SD on storage, attended by the drives themselves
Data        N_c             layers of a kind          R_p         passes of a phase
            W_c, M_c        bytes of a layer's weights, and of those that a pass brings where they are not on the device
            MAY_cS          whether storage may hold them
            COMPUTE_cp      seconds of the device for a layer and all K batches, attention to keys and values before left out
            ATTEND_p        seconds of the device to attend to all keys and values of a pass
            READ_p, NEW_p   bytes of keys and values that a pass attends to, that it makes; CACHE: of all at the end
            HIDDEN_p        bytes of the hidden states of all sequences between two layers; STATES: their most
            ASK_p           bytes that go down, and as many up, where the host or a drive attends
            STEPS           layers that hidden states go through
            UP, DOWN, DUPLEX, DISK    rates of the link's directions, both at once, of storage
            HOST, DRIVE     rates of attention by the host's processors, and by drives within themselves; no DRIVE: none attends
            BUFFER, SLOT    bytes of weights on the way; of one batch's keys and values of one layer
            WORK, CAP_D, CAP_H, STAGE, CAP_S   bytes in use while computing; of the device, of the host, what storage passes through
Variables   w_cx  layers of kind c in place x, integer     k_x  share of keys and values in each way     h_x  share of hidden states
            t_p   seconds of a pass
(O)         min  sum_p R_p t_p
(C1)        everything is somewhere: sum_x w_cx = N_c;  sum_x k_x = 1;  sum_x h_x = 1
(C2)        compute: t_p >= sum_c N_c COMPUTE_cp + ATTEND_p (k_D + k_HC + k_SC)
(C3)        links: with ask_p  = ASK_p (k_HA + k_SA + k_SD)
                        up_p   = sum_c M_c (w_cH + w_cS) + READ_p (k_HC + k_SC) + ask_p + STEPS HIDDEN_p (h_H + h_S)
                        down_p = NEW_p (1 - k_D) + ask_p + STEPS HIDDEN_p (h_H + h_S)
                        UP t_p >= up_p;  DOWN t_p >= down_p;  (1 + DUPLEX) t_p >= up_p / UP + down_p / DOWN
(C4)        storage: DISK t_p >= sum_c M_c w_cS + (READ_p + NEW_p) (k_SA + k_SC) + (NEW_p + 2 ASK_p) k_SD + 2 STEPS HIDDEN_p h_S
(C5)        host attention: HOST t_p >= READ_p (k_HA + k_SA)
(C6)        one batch: t_p >= (sum_c N_c COMPUTE_cp + READ_p (k_HA + k_SA) / HOST + READ_p k_SD / DRIVE
                  + ask_p (1 / UP + 1 / DOWN) + 2 ASK_p k_SD / DISK) / K
(C7)        device memory: sum_c W_c w_cD + BUFFER + CACHE k_D + 2 SLOT (1 - k_D) + STATES h_D + WORK <= CAP_D
(C8)        host memory: sum_c W_c w_cH + CACHE (k_HA + k_HC) + STATES h_H + STAGE <= CAP_H
(C9)        storage: sum_c W_c w_cS + CACHE (k_SA + k_SC + k_SD) + STATES h_S <= CAP_S
(C10)       attention in the drives: DRIVE t_p >= READ_p k_SD

Copies and compute of different batches and layers run side by side: a pass is as long as the busiest resource, which (C6)
corrects where there is one batch only. Decoding reads the weights from the device's memory once for each batch, and its keys and
values once: that is in COMPUTE and ATTEND, which are the larger of arithmetic and memory traffic. A drive that attends reads its
flash at DRIVE; only new keys and values, queries and what comes of them cross its interface, at DISK (C4).

Source: FlexGen (arXiv:2303.06865) for the schedule of blocks, the places and the idea of a linear program over them; InstInfer
(arXiv:2409.04992) for attention in the drives; terms for memory bandwidth, integer layers, shares that differ in who attends, and
duals are ours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...schema.units import BoolArray, FloatArray, IntArray
from ..tolerances import SOLVER

DRIVES = "attention in the drives"

RESOURCES = (
    "compute",
    "link to device",
    "link to host",
    "link both ways",
    "storage",
    "host attention",
    "one batch",
    DRIVES,
)
"""Resources that a pass may wait for, in the order of (C2) to (C6) and (C10)."""

WAYS = ("device", "host_attended", "host_copied", "storage_attended", "storage_copied", "drive_attended")
"""Ways of keys and values: D, HA, HC, SA, SC, SD."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes per second of one rank; ``storage`` is zero where there is none, ``drive_attention`` where no drive attends."""

    to_device: float
    to_host: float
    duplex: float
    storage: float
    host_attention: float
    drive_attention: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Bytes of one rank: of its memories, and what is taken whatever lies where (WORK, BUFFER, SLOT, STAGE)."""

    device: float
    host: float
    storage: float
    working: float
    buffer: float
    slot: float
    staging: float


@dataclass(frozen=True, kw_only=True)
class GenerationInstance:
    """Arrays [C] by kind of layer, [P] by phase, [C, P] by both; see DATA above.

    ``streams``: layers may be off the device; ``has_host``: the host has a memory and processors apart from the device's.
    """

    counts: IntArray
    weight_bytes: FloatArray
    moved_bytes: FloatArray
    may_store: BoolArray
    passes: FloatArray
    compute_s: FloatArray
    attend_s: FloatArray
    read_bytes: FloatArray
    new_bytes: FloatArray
    hidden_bytes: FloatArray
    ask_bytes: FloatArray
    cache_bytes: float
    states_bytes: float
    hidden_steps: int
    num_batches: int
    rates: Rates
    capacity: Capacity
    streams: bool = True
    has_host: bool = True

    @property
    def allowed_layers(self) -> BoolArray:
        """Return where layers of a kind may be [C, 3]."""
        host, stored = self.streams and self.has_host, self.may_store & self.streams
        return np.stack([np.ones_like(self.may_store), np.full_like(self.may_store, host), stored], 1)

    @property
    def allowed_ways(self) -> BoolArray:
        """Return which of WAYS keys and values may take."""
        stores, host, drives = self.rates.storage > 0, self.has_host, self.rates.drive_attention > 0
        return np.array([True, host, host, host and stores, stores, drives and stores])

    @property
    def layer_compute_s(self) -> FloatArray:
        """Seconds of the device for all layers of a pass [P]."""
        return np.asarray(self.counts @ self.compute_s)

    @property
    def min_s(self) -> float:
        """Seconds of a block that nothing is below: the device's, for all layers."""
        return float(self.passes @ self.layer_compute_s)

    def with_capacity(self, **changes: float) -> GenerationInstance:
        """Return the same problem on a machine with other capacities."""
        return replace(self, capacity=replace(self.capacity, **changes))


@dataclass(frozen=True, kw_only=True)
class GenerationPlacement:
    """``layers`` [C, 3] by kind and place (device, host, storage), integer except in relaxations.

    ``cache`` [6] by WAYS; ``hidden`` [3] by place.
    """

    layers: IntArray | FloatArray
    cache: FloatArray
    hidden: FloatArray


@dataclass(frozen=True, kw_only=True)
class GenerationMarginalSeconds:
    """Seconds of a block that one more unit saves: a byte, or a byte per second."""

    device_s_per_byte: float = 0.0
    host_s_per_byte: float = 0.0
    storage_s_per_byte: float = 0.0
    link_s2_per_byte: float = 0.0
    storage_s2_per_byte: float = 0.0
    host_attention_s2_per_byte: float = 0.0
    drive_attention_s2_per_byte: float = 0.0


def busy_s(i: GenerationInstance, place: GenerationPlacement) -> FloatArray:
    """Return the seconds [R, P] that each of RESOURCES is busy in one pass, from the definition."""
    on_device, attended, copied, stored_attended, stored_copied, in_drives = (float(share) for share in place.cache)
    off = float(place.hidden[1] + place.hidden[2])
    by_host, r = attended + stored_attended, i.rates
    moved = i.moved_bytes @ place.layers
    queries = i.ask_bytes * (by_host + in_drives)
    up = moved[1] + moved[2] + i.read_bytes * (copied + stored_copied)
    up = up + queries + i.hidden_steps * i.hidden_bytes * off
    down = i.new_bytes * (1 - on_device) + queries + i.hidden_steps * i.hidden_bytes * off
    through_drives = 2 * i.ask_bytes * in_drives
    stored = moved[2] + (i.read_bytes + i.new_bytes) * (stored_attended + stored_copied)
    stored = stored + i.new_bytes * in_drives + through_drives
    stored = stored + 2 * i.hidden_steps * i.hidden_bytes * float(place.hidden[2])
    compute, to_device, to_host = i.layer_compute_s, up / r.to_device, down / r.to_host
    host, drives = i.read_bytes * by_host / r.host_attention, _over(i.read_bytes * in_drives, r.drive_attention)
    exchanged = queries * (1 / r.to_device + 1 / r.to_host) + _over(through_drives, r.storage)
    return np.stack(
        [
            compute + i.attend_s * (on_device + copied + stored_copied),
            to_device,
            to_host,
            (to_device + to_host) / (1 + r.duplex),
            _over(stored, r.storage),
            host,
            (compute + host + drives + exchanged) / i.num_batches,
            drives,
        ]
    )


def _over(used_bytes: FloatArray, rate: float) -> FloatArray:
    """Return seconds; without a rate they are infinite for anything at all."""
    return np.where(used_bytes > 0, np.inf, 0.0) if rate == 0 else used_bytes / rate


def resident_bytes(i: GenerationInstance, place: GenerationPlacement) -> FloatArray:
    """Return the bytes [3] in each place at the most."""
    on_device, attended, copied = (float(share) for share in place.cache[:3])
    stored = float(place.cache[3:].sum())
    weights, c = i.weight_bytes @ place.layers, i.capacity
    cache = np.array([on_device, attended + copied, stored]) * i.cache_bytes
    fixed = np.array([c.buffer + 2 * c.slot * (1 - on_device) + c.working, c.staging, 0.0])
    return np.asarray(weights + cache + place.hidden * i.states_bytes + fixed)


def check(i: GenerationInstance, place: GenerationPlacement) -> float:
    """Recompute the objective (O) of a placement, seconds of a block, from the definition.

    Raises:
        ValueError: it breaks (C1), (C7), (C8) or (C9), which the message names.
    """
    if np.any(place.layers < 0) or np.any(place.layers.sum(axis=1) != i.counts):
        raise ValueError(f"everything is somewhere (C1): layers {place.layers.tolist()} of {i.counts.tolist()}")
    if np.any(place.layers[~i.allowed_layers]):
        raise ValueError("everything is somewhere (C1): layers where they may not be")
    if np.any(place.cache[~i.allowed_ways] > SOLVER) or (not i.has_host and place.hidden[1] > SOLVER):
        raise ValueError("everything is somewhere (C1): keys and values or hidden states where they may not be")
    for name, shares in (("keys and values", place.cache), ("hidden states", place.hidden)):
        if np.any(shares < -SOLVER) or abs(float(shares.sum()) - 1) > SOLVER:
            raise ValueError(f"everything is somewhere (C1): shares of {name} {shares.tolist()}")
    c, labels = i.capacity, ("device memory (C7)", "host memory (C8)", "storage (C9)")
    for label, resident, cap in zip(labels, resident_bytes(i, place), (c.device, c.host, c.storage), strict=True):
        if resident > cap * (1 + SOLVER) + 1.0:  # a byte for capacities of zero
            raise ValueError(f"{label}: {resident:.0f} bytes of {cap:.0f}")
    return float(i.passes @ busy_s(i, place).max(axis=0))
