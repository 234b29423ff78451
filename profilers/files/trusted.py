"""Whether a profile may be used here: it is unaltered, and of this hardware and software."""

from __future__ import annotations

from pathlib import Path

from ...schema.errors import ConfigError, ProfileError
from ...schema.profile import Machine, Profile
from ..machine import identify

_COMPARED = {
    "device": "device",
    "backend": "backend",
    "torch": "torch",
    "python": "python",
    "driver": "driver",
}
"""Fields of Machine that must agree, and what messages call them; how many ranks and nodes it was is the profile's own affair."""


def load_profile(path: str | Path, *, allow_foreign: bool = False) -> tuple[Profile, tuple[str, ...]]:
    """A profile from a file, and what makes it foreign here where that is allowed.

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
    """What speaks against using a profile on this machine; empty when nothing does."""
    altered = ("its content was changed after it was measured: the hash differs",) if profile.is_altered else ()
    return (*altered, *machine_differences(profile.machine))


def machine_differences(measured: Machine) -> tuple[str, ...]:
    """In what this machine is another one than was measured."""
    try:
        here = identify(max(1, measured.num_devices // measured.num_nodes))
    except ConfigError as error:
        return (f"this machine cannot be what was measured: {error.message}",)
    pairs = [(title, str(getattr(measured, name)), str(getattr(here, name))) for name, title in _COMPARED.items()]
    return tuple(f"{title}: measured on {theirs}, here is {ours}" for title, theirs, ours in pairs if theirs != ours)
