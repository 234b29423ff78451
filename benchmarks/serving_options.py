"""Options of serving beside papers' figures: adapters, an adapter's fine-tuning, prefixes, nano-batches, shares of devices.

    python benchmarks/serving_options.py

Adapters: tokens a second of decoding over those without, as `plan --serve --adapters` takes them: Llama-2-7B in fp16 on
A100-SXM-80GB, rank 8 on attention, popularity k^-1 (the settings of S-LoRA, arXiv:2311.03285), rows of 400 cached tokens, steps of
kernels alone.

Fine-tuning: `plan --serve --finetune rank=16` for Llama-3.1-8B on four A100-SXM-80GB, requests of 220 and 180 tokens, 50 ms a token
(FlexLLM, arXiv:2402.18789: over 76 % of what it fine-tunes under a light load remains at 20 requests a second).

Prefixes: Llama-2-70B in fp16 on four A100-SXM-80GB (tp 4), turns of conversations whose history lies with the host or on its drives
(CachedAttention, arXiv:2403.19708: the first token up to 87 % earlier, prompts up to 7.8 times as many a second): a lone
prompt, and as many as the slower of device and link takes.

Nano-batches: DeepSeek-V3 in fp8 over H100, an attention rank and experts on each, 16,384 tokens of prompts a rank or 256 rows of
2,000 tokens (SGLang with two-batch overlap, blog of 2025-05-05: 57,674, 54,543 and 50,302 tokens a second and node of prompts
over 32 ranks, 22,282 decoding over 72); Llama-2-70B in fp16 on eight A100 (tp 8), 1,024 rows beside 1,024 tokens of prompts
(NanoFlow, arXiv:2408.12757: up to 1.91 times the tokens of other engines, with memory and compute overlapped, too, and another
host).

Shares: phases at once on parts of the multiprocessors, `plan --serve --modes shared`, beside the other modes on the same devices
(semi-PD, arXiv:2504.19867, abstract: mean latency 1.27 to 2.58 times lower on DeepSeek models, 1.55 to 1.72 times the requests
within limits on Llama models, against other systems): DeepSeek-V2-Lite on an A100 and DeepSeek-V3 in fp8 on eight H200, 1,024 and
128 tokens, at parts of the requests that steps with both phases carry; Llama-3.1-8B on two A100 within 500 ms and 25 ms a token.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import Any

from meshwright.cost_models.serving.nano_batches import with_nano_batches
from meshwright.cost_models.serving.prefixes import fetch_s_per_token
from meshwright.cost_models.serving.step import StepCosts
from meshwright.planner import plan
from meshwright.schema import ClusterSpec, ModelSpec, ServingPlan
from meshwright.schema.adapters import Adapters, FineTuning
from meshwright.schema.requests_file import parse_limit, parse_requests
from meshwright.schema.serving import Serving, ServingLayout, ServingMode, WeightDtype

COUNTS, ROWS, CACHED = (1, 5, 100, 1000, 2000), (1, 8, 32, 64, 128), 400
RATES = (1, 4, 10, 20, 30)
STEPS = (
    ("deepseek-v3", "H100-SXM-80GB", 32, (0, 16384, 1024)),
    ("deepseek-v3", "H100-SXM-80GB", 32, (0, 16384, 2048)),
    ("deepseek-v3", "H100-SXM-80GB", 32, (0, 16384, 4096)),
    ("deepseek-v3", "H100-SXM-80GB", 64, (256, 0, 2000)),
    ("llama-2-70b", "A100-SXM-80GB", 8, (1024, 1024, 512)),
)
DEEPSEEK: tuple[tuple[str, str, WeightDtype, dict[str, int]], ...] = (
    ("deepseek-v2-lite", "1xA100-SXM-80GB", "bf16", {"tp": 1}),
    ("deepseek-v3", "8xH200-SXM-141GB", "fp8", {"tp": 8, "ep": 8}),
)
PARTS = (0.5, 0.7, 0.9)
MODES: tuple[ServingMode, ...] = ("agg", "disagg", "shared")
LLAMA_LOADS = ("isl=330,osl=220", "isl=1024,osl=256")
TURNS = ((1024, 512), (2048, 1792), (2048, 1984), (4096, 3968))


def adapters() -> None:
    """Print a row for each number of adapters."""
    model, cluster = ModelSpec.named("llama-2-7b"), ClusterSpec.parse("1xA100-SXM-80GB")

    def step(adapters: Adapters | None) -> StepCosts:
        return StepCosts.build(model, cluster, ServingLayout(), weights="fp16", cache="fp16", adapters=adapters)

    plain = step(None)
    print("adapters      GB  tokens/s over those without, of " + ", ".join(map(str, ROWS)) + " rows")
    for count in COUNTS:
        costs = step(Adapters(count=count, rank=8, on="attention"))
        of_rows = (float(plain.seconds(b, b * CACHED) / costs.seconds(b, b * CACHED)) for b in ROWS)
        size = (costs.weight_bytes - plain.weight_bytes) / 1e9
        print(f"{count:8,} {size:7.2f}  " + "  ".join(f"{ratio:.2f}" for ratio in of_rows))


def fine_tuning() -> None:
    """Print a row for each rate of requests."""
    print("requests/s  tokens/s fine-tuned on all four, of the first row's  of the peak  by the others alone")
    first = None
    for rate in RATES:
        task = Serving(
            requests=parse_requests(f"isl=220,osl=180,rate={rate}"), modes=("agg",), fine_tuning=FineTuning(rank=16),
            limits=(parse_limit("tpot", "50ms@p90"), parse_limit("ttft", "5s@p90")),
        )  # fmt: skip
        made = plan("llama-3.1-8b", "4xA100-SXM-80GB", task, fixed={"tp": 1, "pp": 1})
        assert isinstance(made, ServingPlan) and made.estimate.fine_tuning is not None
        cost = made.estimate.fine_tuning
        per_s = cost.pools[-1].tokens_per_s
        first = first or per_s
        others = cost.pools[-1].replicas - cost.pools[0].replicas
        print(
            f"{rate:10}  {per_s:8,.0f}  {per_s / first:.0%}  {cost.share_of_peak:.0%}  {cost.apart_tokens_per_s:,.0f} on {others}"
        )


def prefixes() -> None:
    """Print a row for each length of a prompt and of its history."""
    model, cluster = ModelSpec.named("llama-2-70b"), ClusterSpec.parse("4xA100-SXM-80GB")
    step = StepCosts.build(model, cluster, ServingLayout(tp=4), weights="fp16", cache="fp16")
    print(
        "prompt  of it history  computed  history from: device, host, drives (ms; of computed); prompts/s over computed"
    )
    for prompt, history in TURNS:
        computed_s, rest_s = (
            float(step.seconds(0, 0, prompt - known, known + (prompt - known) / 2, prompts=1)) for known in (0, history)
        )
        copies_s = [history * fetch_s_per_token(step, place) for place in ("device", "host", "storage")]
        first = "  ".join(f"{1e3 * (rest_s + copy):4.0f} {1 - (rest_s + copy) / computed_s:4.0%}" for copy in copies_s)
        more = "  ".join(f"{computed_s / max(rest_s, copy):.1f}" for copy in copies_s)
        print(f"{prompt:6,} {history:12,} {1e3 * computed_s:9.0f}  {first}   {more}")


def nano_batches() -> None:
    """Print a row for each step."""
    print("tokens/s of a node of 8   rows  prompts  of tokens  in one batch  in two   times")
    for name, device, ranks, (rows, tokens, length) in STEPS:
        has_experts = name == "deepseek-v3"
        layout = ServingLayout(attention_dp=ranks, ep=ranks) if has_experts else ServingLayout(tp=ranks)
        dtypes: dict[str, Any] = (
            {"weights": "fp8", "cache": "bf16"} if has_experts else {"weights": "fp16", "cache": "fp16"}
        )
        step = StepCosts.build(ModelSpec.named(name), ClusterSpec.parse(f"{ranks}x{device}"), layout, **dtypes)
        one_s, two_s = (
            float(costs.seconds(rows, rows * length, tokens, length / 2, prompts=tokens / length))
            for costs in (step, with_nano_batches(step))
        )
        of_node = (rows + tokens) * 8 * layout.attention_dp / ranks
        print(
            f"{name:12} {ranks:3} GPUs   {rows:8,} {tokens:8,} {length:10,} {of_node / one_s:12,.0f} {of_node / two_s:8,.0f} "
            f"{one_s / two_s:7.2f}"
        )


def shares() -> None:
    """Print mean latencies of DeepSeek models by rate, then the most requests a second of Llama's within limits, by mode."""

    def planned(
        model: str, cluster: str, fixed: dict[str, int], mode: ServingMode, load: str, **fields: Any
    ) -> ServingPlan:
        made = plan(model, cluster, Serving(requests=parse_requests(load), modes=(mode,), **fields), fixed=fixed)
        assert isinstance(made, ServingPlan)
        return made

    print("requests/s of the most in steps of both phases   mean seconds of a request: together, shared   times")
    for model, cluster, weights, fixed in DEEPSEEK:
        settings: dict[str, Any] = {"weights": weights, "objective": "latency"}
        free = planned(model, cluster, fixed, "agg", "isl=1024,osl=128", **settings | {"objective": "throughput"})
        for part in PARTS:
            rate = round(part * free.estimate.requests_per_s, 1)
            load = f"isl=1024,osl=128,rate={rate}"
            one, two = (planned(model, cluster, fixed, mode, load, **settings) for mode in ("agg", "shared"))
            seconds = [made.estimate.overall.e2e.mean_s for made in (one, two)]
            print(
                f"{model:17} {rate:5} {part:4.0%}   {seconds[0]:6.2f} {seconds[1]:6.2f}   {seconds[0] / seconds[1]:.2f}  "
                f"{two.summary['pools']}"
            )
    limits = (parse_limit("ttft", "500ms@p90"), parse_limit("tpot", "25ms@p90"))
    print("requests/s within limits   together  apart  shared   times both")
    for load in LLAMA_LOADS:
        rates = [
            planned("llama-3.1-8b", "2xA100-SXM-80GB", {"tp": 1}, mode, load, objective="throughput", limits=limits)
            .estimate.requests_per_s
            for mode in MODES
        ]  # fmt: skip
        figures = "  ".join(f"{rate:6.2f}" for rate in rates)
        print(f"{load:16} {figures}   {rates[2] / rates[0]:.2f} {rates[2] / rates[1]:.2f}")


def main() -> None:
    """Print the tables."""
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    adapters()
    fine_tuning()
    prefixes()
    nano_batches()
    shares()


if __name__ == "__main__":
    main()
