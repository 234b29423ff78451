"""Profile: what was measured on a machine, where and with which software."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from .base import Document, Frozen

CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"]


class MatmulPoint(Frozen):
    """One matrix product [m,k] x [k,n], median seconds."""

    dtype: Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
    m: PositiveInt
    n: PositiveInt
    k: PositiveInt
    time_s: PositiveFloat


class CollectivePoint(Frozen):
    """One collective over ``group_size`` ranks; ``size_bytes`` is the full buffer (nccl-tests convention), median seconds."""

    op: CollectiveOp
    group_size: PositiveInt
    size_bytes: PositiveInt
    time_s: PositiveFloat


class Machine(Frozen):
    """Identity of what was measured; a profile of another identity is refused."""

    device: str
    num_devices: PositiveInt
    host_memory_bytes: PositiveInt
    backend: Literal["nccl", "gloo"]
    torch: str
    python: str
    driver: str = ""


class Profile(Document):
    """Measurements of one machine.

    Attributes:
        foreign_load_fraction: part of the cores that other work used when the measurement began; above some tenths the figures
            are too low.
    """

    machine: Machine
    created: str
    duration_s: PositiveFloat
    foreign_load_fraction: float = Field(default=0.0, ge=0, le=1)
    memory_bandwidth_bytes_per_s: PositiveFloat
    device_memory_bytes: PositiveInt
    matmuls: tuple[MatmulPoint, ...] = ()
    collectives: tuple[CollectivePoint, ...] = ()
