"""Activation recomputation, one checkpoint for each block, or for each half of it where stages end inside blocks.

full keeps only a block's input. selective also keeps what is expensive to compute again: the outputs of matrix products and of
attention (not of the last product, which no backward pass reads).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..schema.layout import Recompute
from ..schema.model import ModelSpec
from .context_parallel import RING_ATTENTION
from .models.decoder import ADAPTER_UP, Decoder, DecoderBlock, init_weights, parts_of_block
from .models.experts import Experts, MixtureOfExperts
from .models.layers import ReplicatedLinear

_aten = torch.ops.aten
PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default, _aten._grouped_mm.default})
ATTENTION = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        RING_ATTENTION,
    }
)


def apply_recompute(
    stage: Decoder,
    recompute_of: Callable[[int], Recompute],
    *,
    half_blocks: bool = False,
    by_halves: Callable[[int], bool] = lambda _: False,
) -> None:
    """Checkpoint the blocks of a stage, in place, each as ``recompute_of`` says of its index in ``ModelSpec.iter_layers``.

    With half blocks each part of a block that the stage has, by its own index; ``by_halves`` tells whether a block takes two
    half-batches. The method is replaced on the instance: parameter
    names stay, and hooks of `fully_shard` run outside, so that a recomputation does not gather parameters once more.
    """
    for name, block in stage.model.layers.items():
        attention, mlp = parts_of_block(int(name), half_blocks=half_blocks)
        if not half_blocks:
            checkpoint_block(block, recompute_of(attention), by_halves=by_halves(attention))
            continue
        for idx, part, method in ((attention, block.self_attn, "attend"), (mlp, block.mlp, "feed")):
            if part is not None:
                _checkpoint(block, method, recompute_of(idx), {_count_products_within(part)})


def build_standalone(
    spec: ModelSpec,
    recompute: Recompute,
    *,
    device: torch.device,
    layer_idxs: Collection[int] | None = None,
    is_fake: bool = False,
) -> Decoder:
    """Build a decoder, or some layers of it, on one device outside a job: what a profile measures.

    Args:
        layer_idxs: of the layers, as in ``ModelSpec.iter_layers``; None for all.
        is_fake: under a FakeTensorMode, where nothing has memory and nothing is initialised.
    """
    with device if is_fake else torch.device("meta"):
        decoder = Decoder(spec)
    if layer_idxs is not None:
        decoder.keep(layer_idxs)
    apply_recompute(decoder, lambda _: recompute)
    if not is_fake:
        decoder.to_empty(device=device)
        decoder.tie()
        init_weights(decoder, seed=0)
    return decoder


def checkpoint_block(block: nn.Module, recompute: Recompute, *, by_halves: bool = False) -> None:
    """Checkpoint one block, in place."""
    # Whatever products of others are for, all are kept.
    num_products = _count_products_within(block, block.mlp) if isinstance(block, DecoderBlock) else -1
    last = {num_products}
    if by_halves:  # two times the products of attention come before two times those of the feed-forward part
        last = {2 * num_products, 2 * num_products - _count_products_within(block.mlp)}
    _checkpoint(block, "forward", recompute, last)


def _checkpoint(block: nn.Module, method: str, recompute: Recompute, last_products: Collection[int]) -> None:
    if recompute == "none":
        return
    # Ours draw no random numbers; others may drop out.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": not isinstance(block, DecoderBlock)}
    if recompute == "selective":
        options["context_fn"] = functools.partial(_selective_contexts, last_products)
    compute = getattr(block, method)
    if not isinstance(block, DecoderBlock):
        setattr(block, method, _WithState(block, compute, options))
        return
    setattr(block, method, functools.partial(checkpoint, compute, **options))


class _Buffer(NamedTuple):
    """A buffer of a part of a block, and a copy of its values at some time."""

    owner: nn.Module
    name: str
    tensor: Tensor
    values: Tensor
    version: int

    @property
    def is_changed(self) -> bool:
        """True if it has other values by now, or another tensor has its place; batch norms write without torch's counting it."""
        if self.owner._buffers[self.name] is not self.tensor or self.tensor._version != self.version:
            return True
        return not isinstance(self.tensor, FakeTensor) and not torch.equal(self.tensor, self.values)

    @torch.no_grad()
    def restore(self) -> None:
        """Let it be again what it was."""
        if self.owner._buffers[self.name] is self.tensor:
            self.tensor.copy_(self.values)
        self.owner._buffers[self.name] = self.tensor


class _Attribute(NamedTuple):
    """What a part of a block had in an attribute at some time."""

    owner: nn.Module
    name: str
    value: Any

    @property
    def is_changed(self) -> bool:
        """True if it is another by now."""
        return vars(self.owner).get(self.name, _NOTHING) is not self.value

    def restore(self) -> None:
        """Let it be again what it was."""
        if self.value is _NOTHING:
            vars(self.owner).pop(self.name, None)
        else:
            vars(self.owner)[self.name] = self.value


_NOTHING = object()
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}


class _WithState:
    """A checkpointed method of a block that changes buffers or attributes: a recomputation finds and leaves them as they were."""

    def __init__(self, block: nn.Module, compute: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._block, self._compute, self._options = block, compute, options
        self._changed: dict[bool, tuple[list[tuple[nn.Module, str]], list[tuple[nn.Module, str]]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method; what it changes shows its first pass in training, and in evaluation."""
        entered: list[_Buffer | _Attribute] | None = None

        def compute(*args: Any, **kwargs: Any) -> Any:
            nonlocal entered
            with _disable_current_modes():  # those of a selective checkpoint, which would note the copies
                now = self._state()
                for each in entered or ():
                    each.restore()
            try:
                return self._compute(*args, **kwargs)
            finally:
                with _disable_current_modes():
                    if entered is None:
                        entered = now if self._block.training in self._changed else self._note_changed(now)
                    else:
                        for each in now:
                            each.restore()

        return checkpoint(compute, *args, **self._options, **kwargs)

    def _note_changed(self, before: Sequence[_Buffer | _Attribute]) -> list[_Buffer | _Attribute]:
        """Return what a first pass has changed, and watch it from now on."""
        changed = [each for each in before if each.is_changed]
        known = {(each.owner, each.name) for each in before if isinstance(each, _Attribute)}
        made = [_Attribute(*place, _NOTHING) for place in self._attributes() if place not in known]
        buffers = [(each.owner, each.name) for each in changed if isinstance(each, _Buffer)]
        attributes = [(each.owner, each.name) for each in (*changed, *made) if isinstance(each, _Attribute)]
        self._changed[self._block.training] = buffers, attributes
        return [*changed, *made]

    def _attributes(self) -> list[tuple[nn.Module, str]]:
        return [(part, name) for part in self._block.modules() for name in vars(part) if name not in _OF_TORCH]

    def _state(self) -> list[_Buffer | _Attribute]:
        if self._block.training in self._changed:
            slots, names = self._changed[self._block.training]
        else:
            slots = [(part, name) for part in self._block.modules() for name in part._buffers]
            names = self._attributes()
        attributes = [_Attribute(owner, name, vars(owner).get(name, _NOTHING)) for owner, name in names]
        return [*attributes, *self._copies(slots)]

    def _copies(self, slots: Sequence[tuple[nn.Module, str]]) -> list[_Buffer]:
        buffers = ((owner, name, owner._buffers[name]) for owner, name in slots)
        return [
            _Buffer(owner, name, tensor, tensor.clone(), tensor._version)
            for owner, name, tensor in buffers
            if tensor is not None
        ]


def _count_products_within(part: nn.Module, mlp: nn.Module | None = None) -> int:
    """Count the products of a block, or of a part of it, whose last one need not be kept; -1 where all must be."""
    modules, mlp = list(part.modules()), mlp or part
    if isinstance(mlp, MixtureOfExperts) and mlp.shared_expert is None:
        return -1  # the weights of a token's experts need the experts' outputs
    single = sum(isinstance(module, nn.Linear | ReplicatedLinear) for module in modules)
    single += 2 * sum(hasattr(module, ADAPTER_UP) for module in modules)
    return single + 3 * sum(isinstance(module, Experts) for module in modules)


def _selective_contexts(last_products: Collection[int]) -> Any:
    """Return contexts for one pass through a block and its recomputation; the products that none reads are ``last_products``."""
    seen = {False: 0, True: 0}

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if op not in PRODUCTS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        seen[ctx.is_recompute] += 1
        is_last = seen[ctx.is_recompute] in last_products
        return CheckpointPolicy.PREFER_RECOMPUTE if is_last else CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
