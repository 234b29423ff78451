"""Offload against none on the same ranks: the same losses, norms and gradients, bit for bit, and no byte more than planned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from harness import Case, Outcome, by_world_size, run_group
from meshwright.schema import Layout, ModelSpec, OffloadSchedule, TrainingPlan, Workload
from meshwright.schema.layers import MoE
from meshwright.schema.offload import LayerOffload
from plans import make_plan, tiny_model, with_offload

WORKLOAD = Workload(seq_len=16, global_batch_size=8, precision="fp32")
BF16 = WORKLOAD.replace(precision="bf16-mixed")
PLAIN, TIED = tiny_model(num_blocks=4), tiny_model(num_blocks=4, tied=True)
EXPERTS = tiny_model(num_blocks=4, experts=MoE(num_experts=8, top_k=2, ffn_dim=32))
IN_TURN: tuple[LayerOffload, ...] = ("none", "activations", "boundary", "activations", "boundary", "none")
"""By layer: embedding, four blocks, head."""
STATES = OffloadSchedule(host_optimizer_layers=(0, 2), streamed_optimizer_layers=(1, 3, 5), prefetch_layers=2)


@dataclass(frozen=True)
class Setup:
    """A layout, and what it offloads; ``resumes``: from its checkpoint without offload, and from one without it with it."""

    name: str
    layout: Layout
    schedule: OffloadSchedule = STATES
    offloads: tuple[LayerOffload, ...] = IN_TURN
    model: ModelSpec = PLAIN
    workload: Workload = WORKLOAD
    resumes: bool = False

    def plans(self, folder: Path) -> tuple[TrainingPlan, TrainingPlan]:
        """Without and with the offload, both with the recompute that the offload needs."""
        schedule = self.schedule
        if schedule.storage_optimizer_layers:
            schedule = schedule.replace(storage_path=str(folder / "states"))
        return with_offload(make_plan(self.model, self.layout, workload=self.workload), schedule, self.offloads)


STORED = OffloadSchedule(
    host_optimizer_layers=(0, 1), streamed_optimizer_layers=(2, 3), storage_optimizer_layers=(1, 3), storage_path="x"
)
STREAMED = OffloadSchedule(
    host_optimizer_layers=(0,),
    streamed_optimizer_layers=(1,),
    streamed_parameter_layers=(2, 3, 5),
    storage_optimizer_layers=(1, 3),
    storage_path="x",
)
ONE = (
    Setup("plain", Layout(micro_batch_size=2)),
    Setup("experts", Layout(micro_batch_size=4), model=EXPERTS),
    Setup("bf16", Layout(micro_batch_size=4), workload=BF16),
    Setup("stored", Layout(micro_batch_size=4), STORED, resumes=True),
    Setup("streamed", Layout(micro_batch_size=4), STREAMED),
)
TWO = (
    Setup("zero 3", Layout(dp_shard=2, micro_batch_size=2)),
    Setup("zero 3 streamed bf16", Layout(dp_shard=2, micro_batch_size=2), STREAMED, workload=BF16, resumes=True),
    Setup("zero 1", Layout(dp_shard=2, zero_stage=1, micro_batch_size=2), STORED, model=TIED),
    Setup("tp", Layout(tp=2, micro_batch_size=4), STORED),
    Setup("1f1b", Layout(pp=2, micro_batch_size=2), STORED, model=TIED, resumes=True),
    Setup(
        "zero bubble",
        Layout(pp=2, micro_batch_size=2, schedule="zb-h1"),
        offloads=("none",) + ("activations",) * 4 + ("none",),
    ),
    Setup(
        "zb-v",
        Layout(pp=2, num_model_chunks=2, schedule="zb-v", micro_batch_size=2),
        offloads=("none",) + ("activations",) * 4 + ("none",),
    ),
    Setup("ep", Layout(dp_shard=2, ep=2, micro_batch_size=2), STREAMED, model=EXPERTS),
    Setup("cp", Layout(cp=2, micro_batch_size=2)),
)
QUICK = ("plain", "stored", "streamed", "zero 3", "tp", "1f1b")
FOUR = (
    Setup("tp zero 3", Layout(tp=2, dp_shard=2, micro_batch_size=2), STREAMED),
    Setup("pp tp", Layout(pp=2, tp=2, micro_batch_size=2), model=TIED),
    Setup("hsdp", Layout(dp_replicate=2, dp_shard=2), STREAMED),
)


@pytest.mark.parametrize("setups", by_world_size(ONE, TWO, FOUR, quick=QUICK))
def test_offload_changes_no_bit(setups: tuple[Setup, ...], tmp_path: Path) -> None:
    cases = []
    for setup in setups:
        without, with_ = setup.plans(tmp_path)
        cases += [
            Case(f"{setup.name}, without", without, saves=setup.resumes),
            Case(setup.name, with_, saves=setup.resumes),
        ]
        if setup.resumes:
            cases += [
                Case(f"{setup.name}, goes on without", without, resumes=setup.name),
                Case(f"{setup.name}, goes on with", with_, resumes=f"{setup.name}, without"),
            ]
    outcomes = run_group(setups[0].layout.world_size, cases, tmp_path)
    problems = [
        f"{setup.name}: {problem}"
        for setup in setups
        for found, expected in zip(outcomes[setup.name], outcomes[f"{setup.name}, without"], strict=True)
        for problem in differences(found, expected)
    ]
    for setup in filter(lambda setup: setup.resumes, setups):
        whole = outcomes[setup.name][0].losses
        for how in ("without", "with"):
            later = outcomes[f"{setup.name}, goes on {how}"][0].losses
            if later != whole[1:]:
                problems.append(f"{setup.name}: goes on {how} offload to losses {later}, expected {whole[1:]}")
    assert not problems, "\n".join(problems)


def differences(found: Outcome, expected: Outcome) -> list[str]:
    """Everything that is not the same to the last bit."""
    problems = []
    if found.losses != expected.losses:
        problems.append(f"losses {found.losses}, expected {expected.losses}")
    if found.norms != expected.norms:
        problems.append(f"norms {found.norms}, expected {expected.norms}")
    if found.gradients.keys() != expected.gradients.keys():
        problems.append("gradients of other parameters")
    problems += [
        f"gradient of {name} is off by {(gradient - expected.gradients[name]).abs().max():.1e}"
        for name, gradient in found.gradients.items()
        if not torch.equal(gradient, expected.gradients[name])
    ]
    return problems
