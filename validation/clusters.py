"""A row's cluster: the device by name or class, the network between nodes from what the table says about it."""

from __future__ import annotations

import math
import re
from functools import cache
from typing import NamedTuple

from ..schema import ClusterSpec, ConfigError, LinkLevel
from ..schema.catalogue import find_device
from ..schema.cluster_files import catalogue_device, catalogue_link, derived_levels
from ..schema.devices import Link, NodeGroup
from ..schema.units import GB, GIB
from .device_names import device_named
from .rows import RunRow

MEMORY_TOLERANCE = 0.1
"""A stated memory this far from the catalogue's is another variant of the device; nearer, the catalogue is more exact."""


DEVICES = {
    "a800-sxm-80gb": "A100-SXM-80GB",  # an A100 with fewer NVLinks, see SCALE_UP
    "a800": "A100-SXM-80GB",
    "a100": "A100-SXM-80GB",
    "a100-80gb": "A100-SXM-80GB",
    "a100-40gb": "A100-SXM-40GB",
    "h100": "H100-SXM-80GB",
    "h100-80gb": "H100-SXM-80GB",
    "h800": "H800-SXM-80GB",
    "gh200": "GH200-96GB",
    "b200": "B200-SXM-180GB",
    "b200-180gb": "B200-SXM-180GB",
    "gb200": "GB200-186GB",
    "rtx-4090-24gb": "RTX4090-24GB",
    "mi250x-gcd-64gb": "MI250X-GCD",
}
"""Names of tables that are neither names nor aliases of the catalogue."""


SCALE_UP = {"a800-sxm-80gb": "nvlink4-h800", "a800": "nvlink4-h800"}
"""Eight NVLinks, 200 GB/s each way, as on the H800."""


class RowCluster(NamedTuple):
    """A row's cluster and where it only comes close."""

    spec: ClusterSpec
    approximated: tuple[str, ...]


def cluster_of(row: RunRow) -> RowCluster | str:
    """The cluster of a row, or why it cannot be built."""
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
    gpu_type: str, gpu_class: str, n_gpus: int, per_node: int | None, inter: str, memory_gib: float | None
) -> RowCluster | str:
    found = _device_name(gpu_type) or _device_name(gpu_class)
    if found is None:
        return "cluster: device not in the catalogue"
    name, entry = find_device(found)
    device = catalogue_device(name, entry)
    if memory_gib and abs(memory_gib * GIB / device.memory_bytes - 1) > MEMORY_TOLERANCE:
        device = device.replace(memory_bytes=int(memory_gib * GIB))
    node = math.gcd(n_gpus, min(per_node or entry["devices_per_node"], n_gpus))
    host_link = entry.get("host_link_bytes_per_s")
    group = NodeGroup(device=device, num_nodes=n_gpus // node, devices_per_node=node, host_link_bytes_per_s=host_link)
    scale_up = SCALE_UP.get(gpu_type.lower(), entry["scaleup"])
    levels = derived_levels([(group, {**entry, "scaleup": scale_up})])
    if levels[-1].link.kind == "scale-out":
        link = network(inter, devices_per_node=per_node or entry["devices_per_node"], default=entry["scaleout"])
        levels = (*levels[:-1], LinkLevel(link=link, domain_size=n_gpus))
    return RowCluster(ClusterSpec(name=f"{n_gpus}x{name}", groups=(group,), levels=levels), ())


@cache
def with_drives(spec: ClusterSpec, rate_bytes_per_s: float) -> ClusterSpec:
    """The cluster with storage of this rate in every node."""
    return spec.replace(groups=tuple(group.replace(storage_bytes_per_s=rate_bytes_per_s) for group in spec.groups))


def _device_name(text: str) -> str | None:
    key = text.lower()
    try:
        return find_device(DEVICES.get(key, text))[0]
    except ConfigError:
        return device_named(text)


NETWORKS: tuple[tuple[str, str], ...] = (
    (r"\befa\b.*(p6|v4|b200)|\bp6-b", "efa-v4"),
    (r"\befa\b.*(p5en|v3)|\bp5en\b", "efa-v3"),
    (r"\befa\b.*(p4d|v1|\b400 gb)|\bp4de?\b", "efa-v1"),
    (r"\befa\b|\bp5\.48|\baws p5\b", "efa-v2"),
    (r"tcpxo|a3[- ]?mega", "tcpxo"),
    (r"tcp-?\(?x|a3[- ]?high", "tcpx"),
    (r"frontier|lumi\b|slingshot.*mi250", "slingshot11-gcd"),
    (r"slingshot|\balps\b|perlmutter", "slingshot11"),
    (r"omni-?path|\bopa\b", "opa100"),
    (r"roce|rdma over converged|a3[- ]?ultra|\bgcp a4\b|spectrum-x", "roce"),
    (r"xdr|connectx-?8|\bcx-?8\b", "ib800"),
    (r"ndr-?200", "ib200"),
    (r"ndr|connectx-?7|\bcx-?7|quantum-?2|nd_?h[12]00|superpod h100", "ib400"),
    (r"hdr|connectx-?6|\bcx-?6|juwels|leonardo|nd_?a100|superpod a100", "ib200"),
    (r"edr|connectx-?5|\bcx-?5|ndv2", "ib100"),
    (r"infini-?band|\bib\b|\brdma\b|gb/?p?s per gpu", "ib"),
    (r"ethernet|gbe\b|gbase|\btcp\b", "eth"),
)
"""Words of a description -> a link of the catalogue, or a family (``ib``, ``roce``, ``eth``) whose member the rate picks."""


NETWORK_FAMILIES: dict[str, tuple[tuple[float, str], ...]] = {
    "ib": ((100, "ib100"), (200, "ib200"), (400, "ib400"), (800, "ib800")),
    "roce": ((100, "roce100"), (200, "roce200"), (400, "roce400")),
    "eth": ((10, "eth10"), (25, "eth25"), (100, "eth100"), (200, "roce200"), (400, "roce400")),
}
"""Gb/s of one NIC -> link; Ethernet from 200 Gb/s on is taken to carry RoCE."""


_GB = r"(\d+(?:\.\d+)?) ?G(?:b(?:it)?(?:/[sS](?:ec)?|ps|E)?|B(?:/[sS](?:ec)?|ps)|)(?![A-Za-z])"


_PER_DEVICE = re.compile(r"(\d+(?:\.\d+)?) ?G(b|B)(?:/s|ps) per (?:GPU|device|GCD)")


_PER_NODE = re.compile(r"(?:(\d+) ?x ?(?:[A-Z]\S+ )?)?(\d+) ?Gb(?:/s|ps) per node")


_NICS = re.compile(r"(\d+) ?x ?((?:[A-Za-z][^\s,;]* ){0,5}?)\(?" + _GB)


_RATE = re.compile(_GB)


_CHOICE = re.compile(r"(?:\d+ ?Gb/)+(\d+ ?Gb)(?![A-Za-z/])")
"""One port that can run at several rates."""


_SIDE_NETWORK = re.compile(r"management|storage|in-band|frontend|gpu-pcie|pcie-nic", re.IGNORECASE)


def network(text: str, *, devices_per_node: int, default: str) -> Link:
    """The link between nodes that a description means; the device's usual one where it says nothing usable.

    Parts that name a management or storage network, and no compute network, are not read. The rate is what one device gets:
    "4x HDR = 800 Gb/s per node" of eight devices is 100 Gb/s each. A nominal rate of EFA is the catalogue's own.
    """
    compute = ", ".join(part for part in re.split(r"[,;+](?!\d)", text) if _is_compute(part))
    compute = _CHOICE.sub(r"\1", compute)
    words = compute.lower()
    key = next((key for pattern, key in NETWORKS if re.search(pattern, words)), None)
    gbit = _gbit_per_device(compute, devices_per_node)
    link = catalogue_link(_member(key, compute, default, gbit))
    if gbit is None or link.shared_by != "device" or link.name in ("efa-v2", "efa-v3", "efa-v4"):
        return link
    return link.replace(bandwidth_bytes_per_s=gbit * GB / 8)


def _is_compute(part: str) -> bool:
    return "compute" in part.lower() or not _SIDE_NETWORK.search(part)


def _member(key: str | None, text: str, default: str, gbit_per_device: float | None) -> str:
    """Name of the link: of a family the member next to the rate of a NIC, where none is stated next to the default's rate."""
    if key is None:
        return default
    if key not in NETWORK_FAMILIES:
        return key
    nics = [float(match[3]) for match in _NICS.finditer(text)]
    stated = max(nics, default=0.0) or gbit_per_device or max((float(m[1]) for m in _RATE.finditer(text)), default=0.0)
    if key == "ib" and re.search(r"\d ?gbe", text, re.IGNORECASE):
        stated = 0.0  # an Ethernet rate says nothing about the InfiniBand beside it
    if not stated and key == "eth":
        return default
    wanted = stated or catalogue_link(default).bandwidth_bytes_per_s * 8 / GB
    return min(NETWORK_FAMILIES[key], key=lambda member: abs(member[0] - wanted))[1]


def _gbit_per_device(text: str, devices_per_node: int) -> float | None:
    """Gb/s of one device where the text states it, by the device, by the node or by its NICs; None where it does not."""
    if match := _PER_DEVICE.search(text):
        return float(match[1]) * (8 if match[2] == "B" else 1)
    if match := _PER_NODE.search(text):
        return int(match[1] or 1) * float(match[2]) / devices_per_node
    # A device uses the NIC beside it: more NICs than devices add nothing.
    totals = [min(int(nics[1]), devices_per_node) * float(nics[3]) for nics in _NICS.finditer(text)]
    return max(totals) / devices_per_node if totals else None
