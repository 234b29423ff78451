"""Profiles as files: whether one may be used here, what it comes to in numbers, what differs between two, several as one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from ..schema.errors import ConfigError, ProfileError
from ..schema.model import ModelSpec
from ..schema.profile import Machine, Profile, Timed
from ..schema.task import Workload
from .machine import identify
from .measure.compute import peak_flops
from .measure.links import bus_factor

_COMPARED = ("device", "backend", "torch", "python", "driver")
"""Fields of Machine that must agree; how many ranks and nodes it was is the profile's own affair."""

_MEASURED = {"time_s", "spread"}


def require_layers_of_engine(profile: Profile, model: ModelSpec, workload: Workload) -> None:
    """Require that a model's layers were measured under the engine of the plan, where any of them were.

    Raises:
        ProfileError: all of them were measured under others.
    """
    engines = profile.engines_of({run.layer for run in model.layers}, model.hidden_dim)
    if engines and workload.engine not in engines:
        raise ProfileError(
            f"the layers of {model.name} in the profile were measured under {', '.join(sorted(engines))}, "
            f"the plan is for {workload.engine}",
            help=f"plan with --engine {min(engines)}, give a profile without layers, or add --allow-foreign-profile, "
            "which takes all but the layers from it",
        )


def load_profile(path: str | Path, *, allow_foreign: bool = False) -> tuple[Profile, tuple[str, ...]]:
    """Load a profile from a file; return it and what makes it foreign here where that is allowed.

    Raises:
        ConfigError: the file is no profile.
        ProfileError: it was altered after it was measured, or is of other hardware or software; says what differs.
    """
    profile = Profile.load(path)
    problems = mismatches(profile)
    if problems and not allow_foreign:
        raise ProfileError(
            f"{path} cannot be trusted on this machine",
            details=problems,
            help="measure here with `meshwright profile`, or add --allow-foreign-profile",
        )
    return profile, problems


def mismatches(profile: Profile) -> tuple[str, ...]:
    """Return what speaks against using a profile on this machine; empty when nothing does."""
    altered = ("its content was changed after it was measured: the hash differs",) if profile.is_altered else ()
    return (*altered, *machine_differences(profile.machine))


def machine_differences(measured: Machine) -> tuple[str, ...]:
    """Return in what this machine differs from the measured one."""
    try:
        here = identify(max(1, measured.num_devices // measured.num_nodes))
    except ConfigError as error:
        return (f"this machine cannot be what was measured: {error.message}",)
    pairs = ((name, getattr(measured, name), getattr(here, name)) for name in _COMPARED)
    return tuple(f"{name}: measured on {theirs}, here is {ours}" for name, theirs, ours in pairs if theirs != ours)


# --- numbers ----------------------------------------------------------------------------------------------------------


def summary(profile: Profile) -> dict[str, float]:
    """Return named rates: FLOP/s, bytes/s or seconds, as the name says."""
    rates_by_name: dict[str, float] = {"memory_bandwidth_bytes_per_s": profile.memory_bandwidth_bytes_per_s}
    with suppress(ProfileError):  # a profile of links only
        rates = peak_flops(profile.matmuls).model_dump(exclude_none=True)
        rates_by_name |= {f"{dtype}_flops_per_s": rate for dtype, rate in rates.items()}
    for op in dict.fromkeys(point.op for point in profile.collectives):
        same_op = [point for point in profile.collectives if point.op == op]
        large, small = max(same_op, key=lambda p: p.size_bytes), min(same_op, key=lambda p: p.size_bytes)
        rates_by_name[f"{op}_bus_bytes_per_s"] = bus_factor(op, large.group_size) * large.size_bytes / large.time_s
        rates_by_name[f"{op}_latency_s"] = small.time_s
    for copy in profile.host_copies:
        if copy.host_memory == "pinned" and copy.devices_at_once == 1:
            rates_by_name[f"{copy.direction}_bytes_per_s"] = copy.size_bytes / copy.time_s
    return rates_by_name


def compare(first: Profile, second: Profile) -> dict[str, Any]:
    """Return ``{"machine": {field: [a, b]}, "rates": {name: [a, b]}, "points": {kind: {"both", "first", "second", "ratio"}}}``.

    A ratio is the median of second over first of the seconds of points that both measured; None where there is none.
    """
    machines = first.machine.model_dump(), second.machine.model_dump()
    rates = summary(first), summary(second)
    lists = point_lists(first), point_lists(second)
    return {
        "machine": {name: [a, machines[1][name]] for name, a in machines[0].items() if a != machines[1][name]},
        "rates": {name: [rates[0].get(name), rates[1].get(name)] for name in {**rates[0], **rates[1]}},
        "points": {name: _points(*(known.get(name, ()) for known in lists)) for name in {**lists[0], **lists[1]}},
    }


def _points(first: tuple[Timed, ...], second: tuple[Timed, ...]) -> dict[str, Any]:
    a, b = ({_identity(point): point.time_s for point in points} for points in (first, second))
    both = [b[key] / a[key] for key in a if key in b]
    counts = {"both": len(both), "first": len(a) - len(both), "second": len(b) - len(both)}
    return {**counts, "ratio": median(both) if both else None}


# --- several as one ---------------------------------------------------------------------------------------------------


def point_lists(profile: Profile) -> dict[str, tuple[Any, ...]]:
    """Return the fields of a profile that are lists of measurements with a time, by name."""
    return {
        name: value
        for name in Profile.model_fields
        if isinstance(value := getattr(profile, name), tuple) and value and isinstance(value[0], Timed)
    }


def _identity(point: Timed) -> str:
    """Return what a point is a measurement of: everything but the result."""
    return point.model_dump_json(exclude=_MEASURED)


def merge_profiles(profiles: Sequence[Profile]) -> Profile:
    """Merge profiles into one; what is no list of points is the newest profile's, and so are the bandwidths."""
    if len(profiles) < 2:
        raise ConfigError("one profile is nothing to merge", help="give two or more")
    ordered = sorted(profiles, key=lambda profile: profile.created)
    newest = ordered[-1]
    for profile in ordered:
        if profile.is_altered:
            raise ProfileError(f"the profile of {profile.created} was changed after it was measured: the hash differs")
        if profile.machine != newest.machine:
            values = {
                name: (getattr(profile.machine, name), getattr(newest.machine, name)) for name in Machine.model_fields
            }
            unlike = tuple(f"{name}: {a} and {b}" for name, (a, b) in values.items() if a != b)
            raise ProfileError("the profiles are of different machines", details=unlike)
    fields: dict[str, Any] = {}
    for name in dict.fromkeys(name for profile in ordered for name in point_lists(profile)):
        fields[name] = _merge_timed([getattr(profile, name) for profile in ordered])
    for name in ("layer_memory", "step_memory", "allocator", "node_bandwidth_bytes_per_s", "overlaps"):
        fields[name] = next((value for p in reversed(ordered) if (value := getattr(p, name))), getattr(newest, name))
    fields["duration_s"] = sum(profile.duration_s for profile in ordered)
    return newest.replace(**fields, content_sha256="").sealed()


def _merge_timed(lists: Sequence[tuple[Timed, ...]]) -> tuple[Timed, ...]:
    """Return the points of all lists, each once, with the median of its times and the largest of its spreads."""
    by_identity: dict[str, list[Timed]] = defaultdict(list)
    for point in chain.from_iterable(lists):
        by_identity[_identity(point)].append(point)
    return tuple(
        same[-1].replace(time_s=median(p.time_s for p in same), spread=max(p.spread for p in same))
        for same in by_identity.values()
    )
