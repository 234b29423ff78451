"""Say what can be done with a plan that `meshwright apply` does not run: ask what `export` asks, and name what it would write."""

from __future__ import annotations

from pathlib import Path

from ...engines import exportable
from ...schema import TrainingPlan


def instead_of_apply(plan: TrainingPlan, path: Path) -> str:
    """Return why `apply` does not run a plan, and the command that writes it for an engine that does, or why none does."""
    engine, why_not = plan.workload.engine_facts, exportable(plan)
    takers = [target for target, reason in why_not.items() if reason is None]
    if engine.exporter in takers and not engine.is_own_runtime:
        return f"next: meshwright export {path} --to {engine.exporter}"
    lines = [
        f"not run by `meshwright apply`: {'; '.join(plan.why_not_applied(is_user_model=plan.model.code is not None))}"
    ]
    if takers:
        if engine.exporter not in ("", *takers):
            lines.append(f"not exported to {engine.exporter}: {why_not[engine.exporter]}")
        others = f" (or {', '.join(takers[1:])})" if takers[1:] else ""
        return "\n".join((*lines, f"next: meshwright export {path} --to {takers[0]}{others}"))
    targets: dict[str, list[str]] = {}
    for target, reason in why_not.items():
        targets.setdefault(str(reason), []).append(target)
    lines += [f"not exported to {', '.join(names)}: {reason}" for reason, names in targets.items()]
    return "\n".join((*lines, f"next: meshwright explain {path}; nothing here runs this plan: it is an estimate"))
