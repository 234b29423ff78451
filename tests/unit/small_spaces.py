"""Small models on small clusters whose devices have random memory, with a few layouts of every kind that their space has."""

from __future__ import annotations

import numpy as np
from meshwright.planner.request import PlanRequest
from meshwright.planner.space import Space, build_space
from meshwright.schema import ClusterSpec, ModelSpec, Workload
from meshwright.schema.layout_table import LayoutTable

MODELS = ("gpt2", "smollm2-135m", "llama-3.2-1b", "olmoe-1b-7b", "deepseek-v2-lite", "mixtral-8x7b")
CLUSTERS = ("1xA100-SXM-80GB", "4xL40S", "6xA100-SXM-40GB", "8xH100-SXM-80GB", "2x4xA100-SXM-40GB/ib200", "4x1xH100-SXM-80GB/eth25",
            "2x8xH100-SXM-80GB/ib400", "3x4xA100-SXM-80GB/ib200")  # fmt: skip
MAX_BLOCKS, MAX_LAYOUTS = 5, 5


def shortened(model: str, num_blocks: int) -> ModelSpec:
    """The model with at most so many blocks of each run."""
    spec = ModelSpec.named(model)
    runs = (run.replace(count=min(run.count, num_blocks)) if run.layer.kind == "block" else run for run in spec.layers)
    return spec.replace(layers=tuple(runs))


def random_instance(seed: int) -> tuple[ModelSpec, Workload, ClusterSpec, Space]:
    """A small model on a small cluster whose devices have random memory, and some of the layouts of its space."""
    rng = np.random.default_rng(seed)
    spec = shortened(str(rng.choice(MODELS)), int(rng.integers(2, MAX_BLOCKS + 1)))
    cluster = ClusterSpec.parse(str(rng.choice(CLUSTERS)))
    group = cluster.groups[0]
    memory_bytes = int(group.device.memory_bytes * rng.choice([0.08, 0.15, 0.4, 1.0]))
    cluster = cluster.replace(groups=(group.replace(device=group.device.replace(memory_bytes=memory_bytes)),))
    batch_size = cluster.num_devices * int(rng.choice([1, 2, 6, 16]))
    engine = str(rng.choice(["fsdp2", "megatron", "megatron", "deepspeed"]))
    workload = Workload(seq_len=int(rng.choice([512, 1024])), global_batch_size=batch_size, engine=engine)
    space = build_space(PlanRequest(spec, cluster, workload))
    rows = _different_rows(space.batch, rng)
    return spec, workload, cluster, Space(space.batch.select(rows), space.excluded)


def _different_rows(batch: LayoutTable, rng: np.random.Generator) -> np.ndarray:
    """Rows that differ in as many fields as possible: those first that bring values not seen yet, whatever the fields are."""
    order = rng.permutation(len(batch))[:200]
    columns = np.array([column[order] for column in batch.columns.values()], dtype=np.float64)
    chosen: list[int] = []
    for _ in range(min(MAX_LAYOUTS, len(order))):
        is_new = np.ones(columns.shape, dtype=bool)
        for at in chosen:
            is_new &= columns != columns[:, [at]]
        gain = is_new.sum(axis=0)
        gain[chosen] = -1
        chosen.append(int(np.argmax(gain)))
    return np.sort(order[chosen])
