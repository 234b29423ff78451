"""Plan every published run of validation/data/recipes.csv and write docs/recipes.md, with the figures as benchmarks/recipes.json.

    python benchmarks/recipes.py             plan all of them (minutes), then write both
    python benchmarks/recipes.py page        write the page from benchmarks/recipes.json

The same table on a screen: `meshwright recipes --plan`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.cli.recipes import document, figure, remarks
from meshwright.planner.request import Deadline
from meshwright.schema.layout import SWITCHES
from meshwright.schema.units import format_percent
from meshwright.validation.recipes import Recipe, recipes, with_plans

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs/recipes.md"
TIME_LIMIT_S = 60.0

RULE = """Chosen by what they are and not by how they come out: pretraining on NVIDIA's devices of
which devices, model, batch, sequence length, degrees and precision are public, for engines that have a record here. Of each
publisher and model the run on the most devices; of NVIDIA's tables that of the newest release with H100; where several
precisions were measured bf16 (fp16 before 2022), where only fp8 was, that. In it are the papers that such a list is
expected to have (Llama 3 405B, BLOOM, MT-NLG, DeepSeek-V3, Megatron-LM's 1T) and the public tables of NVIDIA (DGX Cloud,
Megatron Bridge, MLPerf's largest GPT-3), torchtitan, llm-foundry, fms-fsdp, InternEvo, Alibaba and FlagPerf. No row was
left out for its error. Twenty-seven were written down before anything was predicted; NVIDIA's 405B and 70B were added
after the first run, and Meta's 405B, whose chunks of layers its paper implies but does not state, was then read with eight
instead of one."""

TEXT = """# Published runs beside our predictions and our plans

Made by `python benchmarks/recipes.py` at commit {commit}, in {minutes:.0f} minutes on {cores} cores. `meshwright recipes`
shows the predictions in seconds, `meshwright recipes --plan` plans again. The rows are facts with their sources
(`validation/data/recipes.csv`); predictions are for the published layout, from data sheets and the packaged coefficients.
Nothing was fitted to this list. Half of the tables from which some of the rows come was used when coefficients were fitted:
docs/accuracy.md has the errors of the other half.

* **measured**: tokens a second on each device, or MFU where the publisher says only that.
* **predicted**: the same of our estimate of the published layout, and its **error**.
* **plan**: what the best layout that we find for the same model, batch, machine and engine is predicted to give, how much
  that is more than our prediction of the published layout (**gain**), what of it there is with the switches that the run had
  (gradients, tp_overlap, cuda_graphs, ep_overlap: **of axes**), and what the search proved. Gains are predicted, not measured.

{count} runs: the mean error is {mean}, the median {median}, the largest {largest}; {within} of {count} are within 10 %.

{table}

## The plans

{plans}

## What gains are made of

Seconds of the published layout less those of the plan by term, over the plan's step (they sum to the gain; below 1 % is left
out), and what the plan turns on or off besides. A mixture's gain is mostly choices that its recipe does not make:

* **waiting for the host**: it takes 8 ms for a block with experts and a micro-batch, 5 where attention and router are replayed as
  graphs, whatever the tokens (coefficients.toml, [host.megatron]).
* **exchange of tokens**: experts within a node, or their exchange beside another micro-batch.
* **more tokens a pass** spread both over more work, as far as memory goes: allocated peaks are within 1 % of measured on eight
  runs of mixtures. Recipes leave a quarter of their devices empty, plans 2 to 5 %.

Where both sides of such a choice were measured, gains came true: of these nine the median is 35 %, of 34 predicted.

| measured | from | to | measured | predicted |
|---|---|---|--:|--:|
| Qwen3-235B-A22B, 256 H800 (xtuner) | 8 stages, ep 32 on four nodes, all-to-all | 32 stages, ep 8 in a node | +58 % | +29 % |
| | the same | 8 stages, ep 8 in a node | +28 % | +34 % |
| | the same | DeepEP | +38 % | +45 % |
| Mixtral-8x22B, 128 H100 (arXiv:2504.14960) | tp 4, ep 8, one stage | tp 2, 8 stages, ep 8 folded | +35 % | +39 % |
| Qwen3-30B-A3B, 16 H100 (Megatron Bridge) | HybridEP by itself | beside another micro-batch | +18 % | +11 % |
| Qwen3-30B-A3B, 8 B200 (the same) | one sequence a pass | four | +175 % | +152 % |
| Qwen3-30B-A3B, 8 GB200 (the same) | graphs before experts | of all, exchange beside | +56 % | +27 % |
| Qwen3-235B-A22B, 256 GB200 (the same) | graphs before experts | of all, exchange beside | +30 % | +36 % |
| DeepSeek-V3, 256 B200 (the same) | 16 stages, ep 8 | 8 stages of two chunks, ep 32, graphs | +18 % | +14 % |

{gains}

## What each publication leaves open, and what was taken for it

{assumed}

## How the rows were chosen

{rule}

## Where we are off

{off}
"""

OFF = """* **DeepSeek-V3 by DeepSeek** ran DualPipe with its own kernels; we cost Megatron's with two chunks a rank, and say wrongly
  that it does not fit.
* **Llama 3 405B by Meta**: the publication does not say the pipeline's chunks. It does say that a chunk without its one
  layer holds only the embedding, so that chunks of one layer are taken. We cost it with torch's FSDP and torch's memory,
  and say wrongly that it does not fit; the micro-batch of one sequence is assumed too.
* **MT-NLG** ran much slower than we predict, **Qwen3-235B** of Megatron Bridge faster. What the publications say does not tell
  why, and nothing was adjusted.
* **DeepSeek-V3** of Megatron Bridge was measured with its first release, of September 2025, with which mixtures take 20 % longer
  than predicted on every device, and dense models do not. Its recipe for Qwen3-235B-A22B on 256 H100, unchanged, took 13.3 ms a
  sequence then, 10.2 two months later and 9.4 in April 2026.
* **Qwen3-235B** of Alibaba is right with 32 stages; four runs of the same table with 8 stages take 4 to 5 s a step longer than
  predicted, whatever their exchange. Plans have 8 to 16 stages: their gain may be too large by as much."""


def main() -> None:
    """Plan, or read what was planned; then write the page."""
    parser = argparse.ArgumentParser(
        description="Plan the published runs of `meshwright recipes`, and write docs/recipes.md."
    )
    parser.add_argument("what", nargs="?", choices=["page"], help="page: write it from what was planned before")
    if parser.parse_args().what == "page":
        content = json.loads(RESULTS.read_text())
    else:
        start = time.perf_counter()
        rows = []
        for recipe in with_plans(recipes(), time_limit_s=TIME_LIMIT_S, deadline=Deadline()):
            rows.append(document(recipe))
            print(f"{time.perf_counter() - start:6.0f} s  {recipe.title}", file=sys.stderr)
        git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
        content = {"commit": commit, "seconds": time.perf_counter() - start, "cores": 2, "rows": rows}
        RESULTS.write_text(json.dumps(content, indent=1) + "\n")
    PAGE.write_text(page(content))


def page(content: dict[str, Any]) -> str:
    """Return the page."""
    rows = [Recipe(**{key: value for key, value in row.items() if key != "error"}) for row in content["rows"]]
    errors = [abs(row.error) for row in rows if row.error is not None]
    assumed = [f"* **{row.title}** ({row.source}): {', '.join(row.assumed)}" for row in rows if row.assumed]
    return TEXT.format(
        commit=content["commit"],
        minutes=content["seconds"] / 60,
        cores=content["cores"],
        count=len(errors),
        mean=format_percent(sum(errors) / len(errors)),
        median=format_percent(median(errors)),
        largest=format_percent(max(errors)),
        within=sum(error < 0.1 for error in errors),
        table="\n".join(_table(rows)),
        plans="\n".join(_plans(rows)),
        gains="\n".join(_gains(rows)),
        assumed="\n".join(assumed),
        rule=RULE,
        off=OFF,
    )


def _table(rows: list[Recipe]) -> list[str]:
    lines = [
        "| run | devices | measured | predicted | error | plan | gain | of axes | remarks |",
        "|---|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        planned, predicted = row.planned_figure, row.predicted
        gains = ("-" if gain is None else format_percent(gain, sign=True) for gain in (row.gain, row.axes_gain))
        error = "-" if row.error is None else format_percent(row.error, sign=True)
        cells = (
            row.title, f"{row.num_devices:,} {row.device}, {row.precision}", figure(row, row.measured), figure(row, predicted),
            error, figure(row, planned), *gains, "; ".join(remarks(row)),
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _plans(rows: list[Recipe]) -> list[str]:
    lines = ["| run | published layout | plan |", "|---|---|---|"]
    return lines + [f"| {row.title} | `{row.layout}` | `{row.planned.layout}` |" for row in rows if row.planned]


def _gains(rows: list[Recipe]) -> list[str]:
    lines = ["| run | gain | of | turned on or off |", "|---|--:|---|---|"]
    for row in rows:
        if row.planned is None or row.layout is None or not row.planned.gains:
            continue
        by_size = sorted(row.planned.gains.items(), key=lambda item: -abs(item[1]))
        terms = [f"{term} {format_percent(part, sign=True)}" for term, part in by_size if abs(part) >= 0.01]
        switches = [f"{name}={getattr(row.planned.layout, name)}".lower() for name in SWITCHES if _differs(row, name)]
        gain = format_percent(sum(row.planned.gains.values()), sign=True)
        lines.append(f"| {row.title} | {gain} | {', '.join(terms)} | {', '.join(switches)} |")
    return lines


def _differs(row: Recipe, name: str) -> bool:
    return row.planned is not None and getattr(row.planned.layout, name) != getattr(row.layout, name)


if __name__ == "__main__":
    main()
