"""Error correction that lies in the memory itself takes part of its rate."""

from __future__ import annotations

import pytest
from meshwright.cost_models.hardware.machine import gemm_rates, memory_ratio
from meshwright.schema import ClusterSpec
from meshwright.schema.cluster import Device


def device(name: str) -> Device:
    return ClusterSpec.parse(f"1x{name}").weakest_device


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        ("L40S-48GB", 1),  # measured
        ("H100-SXM-80GB", 1),
        ("L4-24GB", 1),  # as the measured one of Ada, L40S
        ("RTX4090-24GB", 16 / 15),
        ("RTX6000-Ada-48GB", 16 / 15),
        ("A10-24GB", 15 / 16),  # Ampere's measured one has HBM
        ("RTX3090-24GB", 1),
        ("T4-16GB", 1),  # none of Turing was measured
    ],
)
def test_boards_without_it_read_more_than_measured_ones_with_it(name: str, ratio: float) -> None:
    assert memory_ratio(device(name)) == pytest.approx(ratio)


def test_products_read_weights_at_that_rate() -> None:
    measured, card = (gemm_rates(device(name), "bf16-mixed") for name in ("L40S-48GB", "RTX4090-24GB"))
    assert card.coefficients.memory_efficiency == pytest.approx(measured.coefficients.memory_efficiency * 16 / 15)


def test_memory_that_is_seen_lacks_what_check_bits_take() -> None:
    """A sixteenth of all of it, of which a little more is the driver's."""
    for name, gib in (("L40S-48GB", 48), ("L4-24GB", 24), ("A10-24GB", 24), ("A40-48GB", 48), ("T4-16GB", 16)):
        assert device(name).inline_ecc
        assert 0.9 * gib < device(name).memory_bytes / 2**30 <= 15 / 16 * gib
