"""Write what benchmarks/search.py measured: search.md next to the goals, and as a figure of how time grows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

Result = dict[str, Any]


class Goal(NamedTuple):
    """A row of the goals: which case shows it, and what it must be within."""

    title: str
    case: str
    seconds: float
    gap: float = 0.01
    memory_mib: int | None = None
    best_known: str = ""


EARLY = {"cpu_s_within_5_percent": 0.5, "cpu_s_within_1_percent": 2.0}
"""CPU seconds after which an answer is to be within 5 and 1 % of the last."""

CALCULON = "Calculon: 1.1 M evaluations for 175B on 512 GPUs in a smaller space"
SIMUMAX = "SimuMax: nothing and no reason for pp 4, 8, 16"

GOALS = (
    Goal("Llama-3.1-405B, 16,384 H100, full space of Megatron", "llama-3.1-405b on 16384", 3, best_known=CALCULON),
    Goal("the same for torch's parts (fsdp2)", "llama-3.1-405b on 16384 fsdp2", 3),
    Goal("DeepSeek-V3, 2,048 H800, with ep and etp", "deepseek-v3 on 2048", 5, best_known=SIMUMAX),
    Goal("the same for torch's parts (fsdp2)", "deepseek-v3 on 2048 fsdp2", 5),
    Goal("MoE of 1e12 parameters, 100,000 GPUs", "1T MoE on 100000", 10, gap=0.02, memory_mib=2048),
    Goal("the same for torch's parts (fsdp2)", "1T MoE on 100000 fsdp2", 10, gap=0.02, memory_mib=2048),
    Goal("the same on 98,304 GPUs, Megatron", "1T MoE on 98304", 10, gap=0.02, memory_mib=2048),
    Goal("Qwen3-235B, 512 GPUs, Megatron", "qwen3-235b on 512", 3),
    Goal("the same for torch's parts (fsdp2)", "qwen3-235b on 512 fsdp2", 3),
    Goal("Llama-3.1-70B, 64 GPUs, Megatron", "llama-3.1-70b on 64", 0.7, best_known="10.4 CPU-s (SimuMax's grid)"),
    Goal("the same for torch's parts (fsdp2)", "llama-3.1-70b on 64 fsdp2", 0.7),
    Goal("the same, what `apply` runs", "llama-3.1-70b on 64 what apply runs", 0.7),
    Goal("Llama-2-7B, 8 GPUs of which 36 GiB are used", "llama-2-7b on 8", 1, best_known="Galvatron: 64 to 114 CPU-s"),
    Goal("the same, full space of torch's parts", "llama-2-7b on 8 full space", 1),
    Goal("cheapest of 1 to 64 nodes of 8 H100, Llama-3.1-70B", "cheapest of 1 to 64 nodes", 10),
    Goal("time against memory, Llama-3.1-70B, 64 GPUs, what `apply` runs", "pareto of llama-3.1-70b on 64", 5),
    Goal("the same for Megatron", "pareto of llama-3.1-70b on 64 megatron", 5),
)  # fmt: skip

SERIES = {"devices": "GPUs", "layers": "blocks"}


def write_report(result: Result, folder: Path) -> None:
    """search.md, and search.svg where matplotlib is installed."""
    has_figure = draw(result, folder / "search.svg") or (folder / "search.svg").exists()
    (folder / "search.md").write_text(markdown(result, folder, has_figure=has_figure))


def markdown(result: Result, folder: Path, *, has_figure: bool) -> str:
    """Return the page."""
    lines = [
        "# The search, measured",
        "",
        f"`{result['command']}` writes this page, `search.json` and the figure; Python {result['python']}, numpy "
        f"{result['numpy']}, {result['cores']} core(s) of {result['processor']}, shared with other work. A goal in seconds is "
        "compared with CPU seconds of the one thread that works, wall seconds stand next to them; the gap is the search's, "
        "from the fastest layout to the bound.",
        "",
        "| goal | layouts | gap | CPU s | wall s | memory MiB | target | met | best known |",
        "|---|---:|---:|---:|---:|---:|---|---|---|",
        *(_goal_row(goal, result["cases"].get(goal.case, {})) for goal in GOALS),
        "",
        *_other_goals(result, folder),
        "",
        "## Early answers",
        "",
        "What Ctrl-C or a time limit gives: CPU seconds until the search has an answer within 5 and 1 % of its last one "
        f"(targets: {' and '.join(f'{seconds:g} s' for seconds in EARLY.values())}), and the first.",
        "",
        "| case | first after | it is slower by | within 5 % after | within 1 % after | target met |",
        "|---|---:|---:|---:|---:|---|",
        *(_early_row(goal.case, row) for goal in GOALS if "answers" in (row := result["cases"].get(goal.case, {}))),
        "",
        "## Results",
        "",
        "| case | answer | step time |",
        "|---|---|---:|",
        *(_answer_row(goal.case, result["cases"].get(goal.case, {})) for goal in GOALS),
        "",
        "## Growth",
        "",
        *(["![CPU seconds against GPUs and blocks](search.svg)", ""] if has_figure else []),
        *_growth_tables(result["cases"]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _goal_row(goal: Goal, row: Result) -> str:
    if "cpu_s" not in row:
        return f"| {goal.title} | | | | | | | {row.get('error', 'not run')} | {goal.best_known} |"
    met = row["cpu_s"] <= goal.seconds and row["gap"] <= goal.gap
    target = f"{goal.seconds:g} s, {100 * goal.gap:g} %"
    if goal.memory_mib is not None:
        met = met and row["peak_rss_mib"] <= goal.memory_mib
        target += f", {goal.memory_mib} MiB"
    size = f"{row['layouts']:,}" if "layouts" in row else f"{row['points']} points"
    figures = f"{100 * row['gap']:.2g} % | {row['cpu_s']:.2f} | {row['wall_s']:.2f} | {row['peak_rss_mib']}"
    return f"| {goal.title} | {size} | {figures} | {target} | {'yes' if met else 'no'} | {goal.best_known} |"


def _early_row(name: str, row: Result) -> str:
    (first_s, step_s), (_, last_s) = row["answers"][0], row["answers"][-1]
    met = ["yes" if row[figure] <= seconds else "no" for figure, seconds in EARLY.items()]
    until = " | ".join(f"{row[figure]:.2f} s" for figure in EARLY)
    return f"| {name} | {first_s:.2f} s | {100 * (step_s / last_s - 1):.1f} % | {until} | {', '.join(met)} |"


def _answer_row(name: str, row: Result) -> str:
    answer = row.get("layout", f"{row['points']} points" if "points" in row else row.get("error", "not run"))
    if "nodes" in row:
        answer = f"{row['nodes']} nodes, {row['usd_per_billion_tokens']} USD per 1e9 tokens: {answer}"
    step = f"{row['step_time_s']:.3f} s" if "step_time_s" in row else ""
    return f"| {name} | {answer} | {step} |"


def _other_goals(result: Result, folder: Path) -> list[str]:
    lines = ["| goal | result | command |", "|---|---|---|"]
    titles = {
        "equality with enumeration": "objective equal to expanding every layout on 304 random small instances",
        "published layer-wise plan": "Llama-2-7B on one node: no slower in our model than Galvatron's published plan",
    }
    for name, row in result["tests"].items():
        lines.append(f"| {titles[name]} | {row['result'].strip('= ')} | `{row['command']}` |")
    path = folder / "pipeline_schedules.json"
    if path.exists():
        lines += _schedule_rows(json.loads(path.read_text()))
    return lines


def _schedule_rows(schedules: Result) -> list[str]:
    rates, optima, cases = schedules["bubble_rates"], schedules["optima"], schedules["cases"]
    same = sum(abs(row["published"] - row["ours"]) < 1e-9 for row in rates)
    optima = [row for row in optima if row["known"] is not None]
    reached = sum(row["ours"] <= row["known"] * (1 + 1e-9) for row in optima)
    theirs = [
        row for row in cases if row["length"] == "makespan" and row["schedule"].startswith(("torch ", "zb_greedy"))
    ]
    longer = [row for row in theirs if row["ours"] > row["theirs"] * (1 + 1e-9)]
    command = "`python benchmarks/pipeline_schedules.py`"
    return [
        f"| published bubble rates to 4 decimals | {same} of {len(rates)} | {command} |",
        f"| optima of an earlier study reached | {reached} of {len(optima)} | {command} |",
        f"| makespan at equal memory against torch and zero-bubble | longer than {len(longer)} of {len(theirs)} | {command} |",
    ]


def series(cases: Result) -> dict[str, dict[str, list[tuple[int, Result]]]]:
    """Of what grows, by model and engine: (number, row) in order."""
    points: dict[str, dict[str, list[tuple[int, Result]]]] = {kind: {} for kind in SERIES}
    for name, row in cases.items():
        kind, *middle, number = name.split()
        if kind in SERIES and number.isdigit() and "cpu_s" in row:
            points[kind].setdefault(" ".join(middle), []).append((int(number), row))
    return points


def _growth_tables(cases: Result) -> list[str]:
    lines: list[str] = []
    for kind, by_name in series(cases).items():
        if not by_name:
            continue
        lines += [f"| {SERIES[kind]} |" + "".join(f" {name}: layouts | CPU s | gap |" for name in by_name)]
        lines += ["|---:|" + "---:|---:|---:|" * len(by_name)]
        for number in sorted({number for points in by_name.values() for number, _ in points}):
            cells = []
            for points in by_name.values():
                row = dict(points).get(number)
                cells.append(
                    "| | |" if row is None else f" {row['layouts']:,} | {row['cpu_s']:.2f} | {100 * row['gap']:.2g} % |"
                )
            lines.append(f"| {number:,} |" + "".join(cells))
        lines.append("")
    return lines


def draw(result: Result, path: Path) -> bool:
    """Two log-log panels of CPU seconds; False, and said so, without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        sys.stderr.write("matplotlib is not installed: search.svg is not drawn (pip install matplotlib)\n")
        return False
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "meshwright"
    mpl.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(SERIES), figsize=(9, 3.4), sharey=True, layout="constrained")
    for panel, (kind, by_name) in zip(panels, series(result["cases"]).items(), strict=True):
        for name, points in by_name.items():
            panel.loglog([n for n, _ in points], [row["cpu_s"] for _, row in points], marker="o", label=name)
        panel.set_xlabel(SERIES[kind])
        panel.grid(visible=True, which="major", alpha=0.3)
        if by_name:
            panel.legend(frameon=False, fontsize=8)
    panels[0].set_ylabel("CPU seconds of plan")
    figure.savefig(path, metadata={"Date": None})
    return True
