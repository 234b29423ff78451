"""Every parallel axis against one rank: the same loss, gradients, gradient norm and training steps.

Why the tolerances are not zero (fp32): sums are taken in another order (over ranks, micro-batches, columns of a split product). One
unit in the last place of a loss near 4.6 is 4.8e-7, and losses were seen to differ by two; gradients here are at most 0.5, and were
seen to differ by 1.2e-7. From the second step on Adam divides by the root of tiny squares, which magnifies differences of the
gradients of rare tokens (seen: 2.3e-6 of the norm). bf16 and fp16 are compared with fp32, so that their own rounding is in the
tolerance (seen: loss 7.7e-5 at first and 2.2e-3 after two steps, gradients 2.7e-3, norm 5e-4 and 3.9e-2).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from harness import Case, Outcome, by_world_size, run_group
from meshwright.schema import Layout, TrainingPlan, Workload
from meshwright.schema.layers import LatentAttention, MoE
from meshwright.schema.rope import Rope
from meshwright.schema.stages import LayerSlots
from plans import gpt2_model, make_plan, tiny_model

LOSS_TOLERANCE = 1.5e-6
GRADIENT_TOLERANCE = 5e-7
NORM_TOLERANCE = 1e-6  # relative: six digits
LATER_NORM_TOLERANCE = 1e-4  # Adam's first update has a gradient's sign even where that is rounding: up to 2.3e-5 seen
MIXED_LOSS_TOLERANCE = 3e-4  # bf16 keeps 8 bits: 4e-3 a logit, averaged over 128 tokens
MIXED_LATER_LOSS_TOLERANCE = 6e-3
MIXED_GRADIENT_TOLERANCE = 5e-3
MIXED_NORM_TOLERANCE = 2e-3
MIXED_LATER_NORM_TOLERANCE = 0.08

WORKLOAD = Workload(seq_len=16, global_batch_size=8, precision="fp32")
BF16 = WORKLOAD.replace(precision="bf16-mixed")
SIX = WORKLOAD.replace(global_batch_size=6)
SGD = WORKLOAD.replace(optimizer="sgd")
FP16 = WORKLOAD.replace(precision="fp16-mixed")
MODELS = {
    "plain": tiny_model(num_blocks=3),
    "rich": tiny_model(
        num_blocks=3,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        qk_norm="per_head",
        rope=Rope(theta=1e4, scaling="linear", factor=2.0),
    ),
    "tied": tiny_model(num_blocks=3, tied=True),
    "five": tiny_model(),
    "five tied": tiny_model(tied=True),
    "five rich": tiny_model(
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        qk_norm="per_head",
        rope=Rope(theta=1e4, scaling="linear", factor=2.0),
    ),
    "mha": tiny_model(num_kv_heads=4, vocab_size=98),
    "experts": tiny_model(num_blocks=3, experts=MoE(num_experts=8, top_k=2, ffn_dim=32)),
    "five with experts": tiny_model(experts=MoE(num_experts=8, top_k=2, ffn_dim=32)),
    "latent": tiny_model(
        num_blocks=2,
        latent=LatentAttention(
            num_heads=4, q_lora_rank=12, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
        ),
        experts=MoE(
            num_experts=8,
            top_k=2,
            ffn_dim=32,
            shared_ffn_dim=16,
            router="sigmoid",
            num_groups=4,
            top_groups=2,
            scale=2.5,
        ),
        rope=Rope(scaling="yarn", factor=4.0, original_max_seq_len=8, mscale=0.7, mscale_all_dim=0.8),
    ),
    "mixed experts": tiny_model(
        num_blocks=2, num_kv_heads=4, qk_norm="full", experts=MoE(num_experts=8, top_k=2, ffn_dim=32)
    ),
    "shared experts": tiny_model(
        num_blocks=3,
        tied=True,
        experts=MoE(
            num_experts=6, top_k=3, ffn_dim=16, shared_ffn_dim=28, shared_gate=True, normalize=False, scale=1.5
        ),
    ),
    "gpt2": gpt2_model(),
    # Names of their own, because their references have other workloads.
    "sgd": tiny_model(num_blocks=3),
    "six": tiny_model(num_blocks=3),
}


REPLICAS = LayerSlots(
    experts=(7, 0, 2, 2, 5, 1, 3, 2, 4, 6), shares=(1.0, 1.0, 0.25, 0.25, 1.0, 1.0, 1.0, 0.5, 1.0, 1.0)
)
ORDERED = LayerSlots(experts=(4, 5, 6, 7, 0, 1, 2, 3), shares=(1.0,) * 8)


@dataclass(frozen=True)
class Setup:
    """A layout, the model it is tried on, and what differs from the default plan."""

    name: str
    layout: Layout
    model: str = "plain"
    workload: Workload = WORKLOAD
    blocks_per_stage: tuple[int, ...] | None = None
    rank_map: tuple[int, ...] | None = None
    own_model: bool = False
    pipeline_order: tuple[str, ...] = ()
    num_steps: int = 3
    saves: bool = False
    resumes: str = ""
    expert_slots: tuple[LayerSlots, ...] = ()

    @property
    def plan(self) -> TrainingPlan:
        return make_plan(
            MODELS[self.model],
            self.layout,
            workload=self.workload,
            blocks_per_stage=self.blocks_per_stage,
            rank_map=self.rank_map,
            pipeline_order=self.pipeline_order,
            expert_slots=self.expert_slots,
        )


REFERENCES = tuple(
    Setup(name, Layout(micro_batch_size=2), model=name, workload={"sgd": SGD, "six": SIX}.get(name, WORKLOAD))
    for name in MODELS
)
ONE = (
    Setup("full", Layout(micro_batch_size=8, recompute="full"), model="rich"),
    Setup("selective", Layout(micro_batch_size=2, recompute="selective"), model="rich"),
    Setup("math attention", Layout(micro_batch_size=4), workload=WORKLOAD.replace(attention="math")),
    Setup("bf16", Layout(micro_batch_size=4), workload=BF16, model="five"),
    Setup("experts full", Layout(micro_batch_size=4, recompute="full"), model="experts"),
    Setup("experts selective", Layout(micro_batch_size=4, recompute="selective"), model="shared experts"),
    Setup("fp16", Layout(micro_batch_size=4), workload=FP16, model="five"),
)
# Where no pipeline is to be filled two micro-batches accumulate, and only some cases take one sequence at a time.
TWO = (
    Setup("zero 1", Layout(dp_shard=2, zero_stage=1, micro_batch_size=2)),
    Setup("zero 2", Layout(dp_shard=2, zero_stage=2, micro_batch_size=2), model="rich"),
    Setup("zero 3", Layout(dp_shard=2, micro_batch_size=2)),
    Setup("zero 3 tied", Layout(dp_shard=2, micro_batch_size=2), model="tied"),
    Setup("zero 3 selective", Layout(dp_shard=2, micro_batch_size=2, recompute="selective"), model="rich"),
    Setup("zero 3 full", Layout(dp_shard=2, micro_batch_size=2, recompute="full")),
    Setup("zero 3 bf16", Layout(dp_shard=2, micro_batch_size=2), workload=BF16, model="five"),
    Setup("zero 1 bf16", Layout(dp_shard=2, zero_stage=1, micro_batch_size=2), workload=BF16, model="tied"),
    Setup("replicas", Layout(dp_replicate=2, micro_batch_size=2), rank_map=(1, 0)),
    Setup("replicas bf16", Layout(dp_replicate=2, micro_batch_size=2), workload=BF16, model="five"),
    Setup("tp", Layout(tp=2, sequence_parallel=False, micro_batch_size=4), model="rich"),
    Setup(
        "tp bf16 selective", Layout(tp=2, sequence_parallel=False, recompute="selective"), workload=BF16, model="five"
    ),
    Setup("tp tied", Layout(tp=2, sequence_parallel=False, micro_batch_size=4), model="tied"),
    Setup("own model, zero 3", Layout(dp_shard=2, micro_batch_size=2), model="rich", own_model=True),
    Setup("own model, tp", Layout(tp=2, micro_batch_size=4), model="tied", own_model=True),
    Setup("own model, pp", Layout(pp=2, micro_batch_size=2), model="tied", own_model=True),
    Setup("sgd zero 2", Layout(dp_shard=2, zero_stage=2, micro_batch_size=2), model="sgd", workload=SGD),
    Setup("sgd tp", Layout(tp=2, micro_batch_size=4), model="sgd", workload=SGD),
    Setup("tp sp", Layout(tp=2, micro_batch_size=4), model="rich"),
    Setup("tp sp tied", Layout(tp=2, micro_batch_size=4), model="tied"),
    Setup("tp sp selective", Layout(tp=2, micro_batch_size=4, recompute="selective"), model="rich"),
    Setup("tp sp full", Layout(tp=2, micro_batch_size=4, recompute="full")),
    Setup("tp sp bf16", Layout(tp=2, micro_batch_size=4), workload=BF16, model="five"),
    Setup("tp sp fp16", Layout(tp=2, micro_batch_size=4), workload=FP16, model="five"),
    Setup("pp", Layout(pp=2, micro_batch_size=2), model="rich"),
    Setup("pp gpipe", Layout(pp=2, micro_batch_size=2, schedule="gpipe"), rank_map=(1, 0)),
    Setup("pp uneven", Layout(pp=2, micro_batch_size=1), blocks_per_stage=(2, 1)),
    Setup("pp tied", Layout(pp=2, micro_batch_size=2), model="tied"),
    Setup("pp selective", Layout(pp=2, micro_batch_size=2, recompute="selective")),
    Setup("pp mixed", Layout(pp=2, micro_batch_size=2, recompute="mixed"), model="rich"),
    Setup("experts, zero 3", Layout(dp_shard=2, micro_batch_size=2), model="experts"),
    Setup("experts over tp", Layout(tp=2, micro_batch_size=4), model="shared experts"),
    Setup(
        "experts over tp, whole sequence", Layout(tp=2, sequence_parallel=False, micro_batch_size=4), model="experts"
    ),
    Setup("ep, zero 3", Layout(dp_shard=2, ep=2, micro_batch_size=2), model="shared experts"),
    Setup("ep, zero 1", Layout(dp_shard=2, ep=2, zero_stage=1, micro_batch_size=2), model="experts"),
    Setup("ep, replicas", Layout(dp_replicate=2, ep=2, micro_batch_size=2), model="experts"),
    Setup(
        "ep, replicas of experts", Layout(dp_shard=2, ep=2), model="experts", expert_slots=(REPLICAS, ORDERED, REPLICAS)
    ),
    Setup("latent, cp", Layout(cp=2, micro_batch_size=2), model="latent"),
    Setup("latent, tp", Layout(tp=2, micro_batch_size=4), model="latent"),
    Setup("latent, tp, whole sequence", Layout(tp=2, sequence_parallel=False, micro_batch_size=4), model="latent"),
    Setup("latent, ep", Layout(dp_shard=2, ep=2, micro_batch_size=2, recompute="selective"), model="latent"),
    Setup("ep folded over tp", Layout(tp=2, ep=2, micro_batch_size=4), model="shared experts"),
    Setup("ep, full", Layout(dp_shard=2, ep=2, micro_batch_size=2, recompute="full"), model="experts"),
    Setup("etp over data", Layout(dp_shard=2, etp=2, micro_batch_size=2), model="experts"),
    Setup("ep bf16", Layout(dp_shard=2, ep=2, micro_batch_size=2), model="experts", workload=BF16),
    Setup("gpt2, zero 3 selective", Layout(dp_shard=2, micro_batch_size=2, recompute="selective"), model="gpt2"),
    Setup("gpt2, tp", Layout(tp=2, sequence_parallel=False, micro_batch_size=4), model="gpt2"),
    Setup("gpt2, tp sp", Layout(tp=2, micro_batch_size=4), model="gpt2"),
    Setup("gpt2, pp", Layout(pp=2, micro_batch_size=2), model="gpt2"),
    Setup("gpt2, cp", Layout(cp=2, micro_batch_size=2), model="gpt2"),
    Setup("pp bf16", Layout(pp=2, micro_batch_size=2), workload=BF16, model="tied"),
)
QUICK = (
    "zero 1", "zero 2", "zero 3 tied", "zero 3 selective", "zero 3 bf16", "replicas",
    "tp", "own model, tp", "tp sp", "tp sp bf16", "pp", "pp tied", "gpt2, cp",
    "experts over tp", "ep, zero 3", "ep, replicas of experts", "latent, tp",
)  # fmt: skip
"""Of two ranks: every axis once, and what shares parameters, copies experts or computes in 16 bits."""
THREE = (
    Setup("zero 3, uneven shards", Layout(dp_shard=3), model="six", workload=SIX),
    Setup("pp 3", Layout(pp=3, micro_batch_size=2), model="six", workload=SIX, rank_map=(2, 0, 1)),
)
# Pairs of axes that share a tensor or a stage; the long tier has the others.
FOUR = (
    Setup("tp zero 3", Layout(tp=2, dp_shard=2, micro_batch_size=2), model="five rich", rank_map=(0, 2, 1, 3)),
    Setup("pp tp", Layout(pp=2, tp=2, micro_batch_size=2), model="five tied", rank_map=(1, 3, 0, 2)),
    Setup("cp tp ep", Layout(cp=2, tp=2, ep=2, micro_batch_size=4), model="shared experts"),
    Setup("chunks ep", Layout(pp=2, num_model_chunks=2, dp_shard=2, ep=2), model="five with experts"),
)
MORE_OF_FOUR = (
    Setup("hsdp", Layout(dp_replicate=2, dp_shard=2), model="five"),
    Setup("pp zero 1", Layout(pp=2, dp_shard=2), model="five rich", blocks_per_stage=(1, 4)),
    Setup("ep 2, etp 2", Layout(dp_shard=2, tp=2, ep=2, etp=2, micro_batch_size=2), model="experts"),
    Setup("latent, pp tp ep", Layout(pp=2, tp=2, ep=2, micro_batch_size=2), model="latent"),
    Setup("tp zero 1", Layout(tp=2, dp_shard=2, zero_stage=1, micro_batch_size=2), model="five tied"),
    Setup("tp replicas", Layout(tp=2, dp_replicate=2, sequence_parallel=False), model="five rich"),
    Setup("tp zero 3 full", Layout(tp=2, dp_shard=2, sequence_parallel=False, recompute="full"), model="five rich"),
    Setup("cp tp, whole sequence", Layout(cp=2, tp=2, sequence_parallel=False), model="gpt2"),
    Setup("pp replicas", Layout(pp=2, dp_replicate=2), model="five tied"),
    Setup("pp 4", Layout(pp=4), model="five tied", rank_map=(1, 3, 0, 2)),
    Setup("tp 4", Layout(tp=4, micro_batch_size=4), model="mha"),
    Setup("ep 2 of 4", Layout(dp_shard=4, ep=2), model="shared experts"),
    Setup("experts cut within", Layout(dp_shard=4), model="shared experts"),  # 6 over 4 ranks: along another dimension
    Setup("ep 2, replicas of shards", Layout(dp_replicate=2, dp_shard=2, ep=2), model="experts"),
    Setup("ep 4 over dp and tp", Layout(dp_shard=2, tp=2, ep=4, micro_batch_size=2), model="experts"),
    Setup("ep 2, etp 1, tp 4", Layout(tp=4, ep=2, micro_batch_size=4), model="mixed experts"),
    Setup("cp ep 4", Layout(cp=2, dp_shard=2, ep=4, micro_batch_size=2), model="experts"),
    Setup("gpt2, cp tp", Layout(cp=2, tp=2, micro_batch_size=4), model="gpt2"),
    Setup("pp ep", Layout(pp=2, dp_shard=2, ep=2, micro_batch_size=2), model="shared experts"),
)
EIGHT = (
    Setup("3d", Layout(pp=2, tp=2, dp_shard=2), model="five tied", rank_map=(1, 5, 3, 7, 0, 4, 2, 6)),
    Setup(
        "3d bf16",
        Layout(pp=2, tp=2, dp_shard=2, recompute="selective", schedule="gpipe"),
        model="five rich",
        workload=BF16,
    ),
    Setup("pp tp ep", Layout(pp=2, tp=2, dp_shard=2, ep=4), model="experts", rank_map=(1, 3, 5, 7, 0, 2, 4, 6)),
)


def run(setups: tuple[Setup, ...], folder: Path) -> dict[str, list[Outcome]]:
    cases = [
        Case(s.name, s.plan, num_steps=s.num_steps, own_model=s.own_model, saves=s.saves, resumes=s.resumes)
        for s in setups
    ]
    return run_group(setups[0].layout.world_size, cases, folder)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """One rank, fp32, by model."""
    return {name: ranks[0] for name, ranks in run(REFERENCES, tmp_path_factory.mktemp("reference")).items()}


@pytest.fixture(
    scope="module",
    params=[
        *by_world_size(ONE, TWO, THREE, quick=QUICK),
        pytest.param(FOUR, id="4 ranks, pairs of axes"),
        *by_world_size(MORE_OF_FOUR, EIGHT),
    ],
)
def group(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[tuple[Setup, ...], dict[str, list[Outcome]]]:
    setups: tuple[Setup, ...] = request.param
    return setups, run(setups, tmp_path_factory.mktemp("ranks"))


def test_layouts_train_as_one_rank_does(
    group: tuple[tuple[Setup, ...], dict[str, list[Outcome]]], references: dict[str, Outcome]
) -> None:
    setups, outcomes = group
    problems = [
        f"{setup.name}: {problem}"
        for setup in setups
        for problem in differences(
            outcomes[setup.name], references[setup.model], mixed=setup.workload.precision != "fp32"
        )
    ]
    assert not problems, "\n".join(problems)


def require_equal(
    setups: tuple[Setup, ...], outcomes: dict[str, list[Outcome]], references: dict[str, Outcome]
) -> None:
    """Every setup as its model's reference, or as the steps of it that follow the checkpoint it goes on from."""
    problems = []
    for setup in setups:
        reference, done = references[setup.model], int(bool(setup.resumes))
        steps = slice(done, setup.num_steps)
        expected = Outcome(reference.losses[steps], reference.norms[steps], {} if done else reference.gradients)
        found = differences(outcomes[setup.name], expected, mixed=setup.workload.precision != "fp32")
        problems += [f"{setup.name}: {problem}" for problem in found]
    assert not problems, "\n".join(problems)


def differences(ranks: list[Outcome], reference: Outcome, *, mixed: bool) -> list[str]:
    """Where the ranks' outcomes leave the reference by more than the tolerance."""
    problems = []
    names = set()
    for rank, outcome in enumerate(ranks):
        if outcome.losses != ranks[0].losses or outcome.norms != ranks[0].norms:
            problems.append(f"rank {rank} reports losses {outcome.losses}, rank 0 {ranks[0].losses}")
        for name, gradient in outcome.gradients.items():
            # A pipeline's last stage has a copy of a tied embedding under the head's name.
            source = name if name in reference.gradients else _embedding(reference)
            names.add(source)
            error = (gradient - reference.gradients[source]).abs().max().item()
            if not error <= (MIXED_GRADIENT_TOLERANCE if mixed else GRADIENT_TOLERANCE):
                problems.append(f"rank {rank}: gradient of {name} is off by {error:.1e}")
    if names != set(reference.gradients):
        problems.append(f"no gradient for {set(reference.gradients) - names}")
    for step, (loss, expected) in enumerate(zip(ranks[0].losses, reference.losses, strict=True)):
        mixed_tolerance = MIXED_LATER_LOSS_TOLERANCE if step else MIXED_LOSS_TOLERANCE
        if not abs(loss - expected) <= (mixed_tolerance if mixed else LOSS_TOLERANCE):
            problems.append(f"loss of step {step} is {loss:.7f}, expected {expected:.7f}")
    for step, (norm, expected) in enumerate(zip(ranks[0].norms, reference.norms, strict=True)):
        mixed_tolerance = MIXED_LATER_NORM_TOLERANCE if step else MIXED_NORM_TOLERANCE
        tolerance = mixed_tolerance if mixed else LATER_NORM_TOLERANCE if step else NORM_TOLERANCE
        if not abs(norm - expected) <= tolerance * expected:
            problems.append(f"gradient norm of step {step} is {norm:.7f}, expected {expected:.7f}")
    return problems


def _embedding(reference: Outcome) -> str:
    return next(name for name in reference.gradients if name.endswith(("embed_tokens.weight", "wte.weight")))


def test_a_failing_rank_ends_the_group(tmp_path: Path) -> None:
    broken = Setup("broken", Layout(dp_shard=2, micro_batch_size=2)).plan
    wrong_size = Case("wrong size", Setup("one", Layout(micro_batch_size=4)).plan)
    with pytest.raises(AssertionError, match="the plan is for 1 ranks, this job has 2"):
        run_group(2, [Case("broken", broken, num_steps=1), wrong_size], tmp_path)


@pytest.mark.long
def test_a_group_that_does_not_end_is_stopped(tmp_path: Path) -> None:
    endless = Case("endless", Setup("endless", Layout(dp_shard=2, micro_batch_size=2)).plan, num_steps=10**9)
    # Killed, unless the dump of the stacks of a running thread crashed one before, and so its peer.
    with pytest.raises(
        AssertionError, match=r"(?s)exit codes \[(-9|-11|1), (-9|-11|1)\].*most recent call.*forward_backward"
    ):
        run_group(2, [endless], tmp_path, timeout_s=16.0)


def test_gradients_of_the_reference_are_not_trivial(references: dict[str, Outcome]) -> None:
    """A bias of unrotated keys adds the same to all scores of a query, which softmax does not see: its gradient is zero."""
    for model, outcome in references.items():
        for name, gradient in outcome.gradients.items():
            is_unseen = model == "gpt2" and name.endswith("k_proj.bias")
            assert torch.isfinite(gradient).all(), (model, name)
            assert is_unseen or gradient.abs().max() > 10 * GRADIENT_TOLERANCE, (model, name, gradient.abs().max())
