"""A row's cluster: the device by name or class, the network between nodes from what the table says about it."""

from __future__ import annotations

import math
import re
from functools import cache

from ..schema import ClusterSpec, ConfigError, LinkLevel
from ..schema.catalogue import find_device
from ..schema.cluster import Device, Link, NodeGroup
from ..schema.cluster_files import usual_levels
from ..schema.units import GB, GIB
from .rows import RunRow, first_match

MEMORY_TOLERANCE = 0.1
"""A stated memory this far from the catalogue's is another variant of the device; nearer, the catalogue is more exact."""

DRIVE_BYTES_PER_S = 4.5e9
"""One data-centre NVMe drive reading and writing as much: 6.5 and 3.4 GB/s (Intel P5510 data sheet), harmonic mean."""

_VENDOR_WORDS = re.compile(
    r"\b(nvidia|amd|instinct|geforce|tesla|quadro|intel|habana|hpu|google|cloud|aws|amazon|dgx|hgx|oam)\b[- ]*"
)

_GBIT = r"(\d+(?:\.\d+)?) ?G(?:b(?:it)?(?:/[sS](?:ec)?|ps|E)?|B(?:/[sS](?:ec)?|ps)|)(?![A-Za-z])"
_PER_DEVICE = re.compile(r"(\d+(?:\.\d+)?) ?Gb(?:/s|ps) (?:per|a) (?:GPU|device|GCD)", re.IGNORECASE)
_PER_NODE = re.compile(r"(?:(\d+) ?x ?(?:[A-Z]\S+ )?)?(\d+(?:\.\d+)?) ?Gb(?:/s|ps) (?:per|a) node")
_BYTES = re.compile(r"(\d+(?:\.\d+)?) ?GB(?:/[sS](?:ec)?|ps)")
_TERABITS = re.compile(r"(\d+(?:\.\d+)?) ?T(?:b(?:it)?(?:/[sS](?:ec)?|ps)|bE)")
_MAX_PORT_GBIT = 800.0
"""Of one port (XDR InfiniBand, 800GbE): a bare rate above it is of all ports of a node."""
_NICS = re.compile(r"(\d+) ?x ?((?:[A-Za-z][^\s,;]* ){0,5}?)\(?" + _GBIT)
_RATE = re.compile(_GBIT)
_RATES_OF_ONE_PORT = re.compile(r"(?:\d+ ?Gb/)+(\d+ ?Gb)(?![A-Za-z/])")
_SIDE_NETWORK = re.compile(r"management|storage|in-band|frontend|gpu-pcie|pcie-nic", re.IGNORECASE)
_NOMINAL_ONLY = ("efa-v2", "efa-v3", "efa-v4")
"""Links whose stated rate is nominal: the catalogue's is what they reach."""


def cluster_of(row: RunRow) -> ClusterSpec | str:
    """Return the cluster of a row, or why it cannot be built."""
    if row.n_gpus is None:
        return "cluster: number of devices not stated"
    try:
        return _cluster(
            row.gpu_type, row.gpu_class, row.n_gpus, row.gpus_per_node, row.inter_interconnect, row.gpu_mem_gib
        )
    except ConfigError as error:
        return f"cluster: {error.message}"


@cache
def _cluster(
    gpu_type: str, gpu_class: str, n_gpus: int, per_node: int | None, network: str, memory_gib: float | None
) -> ClusterSpec | str:
    """Return one group of nodes; the same object for the same arguments, so that its rows are estimated together."""
    known = device_named(gpu_type) or device_named(gpu_class)
    if known is None:
        return f"cluster: device not in the catalogue: {gpu_type or gpu_class}"
    name, entry = find_device(known)
    device = Device.named(known)
    if memory_gib and abs(memory_gib * GIB / device.memory_bytes - 1) > MEMORY_TOLERANCE:
        device = device.replace(memory_bytes=int(memory_gib * GIB))
    node = math.gcd(n_gpus, min(per_node or entry["devices_per_node"], n_gpus))
    host_link = entry.get("host_link_bytes_per_s")
    counts = {"num_nodes": n_gpus // node, "devices_per_node": node}
    group = NodeGroup(device=device, num_nodes=n_gpus // node, devices_per_node=node, host_link_bytes_per_s=host_link)
    variant = first_match("devices", _plain(gpu_type))
    scale_up = (variant and variant["scaleup"]) or entry["scaleup"]
    levels = tuple(LinkLevel(**level) for level in usual_levels([(counts, {**entry, "scaleup": scale_up})]))
    if levels[-1].link.kind == "scale-out":
        link = network_link(network, devices_per_node=per_node or entry["devices_per_node"], default=entry["scaleout"])
        levels = (*levels[:-1], LinkLevel(link=link, domain_size=n_gpus))
    return ClusterSpec(name=f"{n_gpus}x{name}", groups=(group,), levels=levels)


@cache
def with_drives(spec: ClusterSpec, bytes_per_s: float) -> ClusterSpec:
    """Return the cluster with storage of this rate in every node."""
    return spec.replace(groups=tuple(group.replace(storage_bytes_per_s=bytes_per_s) for group in spec.groups))


def device_named(text: str) -> str | None:
    """Return the catalogue's name of a device, e.g. of ``NVIDIA H100 80GB HBM3``; None where nothing known is meant."""
    try:
        return find_device(text)[0]
    except ConfigError:
        line = first_match("devices", _plain(text))
        return line["device"] if line else None


def _plain(text: str) -> str:
    """Return a device's name in lower case, words joined by hyphens, without its vendor's words."""
    return re.sub(r"[\s_/()]+", "-", _VENDOR_WORDS.sub("", text.strip().lower())).strip("-")


def network_link(text: str, *, devices_per_node: int, default: str) -> Link:
    """Return the link between nodes that a description means; the device's usual one where it says nothing usable.

    Parts that name a management or storage network, and no compute network, are not read. The rate is what one device gets:
    "4x HDR = 800 Gb/s per node" of eight devices is 100 Gb/s each.
    """
    parts = re.split(r"[,;+](?!\d)", _in_gbit(text))
    compute = ", ".join(part for part in parts if "compute" in part.lower() or not _SIDE_NETWORK.search(part))
    compute = _RATES_OF_ONE_PORT.sub(r"\1", compute)
    line = first_match("networks", compute.lower())
    gbit = _gbit_per_device(compute, devices_per_node)
    members = line["links"].split() if line else [default]
    link = Link.named(members[0] if len(members) == 1 else _closest_link(members, compute, default, gbit))
    if gbit is None or link.shared_by != "device" or link.name in _NOMINAL_ONLY:
        return link
    return link.replace(bandwidth_bytes_per_s=gbit * GB / 8)


def _in_gbit(text: str) -> str:
    """Return a text with its rates in Gb/s: bytes times eight; "10GB/Sec" of Ethernet is spelled wrong and stays."""
    text = _TERABITS.sub(lambda match: f"{float(match[1]) * 1000:g} Gb/s", text.replace("\u00d7", "x"))
    if re.search(r"ethernet", text, re.IGNORECASE) and not re.search(r"roce|rdma", text, re.IGNORECASE):
        return text
    return _BYTES.sub(lambda match: f"{float(match[1]) * 8:g} Gb/s", text)


def _closest_link(members: list[str], text: str, default: str, gbit_per_device: float | None) -> str:
    """Return the member of a family of links closest to the rate of a NIC; where none is stated, to the default's rate."""
    nics = [float(match[3]) for match in _NICS.finditer(text)]
    stated = max(nics, default=0.0) or gbit_per_device or max((float(m[1]) for m in _RATE.finditer(text)), default=0.0)
    if members[0].startswith("ib") and re.search(r"\d ?gbe", text, re.IGNORECASE):
        stated = 0.0  # an Ethernet rate says nothing about the InfiniBand next to it
    if not stated and members[0].startswith("eth"):
        return default
    target = stated * GB / 8 or Link.named(default).bandwidth_bytes_per_s
    return min(members, key=lambda member: abs(Link.named(member).bandwidth_bytes_per_s - target))


def _gbit_per_device(text: str, devices_per_node: int) -> float | None:
    """Return the Gb/s of one device where the text states it, by the device, by the node or by its NICs."""
    if match := _PER_DEVICE.search(text):
        return float(match[1])
    if match := _PER_NODE.search(text):
        return int(match[1] or 1) * float(match[2]) / devices_per_node
    # A device uses the NIC next to it: more NICs than devices add nothing.
    totals = [min(int(nics[1]), devices_per_node) * float(nics[3]) for nics in _NICS.finditer(text)]
    totals = totals or [rate for match in _RATE.finditer(text) if (rate := float(match[1])) > _MAX_PORT_GBIT]
    return max(totals) / devices_per_node if totals else None
