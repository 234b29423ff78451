"""One call of a module as a tape: calls of its units, and the functions of torch between them.

Units (blocks, and modules with parameters outside of blocks) are called as they are; what is between them is the user's code, noted
function by function on tensors without contents. So any part of a call can be made by itself: of a pipeline, what a stage has to.
What cannot be noted is refused: code that looks at values, and tensors that nobody knows where they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ...schema.errors import ConfigError
from .fakes import on_fakes
from .splits import storage_key
from .trials import attributes_of, stored_since
from .units import Unit, find_units

_IN_PLACE = frozenset(
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
)

RANDOM = ("dropout", "rand", "normal", "bernoulli", "multinomial", "uniform", "exponential_")
"""Functions that draw: what they make is made once."""


class Ref(NamedTuple):
    """A value of the tape."""

    value: int


class State(NamedTuple):
    """A parameter or buffer, by its path."""

    path: str


class Kind(NamedTuple):
    """What a value is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool


@dataclass
class Step:
    """A call of a unit, at ``path``, or of a function.

    Attributes:
        leaves, spec: its arguments, flattened; tensors as `Ref` and `State`.
        outs: the value of each leaf of what it returns; None for what is no tensor.
        renamed: values that it writes into, and what these are from then on.
        is_random: two calls differ.
        writes_state: it writes into a parameter or buffer by itself.
    """

    path: str
    function: Callable[..., Any] | None
    leaves: list[Any]
    spec: TreeSpec
    outs: list[int | None] = field(default_factory=list)
    renamed: list[tuple[int, int]] = field(default_factory=list)
    has_grad_mode: bool = True
    is_random: bool = False
    writes_state: bool = False

    @property
    def reads(self) -> list[int]:
        """The values that it reads."""
        return [leaf.value for leaf in self.leaves if isinstance(leaf, Ref)] + [old for old, _ in self.renamed]

    @property
    def states(self) -> list[str]:
        """The parameters and buffers that it reads by itself."""
        return [leaf.path for leaf in self.leaves if isinstance(leaf, State)]

    @property
    def makes(self) -> list[int]:
        """The values that are there after it."""
        return [value for value in self.outs if value is not None] + [new for _, new in self.renamed]


@dataclass
class Tape:
    """A recorded call.

    Attributes:
        inputs: value of each tensor of the batch; kinds: of every value; units: all paths, called or not; parameters: paths.
        outputs: what the module returns, flattened, tensors as `Ref`.
    """

    inputs: list[int]
    steps: list[Step]
    kinds: list[Kind]
    units: list[str]
    parameters: set[str]
    outputs: list[Any]
    out_spec: TreeSpec


def record(twin: nn.Module, mode: FakeTensorMode, batch: Any, blocks: str) -> Tape:
    """Return the tape of a call.

    Args:
        twin: the module on fake tensors (`trials.fake_twin`).
        batch: tensors to call it with (their values do not count): a tensor, or several by position or by name.
        blocks: path of the container whose children are units, whatever is in them.

    Raises:
        ConfigError: the call cannot be noted; the message names what.
    """
    listed = [Unit(f"{blocks}.{name}", block) for name, block in twin.get_submodule(blocks).named_children()]
    units = [*listed, *(unit for unit in find_units(twin) if not unit.path.startswith(f"{blocks}."))]
    with on_fakes(twin, mode), ExitStack() as hooks:
        given = [torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in tree_leaves(batch)]
        recorder = _Recorder(twin, given)
        for unit in units:
            hooks.callback(unit.module.register_forward_pre_hook(recorder.enter, with_kwargs=True).remove)
            hooks.callback(unit.module.register_forward_hook(recorder.leave(unit.path), with_kwargs=True).remove)
        args, kwargs = called_with(tree_unflatten(given, tree_flatten(batch)[1]))
        before, within = attributes_of(twin), tuple(f"{unit.path}." for unit in units)
        buffers = {path: buffer for path, buffer in twin.named_buffers() if not path.startswith(within)}
        with recorder:
            try:
                output = twin(*args, **kwargs)
            except DataDependentOutputException as error:
                raise ConfigError(
                    f"{type(twin).__name__} computes by values of its inputs ({error.func}), which every stage would have to see"
                ) from None
    if anew := [path for path, buffer in twin.named_buffers() if buffers.get(path, buffer) is not buffer]:
        raise ConfigError(
            f"{type(twin).__name__} puts another tensor in the place of its buffer {anew[0]} between its blocks"
        )
    for each, name in stored_since(before):
        if not f"{each.path}.".startswith(within):
            attribute = f"{each.path}.{name}".lstrip(".")
            raise ConfigError(f"{type(twin).__name__} keeps a tensor of the call in its attribute {attribute}")
    leaves, spec = tree_flatten(output)
    outputs = [recorder.noted(leaf, "what it puts out") for leaf in leaves]
    parameters = {path for path, _ in twin.named_parameters(remove_duplicate=False)}
    return Tape(
        recorder.inputs, recorder.steps, recorder.kinds, [unit.path for unit in units], parameters, outputs, spec
    )


def called_with(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call on a batch: a tensor, or several by position or by name."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, Sequence) else ((batch,), {})


class _Recorder(TorchFunctionMode):
    def __init__(self, twin: nn.Module, given: Sequence[Tensor]) -> None:
        super().__init__()
        state = (*twin.named_parameters(), *twin.named_buffers())
        self._paths = {id(tensor): path for path, tensor in state}
        self._name, self._depth = type(twin).__name__, 0
        self._calls: list[tuple[Any, Any, list[Any], TreeSpec]] = []
        self._values: dict[int, int] = {}
        self._alive: list[Tensor] = []
        self.steps: list[Step] = []
        self.kinds: list[Kind] = []
        self.inputs = [self._new(tensor) for tensor in given]

    def _new(self, tensor: Tensor) -> int:
        self._alive.append(tensor)  # so that no other gets its id
        self._values[id(tensor)] = len(self.kinds)
        self.kinds.append(Kind(tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
        return len(self.kinds) - 1

    def noted(self, leaf: Any, where: str) -> Any:
        """Return what stands for a leaf of arguments on the tape."""
        if not isinstance(leaf, Tensor):
            fields = vars(leaf).values() if hasattr(leaf, "__dict__") and not isinstance(leaf, type | nn.Module) else ()
            if any(isinstance(part, Tensor) for part in fields):
                raise ConfigError(
                    f"{self._name} hands on tensors in a {type(leaf).__name__} ({where}), which torch's pytree does not know"
                )
            return leaf
        if isinstance(leaf.grad_fn, BackwardCFunction):  # whose steps were noted as they are without gradients
            made_by = type(leaf.grad_fn).__name__.removesuffix("Backward")
            raise ConfigError(
                f"{self._name} calls {made_by}, a torch.autograd.Function, between its blocks, which is noted in blocks only"
            )
        if id(leaf) in self._values:
            return Ref(self._values[id(leaf)])
        if id(leaf) in self._paths:
            return State(self._paths[id(leaf)])
        if isinstance(leaf, FakeTensor) and leaf.constant is None:
            raise ConfigError(
                f"{self._name} uses a tensor {list(leaf.shape)} in {where} that no function of torch returned to its code"
            )
        return leaf.constant if isinstance(leaf, FakeTensor) else leaf

    def enter(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Note what a unit is called with."""
        if not self._depth:
            leaves, spec = tree_flatten((args, kwargs))
            self._calls.append((args, kwargs, [self.noted(leaf, "the call of a unit") for leaf in leaves], spec))
        self._depth += 1

    def leave(self, path: str) -> Callable[..., None]:
        """Return what notes the end of a unit's call."""

        def leave(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._depth -= 1
            if not self._depth:
                *_, leaves, spec = self._calls.pop()
                self._add(Step(path, None, leaves, spec), output)

        return leave

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._depth:
            return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "__iter__":  # an iterator over what this makes
            return iter(self.__torch_function__(Tensor.unbind, types, args, kwargs))
        writes = name == "__setitem__" or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        leaves, spec = tree_flatten((args, kwargs or {}))
        before = {id(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        output = func(*args, **(kwargs or {}))
        if writes or any(isinstance(leaf, Tensor) and id(leaf) not in before for leaf in tree_leaves(output)):
            noted = [self.noted(leaf, name) for leaf in leaves]
            step = Step("", func, noted, spec, is_random=any(part in name for part in RANDOM))
            self._add(step, output, written=args[0] if writes and args and isinstance(args[0], Tensor) else None)
        return output

    def _add(self, step: Step, output: Any, *, written: Tensor | None = None) -> None:
        step.has_grad_mode = torch.is_grad_enabled()
        if written is not None:
            step.writes_state = id(written) in self._paths
            key = storage_key(written)
            sharing = [t for t in self._alive if id(t) in self._values and storage_key(t) == key]
            for tensor in {id(t): t for t in sharing}.values():
                old = self._values[id(tensor)]
                step.renamed.append((old, self._new(tensor)))
        for leaf in tree_leaves(output):
            is_new = isinstance(leaf, Tensor) and not (written is not None and leaf is written)
            step.outs.append(self._new(leaf) if is_new else None)
        self.steps.append(step)
