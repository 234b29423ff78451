"""Code that an export writes otherwise: regions, complex numbers, written buffers; and modules that cannot be trained."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from meshwright.planner import plan
from meshwright.profilers import profile_module
from meshwright.profilers.module.stages import why_not_cut
from meshwright.profilers.module.structure import find_structure
from meshwright.profilers.module.units import find_units
from meshwright.profilers.placements.export import export_unit, skeleton
from meshwright.profilers.placements.work import placed_units
from meshwright.runtime.user_stages import UserStages
from meshwright.schema import ClusterSpec, ConfigError, ModelSpec, Workload
from plans import cpu_cluster
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

WIDTH = 16
X = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(0))
Between = Callable[["Block", Tensor], Tensor]


class Block(nn.Module):
    """Two products and something between them."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.between = between
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(self, self.up(x)))


class Blocks(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([make() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _without_gradient(_: Block, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().mean(-1, keepdim=True)
    return x / (1 + scale) + scale


def _in_16_bits(_: Block, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(x, torch.eye(2 * WIDTH)).float()


def _written_without_gradient(_: Block, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().mean()
    x = x * scale
    x[:, 0] = 2.0 * x[:, 1]
    return x


def _turned(_: Block, x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones(WIDTH), torch.arange(WIDTH) / 7)).flatten(-2)


def _with_memory(block: Block, x: Tensor) -> Tensor:
    with torch.no_grad():
        block.mean.lerp_(x.mean((0, 1)), 0.1)
    return x + block.mean


def _again(_: Block, x: Tensor) -> Tensor:
    made = checkpoint(torch.sin, x, use_reentrant=False)
    assert isinstance(made, Tensor)
    return made


@pytest.mark.parametrize(
    "between",
    [
        _turned,
        _with_memory,
        _again,
        _written_without_gradient,
        *(pytest.param(between, marks=pytest.mark.long) for between in (_without_gradient, _in_16_bits)),
    ],
)
def test_a_block_is_cut_whatever_stands_between_its_products(between: Between) -> None:
    works, whole = placed_units(Blocks(lambda: Block(between)), [X], (2,))
    assert not whole
    products = [op for op in works[0].operators if op.op == "linear"]
    assert all(any("S" in signature for signature in op.signatures) for op in products)


def test_a_cell_is_placed_for_its_later_calls_whose_state_has_a_gradient() -> None:
    class Recurs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            state = torch.zeros(len(x), WIDTH)
            for place in x.unbind(1):
                state = self.cell(place, state)
            return state

    ((work,), _) = placed_units(Recurs(), [X], (2,))
    assert work.trained_inputs == (False, True)


def _summed(_: Block, x: Tensor) -> Tensor:
    index = torch.arange(2 * WIDTH).expand_as(x) // 2
    return torch.full((*x.shape[:-1], 2 * WIDTH), 1.0).scatter_reduce(-1, index, x, "sum")


def test_what_is_created_within_a_block_is_in_double_precision_where_the_rest_is() -> None:
    assert not placed_units(Blocks(lambda: Block(_summed)), [X], (2,))[1]


def test_weight_norms_are_tried_without_their_kernel_which_checks_no_sizes() -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            weight_norm(nn.Conv1d(4, 8, 3, padding=1)), weight_norm(nn.ConvTranspose1d(8, 4, 3, padding=1))
        )

    works, whole = placed_units(Blocks(make), [X], (2,))
    assert not whole
    assert all(any("S0" in s for s in op.signatures) for op in works[0].operators if op.op == "_weight_norm")


def test_what_cannot_be_copied_is_shared_and_what_has_no_shape_is_refused() -> None:
    model = Blocks(lambda: nn.Linear(WIDTH, WIDTH))
    model.lock = threading.Lock()  # type: ignore[assignment]
    profile_module(model, [X], tp=(2,))
    for part, why in (
        (nn.LazyLinear(4), "no shape before the first call"),
        (nn.Embedding(4, 4, sparse=True), "sparse gradients"),
    ):
        with pytest.raises(ConfigError, match=why):
            profile_module(nn.Sequential(model, part), [X])


def test_attention_of_torch_outside_of_blocks_is_one_unit() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.attention(x, x, x)[0]
            return made

    assert [unit.path for unit in find_units(Attends())] == ["attention"]
    assert not placed_units(Attends(), [X], (2,))[1]


class Named(nn.Module):
    """Blocks by name."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("first", "second", "third")})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


def test_blocks_with_names_can_be_stages() -> None:
    assert why_not_cut(Named(), find_structure(Named(), "blocks"), [X]) == ""


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        raise RuntimeError("no backward pass yet")


def _written(x: Tensor) -> Tensor:
    y = x.sigmoid()
    z = y * y
    y.zero_()
    return z


@pytest.mark.parametrize(
    ("last", "why"),
    [
        (lambda _: None, "puts out nothing that has a gradient, but NoneType"),
        (Tensor.detach, "puts out nothing that has a gradient, but float32"),
        (lambda x: x.argmax(-1), "puts out nothing that has a gradient, but int64"),
        (Fails.apply, r"backward pass of Ends fails .*: no backward pass yet \(test_unusual_code.py, line "),
        (_written, "backward pass of Ends fails .*changed by an operation in place"),
        (lambda x: x.sizes, r"Ends does not run on the sample batch: AttributeError: .* \(test_unusual_code.py, line "),
    ],
)
def test_a_module_that_cannot_be_trained_says_so(last: Callable[[Tensor], object], why: str) -> None:
    class Ends(Named):
        def forward(self, x: Tensor) -> Tensor:
            return last(super().forward(x))  # type: ignore[return-value]

    with pytest.raises(ConfigError, match=why):
        profile_module(Ends(), [X])


def _normalised(channels: int, x: Tensor) -> ModelSpec:
    return profile_module(Blocks(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(channels))), [x])


def test_batch_norms_are_said_to_couple_samples_and_take_two_of_single_rows() -> None:
    rows, places = _normalised(WIDTH, X[:, 0]), _normalised(4, X)
    assert rows.code is not None
    assert places.code is not None
    assert (rows.code.min_samples, places.code.min_samples) == (2, 1)
    found = plan(rows, cpu_cluster(2), Workload(seq_len=1, global_batch_size=4, precision="fp32"))
    assert found.layout.micro_batch_size >= 2
    assert any("batch norms, takes the statistics of each micro-batch" in note for note in found.notes)


class Twice(Blocks):
    """A norm that has two names, and a block that stands twice in the list."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(WIDTH, WIDTH))
        self.blocks.append(self.blocks[0])
        self.norm = nn.LayerNorm(WIDTH)
        self.also = self.norm

    def forward(self, x: Tensor) -> Tensor:
        return self.also(super().forward(self.norm(x)))


def test_a_module_that_was_profiled_has_its_own_tensors_again() -> None:
    module = Twice()
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters(remove_duplicate=False)}
    profile_module(module, [X])
    for name, parameter in module.named_parameters(remove_duplicate=False):
        assert not isinstance(parameter.data, FakeTensor)
        assert torch.equal(parameter, before[name]), name
    module(X).sum().backward()


def _stores(block: Block, x: Tensor) -> Tensor:
    block.kept = x.mean()
    return x


def test_a_unit_that_stores_a_tensor_or_has_a_hook_inside_stays_whole() -> None:
    _, whole = placed_units(Blocks(lambda: Block(_stores)), [X], (2,))
    assert [unit.path for unit in whole] == ["blocks.0", "blocks.1"]
    assert all("keeps a tensor of the call in its attribute kept" in unit.why for unit in whole)
    seen = list[Tensor]()
    module = Blocks(lambda: Block(lambda _, x: x))
    module.blocks[0].up.register_forward_hook(lambda _, args, out: seen.append(out))
    module.blocks[1].up.register_forward_hook(lambda _, args, out: seen.append(out))
    _, whole = placed_units(module, [X], (2,))
    assert all("a hook of up reads inside" in unit.why for unit in whole) and len(whole) == 2


@pytest.mark.parametrize(
    ("other", "axes"), [(lambda x: x.softmax(0), "-1 and 0"), (lambda x: x[0].softmax(-1), "three and two")]
)
def test_graphs_with_other_axes_or_dimensions_are_others(other: Callable[[Tensor], Tensor], axes: str) -> None:
    module, x = Of(lambda x: x.softmax(-1)), X.clone()
    one, same, another = (
        skeleton(export_unit(made, (given,), {}).described)
        for made, given in ((module, x), (module, x[:1]), (Of(other), x))
    )
    assert one == same
    assert one != another, axes


class Of(nn.Module):
    """A function of a layer's output."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


class Reads(Blocks):
    """Code between blocks that looks at the batch, or changes what the model keeps."""

    def __init__(self, between: Callable[[Reads, Tensor], Tensor]) -> None:
        super().__init__(lambda: nn.Linear(WIDTH, WIDTH))
        self.tokens, self.between = nn.Embedding(8, WIDTH), between
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(self.between(self, tokens))


def _branches(model: Reads, tokens: Tensor) -> Tensor:
    return model.tokens(tokens) * (2.0 if (tokens == 0).any() else 1.0)


def _rebinds(model: Reads, tokens: Tensor) -> Tensor:
    model.seen = model.seen + 1
    return model.tokens(tokens)


def _keeps(model: Reads, tokens: Tensor) -> Tensor:
    model.last = model.tokens(tokens)
    return model.last


def _counts(model: Reads, tokens: Tensor) -> Tensor:
    model.seen.index_add_(0, tokens.flatten(), torch.ones(tokens.numel()))
    return model.tokens(tokens)


@pytest.mark.parametrize(
    ("between", "why"),
    [
        (_branches, "computes by values of its inputs"),
        (_rebinds, "another tensor in the place of its buffer seen"),
        (_keeps, "keeps a tensor of the call in its attribute last"),
        (_counts, ""),
    ],
)
def test_stages_of_code_that_looks_at_values_or_keeps_tensors_are_refused(
    between: Callable[[Reads, Tensor], Tensor], why: str
) -> None:
    module = Reads(between)
    said = why_not_cut(module, find_structure(module), [torch.empty(2, 4, dtype=torch.long, device="meta")])
    assert why in said if why else not said


def test_what_is_written_between_blocks_is_written_by_the_first_stage_and_buffers_go_with_their_units() -> None:
    module = Reads(_counts)
    for block in module.blocks:
        block.register_buffer("own", torch.zeros(1))
    structure = find_structure(module)
    stages = UserStages(
        module, structure, {0: 0, 1: 0, 2: 1, 3: 1}, [torch.empty(2, 4, dtype=torch.long, device="meta")], torch.float32
    )
    first, last = stages.part(0), stages.part(1)
    assert {name for name, _ in first.named_buffers()} == {"seen", "blocks.0.own"}
    assert "blocks.1.own" in {name for name, _ in last.named_buffers()} and last.blocks[0].own is None


def test_a_parameter_that_is_read_outside_of_its_unit_has_values_on_the_meta_device() -> None:
    class Queries(Reads):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) + self.tokens.weight[: tokens.shape[1]]

    with torch.device("meta"):
        module = Queries(lambda model, tokens: model.tokens(tokens))
    works, _ = placed_units(module, [torch.zeros(2, 4, dtype=torch.long)], (2,))
    assert works


def test_a_scalar_parameter_is_said_to_need_fp32() -> None:
    module = Blocks(lambda: nn.Linear(WIDTH, WIDTH))
    module.scale = nn.Parameter(torch.tensor(1.0))
    spec, workload = profile_module(module, [X]), Workload(seq_len=4, global_batch_size=64)
    with pytest.raises(ConfigError) as refused:
        plan(spec, ClusterSpec.parse("8xH100-SXM-80GB"), workload)
    assert refused.value.help == "add --precision fp32, in which whole replicas run"
    assert plan(spec, ClusterSpec.parse("8xH100-SXM-80GB"), workload.replace(precision="fp32")).layout.dp_replicate == 8
