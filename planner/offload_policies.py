"""The layout of a plan with an offload schedule under uniform policies: what switches for all layers alike would have given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..cost_models.layouts import RECOMPUTES
from ..cost_models.option_costs import OptionCosts
from ..schema import Estimate, OffloadSchedule, Plan
from ..schema.units import format_bytes
from ..solvers import offload_uniform
from ..solvers.offload_changes import Sums
from ..solvers.offload_instance import Choice, Instance
from ..solvers.offload_repair import Found, beyond_bytes, with_window
from ..solvers.offload_simulation import check
from .choose import TOO_LARGE, why_slower, why_too_large
from .compare import compare
from .explanation import Comparison
from .offload_costs import RECOMPUTE_OF, estimate_of, instances_of
from .offload_plan import options_of
from .offload_request import OffloadRequest
from .planning import estimate

STAY = (0, 1, 2)
"""Options (solvers/offload_instance.py) that move no activations: keep, selective and full recompute."""

MOVE = (3, 4)
"""All activations, or under full recompute the blocks' inputs."""


@dataclass(frozen=True)
class Policy:
    """What all layers do alike: where their states lie (`offload_uniform.PLACES`), and what their activations may do."""

    name: str
    text: str
    place: str
    options: tuple[int, ...]


NO_OFFLOAD = "no offload"

POLICIES = (
    Policy("activations", "all activations on the host, or the inputs of recomputed blocks", "device", MOVE),
    Policy("host updates", "all optimizer states on the host, which updates them (as ZeRO-Offload)", "host", STAY),
    Policy("states streamed", "all optimizer states on the host, streamed to the device", "streamed", STAY),
    Policy("parameters", "all parameters and states on the host (as FSDP2's CPUOffloadPolicy)", "parameters", STAY),
)


def under_policies(plan: Plan) -> Iterator[Comparison]:
    """The layout of a plan without offload and under each policy, with the recompute that is best for it, against the plan."""
    yield _without(plan)
    request = OffloadRequest.of(plan)
    assert request is not None
    anything = OffloadRequest(host_memory_bytes=request.host_memory_bytes)
    options = options_of(plan, plan.cluster)
    problems = instances_of(options, 0, anything)
    for policy in POLICIES:
        tried = [(problem, choice) for problem in problems for choice in _choices(problem, policy)]
        if tried:
            yield _compared(plan, policy, options, *_best(tried))


def _without(plan: Plan) -> Comparison:
    """Everything on the device, as any layout without a schedule is costed."""
    layouts = [plan.layout.replace(offload="none", recompute=recompute) for recompute in RECOMPUTES]
    costs = [(estimate(plan.model, plan.cluster, plan.workload, layout), layout) for layout in layouts]
    found, layout = min(costs, key=lambda each: (_beyond(each[0]), each[0].step_time_s))
    why = why_slower(found, plan.estimate) if found.fits else f"{why_too_large(found)}   [device memory (C6)]"
    reason = f"the same layout with everything on the device; recompute {layout.recompute}: {why}"
    return compare(plan, layout, found, reason=reason).replace(name=NO_OFFLOAD)


def _beyond(found: Estimate) -> int:
    return max(0, found.required_bytes - found.budget_bytes)


def _choices(problem: Instance, policy: Policy) -> Iterator[Choice]:
    """What the policy says of every layer, with each recompute; parameters of a tied embedding stay."""
    if policy.place == "parameters" and not problem.may.parameters:
        return
    for option in policy.options:
        if problem.allowed[option].any():
            choice = offload_uniform.policy(problem, option, policy.place)
            yield Choice(
                option=choice.option,
                host_optimizer=choice.host_optimizer,
                streamed_optimizer=choice.streamed_optimizer,
                parameters=choice.parameters & problem.streamable,
                storage=choice.storage,
            )


def _best(tried: list[tuple[Instance, Choice]]) -> tuple[Instance, Found]:
    """The fastest that fits, or the one that lacks the least."""

    def simulated(problem: Instance, choice: Choice) -> Found:
        sums = Sums(problem)
        found = Found(choice, sums.simulate(choice), 1)
        return found if check(problem, choice, found.simulated) else with_window(sums, found)

    results = [(problem, simulated(problem, choice)) for problem, choice in tried]
    return min(results, key=lambda each: (beyond_bytes(each[0], each[1].simulated), each[1].step_s))


def _compared(plan: Plan, policy: Policy, options: OptionCosts, problem: Instance, found: Found) -> Comparison:
    option = int(found.choice.option[problem.allowed.sum(axis=0).argmax()])
    recompute = RECOMPUTE_OF[option]
    layout = plan.layout.replace(recompute=recompute)
    estimate = estimate_of(options, 0, problem, found.choice, found.simulated)
    lacking = _lacking(plan, problem, found, estimate)
    held = found.simulated
    moved = OffloadSchedule(
        host_bytes=int(held.host_bytes * plan.cluster.largest_node),
        to_host_bytes=int(held.to_host_bytes),
        to_device_bytes=int(held.to_device_bytes),
    )
    reason = f"{policy.text}; recompute {recompute}: " + ("; ".join(lacking) or why_slower(estimate, plan.estimate))
    return compare(plan, layout, estimate, reason=reason, schedule=moved).replace(name=policy.name, fits=not lacking)


def _lacking(plan: Plan, problem: Instance, found: Found, estimate: Estimate) -> list[str]:
    """Which memory is too small for it, by the names of solvers/offload_instance.py."""
    ranks, needed = plan.cluster.largest_node, found.simulated.host_bytes
    lacking = []
    if found.simulated.peak_bytes > problem.cap_bytes * (1 + 1e-9):
        lacking.append(f"{why_too_large(estimate)}   [device memory (C6)]")
    if needed > problem.host_cap_bytes * (1 + 1e-9):
        lacking.append(
            f"{TOO_LARGE} into the host: needs {format_bytes(needed * ranks)} of "
            f"{format_bytes(problem.host_cap_bytes * ranks)} a node   [host memory (C7)]"
        )
    return lacking
