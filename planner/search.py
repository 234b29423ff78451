"""Best-first search: expand layouts in the order of their lower bounds until no bound is below the incumbent.

Every layout has an admissible lower bound on time and memory (cost_models/step.py, one vectorised pass). Expanding a layout
cuts its layers into stages exactly (solvers/stage_split.py) and costs them. What is left unexpanded has bounds no better than
the incumbent, so the incumbent is optimal for the cost model; a time limit leaves an honest gap.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..cost_models import memory
from ..cost_models.layouts import FloatArray, IntArray
from ..cost_models.space_costs import SpaceCosts
from ..cost_models.step import contents_between, estimate_step, lower_bounds, stage_memory_parts
from ..schema import ClusterSpec, Estimate, ModelSpec, SearchCertificate, Workload
from ..schema.model import Block
from ..solvers import stage_split
from ..solvers.status import Status
from .space import Space

REL_GAP = 1e-4
"""A bound within this of the incumbent is not worth expanding; far below the cost model's own error."""

OnProgress = Callable[[int, float | None, float], None]
"""Called with (layouts evaluated, incumbent seconds or None, bound seconds)."""


@dataclass(frozen=True)
class Candidate:
    """One expanded layout; ``idx`` in the space, stage boundaries, estimate; no split of it is faster than ``bound_s``."""

    idx: int
    boundaries: tuple[int, ...]
    estimate: Estimate
    bound_s: float


@dataclass
class SearchResult:
    """Expanded layouts that fit, best first, and those that do not; no layout of the space is faster than ``bound_s``."""

    costs: SpaceCosts
    fitting: list[Candidate] = field(default_factory=list)
    too_large: list[Candidate] = field(default_factory=list)
    bound_s: float = 0.0
    search_s: float = 0.0
    stopped_early: bool = False

    def certificate(self, chosen: Candidate) -> SearchCertificate:
        """How far from the best of the space ``chosen`` may be."""
        objective = chosen.estimate.step_time_s
        evaluated = len(self.fitting) + len(self.too_large)
        return SearchCertificate(
            status="feasible" if self.stopped_early else "optimal",
            objective_s=objective,
            bound_s=self.bound_s,
            gap=max(0.0, (objective - self.bound_s) / objective),
            evaluated=evaluated,
            pruned=len(self.costs.batch) - evaluated,
            search_s=self.search_s,
        )


def search(
    model: ModelSpec,
    workload: Workload,
    cluster: ClusterSpec,
    space: Space,
    *,
    time_limit_s: float,
    runner_ups: int = 0,
    on_progress: OnProgress | None = None,
) -> SearchResult:
    """Expand layouts best first, then ``runner_ups`` more combinations of degrees for comparison.

    ``fitting`` is empty when nothing fits, or when the time limit came first.
    """
    start = time.perf_counter()
    costs = SpaceCosts.of(model, workload, cluster, space.batch)
    bound_s, bound_bytes = lower_bounds(costs)
    may_fit = memory.least_required_bytes(bound_bytes, workload, cluster) <= cluster.memory_budget_bytes
    order = np.flatnonzero(may_fit)[np.argsort(bound_s[may_fit], kind="stable")]
    result = SearchResult(costs)
    incumbent, bound = np.inf, np.inf
    for expanded, idx in enumerate(order, start=1):
        bound = float(bound_s[idx])
        if bound >= incumbent * (1 - REL_GAP):
            break
        if time.perf_counter() - start > time_limit_s:
            result.stopped_early = True
            break
        candidate = expand(costs, int(idx), bound_s=bound)
        (result.fitting if candidate.estimate.fits else result.too_large).append(candidate)
        if candidate.estimate.fits:
            incumbent = min(incumbent, candidate.estimate.step_time_s)
        if on_progress:
            on_progress(expanded, None if np.isinf(incumbent) else incumbent, bound)
    else:
        bound = incumbent
    # A split of a layout that was expanded may be faster than the one that was found, down to that layout's own bound.
    result.bound_s = min([bound, incumbent, *(candidate.bound_s for candidate in result.fitting)])
    if result.fitting and not result.stopped_early:
        _expand_runner_ups(result, order, bound_s, runner_ups)
    result.too_large += _nearest_misses(costs, bound_s, bound_bytes, ~may_fit, incumbent)
    result.fitting.sort(key=lambda c: (c.estimate.step_time_s, c.idx))
    result.search_s = time.perf_counter() - start
    return result


def _expand_runner_ups(result: SearchResult, order: IntArray, bound_s: FloatArray, wanted: int) -> None:
    """Expand the most promising layout of each combination of degrees not seen yet, until ``wanted`` more of them fit."""
    batch = result.costs.batch
    seen = {batch.degrees(c.idx) for c in (*result.fitting, *result.too_large)}
    missing = wanted + 1 - len({batch.degrees(c.idx) for c in result.fitting})
    for idx in order:
        if missing <= 0:
            return
        if batch.degrees(int(idx)) not in seen:
            seen.add(batch.degrees(int(idx)))
            candidate = expand(result.costs, int(idx), bound_s=float(bound_s[idx]))
            (result.fitting if candidate.estimate.fits else result.too_large).append(candidate)
            missing -= candidate.estimate.fits


def expand(costs: SpaceCosts, idx: int, *, bound_s: float = 0.0) -> Candidate:
    """Cut the layers of layout ``idx`` into stages and cost them; without memory limits where no split is within them.

    Two cuts are tried: the even one for the pipeline (stage_split's objective), and one that also counts what a stage adds to the
    step once, its exposed communication and its update, spread over the micro-batches. The faster one that fits is taken.

    Args:
        bound_s: of the layout for perfectly balanced stages; the result's bound is raised to the least possible slowest stage.
    """
    fits = _stage_fits(costs, idx, cap_bytes=costs.cluster.memory_budget_bytes)
    busy = costs.per_layer("busy_s", idx)
    even = stage_split.solve(stage_split.Instance(busy, fits))
    if even.status is Status.INFEASIBLE:
        anywhere = stage_split.solve(stage_split.Instance(busy, _stage_fits(costs, idx, cap_bytes=np.inf)))
        return Candidate(idx, anywhere.boundaries, estimate_step(costs, idx, anywhere.boundaries), bound_s)
    pp, m, v = (int(getattr(costs.batch, name)[idx]) for name in ("pp", "num_microbatches", "num_model_chunks"))
    once = stage_split.solve(stage_split.Instance(busy + costs.once_per_layer_s(idx) / m, fits))
    estimates = {cut.boundaries: estimate_step(costs, idx, cut.boundaries) for cut in (even, once)}
    best = min(estimates, key=lambda boundaries: estimates[boundaries].step_time_s)
    # The slowest stage takes at least even.objective_s; the bound had total / pp for it.
    raised = bound_s + (m - 1 / v) * max(0.0, even.objective_s - float(busy.sum()) / pp)
    return Candidate(idx, best, estimates[best], raised)


def _stage_fits(costs: SpaceCosts, idx: int, *, cap_bytes: float) -> NDArray[np.bool_]:
    """FITS [S, L+1, L+1]: the stage has a block, and what it requires is within ``cap_bytes``."""
    pp, size = int(costs.batch.pp[idx]), len(costs.kind_of_layer) + 1
    first, last = np.meshgrid(np.arange(size), np.arange(size), indexing="ij")
    is_block = np.array([isinstance(kind, Block) for kind in costs.kinds])[costs.kind_of_layer]
    blocks = np.concatenate([[0], np.cumsum(is_block)])
    has_block = blocks[last] > blocks[first]
    if np.isinf(cap_bytes):
        return np.broadcast_to(has_block, (pp, size, size))
    contents = contents_between(costs, idx, first, last)
    parts = stage_memory_parts(costs, idx, contents, np.arange(pp)[:, None, None])
    total = np.broadcast_to(memory.total_bytes(parts), (pp, size, size))
    required = memory.required_bytes(total, parts["parameters"], costs.workload, costs.cluster)
    return np.asarray(has_block & (required <= cap_bytes))


def _nearest_misses(
    costs: SpaceCosts, bound_s: FloatArray, bound_bytes: FloatArray, excluded: NDArray[np.bool_], incumbent: float
) -> list[Candidate]:
    """Of the layouts that would be faster and that memory alone excluded, those that lack the least, for the explanation."""
    faster = np.flatnonzero(excluded & (bound_s < incumbent))
    nearest = faster[np.argsort(bound_bytes[faster], kind="stable")][:3]
    return [expand(costs, int(idx), bound_s=float(bound_s[idx])) for idx in nearest]
