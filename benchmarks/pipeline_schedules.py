"""Pipeline schedules against published ones: bubble rates, thirteen cases, proved optima.

    python benchmarks/pipeline_schedules.py --data ../shared/data/schedules --json benchmarks/pipeline_schedules.json

1. Bubble rates of arXiv:2401.10241 (table 5 with the profiled times of table 9), by our generators.
2. Thirteen inputs: our shortest order against the schedules of torch 2.13 and of the zero-bubble scheduler, each at the memory of
   its fullest rank, every placement of one or two chunks a rank allowed; makespans, and spans where span is their goal. The
   time limit is for 1000 actions and grows with their number.
3. Proved optima of an earlier CP-SAT study on one stage a rank: reached, and proved here by which bound.
4. With `--authors CHECKOUT` of sail-sg/zero-bubble-pipeline-parallelism: its V-half and V-min against what a plan has time for
   (`quick_order`) and the best of all starts (`best_greedy`), on random pipelines of equal and unequal stages, at the memory of
   its fullest rank.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import itertools
import json
import random
import statistics
import sys
import time
import types
from pathlib import Path
from typing import Any

from meshwright.cost_models.pipeline import orders
from meshwright.cost_models.pipeline.orders import Action, Pipeline
from meshwright.cost_models.pipeline.simulation import simulate
from meshwright.schema.schedules import placement
from meshwright.solvers.pipeline.greedy import quick_order
from meshwright.solvers.pipeline.improve import solve, synthesise
from meshwright.solvers.pipeline.schedule import Length, PipelineInstance, best_greedy, check, lower_bound_s
from meshwright.solvers.pipeline.waves import WAVE_RULES, wave_order

PLACEMENTS = ((1, "loop"), (2, "loop"), (2, "wave"), (2, "wave_from_last"))


def pipeline_of(case: dict[str, Any], chunks: int, style: Any) -> Pipeline:
    """Each rank's times and memory in `chunks` equal parts, as the recorded baselines were timed."""
    ranks = placement(case["p"], chunks, style)

    def column(name: str, sign: int = 1) -> tuple[float, ...]:
        return tuple(sign * case[name][rank] / chunks for rank in ranks)

    return Pipeline(
        num_microbatches=case["m"],
        rank_of_stage=ranks,
        forward_s=column("f"),
        backward_s=column("b"),
        weight_s=column("w"),
        transfer_s=(case["comm"],) * (len(ranks) - 1),
        held_bytes=column("mem_f"),
        backward_freed_bytes=column("mem_b", -1),
        weight_freed_bytes=column("mem_w", -1),
    )


def bubble_rates(data: Path) -> list[dict[str, Any]]:
    """Published and ours, per model and schedule; times as integer microseconds."""
    rows = []
    for row in json.loads((data / "zero_bubble/paper_tables.json").read_text())["rows"]:
        ranks, m = row["p"], row["m"]
        micros = {name: round(1000 * row[f"t{name}_ms"]) for name in ("F", "B", "W", "comm")}
        case = {
            "p": ranks,
            "m": m,
            "comm": micros["comm"],
            "mem_f": [2] * ranks,
            "mem_b": [-1] * ranks,
            "mem_w": [-1] * ranks,
        }
        case |= {name.lower(): [micros[name]] * ranks for name in ("F", "B", "W")}
        pipeline = pipeline_of(case, 1, "loop")
        made = {
            "1F1B": [orders.one_f_one_b(ranks, m)],
            "ZB-H1": [orders.zb_h1(ranks, m)],
            "ZB-H2": [orders.zb_h2(ranks, m)],
            "ZB-1p": [wave_order(pipeline, [2 * ranks] * ranks, rule) for rule in WAVE_RULES],
            "ZB-2p": [wave_order(pipeline, [4 * ranks] * ranks, rule) for rule in WAVE_RULES],
        }
        for name, candidates in made.items():
            ours = min(simulate(pipeline, order).bubble_fraction for order in candidates)
            rows.append({
                "model": row["model"], "ranks": ranks, "micro_batches": m, "schedule": name,
                "published": row["published_bubble"][name], "ours": round(ours, 4),
            })  # fmt: skip
    return rows


def baselines(data: Path) -> dict[str, tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]]:
    """Per case its input and the recorded schedules of torch and of the zero-bubble greedy."""
    zero_bubble = json.loads((data / "zero_bubble/zb_results.json").read_text())
    torch_orders = json.loads((data / "torch_pipelining/torch_sched_results.json").read_text())
    published = {}
    for name, entry in zero_bubble.items():
        rows = [(f"torch {key.removeprefix('Schedule')}", value) for key, value in torch_orders.get(name, {}).items()]
        rows += [(key, value) for key, value in entry["results"].items()]
        published[name] = (entry["input"], rows)
    return published


def cases(data: Path, time_limit_s: float, only: str | None) -> list[dict[str, Any]]:
    """Ours against every recorded schedule, both lengths, at its memory."""
    rows = []
    for name, (case, recorded) in baselines(data).items():
        if only and only not in name:
            continue
        ours: dict[tuple[float, Length], dict[str, Any]] = {}
        for schedule, value in recorded:
            cap = float(value["peak_mem"])
            limit_s = time_limit_s * max(1.0, 3 * case["p"] * case["m"] / 1000)
            lengths: tuple[Length, ...] = ("makespan", "span") if schedule.startswith("zb") else ("makespan",)
            for length in lengths:
                if (cap, length) not in ours:
                    ours[cap, length] = shortest(case, cap, length, limit_s)
                row = ours[cap, length]
                rows.append(
                    {
                        "case": name,
                        "schedule": schedule,
                        "memory": cap,
                        "length": length,
                        "theirs": value[length],
                        **row,
                    }
                )
                print(f"{name:32} {schedule:28} {length:8} memory {cap:8g} theirs {value[length]:10g} ours {row['ours']:10g} "
                      f"bound {row['bound']:10g} {row['how']}", flush=True)  # fmt: skip
    return rows


def shortest(case: dict[str, Any], cap: float, length: Length, time_limit_s: float) -> dict[str, Any]:
    """Our best order over the placements."""
    built = [(label, pipeline_of(case, *label)) for label in PLACEMENTS]
    instances = tuple(PipelineInstance(pipeline, (cap,) * case["p"], length) for _, pipeline in built)
    which, solution = synthesise(instances, time_limit_s=time_limit_s)
    chunks, style = built[which][0]
    bound = min(lower_bound_s(instance) for instance in instances)
    return {
        "ours": solution.objective, "bound": min(bound, solution.objective), "solve_s": round(solution.solve_s, 2),
        "how": f"{solution.backend}, {chunks} chunk(s) {style}",
    }  # fmt: skip


def optima(data: Path, time_limit_s: float) -> list[dict[str, Any]]:
    """One stage a rank, span, the inputs of the earlier study."""
    known = json.loads((data / "zero_bubble/cpsat_optimum.json").read_text())
    hinted = json.loads((data / "zero_bubble/cpsat_hint.json").read_text())
    inputs = baselines(data)
    rows = []
    for key, entry in known.items():
        name, memory = key.split("@mem")
        case = inputs[name][0]
        caps = tuple(float(memory) * resident for resident in case["mem_f"])
        start = time.perf_counter()
        solution = solve(PipelineInstance(pipeline_of(case, 1, "loop"), caps, "span"), time_limit_s=time_limit_s)
        best = (
            min(x["span"] for x in (entry, hinted.get(key, entry)) if x["span"] is not None)
            if entry["span"] or key in hinted
            else None
        )
        rows.append({
            "input": key, "known": best, "known_proved": "OPTIMAL" in (entry["status"], hinted.get(key, entry)["status"]),
            "ours": solution.objective, "bound": solution.bound, "status": str(solution.status),
            "backend": solution.backend, "solve_s": round(time.perf_counter() - start, 2),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def random_pipeline(seed: int) -> tuple[str, Pipeline]:
    """Return a pipeline over a V: equal passes, unequal ones, unequal stages, or heavy ends; with and without transfers."""
    rng = random.Random(seed)
    ranks = rng.choice([4, 6, 8, 8, 10, 12, 16])
    micro_batches = rng.choice([ranks, ranks + 3, 2 * ranks, 2 * ranks + 1, 3 * ranks, 4 * ranks])
    kind = rng.choice(["equal", "passes", "transfers", "stages", "stages", "ends"])
    times = (10.0, 10.0, 10.0) if kind == "equal" else (rng.uniform(8, 12), rng.uniform(8, 14), rng.uniform(4, 12))
    transfer = 0.0 if kind in ("equal", "passes") else rng.choice([0.0, 0.2, 0.5, 1.0])
    scale = [rng.uniform(0.85, 1.15) if kind == "stages" else 1.0 for _ in range(2 * ranks)]
    if kind == "ends":
        scale[0], scale[-1] = 1.15, rng.choice([1.2, 1.4])
    forward, backward, weight = (tuple(round(seconds * each, 2) for each in scale) for seconds in times)
    halves = (0.5,) * (2 * ranks)
    return f"{kind} {ranks}x{micro_batches}", Pipeline(
        num_microbatches=micro_batches, rank_of_stage=placement(ranks, 2, "wave"), forward_s=forward, backward_s=backward,
        weight_s=weight, transfer_s=(transfer,) * (2 * ranks - 1), held_bytes=(1.0,) * (2 * ranks),
        backward_freed_bytes=halves, weight_freed_bytes=halves,
    )  # fmt: skip


def authors_order(checkout: Path, kind: str, ranks: int, micro_batches: int) -> orders.Order:
    """Return V-half or V-min as the authors' own module makes it; its package is not imported, which needs Megatron."""
    package = "megatron.core.pipeline_parallel.zerobubble.scheduler"
    for name in ("graph", "zbv_greedy"):
        if f"{package}.{name}" not in sys.modules:
            path = checkout.joinpath(*package.split("."), f"{name}.py")
            for parent in itertools.accumulate(package.split("."), "{}.{}".format):
                sys.modules.setdefault(parent, types.ModuleType(parent))
            spec = importlib.util.spec_from_file_location(f"{package}.{name}", path)
            assert spec is not None and spec.loader is not None
            module = sys.modules[f"{package}.{name}"] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    graph = sys.modules[f"{package}.zbv_greedy"].PipelineGraph(ranks, micro_batches, kind, 1, 1, 1, 0)
    with contextlib.redirect_stdout(io.StringIO()):
        rows = graph.create_schedule(types.SimpleNamespace(max_chunks=2, n_stages=ranks))
    return tuple(tuple(Action(node.layer_group_idx, node.type.value, node.microbatch) for node in row) for row in rows)


def against_authors(checkout: Path, num_draws: int) -> list[dict[str, Any]]:
    """Both of their orders on random pipelines."""
    rows = []
    for seed in range(num_draws):
        name, pipeline = random_pipeline(seed)
        for kind in ("half", "min"):
            theirs = simulate(pipeline, authors_order(checkout, kind, pipeline.num_ranks, pipeline.num_microbatches))
            caps = (float(max(theirs.peak_bytes)),) * pipeline.num_ranks
            start, cpu = time.perf_counter(), time.process_time()
            quick = quick_order(pipeline, caps)
            quick_cpu_s = time.process_time() - cpu
            instance = PipelineInstance(pipeline, caps)
            greedy = best_greedy(instance)
            assert quick is not None and greedy is not None
            rows.append({
                "draw": seed, "pipeline": name, "schedule": f"v-{kind}", "memory": caps[0],
                "theirs": round(theirs.makespan_s, 2), "quick": round(check(instance, quick) / theirs.makespan_s, 4),
                "quick_cpu_s": round(quick_cpu_s, 3), "best": round(check(instance, greedy[1]) / theirs.makespan_s, 4),
                "how": greedy[0], "bound": round(lower_bound_s(instance) / theirs.makespan_s, 4),
            })  # fmt: skip
            print(rows[-1], f"{time.perf_counter() - start:.1f} s", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/schedules"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--time-limit-s", type=float, default=5.0)
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--authors", type=Path, metavar="CHECKOUT", help="only part 4; the other parts of --json stay")
    parser.add_argument("--draws", type=int, default=60)
    arguments = parser.parse_args()
    if arguments.authors:
        rows = against_authors(arguments.authors, arguments.draws)
        for column in ("quick", "best"):
            ratios = [row[column] for row in rows]
            print(f"{column}: {sum(r > 1 for r in ratios)} of {len(ratios)} longer, median {statistics.median(ratios):.4f}, "
                  f"least {min(ratios):.4f}, most {max(ratios):.4f}")  # fmt: skip
        if arguments.json:
            before = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
            arguments.json.write_text(json.dumps(before | {"authors": rows}, indent=1) + "\n")
        return
    result: dict[str, Any] = {"time_limit_s": arguments.time_limit_s}
    if not arguments.only:
        result["bubble_rates"] = bubble_rates(arguments.data)
        equal = sum(row["ours"] == row["published"] for row in result["bubble_rates"])
        print(f"bubble rates: {equal} of {len(result['bubble_rates'])} equal to four decimals")
        result["optima"] = optima(arguments.data, 12 * arguments.time_limit_s)
    result["cases"] = cases(arguments.data, arguments.time_limit_s, arguments.only)
    worse = [row for row in result["cases"] if row["ours"] > row["theirs"] * (1 + 1e-9)]
    print(f"cases: {len(result['cases'])} comparisons, ours worse in {len(worse)}")
    for row in worse:
        print("  worse:", row)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
