"""Faults at random against small jobs for some minutes; the losses of every step are compared with those of runs without faults.

    python benchmarks/chaos.py OUT.json [--minutes 10] [--seed 1] [--steps 200] [--layout fsdp] [--mean-s 6]

Episodes follow each other: `meshwright apply` trains a tiny model on four gloo ranks under a layout drawn at random, going on after
deaths, with dead ranks started anew, checkpoints, and restarts from them. Meanwhile faults come at random times:

    kill     SIGKILL to a rank            kill two   to two at once
    stop     SIGSTOP to a rank            pause      SIGCONT follows within four seconds
    cut      a connection of a rank is closed, though nobody died
    disk     no rank may write more than 64 KiB to a file from then on, as on a disk that is full
    notice   SIGTERM to the launcher      launcher   SIGKILL to the launcher

After the last three the command is given again with --resume, as whoever runs the job would, until the last step is done. Of each
episode is noted: its faults with the last step that was told before, how far the losses of its steps, also of those done twice, are
from the reference, whether the job came to its end, what it said where it ended before, and which of its processes were still
there afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from faults import LAYOUTS, small_plans
from meshwright.profilers.local import measure_local
from meshwright.schema import TrainingPlan

SAME = 1e-5
"""Relative difference of losses within which sums in another order lie."""

RANKS, MOST_STARTS, TIMEOUT_S = 4, 25, 240.0
FAULTS = {"kill": 6, "kill two": 2, "stop": 1, "pause": 2, "cut": 2, "disk": 1, "notice": 1, "launcher": 1}
"""How often each fault comes, next to the others."""

_PIDFD_GETFD = 438
"""The number of a Linux system call, the same on all machines."""

COMMAND = "from meshwright.runtime.job import machine; machine.num_cores = lambda: 4; from meshwright.cli.main import main; main()"
"""`meshwright`, where ranks may share cores."""


class Episode:
    """One job, started again where a fault ends it."""

    def __init__(self, plan: Path, folder: Path, steps: int, generator: random.Random, mean_s: float) -> None:
        self._generator, self._mean_s, self._metrics, self._steps = generator, mean_s, folder / "metrics", steps
        self.faults, self.messages = list[tuple[str, int]](), list[str]()
        self._words = [
            "apply", str(plan), "--steps", str(steps), "--metrics", str(self._metrics), "--on-fault", "continue",
            "--restart-ranks", "1000", "--max-restarts", "3", "--checkpoint-dir", str(folder / "checkpoints"),
            "--checkpoint-every", "20", "--hang-timeout-s", "5", "--collective-timeout-s", "60",
        ]  # fmt: skip
        self._seen, self.starts, self.remained, self.exit_code = dict[int, psutil.Process](), 0, 0, -1

    def run(self, *, until_s: float) -> None:
        """Train to the end under faults, of which none comes after a time of the monotonic clock."""
        while self.exit_code and self.last_step < self._steps and self.starts < MOST_STARTS:
            self.starts += 1
            resume = ["--resume"] if self.starts > 1 else []
            with tempfile.TemporaryFile("w+") as errors:
                launcher = subprocess.Popen(
                    [sys.executable, "-c", COMMAND, *self._words, *resume], stdout=subprocess.DEVNULL, stderr=errors
                )
                self._disturb(launcher, until_s)
                self.exit_code = launcher.wait()
                errors.seek(0)
                if self.exit_code:
                    lines = [line for line in errors.read().splitlines() if line.startswith("error: ")]
                    self.messages.append(f"{self.exit_code}: {'; '.join(lines)}")
            _, alive = psutil.wait_procs(list(self._seen.values()), timeout=10)
            self.remained += len(alive)
            self._seen.clear()
            if not self.faults and self.exit_code:
                return

    def _disturb(self, launcher: subprocess.Popen[Any], until_s: float) -> None:
        """Draw faults until the launcher ends."""
        due_s = time.monotonic() + self._generator.expovariate(1 / self._mean_s)
        end_s = time.monotonic() + TIMEOUT_S
        while launcher.poll() is None:
            time.sleep(0.05)
            ranks = self._ranks(launcher.pid)
            if time.monotonic() > end_s:
                launcher.kill()
                self.faults.append(("time is over", self.last_step))
            elif ranks and due_s < time.monotonic() < until_s:
                kind = self._generator.choices(list(FAULTS), weights=list(FAULTS.values()))[0]
                self.faults.append((kind, self.last_step))
                self._strike(kind, launcher, ranks)
                due_s = time.monotonic() + self._generator.expovariate(1 / self._mean_s)

    def _ranks(self, launcher: int) -> list[psutil.Process]:
        try:
            ranks = [
                each for each in psutil.Process(launcher).children() if any("job.worker" in w for w in each.cmdline())
            ]
        except psutil.Error:
            return []
        self._seen |= {rank.pid: rank for rank in ranks}
        return ranks

    def _strike(self, kind: str, launcher: subprocess.Popen[Any], ranks: list[psutil.Process]) -> None:
        struck = self._generator.sample(ranks, min(2 if kind == "kill two" else 1, len(ranks)))
        try:
            for rank in ranks if kind == "disk" else ():
                rank.rlimit(psutil.RLIMIT_FSIZE, (65_536, resource.RLIM_INFINITY))
            for rank in struck if kind in ("kill", "kill two", "stop", "pause") else ():
                rank.send_signal(signal.SIGSTOP if kind in ("stop", "pause") else signal.SIGKILL)
            if kind == "pause":
                threading.Timer(self._generator.uniform(0.5, 4), resume, struck).start()
            if kind == "cut":
                cut(struck[0], self._generator)
        except (psutil.Error, OSError):
            return
        if kind in ("notice", "launcher"):
            launcher.send_signal(signal.SIGTERM if kind == "notice" else signal.SIGKILL)

    def losses(self) -> list[tuple[int, float]]:
        """Return the steps that were reported, again where they were done again."""
        lines = self._metrics.read_text().splitlines() if self._metrics.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("}")]
        return [(record["step"], record["loss"]) for record in records if "step" in record]

    @property
    def last_step(self) -> int:
        """The step that was reported last; 0 before the first."""
        return next((step for step, _ in reversed(self.losses())), 0)


def resume(rank: psutil.Process) -> None:
    """Let a suspended rank go on, where it is still there."""
    with contextlib.suppress(psutil.NoSuchProcess):
        rank.send_signal(signal.SIGCONT)


def cut(rank: psutil.Process, generator: random.Random) -> None:
    """Close one of a rank's connections, as a network that forgets it would."""
    connections = [each for each in rank.net_connections("tcp") if each.raddr]
    if not connections:
        return
    rank_descriptor = os.pidfd_open(rank.pid)
    number = ctypes.CDLL(None).syscall(_PIDFD_GETFD, rank_descriptor, generator.choice(connections).fd, 0)
    os.close(rank_descriptor)
    if number >= 0:
        with socket.socket(fileno=number) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def train(
    main: TrainingPlan, steps: int, seed: int, mean_s: float, *, until_s: float
) -> tuple[Episode, list[tuple[int, float]]]:
    """Run one episode; return it and its losses. With ``until_s`` in the past there are no faults."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        plan = Path(name) / "plan.json"
        main.save(plan)
        episode = Episode(plan, Path(name), steps, random.Random(seed), mean_s)
        episode.run(until_s=until_s)
        return episode, episode.losses()


def main() -> None:
    """Write and print what became of each episode."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--mean-s", type=float, default=6.0, help="seconds between faults on average")
    parser.add_argument("--layout", choices=LAYOUTS, action="append")
    options = parser.parse_args()
    cluster, generator, episodes = measure_local(RANKS), random.Random(options.seed), list[dict[str, Any]]()
    plans = {}
    for name in options.layout or LAYOUTS:
        plan, fewer = small_plans(LAYOUTS[name], cluster)
        plans[name] = plan.replace(fallbacks=fewer)
    expected = dict[str, dict[int, float]]()
    end_s = time.monotonic() + 60 * options.minutes
    while time.monotonic() < end_s:
        name = generator.choice(list(plans))
        if name not in expected:
            expected[name] = dict(train(plans[name], options.steps, 0, options.mean_s, until_s=0.0)[1])
        seed = generator.randrange(10**6)
        episode, losses = train(plans[name], options.steps, seed, options.mean_s, until_s=end_s)
        reference = expected[name]
        episodes.append(
            {
                "layout": name,
                "faults": Counter(kind for kind, _ in episode.faults),
                "faults after steps": episode.faults,
                "starts": episode.starts,
                "reached the end": {step for step, _ in losses} == reference.keys(),
                "steps done": len(losses),
                "losses apart": max((abs(loss / reference[step] - 1) for step, loss in losses), default=0.0),
                "steps apart": sorted({step for step, loss in losses if abs(loss / reference[step] - 1) > SAME}),
                "messages": episode.messages,
                "processes that remained": episode.remained,
            }
        )
        print(json.dumps(episodes[-1]), flush=True)
    total = {
        "episodes": len(episodes),
        "faults": sum((Counter(each["faults"]) for each in episodes), Counter[str]()),
        "reached the end": sum(each["reached the end"] for each in episodes),
        "losses apart": max(each["losses apart"] for each in episodes),
        "processes that remained": sum(each["processes that remained"] for each in episodes),
    }
    print(json.dumps(total))
    Path(options.out).write_text(json.dumps({"total": total, "episodes": episodes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
