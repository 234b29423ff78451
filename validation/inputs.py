"""A row as our nouns: model, cluster, workload, layout; or why not.

Other engines' runs need not satisfy schema/runnable.py, which is about what our runtime executes. Where a row does not
state a choice, a default of its framework is assumed (data/frameworks.toml, each with its source). Where the cost model
lacks a feature, the nearest layout it has stands in and the row names the approximation (APPROXIMATIONS), or the row is
skipped (SKIPS).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..schema import ClusterSpec, ConfigError, Layout, ModelSpec, Workload
from .clusters import cluster_of, with_drives
from .layouts import (
    DRIVE_BYTES_PER_S,
    completed_degrees,
    layout_of,
    num_chunks,
    offload_of,
    stage_cuts,
    stage_layouts,
    stages_differ_in_devices,
)
from .models import model_of
from .rows import FrameworkDefaults, RunRow
from .workloads import PRECISIONS, base_precision, workload_of

SKIPS: tuple[tuple[str, Callable[[RunRow], bool]], ...] = (
    ("mapping: stages have different numbers of devices", stages_differ_in_devices),
    ("precision not known", lambda row: base_precision(row) not in ("", "unknown", *PRECISIONS)),
    ("mapping: sequence length not stated", lambda row: row.seq_len is None),
)
"""Reason and condition; a feature that the cost model learns loses its line here."""

APPROXIMATIONS: tuple[tuple[str, Callable[[RunRow], bool]], ...] = (
    (
        "adapter",
        lambda row: row.task.startswith(("adapter", "finetune-peft")),
    ),  # prefix or scales as an adapter of rank 1
    (
        "schedule",
        lambda row: not row.vpp.isdigit() and num_chunks(row) > 1,
    ),  # a zero-bubble schedule as interleaved chunks
    ("recompute by operator", lambda row: row.recompute_class == "custom"),  # as the same fraction of the blocks
    ("mxfp4", lambda row: "mxfp4" in row.precision_class.lower()),  # as nvfp4
    ("mxfp8", lambda row: row.precision_class == "mxfp8"),  # the rate of fp8
)
"""Name and condition of what stands in for something else."""


@dataclass(frozen=True)
class RunInputs:
    """A row as nouns.

    Attributes:
        balanced_stages: stages are cut by cost; otherwise every stage has the same number of blocks.
        stage_cuts: where stages begin and end, as far as the row says it.
        stage_layouts: where stages recompute or offload different fractions, the layout of each; `layout` has their mean.
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


def run_inputs(row: RunRow) -> RunInputs | str:
    """Return what the estimator needs for a row, or why it cannot have it."""
    reason = next((reason for reason, applies in SKIPS if applies(row)), None)
    if reason is not None:
        return reason
    completed = completed_degrees(row)
    if isinstance(completed, str):
        return completed
    row, derived = completed
    model, cluster = model_of(row), cluster_of(row)
    if isinstance(model, str):
        return model
    if isinstance(cluster, str):
        return cluster
    device, defaults = cluster.weakest_device, FrameworkDefaults(row.framework)
    defaults.assumed += [*model.assumed, *derived]
    try:
        layout = layout_of(row, model.spec, defaults)
        has_bf16 = device.peak_flops_per_s.bf16 is not None
        workload = workload_of(row, model.spec, layout, defaults, has_bf16=has_bf16)
        workload = workload.replace(cuda_graphs=device.vendor == "nvidia" and defaults.value("cuda_graphs"))
        layout.num_microbatches(workload.global_batch_size)
    except ConfigError as error:
        return f"layout: {'batch does not divide' if 'multiple of dp' in error.message else error.message}"
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
    )
