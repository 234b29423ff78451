"""The steps of a measurement that need a model: memory of its layers on fake tensors, and seconds of the layers themselves.

A layer is measured as one of tp ranks has it: heads, feed-forward width and vocabulary divided by tp, without communication. What
makes the modules comes from outside (`BuildModel`), so that what is measured is what is trained.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..schema.layers import Block, Embedding, Head, LayerRun, MoE, SoftmaxAttention
from ..schema.layout import Recompute
from ..schema.model import ModelSpec
from .measure.compute import FIRST_RATE, best_rate, torch_dtype
from .measure.kernels import allocator_bytes, measure_passes
from .measure.traced import TRACED_DEPTHS, trace_layer, trace_step
from .run.protocol import MeasurementStep, ProfileTask, RankPlace

if TYPE_CHECKING:
    from .measure.timing import Bench, Points

MeasuredLayer = Embedding | Block | Head

MICRO_BATCHES = (1, 2, 4)
TENSOR_PARALLEL = (1, 2, 4, 8)
SHORTER = (4, 16, 64)
"""Of documents: how much shorter sequences are, of which there are so many more in a micro-batch, or one."""
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")

_LAYER_TRACE_S = 0.3
"""Of one layer forward and backward on fake tensors."""

_INITIAL_S, _GRADIENT_S = 2e-8, 4e-9
"""Of one parameter: drawing it, and writing its gradient, by one core."""


class BuildModel(Protocol):
    """Makes a model outside a job, called with hidden states or tokens and targets, in torch's default dtype."""

    def __call__(
        self,
        spec: ModelSpec,
        recompute: Recompute,
        *,
        device: torch.device,
        layer_idxs: Collection[int] | None = None,
        is_fake: bool = False,
    ) -> nn.Module:
        """Build the layers at ``layer_idxs`` (None: all); fake ones have no memory and no weights."""


class LayerCase(NamedTuple):
    """One kind of layer under one micro-batch, tensor-parallel degree and recompute option."""

    model: ModelSpec
    layer: MeasuredLayer
    micro_batch_size: int
    seq_len: int
    tp: int
    dtype: str
    recompute: Recompute

    def fields(self) -> dict[str, Any]:
        """Return the fields of a LayerPoint or LayerMemory."""
        shape = {name: getattr(self, name) for name in ("micro_batch_size", "seq_len", "tp", "dtype", "recompute")}
        return {"layer": self.layer.model_dump(mode="json"), "hidden_dim": self.model.hidden_dim, **shape}

    @property
    def label(self) -> str:
        """Return the text for the progress bar."""
        recompute = "" if self.recompute == "none" else f", {self.recompute} recompute"
        return f"{self.layer.kind} (micro-batch {self.micro_batch_size}, tp {self.tp}{recompute})"


def model_steps(build_model: BuildModel, task: ProfileTask, place: RankPlace, dtype: str) -> list[MeasurementStep]:
    """Return the steps for the memory and the seconds of the layers of the task's model."""
    model = ModelSpec.model_validate_json(task.model)
    options: dict[str, Any] = {"seq_len": task.seq_len, "micro_batch_size": task.micro_batch_size, "dtype": dtype}
    cases = layer_cases(model, **options, max_tp=max(2, place.ranks_per_node), documents=task.documents)
    measures = {
        "layers on fake tensors": partial(_trace_layers, build_model, cases),
        "a step on fake tensors": partial(_trace_steps, build_model, model, options),
    }
    memory = [MeasurementStep("memory", what, 6, measure) for what, measure in measures.items()]
    return [*memory, MeasurementStep("layers", "layers of the model", 16, partial(_time_layers, build_model, cases))]


# --- the layers ------------------------------------------------------------------------------------------------------


def layer_cases(
    model: ModelSpec, *, seq_len: int, micro_batch_size: int, dtype: str, max_tp: int, documents: bool = False
) -> list[LayerCase]:
    """Return the cases by value: each kind and its shards as they are, over shorter sequences, recomputed, then larger."""
    kinds: list[MeasuredLayer] = [*dict.fromkeys(block for block, _ in model.block_runs), model.head, model.embedding]
    degrees = [tp for tp in TENSOR_PARALLEL if tp <= max_tp]
    shorter = [times for times in SHORTER if documents and times < seq_len]
    order: list[tuple[int, int, int, Recompute]] = [
        *product((1,), (1,), degrees, RECOMPUTES[:1]),
        *((times, times, 1, RECOMPUTES[0]) for times in shorter),
        *((1, times, 1, RECOMPUTES[0]) for times in shorter),
        *product((1,), (1,), degrees, RECOMPUTES[1:]),
        *product(MICRO_BATCHES[1:], (1,), degrees, RECOMPUTES),
    ]
    return [
        LayerCase(model, kind, factor * micro_batch_size, seq_len // times, tp, dtype, recompute)
        for factor, times, tp, recompute in order
        for kind in kinds
        if shard_of(kind, tp) is not None and (recompute == "none" or kind.kind == "block")
    ]


def shard_of(layer: MeasuredLayer, tp: int) -> MeasuredLayer | None:
    """Return the layer that one of tp ranks has; None where they cannot share it evenly."""
    if not isinstance(layer, Block):
        return _divided(layer, tp, "vocab_size")
    kv_heads = ("num_kv_heads",) if isinstance(layer.attention, SoftmaxAttention) else ()
    shared = ("shared_ffn_dim",) if isinstance(layer.mlp, MoE) else ()
    attention = _divided(layer.attention, tp, "num_heads", *kv_heads)
    mlp = _divided(layer.mlp, tp, "ffn_dim", *shared)
    return layer.replace(attention=attention, mlp=mlp) if attention is not None and mlp is not None else None


def _divided(part: Any, tp: int, *names: str) -> Any:
    sizes = {name: divmod(getattr(part, name), tp) for name in names}
    if any(remainder for _, remainder in sizes.values()):
        return None
    return part.replace(**{name: size for name, (size, _) in sizes.items()})


def build_layer(
    build_model: BuildModel, case: LayerCase, device: torch.device, *, is_fake: bool = False
) -> tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]:
    """Return the layer on a device with weights as at the start of training, and what makes its inputs.

    It is a model with this shard as its only block, of which the other layers were dropped before any has memory.
    """
    layer_idx = ("embedding", "block", "head").index(case.layer.kind)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch_dtype(case.dtype))
    try:
        module = build_model(
            _shallow_model(case), case.recompute, device=device, layer_idxs={layer_idx}, is_fake=is_fake
        )
    finally:
        torch.set_default_dtype(before)
    return module, partial(_inputs, case, device)


def _shallow_model(case: LayerCase) -> ModelSpec:
    """Return the model with one block, all layers as one of tp ranks has them."""
    model, shard = case.model, shard_of(case.layer, case.tp)
    if isinstance(shard, Block):
        layers = [model.embedding, shard, model.head]
    else:
        layers = [shard_of(model.embedding, case.tp), model.block_runs[0][0], shard_of(model.head, case.tp)]
    return model.replace(layers=tuple(LayerRun(layer=layer) for layer in layers))


def _inputs(case: LayerCase, device: torch.device) -> tuple[Tensor, ...]:
    shape = (case.micro_batch_size, case.seq_len)
    vocab_size = max(1, case.model.vocab_size // case.tp)
    if isinstance(case.layer, Embedding):
        return (torch.randint(vocab_size, shape, device=device),)
    hidden = torch.randn(*shape, case.model.hidden_dim, device=device, dtype=torch_dtype(case.dtype)).requires_grad_()
    if isinstance(case.layer, Head):
        return hidden, torch.randint(vocab_size, shape, device=device)
    return (hidden,)


# --- memory ----------------------------------------------------------------------------------------------------------


def layer_memory(build_model: BuildModel, case: LayerCase) -> dict[str, Any]:
    """Return the fields of a LayerMemory."""
    build = partial(build_layer, build_model, case, torch.device("cpu"), is_fake=True)
    return {**case.fields(), **trace_layer(build)}


def step_memory(
    build_model: BuildModel, model: ModelSpec, *, micro_batch_size: int, seq_len: int, dtype: str, recompute: Recompute
) -> dict[str, Any]:
    """Return the fields of a StepMemory."""
    build = partial(build_model, recompute=recompute, device=torch.device("cpu"), is_fake=True)
    shape = {"micro_batch_size": micro_batch_size, "seq_len": seq_len}
    traced = trace_step(build, model, **shape, dtype=torch_dtype(dtype))
    return {"model": model.name, **shape, "dtype": dtype, "recompute": recompute, **traced}


def _trace_layers(build_model: BuildModel, cases: Sequence[LayerCase], bench: Bench, _: Points) -> Points:
    traces = [(case.label, partial(layer_memory, build_model, case)) for case in cases]
    return {"layer_memory": _share_traces(bench, traces, _LAYER_TRACE_S)}


def _trace_steps(build_model: BuildModel, model: ModelSpec, options: dict[str, Any], bench: Bench, _: Points) -> Points:
    trace = partial(step_memory, build_model, model, **options)
    traces = [(f"a step, {recompute} recompute", partial(trace, recompute=recompute)) for recompute in RECOMPUTES]
    num_kinds = len(model.block_runs)
    num_layers = (num_kinds + 1) * (TRACED_DEPTHS[0] * num_kinds + 3)
    return {"step_memory": _share_traces(bench, traces, num_layers * _LAYER_TRACE_S)}


def _share_traces(bench: Bench, traces: Sequence[tuple[str, Any]], expected_s: float) -> list[dict[str, Any]]:
    """Count on fake tensors, each rank another trace; none is begun that would outlast the time."""
    points = []
    rank, size = dist.get_rank(), dist.get_world_size()
    for first in range(0, len(traces), size):
        begin, batch = time.perf_counter(), traces[first : first + size]
        if not bench.has_time(expected_s, f"the memory of {batch[0][0]}"):
            bench.leave_out("", len(traces) - first - 1)
            break
        if rank < len(batch):
            with torch.enable_grad():
                points.append(batch[rank][1]())
        expected_s = bench.agree(time.perf_counter() - begin)
    return points


# --- seconds ---------------------------------------------------------------------------------------------------------


def _time_layers(build_model: BuildModel, cases: Sequence[LayerCase], bench: Bench, points: Points) -> Points:
    """Measure each case, largest value first; none that its traced memory says would not fit."""
    by_rank = bench.gather(points.get("layer_memory", []))
    traced = {_case_key(point): point for rank_points in by_rank for point in rank_points if point["source"] == "fake"}
    layers: list[dict[str, Any]] = []
    memory: list[dict[str, Any]] = []
    flops_per_s = best_rate(points["matmuls"], cases[0].dtype) or FIRST_RATE
    for case in cases:
        needed = _needed_bytes(case, traced.get(_case_key(case.fields())))
        expected_s = _expected_s(case, flops_per_s, bench)
        if not bench.has_memory(needed) or not bench.has_time(expected_s, case.label):
            continue
        module, inputs = build_layer(build_model, case, bench.device)
        fields = case.fields()
        for direction, timing in zip(("forward", "backward"), measure_passes(bench, module, inputs()), strict=True):
            layers.append({**fields, "direction": direction, **timing._asdict()})
        if bench.device.type == "cuda":
            parameters = sum(p.numel() * p.element_size() for p in module.parameters())
            resident = allocator_bytes(bench.device, module, inputs())
            memory.append({**fields, "parameter_bytes": parameters, **resident, "source": "allocator"})
        del module, inputs
    # Ranks may differ by some blocks of the allocator: the first one's are stored.
    return {"layers": layers, "layer_memory": memory if dist.get_rank() == 0 else []}


def _expected_s(case: LayerCase, flops_per_s: float, bench: Bench) -> float:
    """Expect the seconds of making and measuring a layer: 6 FLOPs per parameter and token, attention, and what is recomputed."""
    tokens = case.micro_batch_size * case.seq_len
    parameters = case.layer.num_params(case.model.hidden_dim) / case.tp
    active = 0.0 if isinstance(case.layer, Embedding) else parameters
    scores = 4.0 * tokens * case.seq_len * case.model.hidden_dim / case.tp if isinstance(case.layer, Block) else 0.0
    passes = 3 if case.recompute == "none" else 4
    call_s = passes * (2 * active * tokens + scores) / flops_per_s + parameters * _GRADIENT_S
    return parameters * _INITIAL_S + bench.point_s(call_s)


def _case_key(fields: dict[str, Any]) -> str:
    names = ("layer", "micro_batch_size", "seq_len", "tp", "dtype", "recompute")
    return json.dumps([fields[name] for name in names], sort_keys=True)


def _needed_bytes(case: LayerCase, traced: dict[str, Any] | None) -> int:
    """Return the memory of a layer with its gradients; without a trace an upper guess: 40 tensors as wide as its widest."""
    if traced is not None:
        return int(2 * traced["parameter_bytes"] + traced["saved_bytes"] + traced["transient_bytes"])
    tokens = case.micro_batch_size * case.seq_len
    parameters = case.layer.num_params(case.model.hidden_dim) // case.tp
    widest = case.model.vocab_size if case.layer.kind == "head" else 4 * case.model.hidden_dim
    element_bytes = {"fp32": 4}.get(case.dtype, 2)
    return element_bytes * (2 * parameters + 40 * tokens * max(case.model.hidden_dim, widest // case.tp))
