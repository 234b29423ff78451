"""Adapters beside a frozen model: the same training in every layout, checkpoints that hold nothing else, and what peft reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import SEED, Case, Outcome, by_world_size, local_tokens, run_group
from meshwright.runtime import build_optimizer, parallelize
from meshwright.runtime.adapters import merge_adapters, save_adapters
from meshwright.runtime.models.decoder import is_adapter
from meshwright.runtime.training.checkpoint import SafeReader
from meshwright.schema import Layout, OffloadSchedule, RuntimeMismatchError, TrainingPlan, Workload
from meshwright.schema.layers import MoE
from meshwright.schema.task import LowRank
from plans import make_plan, tiny_model, with_offload
from test_parity import differences

ADAPTERS = LowRank(rank=4, targets=("qkv", "out", "mlp"), dropout=False)
WORKLOAD = Workload(seq_len=16, global_batch_size=8, precision="fp32", adapters=ADAPTERS)
MODEL = tiny_model(num_blocks=4, tied=True)


@dataclass(frozen=True)
class Setup:
    name: str
    layout: Layout
    saves: bool = False
    resumes: str = ""
    offloads: bool = False
    is_zeroth: bool = False

    @property
    def plan(self) -> TrainingPlan:
        if self.is_zeroth:
            return make_plan(MODEL, self.layout, workload=WORKLOAD.replace(adapters=None, passes="zeroth_order"))
        plan = make_plan(MODEL, self.layout, workload=WORKLOAD)
        if not self.offloads:
            return plan
        schedule = OffloadSchedule(host_optimizer_layers=(1, 3), streamed_optimizer_layers=(2,))
        return with_offload(plan, schedule, ("none", "activations", "boundary", "activations", "none", "none"))[1]


ONE = (
    Setup("reference", Layout(micro_batch_size=2)),
    Setup("selective", Layout(recompute="selective")),
    Setup("zeroth", Layout(micro_batch_size=2), is_zeroth=True),
)
TWO = (
    Setup("zero 3", Layout(dp_shard=2, micro_batch_size=2), saves=True),
    Setup("tp", Layout(tp=2, micro_batch_size=4, sequence_parallel=False), resumes="zero 3"),
    Setup("tp sp, offload", Layout(tp=2, micro_batch_size=4), offloads=True),
    Setup("pp", Layout(pp=2, micro_batch_size=2)),
    Setup("zeroth, zero 3", Layout(dp_shard=2, micro_batch_size=2), is_zeroth=True),
    Setup("zeroth, zero 1", Layout(dp_shard=2, zero_stage=1, micro_batch_size=2), is_zeroth=True),
    Setup("zeroth, replicas", Layout(dp_replicate=2, zero_stage=0, micro_batch_size=2), is_zeroth=True),
    Setup("zeroth, tp", Layout(tp=2, micro_batch_size=4), is_zeroth=True),
    Setup("zero bubble", Layout(pp=2, micro_batch_size=2, schedule="zb-h1")),
)
QUICK = ("zero 3", "tp", "tp sp, offload", "pp", "zeroth, zero 3")
FOUR = (
    Setup("tp zero 3", Layout(tp=2, dp_shard=2, micro_batch_size=2, recompute="full")),
    Setup("pp zero 1", Layout(pp=2, dp_shard=2), resumes=""),
)


def run(setups: tuple[Setup, ...], folder: Path) -> dict[str, list[Outcome]]:
    cases = [Case(setup.name, setup.plan, saves=setup.saves, resumes=setup.resumes) for setup in setups]
    return run_group(setups[0].layout.world_size, cases, folder)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Outcome]:
    """With adapters, and of zeroth order."""
    outcomes = run(ONE, tmp_path_factory.mktemp("one"))
    assert not differences(outcomes["selective"], outcomes["reference"][0], mixed=False)
    return outcomes["reference"][0], outcomes["zeroth"][0]


@pytest.mark.parametrize("setups", by_world_size(TWO, FOUR, quick=QUICK))
def test_adapters_train_as_on_one_rank(
    setups: tuple[Setup, ...], references: tuple[Outcome, Outcome], tmp_path: Path
) -> None:
    outcomes, (reference, zeroth) = run(setups, tmp_path), references
    assert reference.gradients and all(map(is_adapter, reference.gradients))
    problems = []
    for setup in setups:
        if (
            setup.is_zeroth
        ):  # a loss is rounded to 5e-7, so a slope to 5e-4, and it moves the loss by 1e-2 of its square
            pairs = zip(outcomes[setup.name][0].losses, zeroth.losses, strict=True)
            problems += [f"{setup.name}: {a} for {b}" for a, b in pairs if not abs(a - b) <= 2e-4 * (1 + abs(b))]
            continue
        done = int(bool(setup.resumes))
        expected = Outcome(reference.losses[done:], reference.norms[done:], {} if done else reference.gradients)
        problems += [f"{setup.name}: {text}" for text in differences(outcomes[setup.name], expected, mixed=False)]
    assert not problems, "\n".join(problems)
    for setup in setups:
        if setup.saves:
            stored = SafeReader(tmp_path / setup.name / "step-00000001").read_metadata().state_dict_metadata
            names = {name.rsplit(".", 1)[0] if "state." in name else name for name in stored}
            assert names and all(map(is_adapter, names))


def test_merged_weights_compute_what_adapters_do(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plan = Setup("one", Layout(micro_batch_size=4)).plan
        model = parallelize(None, plan, seed=SEED)
        optimizer = build_optimizer(model, learning_rate=1e-2)
        frozen = {name: p.clone() for name, p in model.named_parameters() if not is_adapter(name)}
        for step in range(2):
            model.forward_backward(local_tokens(plan, 0, step))
            optimizer.step()
            optimizer.zero_grad()
        assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
        folder = save_adapters(model, tmp_path / "adapters")
        tokens = local_tokens(plan, 0, 2)
        before = model.forward_backward(tokens)
        merge_adapters(model)
        assert abs(model.forward_backward(tokens) - before) < 1e-6  # one rounding of each merged weight
        safetensors = pytest.importorskip("safetensors.torch", reason="reads what peft would read")
        stored = safetensors.load_file(folder / "adapter_model.safetensors")
        down = stored["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"]
        up = stored["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"]
        weight = dict(model.named_parameters())["model.layers.0.mlp.down_proj.weight"]
        torch.testing.assert_close(weight, frozen["model.layers.0.mlp.down_proj.weight"] + up @ down)
    finally:
        dist.destroy_process_group()


def test_what_adapters_cannot_stand_beside_is_refused() -> None:
    experts = tiny_model(experts=MoE(num_experts=4, top_k=2, ffn_dim=16))
    plan = make_plan(
        experts, Layout(), workload=WORKLOAD.replace(adapters=ADAPTERS.replace(frozen="nf4", dropout=True))
    )
    with pytest.raises(RuntimeMismatchError) as error:
        parallelize(None, plan)
    said = " ".join(error.value.details)
    assert "nf4" in said and "dropout" in said and "experts" in said
