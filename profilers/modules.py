"""A model outside the catalogue as a ModelSpec: its repeated blocks are run on fake tensors and counted.

Weights are never read and never materialised: parameters and activations are torch's fake tensors, so that a model on the meta
device is traced like any other. One sequence (the first dimension of the inputs is the batch) goes through each distinct kind of
block forward and backward. Counted are the products and fused attentions of the forward pass, the elements that all other kernels
read and write in both passes, and what autograd keeps, by storage and without parameters. What lies before and after the blocks is
counted in one forward pass of the entire model; its backward kernels are taken to move twice what its forward ones do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ..schema.errors import ConfigError
from ..schema.layers import (
    Block,
    DenseMLP,
    Embedding,
    Head,
    LayerRun,
    SoftmaxAttention,
    Traced,
    TracedAttention,
    TracedProduct,
)  # fmt: skip
from ..schema.model import ModelSpec

_STAND_INS = {
    "attention": SoftmaxAttention(kind="mha", num_heads=1, num_kv_heads=1, head_dim=1, rope_fraction=0),
    "mlp": DenseMLP(ffn_dim=1),
}


def profile_module(
    model: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    *,
    name: str | None = None,
    blocks: str | None = None,
) -> ModelSpec:
    """Return the ModelSpec of a module with repeated blocks; `plan` cuts it by data, stages and recompute, not by tp, cp or ep.

    Args:
        model: on any device, also ``meta``.
        example_inputs: positional or keyword arguments of one call, tensors with the batch as their first dimension; tensors on the
            meta device do.
        blocks: name of the container (ModuleList, Sequential, ModuleDict) whose children are the blocks; found where unset.

    Raises:
        ConfigError: there are no repeated blocks, or a block takes and returns something else than hidden states
            [batch, tokens, width].
    """
    container = largest_container(model) if blocks is None else blocks
    if container is None:
        raise ConfigError(
            f"{type(model).__name__} has no repeated blocks: no list of two or more modules of one class",
            help="name the container of its blocks: profile_module(..., blocks='encoder.layers')",
        )
    tracer = Tracer(model, container)
    tracer.run(example_inputs)
    hidden_dim, seq_len = tracer.width, tracer.seq_len
    kinds = [tracer.traced_block(idx) for idx in range(len(tracer.blocks))]
    before, after = tracer.outside()
    # Parameters that both ends use (tied embeddings) are counted in the first.
    first, last = Embedding(vocab_size=1, traced=before), Head(vocab_size=1, traced=after)
    title = name or type(model).__name__
    return ModelSpec(
        name=title,
        architecture=type(model).__name__,
        hidden_dim=hidden_dim,
        layers=(LayerRun(layer=first), *_runs(kinds), LayerRun(layer=last)),
        tie_embeddings=False,
        max_seq_len=seq_len,
        source=f"traced from {type(model).__module__}.{type(model).__qualname__}, blocks {container}",
    )


def _runs(kinds: Sequence[Traced]) -> tuple[LayerRun, ...]:
    runs: list[LayerRun] = []
    for traced in kinds:
        block = Block(traced=traced, **_STAND_INS)
        if runs and runs[-1].layer == block:
            runs[-1] = runs[-1].replace(count=runs[-1].count + 1)
        else:
            runs.append(LayerRun(layer=block))
    return tuple(runs)


# --- counting --------------------------------------------------------------------------------------------------------


_Product = tuple[int, int, int]

_SDPA = {
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_cudnn_attention": 6,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_fused_attention_overrideable": 5,
}
"""Fused attention, and which positional argument says that it is causal."""

_NO_TRAFFIC = ("detach", "empty", "empty_like", "empty_strided", "_unsafe_view", "lift_fresh", "alias")


def largest_container(model: nn.Module) -> str | None:
    """Return the name of the container with the most parameters in two or more children of one class."""
    best: tuple[int, str] | None = None
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            continue
        children = list(module.children())
        if len(children) < 2 or len({type(child) for child in children}) > 1:
            continue
        size = sum(parameter.numel() for parameter in module.parameters())
        if size and (best is None or size > best[0]):  # of nested containers the outer one, which comes first
            best = size, name
    return best[1] if best else None


@dataclass
class Counts(TorchDispatchMode):
    """Operators that run while it is active."""

    products: Counter[_Product] = field(default_factory=Counter)
    attentions: Counter[tuple[int, ...]] = field(default_factory=Counter)
    elements: float = 0.0
    kernels: int = 0
    saved_outputs: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and count."""
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        product = _product(name, args, result)
        if product is not None:
            self.products[product] += 1
        elif name in _SDPA:
            self.attentions[_attention(name, args, kwargs or {})] += 1
        elif not name.endswith("_backward") or "scaled_dot_product" not in name:
            self._add_elementwise(func, args, kwargs, result)
        if product is not None or name in _SDPA:
            for output in tree_leaves(result):
                if isinstance(output, Tensor):
                    self.saved_outputs[_storage(output)] = (
                        output.untyped_storage()
                    )  # referenced, so that no other takes its place
        return result

    def _add_elementwise(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        space, _, name = func._schema.name.partition("::")
        if func.is_view or space != "aten" or name in _NO_TRAFFIC:
            return
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        if tensors and isinstance(tree_leaves(result)[0], Tensor):
            self.elements += sum(_traffic_bytes(t) for t in tensors)
            self.kernels += 1


def _product(name: str, args: Sequence[Any], result: Any) -> _Product | None:
    """Return rows, columns and inner size of a product."""
    if name in ("mm", "addmm"):
        a, b = args[-2:] if name == "mm" else args[1:3]
        return a.shape[0], b.shape[1], a.shape[1]
    if name in ("bmm", "baddbmm"):
        a, b = args[-2:] if name == "bmm" else args[1:3]
        return a.shape[0] * a.shape[1], b.shape[2], a.shape[2]
    if name == "convolution":
        weight, out = args[1], result
        return out.numel() // out.shape[1], out.shape[1], weight.numel() // weight.shape[0]
    return None


def _attention(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    query, key, value = args[:3]
    place = _SDPA[name]
    causal = bool(kwargs.get("is_causal", args[place] if len(args) > place else False))
    heads, kv_heads, length, kv_len = query.shape[1], key.shape[1], query.shape[2], key.shape[2]
    return query.shape[0], heads, kv_heads, query.shape[3], value.shape[3], length, kv_len, int(causal)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _storages(values: Any) -> set[int]:
    return {_storage(t) for t in tree_leaves(values) if isinstance(t, Tensor)}


def _storage_bytes(tensor: Tensor) -> float:
    return float(tensor.untyped_storage().nbytes())


def _traffic_bytes(tensor: Tensor) -> float:
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return float(math.prod(sizes) * tensor.element_size())


class Tracer:
    """Runs a model and its blocks on fake tensors. Final.

    Attributes:
        blocks: the children of the container; width, seq_len: of the hidden states [1, seq_len, width] that they read.
    """

    def __init__(self, model: nn.Module, container: str) -> None:
        self._model = model
        try:
            holder = model.get_submodule(container)
        except AttributeError:
            raise ConfigError(f"{type(model).__name__} has no module {container!r}") from None
        self.blocks = list(holder.children())
        if not self.blocks:
            raise ConfigError(f"{container} of {type(model).__name__} has no children")
        self._names = {module: name for name, module in model.named_modules()}
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._calls: dict[nn.Module, tuple[Any, Any]] = {}
        self._before, self._after = Counts(), Counts()
        self._saved: dict[nn.Module | None, int] = {}
        self._counted: dict[Any, Traced] = {}
        with self._mode:
            self._state = {name: _fake(t, grad=True) for name, t in model.named_parameters(remove_duplicate=False)}
            tied = {id(t): name for name, t in model.named_parameters(remove_duplicate=False)}
            for name, tensor in model.named_parameters(remove_duplicate=False):
                self._state[name] = self._state[tied[id(tensor)]]
            self._state |= {name: _fake(t, grad=False) for name, t in model.named_buffers(remove_duplicate=False)}
        self._element_bytes = next((t.element_size() for t in model.parameters()), 4)

    def run(self, example_inputs: Sequence[Any] | Mapping[str, Any]) -> None:
        """Run one sequence through the entire model, noting what each block is called with."""
        with self._mode, _noting(self.blocks, self._calls, self._before, self._after) as switch:
            inputs = tree_map(_one_sequence, example_inputs)
            args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
            saved: dict[int, tuple[Any, nn.Module | None]] = {}
            with saved_tensors_hooks(self._saves(switch, saved), lambda t: t):
                output = self._call(self._model, "", args, kwargs)
            self._share_out(saved)
            del output  # until here autograd holds all that it keeps
        if len(self._calls) < len(self.blocks):
            raise ConfigError(f"{len(self.blocks) - len(self._calls)} of {len(self.blocks)} blocks are not called")
        hidden = self._hidden(self._calls[self.blocks[0]])
        self.seq_len, self.width = hidden.shape[1], hidden.shape[2]

    def _saves(self, switch: _Switch, saved: dict[int, tuple[Any, nn.Module | None]]) -> Callable[[Tensor], Tensor]:
        """Note each storage that is kept besides parameters and buffers, and the block that keeps it first."""
        persistent = {_storage(t) for t in self._state.values()}

        def pack(tensor: Tensor) -> Tensor:
            key = _storage(tensor)
            if key not in persistent and key not in saved:
                saved[key] = tensor.untyped_storage(), switch.block
            return tensor

        return pack

    def _share_out(self, saved: Mapping[int, tuple[Any, nn.Module | None]]) -> None:
        """Count the bytes that each block keeps, and the model outside.

        Also what several blocks are called with, as a table of angles.
        """
        read_by = Counter(key for call in self._calls.values() for key in _storages(call))
        self._saved = dict.fromkeys(self.blocks, 0) | {None: 0}
        for key, (storage, block) in saved.items():
            self._saved[None if read_by[key] > 1 else block] += storage.nbytes()

    def _call(self, module: nn.Module, prefix: str, args: Any, kwargs: Any) -> Any:
        start = f"{prefix}." if prefix else ""
        state = {name.removeprefix(start): t for name, t in self._state.items() if name.startswith(start)}
        return torch.func.functional_call(module, state, args, kwargs, tie_weights=False)

    @staticmethod
    def _hidden(call: tuple[Any, Any]) -> Tensor:
        tensors = [t for t in tree_leaves(call) if isinstance(t, Tensor) and t.is_floating_point() and t.ndim == 3]
        if not tensors:
            raise ConfigError("a block reads no hidden states [batch, tokens, width]")
        return tensors[0]

    def traced_block(self, idx: int) -> Traced:
        """Count one block; blocks of one class, equal parameters and equal inputs are counted once."""
        block = self.blocks[idx]
        args, kwargs = self._calls[block]
        shapes = tuple(tuple(t.shape) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        layout = tuple((name, tuple(t.shape)) for name, t in block.named_parameters())
        key = (type(block), layout, shapes, str(block), self._saved[block])
        if key not in self._counted:
            self._counted[key] = self._count(block, args, kwargs)
        return self._counted[key]

    def _count(self, block: nn.Module, args: Any, kwargs: Any) -> Traced:
        saved: dict[int, Any] = {}

        def pack(tensor: Tensor) -> Tensor:
            saved[_storage(tensor)] = tensor.untyped_storage()
            return tensor

        forward, backward = Counts(), Counts()
        with self._mode:
            args, kwargs = tree_map(_leaf, args), tree_map(_leaf, kwargs)
            read = _storage_bytes(self._hidden((args, kwargs)))
            with saved_tensors_hooks(pack, lambda t: t), forward:
                output = self._call(block, self._names[block], args, kwargs)
            result = next(t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad)
            gradient = torch.ones_like(result)
            with backward:
                result.backward(gradient)
        products = sum(storage.nbytes() for key, storage in forward.saved_outputs.items() if key in saved)
        size = self._element_bytes
        num_params = sum(parameter.numel() for parameter in block.parameters())
        return _traced(
            forward, self.seq_len, num_params, size,
            backward_elements=round(backward.elements / size), backward_kernels=backward.kernels,
            saved_elements=math.ceil(self._saved[block] / size), selective_elements=round((products + read) / size),
            full_elements=round(read / size),
        )  # fmt: skip

    def outside(self) -> tuple[Traced, Traced]:
        """Count what lies before and after the blocks; parameters go where they are used first, the others to the end."""
        in_blocks = {id(p) for block in self.blocks for p in block.parameters()}
        sizes = {id(p): p.numel() for p in self._model.parameters() if id(p) not in in_blocks}
        total, size = sum(sizes.values()), self._element_bytes
        embeddings = {
            id(p) for m in self._model.modules() if isinstance(m, nn.Embedding | nn.Conv2d) for p in m.parameters()
        }
        first = sum(numel for key, numel in sizes.items() if key in embeddings)
        ends = []
        for counts, params in ((self._before, first), (self._after, total - first)):
            saved = math.ceil(self._saved[None] / size) if counts is self._after else 0
            ends.append(
                _traced(
                    counts, self.seq_len, params, size, backward_elements=round(2 * counts.elements / size),
                    backward_kernels=2 * counts.kernels, saved_elements=saved,
                )
            )  # fmt: skip
        return ends[0], ends[1]


def _traced(counts: Counts, seq_len: int, num_params: int, element_bytes: int, **others: int) -> Traced:
    products = tuple(TracedProduct(rows=m, n=n, k=k, count=c) for (m, n, k), c in sorted(counts.products.items()))
    attentions = tuple(
        TracedAttention(
            num_heads=heads, num_kv_heads=kv_heads, head_dim=width, v_head_dim=v_width, query_len=batch * length,
            kv_len=kv_len, context=(kv_len + 1) / 2 if causal else float(kv_len), count=count,
        )
        for (batch, heads, kv_heads, width, v_width, length, kv_len, causal), count in sorted(counts.attentions.items())
    )  # fmt: skip
    return Traced(
        seq_len=seq_len, num_params=num_params, products=products, attentions=attentions,
        forward_elements=round(counts.elements / element_bytes), forward_kernels=counts.kernels, **others,
    )  # fmt: skip


@dataclass
class _Switch:
    """Where the model is: inside a block, before the first or after the last one."""

    inside: int = 0
    block: nn.Module | None = None


@contextmanager
def _noting(
    blocks: Sequence[nn.Module], calls: dict[nn.Module, tuple[Any, Any]], before: Counts, after: Counts
) -> Iterator[_Switch]:
    """Note what blocks are called with, and count what runs outside them: before the first one returns, and after."""
    switch, active = _Switch(), [before]

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not switch.inside:
            active.pop().__exit__(None, None, None)
            switch.block = module
        calls[module] = args, kwargs
        switch.inside += 1

    def leave(*_: Any) -> None:
        switch.inside -= 1
        if not switch.inside:
            switch.block = None
            active.append(after)
            after.__enter__()

    handles = [block.register_forward_pre_hook(enter, with_kwargs=True) for block in blocks]
    handles += [block.register_forward_hook(leave) for block in blocks]
    before.__enter__()
    try:
        yield switch
    finally:
        for counts in active:
            counts.__exit__(None, None, None)
        for handle in handles:
            handle.remove()


def _fake(tensor: Tensor, *, grad: bool) -> Tensor:
    """Return a fake tensor on the CPU of the same shape; inside the fake mode."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").requires_grad_(
        grad and tensor.dtype.is_floating_point
    )


def _one_sequence(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    shape = (1, *value.shape[1:]) if value.ndim else value.shape
    return torch.zeros(shape, dtype=value.dtype, device="cpu")


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.is_floating_point() and value.ndim == 3)
