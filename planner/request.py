"""What is asked of the planner: PlanRequest, what may leave the devices (OffloadRequest), and until when (Deadline).

Every search of the planner takes one PlanRequest, so that it can be asked again with something changed (`dataclasses.replace`):
another cluster, other fixed fields, a smaller workload.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypedDict

from ..cost_models.hardware.streams import HostRates, host_rates
from ..schema import (
    ClusterSpec,
    ConfigError,
    Generation,
    ModelSpec,
    OffloadLimits,
    PlanProvenance,
    SolverLimitError,
    TrainingPlan,
    Workload,
)
from ..schema.engine_facts import PLANNED_ENGINES, require_our_engine
from ..schema.errors import UnknownModelError
from ..schema.layout import check_fields, format_assignments, parse_assignments
from ..schema.layout_rules import VERSION_RULES, broken_rules, problem_on
from ..schema.local_updates import SyncLimits
from ..schema.plan import Preference
from ..schema.runnable import why_not_runnable, why_not_trainable
from ..schema.task import Precision, Task
from ..solvers.branch_and_bound import OnProgress

OffloadKinds = Literal["none", "auto", "activations", "optimizer", "params"]


class Deadline:
    """The end of a time limit that began when this was made, or of the user's patience (`stop`), whichever comes first.

    Long array passes look at it between their pieces (`require`); searches look at it before every node (`is_over`).
    """

    def __init__(self, limit_s: float = float("inf"), *, within: Deadline | None = None) -> None:
        """Start the clock; a stop of the deadline that this one is ``within`` ends it too."""
        self.limit_s = limit_s
        self._within = within
        self._end_s = time.perf_counter() + limit_s
        self.is_stopped = False
        """Somebody asked to stop."""

    @property
    def is_over(self) -> bool:
        """Stop now, with what there is."""
        if self._within is not None and self._within.is_stopped:
            return True
        return self.is_stopped or time.perf_counter() >= self._end_s

    @property
    def remaining_s(self) -> float:
        """Seconds, at least 0."""
        return 0.0 if self.is_stopped else max(0.0, self._end_s - time.perf_counter())

    def restart(self) -> None:
        """Start the clock again, after what does not count: measuring this machine takes as long as it takes."""
        self._end_s = time.perf_counter() + self.limit_s

    def stop(self) -> None:
        """Ask for an early end; safe in a signal handler."""
        self.is_stopped = True

    def require(self, doing: str) -> None:
        """Go on only while there is time: without bounds on the full space nothing can be certified.

        Raises:
            SolverLimitError: time is over; the message names what was being done.
        """
        if self.is_over:
            raise self.error(f"while {doing}")

    def error(self, when: str, *details: str) -> SolverLimitError:
        """Return the error for a search that ended before it had any layout that fits."""
        ended = "was stopped" if self.is_stopped else f"ran into its time limit of {self.limit_s:g} s"
        return SolverLimitError(
            f"the search {ended} {when}, before any layout that fits was found",
            details=details,
            help="raise --time-limit-s, or fix some degrees with --fix so that fewer layouts are to be compared",
        )


@dataclass(frozen=True, kw_only=True)
class OffloadRequest:
    """What may leave the devices, and for where.

    Attributes:
        kinds: auto: everything; none: nothing.
        host_memory_bytes: of one node; None: as the cluster says.
        storage_path, storage_bytes: a folder of each node's drives and what may be written there; None: no storage.
        host_attention_bytes_per_s: keys and values that a node's processors attend to; None: the default coefficient.
        drive_attention_bytes_per_s: of generation: those that a node's drives attend to within themselves; None: drives only store.
    """

    kinds: OffloadKinds = "auto"
    host_memory_bytes: float | None = None
    storage_path: str | None = None
    storage_bytes: float = 0.0
    host_attention_bytes_per_s: float | None = None
    drive_attention_bytes_per_s: float | None = None

    @classmethod
    def from_plan(cls, plan: TrainingPlan) -> OffloadRequest | None:
        """Return what a plan's search was allowed to move; of a plan that does not say so, what its schedule was given."""
        allowed, schedule = plan.provenance.offload, plan.offload
        if allowed is not None:
            return cls(**allowed.model_dump())
        if schedule is None:
            return None
        return cls(
            host_memory_bytes=schedule.host_budget_bytes,
            storage_path=schedule.storage_path,
            storage_bytes=float(schedule.storage_bytes),
        )

    @property
    def limits(self) -> OffloadLimits | None:
        """As a plan says it; None: nothing may leave."""
        if self.kinds == "none":
            return None
        return OffloadLimits(
            kinds=self.kinds,
            host_memory_bytes=self.host_memory_bytes,
            storage_path=self.storage_path,
            storage_bytes=self.storage_bytes,
        )

    def rates(self, workload: Workload, cluster: ClusterSpec) -> HostRates:
        """Return the rates of one rank's host."""
        return host_rates(workload, cluster, memory_bytes=self.host_memory_bytes)


class RequestOptions(TypedDict, total=False):
    """Options that `plan`, `pareto` and `cheapest` share; `PlanRequest.create` says what they mean."""

    fixed: Mapping[str, Any] | None
    runnable: bool | None
    offload: OffloadRequest | None
    deadline: Deadline | None
    time_limit_s: float
    on_progress: OnProgress | None
    latency_limit_s: float | None
    batch_tolerance: float
    prefer: Preference
    local_updates: SyncLimits | None


_USER_MODEL = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
ModelInput = ModelSpec | str | Path
ClusterInput = ClusterSpec | str | Path
"""As an object, or as one types it for the command line."""


def read_inputs(
    model: ModelInput, cluster: ClusterInput, task: Task | None, options: Mapping[str, Any]
) -> tuple[ModelSpec, ClusterSpec, Task, dict[str, Any]]:
    """Return model, cluster and task as objects, and the options that are not fields of the task.

    Raises:
        ConfigError: a text names no model or cluster; there is neither a task nor the fields of one, or there are both.
    """
    length = options.get("seq_len") if task is None else getattr(task, "seq_len", None)
    model = resolve_model(str(model), length) if isinstance(model, str | Path) else model
    cluster = ClusterSpec.parse(str(cluster)) if isinstance(cluster, str | Path) else cluster
    known = RequestOptions.__annotations__
    fields = {name: value for name, value in options.items() if name not in known}
    others = {name: value for name, value in options.items() if name in known}
    if task is not None:
        if fields:
            raise ConfigError(
                f"unknown options {', '.join(fields)}",
                help=f"fields of {type(task).__name__} are part of the task that is given; options are {', '.join(known)}",
            )
        return model, cluster, task, others
    kind = Generation if {"prompt_len", "generate_len"} & fields.keys() else Workload
    if "precision" not in fields:
        fields["precision"] = default_precision(cluster)
        if kind is Generation:
            fields["precision"] = fields["precision"].removesuffix("-mixed")
    return model, cluster, kind(**fields), others


def resolve_model(text: str, seq_len: int | None, sample_batch: str | None = None) -> ModelSpec:
    """Read what a user types for MODEL; one of no known family is traced for sequences of ``seq_len`` tokens, if they are known.

    ``module:name`` is a user's own module, traced with a batch (profilers/module/user_code.py).

    Raises:
        ConfigError: there is no such name or file, or transformers cannot build its model either.
    """
    if _USER_MODEL.fullmatch(text):
        from ..profilers.module.user_code import profile_user_model

        return profile_user_model(text, sample_batch, seq_len=seq_len)
    if sample_batch is not None:
        raise ConfigError(
            f"--sample-batch with {text}, which is no module of yours",
            help="leave it out, or give MODEL as module:name",
        )
    try:
        return ModelSpec.resolve(text)
    except UnknownModelError:
        if seq_len is None:
            raise
        # With torch and transformers, which plans of known families do without.
        from ..profilers.module.configs import trace_config

        return trace_config(text, seq_len=seq_len)


@dataclass(frozen=True)
class PlanRequest:
    """Inputs of a search for one cluster.

    Attributes:
        model, cluster, task: what to train or to generate with, where, and how.
        fixed: fields of Layout that the search must keep, e.g. ``{"tp": 8}``; of generation ``batch_size``, sequences of a block on
            each replica, and ``tp``, devices that hold the model together.
        runnable: only layouts that `meshwright apply` of this version executes.
        offload: what may leave the devices (docs/offload.md); None: layouts without an offload schedule only, and of generation
            all that the host has.
        deadline: of everything that is done for this request.
        on_progress: called after every expansion.
        latency_limit_s: of generation: from the prompts to the last token of a block.
        batch_tolerance: of training: part of the global batch by which it may be rounded up or down, where a sequence then takes
            less time (planner/variants.py).
        prefer: plain: of layouts that may be as fast the simplest (planner/choice.py); fastest: by prediction.
        local_updates: of training over regions: how far these may go by themselves (planner/regions.py); None: a sum each step.
    """

    model: ModelSpec
    cluster: ClusterSpec
    task: Task
    fixed: Mapping[str, Any] = field(default_factory=dict)
    runnable: bool = False
    offload: OffloadRequest | None = None
    deadline: Deadline = field(default_factory=Deadline, compare=False)
    on_progress: OnProgress | None = field(default=None, compare=False)
    latency_limit_s: float | None = None
    batch_tolerance: float = 0.0
    prefer: Preference = "plain"
    local_updates: SyncLimits | None = None

    def __post_init__(self) -> None:
        if self.model.code is not None and self.model.code.works and isinstance(self.task, Workload):
            from .placements import with_placements

            object.__setattr__(self, "model", with_placements(self.model, self.cluster, self.task))

    @property
    def workload(self) -> Workload:
        """The task, which is training."""
        assert isinstance(self.task, Workload)
        return self.task

    @classmethod
    def create(
        cls,
        model: ModelSpec,
        cluster: ClusterSpec,
        task: Task,
        *,
        fixed: Mapping[str, Any] | None = None,
        runnable: bool | None = None,
        offload: OffloadRequest | None = None,
        deadline: Deadline | None = None,
        time_limit_s: float = 60.0,
        on_progress: OnProgress | None = None,
        latency_limit_s: float | None = None,
        batch_tolerance: float = 0.0,
        prefer: Preference = "plain",
        local_updates: SyncLimits | None = None,
    ) -> PlanRequest:
        """Check what a user asks for and fill in what was left open.

        Args:
            fixed: as above; ``offload=scheduled`` asks for offload schedules, as ``offload`` does.
            runnable: None: where `meshwright apply` trains the model, and all of the engine where it does not.
            latency_limit_s: of generation only.
            local_updates: of training with our runtime only, on a cluster whose groups stand in regions.
            deadline: stands in for ``time_limit_s`` where somebody may end the search earlier (`Deadline.stop`).

        Raises:
            ConfigError: a field is unknown or out of range, or no plan is made for the engine.
        """
        fields = check_fields(fixed or {}, task.fixable)
        deadline = deadline or Deadline(time_limit_s)
        if not 0 <= batch_tolerance < 1 or (batch_tolerance and not isinstance(task, Workload)):
            raise ConfigError(
                f"batch_tolerance {batch_tolerance:g}: a part of the global batch of training, from 0 to below 1",
                help="e.g. --batch-tolerance 5%",
            )
        if local_updates is not None:
            _require_islands(cluster, task, offload)
        if not isinstance(task, Workload):
            if runnable:
                raise ConfigError("`meshwright apply` runs training only", help="leave out runnable (--space runnable)")
            return cls(model, cluster, task, fields, False, offload, deadline, on_progress, latency_limit_s)
        if latency_limit_s is not None:
            raise ConfigError(
                "a step of training has no latency that could be limited", help="leave out latency_limit_s"
            )
        if task.engine_facts.rules is None:
            raise ConfigError(f"cannot plan for {task.engine}", help="plan for one of " + ", ".join(PLANNED_ENGINES))
        if task.engine_facts.lacks and (lacking := task.engine_facts.lacks(model, task)):
            raise ConfigError(
                f"{task.engine} does not train {model.name} as asked", details=lacking, help="plan without --engine"
            )
        if fields.get("offload") == "scheduled":
            del fields["offload"]
            offload = offload or OffloadRequest()
        elif offload is not None and offload.kinds == "none":
            offload = None
        if model.code is not None and (task.adapters is not None or offload is not None):
            what = "adapters beside" if task.adapters is not None else "offload of"
            raise ConfigError(
                f"{what} {model.name}: it was traced from code, in which their places are not known",
                help="leave them out",
            )
        if runnable is None:
            runnable = is_trained_by_apply(model, task)
        elif runnable:
            require_our_engine(task.engine)
        return cls(
            model, cluster, task, fields, runnable, offload, deadline, on_progress,
            batch_tolerance=batch_tolerance, prefer=prefer, local_updates=local_updates,
        )  # fmt: skip

    def require_one_batch(self, what: str) -> None:
        """Refuse a tolerance for what compares layouts of one batch.

        Raises:
            ConfigError: there is a tolerance.
        """
        if self.batch_tolerance:
            raise ConfigError(f"{what} is of one global batch", help="leave out batch_tolerance (--batch-tolerance)")

    def provenance(self) -> PlanProvenance:
        """Return where a plan that answers this request comes from."""
        inputs = (self.model, self.cluster, self.task)
        text = "\n".join([*(part.model_dump_json() for part in inputs), repr(sorted(self.fixed.items()))])
        return PlanProvenance(
            meshwright=version("meshwright"),
            created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            inputs_sha256=hashlib.sha256(text.encode()).hexdigest(),
            fixed=format_assignments(self.fixed),
            space=("runnable" if self.runnable else "full") if isinstance(self.task, Workload) else None,
            offload=None if self.offload is None else self.offload.limits,
            prefer=self.prefer,
        )

    @classmethod
    def from_plan(cls, plan: TrainingPlan, deadline: Deadline | None = None) -> PlanRequest:
        """Return what a plan answers; of a plan that does not say its space, the smallest one that has its layout."""
        runnable = plan.provenance.space == "runnable"
        if plan.provenance.space is None:
            broken = broken_rules(plan.layout, problem_on(plan.model, plan.workload, plan.cluster), VERSION_RULES)
            runnable = is_trained_by_apply(plan.model, plan.workload) and not broken
        fixed = parse_assignments(plan.provenance.fixed)
        if fixed.get("offload") == "scheduled":
            del fixed["offload"]
        offload = OffloadRequest.from_plan(plan)
        updates = plan.local_updates
        return cls(
            plan.model, plan.cluster, plan.workload, fixed, runnable, offload, deadline or Deadline(),
            prefer=plan.provenance.prefer, local_updates=None if updates is None else updates.limits,
        )  # fmt: skip


def _require_islands(cluster: ClusterSpec, task: Task, offload: OffloadRequest | None) -> None:
    lacks = [
        (not cluster.region_links, f"the groups of {cluster.name} stand in no regions"),
        (not isinstance(task, Workload) or not task.has_backward, "local updates are of training with a backward pass"),
        (isinstance(task, Workload) and not task.engine_facts.is_own_runtime, "only our own runtime makes them"),
        (isinstance(task, Workload) and task.adapters is not None, "adapters are small: sum them up each step"),
        (isinstance(task, Workload) and task.lengths is not None, "plans for unequal lengths are of one cluster"),
        (offload is not None and offload.kinds != "none", "offload schedules are of one cluster"),
    ]
    if why := tuple(text for is_lacking, text in lacks if is_lacking):
        raise ConfigError(
            "local updates of regions do not suit what is asked",
            details=why,
            help="--sync step, or regions as in docs/regions.md",
        )


def is_trained_by_apply(model: ModelSpec, workload: Workload) -> bool:
    """Return whether `meshwright apply` of this version trains a model, one traced from code by a script of the user's."""
    lacking = why_not_runnable(model, workload) if model.code is None else why_not_trainable(workload)
    return workload.engine_facts.is_own_runtime and not lacking


def default_precision(cluster: ClusterSpec) -> Precision:
    """Return bf16-mixed where the device has a bf16 rate, else fp16-mixed; fp32 on a CPU.

    Raises:
        ConfigError: the device has none of the three.
    """
    device = cluster.weakest_device
    if device.backend.is_host:
        return "fp32"
    choices: tuple[tuple[Precision, str], ...] = (("bf16-mixed", "bf16"), ("fp16-mixed", "fp16"), ("fp32", "fp32"))
    for precision, peak in choices:
        if getattr(device.peak_flops_per_s, peak) is not None:
            return precision
    raise ConfigError(f"{device.name} has no bf16, fp16 or fp32 rate")
