"""TensorRT-LLM: `trtllm-serve` with a file of options for each pool, `trtllm-serve disaggregated` before prefill and decode.

Source: TensorRT-LLM 1.2 (tensorrt_llm/llmapi/llm_args.py, llmapi/disagg_utils.py, commands/serve.py and
tests/unittest/api_stability/references/trtllm_serve_cli.yaml at 029e223d52).
"""

from __future__ import annotations

from typing import Any

import yaml

from ...schema.serving import Pool, RequestClass
from ...schema.serving_plan import ServingPlan
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
    begin_script,
    common_notes,
    instances,
    keeps_prefixes,
    longest_request,
    no_adapters,
    no_experts_on_host,
    no_prefixes_on,
    no_shares,
    pool_limit,
    serve_script,
    title,
    to_set,
)
from .load import load_script, vllm_lengths

VERSION = "1.2"
DISAGGREGATED = "disaggregated.yaml"
CACHES = {"bf16": "auto", "fp16": "auto", "fp8": "fp8", "fp32": "auto"}

LIMITS = (
    no_shares("TensorRT-LLM runs both phases in one step"),
    no_adapters("trtllm"),
    no_experts_on_host("trtllm"),
    no_prefixes_on("storage", "export to sglang"),
    pool_limit(
        "one_batch",
        lambda pool: "steps in two nano-batches, which it has not" if pool.nano_batch_rows is not None else "",
        "plan without --nano-batches, or export to vllm or sglang",
    ),
    IN_ONE_PLACE,
    PLACED,
    pool_limit(
        "drafts_itself",
        lambda pool: (
            f"tokens drafted by {pool.speculate.method}: of TensorRT-LLM's drafters the export writes the model's own alone"
            if pool.speculate is not None and pool.speculate.method != "mtp"
            else ""
        ),
        "plan with --speculate mtp, or export to vllm or sglang",
    ),
    pool_limit(
        "attention_whole",
        lambda pool: (
            f"attention_dp={pool.layout.attention_dp} beside tp={pool.layout.tp}: enable_attention_dp gives every rank "
            "an attention of its own"
            if pool.layout.attention_dp > 1 and pool.layout.tp > 1
            else ""
        ),
        "plan with --fix tp=1 or --fix attention_dp=1",
    ),
    Limit(
        "one_layout_of_role",
        lambda p: all(sum(other.role == pool.role for other in p.pools) == 1 for pool in p.pools) or p.mode == "agg",
        lambda _: "several pools of one role: disaggregated.yaml has one section for prefill and one for decode",
        "plan with one kind of device",
    ),
)


def options(plan: ServingPlan, pool: Pool) -> dict[str, Any]:
    """Return the options of an instance of a pool, as `LlmArgs` takes them."""
    limits, layout = pool.limits, pool.layout
    made: dict[str, Any] = {
        "tensor_parallel_size": layout.stage_devices,
        "pipeline_parallel_size": layout.pp,
        "enable_attention_dp": layout.attention_dp > 1,
        "max_batch_size": limits.max_batch,
        "max_num_tokens": limits.max_batched_tokens,
        "max_seq_len": longest_request(plan, pool),
        "enable_chunked_prefill": limits.chunk is not None,
        "kv_cache_config": {
            "max_tokens": limits.cache_blocks * limits.block_size,
            "free_gpu_memory_fraction": limits.cache_fraction,
            "tokens_per_block": limits.block_size,
            "dtype": CACHES[pool.cache],
            "enable_block_reuse": keeps_prefixes(plan, pool),
            **({"host_cache_size": pool.host_prefix_bytes} if pool.host_prefix_bytes else {}),
        },
        "cuda_graph_config": {"enable_padding": True, "batch_sizes": list(limits.graph_sizes)}
        if limits.graph_sizes
        else None,
    }
    if layout.ep > 1:
        made |= {"moe_expert_parallel_size": layout.ep, "moe_tensor_parallel_size": layout.moe_tp}
    if pool.role == "prefill":
        made["disable_overlap_scheduler"] = True  # of context servers: their requests end with the first token
    if pool.role != "agg":
        made["cache_transceiver_config"] = {"backend": "NIXL", "max_tokens_in_buffer": longest_request(plan, pool)}
    if (drafting := pool.speculate) is not None:
        made["speculative_config"] = {"decoding_type": "MTP", "num_nextn_predict_layers": drafting.draft_tokens}
    return made


def _file(plan: ServingPlan, pool: Pool) -> str:
    same = [other for other in plan.pools if other.role == pool.role]
    return f"{pool.role}.yaml" if len(same) == 1 else f"{pool.role}_{plan.pools.index(pool)}.yaml"


def _command(plan: ServingPlan, pool: Pool) -> str:
    serve = f'trtllm-serve "$MODEL" --host "${{HOSTS[NODE]}}" --port "$2" --config {_file(plan, pool)}'
    return (
        f"  if [[ -n ${{4:-}} ]]; then\n"
        f'    mpirun --allow-run-as-root --host "$4" trtllm-llmapi-launch {serve}\n'
        f"  else\n    CUDA_VISIBLE_DEVICES=$1 {serve}\n  fi"
    )


def _on_nodes(item: Instance, _pool: Pool, rank: int) -> str | None:
    """Return the hosts of an instance on several nodes, for mpirun on the first; it starts what runs on the others."""
    hosts = ",".join(f"${{HOSTS[{node}]}}:{len(item.devices)}" for node in item.nodes)
    return f'"{hosts}"' if rank == 0 else None


def _disaggregated(plan: ServingPlan) -> dict[str, Any]:
    """Return the file of `trtllm-serve disaggregated`; on several nodes their names are node0, node1 and so on."""
    is_one = all(item.nodes == (0,) for item in instances(plan))
    made: dict[str, Any] = {"hostname": "localhost" if is_one else "node0", "port": PORT, "backend": "pytorch"}
    for section, role in (("context_servers", "prefill"), ("generation_servers", "decode")):
        lying = [item for item in instances(plan) if plan.pools[item.pool].role == role]
        addresses = [f"{'localhost' if is_one else f'node{item.nodes[0]}'}:{item.port}" for item in lying]
        made[section] = {"num_instances": len(lying), "urls": addresses}
    return made


def _lengths(entry: RequestClass) -> Options:
    made = vllm_lengths(entry)
    return {"backend": "openai", **made, "random-ids": True}


def write(plan: ServingPlan) -> Exported:
    """Return the plan as options of each pool, the scripts that start it, and the load."""
    head, disaggregated = title(plan, "trtllm", VERSION), plan.mode == "disagg"
    files = {_file(plan, pool): head + yaml.safe_dump(options(plan, pool), sort_keys=False) for pool in plan.pools}
    files[SERVE] = serve_script(
        plan, engine="trtllm", version=VERSION, command=lambda pool: _command(plan, pool), on_nodes=_on_nodes
    )
    if disaggregated:
        files[DISAGGREGATED] = head + yaml.safe_dump(_disaggregated(plan), sort_keys=False)
        files[ROUTER] = begin_script(plan, "trtllm", VERSION) + f"exec trtllm-serve disaggregated -c {DISAGGREGATED}\n"
    bench = "python3 -m tensorrt_llm.serve.scripts.benchmark_serving"
    files[LOAD] = load_script(
        plan, "trtllm", VERSION, command=bench, options=_lengths, routed=disaggregated, has_burstiness=True
    )
    several = len(instances(plan)) > 1
    spread = ("a load balancer before the instances of serve.sh",) if several and not disaggregated else ()
    names = any(node for item in instances(plan) for node in item.nodes) and disaggregated
    return Exported(
        engine="trtllm",
        version=VERSION,
        files=tuple(files.items()),
        not_expressed=common_notes(plan, "trtllm"),
        to_set=(*to_set(plan), *spread, *((f"names of node0, node1, ... in {DISAGGREGATED}",) if names else ())),
        command=f"bash {SERVE}" + (f", bash {ROUTER}" if disaggregated else "") + f", then bash {LOAD}",
    )


ADAPTER = Adapter(version=VERSION, limits=LIMITS, write=write)
