"""Layouts of an engine instance on equal devices.

tp     divides the heads, within what the fastest links join (beyond them where it is fixed)
pp     up to MAX_PP, without attention_dp
attention_dp, ep   of models with experts: the ranks of a stage share the experts, whole (ep) or cut (moe_tp)
An instance has a divisor of a node's devices or whole nodes, so that instances fill nodes without rest (E3). Its phases have the
same steps, or each of some shares of the devices, without pp (`ways_of`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from ...cost_models.serving.shares import EIGHTHS, SHARES
from ...schema import ClusterSpec, ConfigError, ModelSpec
from ...schema.serving import Serving, ServingLayout
from ..request import PlanRequest

MAX_PP = 8
MAX_STAGE_DEVICES = 64
"""Ranks that share experts: beyond, published deployments (EP 32 to 144) are of thousands of devices."""


def layouts(model: ModelSpec, cluster: ClusterSpec, serving: Serving, *, fixed_tp: int = 1) -> Iterator[ServingLayout]:
    """Yield the layouts of an engine instance on equal devices; ``fixed_tp``: a degree that may go beyond the fastest links."""
    node, total = math.gcd(*cluster.node_sizes), cluster.num_devices
    domain = max(node, cluster.scaleup_domain)
    heads = [block.attention.num_heads for block, _ in model.block_runs]
    experts = [block.experts.num_experts for block, _ in model.block_runs if block.experts is not None]
    degrees = [n for n in range(1, min(total, MAX_STAGE_DEVICES) + 1) if node % n == 0 or n % node == 0]
    tps = [n for n in degrees if n <= max(domain, fixed_tp) and all(count % n == 0 for count in heads)]
    for tp, pp in itertools.product(
        tps, (n for n in range(1, MAX_PP + 1) if n & (n - 1) == 0 and n <= model.num_blocks)
    ):
        size = tp * pp
        if size > total or not (node % size == 0 or size % node == 0):
            continue
        yield ServingLayout(tp=tp, pp=pp)
        if pp == 1 and tp > 1 and all(count % tp == 0 for count in experts) and experts:
            yield ServingLayout(tp=tp, ep=tp)
    if not experts or serving.engine == "meshwright":
        return
    for stage, tp in itertools.product(degrees, tps):
        ranks = stage // tp
        if stage % tp or ranks < 2 or stage > total:
            continue
        yield from (
            ServingLayout(tp=tp, attention_dp=ranks, ep=ep)
            for ep in (1, stage)
            if all(count % ep == 0 for count in experts) and (ep > 1 or stage <= domain)
        )


def ways_of(layout: ServingLayout, request: PlanRequest, serving: Serving) -> Iterator[int | None]:
    """Yield how the phases of a layout may run: in the same steps (None), and the eighths of its devices that prompts may have."""
    if {*serving.modes} & {"agg", "disagg"}:
        yield None
    if "shared" in serving.modes and layout.pp == 1:
        eighths = request.fixed.get("prefill_eighths")
        yield from SHARES if eighths is None else (eighths,)


def check_sharing(request: PlanRequest, serving: Serving, parts: Sequence[ClusterSpec]) -> None:
    """Refuse what phases that share devices are not planned with.

    Raises:
        ConfigError: shares of no such mode, of CPUs, of a pipeline, or of requests of which nothing decodes.
    """
    eighths, is_only = request.fixed.get("prefill_eighths"), serving.modes == ("shared",)
    if eighths is not None and "shared" not in serving.modes:
        raise ConfigError(
            f"prefill_eighths {eighths}: {', '.join(serving.modes)} share no devices", help="add --modes shared"
        )
    if eighths is not None and eighths not in SHARES:
        raise ConfigError(f"prefill_eighths {eighths}: prompts have {SHARES[0]} to {SHARES[-1]} of {EIGHTHS} parts")
    if "shared" in serving.modes and any(part.weakest_device.backend.is_host for part in parts):
        raise ConfigError(
            f"mode shared: {request.cluster.name} has processors without multiprocessors to share", help="--modes agg"
        )
    if is_only and request.fixed.get("pp", 1) > 1:
        raise ConfigError(
            f"mode shared: pp {request.fixed['pp']}: stages of a pipeline have several steps under way already",
            help="--fix pp=1, or --modes agg",
        )
    if is_only and all(entry.output_len == 1 for entry in serving.requests.classes):
        raise ConfigError("mode shared: answers of one token leave nothing to decode", help="--modes agg")
