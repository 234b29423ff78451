"""Two ranks, one half as fast: a step with even shares of the batch, and with shares by speed (`TrainingPlan.dealt_by`).

    python benchmarks/uneven_shares.py [--steps 5] [--ms 100]

Two gloo ranks train a tiny model; each sequence takes the first rank ``--ms`` longer than its arithmetic, the second twice that (it
sleeps, so that two ranks on one core do not slow each other down). Printed are seconds of a step, and how far gradients of the
first step lie apart.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from meshwright.planner import plan
from meshwright.runtime import parallelize
from meshwright.runtime.models.layers import full_tensor
from meshwright.schema import TrainingPlan

TINY = Path(__file__).resolve().parent.parent / "docs" / "examples" / "tiny"
LAYOUTS = ("dp_replicate=2", "dp_shard=2,zero_stage=1", "dp_shard=2,zero_stage=2", "dp_shard=2,zero_stage=3")
BATCH = 24


def run(rank: int, folder: str, plans: list[TrainingPlan], ms: float, steps: int) -> None:
    """Train under each plan; keep the seconds of the shortest step (the machine may be shared) and the gradients of the first."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = []
    for each in plans:
        model = parallelize(None, each, device=torch.device("cpu"), seed=3)

        def wait(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            time.sleep(len(args[0]) * ms / 1e3 * (1 + rank))

        model.module.register_forward_pre_hook(wait)
        generator, seconds, gradients = torch.Generator().manual_seed(1), [], {}
        for step in range(steps):
            shape = (BATCH, each.workload.seq_len + 1)
            tokens = torch.randint(0, each.model.vocab_size, shape, generator=generator)
            dist.barrier()
            start = time.perf_counter()
            model.forward_backward(tokens[model.share.rows.start : model.share.rows.stop])
            seconds.append(time.perf_counter() - start)
            if step == 0:
                gradients = {name: full_tensor(p.grad).clone() for name, p in model.named_parameters()}
            model.module.zero_grad()
        results.append((min(seconds[1:]), gradients))
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.barrier()
    os._exit(0)


def main() -> None:
    """Print a line for each layout."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--ms", type=float, default=100.0)
    options = parser.parse_args()
    for layout in LAYOUTS:
        fixed = {name: int(value) for name, value in (item.split("=") for item in layout.split(","))}
        even = plan(
            str(TINY), "2xA100-SXM-40GB", global_batch_size=BATCH, seq_len=32, precision="fp32",
            fixed=fixed | {"micro_batch_size": 2, "recompute": "none"},
        )  # fmt: skip
        plans = [even, even.dealt_by([1.0, 2.0])]
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run, (folder, plans, options.ms, options.steps), nprocs=2)
            (even_s, expected), (dealt_s, gradients) = torch.load(Path(folder) / "0.pt")
        apart = max(float((gradients[name] - expected[name]).abs().max()) for name in expected)
        print(
            f"{layout}: even {even.batch_shares} {even_s:.3f} s, by speed {plans[1].batch_shares} {dealt_s:.3f} s: "
            f"{even_s / dealt_s:.2f} x, gradients {apart:.1e} apart",
            flush=True,
        )


if __name__ == "__main__":
    main()
