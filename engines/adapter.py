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
from ..schema.layout_rules import ProblemFacts, Rule, broken_rules, problem_facts
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
    """Something that an engine cannot do and that would change what fits or what is computed; of plans that its adapter takes."""

    name: str
    holds: Callable[[Any], bool]
    reason: Callable[[Any], str]
    help: str


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An engine whose configuration is written, and mostly read: ``ADAPTER`` of the file of its name.

    Attributes:
        version: of the engine whose options these are.
        limits: what it cannot do; `write` is called for plans within them only.
        write: a plan in the engine's form, with the ``options`` that are given.
        adapt: the plan as the engine runs what it has in another way; what comes of it is costed again.
        is_own_table: say whether a table of settings is this engine's; None: it has no such files.
        read_table: the layout of one, given the ranks of the job and the model where they are known.
        read_text: the same for a script; ``suffixes`` are those of its files, empty: any.
    """

    version: str
    limits: tuple[Limit, ...]
    write: Callable[..., Exported]
    options: tuple[str, ...] = ()
    adapt: Callable[[Any], Any] = lambda plan: plan
    is_own_table: Callable[[Table], bool] | None = None
    read_table: Callable[[Table, int | None, ModelSpec | None], Imported] | None = None
    read_text: Callable[[str, int | None, ModelSpec | None], Imported] | None = None
    suffixes: tuple[str, ...] = ()


def limits_of(engine: str) -> tuple[Limit, ...]:
    """Return what the search knows of a planned engine, so that a plan that was made for it keeps all of it."""
    facts = ENGINES[engine]

    def lacking(plan: TrainingPlan) -> tuple[str, ...]:
        return facts.lacks(plan.model, plan.workload) if facts.lacks else ()

    trained = Limit(
        f"{engine}_trains", lambda p: not lacking(p), lambda p: "; ".join(lacking(p)), "plan for another engine"
    )
    only_ours = (
        (facts.takes_uneven_shares, _EVEN_SHARES),
        (facts.cuts_blocks, _ENTIRE_BLOCKS),
        (facts.has_stage_degrees, _ONE_DEGREE),
    )
    lacks = (limit for has, limit in only_ours if not has)
    return (trained, *lacks, *(_of_rule(engine, rule) for rule in facts.rules or ()))


_EVEN_SHARES = Limit(
    "batch_divides",
    lambda p: len(set(p.batch_shares)) == 1 and p.batch_shares[0] % p.layout.micro_batch_size == 0,
    lambda p: (
        f"of {p.workload.global_batch_size} sequences data-parallel ranks take {min(p.batch_shares)} to {max(p.batch_shares)}, in "
        f"micro-batches of up to {p.layout.micro_batch_size}: the engine gives every rank as many micro-batches of one size"
    ),
    "plan with a global batch size that divides",
)


_ENTIRE_BLOCKS = Limit(
    "blocks_in_halves",
    lambda p: not p.layout.half_blocks,
    lambda _: "half_blocks: the engine's stages end behind entire blocks",
    "plan with --fix half_blocks=false",
)

_ONE_DEGREE = Limit(
    "one_degree",
    lambda p: not p.degrees_by_stage,
    lambda p: f"tp {', '.join(str(stage.tp) for stage in p.stages)} of the stages: the engine has one for all",
    "plan with --fix tp=N",
)


def _of_rule(engine: str, rule: Rule) -> Limit:
    def problem(plan: TrainingPlan) -> ProblemFacts:
        world_size, domain = plan.cluster.num_devices, plan.cluster.scaleup_domain
        return problem_facts(
            plan.model, plan.workload, world_size=world_size, scaleup_domain=domain, is_nvidia=plan.cluster.is_nvidia
        )

    def broken(plan: TrainingPlan) -> tuple[str, ...]:
        return broken_rules(plan.layout, problem(plan), (rule,))

    return Limit(
        rule.name,
        lambda p: not broken(p),
        lambda p: broken(p)[0].removesuffix(f"   [{rule.name}]"),
        f"plan again with --engine {engine}",
    )


DRIVEN = Limit(
    "driven_devices",
    lambda p: not p.cluster.why_not_driven,
    lambda p: f"{'; '.join(p.cluster.why_not_driven)}: the files start torch for GPUs or CPUs",
    "plan for NVIDIA or AMD GPUs, or for CPUs",
)
"""A limit of every target."""


def with_sharded_gradients(plan: TrainingPlan) -> TrainingPlan:
    """Return a plan of stage 1 as FSDP2 runs it outside a pipeline: it reduces and shards gradients in every micro-batch."""
    if plan.layout.zero_stage != 1 or plan.layout.pp > 1:
        return plan
    return plan.replace(layout=plan.layout.replace(zero_stage=2))


TF32_VARIABLE = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
"""Of torch (aten/src/ATen/Context.h): 1 multiplies fp32 matrices as TF32, 0 does not; NVIDIA's containers set it to 1."""


PLAIN_PRODUCTS = f"fp32: products without TF32, of which this file says nothing ({TF32_VARIABLE}=1, --precision tf32)"
"""What is assumed of a configuration without 16-bit formats."""


def environment(plan: TrainingPlan) -> tuple[str, ...]:
    """Return the variables, ``NAME=1``, by which torch multiplies as the plan says where the engine has no option for it."""
    if not plan.workload.is_full_precision or plan.cluster.weakest_device.backend.is_host:
        return ()
    chosen = int(plan.workload.precision == "tf32")
    # torch for ROCm wants to be told twice.
    names = (TF32_VARIABLE,) if plan.cluster.is_nvidia else (TF32_VARIABLE, "HIPBLASLT_ALLOW_TF32")
    return tuple(f"{name}={chosen}" for name in names)


def on_command(plan: TrainingPlan) -> str:
    """Return `environment` as it stands before a command, with a blank; empty where there is none."""
    return "".join(f"{variable} " for variable in environment(plan))


def torchrun(plan: TrainingPlan) -> str:
    """Return the beginning of the line that starts the ranks of one node."""
    nodes = plan.cluster.num_nodes
    where = ' --rdzv-backend c10d --rdzv-endpoint "${RDZV_ENDPOINT:?host:port of the first node}"' if nodes > 1 else ""
    return f"torchrun --nnodes {nodes} --nproc-per-node {plan.cluster.largest_node}{where}"


def recompute_by_stage(plan: TrainingPlan) -> list[list[str]]:
    """Return what each block of each stage recomputes, in the order of the model."""
    layers = tuple(plan.model.staged(half_blocks=plan.layout.half_blocks).iter_layers())
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


def comment(text: str) -> str:
    """Return a line of a comment of a script, of YAML or of Python, whatever the text has in it: a name may hold a line end."""
    printable = "".join(each if each.isprintable() else " " for each in text)
    return "# " + " ".join(printable.split()) + "\n"
