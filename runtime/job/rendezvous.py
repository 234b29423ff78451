"""Which of its addresses and interfaces a node shows to the others of a job.

Where the nodes of a job under Slurm meet, from what `srun` tells each of its tasks.

`meshwright apply` starts the ranks of a node itself, so `srun` starts one task on each node:

    srun --ntasks-per-node=1 meshwright apply plan.json

Source: man srun, "Output environment variables" (Slurm 20.02 and later have these names).
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil

from ...schema import ConfigError
from ...schema.base import shown


def local_address(endpoint: str) -> str | None:
    """The address from which this node reaches ``HOST:PORT``; None where that is inside the machine, or is not known.

    Ranks are told to meet at an address. The default is the node's name, which other nodes may not know, or know as another
    machine's. Nothing is sent: a datagram socket only asks the kernel for the way.
    """
    host, _, port = endpoint.rpartition(":")
    with suppress(OSError, ValueError):
        family, kind, protocol, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as asked:
            asked.connect(target)
            address = str(asked.getsockname()[0])
        return None if ipaddress.ip_address(address.partition("%")[0]).is_loopback else address
    return None


def is_endpoint_local(endpoint: str) -> bool | None:
    """Whether ``HOST:PORT`` is on this node; None where that is not known, or where the node's name stands for it.

    In the last case several launchers may run on the machine, of which the first one to come takes the port.
    """
    own = local_address(endpoint)
    if own is None:
        return None
    if own not in _addresses(endpoint.rpartition(":")[0].strip("[]")):
        return False
    return None if own in _addresses(socket.gethostname()) else True


def _addresses(host: str) -> set[str]:
    with suppress(OSError):
        return {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    return set()


def interface_of(address: str) -> str | None:
    """Name of the interface that has an address."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address.partition("%")[0] for entry in entries):
            return name
    return None


_FIRST_PORT, _NUM_PORTS = 20_000, 10_000
"""Below what Linux gives to outgoing connections (net.ipv4.ip_local_port_range); two jobs on a node have different numbers."""


_GIVE_PLACE = "say where the nodes meet: --nnodes N --node-rank I --rdzv-endpoint HOST:PORT"


def slurm_rendezvous(variables: Mapping[str, str]) -> Rendezvous | None:
    """The meeting place of the nodes of a step; None outside `srun` and on one node.

    Args:
        variables: the environment.

    Raises:
        ConfigError: the step has several tasks on a node, or a variable of it is missing or no number.
    """
    if "SLURM_STEP_NUM_NODES" not in variables or "SLURM_STEP_ID" not in variables:
        return None
    num_nodes, num_tasks = (_number(variables, f"SLURM_STEP_NUM_{what}") for what in ("NODES", "TASKS"))
    if num_tasks != num_nodes:
        raise ConfigError(
            f"srun started {num_tasks} tasks on {num_nodes} nodes; `meshwright apply` starts the ranks of a node itself",
            help="srun --ntasks-per-node=1 meshwright apply ...",
        )
    if num_nodes == 1:
        return None
    job = _number(variables, "SLURM_JOB_ID")
    host = first_host(variables.get("SLURM_STEP_NODELIST", ""))
    if not host:
        raise ConfigError("SLURM_STEP_NODELIST names no node", help=_GIVE_PLACE)
    return Rendezvous(
        nnodes=num_nodes,
        node_rank=_number(variables, "SLURM_NODEID"),
        endpoint=f"{host}:{_FIRST_PORT + job % _NUM_PORTS}",
        run_id=f"{job}.{variables['SLURM_STEP_ID']}",
    )


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name, "")
    if not re.fullmatch("[0-9]{1,18}", text):
        raise ConfigError(f"{name} = {shown(text)} in a step of Slurm's: must be a whole number", help=_GIVE_PLACE)
    return int(text)


def first_host(nodes: str) -> str:
    """The first of the names that a list of Slurm's stands for: ``gpu[003-007,12],login`` begins with gpu003."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the nodes of a job meet; the default is a job of one node.

    Attributes:
        node_rank: position of this node in the plan's cluster; the endpoint must then be on node 0.
        endpoint: ``HOST:PORT`` on one of the nodes, the same text on all.
        run_id: any text that is the same on all nodes of the job and on no other job at the endpoint.
        timeout_s: how long a node waits for the others.
    """

    nnodes: int = 1
    node_rank: int | None = None
    endpoint: str | None = None
    run_id: str | None = None
    timeout_s: int = 600

    def __post_init__(self) -> None:
        if self.nnodes < 1:
            raise ConfigError(f"--nnodes {self.nnodes}: must be at least 1")
        if self.nnodes > 1 and self.endpoint is None:
            raise ConfigError(f"{self.nnodes} nodes need a place to meet", help="add --rdzv-endpoint HOST:PORT")
        if self.endpoint is not None:
            host, _, port = self.endpoint.rpartition(":")
            if not host or not port.isdecimal() or int(port) > 65535:
                raise ConfigError(f"rendezvous endpoint {self.endpoint!r} is not HOST:PORT with a port up to 65535")
        if self.node_rank is not None and not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(f"node rank {self.node_rank} is not in 0..{self.nnodes - 1}")
