"""Profiles are trusted, joined and compared: what was measured here is used, everything else says why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from meshwright.planner import estimate
from meshwright.profilers.files import compare, load_profile, machine_differences, merge_profiles, summary
from meshwright.profilers.machine import identify
from meshwright.profilers.profiled_cluster import profiled_cluster, with_measured_devices
from meshwright.schema import ConfigError, Workload
from meshwright.schema.device_groups import with_parts_only
from meshwright.schema.errors import ProfileError
from meshwright.schema.profile import Calibration, CollectivePoint, HostCopyPoint, MatmulPoint, Profile, StoragePoint

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")


def profile(*, num_nodes: int = 1, rate: float = 1e9, **fields: object) -> Profile:
    """Two ranks a node; a link of ``rate`` inside, a tenth of it between nodes."""
    machine = identify(2).replace(num_devices=2 * num_nodes, num_nodes=num_nodes)
    points = [
        CollectivePoint(
            op=op, group_size=2 * nodes, num_nodes=nodes, size_bytes=size, time_s=1e-4 + nodes**3 * size / rate
        )
        for op in OPS
        for size in (2**18, 2**23)
        for nodes in range(1, num_nodes + 1)
    ]
    matmuls = [MatmulPoint(dtype="fp32", m=s, n=s, k=s, time_s=1e-5 + 2 * s**3 / 8e10) for s in (64, 256, 1024)]
    known = {
        "machine": machine, "created": "2026-01-01T00:00:00", "duration_s": 9.0, "memory_bandwidth_bytes_per_s": 1e10,
        "device_memory_bytes": 2**32, "matmuls": tuple(matmuls), "collectives": tuple(points),
    }  # fmt: skip
    return Profile(**{**known, **fields}).sealed()


def test_own_profile_is_trusted_and_an_edited_or_foreign_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile().save(path)
    assert load_profile(path)[1] == ()
    edited = json.loads(path.read_text())
    edited["machine"]["device"] = "NVIDIA H200"
    path.write_text(json.dumps(edited))
    with pytest.raises(ProfileError, match="cannot be trusted") as refused:
        load_profile(path)
    assert "hash differs" in str(refused.value)
    assert "device: measured on NVIDIA H200, here is" in str(refused.value)
    assert refused.value.exit_code == 2
    assert len(load_profile(path, allow_foreign=True)[1]) == 2


def test_another_version_of_the_software_is_named() -> None:
    other = identify(2).replace(torch="1.0", python="3.1")
    assert [line.split(":")[0] for line in machine_differences(other)] == ["torch", "python"]
    assert machine_differences(identify(2)) == ()


def test_more_ranks_than_this_machine_carries_are_a_difference_and_no_crash() -> None:
    assert "cannot be what was measured" in machine_differences(identify(1).replace(num_devices=10**6))[0]


def test_merging_takes_every_point_once_and_the_median_of_those_measured_twice() -> None:
    first = profile()
    slower = [point.replace(time_s=3 * point.time_s) for point in first.matmuls[:2]]
    extra = MatmulPoint(dtype="bf16", m=64, n=64, k=64, time_s=1.0)
    second = profile(matmuls=(*slower, extra), created="2026-02-01T00:00:00")
    joined = merge_profiles([second, first])
    assert joined.created == second.created
    assert not joined.is_altered
    assert len(joined.matmuls) == len(first.matmuls) + 1
    assert joined.matmuls[0].time_s == pytest.approx(2 * first.matmuls[0].time_s)
    assert joined.matmuls[2] == first.matmuls[2]
    assert merge_profiles([first, first]).matmuls == first.matmuls


def test_profiles_of_unlike_machines_or_altered_ones_are_not_merged() -> None:
    first = profile()
    with pytest.raises(ProfileError, match="different machines"):
        merge_profiles([first, profile(machine=first.machine.replace(torch="1.0"))])
    with pytest.raises(ProfileError, match="hash differs"):
        merge_profiles([first, first.replace(duration_s=1.0)])
    with pytest.raises(ConfigError, match="nothing to merge"):
        merge_profiles([first])


def test_comparison_has_machines_rates_and_ratios_of_common_points() -> None:
    first, second = profile(), profile(rate=2e9)
    found = compare(first, second.replace(machine=second.machine.replace(torch="1.0")))
    assert found["machine"] == {"torch": [first.machine.torch, "1.0"]}
    assert found["points"]["matmuls"] == {"both": 3, "first": 0, "second": 0, "ratio": 1.0}
    assert found["points"]["collectives"]["ratio"] < 1
    assert summary(first)["memory_bandwidth_bytes_per_s"] == 1e10


def test_cluster_of_two_nodes_has_both_links_the_matrix_and_the_hosts_link() -> None:
    matrix = ((0.0, 1e9), (2e9, 0.0))
    copies = tuple(
        HostCopyPoint(direction=way, host_memory="pinned", size_bytes=2**26, time_s=2**26 / rate)
        for way, rate in (("to_device", 2e10), ("to_host", 1e10))
    )
    cluster = profiled_cluster(profile(num_nodes=2, node_bandwidth_bytes_per_s=matrix, host_copies=copies))
    assert [level.domain_size for level in cluster.levels] == [2, 4]
    inside, outside = (level.link.bandwidth_bytes_per_s for level in cluster.levels)
    assert outside < inside
    assert cluster.bandwidth_matrix == matrix
    assert cluster.groups[0].host_link_bytes_per_s == pytest.approx(1e10)
    assert {point.num_nodes for point in cluster.levels[0].link.measured} == {1}


def test_larger_cluster_of_the_measured_devices_takes_their_rates() -> None:
    measured = profiled_cluster(profile())
    larger = profiled_cluster(profile(num_nodes=2, memory_bandwidth_bytes_per_s=5e9))
    planned = with_measured_devices(larger, measured)
    assert planned.groups[0].device.memory_bandwidth_bytes_per_s == 1e10
    assert planned.num_devices == 4
    assert planned.levels[0].link == measured.levels[0].link
    group = measured.groups[0].replace(host_link_bytes_per_s=3e10)
    with_host_link = with_measured_devices(larger, measured.replace(groups=(group,)))
    assert with_host_link.groups[0].host_link_bytes_per_s == 3e10
    other = larger.replace(groups=(larger.groups[0].replace(device=larger.groups[0].device.replace(name="other")),))
    with pytest.raises(ProfileError, match="the cluster has other"):
        with_measured_devices(other, measured)


def test_every_kind_of_device_has_its_own_profile() -> None:
    machines = [profile().machine.replace(device=name) for name in ("quick", "slow")]
    quick = profiled_cluster(profile(machine=machines[0], calibration=Calibration(products=0.5)))
    slower = tuple(point.replace(time_s=4 * point.time_s) for point in profile().matmuls)
    slow = profiled_cluster(profile(machine=machines[1], matmuls=slower, rate=5e8))
    groups = tuple(each.groups[0].replace(num_nodes=2) for each in (quick, slow))
    mixed = quick.replace(groups=groups, levels=profiled_cluster(profile(num_nodes=4)).levels, profile=None)

    planned = with_measured_devices(mixed, slow, quick)
    assert planned.profile == slow.profile  # of ranks that are all treated alike
    assert [part.cluster.profile for part in planned.parts] == [quick.profile, slow.profile]
    assert [part.cluster.levels[0].link for part in planned.parts] == [quick.levels[0].link, slow.levels[0].link]
    assert with_parts_only(planned, [0]).profile == quick.profile

    work = Workload(global_batch_size=16, seq_len=256, precision="fp32")
    stages = estimate("smollm2-135m", planned, work, "pp=2 dp_shard=4 zero=1").stages
    without = planned.replace(groups=tuple(group.replace(profile=None) for group in planned.groups))
    others = estimate("smollm2-135m", without, work, "pp=2 dp_shard=4 zero=1").stages
    ratio = {one.device: one.forward_s / other.forward_s for one, other in zip(stages, others, strict=True)}
    # What runs said of the quick ones is said of them alone; blocks move to the others.
    assert 1.7 < ratio["quick / 2"] < 2.0
    assert 1.0 <= ratio["slow / 2"] < 1.1

    with pytest.raises(ProfileError, match="the cluster has quick / 2, slow / 2"):
        with_measured_devices(planned, slow)
    with pytest.raises(ProfileError, match="of quick / 2, quick / 2, slow / 2"):
        with_measured_devices(planned, quick, quick, slow)


def test_storage_is_that_of_a_node_with_all_its_ranks() -> None:
    points = tuple(
        StoragePoint(
            operation=operation, size_bytes=2**26, block_bytes=2**22, direct=True, ranks_at_once=2, time_s=2**26 / rate
        )
        for operation, rate in (("read", 3e9), ("write", 1e9))
    )
    assert profiled_cluster(profile(storage=points)).groups[0].storage_bytes_per_s == pytest.approx(2e9)
    assert profiled_cluster(profile(storage=points[:1])).groups[0].storage_bytes_per_s is None


def test_groups_that_share_a_nic_make_the_link_between_nodes_slower() -> None:
    """Counterparts of two nodes, both pairs of them at once: what a device gets then stands for what the world's ring left it."""
    known = profile(num_nodes=2)

    def outer(rate: float) -> float:
        at_once = tuple(
            CollectivePoint(
                op=op,
                group_size=2,
                num_nodes=2,
                stride=2,
                concurrent_groups=2,
                size_bytes=size,
                time_s=1e-4 + size / rate,
            )
            for op in OPS
            for size in (2**18, 2**23)
        )
        link = profiled_cluster(profile(num_nodes=2, collectives=(*known.collectives, *at_once))).levels[-1].link
        return link.bandwidth_bytes_per_s * link.efficiency.all_reduce

    assert outer(2e8) == pytest.approx(2e8, rel=0.01)
    assert outer(1e8) == pytest.approx(1e8, rel=0.01)
