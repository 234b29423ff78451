"""The meeting of a job's nodes: where it is, which node is which, and the store through which all ranks find each other.

A job of one node has a store of its own, and its ranks meet, on the loopback alone. Of several nodes one holds the store, on its
loopback as well, and a gate at the endpoint that lets those through who know the job's secret (gate.py); every node counts itself
in and waits until all are there. The ranks use the same store, so that it stays until the last node is done. A node that the job
goes on without (supervision/) is not waited for, and may come back.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from ...profilers.machine import first_host, interface_of, slurm_number
from ...schema import ConfigError
from ...schema.errors import InterruptedRunError, NodesNotMetError
from .gate import (
    MIN_SECRET,
    SECRET_VARIABLE,
    Relay,
    WrongSecretError,
    knock,
    open_door,
    open_gate,
    raise_descriptor_limit,
    secret_of,
)

_FIRST_PORT, _NUM_PORTS = 20_000, 10_000
"""Below what Linux gives to outgoing connections (net.ipv4.ip_local_port_range); two jobs on a node have different numbers."""

_GIVE_PLACE = "say where the nodes meet: --nnodes N --node-rank I --rdzv-endpoint HOST:PORT"
_LOOPBACK, _GLOO_INTERFACE = "127.0.0.1", "GLOO_SOCKET_IFNAME"
_TRY_S, _POLL_S = 2.0, 0.1
_LEAVE_S = 300.0
"""How long the node with the store waits for nodes whose ranks are not done when its own are."""
_NOTICED_S = 10.0
"""Within which the others notice that a node is gone: it may be back before."""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the nodes of a job meet; the default is a job of one node.

    Attributes:
        node_rank: position of this node in the plan's cluster.
        endpoint: ``HOST:PORT`` on one of the nodes, the same text on all; on node 0 where a node cannot tell whether it is its own.
        run_id: any text that is the same on all nodes of the job and on no other job at the endpoint.
        timeout_s: how long a node waits for the others.
        secret: what all nodes of the job know and nobody else; several nodes need one.
        store_only: this machine holds the store and is none of the nodes.
    """

    nnodes: int = 1
    node_rank: int | None = None
    endpoint: str | None = None
    run_id: str | None = None
    timeout_s: int = 600
    secret: bytes = field(default=b"", repr=False)
    store_only: bool = False

    def __post_init__(self) -> None:
        if self.nnodes < 1:
            raise ConfigError(f"--nnodes {self.nnodes}: must be at least 1")
        if self.nnodes > 1 and self.endpoint is None:
            raise ConfigError(f"{self.nnodes} nodes need a place to meet", help="add --rdzv-endpoint HOST:PORT")
        if self.store_only and (self.nnodes == 1 or self.node_rank is not None):
            raise ConfigError(
                "--store-only is for a machine that is none of several nodes", help="--nnodes N, no --node-rank"
            )
        if self.endpoint is not None:
            host, _, port = self.endpoint.rpartition(":")
            if not host or not port.isdecimal() or int(port) > 65535:
                raise ConfigError(f"rendezvous endpoint {self.endpoint!r} is not HOST:PORT with a port up to 65535")
        if self.node_rank is not None and not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(f"node rank {self.node_rank} is not in 0..{self.nnodes - 1}")


@dataclass(frozen=True)
class Meeting:
    """The nodes of a job, all present: which one this is, and the store and the variables by which its ranks find the others.

    Attributes:
        is_host: this node holds the store.
        is_return: the job runs already, and goes on without this node.
    """

    node_rank: int
    variables: Mapping[str, str]
    store: dist.Store
    is_host: bool = True
    is_return: bool = False

    def leave_out(self, node: int) -> None:
        """Go on without a node: it is not waited for, and may come back."""
        self.store.set(_absent(node), "1")

    def is_absent(self, node: int) -> bool:
        """Tell whether the job goes on without a node, which has not come back."""
        return self.store.check([_absent(node)])


def _absent(node: int) -> str:
    return f"meshwright/absent/{node}"


@contextmanager
def meet(rendezvous: Rendezvous) -> Iterator[Meeting]:
    """Wait for all nodes of a job; the store stays while inside, and where the body ends well until every node's has.

    Raises:
        ConfigError: several nodes have no secret.
        NodesNotMetError: they did not meet.
    """
    if rendezvous.nnodes == 1:
        store = _loopback_store()
        yield Meeting(0, _variables(_LOOPBACK, store.port) | _socket_interface(_LOOPBACK), store)
        return
    assert rendezvous.endpoint is not None
    if len(rendezvous.secret) < MIN_SECRET:
        raise ConfigError(f"{rendezvous.nnodes} nodes need a secret of at least {MIN_SECRET} letters that they share")
    host, _, port = rendezvous.endpoint.rpartition(":")
    host = host.strip("[]")
    raise_descriptor_limit()
    try:
        store, relay, is_host = _open_store(rendezvous, host, int(port))
    except (dist.DistError, OSError, WrongSecretError) as error:
        raise _not_met(rendezvous, error) from None
    try:
        yield from _among_others(rendezvous, store, relay, is_host=is_host)
    finally:
        del store  # a traceback would hold it
        relay.close()


def _among_others(rendezvous: Rendezvous, store: dist.TCPStore, relay: Relay, *, is_host: bool) -> Iterator[Meeting]:
    """Yield the meeting of several nodes when all are there.

    Raises:
        NodesNotMetError: they are not.
    """
    try:
        shared = dist.PrefixStore(f"meshwright/{rendezvous.run_id or 'meshwright'}", store)
        number = 0 if rendezvous.store_only else shared.add("arrived", 1)
        node_rank = number - 1 if rendezvous.node_rank is None else rendezvous.node_rank
        node_rank = rendezvous.nnodes if rendezvous.store_only else node_rank
        is_return = number > rendezvous.nnodes
        if is_return:
            nodes = range(rendezvous.nnodes) if rendezvous.node_rank is None else (node_rank,)
            node_rank = _taken_place(store, nodes, min(rendezvous.timeout_s, _NOTICED_S))
            shared.delete_key(f"done/{node_rank}")
        _wait_for(partial(_num_awaited, shared, rendezvous.nnodes), rendezvous.nnodes, rendezvous.timeout_s)
    except dist.DistError as error:
        raise _not_met(rendezvous, error) from None
    variables, address = _variables(_LOOPBACK, store.port), local_address(rendezvous.endpoint or "")
    meeting = Meeting(node_rank, variables | _socket_interface(address), store, is_host, is_return)
    try:
        try:
            yield meeting
        except InterruptedRunError:
            # The others need not wait. After a failure nothing is told: the store may be gone, and a client would wait for it.
            with suppress(dist.DistError):
                shared.set(f"done/{node_rank}", "1")
            raise
        with suppress(dist.DistError):  # the other nodes are done, or their failure is their own to tell
            shared.set(f"done/{node_rank}", "1")
            if is_host:
                _wait_for(partial(_num_training, shared, meeting, rendezvous.nnodes), rendezvous.nnodes, _LEAVE_S)
    finally:
        del shared, store, relay, meeting  # a traceback would hold them, and with them the port


def _taken_place(store: dist.TCPStore, nodes: Iterable[int], limit_s: float) -> int:
    """Return the absent node whose place a returning one takes; the others may be about to notice that it is gone.

    Raises:
        DistStoreError: none of them is gone.
    """
    end = time.monotonic() + limit_s
    while True:
        for node in nodes:
            if store.delete_key(_absent(node)):
                return node
        if time.monotonic() > end:
            raise dist.DistStoreError("as many nodes are there already: another job has the same --rdzv-id?")
        time.sleep(_POLL_S)


def _not_met(rendezvous: Rendezvous, error: Exception) -> NodesNotMetError:
    if isinstance(error, WrongSecretError):
        return NodesNotMetError(
            f"what listens at {rendezvous.endpoint} does not know this job's secret",
            help=f"set {SECRET_VARIABLE} to the same text on every node; is another job there?",
        )
    lines = str(error).strip().splitlines() or [""]
    return NodesNotMetError(
        f"the {rendezvous.nnodes} nodes of the job did not meet at {rendezvous.endpoint}",
        details=(f"{type(error).__name__}: {lines[0]}",),
        help="start the same command on every node, with the same --rdzv-endpoint and --rdzv-id; is the port open?",
    )


def _loopback_store() -> dist.TCPStore:
    """Return a store at a free port that only this machine reaches; by itself torch listens on every interface."""
    listener = socket.create_server((_LOOPBACK, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(_LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _listener(host: str, port: int) -> socket.socket:
    """Return a socket that only those reach who reach the address of a host.

    A name that is another machine's, or this one's loopback by a line in /etc/hosts, says nothing about where the others come from:
    then every interface is listened on.

    Raises:
        OSError: the port is taken.
    """
    for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[:1]:
        is_loopback = ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
        if is_loopback and not _is_literal(host):
            break
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRNOTAVAIL:
                break
            raise
        listener.listen(socket.SOMAXCONN)
        return listener
    is_dual = socket.has_dualstack_ipv6()
    return socket.create_server(
        ("", port), family=socket.AF_INET6 if is_dual else socket.AF_INET, dualstack_ipv6=is_dual
    )


def _is_literal(host: str) -> bool:
    """Tell whether a host is written as an address, or is the name of every machine's loopback."""
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return host == "localhost"


def _socket_interface(address: str | None) -> dict[str, str]:
    """Return by which interface gloo's ranks meet: that of an address. By itself it takes that of the machine's name."""
    interface = interface_of(address) if address and _GLOO_INTERFACE not in os.environ else None
    return {_GLOO_INTERFACE: interface} if interface else {}


def _variables(host: str, port: int) -> dict[str, str]:
    """Return what torch's ``env://`` reads, with the words that tell it that the store is there already."""
    place = {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    return {**place, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}


def _open_store(rendezvous: Rendezvous, host: str, port: int) -> tuple[dist.TCPStore, Relay, bool]:
    """Return the store of the job, this node's gate or door to it, and whether this process holds it."""
    is_host = is_endpoint_local(rendezvous.endpoint or "")
    if is_host is None and rendezvous.node_rank is not None:
        is_host = rendezvous.node_rank == 0
    if rendezvous.store_only:
        listener = _listener(host, port)
        store = _loopback_store()
        return store, open_gate(listener, store.port, rendezvous.secret), True
    end, wait = time.monotonic() + rendezvous.timeout_s, timedelta(seconds=min(_TRY_S, rendezvous.timeout_s))
    while True:
        if is_host is not False:
            with suppress(OSError):  # another launcher of this machine has taken the port
                listener = _listener(host, port)
                store = _loopback_store()
                return store, open_gate(listener, store.port, rendezvous.secret), True
        try:
            knock(host, port, rendezvous.secret, _TRY_S)
            door = open_door(host, port, rendezvous.secret)
            store = dist.TCPStore(_LOOPBACK, door.port, is_master=False, timeout=wait, wait_for_workers=False)
            return store, door, False
        except (dist.DistError, OSError):
            if time.monotonic() > end:
                raise
        time.sleep(_POLL_S)  # in Python, so that a signal is noticed


def _num_awaited(store: dist.Store, nnodes: int) -> int:
    return max(nnodes - store.add("arrived", 0), 0)


def _num_training(store: dist.Store, meeting: Meeting, nnodes: int) -> int:
    return sum(not (store.check([f"done/{node}"]) or meeting.is_absent(node)) for node in range(nnodes))


def _wait_for(missing: Callable[[], int], count: int, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while lacking := missing():
        if time.monotonic() > end:
            raise dist.DistStoreError(f"{count - lacking} of {count} nodes after {timeout_s:g} s")
        time.sleep(_POLL_S)


# --- the network -----------------------------------------------------------------------------------------------------


def local_address(endpoint: str) -> str | None:
    """Return the address from which this node reaches ``HOST:PORT``; None where that is inside the machine, or is not known.

    The default is the node's name, which other nodes may not know, or know as another machine's. Nothing is sent: a datagram socket
    only asks the kernel for the way.
    """
    host, _, port = endpoint.rpartition(":")
    with suppress(OSError, ValueError):
        family, kind, protocol, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            address = str(probe.getsockname()[0])
        return None if ipaddress.ip_address(address.partition("%")[0]).is_loopback else address
    return None


def is_endpoint_local(endpoint: str) -> bool | None:
    """Tell whether ``HOST:PORT`` is on this node; None where that is not known, or where the node's name stands for it.

    In the last case several launchers may run on the machine, of which the first one to come takes the port.
    """

    def addresses(host: str) -> set[str]:
        with suppress(OSError):
            return {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
        return set()

    address = local_address(endpoint)
    if address is None:
        return None
    if address not in addresses(endpoint.rpartition(":")[0].strip("[]")):
        return False
    return None if address in addresses(socket.gethostname()) else True


# --- Slurm -----------------------------------------------------------------------------------------------------------


def slurm_rendezvous(variables: Mapping[str, str]) -> Rendezvous | None:
    """Return the meeting place of the nodes of a Slurm step, from its environment; None outside `srun` and on one node.

    Source: man srun, "Output environment variables" (Slurm 20.02 and later have these names).

    Raises:
        ConfigError: the step has several tasks on a node, or a variable of it is missing or no number.
    """
    if "SLURM_STEP_NUM_NODES" not in variables or "SLURM_STEP_ID" not in variables:
        return None
    num_nodes, num_tasks = (
        slurm_number(variables, f"SLURM_STEP_NUM_{what}", advice=_GIVE_PLACE) for what in ("NODES", "TASKS")
    )
    if num_tasks != num_nodes:
        raise ConfigError(
            f"srun started {num_tasks} tasks on {num_nodes} nodes; `meshwright apply` starts the ranks of a node itself",
            help="srun --ntasks-per-node=1 meshwright apply ...",
        )
    if num_nodes == 1:
        return None
    job = slurm_number(variables, "SLURM_JOB_ID", advice=_GIVE_PLACE)
    host = first_host(variables.get("SLURM_STEP_NODELIST", ""))
    if not host:
        raise ConfigError("SLURM_STEP_NODELIST names no node", help=_GIVE_PLACE)
    return Rendezvous(
        nnodes=num_nodes,
        node_rank=slurm_number(variables, "SLURM_NODEID", advice=_GIVE_PLACE),
        endpoint=f"{host}:{_FIRST_PORT + job % _NUM_PORTS}",
        run_id=f"{job}.{variables['SLURM_STEP_ID']}",
        secret=secret_of(variables),
    )
