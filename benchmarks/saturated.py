"""NVIDIA's published runs of all requests at once, as they were run: equal requests, queued together, to the last answer.

perf-overview.md of TensorRT-LLM says for each pair of lengths how many requests there were, the share of free memory (0.95), and
from 0.19 on PyTorch's backend with the sizes of its graphs; up to 0.14 an engine holds 4,096 requests and 8,192 tokens a step (its
example), later ones what trtllm-bench sets (tensorrt_llm/bench/build/tuning.py) and CUTLASS's experts (moe_config; Triton's for
gpt-oss on Hopper). Nothing is streamed, so that a request has one response. A run of many waves of requests is as fast as a shorter
one: at most WAVES of them are simulated.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from meshwright.cost_models.serving.engine import EngineProfile, Graphs
from meshwright.cost_models.serving.memory import serving_memory
from meshwright.cost_models.serving.simulation import EnginePool, RequestTable, simulate
from meshwright.cost_models.serving.step import StepCosts

NUM_REQUESTS = {
    (128, 128): 30_000, (128, 2048): 3000, (128, 4096): 1500, (500, 2000): 3000, (1000, 1000): 3000, (1000, 2000): 1500,
    (1024, 1024): 3000, (1024, 2048): 1500, (1024, 8192): 1500, (1024, 32768): 1000, (2048, 128): 3000, (2048, 2048): 1500,
    (5000, 500): 1500, (8192, 1024): 1500, (20000, 2000): 1000, (32768, 1024): 1000,
}  # fmt: skip
"""By tokens of a prompt and of an answer ("Preparing a Dataset"; 1,024 + 2,048 as its neighbour)."""

MEMORY_FRACTION = 0.95
BACKEND = {"0.20": "1.0"}
"""Versions whose backend is that of a later one: PyTorch's, from 0.19 on."""

FIXED_LIMITS = dict.fromkeys(("0.10.0", "0.11.0", "0.12.0", "0.14"), (4096, 8192))
GRAPHS = Graphs(first=(1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 1024, 2048, 4096, 8192), steps=())
DEEPSEEK_BALANCE_STEPS = 60
"""attention_dp_config.timeout_iters of DeepSeek's runs; others do not balance."""

REQUEST_LIMIT, TOKEN_LIMIT = 4096, 32768
WAVES = 8


def tuned_limits(requests: float, isl: int, osl: int) -> tuple[int, int]:
    """Return requests and tokens of a step that trtllm-bench sets for a cache that holds so many requests."""
    rows = min(requests, REQUEST_LIMIT)
    tokens = min(rows * (1 + isl / osl), TOKEN_LIMIT)
    row_unit = 32 if rows < 256 else 128 if rows < 1024 else 256
    token_unit = 256 if tokens < 4096 else 512 if tokens < 8192 else 1024
    return max(64, _rounded_up(rows, row_unit)), max(2048, _rounded_up(tokens, token_unit))


def _rounded_up(value: float, unit: int) -> int:
    return unit * math.ceil(value / unit)


def profile_of(row: Any) -> EngineProfile:
    """Return the engine of a row as it was started."""
    profile = EngineProfile.named("trtllm", BACKEND.get(row.version, row.version))
    overhead, scheduler = profile.overhead, profile.scheduler
    if profile.graphs.first:
        overhead = overhead.replace(row_s=overhead.row_s / row.osl)
        is_triton = row.model.startswith("gpt-oss") and row.gpu.startswith("H")
        profile = profile.replace(graphs=GRAPHS, kernels=profile.kernels.replace(cutlass_experts=not is_triton))
    if row.attention_dp > 1:
        scheduler = scheduler.replace(balance_steps=DEEPSEEK_BALANCE_STEPS if "DeepSeek" in row.model else 0)
    return profile.replace(
        overhead=overhead, scheduler=scheduler, memory=profile.memory.replace(fraction=MEMORY_FRACTION),
        request=profile.request.replace(fixed_s=0.0, token_s=0.0, way_s=0.0),
    )  # fmt: skip


def saturated_s(step: StepCosts, row: Any) -> float:
    """Return the seconds of an output token of a run.

    Args:
        row: of the table, with model, version, isl, osl, pp and attention_dp.
    """
    profile, ranks, length = profile_of(row), int(row.attention_dp), int(row.isl + row.osl)
    fits = ranks * serving_memory(step, profile, request_len=length, max_batch=512).cache_tokens / length
    batch, tokens = FIXED_LIMITS.get(row.version) or tuned_limits(fits, row.isl, row.osl)
    tokens = max(tokens, int(row.isl) + batch)
    memory = serving_memory(step, profile, request_len=length, max_batch=batch, max_batched_tokens=tokens)
    limits = profile.limits(
        device_bytes=memory.device_bytes, cache_tokens=max(memory.cache_tokens, length + profile.memory.block_size),
        max_batch=batch, max_batched_tokens=tokens, longest_prompt=int(row.isl),
    )  # fmt: skip
    num_running = ranks * max(min(limits.cache_blocks // math.ceil(length / limits.block_size), batch), 1)
    count = min(NUM_REQUESTS[row.isl, row.osl], WAVES * num_running)
    requests = RequestTable.of(np.full(count, row.isl), np.full(count, row.osl))
    served = simulate(EnginePool.of(step, profile, limits, ranks=ranks, lanes=int(row.pp)), requests)
    return 1.0 / served.output_tokens_per_s
