"""Which of its addresses and interfaces a node shows to the others of a job."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

import psutil


def own_address(endpoint: str) -> str | None:
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


def holds_endpoint(endpoint: str) -> bool | None:
    """Whether ``HOST:PORT`` is on this node; None where that is not known, or where the node's name stands for it.

    In the last case several launchers may run on the machine, of which the first one to come takes the port.
    """
    own = own_address(endpoint)
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
