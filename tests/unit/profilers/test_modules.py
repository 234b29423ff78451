"""Models outside the catalogue: traced counts against known models, and plans of what no catalogue describes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from meshwright.cost_models.stage.step import model_flops_per_token
from meshwright.planner import estimate, plan
from meshwright.profilers import profile_module
from meshwright.schema import ClusterSpec, ConfigError, Layout, ModelSpec, Workload
from torch import nn

SEQ_LEN, WIDTH = 64, 128


class Attend(nn.Module):
    """Rotary-free causal attention and a gated feed-forward part behind layer norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(self.norms[0](x)).chunk(3, dim=-1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class VisionTransformer(nn.Module):
    """Patches, blocks, a mean and a classifier."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, kernel_size=16, stride=16)
        self.blocks = nn.ModuleList(Attend() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


@pytest.fixture(scope="module")
def vision() -> ModelSpec:
    with torch.device("meta"):
        return profile_module(VisionTransformer(), [torch.empty(2, 3, 128, 128)], name="vit")


@pytest.fixture(scope="module")
def llamas() -> tuple[ModelSpec, ModelSpec]:
    """Of one model: traced from transformers' code, and as the catalogue would have it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=344, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=512, max_position_embeddings=SEQ_LEN, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        traced = profile_module(model, {"input_ids": torch.zeros(2, SEQ_LEN, dtype=torch.long)})
    return traced, ModelSpec.from_hf({**config.to_dict(), "architectures": ["LlamaForCausalLM"]})


def flops(spec: ModelSpec) -> float:
    return model_flops_per_token(tuple((run.layer, run.count) for run in spec.layers), spec.hidden_dim, SEQ_LEN)


def test_traced_llama_has_the_parameters_and_flops_of_the_catalogues(llamas: tuple[ModelSpec, ModelSpec]) -> None:
    """Equal but for attention: under fake tensors transformers gives it a mask, so that the kernel computes all scores."""
    traced, known = llamas
    assert traced.num_params == known.num_params
    assert [run.count for run in traced.layers] == [run.count for run in known.layers]
    masked = 3 * 3 * 2 * WIDTH * 2 * (SEQ_LEN - (SEQ_LEN + 1) / 2)
    assert flops(traced) == pytest.approx(flops(known) + masked, rel=1e-3)


def test_traced_llama_keeps_what_the_catalogues_keeps(llamas: tuple[ModelSpec, ModelSpec]) -> None:
    """transformers' eager norm, rotation and activation keep some tensors that our decoder's do not: within a third."""
    workload = Workload(seq_len=SEQ_LEN, global_batch_size=8, precision="fp32")
    cluster, kept = ClusterSpec.parse("8xH100-SXM-80GB"), {}
    for recompute in ("none", "selective", "full"):
        layout = Layout(dp_shard=8, recompute=recompute)
        kept[recompute] = [estimate(spec, cluster, workload, layout).memory_bytes.activations for spec in llamas]
    assert 1.0 <= kept["none"][0] / kept["none"][1] < 2.0
    assert kept["full"][0] < kept["selective"][0] < kept["none"][0]
    # One hidden state of each of the three blocks, beside what the last norm and projection keep.
    block = traced_block(llamas[0])
    assert block.full_elements == SEQ_LEN * WIDTH
    assert block.num_params == llamas[1].block_runs[0][0].num_params(WIDTH)


def traced_block(spec: ModelSpec):
    traced = spec.block_runs[0][0].traced
    assert traced is not None
    return traced


def test_counts_of_a_plain_block_are_those_of_paper_and_pencil(vision: ModelSpec) -> None:
    block, tokens = traced_block(vision), 64
    products = {(p.rows, p.n, p.k): p.count for p in block.products}
    assert products == {
        (tokens, 3 * WIDTH, WIDTH): 1,
        (tokens, WIDTH, WIDTH): 1,
        (tokens, 4 * WIDTH, WIDTH): 1,
        (tokens, WIDTH, 4 * WIDTH): 1,
    }
    (attention,) = block.attentions
    assert (attention.num_heads, attention.head_dim, attention.context) == (4, WIDTH // 4, tokens)
    # Inputs of two norms, of four products, q/k/v, attention's output, the activation's input; statistics and logsumexp beside.
    wide = WIDTH * tokens * (2 + 2 + 3 + 1 + 4 + 4)
    assert wide <= block.saved_elements <= 1.1 * wide
    assert block.full_elements == WIDTH * tokens
    assert vision.num_params == sum(p.numel() for p in VisionTransformer().parameters())


def test_model_outside_the_catalogue_is_planned_and_saved(vision: ModelSpec, tmp_path: Path) -> None:
    path = tmp_path / "vit.json"
    path.write_text(vision.model_dump_json())
    assert ModelSpec.resolve(str(path)) == vision
    workload = Workload(seq_len=64, global_batch_size=64, precision="bf16-mixed")
    found = plan(vision, ClusterSpec.parse("4xA100-SXM-80GB"), workload, time_limit_s=10)
    assert (found.layout.tp, found.layout.cp, found.layout.ep) == (1, 1, 1)
    assert any("traced" in note for note in found.notes)
    staged = plan(
        vision, ClusterSpec.parse("4xA100-SXM-80GB"), workload, fixed={"pp": 2}, time_limit_s=10, runnable=False
    )
    assert [stage.num_layers for stage in staged.stages] == [4, 4]


@pytest.mark.parametrize(
    ("layout", "why"), [({"tp": 4}, "a plain module, does not say"), ({"cp": 4}, "traced from code")]
)
def test_axes_that_cut_into_a_block_are_refused_with_the_reason(
    vision: ModelSpec, layout: dict[str, int], why: str
) -> None:
    workload = Workload(seq_len=64, global_batch_size=64, precision="bf16-mixed")
    with pytest.raises(ConfigError, match=why):
        estimate(vision, ClusterSpec.parse("4xA100-SXM-80GB"), workload, Layout(**layout))


def test_another_sequence_length_than_was_traced_is_refused(vision: ModelSpec) -> None:
    workload = Workload(seq_len=128, global_batch_size=64, precision="bf16-mixed")
    with pytest.raises(ConfigError, match="sequences of 64 tokens"):
        estimate(vision, ClusterSpec.parse("4xA100-SXM-80GB"), workload, Layout(dp_shard=4))


def test_model_without_repeated_blocks_is_one_block() -> None:
    spec = profile_module(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), [torch.empty(2, 3, 6, 6)])
    assert (spec.num_blocks, spec.traced_len, spec.hidden_dim) == (1, 36, 3)
    assert spec.num_params == spec.block_runs[0][0].num_params(3) == 8 * 27 + 8


def test_names_and_inputs_that_lead_nowhere_are_refused() -> None:
    with pytest.raises(ConfigError, match="no module"):
        profile_module(nn.Linear(4, 4), [torch.empty(1, 4)], blocks="layers")
    with pytest.raises(ConfigError, match="reads no tensor"):
        profile_module(nn.Identity(), [4])


# --- what autograd keeps, against a real run --------------------------------------------------------------------------


class Dropping(Attend):
    """With dropout, whose mask is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(super().forward(x))


class Wide(nn.Module):
    """GPT-like: layer norms, one projection for q, k and v, dropout, a learned table of positions."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(97, WIDTH), nn.Embedding(SEQ_LEN, WIDTH)
        self.blocks = nn.ModuleList(Dropping() for _ in range(depth))
        self.drop, self.norm, self.head = nn.Dropout(0.1), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 97, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Rotated(nn.Module):
    """A Llama block: RMS norms, angles that all blocks share, grouped queries, a gated feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.q, self.kv, self.out = (nn.Linear(WIDTH, n * WIDTH // 2, bias=False) for n in (2, 2, 2))
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        def rotated(t: torch.Tensor) -> torch.Tensor:
            first, second = t.chunk(2, dim=-1)
            return t * cos + torch.cat((-second, first), dim=-1) * sin

        y, heads = self.norms[0](x), WIDTH // 32
        q = rotated(self.q(y).unflatten(-1, (heads, 32)).transpose(1, 2))
        k, v = (t.unflatten(-1, (heads // 2, 32)).transpose(1, 2) for t in self.kv(y).chunk(2, dim=-1))
        y = nn.functional.scaled_dot_product_attention(q, rotated(k), v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(97, WIDTH), nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleList(Rotated() for _ in range(depth))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * torch.ones(32, device=tokens.device)
        x, cos, sin = self.tokens(tokens), angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x) @ self.tokens.weight.t()


class Odd(nn.Module):
    """Convolutions over tokens, a batch norm, work in place, a mask, indices of a sort, an output that it keeps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.norm, self.mix = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2).relu_()
        value, gate = self.mix(y).chunk(2, dim=-1)
        best, _ = value.sort(dim=1)
        return torch.tanh(x + best.masked_fill(gate > 0.5, 0.0) * gate.sigmoid().cumsum(1))


class Convolved(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(5, WIDTH), nn.Sequential(*(Odd() for _ in range(depth)))
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.max_pool1d(self.blocks(self.first(x)).transpose(1, 2), 4).transpose(1, 2))


def kept_bytes(model: nn.Module, inputs: torch.Tensor) -> int:
    """What autograd really keeps of one call: bytes of distinct storages other than parameters and buffers."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(inputs)
    assert out.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("kind", [Wide, Llama, Convolved])
def test_saved_bytes_are_those_of_a_real_run(kind: type[nn.Module]) -> None:
    """Of the whole model, and of a block by the difference that one more makes: equal but for rounding up to an element."""
    inputs = torch.randn(1, SEQ_LEN, 5) if kind is Convolved else torch.randint(97, (1, SEQ_LEN))
    real = [kept_bytes(kind(depth), inputs) for depth in (3, 4)]
    spec = profile_module(kind(4), [inputs])
    traced = [(run.layer.traced, run.count) for run in spec.layers]
    found = 4 * sum(layer.saved_elements * count for layer, count in traced)
    assert real[1] <= found < real[1] + 4 * len(traced)
    blocks = {run.layer.traced.saved_elements for run in spec.layers if run.layer.kind == "block"}
    assert -(-(real[1] - real[0]) // 4) in blocks
