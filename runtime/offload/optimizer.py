"""AdamW whose states lie on the device, in the host's memory or in a file, parameter by parameter, behind one optimizer.

| place    | states                  | who updates                                         | bytes of fp32 that move in a step   |
|----------|-------------------------|-----------------------------------------------------|-------------------------------------|
| own      | with the parameter      | the device, or the host under CPUOffloadPolicy      | none here                           |
| host     | host, with a copy of it | the host's processors                               | gradient down 4, new parameter up 4 |
| streamed | host                    | the device, while the next ones come and others go  | states up 8, states down 8          |

The update is torch's fused AdamW everywhere, so that where device and host are both CPUs no bit differs from an optimizer without
offload; a GPU's and a CPU's kernel may round the last place differently.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from ..models.layers import local_tensor
from .copies import Copies, HostBuffer, StateFile

Place = Literal["own", "host", "streamed"]
T = TypeVar("T")

_MOMENTS = ("exp_avg", "exp_avg_sq")
_AS_ADAMW = {
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": True,
    "decoupled_weight_decay": True,
}
"""What `torch.optim.AdamW` has in its groups, so that it may take them over."""


@dataclass(frozen=True)
class Placement:
    """Where a parameter's optimizer states lie; ``is_stored``: in a file instead of the host's memory."""

    place: Place = "own"
    is_stored: bool = False


@dataclass(eq=False)
class _States:
    """What the optimizer has of one parameter away from the device.

    Attributes:
        moments: [2, *shape] on the host, or a view of the file.
        start: of the moments in the file; None in memory.
        copy: the parameter on the host, where the host updates it; ``copied`` tells which contents of the parameter it holds.
    """

    parameter: nn.Parameter
    place: Place
    moments: Tensor
    start: int | None = None
    copy: Tensor | None = None
    copied: tuple[int, int, int] | None = None

    @property
    def local(self) -> Tensor:
        return local_tensor(self.parameter)

    @property
    def gradient(self) -> Tensor:
        assert self.parameter.grad is not None
        return local_tensor(self.parameter.grad)

    @property
    def contents(self) -> tuple[int, int, int]:
        """Return what changes whenever the parameter does: a DTensor and its local part count changes apart."""
        return self.local.data_ptr(), self.local._version, self.parameter._version


@dataclass(eq=False)
class _Moments:
    """The moments of one update in the host's memory: where they live, or a buffer that they are being read into."""

    group: dict[str, Any]
    states: _States
    host: Tensor
    buffer: HostBuffer | None = None
    reading: Future[None] | None = None


@dataclass(eq=False)
class _Gradient:
    """A gradient in the host's memory, once it is down."""

    host: Tensor
    buffer: HostBuffer | None = None
    down: torch.cuda.Event | None = None


_Work = Sequence[tuple[dict[str, Any], _States]]
_OnDevice = tuple[_Moments, Tensor, torch.cuda.Event | None]
"""Moments, their copy on the device, and the event (CUDA) when it is there, or down again."""


class OffloadedAdamW(torch.optim.Optimizer):
    """AdamW over the parameters of one rank, with the states of `torch.optim.AdamW`: a checkpoint of either loads into the other.

    Args:
        placements: of the parameters; those that are not named have their states with them.
        folder: where the file of stored states is made.

    Raises:
        ConfigError: the file's folder cannot be written or has too little space.
        MeshwrightError: the host lacks the memory.
    """

    @torch.no_grad()
    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        placements: Mapping[nn.Parameter, Placement],
        copies: Copies,
        *,
        learning_rate: float,
        betas: tuple[float, float],
        folder: str | None = None,
    ) -> None:
        super().__init__(groups, {"lr": learning_rate, "betas": betas, **_AS_ADAMW})
        self._copies = copies
        self._leaving: torch.cuda.Event | None = None
        self._writing: list[tuple[Future[None], HostBuffer]] = []
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        placed = {parameter: placements[parameter] for parameter in parameters if parameter in placements}
        stored = [parameter for parameter, placement in placed.items() if placement.is_stored]
        # Where the moments of each begin in the file, at a page of its own, and where the file ends.
        pages = (-(-2 * local_tensor(parameter).nbytes // mmap.PAGESIZE) for parameter in stored)
        *starts, end = accumulate(pages, lambda start, size: start + size * mmap.PAGESIZE, initial=0)
        self._file = None if folder is None or not stored else StateFile(folder, end, copies.traffic)
        start_of = dict(zip(stored, starts, strict=True))
        self._away = {
            parameter: self._states(parameter, placement, start_of.get(parameter))
            for parameter, placement in placed.items()
            if placement != Placement()
        }
        for parameter in parameters:
            self._make_state(parameter)
        self.register_state_dict_pre_hook(lambda _: self._settle())

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; the device's work and the host's run side by side.

        Raises:
            MeshwrightError: stored states cannot be read or written.
        """
        assert closure is None
        groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        away = [(group, self._away[p]) for group, chosen in groups for p in chosen if p in self._away]
        on_host = [(group, states) for group, states in away if states.place != "streamed"]
        gradients = [self._bring_down(states) for _, states in on_host]
        for group, chosen in groups:
            self._update_on_device(group, [p for p in chosen if p not in self._away])
        self._update_streamed([(group, states) for group, states in away if states.place == "streamed"])
        self._update_on_host(on_host, gradients)
        for transfer, buffer in self._writing:
            transfer.result()
            self._copies.give_back(buffer)
        self._writing.clear()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over states into the places they have here; torch's own would first put them all on the device."""
        self._settle()
        for group, given in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in given.items() if name != "params" and name in group})
            for parameter, key in zip(group["params"], given["params"], strict=True):
                for name, value in state_dict["state"].get(key, {}).items():
                    local_tensor(self.state[parameter][name]).copy_(local_tensor(torch.as_tensor(value)))

    def _states(self, parameter: nn.Parameter, placement: Placement, start: int | None) -> _States:
        local = local_tensor(parameter)
        if start is None:
            data = self._copies.allocate(2 * local.nbytes)
        else:
            assert self._file is not None
            data = self._file.view(start, 2 * local.nbytes)
        states = _States(parameter, placement.place, data.view(local.dtype).view(2, *local.shape), start)
        if placement.place == "host":
            states.copy = self._copies.allocate(local.nbytes).view(local.dtype).view(local.shape)
        return states

    def _make_state(self, parameter: nn.Parameter) -> None:
        """Make zero states under torch's names; fresh pages and fresh files are zero."""
        away, local = self._away.get(parameter), local_tensor(parameter)
        moments = local.new_zeros((2, *local.shape)) if away is None else away.moments
        if isinstance(parameter, DTensor):
            # By the constructor: `DTensor.from_local` would move states to the device.
            parts = [DTensor(part, parameter._spec, requires_grad=False) for part in moments]
        else:
            parts = list(moments)
        step = torch.zeros((), dtype=torch.float32, device=moments.device)
        self.state[parameter] = {"step": step, **dict(zip(_MOMENTS, parts, strict=True))}

    def _update_on_device(self, group: dict[str, Any], parameters: Sequence[nn.Parameter]) -> None:
        if parameters:
            states = [self.state[parameter] for parameter in parameters]
            moments = [[local_tensor(state[name]) for state in states] for name in _MOMENTS]
            gradients = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
            steps = [state["step"] for state in states]
            _update(group, [local_tensor(parameter) for parameter in parameters], gradients, moments, steps)

    def _update_streamed(self, work: _Work) -> None:
        """Update each on the device, while the states of the next one come and those of the one before go."""
        for leaving in _one_ahead(self._updated(work)):
            moments, self._leaving = leaving[0], leaving[2]
            self._copies.wait(self._leaving)
            del leaving  # the device's copy may go now that it is down; with a file it goes on from there
            if moments.buffer is not None:
                self._settle()
                self._write(moments)

    def _updated(self, work: _Work) -> Iterator[_OnDevice]:
        for moments, on_device, arrived in _one_ahead(self._arriving(work)):
            self._copies.wait(arrived)
            states, (first, second) = moments.states, on_device
            step = self.state[states.parameter]["step"]
            device_step = step.to(on_device.device, copy=True)
            _update(moments.group, [states.local], [states.gradient], [[first], [second]], [device_step])
            step += 1
            yield moments, on_device, self._copies.to_host(on_device, moments.host)

    def _arriving(self, work: _Work) -> Iterator[_OnDevice]:
        for moments in self._on_host(work):
            on_device = torch.empty_like(moments.host, device=moments.states.local.device)
            yield moments, on_device, self._copies.to_device(moments.host, on_device)

    def _update_on_host(self, work: _Work, gradients: Sequence[_Gradient]) -> None:
        for moments, gradient in zip(self._on_host(work), gradients, strict=True):
            states, (first, second) = moments.states, moments.host
            if gradient.down is not None:
                gradient.down.synchronize()
            step = self.state[states.parameter]["step"]
            target = states.local if states.copy is None else states.copy
            _update(moments.group, [target], [gradient.host], [[first], [second]], [step])
            if states.copy is not None:
                self._copies.wait(self._copies.to_device(states.copy, states.local))
                states.copied = states.contents
            if gradient.buffer is not None:
                self._copies.give_back(gradient.buffer)
            self._write(moments)

    def _bring_down(self, states: _States) -> _Gradient:
        """Bring down the gradient, and the parameter where something else than this optimizer has changed it."""
        gradient = states.gradient
        if states.copy is None:  # on the host already, as its parameter is
            return _Gradient(gradient)
        if states.copied != states.contents:
            self._copies.to_host(states.local, states.copy)
        buffer = self._copies.take(gradient.nbytes)
        target = buffer.data[: gradient.nbytes].view(gradient.dtype).view(gradient.shape)
        return _Gradient(target, buffer, self._copies.to_host(gradient, target, after=buffer.read))

    def _on_host(self, work: _Work) -> Iterator[_Moments]:
        """Yield moments in the host's memory; of stored ones the next are being read."""
        for moments in _one_ahead(self._read(group, states) for group, states in work):
            if moments.reading is not None:
                moments.reading.result()
            yield moments

    def _read(self, group: dict[str, Any], states: _States) -> _Moments:
        if states.start is None:
            return _Moments(group, states, states.moments)
        assert self._file is not None
        buffer = self._copies.take(states.moments.nbytes)
        if buffer.read is not None:
            buffer.read.synchronize()
        data = buffer.data[: states.moments.nbytes]
        host = data.view(states.moments.dtype).view(states.moments.shape)
        return _Moments(group, states, host, buffer, self._file.read(states.start, data))

    def _write(self, moments: _Moments) -> None:
        if moments.buffer is not None:
            assert self._file is not None
            assert moments.states.start is not None
            data = moments.buffer.data[: moments.host.nbytes]
            self._writing.append((self._file.write(moments.states.start, data), moments.buffer))

    def _settle(self) -> None:
        """Wait for what is on its way down, before anything but a later update reads the host's states."""
        if self._leaving is not None:
            self._leaving.synchronize()


def _one_ahead(items: Iterable[T]) -> Iterator[T]:
    """Yield each item when the next one, whose transfer has begun with it, has been made."""
    made: deque[T] = deque()
    for item in items:
        made.append(item)
        del item  # or it would live a turn longer
        if len(made) > 1:
            yield made.popleft()
    yield from made


def _update(
    group: dict[str, Any],
    parameters: list[Tensor],
    gradients: list[Tensor],
    moments: list[list[Tensor]],
    steps: list[Tensor],
) -> None:
    beta1, beta2 = group["betas"]
    options = {name: group[name] for name in ("lr", "weight_decay", "eps")}
    adamw(
        parameters, gradients, *moments, [], steps,
        fused=True, amsgrad=False, maximize=False, beta1=beta1, beta2=beta2, **options,
    )  # fmt: skip
