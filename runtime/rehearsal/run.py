"""All kinds of ranks of a plan, rehearsed one after another and set beside the plan's own figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...cost_models.stage.traffic import collective_bytes
from ...schema.errors import MeshwrightError, RuntimeMismatchError
from ...schema.rehearsal import CollectiveCount, Failure, LargestTensors, Rehearsal, RehearsedKind
from ...schema.training_plan import TrainingPlan
from .kinds import RankKind, rank_kinds
from .many_passes import Extrapolation, with_few_passes
from .peak import Peak, find_peak
from .rank import RehearsalError, Setting, rehearse_rank
from .recorder import Log
from .reordering import Contents, contents_in_the_middle, reordered
from .timeline import step_time
from .trace import OPS, Trace


def rehearse(
    plan: TrainingPlan,
    *,
    ranks: Sequence[int] = (),
    setting: Setting | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    worst: bool = True,
) -> Rehearsal:
    """Let every kind of rank of a plan go through a step without devices, and say what it holds and sends.

    Args:
        ranks: only the kinds of these ranks.
        setting: another module than the plan's model, with its loss.
        progress: told how many kinds are done, of how many.
        worst: experts are rehearsed with the most rows as well.

    Raises:
        ConfigError: a rank that the plan does not have.
        RuntimeMismatchError: this version does not run such a plan.
    """
    setting = setting or Setting()
    lacking = plan.why_not_applied(is_user_model=setting.is_user_model)
    if lacking:
        raise RuntimeMismatchError(
            "`meshwright apply` cannot run this plan, so that there is nothing to rehearse", details=lacking
        )
    short = None if setting.script else with_few_passes(plan)
    if short is not None:
        few, more = (rehearse(one, ranks=ranks, setting=setting, progress=progress, worst=worst) for one in short)
        return Extrapolation(*short, plan).of(few, more)
    kinds = rank_kinds(plan, ranks)
    rehearsed, failures = list[RehearsedKind](), list[Failure]()
    capacity = plan.cluster.weakest_device.memory_bytes
    logs, traces = _Logs(plan), dict[RankKind, Trace]()
    for done, kind in enumerate(kinds):
        progress(done, len(kinds))
        try:
            log = logs.log(kind, setting)
            if log.trace is not None:
                traces[kind] = log.trace
            peak = find_peak(log, capacity=int(capacity))
            peak_of_worst = None
            if worst and plan.layout.ep > 1:
                peak_of_worst = find_peak(logs.log(kind, replace(setting, is_worst=True))).allocated_bytes
            rehearsed.append(_compared(plan, kind, log, peak, peak_of_worst))
        except RehearsalError as error:
            failures.append(Failure(rank=kind.rank, stage=kind.stages[0], message=error.message, details=error.details))
        except MeshwrightError as error:
            raise type(error)(
                f"rank {kind.rank}, stage {kind.stages[0]}: {error.message}", details=error.details, help=error.help
            ) from None
    progress(len(kinds), len(kinds))
    runs = not failures
    budget = plan.estimate.budget_bytes
    is_timed = runs and {stage for kind in traces for stage in kind.stages} == set(range(len(plan.stages)))
    parts = step_time(plan, traces) if is_timed and plan.offload is None else {}
    return Rehearsal(
        model=plan.model.name, cluster=plan.cluster.name, layout=str(plan.layout), world_size=plan.layout.world_size,
        runs=runs, fits=runs and all(kind.peak_reserved_bytes <= budget for kind in rehearsed), budget_bytes=budget,
        kinds=tuple(rehearsed), failures=tuple(failures), notes=tuple(_notes(plan)), time_parts=parts,
    )  # fmt: skip


class _Logs:
    """Logs of ranks, of those with alike stages in the middle of a pipeline one that was rehearsed and others made of it."""

    def __init__(self, plan: TrainingPlan) -> None:
        self._plan, self._known = plan, dict[tuple[Contents, bool], tuple[RankKind, Log]]()

    def log(self, kind: RankKind, setting: Setting) -> Log:
        """Return the log of a rank."""
        contents = None if setting.script else contents_in_the_middle(self._plan, kind)
        if contents is None:
            return rehearse_rank(self._plan, kind.rank, setting)
        known = self._known.get((contents, setting.is_worst))
        log = None if known is None else reordered(known[1], self._plan, known[0], kind)
        if log is None:
            log = rehearse_rank(self._plan, kind.rank, setting)
            self._known[contents, setting.is_worst] = kind, log
        return log


def _notes(plan: TrainingPlan) -> list[str]:
    notes = []
    if plan.layout.ep > 1:
        notes.append("every rank's experts get as many rows; the worst case is beside")
    if not plan.cluster.weakest_device.backend.is_host:
        notes.append(
            "kernels are those of NVIDIA's GPUs by torch's flash attention; libraries' own workspaces are not counted"
        )
    return notes


def _compared(plan: TrainingPlan, kind: RankKind, log: Log, peak: Peak, worst: int | None) -> RehearsedKind:
    predicted = plan.estimate.stages[plan.rank_of_stage[kind.stages[0]]].memory_bytes
    counts: dict[tuple[str, str], list[int]] = {}
    for (axis, op), (count, num_bytes) in log.messages.items():
        entry = counts.setdefault((axis, OPS.get(op, op)), [0, 0])
        entry[0] += count
        entry[1] += num_bytes
    formulas = collective_bytes(plan, kind.stages)
    return RehearsedKind(
        stage=kind.stages[0], stages=kind.stages, rank=kind.rank, ranks=kind.ranks,
        peak_allocated_bytes=peak.allocated_bytes, initial_allocated_bytes=peak.initial_bytes,
        peak_reserved_bytes=peak.reserved_bytes,
        expandable_reserved_bytes=peak.expandable_bytes, predicted_allocated_bytes=predicted.total,
        worst_allocated_bytes=worst, memory_bytes=dict(peak.by_category),
        predicted_memory_bytes=predicted.model_dump(), moment=peak.moment, operator=peak.operator, module=peak.module,
        largest=tuple(
            LargestTensors(category=category, operator=operator, bytes=num_bytes, count=count)
            for category, operator, num_bytes, count in peak.largest
        ),
        collectives=tuple(
            CollectiveCount(
                axis=axis, op=op, count=count, bytes=num_bytes,
                predicted_bytes=round(formulas[axis, op]) if (axis, op) in formulas else None,
            )
            for (axis, op), (count, num_bytes) in sorted(counts.items())
        ),
        flops=sum(log.flops.values()), allocations=len(log.num_bytes),
    )  # fmt: skip
