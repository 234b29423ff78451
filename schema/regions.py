"""Links between regions: what a table of pairs says, and the link that joins some regions.

A pair of nodes in two regions gets ``min(line, streams * window / round trip)``: what was measured over many connections, or what
the connections that a job opens have in flight.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

from pydantic import Field

from .base import Count, Frozen, NonNegativeFloat, PositiveFloat, PositiveInt, did_you_mean, shown
from .csv_file import table_rows
from .errors import ConfigError
from .units import MIB

WINDOW_BYTES = 3 * MIB
"""Of one TCP connection: half of the 6 MiB that Linux lets a receive buffer grow to (Documentation/networking/ip-sysctl: tcp_rmem,
tcp_adv_win_scale 1)."""

_BYTES_PER_GBIT = 1e9 / 8
_HELP = (
    "columns src, dst, throughput_gbit_per_s (of a pair of nodes) and min_rtt_ms, and where they are known egress_usd_per_gb and "
    "streams (connections of a pair of nodes)"
)


class RegionLink(Frozen):
    """What one node of a region gets to one of another, with as many other pairs at once as there are nodes.

    Attributes:
        line_bytes_per_s: with as many connections as it takes.
        round_trip_s: of one small message and its answer.
        usd_per_gb: for what leaves ``src``, 10^9 bytes; 0 where no price is known.
        streams: connections of a pair of nodes.
    """

    src: str
    dst: str
    line_bytes_per_s: PositiveFloat
    round_trip_s: NonNegativeFloat
    usd_per_gb: NonNegativeFloat = 0.0
    streams: Count = 1
    window_bytes: PositiveInt = Field(default=WINDOW_BYTES)

    @property
    def bytes_per_s(self) -> float:
        """Rate of a pair of nodes."""
        in_flight = self.streams * self.window_bytes
        return min(self.line_bytes_per_s, in_flight / self.round_trip_s if self.round_trip_s else math.inf)


def joining_link(links: Iterable[RegionLink], regions: Collection[str]) -> dict[str, Any]:
    """Return the fields of the Link that is sure between any two nodes of some regions: the slowest rate and the longest way."""
    among = [link for link in links if link.src in regions and link.dst in regions]
    one_way_s = max(link.round_trip_s for link in among) / 2
    return {
        "name": "wan",
        "kind": "wan",
        "title": "between regions",
        "bandwidth_bytes_per_s": min(link.bytes_per_s for link in among),
        "shared_by": "node",
        "latency_s": one_way_s,
        "efficiency": dict.fromkeys(("p2p", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"), 1.0),
        "collective_latency_s": {"base": one_way_s, "per_hop": one_way_s},
    }


def read_region_links(
    table: Mapping[str, Any], folder: Path, regions: Collection[str], streams: int
) -> list[dict[str, Any]]:
    """Return the fields of the links among some regions, in both directions, from the ``[regions]`` table of a cluster file.

    Of a pair that the table has twice the slower line counts; a round trip may stand with either direction.

    Args:
        folder: where the cluster file is.
        streams: of a pair of nodes, where neither the file nor the table says.

    Raises:
        ConfigError: the table cannot be read, or lacks a pair.
    """
    path = table.get("table")
    if not isinstance(path, str):
        raise ConfigError("[regions] needs the file of its pairs", help=f'table = "pairs.csv", with {_HELP}')
    path = folder / path
    streams = table.get("streams", streams)
    rows = _rows(path, regions)
    known = {name for pair in rows for name in pair}
    links = []
    for src, dst in permutations(sorted(regions), 2):
        row, back = rows.get((src, dst)), rows.get((dst, src))
        round_trips = [each["round_trip_s"] for each in (row, back) if each and each["round_trip_s"] is not None]
        if row is None or not round_trips:
            lacking = "no pair" if row is None else "no round trip of the pair"
            hint = "" if src in known else did_you_mean(src, known, limit=1, cutoff=0.6) or ""
            raise ConfigError(f"{path} has {lacking} {src} to {dst}", help=hint or f"add it: {_HELP}")
        links.append({"src": src, "dst": dst, "streams": streams, **row, "round_trip_s": round_trips[0]})
    return links


def _rows(path: Path, regions: Collection[str]) -> dict[tuple[str, str], dict[str, Any]]:
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for number, row in table_rows(path, ("src", "dst", "throughput_gbit_per_s", "min_rtt_ms"), form=_HELP):
        pair = row["src"], row["dst"]
        if pair[0] not in regions or pair[1] not in regions:
            rows.setdefault(pair, {})
            continue
        link = _link(path, number, row)
        before = rows.get(pair)
        if before is None or link["line_bytes_per_s"] < before["line_bytes_per_s"]:
            rows[pair] = link
    return rows


def _link(path: Path, number: int, row: Mapping[str, str]) -> dict[str, Any]:
    def read(name: str, scale: float) -> float | None:
        text = row.get(name) or ""
        try:
            value = float(text) * scale if text else None
        except ValueError:
            value = math.nan
        if value is not None and not 0 <= value < 1e15:
            raise ConfigError(f"{path} line {number}: {name} is {shown(text)}", help=_HELP)
        return value

    line = read("throughput_gbit_per_s", _BYTES_PER_GBIT)
    if not line:
        raise ConfigError(f"{path} line {number}: a pair without throughput_gbit_per_s", help=_HELP)
    streams = read("streams", 1.0)
    fields: dict[str, Any] = {
        "line_bytes_per_s": line,
        "round_trip_s": read("min_rtt_ms", 1e-3),
        "usd_per_gb": read("egress_usd_per_gb", 1.0) or 0.0,
    }
    return fields if streams is None else {**fields, "streams": streams}
