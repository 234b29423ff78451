"""Options of `plan --infer` beside papers' figures: drives that attend, and small devices over a slow network.

    python benchmarks/generation_options.py

Drives (InstInfer, arXiv:2409.04992): OPT-13B in fp16 on an RTX A6000 of 48 GB, 96 GB of host memory, prompts of 1,024 tokens and
as many generated; a drive has eight flash channels of 1.4 GB/s and an interface of PCIe 3 x4. The abstract says up to 11.1 times
FlexGen's throughput; the other ratios are those of its section 6, second hand. Weights lie on the device, keys and values on the
drives, one batch: all of them attended there, or copied up from a drive that reads 7 GB/s (its SSD's data sheet) or 2 GB/s (what
FlexGen's authors had of theirs), or from the host. Sparse attention of an eighth (r and k of SparQ) reads 3/16 of the keys and
values: the drive's rate over that.

Small devices (TPI-LLM, arXiv:2410.00531, table 1): docs/examples/edge-devices.toml, one sequence of 16 tokens (the paper does not
say how many), fp32, eight devices, weights in memory or read in every pass through a window of two layers.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import numpy as np
from meshwright.cost_models.hardware.all_reduce import ALGORITHMS, network_of, seconds_by_algorithm
from meshwright.planner import plan
from meshwright.planner.request import OffloadRequest, PlanRequest
from meshwright.planner.tasks.generation import GenerationProblem
from meshwright.schema import ClusterSpec, ModelSpec
from meshwright.schema.task import Generation
from meshwright.schema.units import GIB
from meshwright.solvers.generation.instance import WAYS, GenerationInstance, GenerationPlacement, busy_s, resident_bytes

FLASH, INTERFACE = 8 * 1.4e9, 3.5e9
"""Bytes per second of a drive's channels, and of its interface: PCIe 3 x4 less its protocol (3.94e9 on the line)."""

SPARSE = 16 / 3
"""Keys and values over those that SparQ reads: an eighth of the width of all keys, then an eighth of both."""

DRIVES = (
    # case, figure, what is compared: (way of keys and values, sequences, drives, rate of storage, times DRIVE) over another
    ("drives attend over FlexGen, 7 GB/s", 6.85, ("drive_attended", 256, 1, INTERFACE, 1.0), ("storage_copied", 64, 1, 7e9, 1.0)),
    ("drives attend over FlexGen, 2 GB/s", 6.85, ("drive_attended", 256, 1, INTERFACE, 1.0), ("storage_copied", 64, 1, 2e9, 1.0)),
    ("the same, sparse, 2 GB/s", 11.1, ("drive_attended", 256, 1, INTERFACE, SPARSE), ("storage_copied", 64, 1, 2e9, 1.0)),
    ("sparse over dense", 2.08, ("drive_attended", 256, 1, INTERFACE, SPARSE), ("drive_attended", 256, 1, INTERFACE, 1.0)),
    ("20 drives over one", 8.99, ("drive_attended", 256, 20, INTERFACE, 1.0), ("drive_attended", 256, 1, INTERFACE, 1.0)),
    ("drives attend over host copies", 1.046, ("drive_attended", 256, 1, INTERFACE, 1.0), ("host_copied", 16, 1, 2e9, 1.0)),
)  # fmt: skip

EDGE = Path(__file__).parents[1] / "docs" / "examples" / "edge-devices.toml"

DEVICES = (
    # model; first token, seconds a token, GB a device: all weights in memory, then read in every pass; None: out of memory
    ("llama-2-7b", (3.1, 1.2, 4.5), (3.0, 2.6, 1.7)),
    ("llama-2-13b", (5.1, 1.9, 8.1), (5.8, 2.9, 2.1)),
    ("llama-3.1-8b", (4.5, 1.5, 8.5), (4.5, 4.3, 5.4)),
    ("llama-2-70b", None, (29.4, 26.1, 3.1)),
    ("llama-3.1-70b", None, (32.9, 29.9, 11.3)),
)


def instance(
    model: ModelSpec, cluster: ClusterSpec, task: Generation, batch: int, offload: OffloadRequest, tp: int = 1
) -> GenerationInstance:
    """Return the problem of one rank with one batch."""
    problem = GenerationProblem(PlanRequest(model, cluster, task, {"batch_size": batch, "tp": tp}, offload=offload))
    return problem.instance(next(shape for shape in problem.shapes if shape.batch_size == batch and shape.streams))


def tokens_per_s(way: str, batch: int, drives: int, storage: float, sparse: float) -> float:
    """Return what OPT-13B generates with its weights on the device and its keys and values in one way."""
    group = ClusterSpec.parse("1xRTX-A6000-48GB").groups[0].replace(storage_bytes_per_s=drives * storage)
    cluster = ClusterSpec.parse("1xRTX-A6000-48GB").replace(groups=(group,))
    offload = OffloadRequest(storage_bytes=4e12 * drives, drive_attention_bytes_per_s=drives * FLASH * sparse)
    task = Generation(prompt_len=1024, generate_len=1024, precision="fp16")
    i = instance(ModelSpec.named("opt-13b"), cluster, task, batch, offload)
    layers = np.stack([i.counts, 0 * i.counts, 0 * i.counts], axis=1)
    cache = np.array([float(name == way) for name in WAYS])
    place = GenerationPlacement(layers=layers, cache=cache, hidden=np.array([1.0, 0.0, 0.0]))
    return batch * task.generate_len / float(i.passes @ busy_s(i, place).max(axis=0))


def drive_rows() -> list[tuple[str, float, float, float, float]]:
    """Return for each of DRIVES the case, the published ratio, tokens a second of both, and their ratio."""
    rows = []
    for case, published, *cases in DRIVES:
        rates = [tokens_per_s(*each) for each in cases]
        rows.append((case, published, rates[0], rates[1], rates[0] / rates[1]))
    return rows


def edge_pass(name: str, *, reads: bool, tp: int = 8) -> tuple[float, float, float]:
    """Return seconds of the first token and of a later one, and GB of a device and what is reserved: weights in memory, or read."""
    task = Generation(prompt_len=16, generate_len=32, precision="fp32", across_nodes=tp > 1)
    offload = OffloadRequest(storage_bytes=400 * GIB)
    cluster = ClusterSpec.parse(str(EDGE))
    i = instance(ModelSpec.named(name), cluster, task, 1, offload, tp)
    away = i.counts * i.may_store * reads
    place = GenerationPlacement(
        layers=np.stack([i.counts - away, 0 * away, away], axis=1), cache=np.eye(len(WAYS))[0], hidden=np.eye(3)[0]
    )
    seconds = busy_s(i, place).max(axis=0)
    resident = float(resident_bytes(i, place)[0]) - (0.0 if reads else i.capacity.buffer)
    return float(seconds[0]), float(seconds[-1]), (resident + cluster.reserved_bytes) / 1e9


def main() -> None:
    """Print both tables, the all-reduces of one row, and what the planner does with 3 and with 8 GB a device."""
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    print("OPT-13B on RTX A6000                     published  tokens/s  over  model")
    for case, published, ours, other, ratio in drive_rows():
        print(f"{case:40} {published:9}  {ours:8.1f}  {other:5.1f}  {ratio:5.2f}")
    print("\neight small devices       first token     s a token          GB a device: published, model")
    for name, in_memory, read in DEVICES:
        for published, reads in ((in_memory, False), (read, True)):
            if published is not None:
                model = edge_pass(name, reads=reads)
                pairs = "  ".join(f"{theirs:5} {ours:6.2f}" for theirs, ours in zip(published, model, strict=True))
                print(f"{name:14} {'read' if reads else 'in memory':10} {pairs}")
    print(
        "\none device alone, reading: "
        + ", ".join(f"{n} {edge_pass(n, reads=True, tp=1)[1]:.1f} s" for n, *_ in DEVICES)
    )
    cluster = ClusterSpec.parse(str(EDGE))
    seconds = seconds_by_algorithm(np.array([4.0, 32768.0, 524288.0]), 8, network_of(cluster.levels[0], cluster))
    print("\nms of 4 bytes, a row of 32 kB, sixteen rows")
    for algorithm, row in zip(ALGORITHMS, seconds, strict=True):
        print(f"{algorithm:9} " + "  ".join(f"{1e3 * s:7.1f}" for s in row))
    task = Generation(prompt_len=16, generate_len=32, precision="fp32", across_nodes=True)
    for gigabytes in (3.1, 8):
        device = cluster.groups[0].device.replace(memory_bytes=round(gigabytes * 1e9))
        small = cluster.replace(groups=(cluster.groups[0].replace(device=device),))
        for model in ("llama-2-7b", "llama-2-70b"):
            made = plan(
                model, small, task, fixed={"tp": 8, "batch_size": 1}, offload=OffloadRequest(storage_bytes=400 * GIB)
            )
            kept = made.model.num_layers - len(made.storage_layers)
            each = made.estimate.phases[-1].seconds_per_pass
            size = made.estimate.device_bytes / 1e9
            print(f"planned, {gigabytes} GB a device: {model} {each:.2f} s a token, {kept} layers stay, {size:.2f} GB")


if __name__ == "__main__":
    main()
