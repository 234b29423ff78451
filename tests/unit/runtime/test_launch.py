"""Every test that starts processes does it through `launch` itself, in this process; see test_apply for signals to it."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from meshwright.profilers.machine import num_cores
from meshwright.profilers.run.faults import RankDeath, explain_failure
from meshwright.runtime.job import watch
from meshwright.runtime.job.launch import launch
from meshwright.runtime.job.machine import is_same_chip
from meshwright.runtime.job.rendezvous import Rendezvous
from meshwright.runtime.job.worker import Job
from meshwright.schema import ConfigError, Layout, MeshwrightError, Profile, RuntimeMismatchError, TrainingPlan
from meshwright.schema.profile import Machine
from small_jobs import assert_gone, plan_elsewhere, small_plan

LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
RESET = "DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed."
TIMED_OUT = (
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete"
)

needs_two_cores = pytest.mark.skipif(num_cores() < 2, reason="two ranks need two cores")


@pytest.fixture
def two_ranks() -> TrainingPlan:
    return small_plan(Layout(dp_replicate=2))


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Environment, signal handlers and processes are afterwards what they were; ranks are forked where no real ones are needed."""
    if request.node.get_closest_marker("job") is None:
        request.getfixturevalue("warm_ranks")
    variables, handler, children = dict(os.environ), signal.getsignal(signal.SIGINT), psutil.Process().children()
    yield
    assert signal.getsignal(signal.SIGINT) is handler
    assert {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} == {
        name: value for name, value in variables.items() if not name.startswith("PYTEST")
    }
    assert_gone([child for child in psutil.Process().children(recursive=True) if child not in children])


def script_job(folder: Path, plan: TrainingPlan, text: str, *arguments: str) -> Job:
    script = folder / "train.py"
    script.write_text(text)
    plan.save(folder / "plan.json")
    return Job(plan=str(folder / "plan.json"), script=(str(script), *arguments))


def death(rank: int, exit_code: int, error: str = "", *, by_launcher: bool = False, time_s: float = 0.0) -> RankDeath:
    return RankDeath(rank=rank, exit_code=exit_code, error=error, ended_by_launcher=by_launcher, time_s=time_s)


@needs_two_cores
@pytest.mark.job
def test_script_gets_its_arguments_the_plan_and_torchrun_variables(
    tmp_path: Path, two_ranks: TrainingPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    text = """
import os, pathlib, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "MESHWRIGHT_PLAN")
lines = [__name__, *sys.argv[1:], *(os.environ[name] for name in names), str(pathlib.Path(sys.path[0]))]
pathlib.Path(__file__).with_name(os.environ["RANK"]).write_text("\\n".join(lines))
"""
    launch(two_ranks, script_job(tmp_path, two_ranks, text, "--steps", "$$3"))
    threads = str(num_cores() // 2)
    for rank in ("0", "1"):
        expected = ["__main__", "--steps", "$$3", rank, rank, "2", threads, str(tmp_path / "plan.json"), str(tmp_path)]
        assert (tmp_path / rank).read_text().splitlines() == expected


@needs_two_cores
def test_script_that_raises_is_reported_with_its_rank_and_last_lines(tmp_path: Path, two_ranks: TrainingPlan) -> None:
    text = """
import os, time
if os.environ["RANK"] == "1":
    raise ValueError("the data are wrong")
time.sleep(60)
"""
    with pytest.raises(MeshwrightError, match="rank 1 of 2 failed: ValueError: the data are wrong") as caught:
        launch(two_ranks, script_job(tmp_path, two_ranks, text))
    assert caught.value.exit_code == 1
    assert caught.value.details[0].startswith("Traceback")
    assert "train.py" in caught.value.details[1]  # no frame of ours comes before the script's


@needs_two_cores
@pytest.mark.job
def test_killed_rank_is_named_and_its_own_children_end_too(tmp_path: Path, two_ranks: TrainingPlan) -> None:
    text = """
import os, pathlib, signal, subprocess, time
if os.environ["RANK"] == "1":
    child = subprocess.Popen(["sleep", "60"])
    pathlib.Path(__file__).with_name("child").write_text(str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
    with pytest.raises(MeshwrightError, match=r"rank 1 of 2 was killed by signal 9 \(SIGKILL\)"):
        launch(two_ranks, script_job(tmp_path, two_ranks, text))
    child = int((tmp_path / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_suspended_rank_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SUSPENDED_S", 0.5)
    plan = small_plan()
    with pytest.raises(MeshwrightError, match="rank 0 of 1 was suspended"):
        launch(plan, script_job(tmp_path, plan, "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"))


def test_exit_code_and_our_own_errors_cross_the_process_border(tmp_path: Path) -> None:
    plan = small_plan()
    with pytest.raises(MeshwrightError, match="rank 0 of 1 ended with exit code 3"):
        launch(plan, script_job(tmp_path, plan, "import sys; sys.exit(3)"))
    text = "from meshwright.schema import ConfigError; raise ConfigError('what', details=('numbers',), help='fix')"
    with pytest.raises(ConfigError) as caught:
        launch(plan, script_job(tmp_path, plan, text))
    assert (caught.value.message, caught.value.details, caught.value.help) == ("what", ("numbers",), "fix")


def test_plan_with_more_ranks_than_cores_is_refused(monkeypatch: pytest.MonkeyPatch, two_ranks: TrainingPlan) -> None:
    monkeypatch.setattr("meshwright.runtime.job.machine.num_cores", lambda: 1)
    with pytest.raises(RuntimeMismatchError, match="2 ranks on the CPU of each node; this machine has 1 cores"):
        launch(two_ranks, Job(plan="plan.json"))


def test_ranks_that_were_measured_sharing_cores_may_share_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_ranks: TrainingPlan
) -> None:
    """The estimate of a plan from a profile of so many ranks holds for them."""
    machine = Machine(device="x", num_devices=2, host_memory_bytes=1, backend="gloo", torch="2.13.0", python="3.11")
    profile = Profile(
        machine=machine,
        created="2026-01-01",
        duration_s=1.0,
        memory_bandwidth_bytes_per_s=1e10,
        device_memory_bytes=10**9,
    )
    monkeypatch.setattr("meshwright.runtime.job.machine.num_cores", lambda: 1)
    plan = two_ranks.replace(cluster=two_ranks.cluster.replace(profile=profile))
    text = "import os, pathlib; pathlib.Path(f'{os.environ[\"RANK\"]}.ran').touch()"
    monkeypatch.chdir(tmp_path)
    launch(plan, script_job(tmp_path, plan, text))
    assert {path.name for path in tmp_path.glob("*.ran")} == {"0.ran", "1.ran"}


def test_plan_that_needs_more_memory_than_the_host_has_is_refused(two_ranks: TrainingPlan) -> None:
    large = two_ranks.replace(estimate=two_ranks.estimate.replace(peak_allocated_bytes=10**15))
    with pytest.raises(RuntimeMismatchError, match=r"the plan's 2 ranks need 1819\.\d TiB; this machine has"):
        launch(large, Job(plan="plan.json"))


@pytest.mark.parametrize("nnodes", [1, 3])
def test_plan_for_other_nodes_is_refused(nnodes: int) -> None:
    with pytest.raises(RuntimeMismatchError, match=f"2 ranks on 2 nodes; this job has {nnodes} nodes"):
        launch(
            plan_elsewhere(num_nodes=2),
            Job(plan="plan.json"),
            rendezvous=Rendezvous(nnodes=nnodes, endpoint="localhost:29400"),
        )


@pytest.mark.parametrize(("found", "message"), [(0, "has no GPU that torch can use"), (1, "this machine has 1 GPUs")])
def test_plan_for_gpus_is_refused_without_them(monkeypatch: pytest.MonkeyPatch, found: int, message: str) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: found)
    with pytest.raises(RuntimeMismatchError, match=message) as caught:
        launch(plan_elsewhere(device="H100-SXM-80GB"), Job(plan="plan.json"))
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("planned", "found", "same"),
    [
        ("H100-SXM-80GB", "NVIDIA H100 80GB HBM3", True),
        ("H100-SXM-80GB", "NVIDIA H100 PCIe", False),
        ("H100-PCIe-80GB", "NVIDIA H100 PCIe", True),
        ("H100-SXM-80GB", "NVIDIA H200", False),
        ("A10-24GB", "NVIDIA A100-SXM4-80GB", False),
        ("A100-PCIe-40GB", "NVIDIA A100-PCIE-40GB", True),
        ("RTX4090-24GB", "NVIDIA GeForce RTX 4090", True),
        ("L40S-48GB", "NVIDIA L40S", True),
        ("MI300X-192GB", "AMD Instinct MI300X", True),
        ("NVIDIA H200", "NVIDIA H200", True),
    ],
)
def test_gpu_names_of_plans_and_of_torch(planned: str, found: str, same: bool) -> None:
    assert is_same_chip(planned, found) is same


@pytest.mark.parametrize(
    ("deaths", "message"),
    [
        ((death(0, 1, LOST), death(1, -9)), "rank 1 of 4 was killed by signal 9"),
        ((death(0, 1, LOST), death(1, 1, "KeyError: 'x'", time_s=1.0)), "rank 1 of 4 failed: KeyError: 'x'"),
        ((death(0, 1, RESET), death(1, -9)), "rank 1 of 4 was killed by signal 9"),
        ((death(0, 1, RESET),), "rank 0 of 4 lost the connection"),
        ((death(0, -15, by_launcher=True), death(3, 1, "ValueError: v")), "rank 3 of 4 failed: ValueError: v"),
        ((death(0, 1, TIMED_OUT), death(2, -9, by_launcher=True)), "rank 2 of 4 stopped answering"),
        ((death(0, 1, "OSError: disk"), death(2, -9, by_launcher=True)), "rank 0 of 4 failed: OSError: disk"),
        ((death(0, -6), death(1, 1, "TypeError: t", time_s=1.0)), "rank 1 of 4 failed: TypeError: t"),
        ((death(1, 1, LOST, time_s=2.0), death(0, 1, LOST, time_s=1.0)), "rank 0 of 4 lost the connection"),
        ((death(1, 1, "IndexError: 2", time_s=2.0), death(0, 1, "IndexError: 1", time_s=1.0)), "rank 0 of 4 failed"),
        ((death(2, -15),), "rank 2 of 4 was killed by signal 15"),
    ],
)
def test_rank_at_fault(deaths: tuple[RankDeath, ...], message: str) -> None:
    assert explain_failure(deaths, world_size=4).message.startswith(message)


def test_rank_that_left_early_is_mentioned_where_others_lost_it() -> None:
    error = explain_failure([death(0, 1, LOST)], world_size=2, ended_well=[1])
    assert error.details == ("rank 1 had already ended, without an error",)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nnodes": 2}, "need a place to meet"),
        ({"nnodes": 2, "endpoint": "host"}, "is not HOST:PORT"),
        ({"nnodes": 2, "endpoint": "host:1", "node_rank": 2}, r"not in 0\.\.1"),
    ],
)
def test_rendezvous_that_cannot_work_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rendezvous(**settings)  # type: ignore[arg-type]


def test_nodes_that_do_not_come_are_waited_for_no_longer_than_said() -> None:
    plan = plan_elsewhere(num_nodes=2)
    rendezvous = Rendezvous(
        nnodes=2, endpoint="localhost:29431", run_id="alone", timeout_s=2, secret=b"of a test, as long"
    )
    with pytest.raises(MeshwrightError, match="2 nodes of the job did not meet at localhost:29431"):
        launch(plan, Job(plan="plan.json"), rendezvous=rendezvous)
