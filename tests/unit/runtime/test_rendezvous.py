"""Where nodes meet: the meeting itself, what Slurm says, and which address a node has for the others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue

import psutil
import pytest
from meshwright.profilers.machine import first_host, interface_of
from meshwright.runtime.job.rendezvous import (
    Meeting,
    Rendezvous,
    is_endpoint_local,
    local_address,
    meet,
    slurm_rendezvous,
)
from meshwright.schema import ConfigError
from meshwright.schema.errors import NodesNotMetError

SECRET = b"of the job of a test"
STEP = {
    "SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "2", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1", "MESHWRIGHT_SECRET": "of the job of a test",
}  # fmt: skip


def test_task_of_a_step_knows_where_the_others_are() -> None:
    expected = Rendezvous(nnodes=2, node_rank=1, endpoint="gpu07:23456", run_id="123456.2", secret=SECRET)
    assert slurm_rendezvous(STEP) == expected


@pytest.mark.parametrize("lacking", ["SLURM_STEP_ID", "SLURM_STEP_NUM_NODES"])
def test_outside_srun_a_job_has_one_node(lacking: str) -> None:
    assert slurm_rendezvous({name: value for name, value in STEP.items() if name != lacking}) is None


def test_step_on_one_node_needs_no_meeting() -> None:
    assert slurm_rendezvous({**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_several_tasks_on_a_node_are_refused() -> None:
    with pytest.raises(ConfigError, match="16 tasks on 2 nodes"):
        slurm_rendezvous({**STEP, "SLURM_STEP_NUM_TASKS": "16"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("login", "login"),
        ("gpu[003-007,12],login", "gpu003"),
        ("a1,gpu[003-007]", "a1"),
        ("rack[2-3]node[01,05]", "rack2node01"),
        ("gpu[5,7-9]-ib", "gpu5-ib"),
    ],
)
def test_first_of_a_list_of_nodes(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_loopback_is_no_address_for_others() -> None:
    assert local_address("127.0.0.1:29400") is None
    assert is_endpoint_local("127.0.0.1:29400") is None
    assert interface_of("127.0.0.1") is not None


@pytest.mark.parametrize("endpoint", ["no.such.host.invalid:1", "", "host:", "[::1]:29400"])
def test_endpoint_without_an_answer(endpoint: str) -> None:
    assert local_address(endpoint) is None


def test_interface_of_nobody() -> None:
    assert interface_of("192.0.2.77") is None


@pytest.fixture
def endpoint_here() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def meeting_of(rendezvous: Rendezvous) -> tuple[int, str]:
    with meet(rendezvous) as meeting:
        return meeting.node_rank, meeting.variables["MASTER_PORT"]


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0), (None, None)])
def test_nodes_meet_in_the_order_of_their_numbers_or_of_their_arrival(endpoint_here: str, ranks: tuple) -> None:
    """They meet at one store, which stays until both have left; the port is free again afterwards."""
    nodes = [
        Rendezvous(nnodes=2, node_rank=rank, endpoint=endpoint_here, timeout_s=30, secret=SECRET) for rank in ranks
    ]
    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            meetings = list(pool.map(meeting_of, nodes))
        assert sorted(node_rank for node_rank, _ in meetings) == [0, 1]
        assert ranks == (None, None) or [rank for rank, _ in meetings] == list(ranks)


def test_node_too_many_is_refused(endpoint_here: str) -> None:
    node = Rendezvous(nnodes=2, endpoint=endpoint_here, timeout_s=30, secret=SECRET)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(meeting_of, node)
        late = replace(node, timeout_s=2)  # a node that was gone might be back within ten seconds
        with meet(node), pytest.raises(NodesNotMetError, match="did not meet") as caught, meet(late):
            pass
        other.result()
    assert "--rdzv-id" in caught.value.details[0]


RANK = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo", rank=int(sys.argv[1]), world_size=2)
dist.all_reduce(torch.ones(1))
print("met", flush=True)
sys.stdin.read()
"""


def test_a_job_of_one_node_listens_on_the_loopback_alone() -> None:
    with meet(Rendezvous()) as meeting:
        environment = {**os.environ, **meeting.variables}
        command = (sys.executable, "-c", RANK)
        ranks = [
            subprocess.Popen([*command, str(rank)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for rank in range(2)
        ]
        try:
            assert all(rank.stdout is not None and rank.stdout.readline() == b"met\n" for rank in ranks)
            processes = [psutil.Process(), *(psutil.Process(rank.pid) for rank in ranks)]
            listening = [
                {c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
                for process in processes
            ]
        finally:
            for rank in ranks:
                rank.communicate()
    assert listening[0] == {"127.0.0.1"}
    assert set().union(*listening) == {"127.0.0.1"}


def other_address() -> str | None:
    """An address of this machine besides the loopback's."""
    entries = [entry for each in psutil.net_if_addrs().values() for entry in each if entry.family == socket.AF_INET]
    return next((entry.address for entry in entries if not entry.address.startswith("127.")), None)


@pytest.mark.skipif(other_address() is None, reason="the machine has its loopback only")
@pytest.mark.parametrize("nnodes", [1, 2])
def test_from_another_address_nobody_reaches_the_store(nnodes: int, endpoint_here: str) -> None:
    """Nothing of the job is open at an address that was not named; its store is on the loopback."""
    node = Rendezvous(nnodes=2, endpoint=f"127.0.0.1:{endpoint_here.rpartition(':')[2]}", timeout_s=30, secret=SECRET)
    with nodes_that_met(node if nnodes == 2 else Rendezvous(), nnodes) as meeting:
        ports = {int(meeting.variables["MASTER_PORT"])} | (
            {int(endpoint_here.rpartition(":")[2])} if nnodes == 2 else set()
        )
        for port in ports:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((str(other_address()), port), timeout=2).close()


STRANGER = """
import socket, sys
from datetime import timedelta
import torch.distributed as dist
from meshwright.runtime.job.gate import WrongSecretError, knock
host, port = sys.argv[1].split(":")
said = b""
with socket.create_connection((host, int(port)), timeout=10) as connection:
    connection.sendall(b"\\x00" * 64)  # what the gate reads of a proof
    while part := connection.recv(4096):
        said += part
print("bytes", len(said))
try:
    knock(host, int(port), b"another secret, as long", 10)
except WrongSecretError:
    print("refused")
try:
    store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))
    store.set("key", "theirs")
    print(store.list_keys())
except dist.DistError:
    print("no store")
"""


def namespace(*words: str) -> bool:
    try:
        return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture
def from_outside() -> Iterator[tuple[str, ...]]:
    """What runs a command in a network namespace that a cable joins to this machine, which is 10.77.9.1 there."""
    name, near, far = (f"mw{os.getpid()}{part}" for part in "nvw")
    steps = (
        ("netns", "add", name), ("link", "add", near, "type", "veth", "peer", "name", far, "netns", name),
        ("addr", "add", "10.77.9.1/24", "dev", near), ("link", "set", near, "up"),
        ("-n", name, "addr", "add", "10.77.9.2/24", "dev", far), ("-n", name, "link", "set", far, "up"),
    )  # fmt: skip
    try:
        if not all(namespace(*words) for words in steps):
            pytest.skip("network namespaces may not be made here: that needs root")
        yield "ip", "netns", "exec", name
    finally:
        namespace("netns", "del", name)
        namespace("link", "del", near)


def test_who_does_not_know_the_secret_lists_and_writes_nothing(from_outside: tuple[str, ...]) -> None:
    """An attacker in another namespace reaches the gate: it tells 32 random bytes, and nothing comes through to the store."""
    place = f"10.77.9.1:{20_000 + os.getpid() % 10_000}"
    node = Rendezvous(nnodes=2, endpoint=place, timeout_s=30, secret=SECRET)
    with nodes_that_met(node, 2) as meeting:
        meeting.store.set("key", "ours")
        before = keys_of(meeting)
        stranger = subprocess.run(
            [*from_outside, sys.executable, "-c", STRANGER, place],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert stranger.stdout.split("\n")[:3] == ["bytes 32", "refused", "no store"]
        assert meeting.store.get("key") == b"ours"
        assert "key" in before
        assert keys_of(meeting) == before


def keys_of(meeting: Meeting) -> list[str]:
    """All keys, as a rank lists them; in this process the call would hold the interpreter, and with it the door."""
    listing = (
        "import os, torch.distributed as dist\n"
        "place = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])\n"
        "print(*sorted(dist.TCPStore(*place, is_master=False, wait_for_workers=False).list_keys()), sep='\\n')"
    )
    environment = {**os.environ, **meeting.variables}
    command = [sys.executable, "-c", listing]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()


@contextmanager
def nodes_that_met(rendezvous: Rendezvous, count: int) -> Iterator[Meeting]:
    """The meeting of one of several nodes, all in threads of this process, while all are there."""
    checked = threading.Event()
    meetings: SimpleQueue[Meeting] = SimpleQueue()

    def meet_and_wait() -> None:
        with meet(rendezvous) as meeting:
            meetings.put(meeting)
            checked.wait(60)

    with ThreadPoolExecutor(count) as pool:
        done = [pool.submit(meet_and_wait) for _ in range(count)]
        try:
            yield meetings.get(timeout=30)
        finally:
            checked.set()
        for future in done:
            future.result(30)


def test_nodes_with_other_secrets_do_not_meet(endpoint_here: str) -> None:
    first = Rendezvous(nnodes=2, endpoint=endpoint_here, timeout_s=3, secret=SECRET)
    with ThreadPoolExecutor(1) as pool:
        alone = pool.submit(meeting_of, first)
        end = time.monotonic() + 20
        while not is_open(endpoint_here) and time.monotonic() < end:
            time.sleep(0.01)
        with pytest.raises(NodesNotMetError, match="does not know this job's secret"):
            meeting_of(replace(first, secret=b"of another job, as long"))
        with pytest.raises(NodesNotMetError, match="1 of 2 nodes"):
            alone.result(30)


def is_open(endpoint: str) -> bool:
    host, port = endpoint.split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


@pytest.mark.parametrize("variables", [{}, {"MESHWRIGHT_SECRET": "short"}])
def test_several_nodes_need_a_secret(variables: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        slurm_rendezvous({**STEP, "MESHWRIGHT_SECRET": "", **variables})
    assert "export MESHWRIGHT_SECRET=" in str(caught.value.help)
