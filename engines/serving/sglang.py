"""SGLang: `sglang.launch_server` for every instance, `sglang_router` before them, `sglang.bench_serving` as their load.

Source: the options of SGLang 0.5.23 (python/sglang/srt/server_args.py, srt/arg_groups/fields;
tests/unit/engines/parsers/sglang_args.py runs them), sglang-router 0.3.2. Attention's data parallelism is --attn-dp-size here, in
older versions --dp-size with --enable-dp-attention. With it the limits of the batch and of the chunk are of all its ranks together
(srt/arg_groups/parallel_hook.py, srt/mem_cache/kv_cache_configurator.py).

Experts on the host are those of its KTransformers part (srt/layers/moe/kt_ep_wrapper.py): of each layer the first ones on the
devices, the others computed by the processors of the first rank's node while the devices compute theirs; none is copied. Its
paged experts (srt/layers/moe/paged_experts) are copied when they are met, before any is computed, and the last used ones remain:
plans have copies beside kernels and the most visited ones, so that these are refused.
"""

from __future__ import annotations

import math
import shlex

from ...schema.host_experts import ExpertsOnHost
from ...schema.serving import Pool, RequestClass
from ...schema.serving_plan import ServingPlan
from ...schema.units import GB
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
    no_adapters,
    no_shares,
    pool_limit,
    router_script,
    serve_script,
    spans_nodes,
    to_set,
    urls,
)
from .load import load_script

VERSION = "0.5.23"
DTYPES = {"fp16": "float16", "fp32": "float32"}
CACHES = {"bf16": "bf16", "fp16": "auto", "fp8": "fp8_e4m3", "fp32": "auto"}
HOST_KERNELS = {"int4": "AMXINT4", "int8": "AMXINT8"}
"""Of KTransformers' kernels for the host those whose types plans have."""

_BOOTSTRAP_PORT = 8998
"""Of the first prefill instance; others follow."""


def options(plan: ServingPlan, pool: Pool) -> Options:
    """Return the options of an instance of a pool."""
    limits, layout = pool.limits, pool.layout
    made: Options = {
        "tp-size": layout.stage_devices,
        "pp-size": layout.pp,
        "dtype": DTYPES.get(pool.weights, "bfloat16"),
        "context-length": longest_request(plan, pool),
        "max-running-requests": limits.max_batch * layout.attention_dp,
        "max-prefill-tokens": limits.max_batched_tokens,
        "chunked-prefill-size": limits.chunk * layout.attention_dp if limits.chunk else -1,
        "max-total-tokens": limits.cache_blocks * limits.block_size,
        "mem-fraction-static": limits.cache_fraction,
        "page-size": limits.block_size,
        "kv-cache-dtype": CACHES[pool.cache],
    }
    if layout.attention_dp > 1:
        made["attn-dp-size"] = layout.attention_dp
    if layout.ep > 1:
        made["ep-size"] = layout.ep
    if pool.weights == "fp8":
        made["quantization"] = "fp8"
    if not keeps_prefixes(plan, pool):
        made["disable-radix-cache"] = True
    if pool.host_prefix_bytes:
        made |= {"enable-hierarchical-cache": True, "hicache-size": math.ceil(pool.host_prefix_bytes / GB)}
    if pool.prefixes == "storage":
        made["hicache-storage-backend"] = "file"
    if plan.serving.scheduler == "mixed" and pool.role == "agg":
        made["enable-mixed-chunk"] = True
    if pool.role == "prefill" or not limits.graph_sizes:
        made["cuda-graph-backend-decode"] = "disabled"
    else:
        made["cuda-graph-bs-decode"] = limits.graph_sizes
    if pool.role != "agg":
        made |= {"disaggregation-mode": pool.role, "disaggregation-transfer-backend": "nixl"}
    if pool.nano_batch_rows is not None:
        made |= {"enable-two-batch-overlap": True, "moe-a2a-backend": "deepep"}
    if (placed := pool.experts_on_host) is not None:
        made |= {"kt-method": HOST_KERNELS[pool.weights], "kt-num-gpu-experts": _experts_on_device(plan, placed)}
    if (drafting := pool.speculate) is not None:
        drafted, model = drafting.draft_tokens or 1, drafter(pool)
        made |= {
            "speculative-algorithm": {"mtp": "EAGLE", "eagle3": "EAGLE3", "draft": "STANDALONE"}[drafting.method],
            "speculative-num-steps": drafted, "speculative-eagle-topk": 1, "speculative-num-draft-tokens": drafted + 1,
        }  # fmt: skip
        if model is not None:
            made["speculative-draft-model-path"] = model
    return made


def _experts_on_device(plan: ServingPlan, placed: ExpertsOnHost) -> int:
    """Return the experts of a layer that are on the devices."""
    experts = next(block.experts for block, _ in plan.model.block_runs if block.experts is not None)
    return round((1 - (placed.share or 0.0)) * experts.num_experts)


def _command(plan: ServingPlan, pool: Pool) -> str:
    words = " ".join(map(shlex.quote, arguments(options(plan, pool))))
    if pool.experts_on_host is not None:
        words += (
            ' --kt-weight-path "${KT_WEIGHTS:?experts for the host}" --kt-cpuinfer "${KT_THREADS:?cores of the host}"'
        )
    bootstrap = f" --disaggregation-bootstrap-port $(({_BOOTSTRAP_PORT} + $3))" if pool.role == "prefill" else ""
    return (
        "  CUDA_VISIBLE_DEVICES=$1 \\\n"
        '  python3 -m sglang.launch_server --model-path "$MODEL" --host "${HOSTS[NODE]}" --port "$2" '
        f'{words}{bootstrap} "${{@:4}}"'
    )


def _on_nodes(item: Instance, _pool: Pool, rank: int) -> str:
    return f'--nnodes {len(item.nodes)} --node-rank {rank} --dist-init-addr "${{HOSTS[{item.nodes[0]}]}}:{meeting_port(item)}"'


def _router(plan: ServingPlan) -> list[str]:
    begin = [
        "exec python3 -m sglang_router.launch_router",
        f'--host "${{HOSTS[0]}}" --port {PORT} --policy cache_aware',
    ]
    if plan.mode == "agg":
        return [*begin, "--worker-urls", *urls(plan)]
    prefills = [item for item in instances(plan) if plan.pools[item.pool].role == "prefill"]
    named = zip(urls(plan, "prefill"), prefills, strict=True)
    pairs = [f"--prefill {url} {_BOOTSTRAP_PORT + item.idx}" for url, item in named]
    return [*begin, "--pd-disaggregation", *pairs, *(f"--decode {url}" for url in urls(plan, "decode"))]


def _lengths(entry: RequestClass) -> Options:
    return {
        "backend": "sglang-oai",
        "dataset-name": "random",
        "random-input-len": entry.prompt_len,
        "random-output-len": entry.output_len,
        "random-range-ratio": 1.0,
    }


def write(plan: ServingPlan) -> Exported:
    """Return the plan as scripts that start every instance, the router and the load."""
    routed = len(instances(plan)) > 1
    files = {SERVE: serve_script(
        plan, engine="sglang", version=VERSION, command=lambda pool: _command(plan, pool), on_nodes=_on_nodes
    )}  # fmt: skip
    if routed:
        files[ROUTER] = router_script(plan, "sglang", VERSION, _router(plan))
    bench = "python3 -m sglang.bench_serving"
    files[LOAD] = load_script(plan, "sglang", VERSION, command=bench, options=_lengths, routed=routed)
    spread = (f"sglang-router (a package of its own) for {ROUTER}",) if routed else ()
    load = plan.serving.requests
    on_host = any(pool.experts_on_host for pool in plan.pools)
    kernels = ("KT_WEIGHTS: a folder of the experts as kt-kernel converts them; KT_THREADS: cores of the host",)
    unsaid = [
        *(["experts: it has the first ones of a layer on the devices, the plan the most visited"] if on_host else []),
        *(["arrivals: bench_serving draws them from a Poisson process only"] if load.arrival_cv != 1 else []),
        *(["prefixes: bench_serving's random prompts share none"] if any(e.prefix_len for e in load.classes) else []),
    ]
    return Exported(
        engine="sglang",
        version=VERSION,
        files=tuple(files.items()),
        not_expressed=(*common_notes(plan, "sglang"), *unsaid),
        to_set=(*to_set(plan), *spread, *(kernels if on_host else ())),
        command=f"bash {SERVE}" + (f", bash {ROUTER}" if routed else "") + f", then bash {LOAD}",
    )


def _not_computed_by_the_host(pool: Pool) -> str:
    """Return what of a pool's experts on the host KTransformers' part has not; nothing where it has all."""
    placed, layout = pool.experts_on_host, pool.layout
    if placed is None:
        return ""
    if placed.by != "compute":
        return f"experts on the host are split by={placed.by}, of which it has compute alone"
    if layout.num_devices != layout.tp or layout.ep > 1:
        return "experts on the host beside pp, attention_dp or ep, of which it has tp alone"
    if pool.weights not in HOST_KERNELS:
        return f"experts on the host in {pool.weights}, of which it has {' and '.join(HOST_KERNELS)}"
    return ""


LIMITS = (
    IN_ONE_PLACE,
    PLACED,
    drafter_named("sglang"),
    no_adapters("sglang"),
    pool_limit(
        "host_computes",
        _not_computed_by_the_host,
        "plan with --experts-on-host on,by=compute --weights int4 and --fix pp=1,attention_dp=1,ep=1",
    ),
    Limit(
        "one_host",
        lambda p: not any(pool.experts_on_host and spans_nodes(p, pool) for pool in p.pools),
        lambda _: "experts on the hosts of an instance on several nodes: the first one's processors alone compute",
        "plan with --fix tp=N within a node",
    ),
    # --enable-pdmux: srt/multiplex/multiplexing_mixin.py
    no_shares(
        "SGLang's --enable-pdmux gives a phase that runs by itself the entire device, shares it by the rows that decode, and "
        "cuts prompts between layers: other steps than the plan's"
    ),
)

ADAPTER = Adapter(version=VERSION, limits=LIMITS, write=write)
