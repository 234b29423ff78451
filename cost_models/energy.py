"""Energy of a step: each device draws a part of its power limit, which depends on what it does (coefficients.toml, [power]).

    E = sum over devices of LIMIT * (COMPUTE t_compute + MEMORY t_memory_bound + COMMUNICATION t_communication + WAITING t_waiting)

of the devices alone: hosts, switches, fans and losses of the supply come on top (about half as much again in a node of eight H100,
of which 8.4 kW were measured where the boards' limits are 5.6 kW, arXiv:2412.08602).
"""

from __future__ import annotations

from ..schema import ClusterSpec, ConfigError, TrainingEstimate
from ..schema.training_plan import TimeBreakdown
from .coefficients import packaged_coefficients

WORK = {
    "compute": ("compute", "recompute"),
    "memory_bound": ("optimizer",),
    "communication": ("tp", "cp", "ep", "dp", "pp"),
    "waiting": ("bubble", "offload"),
}
"""Kind of work -> parts of a step that are spent on it. Kernels of compute that memory binds count as compute."""


def has_power_limits(cluster: ClusterSpec) -> bool:
    """Return whether the power limit of every device is known."""
    return all(group.device.power_limit_w is not None for group in cluster.groups)


def power_limit_w(cluster: ClusterSpec) -> float:
    """Return the watts that all devices may draw together.

    Raises:
        ConfigError: the power limit of a device is unknown.
    """
    lacking = sorted({group.device.name for group in cluster.groups if group.device.power_limit_w is None})
    if lacking:
        raise ConfigError(
            f"the power limit of {', '.join(lacking)} is unknown, so energy is too",
            help="state power_limit_w of the device in a cluster file (docs/cluster.md)",
        )
    return sum(group.num_devices * (group.device.power_limit_w or 0.0) for group in cluster.groups)


def energy_j(breakdown_s: TimeBreakdown, cluster: ClusterSpec) -> float:
    """Return the joules that all devices draw in a step."""
    power = packaged_coefficients()["power"]
    busy_s = {work: sum(getattr(breakdown_s, part) for part in parts) for work, parts in WORK.items()}
    return power_limit_w(cluster) * float(sum(power[work] * seconds for work, seconds in busy_s.items()))


def step_energy_j(estimate: TrainingEstimate, cluster: ClusterSpec) -> float:
    """Return the joules of an estimated step."""
    return energy_j(estimate.breakdown_s, cluster)


def min_energy_j(step_s: float, compute_s: float, cluster: ClusterSpec) -> float:
    """Return joules that no step of ``step_s`` or more is below, which computes for ``compute_s`` at least."""
    power = packaged_coefficients()["power"]
    lowest = min(power[work] for work in WORK)
    return power_limit_w(cluster) * float(lowest * step_s + (power["compute"] - lowest) * compute_s)
