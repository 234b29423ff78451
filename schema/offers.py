"""Offers of machines for rent, and the money a plan on them costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from .base import Frozen, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, read_toml, shown
from .catalogue import find_device
from .cluster import ClusterSpec, Link, LinkLevel, joined_levels
from .cluster_files import check_keys, count_from_table
from .errors import ConfigError
from .layout import Layout
from .machines_file import read_pools
from .plan import Proof
from .units import counted

Outcome = Literal["chosen", "on the front", "dearer", "too slow", "does not fit", "no layout", "not examined"]


class SizeTried(Frozen):
    """One size of one offer, or of several together, and the outcome of examining it.

    Attributes:
        offer: its name; of several the nodes of each, as `mixture_name` writes them.
        bound_s: no layout of this size has a faster step; unset where no bound was worked out.
        step_time_s: of the fastest layout; unset where the bounds alone decided, or nothing fits.
        usd_per_million_tokens: at that step time, or (``is_bound``) at the bound: no layout of this size is cheaper.
        joules_per_token: of its fastest layout, where that and the power limits of its devices are known.
        host_bytes: of a node, where the fastest layout has an offload schedule.
    """

    offer: str
    num_nodes: PositiveInt
    num_devices: PositiveInt
    price_per_hour: PositiveFloat | None = None
    outcome: Outcome
    reason: str = ""
    layouts: NonNegativeInt = 0
    bound_s: PositiveFloat | None = None
    step_time_s: PositiveFloat | None = None
    usd_per_million_tokens: PositiveFloat | None = None
    joules_per_token: PositiveFloat | None = None
    is_bound: bool = False
    host_bytes: NonNegativeInt = 0


class CostSummary(Proof):
    """Money, in USD, and energy; devices are paid for as long as the training takes.

    Attributes:
        objective: what was minimised: cost, or energy; prices are needed for the one, power limits of the devices for the other.
        offer, num_nodes: what is rented; price_per_hour: all of it.
        goodput: part of the time in which it makes progress that stays, where it has spot nodes; money, hours and joules are of
            such progress, and the floor is one on it.
        min_tokens_per_s: the floor that every size had to reach.
        tokens, hours, total: the whole run, where its tokens are given.
        joules_per_token: of the devices alone; bound_joules_per_token: no layout of any size draws less.
        bound_usd_per_million_tokens: no size of any offer that reaches the floor is cheaper, within the cost model.
        gap: 1 - bound over what was reached; above zero where a simpler layout was taken over a faster one, or a time limit came
            first, and of energy, whose bound has all computation at the devices' peak rates.
        status: as of a `Certificate`, with sizes in place of layouts.
        sizes: every size of every offer, in the order of the offers, then the mixtures that were looked at.
        mix, num_mixtures: how many offers may be rented together, and the mixtures of them that the bound is about.
    """

    objective: str = "cost"
    offer: str
    num_nodes: PositiveInt
    price_per_hour: PositiveFloat | None = None
    usd_per_step: PositiveFloat | None = None
    usd_per_million_tokens: PositiveFloat | None = None
    usd_per_billion_tokens: PositiveFloat | None = None
    joules_per_token: PositiveFloat | None = None
    bound_joules_per_token: NonNegativeFloat | None = None
    min_tokens_per_s: NonNegativeFloat = 0.0
    tokens: PositiveFloat | None = None
    hours: PositiveFloat | None = None
    total: PositiveFloat | None = None
    bound_usd_per_million_tokens: NonNegativeFloat | None = None
    search_s: NonNegativeFloat
    sizes: tuple[SizeTried, ...] = ()
    goodput: PositiveFloat = 1.0
    mix: PositiveInt = 1
    num_mixtures: NonNegativeInt = 0


class ParetoPoint(Frozen):
    """A layout that no other one beats in both time and memory.

    Attributes:
        cap_bytes: the point is the fastest layout that requires at most this much of a device.
        bound_s: no such layout of the space is faster.
        layers_of_stage: how many layers each stage holds, in order: one layout may be cut in several ways.
        host_bytes: of a node, where the layout has an offload schedule.
    """

    layout: Layout
    step_time_s: PositiveFloat
    bound_s: PositiveFloat
    required_bytes: PositiveInt
    peak_allocated_bytes: PositiveInt
    cap_bytes: PositiveInt
    tokens_per_s: PositiveFloat
    layers_of_stage: tuple[PositiveInt, ...] = ()
    host_bytes: NonNegativeInt = 0


DAY_S = 86_400.0

MAX_LOSSES_PER_NODE_DAY = 1e4
"""One in nine seconds: such a node is of no use."""

_DEVICE_KEYS = ("device", "devices_per_node", "link", "num_nodes")


class Offer(Frozen):
    """``cluster`` is the largest size; of one group of equal nodes there are all sizes from ``min_nodes`` up.

    A cluster of several groups is offered as a whole. Cost needs a price of every device. ``losses_per_node_day``: nodes that are
    taken away, of spot machines.
    """

    name: str = Field(min_length=1)
    cluster: ClusterSpec
    min_nodes: int = Field(default=1, ge=1)
    losses_per_node_day: NonNegativeFloat = 0.0

    @property
    def sizes(self) -> range:
        """Numbers of nodes that can be rented."""
        max_nodes = self.cluster.num_nodes
        return range(max_nodes if len(self.cluster.groups) > 1 else self.min_nodes, max_nodes + 1)

    def with_size(self, num_nodes: int) -> ClusterSpec:
        """Return the cluster of so many nodes."""
        return with_nodes(self.cluster, num_nodes)

    @classmethod
    def from_cluster(
        cls,
        cluster: ClusterSpec,
        *,
        name: str = "",
        price_per_device_hour: float | None = None,
        min_nodes: int = 1,
        losses_per_node_day: float = 0.0,
    ) -> Offer:
        """Offer a cluster at a price per device, or at the prices that its devices have, if any."""
        name = name or cluster.name
        if price_per_device_hour is not None:
            devices = (group.device.replace(price_per_hour=price_per_device_hour) for group in cluster.groups)
            groups = (group.replace(device=device) for group, device in zip(cluster.groups, devices, strict=True))
            cluster = cluster.replace(groups=tuple(groups))
        return cls(name=name, cluster=cluster, min_nodes=min_nodes, losses_per_node_day=losses_per_node_day)


def with_more_nodes(cluster: ClusterSpec, num_nodes: int) -> ClusterSpec:
    """Return a cluster of one group as it would be with so many nodes, also more than it has."""
    if num_nodes <= cluster.num_nodes:
        return with_nodes(cluster, num_nodes)
    group = cluster.groups[0].replace(num_nodes=num_nodes)
    levels = joined_levels(cluster.levels, group.num_devices)
    return cluster.replace(groups=(group,), levels=levels, bandwidth_matrix=None)


def mixture_name(names: Sequence[str], counts: Sequence[int]) -> str:
    """Name nodes of several offers together."""
    return " + ".join(f"{count} {name}" for name, count in zip(names, counts, strict=True) if count)


def mixture(offers: Sequence[Offer], counts: Sequence[int]) -> ClusterSpec:
    """Return the cluster of so many nodes of each of several offers, joined by the slowest of the links between their nodes.

    Raises:
        ConfigError: no offer has several nodes, whose link could join them.
    """
    used = [(offer, count) for offer, count in zip(offers, counts, strict=True) if count]
    sizes = [offer.with_size(count) for offer, count in used]
    groups = [size.groups[0] for size in sizes]
    outer = [offer.cluster.levels[-1].link for offer, _ in used if offer.cluster.num_nodes > 1]
    if not outer:
        names = ", ".join(offer.name for offer, _ in used)
        raise ConfigError(f"nothing says what joins nodes of {names}", help="give an offer with two nodes or more")
    domain = math.gcd(*(size.scaleup_domain for size in sizes))
    levels = [LinkLevel(link=_slowest([size.levels[0].link for size in sizes]), domain_size=domain)] * (domain > 1)
    total = sum(group.num_devices for group in groups)
    levels.append(LinkLevel(link=_slowest(outer), domain_size=total))
    cluster = sizes[0].replace(
        name=mixture_name([offer.name for offer in offers], counts),
        groups=tuple(group.replace(levels=size.levels) for group, size in zip(groups, sizes, strict=True)),
        levels=tuple(levels),
        reserved_bytes=max(size.reserved_bytes for size in sizes),
    )
    if cluster.is_mixed:
        return cluster
    largest = max((offer.cluster for offer, _ in used), key=lambda each: each.num_nodes)
    return cluster.replace(groups=tuple(groups), levels=joined_levels(largest.levels, total))


def _slowest(links: Sequence[Link]) -> Link:
    return min(links, key=lambda link: link.bandwidth_bytes_per_s * link.efficiency.all_reduce)


def with_nodes(cluster: ClusterSpec, num_nodes: int) -> ClusterSpec:
    """Return the first ``num_nodes`` nodes of a cluster of one group, joined by the same links.

    Link domains must nest: one that does not divide the smaller cluster becomes the largest number of complete nodes that does.

    Raises:
        ConfigError: the nodes are not all alike.
    """
    if num_nodes == cluster.num_nodes:
        return cluster
    if len(cluster.groups) > 1:
        raise ConfigError(f"{cluster.name} has {len(cluster.groups)} groups of nodes: it has no smaller size")
    group = cluster.groups[0].replace(num_nodes=num_nodes)
    total, node, inner = group.num_devices, group.devices_per_node, 1
    levels: list[LinkLevel] = []
    for level in cluster.levels:
        step = inner if level.domain_size <= node else max(inner, node)
        size = total
        if level.domain_size < total:
            size = max((s for s in range(step, level.domain_size + 1, step) if total % s == 0), default=inner)
        if size > inner or (size == total and not levels):
            levels.append(LinkLevel(link=level.link, domain_size=size))
        inner = size
        if size == total:
            break
    return cluster.replace(
        name=f"{cluster.name}, {counted(num_nodes, 'node')}",
        groups=(group,),
        levels=tuple(levels),
        bandwidth_matrix=cluster.bandwidths_of(range(num_nodes)),
    )


def with_devices_per_node(cluster: ClusterSpec, num_devices: int) -> ClusterSpec:
    """Return a cluster of one group with so many devices in each node, no more than it has."""
    group = cluster.groups[0]
    sizes: dict[int, LinkLevel] = {}
    for level in cluster.levels:  # links within a node join all of its devices
        spans_nodes = level.domain_size > group.devices_per_node
        size = level.domain_size * num_devices // group.devices_per_node if spans_nodes else num_devices
        sizes.setdefault(size, level.replace(domain_size=size))
    return cluster.replace(
        name=f"{cluster.name}, {counted(num_devices, 'device')} in each node",
        groups=(group.replace(devices_per_node=num_devices, levels=()),),
        levels=tuple(sizes.values()),
    )


def offers_from_file(path: str) -> tuple[Offer, ...]:
    """Read the offers of a TOML file: [[offers]] tables, each of a device or of a cluster (docs/cluster.md).

    Raises:
        ConfigError: no such file, not TOML, a field that is missing, unknown or of the wrong kind, or no price.
    """
    data = read_toml(path)
    tables = data.get("offers")
    if set(data) != {"offers"} or not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise ConfigError(f"{path} is no list of offers: it must hold [[offers]] tables and nothing else")
    if not tables:
        raise ConfigError(f"{path}: there is no offer in it", help="write an [[offers]] table")
    offers = tuple(
        _offer_from_table(table, f"{path}: offers[{i}]", Path(path).parent) for i, table in enumerate(tables)
    )
    names = [offer.name for offer in offers]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{path}: two offers are called {twice}", help="give each a `name` of its own")
    return offers


def _offer_from_table(table: Mapping[str, Any], where: str, folder: Path) -> Offer:
    keys = ("name", *_DEVICE_KEYS, "min_nodes", "cluster", "price_per_device_hour", "losses_per_node_day", "trace")
    check_keys(table, keys, where)
    price = table.get("price_per_device_hour")
    if price is not None and (type(price) not in (int, float) or not 0 < price < 1e6):
        raise ConfigError(f"{where}: price_per_device_hour = {shown(price)} is no price in USD such as 2.5")
    if ("device" in table) == ("cluster" in table):
        raise ConfigError(f"{where}: an offer is of a `device` or of a `cluster`: give one of them")
    if "device" in table:
        device, link = table["device"], table.get("link")
        if not isinstance(device, str) or not (link is None or isinstance(link, str)):
            raise ConfigError(f"{where}: `device` and `link` are names of the catalogue")
        per_node = count_from_table(table, "devices_per_node", where, find_device(device)[1]["devices_per_node"])
        text = f"{count_from_table(table, 'num_nodes', where)}x{per_node}x{device}" + (
            "" if link is None else f"/{link}"
        )
    else:
        text, given = table["cluster"], [key for key in _DEVICE_KEYS if key in table]
        if given or not isinstance(text, str):
            without = f", without {given}" if given else ""
            raise ConfigError(f"{where}: `cluster` is the name or file of a whole cluster{without}")
        if text.lower().endswith(".toml") and (folder / text).exists():  # a file next to the offers file
            text = str(folder / text)
    cluster = ClusterSpec.parse(text)
    min_nodes = cluster.num_nodes if "cluster" in table else 1
    if "min_nodes" in table:
        min_nodes = count_from_table(table, "min_nodes", where)
        if min_nodes > cluster.num_nodes:
            raise ConfigError(f"{where}: min_nodes {min_nodes} of {cluster.num_nodes} nodes")
    return Offer.from_cluster(
        cluster,
        name=table.get("name", cluster.name),
        price_per_device_hour=price,
        min_nodes=min_nodes,
        losses_per_node_day=_losses_per_node_day(table, where, folder),
    )


def _losses_per_node_day(table: Mapping[str, Any], where: str, folder: Path) -> float:
    """Return what an offer says of losses, or what a recording of its machines does; none where it says nothing."""
    if "trace" not in table:
        losses = table.get("losses_per_node_day", 0.0)
        if type(losses) not in (int, float) or not 0 <= losses <= MAX_LOSSES_PER_NODE_DAY:
            raise ConfigError(
                f"{where}: losses_per_node_day = {shown(losses)} is no rate from 0 to {MAX_LOSSES_PER_NODE_DAY:g}"
            )
        return float(losses)
    if not isinstance(table["trace"], str) or "losses_per_node_day" in table:
        raise ConfigError(f"{where}: `trace` is the name of a file, in place of losses_per_node_day")
    pools = read_pools(folder / table["trace"]).values()
    spans = [(before, after) for changes in pools for before, after in pairwise(changes)]
    node_days = sum((after.time_s - before.time_s) * before.available for before, after in spans) / DAY_S
    losses = sum(max(before.available - after.available, 0) for before, after in spans)
    return losses / node_days if node_days else MAX_LOSSES_PER_NODE_DAY
