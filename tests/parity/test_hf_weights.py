"""Weights of Hugging Face models into every layout and back: their loss, and their tensors bit by bit.

The loss differs from transformers' by the order of sums only: one unit in the last place of a loss near 5 is 4.8e-7, and their
rms_norm and rotation are evaluated in another order (seen: 9.5e-7). Weights are random and not the initial ones, whose zero biases
and unit norms would hide mistakes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from harness import Case, by_world_size, local_tokens, run_group
from meshwright.runtime.weights.load import INDEX_FILE, find_weights
from meshwright.schema import Layout, ModelSpec, TrainingPlan, Workload
from meshwright.schema.stages import LayerSlots
from plans import make_plan

LOSS_TOLERANCE = 3e-6
FILE_BYTES = 30_000  # five files or more, and the embedding alone in one
WORKLOAD = Workload(seq_len=16, global_batch_size=4, precision="fp32")

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT: dict[str, Any] = {
    "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4,
}  # fmt: skip
CONFIGS = {
    "llama": transformers.LlamaConfig(
        **{**SIZES, "num_hidden_layers": 4}, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=16),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=None),
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen2-moe": transformers.Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=40),
    "qwen3-moe": transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16, mlp_only_layers=[1]),
    "olmoe": transformers.OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2),
    "deepseek-v2": transformers.DeepseekV2Config(**{**SIZES, **LATENT}, topk_method="group_limited_greedy"),
    "deepseek-v3": transformers.DeepseekV3Config(**{**SIZES, **LATENT}),
    "gpt2": transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=3, n_head=4, n_positions=24),
}
PLACED = LayerSlots(experts=(3, 0, 1, 2, 1, 0), shares=(1.0, 0.5, 0.25, 1.0, 0.75, 0.5))


@dataclass(frozen=True)
class Setup:
    model: str
    layout: Layout
    expert_slots: tuple[LayerSlots, ...] = ()

    @property
    def name(self) -> str:
        degrees = self.layout.model_dump(exclude_defaults=True)
        return "-".join([self.model, *(f"{axis}{degree}" for axis, degree in degrees.items())])


GROUPS = (
    (
        Setup("llama", Layout(tp=2)),
        Setup("qwen2", Layout(dp_shard=2)),
        Setup("qwen3", Layout(pp=2)),
        Setup("mixtral", Layout(dp_shard=2, ep=2)),
        Setup("olmoe", Layout(dp_shard=2, ep=2), expert_slots=(PLACED,) * 3),
        Setup("deepseek-v2", Layout(tp=2)),
        Setup("gpt2", Layout(tp=2)),
    ),
    (
        Setup("llama", Layout(pp=2, tp=2)),
        Setup("llama", Layout(pp=2, num_model_chunks=2, schedule="zb-v", dp_shard=2)),
        Setup("mistral", Layout(dp_replicate=2, cp=2)),
        Setup("mixtral", Layout(dp_shard=2, tp=2, ep=2, etp=2)),
        Setup("qwen2-moe", Layout(tp=2, dp_shard=2)),
        Setup("qwen3-moe", Layout(pp=2, dp_shard=2, ep=2)),
        Setup("deepseek-v3", Layout(tp=2, dp_shard=2, ep=4)),
        Setup("gpt2", Layout(pp=2, dp_shard=2)),
        Setup("gpt2", Layout(dp_shard=2, tp=2)),
    ),
)
QUICK = [setup.name for setup in GROUPS[0] if setup.model in ("llama", "qwen3", "mixtral")]


def plan_of(setup: Setup, folder: Path) -> TrainingPlan:
    spec = ModelSpec.from_hf(folder / setup.model)
    return make_plan(spec, setup.layout, workload=WORKLOAD, expert_slots=setup.expert_slots)


def published(name: str, folder: Path) -> torch.nn.Module:
    """A model with random weights, saved in several files as published ones are."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        CONFIGS[name], attn_implementation="sdpa", dtype=torch.float32
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0 if parameter.ndim > 1 else 0.5, 0.1)
    for label, buffer in model.named_buffers():
        if label.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, 0.0, 0.3)
    model.save_pretrained(folder / name, max_shard_size="30KB")
    return model.eval()


def loss_of(model: torch.nn.Module, plan: TrainingPlan) -> float:
    tokens = torch.cat([local_tokens(plan, rank, 0) for rank in range(plan.layout.dp)])
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.nn.Module], Path]:
    folder = tmp_path_factory.mktemp("published")
    return {name: published(name, folder) for name in CONFIGS}, folder


@pytest.mark.parametrize("setups", by_world_size(*GROUPS, quick=QUICK))
def test_weights_go_in_and_come_back(
    setups: tuple[Setup, ...], models: tuple[dict[str, torch.nn.Module], Path], tmp_path: Path
) -> None:
    theirs, folder = models
    plans = {setup.name: plan_of(setup, folder) for setup in setups}
    cases = [
        Case(s.name, plans[s.name], num_steps=1, weights=str(folder / s.model), exports=FILE_BYTES) for s in setups
    ]
    outcomes = run_group(setups[0].layout.world_size, cases, tmp_path)
    for setup in setups:
        expected = loss_of(theirs[setup.model], plans[setup.name])
        assert abs(outcomes[setup.name][0].losses[0] - expected) < LOSS_TOLERANCE, setup.name
        assert_same(folder / setup.model, tmp_path / setup.name)


def assert_same(expected: Path, actual: Path) -> None:
    """The files hold the same tensors, are bounded, and transformers reads them as the same model."""
    assert set(find_weights(actual).shapes.items()) == set(find_weights(expected).shapes.items())
    assert (actual / INDEX_FILE).is_file()
    model, info = transformers.AutoModelForCausalLM.from_pretrained(actual, output_loading_info=True)
    assert not any(info.values()), info
    for name, tensor in transformers.AutoModelForCausalLM.from_pretrained(expected).state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), (actual.name, name)
    for path in actual.glob("*.safetensors"):
        assert path.stat().st_size < FILE_BYTES + 10_000, path  # the header comes on top
    assert not list(actual.parent.glob(".*.partial"))
