"""Plans over regions and local updates: published runs, jobs over regions, a slow link of this machine, and losses.

    python benchmarks/regions.py published RUNS.csv
    python benchmarks/regions.py jobs CASES.json PAIRS.csv
    python benchmarks/regions.py link [--rate-mbit 20] [--round-trip-ms 40]     as root, on Linux: two network namespaces
    python benchmarks/regions.py drop                                           the same, of which a tenth is left in the middle
    python benchmarks/regions.py loss [--steps 300] [--every 4 16 50]

Each part replaces its results in regions.json next to this file. RUNS.csv has columns run, where, inner_steps, inner_s,
outer_sync_s and compute_utilisation_percent; CASES.json a list of {name, model, global_batch_size, seq_len, groups: [{region,
nodes, gpus_per_node, gpu}]}; PAIRS.csv what docs/regions.md says.

The slow link is a kernel's token bucket (tc tbf) on each end, and a delay: a relay between two TUN devices, which needs no netem.
It goes before all other work of the machine (SCHED_FIFO), and the ranks have most of the cores (nice -20, of their session
where the kernel groups processes by it), one thread each: figures are meant to be those of a machine of its own.
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import itertools
import json
import os
import secrets
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
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

PACKET, PAYLOAD = 1500, 1448
"""Bytes of a packet, and those without the headers of IPv4 and TCP with timestamps."""

Ends = list[tuple[str, str]]
"""Network namespaces, and the device of the link in each."""

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


def small_regions(rate_mbit: float, round_trip_ms: float) -> ClusterSpec:
    """Two regions of one CPU rank of this machine each, with the throughput of one connection, as tables of pairs have it."""
    rate_bytes_per_s, round_trip_s = PAYLOAD / PACKET * rate_mbit * 1e6 / 8, round_trip_ms / 1e3
    local = ClusterSpec.parse("local:1")
    links = tuple(
        RegionLink(src=a, dst=b, line_bytes_per_s=rate_bytes_per_s, round_trip_s=round_trip_s) for a, b in ("ab", "ba")
    )
    groups = tuple(NodeGroup(**{**dict(local.groups[0]), "zone": zone, "levels": local.levels}) for zone in "ab")
    outer = {"link": joining_link(links, "ab"), "domain_size": 2}
    return ClusterSpec(name="two-regions", groups=groups, levels=(outer,), region_links=links, profile=local.profile)


def local_plan(model: ModelSpec, cluster: ClusterSpec, task: Workload, limits: SyncLimits) -> TrainingPlan:
    """Return the plan that both regions train by themselves."""
    request = PlanRequest.create(model, cluster, task, local_updates=limits)
    joined = IslandProblem(request, limits, plan_as_requested).joined((0, 1))
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
            before = _sent(*ends[0])
            lines = _train(_commands(ends), "10.77.9.1", path, steps, Path(name) / f"{kind}.jsonl")
            sent, packets = (b - a for a, b in zip(before, _sent(*ends[0]), strict=True))
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
                    subprocess.run(
                        ["tc", "-n", namespace, "qdisc", "change", "dev", device, *_bucket(rate)], check=True
                    )

        thread = threading.Thread(target=change)
        thread.start()
        try:
            lines = _train(_commands(ends), "10.77.9.1", path, 90, metrics, "--sync-every", "auto")
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


def _commands(ends: Ends) -> list[list[str]]:
    return [["ip", "netns", "exec", namespace] for namespace, _ in ends]


def _train(
    prefixes: list[list[str]], host: str, path: Path, steps: int, metrics: Path, *options: str
) -> list[dict[str, Any]]:
    """Run a plan on as many nodes as there are prefixes of their commands; return what is reported, of each step and at the end."""
    launchers, threads = [], {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # each node takes the machine for its own
    environment = os.environ | threads | {"MESHWRIGHT_SECRET": secrets.token_hex(32)}
    for node, prefix in enumerate(prefixes):
        command = [*prefix, sys.executable, "-m", "meshwright.cli", "apply", str(path), "--steps", str(steps), *options]
        command += ["--hang-timeout-s", "0", *(["--metrics", str(metrics)] if node == 0 else [])]
        if len(prefixes) > 1:
            command += ["--nnodes", str(len(prefixes)), "--node-rank", str(node), "--rdzv-endpoint", f"{host}:29400"]
        launchers.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        )
    if prefixes[0]:
        for launcher in launchers:
            _put_first(launcher)
    for launcher in launchers:
        _, log = launcher.communicate()
        if launcher.returncode:
            raise SystemExit(log)
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def _put_first(launcher: subprocess.Popen[str]) -> None:
    """Let the rank of a launcher have most of a core, once it has started."""
    while launcher.poll() is None:
        for rank in psutil.Process(launcher.pid).children(recursive=True):
            if os.getsid(rank.pid) == rank.pid:
                os.setpriority(os.PRIO_PROCESS, rank.pid, -20)
                Path(f"/proc/{rank.pid}/autogroup").write_text("-20")
                return
        time.sleep(0.02)


def _sent(namespace: str, device: str) -> tuple[int, int]:
    shown = subprocess.run(
        ["ip", "-n", namespace, "-s", "-j", "link", "show", device], capture_output=True, check=True, text=True
    )
    counted = json.loads(shown.stdout)[0]["stats64"]["tx"]
    return counted["bytes"], counted["packets"]


@contextmanager
def slow_link(rate_mbit: float, round_trip_ms: float) -> Iterator[Ends]:
    """Yield two network namespaces with a link between them."""
    names = (f"mw{os.getpid()}a", f"mw{os.getpid()}b")
    devices = (f"mw{os.getpid()}t0", f"mw{os.getpid()}t1")
    ends, over = [], threading.Event()

    def ip(*words: str) -> None:
        subprocess.run(words, check=True)

    try:
        for i, (name, device) in enumerate(zip(names, devices, strict=True)):
            ip("ip", "netns", "add", name)
            ends.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
            fcntl.ioctl(
                ends[-1], 0x400454CA, struct.pack("16sH", device.encode(), 0x0001 | 0x1000)
            )  # TUNSETIFF, IFF_TUN, NO_PI
            ip("ip", "link", "set", device, "netns", name)
            ip("ip", "-n", name, "addr", "add", f"10.77.9.{i + 1}/24", "dev", device)
            ip("ip", "-n", name, "link", "set", "lo", "up")
            ip("ip", "-n", name, "link", "set", device, "up")
            ip("tc", "-n", name, "qdisc", "add", "dev", device, *_bucket(rate_mbit))
        relay = threading.Thread(target=_relay, args=(ends, round_trip_ms / 2e3, over))
        relay.start()
        try:
            yield list(zip(names, devices, strict=True))
        finally:
            over.set()
            relay.join()
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)
        for end in ends:
            os.close(end)


def _bucket(rate_mbit: float) -> tuple[str, ...]:
    return "root", "tbf", "rate", f"{rate_mbit}mbit", "burst", "16kb", "latency", "400ms"


def _relay(ends: list[int], one_way_s: float, over: threading.Event) -> None:
    """Hand every packet of an end to the other one after a time, whatever else the machine does."""
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(2))  # of this thread
    waiting: deque[tuple[float, int, bytes]] = deque()
    while not over.is_set():
        next_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.05
        for end in select.select(ends, [], [], next_s)[0]:
            packet = os.read(end, 65536)
            waiting.append((time.monotonic() + one_way_s, ends[1 - ends.index(end)], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, other, packet = waiting.popleft()
            os.write(other, packet)


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
    of_loss = parts.add_parser("loss")
    of_loss.add_argument("--steps", type=int, default=300)
    of_loss.add_argument("--every", type=int, nargs="+", default=[4, 16, 50])
    given = vars(parser.parse_args())
    part = given.pop("part")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[part] = {"published": published, "jobs": jobs, "link": link, "drop": drop, "loss": loss}[part](**given)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results[part], indent=1))


if __name__ == "__main__":
    main()
