"""`--checkpoint-every auto` against fixed intervals: a run whose first rank is killed at times, and goes back to its checkpoints.

    python benchmarks/checkpoint_interval.py OUT.json [--steps 300] [--every 4 8 16 32] [--seeds 1 2]
    python benchmarks/checkpoint_interval.py OUT.json --only-simulate

Kills come after so many executed steps, steps that are done again included, with an exponential distribution of a mean of 60; all
intervals have the same kills. What a run took is what it executed, in medians over all runs, so that other work on the machine
moves all of them alike:

    seconds = executed steps x step + saves x save

What one schedule of kills says of two intervals is luck to some percent. So 400 schedules are also simulated, with those medians
and the formulas of the automatic one (`expected_mtbf_s`, `steps_to_save`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any

from meshwright.cost_models.goodput import steps_to_save
from meshwright.planner.plan import plan
from meshwright.profilers.local import measure_local
from meshwright.profilers.run.processes import serve_rank
from meshwright.runtime.training.save_schedule import FIRST_STEPS, expected_mtbf_s
from meshwright.schema import TrainingPlan

TINY = Path(__file__).resolve().parent.parent / "docs" / "examples" / "tiny"
MEAN_STEPS, RANKS = 60, 2
FIXED = (2, 4, 8, 16, 32, 64)
Every = int | str


def kills(seed: int, steps: int) -> list[int]:
    """Return after how many executed steps the first rank is killed, further than any run gets."""
    generator, times = random.Random(seed), [0.0]
    while times[-1] < 20 * steps:
        times.append(times[-1] + generator.expovariate(1 / MEAN_STEPS))
    return sorted({max(round(each), 1) for each in times[1:]})


# --- runs ------------------------------------------------------------------------------------------------------------


def train(main: TrainingPlan, steps: int, every: Every, seed: int, mtbf_hours: float | None) -> dict[str, Any]:
    """Train under kills; return what was executed."""
    from meshwright.runtime.job import JobEvent, apply, launch, machine
    from meshwright.runtime.training.options import TrainOptions

    machine.num_cores = lambda: RANKS  # type: ignore[assignment]
    launch.worker = SimpleNamespace(__name__=Path(__file__).stem)  # type: ignore[assignment]
    here, events, records = str(Path(__file__).parent), list[JobEvent](), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        places = {"KILLS": ",".join(map(str, kills(seed, steps))), "EXECUTED": f"{name}/executed"}
        os.environ |= places | {"PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
        options = TrainOptions(
            steps=steps, checkpoint_dir=f"{name}/checkpoints", checkpoint_every=every, mtbf_hours_per_device=mtbf_hours
        )
        apply(main, options, max_restarts=1000, on_event=events.append, on_record=records.append)
        executed = Path(places["EXECUTED"]).stat().st_size
    return {
        "every": every,
        "given": mtbf_hours is not None,
        "seed": seed,
        "executed": executed,
        "restarts": sum(event.event == "restarted" for event in events),
        "saves_s": [event.seconds for event in events if event.event == "checkpoint"],
        "saved_at": [event.after_step for event in events if event.event == "checkpoint"],
        "step_s": median(record["step_time_s"] for record in records if "step" in record),
    }


def be_a_rank() -> None:
    """Do the worker's job; the first rank counts the steps that it executes, and kills itself where its time has come."""
    from meshwright.runtime.job import worker
    from meshwright.runtime.training.train import TrainingRun

    times, file, step = (
        [int(text) for text in os.environ["KILLS"].split(",")],
        Path(os.environ["EXECUTED"]),
        TrainingRun.step,
    )
    killed = file.with_suffix(".killed")
    file.touch()
    killed.touch()

    def counted(run: TrainingRun, tokens: Any) -> None:
        if os.environ["RANK"] == "0":
            if file.stat().st_size >= times[killed.stat().st_size]:
                with killed.open("ab") as note:
                    note.write(b".")
                os.kill(os.getpid(), signal.SIGKILL)
            with file.open("ab") as note:
                note.write(b".")
        step(run, tokens)

    TrainingRun.step = counted  # type: ignore[method-assign]
    worker.main()


# --- simulated -------------------------------------------------------------------------------------------------------


def simulated(every: Every, seed: int, steps: int, costs: dict[str, float], mtbf_s: float | None) -> float:
    """Return the seconds of a run whose steps, saves and restarts take the same each time.

    Args:
        mtbf_s: that ``auto`` is given.
    """
    step_s, save_s = costs["step_s"], costs["save_s"]
    times, executed, done, saved, num_saves, faults = kills(seed, steps), 0, 0, 0, 0, 0
    first = due = FIRST_STEPS

    def interval() -> int:
        seconds = executed * step_s + num_saves * save_s
        expected_s = expected_mtbf_s(mtbf_s, faults=faults, seconds=seconds, devices=RANKS)
        return steps_to_save(max(steps - saved, 1), step_s=step_s, mtbf_s=expected_s, save_s=save_s)

    while done < steps:
        if executed >= times[faults]:
            faults, done = faults + 1, saved
            first = due = saved + FIRST_STEPS
            continue
        executed, done = executed + 1, done + 1
        if done == first and num_saves > 1:
            due = max(saved + interval(), done)
        if done == steps or (done >= due if every == "auto" else done % int(every) == 0):
            num_saves, saved = num_saves + 1, done
            due = saved + interval()
    return executed * step_s + num_saves * save_s


def simulation(steps: int, costs: dict[str, float], fixed: Sequence[int]) -> dict[str, float]:
    """Return mean seconds over 400 schedules: of each interval, of auto that is given the mean and that is not."""
    mean_s = MEAN_STEPS * costs["step_s"]
    cases: dict[str, tuple[Every, float | None]] = {str(every): (every, mean_s) for every in fixed}
    cases |= {"auto, given": ("auto", mean_s), "auto, not given": ("auto", None)}
    return {
        name: fmean(simulated(every, seed, steps, costs, mtbf_s) for seed in range(400))
        for name, (every, mtbf_s) in cases.items()
    }


def main() -> None:
    """Write and print what each interval took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, nargs="*", default=(4, 8, 16, 32))
    parser.add_argument("--seeds", type=int, nargs="*", default=(1,))
    parser.add_argument("--only-simulate", action="store_true")
    options = parser.parse_args()
    if options.out.endswith("job.json"):
        serve_rank(be_a_rank)
    path, runs = Path(options.out), list[dict[str, Any]]()
    if options.only_simulate:
        runs = json.loads(path.read_text())["runs"]
    else:
        main_plan = plan(
            str(TINY), measure_local(RANKS), global_batch_size=8, seq_len=64, precision="fp32",
            fixed={"dp_replicate": RANKS, "micro_batch_size": 2, "recompute": "none"},
        )  # fmt: skip
        step_s = train(main_plan, 30, 30, 0, None)["step_s"]
        given = MEAN_STEPS * step_s / 3600 * RANKS
        cases = [*((every, None) for every in options.every), ("auto", given), ("auto", None)]
        for seed in options.seeds:
            for every, mtbf_hours in cases:
                runs.append(train(main_plan, options.steps, every, seed, mtbf_hours))
                print({name: value for name, value in runs[-1].items() if name != "saves_s"}, flush=True)
    costs = {
        "step_s": median(run["step_s"] for run in runs),
        "save_s": median(seconds for run in runs for seconds in run["saves_s"]),
    }
    for run in runs:
        run["seconds"] = run["executed"] * costs["step_s"] + len(run["saves_s"]) * costs["save_s"]
        name = (
            f"auto, {'given' if run['given'] else 'not given'}" if run["every"] == "auto" else f"every {run['every']}"
        )
        print(
            f"seed {run['seed']}, {name}: {run['seconds']:.2f} s; {run['executed']} steps, {len(run['saves_s'])} saves"
        )
    means = simulation(options.steps, costs, FIXED)
    best = min(means[str(every)] for every in FIXED)
    for name, seconds in means.items():
        print(f"simulated, {name}: {seconds:.2f} s, {seconds / best - 1:+.1%} against the best fixed one")
    path.write_text(json.dumps({"costs": costs, "runs": runs, "simulated_s": means}, indent=1) + "\n")


if __name__ == "__main__":
    sys.argv[0] = str(Path(__file__))
    main()
