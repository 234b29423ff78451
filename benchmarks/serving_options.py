"""Options of serving beside papers' figures: what adapters cost, what an adapter's fine-tuning gets, what prefixes save.

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

Attention and feed-forward devices: tokens a second and device of instances that decode within a limit, the best layout with all
parts on the same devices, and the best with feed-forward parts on devices of their own, as far as a cache holds the rows. Step-3
and DeepSeek-V3 in fp8 on H800, rows of 4,096 tokens, 50 ms (arXiv:2507.19427, abstract); Scaled-MoE (317 B, 32 experts) and
Mixtral-8x22B on A100, rows of 650 tokens, 150 ms (MegaScale-Infer, arXiv:2504.02263, abstract); Llama-3.1-70B with attention on H20
and the rest on H100, H20 at 0.42 of an H100's price, assumed (Lamina, arXiv:2405.01814, abstracts of both versions). Step-3's
attention is taken for latent attention with as large a cache (512 elements a token) and as thin queries, whose kernels are known.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from typing import Any

import numpy as np
from meshwright.cost_models.serving.attention_ffn import MICRO_BATCHES, SplitCosts
from meshwright.cost_models.serving.engine import EngineProfile
from meshwright.cost_models.serving.memory import serving_memory
from meshwright.cost_models.serving.nano_batches import with_nano_batches
from meshwright.cost_models.serving.prefixes import fetch_s_per_token
from meshwright.cost_models.serving.step import StepCosts
from meshwright.planner import plan
from meshwright.planner.serving.layouts import layouts, split_layouts
from meshwright.schema import ClusterSpec, ModelSpec, ServingPlan
from meshwright.schema.adapters import Adapters, FineTuning
from meshwright.schema.requests_file import parse_limit, parse_requests
from meshwright.schema.serving import Serving, ServingLayout
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
H20_PRICE = 0.42
"""Of an H100's, assumed."""

MAX_ROWS = np.unique(np.round(np.geomspace(1, 4096, 128)))
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


def main() -> None:
    """Print the tables."""
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    adapters()
    fine_tuning()
    prefixes()
    nano_batches()
    attention_ffn()


if __name__ == "__main__":
    main()
