"""Plans over regions and local updates: published runs, jobs over regions, a slow link of this machine, and losses.

    python benchmarks/regions.py published RUNS.csv
    python benchmarks/regions.py jobs CASES.json PAIRS.csv
    python benchmarks/regions.py link [--rate-mbit 20] [--round-trip-ms 40]     as root, on Linux
    python benchmarks/regions.py drop                                           the same, of which a tenth is left in the middle
    python benchmarks/regions.py lost [--steps 2000]                            three regions, one of which is killed and comes back
    python benchmarks/regions.py loss [--steps 300] [--every 4 16 50]

Each part replaces its results in regions.json next to this file. RUNS.csv has columns run, where, inner_steps, inner_s,
outer_sync_s and compute_utilisation_percent; CASES.json a list of {name, model, global_batch_size, seq_len, groups: [{region,
nodes, gpus_per_node, gpu}]}; PAIRS.csv what docs/regions.md says.

The slow link is that of slow_link.py.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from meshwright.planner import plan
from meshwright.planner.islands import exchange_instance, join
from meshwright.planner.plan import plan_as_requested
from meshwright.planner.regions import IslandProblem
from meshwright.planner.request import PlanRequest
from meshwright.schema import ClusterSpec, ConfigError, InfeasibleError, ModelSpec, NodeGroup, TrainingPlan, Workload
from meshwright.schema.local_updates import SyncLimits, with_sync_every
from meshwright.schema.regions import RegionLink, joining_link
from meshwright.solvers.islands import Exchange, IslandsInstance, step_s
from slow_link import PACKET, PAYLOAD, bucket, commands, put_first, sent_by, slow_link

RESULTS = Path(__file__).with_suffix(".json")
SMALL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_hidden_layers": 4,
    "intermediate_size": 688, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256,
    "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip


def published(runs: Path) -> list[dict[str, Any]]:
    """Utilisation of published local-update runs by (O), of runs that say how long their steps and sums took."""
    rows = []
    for row in csv.DictReader(runs.open(newline="", encoding="utf-8")):
        if not (row["inner_s"] and row["outer_sync_s"]):
            continue
        steps, inner_s, sync_s = int(row["inner_steps"]), float(row["inner_s"]), float(row["outer_sync_s"])
        latency = np.full((2, 2), sync_s / 2)
        instance = IslandsInstance(
            step_s=np.full(2, inner_s / steps),
            rate=np.full((2, 2), np.inf),
            latency_s=latency,
            num_params=1.0,
            max_steps=steps,
        )
        predicted = 100 * float(instance.step_s[0]) / step_s(instance, Exchange((0, 1), steps=steps))
        rows.append(
            {
                "run": f"{row['run']}, {row['where']}",
                "published_percent": float(row["compute_utilisation_percent"]),
                "predicted_percent": round(predicted, 2),
            }
        )
    return rows


def jobs(cases: Path, pairs: Path) -> list[dict[str, Any]]:
    """Each job: seconds of the search, gap, and the step against the best single region and against DT-FM's order of the ring."""
    plan("gpt2", "8xA100-SXM-40GB", global_batch_size=64, seq_len=1024)  # what is loaded and fitted once
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in json.loads(cases.read_text()):
            path = Path(folder) / "cluster.toml"
            groups = (
                f'[[groups]]\nregion = "{g["region"]}"\ndevice = "{g["gpu"]}"\nnum_nodes = {g["nodes"]}\n'
                f"devices_per_node = {g['gpus_per_node']}\n"
                for g in case["groups"]
            )
            path.write_text(f'[regions]\ntable = "{pairs.resolve()}"\n' + "".join(groups))
            rows.append(_job(case, ClusterSpec.parse(str(path))))
            print(rows[-1], flush=True)
    return rows


def _job(case: dict[str, Any], cluster: ClusterSpec) -> dict[str, Any]:
    task = {"global_batch_size": case["global_batch_size"], "seq_len": case["seq_len"]}
    start, cpu = time.perf_counter(), time.process_time()
    answer = plan(case["model"], cluster, **task, local_updates=SyncLimits())
    cpu_s, wall_s = time.process_time() - cpu, time.perf_counter() - start
    assert answer.search is not None
    singles = []
    for part in cluster.parts:
        try:
            singles.append(plan(case["model"], part.cluster, **task).estimate.step_time_s)
        except (ConfigError, InfeasibleError):
            continue
    updates = answer.local_updates
    row = {
        "job": case["name"], "search_cpu_s": round(cpu_s, 2), "search_wall_s": round(wall_s, 2),
        "gap_percent": round(100 * answer.search.gap, 2), "step_s": answer.estimate.step_time_s,
        "best_single_region_s": min(singles), "regions": len(answer.cluster.groups),
        "local_steps": updates and updates.steps, "bits": updates and updates.bits, "dtfm_order_s": None,
    }  # fmt: skip
    if updates is not None:
        request = PlanRequest.from_plan(answer)
        steps_s = [island.step_s for island in updates.islands]
        instance = exchange_instance(request, updates.limits, range(len(steps_s)), steps_s, updates.node_pairs)
        seconds = instance.edge_s(updates.fragments, updates.bits)
        tour = min(
            ((0, *rest) for rest in itertools.permutations(range(1, len(steps_s)))),
            key=lambda ring: sum(seconds[u, v] for u, v in zip(ring, (*ring[1:], ring[0]), strict=True)),
        )
        row["dtfm_order_s"] = step_s(
            instance, Exchange(tour, updates.steps, updates.fragments, updates.bits, updates.delay_steps)
        )
    return row


def small_regions(rate_mbit: float, round_trip_ms: float, zones: str = "ab") -> ClusterSpec:
    """Regions of one CPU rank of this machine each, with the throughput of one connection, as tables of pairs have it."""
    rate_bytes_per_s, round_trip_s = PAYLOAD / PACKET * rate_mbit * 1e6 / 8, round_trip_ms / 1e3
    local = ClusterSpec.parse("local:1")
    links = tuple(
        RegionLink(src=a, dst=b, line_bytes_per_s=rate_bytes_per_s, round_trip_s=round_trip_s)
        for a, b in itertools.permutations(zones, 2)
    )
    groups = tuple(NodeGroup(**{**dict(local.groups[0]), "zone": zone, "levels": local.levels}) for zone in zones)
    outer = {"link": joining_link(links, zones), "domain_size": len(zones)}
    return ClusterSpec(name="two-regions", groups=groups, levels=(outer,), region_links=links, profile=local.profile)


def local_plan(model: ModelSpec, cluster: ClusterSpec, task: Workload, limits: SyncLimits) -> TrainingPlan:
    """Return the plan under which all regions train by themselves."""
    request = PlanRequest.create(model, cluster, task, local_updates=limits)
    joined = IslandProblem(request, limits, plan_as_requested).joined(tuple(range(len(cluster.groups))))
    assert joined is not None
    return join(request, joined)


def link(rate_mbit: float, round_trip_ms: float) -> dict[str, Any]:
    """Train over a slow link with a sum each step and with local updates, and compare with what the plan says."""
    model = ModelSpec.from_hf(SMALL)
    cluster = small_regions(rate_mbit, round_trip_ms)
    task = Workload(global_batch_size=2, seq_len=8, precision="fp32")
    each_step = plan(model, cluster, task, fixed={"dp_replicate": 2, "zero_stage": 0})
    local = local_plan(model, cluster, task, SyncLimits(max_local_steps=16))
    assert local.local_updates is not None
    updates, result = local.local_updates, dict[str, Any](rate_mbit=rate_mbit, round_trip_ms=round_trip_ms)
    result["plan"] = updates.model_dump(
        include={"steps", "fragments", "bits", "delay_steps", "exchange_s", "sent_bytes"}
    )
    rounds, tokens = 5, task.tokens_per_step
    with tempfile.TemporaryDirectory() as name, slow_link(rate_mbit, round_trip_ms) as ends:
        runs = {"step": (each_step, 4), "local": (local, rounds * updates.steps)}
        for kind, (chosen, steps) in runs.items():
            path = Path(name) / f"{kind}.json"
            chosen.save(path)
            before = sent_by(*ends[0])
            lines = _train(commands(ends), "10.77.9.1", path, steps, Path(name) / f"{kind}.jsonl")
            sent, packets = (b - a for a, b in zip(before, sent_by(*ends[0]), strict=True))
            # The first steps also load and plan kernels, and one region begins before the other; then entire rounds.
            timed = [line for line in lines if "step" in line][1 if kind == "step" else updates.steps :]
            own_s = [line["step_time_s"] - line["parts_s"]["preempted"] for line in timed]
            inner_s = [line["step_time_s"] for line in timed if line["step"] % updates.steps]
            result[kind] = {
                "tokens_per_s": tokens / statistics.mean(line["step_time_s"] for line in timed),
                "step_s": statistics.median(own_s), "interface_bytes": sent,
            }  # fmt: skip
            if kind == "local":
                # One more sum of everything ends a run.
                payload, planned = sent - (PACKET - PAYLOAD) * packets, updates.sent_bytes * (rounds + 1)
                exchange_s, step_s = lines[-1]["measured"]["exchange_s"], statistics.mean(inner_s)
                predicted = tokens / (step_s + updates.exchange_s / updates.steps)
                result[kind] |= {
                    "exchange_s": exchange_s, "exchange_percent": 100 * (exchange_s / updates.exchange_s - 1),
                    "payload_bytes": payload, "planned_bytes": planned, "bytes_percent": 100 * (payload / planned - 1),
                    "inner_step_s": step_s, "predicted_tokens_per_s": predicted,
                    "rate_percent": 100 * (result[kind]["tokens_per_s"] / predicted - 1),
                }  # fmt: skip
    result["ratio_as_run"] = result["local"]["tokens_per_s"] / result["step"]["tokens_per_s"]
    return result


def drop(rate_mbit: float, round_trip_ms: float) -> dict[str, Any]:
    """Train with `--sync-every auto` over a slow link that has a tenth of its rate for a while; after which steps sums come."""
    limits = SyncLimits(max_local_steps=64)
    cluster = small_regions(rate_mbit, round_trip_ms)
    task = Workload(global_batch_size=2, seq_len=8, precision="fp32")
    chosen = with_sync_every(local_plan(ModelSpec.from_hf(SMALL), cluster, task, limits), 6)
    assert chosen.local_updates is not None
    planned_s, slow_after, fast_after = chosen.local_updates.exchange_s, 12, 50
    rates = {slow_after: rate_mbit / 10, fast_after: rate_mbit}
    with tempfile.TemporaryDirectory() as name, slow_link(rate_mbit, round_trip_ms) as ends:
        path = Path(name) / "plan.json"
        chosen.save(path)
        metrics = Path(name) / "metrics.jsonl"
        over = threading.Event()

        def change() -> None:
            for step, rate in rates.items():
                while not over.wait(0.02) and (not metrics.exists() or f'"step": {step},' not in metrics.read_text()):
                    pass
                for namespace, device in ends:
                    subprocess.run(["tc", "-n", namespace, "qdisc", "change", "dev", device, *bucket(rate)], check=True)

        thread = threading.Thread(target=change)
        thread.start()
        try:
            lines = _train(commands(ends), "10.77.9.1", path, 90, metrics, "--sync-every", "auto")
        finally:
            over.set()
            thread.join()
    steps = [line for line in lines if "step" in line]
    sums = [
        (line["step"], line["parts_s"]["communication"])
        for line in steps
        if line["parts_s"]["communication"] > planned_s / 2
    ]
    gaps = [after - before for before, after in itertools.pairwise([step for step, _ in sums if step > slow_after])]
    return {
        "rate_mbit": rate_mbit, "round_trip_ms": round_trip_ms, "dropped_mbit": rate_mbit / 10,
        "planned_steps": chosen.local_updates.steps, "planned_s": planned_s,
        "dropped_after_step": slow_after, "restored_after_step": fast_after, "sums": sums,
        "sums_until_raised": next((i + 1 for i, gap in enumerate(gaps) if gap > 2 * chosen.local_updates.steps), None),
    }  # fmt: skip


def _train(
    prefixes: list[list[str]], host: str, path: Path, steps: int, metrics: Path, *options: str
) -> list[dict[str, Any]]:
    """Run a plan on as many nodes as there are prefixes of their commands; return what is reported, of each step and at the end."""
    start = _starter(host, len(prefixes), path, "--steps", str(steps), *options)
    launchers = [start(node, prefix, metrics if node == 0 else None) for node, prefix in enumerate(prefixes)]
    if prefixes[0]:
        for launcher in launchers:
            put_first(launcher)
    for launcher in launchers:
        _, log = launcher.communicate()
        if launcher.returncode:
            raise SystemExit(log)
    return _records(metrics)


def _starter(
    host: str, num_nodes: int, path: Path, *options: str
) -> Callable[[int, list[str], Path | None], subprocess.Popen[str]]:
    """Return what starts the launcher of a node, for the first time or again."""
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # each node takes the machine for its own
    environment = os.environ | threads | {"MESHWRIGHT_SECRET": secrets.token_hex(32)}

    def start(node: int, prefix: list[str], metrics: Path | None) -> subprocess.Popen[str]:
        command = [
            *prefix,
            sys.executable,
            "-m",
            "meshwright.cli",
            "apply",
            str(path),
            *options,
            "--hang-timeout-s",
            "0",
        ]
        command += [] if metrics is None else ["--metrics", str(metrics)]
        if num_nodes > 1:
            command += ["--nnodes", str(num_nodes), "--node-rank", str(node), "--rdzv-endpoint", f"{host}:29400"]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    return start


def _records(metrics: Path) -> list[dict[str, Any]]:
    text = metrics.read_text() if metrics.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def lost(steps: int) -> dict[str, Any]:
    """Kill one of three regions, its launcher included, and start it again: what the others do meanwhile."""
    model = ModelSpec.from_hf({**SMALL, "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2})
    task = Workload(global_batch_size=6, seq_len=32, precision="fp32")
    chosen = with_sync_every(local_plan(model, small_regions(1e3, 1.0, "abc"), task, SyncLimits()), 4)
    with tempfile.TemporaryDirectory() as name:
        path, files = Path(name) / "plan.json", [Path(name) / f"{node}.jsonl" for node in range(4)]
        chosen.save(path)
        start = _starter("127.0.0.1", 3, path, "--steps", str(steps))
        launchers = [start(node, [], files[node]) for node in range(3)]

        def step() -> int:
            return max((record.get("step", 0) for record in _records(files[0])), default=0)

        def wait(step_idx: int) -> float:
            while step() < step_idx:
                time.sleep(0.02)
            return time.time()

        wait(steps // 20)
        killed = psutil.Process(launchers[1].pid)
        for process in [*killed.children(recursive=True), killed]:
            process.kill()
        launchers[1].communicate()
        killed_s, killed_step = time.time(), step()
        went_on_s = wait(killed_step + 3 * 4) - killed_s
        launchers[1] = start(1, [], files[3])
        for launcher in launchers:
            _, log = launcher.communicate()
            if launcher.returncode:
                raise SystemExit(log)
        done, again = ([r["step"] for r in _records(files[i]) if "step" in r] for i in (0, 3))
        events = [record for record in _records(files[0]) if "event" in record]
    return {
        "steps": steps, "killed_after_step": killed_step, "three_sums_later_s": went_on_s, "back_at_step": again[0],
        "steps_of_the_others_in_order": done == list(range(1, steps + 1)),
        "noticed_s": next(e["time_s"] for e in events if e["event"] == "lost") - killed_s,
        "causes": [cause for event in events for cause in event["causes"] if event["event"] in ("lost", "returned")],
    }  # fmt: skip


def loss(steps: int, every: list[int]) -> dict[str, Any]:
    """Train on Python's own sources, all together and as two islands; the mean loss of the last tenth of the steps."""
    model = ModelSpec.from_hf({**SMALL, "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2})
    limits = SyncLimits()
    task = Workload(global_batch_size=8, seq_len=32, precision="fp32")
    apart = local_plan(model, small_regions(20.0, 40.0), task, limits)
    assert apart.local_updates is not None
    results: dict[str, Any] = {
        "steps": steps,
        "tokens_per_step": task.tokens_per_step,
        "bits": apart.local_updates.bits,
    }
    with tempfile.TemporaryDirectory() as name:
        together = Path(name) / "together.json"
        plan(model, ClusterSpec.parse("local:1"), task).save(together)
        results["a sum each step"] = _last_loss([[]], together, steps, Path(name) / "together.jsonl")
        for steps_between in every:
            path = Path(name) / f"{steps_between}.json"
            with_sync_every(apart, steps_between).save(path)
            results[f"every {steps_between} steps"] = _last_loss([[], []], path, steps, path.with_suffix(".jsonl"))
            print(results, flush=True)
    return results


def _last_loss(prefixes: list[list[str]], path: Path, steps: int, metrics: Path) -> float:
    losses = [line["loss"] for line in _train(prefixes, "127.0.0.1", path, steps, metrics)[:-1]]
    return statistics.mean(losses[-max(1, steps // 10) :])


def main() -> None:
    """Measure one part and write its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("published").add_argument("runs", type=Path)
    of_jobs = parts.add_parser("jobs")
    of_jobs.add_argument("cases", type=Path)
    of_jobs.add_argument("pairs", type=Path)
    for name in ("link", "drop"):
        of_link = parts.add_parser(name)
        of_link.add_argument("--rate-mbit", type=float, default=20.0)
        of_link.add_argument("--round-trip-ms", type=float, default=40.0)
    parts.add_parser("lost").add_argument("--steps", type=int, default=2000)
    of_loss = parts.add_parser("loss")
    of_loss.add_argument("--steps", type=int, default=300)
    of_loss.add_argument("--every", type=int, nargs="+", default=[4, 16, 50])
    given = vars(parser.parse_args())
    part = given.pop("part")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[part] = {"published": published, "jobs": jobs, "link": link, "drop": drop, "lost": lost, "loss": loss}[
        part
    ](**given)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results[part], indent=1))


if __name__ == "__main__":
    main()
