"""Serving plans made by hand; all estimates are made up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.schema import ClusterSpec, ModelSpec, RequestClass, Requests, Serving, ServingPlan
from meshwright.schema.serving import EngineLimits, Pool, ServingLayout
from meshwright.schema.serving_plan import ClassEstimate, Percentiles, PoolEstimate, Route, ServingEstimate

H100 = "H100-SXM-80GB"
LIMITS = EngineLimits(
    max_batch=64, max_batched_tokens=8192, chunk=2048, cache_blocks=4000, block_size=16, graph_sizes=(1, 2, 4, 8, 64)
)


def pool_of(role: str = "agg", replicas: int = 2, **fields: Any) -> Pool:
    layout = ServingLayout(**{name: fields.pop(name) for name in ("tp", "pp", "attention_dp", "ep") if name in fields})
    made: dict[str, Any] = {"device": H100, "limits": LIMITS, **fields}
    return Pool(role=role, replicas=replicas, layout=layout, **made)


def serving_plan(
    *pools: Pool, model: ModelSpec | str = "llama-3.1-8b", cluster: ClusterSpec | str = f"16x{H100}", load: Requests | None = None,
    **serving: Any,
) -> ServingPlan:  # fmt: skip
    """A plan whose requests go to the pools in equal shares."""
    some = Percentiles(mean_s=0.1, p50_s=0.1, p90_s=0.2, p99_s=0.3)
    overall = ClassEstimate(num_simulated=10, ttft=some, tpot=some, e2e=some, goodput_requests_per_s=1, attainment=1)
    of_pool = PoolEstimate(
        requests_per_s=1, decode_rows=4, prefill_tokens=100, step_s=0.01, step_parts_s={"products": 0.01}, binds="rate",
        cache_bytes=10**9, cache_use=0.5, weight_bytes=10**9, utilisation=0.3, largest_requests_per_s=3,
    )  # fmt: skip
    estimate = ServingEstimate(
        tokens_per_s=100, num_devices=8, tokens_per_s_per_device=12.5, tokens_per_s_per_user=10, requests_per_s=1,
        max_requests_per_s=6, overall=overall, pools=(of_pool,) * len(pools),
    )  # fmt: skip
    load = load or Requests(
        classes=(RequestClass(prompt_len=1000, output_len=100, prefix_len=200),), rate=2, arrival_cv=2
    )
    return ServingPlan(
        model=ModelSpec.named(model) if isinstance(model, str) else model,
        cluster=ClusterSpec.parse(cluster) if isinstance(cluster, str) else cluster,
        serving=Serving(requests=load, **serving), pools=pools, routes=_routes(pools, len(load.classes)), estimate=estimate,
    )  # fmt: skip


def _routes(pools: Sequence[Pool], num_classes: int) -> tuple[Route, ...]:
    firsts = [idx for idx, pool in enumerate(pools) if pool.role in ("agg", "prefill")]
    decode = next((idx for idx, pool in enumerate(pools) if pool.role == "decode"), None)
    return tuple(
        Route(request_class=number, pool=idx, decode_pool=decode, share=1 / len(firsts))
        for number in range(num_classes)
        for idx in firsts
    )


AGGREGATED = serving_plan(pool_of(tp=4, replicas=4))
DISAGGREGATED = serving_plan(pool_of("prefill", tp=2, replicas=2), pool_of("decode", tp=4, replicas=1))
EXPERTS = serving_plan(
    pool_of(attention_dp=8, ep=8, weights="fp8", cache="fp8"), model="deepseek-v3", prefix_cache=False
)
TWO_NODES = serving_plan(pool_of(tp=8, pp=2, replicas=1))
CASES = {"aggregated": AGGREGATED, "disaggregated": DISAGGREGATED, "experts": EXPERTS, "two nodes": TWO_NODES}
