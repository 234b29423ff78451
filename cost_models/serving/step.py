"""Seconds of one step of an engine instance: b rows that decode over S cached tokens, and p tokens of prompts (docs/serving.md).

    t = g(b + p) + h(b + prompts) + a_d(b, S / b) + a_p(p, C)

g: products, experts and communication by rows; h: the head, of rows whose logits are needed; a_d, a_p: attention. Everything is
tabulated when the costs are built, so that a call only interpolates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from ...schema import ClusterSpec, ConfigError, ModelSpec
from ...schema.adapters import Adapters
from ...schema.layers import Block, Head
from ...schema.serving import BYTES_OF, CacheDtype, ServingLayout, WeightDtype
from ...schema.units import FloatArray
from ..coefficients import Coefficients, packaged_coefficients
from ..hardware.collectives import p2p_s
from ..hardware.node_links import Hops
from ..layer.operators import Layer
from .attention import AttentionHeads, decode_s, index_bytes, index_s, prompt_s, state_element_bytes, state_s
from .device_part import ENTIRE, DevicePart
from .engine import USUAL_KERNELS, Kernels
from .operators import PARTS, Instance, row_costs, weight_bytes
from .tables import ROWS, Plane, over_rows

AnyLayer = TypeVar("AnyLayer", bound=Layer)


@dataclass(frozen=True, eq=False)
class _Stage:
    """One pipeline stage, tabulated: by rows [G] of each part, of the head [G], and both kinds of attention."""

    by_rows: dict[str, FloatArray]
    head: FloatArray
    decode: Plane
    prompt: Plane

    def parts(
        self, queries: int, decode_rows: Any, cached: Any, tokens: Any, context: Any, prompts: Any
    ) -> dict[str, FloatArray]:
        """Return the seconds by part; each row that decodes has so many queries."""
        rows, per_row = queries * decode_rows + tokens, cached / np.maximum(decode_rows, 1e-9)
        seconds = {name: over_rows(rows, table) for name, table in self.by_rows.items()}
        return seconds | {
            "decode_attention": self.decode(decode_rows, per_row),
            "prefill_attention": self.prompt(tokens, context),
            "head": over_rows(queries * decode_rows + prompts, self.head),
        }


@dataclass(frozen=True, eq=False)
class StepCosts:
    """Seconds of one step of an engine instance's attention rank, on arrays [...] that broadcast.

    Attributes:
        weight_bytes: of the fullest device.
        cache_bytes_per_token: of one attention rank's device, all its layers, windows as if all were kept.
        window_cache_bytes: (window, bytes per token) of layers that keep only their last tokens, included above.
        state_bytes: of a request on that device, in layers with a state of fixed size.
        queries: tokens of each row that decodes, which its cache is read once for: 1 but where drafts are checked.
        host_weight_bytes: of a device's weights in the host's memory (host_experts.py).
    """

    instance: Instance
    stages: tuple[_Stage, ...]
    weight_bytes: float
    cache_bytes_per_token: float
    window_cache_bytes: tuple[tuple[int, float], ...]
    state_bytes: float
    queries: int = 1
    host_weight_bytes: float = 0.0

    @classmethod
    def build(
        cls,
        model: ModelSpec,
        cluster: ClusterSpec,
        layout: ServingLayout,
        *,
        weights: WeightDtype,
        cache: CacheDtype,
        experts: WeightDtype | None = None,
        coefficients: Coefficients | None = None,
        known: dict[Any, Any] | None = None,
        queries: int = 1,
        adapters: Adapters | None = None,
        kernels: Kernels = USUAL_KERNELS,
        part: DevicePart = ENTIRE,
    ) -> StepCosts:
        """Return the costs of an engine instance.

        Args:
            experts: the type of experts' weights; None: as the others.
            adapters: that requests name, all in memory; kernels: of the engine.
            part: of the devices that the steps have.
            known: attention by kind, tp and part, which layouts of the same model, devices, types and kernels share: filled here.

        Raises:
            ConfigError: the layout does not fit the model, or the model was traced from code.
        """
        require_serveable(model, layout)
        instance = Instance(
            model=model, cluster=cluster, layout=layout, weights=weights, experts=experts or weights, cache=cache,
            coefficients=coefficients or packaged_coefficients(), adapters=adapters, kernels=kernels, part=part,
        )  # fmt: skip
        counts = counted_stages(model, layout.pp)
        costs = {layer: row_costs(instance, layer) for stage in counts for layer in stage}
        planes, known = dict[Layer, Any](), {} if known is None else known
        for layer in (layer for layer in costs if isinstance(layer, Block)):
            key = (layer.attention, layout.tp, part)
            if (key, queries) not in known:
                known[key, queries] = decoding_plane(instance, layer, queries)
            if key not in known:
                known[key] = prompts_plane(instance, layer)
            planes[layer] = known[key, queries], known[key]
        sizes = [sum(count * weight_bytes(instance, layer) for layer, count in stage.items()) for stage in counts]
        caches = [cache_bytes_of(instance, stage) for stage in counts]
        fullest = int(np.argmax([sum(of_window.values()) for of_window, _ in caches]))
        of_window, state = caches[fullest]
        return cls(
            instance=instance,
            stages=tuple(_stages(instance, counts, costs, planes)),
            weight_bytes=max(sizes),
            cache_bytes_per_token=sum(of_window.values()),
            window_cache_bytes=tuple(sorted((window, size) for window, size in of_window.items() if window)),
            state_bytes=state,
            queries=queries,
        )

    def seconds(
        self,
        decode_rows: Any,
        cached_tokens: Any,
        prefill_tokens: Any = 0,
        prefill_context: Any = 0,
        *,
        prompts: Any = 0,
    ) -> FloatArray:
        """Return the seconds of one pass through all stages.

        Args:
            decode_rows: requests that decode a token; cached_tokens: of all of them together.
            prefill_tokens: of prompts; prefill_context: tokens that one of them attends to on average.
            prompts: of these that end in this step, whose last row goes through the head.
        """
        return np.asarray(
            sum(self.parts(decode_rows, cached_tokens, prefill_tokens, prefill_context, prompts=prompts).values())
        )

    def parts(
        self,
        decode_rows: Any,
        cached_tokens: Any,
        prefill_tokens: Any = 0,
        prefill_context: Any = 0,
        *,
        prompts: Any = 0,
    ) -> dict[str, FloatArray]:
        """Return the seconds of one pass by part: products, experts, communication, both kinds of attention, head."""
        sizes = _floats(decode_rows, cached_tokens, prefill_tokens, prefill_context, prompts)
        of_stages = [(count, stage.parts(self.queries, *sizes)) for stage, count in self.distinct_stages.items()]
        return {name: np.asarray(sum(count * parts[name] for count, parts in of_stages)) for name in of_stages[0][1]}

    @cached_property
    def distinct_stages(self) -> Mapping[_Stage, int]:
        """Pipeline stages, those that are alike once, with how many there are of each."""
        return Counter(self.stages)

    def filled(self) -> FilledPipeline:
        """Return the costs of a step where every stage has one at any time."""
        return FilledPipeline(self)


@dataclass(frozen=True, eq=False)
class FilledPipeline:
    """A step among as many others as there are stages: all move on when the slowest stage has, pp times for each step."""

    step: StepCosts

    def parts(self, *sizes: Any, prompts: Any = 0) -> dict[str, FloatArray]:
        """Return the seconds by part, and those that a step waits for the slowest stage."""
        arrays = _floats(*sizes, *[0] * (4 - len(sizes)), prompts)
        of_stages = [stage.parts(self.step.queries, *arrays) for stage in self.step.distinct_stages]
        totals = np.stack([np.asarray(sum(parts.values())) for parts in of_stages])
        counts = np.array(list(self.step.distinct_stages.values()), dtype=np.float64)
        waiting = counts.sum() * totals.max(axis=0) - np.tensordot(counts, totals, axes=1)
        return self.step.parts(*sizes, prompts=prompts) | {"imbalance": waiting}

    @property
    def queries(self) -> int:
        """Return the tokens of each row that decodes."""
        return self.step.queries

    @property
    def tokens_per_step(self) -> float:
        """Return the tokens that a step gives each of them."""
        return float(getattr(self.step, "tokens_per_step", 1.0))


def _floats(*sizes: Any) -> tuple[FloatArray, ...]:
    return tuple(np.asarray(size, dtype=np.float64) for size in sizes)


def require_serveable(model: ModelSpec, layout: ServingLayout) -> None:
    """Raise an error where a layout does not fit the model, or it was traced from code."""
    if model.traced_len is not None:
        raise ConfigError(f"{model.name} was traced from code: how it generates is not known")
    if layout.pp > model.num_blocks:
        raise ConfigError(f"pp {layout.pp} exceeds the {model.num_blocks} blocks of {model.name}")
    for block, _ in model.block_runs:
        if block.attention.num_heads % layout.tp and layout.tp <= block.attention.num_heads:
            raise ConfigError(f"tp {layout.tp} does not divide the {block.attention.num_heads} heads of {model.name}")
        if block.experts is not None and block.experts.num_experts % layout.ep:
            raise ConfigError(f"ep {layout.ep} does not divide the {block.experts.num_experts} experts of {model.name}")


def counted_stages(model: ModelSpec, pp: int) -> list[dict[Layer, int]]:
    """Return the layers of each stage with how many there are: equally many blocks, the embedding first and the head last."""
    blocks = [layer for layer in model.iter_layers() if isinstance(layer, Block)]
    stages: list[list[Layer]] = [list(part) for part in np.array_split(np.array(blocks, dtype=object), pp)]
    stages[0].insert(0, model.embedding)
    stages[-1].append(model.head)
    return [counted_layers(stage) for stage in stages]


def counted_layers(layers: Iterable[AnyLayer]) -> dict[AnyLayer, int]:
    """Return layers that are alike once, with how many there are of each."""
    counts: dict[AnyLayer, int] = {}
    for layer in layers:
        counts[layer] = counts.get(layer, 0) + 1
    return counts


def decoding_plane(instance: Instance, block: Block, queries: int = 1) -> FloatArray:
    """Return the seconds of decoding in one block over the sizes of a `Plane`.

    Several queries of a row are to its cache what so many times the heads are: it is read once for all.
    """
    rows, tokens = Plane.sizes()
    tp, rates, cache_bytes = instance.layout.tp, instance.rates, BYTES_OF[instance.cache]
    heads = AttentionHeads.decoding(block, tp, cache_bytes)
    shape = np.zeros(np.broadcast_shapes(rows.shape, tokens.shape))
    if heads is None:
        return state_s(block, tp, rates.compute_bytes, rows + shape, rates)
    device = None if instance.products.plain is None else instance.products.device()
    heads = replace(heads, num_heads=queries * heads.num_heads)
    attention = decode_s(heads, rows, tokens, rates, device, instance.kernels.attention)
    return attention + index_s(block, queries * rows, tokens, rows, rates) + shape


def prompts_plane(instance: Instance, block: Block) -> FloatArray:
    """Return the seconds of prompts in one block over the sizes of a `Plane`."""
    rows, tokens = Plane.sizes()
    shape = np.zeros(np.broadcast_shapes(rows.shape, tokens.shape))
    seconds = prompt_s(block, instance.model.hidden_dim, instance.layout.tp, rows, tokens, instance.rates)
    return seconds + index_s(block, rows, tokens, np.ones_like(rows), instance.rates) + shape


def _stages(
    instance: Instance,
    counts: Sequence[dict[Layer, int]],
    costs: dict[Layer, dict[str, FloatArray]],
    planes: Mapping[Layer, Any],
) -> Iterator[_Stage]:
    """Yield the stages; those of equal layers are one object."""
    known: dict[Any, _Stage] = {}
    for idx, layers in enumerate(counts):
        key = frozenset(layers.items()), idx > 0
        if key not in known:
            known[key] = _stage(instance, layers, costs, planes, idx)
        yield known[key]


def _stage(
    instance: Instance,
    layers: dict[Layer, int],
    costs: dict[Layer, dict[str, FloatArray]],
    planes: Mapping[Layer, Any],
    idx: int,
) -> _Stage:
    body = {layer: count for layer, count in layers.items() if not isinstance(layer, Head)}
    by_rows = {part: sum((n * costs[layer][part] for layer, n in body.items()), np.zeros_like(ROWS)) for part in PARTS}
    if idx:
        layout = instance.layout
        size = ROWS * instance.model.hidden_dim * instance.rates.compute_bytes
        hops = Hops(np.full(ROWS.shape, 2), np.full(ROWS.shape, layout.stage_devices), "chain")
        by_rows["communication"] = by_rows["communication"] + np.where(
            ROWS > 0, p2p_s(size, hops, instance.cluster), 0.0
        )
    heads = [np.asarray(sum(costs[layer].values())) for layer in layers if isinstance(layer, Head)]
    none = np.zeros((len(Plane.FIRST), len(Plane.SECOND)))
    decode, prompt = (
        sum((n * planes[layer][which] for layer, n in body.items() if layer in planes), none) for which in (0, 1)
    )
    return _Stage(by_rows, heads[0] if heads else np.zeros_like(ROWS), Plane.of(decode), Plane.of(prompt))


def cache_bytes_of(instance: Instance, layers: Mapping[AnyLayer, int]) -> tuple[dict[int, float], float]:
    """Return bytes of a cached token by window (0: all are kept), and of a request's states, of the layers of one stage."""
    of_window: dict[int, float] = {0: 0.0}
    state = 0.0
    for layer, count in layers.items():
        if not isinstance(layer, Block):
            continue
        heads = AttentionHeads.decoding(layer, instance.layout.tp, BYTES_OF[instance.cache])
        if heads is not None:
            window = layer.attention.window or 0
            of_window[window] = of_window.get(window, 0.0) + count * (heads.token_bytes + index_bytes(layer))
        else:
            state += (
                count
                * getattr(layer.attention, "state_elements", 0)
                / instance.layout.tp
                * state_element_bytes(layer, instance.rates.compute_bytes)
            )
    return of_window, state
