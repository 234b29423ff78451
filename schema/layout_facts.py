"""What the rules of schema/rules.py look at: a layout, and the numbers of its model, workload and cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .layout import NUMBERS, SCHEDULES, Layout, Schedule
from .model import DenseMLP, LatentAttention, ModelSpec
from .workload import Workload

IntLike = Any
"""An int, or an integer array with one entry per layout."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the rules look at: a layout (numbers or arrays) and the numbers of its model, workload and cluster."""

    dp_replicate: IntLike
    dp_shard: IntLike
    cp: IntLike
    cp_ulysses: IntLike = 1
    tp: IntLike
    pp: IntLike
    ep: IntLike
    etp: IntLike
    num_model_chunks: IntLike
    micro_batch_size: IntLike
    zero_stage: IntLike
    gradient_shard: IntLike = 1
    optimizer_shard: IntLike = 1
    sequence_parallel: IntLike
    schedule: IntLike
    world_size: int
    offloads: IntLike = 0
    recomputes: IntLike = 0
    recompute_fraction: IntLike = 1
    scaleup_domain: int
    seq_len: int
    global_batch_size: int
    num_blocks: int
    head_counts: tuple[int, ...]
    kv_head_counts: tuple[int, ...]
    ffn_dims: tuple[int, ...]
    vocab_size: int
    expert_counts: tuple[int, ...] = ()
    expert_ffn_dims: tuple[int, ...] = ()
    fused_attention: bool = True
    has_backward: bool = True
    vocabulary_is_split: IntLike = 0
    predicts_further_tokens: bool = False
    latent_attention: bool = False
    traced_len: int = 0

    @property
    def dp(self) -> IntLike:
        """Ranks that see different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def stage_ranks(self) -> IntLike:
        """Ranks of one pipeline stage."""
        return self.dp * self.cp * self.tp

    @property
    def gradient_level(self) -> IntLike:
        """Data-parallel ranks over which gradients are sharded, under the stages that shard them."""
        return np.maximum(self.gradient_shard, self.dp_shard)

    @property
    def optimizer_level(self) -> IntLike:
        """The same for the optimizer states."""
        return np.maximum(self.optimizer_shard, self.gradient_level)

    @property
    def has_levels(self) -> IntLike:
        """Whether some state is sharded over more ranks than dp_shard."""
        return self.optimizer_level > self.dp_shard

    @property
    def experts_follow_tp(self) -> IntLike:
        """Experts have no axes of their own: they are split over tp."""
        return (self.ep == 1) & ((self.etp == 1) | (self.etp == self.tp))

    @property
    def expert_tp(self) -> IntLike:
        """Ranks that share one expert."""
        return self.etp + self.experts_follow_tp * (self.tp - self.etp)

    @property
    def num_microbatches(self) -> IntLike:
        """Whole micro-batches of one step on each data-parallel rank (rounded down)."""
        return self.global_batch_size // (self.dp * self.micro_batch_size)


class Undecided(Exception):  # noqa: N818
    """A rule looks at a field that is not chosen yet."""


@dataclass(frozen=True, kw_only=True)
class PartialFacts(Facts):
    """Facts of layouts of which some fields are chosen: whoever looks at one of ``unknown`` is `Undecided`.

    How many ranks see different sequences may be known, ``whole_dp``, where their split into dp_replicate and dp_shard is not.
    """

    unknown: frozenset[str]
    whole_dp: IntLike | None = None

    def __getattribute__(self, name: str) -> Any:
        """The field, if it is known."""
        if name in object.__getattribute__(self, "unknown"):
            raise Undecided(name)
        return object.__getattribute__(self, name)

    @property
    def dp(self) -> IntLike:
        """Ranks that see different sequences."""
        return super().dp if self.whole_dp is None else self.whole_dp


V_SCHEDULES: tuple[Schedule, ...] = ("zb-v", "v-half", "v-min")
"""Each rank holds one stage of the way down the model and one of the way back up."""

SPLIT_SCHEDULES: tuple[Schedule, ...] = ("zb-h1", "zb-h2", *V_SCHEDULES, "synthesised")
"""Gradients of weights are passes of their own, which may come later than those of the inputs."""


class Rule(NamedTuple):
    """``holds`` on numbers or arrays; ``reason`` on numbers."""

    name: str
    holds: Callable[[Facts], Any]
    reason: Callable[[Facts], str]


def all_divide(dims: tuple[int, ...], degree: IntLike) -> Any:
    """Whether ``degree`` divides each of ``dims``."""
    holds = degree == degree  # True, or an array of it
    for dim in dims:
        holds = holds & (dim % degree == 0)
    return holds


def not_dividing(dims: tuple[int, ...], degree: int) -> str:
    """Those it does not divide, for a message."""
    return ", ".join(str(dim) for dim in dims if dim % degree)


def as_array(value: Any) -> Any:
    """Numpy booleans: ``~`` of a Python one is not its negation."""
    return np.asarray(value, dtype=bool)


def runs(f: Facts, *schedules: Schedule) -> Any:
    """Whether the schedule is one of these, as numpy booleans (``~`` of a Python one is not its negation)."""
    return np.isin(f.schedule, [SCHEDULES.index(schedule) for schedule in schedules])


def model_facts(model: ModelSpec) -> dict[str, Any]:
    """The numbers of a model that rules look at, as fields of `Facts`."""
    blocks = [block for block, _ in model.block_runs]
    routed = [block.mlp for block in blocks if not isinstance(block.mlp, DenseMLP)]
    ffn_dims = {block.mlp.ffn_dim for block in blocks if isinstance(block.mlp, DenseMLP)}
    ffn_dims |= {moe.shared_ffn_dim for moe in routed if moe.shared_ffn_dim}
    return {
        "num_blocks": model.num_blocks,
        "head_counts": tuple(sorted({block.attention.num_heads for block in blocks})),
        "kv_head_counts": tuple(sorted({block.attention.num_kv_heads for block in blocks})),
        "ffn_dims": tuple(sorted(ffn_dims)),
        "expert_counts": tuple(sorted({moe.num_experts for moe in routed})),
        "expert_ffn_dims": tuple(sorted({moe.ffn_dim for moe in routed})),
        "vocab_size": model.vocab_size,
        "predicts_further_tokens": any(run.layer.kind == "mtp" for run in model.layers),
        "latent_attention": any(isinstance(block.attention, LatentAttention) for block in blocks),
        "traced_len": model.traced_len or 0,
    }


def layout_facts(
    model: ModelSpec, workload: Workload, layout: Layout, *, world_size: int, scaleup_domain: int
) -> Facts:
    """The facts of one layout, as numbers."""
    return Facts(
        **{name: getattr(layout, name) for name in NUMBERS},
        sequence_parallel=int(layout.sequence_parallel),
        offloads=int(layout.offload not in ("none", "scheduled") or layout.offload_activations > 0),
        recomputes=int(layout.recompute != "none"),
        recompute_fraction=layout.recompute_fraction,
        schedule=SCHEDULES.index(layout.schedule),
        world_size=world_size,
        scaleup_domain=scaleup_domain,
        seq_len=workload.seq_len,
        global_batch_size=workload.global_batch_size,
        fused_attention=workload.attention == "flash",
        has_backward=workload.has_backward,
        vocabulary_is_split=int(layout.vocabulary == "split"),
        **model_facts(model),
    )
