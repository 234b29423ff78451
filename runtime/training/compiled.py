"""torch.compile of each block: kernels fused within a block, hooks of parallel axes outside."""

from __future__ import annotations

import shutil

from ...schema import Plan, RuntimeMismatchError
from ..models.decoder import Decoder
from ..models.experts import MixtureOfExperts

SPLIT_BACKWARD = frozenset({"zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "synthesised"})
"""Schedules with passes for the gradients of inputs and of weights apart; a compiled block has one backward pass."""


def require_compilable(plan: Plan) -> None:
    """Refuse what torch.compile does not take.

    Raises:
        RuntimeMismatchError: with what is in the way.
    """
    reasons = []
    if plan.layout.schedule in SPLIT_BACKWARD:
        reasons.append(f"schedule {plan.layout.schedule} splits backward passes, a compiled block has one")
    if plan.layout.cp > 1:
        reasons.append("attention over the ranks of cp cannot be traced")
    if any(stage.offload_of(idx) != "none" for stage in plan.stages for idx in stage.layer_idxs):
        reasons.append("what a compiled block keeps is not what the offload schedule moves")
    if plan.cluster.weakest_device.vendor == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        reasons.append("on a CPU torch.compile needs a C++ compiler (g++), and there is none")
    if reasons:
        raise RuntimeMismatchError(
            "--compile does not suit this plan", details=tuple(reasons), help="leave out --compile"
        )


def apply_compile(stage: Decoder) -> None:
    """Compile the blocks of a stage, in place; those with experts stay as they are, since their row counts change each step."""
    for block in stage.model.layers.values():
        if not isinstance(block.mlp, MixtureOfExperts):
            block.compile()
