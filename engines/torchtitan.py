"""torchtitan: a Python module with a configuration function, its form since 0.3; its TOML files of 0.1 and 0.2 are read too."""

from __future__ import annotations

import ast
from typing import Any

from ..schema.base import shown
from ..schema.errors import ConfigError
from ..schema.layout import Layout
from ..schema.model import ModelSpec
from ..schema.schedules import DEFAULT, SCHEDULES
from ..schema.training_plan import TrainingPlan
from . import adapter
from .adapter import Adapter, Exported, Imported, Table

VERSION = "0.3.0"
MODULE = "meshwright_plan"
ORDER = "pipeline_{}.csv"
"""File of the order of a schedule that has no name in torch."""

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

WITH_FP8 = {"llama3_405b": "405B"}
"""Functions whose model has fp8 converters, and its name in ``model_registry``, which makes it without."""

PRECISION = {"bf16-mixed": ("float32", "bfloat16"), "bf16": ("bfloat16", "bfloat16"), "fp32": ("float32", "float32")}
"""`training.dtype` and `training.mixed_precision_param`; tf32 has those of fp32 and one line besides."""

_TF32 = 'torch.set_float32_matmul_precision("high")'

PRODUCTS = "fp32_products"
"""Setting of `training` that stands for the line of `sets_tf32`."""

_CHECKPOINTING: dict[str, str] = {"full": "FullAC", "selective": "SelectiveAC"}
_MODULES = {"embedding": ["tok_embeddings"], "block": ["layers.{}"], "head": ["norm", "lm_head"]}
"""Kind of layer -> its modules, by the number of the block."""


def write(plan: TrainingPlan) -> Exported:
    """Return the plan as a module: `--module meshwright_plan --config plan`."""
    package, function = MODELS[plan.model.name]
    checkpointing = _CHECKPOINTING.get(plan.layout.recompute)
    lines = [
        f'"""torchtitan {VERSION}: {plan.model.name} on {plan.cluster.num_devices} devices, {plan.layout}"""',
        "",
        *(["import torch"] if plan.workload.precision == "tf32" else []),
        *([f"from torchtitan.distributed.activation_checkpoint import {checkpointing}"] if checkpointing else []),
        *([f"from torchtitan.models.{package} import model_registry"] if function in WITH_FP8 else []),
        f"from torchtitan.models.{package}.config_registry import {function}",
        "from torchtitan.trainer import Trainer",
        "",
        "",
        "def plan() -> Trainer.Config:",
        *([f"    {_TF32}"] if plan.workload.precision == "tf32" else []),
        f"    config = {function}()",
        *(f"    config.{name} = {value!r}" for name, value in _settings(plan).items()),
        *_without_fp8(plan),
        f"    config.activation_checkpoint = {f'{checkpointing}.Config()' if checkpointing else None}",
        "    return config",
        "",
    ]
    files = [(f"{MODULE}.py", "\n".join(lines))]
    if plan.layout.pp > 1 and not _schedule_name(plan.layout):
        from ..cost_models.pipeline.orders import to_torch_csv
        from ..cost_models.pipeline.simulation import pipeline_order

        files.append((ORDER.format(plan.layout.schedule), to_torch_csv(pipeline_order(plan))))
    # tf32 is said in the module, where `import` finds it; fp32 against a container that says otherwise.
    variables = adapter.on_command(plan) if plan.workload.precision == "fp32" else ""
    return Exported(
        engine="torchtitan",
        version=VERSION,
        files=tuple(files),
        not_expressed=adapter.placement_not_expressed(plan),
        to_set=("hf_assets_path (tokenizer), dataloader, optimizer, steps: as the function of torchtitan has them",),
        command=f"{variables}PYTHONPATH=. {adapter.torchrun(plan)} -m torchtitan.train --module {MODULE} --config plan",
    )


def _without_fp8(plan: TrainingPlan) -> list[str]:
    """Return the line that takes converters from the model, where the function has them: the plan multiplies in bf16."""
    flavor = WITH_FP8.get(MODELS[plan.model.name][1])
    return [f"    config.model_spec = model_registry({flavor!r})"] if flavor else []


def _settings(plan: TrainingPlan) -> Table:
    layout, work = plan.layout, plan.workload
    dtype, products = PRECISION["fp32" if work.is_full_precision else work.precision]
    pipelined = layout.pp > 1
    settings: dict[str, Any] = {
        "training.local_batch_size": layout.micro_batch_size * (plan.num_microbatches if pipelined else 1),
        "training.global_batch_size": work.global_batch_size,
        "training.seq_len": work.seq_len,
        "training.dtype": dtype,
        "training.mixed_precision_param": products,
        "training.enable_cpu_offload": layout.offload == "parameters",
        # Graphs take neither pipelines nor experts that are sent to other ranks, and the plan was not made for them.
        "training.disable_cuda_graphs": not layout.cuda_graphs or pipelined or layout.ep > 1,
        "compile.enable": work.fusion.startswith("compiled"),
        "compile.components": ["model"] if work.fusion == "compiled_blocks" else ["model", "loss"],
        "parallelism.data_parallel_replicate_degree": layout.dp_replicate,
        "parallelism.data_parallel_shard_degree": layout.dp_shard,
        "parallelism.tensor_parallel_degree": layout.tp,
        "parallelism.enable_sequence_parallel": layout.sequence_parallel or layout.tp == 1,
        "parallelism.context_parallel_degree": layout.cp,
        "parallelism.pipeline_parallel_degree": layout.pp,
        "parallelism.expert_parallel_degree": layout.ep,
        "parallelism.fsdp_reshard_after_forward": "always" if layout.zero_stage == 3 else "never",
    }
    if pipelined:
        name, layers = _schedule_name(layout), tuple(plan.model.iter_layers())
        settings |= {
            "parallelism.pipeline_parallel_schedule": name or "_PipelineScheduleRuntime",
            "parallelism.pipeline_parallel_microbatch_size": layout.micro_batch_size,
            "parallelism.module_fqns_per_model_part": [
                [name.format(idx - 1) for idx in stage.layer_idxs for name in _MODULES.get(layers[idx].kind, ())]
                for stage in plan.stages
            ],
            **({} if name else {"parallelism.pipeline_parallel_schedule_csv": ORDER.format(layout.schedule)}),
        }
    return settings


def _schedule_name(layout: Layout) -> str:
    """Return torch's name of the schedule; empty: it goes through a table of the order."""
    return SCHEDULES[layout.schedule].torch_names[layout.num_model_chunks > 1]


def read_module(text: str, num_devices: int | None, model: ModelSpec | None) -> Imported:
    """Read a Python module whose function assigns ``config.section.name = literal``; nothing of it is run.

    Raises:
        ConfigError: it is not Python, or has no such assignment.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"not a Python module: {error}") from None
    try:
        return read(_assigned(tree), num_devices, model)
    except (RecursionError, MemoryError):
        raise ConfigError("not a configuration: its expressions are nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits cannot be shown
        raise ConfigError(f"not a configuration: {error}") from None


def sets_tf32(node: ast.AST) -> bool:
    """Return whether a statement has torch multiply fp32 matrices as TF32."""
    return isinstance(node, ast.Expr) and ast.unparse(node).replace("'", '"') == _TF32


def _assigned(tree: ast.Module) -> dict[str, dict[str, Any]]:
    """Return section -> name -> literal of the assignments to ``config``."""
    content: dict[str, dict[str, Any]] = {}
    for node in ast.walk(tree):
        if sets_tf32(node):
            content.setdefault("training", {})[PRODUCTS] = "tf32"
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        path = ast.unparse(node.targets[0]).split(".")
        if path[0] != "config" or len(path) not in (2, 3):
            continue
        if path[1] == "activation_checkpoint":
            kind = ast.unparse(node.value)
            modes = [mode for mode, name in _CHECKPOINTING.items() if kind.startswith(name)]
            content["activation_checkpoint"] = {"mode": (*modes, "none")[0]}
        elif len(path) == 3:
            try:
                content.setdefault(path[1], {})[path[2]] = ast.literal_eval(node.value)
            except (ValueError, TypeError):  # no literal; a dictionary with a list as a key
                continue
    return content


def read(content: Table, num_devices: int | None, model: ModelSpec | None) -> Imported:
    """Read the tables of a TOML file.

    Raises:
        ConfigError: the number of devices is unknown, or the numbers do not fit together.
    """
    training, axes, checkpoint = adapter.tables_in(content, "training", "parallelism", "activation_checkpoint")
    if not axes:
        raise ConfigError("no [parallelism] of torchtitan was found", help="e.g. tensor_parallel_degree = 8")

    def degree(name: str) -> int:
        return adapter.positive_integer(axes.get(f"{name}_degree", 1), f"parallelism.{name}_degree")

    tp, cp, pp = (degree(f"{axis}_parallel") for axis in ("tensor", "context", "pipeline"))
    replicate = degree("data_parallel_replicate")
    shard = axes.get("data_parallel_shard_degree", -1)
    if num_devices is None:
        if shard == -1:
            raise ConfigError("data_parallel_shard_degree -1 takes the devices that remain", help="give --num-devices")
        num_devices = tp * cp * pp * replicate * adapter.positive_integer(shard, "data_parallel_shard_degree")
    remaining = adapter.remaining_devices(num_devices, tp=tp, cp=cp, pp=pp, dp_replicate=replicate)
    if shard != -1 and remaining != adapter.positive_integer(shard, "data_parallel_shard_degree"):
        raise ConfigError(f"data_parallel_shard_degree {shard}: {num_devices} devices leave {remaining}")
    schedule, chunks, assumed = _schedule(axes, pp)
    micro, batch = _batches(training, axes, pp, replicate * remaining)
    zero: Any = {"always": 3, "never": 2 if pp == 1 else 1}.get(
        str(axes.get("fsdp_reshard_after_forward", "default")), 3 if pp == 1 else 1
    )
    mode: Any = str(checkpoint.get("mode", "selective"))
    layout = Layout(
        tp=tp, cp=cp, pp=pp, dp_replicate=replicate, dp_shard=remaining, ep=degree("expert_parallel"),
        micro_batch_size=micro, schedule=schedule, num_model_chunks=chunks, zero_stage=zero if remaining * cp > 1 else 0,
        recompute=mode if mode in _CHECKPOINTING else "none",
        sequence_parallel=tp > 1 and bool(axes.get("enable_sequence_parallel", not axes.get("disable_sequence_parallel"))),
        offload="parameters" if training.get("enable_cpu_offload") else "none",
    )  # fmt: skip
    known = ("training", "parallelism", "activation_checkpoint")
    return Imported(
        engine="torchtitan",
        layout=layout,
        num_devices=num_devices,
        global_batch_size=batch,
        seq_len=adapter.optional_integer(training, "seq_len"),
        precision=_precision(training),
        ignored=tuple(sorted(str(name) for name in content if name not in known)),
        assumed=assumed,
    )  # fmt: skip


def _precision(training: Table) -> str:
    said = (training.get("dtype", "float32"), training.get("mixed_precision_param", "bfloat16"))
    if said == PRECISION["fp32"] and training.get(PRODUCTS) == "tf32":
        return "tf32"
    return next((ours for ours, theirs in PRECISION.items() if theirs == said), "bf16-mixed")


def _schedule(axes: Table, pp: int) -> tuple[str, int, tuple[str, ...]]:
    """Return our schedule, the chunks of a rank, and what was assumed."""
    if pp == 1:
        return DEFAULT.name, 1, ()
    names = {
        name.lower(): (schedule.name, has_chunks)
        for schedule in SCHEDULES.values()
        for has_chunks, name in enumerate(schedule.torch_names)
        if name
    }
    given = str(axes.get("pipeline_parallel_schedule", "1F1B"))
    table = str(axes.get("pipeline_parallel_schedule_csv") or "")
    if ordered := [name for name in SCHEDULES if table.endswith(ORDER.format(name))]:
        names["_pipelinescheduleruntime"] = (ordered[0], 0)
    if given.lower() not in names:
        known = [name for schedule in SCHEDULES.values() for name in schedule.torch_names if name]
        raise ConfigError(f"pipeline_parallel_schedule {shown(given)}: one of {', '.join(known)}")
    schedule, has_chunks = names[given.lower()]
    stages = axes.get("module_fqns_per_model_part")
    if isinstance(stages, list):
        even = "stages as even as can be: a Layout has no stages of its own (module_fqns_per_model_part)"
        return schedule, max(len(stages) // pp, 1), (even,)
    if has_chunks:
        return schedule, 2, ("2 model chunks a rank, torchtitan's default for looped schedules",)
    return schedule, 1, ()


def _batches(training: Table, axes: Table, pp: int, dp: int) -> tuple[int, int]:
    """Return micro-batch and global batch size: torchtitan's local batch is a micro-batch, or all those of a pipeline's step."""
    local = adapter.positive_integer(training.get("local_batch_size", 8), "training.local_batch_size")
    given = training.get("global_batch_size", -1)
    batch = local * dp if given == -1 else adapter.positive_integer(given, "training.global_batch_size")
    micro = adapter.positive_integer(
        axes.get("pipeline_parallel_microbatch_size", 1), "pipeline_parallel_microbatch_size"
    )
    return (micro if pp > 1 else local), batch


ADAPTER = Adapter(
    version=VERSION,
    limits=adapter.limits_of("torchtitan"),
    write=write,
    adapt=adapter.with_sharded_gradients,
    is_own_table=lambda content: "parallelism" in content,
    read_table=read,
    read_text=read_module,
    suffixes=(".py",),
)
