"""Published peaks of memory of torchtitan against rehearsals of the same code, with nothing fitted.

    python benchmarks/published_peaks.py RUNS.csv [--json FILE]

RUNS.csv is a table as `meshwright validate` reads it, with ``peak_mem_gib`` that torchtitan logs as reserved. Of its runs those
are rehearsed that train in bf16 under FSDP2 alone and whose notes say in what code: the Llama of torchtitan in eager code, with its
loss and its selective recompute, which saves every second product, sharded by `parallelize`. Compiled ones are rehearsed in eager
code too and set apart: a compiler merges what a rehearsal sees as tensors. Products in fp8, tp and pipelines are left out.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from meshwright.planner import plan
from meshwright.runtime.rehearsal.rank import Setting
from meshwright.runtime.rehearsal.run import rehearse
from meshwright.schema import MeshwrightError, ModelSpec
from meshwright.schema.layers import Block, SoftmaxAttention
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

ROOMY = "MI355X-288GB"
"""A device that any of the runs fits on: what is asked here is what a rank takes."""

CATALOGUE = {"Llama-3-8B": "llama-3.1-8b", "Qwen3-8B": "qwen3-8b"}
_aten = torch.ops.aten
SAVED = {_aten.mm.default, _aten._scaled_dot_product_flash_attention.default}


class Attention(nn.Module):
    """Grouped-query attention whose rotation multiplies complex numbers in fp32, and whose key and value heads are repeated."""

    def __init__(self, dim: int, spec: SoftmaxAttention) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.wq, self.wo = nn.Linear(dim, spec.q_dim, bias=False), nn.Linear(spec.q_dim, dim, bias=False)
        self.wk, self.wv = nn.Linear(dim, spec.kv_dim, bias=False), nn.Linear(dim, spec.kv_dim, bias=False)
        per_head = spec.qk_norm == "per_head"
        self.q_norm = nn.RMSNorm(self.width) if per_head else nn.Identity()
        self.k_norm = nn.RMSNorm(self.width) if per_head else nn.Identity()

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """Map [B, S, D] to the same shape; turns [S, C / 2] are complex."""
        batch, tokens, _ = x.shape
        q, k, v = (
            product(x).view(batch, tokens, heads, self.width)
            for product, heads in ((self.wq, self.heads), (self.wk, self.kv_heads), (self.wv, self.kv_heads))
        )
        q, k = _turned(self.q_norm(q), turns), _turned(self.k_norm(k), turns)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, dim=2) for y in (k, v))
        out = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True)
        result: Tensor = self.wo(out.transpose(1, 2).contiguous().view(batch, tokens, -1))
        return result


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None, :]).flatten(3).type_as(x)


class TransformerBlock(nn.Module):
    """A block of Llama."""

    def __init__(self, dim: int, spec: Block, *, every_second: bool) -> None:
        super().__init__()
        assert isinstance(spec.attention, SoftmaxAttention)
        self.attention = Attention(dim, spec.attention)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        width = spec.mlp.ffn_dim
        self.w1, self.w3 = nn.Linear(dim, width, bias=False), nn.Linear(dim, width, bias=False)
        self.w2, self.every_second = nn.Linear(width, dim, bias=False), every_second

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """Map [B, S, D] to the same shape."""
        if not self.every_second:
            return self._forward(x, turns)
        options: Any = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": _every_second_product}
        result: Tensor = checkpoint(self._forward, x, turns, **options)
        return result

    def _forward(self, x: Tensor, turns: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), turns)
        normed = self.ffn_norm(h)
        result: Tensor = h + self.w2(F.silu(self.w1(normed)) * self.w3(normed))
        return result


def _every_second_product() -> Any:
    counts = {False: 0, True: 0}

    def policy(ctx: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        counts[ctx.is_recompute] += op is _aten.mm.default
        is_saved = op in SAVED and not (op is _aten.mm.default and counts[ctx.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


class Transformer(nn.Module):
    """torchtitan's Llama."""

    def __init__(self, spec: ModelSpec, *, every_second: bool) -> None:
        super().__init__()
        blocks = [layer for layer in spec.iter_layers() if isinstance(layer, Block)]
        self.tok_embeddings = nn.Embedding(spec.vocab_size, spec.hidden_dim)
        self.layers = nn.ModuleList(
            [TransformerBlock(spec.hidden_dim, one, every_second=every_second) for one in blocks]
        )
        self.norm, self.output = nn.RMSNorm(spec.hidden_dim), nn.Linear(spec.hidden_dim, spec.vocab_size, bias=False)
        assert isinstance(blocks[0].attention, SoftmaxAttention)
        self.width = blocks[0].attention.head_dim

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [B, S] to logits [B, S, V]."""
        hidden = self.tok_embeddings(tokens)
        turns = torch.empty(tokens.shape[1], self.width // 2, dtype=torch.complex64, device=tokens.device)
        for layer in self.layers:
            hidden = layer(hidden, turns)
        logits: Tensor = self.output(self.norm(hidden))
        return logits


def on_meta(spec: ModelSpec, *, every_second: bool) -> Transformer:
    """Return torchtitan's Llama without memory."""
    with torch.device("meta"):
        return Transformer(spec, every_second=every_second)


def loss_fn(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over logits in fp32."""
    return F.cross_entropy(module(inputs).flatten(0, 1).float(), targets.flatten()).reshape(1)


def runs(path: Path) -> Iterator[dict[str, str]]:
    """Iterate over the rows that can be rehearsed."""
    with path.open() as file:
        for row in csv.DictReader(file):
            plain = all(row[axis] in ("", "1") for axis in ("tp", "pp", "cp", "ep"))
            is_said = row["notes"].startswith("FSDP") and row["recompute_class"]
            if row["source_set"] != "torchtitan" or not row["peak_mem_gib"] or not (plain and is_said):
                continue
            if row["model"] in CATALOGUE and row["precision"] == "bf16":
                yield row


def rehearsed(row: dict[str, str]) -> dict[str, Any]:
    """Return what a run is said to reserve and what its rehearsal reserves."""
    fixed = {"dp_shard": int(row["dp"]), "zero_stage": 3, "recompute": "none", "tp": 1, "pp": 1, "cp": 1}
    given = plan(
        CATALOGUE[row["model"]], f"{row['n_gpus']}x{ROOMY}", global_batch_size=int(row["global_batch"]),
        seq_len=int(row["seq_len"]), fixed=fixed | {"micro_batch_size": int(row["micro_batch"])},
    )  # fmt: skip
    build = partial(on_meta, given.model, every_second=row["recompute_class"] == "selective")
    outcome = rehearse(given, setting=Setting(build=build, loss_fn=loss_fn), worst=False)
    if not outcome.runs:
        raise SystemExit("\n".join((outcome.failures[0].message, *outcome.failures[0].details)))
    kind, measured = outcome.fullest, float(row["peak_mem_gib"]) * 2**30
    return {
        "id": row["id"], "model": row["model"], "devices": int(row["n_gpus"]), "measured_gib": float(row["peak_mem_gib"]),
        "compiled": "compile" in row["notes"].lower(), "allocated_gib": round(kind.peak_allocated_bytes / 2**30, 2),
        "reserved_gib": round(kind.peak_reserved_bytes / 2**30, 2), "off": round(kind.peak_reserved_bytes / measured - 1, 4),
        "moment": kind.moment, "operator": kind.operator,
    }  # fmt: skip


def main() -> None:
    """Rehearse, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for row in runs(options.runs):
        try:
            rows.append(rehearsed(row))
        except MeshwrightError as error:
            rows.append({"id": row["id"], "left_out": error.message})
        print(json.dumps(rows[-1]))
    off = [abs(row["off"]) for row in rows if not row.get("compiled", True)]
    answer = {"mean_error_of_eager": round(sum(off) / len(off), 4) if off else None, "rows": rows}
    if options.json is not None:
        options.json.write_text(json.dumps(answer, indent=1) + "\n")


if __name__ == "__main__":
    main()
