"""Wrong gradients of some ranks under each mean: final losses, and CPU seconds of a step.

    python benchmarks/robust_sum.py OUT.json [--steps 300] [--ranks 8] [--means flag trimmed]

Ranks of gloo on this machine's cores train one tiny model after the other, on Python's own sources; bad ranks send -10 times their
gradients, or normal noise ten times as long. Losses are means of the last ten steps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import wraps
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from meshwright.planner.plan import plan
from meshwright.profilers.local import measure_local
from meshwright.runtime import data_parallel
from meshwright.runtime.parallelize_model import parallelize
from meshwright.runtime.robust_sum import apply_robust_sum
from meshwright.runtime.training.optimizer import build_optimizer, take_step
from meshwright.runtime.training.samples import open_batches
from meshwright.schema import TrainingPlan

TINY = Path(__file__).resolve().parent.parent / "docs" / "examples" / "tiny"
MEANS, FAULTS, NUM_BAD = ("flag", "trimmed", "median", "plain"), ("-10 x", "noise"), (1, 2)


def cases(means: Sequence[str]) -> list[tuple[str, str, int]]:
    """Return mean, fault and number of bad ranks of each run; the plain mean without faults is the first."""
    return [(mean, "none", 0) for mean in ("plain", *means)] + list(product(means, FAULTS, NUM_BAD))


def be_a_rank(path: str, steps: int, out: str, *means: str) -> None:
    """Train every case; the first rank writes what came out."""
    dist.init_process_group("gloo")
    the_plan, reduce, results = TrainingPlan.load(path), data_parallel._reduce, list[dict[str, Any]]()
    bad: dict[str, Any] = {}

    @wraps(reduce)  # DDP looks at the annotations
    def faulty_reduce(state: Any, bucket: Any) -> Any:
        gradients = bucket.buffer()
        if dist.get_rank() >= dist.get_world_size() - bad["ranks"]:
            if bad["fault"] == "-10 x":
                gradients.mul_(-10)
            else:
                noise = torch.randn_like(gradients)
                gradients.copy_(noise * (10 * gradients.norm() / noise.norm()))
        return reduce(state, bucket)

    data_parallel._reduce = faulty_reduce  # type: ignore[assignment]
    for mean, fault, num_bad in cases(means):
        torch.manual_seed(dist.get_rank())
        bad |= {"fault": fault, "ranks": num_bad}
        model = parallelize(None, the_plan, device=torch.device("cpu"))
        if mean != "plain":
            apply_robust_sum(model, mean)  # type: ignore[arg-type]
        optimizer = build_optimizer(model, learning_rate=3e-3)
        batches, _ = open_batches(the_plan, (), seed=0, rows=model.share.rows)
        losses, cpu_s = [], []
        for step in range(steps):
            start_s = time.process_time()
            sums = take_step(
                model, optimizer, batches.batch(step * the_plan.workload.global_batch_size), max_grad_norm=1.0
            )
            cpu_s.append(time.process_time() - start_s)
            losses.append(sums[0].item())
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, median(cpu_s))
        results.append(
            {"mean": mean, "fault": fault, "bad": num_bad, "loss": fmean(losses[-10:]), "cpu_ms": 1e3 * fmean(everyone)}
        )
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results, indent=1) + "\n")
    dist.destroy_process_group()


def main() -> None:
    """Print a line for each case, against the plain mean without faults."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--means", nargs="+", choices=MEANS, default=MEANS)
    options = parser.parse_args()
    from meshwright.runtime.job import machine
    from meshwright.runtime.job.launch import launch
    from meshwright.runtime.job.worker import Job

    machine.num_cores = lambda: options.ranks  # ranks share cores here
    fixed = {"dp_replicate": options.ranks, "micro_batch_size": 2, "recompute": "none", "zero_stage": 0}
    main_plan = plan(
        str(TINY), measure_local(options.ranks), global_batch_size=2 * options.ranks, seq_len=64, precision="fp32",
        fixed=fixed,
    )  # fmt: skip
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        main_plan.save(path)
        script = (str(Path(__file__).resolve()), "rank", str(path), str(options.steps), str(options.out.resolve()))
        script = (*script, *options.means)
        launch(main_plan, Job(plan=str(path), script=script))
    results = json.loads(options.out.read_text())
    clean = results[0]
    for each in results:
        print(
            f"{each['mean']:8} {each['bad']} bad, {each['fault']:6} loss {each['loss']:8.3f} "
            f"({each['loss'] / clean['loss'] - 1:+7.1%})  {each['cpu_ms']:6.1f} ms CPU ({each['cpu_ms'] / clean['cpu_ms']:.2f} x)"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        be_a_rank(sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
    else:
        main()
