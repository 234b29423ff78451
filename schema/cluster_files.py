"""What a user writes for a cluster -> the fields of a ClusterSpec: a short text, or a TOML file.

A text has one of three forms. A name never changes its meaning with the files around it: the first form goes by its spelling alone.

    [NODES x] GPUS x DEVICE [/LINK]  256xH100-SXM-80GB, 8x8xH100-SXM-80GB/ib400; names of the catalogue, in any case
    PATH                             a TOML file: ends with .toml, or names an existing file
    NAME[:RANKS]                     an entry point of the group "meshwright.clusters"; ours is `local`

A cluster file is explained in docs/cluster.md. Checked here is what a file says otherwise than a ClusterSpec, and where a name that
is nearly right should be offered; cluster.py checks everything else.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from .base import did_you_mean, located, read_toml, shown
from .catalogue import device_entries, find_device, find_link
from .errors import ConfigError
from .limits import MAX_DEVICES
from .regions import RegionLink, joining_link, read_region_links
from .units import GIB

ENTRY_POINTS = "meshwright.clusters"

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

_DEVICE_FIELDS = (
    "vendor", "architecture", "memory_bytes", "memory_bandwidth_bytes_per_s", "peak_flops_per_s", "num_sms", "cache_bytes",
    "power_limit_ratio", "power_limit_w", "die", "max_clock_ratio", "inline_ecc", "gemm", "price_per_hour", "source",
)  # fmt: skip

Table = dict[str, Any]


def read_cluster(text: str) -> tuple[Any, str]:
    """Read what a text names: the fields of a ClusterSpec, or what an entry point made; and where it is from.

    Raises:
        ConfigError: the text is of none of the three forms, or what it names cannot be read.
    """
    text = text.strip()
    if not text or not text.isprintable() or len(text) > 4096:
        raise ConfigError(f"{shown(text)} is not a cluster", details=_FORMS)
    is_toml = text.lower().endswith(".toml")
    if not is_toml and (match := _SHORTHAND.fullmatch(text)):
        return _from_shorthand(*match.groups()), ""
    if is_toml or os.path.exists(text):  # noqa: PTH110 (Path.exists raises for names that no file can have)
        return _from_file(text), text
    if match := _NAME.fullmatch(text):
        points = metadata.entry_points(group=ENTRY_POINTS)
        if match[1] in points.names:
            return _from_entry_point(points[match[1]], match[2])
    reason = "no count x device, no file and no known name"
    raise ConfigError(f"{shown(text)} is not a cluster: {reason}", details=_FORMS, help=_near(text))


def _near(text: str) -> str | None:
    """Suggest names that resemble the text without its counts and link."""
    names = {alias.lower(): f"8x{key}" for key, entry in device_entries().items() for alias in (key, *entry["aliases"])}
    names |= {name.lower(): name for name in metadata.entry_points(group=ENTRY_POINTS).names}
    requested = re.sub(r"^([^x]*[0-9]x)+", "", text.lower()).split("/")[0].split(":")[0]
    return did_you_mean(requested, names) or None


def _from_shorthand(nodes: str | None, gpus: str, device_name: str, link_name: str | None) -> Table:
    name, entry = find_device(device_name)
    num_nodes, per_node, full = int(nodes or 1), int(gpus), entry["devices_per_node"]
    if num_nodes * per_node == 0:
        raise ConfigError("a cluster has at least one device in every node, and at least one node", details=_FORMS)
    if num_nodes * per_node > MAX_DEVICES:
        raise ConfigError(f"{shown(num_nodes * per_node)} is more than the {MAX_DEVICES} devices that make sense")
    if nodes is None and per_node > full:
        if per_node % full:
            below, size = per_node - per_node % full, max(size for size in range(1, full) if per_node % size == 0)
            raise ConfigError(
                f"{per_node} devices do not fill nodes of {full} {name}",
                help=f"use {below}x{name} or {below + full}x{name}, or state the nodes: {per_node // size}x{size}x{name}",
            )
        num_nodes, per_node = per_node // full, full
    if link_name is not None:
        link, fields = find_link(link_name)
        if fields["kind"] != "scale-out":
            raise ConfigError(
                f"{link} joins devices inside a node; after the slash stands the network between nodes",
                help=f"for example {num_nodes}x{per_node}x{name}/ib400, or describe both links in a cluster file",
            )
        entry = {**entry, "scaleout": link}
    counts = f"{num_nodes * per_node}" if nodes is None else f"{num_nodes}x{per_node}"
    group = {
        "device": device_fields(name, entry),
        "num_nodes": num_nodes,
        "devices_per_node": per_node,
        "host_link_bytes_per_s": entry.get("host_link_bytes_per_s"),
    }
    return {
        "name": f"{counts}x{name}" + ("" if link_name is None else f"/{link}"),
        "groups": (group,),
        "levels": usual_levels([(group, entry)]),
    }


def _from_entry_point(point: metadata.EntryPoint, argument: str | None) -> tuple[Any, str]:
    if argument is not None and not re.fullmatch(r"[0-9]{1,8}", argument):
        message = f"after `{point.name}:` stands a number of ranks, not {shown(argument)}"
        raise ConfigError(message, help=f"{point.name}:4")
    try:
        function = point.load()
    except (ImportError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            raise  # which the command line answers for every command that needs torch
        raise ConfigError(f"the cluster name {point.name} cannot be loaded from {point.value}: {error}") from None
    if argument is not None and not inspect.signature(function).parameters:
        raise ConfigError(f"the cluster name {point.name} takes no number of ranks", help=point.name)
    return function() if argument is None else function(int(argument)), f"{point.name} ({point.value})"


def _from_file(path: str) -> Table:
    if not os.path.exists(path):  # noqa: PTH110
        raise ConfigError(f"there is no cluster file {path}")
    if not Path(path).is_file():
        kind = "directory" if Path(path).is_dir() else "special file"
        raise ConfigError(f"{path} is a {kind}, not a cluster file (TOML)")
    data = read_toml(path)
    with located(path):
        known = (
            "name",
            "reserved_gib",
            "reserved_bytes",
            "groups",
            "levels",
            "zone_links",
            "regions",
            "bandwidth_matrix",
        )
        check_keys(data, known, "the cluster")
        in_regions = "regions" in data or any("region" in table for table in _tables(data, "groups"))
        read = [_group(table, f"groups[{i}]") for i, table in enumerate(_tables(data, "groups"))]
        if not read:
            raise ConfigError("a cluster needs at least one [[groups]] table")
        groups = [group for group, _ in read]
        node = min(group["devices_per_node"] for group in groups)
        levels = [_level(table, f"levels[{i}]", node) for i, table in enumerate(_tables(data, "levels"))]
        region_links: list[Table] = []
        if in_regions:
            groups, levels, region_links = _of_regions(read, data, Path(path).parent)
        elif not levels:
            if len({group["zone"] for group in groups}) > 1:
                raise ConfigError(
                    "the groups stand in several zones, and the file does not say what joins these",
                    help="add [[levels]] tables, innermost first; the last one joins all devices: the slowest link between zones",
                )
            if unknown := [i for i, (_, entry) in enumerate(read) if entry is None]:
                raise ConfigError(
                    f"groups[{unknown[0]}]: the links of a device that the file itself describes are not known",
                    help='add [[levels]] tables, innermost first: link = "pcie4", domain_size = 4',
                )
            of_catalogue = [(group, entry or {}) for group, entry in read]
            levels = usual_levels(of_catalogue)
            if len(groups) > 1:
                groups = [
                    {**group, "levels": group["levels"] or usual_levels([(group, entry)])}
                    for group, entry in of_catalogue
                ]
        joins = [_zone_link(table, f"zone_links[{i}]") for i, table in enumerate(_tables(data, "zone_links"))]
        fields = {name: value for name, value in data.items() if name != "regions"}
        fields |= {"groups": groups, "levels": levels, "zone_links": joins, "region_links": region_links}
        return {"name": Path(path).stem, **_with_bytes(fields, "reserved", "the cluster")}


def _of_regions(
    read: Sequence[tuple[Table, Table | None]], data: Table, folder: Path
) -> tuple[list[Table], list[Table], list[Table]]:
    """Return the groups of a cluster over regions, with links of their own, the levels of the cluster, and the region links."""
    regions = {group["zone"] for group, _ in read}
    if "" in regions or data.get("levels") or data.get("zone_links"):
        raise ConfigError(
            "the groups stand in regions: each of them needs one, and what joins them is in [regions]",
            help="give every group a region; levels inside a region belong to its group: levels = [...]",
        )
    table = data.get("regions", {})
    check_keys(table, ("table", "streams"), "regions")
    if "streams" in table:
        count_from_table(table, "streams", "regions")
    groups = []
    for i, (group, entry) in enumerate(read):
        if not group["levels"] and entry is None:
            raise ConfigError(
                f"groups[{i}]: the links of a device that the file itself describes are not known", help="levels"
            )
        groups.append({**group, "levels": group["levels"] or usual_levels([(group, entry or {})])})
    total, inner = sum(map(_num_devices, groups)), math.gcd(*(group["devices_per_node"] for group in groups))
    if len(groups) == 1:
        return [{**groups[0], "levels": []}], groups[0]["levels"], []
    if len(regions) == 1:
        raise ConfigError("several groups in one region", help="give them zones, and [[levels]] for what joins these")
    links = read_region_links(table, folder, regions, min(group["devices_per_node"] for group in groups))
    slowest = min((group["levels"][0]["link"] for group in groups), key=lambda link: link["bandwidth_bytes_per_s"])
    levels = [{"link": slowest, "domain_size": inner}] if inner > 1 else []
    joined = joining_link([RegionLink(**link) for link in links], regions)
    return groups, [*levels, {"link": joined, "domain_size": total}], links


def _num_devices(group: Mapping[str, Any]) -> int:
    return int(group["num_nodes"] * group["devices_per_node"])


def _group(table: Table, where: str) -> tuple[Table, Table | None]:
    """Return the fields of a NodeGroup, and the catalogue entry of its device where it has one."""
    link, rates = "host_link_bytes_per_s", ("host_bandwidth_bytes_per_s", "host_flops_per_s")
    limit = "power_limit_w"
    sizes = ("num_nodes", "devices_per_node", "host_memory_gib", "host_memory_bytes")
    check_keys(table, ("device", *sizes, link, *rates, "storage_bytes_per_s", limit, "levels", "zone", "region"), where)
    if "region" in table and "zone" in table:
        raise ConfigError(f"{where}: a region is a zone", help="keep one of them")
    device, entry = table.get("device"), None
    if isinstance(device, str):
        with located(where):
            name, entry = find_device(device)
        device = device_fields(name, entry)
    elif isinstance(device, dict):
        device = {"vendor": "other", **_with_bytes(device, "memory", f"{where}.device")}
        _check_architecture(device.get("architecture"), f"{where}.device")
    else:
        raise ConfigError(f"{where}: `device` must be a catalogue name or an inline table with the fields of a device")
    if limit in table:
        device[limit] = table.pop(limit)
    zone = table.pop("region", table.get("zone", ""))
    if not isinstance(zone, str):
        raise ConfigError(f"{where}: the zone {shown(zone)} is no name")
    known = entry or {}
    per_node = count_from_table(table, "devices_per_node", where, known.get("devices_per_node"))
    group = {
        **_with_bytes(table, "host_memory", where),
        "device": device,
        "zone": zone,
        "num_nodes": count_from_table(table, "num_nodes", where),
        "devices_per_node": per_node,
        "levels": [_level(level, f"{where}.levels[{i}]", per_node) for i, level in enumerate(_tables(table, "levels"))],
        link: table.get(link, known.get(link)),
        **{rate: table[rate] for rate in rates if rate in table},
    }
    return group, entry


def _check_architecture(value: Any, where: str) -> None:
    """Refuse a misspelt one, whose measured kernels would be ignored; one of which nothing is known is no error."""
    known = {entry["architecture"] for entry in device_entries().values() if "architecture" in entry}
    if isinstance(value, str) and value not in known and (hint := did_you_mean(value, known, limit=1, cutoff=0.75)):
        raise ConfigError(f"{where}: unknown architecture {shown(value)}", help=hint)


def _level(table: Table, where: str, devices_per_node: int) -> Table:
    """Return the fields of a LinkLevel.

    Of an inline link only bandwidth_bytes_per_s and latency_s are needed: the rest becomes ``DEFAULT_EFFICIENCY`` and a collective
    latency of latency_s + log2(n) latency_s / 2, and the kind follows from the domain.
    """
    check_keys(table, ("link", "domain_size"), where)
    domain, link = count_from_table(table, "domain_size", where), table.get("link")
    if isinstance(link, str):
        with located(where):
            return {"link": link_fields(link), "domain_size": domain}
    if not isinstance(link, dict):
        raise ConfigError(f"{where}: `link` must be a catalogue name or an inline table with the fields of a link")
    efficiency, latency = link.get("efficiency", {}), link.get("latency_s")
    if latency is not None and (type(latency) not in (int, float) or not 0 <= latency < 3600):
        raise ConfigError(f"{where}.link: `latency_s` = {shown(latency)} is no time in seconds such as 1.5e-5")
    seconds = float(latency or 0)  # where it is missing, Link says so
    fields = {
        "name": f"link-{domain}",
        "kind": "scale-up" if domain <= devices_per_node else "scale-out",
        "collective_latency_s": {"base": seconds, "per_hop": seconds / 2},
        **link,
        "efficiency": {**DEFAULT_EFFICIENCY, **efficiency} if isinstance(efficiency, dict) else efficiency,
    }
    return {"link": fields, "domain_size": domain}


def _zone_link(table: Table, where: str) -> Table:
    """Return the fields of a ZoneLink; its link is one between nodes."""
    check_keys(table, ("zones", "link"), where)
    level = _level({"link": table.get("link"), "domain_size": MAX_DEVICES}, where, 1)
    return {"zones": table.get("zones", ()), "link": level["link"]}


def _tables(data: Table, key: str) -> list[Table]:
    value = data.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ConfigError(f"`{key}` must be a list of tables: write [[{key}]]")
    return value


def check_keys(table: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    """Refuse what is no table, or has a key that is none of ``keys``, naming the nearest."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"`{where}` must be a table: write [{where}]")
    for key in table:
        if key not in keys:
            hint = did_you_mean(key, keys, limit=1, cutoff=0.6) or "one of " + ", ".join(keys)
            raise ConfigError(f"{where}: unknown key {shown(key)}", help=hint)


def count_from_table(table: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    """Read a count of a table, from 1 to MAX_DEVICES."""
    value = table.get(key, default)
    if value is None:
        raise ConfigError(f"{where}: `{key}` is missing")
    if type(value) is not int or not 1 <= value <= MAX_DEVICES:  # `true` is an int that cannot be meant
        raise ConfigError(f"{where}: `{key}` must be a whole number from 1 to {MAX_DEVICES}, not {shown(value)}")
    return value


def _with_bytes(table: Table, key: str, where: str) -> Table:
    """Return the table with ``<key>_bytes`` where it says that or ``<key>_gib``."""
    fields = {name: value for name, value in table.items() if name not in (f"{key}_gib", f"{key}_bytes")}
    given = [(f"{key}_{name}", unit) for name, unit in (("gib", GIB), ("bytes", 1)) if f"{key}_{name}" in table]
    if len(given) > 1:
        raise ConfigError(f"{where}: `{key}_gib` and `{key}_bytes` are both given", help="keep one of them")
    for name, unit in given:
        value = table[name]
        if type(value) not in (int, float) or not 0 <= value <= 2**60 / unit:  # beyond any machine; NaN fails as well
            raise ConfigError(f"{where}: `{name}` = {shown(value)} is no size of memory")
        fields[f"{key}_bytes"] = int(value * unit)
    return fields


def device_fields(name: str, entry: Mapping[str, Any]) -> Table:
    """Return the fields of the Device of an entry of devices.toml."""
    return {"name": name, **{key: entry[key] for key in _DEVICE_FIELDS if key in entry}}


def link_fields(name: str) -> Table:
    """Return the fields of the Link of an entry of links.toml.

    Raises:
        ConfigError: there is no such link.
    """
    key, entry = find_link(name)
    return {"name": key, **entry}


def usual_levels(groups: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[Table]:
    """Return scale-up within a domain, scale-out over all devices; of a mixed cluster the weakest link of each kind.

    A domain of one device is left out (nothing can be sent in it) unless it is the whole cluster.

    Args:
        groups: the fields of each group, with the catalogue entry of its device, of which scaleup, scaleup_domain,
            devices_per_node and scaleout are used.

    Returns:
        The fields of LinkLevels.
    """
    total = sum(_num_devices(group) for group, _ in groups)
    domain = math.gcd(*(_domain(group, entry) for group, entry in groups))
    kinds = [("scaleup", domain)] if domain > 1 or total == 1 else []
    if domain < total:
        kinds.append(("scaleout", total))
    levels = []
    for kind, size in kinds:
        links = (link_fields(entry[kind]) for _, entry in groups)
        weakest = min(links, key=lambda link: link["bandwidth_bytes_per_s"] * link["efficiency"]["all_reduce"])
        levels.append({"link": weakest, "domain_size": size})
    return levels


def _domain(group: Mapping[str, Any], entry: Mapping[str, Any]) -> int:
    """Return the devices of a group that the scale-up link joins: a node, or the nodes of a rack where it spans nodes (NVL72).

    Domains must nest in the cluster, so a rack's domain is the largest number of complete nodes that divides the group and
    fits the rack: 64 of 72 for 256 devices. Where an allocation is cut otherwise, a cluster file can say so.
    """
    node, total = group["devices_per_node"], _num_devices(group)
    if entry["scaleup_domain"] <= entry["devices_per_node"]:
        return node
    node_multiples = range(node, min(entry["scaleup_domain"], total) + 1, node)
    return max((size for size in node_multiples if total % size == 0), default=node)
