"""What memory depends on: the contents of a pipeline stage, and the choices of a layout that say how much of them a rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .experts import sharded_params

Array = Any
"""A float or a float array; all arguments of one call broadcast together."""


@dataclass(frozen=True, kw_only=True)
class StageContents:
    """What a stage holds, per tensor-parallel rank and micro-batch; floats or arrays; ``expert_params`` are part of ``params``."""

    params: Array
    expert_params: Array
    trained: Array
    block_trained: Array
    frozen_bytes: Array
    root_params: Array
    block_params: Array
    activation_bytes: Array
    working_bytes: Array
    logits: Array
    boundary_bytes: Array

    def frozen(self, step: StepShape) -> Array:
        """Bytes of a frozen model beside adapters: whole, or this rank's shard under zero 3."""
        return self.frozen_bytes / np.where(step.zero_stage == 3, step.dp_shard, 1)

    def owned(self, step: StepShape) -> Array:
        """Trained parameters of which one rank owns the states; those of experts are sharded over groups of their own."""
        return sharded_params(self.trained, self.expert_params, *step.optimizer_shards)

    def reduced(self, step: StepShape) -> Array:
        """Trained parameters of which one rank keeps the gradients where they are sharded."""
        return sharded_params(self.trained, self.expert_params, *step.gradient_shards)

    def kept(self, step: StepShape) -> Array:
        """Trained parameters of which one rank keeps the values that passes read where they are sharded."""
        return sharded_params(self.trained, self.expert_params, step.dp_shard, step.expert_shards)


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The choices of the layout that memory depends on; ints or arrays.

    Attributes:
        dp_replicate, dp_shard: groups that hold the same shards, and ranks over which states are sharded (context ranks included).
        is_replicated: whether ranks hold whole replicas of one stage and nothing more.
        tp: ranks that share a stage's matrices.
        expert_shards: ranks over which the states of experts are sharded.
        gradient_shards, optimizer_shards: the same two for gradients and for optimizer states, multiples of the former.
    """

    dp_replicate: Array
    dp_shard: Array
    expert_shards: Array
    gradient_shards: tuple[Array, Array]
    optimizer_shards: tuple[Array, Array]
    zero_stage: Array
    is_replicated: Array
    tp: Array = 1
    num_microbatches: Array
    in_flight: Array
    num_neighbours: Array
    offload: Array
    offload_fraction: Array

    @property
    def has_second_copy(self) -> Array:
        """Whether parameters are sharded over fewer ranks than the optimizer states they are made from."""
        wider = (self.optimizer_shards[0] > self.dp_shard) | (self.optimizer_shards[1] > self.expert_shards)
        return (self.zero_stage == 3) & wider

    @property
    def on_device(self) -> Array:
        """Part of the optimizer states, and of the masters they update, that is not on the host."""
        return 1.0 - np.where(self.offload > 0, self.offload_fraction, 0.0)
