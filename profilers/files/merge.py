"""Several profiles of one machine as one: every point of any of them, of points measured more than once the median."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from ...schema.errors import ConfigError, ProfileError
from ...schema.profile import Profile, Timed

_MEASURED = ("time_s", "spread")


def point_lists(profile: Profile) -> dict[str, tuple[Any, ...]]:
    """The fields of a profile that are lists of measurements with a time, by name."""
    return {
        name: value
        for name in Profile.model_fields
        if isinstance(value := getattr(profile, name), tuple) and value and isinstance(value[0], Timed)
    }


def point_identity(point: Timed) -> str:
    """What a point is a measurement of: everything but the result."""
    return point.model_dump_json(exclude=set(_MEASURED))


def merge_profiles(profiles: Sequence[Profile]) -> Profile:
    """One profile; what is no list of points is the newest profile's, and so are the bandwidths.

    Raises:
        ConfigError: fewer than two profiles.
        ProfileError: they are of different machines, or one was altered.
    """
    if len(profiles) < 2:
        raise ConfigError("one profile is nothing to merge", help="give two or more")
    ordered = sorted(profiles, key=lambda profile: profile.created)
    newest = ordered[-1]
    for profile in ordered:
        if profile.is_altered:
            raise ProfileError(f"the profile of {profile.created} was changed after it was measured: the hash differs")
        if profile.machine != newest.machine:
            raise ProfileError("the profiles are of different machines", details=_unlike(profile, newest))
    fields: dict[str, Any] = {}
    for name in dict.fromkeys(name for profile in ordered for name in point_lists(profile)):
        fields[name] = _joined([getattr(profile, name) for profile in ordered])
    for name in ("layer_memory", "step_memory", "allocator", "node_bandwidth_bytes_per_s", "overlaps"):
        fields[name] = next((value for p in reversed(ordered) if (value := getattr(p, name))), getattr(newest, name))
    fields["duration_s"] = sum(profile.duration_s for profile in ordered)
    return newest.replace(**fields, content_sha256="").sealed()


def _joined(lists: Sequence[tuple[Timed, ...]]) -> tuple[Timed, ...]:
    """Points of all lists, each once, with the median of its times and the largest of its spreads."""
    found: dict[str, list[Timed]] = {}
    for points in lists:
        for point in points:
            found.setdefault(point_identity(point), []).append(point)
    return tuple(
        same[-1].replace(time_s=median(p.time_s for p in same), spread=max(p.spread for p in same))
        for same in found.values()
    )


def _unlike(first: Profile, second: Profile) -> tuple[str, ...]:
    names = type(first.machine).model_fields
    pairs = [(name, getattr(first.machine, name), getattr(second.machine, name)) for name in names]
    return tuple(f"{name}: {a} and {b}" for name, a, b in pairs if a != b)
