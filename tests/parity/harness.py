"""Runs cases on a group of gloo ranks that are started once, and hands back what every rank saw.

Ranks come from a fork server that has torch imported already: starting one takes 0.1 s instead of 3, and unlike a fork of the test
process it is safe after autograd has started threads there.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing as mp
import multiprocessing.forkserver
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from meshwright.runtime import Decoder, build_optimizer, clip_gradients, parallelize
from meshwright.runtime.models.decoder import init_weights
from meshwright.runtime.models.layers import full_tensor
from meshwright.runtime.training.checkpoint import CheckpointWriter, TrainingProgress, load_checkpoint
from meshwright.runtime.training.optimizer import ZerothOrderSGD
from meshwright.runtime.weights.save import save_weights
from meshwright.schema import TrainingPlan
from meshwright.schema.shares import share_of_rank
from torch import Tensor, nn

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet

SEED = 7
MAX_NORM = 0.5
LEARNING_RATE = 1e-2
GRACE_S = 5.0
CRASHED = -signal.SIGABRT
"""Exit code of a rank that native code ended: once "malloc(): unaligned tcache chunk" was seen, not again in the same group."""

PRELOADED = [
    "pytest",
    "torch.distributed.tensor",
    "torch.profiler",
    "meshwright.runtime.parallelize_model",
    "meshwright.runtime.training.checkpoint",
    "meshwright.runtime.training.optimizer",
    "meshwright.runtime.weights.save",
]


@dataclass(frozen=True)
class Case:
    """One plan to execute; its name is its key in the results.

    Attributes:
        own_model: hand a Decoder with weights to `parallelize` instead of letting it build one.
        saves: write a checkpoint after the first step.
        resumes: name of an earlier case of the group from whose checkpoint this one goes on.
        module: name of a foreign module (foreign_models.py) to spread; on the meta device if there are ``weights``.
        weights: folder of Hugging Face weights to start from.
        run: what to do in the place of `train`, a function of a module.
        exports: write such weights to the folder ``NAME`` before the first step, in files of at most ``exports`` bytes.
    """

    name: str
    plan: TrainingPlan
    num_steps: int = 3
    own_model: bool = False
    saves: bool = False
    resumes: str = ""
    module: str = ""
    weights: str | None = None
    exports: int = 0
    run: Callable[[Case, Path], Outcome] | None = None


def by_world_size(*groups: Sequence[Any], long_from: int = 4, quick: Collection[str] = ()) -> list[ParameterSet]:
    """Return groups of setups as test parameters: from ``long_from`` ranks on of the long tier, of eight for the night.

    Of a group with setups named in ``quick`` the short tier has these alone; the others are a group of the long tier, together with
    those from whose checkpoints they go on.
    """
    parameters = []
    for group in groups:
        size = group[0].layout.world_size
        marks = _tier(size, long_from)
        chosen = tuple(setup for setup in group if setup.name in quick)
        if marks or not chosen:
            parameters.append(pytest.param(group, id=f"{size} ranks", marks=marks))
            continue
        needed = {getattr(setup, "resumes", "") for setup in group if setup not in chosen}
        others = tuple(setup for setup in group if setup not in chosen or setup.name in needed)
        parameters += [
            pytest.param(chosen, id=f"{size} ranks"),
            pytest.param(others, id=f"{size} ranks, others", marks=pytest.mark.long),
        ]
    assert set(quick) <= {setup.name for group in groups for setup in group}
    return parameters


def _tier(size: int, long_from: int) -> list[pytest.MarkDecorator]:
    return [pytest.mark.nightly] if size >= 8 else [pytest.mark.long] if size >= long_from else []


@dataclass
class Outcome:
    """What one rank saw: the first step's gradients (before clipping), and loss and gradient norm of each step; or an error."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    stage: int = 0
    error: str = ""


def run_group(
    world_size: int, cases: list[Case], folder: Path, *, timeout_s: float = 240.0
) -> dict[str, list[Outcome]]:
    """Execute all cases one after the other on ``world_size`` ranks.

    Returns:
        For each case the outcome of every rank.

    Raises:
        AssertionError: a rank failed (with its traceback), or the group did not end in time (with the stacks of all ranks).
    """
    codes, reports = _run_ranks(world_size, cases, folder, timeout_s, "store")
    if CRASHED in codes:
        warnings.warn(f"ranks ended with {codes} and run once more: {reports}", stacklevel=2)
        codes, reports = _run_ranks(world_size, cases, folder, timeout_s, "second store")
    if any(codes):
        raise AssertionError(f"exit codes {codes}\n" + "\n".join(reports))
    results = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]
    return {case.name: [result[case.name] for result in results] for case in cases}


def _run_ranks(
    world_size: int, cases: list[Case], folder: Path, timeout_s: float, store: str
) -> tuple[list[int | None], list[str]]:
    """Start the ranks and wait for them; return their exit codes and what they wrote about their failures."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        # Libraries read it when they are loaded: OpenBLAS would start threads in the server, which is forked for every rank.
        patch.setenv("OMP_NUM_THREADS", "1")
        mp.forkserver.ensure_running()
    ranks = [
        context.Process(target=_rank_main, args=(rank, world_size, cases, folder, timeout_s, store))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + timeout_s
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
        if any(process.exitcode for process in ranks):
            deadline = min(deadline, time.monotonic() + GRACE_S)  # its peers would wait for it forever
        time.sleep(0.05)
    for process in ranks:
        process.kill()
        process.join()
    reports = [path.read_text() for path in sorted(folder.glob("*.failed")) if path.stat().st_size]
    return [process.exitcode for process in ranks], reports


def _rank_main(rank: int, world_size: int, cases: list[Case], folder: Path, timeout_s: float, store: str) -> None:
    torch.set_num_threads(1)
    # Gathering whole gradients, which only tests do, is known to take two collectives.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    with (folder / f"{rank}.failed").open("w") as report:
        faulthandler.dump_traceback_later(timeout_s - GRACE_S, file=report)
        # Once for all cases: a DeviceMesh made after a group was destroyed may find the old group's name in torch's caches.
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        results = {}
        for case in cases:
            try:
                results[case.name] = (case.run or train)(case, folder)
            except Exception:
                report.write(f"rank {rank} of {world_size}, case {case.name}\n{traceback.format_exc()}\n")
                report.flush()
                raise
        torch.save(results, folder / f"{rank}.pt")
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
    os._exit(0)  # gloo's threads were seen to abort the interpreter's shutdown after a run that was in order


def train(case: Case, folder: Path) -> Outcome:
    """Some steps on random tokens, on one rank of a running group; those that a checkpoint has already done are left out."""
    plan = case.plan
    module: nn.Module | None = None
    if case.own_model:
        module = Decoder(plan.model)
        init_weights(module, SEED)
    if case.module:
        from foreign_models import build

        module = build(case.module, "meta" if case.weights else "cpu").train()
    model = parallelize(module, plan, device=torch.device("cpu"), seed=SEED, weights=case.weights)
    if case.exports:
        save_weights(model, folder / case.name, max_file_bytes=case.exports)
    optimizer = build_optimizer(model, learning_rate=LEARNING_RATE)
    outcome = Outcome(stage=model.mesh.coordinates["pp"])
    done = load_checkpoint(folder / case.resumes / "step-00000001", model, optimizer).step if case.resumes else 0
    for step in range(done, case.num_steps):
        optimizer.zero_grad()
        if isinstance(optimizer, ZerothOrderSGD):
            loss = optimizer.losses(local_tokens(model.plan, model.mesh.dp_rank, step))
            model.add_over_ranks(loss)
            outcome.losses.append(loss.item())
            optimizer.step()
            continue
        outcome.losses.append(model.forward_backward(local_tokens(model.plan, model.mesh.dp_rank, step)))
        if step == 0:
            gradients = {
                name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
            }
            # A replicated DTensor's full tensor is the local one: copy it, or clipping would change the result.
            outcome.gradients = {name: full_tensor(gradient).clone() for name, gradient in gradients.items()}
        outcome.norms.append(clip_gradients(model, MAX_NORM))
        optimizer.step()
        if step == 0 and case.saves:
            CheckpointWriter(folder / case.name, model, optimizer).save(TrainingProgress(step=1, seed=SEED))
    return outcome


def local_tokens(plan: TrainingPlan, dp_rank: int, step: int) -> Tensor:
    """Share of one data-parallel rank of a random global batch, [local_batch, seq_len + 1]."""
    generator = torch.Generator().manual_seed(step)
    shape = (plan.workload.global_batch_size, plan.workload.seq_len + 1)
    rows = share_of_rank(plan, dp_rank).rows
    return torch.randint(0, plan.model.vocab_size, shape, generator=generator)[rows.start : rows.stop]
