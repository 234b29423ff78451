"""Ranks of a running job are killed: seconds until the next finished step, and how far losses are from a run without faults.

    python benchmarks/faults.py [--layout fsdp] [--faults 2:6:forward,1:9:sums] [--steps 14]

Four gloo ranks on this machine's cores train a tiny model under each layout; a fault is ``rank:step:place[:signal]``, step -1 for
the second call of the place. Places are functions that a rank's process patches so that it dies there. Without ``--faults`` every
layout loses one rank at each place in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from meshwright.planner.fallbacks import fallbacks
from meshwright.planner.plan import plan
from meshwright.profilers.local import measure_local
from meshwright.profilers.run.processes import serve_rank
from meshwright.schema import ClusterSpec, MeshwrightError, TrainingPlan

TINY = Path(__file__).resolve().parent.parent / "docs" / "examples" / "tiny"
LAYOUTS = {
    "replicas": "dp_replicate=4",
    "fsdp": "dp_shard=4,zero_stage=3",
    "pp": "pp=2,dp_replicate=2",
    "tp": "tp=2,dp_replicate=2",
}
PLACES = {
    "forward": ("runtime.parallel_model", "ParallelModel._inputs_and_targets"),
    "backward": ("runtime.parallel_model", "ParallelModel._finish_gradients"),
    "sums": ("runtime.parallel_model", "ParallelModel.add_over_ranks"),
    "update": ("runtime.training.train", "update"),
    "copy": ("runtime.supervision.copies", "PeerCopies.copy"),
    "save": ("runtime.training.checkpoint", "CheckpointWriter._publish"),
    "rebuild": ("runtime.supervision.survivor", "Survivor._build"),
    "reduce-scatter": ("", "foreach_reduce"),
}


@dataclass(frozen=True)
class Outcome:
    """What became of a job: its losses by step, the events, and the error that ended it."""

    losses: dict[int, float]
    events: list[dict[str, Any]]
    error: MeshwrightError | None


# --- the launcher ----------------------------------------------------------------------------------------------------


def small_plans(layout: str, cluster: ClusterSpec) -> tuple[TrainingPlan, tuple[TrainingPlan, ...]]:
    """Return the plan of a layout over a cluster's devices, and those for fewer."""
    fixed = {name: int(value) for name, value in (item.split("=") for item in layout.split(","))}
    main = plan(
        str(TINY), cluster, global_batch_size=12, seq_len=64, precision="fp32",
        fixed=fixed | {"micro_batch_size": 1, "recompute": "none"},
    )  # fmt: skip
    return main, fallbacks(main, cluster.num_devices - 1)[0]


def run(main: TrainingPlan, plans: tuple[TrainingPlan, ...], faults: str = "", **options: Any) -> Outcome:
    """Train under faults, in this process as the launcher."""
    from meshwright.runtime.job import launch as launching
    from meshwright.runtime.job import machine
    from meshwright.runtime.job.worker import Job
    from meshwright.runtime.training.options import TrainOptions, prepare_options

    machine.num_cores = lambda: main.layout.world_size  # ranks may share cores here
    launching.worker = SimpleNamespace(__name__=Path(__file__).stem)
    here = str(Path(__file__).parent)
    os.environ |= {"FAULTS": faults, "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryDirectory() as name:
        folder, files = Path(name), []
        main.save(folder / "plan.json")
        for each in plans:
            files.append(str(folder / f"{each.layout.world_size}.json"))
            each.save(files[-1])
        if "save" in faults:
            options |= {"checkpoint_dir": str(folder / "checkpoints"), "checkpoint_every": 3}
        chosen = prepare_options(main, TrainOptions(**options))
        job = Job(
            plan=str(folder / "plan.json"), options=chosen, report=str(folder / "report"), timeout_s=60,
            hang_timeout_s=5, fallbacks=tuple(files),
        )  # fmt: skip
        error = None
        try:
            launching.launch(main, job)
        except MeshwrightError as caught:
            error = caught
        lines = (folder / "report").read_text().splitlines() if (folder / "report").exists() else []
    records = [json.loads(line) for line in lines]
    losses = {record["step"]: record["loss"] for record in records if "step" in record}
    return Outcome(losses, [record for record in records if record.get("event") == "went on"], error)


def apart(outcome: Outcome, expected: Outcome) -> float:
    """Return the largest difference of the losses of a step, relative; infinite where a step is missing."""
    if outcome.losses.keys() != expected.losses.keys():
        return float("inf")
    return max(abs(outcome.losses[step] - loss) / loss for step, loss in expected.losses.items())


def main() -> None:
    """Print a line for each fault."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--layout", choices=LAYOUTS, action="append")
    parser.add_argument("--faults", action="append")
    parser.add_argument("--steps", type=int, default=14)
    options = parser.parse_args()
    if options.job:
        serve_rank(be_a_rank)
    cluster = measure_local(4)
    for name in options.layout or LAYOUTS:
        main_plan, plans = small_plans(LAYOUTS[name], cluster)
        expected = run(main_plan, plans, steps=options.steps)
        for faults in options.faults or [f"{i % 4}:6:{place}" for i, place in enumerate(PLACES) if place != "rebuild"]:
            outcome = run(main_plan, plans, faults, steps=options.steps)
            events = "; ".join(f"{event['seconds']:.2f} s, {event['layout']}" for event in outcome.events)
            print(
                f"{name} {faults}: {events}; losses {apart(outcome, expected):.1e} apart; {outcome.error or 'well'}",
                flush=True,
            )


# --- a rank ----------------------------------------------------------------------------------------------------------

RUNS: list[Any] = []


def dies(call: Callable[..., Any], step: int, number: int) -> Callable[..., Any]:
    """Return a function that ends this process in a step, or at its second call where the step is -1."""
    calls = 0

    def patched(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if (step == -1 and calls == 2) or (step > 0 and RUNS and RUNS[-1].steps + 1 == step):
            os.kill(os.getpid(), number)
        return call(*args, **kwargs)

    return patched


def own_faults() -> Iterator[tuple[str, int, int]]:
    """Yield place, step and signal of each fault of this rank."""
    for words in filter(None, os.environ["FAULTS"].split(",")):
        rank, step, place, *number = words.split(":")
        if rank == os.environ["RANK"]:
            yield place, int(step), int(number[0]) if number else signal.SIGKILL


def be_a_rank() -> None:
    """Do the worker's job, with faults."""
    from meshwright.runtime.job import worker
    from meshwright.runtime.training.train import TrainingRun

    begin = TrainingRun.__post_init__

    def noted(run: TrainingRun) -> None:
        begin(run)
        RUNS.append(run)

    TrainingRun.__post_init__ = noted  # type: ignore[method-assign]
    for place, step, number in own_faults():
        module, path = PLACES[place]
        torch_module = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
        owner: Any = import_module(f"meshwright.{module}" if module else torch_module)
        *outer, name = path.split(".")
        for each in outer:
            owner = getattr(owner, each)
        setattr(owner, name, dies(getattr(owner, name), step, number))
    worker.main()


if __name__ == "__main__":
    sys.argv[0] = str(Path(__file__))
    main()
