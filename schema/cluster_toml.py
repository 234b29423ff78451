"""A cluster file (TOML) -> the fields of a ClusterSpec.

::

    name = "lab"                     # default: the file's name
    reserved_gib = 2.5               # or reserved_bytes: what a plan may not use of each device
    bandwidth_matrix = [[...], ...]  # optional: node x node, bytes/s

    [[groups]]
    device = "H100-SXM-80GB"         # or an inline table with the fields of Device; memory_gib for memory_bytes
    num_nodes = 4
    devices_per_node = 8             # default: the catalogue's
    host_memory_gib = 2048           # optional, or host_memory_bytes; host_link_bytes_per_s: default the catalogue's
    levels = [{ link = "nvlink4", domain_size = 8 }, ...]   # of several groups: links among the devices of this one, as below;
                                     # default: the device's usual ones where the cluster has no levels, else those of the cluster

    [[levels]]                       # innermost first; may be left out where every device is of the catalogue
    link = "nvlink4"                 # or an inline table with the fields of Link
    domain_size = 8                  # devices that reach each other over it

Of an inline link only bandwidth_bytes_per_s and latency_s are needed; the rest becomes ``DEFAULT_EFFICIENCY`` and
``collective_latency_s = {base = latency_s, per_hop = latency_s / 2}``, and the kind follows from the domain.
"""

from __future__ import annotations

import difflib
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .base import read_text
from .catalogue import device_entries, find_device
from .cluster import MAX_DEVICES, ClusterSpec, Device, Link, LinkLevel, NodeGroup
from .cluster_levels import catalogue_device, catalogue_link, derived_levels
from .errors import ConfigError
from .units import GIB

DEFAULT_EFFICIENCY = {"p2p": 0.8, "all_reduce": 0.79, "all_gather": 0.65, "reduce_scatter": 0.65, "all_to_all": 0.5}
"""Of a link that is described without them: the medians over catalogue/links.toml.

[fitted: statistics.median(entry["efficiency"][op] for entry in link_entries().values())]
"""


def cluster_from_file(path: str) -> dict[str, Any]:
    """Fields of the ClusterSpec in a TOML file.

    Raises:
        ConfigError: no such file, not TOML, or a field that is missing, unknown or of the wrong kind.
    """
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
        fields = _cluster(data, Path(path).stem)
        ClusterSpec(**fields)  # here, so that what it refuses is reported with the file's name
    except ConfigError as error:
        raise _inside(path, error) from None
    return fields


def file_mode(path: str) -> int | None:
    """Mode of a file, following links; None where there is none or the text cannot be a path."""
    try:
        return Path(path).stat().st_mode
    except (OSError, ValueError):  # ValueError: a character that no path can hold
        return None


def shown(value: object) -> str:
    """A value for an error message: ASCII, short."""
    text = ascii(value) if not isinstance(value, int) or abs(value) < 10**20 else "a number of more than 20 digits"
    return text if len(text) <= 60 else text[:57] + "..."


def _cluster(data: dict[str, Any], stem: str) -> dict[str, Any]:
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
        known = [_known_device(i, *pair) for i, pair in enumerate(groups)]
        levels = list(derived_levels(known))
        groups = [_with_usual_links(*pair, alone=len(groups) == 1) for pair in known]
    return {
        "name": data.get("name", stem),
        "groups": tuple(group for group, _ in groups),
        "levels": tuple(levels),
        **({} if reserved is None else {"reserved_bytes": reserved}),
        **({"bandwidth_matrix": data["bandwidth_matrix"]} if "bandwidth_matrix" in data else {}),
    }


def _known_device(i: int, group: NodeGroup, entry: Mapping[str, Any] | None) -> tuple[NodeGroup, Mapping[str, Any]]:
    if entry is None:
        raise ConfigError(
            f"groups[{i}]: the links of a device that the file itself describes are not known",
            help='add [[levels]] tables, innermost first: link = "pcie4", domain_size = 4',
        )
    return group, entry


def _with_usual_links(
    group: NodeGroup, entry: Mapping[str, Any], *, alone: bool
) -> tuple[NodeGroup, Mapping[str, Any]]:
    """The group with the usual links of its own device, unless the file says others or it is the whole cluster."""
    return (group if alone or group.levels else group.replace(levels=derived_levels([(group, entry)]))), entry


def _group(table: dict[str, Any], where: str) -> tuple[NodeGroup, Mapping[str, Any] | None]:
    link = "host_link_bytes_per_s"
    keys = ("device", "num_nodes", "devices_per_node", "host_memory_gib", "host_memory_bytes", link, "levels")
    check_keys(table, keys, where)
    device, entry = _device(table.get("device"), where)
    known = entry or {}
    per_node = whole_number(table, "devices_per_node", where, known.get("devices_per_node"))
    levels = [_level(own, f"{where}.levels[{i}]", per_node) for i, own in enumerate(_tables(table, "levels"))]
    fields = {
        "device": device,
        "num_nodes": whole_number(table, "num_nodes", where),
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
            raise _inside(where, error) from None
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
        raise ConfigError(f"{where}: unknown architecture {shown(value)}", help=f"did you mean {near[0]}?")


def _level(table: dict[str, Any], where: str, devices_per_node: int) -> LinkLevel:
    check_keys(table, ("link", "domain_size"), where)
    domain, value = whole_number(table, "domain_size", where), table.get("link")
    if isinstance(value, str):
        try:
            return LinkLevel(link=catalogue_link(value), domain_size=domain)
        except ConfigError as error:
            raise _inside(where, error) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: `link` must be a catalogue name or an inline table with the fields of a link")
    efficiency, latency = value.get("efficiency", {}), value.get("latency_s")
    if latency is not None and (type(latency) not in (int, float) or not 0 <= latency < 3600):
        raise ConfigError(f"{where}.link: `latency_s` = {shown(latency)} is no time in seconds such as 1.5e-5")
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
            raise ConfigError(f"{where}: unknown key {shown(key)}", help=hint)


def whole_number(table: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    """A count of a table, from 1 to MAX_DEVICES."""
    value = table.get(key, default)
    if value is None:
        raise ConfigError(f"{where}: `{key}` is missing")
    if type(value) is not int or not 1 <= value <= MAX_DEVICES:  # `true` is an int that cannot be meant
        raise ConfigError(f"{where}: `{key}` must be a whole number from 1 to {MAX_DEVICES}, not {shown(value)}")
    return value


def _bytes(table: Mapping[str, Any], key: str, where: str) -> int | None:
    """``<key>_gib`` or ``<key>_bytes`` of a table, in bytes; None where neither is given."""
    gib, exact = table.get(f"{key}_gib"), table.get(f"{key}_bytes")
    if gib is not None and exact is not None:
        raise ConfigError(f"{where}: `{key}_gib` and `{key}_bytes` are both given", help="keep one of them")
    name, value, unit = (f"{key}_gib", gib, GIB) if gib is not None else (f"{key}_bytes", exact, 1)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value <= 2**60 / unit:  # beyond any machine; NaN fails as well
        raise ConfigError(f"{where}: `{name}` = {shown(value)} is no size of memory")
    return int(value * unit)


def _built(kind: type[Any], where: str, fields: dict[str, Any]) -> Any:
    try:
        return kind(**fields)
    except ConfigError as error:
        raise _inside(where, error) from None


def _inside(where: str, error: ConfigError) -> ConfigError:
    return ConfigError(f"{where}: {error.message}", details=error.details, help=error.help)
