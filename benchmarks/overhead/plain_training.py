"""A straightforward training script for each layout, with nothing but torch: what `meshwright apply` is compared with.

    torchrun --nproc-per-node 2 benchmarks/overhead/plain_training.py plan.json STEPS OUT.json

Sizes and degrees come from the plan file, read as JSON; nothing of meshwright is imported. One axis at a time: DDP, FSDP2,
tensor parallel with or without sequence parallelism, or a 1F1B pipeline; random tokens, AdamW, clipping. Rank 0 writes the
seconds of each step.
"""

from __future__ import annotations

import contextlib
import json
import time
from argparse import ArgumentParser
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, theta: float) -> None:
        super().__init__()
        self.head_dim, self.theta = dim // heads, theta
        self.wq = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.view(*y.shape[:2], -1, self.head_dim).transpose(1, 2) for y in (self.wq(x), self.wk(x), self.wv(x))
        )
        cos, sin = rotary(q.shape[2], self.head_dim, self.theta, q)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.wo(out.transpose(1, 2).flatten(2))


_TABLES: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}


def rotary(length: int, dim: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    if (length, dim) not in _TABLES:
        frequencies = theta ** (-torch.arange(0, dim, 2, device=like.device).float() / dim)
        angles = torch.outer(torch.arange(length, device=like.device).float(), frequencies).repeat(1, 2)
        _TABLES[length, dim] = angles.cos().to(like.dtype), angles.sin().to(like.dtype)
    return _TABLES[length, dim]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class FeedForward(nn.Module):
    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, ffn_dim, bias=False), nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, dim: int, ffn_dim: int, heads: int, kv_heads: int, theta: float) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(dim), Attention(dim, heads, kv_heads, theta)
        self.ffn_norm, self.feed_forward = nn.RMSNorm(dim), FeedForward(dim, ffn_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, sizes: dict) -> None:
        super().__init__()
        dim = sizes["dim"]
        self.embedding = nn.Embedding(sizes["vocab"], dim)
        self.layers = nn.ModuleList(
            Block(dim, sizes["ffn"], sizes["heads"], sizes["kv_heads"], sizes["theta"]) for _ in range(sizes["layers"])
        )
        self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, sizes["vocab"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.output is None else self.output(self.norm(x))


def sizes_of(plan: dict) -> dict:
    runs = {run["layer"]["kind"]: run for run in plan["model"]["layers"]}
    block = runs["block"]["layer"]
    return {
        "dim": plan["model"]["hidden_dim"],
        "layers": runs["block"]["count"],
        "vocab": runs["head"]["layer"]["vocab_size"],
        "heads": block["attention"]["num_heads"],
        "kv_heads": block["attention"]["num_kv_heads"],
        "ffn": block["mlp"]["ffn_dim"],
        "theta": plan["model"]["rope"]["theta"],
    }


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def shard(model: Llama, layout: dict, device: torch.device) -> nn.Module:
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if device.type == "cuda" else MixedPrecisionPolicy()
    for part in [*model.layers, model]:
        fully_shard(part, mp_policy=precision, reshard_after_forward=layout["zero_stage"] == 3)
    return model


def split_tensors(model: Llama, layout: dict, device: torch.device) -> nn.Module:
    mesh = init_device_mesh(device.type, (layout["tp"],))
    is_sequence = layout["sequence_parallel"]
    hidden = Shard(1) if is_sequence else Replicate()
    for block in model.layers:
        to_all = PrepareModuleInput(input_layouts=hidden, desired_input_layouts=Replicate())
        styles = {
            "attention": to_all,
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=hidden),
            "feed_forward": to_all,
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w3": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=hidden),
        }
        if is_sequence:
            styles |= {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
        parallelize_module(block, mesh, styles)
    outer = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=hidden),
        "output": ColwiseParallel(input_layouts=hidden, output_layouts=Shard(-1), use_local_output=False),
    }
    return parallelize_module(model, mesh, outer | ({"norm": SequenceParallel()} if is_sequence else {}))


def pipeline(model: Llama, plan: dict, device: torch.device) -> Schedule1F1B:
    rank, stages = dist.get_rank(), plan["stages"]
    stage, last = stages[rank], len(stages) - 1
    idxs = range(stage["first_layer_idx"] - 1, stage["first_layer_idx"] - 1 + stage["num_layers"])
    model.layers = nn.ModuleList(layer for i, layer in enumerate(model.layers) if i in idxs)
    if rank > 0:
        model.embedding = None
    if rank < last:
        model.norm = model.output = None
    module = PipelineStage(model, rank, len(stages), device)
    batch = plan["workload"]["global_batch_size"] // plan["layout"]["micro_batch_size"]
    return Schedule1F1B(module, batch, loss_fn=cross_entropy)


def clip(parameters: list[nn.Parameter], layout: dict) -> None:
    kinds = [[p.grad for p in parameters if isinstance(p.grad, DTensor) == is_sharded] for is_sharded in (True, False)]
    norms = [nn.utils.get_total_norm(kind) for kind in kinds if kind]
    norm = nn.utils.get_total_norm([n.full_tensor() if isinstance(n, DTensor) else n for n in norms])
    if layout["pp"] > 1:
        square = norm**2
        dist.all_reduce(square)
        norm = square.sqrt()
    for is_sharded in (True, False):
        nn.utils.clip_grads_with_norm_([p for p in parameters if isinstance(p, DTensor) == is_sharded], 1.0, norm)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    plan = json.loads(options.plan.read_text())
    layout, workload = plan["layout"], plan["workload"]
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = (
        torch.device("cuda", dist.get_rank() % max(1, torch.cuda.device_count())) if on_gpu else torch.device("cpu")
    )
    if on_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model: nn.Module = Llama(sizes_of(plan)).to(device)
    schedule, loss_context, cast = None, contextlib.nullcontext, contextlib.nullcontext
    if layout["pp"] > 1:
        schedule = pipeline(model, plan, device)
    elif layout["tp"] > 1:
        model, loss_context = split_tensors(model, layout, device), loss_parallel
    elif layout["dp_shard"] > 1:
        model = shard(model, layout, device)
    elif layout["dp_replicate"] > 1:
        model = DistributedDataParallel(model)
    if on_gpu and layout["dp_shard"] == 1:
        cast = lambda: torch.autocast("cuda", torch.bfloat16)  # noqa: E731
    parameters = list(model.parameters())
    groups = [[p for p in parameters if isinstance(p, DTensor) == is_sharded] for is_sharded in (True, False)]
    groups = [{"params": group} for group in groups if group]  # one fused update takes one kind
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    replicas = layout["dp_replicate"] * layout["dp_shard"]
    local_batch, seq_len = workload["global_batch_size"] // replicas, workload["seq_len"]
    micro = layout["micro_batch_size"]
    generator = torch.Generator().manual_seed(dist.get_rank() if replicas > 1 else 0)
    seconds = []
    for _ in range(options.steps):
        tokens = torch.randint(256, (local_batch, seq_len + 1), generator=generator).to(device)
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        with cast():
            if schedule is not None:
                args = (inputs,) if model.embedding is not None else ()
                schedule.step(*args, target=targets if model.output is not None else None)
            else:
                train_micro_batches(model, inputs, targets, micro, loss_context)
        clip(parameters, layout)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(seconds))
    dist.destroy_process_group()


def train_micro_batches(model: nn.Module, inputs: Tensor, targets: Tensor, micro: int, loss_context) -> None:
    count = len(inputs) // micro
    for i, (x, y) in enumerate(zip(inputs.split(micro), targets.split(micro), strict=True)):
        is_last = i == count - 1
        waits = isinstance(model, DistributedDataParallel) and not is_last
        with model.no_sync() if waits else contextlib.nullcontext(), loss_context():
            (cross_entropy(model(x), y) / count).backward()


if __name__ == "__main__":
    main()
