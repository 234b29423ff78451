"""Overlap modes: how a kind of layer runs its tensor-parallel communication along with products, the best of those that it can.

Sets       l kinds of layers, m in {whole, halves} modes (`chunks` of one product are `parallel.overlapped_s`, of tp_overlap)
Data       c[l,m] seconds of a micro-batch's passes through l in mode m with what communication adds to them
Variables  y[l,m] binary, for each layout
(O)  min sum_l n_l sum_m c[l,m] y[l,m]
(V1) one_mode:     sum_m y[l,m] = 1; of a layout with tp_overlap no kind has halves (layout_rules.py)
(V2) rows_divide:  2 divides micro_batch_size where tp_halves (layout_rules.py)
(V3) resident:     a stage holds what its kinds keep in their modes: half-batches hold what an entire one does, as rehearsed
                   (tests/unit/runtime/test_halves.py)
(V4) supported:    the engine runs halves (`EngineFacts.switches`), and this kind of layer; where a device has no streams nothing
                   is gained and nothing is chosen: every kind that can has them if the layout says so
(V5) shared_link:  what runs on a level of links during a pass takes no longer than the pass: collectives over data hide in what
                   half-batches leave of it

No term of (O) has two kinds in it, so that the least of each kind is the optimum (`passes.layer_passes`). What (V5) takes from
collectives over data is not in (O): the search costs every layout with and without ``tp_halves``, and takes the faster.

By half-batches A and B a part of a block (attention, feed-forward) takes, in either pass, with c the products of one half-batch and
g, s the gather before and the reduction after them,

    g + at_once(c, g) + at_once(c, s) + s          at_once: `collectives.pair_s`

instead of 2 (g + c + s): the gather of B runs with the products of A, the reduction of A with those of B. Without sequence
parallelism there is no g. Autograd goes back in the reverse order, so that the backward pass hides the same (runtime/halves.py).
What it costs: products of half as many rows, twice as many kernels to launch and collectives.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...schema.layout_table import RECOMPUTES, LayoutTable
from ...schema.units import Array, BoolArray, FloatArray
from ..hardware.collectives import Pair, exposed_s, slowdown_law
from ..hardware.compute import OperatorTime
from ..hardware.machine import device_rates, measured_rates
from .operators import CostInputs, Layer, Operator
from .parallel import exchange_s, sequence_copy_s

NUM_HALVES = 2


def supported(layer: Layer, inputs: CostInputs) -> BoolArray:
    """Return where a kind of layer runs by half-batches if it is chosen to [N] (V4)."""
    can = (
        layer.is_block and layer.counted is None and layer.inner_block is not None and layer.inner_block.runs_in_halves
    )
    layouts = inputs.layouts
    return np.asarray((layouts.tp_halves == 1) & (layouts.tp > 1) & (layouts.micro_batch_size % NUM_HALVES == 0) & can)


def is_chosen(inputs: CostInputs) -> bool:
    """Return whether a kind takes the mode that is faster; without streams the layout's word stands (V4)."""
    return inputs.workload.overlaps and inputs.cluster.weakest_device.backend.has_streams


def half_batches(inputs: CostInputs) -> CostInputs:
    """Return the inputs of one half-batch: half of the sequences (V2)."""
    sizes = inputs.layouts.micro_batch_size // NUM_HALVES
    return CostInputs(
        hidden_dim=inputs.hidden_dim, layouts=inputs.layouts.replace(micro_batch_size=sizes), scenario=inputs.scenario
    )


class HalvedTime(NamedTuple):
    """Communication of a layer by half-batches [N], for a micro-batch.

    Attributes:
        forward_s, backward_s: what it adds to the products, and the copy that joins both; the latter with what recompute repeats.
        hidden_s: what of it runs with products, of both passes.
    """

    forward_s: FloatArray
    backward_s: FloatArray
    hidden_s: FloatArray


def by_half_batches_s(operators: tuple[Operator, ...], times: list[OperatorTime], inputs: CostInputs) -> HalvedTime:
    """Return the communication of a block of two parts, given its operators' seconds for one half-batch and that one's inputs."""
    layouts, rates = inputs.layouts, device_rates(inputs.scenario)
    exchange = Exchange(inputs)
    joined = rates.kernel_s + 2 * NUM_HALVES * exchange.local_bytes / rates.elementwise_bytes_per_s
    parts = _parts(operators, times, len(layouts))
    forward = sum((exchange.added_s(part.forward_s) for part in parts), start=joined)
    backward = sum((exchange.added_s(part.backward_s) for part in parts), start=joined)
    sent = NUM_HALVES * len(parts) * (exchange.gather_s + exchange.reduce_s + 2 * exchange.copied_s)
    hidden = np.maximum(2 * (sent + joined) - forward - backward, 0.0)
    # Repeated up to the last product of B, which no backward pass reads: blocks hide as before, what is cheap hides nothing.
    last = exchange.reduce_s + exchange.copied_s
    in_full, in_selective = forward - joined - last, sent - last
    is_kind = [layouts.recompute == RECOMPUTES.index(kind) for kind in ("full", "selective")]
    repeated = layouts.recompute_fraction * np.select(is_kind, [in_full, in_selective], 0.0)
    return HalvedTime(forward, backward + repeated, hidden)


def repeated_product_s(operators: tuple[Operator, ...], times: list[OperatorTime], layouts: LayoutTable) -> FloatArray:
    """Return what recompute repeats of A's last product [N], on the way to B's inputs, given seconds of both half-batches.

    Of an entire block nothing is repeated of it.
    """
    last = next(time for op, time in reversed(list(zip(operators, times, strict=True))) if op.name == "mlp_down")
    repeats = layouts.recompute_fraction * (layouts.recompute != RECOMPUTES.index("none"))
    return np.asarray(repeats * last.forward_s / NUM_HALVES)


class Exchange:
    """The collectives of one part and half-batch [N] beside the products of the other half-batch.

    Attributes:
        gather_s: before the products, 0 without sequence parallelism; reduce_s: after them; copied_s: sorting either by sequence.
        gather_law, reduce_law: slow-downs of products by either, and by products.
        local_bytes: hidden states of one half-batch between parts on one rank.
    """

    def __init__(self, inputs: CostInputs) -> None:
        layouts, unsharded = inputs.layouts, inputs.hidden_bytes
        splits, self.copied_s = layouts.sequence_parallel == 1, sequence_copy_s(inputs)
        gather, reduce = exchange_s(inputs)
        self.gather_s, self.reduce_s = gather - np.where(splits, self.copied_s, 0.0), reduce - self.copied_s
        self.local_bytes = unsharded / np.where(splits, layouts.tp, 1)
        sent = unsharded * (layouts.tp - 1) / layouts.tp
        self.gather_law = _law(sent, self.gather_s, inputs)
        self.reduce_law = _law(np.where(splits, sent, 2 * sent), self.reduce_s, inputs)

    def added_s(self, products_s: FloatArray) -> FloatArray:
        """Return what the collectives of both half-batches add to the products of a part [N], each of ``products_s``."""
        moves = [(self.gather_s, self.gather_law), (self.reduce_s, self.reduce_law)]
        added = sum(seconds + exposed_s(products_s, seconds, law) for seconds, law in moves)
        return np.asarray(2 * NUM_HALVES * self.copied_s + added)


def _law(sent_bytes: Array, seconds: FloatArray, inputs: CostInputs) -> Pair:
    rate = np.divide(sent_bytes, seconds, out=np.zeros_like(seconds), where=seconds > 0)
    law = slowdown_law(rate / inputs.cluster.weakest_device.memory_bandwidth_bytes_per_s, inputs.scenario.coefficients)
    ratio = measured_rates(inputs.scenario).overlap_ratio
    if not is_chosen(inputs):
        return Pair(np.ones_like(seconds), 1.0)  # one after the other
    return Pair(law.compute * ratio, law.collective * ratio)


class _Part(NamedTuple):
    forward_s: FloatArray
    backward_s: FloatArray


def _parts(operators: tuple[Operator, ...], times: list[OperatorTime], size: int) -> tuple[_Part, _Part]:
    """Return the seconds of what runs between gather and reduction: of attention and of the feed-forward part."""
    seconds = np.zeros((2, 2, size))
    part = 0
    for op, time in zip(operators, times, strict=True):
        if not op.name.startswith(("norm_", "residual_adds")):
            part = 1 if op.name.startswith("mlp_") else 0
            seconds[part, 0] += time.forward_s
            seconds[part, 1] += time.backward_s
    return _Part(*seconds[0]), _Part(*seconds[1])


def shared_link(hidden_s: FloatArray, inputs: CostInputs) -> FloatArray:
    """Return the seconds that collectives over data cannot hide in, as what runs with products takes their links [N] (V5).

    Where tp fills the domain of the fastest link, data moves over another level.
    """
    return np.where(inputs.layouts.tp < inputs.cluster.scaleup_domain, hidden_s, 0.0)
