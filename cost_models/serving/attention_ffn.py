"""Steps of an instance whose attention and feed-forward parts are on devices of their own (docs/serving.md).

n_a = tp attention_dp attention devices have attention, norms, routers, embedding, head and the cache; n_f = ffn_devices the rest:
ep groups, each with E / ep experts and a copy of dense parts, cut over n_f / ep devices. In every layer rows go over and back.
The b rows of an attention rank are m micro-batches in flight, so that a group works on one while others are on their way:

    u = b / m                          rows of a micro-batch, of one attention rank; m at most b
    a = products(u) + attention(u) + all-reduce(u, tp)                                                      (A1)
    f = experts(u attention_dp) + products(u attention_dp / ep) + all-reduce(.., n_f / ep)                  (A2)
    w = l + c u attention_dp D e / (min(n_a, n_f) R)           each way; c copies of a row                  (A3)
    t = max(m s, a + w + f + w'),  s = max(a, w, f, w')        a layer: its slowest part, or a round trip   (A4)
    T = sum t + max over layers of min(a + w + f + w' - s, (m - 1) s) + head                                (A5)

c = ep (1 - (1 - 1 / ep)^k) groups have one of a row's k experts; e is one byte there where products of the weights' type take
that, and two back. (A4) and (A5) are what a cycle of m jobs over four servers takes: exactly where all layers are alike, but for
a round trip where a run of others begins (tests). The last micro-batch ends (m - 1) s after the first.

Sources: arXiv:2405.01814 (Lamina); arXiv:2504.02263 (MegaScale-Infer, section 4.1, ping-pong); arXiv:2507.19427 (Step-3).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...schema import ClusterSpec, ModelSpec
from ...schema.adapters import Adapters
from ...schema.layers import Block, MoE, NoMixer
from ...schema.serving import BYTES_OF, CacheDtype, ServingLayout, WeightDtype
from ...schema.units import FloatArray
from ..coefficients import Coefficients, packaged_coefficients
from ..hardware.collectives import p2p_s
from ..hardware.node_links import Hops
from ..layer.operators import Gemm, Layer, Operator
from .communication import all_reduce_s
from .engine import USUAL_KERNELS, Kernels
from .operators import Instance, experts_s, operators, products_bytes, products_s, row_costs, weight_bytes
from .step import StepCosts, cache_bytes_of, counted_layers, decoding_plane, prompts_plane, require_serveable
from .tables import ROWS, Plane, over_rows

MICRO_BATCHES = (1, 2, 3, 4)
"""In flight: one where the weights that each reads cost most; three where parts are alike (Step-3), four where the way is long
(MegaScale-Infer)."""


@dataclass(frozen=True, eq=False)
class SplitLayers:
    """Layers that are alike, tabulated: seconds of a micro-batch in one of them.

    Attributes:
        products, exchange: of attention devices, without attention itself, [G] by rows of one attention rank (A1).
        decode, prompt: attention.
        feed_forward, sent, returned: [G] by rows of all attention ranks together (A2), (A3).
    """

    count: int
    products: FloatArray
    exchange: FloatArray
    decode: Plane | None
    prompt: Plane | None
    feed_forward: FloatArray
    sent: FloatArray
    returned: FloatArray


def layer_s(parts: Sequence[Any], micro_batches: Any) -> FloatArray:
    """Return the seconds [...] of a layer for all its micro-batches (A4); parts: seconds of one in each part of the round trip."""
    return np.maximum(micro_batches * functools.reduce(np.maximum, parts), sum(parts))


def fill_s(parts: Sequence[Any], micro_batches: Any) -> FloatArray:
    """Return the seconds [...] in which not all micro-batches are in flight, at the begin and the end of a step (A5)."""
    slowest = functools.reduce(np.maximum, parts)
    return np.minimum(sum(parts) - slowest, (micro_batches - 1) * slowest)


def link_s(num_bytes: FloatArray, layout: ServingLayout, clusters: Sequence[ClusterSpec], c: Any) -> FloatArray:
    """Return the seconds [N] in which so many bytes [N] go from all devices of one group to all of the other (A3).

    Every device sends and receives at the rate of its link, so that the smaller group's links bind; a transfer begins as one of
    DeepEP's kernels for decoding does.

    Args:
        clusters: of attention and of feed-forward devices; unlike ones are joined by the slower of their outermost links.
        c: coefficients of section ``serving``.
    """
    each = num_bytes / min(layout.stage_devices, layout.ffn_devices)
    total, slowest = layout.num_devices, np.zeros_like(each)
    are_unlike = clusters[0] is not clusters[1]
    for cluster in clusters:
        reach = cluster.num_devices + 1 if are_unlike else total  # beyond every domain but the last
        hops = Hops(np.full(each.shape, reach), np.ones(each.shape, dtype=np.int64), "all")
        if are_unlike and cluster.bandwidth_matrix is not None:
            cluster = cluster.replace(bandwidth_matrix=None)
        slowest = np.maximum(slowest, p2p_s(each, hops, cluster) - p2p_s(0 * each, hops, cluster))
    spans_nodes = are_unlike or total > max(clusters[0].levels[0].domain_size, 1)
    return np.asarray(c["low_latency_s"] + spans_nodes * c["low_latency_network_s"] + slowest)


@dataclass(frozen=True, eq=False)
class SplitCosts(StepCosts):
    """Seconds of a step over attention and feed-forward devices; weight_bytes and cache are of an attention device.

    Attributes:
        feed_forward: the group of feed-forward devices, as an instance of its own.
        layers: those that are alike once; head: [G] of rows that need logits; embedding: [G].
        micro_batches: m; ffn_weight_bytes: of a feed-forward device.
    """

    feed_forward: Instance | None = None
    layers: tuple[SplitLayers, ...] = ()
    head: FloatArray | None = None
    embedding: FloatArray | None = None
    micro_batches: int = 1
    ffn_weight_bytes: float = 0.0

    @classmethod
    def split(
        cls,
        model: ModelSpec,
        clusters: tuple[ClusterSpec, ClusterSpec],
        layout: ServingLayout,
        *,
        weights: WeightDtype,
        cache: CacheDtype,
        experts: WeightDtype | None = None,
        micro_batches: int = 1,
        coefficients: Coefficients | None = None,
        known: tuple[dict[Any, Any], dict[Any, Any]] | None = None,
        adapters: Adapters | None = None,
        kernels: Kernels = USUAL_KERNELS,
    ) -> SplitCosts:
        """Return the costs of an engine instance.

        Args:
            clusters: of attention devices, and of feed-forward devices: the same one, or another kind of device.
            known: tables of either kind of device, which layouts of the same model and types share: filled here.

        Raises:
            ConfigError: the layout does not fit the model, or the model was traced from code.
        """
        require_serveable(model, layout)
        known = ({}, {}) if known is None else known
        shared: dict[str, Any] = {
            "model": model, "weights": weights, "experts": experts or weights, "cache": cache, "adapters": adapters,
            "coefficients": coefficients or packaged_coefficients(), "kernels": kernels,
        }  # fmt: skip
        groups = ServingLayout(tp=layout.moe_tp, attention_dp=layout.ep, ep=layout.ep)
        attention = Instance(cluster=clusters[0], layout=layout, **shared)
        feed_forward = Instance(cluster=clusters[1], layout=groups, **shared)
        counts = counted_layers([layer for layer in model.iter_layers() if isinstance(layer, Block)])
        of_window, state = cache_bytes_of(attention, counts)
        ends = {id(layer): row_costs(attention, layer) for layer in (model.embedding, model.head)}
        return cls(
            instance=attention,
            stages=(),
            weight_bytes=sum(count * _attention_bytes(attention, layer) for layer, count in counts.items())
            + weight_bytes(attention, model.embedding)
            + weight_bytes(attention, model.head),
            cache_bytes_per_token=sum(of_window.values()),
            window_cache_bytes=tuple(sorted((window, size) for window, size in of_window.items() if window)),
            state_bytes=state,
            feed_forward=feed_forward,
            layers=tuple(_tabulated(attention, feed_forward, layer, count, known) for layer, count in counts.items()),
            head=np.asarray(sum(ends[id(model.head)].values())),
            embedding=np.asarray(sum(ends[id(model.embedding)].values())),
            micro_batches=micro_batches,
            ffn_weight_bytes=sum(
                count * products_bytes(feed_forward, _parts(feed_forward, layer)[1]) for layer, count in counts.items()
            ),
        )

    def with_micro_batches(self, micro_batches: int) -> SplitCosts:
        """Return the same with so many micro-batches."""
        return replace(self, micro_batches=micro_batches)

    def parts(
        self,
        decode_rows: Any,
        cached_tokens: Any,
        prefill_tokens: Any = 0,
        prefill_context: Any = 0,
        *,
        prompts: Any = 0,
        mean_rows: Any = None,
        pad: Callable[[float], float] = float,
    ) -> dict[str, FloatArray]:
        """Return the seconds of a step by part: what attention devices do, and what they wait for rows that come back.

        Args:
            mean_rows: of an attention rank, decoding and of prompts, where ``decode_rows`` are those of the fullest; None: as many.
            pad: the rows that a micro-batch of so many has, where graphs of some sizes are replayed; of single steps alone.
        """
        done = {name: np.zeros(()) for name in ("products", "communication", "decode_attention", "prefill_attention")}
        total, fill, seen = np.zeros(()), np.zeros(()), self._round_trips(
            decode_rows, cached_tokens, prefill_tokens, prefill_context, mean_rows, pad
        )  # fmt: skip
        for count, of_attention, others, m in seen:
            stops = (sum(of_attention.values()), *others)
            total = total + count * layer_s(stops, m)
            fill = np.maximum(fill, fill_s(stops, m))
            for name, seconds in of_attention.items():
                done[name] = done[name] + count * m * seconds
        rows = self.queries * np.asarray(decode_rows, dtype=np.float64)
        assert self.head is not None and self.embedding is not None
        waiting = np.maximum(total + fill - sum(done.values()), 0.0)
        done["products"] = done["products"] + over_rows(rows + prefill_tokens, self.embedding)
        return done | {"head": over_rows(rows + prompts, self.head), "waiting": waiting}

    def busy(self, *sizes: Any) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return the seconds of a step in which attention devices, feed-forward devices and the link work; sizes as of `parts`."""
        attention, feed_forward, link = np.zeros(()), np.zeros(()), np.zeros(())
        for count, of_attention, (sent, f, returned), m in self._round_trips(*sizes):
            attention = attention + count * m * sum(of_attention.values())
            feed_forward = feed_forward + count * m * f
            link = link + count * m * np.maximum(sent, returned)
        return attention, feed_forward, link

    def _round_trips(
        self,
        decode_rows: Any,
        cached: Any,
        tokens: Any = 0,
        context: Any = 0,
        mean_rows: Any = None,
        pad: Callable[[float], float] = float,
    ) -> Iterator[tuple[int, dict[str, FloatArray], tuple[FloatArray, FloatArray, FloatArray], FloatArray]]:
        """Yield of layers that are alike their number, a micro-batch's seconds by part of attention devices, its way there, seconds
        of feed-forward devices and way back, and the number of micro-batches.
        """
        decoding, tokens = np.asarray(decode_rows, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
        rows = self.queries * decoding + tokens
        m = np.clip(rows, 1.0, self.micro_batches)
        u, per_row = rows / m, cached / np.maximum(decoding, 1e-9)
        mean = u if mean_rows is None else mean_rows / m
        if pad is not float:
            u, mean = np.asarray(pad(float(u))), np.asarray(pad(float(mean)))
        everyone = self.instance.layout.attention_dp * mean
        for layers in self.layers:
            of_attention = {
                "products": over_rows(u, layers.products),
                "communication": over_rows(u, layers.exchange),
                "decode_attention": 0 * u if layers.decode is None else layers.decode(decoding / m, per_row),
                "prefill_attention": 0 * u if layers.prompt is None else layers.prompt(tokens / m, context),
            }
            sent, f, returned = (
                over_rows(everyone, table) for table in (layers.sent, layers.feed_forward, layers.returned)
            )
            yield layers.count, of_attention, (sent, f, returned), m


def _is_feed_forward(op: Operator) -> bool:
    return bool(getattr(op, "routed", False)) or op.name.startswith(("mlp_", "shared_"))


def _parts(instance: Instance, layer: Layer) -> tuple[list[Operator], list[Operator]]:
    """Return the operators of attention and of feed-forward devices: norms and routers are of the former."""
    listed = operators(instance, layer)
    return [op for op in listed if not _is_feed_forward(op)], [op for op in listed if _is_feed_forward(op)]


def has_feed_forward(model: ModelSpec) -> bool:
    """Return whether a model has feed-forward parts that may be on devices of their own."""
    return any(block.experts is not None or getattr(block.mlp, "ffn_dim", 0) > 0 for block, _ in model.block_runs)


def _attention_bytes(instance: Instance, layer: Block) -> float:
    """Return the bytes of a layer's weights on an attention device: its products, and norms and biases of either part."""
    listed = operators(instance, layer)
    counted = sum(op.num_params for op in listed if isinstance(op, Gemm) and not op.name.startswith("index_"))
    others = layer.num_params(instance.model.hidden_dim) - counted
    return products_bytes(instance, _parts(instance, layer)[0]) + others * BYTES_OF[instance.plain_dtype]


def _tabulated(
    attention: Instance, feed_forward: Instance, layer: Block, count: int, known: tuple[dict[Any, Any], dict[Any, Any]]
) -> SplitLayers:
    layout, groups = attention.layout, feed_forward.layout
    planes, rows = (layer.attention, layout.tp), ("attention rows", layer, layout.tp)
    if (planes, 1) not in known[0]:
        known[0][planes, 1] = decoding_plane(attention, layer)
    if planes not in known[0]:
        known[0][planes] = prompts_plane(attention, layer)
    if rows not in known[0]:
        known[0][rows] = _attention_rows(attention, layer)
    of_groups = ("feed-forward rows", layer, groups)
    if of_groups not in known[1]:
        known[1][of_groups] = _feed_forward_rows(feed_forward, layer)
    products, exchange = known[0][rows]
    sent, returned = _ways(attention, feed_forward, layer)
    attends = not isinstance(layer.attention, NoMixer)
    return SplitLayers(
        count=count,
        products=products,
        exchange=exchange,
        decode=Plane.of(known[0][planes, 1]) if attends else None,
        prompt=Plane.of(known[0][planes]) if attends else None,
        feed_forward=known[1][of_groups],
        sent=sent,
        returned=returned,
    )


def _attention_rows(instance: Instance, layer: Block) -> tuple[FloatArray, FloatArray]:
    """Return products and all-reduce [G] of attention devices by rows of a rank (A1).

    Outputs are reduced to parts of the rows before they are sent, and what comes back is gathered: together an all-reduce.
    """
    rows = np.maximum(ROWS, 1.0)
    size = rows * instance.model.hidden_dim * instance.rates.compute_bytes
    seconds = products_s(instance, layer, _parts(instance, layer)[0], rows)
    exchange = _all_reduce_s(instance, size)
    return np.where(ROWS > 0, seconds, 0.0), np.where(ROWS > 0, exchange, 0.0)


def _all_reduce_s(instance: Instance, size: FloatArray) -> FloatArray:
    """Return the seconds [G] of an all-reduce over tp."""
    return all_reduce_s(size, instance.layout.tp, instance.cluster, instance.coefficients, instance.kernels.all_reduce)


def _feed_forward_rows(instance: Instance, layer: Block) -> FloatArray:
    """Return the seconds [G] of feed-forward devices by rows of all attention ranks (A2)."""
    listed, layout = _parts(instance, layer)[1], instance.layout
    if not listed:
        return np.zeros_like(ROWS)
    rows = np.maximum(ROWS, 1.0)
    seconds = products_s(instance, layer, listed, rows / layout.ep)
    if layer.experts is not None:
        seconds = seconds + experts_s(instance, layer.experts, rows / layout.ep)
    # Rows are gathered as they came and outputs reduced to parts of them: the two halves of an all-reduce.
    arriving = rows * _copies(layer, layout) / layout.ep * instance.model.hidden_dim
    size = arriving * (_narrow_bytes(instance, layer) + instance.rates.compute_bytes) / 2
    seconds = seconds + _all_reduce_s(instance, size)
    return np.where(ROWS > 0, seconds, 0.0)


def _narrow_bytes(instance: Instance, layer: Block) -> float:
    """Return the bytes of an element of the rows that feed-forward devices take: one where their products cast it to 8 bits."""
    dtype = instance.experts if isinstance(layer.mlp, MoE) else instance.weights
    return 1.0 if dtype in instance.products.casts else instance.rates.compute_bytes


def _copies(layer: Block, groups: ServingLayout) -> float:
    """Return the groups that a row goes to: all that have one of its experts, or one of those with a dense part."""
    if layer.experts is None:
        return 1.0
    return groups.ep * float(1 - (1 - 1 / groups.ep) ** layer.experts.top_k)


def _ways(attention: Instance, feed_forward: Instance, layer: Block) -> tuple[FloatArray, FloatArray]:
    """Return the seconds [G] of rows there and back, by rows of all attention ranks (A3)."""
    if not _parts(feed_forward, layer)[1]:
        return np.zeros_like(ROWS), np.zeros_like(ROWS)
    narrow = _narrow_bytes(feed_forward, layer)
    elements = ROWS * _copies(layer, feed_forward.layout) * attention.model.hidden_dim
    clusters = attention.cluster, feed_forward.cluster
    sent, returned = (
        np.where(ROWS > 0, link_s(size * elements, attention.layout, clusters, attention.coefficients["serving"]), 0.0)
        for size in (narrow, attention.rates.compute_bytes)
    )
    return sent, returned


def copies_of(model: ModelSpec, layout: ServingLayout) -> float:
    """Return the most groups that a row goes to in a layer."""
    groups = ServingLayout(attention_dp=layout.ep, ep=layout.ep)
    return max(_copies(block, groups) for block, _ in model.block_runs)
