"""Activations on the host: the same numbers, no more bytes than there are, and memory that is really free in between."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from meshwright.runtime import Decoder
from meshwright.runtime.models.decoder import init_weights
from meshwright.runtime.offload.activations import ActivationOffload
from meshwright.runtime.offload.copies import Copies
from meshwright.runtime.recompute import apply_recompute
from meshwright.schema.layers import MoE
from meshwright.schema.layout import Recompute
from meshwright.schema.offload import LayerOffload
from plans import tiny_model
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")
SMALLEST = 256
DENSE = tiny_model(num_blocks=4)
ROUTED = tiny_model(num_blocks=4, experts=MoE(num_experts=4, top_k=2, ffn_dim=32))
NEEDED: dict[LayerOffload, Recompute] = {"none": "none", "activations": "none", "boundary": "full"}


@dataclass
class Device:
    """What operators allocated and is still alive; buffers of the host, which are handed to be pinned, do not count."""

    sizes: dict[StorageWeakRef, int] = field(default_factory=dict)
    host: set[StorageWeakRef] = field(default_factory=set)

    def pin(self, buffer: Tensor) -> bool:
        self.host.add(StorageWeakRef(buffer.untyped_storage()))
        return True

    def alive_bytes(self) -> int:
        gc.collect()
        return sum(size for ref, size in self.sizes.items() if not ref.expired() and ref not in self.host)


class Watch(TorchDispatchMode):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.device.sizes[StorageWeakRef(leaf.untyped_storage())] = leaf.untyped_storage().nbytes()
        return result


@dataclass
class Run:
    """One step of a decoder whose blocks offload as they are told."""

    offloads: tuple[LayerOffload, ...]
    model: Any = DENSE
    prefetch_layers: int = 1
    smallest_bytes: int = SMALLEST

    def __post_init__(self) -> None:
        self.device = Device()
        self.copies = Copies(CPU, pin=self.device.pin)
        self.decoder = Decoder(self.model)
        init_weights(self.decoder, 1)
        apply_recompute(self.decoder, lambda idx: NEEDED[self.offloads[idx - 1]])
        offload = ActivationOffload(
            self.copies, prefetch_layers=self.prefetch_layers, smallest_bytes=self.smallest_bytes
        )
        offload.apply(self.decoder, lambda idx: self.offloads[idx - 1])
        self.kept_bytes = 0
        self.step(seed=0)  # makes tables that live on

    def step(self, seed: int, *, watch: bool = False) -> dict[str, Tensor]:
        tokens = torch.randint(0, 97, (2, 33), generator=torch.Generator().manual_seed(seed))
        self.decoder.zero_grad()
        self.copies.traffic.take()
        self.device.sizes.clear()
        with Watch(self.device) if watch else contextlib.nullcontext():
            loss = self.decoder(tokens[:, :-1], tokens[:, 1:]).sum()
        if watch:
            self.kept_bytes = self.device.alive_bytes()
        loss.backward()
        self.traffic = self.copies.traffic.take()
        return {"loss": loss.detach(), **{name: p.grad.clone() for name, p in self.decoder.named_parameters()}}


def plain(offloads: tuple[LayerOffload, ...], model: Any = DENSE) -> Run:
    """The same recompute without offload: what a full recompute keeps of a block is its input either way."""
    run = Run(("none",) * 4, model)
    run.decoder = Decoder(model)
    init_weights(run.decoder, 1)
    apply_recompute(run.decoder, lambda idx: NEEDED[offloads[idx - 1]])
    run.step(seed=0)
    return run


CASES: tuple[tuple[LayerOffload, ...], ...] = (
    ("activations", "activations", "activations", "none"),
    ("activations", "none", "boundary", "none"),
    ("boundary",) * 4,
    ("none", "none", "activations", "activations"),
)


@pytest.mark.parametrize("model", [DENSE, ROUTED], ids=["dense", "routed"])
@pytest.mark.parametrize("offloads", CASES)
def test_offload_changes_no_bit(offloads: tuple[LayerOffload, ...], model: Any) -> None:
    run, reference = Run(offloads, model), plain(offloads, model)
    for seed in (1, 2):
        found, expected = run.step(seed), reference.step(seed)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert found.keys() == expected.keys()


@pytest.mark.parametrize("offloads", [CASES[0], *(pytest.param(case, marks=pytest.mark.long) for case in CASES[1:])])
def test_what_goes_down_is_freed_and_comes_up_once(offloads: tuple[LayerOffload, ...]) -> None:
    run, reference = Run(offloads), plain(offloads)
    run.step(seed=1, watch=True)
    reference.step(seed=1, watch=True)
    freed = reference.kept_bytes - run.kept_bytes
    moved = run.traffic
    assert moved.to_host_bytes == moved.to_device_bytes > 0
    assert freed == moved.to_host_bytes


@pytest.mark.long
def test_traffic_is_what_autograd_keeps() -> None:
    """All blocks on the host against none: at most 1 % above the bytes of the distinct storages that blocks keep."""
    everything, nothing = ("activations",) * 4, ("none",) * 4
    run, reference = Run(everything, smallest_bytes=0), plain(nothing)
    run.step(seed=1, watch=True)
    reference.step(seed=1, watch=True)
    outside = run.kept_bytes
    unique = reference.kept_bytes - outside
    assert 0.99 * unique <= run.traffic.to_host_bytes <= 1.01 * unique


def test_buffers_are_used_again() -> None:
    run = Run(("activations",) * 3 + ("none",))
    taken = run.copies.host_bytes
    for seed in range(3):
        run.step(seed)
    assert run.copies.host_bytes == taken


def test_nothing_moves_without_gradients() -> None:
    run = Run(("activations",) * 4)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    with torch.no_grad():
        run.decoder(tokens, tokens)
    assert run.copies.traffic.take().to_host_bytes == 0


def test_refused_pinning_is_counted_and_not_tried_again() -> None:
    asked: list[int] = []

    def refuse(buffer: Tensor) -> bool:
        asked.append(buffer.numel())
        return False

    copies = Copies(CPU, pin=refuse)
    copies.take(1000), copies.take(5000)
    assert len(asked) == 1
    assert copies.traffic.unpinned_bytes >= 6000


class ChangesInPlace(nn.Module):
    """Saves a tensor, changes it in place and saves it again."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((SMALLEST,), 2.0))

    def forward(self, hidden: Tensor) -> Tensor:
        product = hidden * 1.0
        before = product * self.scale
        product.add_(1.0)
        return before + product * self.scale


def test_a_tensor_changed_in_place_is_moved_again() -> None:
    block = ChangesInPlace()
    offload = ActivationOffload(Copies(CPU), smallest_bytes=1)
    offload.apply(SimpleNamespace(model=SimpleNamespace(layers={"0": block})), lambda _: "activations")
    block(torch.ones(SMALLEST, requires_grad=True)).sum().backward()
    assert block.scale.grad is not None
    assert torch.equal(block.scale.grad, torch.full((SMALLEST,), 1.0 + 2.0))
