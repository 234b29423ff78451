"""Steps of modules under tp 2 against tensor parallelism written by hand, and against one rank.

    python benchmarks/module_tp.py OUT.json [--steps 12]

A Llama of transformers (1,024 wide, two layers, four samples of 128 tokens) is split by hand as Megatron does: projections hold
their parts as plain parameters, with an all-reduce behind the output projections forward and before the others backward, and the
logits are gathered; `parallelize` splits the same model by its plan. A BERT of that size is placed operator by operator, as no
plan of its own says how. Each runs on two gloo ranks with one thread each. All take turns step by step, one rank by itself among
them, so that other work on the machine falls on all alike; seconds are those of forward and backward passes: the median of the
processor of the rank that computes longest, and the least by the clock. Losses of all steps, with updates between them, must be
those of one rank.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "parity"))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Case, Outcome, run_group
from meshwright.planner import plan
from meshwright.profilers import profile_module
from meshwright.profilers.machine import cpu_rank_environment
from meshwright.runtime import parallelize
from meshwright.schema import TrainingPlan, Workload
from plans import cpu_cluster
from torch import Tensor, nn

BATCH, LENGTH, WIDTH, VOCAB = 4, 128, 1024, 2048
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 16, "vocab_size": VOCAB, "pad_token_id": None,
}  # fmt: skip
WARM_UP = 2
LOSS_TOLERANCE = 1e-3
"""After some updates by AdamW, which makes full steps of gradients that are next to nothing."""


@dataclass
class Steps(Outcome):
    """Of each way to run the model: losses of all steps, seconds of the processor and of the clock."""

    losses_of: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: dict[str, list[float]] = field(default_factory=dict)
    clock_s: dict[str, list[float]] = field(default_factory=dict)


def build(name: str) -> nn.Module:
    """Return the same model on every rank."""
    from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if name == "bert":
        return BertForMaskedLM(BertConfig(**SIZES, intermediate_size=4 * WIDTH)).eval()
    config = LlamaConfig(**SIZES, intermediate_size=2816, bos_token_id=None, eos_token_id=None, use_cache=False)
    return LlamaForCausalLM(config).eval()


class _ToParts(torch.autograd.Function):
    """Megatron's f: what parts read, whose gradient is a sum over the ranks."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class _Summed(torch.autograd.Function):
    """Megatron's g: a sum over the ranks, whose gradient every rank has."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class _Gathered(torch.autograd.Function):
    """Parts of the last dimension side by side."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.chunk(dist.get_world_size(), -1)[dist.get_rank()]


def split_by_hand(model: nn.Module) -> nn.Module:
    """Split a Llama over all ranks, in place."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def hold(layer: nn.Linear, dim: int) -> None:
        layer.weight = nn.Parameter(layer.weight.detach().chunk(size, dim)[rank].clone())

    def to_parts(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (_ToParts.apply(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": _ToParts.apply(kwargs["hidden_states"])}

    for layer in model.model.layers:  # type: ignore[union-attr]
        for column in (
            layer.self_attn.q_proj,
            layer.self_attn.k_proj,
            layer.self_attn.v_proj,
            layer.mlp.gate_proj,
            layer.mlp.up_proj,
        ):
            hold(column, 0)
        for row in (layer.self_attn.o_proj, layer.mlp.down_proj):
            hold(row, 1)
            row.register_forward_hook(lambda _, __, out: _Summed.apply(out))
        for region in (layer.self_attn, layer.mlp):
            region.register_forward_pre_hook(to_parts, with_kwargs=True)
    head = model.lm_head
    assert isinstance(head, nn.Linear)
    hold(head, 0)
    head.register_forward_pre_hook(to_parts, with_kwargs=True)
    head.register_forward_hook(lambda _, __, out: _Gathered.apply(out))
    return model


def run_steps(case: Case, folder: Path) -> Steps:
    """Run one rank's steps of each way in turn."""
    ours = parallelize(build(case.module), case.plan, device=torch.device("cpu")).module
    ways: dict[str, nn.Module] = {"one rank": build(case.module), "ours": ours}
    if case.module == "llama":
        ways["by hand"] = split_by_hand(build(case.module))
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    steps = Steps(**{name: {way: [] for way in ways} for name in ("losses_of", "cpu_s", "clock_s")})
    optimizers = {way: torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=False) for way, module in ways.items()}
    for step in range(WARM_UP + case.num_steps):
        for way, module in ways.items():
            dist.barrier()
            if way == "one rank" and dist.get_rank():
                continue
            start, start_cpu = time.perf_counter(), time.process_time()
            loss = F.cross_entropy(module(input_ids=tokens).logits.flatten(0, 1).float(), tokens.flatten())
            loss.backward()
            if step >= WARM_UP:
                steps.cpu_s[way].append(time.process_time() - start_cpu)
                steps.clock_s[way].append(time.perf_counter() - start)
            optimizers[way].step()
            optimizers[way].zero_grad()
            steps.losses_of[way].append(loss.item())
    return steps


def planned(name: str) -> TrainingPlan:
    """Return the plan with tp 2 on two ranks."""
    model = build(name)
    spec = profile_module(model, {"input_ids": torch.zeros(BATCH, LENGTH, dtype=torch.long)}, tp=(2,))
    workload = Workload(seq_len=LENGTH, global_batch_size=BATCH, precision="fp32")
    fixed = {"tp": 2, "sequence_parallel": False, "micro_batch_size": BATCH, "recompute": "none"}
    return plan(spec, cpu_cluster(2), workload, fixed=fixed, time_limit_s=600.0)


def row_of(ranks: list[Steps]) -> dict[str, Any]:
    """Return the seconds of each way, and how ours compare.

    Raises:
        RuntimeError: losses are not those of one rank.
    """
    alone = ranks[0].losses_of["one rank"]
    for way, losses in ranks[0].losses_of.items():
        if max(abs(a / b - 1) for a, b in zip(losses, alone, strict=True)) > LOSS_TOLERANCE:
            raise RuntimeError(f"losses of {way} are {losses}, those of one rank {alone}")
    cpu_ms = {way: 1e3 * max(median(rank.cpu_s[way]) for rank in ranks if rank.cpu_s[way]) for way in ranks[0].cpu_s}
    clock_ms = {way: 1e3 * min(ranks[0].clock_s[way]) for way in ranks[0].clock_s}
    row: dict[str, Any] = {"cpu_ms": {k: round(v, 1) for k, v in cpu_ms.items()}}
    row["clock_ms"] = {k: round(v, 1) for k, v in clock_ms.items()}
    for kind, ms in (("cpu", cpu_ms), ("clock", clock_ms)):
        row[f"one rank over ours, {kind}"] = round(ms["one rank"] / ms["ours"], 3)
        if "by hand" in ms:
            row[f"ours over by hand, {kind}"] = round(ms["ours"] / ms["by hand"], 3)
    return row


def main() -> None:
    """Run both models and write the table."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args()
    cases = [Case(name, planned(name), module=name, run=run_steps, num_steps=given.steps) for name in ("llama", "bert")]
    os.environ.update(cpu_rank_environment())  # as `apply` starts its ranks
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_group(2, cases, Path(folder), timeout_s=3600.0)
    rows = {name: row_of([rank for rank in ranks if isinstance(rank, Steps)]) for name, ranks in outcomes.items()}
    given.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
