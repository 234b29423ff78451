"""Documents in a model of transformers: its blocks attend by `DocumentAttention`, over any group of ranks.

transformers lets a function take the place of attention in every model that asks its registry for one. Ours gets queries, keys and
values with their positions applied; the model makes no mask for it. What else a model would do there (windows, caps on scores,
sinks, dropout, attention in both directions) is refused by name, and so is whatever mixes tokens in other ways.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from ...profilers.module.structure import Structure
from ...profilers.module.trials import why_not_sharded
from ...schema.errors import RuntimeMismatchError
from ...schema.training_plan import TrainingPlan
from ..loss import cross_entropy
from .attention import DocumentAttention

IMPLEMENTATION = "meshwright_documents"
"""Our name among transformers' attention functions."""

_REFUSED = {"sliding_window": "a window", "softcap": "a cap on scores", "s_aux": "sinks"}
"""Arguments of attention functions that ours does not take."""


def require_user_documents(
    module: nn.Module, structure: Structure, plan: TrainingPlan, *, has_loss: bool = False
) -> None:
    """Refuse modules that cannot be trained on batches of documents, and losses of a user's own.

    Raises:
        RuntimeMismatchError: with every reason.
    """
    reasons = list(_why_no_documents(module, structure))
    if plan.layout.pp > 1:
        reasons.append(f"pp {plan.layout.pp}: its stages are cut for batches of one shape")
    if has_loss:
        reasons.append(
            "the loss of a pack is that of the next tokens within its documents: leave out loss_fn and batch_loss"
        )
    if reasons:
        raise RuntimeMismatchError(
            f"{type(module).__name__} cannot be trained on documents", details=tuple(reasons),
            help="use parallelize(None, plan, weights=..., documents=True) for the plan's own model",
        )  # fmt: skip


def _why_no_documents(module: nn.Module, structure: Structure) -> Iterable[str]:
    name, config = type(module).__name__, getattr(module, "config", None)
    if not structure.is_transformers or config is None:
        yield f"the attention of {name} is its own code, which takes a row of tokens as one sequence"
        return
    if not getattr(module, "_supports_attention_backend", False):
        yield f"the attention of {name} is not one of transformers' functions"
    if "position_ids" not in inspect.signature(module.forward).parameters:
        yield f"{name} takes no position_ids, which begin at 0 with each document"
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    if others := sorted(set(kinds) - {"full_attention"}):
        yield f"{name} has layers of {', '.join(others)}"
    elif getattr(config, "sliding_window", None) and not getattr(config, "layer_types", None):
        yield f"{name} attends within a window of {config.sliding_window} tokens"
    attending, blocks = _attending(module), len(structure.blocks_of(module))
    if len(attending) != blocks or not all(each.is_causal for each in attending):
        yield f"{sum(bool(each.is_causal) for each in attending)} of the {blocks} blocks of {name} attend causally"
    if reason := why_not_sharded(module, ()):
        yield reason


def _attending(module: nn.Module) -> list[Any]:
    return [each for each in module.modules() if hasattr(each, "is_causal")]


def attach(module: nn.Module, documents: DocumentAttention) -> None:
    """Let the blocks of a model of transformers attend within the documents of the pack that was entered last."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, _attend)
    module.set_attn_implementation(IMPLEMENTATION)  # type: ignore[operator]
    for each in _attending(module):
        object.__setattr__(each, "document_attention", documents)


def document_loss(documents: DocumentAttention) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    """Return what the loss of a pack is: the mean over its tokens, of those that are targets."""

    def loss(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        out = module(input_ids=inputs, position_ids=documents.positions[None])
        return cross_entropy(out.logits, targets)

    return loss


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers calls it: query [1, H, S, C], key and value [1, K, S, C] to [1, S, H, C]."""
    refused = [text for name, text in _REFUSED.items() if others.get(name) is not None]
    refused += ["dropout"] * (dropout > 0) + ["a mask"] * (attention_mask is not None)
    if refused:
        raise RuntimeMismatchError(
            f"{type(module).__name__} attends with {', '.join(refused)}, which attention within documents has not"
        )
    factor = 1.0 if scaling is None else scaling * math.sqrt(query.shape[-1])
    out = module.document_attention.attend(query if factor == 1 else query * factor, key, value)
    return out.transpose(1, 2).contiguous(), None
