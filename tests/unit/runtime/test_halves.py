"""Order of events in blocks by half-batches, and their bytes, on one process that plays the first of two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meshwright.planner import plan, rehearse
from meshwright.runtime import ParallelModel, halves, parallelize
from meshwright.schema import Layout, ModelSpec, Workload
from meshwright.schema.errors import ConfigError, RuntimeMismatchError
from plans import make_plan, tiny_model
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
NUM_BLOCKS = 2


class Events(TorchDispatchMode):
    """Products and the half-batches' collectives in order, ``start N`` and ``wait N``; elements of all collectives, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.sent: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _PRODUCTS:
            self.names.append("product")
        kind = next((kind for kind in ("gather", "scatter", "reduce") if kind in str(func)), "")
        if func.namespace in ("c10d", "_c10d_functional") and kind:
            sizes = [x.numel() for x in torch.utils._pytree.tree_leaves((args, out)) if isinstance(x, torch.Tensor)]
            self.sent[kind] = self.sent.get(kind, 0) + max(sizes)
        return out


def build(monkeypatch: pytest.MonkeyPatch, events: Events, **fields: Any) -> ParallelModel:
    starts, wait = halves.Transfer.__init__, halves.Transfer.wait

    def started(self: Any, value: torch.Tensor, move: str, group: Any, *, owns: bool) -> None:
        starts(self, value, move, group, owns=owns)
        if move != "none":
            self.number = sum(name.startswith("start") for name in events.names)
            events.names.append(f"start {self.number}")

    def awaited(self: Any) -> torch.Tensor:
        if self.move != "none":
            events.names.append(f"wait {self.number}")
        return wait(self)

    monkeypatch.setattr(halves.Transfer, "__init__", started)
    monkeypatch.setattr(halves.Transfer, "wait", awaited)
    layout = Layout(**{"tp": 2, "micro_batch_size": 2, "tp_halves": True, **fields})
    workload = Workload(seq_len=16, global_batch_size=2, precision="fp32")
    model = tiny_model(num_blocks=NUM_BLOCKS)
    return parallelize(None, make_plan(model, layout, workload=workload), device=torch.device("cpu"))


def products_while_under_way(names: list[str]) -> list[int]:
    """Products between the start of each collective and the wait for it."""
    starts = [(idx, name) for idx, name in enumerate(names) if name.startswith("start")]
    return [names[idx : names.index(name.replace("start", "wait"))].count("product") for idx, name in starts]


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_collectives_start_before_the_other_halfs_products(
    two_ranks: None, monkeypatch: pytest.MonkeyPatch, sequence_parallel: bool
) -> None:
    events = Events()
    model = build(monkeypatch, events, sequence_parallel=sequence_parallel)
    tokens = torch.zeros(2, 16, dtype=torch.long)
    with events:
        loss = model.module(tokens, tokens)
        forward = len(events.names)
        loss.backward()
    attention, feed_forward = 4, 3
    # A gather of B runs with the products of A, a reduction of A with those of B; the other two of a part with none.
    of_part = (lambda n: [0, n, n, 0]) if sequence_parallel else (lambda n: [n, 0])
    expected = NUM_BLOCKS * (of_part(attention) + of_part(feed_forward))
    assert products_while_under_way(events.names[:forward]) == expected
    of_part = (lambda n: [0, 2 * n, 2 * n, 0]) if sequence_parallel else (lambda n: [2 * n, 0])
    assert products_while_under_way(events.names[forward:]) == NUM_BLOCKS * (of_part(feed_forward) + of_part(attention))


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_halves_send_as_many_bytes(two_ranks: None, monkeypatch: pytest.MonkeyPatch, sequence_parallel: bool) -> None:
    sent, tokens = [], torch.zeros(2, 16, dtype=torch.long)
    for by_halves in (True, False):
        events = Events()
        model = build(monkeypatch, events, sequence_parallel=sequence_parallel, tp_halves=by_halves)
        with events:
            model.module(tokens, tokens).backward()
        sent.append(events.sent)
    assert sent[0] == sent[1]
    assert max(sent[0].values()) >= 4 * NUM_BLOCKS * 2 * 16 * 32


def test_what_cannot_be_halved_is_refused_by_name(two_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"rows_divide"):
        build(monkeypatch, Events(), micro_batch_size=1)
    with pytest.raises(ConfigError, match=r"\[supported\]"):
        build(monkeypatch, Events(), tp=1, dp_shard=2, sequence_parallel=False)
    layout, workload = Layout(tp=2, micro_batch_size=2, tp_halves=True), Workload(seq_len=16, global_batch_size=2)
    plan = make_plan(tiny_model(num_blocks=NUM_BLOCKS), layout, workload=workload)
    with pytest.raises(RuntimeMismatchError) as error:
        parallelize(None, plan, device=torch.device("cpu"), compile_blocks=True)
    assert any("half-batches" in text for text in error.value.details)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_blocks_are_gathered_as_far_ahead_as_the_plan_says_and_in_order(
    two_ranks: None, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    events: list[str] = []
    unshard = FSDPParamGroup.unshard

    def gathered(self: Any, async_op: bool = False) -> None:
        if self._all_gather_result is None and not self.is_unsharded:
            events.append(f"gather {self._module_fqn.rpartition('.')[2]}")
        unshard(self, async_op)

    monkeypatch.setattr(FSDPParamGroup, "unshard", gathered)
    layout = Layout(dp_shard=2, zero_stage=3, prefetch=depth)
    workload = Workload(seq_len=16, global_batch_size=2, precision="fp32")
    model = parallelize(
        None, make_plan(tiny_model(num_blocks=5), layout, workload=workload), device=torch.device("cpu")
    )
    for name, block in model.module.model.layers.items():
        block.self_attn.register_forward_pre_hook(lambda *_, name=name: events.append(f"run {name}"))
        block.self_attn.register_full_backward_pre_hook(lambda *_, name=name: events.append(f"back {name}"))
    model.forward_backward(torch.zeros(1, 17, dtype=torch.long))
    in_blocks = [event for event in events if event.split()[1].isdigit()]
    forward, backward = in_blocks[: in_blocks.index("run 4") + 1], in_blocks[in_blocks.index("run 4") + 1 :]
    assert [event for event in forward if "gather" in event] == [f"gather {n}" for n in range(5)]
    assert [event for event in backward if "gather" in event] == [f"gather {n}" for n in reversed(range(5))]
    ahead = depth if depth > 1 else 0  # torch gathers the next one forward as the host runs ahead of the device
    for n in range(5):
        assert forward.index(f"run {n}") > forward.index(f"gather {min(n + ahead, 4)}")
        assert backward.index(f"back {n}") > backward.index(f"gather {max(n - depth, 0)}")
        if n + ahead < 4:
            assert forward.index(f"run {n}") < forward.index(f"gather {n + ahead + 1}")


def rehearsed_bytes(layout: Layout) -> tuple[int, int]:
    """The fullest moment of a rank, rehearsed and predicted, of three blocks between small ends."""
    named = ModelSpec.named("llama-3.2-1b")
    ends = [run.replace(layer=run.layer.replace(vocab_size=2048)) for run in named.layers if run.layer.kind != "block"]
    blocks = next(run for run in named.layers if run.layer.kind == "block").replace(count=3)
    model = named.replace(layers=(ends[0], blocks, ends[1]))
    made = plan(model, "2xH100-SXM-80GB", global_batch_size=8, seq_len=512, fixed=layout.model_dump())
    (kind,) = rehearse(made.replace(unhalved_layers=()), ranks=(0,)).kinds
    return kind.peak_allocated_bytes, kind.predicted_allocated_bytes


@pytest.mark.long
def test_half_batches_hold_no_more_than_an_entire_one() -> None:
    layout = Layout(tp=2, micro_batch_size=8)
    whole, halved = (rehearsed_bytes(layout.replace(tp_halves=on))[0] for on in (False, True))
    assert halved <= 1.001 * whole


@pytest.mark.long
def test_gathers_further_ahead_hold_more_blocks() -> None:
    layout = Layout(dp_shard=2, zero_stage=3)
    one, two = (rehearsed_bytes(layout.replace(prefetch=depth)) for depth in (1, 2))
    assert one[0] < two[0] and one[1] < two[1]
    assert two[0] < 1.02 * two[1]
