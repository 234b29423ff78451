"""Operators counted as they run: products, attentions, bytes that all other kernels move, and what of it tp would divide."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...schema.traced import Traced, TracedAttention, TracedProduct, TracedShard, TracedSplit
from .splits import Splits, storage_key

_SDPA = {
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_cudnn_attention": 6,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_fused_attention_overrideable": 5,
}
"""Fused attention, and which positional argument says that it is causal."""

_NO_TRAFFIC = ("detach", "empty", "empty_like", "empty_strided", "_unsafe_view", "lift_fresh", "alias")


@dataclass
class Counts(TorchDispatchMode):
    """Operators that run while it is active: products [m, k] x [k, n], attentions, bytes read and written by all other kernels.

    ``read`` names those of the ``watched`` storages that they read.
    """

    products: Counter[tuple[int, int, int, int, TracedShard]] = field(default_factory=Counter)
    attentions: Counter[tuple[int, ...]] = field(default_factory=Counter)
    traffic_bytes: float = 0.0
    split_bytes: float = 0.0
    kernels: int = 0
    saved_outputs: dict[int, Any] = field(default_factory=dict)
    watched: Mapping[int, str] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)
    splits: Splits = field(default_factory=lambda: Splits({}))
    backward: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.watched:
            self.read += [
                self.watched[key] for t in tensors_in((args, kwargs)) if (key := storage_key(t)) in self.watched
            ]
        result = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        given, made = tensors_in((args, kwargs)), tensors_in(result)
        if (product := _product(name, args, result)) is not None:
            self.products[*product, self.splits.product(given, made, backward=self.backward)] += 1
        elif name in _SDPA:
            self.attentions[*_attention(name, args, kwargs), int(self.splits.follow(given, made))] += 1
        else:
            self.splits.follow(given, made)
            is_free = func.is_view or "::" in name or name in _NO_TRAFFIC
            if not is_free and not ("scaled_dot_product" in name and name.endswith("_backward")):
                self._add_elementwise(args, kwargs, result)
            return result
        # Referenced, so that no other storage takes its place.
        self.saved_outputs |= {storage_key(output): output.untyped_storage() for output in tensors_in(result)}
        return result

    def _add_elementwise(self, args: Any, kwargs: Any, result: Any) -> None:
        tensors = tensors_in((args, kwargs, result))
        if tensors and isinstance(tree_leaves(result)[0], Tensor):
            for tensor in tensors:  # what is broadcast is read once
                sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
                size = math.prod(sizes) * tensor.element_size()
                self.traffic_bytes += size
                self.split_bytes += size * self.splits.has(tensor)
            self.kernels += 1

    def traced(self, seq_len: int, num_params: int, element_bytes: int, **others: int | TracedSplit | None) -> Traced:
        """Return the counts of a forward pass, elements in those of the parameters' type, with what else was found."""
        products = tuple(
            TracedProduct(rows=m, n=n, k=k, matrices=e, shard=shard, count=c)
            for (m, n, k, e, shard), c in sorted(self.products.items())
        )
        attentions = tuple(
            TracedAttention(
                num_heads=heads, num_kv_heads=kv_heads, head_dim=width, v_head_dim=v_width, query_len=batch * length,
                kv_len=kv_len, context=(kv_len + 1) / 2 if causal else float(kv_len), split=bool(split), count=count,
            )
            for (batch, heads, kv_heads, width, v_width, length, kv_len, causal, split), count in sorted(self.attentions.items())
        )  # fmt: skip
        return Traced(
            seq_len=seq_len, num_params=num_params, products=products, attentions=attentions,
            forward_elements=round(self.traffic_bytes / element_bytes), forward_kernels=self.kernels, **others,  # type: ignore[arg-type]
        )  # fmt: skip


def _product(name: str, args: Sequence[Any], result: Any) -> tuple[int, int, int, int] | None:
    """Return rows, columns and inner size of a product, and how many matrices share the rows."""
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        a, b = args[1:3] if "add" in name else args[-2:]
        return math.prod(a.shape[:-1]), b.shape[-1], a.shape[-1], 1
    if name == "_grouped_mm":
        a, b = args[:2]
        return a.shape[0], b.shape[-1], a.shape[-1], b.shape[0] if b.ndim == 3 else 1
    if name == "convolution":
        weight, out = args[1], result
        return out.numel() // out.shape[1], out.shape[1], weight.numel() // weight.shape[0], 1
    return None


def _attention(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    query, key, value = args[:3]
    place = _SDPA[name]
    causal = bool(kwargs.get("is_causal", args[place] if len(args) > place else False))
    heads, kv_heads, length, kv_len = query.shape[1], key.shape[1], query.shape[2], key.shape[2]
    return query.shape[0], heads, kv_heads, query.shape[3], value.shape[3], length, kv_len, int(causal)


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in a nest of values."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
