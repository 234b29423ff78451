"""Modules whose code does not say how they are split: their operators placed by a program, and run on two ranks as on one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import zoo
from harness import Case, Outcome, run_group
from meshwright.planner import plan
from meshwright.profilers import profile_module
from meshwright.runtime import parallelize
from meshwright.runtime.models.layers import full_tensor
from plans import cpu_cluster
from torch import Tensor, nn
from zoo_others import TOKENS, RotatedDecoder
from zoo_plans import SHARDED, STAGED, differences, in_groups, placed_plan, share_of_parameters, workload_of

QUICK = ("nanogpt", "dlrm")
"""Fused projections with a tied head; tables and products of pairs."""

RULED = ("neox", "gemma", "phi3", "olmo2", "cohere", "llama", "gemma3")
"""Those that say themselves how they are split."""

PARTLY = ("qwen2_vl", "shared", "rounding")
"""More on both ranks: a tower that is not called, an embedding read outside of it, blocks with a torch.autograd.Function."""


@pytest.mark.parametrize(
    "names", in_groups(QUICK, [name for name in zoo.MODELS if name not in (*QUICK, *RULED)], 3), ids="-".join
)
def test_placed_modules_run_with_the_gradients_of_one_rank(names: Sequence[str], tmp_path: Path) -> None:
    plans = {name: placed_plan(name) for name in names}
    outcomes = run_group(
        2, [Case(name, found, module=name, run=zoo.one_step) for name, found in plans.items()], tmp_path
    )
    wrong = {}
    for name in names:
        gradients = {key: grad for outcome in outcomes[name] for key, grad in outcome.gradients.items()}
        if problems := differences(gradients, zoo.alone(name)):
            wrong[name] = problems
        share = share_of_parameters(name, plans[name])
        print(f"{name}: {share:.2f}")
        if share > 0.6 and name not in PARTLY:
            wrong[name] = [f"{share:.2f} of the parameters on a rank"]
    assert not wrong


TEMPERATURES = (1.0, 1.0, 1.0, 0.25)


def steps_of(module: nn.Module, model: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of a step at each temperature, and the gradients of all."""
    torch.manual_seed(0)
    losses = []
    for step, temperature in enumerate(TEMPERATURES):
        for block in module.blocks:  # type: ignore[union-attr]
            block.temperature, block.step = temperature, step
        loss = zoo.loss_of(model(TOKENS))
        loss.backward()
        losses.append(loss.item())
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def built() -> RotatedDecoder:
    torch.manual_seed(1)
    return RotatedDecoder()


def steps_of_a_rank(case: Case, folder: Path) -> Outcome:
    module = built()
    torch.manual_seed(dist.get_rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = parallelize(module, case.plan, device=torch.device("cpu"))
    said = any("other random states" in str(warning.message) for warning in caught)
    assert said == (model.mesh.tp.get_local_rank() == 0)
    losses, gradients = steps_of(model.module, model.module)
    return Outcome(losses=losses, gradients={name: full_tensor(grad).clone() for name, grad in gradients.items()})


def test_settings_that_the_loop_changes_and_complex_buffers_are_those_of_one_rank(tmp_path: Path) -> None:
    spec = profile_module(built(), [TOKENS], tp=(2,))
    found = plan(spec, cpu_cluster(2), workload_of(spec), fixed={"tp": 2, "sequence_parallel": False})
    (outcomes,) = run_group(2, [Case("rotated", found, run=steps_of_a_rank)], tmp_path).values()
    alone = built()
    losses, gradients = steps_of(alone, alone)
    assert losses[0] == losses[1] and all(one != pytest.approx(other, rel=1e-4) for one, other in pairwise(losses[1:]))
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(losses, rel=1e-6)
        assert not differences(outcome.gradients, gradients)


@pytest.mark.long
def test_placed_modules_are_sharded_and_recomputed(tmp_path: Path) -> None:
    """Tp 2 and zero 3 over two more ranks, blocks computed again: a tied head, attention under a condition, a block of images."""
    plans = {name: placed_plan(name, **SHARDED) for name in ("nanogpt", "dit", "unet")}
    outcomes = run_group(4, [Case(name, plan, module=name, run=zoo.one_step) for name, plan in plans.items()], tmp_path)
    for name in plans:
        gradients = {key: grad for outcome in outcomes[name] for key, grad in outcome.gradients.items()}
        assert not differences(gradients, zoo.alone(name)), name


def test_stages_gather_parameters_for_each_pass(tmp_path: Path) -> None:
    """Zero 3 in two stages of two ranks, two micro-batches, a tied head: torch's stages would keep what they gather."""
    found = placed_plan("nanogpt", tp=1, dp_shard=2, zero_stage=3, **STAGED)
    (outcomes,) = run_group(4, [Case("zero 3", found, module="nanogpt", run=zoo.one_step)], tmp_path).values()
    gradients = {key: grad for outcome in outcomes for key, grad in outcome.gradients.items()}
    assert found.num_microbatches == 2
    assert not differences(gradients, zoo.alone("nanogpt"))


@pytest.mark.nightly
@pytest.mark.parametrize("zero", [{"nanogpt": 3, "t5": 3}, {"dit": 1, "swin": 3}], ids="-".join)
def test_placed_modules_are_stages_that_are_sharded(zero: dict[str, int], tmp_path: Path) -> None:
    """Tp 2 in two stages over two more ranks: a tied head, an encoder-decoder, a condition, blocks that hold lists."""
    plans = {name: placed_plan(name, dp_shard=2, zero_stage=stage, **STAGED) for name, stage in zero.items()}
    outcomes = run_group(8, [Case(name, plan, module=name, run=zoo.one_step) for name, plan in plans.items()], tmp_path)
    for name in plans:
        gradients = {key: grad for outcome in outcomes[name] for key, grad in outcome.gradients.items()}
        assert not differences(gradients, zoo.alone(name)), name


@pytest.mark.long
def test_what_is_called_otherwise_is_computed_whole(tmp_path: Path) -> None:
    """A placement made for other code than is called: the unit runs on gathered parameters."""
    found = placed_plan("mlp")
    assert found.model.code is not None
    (unit,) = found.model.code.placements
    other = unit.replace(described=tuple(line.replace("relu", "tanh") for line in unit.described))
    code = found.model.code.replace(placements=(other,))
    changed = found.model_copy(update={"model": found.model.replace(code=code)})
    (outcomes,) = run_group(2, [Case("whole", changed, module="mlp", run=zoo.one_step)], tmp_path).values()
    gradients = {key: grad for outcome in outcomes for key, grad in outcome.gradients.items()}
    assert not differences(gradients, zoo.alone("mlp"))


@pytest.mark.long
def test_a_placed_module_computes_in_bf16(tmp_path: Path) -> None:
    """Parameters are gathered in bf16, for which the units are exported once more."""
    plan_of_cpu = placed_plan("nanogpt")  # a CPU has no rate for bf16, by which it would be planned
    mixed = plan_of_cpu.model_copy(update={"workload": plan_of_cpu.workload.replace(precision="bf16-mixed")})
    (outcomes,) = run_group(2, [Case("bf16", mixed, module="nanogpt", run=zoo.one_step)], tmp_path).values()
    gradients = {key: grad for outcome in outcomes for key, grad in outcome.gradients.items()}
    reference = zoo.alone("nanogpt")
    largest = max(float(grad.abs().max()) for grad in reference.values())
    for key, grad in gradients.items():
        assert float((grad - reference[key]).abs().max()) < 0.05 * largest, key
