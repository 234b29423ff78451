"""What InferenceX's servers were told that tables of its results do not say: polling, fused all-reduces, drafts.

Sources: SemiAnalysisAI/InferenceX @ 843c625 (Apache-2.0), perf-changelog.yaml and configs/*-master.yaml at each day's commit: the
sweeps of a day, which are those of a table's column ``measured``; benchmarks/single_node/*.sh for settings.
"""

from __future__ import annotations

POLL_STEPS, POLL_STEPS_OF_FEW, POLLS_MANY = 30, 10, 16
"""--scheduler-recv-interval of the SGLang servers, from 16 in flight on and below."""

FUSED_ALL_REDUCE = ("vllm", "trtllm")
"""All-reduces of vLLM's servers on Blackwell, told enable_fi_allreduce_fusion or fuse_allreduce_rms: FlashInfer's, which are
TensorRT-LLM's."""

STREAM_INTERVAL = 10
"""stream_interval of the TensorRT-LLM servers: steps between two responses of a request."""

SPECULATING = frozenset(
    tuple(line.split())
    for line in """
        2026-01-14 trtllm deepseek-r1 b200
        2026-01-14 trtllm deepseek-r1 h200
        2026-02-05 trtllm deepseek-r1 b200
        2026-02-06 trtllm deepseek-r1 b200
        2026-02-06 sglang deepseek-r1 b200
        2026-03-20 sglang qwen3.5-397b-a17b b200
        2026-04-06 sglang qwen3.5-397b-a17b h200
        2026-04-14 sglang qwen3.5-397b-a17b h200
        2026-04-16 sglang qwen3.5-397b-a17b b300
        2026-04-18 sglang glm-5 b200
        2026-04-18 sglang glm-5 b300
        2026-04-25 sglang deepseek-r1 b300
        2026-04-25 sglang qwen3.5-397b-a17b b300
    """.strip().splitlines()
)
"""Day, engine, model and device of sweeps in which every server of one node drafted."""

DRAFTED, DRAFTED_BY_ATTENTION_RANKS = 3, 1
"""Tokens of a draft; of TensorRT-LLM's servers whose ranks attend to requests of their own."""

LENGTHS = "1.79/2.27/2.49"
"""Tokens a step with drafts of 1, 2 and 3: the lowest series measured for SPEED-Bench (golden_al_distribution; DeepSeek-V4-Pro,
thinking), since prompts are random tokens. Qwen3.5's own, 1.93/2.73/3.39 of programs, leaves its tokens a third too short."""


def speculation(measured: str, engine: str, model: str, gpu: str, attention_dp: int) -> str:
    """Return what a server of one node drafted on a day, as `parse_speculation` reads it; "" for nothing."""
    if (measured, engine, model.lower(), gpu.lower().partition("-")[0]) not in SPECULATING:
        return ""
    drafted = DRAFTED_BY_ATTENTION_RANKS if engine == "trtllm" and attention_dp > 1 else DRAFTED
    return f"mtp:{drafted},lengths={LENGTHS}"
