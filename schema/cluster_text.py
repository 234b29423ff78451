"""What a user types for CLUSTER -> the fields of a ClusterSpec.

Three forms. A name never changes its meaning with the files around it: the first form goes by its spelling alone.

    [NODES x] GPUS x DEVICE [/LINK]  256xH100-SXM-80GB, 8x8xH100-SXM-80GB/ib400; names of the catalogue, in any case
    PATH                             a TOML file (cluster_toml.py): ends with .toml, or names an existing file
    NAME[:RANKS]                     an entry point of the group "meshwright.clusters"; ours is `local`
"""

from __future__ import annotations

import difflib
import inspect
import re
from importlib import metadata
from typing import Any

from .catalogue import device_entries, find_device, find_link
from .cluster import MAX_DEVICES, ClusterSpec, NodeGroup
from .cluster_levels import catalogue_device, derived_levels
from .cluster_toml import cluster_from_file, file_mode, shown
from .errors import ConfigError

ENTRY_POINTS = "meshwright.clusters"

_SHORTHAND = re.compile(r"(?:([0-9]+)x)?([0-9]+)x([^/]+)(?:/(.+))?", re.IGNORECASE)
_NAME = re.compile(r"([A-Za-z_][\w.-]*)(?::(.*))?", re.ASCII)
_FORMS = (
    "devices:       256xH100-SXM-80GB, or nodes x devices and their network: 8x8xH100-SXM-80GB/ib400",
    "cluster file:  cluster.toml",
    "this machine:  local, or local:4 for four ranks",
)


def cluster_from_text(text: str) -> dict[str, Any]:
    """Fields of the ClusterSpec that a text names.

    Raises:
        ConfigError: the text is of none of the three forms, or what it names cannot be read.
    """
    text = text.strip()
    if not text or not text.isprintable() or len(text) > 4096:
        raise ConfigError(f"{shown(text)} is not a cluster", details=_FORMS)
    is_toml = text.lower().endswith(".toml")
    if not is_toml and (match := _SHORTHAND.fullmatch(text)):
        return _from_shorthand(*match.groups())
    if is_toml or file_mode(text) is not None:
        return cluster_from_file(text)
    if match := _NAME.fullmatch(text):
        points = metadata.entry_points(group=ENTRY_POINTS)
        if match[1] in points.names:
            return _from_entry_point(points[match[1]], match[2])
    reason = "no count x device, no file and no known name"
    raise ConfigError(f"{shown(text)} is not a cluster: {reason}", details=_FORMS, help=_near(text))


def _from_shorthand(nodes: str | None, gpus: str, device_name: str, link_name: str | None) -> dict[str, Any]:
    name, entry = find_device(device_name)
    num_nodes, per_node = (1, _count(gpus)) if nodes is None else (_count(nodes), _count(gpus))
    if nodes is None and per_node > entry["devices_per_node"]:
        num_nodes, per_node = _whole_nodes(per_node, entry["devices_per_node"], name), entry["devices_per_node"]
    _check_total(num_nodes * per_node)
    scaleout = entry["scaleout"] if link_name is None else _network(link_name, f"{num_nodes}x{per_node}x{name}")
    group = NodeGroup(
        device=catalogue_device(name, entry),
        num_nodes=num_nodes,
        devices_per_node=per_node,
        host_link_bytes_per_s=entry.get("host_link_bytes_per_s"),
    )
    counts = f"{num_nodes * per_node}" if nodes is None else f"{num_nodes}x{per_node}"
    return {
        "name": f"{counts}x{name}" + ("" if link_name is None else f"/{scaleout}"),
        "groups": (group,),
        "levels": derived_levels([(group, {**entry, "scaleout": scaleout})]),
    }


def _count(digits: str) -> int:
    if digits.strip("0") == "":
        raise ConfigError("a cluster needs at least one device, not 0")
    if len(digits) > 20:  # before int(), which refuses more than 4300 digits in its own words
        raise ConfigError(f"a count of {len(digits)} digits is more than the {MAX_DEVICES} devices that make sense")
    return _check_total(int(digits))


def _check_total(count: int) -> int:
    if count > MAX_DEVICES:
        raise ConfigError(f"{count} devices are more than the {MAX_DEVICES} that make sense")
    return count


def _whole_nodes(count: int, per_node: int, name: str) -> int:
    if count % per_node == 0:
        return count // per_node
    below = count - count % per_node
    size = max(size for size in range(1, per_node) if count % size == 0)
    raise ConfigError(
        f"{count} devices do not fill nodes of {per_node} {name}",
        help=f"use {below}x{name} or {below + per_node}x{name}, or state the nodes: {count // size}x{size}x{name}",
    )


def _network(link_name: str, devices: str) -> str:
    """Key of the scale-out link; it is checked, and then not used, where the cluster is one node."""
    key, entry = find_link(link_name)
    if entry["kind"] != "scale-out":
        raise ConfigError(
            f"{key} joins devices inside a node; after the slash stands the network between nodes",
            help=f"for example {devices}/ib400, or describe both links in a cluster file",
        )
    return key


def _from_entry_point(point: metadata.EntryPoint, argument: str | None) -> dict[str, Any]:
    if argument is not None and not re.fullmatch(r"[0-9]{1,8}", argument):
        message = f"after `{point.name}:` stands a number of ranks, not {shown(argument)}"
        raise ConfigError(message, help=f"{point.name}:4")
    try:
        function = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the cluster name {point.name} cannot be loaded from {point.value}: {error}") from None
    if argument is not None and not inspect.signature(function).parameters:
        raise ConfigError(f"the cluster name {point.name} takes no number of ranks", help=point.name)
    spec = function() if argument is None else function(int(argument))
    if not isinstance(spec, ClusterSpec):
        raise ConfigError(f"{point.name} ({point.value}) returned a {type(spec).__name__}, not a ClusterSpec")
    return {name: getattr(spec, name) for name in ClusterSpec.model_fields}


def _near(text: str) -> str | None:
    """Names like the text without its counts and link."""
    names = {alias.lower(): f"8x{key}" for key, entry in device_entries().items() for alias in (key, *entry["aliases"])}
    names |= {name.lower(): name for name in metadata.entry_points(group=ENTRY_POINTS).names}
    wanted = re.sub(r"^([^x]*[0-9]x)+", "", text.lower()).split("/")[0].split(":")[0]
    if wanted in names:
        return f"did you mean {names[wanted]}?"
    near = dict.fromkeys(names[match] for match in difflib.get_close_matches(wanted, names, n=3, cutoff=0.5))
    return f"did you mean {' or '.join(near)}?" if near else None
