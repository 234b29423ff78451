"""What copies of states for a peer take of a training: predicted by the planner, by the run itself, and measured.

    python benchmarks/peer_copies.py OUT.json [--steps 600] [--every N ...]

Four gloo ranks train a tiny model, sharded over all of them, so that each part of the states is on one rank alone. Blocks of steps
with copies, as often as the run decides, and without any take turns; a block's time is from the end of a step to the end of its
last one, copying and waiting included. The share is the median over pairs of neighbours of with / without - 1, in seconds of the
clock and of the processors of all ranks, which other work on the machine moves less.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any

from faults import LAYOUTS, small_plans
from meshwright.cost_models.goodput import MTBF_HOURS_PER_DEVICE
from meshwright.planner.spot import going_on
from meshwright.profilers.local import measure_local
from meshwright.profilers.run.processes import serve_rank

RANKS, WARM_UP, BLOCK = 4, 20, 4


def train(steps: int, every: int | None) -> dict[str, Any]:
    """Train, and return what copies took."""
    from meshwright.runtime.job import JobEvent, apply, launch, machine
    from meshwright.runtime.training.options import TrainOptions

    main_plan, plans = small_plans(LAYOUTS["fsdp"], measure_local(RANKS))
    machine.num_cores = lambda: RANKS  # type: ignore[assignment]
    launch.worker = SimpleNamespace(__name__=Path(__file__).stem)  # type: ignore[assignment]
    here, events = str(Path(__file__).parent), list[JobEvent]()
    with tempfile.TemporaryDirectory() as name:
        os.environ |= {"ENDS": name, "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
        options = TrainOptions(steps=steps, copy_every=every)
        apply(main_plan, options, fallbacks=plans, on_fault="continue", on_event=events.append)
        ends = [json.loads((Path(name) / f"{rank}").read_text()) for rank in range(RANKS)]
    decided = next((event for event in events if event.event == "copies"), None)
    chosen = (decided.every if decided else every) or 1
    block = BLOCK * chosen
    answer: dict[str, Any] = {
        "every": chosen,
        "step_s": median(b[0] - a[0] for a, b in pairwise(ends[0][WARM_UP:])),
        "predicted_by_plan": going_on(main_plan, MTBF_HOURS_PER_DEVICE * 3600 / RANKS).copies,
        "predicted_by_run": None if decided is None else decided.share,
    }
    for name, column in (("clock", 0), ("processors", 1)):
        blocks = [
            sum(of_rank[start + block][column] - of_rank[start][column] for of_rank in ends)
            for start in range(WARM_UP - 2, steps - block - 1, block)
        ]
        shares = [(b / a if i % 2 else a / b) - 1 for i, (a, b) in enumerate(pairwise(blocks))]
        answer[name] = {"share": median(shares), "quartiles": quantiles(shares, n=4)[::2], "pairs": len(shares)}
    return answer


def be_a_rank() -> None:
    """Do the worker's job; in every other block of steps no copies are made."""
    from meshwright.runtime.job import worker
    from meshwright.runtime.supervision.copies import PeerCopies
    from meshwright.runtime.supervision.survivor import Survivor
    from meshwright.runtime.training.train import TrainingRun

    copy, after_step, finish, ends = (
        PeerCopies.copy,
        Survivor.after_step,
        TrainingRun.finish,
        list[tuple[float, float]](),
    )

    def copied_at_times(copies: PeerCopies, progress: Any, step_time_s: float) -> None:
        step = progress.step - WARM_UP
        if step < 0 or step // (BLOCK * copies._every) % 2 == 0:
            copy(copies, progress, step_time_s)

    def noted(survivor: Survivor) -> None:
        after_step(survivor)
        ends.append((time.perf_counter(), time.process_time()))

    def written(run: TrainingRun) -> None:
        (Path(os.environ["ENDS"]) / os.environ["RANK"]).write_text(json.dumps(ends))
        finish(run)

    PeerCopies.copy, Survivor.after_step, TrainingRun.finish = copied_at_times, noted, written  # type: ignore[method-assign]
    worker.main()


def main() -> None:
    """Write and print the shares."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, nargs="*", default=(None,))
    options = parser.parse_args()
    if options.out.endswith("job.json"):
        serve_rank(be_a_rank)
    answers = [train(options.steps, every) for every in options.every]
    Path(options.out).write_text(json.dumps(answers, indent=1) + "\n")
    print(json.dumps(answers, indent=1))


if __name__ == "__main__":
    sys.argv[0] = str(Path(__file__))
    main()
