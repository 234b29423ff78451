"""Offloaded training as planned, against what one would switch on by hand: step time, peak, traffic.

    meshwright plan MODEL --cluster 1xH200-SXM-141GB --seq-len 4096 --global-batch-size 16 --offload auto --out plan.json
    python benchmarks/offload_run.py plan.json OUT.json      # on the GPU that the plan is for
    python benchmarks/offload_run.py --smoke OUT.json        # this machine's CPU, a model of 35 M parameters, a schedule by hand

Variants of the plan run one after another, each in a separate process:

| variant        | blocks             | optimizer states        | parameters             |
|----------------|--------------------|-------------------------|------------------------|
| planned        | as planned         | as planned              | as planned             |
| full recompute | recomputed         | of every layer on host  | on the device          |
| fsdp2          | recomputed         | with the parameters     | CPUOffloadPolicy, all  |
| fsdp2, saved   | on the device      | with the parameters     | CPUOffloadPolicy, all  |
| no offload     | as planned, saved  | on the device           | on the device          |

The last one is there to show that the model needs offloading at all. A variant that runs out of memory says so.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from apply_accuracy import SMALL
from meshwright.runtime.job.launch import launch
from meshwright.runtime.job.worker import Job
from meshwright.runtime.training.options import TrainOptions
from meshwright.schema import MeshwrightError, OffloadSchedule, TrainingPlan
from meshwright.schema.layout import LayoutRecompute
from meshwright.schema.offload import LayerOffload

STEPS = 8


def variant(
    plan: TrainingPlan,
    schedule: OffloadSchedule | None,
    *,
    recompute: LayoutRecompute | None = None,
    offloads: tuple[LayerOffload, ...] = (),
) -> TrainingPlan:
    """The plan with another schedule; ``recompute`` for all blocks, unset, as it was."""
    fields = {name: getattr(plan, name) for name in TrainingPlan.model_fields}
    stages = []
    for stage in plan.stages:
        change: dict[str, Any] = {"layer_offload": tuple(offloads[idx] for idx in stage.layer_idxs) if offloads else ()}
        if recompute is not None:
            change |= {"recompute": recompute, "layer_recompute": ()}
        fields_of_stage = {name: getattr(stage, name) for name in type(stage).model_fields}
        stages.append(type(stage)(**{**fields_of_stage, **change}))
    layout = {name: getattr(plan.layout, name) for name in type(plan.layout).model_fields}
    layout |= {"offload": "none" if schedule is None else "scheduled"}
    if recompute is not None:
        layout |= {"recompute": recompute}
    return TrainingPlan(
        **{**fields, "layout": type(plan.layout)(**layout), "stages": tuple(stages), "offload": schedule}
    )


def variants(plan: TrainingPlan) -> dict[str, TrainingPlan]:
    """By name."""
    layers = tuple(range(plan.model.num_layers))
    on_host = OffloadSchedule(host_optimizer_layers=layers)
    streamed = OffloadSchedule(streamed_parameter_layers=layers)
    return {
        "planned": plan,
        "full recompute": variant(plan, on_host, recompute="full"),
        "fsdp2": variant(plan, streamed, recompute="full"),
        "fsdp2, saved": variant(plan, streamed, recompute="none"),
        "no offload": variant(plan, None),
    }


def measure(plan: TrainingPlan, folder: Path, name: str, steps: int) -> dict[str, Any]:
    """Some steps of a plan: the last record, the traffic of the last step, or why there is none."""
    path, report = folder / f"{name}.json", folder / f"{name}.jsonl"
    plan.save(path)
    try:
        launch(plan, Job(plan=str(path), options=TrainOptions(steps=steps), report=str(report), hang_timeout_s=0))
    except MeshwrightError as error:
        return {"error": str(error).splitlines()[0]}
    records = [json.loads(line) for line in report.read_text().splitlines()]
    last = [record for record in records if "step" in record][-1]
    return {
        "step_time_s": records[-1]["measured"]["step_time_s"],
        "peak_allocated_bytes": records[-1]["measured"]["peak_allocated_bytes"],
        "loss": last["loss"],
        "offload": last.get("offload"),
    }


def smoke_plan(folder: Path) -> TrainingPlan:
    """A little of everything, on one rank of this machine's CPU."""
    (folder / "config.json").write_text(json.dumps(SMALL))
    command = [
        *(sys.executable, "-m", "meshwright.cli", "plan", str(folder / "config.json"), "--cluster", "local:1"),
        *("--seq-len", "128", "--global-batch-size", "4", "--precision", "fp32", "--fix", "recompute=none"),
        *("--out", str(folder / "plan.json")),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    plan = TrainingPlan.load(folder / "plan.json")
    blocks = tuple(range(1, plan.model.num_layers - 1))
    schedule = OffloadSchedule(host_optimizer_layers=(0, *blocks[:2]), streamed_optimizer_layers=blocks[2:4])
    offloads: tuple[LayerOffload, ...] = ("none", *("activations",) * (len(blocks) - 1), "none", "none")
    return variant(plan, schedule, offloads=offloads)


def compare(plan: TrainingPlan, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the goals ask: measured over planned, and how much faster than each other variant."""
    planned = results["planned"]
    if "error" in planned:
        return {}
    offload, estimate = planned["offload"], plan.estimate
    moved = offload["to_host_bytes"] + offload["to_device_bytes"]
    expected = offload["planned_to_host_bytes"] + offload["planned_to_device_bytes"]
    return {
        "step_time_ratio": planned["step_time_s"] / estimate.step_time_s,
        "peak_ratio": planned["peak_allocated_bytes"] / estimate.peak_allocated_bytes,
        "traffic_ratio": moved / expected if expected else None,
        "speedup_over": {
            name: result["step_time_s"] / planned["step_time_s"]
            for name, result in results.items()
            if name != "planned" and "error" not in result
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", nargs="?", type=Path, help="made with --offload")
    parser.add_argument("output", type=Path)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        plan = smoke_plan(folder) if arguments.smoke else TrainingPlan.load(arguments.plan)
        results: dict[str, dict[str, Any]] = {}
        for name, changed in variants(plan).items():
            results[name] = measure(changed, folder, name, arguments.steps)
            print(f"{name:<15}{json.dumps(results[name])}", flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    summary = {"device": device, "torch": version("torch"), "model": plan.model.name, "layout": str(plan.layout)}
    comparison = compare(plan, results)
    print(json.dumps(comparison, indent=2))
    document = {**summary, "steps": arguments.steps, "results": results, "comparison": comparison}
    arguments.output.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
