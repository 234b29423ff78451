"""Activations that wait for their backward pass in the host's memory, layer by layer.

What autograd saves in a block's forward pass goes down as soon as it is saved, each tensor storage once however many views of it
are saved, in this block or the next ones. Parameters, buffers and tables that live on anyway stay, and so do tensors too small to
be worth a copy. In the backward pass they come up while the blocks behind are computed: ``prefetch_layers`` offloaded
blocks ahead, in the order of the backward passes.

Under full recompute autograd saves only the checkpoint's input, so the same hooks outside the checkpoint move just that (a
"boundary"). Selective recompute keeps its tensors where hooks do not see them in torch up to 2.13, so plans do not offload those.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...schema.offload import LayerOffload
from ..models.attention import Rotary
from ..models.decoder import Decoder
from ..models.layers import local_tensor
from .copies import Copies, HostBuffer

_SMALLEST_BYTES = {"cpu": 1 << 10}
_SMALLEST_ELSEWHERE = 1 << 18
"""Storages below stay on the device: a copy takes longer to start (10 us) than to do."""

_LAYERS_IN_FLIGHT = 1
"""Blocks whose tensors may still be on their way down while the next one is computed; before another one starts, they are gone."""


class ActivationOffload:
    """What the blocks of one rank have on the host.

    Args:
        smallest_bytes: storages below stay on the device.
        prefetch_layers: offloaded blocks whose tensors may be back before their backward pass.
    """

    def __init__(self, copies: Copies, *, prefetch_layers: int = 1, smallest_bytes: int | None = None) -> None:
        self.copies, self.prefetch_layers = copies, prefetch_layers
        default = _SMALLEST_BYTES.get(copies.device.type, _SMALLEST_ELSEWHERE)
        self.smallest_bytes = default if smallest_bytes is None else smallest_bytes
        self._leaving: deque[_LayerPass] = deque()

    def apply(self, stage: Decoder, offload_of: Callable[[int], LayerOffload]) -> None:
        """Wrap the blocks of a stage, in place, each as ``offload_of`` says of its index in ``ModelSpec.iter_layers``.

        To be called after `apply_recompute`, which wraps the same ``forward``: hooks must lie outside a checkpoint.
        """
        blocks = [(block, offload_of(int(name) + 1)) for name, block in stage.model.layers.items()]
        if all(offload == "none" for _, offload in blocks):
            return
        run = _Run()
        for position, (block, offload) in enumerate(blocks):
            block.forward = _BlockForward(self, run, block, is_first=position == 0, offloads=offload != "none")

    def leave(self, layer: _LayerPass) -> None:
        """End a forward pass: the device forgets what went down before it."""
        self._leaving.append(layer)
        in_flight = _LAYERS_IN_FLIGHT if self.copies.down is not None else 0
        while len(self._leaving) > in_flight:
            for saved in self._leaving.popleft().alive():
                saved.forget_device()

    def fetch(self, layer: _LayerPass) -> None:
        """Start to bring up what a block needs whose backward pass begins, and the offloaded ones before it."""
        ahead: _LayerPass | None = layer
        count = -int(layer.offloads)
        while ahead is not None and count < self.prefetch_layers:
            if ahead.offloads:
                count += 1
                for saved in reversed(list(ahead.alive())):
                    saved.fetch()
            ahead = ahead.previous


class _Run:
    """One stage's forward passes of one micro-batch: the blocks one after another, and the storages they saved."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin the next micro-batch, whose storages are others."""
        self.last: _LayerPass | None = None
        self.known: weakref.WeakValueDictionary[tuple[int, int], _Saved] = weakref.WeakValueDictionary()


@dataclass(eq=False)
class _LayerPass:
    """One block's forward pass, and through ``previous`` the ones whose backward passes follow its own."""

    offloads: bool
    previous: _LayerPass | None
    first_saved: list[weakref.ref[_Saved]] = field(default_factory=list)

    def alive(self) -> Iterator[_Saved]:
        """Iterate over storages that it was the first to save and whose backward pass is not over, in order."""
        return (saved for saved in (ref() for ref in self.first_saved) if saved is not None)


class _BlockForward:
    """A block's forward pass whose saved tensors go to the host, or which only tells when its backward pass begins."""

    def __init__(
        self, offload: ActivationOffload, run: _Run, block: nn.Module, *, is_first: bool, offloads: bool
    ) -> None:
        self._offload, self._run, self._block, self._forward = offload, run, block, block.forward
        self._is_first, self._offloads = is_first, offloads

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        run = self._run
        if self._is_first:
            run.begin()
        layer = run.last = _LayerPass(self._offloads, run.last)
        if self._offloads:
            packer = _Packer(self._offload, run, layer, self._block)
            with saved_tensors_hooks(packer.pack, _unpack):
                output = self._forward(*args, **kwargs)
            self._offload.leave(layer)
        else:
            output = self._forward(*args, **kwargs)
        offload = self._offload
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: offload.fetch(layer))  # the gradient is there: the backward pass begins
        return output


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Packer:
    """The pack hook of one block's forward pass."""

    def __init__(self, offload: ActivationOffload, run: _Run, layer: _LayerPass, block: nn.Module) -> None:
        self._offload, self._run, self._layer = offload, run, layer
        # What lives on whatever is saved: parameters as they are now (gathered, under FSDP), buffers and tables.
        self._resident = {_key(local_tensor(tensor)) for tensor in (*block.parameters(), *block.buffers())}
        values = (value for module in block.modules() for value in vars(module).values())
        self._rotaries = [value for value in values if isinstance(value, Rotary)]

    def pack(self, tensor: Tensor) -> Tensor | _View:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if not self._moves(local):
            return tensor
        spec = tensor._spec if isinstance(tensor, DTensor) else None
        shape = (local.dtype, local.shape, local.stride(), local.storage_offset())
        return _View(self._saved(local), *shape, spec)

    def _moves(self, tensor: Tensor) -> bool:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
            return False
        if tensor.is_conj() or tensor.is_neg() or tensor.device.type != self._offload.copies.device.type:
            return False
        expanded = any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if expanded or tensor.untyped_storage().nbytes() < max(self._offload.smallest_bytes, 1):
            return False
        if tensor.is_leaf and tensor.requires_grad:
            return False
        # The first pass makes the tables, so they are read here and not once before.
        tables = {_key(table) for rotary in self._rotaries for table in rotary.made_tables}
        return _key(tensor) not in self._resident and _key(tensor) not in tables

    def _saved(self, tensor: Tensor) -> _Saved:
        # A storage that was changed in place since it was copied is another one.
        key = (_key(tensor), tensor._version)
        saved = self._run.known.get(key)
        if saved is None:
            saved = _Saved(self._offload.copies, tensor)
            self._run.known[key] = saved
            self._layer.first_saved.append(weakref.ref(saved))
        return saved


@dataclass(frozen=True)
class _View:
    """What autograd holds instead of a tensor; with the last view of a storage its host buffer is free again."""

    saved: _Saved
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    spec: Any

    def tensor(self) -> Tensor:
        """Return the tensor as it was saved, on the device."""
        storage = self.saved.on_device().untyped_storage()
        with torch.no_grad():
            empty = torch.empty(0, dtype=self.dtype, device=storage.device)
            local = empty.set_(storage, self.offset, self.shape, self.stride)  # type: ignore[call-overload]
        return local if self.spec is None else DTensor(local, self.spec, requires_grad=False)


def _unpack(packed: Tensor | _View) -> Tensor:
    return packed.tensor() if isinstance(packed, _View) else packed


class _Saved:
    """One storage: on the device until its copy is over, then on the host, then back; it ends with its last view."""

    def __init__(self, copies: Copies, tensor: Tensor) -> None:
        self._copies = copies
        storage = tensor.untyped_storage()
        self._identity = StorageWeakRef(storage)  # keeps its address from another one's while this is known by it
        with torch.no_grad():
            empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
            full: Tensor = empty.set_(storage, 0, (storage.nbytes(),), (1,))  # type: ignore[call-overload]
        self._bytes: Tensor | None = full
        self._num_bytes = full.numel()
        self._buffer: HostBuffer = copies.take(self._num_bytes)
        self._down = copies.to_host(full, self._buffer.data[: self._num_bytes], after=self._buffer.read)
        self._up: torch.cuda.Event | None = None
        weakref.finalize(self, copies.give_back, self._buffer).atexit = False

    def forget_device(self) -> None:
        """Drop the device's copy; the compute stream, which takes the memory again, waits until it has gone down."""
        self._copies.wait(self._down)
        self._bytes = None

    def fetch(self) -> None:
        """Start to bring it up, unless it is on the device."""
        if self._bytes is None:
            self._bytes = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._copies.device)
            self._up = self._copies.to_device(self._buffer.data[: self._num_bytes], self._bytes)
            self._buffer.read = self._up

    def on_device(self) -> Tensor:
        """Return its bytes [n], once they are on the device."""
        self.fetch()
        assert self._bytes is not None
        self._copies.wait(self._up)
        return self._bytes
