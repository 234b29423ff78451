"""torchtitan: a Python module with a configuration function, its form since 0.3; its TOML files of 0.1 and 0.2 are read too."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from ..schema.base import shown
from ..schema.errors import ConfigError
from ..schema.layers import Block, Embedding, Head
from ..schema.layout import Layout, Recompute
from ..schema.plan import Plan
from . import limits
from .documents import Exported, Imported, positive_integer, remaining_devices
from .limits import Limit, placement_not_expressed, reduction_not_expressed, require_expressible, torchrun

VERSION = "0.3.0"


MODULE = "meshwright_plan"


ORDER = "pipeline_order.csv"


MODELS = {
    "llama-3.1-8b": ("llama3", "llama3_8b"),
    "llama-3.1-70b": ("llama3", "llama3_70b"),
    "llama-3.1-405b": ("llama3", "llama3_405b"),
    "qwen3-32b": ("qwen3", "qwen3_32b"),
    "qwen3-30b-a3b": ("qwen3", "qwen3_30b_a3b"),
    "deepseek-v3": ("deepseek_v3", "deepseek_v3_671b"),
    "gpt-oss-20b": ("gpt_oss", "gpt_oss_20b"),
    "gpt-oss-120b": ("gpt_oss", "gpt_oss_120b"),
}
"""Catalogue name -> package of torchtitan.models and function of its config_registry."""


SCHEDULES = {
    ("gpipe", False): "GPipe",
    ("1f1b", False): "1F1B",
    ("1f1b", True): "Interleaved1F1B",
    ("zb-h1", True): "InterleavedZeroBubble",
    ("zb-v", True): "ZBVZeroBubble",
}
"""(ours, with chunks) -> torch.distributed.pipelining's name; the others go through a table of the order."""


PRECISION = {"bf16-mixed": ("float32", "bfloat16"), "bf16": ("bfloat16", "bfloat16"), "fp32": ("float32", "float32")}


LIMITS = (
    Limit(
        "torchtitan_models",
        lambda p: p.model.name in MODELS,
        lambda p: f"model {p.model.name}: torchtitan has configurations of {', '.join(MODELS)}",
        "add the model to torchtitan, or export to another engine",
    ),
    limits.NO_LEVELS,
    limits.NO_ULYSSES,
    limits.VOCABULARY_AT_ENDS,
    limits.FULL_TRAINING,
    limits.one_recompute("plan again with --fix recompute=full"),
    Limit(
        "experts_over_ep",
        lambda p: p.layout.etp == 1 and (not p.model.is_moe or p.layout.tp == 1 or p.layout.ep > 1),
        lambda p: (
            f"ep {p.layout.ep}, etp {p.layout.etp} with tp {p.layout.tp}: torchtitan splits experts over ep alone"
        ),
        "--fix etp=1, and ep above 1 where tp is",
    ),
    Limit(
        "torchtitan_offload",
        lambda p: p.layout.offload in ("none", "parameters") and not p.layout.offload_activations,
        lambda p: (
            f"offload={p.layout.offload}: training.enable_cpu_offload moves parameters, gradients and states together"
        ),
        "--fix offload=none",
    ),
    Limit(
        "torchtitan_precision",
        lambda p: p.workload.precision in PRECISION,
        lambda p: f"precision {p.workload.precision}: fp8 is a converter of the model in torchtitan, fp16 it has not",
        "plan again with --precision bf16-mixed",
    ),
)


def export(plan: Plan) -> Exported:
    """The plan as a module: `--module meshwright_plan --config plan`.

    Raises:
        ConfigError: torchtitan cannot run it as it is.
    """
    require_expressible(plan, "torchtitan", VERSION, LIMITS)
    package, function = MODELS[plan.model.name]
    checkpointing = {"full": "FullAC", "selective": "SelectiveAC"}.get(plan.layout.recompute)
    settings = {
        f"{section}.{name}": value for section, fields in _settings(plan).items() for name, value in fields.items()
    }
    lines = [
        f'"""torchtitan {VERSION}: {plan.model.name} on {plan.cluster.num_devices} devices, {plan.layout}"""',
        "",
        *([f"from torchtitan.distributed.activation_checkpoint import {checkpointing}"] if checkpointing else []),
        f"from torchtitan.models.{package}.config_registry import {function}",
        "from torchtitan.trainer import Trainer",
        "",
        "",
        "def plan() -> Trainer.Config:",
        f"    config = {function}()",
        *(f"    config.{name} = {value!r}" for name, value in settings.items()),
        f"    config.activation_checkpoint = {f'{checkpointing}.Config()' if checkpointing else None}",
        "    return config",
        "",
    ]
    order = _order(plan)
    return Exported(
        engine="torchtitan",
        version=VERSION,
        files=((f"{MODULE}.py", "\n".join(lines)), *(((ORDER, order),) if order else ())),
        not_expressed=(*placement_not_expressed(plan), *reduction_not_expressed(plan)),
        to_set=("hf_assets_path (tokenizer), dataloader, optimizer, steps: as the function of torchtitan has them",),
        command=f"PYTHONPATH=. {torchrun(plan)} -m torchtitan.train --module {MODULE} --config plan",
    )


def _settings(plan: Plan) -> dict[str, dict[str, Any]]:
    layout, work = plan.layout, plan.workload
    dtype, products = PRECISION[work.precision]
    pipelined = layout.pp > 1
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": layout.dp_replicate,
        "data_parallel_shard_degree": layout.dp_shard,
        "tensor_parallel_degree": layout.tp,
        "enable_sequence_parallel": layout.sequence_parallel or layout.tp == 1,
        "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp,
        "expert_parallel_degree": layout.ep,
        "fsdp_reshard_after_forward": "always" if layout.zero_stage == 3 else "never",
    }
    if pipelined:
        parallelism |= {
            "pipeline_parallel_schedule": SCHEDULES.get(_named(layout), "_PipelineScheduleRuntime"),
            "pipeline_parallel_microbatch_size": layout.micro_batch_size,
            "module_fqns_per_model_part": _module_names(plan),
        }
        if _named(layout) not in SCHEDULES:
            parallelism["pipeline_parallel_schedule_csv"] = ORDER
    return {
        "training": {
            "local_batch_size": layout.micro_batch_size * (plan.num_microbatches if pipelined else 1),
            "global_batch_size": work.global_batch_size,
            "seq_len": work.seq_len,
            "dtype": dtype,
            "mixed_precision_param": products,
            "enable_cpu_offload": layout.offload == "parameters",
            # Graphs take neither pipelines nor experts that are sent to other ranks, and the plan was not made for them.
            "disable_cuda_graphs": not work.cuda_graphs or pipelined or layout.ep > 1,
        },
        "parallelism": parallelism,
    }


def _named(layout: Layout) -> tuple[str, bool]:
    return layout.schedule, layout.num_model_chunks > 1


def _module_names(plan: Plan) -> list[list[str]]:
    """Modules of each stage, in the order of the model."""
    layers = tuple(plan.model.iter_layers())
    names = []
    for stage in plan.stages:
        part: list[str] = []
        for idx in stage.layer_idxs:
            if isinstance(layers[idx], Embedding):
                part.append("tok_embeddings")
            elif isinstance(layers[idx], Block):
                part.append(f"layers.{idx - 1}")
            elif isinstance(layers[idx], Head):
                part += ["norm", "lm_head"]
        names.append(part)
    return names


def _order(plan: Plan) -> str:
    """The order of the passes as torch's table, where the schedule has no name in torch."""
    if plan.layout.pp == 1 or _named(plan.layout) in SCHEDULES:
        return ""
    from ..runtime.pipeline_order import pipeline_order
    from ..solvers.pipeline.torch_csv import to_torch_csv

    return to_torch_csv(pipeline_order(plan))


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
        return positive_integer(axes.get(f"{name}_degree", 1), f"parallelism.{name}_degree")

    tp, cp, pp = (degree(f"{axis}_parallel") for axis in ("tensor", "context", "pipeline"))
    replicate = degree("data_parallel_replicate")
    shard = axes.get("data_parallel_shard_degree", -1)
    if num_devices is None:
        if shard == -1:
            raise ConfigError(
                "data_parallel_shard_degree -1 takes the devices that are left", help="give --num-devices"
            )
        num_devices = tp * cp * pp * replicate * positive_integer(shard, "data_parallel_shard_degree")
    left = remaining_devices(num_devices, tp=tp, cp=cp, pp=pp, dp_replicate=replicate)
    if shard != -1 and left != positive_integer(shard, "data_parallel_shard_degree"):
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
        seq_len=positive_integer(training["seq_len"], "training.seq_len") if "seq_len" in training else None,
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
    local = positive_integer(training.get("local_batch_size", 8), "training.local_batch_size")
    given = training.get("global_batch_size", -1)
    batch = local * dp if given == -1 else positive_integer(given, "training.global_batch_size")
    micro = positive_integer(axes.get("pipeline_parallel_microbatch_size", 1), "pipeline_parallel_microbatch_size")
    return (micro if pp > 1 else local), batch
