"""Models of transformers and a plain module through `parallelize`, against one rank: loss, every gradient, training steps.

Tolerances as in test_parity, for the same reasons. The reference is the module by itself, without our runtime around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from foreign_models import NAMES, build, spec_of
from harness import LEARNING_RATE, MAX_NORM, Case, Outcome, by_world_size, local_tokens, run_group
from meshwright.schema import Layout, Workload
from plans import make_plan
from test_parity import differences

WORKLOAD = Workload(seq_len=16, global_batch_size=8, precision="fp32")
BF16 = WORKLOAD.replace(precision="bf16-mixed")


@dataclass(frozen=True)
class Setup:
    name: str
    module: str
    layout: Layout
    workload: Workload = WORKLOAD
    on_meta: bool = False

    def case(self, weights: Path) -> Case:
        plan = make_plan(spec_of(self.module), self.layout, workload=self.workload)
        folder = str(weights / self.module) if self.on_meta else None
        return Case(self.name, plan, module=self.module, weights=folder)


WHOLE = {"sequence_parallel": False}
GROUPS = (
    (
        Setup("llama, full", "llama", Layout(micro_batch_size=4, recompute="full")),
        Setup("gpt2, selective", "gpt2", Layout(micro_batch_size=2, recompute="selective")),
        Setup("plain", "plain", Layout(micro_batch_size=4, recompute="selective")),
    ),
    (
        Setup("llama, tp", "llama", Layout(tp=2, micro_batch_size=4, **WHOLE)),
        Setup("llama, tp sp full", "llama", Layout(tp=2, micro_batch_size=4, recompute="full")),
        Setup("llama, zero 3", "llama", Layout(dp_shard=2, micro_batch_size=2)),
        Setup("llama, zero 3, from the meta device", "llama", Layout(dp_shard=2), on_meta=True),
        Setup("llama, pp", "llama", Layout(pp=2, micro_batch_size=2)),
        Setup("llama, pp in chunks", "llama", Layout(pp=2, num_model_chunks=2, schedule="zb-v", micro_batch_size=2)),
        Setup("qwen3, tp", "qwen3", Layout(tp=2, micro_batch_size=4, **WHOLE)),
        Setup("qwen3, tp sp", "qwen3", Layout(tp=2, micro_batch_size=4)),
        Setup("qwen3, pp", "qwen3", Layout(pp=2, micro_batch_size=2)),
        Setup("qwen3, pp in chunks", "qwen3", Layout(pp=2, num_model_chunks=2, schedule="zb-v", micro_batch_size=2)),
        Setup("qwen3, zero 1", "qwen3", Layout(dp_shard=2, zero_stage=1, micro_batch_size=2)),
        Setup("gpt2, zero 3 selective", "gpt2", Layout(dp_shard=2, micro_batch_size=2, recompute="selective")),
        Setup("gpt2, pp", "gpt2", Layout(pp=2, micro_batch_size=2)),
        Setup("gpt2, replicas bf16", "gpt2", Layout(dp_replicate=2, micro_batch_size=2), workload=BF16),
        Setup("plain, zero 3 full", "plain", Layout(dp_shard=2, micro_batch_size=2, recompute="full")),
        Setup("plain, tp", "plain", Layout(tp=2, micro_batch_size=4, **WHOLE)),
    ),
    (
        Setup("llama, pp tp sp", "llama", Layout(pp=2, tp=2, micro_batch_size=2)),
        Setup("llama, tp 2, zero 3, from the meta device", "llama", Layout(tp=2, dp_shard=2), on_meta=True),
        Setup("qwen3, tp sp zero 3", "qwen3", Layout(tp=2, dp_shard=2, micro_batch_size=2)),
        Setup("qwen3, pp tp", "qwen3", Layout(pp=2, tp=2, micro_batch_size=2, **WHOLE)),
        Setup("gpt2, pp zero 1", "gpt2", Layout(pp=2, dp_shard=2)),
        Setup("plain, tp zero 3", "plain", Layout(tp=2, dp_shard=2, micro_batch_size=2, **WHOLE)),
    ),
)
QUICK = (
    "llama, tp sp full", "llama, zero 3, from the meta device", "qwen3, tp", "qwen3, pp in chunks", "gpt2, pp", "plain, tp",
)  # fmt: skip


def alone(name: str) -> Outcome:
    """The module by itself, with a plain loop."""
    model, outcome, plan = build(name), Outcome(), make_plan(spec_of(name), Layout(), workload=WORKLOAD)
    model.train()
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))
    for step in range(3):
        tokens = local_tokens(plan, 0, step)
        out = model(tokens[:, :-1])
        logits = out if isinstance(out, torch.Tensor) else out.logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        outcome.losses.append(loss.item())
        if step == 0:
            outcome.gradients = {key: p.grad.clone() for key, p in named.items() if p.grad is not None}
        outcome.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    return outcome


@pytest.fixture(scope="module")
def references() -> dict[str, Outcome]:
    return {name: alone(name) for name in NAMES}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    build("llama").save_pretrained(folder / "llama", max_shard_size="60KB")
    return folder


@pytest.mark.parametrize("setups", by_world_size(*GROUPS, quick=QUICK))
def test_foreign_modules_train_as_they_do_alone(
    setups: tuple[Setup, ...], references: dict[str, Outcome], weights: Path, tmp_path: Path
) -> None:
    outcomes = run_group(setups[0].layout.world_size, [setup.case(weights) for setup in setups], tmp_path)
    problems = [
        f"{setup.name}: {problem}"
        for setup in setups
        for problem in differences(
            outcomes[setup.name], references[setup.module], mixed=setup.workload.precision != "fp32"
        )
    ]
    assert not problems, "\n".join(problems)
