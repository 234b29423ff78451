"""Experts that follow the load: copies on every rank that change from step to step, against one rank; tolerances of test_parity."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from harness import LEARNING_RATE, MAX_NORM, SEED, Case, Outcome, local_tokens, run_group
from meshwright.runtime import build_optimizer, clip_gradients, parallelize
from meshwright.runtime.models.experts import MixtureOfExperts
from meshwright.runtime.models.layers import full_tensor
from meshwright.runtime.training.expert_load import ExpertLoad, stand_on_every_rank
from meshwright.schema import Layout, TrainingPlan
from meshwright.schema.layers import MoE
from meshwright.schema.units import GB
from plans import make_plan, tiny_model
from test_parity import WORKLOAD, Setup, require_equal, run

HOT_OF_STEP = ((1, 4), (0, 1, 2, 3, 4, 5, 6, 7), (7,))
"""Of eight experts: some of both ranks, all, one."""

SMALL = tiny_model(num_blocks=3, experts=MoE(num_experts=8, top_k=2, ffn_dim=8))
"""Experts of 3 KiB: fewer bytes than the rows of a micro-batch that the hottest of them get."""


class Small(Setup):
    """A setup of the model with small experts."""

    @property
    def plan(self) -> TrainingPlan:
        plan = make_plan(SMALL, self.layout, workload=WORKLOAD)
        return plan.replace(estimate=plan.estimate.replace(budget_bytes=GB))  # room for copies


SETUPS = (
    Small("ep, zero 3", Layout(dp_shard=2, ep=2, micro_batch_size=4)),
    Small("ep, zero 1", Layout(dp_shard=2, ep=2, zero_stage=1, micro_batch_size=4)),
    Small("ep, replicas, full", Layout(dp_replicate=2, ep=2, micro_batch_size=4, recompute="full")),
    Small("ep folded over tp", Layout(tp=2, ep=2, micro_batch_size=8)),
)


@dataclass
class Followed(Outcome):
    """And the experts that were hot after each step, by layer."""

    hot: tuple[tuple[tuple[int, ...], ...], ...] = ()


def train_with_given(case: Case, _: Path) -> Outcome:
    """Train with the experts of HOT_OF_STEP on every rank."""
    return train_hot(case, follows=False)


def train_following(case: Case, _: Path) -> Outcome:
    """Train with those that the tokens of the step before call for."""
    return train_hot(case, follows=True)


def train_hot(case: Case, *, follows: bool) -> Followed:
    model = parallelize(None, case.plan, device=torch.device("cpu"), seed=SEED)
    optimizer, outcome = build_optimizer(model, learning_rate=LEARNING_RATE), Followed()
    load = ExpertLoad(model) if follows else None
    mixtures = [b.mlp for b in model.module.model.layers.values() if isinstance(b.mlp, MixtureOfExperts)]
    for step in range(case.num_steps):
        for mixture in () if follows else mixtures:
            stand_on_every_rank(mixture, HOT_OF_STEP[step])
        optimizer.zero_grad()
        outcome.losses.append(model.forward_backward(local_tokens(case.plan, model.mesh.dp_rank, step)))
        if step == 0:
            outcome.gradients = {
                n: full_tensor(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None
            }
        outcome.norms.append(clip_gradients(model, MAX_NORM))
        optimizer.step()
        if load is not None:
            outcome.hot = (*outcome.hot, tuple(load.follow()))
    return outcome


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    reference = Small("plain", Layout(micro_batch_size=8))
    return {"plain": run((reference,), tmp_path_factory.mktemp("reference"))["plain"][0]}


@pytest.mark.parametrize("trains", [train_with_given, train_following])
def test_hot_experts_train_as_one_rank_does(trains, references: dict[str, Outcome], tmp_path: Path) -> None:
    cases = [Case(setup.name, setup.plan, num_steps=setup.num_steps, run=trains) for setup in SETUPS]
    outcomes = run_group(2, cases, tmp_path)
    require_equal(SETUPS, outcomes, references)
    if trains is train_following:
        for ranks in outcomes.values():
            assert ranks[0].hot == ranks[1].hot
            assert any(hot for step in ranks[0].hot for hot in step)
