"""Offers: every smaller size is the cluster that its shorthand names, and a file that cannot be meant is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from meshwright.schema import ClusterSpec, ConfigError, Offer
from meshwright.schema.offers import offers_from_file, with_nodes


@pytest.mark.parametrize("device", ["8xH100-SXM-80GB", "8xA100-SXM-80GB/ib200", "4xGB200", "4xL40S/eth100"])
@pytest.mark.parametrize("num_nodes", [1, 2, 3, 7, 12, 16, 19, 20])
def test_smaller_size_is_the_cluster_its_shorthand_names(device: str, num_nodes: int) -> None:
    largest, expected = (ClusterSpec.parse(f"{n}x{device}") for n in (64, num_nodes))
    smaller = with_nodes(largest, num_nodes)
    assert smaller.groups == expected.groups
    assert smaller.levels == expected.levels


def test_measured_bandwidths_are_those_of_the_first_nodes() -> None:
    matrix = tuple(tuple(1e9 * (1 + 4 * i + j) for j in range(4)) for i in range(4))
    cluster = ClusterSpec.parse("4x8xH100-SXM-80GB").replace(bandwidth_matrix=matrix)
    assert with_nodes(cluster, 2).bandwidth_matrix == ((1e9, 2e9), (5e9, 6e9))


def test_mixed_cluster_is_offered_as_a_whole() -> None:
    groups = tuple(ClusterSpec.parse(f"2x8x{name}").groups[0] for name in ("H100-SXM-80GB", "A100-SXM-80GB"))
    mixed = ClusterSpec.parse("4x8xA100-SXM-80GB").replace(groups=groups)
    offer = Offer.from_cluster(mixed)
    assert list(offer.sizes) == [4]
    assert offer.with_size(4) == mixed
    assert mixed.price_per_hour == sum(16 * group.device.price_per_hour for group in groups)
    with pytest.raises(ConfigError, match="no smaller size"):
        with_nodes(mixed, 2)


def test_file_names_devices_clusters_and_prices(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('[[groups]]\ndevice = "A100-SXM-80GB"\nnum_nodes = 2\n')
    (tmp_path / "offers.toml").write_text(
        """
        [[offers]]
        name = "spot"
        device = "H100-SXM-80GB"
        link = "ib400"
        num_nodes = 4
        min_nodes = 2
        price_per_device_hour = 1.25
        [[offers]]
        cluster = "own.toml"
        [[offers]]
        cluster = "16xH100-SXM-80GB"
        min_nodes = 1
        """
    )
    spot, own, catalogue = offers_from_file(str(tmp_path / "offers.toml"))
    assert (spot.name, list(spot.sizes)) == ("spot", [2, 3, 4])
    assert spot.with_size(3).price_per_hour == pytest.approx(24 * 1.25)
    assert (own.name, list(own.sizes)) == ("own", [2])
    assert list(catalogue.sizes) == [1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no list of offers"),
        ("offers = 3", "no list of offers"),
        ("offers = []", "no offer in it"),
        ("[[offers]]\nnum_nodes = 1", "give one of them"),
        ('[[offers]]\ndevice = "H100-SXM-80GB"', "`num_nodes` is missing"),
        ('[[offers]]\ndevice = "H100-SXM-80GB"\nnum_nodes = 0', "num_nodes"),
        ('[[offers]]\ndevice = "H100-SXM-80GB"\nnum_nodes = 1\nprice = 2', "unknown key"),
        ('[[offers]]\ndevice = "H100-SXM-80GB"\nnum_nodes = 1\nprice_per_device_hour = -2', "no price in USD"),
        ('[[offers]]\ndevice = "H100-SXM-80GB"\nnum_nodes = 1\nmin_nodes = 2', "min_nodes 2 of 1"),
        ('[[offers]]\ncluster = "8xH100-SXM-80GB"\nnum_nodes = 1', "whole cluster"),
        ('[[offers]]\ncluster = "8xH100-SXM-80GB"\n[[offers]]\ncluster = "8xH100-SXM-80GB"', "two offers are called"),
    ],
)
def test_file_that_cannot_be_meant_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "offers.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        offers_from_file(str(path))
