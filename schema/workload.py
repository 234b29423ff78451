"""Workload: what is trained on each step, in which precision, with which optimizer."""

from __future__ import annotations

from typing import Literal

from .base import Count, Frozen

Precision = Literal["bf16-mixed", "fp16-mixed", "fp8", "fp32"]
Optimizer = Literal["adamw", "sgd"]
Engine = Literal["fsdp2", "megatron", "deepspeed"]
Fusion = Literal["engine", "compiled", "composite_norm"]


class Workload(Frozen):
    """One training step.

    Attributes:
        seq_len: tokens of one sequence.
        global_batch_size: sequences of one step over the whole cluster.
        precision: of the matrix products. The mixed ones keep fp32 master parameters and reduce gradients in fp32.
        optimizer: adamw keeps two fp32 states per parameter, sgd (no momentum) none.
        attention: flash keeps no [seq, seq] matrix; math does.
        dropout: after attention and feed-forward part, as Megatron-LM does unless told otherwise; our runtime has none.
        fusion: of memory-bound kernels: as the engine has them, by torch.compile, or eager with RMSNorm as separate kernels
            (torch before 2.8).
        flash_generation: 1 for FlashAttention-1 and its Triton port (until mid 2023), 2 for what came after.
        engine: whose kernels, host overhead and buffers a prediction is for; fsdp2 is our own runtime on torch's parts.
    """

    seq_len: Count
    global_batch_size: Count
    precision: Precision = "bf16-mixed"
    optimizer: Optimizer = "adamw"
    attention: Literal["flash", "math"] = "flash"
    flash_generation: Literal[1, 2] = 2
    dropout: bool = False
    fusion: Fusion = "engine"
    engine: Engine = "fsdp2"

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step over the whole cluster."""
        return self.seq_len * self.global_batch_size

    @property
    def compute_bytes(self) -> int:
        """Bytes of one element of gathered parameters and of activations."""
        return 4 if self.precision == "fp32" else 2

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state for one parameter."""
        return {"adamw": 8, "sgd": 0}[self.optimizer]
