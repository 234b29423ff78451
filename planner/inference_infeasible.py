"""Why nothing fits for generation, and the smallest change that would."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ..cost_models.coefficients import coefficients
from ..schema import InfeasibleError, ModelSpec
from ..schema.units import GIB, format_bytes, format_seconds
from ..solvers.inference_instance import Instance
from ..solvers.inference_placement import least_bytes
from .inference_shapes import Shape, Shapes


def too_slow(model: ModelSpec, least_s: float, limit_s: float) -> InfeasibleError:
    """No batch is within the latency."""
    return InfeasibleError(
        f"no batch of {model.name} is done within {format_seconds(limit_s)}: the fastest takes {format_seconds(least_s)}   [(O)]",
        help=f"use --latency-limit-s {math.ceil(100 * least_s) / 100:g} or more, or generate fewer tokens",
    )


def nothing_fits(shapes: Shapes) -> InfeasibleError:
    """Which memory lacks how much for the shape that needs least, were the others without limit."""
    ranks, name = shapes.cluster.largest_node, shapes.model.name
    needs = [(_device_need(shapes.instance(shape)), shape) for shape in _smallest(shapes)]
    device, shape = min(needs, key=lambda pair: pair[0])
    instance = shapes.instance(shape)
    batch = f"{shape.num_batches} x {shape.batch_size} sequences"
    if device > instance.capacity.device:
        c = instance.capacity
        return InfeasibleError(
            f"{name} does not fit with a batch of {batch}: each device needs {format_bytes(device)} with everything that may be "
            f"elsewhere on the host, the budget is {format_bytes(c.device)}   [device memory (C7)]",
            details=(
                f"while computing {format_bytes(c.working)}, weights on the way {format_bytes(c.buffer)}, "
                f"keys and values on the way {format_bytes(2 * c.slot)}",
            ),
            help="use a smaller --batch-size or --prompt-len, or devices with more memory",
        )
    host = least_bytes(instance, "host_bytes") * ranks
    gib = math.ceil(host / GIB)
    message = (
        f"{name} does not fit with a batch of {batch}: each node needs {format_bytes(host)} of host memory, "
        f"{format_bytes(instance.capacity.host * ranks)} may be used   [host memory (C8)]"
    )
    stored, also = _storage_need(instance) * ranks, ""
    if np.isfinite(stored):
        also = f", or storage for {format_bytes(stored)}: --nvme PATH --nvme-gib {math.ceil(stored / GIB)}"
    return InfeasibleError(message, help=f"use --host-memory-gib {gib}{also}")


def _smallest(shapes: Shapes) -> list[Shape]:
    """Shapes of which one needs least: few sequences at once, everything that may be elsewhere."""
    fewest = min(shape.num_batches * shape.batch_size for shape in shapes.all())
    return [
        shape
        for shape in shapes.all()
        if shape.streams and shape.num_batches * shape.batch_size == fewest and shape.batch_size == shapes.batches[0]
    ]


def _device_need(instance: Instance) -> float:
    return least_bytes(instance.with_capacity(host=np.inf), "device_bytes")


def _storage_need(instance: Instance) -> float:
    """Bytes of storage that the given host memory would need beside it."""
    rate = float(coefficients()["offload"]["storage_bytes_per_s"])
    anything = np.ones_like(instance.may_store)
    anything[0] = instance.may_store[0]
    stored = replace(instance, may_store=anything, rates=replace(instance.rates, storage=rate))
    staging = 0.0 if instance.capacity.staging else instance.capacity.buffer + 2 * instance.capacity.slot
    changed = stored.with_capacity(storage=np.inf, staging=instance.capacity.staging + staging)
    return least_bytes(changed, "storage_bytes")
