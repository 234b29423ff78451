"""What one GPU says of the predictions: products, layers, copies next to products, and entire steps, before and after a profile.

    python benchmarks/h200/run.py OUT.json [--cluster 1xH200-SXM-141GB] [--model llama-3.1-8b] [--seq-len 4096] [--budget-s 540]
    python benchmarks/h200/run.py OUT.json --tiny     # the same on this machine's CPU with little of everything

Measures a profile (next to OUT), then reports the mean of |predicted / measured - 1|: of products from the data sheet only and
with the first 100 and 500 measured points (scored on all later ones), of each layer of the model from the data sheet only, of sets
of streams that run at once from the shipped slow-downs; host rates; and `apply_accuracy.py`'s training steps (``--steps``).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from apply_accuracy import GPU_CASES, Case, run_case
from meshwright.cost_models.coefficients import Scenario, packaged_coefficients
from meshwright.cost_models.hardware.machine import gemm_rates
from meshwright.cost_models.hardware.streams import STREAMS, interference, together_s
from meshwright.cost_models.layer.layer import within_layer_cost
from meshwright.cost_models.layer.operators import CostInputs
from meshwright.cost_models.learned.calibration import calibrate
from meshwright.cost_models.learned.kernels import predict
from meshwright.profilers.profiled_cluster import cluster_from_profile
from meshwright.schema import ClusterSpec, Layout, Profile, Workload
from meshwright.schema.cluster import Device
from meshwright.schema.layout_table import LayoutTable
from meshwright.schema.profile import LayerPoint, MatmulPoint, OverlapPoint
from meshwright.schema.task import Precision

NUM_POINTS = (0, 100, 500)
TINY_CASE = Case("small", 1, 1, 32, "micro_batch_size=1")


def product_errors(points: Sequence[MatmulPoint], device: Device, precision: Precision) -> dict[str, float | None]:
    """Return the error by the number of points the model was given; None where too few remain to score."""
    m, n, k, seconds = np.array([(p.m, p.n, p.k, p.time_s) for p in points if p.which == "forward"], dtype=float).T
    sheet = gemm_rates(device, precision)._replace(sustained_ratio=1.0)
    errors: dict[str, float | None] = {}
    scored = slice(min(max(NUM_POINTS), len(m) // 2), None)
    for number in NUM_POINTS:
        if number > scored.start:
            errors[str(number)] = None
            continue
        rates = calibrate(m[:number], n[:number], k[:number], seconds[:number], sheet)
        errors[str(number)] = _mean_error(predict(m[scored], n[scored], k[scored], rates), seconds[scored])
    return errors


def layer_errors(points: Sequence[LayerPoint], cluster: ClusterSpec, precision: Precision) -> list[dict[str, object]]:
    """Return predicted over measured seconds of the layers that are not cut over tp."""
    rows = []
    for point in points:
        if point.tp > 1:
            continue
        layout = Layout(micro_batch_size=point.micro_batch_size, recompute=point.recompute)
        layouts = LayoutTable.from_layouts([layout], point.micro_batch_size)
        workload = Workload(seq_len=point.seq_len, global_batch_size=point.micro_batch_size, precision=precision)
        scenario = Scenario.build(workload, cluster)
        inputs = CostInputs(hidden_dim=point.hidden_dim, layouts=layouts, scenario=scenario)
        cost = within_layer_cost(point.layer, inputs)
        backward = float((cost.backward_s + cost.recompute_s)[0])
        predicted = float(cost.forward_s[0]) if point.direction == "forward" else backward
        fields = {"kind": point.layer.kind, "recompute": point.recompute, "direction": point.direction}
        ratio = predicted / point.time_s
        rows.append({**fields, "micro_batch_size": point.micro_batch_size, "measured_s": point.time_s, "ratio": ratio})
    return rows


def overlap_errors(points: Sequence[OverlapPoint], memory_bytes_per_s: float) -> list[dict[str, object]]:
    """Return seconds of sets of streams on one device, predicted from isolated streams, over measured."""
    rows = []
    for point in points:
        isolated_s, traffic = np.zeros(len(STREAMS)), np.zeros(len(STREAMS))
        for stream, seconds in zip(point.streams, point.alone_s, strict=True):
            isolated_s[STREAMS.index(stream)] = seconds
            if stream in ("to_device", "to_host"):
                traffic[STREAMS.index(stream)] = point.copy_bytes / seconds / memory_bytes_per_s
        slowdown = interference(packaged_coefficients(), traffic)
        ratio = float(together_s(isolated_s, slowdown)) / point.together_s
        rows.append({"streams": point.streams, "copy_bytes": point.copy_bytes, "ratio": ratio})
    return rows


def host_rates(profile: Profile) -> list[dict[str, object]]:
    """Return bytes/s of copies and parameters/s of AdamW on the host."""
    copies = [
        {**p.model_dump(exclude={"time_s", "spread"}), "bytes_per_s": p.size_bytes / p.time_s}
        for p in profile.host_copies
    ]
    return [*copies, *({"adam_parameters_per_s": p.num_parameters / p.time_s} for p in profile.cpu_adam)]


def _mean_error(predicted: np.ndarray, measured: np.ndarray) -> float:
    return float(np.abs(predicted / measured - 1).mean())


def measured_profile(options: Namespace, path: Path) -> Profile:
    """Measure the profile of this machine."""
    command = [sys.executable, "-m", "meshwright.cli", "profile", "--ranks", "1", "--out", str(path)]
    model = ["--model", options.model, "--seq-len", str(options.seq_len), "--budget-s", str(options.budget_s)]
    subprocess.run([*command, *model, "--json"], check=True, stdout=subprocess.DEVNULL)
    return Profile.load(path)


def main() -> None:
    """Measure, compare, and write after each part."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cluster", default="1xH200-SXM-141GB")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument("--no-steps", action="store_true", help="leave the training steps out")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        options.cluster, options.model, options.seq_len = "local:1", "smollm2-135m", 32
        options.budget_s = min(options.budget_s, 30.0)
    profile = measured_profile(options, options.out.with_suffix(".profile.json"))
    described = cluster_from_profile(profile) if options.tiny else ClusterSpec.parse(options.cluster)
    cluster = described.replace(profile=None)
    dtype, precision = ("fp32", "fp32") if profile.machine.backend == "gloo" else ("bf16", "bf16-mixed")
    result: dict[str, object] = {
        "machine": profile.machine.model_dump(),
        "provenance": profile.provenance.model_dump(),
        "created": profile.created,
        "parts": [part.model_dump() for part in profile.parts],
        "products": product_errors(
            [p for p in profile.matmuls if p.dtype == dtype], cluster.groups[0].device, precision
        ),
        "layers": layer_errors(profile.layers, cluster, precision),
        "overlap": overlap_errors(profile.overlaps, cluster.weakest_device.memory_bandwidth_bytes_per_s),
        "host": host_rates(profile),
        "allocator": profile.allocator.model_dump() if profile.allocator else None,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    steps = []
    for case in () if options.no_steps else (TINY_CASE,) if options.tiny else GPU_CASES:
        with tempfile.TemporaryDirectory() as folder:
            steps.append(run_case(case, options.cluster, Path(folder)))
        options.out.write_text(json.dumps({**result, "steps": steps}, indent=1) + "\n")
    shown = {name: result[name] for name in ("products", "layers", "overlap")}
    print(json.dumps({**shown, "steps": [step.get("ratio", step.get("error")) for step in steps]}, indent=1))


if __name__ == "__main__":
    main()
