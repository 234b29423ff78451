"""DeepSpeed: the JSON file that `deepspeed --deepspeed_config` and transformers' `deepspeed=` read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain, groupby
from typing import Any

from ..schema.base import shown
from ..schema.errors import ConfigError
from ..schema.layout import Layout
from ..schema.model import ModelSpec
from ..schema.training_plan import TrainingPlan
from . import adapter
from .adapter import Adapter, Exported, Imported, Table

VERSION = "0.19"
CONFIG = "ds_config.json"
ENVIRONMENT = ".deepspeed_env"
"""Variables that the launcher takes to other nodes, from where it is started."""


def write(plan: TrainingPlan) -> Exported:
    """Return the plan as a configuration file."""
    layout, work = plan.layout, plan.workload
    content: dict[str, Any] = {
        "train_batch_size": work.global_batch_size,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": plan.num_microbatches,
        **({"bf16": {"enabled": True}} if work.precision == "bf16-mixed" else {}),
        **({"fp16": {"enabled": True}} if work.precision == "fp16-mixed" else {}),
        "zero_optimization": _zero(plan),
        **({"pipeline": {"stages": layout.pp}} if layout.pp > 1 else {}),
        **({"tensor_parallel": {"autotp_size": layout.tp}} if layout.tp > 1 else {}),
        **({"sequence_parallel_size": layout.cp, "data_parallel_size": layout.dp} if layout.cp > 1 else {}),
    }
    nodes = plan.cluster.num_nodes
    hosts = f" --num_nodes {nodes} --hostfile hostfile" if nodes > 1 else ""
    variables = adapter.environment(plan)
    of_nodes = ((ENVIRONMENT, "\n".join(variables) + "\n"),) if nodes > 1 and variables else ()
    return Exported(
        engine="deepspeed",
        version=VERSION,
        files=((CONFIG, json.dumps(content, indent=2) + "\n"), *of_nodes),
        not_expressed=(*adapter.placement_not_expressed(plan), *_of_model_code(plan)),
        to_set=("data, optimizer and learning rate: in the training script or under `optimizer` and `scheduler`",),
        command=f"{adapter.on_command(plan)}deepspeed --num_gpus {plan.cluster.largest_node}{hosts} your_script.py "
        f"--deepspeed_config {CONFIG}",
    )


def _of_model_code(plan: TrainingPlan) -> tuple[str, ...]:
    """Say what DeepSpeed takes from the training script."""
    layout, lines = plan.layout, []
    if layout.pp > 1:
        blocks = [len(choices) for choices in adapter.recompute_by_stage(plan)]
        lines += [
            f"pp: PipelineModule(layers, num_stages={layout.pp})",
            f"stages: blocks of each stage {blocks}: say so where the training script cuts the model",
        ]
    if layout.recompute == "mixed":
        lines.append(f"recompute of {_recomputed(plan)}: deepspeed.checkpointing.checkpoint around these blocks only")
    elif layout.recompute != "none":
        lines.append(f"recompute={layout.recompute}: model.gradient_checkpointing_enable() or deepspeed.checkpointing")
    return tuple(lines)


def _recomputed(plan: TrainingPlan) -> str:
    """Return the runs of blocks that recompute alike, counted from 0: ``blocks 0-3 (full), blocks 4-4 (selective)``."""
    runs, start = [], 0
    for choice, members in groupby(chain.from_iterable(adapter.recompute_by_stage(plan))):
        end = start + len(tuple(members))
        runs += [f"blocks {start}-{end - 1} ({choice})"] if choice != "none" else []
        start = end
    return ", ".join(runs)


def _zero(plan: TrainingPlan) -> dict[str, Any]:
    layout = plan.layout
    zero: dict[str, Any] = {"stage": layout.zero_stage, "overlap_comm": plan.workload.overlap}
    if layout.zero_stage == 3 and layout.optimizer_shard > 1:
        zero["zero_hpz_partition_size"] = layout.dp_shard
    target = {"device": "cpu" if layout.offload_to == "host" else "nvme", "pin_memory": True}
    if layout.offload_to == "storage":
        target["nvme_path"] = "/local_nvme"
    if layout.offload != "none":
        zero["offload_optimizer"] = target | {"ratio": layout.offload_fraction}
    if layout.offload == "parameters":
        zero["offload_param"] = dict(target)
    return zero


def read(content: Table, num_devices: int | None, model: ModelSpec | None) -> Imported:
    """Read a configuration file.

    Raises:
        ConfigError: the number of devices is unknown, or the numbers do not fit together.
    """
    num_devices = adapter.require_num_devices(num_devices)
    zero, tensor, pipeline = adapter.tables_in(content, "zero_optimization", "tensor_parallel", "pipeline")
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"zero_optimization.stage = {shown(stage)}: must be 0, 1, 2 or 3")
    tp = adapter.positive_integer(tensor.get("autotp_size") or 1, "tensor_parallel.autotp_size")
    cp = adapter.positive_integer(content.get("sequence_parallel_size", 1), "sequence_parallel_size")
    has_stages = pipeline.get("stages", "auto") != "auto"
    pp = adapter.positive_integer(pipeline["stages"], "pipeline.stages") if has_stages else 1
    dp = adapter.remaining_devices(num_devices, tp=tp, cp=cp, pp=pp)
    fields = {"tp": tp, "pp": pp, "cp": cp, "cp_ulysses": cp, "sequence_parallel": False} | _sharding(
        zero, stage, dp, cp
    )
    micro_batch, accumulated, batch = _batch(content, dp)
    known = {
        "zero_optimization", "tensor_parallel", "sequence_parallel_size", "data_parallel_size", "train_batch_size", "bf16",
        "fp16", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "pipeline",
    }  # fmt: skip
    of_script = "recompute none" if has_stages else "pp 1 and recompute none"
    assumed, precision = [f"{of_script}: DeepSpeed takes it from the training script"], _precision(content)
    if precision == "fp32":
        assumed.append(adapter.PLAIN_PRODUCTS)
    if accumulated is None:
        assumed.append(f"micro_batch_size {micro_batch}")
    return Imported(
        engine="deepspeed",
        layout=Layout(**fields, micro_batch_size=micro_batch, **_offload(zero)),
        num_devices=num_devices,
        global_batch_size=batch,
        precision=precision,
        ignored=tuple(sorted(str(name) for name in content if name not in known)),
        assumed=tuple(assumed),
    )


def _sharding(zero: Table, stage: int, dp: int, cp: int) -> dict[str, Any]:
    shard, fields = dp if stage else 1, {}
    if island := zero.get("mics_shard_size", -1):
        shard = adapter.positive_integer(island, "mics_shard_size") if island != -1 else shard
    hpz = adapter.positive_integer(zero.get("zero_hpz_partition_size", 1), "zero_hpz_partition_size")
    if hpz > 1:
        shard, fields = hpz, {"gradient_shard": dp, "optimizer_shard": dp}
    if dp % shard:
        raise ConfigError(f"islands of {shard} ranks do not divide {dp} data-parallel ranks")
    return fields | {
        "dp_shard": shard,
        "dp_replicate": dp // shard,
        "zero_stage": stage if shard * cp > 1 else 0,
    }


def _batch(content: Table, dp: int) -> tuple[int, int | None, int | None]:
    """Return micro-batch, accumulated micro-batches and global batch: any two of DeepSpeed's three settings give the third."""
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    micro, steps, batch = (
        adapter.positive_integer(content[name], name) if content.get(name) not in (None, "auto") else None
        for name in names
    )
    if micro is None and batch is not None:
        micro = max(batch // (dp * (steps or 1)), 1)
    if batch is None and micro is not None:
        batch = micro * (steps or 1) * dp
    if micro is not None and steps is not None and batch != micro * steps * dp:
        raise ConfigError(f"train_batch_size {batch} is not {micro} x {steps} x {dp} data-parallel ranks")
    return micro or 1, steps, batch


def _precision(content: Table) -> str:
    def enabled(name: str) -> bool:
        section = content.get(name)
        return isinstance(section, Mapping) and section.get("enabled") in (True, "auto")

    return "bf16-mixed" if enabled("bf16") else "fp16-mixed" if enabled("fp16") else "fp32"


def _offload(zero: Table) -> dict[str, Any]:
    for name, offload in (("offload_param", "parameters"), ("offload_optimizer", "optimizer")):
        section = zero.get(name)
        if isinstance(section, Mapping) and section.get("device") in ("cpu", "nvme"):
            fields = {"offload": offload, "offload_to": "storage" if section["device"] == "nvme" else "host"}
            return fields | ({"offload_fraction": section.get("ratio", 1.0)} if offload == "optimizer" else {})
    return {}


ADAPTER = Adapter(
    version=VERSION,
    limits=adapter.limits_of("deepspeed"),
    write=write,
    is_own_table=lambda content: bool(
        {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"} & content.keys()
    ),
    read_table=read,
)
