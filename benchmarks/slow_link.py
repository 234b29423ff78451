"""A slow link between two network namespaces of this machine, as root, on Linux.

Each end has a kernel's token bucket (tc tbf), and packets wait in a relay between two TUN devices, which needs no netem. The relay
goes before all other work of the machine (SCHED_FIFO), and the ranks have most of the cores (nice -20, of their session where the
kernel groups processes by it): what is measured is meant to be that of a machine of its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

PACKET, PAYLOAD = 1500, 1448
"""Bytes of a packet, and those without the headers of IPv4 and TCP with timestamps."""

Ends = list[tuple[str, str]]
"""Network namespaces, and the device of the link in each."""


def commands(ends: Ends) -> list[list[str]]:
    """Return what precedes a command on each end."""
    return [["ip", "netns", "exec", namespace] for namespace, _ in ends]


def put_first(launcher: subprocess.Popen[str]) -> None:
    """Let the rank of a launcher have most of a core, once it has started."""
    while launcher.poll() is None:
        for rank in psutil.Process(launcher.pid).children(recursive=True):
            if os.getsid(rank.pid) == rank.pid:
                os.setpriority(os.PRIO_PROCESS, rank.pid, -20)
                Path(f"/proc/{rank.pid}/autogroup").write_text("-20")
                return
        time.sleep(0.02)


def sent_by(namespace: str, device: str) -> tuple[int, int]:
    """Return the bytes and packets that an end has sent."""
    shown = subprocess.run(
        ["ip", "-n", namespace, "-s", "-j", "link", "show", device], capture_output=True, check=True, text=True
    )
    counted = json.loads(shown.stdout)[0]["stats64"]["tx"]
    return counted["bytes"], counted["packets"]


@contextmanager
def slow_link(rate_mbit: float, round_trip_ms: float) -> Iterator[Ends]:
    """Yield two network namespaces with a link between them."""
    names = (f"mw{os.getpid()}a", f"mw{os.getpid()}b")
    devices = (f"mw{os.getpid()}t0", f"mw{os.getpid()}t1")
    ends, over = [], threading.Event()

    def ip(*words: str) -> None:
        subprocess.run(words, check=True)

    try:
        for i, (name, device) in enumerate(zip(names, devices, strict=True)):
            ip("ip", "netns", "add", name)
            ends.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
            fcntl.ioctl(
                ends[-1], 0x400454CA, struct.pack("16sH", device.encode(), 0x0001 | 0x1000)
            )  # TUNSETIFF, IFF_TUN, NO_PI
            ip("ip", "link", "set", device, "netns", name)
            ip("ip", "-n", name, "addr", "add", f"10.77.9.{i + 1}/24", "dev", device)
            ip("ip", "-n", name, "link", "set", "lo", "up")
            ip("ip", "-n", name, "link", "set", device, "up")
            ip("tc", "-n", name, "qdisc", "add", "dev", device, *bucket(rate_mbit))
        relay = threading.Thread(target=_relay, args=(ends, round_trip_ms / 2e3, over))
        relay.start()
        try:
            yield list(zip(names, devices, strict=True))
        finally:
            over.set()
            relay.join()
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)
        for end in ends:
            os.close(end)


def bucket(rate_mbit: float) -> tuple[str, ...]:
    """Return the words of tc for a rate."""
    return "root", "tbf", "rate", f"{rate_mbit}mbit", "burst", "16kb", "latency", "400ms"


def _relay(ends: list[int], one_way_s: float, over: threading.Event) -> None:
    """Hand every packet of an end to the other one after a time, whatever else the machine does."""
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(2))  # of this thread
    waiting: deque[tuple[float, int, bytes]] = deque()
    while not over.is_set():
        next_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.05
        for end in select.select(ends, [], [], next_s)[0]:
            packet = os.read(end, 65536)
            waiting.append((time.monotonic() + one_way_s, ends[1 - ends.index(end)], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, other, packet = waiting.popleft()
            os.write(other, packet)
