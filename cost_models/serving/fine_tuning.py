"""Tokens of an adapter's fine-tuning in the steps of an engine instance: what they take beside rows that decode (docs/serving.md).

    t'(b, S, p, C) = g(b + p + f) + h(b + prompts) + a_d(b, S / b) + a_p(p, C) + a_p(f, C_f)      f tokens of fine-tuning a step
    C_f    (1 + 2.5) / 2 times half of a sequence: attention forward, and backward 2.5 times that, over two passes
    bytes  18 q + s e sum_layers (2 h + sum_columns n / tp + o / tp)      q parameters of the adapter, s tokens of a sequence

A token is two of a step: one forward, one backward, which of frozen products is that of their inputs alone, as large as the forward
one. Decoding reads all weights for few rows, so that the products of some more cost little until they bind. Kept for the backward
pass is what it reads: inputs of norms, outputs of products that are cut by columns, the output of attention; the thin products of
one adapter and its update are left out.

Source: arXiv:2402.18789 (FlexLLM): inference and fine-tuning fused token by token, graph pruning of what is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...schema.adapters import Adapters, FineTuning
from ...schema.layers import Block
from ...schema.units import FloatArray
from ..layer.operators import BACKWARD_ATTENTION_RATIO, Gemm
from .adapters import ELEMENT_BYTES, adapters_bytes, changes
from .instance_model import InstanceModel
from .operators import Instance, operators
from .step import StepCosts

PASSES = 2
"""Of a token: forward, and backward to the inputs."""

STATE_BYTES = 18
"""Of an adapter's parameter: 16-bit weight, fp32 gradient, master weight and both moments of AdamW."""


@dataclass(frozen=True, eq=False)
class TunedStage:
    """A stage of `StepCosts` whose every step has ``tokens`` of fine-tuning, each attending to ``context``."""

    stage: Any
    tokens: float
    context: float

    def parts(
        self, queries: int, decode_rows: Any, cached: Any, tokens: Any, context: Any, prompts: Any
    ) -> dict[str, FloatArray]:
        """Return the seconds by part; attention of what is fine-tuned counts with the products, which it runs beside."""
        seconds = self.stage.parts(queries, decode_rows, cached, tokens + self.tokens, context, prompts)
        attended = self.stage.prompt(np.asarray(self.tokens), np.asarray(self.context))
        return {
            **seconds,
            "products": seconds["products"] + attended,
            "prefill_attention": self.stage.prompt(tokens, context),
        }


def with_fine_tuning(step: StepCosts, tuning: FineTuning, tokens: float) -> StepCosts:
    """Return the costs of steps with so many tokens of fine-tuning in each."""
    context = tuning.seq_len / 2 * (1 + BACKWARD_ATTENTION_RATIO) / PASSES
    stages: Any = tuple(TunedStage(stage, tokens, context) for stage in step.stages)
    return replace(step, stages=stages)


def model_with_fine_tuning(
    model: InstanceModel, step: StepCosts, tuning: FineTuning, tokens: float, cache_tokens: float
) -> InstanceModel:
    """Return an instance with such steps, whose requests have the rest of a step's tokens and of its cache."""
    host = replace(model.host, graph_rows=max(model.host.graph_rows - tokens, 0.0))
    return replace(
        model, steps=with_fine_tuning(step, tuning, tokens), host=host, cache_tokens=max(cache_tokens, 0.0),
        max_batched_tokens=model.max_batched_tokens - tokens, chunk=min(model.chunk, model.max_batched_tokens - tokens),
        others=(),
    )  # fmt: skip


def fine_tuning_bytes(step: StepCosts, tuning: FineTuning) -> float:
    """Return what fine-tuning holds of the fullest device: the adapter with its states, and what is kept of one sequence."""
    instance, blocks = step.instance, [layer for layer in step.instance.model.iter_layers() if isinstance(layer, Block)]
    per_block = [
        STATE_BYTES * _parameters(instance, tuning, block) + ELEMENT_BYTES * tuning.seq_len * _width(instance, block)
        for block in blocks
    ]
    return float(sum(per_block)) / len(blocks) * -(-len(blocks) // instance.layout.pp)


def _parameters(instance: Instance, tuning: FineTuning, block: Block) -> float:
    adapter = Adapters(count=1, rank=tuning.rank, on=tuning.on)
    changed = (op for op in operators(instance, block) if isinstance(op, Gemm) and changes(adapter, op))
    return sum(adapters_bytes(adapter, op, instance.layout.tp) for op in changed) / ELEMENT_BYTES


def _width(instance: Instance, block: Block) -> float:
    """Return the elements of a token that a block's backward pass reads, on one rank."""
    total, tp = 2.0 * instance.model.hidden_dim, instance.layout.tp
    for op in operators(instance, block):
        if not isinstance(op, Gemm) or op.head_dim is not None:
            continue
        cut = tp if op.shard != "none" and not op.routed else instance.layout.moe_tp if op.routed else 1
        if op.shard != "row":
            total += op.rows_per_token * op.n / cut
        elif not op.name.startswith(("mlp_", "shared_")) and not op.routed:
            total += op.rows_per_token * op.k / cut
    return total
