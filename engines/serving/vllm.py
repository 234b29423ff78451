"""vLLM: `vllm serve` for every instance, `vllm-router` before them, `vllm bench serve` as their load.

Source: the options of vLLM 0.32.0 (vllm/engine/arg_utils.py, vllm/entrypoints/openai/cli_args.py, vllm/benchmarks/serve.py;
tests/unit/engines/parsers/vllm_serve.py runs them), docs/features/nixl_connector_usage.md, vllm-project/router 0.1 (src/main.rs).
"""

from __future__ import annotations

import math
import shlex

from ...schema.serving import Pool
from ...schema.serving_plan import ServingPlan
from ...schema.units import GIB
from ..adapter import Adapter, Exported, Limit
from .deployment import (
    IN_ONE_PLACE,
    LOAD,
    PLACED,
    PORT,
    ROUTER,
    SERVE,
    Instance,
    Options,
    arguments,
    common_notes,
    drafter,
    drafter_named,
    instances,
    keeps_prefixes,
    longest_request,
    meeting_port,
    no_experts_on_host,
    no_prefixes_on,
    no_shares,
    pool_limit,
    router_script,
    serve_script,
    spans_nodes,
    to_set,
    urls,
)
from .load import load_script, vllm_lengths

VERSION = "0.32"
DTYPES = {"fp16": "float16", "fp32": "float32"}
CACHES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "fp8", "fp32": "auto"}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
_SIDE_PORT, _SIDE_PORTS = 5600, 64
"""Where prefill and decode instances meet, one port for each data-parallel rank."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that the server takes (vllm/config/lora.py, MaxLoRARanks); adapters of a lower one are padded."""

LIMITS = (
    no_shares("vLLM runs both phases in one step"),
    pool_limit(
        "adapter_rank",
        lambda pool: (
            f"adapters of rank {pool.adapters.rank}, of which vLLM takes {LORA_RANKS[-1]} at most"
            if pool.adapters is not None and pool.adapters.rank > LORA_RANKS[-1]
            else ""
        ),
        f"plan with --adapters of rank {LORA_RANKS[-1]} or less",
    ),
    IN_ONE_PLACE,
    PLACED,
    drafter_named("vllm"),
    no_experts_on_host("vllm"),
    no_prefixes_on("storage", "export to sglang"),
    pool_limit(
        "one_connector",
        lambda pool: (
            "prefixes with the host, and keys and values sent to another pool"
            if pool.host_prefix_bytes and pool.role != "agg"
            else ""
        ),
        "plan with --modes agg, or export to sglang",
    ),
    pool_limit(
        "experts_of_stage",
        lambda pool: (
            f"ep={pool.layout.ep} of {pool.layout.stage_devices} devices: --enable-expert-parallel spreads experts over all of them"
            if pool.layout.ep not in (1, pool.layout.stage_devices)
            else ""
        ),
        "plan with --fix ep=1, or with as many as tp x attention_dp",
    ),
    Limit(
        "cpu_blocks",
        lambda p: (
            not (p.cluster.weakest_device.backend.is_host and any(pool.limits.block_size % 32 for pool in p.pools))
        ),
        lambda p: f"blocks of {p.pools[0].limits.block_size} tokens: attention on CPUs takes multiples of 32",
        "plan with blocks of 32 tokens",
    ),
    pool_limit(
        "step_holds_batch",
        lambda pool: (
            f"max_batched_tokens {pool.limits.max_batched_tokens} is below max_batch {pool.limits.max_batch}"
            if pool.limits.max_batched_tokens < pool.limits.max_batch
            else ""
        ),
        "plan with a smaller max_batch",
    ),
)


def options(plan: ServingPlan, pool: Pool) -> Options:
    """Return the options of an instance of a pool, its parallelism apart."""
    limits = pool.limits
    made: Options = {
        "dtype": DTYPES.get(pool.weights, "bfloat16"),
        "max-model-len": longest_request(plan, pool),
        "max-num-seqs": limits.max_batch,
        "max-num-batched-tokens": limits.max_batched_tokens,
        "gpu-memory-utilization": limits.cache_fraction,
        "block-size": limits.block_size,
        "kv-cache-dtype": CACHES[pool.cache],
        "enable-chunked-prefill" if limits.chunk else "no-enable-chunked-prefill": True,
        "enable-prefix-caching" if keeps_prefixes(plan, pool) else "no-enable-prefix-caching": True,
    }
    if limits.chunk and limits.chunk < limits.max_batched_tokens:
        made["long-prefill-token-threshold"] = limits.chunk
    if pool.weights == "fp8":
        made["quantization"] = "fp8"
    made |= {"cudagraph-capture-sizes": limits.graph_sizes} if limits.graph_sizes else {"enforce-eager": True}
    if pool.role != "agg":
        made["kv-transfer-config"] = NIXL
    if pool.host_prefix_bytes:
        made["kv-offloading-size"] = math.ceil(pool.host_prefix_bytes * pool.layout.num_devices / GIB)
    if (rows := pool.nano_batch_rows) is not None:
        made |= {
            "enable-dbo": True, "dbo-decode-token-threshold": rows, "dbo-prefill-token-threshold": rows,
            "all2all-backend": "deepep_low_latency" if pool.role == "decode" else "deepep_high_throughput",
        }  # fmt: skip
    if (drafting := pool.speculate) is not None:
        method = {"draft": "draft_model"}.get(drafting.method, drafting.method)
        model = drafter(pool)
        made["speculative-config"] = {
            "method": method, "num_speculative_tokens": drafting.draft_tokens, **({"model": model} if model else {}),
        }  # fmt: skip
    if (adapters := pool.adapters) is not None:
        made |= {
            "enable-lora": True,
            "max-loras": adapters.count,
            "max-lora-rank": min(size for size in LORA_RANKS if size >= adapters.rank),
        }
    return made


def parallelism(pool: Pool) -> Options:
    """Return the options of an instance's layout."""
    layout = pool.layout
    made: Options = {"tensor-parallel-size": layout.tp, "pipeline-parallel-size": layout.pp}
    if layout.attention_dp > 1:
        made["data-parallel-size"] = layout.attention_dp
    if layout.ep > 1:
        made["enable-expert-parallel"] = True
    return made


def _command(plan: ServingPlan, pool: Pool) -> str:
    words = " ".join(map(shlex.quote, arguments(parallelism(pool) | options(plan, pool))))
    side = (
        f" VLLM_NIXL_SIDE_CHANNEL_HOST=${{HOSTS[NODE]}} VLLM_NIXL_SIDE_CHANNEL_PORT=$(({_SIDE_PORT} + {_SIDE_PORTS} * $3))"
        if pool.role != "agg"
        else ""
    )
    return f'  CUDA_VISIBLE_DEVICES=$1{side} \\\n  vllm serve "$MODEL" --host "${{HOSTS[NODE]}}" --port "$2" {words} "${{@:4}}"'


def _on_nodes(item: Instance, pool: Pool, rank: int) -> str:
    """Return what vLLM is told on each of several nodes: all but the first have no server of their own."""
    first, port = f'"${{HOSTS[{item.nodes[0]}]}}"', meeting_port(item)
    if pool.layout.attention_dp > 1:
        local = pool.layout.attention_dp // len(item.nodes)
        words = f"--data-parallel-size-local {local} --data-parallel-address {first} --data-parallel-rpc-port {port}"
        return words + (f" --data-parallel-start-rank {rank * local} --headless" if rank else "")
    words = f"--nnodes {len(item.nodes)} --node-rank {rank} --master-addr {first} --master-port {port}"
    return words + (" --headless" if rank else "")


def _router(plan: ServingPlan) -> list[str]:
    begin = ["exec vllm-router", f'--host "${{HOSTS[0]}}" --port {PORT} --policy consistent_hash']
    if plan.mode == "agg":
        return [*begin, "--worker-urls", *urls(plan)]
    pairs = [f"--{role} {url}" for role in ("prefill", "decode") for url in urls(plan, role)]
    return [*begin, "--vllm-pd-disaggregation", *pairs]


def write(plan: ServingPlan) -> Exported:
    """Return the plan as scripts that start every instance, the router and the load."""
    routed = len(instances(plan)) > 1
    files = {SERVE: serve_script(
        plan, engine="vllm", version=VERSION, command=lambda pool: _command(plan, pool), on_nodes=_on_nodes
    )}  # fmt: skip
    if routed:
        files[ROUTER] = router_script(plan, "vllm", VERSION, _router(plan))
    files[LOAD] = load_script(
        plan, "vllm", VERSION, command="vllm bench serve", options=vllm_lengths, routed=routed, has_burstiness=True
    )
    spread = (f"vllm-router (a package of its own) for {ROUTER}",) if routed else ()
    transfer = ("nixl (a package of its own) on prefill and decode instances",) if plan.mode == "disagg" else ()
    return Exported(
        engine="vllm",
        version=VERSION,
        files=tuple(files.items()),
        not_expressed=common_notes(plan, "vllm"),
        to_set=(*to_set(plan), *spread, *transfer),
        command=f"bash {SERVE}" + (f", bash {ROUTER}" if routed else "") + f", then bash {LOAD}",
    )


def _rank_in_node(plan: ServingPlan, pool: Pool) -> bool:
    """Return whether an instance on several nodes has whole data-parallel ranks on each."""
    if pool.layout.attention_dp == 1 or not spans_nodes(plan, pool):
        return True
    nodes = next((len(item.nodes) for item in instances(plan) if plan.pools[item.pool] == pool), 1)
    return pool.layout.attention_dp % nodes == 0


ADAPTER = Adapter(
    version=VERSION,
    limits=(
        *LIMITS,
        Limit(
            "rank_in_node",
            lambda p: all(_rank_in_node(p, pool) for pool in p.pools),
            lambda p: (
                "a data-parallel rank of an instance would span nodes while others share one: vLLM has no words for it"
            ),
            "plan with --fix attention_dp=1, or as many as nodes divide",
        ),
    ),
    write=write,
)
