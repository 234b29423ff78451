"""Prefixes that requests share: where they may lie, what they take there, and the seconds of copying one (docs/serving.md).

device    cache of an attention rank - sum_w prefixes_w tokens_w: held once, for all requests
host      bytes of a token on a device / what its link to the host carries when all devices of a node copy; memory of a node
          >= devices_per_node sum_w prefixes_w tokens_w bytes of a token on a device
storage   the same at a device's share of the drives, where they are slower than the link
none      computed anew with every prompt
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...schema import ClusterSpec
from ...schema.serving import EngineLimits, PrefixTier, Requests, Serving
from ..coefficients import Coefficients
from ..hardware.host_memory import host_copy_bytes_per_s, node_storage_bytes_per_s
from ..hardware.streams import USABLE_HOST_MEMORY
from .engine import EngineProfile
from .host_experts import why_host_lacks
from .step import StepCosts

FULL_STEP = 16384
"""Tokens of a step in which a prompt's take least of it."""


def tiers_of(serving: Serving, profile: EngineProfile) -> tuple[PrefixTier | None, ...]:
    """Return where an engine may have the prefixes of a load, best without regard to what they take there."""
    if not serving.prefix_cache or not serving.requests.stored_tokens:
        return (None,)
    return ("device", *profile.memory.prefix_tiers, "none")


def best_tiers(
    step: StepCosts, requests: Requests, tiers: Sequence[PrefixTier | None]
) -> tuple[PrefixTier | None, ...]:
    """Return the places that may be best: no drives beside a host that holds all, not nowhere where copies are quicker."""
    copies: list[PrefixTier] = [
        tier for tier in ("host", "storage") if tier in tiers and (tier == "storage" or host_holds(step, requests))
    ][:1]
    best = [tier for tier in tiers if tier not in ("host", "storage") or tier in copies]
    lengths = np.array([entry.prefix_len for entry in requests.classes if entry.prefix_len], dtype=np.float64)
    full = np.full(lengths.shape, float(FULL_STEP))
    computed_s = step.seconds(0.0, 0.0, full, lengths / 2) / full
    if copies and np.all(fetch_s_per_token(step, copies[0]) <= computed_s):
        best.remove("none")
    return tuple(best)


def fetch_s_per_token(step: StepCosts, prefixes: PrefixTier | None) -> float:
    """Return the seconds in which a device copies its keys and values of a prefix's token; 0 where it has them or computes them."""
    if prefixes not in ("host", "storage"):
        return 0.0
    cluster, coefficients = step.instance.cluster, step.instance.coefficients
    return step.cache_bytes_per_token / tier_bytes_per_s(cluster, coefficients, prefixes)


def tier_bytes_per_s(cluster: ClusterSpec, coefficients: Coefficients, prefixes: PrefixTier) -> float:
    """Return what a device reads from a place while all of its node do."""
    rate = host_copy_bytes_per_s(cluster, coefficients)
    if prefixes == "storage":
        rate = min(rate, node_storage_bytes_per_s(cluster, coefficients) / cluster.largest_node)
    return rate


def without_prefixes(limits: EngineLimits, requests: Requests, prefixes: PrefixTier | None) -> EngineLimits | None:
    """Return the limits of the cache that prefixes leave to requests; None: they leave none."""
    blocks = -(-requests.stored_tokens // limits.block_size) if prefixes == "device" else 0
    return limits.replace(cache_blocks=limits.cache_blocks - blocks) if blocks < limits.cache_blocks else None


def host_bytes(step: StepCosts, requests: Requests, prefixes: PrefixTier | None) -> float:
    """Return the bytes of a device's part of the prefixes, where they lie with the host or on its drives."""
    return requests.stored_tokens * step.cache_bytes_per_token if prefixes in ("host", "storage") else 0.0


def host_holds(step: StepCosts, requests: Requests) -> bool:
    """Return whether the memory of every node holds the prefixes beside its experts, each device's part for itself."""
    cluster = step.instance.cluster
    sizes = [group.host_memory_bytes for group in cluster.groups]
    needed = cluster.largest_node * host_bytes(step, requests, "host")
    fits = not all(sizes) or needed <= USABLE_HOST_MEMORY * min(size or 0.0 for size in sizes)
    return fits and not why_host_lacks(step, host_bytes(step, requests, "host"))


def why_none_fit(step: StepCosts, requests: Requests, prefixes: PrefixTier | None, free: EngineLimits | None) -> str:
    """Return why a place does not hold the prefixes, or leaves no cache to requests; "" where it does."""
    stored = f"the prefixes of the load, {requests.stored_tokens:,} tokens"
    if free is None or free.cache_blocks * free.block_size < requests.longest_beside_prefix(prefixes):
        return f"{stored}, leave no cache for a request"
    if prefixes == "host" and not host_holds(step, requests):
        return f"the host's memory does not hold {stored}"
    return ""
