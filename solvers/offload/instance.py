"""Choose what a step keeps on the device, computes again or keeps on the host: the problem, for one rank and one pipeline stage.

Sets        layers l = 1..L in the order of the forward pass, options k of what happens to a block's activations
Data        F_l, B_l            seconds of the passes of one micro-batch      R_kl  seconds of the backward pass more
            G_kl, O_kl, W_kl    bytes kept on the device, bytes moved to the host, bytes in use during the backward pass
            P_l, C_l, D_l, S_l  bytes of master parameters, of copies in the compute dtype, of gradients, of optimizer states
            UD_l, UH_l          seconds to update the layer on the device, on the host's processors
            RATE_d, RATE_h      bytes per second to the host, to the device; at once each reaches (1 + DUPLEX) / 2 of its own
            HINDER              (1 - DUPLEX) / (1 + DUPLEX)
            SLOW_d, SLOW_h      seconds of compute lost for each second of a copy next to it
            CAP, HOST, STORAGE  bytes; M micro-batches in a row
Variables   z_kl in {0, 1}      option of a layer                             p_l   its parameters live on the host
            x, s                bytes of states that the host updates, that are streamed; nx, ns of them on storage
            f_l, b_l            length of the slot of each pass               start, turn, tail: slots without compute
            u, w, v, a, c, g    bytes that move in each slot: activations down in the forward and the backward passes and up again,
                                parameters up for the forward and for the backward pass, gradients down
            t                   seconds of the update
(O)         min M (start + sum f_l + turn + sum b_l + tail) + t
(C1)        one option a layer: sum_k z_kl = 1, of the allowed ones; p_l + its parts of x and s at most once: sum S p + x + s <= S
(C2)        compute: f_l >= F_l + SLOW_d u_l / RATE_d + SLOW_h a_l / RATE_h;  b_l >= B_l + sum_k R_kl z_kl + the same of v, c, g
(C3)        links: seconds of one direction alone + HINDER times those of the other are at most the slot, both ways
(C4)        copies move what exists: down before the end of slot l is of layers before l, and of layer l for as long as the slot is
            longer than its pass; up no more than has gone; g likewise
(C5)        arrive before use: what layers >= l moved is back before the backward pass of l begins; parameters before each pass
(C6)        device memory, in every slot: states, parameters and gradients on it + kept + moved but not yet gone or
            already back + in use <= CAP; at the turn the loss's, in the update the update's own bytes. Copies C leave with the
            backward pass of the last micro-batch; of several the peak is in the ones before
(C7)        host memory: states, parameters, gradients and activations on it <= HOST;  (C8) storage: nx + ns <= STORAGE
(C9)        update: t >= the device's UD of what is not on the host; >= UH of x and p; >= their gradients and parameters, and the
            states of s both ways, over the links as in (C3); >= (nx + ns) read and written on storage

A slot lasts from the start of its pass to the start of the next one, so that what the next one waits for comes within it.
Of a link that both directions share evenly (C3) is exact: it works both ways for a time T and one way for D or U, so that
down / RATE_d = T (1 + DUPLEX) / 2 + D, likewise up, and T + D + U is at most the slot.

The slots repeat for each micro-batch. Read on in this order: program.py (the linear program layer by layer), bound.py (its
relaxation by kinds of layers), simulation.py (the schedule as a runtime executes it), repair.py (changes of single layers),
schedule.py (integer layers near the programs, uniform policies, and the method as one).
Source: ZeRO-Offload (arXiv:2101.06840), ZeRO-Infinity (arXiv:2104.07857), Deep Optimizer States (arXiv:2410.21316) for what
moves; the formulation is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...schema.units import BoolArray, FloatArray, IntArray

OPTIONS = ("keep", "selective", "full", "activations", "boundary")
"""Of a block's activations: kept; recomputed except products and attention; recomputed from the input; moved to the host;
recomputed from the input, which moves to the host."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """Rates of one rank's copies; see DATA above. Storage rates are zero where there is none."""

    to_host_bytes_per_s: float
    to_device_bytes_per_s: float
    duplex: float = 1.0
    compute_lost_to_host: float = 0.0
    compute_lost_to_device: float = 0.0
    read_bytes_per_s: float = 0.0
    write_bytes_per_s: float = 0.0

    @property
    def hinder(self) -> float:
        """HINDER: seconds that a second of copies adds to copies the other way next to them."""
        return (1 - self.duplex) / (1 + self.duplex)

    def seconds(self, to_host_s: Any, to_device_s: Any) -> Any:
        """Return the seconds of copies both ways (C3) that take so long in each way by themselves; numbers or arrays."""
        return np.maximum(to_host_s + self.hinder * to_device_s, to_device_s + self.hinder * to_host_s)


@dataclass(frozen=True, kw_only=True)
class AllowedMoves:
    """Which states and parameters may leave the device."""

    host_optimizer: bool = True
    streamed_optimizer: bool = True
    parameters: bool = True


@dataclass(frozen=True, kw_only=True)
class OffloadInstance:
    """One rank; arrays [L] by layer and [K, L] by option and layer, K as in OPTIONS; ``kind`` [L] is equal for interchangeable
    layers and ``streamable`` [L] whose parameters may live on the host. Copies are gone in the update, which goes over each layer
    in ``pieces`` [L].
    """

    forward_s: FloatArray
    backward_s: FloatArray
    kind: IntArray
    allowed: BoolArray
    repeated_s: FloatArray
    retained_bytes: FloatArray
    moved_bytes: FloatArray
    working_bytes: FloatArray
    parameter_bytes: FloatArray
    copy_bytes: FloatArray
    streamable: BoolArray
    gradient_bytes: FloatArray
    state_bytes: FloatArray
    device_update_s: FloatArray
    host_update_s: FloatArray
    links: Links
    may: AllowedMoves
    fixed_bytes: float
    turn_bytes: float
    update_bytes: float
    cap_bytes: float
    host_cap_bytes: float = np.inf
    storage_cap_bytes: float = 0.0
    num_microbatches: int = 1
    gradients_accumulate: bool = False
    pieces: IntArray | int = 1

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.forward_s)

    @cached_property
    def compute_s(self) -> float:
        """Seconds of the passes of one micro-batch when nothing is recomputed or moved."""
        return float(self.forward_s.sum() + self.backward_s.sum())

    @cached_property
    def total_state_bytes(self) -> float:
        """S: bytes of all optimizer states."""
        return float(self.state_bytes.sum())

    @cached_property
    def bytes_per_state_byte(self) -> tuple[float, float]:
        """Bytes of master parameters and of gradients for each byte of optimizer state."""
        trained = self.state_bytes > 0
        if not trained.any():
            return 0.0, 0.0
        return (
            float(self.parameter_bytes[trained].sum() / self.total_state_bytes),
            float(self.gradient_bytes[trained].sum() / self.total_state_bytes),
        )

    @cached_property
    def freed_bytes(self) -> FloatArray:
        """Copies that leave with their layer's backward pass [L]: those of the last micro-batch, so where there is one."""
        return self.copy_bytes * (not self.gradients_accumulate)

    @cached_property
    def layer_bytes(self) -> FloatArray:
        """Device bytes of each layer [L], which leave with its parameters: these, copies, states, accumulated gradients."""
        return (
            self.parameter_bytes + self.copy_bytes + self.state_bytes + self.gradient_bytes * self.gradients_accumulate
        )

    @cached_property
    def resident_bytes(self) -> float:
        """Device bytes of parameters, copies, states, and of gradients where they accumulate, with nothing on the host."""
        gradients = self.gradient_bytes.sum() if self.gradients_accumulate else 0.0
        return float(self.parameter_bytes.sum() + self.copy_bytes.sum() + self.state_bytes.sum() + gradients)


@dataclass(frozen=True, kw_only=True)
class OffloadChoice:
    """Integer layers: ``option`` [L] into OPTIONS; where the states and parameters of each layer lie [L]."""

    option: IntArray
    host_optimizer: BoolArray
    streamed_optimizer: BoolArray
    parameters: BoolArray
    storage: BoolArray

    def take(self, values: FloatArray) -> FloatArray:
        """Return the value of each layer's option [L], of values [K, L]."""
        return np.asarray(values[self.option, np.arange(len(self.option))])


@dataclass(frozen=True, kw_only=True)
class OffloadMarginalSeconds:
    """Seconds of a step that one more unit saves: a byte of device or host memory, a byte per second of a link's rate."""

    device_s_per_byte: float = 0.0
    host_s_per_byte: float = 0.0
    to_host_s2_per_byte: float = 0.0
    to_device_s2_per_byte: float = 0.0
