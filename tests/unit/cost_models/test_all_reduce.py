"""All-reduces between machines: the algorithms carried out message by message, their closed forms, and which is quickest."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshwright.cost_models.hardware.all_reduce import (
    ALGORITHMS,
    Network,
    exchange_s,
    ring_s,
    seconds_by_algorithm,
    star_s,
    tensor_parallel_all_reduce_s,
)
from meshwright.cost_models.hardware.collectives import collective_s
from meshwright.schema import ClusterSpec

EDGE = ClusterSpec.parse(str(Path(__file__).parents[3] / "docs" / "examples" / "edge-devices.toml"))
NET = Network(latency_s=4e-3, bytes_per_s=37.5e6)
SIZES = st.floats(1.0, 1e8)


class Machines:
    """n machines with a part of a sum each; messages take a latency, and wait for both ends' links."""

    def __init__(self, n: int, network: Network, parts: int) -> None:
        self.data = np.arange(1.0, n * parts + 1).reshape(n, parts) ** 2
        self.total = self.data.sum(axis=0)
        self.network, self.ready = network, np.zeros((n, parts))
        self.sends, self.receives = np.zeros(n), np.zeros(n)

    def send(self, messages: list[tuple[int, int, slice]], size: float, *, adds: bool) -> None:
        """Send parts of what machines have now, all at once; each has ``size`` bytes."""
        payloads = [(self.data[a, part].copy(), self.ready[a, part].max()) for a, _, part in messages]
        for (a, b, part), (payload, ready_s) in zip(messages, payloads, strict=True):
            wire_s = size / self.network.bytes_per_s
            start = max(ready_s, self.sends[a], self.receives[b] - self.network.latency_s)
            self.sends[a] = start + wire_s
            self.receives[b] = start + wire_s + self.network.latency_s
            self.data[b, part] = self.data[b, part] + payload if adds else payload
            self.ready[b, part] = np.maximum(self.ready[b, part], self.receives[b])

    def done(self) -> float:
        """Return when all have the sum."""
        assert np.allclose(self.data, self.total)
        return float(self.ready.max())


def by_ring(n: int, size: float) -> float:
    machines = Machines(n, NET, n)
    for adds in (True, False):
        for step in range(n - 1):
            machines.send([
                (a, (a + 1) % n, slice(part, part + 1))
                for a in range(n)
                for part in [(a - step + (0 if adds else 1)) % n]
            ], size / n, adds=adds)  # fmt: skip
    return machines.done()


def by_star(n: int, size: float) -> float:
    machines, everything = Machines(n, NET, 1), slice(0, 1)
    machines.send([(a, 0, everything) for a in range(1, n)], size, adds=True)
    machines.send([(0, a, everything) for a in range(1, n)], size, adds=False)
    return machines.done()


def by_exchange(n: int, size: float) -> float:
    machines, everything, inner = Machines(n, NET, 1), slice(0, 1), 2 ** (n.bit_length() - 1)
    if n > inner:
        machines.send([(a, a - inner, everything) for a in range(inner, n)], size, adds=True)
    for bit in range(inner.bit_length() - 1):
        machines.send([(a, a ^ 2**bit, everything) for a in range(inner)], size, adds=True)
    if n > inner:
        machines.send([(a - inner, a, everything) for a in range(inner, n)], size, adds=False)
    return machines.done()


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 8, 16])
@pytest.mark.parametrize("size", [1.0, 32768.0, 1e7])
def test_closed_forms_are_what_messages_take(n: int, size: float) -> None:
    """Message by message, with links that carry one at a time: every machine ends with the sum, after so many seconds."""
    sizes = np.array([size])
    assert by_ring(n, size) == pytest.approx(ring_s(sizes, n, NET)[0], rel=1e-9)
    assert by_star(n, size) == pytest.approx(star_s(sizes, n, NET)[0], rel=1e-9)
    formula, actual = exchange_s(sizes, n, NET)[0], by_exchange(n, size)
    if n & (n - 1) == 0:
        assert actual == pytest.approx(formula, rel=1e-9)
    else:  # a message of a machine without a partner beyond the power of two does not wait for theirs
        assert formula - (NET.latency_s + size / NET.bytes_per_s) <= actual <= formula * (1 + 1e-9)


def test_one_machine_waits_for_nobody() -> None:
    assert not seconds_by_algorithm(np.array([1.0, 1e6]), 1, NET).any()


@given(size=SIZES, n=st.integers(2, 64), latency=st.floats(0, 1), rate=st.floats(1e3, 1e12), ratio=st.floats(1, 10))
def test_more_bytes_latency_or_machines_are_never_quicker(
    size: float, n: int, latency: float, rate: float, ratio: float
) -> None:
    def best(size: float, n: int, latency: float, rate: float) -> float:
        return float(seconds_by_algorithm(np.array([size]), n, Network(latency, rate)).min())

    now = best(size, n, latency, rate)
    slack = 1 + 1e-9
    assert now <= slack * best(size * ratio, n, latency, rate)
    assert now <= slack * best(size, n, latency * ratio, rate)
    assert now <= slack * best(size, n, latency, rate / ratio)


def test_small_sums_avoid_rings_and_large_ones_take_them() -> None:
    """Eight machines, 300 Mb/s, 4 ms between any two: 4 bytes, a row of Llama-2-70B, 10 MB."""
    chosen = seconds_by_algorithm(np.array([4.0, 32768.0, 1e7]), 8, NET).argmin(axis=0)
    assert [ALGORITHMS[idx] for idx in chosen] == ["star", "exchange", "ring"]


def test_latencies_are_those_of_the_paper() -> None:
    """TPI-LLM (arXiv:2410.00531, 3.2): four links of latency tau between two of eight devices; a star takes 8 tau, a ring 56."""
    network = Network(4 * 1e-3, 1e15)
    ring, star, _ = seconds_by_algorithm(np.array([4.0]), 8, network)[:, 0]
    assert (ring, star) == (pytest.approx(56e-3), pytest.approx(8e-3))


def test_ranks_of_several_machines_take_the_quickest_and_those_of_one_node_what_they_took() -> None:
    sizes = np.array([[32768.0], [4e7]])
    seconds, chosen = tensor_parallel_all_reduce_s(sizes, 8, EDGE)
    assert seconds == pytest.approx(seconds_by_algorithm(sizes, 8, NET).min(axis=0))
    assert [ALGORITHMS[idx] for idx in chosen[:, 0]] == ["exchange", "ring"]
    alone, none = tensor_parallel_all_reduce_s(sizes, 1, EDGE)
    assert not alone.any() and (none == -1).all()
    gpus = ClusterSpec.parse("4x2xA100-SXM-80GB")
    for tp in (2, 8):
        seconds, chosen = tensor_parallel_all_reduce_s(sizes, tp, gpus)
        ranks = np.full(2, tp)
        assert (
            seconds[:, 0].tolist() == collective_s("all_reduce", sizes[:, 0], ranks, np.ones_like(ranks), gpus).tolist()
        )
        assert (chosen == -1).all()


def test_machines_of_two_ranks_carry_half_the_buffer_each() -> None:
    group = EDGE.groups[0].replace(num_nodes=4, devices_per_node=2)
    inner = EDGE.levels[0].link.replace(bandwidth_bytes_per_s=1e10, latency_s=0.0)
    levels = (EDGE.levels[0].replace(link=inner, domain_size=2), EDGE.levels[0])
    pairs = EDGE.replace(groups=(group,), levels=levels)
    size, two = np.array([65536.0]), np.array([2])
    inside = collective_s("all_reduce", size, two, np.ones_like(two), pairs)
    between = seconds_by_algorithm(size / 2, 4, NET).min(axis=0)
    assert tensor_parallel_all_reduce_s(size, 8, pairs)[0] == pytest.approx(inside + between)


def test_slowest_measured_pair_of_nodes_is_what_counts() -> None:
    matrix = [[0.0 if i == j else 2e7 for j in range(8)] for i in range(8)]
    matrix[3][5] = 1e7
    measured = EDGE.replace(bandwidth_matrix=tuple(map(tuple, matrix)))
    size = np.array([1e7])
    expected = seconds_by_algorithm(size, 8, Network(4e-3, 1e7)).min(axis=0)
    assert tensor_parallel_all_reduce_s(size, 8, measured)[0] == pytest.approx(expected)


def test_star_and_exchange_never_differ_by_more_than_the_hops_of_the_other() -> None:
    """For small messages two hops against log2 n, so that a star is never quicker by more than (log2 n) / 2."""
    for n, size in itertools.product((2, 4, 8, 16), (1.0, 100.0)):
        _, star, exchange = seconds_by_algorithm(np.array([size]), n, NET)[:, 0]
        assert exchange / star <= np.log2(n) / 2 + 1e-9
