"""Clusters whose groups stand in regions: links from a table of pairs."""

from __future__ import annotations

from pathlib import Path

import pytest
from meshwright.schema import ClusterSpec, ConfigError
from meshwright.schema.device_groups import with_parts_only
from meshwright.schema.regions import WINDOW_BYTES, RegionLink

TABLE = """src,dst,throughput_gbit_per_s,min_rtt_ms,egress_usd_per_gb,streams
a,b,4,50,0.02,
a,b,3,50,0.02,
b,a,5,,0.05,
a,c,1,200,,2
c,a,1,200,,2
b,c,2,100,,
c,b,2,100,,
c,d,2,,,
"""


def cluster_file(folder: Path, regions: str = "abc", *, table: str = TABLE, extra: str = "") -> str:
    (folder / "pairs.csv").write_text(table)
    groups = (f'[[groups]]\nregion = "{name}"\ndevice = "A100-SXM-80GB"\nnum_nodes = 2\n' for name in regions)
    path = folder / "regions.toml"
    path.write_text(f'[regions]\ntable = "pairs.csv"\n{extra}\n' + "".join(groups))
    return str(path)


def test_regions_are_joined_by_their_slowest_pair(tmp_path: Path) -> None:
    cluster = ClusterSpec.parse(cluster_file(tmp_path))
    links = {(link.src, link.dst): link for link in cluster.region_links}
    assert len(links) == 6 and len(cluster.parts) == 3
    assert links["a", "b"].line_bytes_per_s == 3e9 / 8, "of a pair that was measured twice the slower line"
    assert links["b", "a"].round_trip_s == 0.05, "a round trip is of both directions"
    assert links["a", "b"].streams == 8 and links["a", "c"].streams == 2
    outer = cluster.levels[-1].link
    assert outer.bandwidth_bytes_per_s == 2 * WINDOW_BYTES / 0.2 and outer.latency_s == 0.1
    without = with_parts_only(cluster, [0, 1])
    assert without.levels[-1].link.bandwidth_bytes_per_s == links["a", "b"].bytes_per_s
    assert [level.link.name for level in cluster.parts[0].cluster.levels] == ["nvlink3", "ib200"]


def test_connections_bound_the_rate_of_a_long_way() -> None:
    link = RegionLink(src="a", dst="b", line_bytes_per_s=1e9, round_trip_s=0.1, streams=1)
    assert link.bytes_per_s == WINDOW_BYTES / 0.1
    assert link.replace(streams=64).bytes_per_s == 1e9
    assert link.replace(round_trip_s=0.0).bytes_per_s == 1e9


def test_one_region_is_an_ordinary_cluster(tmp_path: Path) -> None:
    cluster = ClusterSpec.parse(cluster_file(tmp_path, "a"))
    assert not cluster.region_links and not cluster.parts and cluster.levels[-1].link.name == "ib200"


@pytest.mark.parametrize(
    ("regions", "table", "extra", "said"),
    [
        ("abe", TABLE, "", "no pair a to e"),
        ("cd", TABLE + "d,c,2,,,\n", "", "no round trip of the pair c to d"),
        ("ab", TABLE.replace("a,b,3", "a,b,fast"), "", "throughput_gbit_per_s is 'fast'"),
        ("ab", TABLE.replace("a,b,3", "a,b,"), "", "without throughput_gbit_per_s"),
        ("ab", "a,b\n1,2\n", "", "has no column src, dst"),
        ("ab", TABLE, "streams = 0", "streams"),
        ("ab", TABLE, "window = 3", "unknown key"),
        ("aa", TABLE, "", "several groups in one region"),
        ("ab", TABLE, '[[levels]]\nlink = "eth100"\ndomain_size = 32', "what joins them is in"),
    ],
)
def test_unusable_regions_are_a_config_error(tmp_path: Path, regions: str, table: str, extra: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ClusterSpec.parse(cluster_file(tmp_path, regions, table=table, extra=extra))


def test_a_table_that_is_not_there_is_a_config_error(tmp_path: Path) -> None:
    path = Path(cluster_file(tmp_path))
    (tmp_path / "pairs.csv").unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*pairs\.csv"):
        ClusterSpec.parse(str(path))
