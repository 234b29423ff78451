"""Measure our engine on this machine, layout by layout: one instance alone, and as many as the machine has devices for.

What a step takes depends on what else the machine does: instances share its cores, its memory and its links.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil

from ...schema.errors import MeshwrightError
from ...schema.model import ModelSpec
from ...schema.profile import ServingHostPoint, ServingStepPoint
from ...schema.serving import BYTES_OF, EngineLimits, Pool, ServingLayout, WeightDtype
from .deployment import open_engine
from .executor import cache_shape
from .instance import require_servable
from .measure import mean_records, measure_host
from .requests import StepRecord

MAX_CONTEXT = 1024
"""Tokens that measured rows attend to; the seconds of more follow in proportion."""

_CACHE_SHARE = 0.25
"""Of the free memory, for the caches of all measured instances together."""

_HOST_SHARE = 0.15

Points = dict[str, list[Any]]
"""Of a profile: lists of ServingStepPoint and ServingHostPoint, by its fields."""

Tell = Callable[[str], None]


def measure_layouts(
    spec: ModelSpec,
    layouts: Sequence[ServingLayout],
    *,
    num_devices: int,
    limits: EngineLimits,
    weights: WeightDtype,
    device: str,
    budget_s: float,
    tell: Tell,
) -> tuple[Points, str]:
    """Return the points, and what was left out, "" for nothing.

    Args:
        limits: of an instance; the blocks of its cache are chosen here.
    """
    points: Points = {"serving_steps": [], "serving_host": []}
    cases = list(_cases(spec, layouts, num_devices, limits, weights))
    ends_s, left_out = time.monotonic() + budget_s, []
    for idx, pool in enumerate(cases):
        remaining_s = ends_s - time.monotonic()
        title = f"{pool.replicas} x tp={pool.layout.tp} pp={pool.layout.pp} ep={pool.layout.ep}"
        if remaining_s <= 0:
            left_out.append(f"{title}: no time was left")
            continue
        tell(title)
        try:
            _measure(spec, pool, points, device, remaining_s / (len(cases) - idx))
        except MeshwrightError as error:
            left_out.append(f"{title}: {error.message}")
    return points, "; ".join(left_out)


def _cases(
    spec: ModelSpec, layouts: Sequence[ServingLayout], num_devices: int, limits: EngineLimits, weights: WeightDtype
) -> Iterator[Pool]:
    """Yield one instance of each layout that our engine has, and all that fit where those are more; few devices first."""
    for layout in sorted(layouts, key=lambda one: (one.num_devices, one.pp)):
        for replicas in sorted({1, num_devices // layout.num_devices} - {0}):
            room = _CACHE_SHARE * psutil.virtual_memory().available / replicas
            blocks = int(room // (_token_bytes(spec, layout, weights) * limits.block_size))
            ceiling = -(-limits.max_batch * (MAX_CONTEXT + limits.block_size) // limits.block_size)
            pool = Pool(
                device="this machine's", replicas=replicas, layout=layout, weights=weights, cache=cache_of(weights),
                limits=limits.replace(cache_blocks=max(min(blocks, ceiling), 1)),
            )  # fmt: skip
            try:
                require_servable(spec, pool, is_single=False)
            except MeshwrightError:
                continue
            yield pool


def cache_of(weights: WeightDtype) -> Any:
    """Return the cache of an engine that is told nothing else, as a plan has it."""
    return weights if weights in ("fp16", "fp32") else "bf16"


def _token_bytes(spec: ModelSpec, layout: ServingLayout, weights: WeightDtype) -> float:
    """Return the cache of a token on all ranks of an instance."""
    elements = 0
    for idx in range(spec.num_blocks):
        pair, heads, width = cache_shape(spec, idx, layout.tp)
        elements += pair * heads * width
    return elements * BYTES_OF[cache_of(weights)] * layout.tp


def _measure(spec: ModelSpec, pool: Pool, points: Points, device: str, budget_s: float) -> None:
    """Add the points of a pool, all of whose instances work at once."""
    begun, layout = time.monotonic(), pool.layout
    with open_engine(spec, pool, device=device, prefix_cache=False) as engine:
        case: dict[str, Any] = {
            "model": spec.name, "content": spec.content, "layout": layout, "weights": pool.weights,
            "cache": pool.cache, "devices_in_use": pool.num_devices,
        }  # fmt: skip
        remaining_s = budget_s - (time.monotonic() - begun)
        steps = mean_records(
            engine.measure(max_context=MAX_CONTEXT, budget_s=max((1 - _HOST_SHARE) * remaining_s, 1.0))
        )
        points["serving_steps"] += [ServingStepPoint(**case, **_step(record)) for record in steps]
        if layout.pp == 1 and pool.replicas == 1:
            points["serving_host"] += [
                ServingHostPoint(**case, rows=record.decode_rows, time_s=record.seconds)
                for record in measure_host(engine)
            ]


def _step(record: StepRecord) -> dict[str, Any]:
    """Return the fields of a point that are the step's."""
    names = ("decode_rows", "cached_tokens", "prefill_tokens", "prefill_context", "prompts")
    return {**{name: getattr(record, name) for name in names}, "time_s": record.seconds}
