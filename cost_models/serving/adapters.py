"""Seconds and bytes of low-rank adapters in a step: two thin products beside each product that they change (docs/serving.md).

    y = x W + (x A) B of each row's adapter;    W [k, n], A [k, r], B [r, n]; two kernels, each for all adapters of the step
    bytes    d(m) e (k + n) r + m e (k + 2 r + 2 n)      d(m): different adapters of m rows (`Adapters.reached`)
    FLOPs    2 m r (k + n)

Under tensor parallelism A and B are cut as W is: of a column's, A is whole; of a row's, B. A row is taken for a request of its own:
those of one prompt share an adapter, so that steps with few long prompts are a little too long.

Source: arXiv:2311.03285 (S-LoRA), arXiv:2310.18547 (Punica): products of one step gathered by adapter, in one kernel.
"""

from __future__ import annotations

from ...schema.adapters import Adapters
from ...schema.units import FloatArray
from ..hardware.compute import DeviceRates
from ..layer.operators import Gemm

ELEMENT_BYTES = 2
"""Adapters are served in 16 bits, whatever the weights' type."""


def changes(adapters: Adapters, op: Gemm) -> bool:
    """Return whether adapters change a product: of a block, not routed, and of attention where they are on that alone."""
    is_attention = not op.name.startswith(("mlp_", "shared_"))
    return op.quantized and not op.routed and (adapters.on == "all" or is_attention)


def widths(op: Gemm, tp: int) -> tuple[float, float]:
    """Return k and n of a product on one rank."""
    return op.k / tp if op.shard == "row" else op.k, op.n / tp if op.shard == "column" else op.n


def adapters_s(adapters: Adapters, op: Gemm, tp: int, rows: FloatArray, rates: DeviceRates) -> FloatArray:
    """Return the seconds [N] that adapters add to a product of ``rows``."""
    k, n = widths(op, tp)
    weights = adapters.reached(rows) * adapters.rank * (k + n)
    traffic = ELEMENT_BYTES * (weights + rows * op.rows_per_token * (k + 2 * adapters.rank + 2 * n))
    flops_s = 2 * rows * op.rows_per_token * adapters.rank * (k + n) / rates.gemm_flops_per_s
    return 2 * rates.kernel_s + traffic / rates.elementwise_bytes_per_s + flops_s


def adapters_bytes(adapters: Adapters, op: Gemm, tp: int) -> float:
    """Return the bytes of all adapters of a product on one rank."""
    return float(ELEMENT_BYTES * adapters.count * adapters.rank * sum(widths(op, tp)))
