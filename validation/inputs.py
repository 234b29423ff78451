"""A row as our nouns: model, cluster, workload, layout; or why not.

Other engines' runs need not satisfy schema/runnable.py, which is about what our own runtime executes. Where a row does not
state a choice, a default of its framework is assumed (one table per choice, each with its reason). Where the cost model
lacks a feature, the nearest layout it has stands in and the row names the approximation (APPROXIMATE), or the row is
skipped (SKIP).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..schema import ClusterSpec, ConfigError, Layout, ModelSpec, Workload
from .clusters import cluster_of, with_drives
from .defaults import BALANCED_STAGES, CUDA_GRAPHS, PRECISIONS, Assumed, default_of
from .features import DRIVE_BYTES_PER_S, base_precision, differs_by_stage, num_chunks, offload_of, stage_cuts
from .layouts import layout_of, stage_layouts
from .mapping import completed_mapping
from .models import model_of
from .rows import RunRow
from .workloads import workload_of

SKIP: tuple[tuple[str, Callable[[RunRow], bool]], ...] = (
    ("mapping: stages have different numbers of devices", differs_by_stage),
    ("precision not known", lambda r: base_precision(r) not in ("", "unknown", *PRECISIONS)),
    ("mapping: sequence length not stated", lambda r: r.seq_len is None),
)
"""Reason and condition; a feature that the cost model learns loses its line here (and gains one in layouts.py)."""

APPROXIMATE: tuple[tuple[str, Callable[[RunRow], bool]], ...] = (
    ("adapter", lambda r: r.task.startswith(("adapter", "finetune-peft"))),  # prefix or scales as an adapter of rank 1
    # a zero-bubble schedule as two interleaved chunks
    ("schedule", lambda r: not r.vpp.isdigit() and num_chunks(r) > 1),
    ("recompute by operator", lambda r: r.recompute_class == "custom"),  # as the same part of the blocks
    ("mxfp4", lambda r: "mxfp4" in r.precision_class.lower()),  # as nvfp4
    ("mxfp8", lambda r: r.precision_class == "mxfp8"),  # the rate of fp8
)
"""Name and condition of what stands in for something else."""


@dataclass(frozen=True)
class Skip:
    """Why a row cannot be predicted."""

    reason: str


@dataclass(frozen=True)
class RunInputs:
    """A row as nouns.

    Attributes:
        balanced_stages: stages are cut by cost; otherwise every stage has the same number of blocks.
        stage_cuts: where stages begin and end, as far as the row says it.
        stage_layouts: where stages recompute or offload different parts, the layout of each; `layout` has their mean.
        assumed: choices the row does not state, as "name=value".
        approximated: features that something nearby stands in for.
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


def run_inputs(row: RunRow) -> RunInputs | Skip:
    """What the estimator needs for a row, or why it cannot have it."""
    reason = next((reason for reason, applies in SKIP if applies(row)), None)
    if reason is not None:
        return Skip(reason)
    completed = completed_mapping(row)
    if isinstance(completed, str):
        return Skip(completed)
    row, derived = completed
    model, cluster = model_of(row), cluster_of(row)
    if isinstance(model, str):
        return Skip(model)
    if isinstance(cluster, str):
        return Skip(cluster)
    assumed = Assumed(row.framework, [*model.assumed, *derived])
    try:
        layout = layout_of(row, model.spec, assumed)
        has_bf16 = cluster.spec.weakest_device.peak_flops_per_s.bf16 is not None
        workload = workload_of(row, model.spec, layout, assumed, has_bf16=has_bf16)
        is_nvidia = cluster.spec.weakest_device.vendor == "nvidia"
        workload = workload.replace(cuda_graphs=is_nvidia and default_of(row.framework, CUDA_GRAPHS))
        layout.num_microbatches(workload.global_batch_size)
    except ConfigError as error:
        return Skip(
            "layout: batch does not divide" if "multiple of dp" in error.message else f"layout: {error.message}"
        )
    if layout.world_size != cluster.spec.num_devices:
        return Skip("layout: degrees do not multiply to the number of devices")
    if layout.stage_ranks % (layout.ep * layout.expert_tp):
        return Skip("layout: experts do not divide over the ranks of a stage")
    approximated = tuple(name for name, applies in APPROXIMATE if applies(row))
    return RunInputs(
        model=model.spec,
        cluster=_with_storage(cluster.spec, row),
        workload=workload,
        layout=layout,
        balanced_stages=default_of(row.framework, BALANCED_STAGES) or row.recompute_class == "custom",
        stage_cuts=stage_cuts(row),
        stage_layouts=stage_layouts(row, layout),
        assumed=tuple(assumed.taken),
        approximated=(*model.approximated, *cluster.approximated, *approximated),
    )


def _with_storage(cluster: ClusterSpec, row: RunRow) -> ClusterSpec:
    drives = offload_of(row).num_drives
    return with_drives(cluster, drives * DRIVE_BYTES_PER_S) if drives else cluster
