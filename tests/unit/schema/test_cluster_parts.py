"""Parts of a mixed cluster: what makes nodes alike, their own links, and what a file may say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from meshwright.schema import ClusterSpec, ConfigError
from meshwright.schema.device_groups import part_label, with_parts_in_order, with_parts_only

TWO_DEVICES = """
name = "two-devices"
[[groups]]
device = "A100-SXM-40GB"
num_nodes = 2
[[groups]]
device = "H100-SXM-80GB"
num_nodes = 3
"""

TWO_NETWORKS = """
name = "two-networks"
[[groups]]
device = "A100-SXM-80GB"
num_nodes = 2
levels = [{ link = "nvlink3", domain_size = 8 }, { link = "ib200", domain_size = 16 }]
[[groups]]
device = "A100-SXM-80GB"
num_nodes = 2
levels = [{ link = "nvlink3", domain_size = 8 }, { link = "eth25", domain_size = 16 }]
[[levels]]
link = "nvlink3"
domain_size = 8
[[levels]]
link = "eth25"
domain_size = 32
"""


def read(text: str, tmp_path: Path) -> ClusterSpec:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return ClusterSpec.parse(str(path))


def links(cluster: ClusterSpec) -> list[tuple[str, int]]:
    return [(level.link.name, level.domain_size) for level in cluster.levels]


def test_two_devices_have_their_usual_links_inside_and_the_weakest_between(tmp_path: Path) -> None:
    cluster = read(TWO_DEVICES, tmp_path)
    assert links(cluster) == [("nvlink3", 8), ("ib200", 40)]
    assert [links(part.cluster) for part in cluster.parts] == [
        [("nvlink3", 8), ("ib200", 16)],
        [("nvlink4", 8), ("ib400", 24)],
    ]
    assert [part.nodes for part in cluster.parts] == [(0, 1), (2, 3, 4)]
    assert cluster.is_mixed
    assert [part.cluster.memory_budget_bytes for part in cluster.parts] == sorted(
        part.cluster.memory_budget_bytes for part in cluster.parts
    )


def test_two_networks_are_two_parts_named_by_them(tmp_path: Path) -> None:
    cluster = read(TWO_NETWORKS, tmp_path)
    assert [part_label(cluster.parts, g) for g in range(2)] == ["A100-SXM-80GB/ib200", "A100-SXM-80GB/eth25"]


@pytest.mark.parametrize("nodes", [(2, 2), (4, 1)])
def test_groups_that_are_alike_are_no_parts(nodes: tuple[int, int], tmp_path: Path) -> None:
    """Also where one of them is a single node, which has no network of its own."""
    text = "".join(f'[[groups]]\ndevice = "H100-SXM-80GB"\nnum_nodes = {n}\n' for n in nodes)
    cluster = read(text, tmp_path)
    assert cluster.parts == ()
    assert not cluster.is_mixed


def test_groups_that_are_alike_make_one_part_wherever_they_are_listed(tmp_path: Path) -> None:
    devices = ("H100-SXM-80GB", "A100-SXM-80GB", "H100-SXM-80GB")
    cluster = read("".join(f'[[groups]]\ndevice = "{name}"\nnum_nodes = 1\n' for name in devices), tmp_path)
    assert [part.nodes for part in cluster.parts] == [(0, 2), (1,)]
    assert [part.cluster.num_devices for part in cluster.parts] == [16, 8]
    one_after_the_other = with_parts_in_order(cluster, cluster.parts)
    assert [group.device.name for group in one_after_the_other.groups] == [devices[0], devices[2], devices[1]]


def test_a_matrix_is_cut_for_each_part(tmp_path: Path) -> None:
    rows = [[10.0**9 * (10 * i + j + 1) for j in range(5)] for i in range(5)]
    cluster = read(f"bandwidth_matrix = {rows}\n{TWO_DEVICES}", tmp_path)
    second = cluster.parts[1].cluster.bandwidth_matrix
    assert second is not None
    assert second[0] == tuple(rows[2][2:])
    matrix = with_parts_in_order(cluster, cluster.parts[::-1]).bandwidth_matrix
    assert matrix is not None
    assert matrix[0] == (*rows[2][2:], *rows[2][:2])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TWO_NETWORKS.replace('"ib200", domain_size = 16', '"ib200", domain_size = 32'), "the group has 16"),
        (TWO_NETWORKS.replace('"nvlink3", domain_size = 8 }, { link = "ib200"', '"nvlink3", domain_size = 5 }, { link = "ib200"'),
         "must nest"),
        ('[[groups]]\ndevice = "A100-SXM-80GB"\nnum_nodes = 1\nlevels = [{ link = "nvlink3", domain_size = 8 }]',
         "only group"),
        (TWO_NETWORKS.replace('"ib200"', '"ib2000"'), r"groups\[0\]"),
    ],
)  # fmt: skip
def test_links_of_a_group_that_cannot_be_are_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read(text, tmp_path)
    assert re.search(message, "\n".join([error.value.message, *error.value.details]))


def test_a_resized_group_keeps_its_links(tmp_path: Path) -> None:
    group = read(TWO_NETWORKS, tmp_path).groups[0].resized(6)
    assert [(level.link.name, level.domain_size) for level in group.levels] == [("nvlink3", 8), ("ib200", 48)]


def test_zones_make_pools_and_what_joins_some_of_them_is_theirs(tmp_path: Path) -> None:
    text = """
[[groups]]
zone = "a"
device = "A100-SXM-80GB"
num_nodes = 2
[[groups]]
zone = "b"
device = "A100-SXM-80GB"
num_nodes = 2
[[groups]]
zone = "c"
device = "A100-SXM-80GB"
num_nodes = 1
[[levels]]
link = "nvlink3"
domain_size = 8
[[levels]]
link = "eth10"
domain_size = 40
[[zone_links]]
zones = ["a", "b"]
link = "eth100"
"""
    cluster = read(text, tmp_path)
    assert [part_label(cluster.parts, g) for g in range(3)] == [f"A100-SXM-80GB/{zone}" for zone in "abc"]
    assert links(with_parts_only(cluster, [0, 1])) == [("nvlink3", 8), ("eth100", 32)]
    assert links(with_parts_only(cluster, [0, 2])) == [("nvlink3", 8), ("eth10", 24)]
    assert links(with_parts_only(cluster, [2])) == [("nvlink3", 8)]
    assert with_parts_only(cluster, [0, 1, 2]) is cluster
    with pytest.raises(ConfigError, match="zone_links name d, in which no group stands"):
        read(text.replace('["a", "b"]', '["a", "d"]'), tmp_path)
    with pytest.raises(ConfigError, match="does not say what joins these"):
        read(text[: text.index("[[levels]]")], tmp_path)
