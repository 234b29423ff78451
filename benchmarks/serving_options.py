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
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter

from meshwright.cost_models.serving.prefixes import fetch_s_per_token
from meshwright.cost_models.serving.step import StepCosts
from meshwright.planner import plan
from meshwright.schema import ClusterSpec, ModelSpec, ServingPlan
from meshwright.schema.adapters import Adapters, FineTuning
from meshwright.schema.requests_file import parse_limit, parse_requests
from meshwright.schema.serving import Serving, ServingLayout

COUNTS, ROWS, CACHED = (1, 5, 100, 1000, 2000), (1, 8, 32, 64, 128), 400
RATES = (1, 4, 10, 20, 30)
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


def main() -> None:
    """Print the tables."""
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    adapters()
    fine_tuning()
    prefixes()


if __name__ == "__main__":
    main()
