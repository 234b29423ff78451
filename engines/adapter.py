"""The form of a file of an engine: what export makes and import finds, what the engine cannot do, how its numbers are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..schema.base import Count, Frozen, shown, write_atomically
from ..schema.engine_facts import ENGINES
from ..schema.errors import ConfigError
from ..schema.layout import Layout
from ..schema.layout_rules import broken_rules, problem_facts
from ..schema.model import ModelSpec
from ..schema.training_plan import TrainingPlan


class Exported(Frozen):
    """A plan in an engine's own form.

    Attributes:
        engine: of whose form the files are.
        version: of the engine whose options these are.
        files: (name, text) of each file.
        not_expressed: what of the plan the engine's configuration has no words for; it changes speed, never what fits.
        to_set: what the user still says: data, tokenizer, learning rate.
        command: starts the job in the folder of the files.
    """

    engine: str
    version: str
    files: tuple[tuple[str, str], ...]
    not_expressed: tuple[str, ...] = ()
    to_set: tuple[str, ...] = ()
    command: str

    def write(self, folder: str | Path) -> tuple[Path, ...]:
        """Write the files, each in full or not at all.

        Raises:
            ConfigError: the folder cannot be made or written.
        """
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from None
        for name, text in self.files:
            write_atomically(folder / name, text)
        return tuple(folder / name for name, _ in self.files)


class Imported(Frozen):
    """The layout that a configuration of an engine stands for.

    Attributes:
        num_devices: ranks of the job.
        global_batch_size, seq_len, precision: of the workload, where the configuration says them.
        ignored: settings that say nothing about layout or workload.
        assumed: what the configuration leaves open, and what was taken for it.
    """

    engine: str
    layout: Layout
    num_devices: Count
    global_batch_size: Count | None = None
    seq_len: Count | None = None
    precision: str | None = None
    ignored: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()


Table = Mapping[str, Any]
"""The settings of a TOML, JSON or YAML file."""


@dataclass(frozen=True)
class Limit:
    """Something that an engine cannot do and that would change what fits or what is computed."""

    name: str
    holds: Callable[[TrainingPlan], bool]
    reason: Callable[[TrainingPlan], str]
    help: str


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An engine whose configuration is written, and mostly read: ``ADAPTER`` of the file of its name.

    Attributes:
        version: of the engine whose options these are.
        limits: what it cannot do; `write` is called for plans within them only.
        write: a plan in the engine's form.
        is_own_table: say whether a table of settings is this engine's; None: it has no such files.
        read_table: the layout of one, given the ranks of the job and the model where they are known.
        read_text: the same for a script; ``suffixes`` are those of its files, empty: any.
    """

    version: str
    limits: tuple[Limit, ...]
    write: Callable[[TrainingPlan], Exported]
    is_own_table: Callable[[Table], bool] | None = None
    read_table: Callable[[Table, int | None, ModelSpec | None], Imported] | None = None
    read_text: Callable[[str, int | None, ModelSpec | None], Imported] | None = None
    suffixes: tuple[str, ...] = ()


def rules_of(engine: str) -> Limit:
    """Return what the search knows of a planned engine: a plan that was made for it keeps all of it."""

    def broken(plan: TrainingPlan) -> tuple[str, ...]:
        layout, world_size = plan.layout, plan.cluster.num_devices
        problem = problem_facts(
            plan.model,
            plan.workload,
            world_size=world_size,
            scaleup_domain=layout.tp,
            is_nvidia=plan.cluster.is_nvidia,
        )
        return broken_rules(layout, problem, ENGINES[engine].rules or ())

    return Limit(
        f"{engine}_rules",
        lambda p: not broken(p),
        lambda p: "; ".join(broken(p)),
        f"plan again with --engine {engine}",
    )


def precisions_of(engine: str, precisions: tuple[str, ...], reason: str) -> Limit:
    """Return the limit of an engine that trains in these precisions only."""
    return Limit(
        f"{engine}_precision",
        lambda p: p.workload.precision in precisions,
        lambda p: f"precision {p.workload.precision}: {reason}",
        "plan again with --precision bf16-mixed",
    )


def offload_of(engine: str, kinds: tuple[str, ...], reason: str, *, activations: bool = False) -> Limit:
    """Return the limit of an engine that moves these kinds of states only, and no activations unless said."""
    return Limit(
        f"{engine}_offload",
        lambda p: p.layout.offload in kinds and (activations or not p.layout.offload_activations),
        lambda p: f"offload={p.layout.offload}, offload_activations={p.layout.offload_activations:g}: {reason}",
        "--fix offload=none",
    )


DRIVEN = Limit(
    "driven_devices",
    lambda p: not p.cluster.why_not_driven,
    lambda p: f"{'; '.join(p.cluster.why_not_driven)}: the files start torch for GPUs or CPUs",
    "plan for NVIDIA or AMD GPUs, or for CPUs",
)
"""A limit of every target."""

ONE_RECOMPUTE = Limit(
    "recompute_of_all_blocks",
    lambda p: p.layout.recompute != "mixed" and p.layout.recompute_fraction == 1,
    lambda p: (
        f"recompute={p.layout.recompute}"
        + (f" of {p.layout.recompute_fraction:g} of the blocks" if p.layout.recompute_fraction < 1 else "")
        + ": the engine has one choice for all blocks"
    ),
    "plan again with --fix recompute=full",
)


def _only(name: str, reason: str, **values: object) -> Limit:
    """Return the limit of an engine that has one value of each of these layout fields."""
    return Limit(
        name,
        lambda p: all(getattr(p.layout, field) == value for field, value in values.items()),
        lambda p: f"{', '.join(f'{field} {getattr(p.layout, field)}' for field in values)}: {reason}",
        f"--fix {','.join(f'{field}={value}' for field, value in values.items())}",
    )


NO_EXPERT_AXES = _only("no_expert_axes", "the configuration has no expert parallelism", ep=1, etp=1)
NO_PIPELINE = _only("no_pipeline", "the configuration has no pipeline", pp=1)
NO_ULYSSES = _only("no_ulysses", "context parallelism of the engine is a ring", cp_ulysses=1)
NO_LEVELS = _only("no_levels", "every state is sharded alike", gradient_shard=1, optimizer_shard=1)
VOCABULARY_AT_ENDS = _only(
    "vocabulary_at_ends", "the engine keeps embedding and head on the first and the last stage", vocabulary="ends"
)
# Adapters are set in the training script of each engine.
FULL_TRAINING = Limit(
    "full_training",
    lambda p: p.workload.adapters is None and p.workload.has_backward,
    lambda p: (
        "the plan trains adapters: the engine's configuration of them is not written"
        if p.workload.has_backward
        else "the plan trains without a backward pass, which engines do not"
    ),
    "plan again with --train full",
)


def torchrun(plan: TrainingPlan) -> str:
    """Return the beginning of the line that starts the ranks of one node."""
    nodes = plan.cluster.num_nodes
    where = ' --rdzv-backend c10d --rdzv-endpoint "${RDZV_ENDPOINT:?host:port of the first node}"' if nodes > 1 else ""
    return f"torchrun --nnodes {nodes} --nproc-per-node {plan.cluster.largest_node}{where}"


def recompute_by_stage(plan: TrainingPlan) -> list[list[str]]:
    """Return what each block of each stage recomputes, in the order of the model."""
    layers = tuple(plan.model.iter_layers())
    return [[stage.recompute_of(idx) for idx in stage.layer_idxs if layers[idx].is_block] for stage in plan.stages]


def placement_not_expressed(plan: TrainingPlan) -> tuple[str, ...]:
    """Say where ranks and experts lie, unless it is where every engine puts them."""
    lines = []
    if plan.rank_map != tuple(range(len(plan.rank_map))):
        devices = ", ".join(map(str, plan.rank_map[:8])) + (", ..." if len(plan.rank_map) > 8 else "")
        lines.append(
            f"rank_map: the plan runs its ranks on the devices {devices}; start the nodes in the order that puts them there"
        )
    if plan.expert_slots:
        lines.append("expert_slots: experts stand once and in order; `meshwright experts` says where they should be")
    return tuple(lines)


def reduction_not_expressed(plan: TrainingPlan) -> tuple[str, ...]:
    """Say that FSDP2 has no stage 1 of its own outside a pipeline."""
    if plan.layout.zero_stage != 1 or plan.layout.pp > 1 or plan.num_microbatches == 1:
        return ()
    return ("zero_stage=1: gradients are reduced and sharded in every micro-batch, as under stage 2",)


def require_num_devices(num_devices: int | None) -> int:
    """Return the ranks of a job whose configuration does not say them.

    Raises:
        ConfigError: the user did not either.
    """
    if num_devices is None:
        raise ConfigError("the number of devices is not in the configuration", help="give --num-devices")
    return num_devices


def remaining_devices(num_devices: int, **degrees: int) -> int:
    """Return the devices that remain for data parallelism.

    Raises:
        ConfigError: the other degrees do not divide the devices.
    """
    product = math.prod(degrees.values())
    if num_devices % product:
        text = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
        raise ConfigError(f"{text} = {product} does not divide {num_devices} devices", help="give --num-devices")
    return num_devices // product


def positive_integer(value: Any, name: str) -> int:
    """Return a positive whole number of a configuration.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(value, str) and value.strip().isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**9:
        raise ConfigError(f"{name} = {shown(value)}: must be a whole number above 0")
    return value


def optional_integer(table: Table, name: str) -> int | None:
    """Return a positive whole number of a table; None where it has none of that name."""
    return positive_integer(table[name], name) if name in table else None


def tables_in(content: Table, *names: str) -> list[Table]:
    """Return the tables of these names in a table; an absent one is empty.

    Raises:
        ConfigError: one of them is no table.
    """
    tables = [content.get(name) or {} for name in names]
    for name, table in zip(names, tables, strict=True):
        if not isinstance(table, Mapping):
            raise ConfigError(f"{name} must be a table")
    return tables
