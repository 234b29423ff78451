"""What a rehearsed step runs, in order, with the seconds that the operator and collective models give it.

An entry is a kernel or a collective. It runs on a stream after the one before it there, and waits for entries of other streams as
`fully_shard` and DTensor let it: whoever reads what a collective wrote waits for that one; a reduction starts when the gradients
are there that were made before it; a gather of the next unit's parameters when the unit before the last one has been copied out of
its buffer (backward: the last one), and the reductions of at most one unit are under way while the next unit's are prepared.
Collectives that a step waits for at once are entries of the compute stream.

Streams are told apart by where `fully_shard` makes them, since a rehearsal's tensors are on a CPU, which has none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from ...cost_models.coefficients import Scenario
from ...cost_models.hardware.collectives import Op, collective_s, p2p_s, slowdown_law
from ...cost_models.hardware.compute import attention_s, gemm_s, grouped_gemm_s
from ...cost_models.hardware.machine import device_rates, host_costs, measured_rates
from ...cost_models.hardware.node_links import Hops
from ...cost_models.layer.operators import FusedAttention, kernels_of
from ...cost_models.learned.kernels import gemm_seconds
from ...cost_models.pipeline.orders import Action
from ...schema.training_plan import TrainingPlan
from ..halves import Transfer

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm: (0, 1), _aten.addmm: (1, 2), _aten.bmm: (0, 1), _aten.baddbmm: (1, 2)}
"""Positions of both operands."""

_ATTENTION = {
    _aten._scaled_dot_product_flash_attention: (0, False),
    _aten._scaled_dot_product_flash_attention_for_cpu: (0, False),
    _aten._scaled_dot_product_flash_attention_backward: (1, True),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (1, True),
}
"""Position of the queries, and whether it is the backward pass."""

_NO_KERNEL = {
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten.resize_,
    torch.ops._c10d_functional.wait_tensor, _aten.lift_fresh, _aten.set_, _aten._unsafe_view,
}  # fmt: skip
_WRITES_ONLY = {
    _aten.zeros,
    _aten.zeros_like,
    _aten.new_zeros,
    _aten.ones_like,
    _aten.full_like,
    _aten.fill_,
    _aten.zero_,
}
_ROWS = {_aten.embedding, _aten.index_select, _aten.index, _aten.gather}
"""Read of their first input as much as they put out."""

_SCATTERS = {_aten.scatter_add_, _aten.scatter_add}
_UPDATES = {_aten._fused_adamw_, _aten._fused_adam_}
_ROUTED = {"cumsum": 1.0, "_grouped_mm": 1 / 6}
"""Parts of what routing costs the host in a pass: forward the ends of the experts' rows, once a layer (routers that choose groups
first have several topk); backward two products for each of three weights."""

_COPY_OUT = torch.ops.fsdp.split_with_sizes_copy
_COPY_IN = torch.ops.fsdp.all_gather_copy_in

OPS = {
    "_allgather_base_": "all_gather", "allgather_": "all_gather", "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter", "allreduce_": "all_reduce", "all_reduce": "all_reduce",
    "alltoall_base_": "all_to_all", "alltoall_": "all_to_all", "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all", "recv_": "recv", "broadcast_": "broadcast",
}  # fmt: skip
"""Names of collectives by those of torch's operators."""

Stream = Literal["compute", "gather", "reduce", "ring"]


class Run(NamedTuple):
    """A kernel or a collective.

    Attributes:
        part: what its seconds count to: a kind of kernel, or the axis of a collective.
        name: of the operator.
        slows: extra seconds of kernels for each of their own while it runs; of a kernel 0.
        host_s: of the host, to launch it.
        waits: positions of those that have to end before.
        level: of the links that bound a collective, outer ones have a higher one; None: a kernel.
    """

    part: str
    name: str
    seconds: float
    stream: Stream = "compute"
    slows: float = 0.0
    host_s: float = 0.0
    waits: tuple[int, ...] = ()
    level: int | None = None


class OperatorSeconds:
    """Seconds of operators by their shapes, of the models that the closed form uses."""

    def __init__(self, plan: TrainingPlan) -> None:
        self.scenario = Scenario.build(plan.workload, plan.cluster)
        self.rates, self.host = device_rates(self.scenario), host_costs(self.scenario)
        # In each pass; the halves of a block share what is measured of one unit.
        self.unit_s = self.host.fsdp_unit_s / (4 if plan.layout.half_blocks else 2)
        self.kernels = kernels_of(plan.workload, on_host=plan.cluster.weakest_device.backend.is_host)
        self.domains = [level.domain_size for level in plan.cluster.levels[:-1]]
        self.product_s, self.group_s = cache(self._product_s), cache(self._group_s)
        self.attention_s, self.collective_s = cache(self._attention_s), cache(self._collective_s)

    def _product_s(self, m: int, n: int, k: int, batch: int, which: str) -> float:
        """Return the seconds of [m,k] x [k,n]; ``which`` pass it is of says how the learned model takes the shape."""
        rates = self.rates
        if batch > 1 or rates.gemm is None:
            return float(
                gemm_s(np.array([float(m * batch)]), np.array([n]), np.array([k]), rates._replace(gemm=None))[0]
            )
        forward = {"forward": (m, n, k), "input_gradient": (m, k, n), "weight_gradient": (k, n, m)}[which]
        sizes = [np.array([float(size)]) for size in forward]
        return float(gemm_seconds(*sizes, rates.gemm, which=cast("Any", which))[0])

    def _group_s(self, rows: int, n: int, k: int, count: int, which: str) -> float:
        sizes = np.array([float(rows)]), np.array([float(n)]), np.array([float(k)])
        forward, backward, weight = grouped_gemm_s(*sizes, float(count), self.rates)
        return float({"forward": forward, "input_gradient": backward - weight, "weight_gradient": weight}[which][0])

    def _attention_s(
        self, query: tuple[int, ...], key: tuple[int, ...], width: int, causal: bool, backward: bool
    ) -> float:
        batch, heads, tokens, qk_dim = query
        context = (tokens + 1) / 2 if causal else float(key[2])
        op = FusedAttention("attention", heads, qk_dim, width, context, tokens, key[2], key[1])
        one = np.ones(1, dtype=np.int64)
        return float(attention_s(op, one * batch * tokens, one, self.rates, backward=backward)[0])

    def traffic_s(self, num_bytes: float, *, is_update: bool = False, kernels: int = 1) -> float:
        """Return the seconds of kernels that read and write so much."""
        rate = self.rates.update_bytes_per_s if is_update else self.rates.elementwise_bytes_per_s
        return kernels * self.rates.kernel_s + num_bytes / rate

    def _collective_s(self, op: str, size: int, ranks: tuple[int, ...]) -> tuple[float, float]:
        """Return the seconds of a collective, and how much it slows kernels."""
        group, stride = np.array([len(ranks)]), np.array([ranks[1] - ranks[0]])
        cluster = self.scenario.cluster
        if op == "recv":
            seconds = float(p2p_s(np.array([float(size)]), Hops(group, stride, "ring"), cluster)[0])
            sent = float(size)
        else:
            seconds = float(collective_s(cast("Op", op), float(size), group, stride, cluster)[0])
            sent = (2 if op == "all_reduce" else 1) * size * (len(ranks) - 1) / len(ranks)
        memory = cluster.weakest_device.memory_bandwidth_bytes_per_s
        law = slowdown_law(sent / max(seconds, 1e-12) / memory, self.scenario.coefficients)
        return seconds, float(law.compute * measured_rates(self.scenario).overlap_ratio)


@dataclass
class Trace:
    """Entries of a step in the order in which the host launches them, and which of them a pass has."""

    costs: OperatorSeconds
    runs: list[Run] = field(default_factory=list)
    spans: dict[Action, tuple[int, int]] = field(default_factory=dict)
    is_on: bool = False
    is_forward: bool = True
    _writer: dict[int, int] = field(default_factory=dict)  # of storages: the entry of another stream that wrote it last
    _copies_out: list[int] = field(default_factory=list)
    _last: dict[str, int] = field(default_factory=dict)
    _within: str = ""
    _begun: int = 0
    boundary_bytes: int = 0
    _is_sent: bool = False
    _is_between_halves: bool = False
    _unit: int = 0
    _is_first_of_unit: bool = True

    def start(self) -> None:
        """Begin anew."""
        self.runs.clear()
        self.spans.clear()
        self._last.clear()
        self._copies_out.clear()
        self._writer.clear()
        self.is_on = True

    def begin_span(self, action: Action | None) -> None:
        """Say that a pass begins, or the update."""
        self._begun, self._unit = len(self.runs), 0
        self.is_forward = action is None or action.kind == "F"

    def end_span(self, action: Action | None) -> None:
        """Say that it ends: which entries it has."""
        if action is not None and action not in self.spans:
            self.spans[action] = self._begun, len(self.runs)

    def copy(self, source: Action, target: Action) -> None:
        """Let a pass have the entries of another."""
        begin, end = self.spans[source]
        shift = len(self.runs) - begin
        for run in self.runs[begin:end]:
            self._append(run._replace(waits=tuple(idx + shift for idx in run.waits)))
        self.spans[target] = begin + shift, end + shift

    def part(self, begin: int, end: int) -> list[Run]:
        """Return some entries by themselves."""
        return [
            run._replace(waits=tuple(idx - begin for idx in run.waits if idx >= begin)) for run in self.runs[begin:end]
        ]

    def outside(self) -> list[Run]:
        """Return the entries outside of passes."""
        within = {idx for begin, end in self.spans.values() for idx in range(begin, end)}
        new_idx = {
            idx: position for position, idx in enumerate(idx for idx in range(len(self.runs)) if idx not in within)
        }
        return [
            self.runs[idx]._replace(waits=tuple(new_idx[one] for one in self.runs[idx].waits if one in new_idx))
            for idx in new_idx
        ]

    # What runs

    def note_norm(self, x: Tensor, *, is_backward: bool, again: bool) -> None:
        """Note a norm, which a rehearsal has no operator for."""
        norm = self.costs.kernels.norm
        elements, kernels = (
            (norm.backward, norm.backward_kernels) if is_backward else (norm.forward, norm.forward_kernels)
        )
        seconds = self.costs.traffic_s(elements * x.numel() * x.element_size(), kernels=kernels)
        if self.is_on:
            self._kernel("recompute" if again else "memory_bound", "norm", seconds, (x,), (), kernels)

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, where: str) -> None:
        """Note an operator with what it reads and puts out; ``where``: forward, backward, again (recomputed), optimizer."""
        packet = func._overloadpacket
        if packet in _NO_KERNEL:
            return
        inputs = list(tensors_of([*args, *(value for name, value in kwargs.items() if name != "out")]))
        written = [
            value for value, argument in zip(args, func._schema.arguments, strict=False) if _is_written(argument)
        ]
        is_view = not written and "out" not in kwargs
        outputs = list({id(one): one for one in tensors_of([out, kwargs.get("out"), *written])}.values())
        if is_view and inputs and outputs and _key(outputs[0]) == _key(inputs[0]):
            return
        costs, which = self.costs, "forward"
        part = {"again": "recompute", "optimizer": "optimizer"}.get(where, "memory_bound")
        if self._within:
            part = "parameter_copies"
        if packet in _PRODUCTS:
            a, b = (args[position] for position in _PRODUCTS[packet])
            if where == "backward":
                is_weight = a.ndim == 2 and a.stride(0) == 1 and a.shape[0] > 1
                which = "weight_gradient" if is_weight else "input_gradient"
            batch = a.shape[0] if a.ndim == 3 else 1
            seconds = costs.product_s(a.shape[-2], b.shape[-1], a.shape[-1], batch, which)
            part = ("attention" if a.ndim == 3 else "products") if part == "memory_bound" else part
        elif packet is _aten._grouped_mm:
            seconds, part = self._grouped(args, where), "products" if part == "memory_bound" else part
        elif packet in _ATTENTION:
            position, is_backward = _ATTENTION[packet]
            query, key, value = args[position : position + 3]
            causal = _argument(func, args, kwargs, "is_causal")
            seconds = costs.attention_s(
                tuple(query.shape), tuple(key.shape), value.shape[-1], bool(causal), is_backward
            )
            part = "attention" if part == "memory_bound" else part
        else:
            put_out = sum(map(_bytes, outputs))
            read = 0 if packet in _WRITES_ONLY else put_out if packet in _ROWS else sum(map(_bytes, inputs))
            if packet in (_aten.copy_, _aten._foreach_copy_):
                read = sum(map(_bytes, tensors_of(args[1:2])))
            elif packet is _COPY_IN:  # into this rank's part of the buffer, which is passed entire
                read = put_out = sum(map(_bytes, args[0]))
            elif packet in _UPDATES:  # the gradients are said to be written as well
                put_out -= sum(map(_bytes, args[1]))
            elif packet is _COPY_OUT:
                put_out = read
            elif packet in _SCATTERS:  # where it points to, of what it writes to
                read, put_out = 2 * _bytes(args[3]) + _bytes(args[2]), _bytes(args[3])
            elif packet is _aten.logsumexp:  # the largest, exponentials, their sum
                read *= 4
            seconds = costs.traffic_s(read + put_out, is_update=part in ("optimizer", "parameter_copies"))
        position = self._kernel(part, packet.__name__, seconds, inputs, outputs)
        if packet is _COPY_OUT:
            self._copies_out.append(position)

    def _grouped(self, args: tuple[Any, ...], where: str) -> float:
        a, b = args[0], args[1]
        if b.ndim == 2:  # gradients of weights: rows are the inner size
            offsets = args[2] if len(args) > 2 else None
            count = 1 if offsets is None else len(offsets)
            return self.costs.group_s(a.shape[1], b.shape[1], a.shape[0], count, "weight_gradient")
        which = "input_gradient" if where == "backward" else "forward"
        return self.costs.group_s(a.shape[-2], b.shape[-1], a.shape[-1], b.shape[0], which)

    def _kernel(self, part: str, name: str, seconds: float, inputs: Any, outputs: Any, dispatches: int = 1) -> int:
        stream: Stream = "reduce" if self._is_sent else "gather" if self._within == "gather" else "compute"
        waits = {idx for tensor in inputs if (idx := self._writer.get(_key(tensor))) is not None}
        if stream == "gather":
            waits |= self._gather_waits()
        for tensor in outputs:
            if stream == "compute":
                self._writer.pop(_key(tensor), None)
        host_s = 0.0 if self._within else self.costs.host.operator_s * dispatches
        if name in _ROUTED and not self.costs.host.adds and self.is_forward == (name == "cumsum"):
            host_s += self.costs.host.routing_s / 2 * _ROUTED[name]
        position = self._append(Run(part, name, seconds, stream, host_s=host_s, waits=tuple(sorted(waits))))
        if stream != "compute":
            for tensor in outputs:
                self._writer[_key(tensor)] = position
        return position

    def note_message(self, axis: str, op: str, size: int, group: str, tensors: list[Tensor]) -> None:
        """Note a collective of a group over an axis; ``tensors`` are all that it reads and writes."""
        if axis == "pp" and op == "recv":
            self.boundary_bytes = max(self.boundary_bytes, size)
        if not self.is_on or op in ("send", "broadcast") or (axis == "pp" and op == "recv"):
            return
        ranks = tuple(dist.get_process_group_ranks(_resolve_process_group(group)))
        seconds, slows = self.costs.collective_s(op, size, ranks)
        host_s = self.costs.host.collective_s if axis == "tp" else 0.0
        part = axis.replace("expert_", "dp_").replace("etp", "ep")
        part = "dp" if part.startswith("dp_") or part == "world" else part
        stream: Stream = "compute"
        if self._within in ("gather", "reduce"):
            stream = cast("Stream", self._within)
        elif op == "recv" or self._is_between_halves:
            stream = "ring"
        waits = set[int]()
        if stream == "gather":
            waits |= self._gather_waits()
        elif stream != "compute" and "compute" in self._last:
            waits.add(self._last["compute"])
        waits |= {idx for tensor in tensors if (idx := self._writer.get(_key(tensor))) is not None}
        level = sum(ranks[0] // size != ranks[-1] // size for size in self.costs.domains)
        position = self._append(Run(part, op, seconds, stream, slows, host_s, tuple(sorted(waits)), level))
        if stream != "compute":
            for tensor in tensors:
                self._writer[_key(tensor)] = position
        self._is_sent = stream == "reduce"

    def _gather_waits(self) -> set[int]:
        behind = 2 if self.is_forward else 1
        return {self._copies_out[-behind]} if len(self._copies_out) >= behind else set()

    def _append(self, run: Run) -> int:
        position = len(self.runs)
        self.runs.append(run._replace(waits=tuple(idx for idx in run.waits if 0 <= idx < position)))
        self._last[run.stream] = position
        return position

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Know what `fully_shard` gathers, copies and reduces, and what half-batches send, while inside."""
        group = _fsdp_param_group.FSDPParamGroup
        names = {"unshard": "gather", "wait_for_unshard": "copy", "post_backward": "copy"}
        before = {name: getattr(group, name) for name in names}
        reduce = _fsdp_param_group.foreach_reduce
        for name, within in names.items():
            setattr(group, name, self._marked(before[name], within))
        _fsdp_param_group.foreach_reduce = self._marked(reduce, "reduce")  # type: ignore[attr-defined]
        start = Transfer.__init__
        Transfer.__init__ = self._overlapping(start)  # type: ignore[method-assign]
        try:
            yield
        finally:
            Transfer.__init__ = start  # type: ignore[method-assign]
            for name, original in before.items():
                setattr(group, name, original)
            _fsdp_param_group.foreach_reduce = reduce  # type: ignore[attr-defined]

    def _overlapping(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose collectives run beside what comes after them, up to what reads them."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._is_between_halves = True
            try:
                return function(*args, **kwargs)
            finally:
                self._is_between_halves = False

        return run

    def _note_hooks(self, group: Any) -> None:
        """Note what the hooks of a sharded unit take of the host in a pass; groups of parameters of one unit share them."""
        unit = id(group.modules[0])
        if self.is_on and unit != self._unit:
            self._append(Run("parameter_copies", "hooks", 0.0, host_s=self.costs.unit_s))
        self._unit = unit

    def _marked(self, function: Callable[..., Any], within: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            outer, self._within = self._within, within
            if function.__name__ == ("wait_for_unshard" if self.is_forward else "post_backward"):
                self._note_hooks(args[0])
            if function.__name__ == "post_backward":
                # The last group of a unit, whose backward pass ends first, waits for what earlier units reduce.
                self._is_first_of_unit = args[0]._param_group_index == args[0]._num_param_groups - 1
            if within == "reduce" and self._is_first_of_unit and self.is_on and "reduce" in self._last:
                self._append(Run("parameter_copies", "wait", 0.0, waits=(self._last["reduce"],)))
            try:
                return function(*args, **kwargs)
            finally:
                self._within, self._is_sent = outer, False

        return run


def tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    """Iterate over the tensors among values and in lists and tuples of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_of(value)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensor: Tensor) -> int:
    """Return what a kernel reads or writes of a tensor: not more than there is, where it is expanded."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    names = [argument.name for argument in func._schema.arguments]
    position = names.index(name)
    return args[position] if position < len(args) else kwargs.get(name, func._schema.arguments[position].default_value)
