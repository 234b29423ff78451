"""Points of a profile beside products: each that is slower makes the estimate slower, and a plan says which it used."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshwright.cost_models.coefficients import Scenario, packaged_coefficients
from meshwright.cost_models.hardware.collectives import Pair, pair_s, slowdown_law
from meshwright.cost_models.hardware.host_memory import host_link_bytes_per_s
from meshwright.cost_models.hardware.machine import measured_rates
from meshwright.cost_models.hardware.streams import host_rates, interference, measured_interference
from meshwright.cost_models.measured import slowdown_ratio
from meshwright.planner import estimate, plan
from meshwright.schema import ClusterSpec, Layout, ModelSpec, Workload
from meshwright.schema.profile import CpuAdamPoint, ElementwisePoint, HostCopyPoint, Machine, OverlapPoint, Profile

MODEL = ModelSpec.named("llama-3.2-1b")
WORKLOAD = Workload(seq_len=2048, global_batch_size=16, precision="bf16-mixed")
PLAIN = ClusterSpec.parse("8xA100-SXM-80GB")
MEMORY = PLAIN.weakest_device.memory_bandwidth_bytes_per_s


def cluster(**points: object) -> ClusterSpec:
    """Eight A100 with points of a profile and nothing else measured."""
    machine = Machine(device="A100", num_devices=8, host_memory_bytes=2**38, backend="nccl", torch="2", python="3.11")
    known = {"memory_bandwidth_bytes_per_s": MEMORY, "device_memory_bytes": 2**36}
    profile = Profile(machine=machine, created="2026-01-01", duration_s=1.0, **known, **points)
    return PLAIN.replace(profile=profile)


def step_s(of: ClusterSpec, **layout: object) -> float:
    return estimate(MODEL, of, WORKLOAD, Layout(**{"dp_shard": 8, "zero_stage": 3, **layout})).step_time_s


def overlap(together_s: float, streams: tuple[str, str] = ("collective", "compute")) -> OverlapPoint:
    """Two streams of a second each; 100 GB/s of each device where one is a collective."""
    sent = {"collective_op": "all_reduce", "collective_bytes": round(1e11 * 8 / 14), "group_size": 8}
    alone = {"alone_s": (1.0, 1.0), "matmul": (4096, 4096, 4096), "dtype": "bf16"}
    return OverlapPoint(streams=streams, together_s=together_s, **alone, **(sent if "collective" in streams else {}))


def elementwise(rate: float) -> tuple[ElementwisePoint, ...]:
    size = 2**26
    passes = {"copy": 2, "silu_mul": 5, "rms_norm": 2}
    return tuple(
        ElementwisePoint(
            op=op, dtype="bf16", num_elements=size, traffic_bytes=2 * count * size, time_s=2 * count * size / rate
        )
        for op, count in passes.items()
    )


def copies(rate: float, devices: int = 8) -> tuple[HostCopyPoint, ...]:
    return tuple(
        HostCopyPoint(
            direction=direction, host_memory="pinned", size_bytes=2**28, devices_at_once=devices, time_s=2**28 / rate
        )
        for direction in ("to_device", "to_host")
    )


# --- streams at once ---------------------------------------------------------------------------------------------


@given(a=st.floats(0.01, 0.9), b=st.floats(0.01, 0.9), k=st.floats(0.05, 1.0), second=st.floats(0.3, 3.0))
def test_ratio_makes_the_law_say_what_was_measured(a: float, b: float, k: float, second: float) -> None:
    alone = np.array([1.0]), np.array([second])
    measured = float(pair_s(*alone, Pair(k * a, k * b))[0])
    ratio = slowdown_ratio(Pair(a, b), 1.0, second, measured)
    assert float(pair_s(*alone, Pair(ratio * a, ratio * b))[0]) == pytest.approx(measured, rel=1e-9)


@pytest.mark.parametrize(("together_s", "seconds"), [(0.5, 1.0), (5.0, 2.0)])
def test_times_that_no_slow_down_explains_end_at_the_bounds(together_s: float, seconds: float) -> None:
    """Less than the longest stream, and more than one after the other."""
    law = Pair(0.2, 0.1)
    ratio = slowdown_ratio(law, 1.0, 1.0, together_s)
    one = np.ones(1)
    assert float(pair_s(one, one, Pair(ratio * 0.2, ratio * 0.1))[0]) == pytest.approx(seconds, rel=1e-6)


def test_a_point_that_the_law_predicts_changes_nothing() -> None:
    law = slowdown_law(1e11 / MEMORY, packaged_coefficients())
    as_predicted = float(pair_s(np.ones(1), np.ones(1), law)[0])
    rates = measured_rates(Scenario.build(WORKLOAD, cluster(overlaps=(overlap(as_predicted),))))
    assert rates.overlap_ratio == pytest.approx(1.0)
    assert step_s(cluster(overlaps=(overlap(as_predicted),))) == pytest.approx(step_s(PLAIN), rel=1e-6)


def test_kernels_that_collectives_slow_down_more_make_a_longer_step() -> None:
    times = [step_s(cluster(overlaps=(overlap(together_s),))) for together_s in (1.0, 1.3, 1.6, 2.0)]
    assert times == sorted(times) and times[0] < times[1] < times[-1]


def test_copies_that_slow_each_other_down_lower_the_rates_of_offload() -> None:
    slow = [
        host_rates(WORKLOAD, cluster(overlaps=(overlap(t, ("to_host", "compute")),)), memory_bytes=1e12)
        for t in (1.05, 1.8)
    ]
    assert slow[0].compute_lost_to_host < slow[1].compute_lost_to_host
    assert slow[0].to_host_bytes_per_s > slow[1].to_host_bytes_per_s
    both = [
        host_rates(WORKLOAD, cluster(overlaps=(overlap(t, ("to_device", "to_host")),)), memory_bytes=1e12).duplex
        for t in (1.1, 1.9)
    ]
    assert both[0] > both[1]


def test_pairs_without_a_point_keep_the_law() -> None:
    law = interference(packaged_coefficients(), np.zeros(4))
    measured = measured_interference(law, (overlap(1.5, ("to_device", "compute")), overlap(1.9)))
    changed = {(2, 0), (0, 2)}
    assert all(
        measured[i, j] == law[i, j] or (i, j) in changed for i in range(4) for j in range(4)
    ) and not np.array_equal(measured, law)


# --- elementwise, host --------------------------------------------------------------------------------------------


def test_slower_elementwise_kernels_make_a_longer_step() -> None:
    fast, slow = cluster(elementwise=elementwise(1.6e12)), cluster(elementwise=elementwise(0.8e12))
    partial = cluster(elementwise=elementwise(1e12)[:2])
    rates = [measured_rates(Scenario.build(WORKLOAD, of)).elementwise_bytes_per_s for of in (fast, slow, partial)]
    assert rates[0] == pytest.approx(2 * rates[1])
    assert rates[2] is None
    assert step_s(slow) > step_s(fast)


def test_slower_copies_and_updates_make_offload_slower_and_nothing_else() -> None:
    fast, slow = (cluster(host_copies=copies(rate)) for rate in (2e10, 5e9))
    assert float(host_link_bytes_per_s(np.zeros(1), Scenario.build(WORKLOAD, slow))[0]) == pytest.approx(5e9)
    assert step_s(slow, offload="optimizer") > step_s(fast, offload="optimizer")
    assert step_s(slow) == step_s(fast) == step_s(PLAIN)
    adam = [CpuAdamPoint(num_parameters=2**26, threads=8, ranks_at_once=8, time_s=t) for t in (0.5, 5.0)]
    times = [step_s(cluster(cpu_adam=(point,)), offload="optimizer") for point in adam]
    assert times[0] < times[1]


def test_copies_of_one_device_alone_say_nothing_of_all_at_once() -> None:
    alone = cluster(host_copies=copies(2e10, devices=1))
    assert host_link_bytes_per_s(np.zeros(1), Scenario.build(WORKLOAD, alone)) == host_link_bytes_per_s(
        np.zeros(1), Scenario.build(WORKLOAD, PLAIN)
    )


def test_plan_says_what_it_read_from_the_profile() -> None:
    measured = cluster(overlaps=(overlap(1.5),), elementwise=elementwise(1.2e12), host_copies=copies(1e10))
    found = plan(MODEL, measured, WORKLOAD, fixed={"pp": 1, "tp": 1}, time_limit_s=10)
    (note,) = (note for note in found.notes if note.startswith("from the profile"))
    assert "beside collectives" in note and "GB/s (3 points)" in note and "host link 10 GB/s" in note
    assert not any(note.startswith("from the profile") for note in plan(MODEL, PLAIN, WORKLOAD, time_limit_s=10).notes)
