"""Bytes of an engine instance on its fullest device: weights, workspace, graphs, and the cache in what is left.

workspace   T (4 h + 3 w / tp) e + R v / tp 4: a step's hidden states, the widest feed-forward part, logits of R rows in fp32
cache       phi M - weights - workspace - context      the engine may use a fraction phi of all memory (vLLM, SGLang)
phi (M - weights - workspace - context)    of what is left (TensorRT-LLM)
tokens      cache / (c + sum_w c_w min(w, n) / n + state / n)      requests of n tokens, windows w, states of fixed size

Feed-forward devices of their own have weights and T n_dp / m (2 h c / ep + 3 w / n_f) e of workspace: of a micro-batch's rows
c / ep arrive at each of the ep groups, and w is the width of all that a row visits (attention_ffn.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...schema.layers import MoE
from ...schema.model import ModelSpec
from ...schema.serving import EngineLimits
from ...schema.units import GIB, MIB, format_bytes
from .attention_ffn import SplitCosts, copies_of
from .engine import EngineProfile
from .step import StepCosts

CONTEXT_BYTES = 0.5 * GIB
COLLECTIVES_BYTES = 0.6 * GIB
"""CUDA context and library handles of one process; NCCL's channels where there are several."""

GRAPH_BYTES = 12 * MIB
"""Of one captured size: 0.6 GiB for 51 (vllm 0.12 log, "Graph capturing finished", 8B to 70B)."""


@dataclass(frozen=True)
class ServingMemory:
    """Bytes of the fullest device, and the cache in tokens of one attention rank.

    Attributes:
        cache_tokens: 0 where the weights alone fill the device.
        reason: why nothing fits; None where something does.
        ffn_weight_bytes, ffn_free_bytes: of a feed-forward device, where there are any; the other bytes are then of an attention
            device.
    """

    device_bytes: float
    weight_bytes: float
    workspace_bytes: float
    graph_bytes: float
    context_bytes: float
    cache_bytes: float
    cache_tokens: int
    reason: str | None
    ffn_weight_bytes: float = 0.0
    ffn_free_bytes: float = 0.0

    @property
    def fits(self) -> bool:
        """Return whether a cache is left."""
        return self.reason is None


def serving_memory(
    step: StepCosts, profile: EngineProfile, *, request_len: float, max_batch: int | None = None,
    max_batched_tokens: int | None = None, processes: int = 1,
) -> ServingMemory:  # fmt: skip
    """Return the memory of an engine instance for requests of ``request_len`` tokens, under the engine's limits or these.

    ``processes``: on each device, with a context each; weights and cache are there once.
    """
    instance = step.instance
    device_bytes = float(instance.cluster.weakest_device.memory_bytes)
    limits = profile.limits(
        device_bytes=device_bytes, cache_tokens=1, max_batch=max_batch, max_batched_tokens=max_batched_tokens
    )
    element = instance.rates.compute_bytes
    is_split = isinstance(step, SplitCosts)
    widest = 0.0 if is_split else _widest(instance.model, instance.layout.tp, instance.layout.moe_tp)
    workspace = limits.max_batched_tokens * (4 * instance.model.hidden_dim + 3 * widest) * element
    workspace += min(limits.max_batch, limits.max_batched_tokens) * instance.model.vocab_size / instance.layout.tp * 4
    graphs = GRAPH_BYTES * len(limits.graph_sizes)
    is_host = instance.cluster.weakest_device.backend.is_host
    context = 0.0 if is_host else processes * (CONTEXT_BYTES + COLLECTIVES_BYTES * (instance.layout.num_devices > 1))
    phi = profile.memory.fraction
    if profile.memory.of_free:
        cache = phi * (device_bytes - step.weight_bytes - workspace - context - graphs)
    else:
        cache = phi * device_bytes - step.weight_bytes - workspace - context
    token = cached_token_bytes(step, request_len)
    tokens = max(int(cache / token), 0) if token else 10**9
    block = profile.memory.block_size
    reason = None
    if cache < 0:
        reason = (
            f"weights of {format_bytes(step.weight_bytes)} with {format_bytes(workspace + context)} of workspace exceed"
            f" {phi:.0%} of the {format_bytes(device_bytes)} of a device"
        )
    elif tokens // block * block < request_len:
        reason = f"the cache has {tokens} tokens of the {request_len:.0f} that one request needs"
    memory = ServingMemory(
        device_bytes, step.weight_bytes, workspace, graphs, context, max(cache, 0.0), tokens // block * block, reason
    )
    if isinstance(step, SplitCosts) and reason is None:
        return _with_feed_forward(memory, step, profile, limits)
    return memory


def _with_feed_forward(
    memory: ServingMemory, step: SplitCosts, profile: EngineProfile, limits: EngineLimits
) -> ServingMemory:
    """Return the memory of an instance with what its feed-forward devices have, and whether that fits."""
    instance, layout = step.feed_forward, step.instance.layout
    assert instance is not None
    device_bytes = float(instance.cluster.weakest_device.memory_bytes)
    rows = limits.max_batched_tokens * layout.attention_dp / step.micro_batches
    arriving = rows * copies_of(instance.model, layout) / layout.ep * 2 * instance.model.hidden_dim
    inner = rows * 3 * _widest(instance.model, layout.ffn_devices, layout.ffn_devices)
    workspace = (arriving + inner) * instance.rates.compute_bytes
    context = 0.0 if instance.cluster.weakest_device.backend.is_host else CONTEXT_BYTES + COLLECTIVES_BYTES
    free = profile.memory.fraction * device_bytes - step.ffn_weight_bytes - workspace - context
    reason = None
    if free < 0:
        reason = (
            f"feed-forward weights of {format_bytes(step.ffn_weight_bytes)} with {format_bytes(workspace + context)} of workspace"
            f" exceed {profile.memory.fraction:.0%} of the {format_bytes(device_bytes)} of a device"
        )
    return replace(memory, ffn_weight_bytes=step.ffn_weight_bytes, ffn_free_bytes=free, reason=reason)


def cached_token_bytes(step: StepCosts, request_len: float) -> float:
    """Return the bytes of a cached token on one device, averaged over a request of ``request_len`` tokens."""
    windowed = sum(size * (1 - min(window / request_len, 1.0)) for window, size in step.window_cache_bytes)
    return step.cache_bytes_per_token - windowed + step.state_bytes / request_len


def _widest(model: ModelSpec, tp: int, moe_tp: int) -> float:
    """Return the width of the widest feed-forward part on one rank, of the experts that a token visits together."""
    widths = [
        block.mlp.ffn_dim * block.mlp.top_k / moe_tp
        if isinstance(block.mlp, MoE)
        else getattr(block.mlp, "ffn_dim", 0) / tp
        for block, _ in model.block_runs
    ]
    return max(widths)
