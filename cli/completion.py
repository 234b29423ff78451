"""What the shell completes: names of the catalogue."""

from __future__ import annotations


def models(incomplete: str) -> list[str]:
    """Models that begin so; where none does, the shell offers files."""
    from ..schema.catalogue import model_names

    return [name for name in model_names() if name.startswith(incomplete)]


def clusters(incomplete: str) -> list[str]:
    """`local`, or devices behind a count: 64xH1 becomes 64xH100-SXM-80GB."""
    from ..schema.catalogue import device_entries

    count, times, begun = incomplete.rpartition("x")
    if times and all(part.isdecimal() for part in count.split("x")):
        return [f"{count}x{name}" for name in device_entries() if name.lower().startswith(begun.lower())]
    return [name for name in ("local",) if name.startswith(incomplete)]
