"""The steps of a measurement that a model takes part in: memory of its layers on fake tensors, and the layers themselves."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...profilers.measure.compute import FIRST_RATE
from ...profilers.measure.kernels import allocator_bytes, measure_passes
from ...profilers.run.protocol import MeasurementStep, ProfileTask, RankPlace
from ...schema.layers import Block, Embedding
from ...schema.model import ModelSpec
from .model_layers import RECOMPUTES, LayerCase, build_layer, layer_cases
from .traced_memory import TRACED_DEPTHS, layer_memory, step_memory

if TYPE_CHECKING:
    from ...profilers.measure.timing import Bench, Points

_LAYER_TRACE_S = 0.3
"""Of one layer forward and backward on fake tensors."""

_INITIAL_S, _GRADIENT_S = 2e-8, 4e-9
"""Of one parameter: drawing it, and writing its gradient, by one core."""


def model_steps(task: ProfileTask, place: RankPlace, dtype: str) -> list[MeasurementStep]:
    """Memory and seconds of the layers of the task's model."""
    model = ModelSpec.model_validate_json(task.model)
    options: dict[str, Any] = {"seq_len": task.seq_len, "micro_batch_size": task.micro_batch_size, "dtype": dtype}
    cases = layer_cases(model, **options, max_tp=max(2, place.ranks_per_node))
    measures = {
        "layers on fake tensors": partial(_layer_memory, cases),
        "a step on fake tensors": partial(_step_memory, task, model, dtype),
    }
    memory = [MeasurementStep("memory", what, 6, measure) for what, measure in measures.items()]
    return [*memory, MeasurementStep("layers", "layers of the model", 16, partial(_layers, cases))]


def _layer_memory(cases: Sequence[LayerCase], bench: Bench, _: Points) -> Points:
    traces = [(case.label, partial(layer_memory, case)) for case in cases]
    return {"layer_memory": _traced(bench, traces, _LAYER_TRACE_S)}


def _step_memory(task: ProfileTask, model: ModelSpec, dtype: str, bench: Bench, _: Points) -> Points:
    options: dict[str, Any] = {"micro_batch_size": task.micro_batch_size, "seq_len": task.seq_len, "dtype": dtype}
    traces = [(f"a step, {r} recompute", partial(step_memory, model, recompute=r, **options)) for r in RECOMPUTES]
    kinds = len(model.block_runs)
    layers = (kinds + 1) * (TRACED_DEPTHS[0] * kinds + 3)
    return {"step_memory": _traced(bench, traces, layers * _LAYER_TRACE_S)}


def _traced(bench: Bench, traces: Sequence[tuple[str, Any]], expected_s: float) -> list[dict[str, Any]]:
    """What the ranks count on fake tensors, each another one; none is begun that would outlast the time."""
    points = []
    rank, size = dist.get_rank(), dist.get_world_size()
    for first in range(0, len(traces), size):
        begin, mine = time.perf_counter(), traces[first : first + size]
        if not bench.has_time(expected_s, f"the memory of {mine[0][0]}"):
            bench.leave_out("", len(traces) - first - 1)
            break
        bench.say(f"memory of {mine[0][0]}")
        if rank < len(mine):
            with torch.enable_grad():
                points.append(mine[rank][1]())
        expected_s = bench.agree(time.perf_counter() - begin)
    return points


def _layers(cases: Sequence[LayerCase], bench: Bench, points: Points) -> Points:
    """Seconds of each case, largest value first; none that its traced memory says would not fit."""
    of_ranks = bench.gather(points.get("layer_memory", []))
    traced = {_key(point): point for found in of_ranks for point in found if point["source"] == "fake"}
    layers: list[dict[str, Any]] = []
    memory: list[dict[str, Any]] = []
    rates = [2.0 * p["m"] * p["n"] * p["k"] / p["time_s"] for p in points["matmuls"] if p["dtype"] == cases[0].dtype]
    for case in cases:
        needed = _needed_bytes(case, traced.get(_key(case.fields())))
        expected_s = _expected_s(case, max(rates, default=FIRST_RATE), bench)
        if not bench.has_memory(needed) or not bench.has_time(expected_s, case.label):
            continue
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
        del module, inputs
    # Ranks may differ by some blocks of the allocator: the first one's are kept.
    return {"layers": layers, "layer_memory": memory if dist.get_rank() == 0 else []}


def _expected_s(case: LayerCase, flops_per_s: float, bench: Bench) -> float:
    """Seconds of making a layer and measuring it: 6 FLOPs for each parameter and token, attention, and what is recomputed."""
    tokens = case.micro_batch_size * case.seq_len
    parameters = case.layer.num_params(case.model.hidden_dim) / case.tp
    active = 0.0 if isinstance(case.layer, Embedding) else parameters
    scores = 4.0 * tokens * case.seq_len * case.model.hidden_dim / case.tp if isinstance(case.layer, Block) else 0.0
    passes = 3 if case.recompute == "none" else 4
    call_s = passes * (2 * active * tokens + scores) / flops_per_s + parameters * _GRADIENT_S
    return parameters * _INITIAL_S + bench.point_s(call_s)


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
