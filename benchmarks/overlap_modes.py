"""Half-batches over tp (``tp_halves``) and gathers ahead: predictions against rehearsals, plans with and without, what they cost.

    python benchmarks/overlap_modes.py rehearsed | plans | prefetch

``rehearsed``: four blocks of Llama 3.1 70B, entire and by half-batches: the step of the closed form, and of the runtime's operators
and collectives laid out over streams (`meshwright rehearse`). ``plans``: the fastest plan with the choice and without, and the CPU
seconds of either search, the least of three. ``prefetch``: the most that gathers any number of blocks ahead could save.
"""

from __future__ import annotations

import argparse
import itertools
import time

import numpy as np
from meshwright.cost_models.stage.table import CostTable
from meshwright.planner import plan, rehearse
from meshwright.planner.plan import estimate
from meshwright.schema import ClusterSpec, Layout, ModelSpec, Workload
from meshwright.schema.layout_table import LayoutTable

NUM_BLOCKS, REPEATS = 4, 3
REHEARSED = ((8, "8xH100-SXM-80GB"), (4, "8xH100-SXM-80GB"), (4, "8xL40S"))
PLANS = (
    ("llama-3.1-8b", "8xL40S", 64, 4096), ("llama-3.1-8b", "8xH100-SXM-80GB", 64, 4096),
    ("qwen3-30b-a3b", "8xH100-SXM-80GB", 64, 4096), ("llama-3.1-70b", "4x8xH100-SXM-80GB/ib400", 64, 8192),
    ("llama-3.1-70b", "8x8xH100-SXM-80GB/ib400", 32, 4096), ("llama-3.1-70b", "8x8xL40S/ib200", 64, 4096),
    ("llama-3.1-405b", "16x8xH100-SXM-80GB/ib400", 128, 4096), ("llama-3.1-405b", "128x8xH100-SXM-80GB/ib400", 512, 8192),
)  # fmt: skip
SHARDED = (
    ("llama-3.2-1b", "2x8xH100-SXM-80GB/eth100", 32, 1024), ("llama-3.2-1b", "8xL40S", 16, 1024),
    ("llama-3.1-8b", "4x8xH100-SXM-80GB/ib200", 32, 4096), ("llama-3.1-70b", "8x8xH100-SXM-80GB/ib400", 64, 4096),
    ("deepseek-v2-lite", "2x8xH100-SXM-80GB/ib200", 16, 4096), ("deepseek-v3", "64x8xH100-SXM-80GB/ib400", 512, 4096),
    ("mixtral-8x7b", "4x8xH100-SXM-80GB/ib400", 32, 4096), ("qwen3-30b-a3b", "2x8xH100-SXM-80GB/ib400", 32, 4096),
)  # fmt: skip


def rehearsed() -> None:
    """Print steps with and without half-batches, rehearsed and predicted, and how far their ratios are apart."""
    named = ModelSpec.named("llama-3.1-70b")
    model = named.replace(layers=tuple(run.replace(count=min(run.count, NUM_BLOCKS)) for run in named.layers))
    gaps = []
    for (tp, cluster), recompute, splits in itertools.product(REHEARSED, ("none", "selective", "full"), (True, False)):
        seconds = []
        for by_halves in (False, True):
            fixed = Layout(
                tp=tp, dp_replicate=8 // tp, recompute=recompute, micro_batch_size=4, sequence_parallel=splits, tp_halves=by_halves
            )  # fmt: skip
            made = plan(model, cluster, global_batch_size=32, seq_len=4096, fixed=fixed.model_dump())
            result = rehearse(made.replace(unhalved_layers=()), ranks=(0,))
            seconds.append((sum(result.time_parts.values()), made.estimate.step_time_s))
        (one, other), (one_halved, other_halved) = seconds
        gaps.append(abs(other_halved / other / (one_halved / one) - 1))
        print(
            f"tp {tp} {cluster:16} {recompute:9} {'split' if splits else 'whole'} sequence: "
            f"rehearsed {one:.3f} to {one_halved:.3f} s ({one_halved / one - 1:+.1%}), "
            f"predicted {other:.3f} to {other_halved:.3f} ({other_halved / other - 1:+.1%})"
        )
    print(f"ratios apart by {np.mean(gaps):.1%} on average, at most {max(gaps):.1%}")


def plans() -> None:
    """Print what the choice changes and takes."""
    total = np.zeros(2)
    for name, cluster, batch, seq_len in PLANS:
        request = ModelSpec.named(name), ClusterSpec.parse(cluster), Workload(seq_len=seq_len, global_batch_size=batch)
        cpu_s, made = np.full(2, np.inf), {}
        for _, with_it in itertools.product(range(REPEATS + 1), (0, 1)):  # the first fills caches
            begun = time.process_time()
            made[with_it] = plan(*request, fixed=None if with_it else {"tp_halves": False}, prefer="fastest")
            cpu_s[with_it] = min(cpu_s[with_it], time.process_time() - begun)
        total += cpu_s
        without, chosen = made[0].estimate.step_time_s, made[1].estimate.step_time_s
        print(
            f"{name} {cluster} {batch}: {without:.3f} to {chosen:.3f} s ({chosen / without - 1:+.1%}), {made[1].layout}"
        )
        print(f"    CPU {cpu_s[0]:.2f} to {cpu_s[1]:.2f} s")
    print(f"CPU of all: {total[1] / total[0] - 1:+.1%}")


def prefetch() -> None:
    """Print the seconds of gathers and reductions that outlast the compute of their own layer, and that of all layers."""
    for name, cluster, batch, seq_len in SHARDED:
        model, machines = ModelSpec.named(name), ClusterSpec.parse(cluster)
        workload, layout = Workload(seq_len=seq_len, global_batch_size=batch), Layout(dp_shard=machines.num_devices)
        costs = CostTable.from_layouts(model, workload, machines, LayoutTable.from_layouts([layout], batch))
        fields = ("gather_s", "regather_s", "reduce_s", "forward_s", "backward_s")
        per_layer = {field: costs.per_layer(field, 0) for field in fields}
        again = np.where([layer.is_head for layer in model.iter_layers()], 0.0, per_layer["regather_s"])
        passes = (
            (per_layer["gather_s"], per_layer["forward_s"]),
            (again + per_layer["reduce_s"], per_layer["backward_s"]),
        )
        ahead = sum(float(np.maximum(sent - busy, 0.0).sum()) for sent, busy in passes)
        any_number = sum(max(float((sent - busy).sum()), 0.0) for sent, busy in passes)
        count, step_s = int(costs.layouts.num_microbatches[0]), estimate(model, machines, workload, layout).step_time_s
        print(f"{name} {cluster}: step {step_s:.3f} s, at most {count * (ahead - any_number) / step_s:.1%} less")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("rehearsed", "plans", "prefetch"))
    {"rehearsed": rehearsed, "plans": plans, "prefetch": prefetch}[parser.parse_args().what]()
