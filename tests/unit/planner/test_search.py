"""Stages that fit, the order of the bounds, spaces of the engines; the search stops when told (enumeration: test_exhaustive)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from meshwright.cost_models.stage import memory
from meshwright.cost_models.stage.bounds import ROUGH_ERROR, estimates_s, memory_bounds, uniform_time_bounds
from meshwright.cost_models.stage.capacity import stages_may_fit
from meshwright.cost_models.stage.contents import contents_between, stage_memory_terms
from meshwright.cost_models.stage.step import estimate_step
from meshwright.cost_models.stage.table import CostTable
from meshwright.planner import cuts, expand, plan, search
from meshwright.planner.request import Deadline, PlanRequest
from meshwright.planner.space import Frontier, Pool, build_space
from meshwright.planner.stage_choice import last_layers_that_fit
from meshwright.planner.tasks import training
from meshwright.schema import ClusterSpec, ModelSpec, SolverLimitError, Workload
from meshwright.schema.layers import Block
from small_spaces import random_instance, shortened


@pytest.mark.parametrize("engine", ["fsdp2", "megatron", "deepspeed"])
def test_stages_that_fit_are_those_that_fit_one_by_one(engine: str) -> None:
    spec, cluster = shortened("deepseek-v2-lite", 5), ClusterSpec.parse("4xL40S")
    workload = Workload(seq_len=2048, global_batch_size=16, engine=engine)
    batch = build_space(PlanRequest(spec, cluster, workload, {"pp": 4, "recompute": "none"})).batch
    costs = CostTable.from_layouts(spec, workload, cluster, batch)
    layers = list(spec.iter_layers())
    for idx in range(min(len(batch), 3)):
        spans = [(s, i, j) for s in range(4) for i in range(len(layers)) for j in range(i + 1, len(layers) + 1)]
        s, i, j = np.array(spans).T
        parts = stage_memory_terms(costs, idx, contents_between(costs, idx, i, j), s)
        required = memory.required_by_terms(parts, costs.scenario)
        cap = float(np.median(required))
        fits = cuts.stage_fits(costs, idx, cap_bytes=cap)
        has_block = np.array([any(isinstance(layer, Block) for layer in layers[a:b]) for _, a, b in spans])
        assert np.array_equal(fits[s, i, j], has_block & (required <= cap))


@pytest.mark.parametrize("has_scouts", [False, True])
def test_a_search_that_is_stopped_has_an_honest_bound(has_scouts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_scouts:
        monkeypatch.setattr(search, "MAX_SCOUTS", 0)
    spec, cluster = ModelSpec.named("llama-3.1-8b"), ClusterSpec.parse("2x8xH100-SXM-80GB/ib400")
    workload = Workload(seq_len=4096, global_batch_size=64, engine="megatron")
    space = build_space(PlanRequest(spec, cluster, workload, {"tp_overlap": False}))
    whole = search.search(PlanRequest(spec, cluster, workload), space)
    best_s = whole.feasible[0].estimate.step_time_s
    for wants_incumbent in (False, True):
        deadline = Deadline(600)

        def stop(
            evaluated: int,
            incumbent_s: float | None,
            bound_s: float,
            deadline: Deadline = deadline,
            wants_incumbent: bool = wants_incumbent,
        ) -> None:
            if not wants_incumbent or incumbent_s is not None:
                deadline.stop()

        stopped = search.search(
            PlanRequest(spec, cluster, workload, deadline=deadline, on_progress=stop), space, runner_ups=4
        )
        assert stopped.stopped_early
        assert len(stopped.feasible) == (wants_incumbent or has_scouts)
        assert 0 < stopped.bound_s <= best_s * (1 + 1e-12)
    certificate = stopped.certificate()
    assert certificate.status == "stopped"
    assert certificate.objective_s >= best_s
    assert certificate.gap == pytest.approx(1 - certificate.bound_s / certificate.objective_s)


@pytest.mark.parametrize(
    ("engine", "model", "cluster", "batch_size"),
    [
        ("fsdp2", "llama-3.1-8b", "2x8xH100-SXM-80GB/ib400", 64),
        ("fsdp2", "llama-3.1-70b", "8x8xH100-SXM-80GB/ib400", 128),
        ("megatron", "llama-3.1-70b", "16x8xA100-SXM-80GB/ib200", 512),
        ("fsdp2", "olmoe-1b-7b", "2x4xA100-SXM-40GB/ib200", 64),
        ("deepspeed", "gpt2", "4xL40S", 64),
    ],
)
def test_the_first_layouts_that_are_expanded_are_within_5_percent_of_the_best(
    engine: str, model: str, cluster: str, batch_size: int
) -> None:
    found = []

    def note(evaluated: int, incumbent_s: float | None, bound_s: float) -> None:
        found.append((evaluated, incumbent_s))

    workload = Workload(seq_len=4096, global_batch_size=batch_size, engine=engine)
    request = PlanRequest(ModelSpec.named(model), ClusterSpec.parse(cluster), workload, on_progress=note)
    best_s = search.search(request, build_space(request)).feasible[0].step_time_s
    early = [incumbent_s for evaluated, incumbent_s in found if evaluated <= 4 and incumbent_s is not None]
    assert min(early) <= 1.05 * best_s


@pytest.mark.parametrize("engine", ["fsdp2", "megatron"])
def test_estimates_are_near_what_layouts_take_and_need(engine: str) -> None:
    """Of layouts with several stages: they say what is tried first, and what is not worth cutting into stages."""
    spec, cluster = ModelSpec.named("llama-3.1-8b"), ClusterSpec.parse("2x8xH100-SXM-80GB/ib400")
    request = PlanRequest(spec, cluster, Workload(seq_len=4096, global_batch_size=128, engine=engine))
    costs = Pool(request, build_space(request)).costs
    pp, recompute, by_halves = costs.layouts.pp, costs.layouts.recompute, costs.layouts.tp_halves
    rows = np.flatnonzero((pp > 1) & (pp <= 8) & (recompute == 0) & (by_halves == 0))
    costs = costs.select(rows[:: max(len(rows) // 60, 1)]).compacted()
    bound_s = uniform_time_bounds(costs)
    estimate_s, ratios, num_missed = estimates_s(costs, bound_s), [], 0
    assert np.all(estimate_s >= bound_s)
    for idx, estimated_s in enumerate(estimate_s.tolist()):
        candidate = expand.expand_fitting(costs, idx)
        if candidate is not None:
            num_missed += not np.isfinite(estimated_s)
            ratios += [candidate.step_time_s / estimated_s] if np.isfinite(estimated_s) else []
    assert len(ratios) > 20 and num_missed <= 1  # what fits seems to fit: the mean of ranks is rough
    assert min(ratios) > 1 - ROUGH_ERROR
    assert np.median(ratios) < 1.05


def test_a_large_space_that_is_not_even_enumerated_in_time_has_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, cluster = shortened("mixtral-8x7b", 4), ClusterSpec.parse("32x8xH100-SXM-80GB/ib400")
    workload = Workload(seq_len=4096, global_batch_size=512, engine="megatron")
    whole = plan(spec, cluster, workload)

    def out_of_time(request: PlanRequest) -> None:
        raise SolverLimitError("the time limit came while enumerating")

    monkeypatch.setattr(training, "build_space", out_of_time)
    early = plan(spec, cluster, workload)
    assert early.search is not None
    assert whole.search is not None
    assert (early.search.status, early.search.bound_s) == ("stopped", 0.0)
    assert early.estimate.fits
    assert early.search.objective_s <= 1.1 * whole.search.objective_s
    with pytest.raises(SolverLimitError):  # of a small space there is no part that is much smaller
        plan(spec, ClusterSpec.parse("8xH100-SXM-80GB"), workload)


@pytest.mark.long
def test_scouts_change_neither_the_answer_nor_what_is_expanded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "REL_GAP", 0.0)
    for seed in range(0, 48, 3):
        spec, workload, cluster, space = random_instance(seed)
        request, rows = PlanRequest(spec, cluster, workload), list[int]()

        def counted(
            costs: CostTable, idx: int, bound_s: float, below_s: float, rows: list[int] = rows
        ) -> expand.Candidate | None:
            rows.append(idx)
            return expand.expand_fitting(costs, idx, bound_s=bound_s, below_s=below_s)

        with monkeypatch.context() as patched:
            patched.setattr(search, "expand_fitting", counted)
            found = search.search(request, space)
            patched.setattr(search, "MAX_SCOUTS", 0)
            plain = search.search(request, space)
        assert len(rows) <= found.evaluated + plain.evaluated, seed
        assert found.evaluated <= len(space), seed
        assert bool(found.feasible) == bool(plain.feasible), seed
        if plain.feasible:
            assert found.feasible[0].estimate == plain.feasible[0].estimate, seed
            assert len({candidate.idx for candidate in found.feasible}) == len(found.feasible), seed
            assert found.bound_s == pytest.approx(plain.bound_s, rel=1e-9), seed


@pytest.mark.parametrize("pieces", [0, 5, 12, 18])
def test_a_deadline_that_comes_before_any_bound_is_a_clear_error(pieces: int) -> None:
    """Wherever it comes: while enumerating, checking rules, costing or bounding."""

    class After(Deadline):
        left = pieces

        def require(self, doing: str) -> None:
            if After.left == 0:
                self.stop()
            After.left -= 1
            super().require(doing)

    spec, cluster = ModelSpec.named("llama-3.1-8b"), ClusterSpec.parse("8xH100-SXM-80GB")
    with pytest.raises(SolverLimitError, match="before any layout that fits was found"):
        plan(spec, cluster, Workload(seq_len=4096, global_batch_size=64), deadline=After(600))


def test_layouts_come_in_the_order_of_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, workload, cluster, _ = random_instance(3)
    monkeypatch.setattr("meshwright.planner.space.MIN_GROWTH", 7)
    monkeypatch.setattr("meshwright.planner.space.GROWTH_FRACTION", 0.1)
    monkeypatch.setattr("meshwright.planner.space.BLOCK", 5)
    layouts = Pool(PlanRequest(spec, cluster, workload), build_space(PlanRequest(spec, cluster, workload)))
    waiting, order = Frontier(layouts), []
    while np.isfinite(bound := waiting.bound_s):
        if waiting.is_ready:
            order.append((bound, waiting.pop()))
        else:
            waiting.bound_block()
    costs = layouts.costs
    fits = memory.lower_bound_required_bytes(memory_bounds(costs), costs.scenario) <= cluster.memory_budget_bytes
    assert sorted(row for _, row in order) == list(np.flatnonzero(fits))
    assert [bound for bound, _ in order] == sorted(bound for bound, _ in order)
    assert [bound for bound, _ in order] == [uniform_time_bounds(costs)[row] for _, row in order]


def test_megatron_finds_what_our_runtime_cannot_do() -> None:
    """More axes can only help where costs are the same engine's; the plan says whom it is for."""
    spec, cluster = ModelSpec.named("mixtral-8x7b"), ClusterSpec.parse("2x8xH100-SXM-80GB/ib400")
    workload = Workload(seq_len=4096, global_batch_size=64, engine="megatron")
    free = plan(spec, cluster, workload)
    narrow = plan(spec, cluster, workload, fixed={"cp": 1, "ep": 1, "etp": 1, "num_model_chunks": 1})
    assert free.search.bound_s <= narrow.search.bound_s * (1 + 1e-9)
    assert any("for megatron" in note for note in free.notes)
    assert not any("experts are split over tp only" in note for note in free.notes)


def test_chunks_of_a_plan_have_the_blocks_of_their_rank() -> None:
    spec, cluster = ModelSpec.named("llama-3.1-405b"), ClusterSpec.parse("512xH100-SXM-80GB")
    workload = Workload(seq_len=8192, global_batch_size=256, engine="megatron")
    fixed = {"tp": 8, "pp": 16, "cp": 1, "num_model_chunks": 4}
    found = plan(spec, cluster, workload, fixed=fixed)
    blocks = [sum(1 <= idx <= 126 for idx in stage.layer_idxs) for stage in found.stages]
    assert len(blocks) == 64
    assert min(blocks) >= 1
    assert sum(blocks) == 126
    assert found.stages[0].num_layers == blocks[0] + 1  # the embedding
    assert found.stages[-1].num_layers == blocks[-1] + 1  # the head
    on_rank = [sum(blocks[rank::16]) for rank in range(16)]
    assert max(on_rank) - min(on_rank) <= 2
    assert len(found.estimate.stages) == 16


@pytest.mark.parametrize("engine", ["megatron", "deepspeed"])
def test_no_split_beats_the_bound_of_an_expanded_layout(engine: str) -> None:
    """Slow links, so that what a stage adds once counts; brute force over all cuts whose chunks are alike."""
    spec, cluster = shortened("deepseek-v2-lite", 7), ClusterSpec.parse("6x1xA100-SXM-80GB/eth10")
    workload = Workload(seq_len=1024, global_batch_size=24, engine=engine)
    batch = build_space(PlanRequest(spec, cluster, workload, {"pp": 3, "recompute": "selective"})).batch
    costs = CostTable.from_layouts(spec, workload, cluster, batch)
    for idx in range(0, len(batch), max(len(batch) // 8, 1)):
        candidate = expand.expand(costs, idx)
        if not candidate.estimate.fits:
            continue
        cuts = all_cuts(spec.num_blocks, int(batch.num_model_chunks[idx]))
        times = [estimate for cut in cuts if (estimate := estimate_step(costs, idx, cut)).fits]
        assert min(estimate.step_time_s for estimate in times) >= candidate.bound_s * (1 - 1e-9)


def all_cuts(num_blocks: int, chunks: int) -> list[tuple[int, ...]]:
    """Boundaries of three ranks' stages between an embedding and a head."""
    inner = itertools.combinations(range(2, num_blocks + 1), 3 * chunks - 1)
    cuts = [(0, *cut, num_blocks + 2) for cut in inner]
    blocks = [np.diff([1, *cut[1:-1], num_blocks + 1]).reshape(chunks, 3) for cut in cuts]
    return [cut for cut, of_stage in zip(cuts, blocks, strict=True) if np.all(np.ptp(of_stage, axis=0) <= 1)]


@pytest.mark.parametrize(
    ("model", "engine"), [("llama-3.2-1b", "megatron"), ("qwen3-30b-a3b", "megatron"), ("llama-3.2-1b", "fsdp2")]
)
def test_ranks_that_cannot_hold_all_blocks_have_no_split(model: str, engine: str) -> None:
    """Also where the mean of the ranks would fit: the first ones hold more micro-batches than the last."""
    spec, nodes = ModelSpec.named(model), ClusterSpec.parse("2x8xH100-SXM-80GB/ib400")
    workload = Workload(seq_len=4096, global_batch_size=64, engine=engine)
    fixed = {"cp": 1, "gradients": "fp32"} if engine == "megatron" else {"cp": 1, "recompute": "none"}
    batch = build_space(PlanRequest(spec, nodes, workload, fixed)).batch
    rows = np.flatnonzero(batch.pp > 2)
    costs = CostTable.from_layouts(spec, workload, nodes, batch.select(rows[:: max(1, len(rows) // 400)]))
    allocated = np.sort(memory_bounds(costs))
    allocated = allocated[allocated < nodes.memory_budget_bytes]
    num_seen = 0
    for budget in (int(allocated[int(part * len(allocated))]) for part in (0.3, 0.6, 0.9)):
        within = costs.with_budget(budget)
        may_fit = stages_may_fit(within)
        passed = memory.lower_bound_required_bytes(memory_bounds(within), within.scenario) <= budget
        num_seen += np.count_nonzero(passed & ~may_fit)
        assert may_fit.any()
        for idx in np.flatnonzero(~may_fit)[::9]:
            assert expand.expand_fitting(within, int(idx)) is None, within.layouts.layout(int(idx))
    assert num_seen > 10


@pytest.mark.parametrize("seed", range(40))
def test_the_longest_span_that_fits_is_that_of_trying_every_end(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size, stages = int(rng.integers(2, 140)), int(rng.integers(1, 20))
    layers = rng.random((stages, size - 1)) * rng.choice([0, 1], (stages, size - 1))
    before, cap = np.pad(np.cumsum(layers, axis=1), ((0, 0), (1, 0))), rng.random((stages, 1)) * size / 2
    stage = np.arange(stages)[:, None]
    last = last_layers_that_fit((stages,), size, lambda i, j: before[stage, j] - before[stage, i] <= cap)
    fits = before[:, None, :] - before[:, :, None] <= cap[:, :, None]
    ends = np.arange(size)
    expected = np.where(fits & (ends >= ends[:, None]), ends, ends[:, None]).max(axis=-1)
    np.testing.assert_array_equal(last, expected)
