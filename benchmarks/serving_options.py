"""Tokens a second of decoding with low-rank adapters over those without, as `plan --serve --adapters` takes them.

    python benchmarks/serving_options.py

Llama-2-7B in fp16 on A100-SXM-80GB, adapters of rank 8 on attention, popularity k^-1 (the settings of S-LoRA, arXiv:2311.03285),
rows of 400 cached tokens, steps of kernels alone.
"""

from __future__ import annotations

from argparse import ArgumentParser

from meshwright.cost_models.serving.step import StepCosts
from meshwright.schema import ClusterSpec, ModelSpec
from meshwright.schema.adapters import Adapters
from meshwright.schema.serving import ServingLayout

COUNTS, ROWS, CACHED = (1, 5, 100, 1000, 2000), (1, 8, 32, 64, 128), 400


def main() -> None:
    """Print a row for each number of adapters."""
    ArgumentParser(description=__doc__).parse_args()
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


if __name__ == "__main__":
    main()
