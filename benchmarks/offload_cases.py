"""Generated offload problems, and the all-or-nothing policies that tools offer today, on equal terms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from meshwright.solvers.offload.instance import OPTIONS, AllowedMoves, Links, OffloadChoice, OffloadInstance
from meshwright.solvers.offload.schedule import uniform_policies, uniform_policy
from meshwright.solvers.offload.simulation import SimulatedStep, broken_constraints, simulate

KEEP, SELECTIVE, FULL, ACTIVATIONS, BOUNDARY = range(len(OPTIONS))


@dataclass(frozen=True)
class Machine:
    """A device with its host: FLOPs a second in use, memory, bytes of its link a second, parameters a CPU updates a second."""

    name: str
    flops_per_s: float
    memory_bytes: float
    link_bytes_per_s: float
    host_params_per_s: float


MACHINES = (
    Machine("4090", 165e12 * 0.5, 24e9, 22e9, 1.2e9),
    Machine("a100-40", 312e12 * 0.5, 40e9, 22e9, 2e9),
    Machine("a100-80", 312e12 * 0.5, 80e9, 22e9, 2e9),
    Machine("h100", 990e12 * 0.45, 80e9, 50e9, 3e9),
    Machine("gh200", 990e12 * 0.45, 96e9, 300e9, 4e9),
)
"""Rates as the prototype of this comparison assumed them: utilisation 45 to 50 %, PCIe 4 and 5 and NVLink-C2C, Adam on the host."""

MODELS = ((32, 4096), (40, 5120), (60, 6656), (80, 8192))
"""Blocks and hidden width of the Llama family's 7, 13, 30 and 70 B."""


def problem(
    machine: Machine,
    blocks: int,
    width: int,
    *,
    sequences: int,
    microbatches: int,
    ranks: int,
    variation: float = 0.0,
    seed: int = 0,
) -> OffloadInstance:
    """Return a model of blocks that differ by up to ``variation``, states sharded over ``ranks``, sequences of 4,096."""
    size, tokens, block = blocks + 2, sequences * 4096, 12 * width * width
    scale = np.random.default_rng(seed).uniform(1 - variation, 1 + variation, size)
    is_block = np.ones(size)
    is_block[[0, -1]] = 0.0
    each = (2 * block * tokens + 2 * tokens * 4096 * width) / machine.flops_per_s
    forward = each * scale * is_block
    forward[-1] = 2 * tokens * width * 32_000 / machine.flops_per_s
    params = np.where(is_block, block * scale, 32_000.0 * width)
    owned = params / ranks
    saved, boundary = 34.0 * tokens * width * scale * is_block, 2.0 * tokens * width * is_block
    by_option = np.stack([saved, 0.6 * saved, boundary, saved, boundary])
    moves = np.array([0, 0, 0, 1, 1])[:, None]
    return OffloadInstance(
        forward_s=forward,
        backward_s=2 * forward,
        kind=np.arange(size) if variation else np.array([0, *[1] * blocks, 2]),
        allowed=np.where(is_block, True, np.arange(len(OPTIONS))[:, None] == KEEP),
        repeated_s=np.array([0, 0.05, 0.85, 0, 0.85])[:, None] * forward * is_block,
        retained_bytes=by_option * (1 - moves),
        moved_bytes=by_option * moves,
        working_bytes=np.array([0.1, 0.4, 1.0, 0.1, 1.0])[:, None] * saved,
        parameter_bytes=4 * owned,
        copy_bytes=0 * owned,
        streamable=np.ones(size, dtype=bool),
        gradient_bytes=4 * owned,
        state_bytes=8 * owned,
        device_update_s=28 * owned / 1.5e12,
        host_update_s=owned / machine.host_params_per_s * ranks,
        links=Links(
            to_host_bytes_per_s=machine.link_bytes_per_s, to_device_bytes_per_s=machine.link_bytes_per_s, duplex=0.6
        ),
        may=AllowedMoves(),
        fixed_bytes=3 * 2 * float(params.max()) + 1.5e9,
        turn_bytes=2.0 * tokens * 32_000,
        update_bytes=0.0,
        cap_bytes=0.95 * machine.memory_bytes,
        host_cap_bytes=2e12 / ranks,
        num_microbatches=microbatches,
        gradients_accumulate=microbatches > 1,
        pieces=np.where(is_block, 3, 1),
    )


def cases(seed: int, count: int) -> Iterator[tuple[str, OffloadInstance]]:
    """Generated problems: models on machines that hold all of them, little of them or too little, with and without accumulation, of
    blocks alike or not. Nothing is left out, so some fit without offload and some not at all.
    """
    rng = np.random.default_rng(seed)
    for number in range(count):
        blocks, width = MODELS[rng.integers(len(MODELS))]
        blocks = int(blocks * rng.choice([0.5, 1.0, 1.6]))
        machine = MACHINES[rng.integers(len(MACHINES))]
        ranks, microbatches = int(rng.choice([1, 2, 4, 8])), int(rng.choice([1, 1, 4, 8]))
        sequences, variation = int(rng.choice([1, 2, 4])), float(rng.choice([0.0, 0.0, 0.3]))
        name = (
            f"{blocks} blocks of {width} +-{100 * variation:.0f} % on {ranks} x {machine.name}, "
            f"{microbatches} x {sequences} sequences"
        )
        yield (
            name,
            problem(
                machine,
                blocks,
                width,
                sequences=sequences,
                microbatches=microbatches,
                ranks=ranks,
                variation=variation,
                seed=seed + number,
            ),
        )


def fastest_feasible_s(instance: OffloadInstance, choices: list[OffloadChoice]) -> float:
    """Return the seconds of the fastest of some choices that fits; infinite if none does."""
    feasible: list[SimulatedStep] = []
    for choice in choices:
        for prefetch in (1, 2):
            simulated = simulate(instance, choice, prefetch=prefetch)
            if not broken_constraints(instance, choice, simulated):
                feasible.append(simulated)
    return min((simulated.step_s for simulated in feasible), default=np.inf)


def best_uniform_s(instance: OffloadInstance) -> float:
    """Return the seconds of the best all-or-nothing policy: one option for all blocks, one place for all states or parameters."""
    return fastest_feasible_s(instance, list(uniform_policies(instance, (1.0,))))


def tuned_uniform_s(instance: OffloadInstance) -> float:
    """Return the same with the fraction of the states that is offloaded tuned in eighths."""
    return fastest_feasible_s(instance, list(uniform_policies(instance)))


def nothing_moves(choice: OffloadChoice) -> bool:
    """Return whether a choice offloads nothing."""
    masks = (choice.host_optimizer, choice.streamed_optimizer, choice.parameters)
    return not any(mask.any() for mask in masks) and not np.isin(choice.option, (ACTIVATIONS, BOUNDARY)).any()


def peers_s(instance: OffloadInstance) -> dict[str, float]:
    """Return the seconds of what three tools do by default where a model does not fit, full recompute on."""
    return {
        "ZeRO-Offload": fastest_feasible_s(instance, [uniform_policy(instance, FULL, "host")]),
        "ZeRO-Infinity": fastest_feasible_s(instance, [uniform_policy(instance, BOUNDARY, "parameters")]),
        "FSDP2 CPUOffloadPolicy": fastest_feasible_s(instance, [uniform_policy(instance, FULL, "parameters")]),
    }
