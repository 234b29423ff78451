"""What a rank's step allocates, frees, sends and computes, written down operator by operator under fake tensors.

Counted are storages: a view has none of its own, however many there are. An entry begins when an operator's output brings a storage
that is not known, or a storage is resized (as `fully_shard` does with what it gathers), and ends with the storage. What a kernel
holds only while it runs is an entry that ends at once (kernels.py).

An entry's category is known at the end only: what is alive after the pass that made it waits for the backward pass.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ...cost_models.pipeline.orders import Action
from ...schema.errors import RuntimeMismatchError
from ..context_parallel import RING_ATTENTION, ring_attention
from .kernels import FLASH_ON_CPU, GROUPED_PRODUCT, flash_on_cpu, grouped_product
from .trace import OPS, Trace, tensors_of

if TYPE_CHECKING:
    from .repetition import Repetition

Category = Literal[
    "parameters", "gradients", "optimizer", "unsharded", "activations", "logits", "communication", "temporaries"
]
CATEGORIES: tuple[Category, ...] = get_args(Category)

_aten, _prim = torch.ops.aten, torch.ops.prim
_FLASH_ON_CPU: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(
        q.shape, k.shape, v.shape
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_, **__: (
        sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)
    ),
}
"""torch counts no operations of these."""

_FAKES: dict[Any, Callable[..., Any]] = {
    FLASH_ON_CPU: flash_on_cpu,
    GROUPED_PRODUCT: grouped_product,
    torch.ops._c10d_functional.wait_tensor.default: lambda tensor: tensor,
}
"""In place of torch's own fake kernels; its last one returns another tensor where the real one returns what it is given."""

_MAY_COPY = {_aten.to, _aten.contiguous, _aten.reshape, _aten.flatten}
"""Views where the input is of that kind already, else copies; seen where autograd is off, as in the ring's operator."""

_IN_PLACE = {_aten.index_put.default, _aten.scatter_add.default}
"""Backward passes of indexing write into zeros that they have just made, but for tensors of subclasses such as fake ones."""

_STREAMS = {torch.ops.c10d._allgather_base_.default: 1, torch.ops.c10d._reduce_scatter_base_.default: 2}
"""fully_shard allocates what these write to on streams of their own (torch's foreach_all_gather, foreach_reduce)."""


_AXES_OF_OP = {"alltoall": ("ep", "cp"), "allreduce": ("dp_replicate", "tp", "world")}
"""Axes that use a collective, where the same ranks are those of several."""


class Message(NamedTuple):
    """A kind of collective: the axis it goes over and its name."""

    axis: str
    op: str


@dataclass
class Phase:
    """A stretch of the step, from one position in the log to another."""

    name: str
    kind: str
    action: Action | None = None
    start: int = 0
    end: int = -1


@dataclass(eq=False)
class Log:
    """Everything that happened, in order: ``events`` are entries that begin (their index) or end (its complement)."""

    events: list[int] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    ops: list[str] = field(default_factory=list)
    phases: list[int] = field(default_factory=list)
    modules: list[str | int] = field(default_factory=list)
    marks: dict[int, Category] = field(default_factory=dict)
    exchanged: set[int] = field(default_factory=set)
    streams: dict[int, int] = field(default_factory=dict)
    phase_list: list[Phase] = field(default_factory=lambda: [Phase("initial weights", "init")])
    messages: dict[Message, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    flops: Counter[str] = field(default_factory=Counter)
    passes: list[tuple[int, int, str]] = field(default_factory=list)  # autograd's numbers of nodes that a module made
    trace: Trace | None = None

    def module_of(self, entry: int) -> str:
        """Return the module whose forward or backward pass made an entry; empty where none did."""
        where = self.modules[entry]
        if isinstance(where, str):
            return where
        within = [(last - first, name) for first, last, name in self.passes if first <= where < last]
        return min(within)[1] if within else ""


class Recorder(TorchDispatchMode):
    """Writes the log of one rank; to be entered inside a FakeTensorMode.

    Args:
        axes_of_group: axes by the name of a process group; messages within one rank are none.
        workspace: bytes that a kernel holds while it runs, of an operator and its arguments.
    """

    def __init__(
        self, axes_of_group: Mapping[str, Sequence[str]], workspace: Callable[[Any, tuple[Any, ...]], int] | None = None
    ) -> None:
        super().__init__()
        self.log = Log()
        self.current: tuple[Any, tuple[Any, ...]] | None = None
        self.module_names: dict[int, str] = {}
        self._axes, self._workspace = axes_of_group, workspace
        self._alive: dict[int, tuple[int, Any]] = {}  # by storage: its entry, and what tells its end
        self._entries: dict[int, list[int]] = {}  # of a storage that was resized
        self._kinds: dict[Any, str] = {}
        self._path: list[tuple[str, int]] = []
        self.on_part_end: Callable[[], None] = lambda: None
        self.failed_module = ""
        self._is_paused = False
        self.repetition: Repetition | None = None

    # The log

    def begin_phase(self, name: str, kind: str, action: Action | None = None) -> None:
        """Begin another stretch of the step."""
        log = self.log
        log.phase_list[-1].end = len(log.events)
        log.phase_list.append(Phase(name, kind, action, len(log.events)))

    @contextlib.contextmanager
    def part(self, name: str, action: Action | None = None) -> Iterator[None]:
        """Count as `StepClock.part` does, whose place it takes."""
        label = name if action is None else f"{name} of micro-batch {action.micro_batch}, stage {action.stage}"
        repetition = self.repetition
        if repetition is not None and action is not None:
            repetition.begin(action)
        self.begin_phase(label, name, action)
        trace = self.log.trace
        if trace is not None:
            trace.begin_span(action)
        if repetition is not None and repetition.is_copied(action):
            paused = _Pause(self) if repetition.copies_on_begin else contextlib.nullcontext()
            if repetition.copies_on_begin:
                repetition.copy()
            with paused:
                yield
        else:
            yield
            self.on_part_end()
        if trace is not None:
            trace.end_span(action)
        if repetition is not None and action is not None:
            repetition.end()
        self.begin_phase("between passes", "between")

    def mark(self, tensor: Tensor | None, category: Category) -> None:
        """Say what a tensor's storage is, and was wherever it was resized."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local is None:
            return
        key = local.untyped_storage()._cdata
        for entry in self._entries.get(key, ()):
            self.log.marks[entry] = category
        if key in self._alive:
            self.log.marks[self._alive[key][0]] = category

    def end_entries(self) -> None:
        """End the log."""
        self.log.phase_list[-1].end = len(self.log.events)
        if self.repetition is not None:
            self.repetition.finish()

    def _begin(self, num_bytes: int, op: str) -> int:
        log, entry = self.log, len(self.log.num_bytes)
        log.num_bytes.append(num_bytes)
        log.ops.append(op)
        log.phases.append(len(log.phase_list) - 1)
        node = torch._C._current_autograd_node() if not self._path else None
        log.modules.append(node._sequence_nr() if node is not None else self._path[-1][0] if self._path else "")
        log.events.append(entry)
        return entry

    def _see(self, tensor: Tensor, op: str) -> None:
        """Begin an entry for a tensor's storage unless it has one."""
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        num_bytes = storage.nbytes()
        entry = self._begin(num_bytes, op) if num_bytes else -1
        self._alive[key] = entry, weakref.ref(storage, lambda _: self._end(key))

    def _end(self, key: int) -> None:
        entry, _ = self._alive.pop(key)
        self._entries.pop(key, None)
        self._end_entry(entry)

    def _end_entry(self, entry: int) -> None:
        if entry >= 0:
            if self.repetition is not None:
                self.repetition.on_end(entry)
            self.log.events.append(~entry)

    def entry_of(self, tensor: Tensor) -> int:
        """Return the entry of a tensor's storage, -1 where it has none."""
        return self._alive.get(tensor.untyped_storage()._cdata, (-1, None))[0]

    def copy_entry(self, source: int) -> int:
        """Begin an entry like another."""
        log = self.log
        entry = self._begin(log.num_bytes[source], log.ops[source])
        log.modules[entry] = log.modules[source]
        if source in log.streams:
            log.streams[entry] = log.streams[source]
        if source in log.exchanged:
            log.exchanged.add(entry)
        return entry

    def _resize(self, storage: torch.UntypedStorage, resize: Callable[..., Any], size: int) -> Any:
        result = resize(storage, size)
        key = storage._cdata
        if key in self._alive:
            entry, reference = self._alive[key]
            self._end_entry(entry)
            new = self._begin(size, "resize_") if size else -1
            self._alive[key] = new, reference
            self._entries.setdefault(key, [] if entry < 0 else [entry])
            if new >= 0:
                self._entries[key].append(new)
        return result

    # What happens

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in here: spare every operator a wrapper

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Write down what an operator makes."""
        if func is _prim.device.default:
            return args[0].fake_device if hasattr(args[0], "fake_device") else func(*args)
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if self._is_paused:
            return func(*args, **(kwargs or {}))
        kind = self._kinds.get(func) or self._learn(func)
        run = _FAKES.get(func, func)
        if kind == "view":
            return func(*args, **(kwargs or {}))
        self.current = func, args
        if kind == "ring":  # one operator for torch, of which what happens within counts
            with self:
                return ring_attention._init_fn(*args)
        if kind == "scalar":
            return self._scalar(args[0])
        if kind == "bincount":
            return self._bincount(*args, **(kwargs or {}))
        out = run(*args, **(kwargs or {}))
        self._trace(func, args, kwargs or {}, out)
        if kind == "in place" and torch._C._current_autograd_node() is not None:
            return args[0]
        if kind == "message":
            self._count_message(func, args, out)
        elif kind == "flops":
            packet = func._overloadpacket
            count = flop_registry[packet] if packet in flop_registry else _FLASH_ON_CPU[packet]
            self.log.flops[packet.__name__] += int(count(*args, **(kwargs or {}), out_val=out))
        for tensor in tensors_of((out,)):
            self._see(tensor, str(func))
        if self._workspace is not None and (bytes_taken := self._workspace(func, args)):
            self.log.events.append(~self._begin(bytes_taken, str(func)))
        return out

    def _trace(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Note a kernel with the pass that it is of, if the step is timed."""
        trace = self.log.trace
        if trace is not None and trace.is_on and func.namespace not in ("c10d", "_c10d_functional", "_dtensor"):
            trace.note(func, args, kwargs, out, self.pass_name)

    @property
    def pass_name(self) -> str:
        """Return forward, backward, again (a forward pass that is recomputed) or optimizer (whatever is outside passes)."""
        kind = self.log.phase_list[-1].kind
        if kind == "backward":
            return "again" if self._path else "backward"
        return "forward" if kind == "forward" else "optimizer"

    def note_norm(self, x: Tensor, *, is_backward: bool) -> None:
        """Note a norm, for which a rehearsal runs no operator."""
        if self.log.trace is not None and not self._is_paused:
            self.log.trace.note_norm(x, is_backward=is_backward, again=self.pass_name == "again")

    def _learn(self, func: Any) -> str:
        returns = func._schema.returns
        if func._overloadpacket in _MAY_COPY:
            kind = "new"
        elif func.is_view or func.namespace == "profiler" or func._overloadpacket in (_aten.detach, _aten.t):
            kind = "view"
        elif func is RING_ATTENTION:
            kind = "ring"
        elif func is _aten._local_scalar_dense.default:
            kind = "scalar"
        elif func is _aten.bincount.default:
            kind = "bincount"
        elif func in _IN_PLACE:
            kind = "in place"
        elif func.namespace in ("c10d", "_c10d_functional", "_dtensor") and "wait_tensor" not in str(func):
            kind = "message"
        elif func._overloadpacket in flop_registry or func._overloadpacket in _FLASH_ON_CPU:
            kind = "flops"
        elif self._workspace is None and returns and all(item.alias_info is not None for item in returns):
            kind = "view"  # in place
        else:
            kind = "new"
        self._kinds[func] = kind
        return kind

    def _scalar(self, tensor: Tensor) -> float:
        """Return a loss or a norm, which the step itself reads, or 1 where ranks ask whether all agree; a model may read none."""
        phase = self.log.phase_list[-1]
        if self._path or phase.kind in ("forward", "backward"):
            raise RuntimeMismatchError(
                "the value of a tensor decides what runs next, and a rehearsal has shapes only",
                details=(f"read in {phase.name}, {self.module or 'outside the model'}",),
            )
        return 0.5 if tensor.is_floating_point() else 1

    @staticmethod
    def _bincount(values: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        return torch.empty(minlength, dtype=torch.long, device=values.device)

    def _count_message(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        tensors, group, result = list(tensors_of(args)), "", out
        for arg in args:
            if isinstance(arg, str) and arg in self._axes:
                group = arg
            elif isinstance(arg, torch.ScriptObject):
                with contextlib.suppress(RuntimeError, ValueError, TypeError):
                    group = ProcessGroup.unbox(arg).group_name
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key in self._alive:
                self.log.exchanged.add(self._alive[key][0])
        stream = _STREAMS.get(func)
        if stream and (out := self._alive.get(tensors[0].untyped_storage()._cdata)) is not None:
            self.log.streams[out[0]] = stream
        if group not in self._axes or not tensors:
            return
        axes, op = self._axes[group], func._overloadpacket.__name__
        preferred = next((names for part, names in _AXES_OF_OP.items() if part in op.replace("_", "")), ())
        axis = next((axis for axis in preferred if axis in axes), axes[0])
        entry = self.log.messages[Message(axis, op)]
        outputs = list(tensors_of((result,)))
        size = max(tensor.numel() * tensor.element_size() for tensor in (*tensors, *outputs))
        entry[0] += 1
        entry[1] += size
        if self.log.trace is not None:
            self.log.trace.note_message(axis, OPS.get(op, op), size, group, [*tensors, *outputs])

    # Where it happens

    @property
    def module(self) -> str:
        """Return the innermost module whose forward pass runs."""
        return self._path[-1][0] if self._path else ""

    @contextlib.contextmanager
    def without_trials(self) -> Iterator[None]:
        """Write nothing down of what DTensor runs on entire shapes, to learn those of outputs, while inside."""
        lock = ShardingPropagator._fake_mode_lock
        ShardingPropagator._fake_mode_lock = _Pause(self)  # type: ignore[assignment]
        try:
            yield
        finally:
            ShardingPropagator._fake_mode_lock = lock

    @contextlib.contextmanager
    def watching(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Know the modules by name, and when a storage is resized, while inside."""
        names = {id(module): name for name, module in modules.items()}
        resize = torch.UntypedStorage.resize_

        def enter(module: nn.Module, _: Any) -> None:
            if (name := names.get(id(module))) is not None:
                self._path.append((name, torch.autograd._get_sequence_nr()))

        def leave(module: nn.Module, *_: Any) -> None:
            if id(module) in names and self._path:
                name, first = self._path.pop()
                self.log.passes.append((first, torch.autograd._get_sequence_nr(), name))
                self.failed_module = self.failed_module or (name if sys.exc_info()[0] is not None else "")

        self._path.clear()
        hooks = [
            nn.modules.module.register_module_forward_pre_hook(enter),
            nn.modules.module.register_module_forward_hook(leave, always_call=True),
        ]
        torch.UntypedStorage.resize_ = lambda storage, size: self._resize(storage, resize, size)  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
            for hook in hooks:
                hook.remove()


class _Pause:
    """Lets a recorder write nothing down while inside."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._before = recorder, list[bool]()

    def __enter__(self) -> None:
        self._before.append(self._recorder._is_paused)
        self._recorder._is_paused = True

    def __exit__(self, *_: object) -> None:
        self._recorder._is_paused = self._before.pop()
