"""The command that makes a plan again, from the plan: what differs from the defaults of `meshwright plan` is an option."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...planner.request import default_precision, is_trained_by_apply
from ...schema import ClusterSpec, MeshwrightError, ModelSpec
from ...schema.task import LowRank, Workload
from ...schema.units import GIB

if TYPE_CHECKING:
    from ...schema import TrainingPlan


OPTIONS = (
    "global_batch_size", "seq_len", "optimizer", "update", "paged_states", "attention", "loss", "recompute_modules",
    "token_dispatch", "engine",
)  # fmt: skip
"""Fields of a workload that are options of the same name."""


def command_of(plan: TrainingPlan) -> tuple[str, tuple[str, ...]]:
    """Return the command, and what it cannot say in words: a model or a cluster that no name gives, a setting without an option."""
    notes = []
    model, cluster, work, made = plan.model.name, plan.cluster.name, plan.workload, plan.provenance
    if not _is_named_model(plan):
        model = "config.json"
        notes.append(f"config.json is that of {plan.model.name}: the catalogue has no such model")
    if not _is_named_cluster(plan):
        cluster = "cluster.toml"
        notes.append(f"cluster.toml describes {plan.cluster.name}: no name gives this very cluster")
    words = ["meshwright", "plan", model, "--cluster", cluster]
    given = work.model_dump()
    for name in OPTIONS:
        value, default = given[name], Workload.model_fields[name].get_default(call_default_factory=True)
        if Workload.model_fields[name].is_required() or value != default:
            words += _option(f"--{name.replace('_', '-')}", value)
    words += list(_training(work))
    if work.precision != default_precision(plan.cluster):
        words += ["--precision", work.precision]
    if made.fixed:
        words += ["--fix", made.fixed]
    if made.space not in (None, "runnable" if is_trained_by_apply(plan.model, work) else "full"):
        words += ["--space", made.space]
    if (limits := made.offload) is not None:
        words += ["--offload", limits.kinds]
        if limits.host_memory_bytes is not None:
            words += ["--host-memory-gib", f"{limits.host_memory_bytes / GIB:g}"]
        if limits.storage_path is not None:
            words += ["--nvme", limits.storage_path, "--nvme-gib", f"{limits.storage_bytes / GIB:g}"]
    if plan.pareto:
        words += ["--pareto"]
    unsaid = {*Workload.model_fields} - {*OPTIONS, "precision", "adapters", "passes"}
    for name in sorted(unsaid):
        default = Workload.model_fields[name].get_default(call_default_factory=True)
        if getattr(work, name) != default:
            notes.append(f"{name}={getattr(work, name)} has no option")
    return shlex.join(words), tuple(notes)


def _option(name: str, value: object) -> list[str]:
    """Return the words of an option: a switch has no value, one that repeats stands before each."""
    if value is True:
        return [name]
    values = value if isinstance(value, list | tuple) else [value]
    return [word for one in values for word in (name, str(one))]


def _training(work: Workload) -> Iterator[str]:
    if not work.has_backward:
        yield from ("--train", "zeroth-order")
    elif work.adapters is not None:
        yield from ("--train", _adapters(work.adapters))


def _adapters(adapters: LowRank) -> str:
    words = [f"r={adapters.rank}", f"targets={'+'.join(adapters.targets)}"]
    for name, field in LowRank.model_fields.items():
        value = getattr(adapters, name)
        if name not in ("rank", "targets") and value != field.get_default(call_default_factory=True):
            words.append(f"{name}={str(value).lower()}")
    return "lora:" + ",".join(words)


def _is_named_model(plan: TrainingPlan) -> bool:
    try:
        return ModelSpec.named(plan.model.name) == plan.model
    except MeshwrightError:
        return False


def _is_named_cluster(plan: TrainingPlan) -> bool:
    if plan.cluster.name.startswith("local"):  # a name that would measure this machine
        return False
    try:
        return ClusterSpec.parse(plan.cluster.name) == plan.cluster
    except MeshwrightError:
        return False
