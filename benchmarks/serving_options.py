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

Experts on the host: DeepSeek-V3, experts in 4 bits and all else in 8, one RTX 4090 beside one or two Xeon 6454S, all experts with
the host, which computes them (KTransformers V0.2, V0.2.1, V0.3, doc/en/DeepseekR1_V3_tutorial.md; the host's rates of
coefficients.toml are fitted to the rows of 13.4, 88.5 and 255). DeepSeek-V2-Lite and Mixtral-8x7B in 4 bits on an RTX A6000
beside a usual host, parts of the experts on the device: what is split over both beside what the host computes alone, which
KTransformers does (HybriMoE, arXiv:2504.05897: 1.33 times in prefill, 1.70 times in decoding, on another host). Mixtral-8x7B on an
A40: memory, and tokens a second with none of the experts on the device (ExpertFlow, arXiv:2410.17954: up to 93.72 % less memory,
2 to 10 times as quick as other engines that offload; MoE-Lens, arXiv:2504.09345: 4.6 times MoE-Lightning, up to 25.5, by larger
batches, keys and values with the host as well).
Attention and feed-forward devices: tokens a second and device of instances that decode within a limit, the best layout with all
parts on the same devices, and the best with feed-forward parts on devices of their own, as far as a cache holds the rows. Step-3
and DeepSeek-V3 in fp8 on H800, rows of 4,096 tokens, 50 ms (arXiv:2507.19427, abstract); Scaled-MoE (317 B, 32 experts) and
Mixtral-8x22B on A100, rows of 650 tokens, 150 ms (MegaScale-Infer, arXiv:2504.02263, abstract); Llama-3.1-70B with attention on H20
and the rest on H100, H20 at 0.42 of an H100's price, assumed (Lamina, arXiv:2405.01814, abstracts of both versions). Step-3's
attention is taken for latent attention with as large a cache (512 elements a token) and as thin queries, whose kernels are known.
Shares: phases at once on parts of the multiprocessors, `plan --serve --modes shared`, beside the other modes on the same devices
(semi-PD, arXiv:2504.19867, abstract: mean latency 1.27 to 2.58 times lower on DeepSeek models, 1.55 to 1.72 times the requests
within limits on Llama models, against other systems): DeepSeek-V2-Lite on an A100 and DeepSeek-V3 in fp8 on eight H200, 1,024 and
128 tokens, at parts of the requests that steps with both phases carry; Llama-3.1-8B on two A100 within 500 ms and 25 ms a token.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from typing import Any

import numpy as np
from meshwright.cost_models.serving.attention_ffn import MICRO_BATCHES, SplitCosts
from meshwright.cost_models.serving.engine import EngineProfile
from meshwright.cost_models.serving.host_experts import with_experts_on_host
from meshwright.cost_models.serving.memory import serving_memory
from meshwright.cost_models.serving.nano_batches import with_nano_batches
from meshwright.cost_models.serving.prefixes import fetch_s_per_token
from meshwright.cost_models.serving.step import StepCosts
from meshwright.planner import plan
from meshwright.planner.serving.layouts import layouts, split_layouts
from meshwright.schema import ClusterSpec, ModelSpec, ServingPlan
from meshwright.schema.adapters import Adapters, FineTuning
from meshwright.schema.host_experts import ExpertsOnHost
from meshwright.schema.requests_file import parse_limit, parse_requests
from meshwright.schema.serving import Serving, ServingLayout, ServingMode, WeightDtype
from meshwright.schema.serving_plan import layout_title

COUNTS, ROWS, CACHED = (1, 5, 100, 1000, 2000), (1, 8, 32, 64, 128), 400
RATES = (1, 4, 10, 20, 30)
STEPS = (
    ("deepseek-v3", "H100-SXM-80GB", 32, (0, 16384, 1024)),
    ("deepseek-v3", "H100-SXM-80GB", 32, (0, 16384, 2048)),
    ("deepseek-v3", "H100-SXM-80GB", 32, (0, 16384, 4096)),
    ("deepseek-v3", "H100-SXM-80GB", 64, (256, 0, 2000)),
    ("llama-2-70b", "A100-SXM-80GB", 8, (1024, 1024, 512)),
)
SOCKET_BYTES_PER_S, SOCKET_FLOPS_PER_S = 1.125e11, {True: 5.5e12, False: 1.85e12}
"""Of a Xeon 6454S, with AMX or without: half of the rates of coefficients.toml for hosts with PCIe 5, without AMX with PCIe 4."""

KTRANSFORMERS = (
    ("decoding, 1,930 tokens, V0.2.1", 8, 2, True, 0, 1930, 13.4),
    ("the same", 6, 2, True, 0, 1930, 15.4),
    ("500 tokens, V0.2", 8, 1, True, 0, 500, 8.73),
    ("the same", 6, 1, True, 0, 500, 10.3),
    ("prompt of 1,930 tokens, V0.2.1", 8, 2, False, 1930, 0, 88.5),
    ("the same", 6, 2, False, 1930, 0, 112.5),
    ("500 tokens, V0.2", 8, 1, False, 500, 0, 54.2),
    ("prompt of 1,024 tokens, AMX, V0.3", 8, 2, True, 1024, 0, 186),
    ("2,048 tokens", 8, 2, True, 2048, 0, 255),
    ("4,096 tokens", 8, 2, True, 4096, 0, 253),
    ("8,192 tokens", 8, 2, True, 8192, 0, 196),
    ("2,048 tokens", 6, 2, True, 2048, 0, 287),
)
"""What, experts of a token, sockets, AMX, tokens of a prompt, or of the cache of a row that decodes, published tokens a second."""

H20_PRICE = 0.42
"""Of an H100's, assumed."""

MAX_ROWS = np.unique(np.round(np.geomspace(1, 4096, 128)))
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


def mixture(model: ModelSpec, cluster: ClusterSpec, experts: str, weights: str = "fp16") -> StepCosts:
    """Return the steps of one device with all of the model on it, whether that fits or not."""
    dtypes: dict[str, Any] = {"weights": weights, "experts": experts, "cache": "bf16" if weights == "fp8" else "fp16"}
    return StepCosts.build(model, cluster, ServingLayout(), **dtypes)


def with_top_k(model: ModelSpec, top_k: int) -> ModelSpec:
    """Return the model whose tokens visit so many experts."""
    runs = tuple(
        run
        if run.layer.experts is None
        else run.replace(layer=run.layer.replace(mlp=run.layer.experts.replace(top_k=top_k)))
        for run in model.layers
    )
    return model.replace(layers=runs)


def experts_computed_by_the_host() -> None:
    """Print a row for each figure of KTransformers."""
    model = ModelSpec.named("deepseek-v3")
    (group,) = ClusterSpec.parse("1xRTX4090").groups
    print("KTransformers, DeepSeek-V3                experts  sockets  published  here, tokens/s  error")
    for what, top_k, sockets, has_amx, tokens, cached, published in KTRANSFORMERS:
        host = group.replace(
            host_bandwidth_bytes_per_s=sockets * SOCKET_BYTES_PER_S,
            host_flops_per_s=sockets * SOCKET_FLOPS_PER_S[has_amx],
        )
        step = mixture(with_top_k(model, top_k), ClusterSpec.parse("1xRTX4090").replace(groups=(host,)), "int4", "fp8")
        placed = with_experts_on_host(step, ExpertsOnHost(share=1.0, by="compute"))
        rows = 1 if cached else 0
        made = (rows + tokens) / float(placed.seconds(rows, cached, tokens, tokens / 2, prompts=1 - rows))
        print(f"{what:40} {top_k:8} {sockets:8} {published:10,} {made:15,.1f} {made / published - 1:+6.0%}")


def experts_split_over_both() -> None:
    """Print what splitting a layer's experts gains over the host computing them alone, by the part that is on the device."""
    print(
        "RTX A6000, 4 bits     on the device  decoding, 1 row: host, both, predicted .9 (ms)  times  prompts of 128, 1,024: times"
    )
    for name in ("deepseek-v2-lite", "mixtral-8x7b"):
        step = mixture(ModelSpec.named(name), ClusterSpec.parse("1xRTX-A6000"), "int4")
        for share in (0.75, 0.5, 0.25):
            ways = [
                with_experts_on_host(step, ExpertsOnHost(share=share, by=by, predicted=a))
                for by, a in (("compute", 0.0), ("balance", 0.0), ("balance", 0.9))
            ]
            rows_s = [float(each.seconds(1, 512)) for each in ways]
            prompts = [[float(each.seconds(0, 0, n, n / 2, prompts=1)) for each in ways] for n in (128, 1024)]
            print(
                f"{name:20} {1 - share:12.0%}   " + "  ".join(f"{1e3 * s:6.1f}" for s in rows_s)
                + f"  {rows_s[0] / rows_s[1]:.2f}, {rows_s[0] / rows_s[2]:.2f}   "
                + "  ".join(f"{host / both:.2f}, {host / ahead:.2f}" for host, both, ahead in prompts)
            )  # fmt: skip


def experts_copied() -> None:
    """Print memory and tokens a second of a mixture whose experts are all with the host, by rows that decode."""
    step = mixture(ModelSpec.named("mixtral-8x7b"), ClusterSpec.parse("1xA40"), "fp16")
    rows = np.array([1, 8, 32, 128, 512, 1024])
    ways = {
        "all experts of every layer copied": None,
        "those that are reached": ExpertsOnHost(share=1.0, by="copy"),
        "9 of 10 predicted": ExpertsOnHost(share=1.0, by="copy", predicted=0.9),
        "copied or computed": ExpertsOnHost(share=1.0, predicted=0.9),
    }
    placed = with_experts_on_host(step, ExpertsOnHost(share=1.0, by="copy"))
    all_reached = placed.parts(2048, 0)
    most = float(all_reached["host_link"] + all_reached["experts"])
    print(
        f"A40, Mixtral-8x7B in 16 bits: {placed.weight_bytes / step.weight_bytes - 1:.1%} of the device's memory for weights"
    )
    print("tokens/s by rows that decode           " + "  ".join(f"{n:7,}" for n in rows))
    for name, spec in ways.items():
        costs = placed if spec is None else with_experts_on_host(step, spec)
        parts = costs.parts(rows, 300 * rows)
        if spec is None:
            parts = parts | {"host_link": most + 0 * rows, "experts": 0.0 * rows}
        per_s = rows / sum(parts.values())
        print(f"{name:38} " + "  ".join(f"{n:7.1f}" for n in per_s))


def decoded(step: StepCosts, context: int, limit_s: float) -> float:
    """Return the most tokens a second of an instance that decodes rows of so many tokens within a limit on a step."""
    memory = serving_memory(
        step, EngineProfile.named("vllm"), request_len=1.1 * context, max_batch=4096, max_batched_tokens=2048
    )
    rows = MAX_ROWS[context * MAX_ROWS <= memory.cache_tokens] if memory.fits else MAX_ROWS[:0]
    if not len(rows):
        return 0.0
    seconds = step.seconds(rows, rows * context)
    return step.instance.layout.attention_dp * float(np.max(rows / seconds, where=seconds <= limit_s, initial=0.0))


def on_same_devices(model: ModelSpec, cluster: ClusterSpec, types: dict[str, Any]) -> Iterator[StepCosts]:
    """Yield instances with all parts on the same devices."""
    known: dict[Any, Any] = {}
    for layout in layouts(model, cluster, Serving(requests=parse_requests("isl=1,osl=2"))):
        if layout.pp == 1:
            yield StepCosts.build(model, cluster, layout, known=known, **types)


def on_own_devices(
    model: ModelSpec, clusters: tuple[ClusterSpec, ClusterSpec], types: dict[str, Any]
) -> Iterator[SplitCosts]:
    """Yield instances with feed-forward parts on devices of their own, with each number of micro-batches."""
    here: dict[Any, Any] = {}
    known = here, here if clusters[0] is clusters[1] else {}
    for layout in split_layouts(model, clusters):
        if layout.num_devices <= clusters[0].num_devices:
            step = SplitCosts.split(model, clusters, layout, known=known, **types)
            yield from (step.with_micro_batches(count) for count in MICRO_BATCHES)


def with_blocks(model: ModelSpec, name: str, hidden_dim: int, counts: tuple[int, ...], **changes: Any) -> ModelSpec:
    """Return a model with so many of each of its blocks, attention and mixtures changed."""
    first, *blocks, last = model.layers
    runs = []
    for run, count in zip(blocks, counts, strict=True):
        parts = {
            part: getattr(run.layer, part).replace(**changed)
            for part, changed in changes.items()
            if part == "attention" or getattr(run.layer, part).kind == "moe"
        }
        runs.append(run.replace(layer=run.layer.replace(**parts), count=count))
    return model.replace(name=name, hidden_dim=hidden_dim, layers=(first, *runs, last))


def attention_ffn() -> None:
    """Print a row for each model, and for each length of a row of the one on unlike devices."""
    deepseek, mixtral = ModelSpec.named("deepseek-v3"), ModelSpec.named("mixtral-8x22b")
    step3 = with_blocks(
        deepseek, "step-3", 7168, (5, 56),
        attention={"num_heads": 64, "q_lora_rank": 2048, "kv_lora_rank": 448, "qk_nope_head_dim": 192, "v_head_dim": 256},
        mlp={"num_experts": 48, "top_k": 3, "ffn_dim": 5120, "shared_ffn_dim": 5120, "num_groups": 1, "top_groups": 1},
    )  # fmt: skip
    scaled = with_blocks(
        mixtral, "scaled-moe", 8192, (48,),
        attention={"num_heads": 64}, mlp={"num_experts": 32, "top_k": 4, "ffn_dim": 8192},
    )  # fmt: skip
    print(
        "tokens/s a device     same devices                         devices of their own                        times"
    )
    for model, machine, context, limit_s, types in (
        (step3, "32xH800-SXM-80GB", 4096, 0.05, {"weights": "fp8", "cache": "fp8"}),
        (deepseek, "64xH800-SXM-80GB", 4096, 0.05, {"weights": "fp8", "cache": "bf16"}),
        (deepseek, "64xH200-SXM-141GB", 4096, 0.05, {"weights": "fp8", "cache": "bf16"}),
        (scaled, "64xA100-SXM-80GB", 650, 0.15, {"weights": "bf16", "cache": "bf16"}),
        (mixtral, "64xA100-SXM-80GB", 650, 0.15, {"weights": "bf16", "cache": "bf16"}),
    ):
        cluster = ClusterSpec.parse(machine)
        same, own = (
            max((decoded(step, context, limit_s) / step.instance.layout.num_devices, n, step) for n, step in enumerate(every))
            for every in (on_same_devices(model, cluster, types), on_own_devices(model, (cluster, cluster), types))
        )  # fmt: skip
        titles = layout_title(same[2].instance.layout), layout_title(own[2].instance.layout)
        print(
            f"{model.name:13} {same[0]:8,.0f} {titles[0]:30} {own[0]:8,.0f} {titles[1]} m={own[2].micro_batches} "
            f"{own[0] / same[0]:.2f}"
        )
    print("tokens/s for an H100's price   H100 alone   H20 alone   attention on H20, the rest on H100")
    model = ModelSpec.named("llama-3.1-70b")
    h100, h20 = ClusterSpec.parse("16xH100-SXM-80GB"), ClusterSpec.parse("16xH20-96GB")
    types = {"weights": "bf16", "cache": "bf16"}
    for context in (1024, 4096, 16384):
        alone = [
            max(decoded(step, context, 0.1) / step.instance.layout.num_devices for step in on_same_devices(model, each, types))
            / price
            for each, price in ((h100, 1.0), (h20, H20_PRICE))
        ]  # fmt: skip
        rate, _, best = max(
            (
                decoded(step, context, 0.1)
                / (H20_PRICE * step.instance.layout.stage_devices + step.instance.layout.ffn_devices),
                n,
                step,
            )
            for n, step in enumerate(on_own_devices(model, (h20, h100), types))
        )
        print(
            f"{context:7,} {alone[0]:10,.0f} {alone[1]:10,.0f} {rate:10,.0f} {layout_title(best.instance.layout)} "
            f"m={best.micro_batches}, {rate / alone[0]:.2f} and {rate / alone[1]:.2f} times"
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
    experts_computed_by_the_host()
    experts_split_over_both()
    experts_copied()
    attention_ffn()
    shares()


if __name__ == "__main__":
    main()
