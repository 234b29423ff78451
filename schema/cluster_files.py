"""What a user writes for a cluster -> the fields of a ClusterSpec: a short text, or a TOML file.

A text has one of three forms. A name never changes its meaning with the files around it: the first form goes by its spelling alone.

    [NODES x] GPUS x DEVICE [/LINK]  256xH100-SXM-80GB, 8x8xH100-SXM-80GB/ib400; names of the catalogue, in any case
    PATH                             a TOML file: ends with .toml, or names an existing file
    NAME[:RANKS]                     an entry point of the group "meshwright.clusters"; ours is `local`

A cluster file (docs/cluster.md) has ``name``, ``reserved_gib``, ``bandwidth_matrix``, ``[[groups]]`` and ``[[levels]]``; a device
or a link is a name of the catalogue or an inline table with the fields of `Device` or `Link`, and levels may be left out where
every device is of the catalogue. Of an inline link only bandwidth_bytes_per_s and latency_s are needed: the rest becomes
``DEFAULT_EFFICIENCY`` and a collective latency of latency_s + log2(n) latency_s / 2, and the kind follows from the domain.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from .base import read_text
from .catalogue import device_entries, find_device, find_link
from .devices import (
    MAX_DEVICES,
    CollectiveLatency,
    Device,
    GemmFit,
    Link,
    LinkEfficiency,
    LinkLevel,
    NodeGroup,
    PeakFlops,
)
from .errors import ConfigError
from .units import GIB

ENTRY_POINTS = "meshwright.clusters"

_DEVICE_FIELDS = (
    "vendor", "architecture", "memory_bytes", "memory_bandwidth_bytes_per_s", "num_sms", "cache_bytes",
    "power_limit_ratio", "price_per_hour", "source",
)  # fmt: skip

DEFAULT_EFFICIENCY = {"p2p": 0.8, "all_reduce": 0.79, "all_gather": 0.65, "reduce_scatter": 0.65, "all_to_all": 0.5}
"""Of a link that is described without them: the medians over catalogue/links.toml.

[fitted: statistics.median(entry["efficiency"][op] for entry in link_entries().values())]
"""

_SHORTHAND = re.compile(r"(?:([0-9]+)x)?([0-9]+)x([^/]+)(?:/(.+))?", re.IGNORECASE)
_NAME = re.compile(r"([A-Za-z_][\w.-]*)(?::(.*))?", re.ASCII)
_FORMS = (
    "devices:       256xH100-SXM-80GB, or nodes x devices and their network: 8x8xH100-SXM-80GB/ib400",
    "cluster file:  cluster.toml",
    "this machine:  local, or local:4 for four ranks",
)


def read_cluster(text: str) -> tuple[Any, str]:
    """Read what a text names: the fields of a ClusterSpec, or the ClusterSpec that an entry point made; and where it is from.

    Raises:
        ConfigError: the text is of none of the three forms, or what it names cannot be read.
    """
    text = text.strip()
    if not text or not text.isprintable() or len(text) > 4096:
        raise ConfigError(f"{shown_ascii(text)} is not a cluster", details=_FORMS)
    is_toml = text.lower().endswith(".toml")
    if not is_toml and (match := _SHORTHAND.fullmatch(text)):
        return _from_shorthand(*match.groups()), ""
    if is_toml or file_mode(text) is not None:
        return _fields_of_file(text), text
    if match := _NAME.fullmatch(text):
        points = metadata.entry_points(group=ENTRY_POINTS)
        if match[1] in points.names:
            return _from_entry_point(points[match[1]], match[2])
    reason = "no count x device, no file and no known name"
    raise ConfigError(f"{shown_ascii(text)} is not a cluster: {reason}", details=_FORMS, help=_near(text))


def _from_shorthand(nodes: str | None, gpus: str, device_name: str, link_name: str | None) -> dict[str, Any]:
    name, entry = find_device(device_name)
    num_nodes, per_node = (1, _count(gpus)) if nodes is None else (_count(nodes), _count(gpus))
    if nodes is None and per_node > entry["devices_per_node"]:
        num_nodes, per_node = _full_nodes(per_node, entry["devices_per_node"], name), entry["devices_per_node"]
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


def _full_nodes(count: int, per_node: int, name: str) -> int:
    if count % per_node == 0:
        return count // per_node
    below = count - count % per_node
    size = max(size for size in range(1, per_node) if count % size == 0)
    raise ConfigError(
        f"{count} devices do not fill nodes of {per_node} {name}",
        help=f"use {below}x{name} or {below + per_node}x{name}, or state the nodes: {count // size}x{size}x{name}",
    )


def _network(link_name: str, devices: str) -> str:
    """Return the key of the scale-out link; it is checked, and then not used, where the cluster is one node."""
    key, entry = find_link(link_name)
    if entry["kind"] != "scale-out":
        raise ConfigError(
            f"{key} joins devices inside a node; after the slash stands the network between nodes",
            help=f"for example {devices}/ib400, or describe both links in a cluster file",
        )
    return key


def _from_entry_point(point: metadata.EntryPoint, argument: str | None) -> tuple[Any, str]:
    if argument is not None and not re.fullmatch(r"[0-9]{1,8}", argument):
        message = f"after `{point.name}:` stands a number of ranks, not {shown_ascii(argument)}"
        raise ConfigError(message, help=f"{point.name}:4")
    try:
        function = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the cluster name {point.name} cannot be loaded from {point.value}: {error}") from None
    if argument is not None and not inspect.signature(function).parameters:
        raise ConfigError(f"the cluster name {point.name} takes no number of ranks", help=point.name)
    return function() if argument is None else function(int(argument)), f"{point.name} ({point.value})"


def _near(text: str) -> str | None:
    """Suggest names that resemble the text without its counts and link."""
    names = {alias.lower(): f"8x{key}" for key, entry in device_entries().items() for alias in (key, *entry["aliases"])}
    names |= {name.lower(): name for name in metadata.entry_points(group=ENTRY_POINTS).names}
    requested = re.sub(r"^([^x]*[0-9]x)+", "", text.lower()).split("/")[0].split(":")[0]
    if requested in names:
        return f"did you mean {names[requested]}?"
    near = dict.fromkeys(names[match] for match in difflib.get_close_matches(requested, names, n=3, cutoff=0.5))
    return f"did you mean {' or '.join(near)}?" if near else None


def _fields_of_file(path: str) -> dict[str, Any]:
    mode = file_mode(path)
    if mode is None:
        raise ConfigError(f"there is no cluster file {path}")
    if not stat.S_ISREG(mode):
        kind = "directory" if stat.S_ISDIR(mode) else "special file"
        raise ConfigError(f"{path} is a {kind}, not a cluster file (TOML)")
    content = read_text(path)
    try:
        data = tomllib.loads(content)
    except (ValueError, RecursionError) as error:  # ValueError: TOMLDecodeError, and int() of more than 4300 digits
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    try:
        return _cluster_fields(data, Path(path).stem)
    except ConfigError as error:
        raise error_in(path, error) from None


def file_mode(path: str) -> int | None:
    """Return the mode of a file, following links; None where there is none or the text cannot be a path."""
    try:
        return Path(path).stat().st_mode
    except (OSError, ValueError):  # ValueError: a character that no path can hold
        return None


def shown_ascii(value: object) -> str:
    """Show a value in an error message: ASCII, short."""
    text = ascii(value) if not isinstance(value, int) or abs(value) < 10**20 else "a number of more than 20 digits"
    return text if len(text) <= 60 else text[:57] + "..."


def _cluster_fields(data: dict[str, Any], stem: str) -> dict[str, Any]:
    check_keys(data, ("name", "reserved_gib", "reserved_bytes", "groups", "levels", "bandwidth_matrix"), "the cluster")
    groups = [_group(table, f"groups[{i}]") for i, table in enumerate(_tables(data, "groups"))]
    if not groups:
        raise ConfigError("a cluster needs at least one [[groups]] table")
    total = sum(group.num_devices for group, _ in groups)
    if total > MAX_DEVICES:
        raise ConfigError(f"{total} devices are more than the {MAX_DEVICES} that make sense")
    reserved = _bytes(data, "reserved", "the cluster")
    node = min(group.devices_per_node for group, _ in groups)
    levels = [_level(table, f"levels[{i}]", node) for i, table in enumerate(_tables(data, "levels"))]
    if not levels:
        known = [_require_catalogue_device(i, *pair) for i, pair in enumerate(groups)]
        levels = list(derived_levels(known))
        groups = [_with_usual_links(*pair, is_only=len(groups) == 1) for pair in known]
    return {
        "name": data.get("name", stem),
        "groups": tuple(group for group, _ in groups),
        "levels": tuple(levels),
        **({} if reserved is None else {"reserved_bytes": reserved}),
        **({"bandwidth_matrix": data["bandwidth_matrix"]} if "bandwidth_matrix" in data else {}),
    }


def _require_catalogue_device(
    i: int, group: NodeGroup, entry: Mapping[str, Any] | None
) -> tuple[NodeGroup, Mapping[str, Any]]:
    if entry is None:
        raise ConfigError(
            f"groups[{i}]: the links of a device that the file itself describes are not known",
            help='add [[levels]] tables, innermost first: link = "pcie4", domain_size = 4',
        )
    return group, entry


def _with_usual_links(
    group: NodeGroup, entry: Mapping[str, Any], *, is_only: bool
) -> tuple[NodeGroup, Mapping[str, Any]]:
    """Give a group the usual links of its device, unless the file says others or it is the only group."""
    return (group if is_only or group.levels else group.replace(levels=derived_levels([(group, entry)]))), entry


def _group(table: dict[str, Any], where: str) -> tuple[NodeGroup, Mapping[str, Any] | None]:
    link = "host_link_bytes_per_s"
    keys = ("device", "num_nodes", "devices_per_node", "host_memory_gib", "host_memory_bytes", link, "levels")
    check_keys(table, keys, where)
    device, entry = _device(table.get("device"), where)
    known = entry or {}
    per_node = count_from_table(table, "devices_per_node", where, known.get("devices_per_node"))
    levels = [_level(level, f"{where}.levels[{i}]", per_node) for i, level in enumerate(_tables(table, "levels"))]
    fields = {
        "device": device,
        "num_nodes": count_from_table(table, "num_nodes", where),
        "devices_per_node": per_node,
        "levels": tuple(levels),
        "host_memory_bytes": _bytes(table, "host_memory", where),
        link: table.get(link, known.get(link)),
    }
    return _built(NodeGroup, where, fields), entry


def _device(value: Any, where: str) -> tuple[Device, Mapping[str, Any] | None]:
    if isinstance(value, str):
        try:
            name, entry = find_device(value)
        except ConfigError as error:
            raise error_in(where, error) from None
        return catalogue_device(name, entry), entry
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: `device` must be a catalogue name or an inline table with the fields of a device")
    memory = _bytes(value, "memory", f"{where}.device")
    fields = {key: item for key, item in value.items() if key not in ("memory_gib", "memory_bytes")}
    if memory is not None:
        fields["memory_bytes"] = memory
    _check_architecture(fields.get("architecture"), f"{where}.device")
    return _built(Device, f"{where}.device", {"vendor": "other", **fields}), None


def _check_architecture(value: Any, where: str) -> None:
    """Refuse a misspelt one, whose measured kernels would be ignored; one of which nothing is known is no error."""
    known = {entry["architecture"] for entry in device_entries().values() if "architecture" in entry}
    if not isinstance(value, str) or value in known:
        return
    near = difflib.get_close_matches(value.lower(), known, n=1, cutoff=0.75)
    if near:
        raise ConfigError(f"{where}: unknown architecture {shown_ascii(value)}", help=f"did you mean {near[0]}?")


def _level(table: dict[str, Any], where: str, devices_per_node: int) -> LinkLevel:
    check_keys(table, ("link", "domain_size"), where)
    domain, value = count_from_table(table, "domain_size", where), table.get("link")
    if isinstance(value, str):
        try:
            return LinkLevel(link=catalogue_link(value), domain_size=domain)
        except ConfigError as error:
            raise error_in(where, error) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: `link` must be a catalogue name or an inline table with the fields of a link")
    efficiency, latency = value.get("efficiency", {}), value.get("latency_s")
    if latency is not None and (type(latency) not in (int, float) or not 0 <= latency < 3600):
        raise ConfigError(f"{where}.link: `latency_s` = {shown_ascii(latency)} is no time in seconds such as 1.5e-5")
    seconds = float(latency or 0)  # where it is missing, Link says so
    fields = {
        "name": f"link-{domain}",
        "kind": "scale-up" if domain <= devices_per_node else "scale-out",
        "collective_latency_s": {"base": seconds, "per_hop": seconds / 2},
        **value,
        "efficiency": {**DEFAULT_EFFICIENCY, **efficiency} if isinstance(efficiency, dict) else efficiency,
    }
    return LinkLevel(link=_built(Link, f"{where}.link", fields), domain_size=domain)


def _tables(data: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    value = data.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ConfigError(f"`{key}` must be a list of tables: write [[{key}]]")
    return value


def check_keys(table: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    """Refuse what is none of ``keys``, naming the nearest."""
    for key in table:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            hint = f"did you mean {near[0]}?" if near else "one of " + ", ".join(keys)
            raise ConfigError(f"{where}: unknown key {shown_ascii(key)}", help=hint)


def count_from_table(table: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    """Read a count of a table, from 1 to MAX_DEVICES."""
    value = table.get(key, default)
    if value is None:
        raise ConfigError(f"{where}: `{key}` is missing")
    if type(value) is not int or not 1 <= value <= MAX_DEVICES:  # `true` is an int that cannot be meant
        raise ConfigError(f"{where}: `{key}` must be a whole number from 1 to {MAX_DEVICES}, not {shown_ascii(value)}")
    return value


def _bytes(table: Mapping[str, Any], key: str, where: str) -> int | None:
    """Read ``<key>_gib`` or ``<key>_bytes`` of a table, in bytes; None where neither is given."""
    gib, exact = table.get(f"{key}_gib"), table.get(f"{key}_bytes")
    if gib is not None and exact is not None:
        raise ConfigError(f"{where}: `{key}_gib` and `{key}_bytes` are both given", help="keep one of them")
    name, value, unit = (f"{key}_gib", gib, GIB) if gib is not None else (f"{key}_bytes", exact, 1)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value <= 2**60 / unit:  # beyond any machine; NaN fails as well
        raise ConfigError(f"{where}: `{name}` = {shown_ascii(value)} is no size of memory")
    return int(value * unit)


def _built(kind: type[Any], where: str, fields: dict[str, Any]) -> Any:
    try:
        return kind(**fields)
    except ConfigError as error:
        raise error_in(where, error) from None


def error_in(where: str, error: ConfigError) -> ConfigError:
    """Return the error with the place where it was met."""
    return ConfigError(f"{where}: {error.message}", details=error.details, help=error.help)


def catalogue_device(name: str, entry: Mapping[str, Any]) -> Device:
    """Return the Device of an entry of devices.toml."""
    gemm = entry.get("gemm")
    return Device(
        name=name,
        peak_flops_per_s=PeakFlops(**entry["peak_flops_per_s"]),
        gemm=GemmFit(**gemm) if gemm else None,
        **{key: entry[key] for key in _DEVICE_FIELDS if key in entry},
    )


def catalogue_link(name: str) -> Link:
    """Return the Link of an entry of links.toml.

    Raises:
        ConfigError: there is no such link.
    """
    key, entry = find_link(name)
    efficiency, latency = LinkEfficiency(**entry["efficiency"]), CollectiveLatency(**entry["collective_latency_s"])
    return Link(**{"name": key, **entry, "efficiency": efficiency, "collective_latency_s": latency})


def derived_levels(groups: Sequence[tuple[NodeGroup, Mapping[str, Any]]]) -> tuple[LinkLevel, ...]:
    """Return scale-up within a domain, scale-out over all devices; of a mixed cluster the weakest link of each kind.

    A domain of one device is left out (nothing can be sent in it) unless it is the whole cluster.

    Args:
        groups: each group with the catalogue entry of its device, of which scaleup, scaleup_domain, devices_per_node
            and scaleout are used.
    """
    total = sum(group.num_devices for group, _ in groups)
    domain = math.gcd(*(_domain(group, entry) for group, entry in groups))
    levels = []
    if domain > 1 or total == 1:
        levels.append(LinkLevel(link=_weakest(entry["scaleup"] for _, entry in groups), domain_size=domain))
    if domain < total:
        levels.append(LinkLevel(link=_weakest(entry["scaleout"] for _, entry in groups), domain_size=total))
    return tuple(levels)


def _domain(group: NodeGroup, entry: Mapping[str, Any]) -> int:
    """Return the devices of a group that the scale-up link joins: a node, or the nodes of a rack where it spans nodes (NVL72).

    Domains must nest in the cluster, so a rack's domain is the largest number of complete nodes that divides the group and
    fits the rack: 64 of 72 for 256 devices. Where an allocation is cut otherwise, a cluster file can say so.
    """
    node, total = group.devices_per_node, group.num_devices
    if entry["scaleup_domain"] <= entry["devices_per_node"]:
        return node
    node_multiples = range(node, min(entry["scaleup_domain"], total) + 1, node)
    return max((size for size in node_multiples if total % size == 0), default=node)


def _weakest(names: Iterable[str]) -> Link:
    return min(map(catalogue_link, names), key=lambda link: link.bandwidth_bytes_per_s * link.efficiency.all_reduce)
