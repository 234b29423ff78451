"""Where nodes meet: the meeting itself, what Slurm says, and which address a node has for the others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import psutil
import pytest
import torch.distributed as dist
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

STEP = {
    "SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "2", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1",
}  # fmt: skip


def test_task_of_a_step_knows_where_the_others_are() -> None:
    expected = Rendezvous(nnodes=2, node_rank=1, endpoint="gpu07:23456", run_id="123456.2")
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
    nodes = [Rendezvous(nnodes=2, node_rank=rank, endpoint=endpoint_here, timeout_s=30) for rank in ranks]
    port = endpoint_here.rpartition(":")[2]
    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            meetings = list(pool.map(meeting_of, nodes))
        assert sorted(meetings) == [(0, port), (1, port)]
        assert ranks == (None, None) or [rank for rank, _ in meetings] == list(ranks)


def test_node_too_many_is_refused(endpoint_here: str) -> None:
    node = Rendezvous(nnodes=2, endpoint=endpoint_here, timeout_s=30)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(meeting_of, node)
        with meet(node), pytest.raises(NodesNotMetError, match="did not meet") as caught, meet(node):
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
    """Keys can be read and written at the address that was named, and the port is closed at every other one."""
    named, checked = "127.0.0.1", threading.Event()
    node = Rendezvous(nnodes=2, endpoint=f"{named}:{endpoint_here.rpartition(':')[2]}", timeout_s=30)
    meetings: SimpleQueue[Meeting] = SimpleQueue()

    def meet_and_wait() -> None:
        with meet(node if nnodes == 2 else Rendezvous()) as meeting:
            meetings.put(meeting)
            checked.wait(30)

    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(meet_and_wait) for _ in range(nnodes)]
        meeting = meetings.get(timeout=30)
        port = int(meeting.variables["MASTER_PORT"])
        dist.TCPStore(named, port, is_master=False, wait_for_workers=False).set("key", "theirs")
        assert meeting.store.check(["key"])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((str(other_address()), port), timeout=2).close()
        checked.set()
        for future in done:
            future.result(30)
