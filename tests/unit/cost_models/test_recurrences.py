"""What layers with a state cost: FLOPs of the scan, no growth with the sequence, states in place of caches, passing them on."""

from __future__ import annotations

import numpy as np
import pytest
from meshwright.cost_models.layer.operators import Gemm, OperatorRules, Scan, layer_operators
from meshwright.cost_models.stage.generation import pass_costs
from meshwright.cost_models.stage.step import model_flops_per_token
from meshwright.planner import estimate, plan
from meshwright.schema import ClusterSpec, ConfigError, Layout, ModelSpec, Workload
from meshwright.schema.layers import Block, LayerRun
from meshwright.schema.recurrences import GatedRecurrence, LinearAttention, SelectiveScan, ShortConvolution
from meshwright.schema.runnable import why_not_runnable
from meshwright.schema.task import Generation

CLUSTER = ClusterSpec.parse("8xH100-SXM-80GB")
LLAMA = ModelSpec.named("llama-3.2-1b")
D = LLAMA.hidden_dim

DELTA = LinearAttention(
    num_heads=32, num_key_heads=16, key_dim=64, value_dim=64, delta=True, conv_kernel=4, head_gates=2, head_params=2,
    norm="per_head",
)  # fmt: skip
MIXERS = {
    "delta": DELTA,
    "mamba2": LinearAttention(
        num_heads=64, num_key_heads=8, key_dim=128, value_dim=64, chunk=256, conv_kernel=4, norm="full"
    ),
    "one group": LinearAttention(num_heads=64, num_key_heads=1, key_dim=128, value_dim=64, chunk=256),
    "kimi": DELTA.replace(num_key_heads=32, key_decay=True, gate_rank=64, head_gates=1),
    "mamba": SelectiveScan(channels=4096, state_dim=16, step_rank=128),
    "convolution": ShortConvolution(channels=2048, conv_kernel=3),
    "rg-lru": GatedRecurrence(num_heads=8, head_dim=256),
}


def with_mixer(mixer, model=LLAMA):
    runs = (run.replace(layer=run.layer.replace(attention=mixer)) if isinstance(run.layer, Block) else run
            for run in model.layers)  # fmt: skip
    return model.replace(layers=tuple(runs), name="with a state")


def workload(seq_len, batch=8):
    return Workload(seq_len=seq_len, global_batch_size=batch)


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_products_hold_the_parameters_but_vectors(mixer):
    """The weights of an operator list are those of the count, less convolutions, biases, norms and learned scalars."""
    block = with_mixer(mixer).block_runs[0][0]
    in_products = sum(
        op.num_params for op in layer_operators(block, OperatorRules(hidden_dim=D)) if isinstance(op, Gemm)
    )
    in_mlp = block.mlp.num_params(D)
    vectors = mixer.num_params(D) - (in_products - in_mlp)
    assert 0 <= vectors < 0.06 * mixer.num_params(D)


def test_scan_of_linear_attention_is_counted_by_hand():
    # chunks of c: q k^T and its product with values 2c(dk + dv), new state and old one read 4 dk dv
    plain = LinearAttention(num_heads=3, num_key_heads=3, key_dim=8, value_dim=16, chunk=32)
    assert plain.scan_flops_per_token == 3 * (2 * 32 * (8 + 16) + 4 * 8 * 16)
    # k k^T 2c dk, triangle 2cc/3, its products with keys and values 2c(dk + dv), what the state holds under the keys 2 dk dv
    more = plain.replace(delta=True).scan_flops_per_token - plain.scan_flops_per_token
    assert more == pytest.approx(3 * (2 * 32 * 8 + 2 * 32 * 32 / 3 + 2 * 32 * (8 + 16) + 2 * 8 * 16))


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_cost_of_a_token_does_not_grow_with_the_sequence(mixer):
    model, layout = with_mixer(mixer), Layout.parse("dp_shard=8 zero=3 micro_batch=1 recompute=full")
    seconds = [estimate(model, CLUSTER, workload(n), layout).breakdown_s.compute / n for n in (16384, 65536)]
    assert seconds[1] < 1.02 * seconds[0]
    attention = [estimate(LLAMA, CLUSTER, workload(n), layout).breakdown_s.compute / n for n in (16384, 65536)]
    assert attention[1] > 1.5 * attention[0]


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_tensor_parallelism_cuts_products_and_scan(mixer):
    model = with_mixer(mixer)
    whole, cut = (
        estimate(model, CLUSTER, workload(8192, 1), Layout.parse(f"tp={tp} sequence_parallel={tp > 1} micro_batch=1".lower()))
        if tp == 8 else estimate(model, ClusterSpec.parse("1xH100-SXM-80GB"), workload(8192, 1), Layout.parse("micro_batch=1"))
        for tp in (1, 8)
    )  # fmt: skip
    assert whole.breakdown_s.compute / 9 < cut.breakdown_s.compute < whole.breakdown_s.compute / 3
    assert cut.memory_bytes.parameters < whole.memory_bytes.parameters / 6


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_context_parallelism_passes_states_and_less_than_keys_and_values(mixer):
    model, layout = with_mixer(mixer), Layout.parse("cp=8 zero=1 micro_batch=1 recompute=none")
    ours, theirs = (estimate(spec, CLUSTER, workload(32768, 1), layout).breakdown_s.cp for spec in (model, LLAMA))
    assert ours > 0
    longer = estimate(model, CLUSTER, workload(131072, 1), layout).breakdown_s.cp
    assert longer == pytest.approx(ours, rel=1e-9)  # a state is as large after any number of tokens
    assert theirs >= 0


def test_unfused_attention_next_to_states_refuses_context_parallelism():
    first, blocks, head = with_mixer(DELTA).layers
    half = (blocks.replace(count=8), LayerRun(layer=LLAMA.block_runs[0][0], count=8))
    mixed = LLAMA.replace(layers=(first, *half, head))
    assert estimate(mixed, CLUSTER, workload(32768), Layout(cp=8)).step_time_s > 0
    with pytest.raises(ConfigError, match="attention_per_cp"):
        estimate(mixed, CLUSTER, workload(32768).replace(attention="math"), Layout(cp=8))


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_generation_keeps_a_state_of_fixed_size(mixer):
    model, batches = with_mixer(mixer), np.array([1, 4])
    short, long = (
        pass_costs(model, CLUSTER, Generation(prompt_len=n, generate_len=64), 1, batches) for n in (512, 4096)
    )
    assert np.array_equal(short.cache_bytes, long.cache_bytes)
    element_bytes = Generation(prompt_len=512, generate_len=64).element_bytes
    assert short.cache_bytes[0] == model.num_blocks * mixer.state_elements * element_bytes
    assert short.cache_bytes[1] == 4 * short.cache_bytes[0]
    assert np.all(short.attend_s[1] > 0)
    assert np.all(short.attend_s[0] == 0)
    assert long.attend_s[1] == pytest.approx(short.attend_s[1])


def test_plan_says_why_our_runtime_does_not_run_it():
    model = with_mixer(DELTA)
    assert any("a state in place of keys and values (linear)" in text for text in why_not_runnable(model))
    made = plan(model, CLUSTER, workload(8192))
    assert made.estimate.fits
    assert any("cannot" in note and "state in place of keys" in note for note in made.notes)


def test_scan_is_repeated_by_selective_recompute_and_products_are_not():
    model = with_mixer(DELTA)
    kept, again = (
        estimate(model, CLUSTER, workload(8192), Layout.parse(f"dp_shard=8 zero=2 micro_batch=1 recompute={kind}"))
        for kind in ("none", "selective")
    )
    assert 0 < again.breakdown_s.recompute < 0.2 * again.breakdown_s.compute
    assert again.memory_bytes.activations < kept.memory_bytes.activations
    assert any(isinstance(op, Scan) for op in layer_operators(model.block_runs[0][0], OperatorRules(hidden_dim=D)))


@pytest.mark.parametrize("mixer", [DELTA, MIXERS["mamba"]], ids=["delta", "mamba"])
def test_model_flops_count_the_scan(mixer):
    model = with_mixer(mixer)
    products = 6 * sum(
        run.count * op.num_params for run in model.layers for op in layer_operators(run.layer, OperatorRules(hidden_dim=D))
        if isinstance(op, Gemm)
    )  # fmt: skip
    runs = tuple((run.layer, run.count) for run in model.layers)
    scans = 3 * model.num_blocks * mixer.scan_flops_per_token
    assert model_flops_per_token(runs, D, 8192) == pytest.approx(products + scans)
