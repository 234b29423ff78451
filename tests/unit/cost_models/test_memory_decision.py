"""What must fit, the memory interval and the loss of each kind of engine."""

import numpy as np
import pytest
from meshwright.cost_models.coefficients import Scenario
from meshwright.cost_models.layer.memory import SavedElements, SavedTensorRules, saved_elements
from meshwright.cost_models.stage import memory
from meshwright.cost_models.stage.passing import loss_bytes
from meshwright.planner.plan import estimate
from meshwright.schema import ClusterSpec, ConfigError, Layout, ModelSpec, TrainingEstimate, Workload
from meshwright.schema.engine_facts import ENGINES
from meshwright.schema.runnable import why_not_trainable
from meshwright.schema.task import LowRank
from meshwright.schema.training_plan import MemoryBreakdown

MACHINE = ClusterSpec.parse("8xH100-SXM-80GB")
MODEL = ModelSpec.named("llama-3.1-8b")


def test_slack_spares_a_frozen_model() -> None:
    whole = Workload(seq_len=4096, global_batch_size=8)
    frozen = whole.replace(adapters=LowRank(rank=8))
    slack = memory.reserved_over_allocated(Scenario.build(whole, MACHINE))
    assert memory.reserved_bytes(100.0, 60.0, Scenario.build(whole, MACHINE)) == pytest.approx(100 * slack)
    assert memory.reserved_bytes(100.0, 60.0, Scenario.build(frozen, MACHINE)) == pytest.approx(60 + 40 * slack)


def test_least_required_is_a_lower_bound_of_required() -> None:
    parameters = np.linspace(0.0, 100.0, 5)
    for adapters in (None, LowRank(rank=8)):
        workload = Workload(seq_len=4096, global_batch_size=8, adapters=adapters)
        scenario = Scenario.build(workload, MACHINE)
        required = memory.required_bytes(100.0, parameters, scenario)
        assert np.all(memory.lower_bound_required_bytes(100.0, scenario) <= required)


def test_eager_loss_holds_more_than_a_compiled_one_and_ours_least() -> None:
    """Whether or not blocks are compiled: torchtitan's benchmarks of 2024 held 5 GiB less compiled, not the 21 GiB of the loss."""
    layout = Layout(dp_shard=8)
    peaks = [
        estimate(MODEL, MACHINE, Workload(seq_len=8192, global_batch_size=8, fusion=fusion), layout).memory_bytes.logits
        for fusion in ("engine", "compiled", "composite_norm", "compiled_blocks")
    ]
    assert peaks[0] <= 1.1 * peaks[1] < peaks[2] == peaks[3]


def test_dropout_and_wide_activation_inputs_keep_more() -> None:
    block = MODEL.block_runs[-1][0]
    plain = Workload(seq_len=8192, global_batch_size=8, engine="megatron")
    kept, dropped, thin = (
        saved_elements(block, MODEL.hidden_dim, "none", SavedTensorRules(workload))
        for workload in (plain, plain.replace(dropout=True), plain.replace(fp8_activation_input=True))
    )
    assert dropped.tokens - kept.tokens == MODEL.hidden_dim  # two masks of one byte
    assert kept.tp - thin.tp == pytest.approx(block.mlp.ffn_dim)  # gate and up at one byte instead of two


def peak_terms(layout: Layout | None = None, **changes: object) -> MemoryBreakdown:
    workload = Workload(seq_len=8192, global_batch_size=8).replace(**changes)
    return estimate(MODEL, MACHINE, workload, layout or Layout(dp_shard=8, recompute="full")).memory_bytes


@pytest.mark.parametrize("engine", ["accelerate", "deepspeed", "megatron"])
def test_fused_loss_holds_hidden_states_in_place_of_logits(engine: str) -> None:
    zero = 1 if engine == "megatron" else 3
    layout = Layout(dp_shard=8, zero_stage=zero, recompute="full")
    whole, parts, fused = (
        peak_terms(layout, engine=engine, loss=loss, fusion="composite_norm").total
        for loss in ("engine", "chunked", "fused")
    )
    assert fused < parts
    if engine == "accelerate":
        assert parts < whole


def test_frozen_head_has_no_gradient() -> None:
    """A head of which the fused loss makes the gradient in advance needs room for it, but not where adapters alone train."""
    layout, model = Layout(dp_shard=8, zero_stage=2, recompute="full"), ModelSpec.named("llama-3.1-8b")
    of_head = 2 * model.vocab_size * model.hidden_dim
    temporary = {
        trained: estimate(
            model, MACHINE, Workload(seq_len=1024, global_batch_size=8, engine="deepspeed", **changes), layout
        ).memory_bytes.temporary
        for trained, changes in (("all", {}), ("adapters", {"adapters": LowRank(rank=8, targets=("qkv",))}))
    }
    assert temporary["all"] - temporary["adapters"] == pytest.approx(of_head, rel=0.2)


def test_loss_bytes_of_one_logit() -> None:
    logits, hidden = 2.0**30, 2.0**26
    eager, compiled = (Workload(seq_len=1, global_batch_size=1, fusion=f) for f in ("composite_norm", "compiled"))
    assert loss_bytes(logits, eager) == 14 * logits
    assert loss_bytes(logits, eager, tp=8) == 16 * logits
    assert (
        loss_bytes(logits, eager.replace(loss="chunked")) == 7 * logits
    )  # logits, log-softmax, an eighth's fp32 copies
    assert loss_bytes(logits, compiled.replace(loss="chunked")) == 2.25 * logits
    assert loss_bytes(logits, eager.replace(loss="chunked_head")) == 14 * logits / 8
    assert loss_bytes(logits, compiled.replace(loss="fused"), hidden) == 2 * hidden
    assert loss_bytes(0.0, compiled.replace(loss="fused"), hidden) == 0


def test_states_of_eight_bits_and_pages() -> None:
    full, small, paged = (
        peak_terms(**changes).optimizer
        for changes in ({}, {"optimizer": "adamw-8bit"}, {"optimizer": "adamw-8bit", "paged_states": True})
    )
    assert small / full == pytest.approx(2 * (1 + 4 / 256) / 8)
    assert paged == 0


def test_update_in_the_backward_pass_leaves_no_gradients_but_of_one_micro_batch_only() -> None:
    one, several = Layout(dp_shard=1), Layout(dp_shard=1, micro_batch_size=1)
    alone = ClusterSpec.parse("1xH100-SXM-80GB")

    def gradients(layout: Layout, batch: int, update: str) -> int:
        workload = Workload(seq_len=1024, global_batch_size=batch, precision="bf16", update=update)
        return estimate(ModelSpec.named("llama-3.2-1b"), alone, workload, layout).memory_bytes.gradients

    assert gradients(one, 1, "in_backward") == 0
    assert gradients(several, 4, "in_backward") == gradients(several, 4, "step") > 0


def test_fully_shard_holds_unsharded_gradients_under_a_pipeline() -> None:
    """torchtitan on 512 H100: 405B with tp 8, pp 8 holds 24 GiB of them, whatever it shards (its pipeline reduces once)."""
    layout = Layout(dp_shard=4, pp=2, zero_stage=2)
    piped, plain = (
        peak_terms(one, global_batch_size=16) for one in (layout, Layout(dp_shard=8, zero_stage=2))
    )  # more micro-batches than are in flight before the first backward pass
    assert piped.gradients == 2 * piped.unsharded > 0  # fp32 of what lies in 16 bits next to it
    assert plain.gradients < plain.unsharded


def test_parts_of_other_libraries_are_refused_but_by_a_script() -> None:
    unusual = Workload(
        seq_len=8, global_batch_size=8, loss="fused", optimizer="adamw-8bit", update="in_backward", paged_states=True
    )
    assert len(why_not_trainable(unusual)) == 4
    assert why_not_trainable(Workload(seq_len=8, global_batch_size=8)) == ()
    for name, num_reasons in (("megatron", 4), ("deepspeed", 4), ("torchtitan", 4), ("nemo", 4), ("accelerate", 0)):
        lacks = ENGINES[name].lacks
        assert lacks is not None
        assert len(lacks(MODEL, unusual.replace(engine=name))) == num_reasons


def saved_under(modules: tuple[str, ...], model: str = "qwen3-30b-a3b") -> SavedElements:
    spec = ModelSpec.named(model)
    workload = Workload(seq_len=4096, global_batch_size=8, engine="megatron", recompute_modules=modules)
    return saved_elements(spec.block_runs[-1][0], spec.hidden_dim, "selective", SavedTensorRules(workload))


def test_each_recompute_module_drops_what_it_makes_again() -> None:
    """Megatron-Bridge's ablation on Llama-3-70B: mlp saves 3 GiB of 58.8, layernorm nothing (predicted 12 and 1.4 less)."""
    spec = ModelSpec.named("qwen3-30b-a3b")
    moe, hidden = spec.block_runs[-1][0].mlp, spec.hidden_dim
    everything = saved_under(("core_attn",))
    assert (everything - saved_under(("layernorm",))).tokens == 2 * hidden
    assert (everything - saved_under(("moe_act",))).tp == moe.top_k * moe.ffn_dim
    without_experts = everything - saved_under(("moe",))
    assert without_experts.routed == moe.top_k * hidden
    assert without_experts.tp == moe.top_k * 3 * moe.ffn_dim  # gate, up and their product
    assert saved_under(("mlp",)) == everything
    dense = ModelSpec.named("llama-3.1-8b").block_runs[-1][0].mlp
    assert (saved_under(("core_attn",), "llama-3.1-8b") - saved_under(("mlp",), "llama-3.1-8b")).tp == 3 * dense.ffn_dim


def test_recompute_modules_repeat_their_operators_and_their_exchange() -> None:
    layout = Layout(dp_shard=8, ep=8, zero_stage=1, recompute="selective")

    def step(*modules: str) -> TrainingEstimate:
        workload = Workload(seq_len=4096, global_batch_size=64, engine="megatron", recompute_modules=modules)
        return estimate(ModelSpec.named("qwen3-30b-a3b"), MACHINE, workload, layout)

    norms, experts = step("layernorm"), step("moe")
    assert 0 < norms.breakdown_s.recompute < experts.breakdown_s.recompute
    assert norms.breakdown_s.ep < experts.breakdown_s.ep
    with pytest.raises(ConfigError, match="recompute_modules are Megatron's"):
        Workload(seq_len=1, global_batch_size=1, recompute_modules=("moe",))


def test_loss_in_place_is_an_option_of_megatron_only() -> None:
    workload = Workload(seq_len=8, global_batch_size=8, engine="megatron", loss="in_place")
    assert workload.library_parts == ()
    assert workload.replace(engine="deepspeed").library_parts == ("the in_place loss",)
    assert loss_bytes(10.0, workload) == 20


def test_products_in_nvfp4_are_not_counted_by_torchtitans_policy() -> None:
    """Llama-3-8B with its first 27 blocks in nvfp4 holds 111 GiB in place of bf16's 174 (torchtitan, four B200)."""
    block = MODEL.block_runs[-1][0]
    plain = Workload(seq_len=2048, global_batch_size=128, selective="alternate_products")
    kept, fewer = (
        saved_elements(block, MODEL.hidden_dim, "selective", SavedTensorRules(workload))
        for workload in (plain, plain.replace(precision="nvfp4"))
    )
    assert fewer.tokens == MODEL.hidden_dim < kept.tokens
    assert fewer.tp == 2 * block.attention.q_dim + 2 * block.attention.kv_dim < kept.tp


def test_blocks_of_aceso_that_do_not_recompute_entirely_repeat_their_cores() -> None:
    def step(recompute: str, fraction: float = 1.0) -> TrainingEstimate:
        layout = Layout(dp_replicate=8, recompute=recompute, recompute_fraction=fraction)
        workload = Workload(seq_len=2048, global_batch_size=8, engine="aceso", attention="math")
        return estimate(ModelSpec.named("llama-3.2-1b"), MACHINE, workload, layout)

    cores, half, full = step("selective"), step("full", 0.5), step("full")
    middle = (cores.memory_bytes.activations + full.memory_bytes.activations) / 2
    assert half.memory_bytes.activations == pytest.approx(middle, rel=1e-6)
    assert half.breakdown_s.recompute == pytest.approx(
        (cores.breakdown_s.recompute + full.breakdown_s.recompute) / 2, rel=1e-3
    )


def test_deepspeed_gathers_products_and_not_blocks() -> None:
    """At most 1e9 parameters, or the largest product: the head's 2.1e9 here, where two blocks would be 6.4e9."""
    layout = Layout(dp_shard=64, zero_stage=3, recompute="full")
    workload = Workload(seq_len=1024, global_batch_size=64, engine="deepspeed")
    model = ModelSpec.named("llama-3.1-405b")
    step = estimate(model, ClusterSpec.parse("8x8xH100-SXM-80GB"), workload, layout)
    shard = 2 * model.num_params / 64
    gathered = step.memory_bytes.unsharded - shard
    assert gathered == pytest.approx(2 * model.vocab_size * model.hidden_dim, rel=0.01)
