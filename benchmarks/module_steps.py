"""Predicted against measured steps of modules, and what choosing by the prediction costs.

    python benchmarks/module_steps.py OUT.json [name ...] [--rounds 2] [--steps 8] [--profile FILE]

Each model of the zoo (tests/parity/zoo.py), and some that are wide enough to compute for long (`WIDE`), is profiled and planned
for one and for two ranks of this machine in every kind of layout that is offered; then each runs steps of `forward_backward`,
clipping and AdamW on gloo, layouts in turn in rounds. Both sides count the seconds of processors, one thread a rank, which other
work on the machine inflates least: layers are timed by `time_layers`, other rates are those of `meshwright profile --cpu-seconds
--parts compute,links`, and a step is the median of the rank that computes longest. Waiting for another rank is in neither: of a
pipeline the predicted bubble is taken off, and counts again on both sides where layouts are compared. ``regret`` is how much
longer the layout with the least prediction takes than the quickest of those for two ranks. ``--counted`` predicts without timing
layers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "parity"))

import torch
import torch.distributed as dist
import zoo
from harness import Case, Outcome, run_group
from meshwright.planner import plan
from meshwright.profilers import profile_module, time_layers
from meshwright.profilers.machine import cpu_rank_environment
from meshwright.profilers.profiled_cluster import profiled_cluster
from meshwright.runtime import build_optimizer, clip_gradients, parallelize
from meshwright.schema import ClusterSpec, MeshwrightError, Profile, TrainingPlan, Workload
from meshwright.schema.cluster import joined_levels
from torch import nn

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "replicas": {"dp_replicate": 2, "dp_shard": 1, "recompute": "none"},
    "zero 3": {"dp_shard": 2, "zero_stage": 3, "recompute": "none"},
    "zero 3, recompute": {"dp_shard": 2, "zero_stage": 3, "recompute": "full"},
    "tp 2": {"tp": 2, "sequence_parallel": False, "recompute": "none"},
    "pp 2": {"pp": 2, "schedule": "1f1b", "num_model_chunks": 1, "recompute": "none"},
}
WARM_UP = 2


@dataclass
class Steps(Outcome):
    """Processor seconds of the steps of a rank."""

    seconds: list[float] = field(default_factory=list)


def _bert() -> tuple[nn.Module, zoo.Inputs]:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(num_hidden_layers=4, hidden_size=512, intermediate_size=2048, **_HEADS)
    ), _tokens()


def _gpt2() -> tuple[nn.Module, zoo.Inputs]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=2048, n_embd=512, n_layer=4, n_head=8, bos_token_id=None, eos_token_id=None)
    return GPT2LMHeadModel(config), _tokens()


def _llama() -> tuple[nn.Module, zoo.Inputs]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, **_HEADS}
    return LlamaForCausalLM(LlamaConfig(bos_token_id=None, eos_token_id=None, **sizes)), _tokens()


def _t5() -> tuple[nn.Module, zoo.Inputs]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=2048, d_model=512, d_kv=64, d_ff=2048, num_layers=3, num_heads=8)
    tokens = _tokens()["input_ids"]
    return T5ForConditionalGeneration(config), {"input_ids": tokens, "decoder_input_ids": tokens[:, :64]}


def _vit() -> tuple[nn.Module, zoo.Inputs]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=4, hidden_size=512, intermediate_size=2048, num_attention_heads=8, image_size=160
    )
    return ViTForImageClassification(config), {"pixel_values": torch.randn(zoo.BATCH, 3, 160, 160)}


def _resnet() -> tuple[nn.Module, zoo.Inputs]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=64, hidden_sizes=[64, 128, 256], depths=[2, 2, 2], layer_type="basic")
    return ResNetForImageClassification(config), {"pixel_values": torch.randn(zoo.BATCH, 3, 96, 96)}


_HEADS = {"vocab_size": 2048, "num_attention_heads": 8, "pad_token_id": None}


def _tokens() -> zoo.Inputs:
    return {"input_ids": torch.randint(0, 2048, (zoo.BATCH, 128))}


WIDE: dict[str, Callable[[], tuple[nn.Module, zoo.Inputs]]] = {
    "wide bert": _bert, "wide gpt2": _gpt2, "wide llama": _llama, "wide t5": _t5, "wide vit": _vit, "wide resnet": _resnet,
}  # fmt: skip


def build(name: str) -> tuple[nn.Module, zoo.Inputs]:
    """Return a model with the same weights on every rank, without dropout, and its inputs."""
    if name not in WIDE:
        return zoo.build(name)
    torch.manual_seed(0)
    model, inputs = WIDE[name]()
    return model.eval(), inputs


def planned(name: str, profile: Profile, *, counted: bool) -> dict[str, TrainingPlan]:
    """Return the plans of a model, by layout; those that are refused are not there."""
    model, inputs = build(name)
    batch = inputs if hasattr(model, "config") else list(inputs.values())
    spec = profile_module(model, batch, tp=(2,))
    assert spec.traced_len is not None
    if not counted:
        points = time_layers(model, batch, spec, cpu_seconds=profile.provenance.cpu_seconds)
        profile = profile.replace(layers=points, content_sha256="").sealed()
    workload = Workload(seq_len=spec.traced_len, global_batch_size=zoo.BATCH, precision="fp32")
    clusters, plans = clusters_of(profile), dict[str, TrainingPlan]()
    for layout, fixed in LAYOUTS.items():
        cluster = clusters[1 if layout == "one rank" else 2]
        try:
            plans[layout] = plan(spec, cluster, workload, fixed=fixed, time_limit_s=600.0)
        except MeshwrightError as error:
            print(f"{name}, {layout}: {str(error).splitlines()[0]}", flush=True)
    return plans


def run_steps(case: Case, folder: Path) -> Steps:
    """Run one rank's steps."""
    found, num_steps = case.plan, case.num_steps
    module, inputs = build(case.module)
    model = parallelize(module, found, device=torch.device("cpu"), batch_loss=lambda output, _: zoo.loss_of(output))
    optimizer = build_optimizer(model, learning_rate=1e-5)
    mine = {name: tensor.chunk(found.layout.dp)[model.mesh.dp_rank] for name, tensor in inputs.items()}
    batch = mine if hasattr(module, "config") else list(mine.values())
    steps = Steps()
    for step in range(WARM_UP + num_steps):
        dist.barrier()
        start = time.process_time()
        optimizer.zero_grad()
        model.forward_backward(batch)
        clip_gradients(model, 1.0)
        optimizer.step()
        if step >= WARM_UP:
            steps.seconds.append(time.process_time() - start)
    return steps


def measured(name: str, plans: Mapping[str, TrainingPlan], num_rounds: int, num_steps: int) -> dict[str, float]:
    """Return the seconds of a step of each layout of a model."""
    os.environ.update(cpu_rank_environment())  # as `apply` starts its ranks
    results = defaultdict[str, list[float]](list)
    for size in (1, 2):
        cases = [
            Case(f"{layout}: {idx}", found, module=name, run=run_steps, num_steps=num_steps)
            for idx in range(num_rounds)
            for layout, found in plans.items()
            if found.layout.world_size == size
        ]
        with tempfile.TemporaryDirectory() as folder:
            outcomes = run_group(size, cases, Path(folder), timeout_s=7200.0) if cases else {}
        for case in cases:
            of_ranks = [outcome.seconds for outcome in outcomes[case.name] if isinstance(outcome, Steps)]
            results[case.name.split(": ")[0]] += max(of_ranks, key=median)
    return {layout: median(seconds) for layout, seconds in results.items()}


def row_of(found: TrainingPlan, measured_s: float) -> dict[str, Any]:
    """Return prediction and measurement of a layout, milliseconds."""
    parts = found.estimate.breakdown_s
    predicted_s = found.estimate.step_time_s - parts.bubble
    return {
        "predicted": round(1e3 * predicted_s, 2), "measured": round(1e3 * measured_s, 2),
        "error": round(predicted_s / measured_s - 1, 3), "micro_batches": found.num_microbatches,
        "parts": {key: round(1e3 * value, 2) for key, value in parts.model_dump().items() if value},
    }  # fmt: skip


def summary(rows: Mapping[str, Mapping[str, Mapping[str, Any]]], names: Collection[str]) -> dict[str, Any]:
    """Return the errors of the layouts and the regret of the choice over these models."""
    errors = defaultdict[str, list[float]](list)
    regrets = dict[str, float]()
    for name in names:
        for layout, row in rows[name].items():
            errors[layout].append(abs(row["error"]))
            errors["all"].append(abs(row["error"]))
        two = [row for layout, row in rows[name].items() if layout != "one rank"]
        if len(two) > 1:
            pairs = [
                tuple(row[key] + row["parts"].get("bubble", 0.0) for key in ("predicted", "measured")) for row in two
            ]
            regrets[name] = round(min(pairs)[1] / min(ms for _, ms in pairs) - 1, 3)
    return {
        "models": len(names), "rows": len(errors["all"]),
        "median error": {layout: round(median(values), 3) for layout, values in errors.items()},
        "mean regret": round(fmean(regrets.values()), 3) if regrets else None,
        "median regret": round(median(regrets.values()), 3) if regrets else None,
        "largest regrets": dict(sorted(regrets.items(), key=lambda item: -item[1])[:5]),
    }  # fmt: skip


def main() -> None:
    """Plan, run and write the table."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("names", nargs="*", help="all models where none is given; rows of others in OUT.json stay")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="of a layout in a round")
    parser.add_argument("--profile", type=Path, help="of this machine with --cpu-seconds; measured where none is given")
    parser.add_argument("--counted", action="store_true", help="predict by counts of operators, no layer is timed")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = json.loads(given.out.read_text())["rows"] if given.out.exists() else {}
    profile = profile_of(given.profile)
    for name in given.names or [*WIDE, *zoo.MODELS]:
        plans = planned(name, profile, counted=given.counted)
        rows[name] = {
            layout: row_of(plans[layout], seconds)
            for layout, seconds in measured(name, plans, given.rounds, given.steps).items()
        }
        print(name, json.dumps({layout: row["error"] for layout, row in rows[name].items()}), flush=True)
        of_kind = {"wide": rows.keys() & WIDE.keys(), "small": rows.keys() - WIDE.keys()}
        totals = {kind: summary(rows, of) for kind, of in of_kind.items() if of}
        given.out.write_text(json.dumps({"summary": totals, "rows": rows}, indent=1) + "\n")
    print(json.dumps(totals, indent=1))


def profile_of(path: Path | None) -> Profile:
    """Return a profile of two ranks of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        found = path or Path(folder) / "profile.json"
        if path is None:
            options = (
                "--cpu-seconds",
                "--ranks",
                "2",
                "--parts",
                "compute,links",
                "--budget-s",
                "120",
                "--out",
                str(found),
            )
            subprocess.run([sys.executable, "-m", "meshwright.cli", "profile", *options], check=True)
        return Profile.load(found)


def clusters_of(profile: Profile) -> dict[int, ClusterSpec]:
    """Return one and two ranks of the machine of a profile."""
    pair = profiled_cluster(profile)
    group = pair.groups[0].replace(devices_per_node=1)
    return {1: pair.replace(groups=(group,), levels=joined_levels(pair.levels, 1)), 2: pair}


if __name__ == "__main__":
    main()
