"""The steps of a measurement that need a model: memory on fake tensors, its real layers; and which products to measure."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist

from ...profilers.measure.layers import allocator_bytes, measure_passes
from ...profilers.run.steps import thorough_steps
from ...profilers.run.task import Place, Step, Task
from ...schema.model import ModelSpec
from ...schema.units import MIB
from .model_layers import RECOMPUTES, LayerCase, build_layer, layer_cases
from .traced_memory import layer_memory, step_memory

if TYPE_CHECKING:
    from ...profilers.measure.timing import Bench, Points

NUM_SHAPES = 600
"""Products measured at most: beyond some hundred, more do not help."""

_FEWEST_SHAPES = 8

_SHAPE_PART = 1 / 40
"""Of the step's time that one product may take with all its repetitions."""

_CALLS = 5
_CACHE_BYTES = 32 * MIB
"""Last cache of a CPU core, for choosing shapes only."""


def steps_with_model(task: Task, place: Place, on_gpu: bool) -> Sequence[Step]:
    """All steps of a thorough measurement, in the order of `task.ALL_PARTS`."""
    steps = thorough_steps(task, place, on_gpu=on_gpu, choose=partial(choose_shapes, bf16=on_gpu))
    model = ModelSpec.model_validate_json(task.model) if task.model else None
    skipped = "" if model else "no --model"
    dtype = "bf16" if on_gpu else "fp32"
    cases = (
        layer_cases(
            model,
            seq_len=task.seq_len,
            micro_batch_size=task.micro_batch_size,
            dtype=dtype,
            max_tp=max(2, place.ranks_per_node),
        )
        if model
        else []
    )
    mine = [
        Step("memory", "what the device holds beside tensors", 1, _allocator),
        Step("memory", "layers on fake tensors", 6, partial(_layer_memory, cases), skipped),
        Step("memory", "a step on fake tensors", 6, partial(_step_memory, task, model, dtype), skipped),
        Step("layers", "layers of the model", 16, partial(_layers, cases), skipped),
    ]
    compute = [step for step in steps if step.part == "compute"]
    return [*compute, *mine, *(step for step in steps if step.part != "compute")]


def choose_shapes(
    bench: Bench, flops_per_s: float, bandwidth_bytes_per_s: float, *, bf16: bool
) -> list[tuple[int, int, int]]:
    """Products (m, n, k) that the learned model is least sure of on this device, the first rank's choice for all."""
    from ...cost_models.learned.gemm import GemmRates, Hardware, known_coefficients
    from ...cost_models.learned.informative import candidates, most_informative

    count = min(NUM_SHAPES, max(_FEWEST_SHAPES, int(bench.remaining_s() / (2 * bench.sample_s))))
    most_s = max(1e-4, bench.remaining_s() * _SHAPE_PART / _CALLS)
    shapes: list[list[int]] = []
    if dist.get_rank() == 0:
        processors, cache = 1, float(_CACHE_BYTES)
        if bench.device.type == "cuda":
            properties = torch.cuda.get_device_properties(bench.device)
            processors, cache = properties.multi_processor_count, float(properties.L2_cache_size)
        coefficients, software, _ = known_coefficients("", "")
        hardware = Hardware(flops_per_s / coefficients.compute_efficiency, bandwidth_bytes_per_s, processors, cache)
        rates = GemmRates(coefficients, hardware, software, 2.0 if bf16 else 4.0)
        m, n, k = candidates(rates, seed=0, most_s=most_s, most_bytes=bench.free_bytes() / 16)
        chosen = most_informative(m, n, k, rates, count) if len(m) else []
        shapes = [[int(m[i]), int(n[i]), int(k[i])] for i in chosen]
    return [(a, b, c) for a, b, c in bench.gather(shapes)[0]]


def _layer_memory(cases: Sequence[LayerCase], bench: Bench, _: Points) -> Points:
    return {"layer_memory": _traced(bench, [(case.label, partial(layer_memory, case)) for case in cases])}


def _step_memory(task: Task, model: ModelSpec, dtype: str, bench: Bench, _: Points) -> Points:
    options: dict[str, Any] = {"micro_batch_size": task.micro_batch_size, "seq_len": task.seq_len, "dtype": dtype}
    traces = [(f"{r} recompute", partial(step_memory, model, recompute=r, **options)) for r in RECOMPUTES]
    return {"step_memory": _traced(bench, traces)}


def _traced(bench: Bench, traces: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
    """What the ranks count on fake tensors, each another one; none is begun that would outlast the time."""
    points, slowest_s = [], 0.0
    rank, size = dist.get_rank(), dist.get_world_size()
    for first in range(0, len(traces), size):
        if not bench.has_time(slowest_s):
            break
        begin, mine = time.perf_counter(), traces[first : first + size]
        bench.say(f"memory of {mine[0][0]}")
        if rank < len(mine):
            with torch.enable_grad():
                points.append(mine[rank][1]())
        slowest_s = max(slowest_s, bench.agree(time.perf_counter() - begin))
    return points


def _layers(cases: Sequence[LayerCase], bench: Bench, points: Points) -> Points:
    """Seconds of each case, largest value first; none that its traced memory says would not fit."""
    of_ranks = bench.gather(points.get("layer_memory", []))
    traced = {_key(point): point for found in of_ranks for point in found if point["source"] == "fake"}
    layers: list[dict[str, Any]] = []
    memory: list[dict[str, Any]] = []
    slowest_s = 0.0
    for case in cases:
        known = traced.get(_key(case.fields()))
        needed = _needed_bytes(case, known)
        if not bench.has_memory(needed) or not bench.has_time(slowest_s):
            continue
        begin = time.perf_counter()
        bench.say(case.label)
        module, inputs = build_layer(case, bench.device)
        forward, backward = measure_passes(bench, module, inputs, sample_s=bench.sample_s)
        fields = case.fields()
        layers.append({**fields, "direction": "forward", **forward.fields()})
        layers.append({**fields, "direction": "backward", **backward.fields()})
        if bench.device.type == "cuda":
            parameters = sum(p.numel() * p.element_size() for p in module.parameters())
            held = allocator_bytes(bench.device, module, inputs)
            memory.append({**fields, "parameter_bytes": parameters, **held, "source": "allocator"})
        slowest_s = max(slowest_s, bench.agree(time.perf_counter() - begin))
        del module, inputs
    # Ranks may differ by some blocks of the allocator: the first one's are kept.
    return {"layers": layers, "layer_memory": memory if dist.get_rank() == 0 else []}


def _key(fields: dict[str, Any]) -> str:
    names = ("layer", "micro_batch_size", "seq_len", "tp", "dtype", "recompute")
    return json.dumps([fields[name] for name in names], sort_keys=True)


def _needed_bytes(case: LayerCase, traced: dict[str, Any] | None) -> int:
    """Memory of a layer with its gradients; without a trace an upper guess: 40 tensors as wide as its widest."""
    size = {"fp32": 4}.get(case.dtype, 2)
    if traced is not None:
        return int(2 * traced["parameter_bytes"] + traced["saved_bytes"] + traced["transient_bytes"])
    tokens = case.micro_batch_size * case.seq_len
    parameters = case.layer.num_params(case.model.hidden_dim) // case.tp
    widest = case.model.vocab_size if case.layer.kind == "head" else 4 * case.model.hidden_dim
    return size * (2 * parameters + 40 * tokens * max(case.model.hidden_dim, widest // case.tp))


def _allocator(bench: Bench, _: Points) -> Points:
    """Driver, libraries and communicators; on a CPU what the process holds."""
    if dist.get_rank():
        return {"allocator": []}
    if bench.device.type != "cuda":
        return {"allocator": [{"context_bytes": psutil.Process().memory_info().rss}]}
    free, total = torch.cuda.mem_get_info(bench.device)
    peaks = torch.cuda.max_memory_allocated(bench.device), torch.cuda.max_memory_reserved(bench.device)
    context = total - free - torch.cuda.memory_reserved(bench.device)
    return {"allocator": [{"context_bytes": context, "allocated_bytes": peaks[0], "reserved_bytes": peaks[1]}]}
