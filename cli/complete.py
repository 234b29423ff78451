"""What the shell offers when <Tab> is pressed: names of the catalogue and of the layout's fields, read when they are asked for."""

from __future__ import annotations

from typing import get_args


def complete_models(incomplete: str) -> list[str]:
    """Return the models of the catalogue that begin so; where none does, the shell offers files."""
    from ..schema.catalogue import model_names

    return [name for name in model_names() if name.startswith(incomplete)]


def complete_clusters(incomplete: str) -> list[str]:
    """Return `local`, devices behind a count (64xH1 becomes 64xH100-SXM-80GB) and their usual nodes without one."""
    from ..schema.catalogue import device_entries

    count, times, begun = incomplete.rpartition("x")
    if times and all(part.isdecimal() for part in count.split("x")):
        return [f"{count}x{name}" for name in device_entries() if name.lower().startswith(begun.lower())]
    nodes = [f"{entry['devices_per_node']}x{name}" for name, entry in device_entries().items()]
    return [name for name in ("local", *nodes) if name.startswith(incomplete)]


def complete_layout(incomplete: str) -> list[str]:
    """Return the fields of a layout that the last item begins, or the values of the field that it names."""
    from ..schema.layout import Layout, choices

    before, comma, item = incomplete.rpartition(",")
    name, equals, begun = item.partition("=")
    if equals and name in Layout.model_fields:
        kind = Layout.model_fields[name].annotation
        values = choices(name) or (("true", "false") if kind is bool else ())
        return [f"{before}{comma}{name}={value}" for value in values if value.startswith(begun)]
    given = {word.partition("=")[0] for word in before.split(",")}
    fields = (field for field in Layout.model_fields if field.startswith(item) and field not in given)
    return [f"{before}{comma}{field}=" for field in fields]


def complete_engines(incomplete: str) -> list[str]:
    """Return the engines whose configurations are read that begin so."""
    from ..engines import ENGINES

    return [name for name in ENGINES if name.startswith(incomplete)]


def complete_engine_names(incomplete: str) -> list[str]:
    """Return who trains or serves and begins so."""
    from ..schema.engine_facts import PLANNED_ENGINES
    from ..schema.serving import ServingEngine

    return [name for name in (*PLANNED_ENGINES, *get_args(ServingEngine)) if name.startswith(incomplete)]


def complete_targets(incomplete: str) -> list[str]:
    """Return what a plan can be written for that begins so."""
    from ..engines import RL_TARGETS, SERVING_TARGETS, TARGETS

    return [name for name in (*TARGETS, *SERVING_TARGETS, *RL_TARGETS) if name.startswith(incomplete)]
