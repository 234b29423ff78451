"""Small offload problems, and choices of their blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from meshwright.solvers.offload.instance import OPTIONS, AllowedMoves, Links, OffloadChoice, OffloadInstance

KEEP, SELECTIVE, FULL, ACTIVATIONS, BOUNDARY = range(len(OPTIONS))


def instance(
    num_blocks: int = 4, *, cap_share: float = 0.6, seed: int | None = None, copies: float = 0.0, **changes: Any
) -> OffloadInstance:
    """Blocks of 1 s forward and 2 s backward with 10 GB kept, between an embedding and a head; links of 10 GB/s.

    Copies in the compute dtype are so many times the master parameters.
    """
    size = num_blocks + 2
    scale = np.ones(size) if seed is None else np.random.default_rng(seed).uniform(0.7, 1.3, size)
    is_block = np.ones(size)
    is_block[[0, -1]] = 0.0
    kept = np.zeros((5, size))
    kept[[KEEP, SELECTIVE, FULL, ACTIVATIONS, BOUNDARY]] = (
        np.array([10e9, 6e9, 1e9, 10e9, 1e9])[:, None] * scale * is_block
    )
    moves = np.array([0, 0, 0, 1, 1])[:, None]
    forward = np.where(is_block, scale, 0.2)
    states = np.where(is_block, 8e9 * scale, 4e9)
    whole = OffloadInstance(
        forward_s=forward,
        backward_s=2 * forward,
        kind=np.arange(size) if seed is not None else np.array([0, *[1] * num_blocks, 2]),
        allowed=np.where(is_block, True, np.arange(5)[:, None] == KEEP),
        repeated_s=np.array([0, 0.1, 0.8, 0, 0.8])[:, None] * forward * is_block,
        retained_bytes=kept * (1 - moves),
        moved_bytes=kept * moves,
        working_bytes=np.array([1e9, 2e9, 4e9, 1e9, 4e9])[:, None] * is_block,
        parameter_bytes=states / 2,
        copy_bytes=copies * states / 2,
        streamable=np.ones(size, dtype=bool),
        gradient_bytes=states / 2,
        state_bytes=states,
        device_update_s=states / 8e9 * 0.02,
        host_update_s=states / 8e9 * 0.5,
        links=Links(to_host_bytes_per_s=10e9, to_device_bytes_per_s=10e9, duplex=0.5),
        may=AllowedMoves(),
        fixed_bytes=2e9,
        turn_bytes=1e9,
        update_bytes=0.0,
        cap_bytes=1e15,
    )
    whole = replace(whole, **changes)
    most = whole.resident_bytes + whole.retained_bytes[KEEP].sum() + whole.gradient_bytes.sum() + 5e9
    return replace(whole, cap_bytes=cap_share * float(most))


def choice_of(problem: OffloadInstance, option: tuple[int, ...], **masks: Any) -> OffloadChoice:
    """Options of the blocks; the ends keep."""
    none = np.zeros(problem.num_layers, dtype=bool)
    names = ("host_optimizer", "streamed_optimizer", "parameters", "storage")
    return OffloadChoice(option=np.array([KEEP, *option, KEEP]), **{name: masks.get(name, none) for name in names})
