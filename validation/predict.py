"""From a row to what we say about it: model, cluster, workload and layout, or why not; and the estimates of many rows.

Other engines' runs need not satisfy schema/layout_rules.py, which is about what our runtime executes. Where a row does not
state a choice, a default of its framework is assumed (data/frameworks.toml, each with its source). Where the cost model
lacks a feature, the nearest layout it has stands in and the row names the approximation (APPROXIMATIONS), or the row is
skipped (SKIPS). Rows that share model, cluster and workload are estimated as one batch of layouts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..cost_models.coefficients import Coefficients, Scenario
from ..cost_models.stage.interval import widened
from ..cost_models.stage.parts import compute_parts
from ..cost_models.stage.step import estimate_step, with_memory
from ..cost_models.stage.table import CostTable
from ..schema import Calibration, ClusterSpec, ConfigError, Layout, ModelSpec, TrainingEstimate, Workload
from ..schema.layers import Embedding
from ..schema.layout_table import LayoutTable
from ..solvers.stages import splits
from .clusters import DRIVE_BYTES_PER_S, cluster_of, with_drives
from .layouts import (
    base_precision,
    has_known_engine,
    layout_of,
    num_chunks,
    offload_of,
    stage_layouts,
    with_switches,
    workload_of,
)
from .models import model_of, untied
from .noted import completed_degrees, stage_cuts, stages_differ_in_devices
from .rows import FrameworkDefaults, RunRow
from .throughput import measured_step_s

SKIPS: tuple[tuple[str, Callable[[RunRow], bool]], ...] = (
    ("mapping: stages have different numbers of devices", stages_differ_in_devices),
    ("precision not known", lambda row: base_precision(row) is None),
    ("mapping: sequence length not stated", lambda row: row.seq_len is None),
)
"""Reason and condition; a feature that the cost model learns loses its line here."""

APPROXIMATIONS: tuple[tuple[str, Callable[[RunRow], bool]], ...] = (
    # Prefix or scales as an adapter of rank 1.
    ("adapter", lambda row: row.task.startswith(("adapter", "finetune-peft"))),
    # A zero-bubble schedule as interleaved chunks.
    ("schedule", lambda row: not row.vpp.isdigit() and num_chunks(row) > 1),
    # As the same fraction of the blocks.
    ("recompute by operator", lambda row: row.recompute_class == "custom"),
    # As nvfp4.
    ("mxfp4", lambda row: "mxfp4" in row.precision_class.lower()),
    # At the rate of fp8.
    ("mxfp8", lambda row: row.precision_class == "mxfp8"),
)
"""Name and condition of what stands in for something else."""

DECISIVE = ("precision=", "micro_batch=", "vocab")
"""Assumptions for which intervals are wider; other defaults of a framework are what runs use."""


@dataclass(frozen=True)
class RunInputs:
    """A row as nouns.

    Attributes:
        balanced_stages: stages are cut by cost; otherwise every stage has the same number of blocks.
        stage_cuts: where stages begin and end, as far as the row says it.
        stage_layouts: where stages recompute or offload different fractions, the layout of each; `layout` has their mean.
        assumed: choices the row does not state, as "name=value".
        approximated: features that something nearby stands in for.
        has_known_engine: the table, or what is known of the framework, says whose kernels and host code ran.
        measured_s: seconds of the measured step; None where the row does not say it.
    """

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    layout: Layout
    balanced_stages: bool
    stage_cuts: tuple[int, ...] = ()
    stage_layouts: tuple[Layout, ...] = ()
    assumed: tuple[str, ...] = ()
    approximated: tuple[str, ...] = ()
    has_known_engine: bool = True
    measured_s: float | None = None

    @property
    def doubts(self) -> dict[str, bool]:
        """Return which causes of error this row has besides those of its prediction (`interval.CAUSES`).

        unstated: something stands in for what ran, or a choice that decides the time is assumed; framework: nobody knows it.
        """
        is_vague = bool(self.approximated) or any(choice.startswith(DECISIVE) for choice in self.assumed)
        return {"unstated": is_vague, "framework": not self.has_known_engine}


def run_inputs(row: RunRow) -> RunInputs | str:
    """Return what the estimator needs for a row, or why it cannot have it."""
    completed = completed_degrees(row)
    known = row if isinstance(completed, str) else completed[0]
    reason = next((reason for reason, applies in SKIPS if applies(known)), None)
    if reason is not None or isinstance(completed, str):
        return reason or str(completed)
    stated_micro_batch, (row, derived) = row.micro_batch, completed
    if isinstance(model := model_of(row), str):
        return model
    if isinstance(cluster := cluster_of(row), str):
        return cluster
    device, defaults = cluster.weakest_device, FrameworkDefaults(row)
    if defaults.value("head") == "untied":
        model = model._replace(spec=untied(model.spec))
    defaults.assumed += [*model.assumed, *derived]
    try:
        layout = layout_of(row, model.spec, defaults)
        workload = workload_of(row, model.spec, layout, defaults, device)
        layout = with_switches(layout, row, model.spec, workload, defaults, has_graphs=device.vendor == "nvidia")
    except ConfigError as error:
        return f"layout: {error.message}"
    if workload.global_batch_size % (layout.dp * layout.micro_batch_size):
        return "layout: batch does not divide"
    if layout.world_size != cluster.num_devices:
        return "layout: degrees do not multiply to the number of devices"
    if layout.stage_ranks % (layout.ep * layout.expert_tp):
        return "layout: experts do not divide over the ranks of a stage"
    num_drives = offload_of(row).num_drives
    return RunInputs(
        model=model.spec,
        cluster=with_drives(cluster, num_drives * DRIVE_BYTES_PER_S) if num_drives else cluster,
        workload=workload,
        layout=layout,
        balanced_stages=defaults.value("balanced_stages") or row.recompute_class == "custom",
        stage_cuts=stage_cuts(row),
        stage_layouts=stage_layouts(row, layout),
        assumed=tuple(defaults.assumed),
        approximated=(*model.approximated, *(name for name, applies in APPROXIMATIONS if applies(row))),
        has_known_engine=has_known_engine(row, layout, defaults),
        measured_s=measured_step_s(replace(row, micro_batch=stated_micro_batch), model.spec, workload, layout, device),
    )


@dataclass(frozen=True)
class Prediction:
    """What we say about a row: an estimate, or why there is none."""

    inputs: RunInputs | None
    estimate: TrainingEstimate | None
    skipped: str | None

    @property
    def measured_s(self) -> float | None:
        """Seconds of the measured step, where the row says them and the row was predicted."""
        return self.inputs.measured_s if self.inputs is not None and self.estimate is not None else None


def predict(
    rows: Sequence[RunRow], calibrations: Mapping[str, Callable[[RunInputs], Calibration]] | None = None
) -> list[Prediction]:
    """Return one prediction per row, in order; ``calibrations`` by name of the device give that of its runs."""

    def calibration_of(run: RunInputs) -> Calibration | None:
        of_run = (calibrations or {}).get(run.cluster.weakest_device.name)
        return None if of_run is None else of_run(run)

    inputs = [run_inputs(row) for row in rows]
    known = with_calibrations([run for run in inputs if not isinstance(run, str)], calibration_of)
    estimated = iter(zip(known, estimate_runs(known), strict=True))
    predictions = []
    for run_or_reason in inputs:
        run, answer = (None, run_or_reason) if isinstance(run_or_reason, str) else next(estimated)
        estimate, skipped = (None, answer) if isinstance(answer, str) else (answer, None)
        predictions.append(Prediction(run, estimate, skipped))
    return predictions


def with_calibrations(
    runs: Sequence[RunInputs], calibration_of: Callable[[RunInputs], Calibration | None]
) -> list[RunInputs]:
    """Return runs on clusters that carry their calibration; equal clusters of equal calibration stay one object."""
    clusters: dict[tuple[int, Calibration], ClusterSpec] = {}
    calibrated = []
    for run in runs:
        calibration = calibration_of(run)
        if calibration is not None:
            key = id(run.cluster), calibration
            if key not in clusters:
                clusters[key] = run.cluster.replace(calibration=calibration)
            run = replace(run, cluster=clusters[key])
        calibrated.append(run)
    return calibrated


def estimate_runs(runs: Sequence[RunInputs], coefficients: Coefficients | None = None) -> list[TrainingEstimate | str]:
    """Return an estimate of each run, or why the cost model has none; ``coefficients`` stand for the packaged ones."""
    batches: dict[object, list[int]] = defaultdict(list)
    for idx, run in enumerate(runs):
        batches[(id(run.model), id(run.cluster), run.workload)].append(idx)
    estimates: dict[int, TrainingEstimate | str] = {}
    for members in batches.values():
        estimates.update(zip(members, _estimate_batch([runs[idx] for idx in members], coefficients), strict=True))
    return [estimates[idx] for idx in range(len(runs))]


def _estimate_batch(runs: Sequence[RunInputs], coefficients: Coefficients | None) -> list[TrainingEstimate | str]:
    first = runs[0]
    try:
        layouts = LayoutTable.from_layouts([run.layout for run in runs], first.workload.global_batch_size)
        costs = CostTable.from_layouts(first.model, first.workload, first.cluster, layouts, coefficients=coefficients)
    except ConfigError as error:
        return [f"estimate: {error.message}"] * len(runs)
    return [_estimate_or_reason(costs, idx, run) for idx, run in enumerate(runs)]


def _estimate_or_reason(costs: CostTable, idx: int, inputs: RunInputs) -> TrainingEstimate | str:
    try:
        return _estimate(costs, idx, inputs)
    except ConfigError as error:  # sizes that no byte count holds
        return f"estimate: {error.message.splitlines()[0]}"


def _cuts(costs: CostTable, idx: int, inputs: RunInputs) -> tuple[int, ...]:
    """Return where stages begin and end: as the row says, else as its engine cuts them."""
    stated = inputs.stage_cuts
    is_complete = bool(stated) and stated[-1] == len(costs.kind_of_layer)
    return stated if is_complete else boundaries(costs, idx, balanced=inputs.balanced_stages)


def step_parts_of_run(inputs: RunInputs) -> dict[str, float]:
    """Return the seconds of each part of a run's step by name, as `planner.step_parts.step_parts` does of a plan's."""
    layouts = LayoutTable.from_layouts([inputs.layout], inputs.workload.global_batch_size)
    costs = CostTable.from_layouts(inputs.model, inputs.workload, inputs.cluster, layouts)
    cuts = _cuts(costs, 0, inputs)
    terms = estimate_step(costs, 0, cuts).breakdown_s
    others = {name: getattr(terms, name) for name in type(terms).model_fields if name != "compute"}
    return compute_parts(costs, 0, cuts)._asdict() | others


def _estimate(costs: CostTable, idx: int, inputs: RunInputs) -> TrainingEstimate:
    cuts = _cuts(costs, idx, inputs)
    estimate = estimate_step(costs, idx, cuts)
    if not inputs.stage_layouts:
        return _with_doubts(estimate, inputs, costs.scenario)
    # Memory is that of the fullest stage, each under its layout.
    layouts = LayoutTable.from_layouts(list(inputs.stage_layouts), inputs.workload.global_batch_size)
    stage_costs = costs.evaluate(layouts)
    stages = [estimate_step(stage_costs, s, cuts).stages[s] for s in range(len(inputs.stage_layouts))]
    fullest = max(stages, key=lambda stage: stage.memory_bytes.total)
    estimate = with_memory(estimate, fullest.memory_bytes, costs.scenario)
    return _with_doubts(estimate, inputs, costs.scenario)


def _with_doubts(estimate: TrainingEstimate, inputs: RunInputs, scenario: Scenario) -> TrainingEstimate:
    """Return the estimate with intervals as wide as what is not known of the row makes them."""
    c, time, peak = scenario.coefficients["interval"], estimate.step_time_interval_s, estimate.memory_interval_bytes
    for doubt in (name for name, has_it in inputs.doubts.items() if has_it):
        time = widened(time, estimate.step_time_s, c["time"]["width"][doubt], c["time"]["skew"])
        peak = widened(peak, estimate.peak_allocated_bytes, c["memory"][doubt])
    return estimate.replace(step_time_interval_s=time, memory_interval_bytes=peak)


def boundaries(costs: CostTable, idx: int, *, balanced: bool) -> tuple[int, ...]:
    """Cut stages as the engine that ran does: at equal weights, or as many blocks on each with embedding and head on top.

    Where the blocks do not divide, embedding and head count as a layer each (as recipes for such models do), else by cost.
    """
    pp, num_blocks, size = int(costs.layouts.pp[idx]), costs.model.num_blocks, len(costs.kind_of_layer)
    if pp == 1:
        return (0, size)
    if num_blocks < pp:  # some stages have no block
        return tuple(-(-s * size // pp) for s in range(pp + 1))
    if balanced and costs.workload.engine == "nanotron":
        return _by_thresholds(costs, pp)
    if num_blocks % pp == 0 and not balanced:
        each = num_blocks // pp
        return (0, *(1 + each * s for s in range(1, pp)), size)
    if size % pp == 0 and not balanced:
        return tuple(range(0, size + 1, size // pp))
    is_block = np.array([kind.is_block for kind in costs.kinds])[costs.kind_of_layer]
    blocks = np.concatenate([[0], np.cumsum(is_block)])
    has_block = np.broadcast_to(blocks[None, :] > blocks[:, None], (pp, size + 1, size + 1))
    return splits.solve_stages(splits.StageSplitInstance(costs.per_layer("busy_s", idx), has_block)).choice or ()


def _by_thresholds(costs: CostTable, pp: int) -> tuple[int, ...]:
    """Cut as nanotron does: a stage ends with the layer that takes the weights of all before it above (s + 1) / pp of the total.

    An embedding weighs nothing, a tied head what it multiplies with. Source: nanotron, PipelineParallel build_model and
    get_block_compute_costs.
    """
    model = costs.model
    weights = [
        0 if isinstance(layer, Embedding)
        else model.vocab_size * model.hidden_dim if layer.is_head
        else layer.num_params(model.hidden_dim)
        for layer in model.iter_layers()
    ]  # fmt: skip
    before = np.cumsum(weights)
    cuts, stage = [0], 0
    for layer_idx, total in enumerate(before[:-1]):
        if stage < pp - 1 and total > before[-1] * (stage + 1) / pp:
            cuts.append(layer_idx + 1)
            stage += 1
    return (*cuts, len(weights))
