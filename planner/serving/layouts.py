"""Layouts of an engine instance on equal devices.

tp     divides the heads, within what the fastest links join (beyond them where it is fixed)
pp     up to MAX_PP, without attention_dp
attention_dp, ep   of models with experts: the ranks of a stage share the experts, whole (ep) or cut (moe_tp)
An instance has a divisor of a node's devices or whole nodes, so that instances fill nodes without rest (E3). Its phases have the
same steps, or each of some shares of the devices, without pp (`ways_of`).

ffn_devices   of instances that decode with feed-forward parts on devices of their own: a divisor of a node's devices or whole
              nodes, with experts whole on each (ep) or cut over all or over those of a node; the other devices are attention_dp
              ranks of tp each
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from ...cost_models.serving.attention_ffn import has_feed_forward
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
    domain, degrees, experts = max(node, cluster.scaleup_domain), _degrees(cluster), _experts(model)
    tps = _tps(model, cluster, fixed_tp)
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


def split_layouts(
    model: ModelSpec, clusters: tuple[ClusterSpec, ClusterSpec], *, fixed_tp: int = 1
) -> Iterator[ServingLayout]:
    """Yield the layouts of an instance with feed-forward parts on devices of their own.

    Args:
        clusters: of attention and of feed-forward devices: the same one, whose nodes both fill together, or unlike ones, each of
            whose nodes they fill by themselves.
    """
    if not has_feed_forward(model):
        return
    of_attention, of_ffn = clusters
    tps, node = _tps(model, of_attention, fixed_tp), math.gcd(*of_ffn.node_sizes)
    domain = max(node, of_ffn.scaleup_domain)
    for ffn_devices, size in itertools.product(_degrees(of_ffn), _degrees(of_attention)):
        attention = size - ffn_devices if of_attention is of_ffn else size
        if attention < 1 or attention + ffn_devices > MAX_STAGE_DEVICES:
            continue
        for tp, ep in itertools.product(tps, _groups(model, ffn_devices, domain)):
            if attention % tp == 0:
                yield ServingLayout(tp=tp, attention_dp=attention // tp, ep=ep, ffn_devices=ffn_devices)


def _groups(model: ModelSpec, ffn_devices: int, domain: int) -> list[int]:
    """Return the groups of feed-forward devices that have experts of their own, cut within the reach of the fastest links."""
    experts = _experts(model)
    if not experts:
        widths = [getattr(block.mlp, "ffn_dim", 0) for block, _ in model.block_runs]
        return [1] if ffn_devices <= domain and all(width % ffn_devices == 0 for width in widths) else []
    several = (1, ffn_devices // domain, ffn_devices)
    return sorted({
        ep
        for ep in several
        if ep and ffn_devices % ep == 0 and ffn_devices // ep <= domain and all(count % ep == 0 for count in experts)
    })  # fmt: skip


def _degrees(cluster: ClusterSpec) -> list[int]:
    """Return the sizes of a group that fills nodes, or of which several fill one."""
    node = math.gcd(*cluster.node_sizes)
    return [n for n in range(1, min(cluster.num_devices, MAX_STAGE_DEVICES) + 1) if node % n == 0 or n % node == 0]


def _tps(model: ModelSpec, cluster: ClusterSpec, fixed_tp: int) -> list[int]:
    """Return the degrees of tensor parallelism: within the fastest links, or as fixed."""
    domain = max(math.gcd(*cluster.node_sizes), cluster.scaleup_domain, fixed_tp)
    heads = [block.attention.num_heads for block, _ in model.block_runs]
    return [n for n in _degrees(cluster) if n <= domain and all(count % n == 0 for count in heads)]


def _experts(model: ModelSpec) -> list[int]:
    """Return the numbers of experts of the blocks that have some."""
    return [block.experts.num_experts for block, _ in model.block_runs if block.experts is not None]


def ways_of(layout: ServingLayout, request: PlanRequest, serving: Serving) -> Iterator[int | None]:
    """Yield how the phases of a layout may run: in the same steps (None), and the eighths of its devices that prompts may have."""
    if {*serving.modes} - {"shared"}:
        yield None
    if "shared" in serving.modes and layout.pp == 1:
        eighths = request.fixed.get("prefill_eighths")
        yield from SHARES if eighths is None else (eighths,)


def require_length(model: ModelSpec, longest: int) -> None:
    """Refuse requests of more tokens than the model's published configuration allows: engines answer them with an error.

    Raises:
        ConfigError: prompt and answer together are longer.
    """
    if longest > model.max_seq_len:
        raise ConfigError(
            f"requests of {longest:,} tokens with their answers: {model.name} takes {model.max_seq_len:,}",
            help="shorter requests; or a config.json whose max_position_embeddings are more, if the model was trained for them",
        )


def check_requests(model: ModelSpec, serving: Serving) -> None:
    """Refuse what means nothing for these requests, or for this model.

    Raises:
        ConfigError: requests longer than the model takes, tokens after the first where there are none, halves without experts.
    """
    require_length(model, serving.requests.longest)
    if all(entry.output_len == 1 for entry in serving.requests.classes):
        if any(limit.metric == "tpot" for limit in serving.limits):
            raise ConfigError("--tpot: answers of one token have no further ones", help="limit --ttft instead")
        if not {*serving.modes} & {"agg"}:
            raise ConfigError(
                f"mode {', '.join(serving.modes)}: answers of one token leave nothing to decode", help="--modes agg"
            )
    if serving.nano_batches and not _experts(model):
        raise ConfigError(
            f"--nano-batches: {model.name} has no experts, whose exchange would run beside the other half",
            help="leave it out",
        )


def check_sharing(request: PlanRequest, serving: Serving, parts: Sequence[ClusterSpec]) -> None:
    """Refuse what phases that share devices are not planned with.

    Raises:
        ConfigError: shares of no such mode, of CPUs, or of a pipeline.
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
