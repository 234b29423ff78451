"""The machine at hand, really measured with two ranks (once), and the cache around it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from meshwright.profilers import local, machine, profiled_cluster
from meshwright.profilers.local import measure_local, measure_profile
from meshwright.profilers.measure import compute, links
from meshwright.profilers.profiled_cluster import cluster_from_profile
from meshwright.schema import ClusterSpec, ConfigError, Profile, ProfileError
from meshwright.schema.profile import CollectivePoint, MatmulPoint
from warm_ranks import forked_ranks

QUICK = {"num_rounds": 1, "sample_s": 0.002, "num_layers": 1, "num_sizes": 2}
"""Enough for every kind of point; the figures are rough."""


def silent(_: str) -> None:
    """Nobody listens."""


SIGINT_BEFORE = signal.getsignal(signal.SIGINT)


@pytest.fixture(scope="session")
def profile() -> Profile:
    # The load of this moment must not decide what the tests of the cache see.
    with forked_ranks():
        return measure_profile(machine.identify(2), silent, **QUICK).replace(foreign_load_fraction=0.0)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache directory of our own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "meshwright"


@pytest.fixture
def measured(profile, monkeypatch) -> list[int]:
    """Replaces the measurement by the session's; the list grows with every call."""
    calls: list[int] = []

    def instead(wanted, say):
        calls.append(wanted.num_devices)
        return profile.replace(machine=wanted)

    monkeypatch.setattr(local, "measure_profile", instead)
    return calls


def test_measurement_of_a_busy_machine_is_not_kept(profile, cache, monkeypatch):
    busy = profile.replace(foreign_load_fraction=0.5)
    monkeypatch.setattr(local, "measure_profile", lambda wanted, say: busy.replace(machine=wanted))
    assert measure_local(2).num_devices == 2
    assert list(cache.glob("local-*.json")) == []


def only_file(cache: Path) -> Path:
    (path,) = cache.glob("local-*.json")
    return path


# --- the measurement itself --------------------------------------------------------------------------------------


def test_measured_machine_is_a_cluster(profile):
    cluster = cluster_from_profile(profile)
    device, (level,) = cluster.groups[0].device, cluster.levels
    assert (cluster.name, cluster.num_devices, cluster.num_nodes, level.domain_size) == ("local", 2, 1, 2)
    assert device.peak_flops_per_s.fp32 and device.peak_flops_per_s.bf16
    assert device.gemm is not None and device.gemm.source.startswith("measured ")
    assert max(level.link.efficiency.model_dump().values()) == 1
    assert cluster.memory_budget_bytes > 0
    assert {point.op for point in profile.collectives} == set(links.OPS)
    assert all(point.group_size == 2 for point in profile.collectives)
    assert ClusterSpec.model_validate_json(cluster.model_dump_json()) == cluster


def test_measuring_leaves_signal_handlers_and_environment_alone(profile):
    assert signal.getsignal(signal.SIGINT) is SIGINT_BEFORE
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert "TORCHELASTIC_SIGNALS_TO_HANDLE" not in os.environ


@pytest.mark.usefixtures("warm_ranks")
def test_failing_rank_is_a_profile_error():
    with pytest.raises(ProfileError) as caught:
        measure_profile(machine.identify(1), silent, **{**QUICK, "num_layers": "one"})
    assert "rank 0 of 1 failed: TypeError" in str(caught.value)


def runs_a_rank(process):
    try:
        return "meshwright.profilers.run.rank" in " ".join(process.cmdline())
    except psutil.Error:  # it ended meanwhile
        return False


@pytest.mark.long
@pytest.mark.job
def test_killed_launcher_leaves_no_ranks_and_no_cache(cache):
    code = "from meshwright.profilers.local import measure_local; measure_local(2)"
    launcher = psutil.Process(subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL).pid)
    ranks: list[psutil.Process] = []
    deadline = time.monotonic() + 60
    while len(ranks) < 2 and time.monotonic() < deadline:
        ranks = [child for child in launcher.children() if runs_a_rank(child)]
    launcher.kill()
    launcher.wait()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert len(ranks) == 2 and not alive
    assert not list(cache.glob("*.json"))


# --- the cache ---------------------------------------------------------------------------------------------------


def test_second_call_reads_the_cache(cache, measured):
    first = measure_local(2)
    assert measure_local(2) == first
    assert measured == [2]
    assert measure_local(1) != first
    assert measure_local(2, refresh=True) == first
    assert measured == [2, 1, 2]


@pytest.mark.parametrize("damage", ["", "{", "\0", "[]", '{"schema_version": 1}', '{"schema_version": 99}', "half"])
def test_damaged_cache_is_measured_anew(cache, measured, damage):
    first = measure_local(2)
    path = only_file(cache)
    path.write_text(path.read_text()[:500] if damage == "half" else damage)
    said: list[str] = []
    assert measure_local(2, on_progress=said.append) == first
    assert measured == [2, 2]
    assert "measuring again" in said[0]
    assert Profile.load(path) == first.profile


def test_cache_of_another_machine_or_without_points_is_measured_anew(cache, measured, profile):
    measure_local(2)
    other = profile.machine.model_copy(update={"torch": "1.0"})
    for wrong in (profile.replace(machine=other), profile.replace(matmuls=()), profile.replace(collectives=())):
        wrong.save(only_file(cache))
        measure_local(2)
    assert measured == [2, 2, 2, 2]


@pytest.mark.parametrize("what", ["version", "cpu_name", "num_cores", "total_memory"])
def test_changed_identity_is_measured_anew(cache, measured, monkeypatch, what):
    measure_local(2)
    changed = {"version": "2.12.0+cpu", "cpu_name": "another", "num_cores": 3, "total_memory": 8 * 2**30}[what]
    monkeypatch.setattr(machine, what, lambda *_: changed)
    measure_local(2)
    assert measured == [2, 2]
    assert len(list(cache.glob("local-*.json"))) == 2


def test_cache_that_cannot_be_written_does_not_matter(tmp_path, measured, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    said: list[str] = []
    assert measure_local(2, on_progress=said.append).num_devices == 2
    assert any("not cached" in line for line in said)


@pytest.mark.job
def test_cached_result_needs_no_torch(cache, measured):
    cluster = measure_local(2)
    code = (
        "import sys; from meshwright.schema import ClusterSpec; cluster = ClusterSpec.parse('local:2')\n"
        "assert 'torch' not in sys.modules; print(cluster.model_dump_json())"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ClusterSpec.model_validate_json(answer.stdout) == cluster


def test_second_process_waits_for_the_first_measurement(cache, measured, profile):
    path = local._cache_file(machine.identify(2))
    said: list[str] = []
    waiting = threading.Thread(target=measure_local, args=(2,), kwargs={"on_progress": said.append})
    with local._measuring_lock(path, silent) as has_waited:
        assert not has_waited
        waiting.start()
        while not said and waiting.is_alive():
            time.sleep(0.01)
        profile.save(path)
    waiting.join()
    assert "waiting" in said[0]
    assert measured == []


# --- identity ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [0, -1, True, 2.0, "2", 10**9])
def test_impossible_number_of_ranks_is_a_config_error(ranks):
    with pytest.raises(ConfigError):
        measure_local(ranks)


def test_more_ranks_than_cores_are_noted(profile, monkeypatch):
    monkeypatch.setattr(machine, "num_cores", lambda: 1)
    identity = machine.identify(2)
    assert identity.driver == "2 ranks on 1 cores"
    assert identity.driver in cluster_from_profile(profile.replace(machine=identity)).groups[0].device.source


def test_container_limits_count_as_the_machine(tmp_path, monkeypatch):
    group = tmp_path / "outer" / "inner"
    group.mkdir(parents=True)
    (tmp_path / "self").write_text("0::/outer/inner\n")
    (tmp_path / "outer" / "memory.max").write_text(f"{2**30}\n")
    (tmp_path / "outer" / "memory.current").write_text(f"{2**29}\n")
    (tmp_path / "outer" / "memory.stat").write_text(f"anon 5\ninactive_file {2**28}\n")
    (group / "memory.max").write_text("max\n")
    (group / "cpu.max").write_text("150000 100000\n")
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "_PROCESS_CGROUPS", tmp_path / "self")
    assert machine.total_memory() == 2**30
    assert machine.available_memory() == 2**30 - 2**28
    assert machine.num_cores() == 1


def test_container_limits_of_version_1_count_as_well(tmp_path, monkeypatch):
    for controller in ("cpu", "memory"):
        (tmp_path / controller / "job").mkdir(parents=True)
    (tmp_path / "self").write_text("4:memory:/job\n3:cpu,cpuacct:/job\n0::/\n")
    (tmp_path / "memory" / "job" / "memory.limit_in_bytes").write_text("1000\n")
    (tmp_path / "cpu" / "job" / "cpu.cfs_quota_us").write_text("100000\n")
    (tmp_path / "cpu" / "job" / "cpu.cfs_period_us").write_text("100000\n")
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "_PROCESS_CGROUPS", tmp_path / "self")
    assert (machine.total_memory(), machine.num_cores()) == (1000, 1)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, [0, 1, 2]), ("", []), ("2,0", [2, 0]), ("1,7,0", [1]), ("GPU-b", [1]), ("-1", []), ("0,0", [0]), ("x", [])],
)
def test_visible_devices_follow_cudas_rule(visible, expected):
    assert machine._visible_indices(visible, ["GPU-a1", "GPU-b2", "GPU-c3"]) == expected


def test_gpus_come_from_nvidia_smi(monkeypatch):
    rows = [["GPU-1", "NVIDIA H100 80GB HBM3", "570.1"], ["GPU-2", "NVIDIA H100 80GB HBM3", "570.1"]]
    monkeypatch.setattr(machine, "version", lambda _: "2.13.0")
    monkeypatch.setattr(machine, "_nvidia_smi", lambda: rows)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    identity = machine.identify()
    assert (identity.device, identity.num_devices, identity.backend) == ("NVIDIA H100 80GB HBM3", 2, "nccl")
    with pytest.raises(ConfigError, match="GPUs"):
        machine.identify(3)


@pytest.mark.parametrize(
    ("torch_name", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
        ("NVIDIA H200", "H200-SXM-141GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
        ("Tesla T4", "T4-16GB"),
        ("NVIDIA GeForce RTX 4090", "RTX4090-24GB"),
        ("NVIDIA RTX A6000", "RTX-A6000-48GB"),
        ("AMD Instinct MI300X", "MI300X-192GB"),
        ("NVIDIA Unheard Of", "NVIDIA Unheard Of"),
    ],
)
def test_gpu_names_are_those_of_the_catalogue(torch_name, name):
    assert profiled_cluster._catalogue_name(torch_name)[0] == name


# --- fits --------------------------------------------------------------------------------------------------------


def test_line_through_exact_times_is_found():
    sizes = [2.0**14, 2.0**18, 2.0**22, 2.0**25]
    latency, rate = links.fit_line(sizes, [1e-4 + size / 2e9 for size in sizes])
    assert (latency, rate) == (pytest.approx(1e-4), pytest.approx(2e9))


@pytest.mark.parametrize("times", [[1.0, 4.0, 40.0], [3.0, 2.0, 1.0], [1.0, 1.0, 1.0]])
def test_line_through_odd_times_is_never_negative(times):
    latency, rate = links.fit_line([1e3, 2e3, 4e3], times)
    assert latency >= 0
    assert rate > 0


def test_link_bandwidths_follow_the_bus_convention():
    points = [
        CollectivePoint(op=op, group_size=4, size_bytes=size, time_s=1e-5 + links.bus_factor(op, 4) * size / 1e9)
        for op in links.OPS
        for size in (2**14, 2**20, 2**25)
    ]
    link = links.fit_link(points, "gloo", "made up")
    assert link.bandwidth_bytes_per_s == pytest.approx(1e9)
    assert list(link.efficiency.model_dump().values()) == pytest.approx([1] * len(links.OPS))
    assert link.collective_latency_s.base == pytest.approx(1e-5)


def test_roofline_through_exact_times_is_found():
    shapes = [(8, 2048, 2048), (16, 64, 64), (512, 576, 576), (2048, 2048, 2048), (16, 4096, 4096)]
    points = []
    for m, n, k in shapes:
        compute_s, memory_s = 2 * m * n * k / (1e11 * 0.9), 4 * (m * k + k * n + m * n) / (2e10 * 0.7)
        points.append(MatmulPoint(dtype="fp32", m=m, n=n, k=k, time_s=5e-6 + max(compute_s, memory_s)))
    peak = compute.peak_flops(points).fp32
    fit = compute.fit_gemm(points, 2e10, "made up")
    assert fit.launch_s == pytest.approx(5e-6, rel=0.05)  # steps of the finer grid: 1.25 %
    assert fit.compute_efficiency * peak == pytest.approx(0.9e11, rel=0.03)
    assert fit.memory_efficiency == pytest.approx(0.7, rel=0.03)


def test_products_whose_bytes_exceed_64_bits_are_fitted_as_any_others():
    sizes = (10**12, 10**12, 8)
    points = [MatmulPoint(dtype="fp32", m=m, n=n, k=k, time_s=1e3) for m, n, k in (sizes, sizes[::-1])]
    assert compute.fit_gemm(points, 1e30, "made up").memory_efficiency > 0


def test_single_rank_has_a_link_that_is_never_used(profile):
    alone = profile.replace(machine=profile.machine.replace(num_devices=1), collectives=())
    (level,) = cluster_from_profile(alone).levels
    assert level.domain_size == 1
    assert "not measured" in level.link.source
