"""Seconds of a step that checks a draft of k tokens for every row that decodes, and of making the drafts (docs/serving.md).

    t = t_verify(b (k + 1), S) + k d(b, S) + d(p)        t_verify: the step with k + 1 queries of each row, whose cache is read once
    d   of mtp and eagle3: a mean block of the model and its head, one after the other; of draft: a step of that model

The step gives E tokens to every row (`Speculation.tokens_per_step`). All else counts steps of a token: each takes t / E, and
prompts take what they add to the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...schema import ClusterSpec, ConfigError, ModelSpec
from ...schema.catalogue import num_mtp_modules
from ...schema.serving import ServingLayout, WeightDtype
from ...schema.speculation import Speculation
from ...schema.units import FloatArray
from .step import StepCosts


@dataclass(frozen=True, eq=False)
class SpeculativeCosts(StepCosts):
    """Steps that check drafts; rows that decode are requests.

    Attributes:
        drafted: tokens of a draft; tokens_per_step: that a row gets.
        drafts: steps of the model that drafts (``has_drafter``), else of the model itself, of which a block and the head draft.
    """

    drafted: int = 1
    tokens_per_step: float = 1.0
    drafts: StepCosts | None = None
    has_drafter: bool = False

    def parts(
        self,
        decode_rows: Any,
        cached_tokens: Any,
        prefill_tokens: Any = 0,
        prefill_context: Any = 0,
        *,
        prompts: Any = 0,
    ) -> dict[str, FloatArray]:
        """Return the seconds of one pass by part, drafts by the parts of what makes them."""
        parts = super().parts(decode_rows, cached_tokens, prefill_tokens, prefill_context, prompts=prompts)
        assert self.drafts is not None
        blocks = 1 if self.has_drafter else self.instance.model.num_blocks
        if np.any(decode_rows):
            decodes = np.asarray(decode_rows) > 0
            for name, seconds in self.drafts.parts(decode_rows, cached_tokens).items():
                parts[name] = parts[name] + self.drafted * decodes * seconds / (1 if name == "head" else blocks)
        if np.any(prefill_tokens):
            ends = prompts if self.has_drafter else 0
            for name, seconds in self.drafts.parts(0, 0, prefill_tokens, prefill_context, prompts=ends).items():
                parts[name] = parts[name] + seconds / blocks * (self.has_drafter or name != "head")
        return parts


def with_drafts(
    plain: StepCosts, speculation: Speculation, drafted: int, *, known: dict[Any, Any] | None = None
) -> SpeculativeCosts:
    """Return the steps of an engine instance that drafts so many tokens.

    Raises:
        ConfigError: the model has no heads to draft with, or the other one another vocabulary.
    """
    instance = plain.instance
    model, layout = instance.model, instance.layout
    wide = StepCosts.build(
        model, instance.cluster, layout, weights=instance.weights, cache=instance.cache, experts=instance.experts,
        coefficients=instance.coefficients, known=known, queries=drafted + 1, adapters=instance.adapters,
        kernels=instance.kernels,
    )  # fmt: skip
    drafter = _draft_steps(plain, speculation)
    blocks, known = model.num_blocks, {} if known is None else known
    if (key := ("blocks", layout.replace(pp=1))) not in known:
        known[key] = plain if layout.pp == 1 else StepCosts.build(
            model, instance.cluster, layout.replace(pp=1), weights=instance.weights, cache=instance.cache,
            experts=instance.experts, coefficients=instance.coefficients, known=known, adapters=instance.adapters,
            kernels=instance.kernels,
        )  # fmt: skip
    fields = {name: getattr(wide, name) for name in StepCosts.__dataclass_fields__}
    fields["weight_bytes"] += plain.weight_bytes * layout.pp / blocks if drafter is None else drafter.weight_bytes
    fields["cache_bytes_per_token"] += (
        plain.cache_bytes_per_token * layout.pp / blocks if drafter is None else drafter.cache_bytes_per_token
    )
    return SpeculativeCosts(
        **fields,
        drafted=drafted,
        tokens_per_step=speculation.tokens_per_step(drafted),
        drafts=known[key] if drafter is None else drafter,
        has_drafter=drafter is not None,
    )


def check_drafts(model: ModelSpec, speculation: Speculation) -> ModelSpec | None:
    """Return the model that drafts, where another one does.

    Raises:
        ConfigError: as `with_drafts`.
    """
    has_heads = any(run.layer.kind == "mtp" for run in model.layers) or num_mtp_modules(model.name) > 0
    if speculation.method == "mtp" and not has_heads:
        raise ConfigError(
            f"--speculate mtp: {model.name} has no multi-token-prediction heads",
            help="eagle3 for a trained head, or draft with a smaller model",
        )
    if speculation.method != "draft" or speculation.model is None:
        return None
    drafter = ModelSpec.named(speculation.model)
    if drafter.vocab_size != model.vocab_size:
        raise ConfigError(
            f"--speculate draft: {drafter.name} has {drafter.vocab_size} words, {model.name} {model.vocab_size}",
            help="a model of the same family, whose tokens are the same",
        )
    return drafter


def _draft_steps(plain: StepCosts, speculation: Speculation) -> StepCosts | None:
    instance = plain.instance
    drafter = check_drafts(instance.model, speculation)
    if drafter is None:
        return None
    heads = min(block.attention.num_heads for block, _ in drafter.block_runs)
    tp = next(n for n in range(instance.layout.tp, 0, -1) if instance.layout.tp % n == 0 and heads % n == 0)
    weights: WeightDtype = "bf16" if instance.weights in ("nvfp4", "mxfp4", "int4") else instance.weights
    cluster: ClusterSpec = instance.cluster
    return StepCosts.build(
        drafter,
        cluster,
        ServingLayout(tp=tp),
        weights=weights,
        cache=instance.cache,
        coefficients=instance.coefficients,
        kernels=instance.kernels,
    )
