"""A configuration of torchtitan as a layout: the Python modules of 0.3 and the TOML files of 0.1 and 0.2."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from ..schema.base import shown
from ..schema.errors import ConfigError
from ..schema.layout import Layout, Recompute
from .documents import Imported, divided, whole
from .torchtitan import PRECISION, SCHEDULES


def read_module(text: str, num_devices: int | None) -> Imported:
    """A Python module whose function assigns ``config.section.name = literal``; nothing of it is run.

    Raises:
        ConfigError: it is not Python, or has no such assignment.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"not a Python module: {error}") from None
    try:
        return read(_assigned(tree), num_devices)
    except (RecursionError, MemoryError):
        raise ConfigError("not a configuration: its expressions are nested too deeply") from None


def _assigned(tree: ast.Module) -> dict[str, dict[str, Any]]:
    """Section -> name -> literal of the assignments to ``config``."""
    content: dict[str, dict[str, Any]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        path = ast.unparse(node.targets[0]).split(".")
        if path[0] != "config" or len(path) not in (2, 3):
            continue
        if path[1] == "activation_checkpoint":
            kind = ast.unparse(node.value)
            mode = "full" if kind.startswith("FullAC") else "selective" if kind.startswith("SelectiveAC") else "none"
            content["activation_checkpoint"] = {"mode": mode}
        elif len(path) == 3:
            try:
                content.setdefault(path[1], {})[path[2]] = ast.literal_eval(node.value)
            except (ValueError, TypeError):  # no literal; a dictionary with a list as a key
                continue
    return content


def read(content: Mapping[str, Any], num_devices: int | None) -> Imported:
    """The tables of a TOML file.

    Raises:
        ConfigError: the number of devices is unknown, or the numbers do not fit together.
    """
    training, axes, checkpoint = (
        content.get(name) or {} for name in ("training", "parallelism", "activation_checkpoint")
    )
    if not all(isinstance(section, Mapping) for section in (training, axes, checkpoint)) or not axes:
        raise ConfigError("no [parallelism] of torchtitan was found", help="e.g. tensor_parallel_degree = 8")

    def degree(name: str) -> int:
        return whole(axes.get(f"{name}_degree", 1), f"parallelism.{name}_degree")

    tp, cp, pp = (degree(f"{axis}_parallel") for axis in ("tensor", "context", "pipeline"))
    replicate = degree("data_parallel_replicate")
    shard = axes.get("data_parallel_shard_degree", -1)
    if num_devices is None:
        if shard == -1:
            raise ConfigError(
                "data_parallel_shard_degree -1 takes the devices that are left", help="give --num-devices"
            )
        num_devices = tp * cp * pp * replicate * whole(shard, "data_parallel_shard_degree")
    left = divided(num_devices, tp=tp, cp=cp, pp=pp, dp_replicate=replicate)
    if shard != -1 and left != whole(shard, "data_parallel_shard_degree"):
        raise ConfigError(f"data_parallel_shard_degree {shard}: {num_devices} devices leave {left}")
    schedule, chunks, assumed = _schedule(axes, pp)
    micro, batch = _batches(training, axes, pp, replicate * left)
    zero: Any = {"always": 3, "never": 2 if pp == 1 else 1}.get(
        str(axes.get("fsdp_reshard_after_forward", "default")), 3 if pp == 1 else 1
    )
    layout = Layout(
        tp=tp, cp=cp, pp=pp, dp_replicate=replicate, dp_shard=left, ep=degree("expert_parallel"),
        micro_batch_size=micro, schedule=schedule, num_model_chunks=chunks, zero_stage=zero if left * cp > 1 else 0,
        recompute=_recompute(checkpoint),
        sequence_parallel=tp > 1 and bool(axes.get("enable_sequence_parallel", not axes.get("disable_sequence_parallel"))),
        offload="parameters" if training.get("enable_cpu_offload") else "none",
    )  # fmt: skip
    known = ("training", "parallelism", "activation_checkpoint")
    return Imported(
        engine="torchtitan",
        layout=layout,
        num_devices=num_devices,
        global_batch_size=batch,
        seq_len=whole(training["seq_len"], "training.seq_len") if "seq_len" in training else None,
        precision=_precision(training),
        ignored=tuple(sorted(str(name) for name in content if name not in known)),
        assumed=assumed,
    )  # fmt: skip


def _recompute(checkpoint: Mapping[str, Any]) -> Recompute:
    mode = checkpoint.get("mode", "selective")
    return "full" if mode == "full" else "selective" if mode == "selective" else "none"


def _precision(training: Mapping[str, Any]) -> str:
    said = (training.get("dtype", "float32"), training.get("mixed_precision_param", "bfloat16"))
    return next((ours for ours, theirs in PRECISION.items() if theirs == said), "bf16-mixed")


def _schedule(axes: Mapping[str, Any], pp: int) -> tuple[Any, int, tuple[str, ...]]:
    """Ours, the chunks of a rank, and what was assumed."""
    parts = axes.get("module_fqns_per_model_part")
    chunks = max(len(parts) // pp, 1) if isinstance(parts, list) else None
    name = str(axes.get("pipeline_parallel_schedule", "1F1B"))
    found = next(((ours, many) for (ours, many), theirs in SCHEDULES.items() if theirs.lower() == name.lower()), None)
    if pp == 1:
        return "1f1b", 1, ()
    if found is None:
        raise ConfigError(f"pipeline_parallel_schedule {shown(name)}: one of {', '.join(SCHEDULES.values())}")
    ours, many = found
    if chunks is None:
        chunks = 2 if many else 1
        if many:
            return ours, chunks, ("2 model chunks a rank, torchtitan's default for looped schedules",)
    even = ("stages as even as can be: a Layout has no stages of its own (module_fqns_per_model_part)",)
    return ours, chunks, even if isinstance(parts, list) else ()


def _batches(training: Mapping[str, Any], axes: Mapping[str, Any], pp: int, dp: int) -> tuple[int, int]:
    """Micro-batch and global batch size: torchtitan's local batch is a micro-batch, or all those of a pipeline's step."""
    local = whole(training.get("local_batch_size", 8), "training.local_batch_size")
    given = training.get("global_batch_size", -1)
    batch = local * dp if given == -1 else whole(given, "training.global_batch_size")
    micro = whole(axes.get("pipeline_parallel_microbatch_size", 1), "pipeline_parallel_microbatch_size")
    return (micro if pp > 1 else local), batch
