"""Workload: what is trained on each step, in which precision, with which optimizer."""

from __future__ import annotations

from typing import Literal

from .base import Count, Frozen

Precision = Literal["bf16-mixed", "fp16-mixed", "fp8", "fp32"]
Optimizer = Literal["adamw", "sgd"]
Engine = Literal["fsdp2", "megatron", "nanotron", "aceso", "deepspeed"]
Gradients = Literal["fp32", "compute"]
SelectiveKeeps = Literal["products", "every_second_product"]


class Workload(Frozen):
    """One training step.

    Attributes:
        seq_len: tokens of one sequence.
        global_batch_size: sequences of one step over the whole cluster.
        precision: of the matrix products. The mixed ones keep fp32 master parameters and reduce gradients in fp32.
        optimizer: adamw keeps two fp32 states per parameter, sgd (no momentum) none.
        attention: flash keeps no [seq, seq] matrix; math does.
        engine: whose kernels, host overhead and buffers a prediction is for; fsdp2 is our own runtime on torch's parts.
        gradients: dtype in which other engines accumulate gradients over micro-batches: fp32, or that of the products.
        selective_keeps: what selective recompute does not run again besides attention: all matrix products (our runtime), or
            the first, third, fifth... of a block (torchtitan's per-operator checkpointing).
    """

    seq_len: Count
    global_batch_size: Count
    precision: Precision = "bf16-mixed"
    optimizer: Optimizer = "adamw"
    attention: Literal["flash", "math"] = "flash"
    engine: Engine = "fsdp2"
    gradients: Gradients = "fp32"
    selective_keeps: SelectiveKeeps = "products"

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step over the whole cluster."""
        return self.seq_len * self.global_batch_size

    @property
    def compute_bytes(self) -> int:
        """Bytes of one element of gathered parameters and of activations."""
        return 4 if self.precision == "fp32" else 2

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one accumulated gradient."""
        return 4 if self.gradients == "fp32" else self.compute_bytes

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state for one parameter."""
        return {"adamw": 8, "sgd": 0}[self.optimizer]
