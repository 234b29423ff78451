"""Mixtures of offers: nodes of several offers rented together, in the order of a bound on what a token costs on them.

Sets
    o            offers of nodes that are alike, each in any number of nodes up to MAX[o]
Data
    PRICE[o]     USD per second of a node
    RATE[o, n]   sequences a second of a node, no less than it has in a mixture with n of its kind
    B, FLOOR     sequences of a step, and seconds that a step may take
Variables
    n[o]         nodes of each offer
Objective
    (O)  min  sum_o n[o] PRICE[o] T[n] / B          USD a sequence; T[n] by the search over layouts (cheapest.py)
Constraints
    (C1) floor:  T[n] <= FLOOR
    (C3) supply: n[o] is 0 or one of the offer's sizes
    (C4) kinds:  at least two n[o] > 0, at most MIX
Bound
    (B)  T[n] >= B / sum_o n[o] RATE[o, n[o]]        no node is faster in a mixture than alone

RATE is first perfect scaling (variants.py). Once a mixture comes to be the cheapest by it, the nodes of its offers get the best
rate that the bounds of clusters of their kind allow, at numbers of nodes from n / 2 to all that the offers have together, those
that divide the batch well: nodes of a mixture communicate over no faster links. That none of its layouts is faster is an
assumption, not a theorem: tests compare with searches of every mixture.

All mixtures are one block of a search: its node opens the cheapest row, and stands for the rest. Where there are more than
EXACT_MIXTURES, those within GAP of the incumbent stay closed, MAX_OPENED are looked at, what others could gain is in the
certificate's gap, and sizes of one offer start with RATE as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..schema import Offer
from ..schema.offers import mixture, mixture_name, with_more_nodes
from ..schema.units import BoolArray, FloatArray, IntArray
from .search import REL_GAP
from .sizes import HOUR_S, Size, bound_size, goodput, price_per_hour

EXACT_MIXTURES, GAP = 1000, 0.02
"""Mixtures up to which the cheapest is proved to the same gap as a size; part of the cost that may be left to gain of more."""

MAX_OPENED = 12
"""Mixtures that are looked at of more than EXACT_MIXTURES: each takes a tenth of a second to bound, and more to search."""

MARGIN = 0.1
"""Part of the floor's seconds of a step that a mixture has to spare by (B), so that it is likely to reach the floor."""

MAX_MIXTURES = 1 << 20
"""Rows; of more nodes of each offer so many are tried that there are no more: multiples of a step, and all of them."""


class Mixtures:
    """The mixtures of some offers that are open, and rates of their nodes.

    Attributes:
        counts: nodes of each offer [M, O].
        num_mixtures: that there were; ``are_many``: more than EXACT_MIXTURES.
        min_gain: part of the cost that one must save to be looked at.
        opened: those that were; ``is_stopped``: a deadline came first.
    """

    def __init__(self, offers: Sequence[Offer], sizes: Sequence[Size], mix: int, slowest_s: float) -> None:
        """Enumerate them, given the sizes of all offers, whose requests they share."""
        self.offers = [
            offer for offer in offers if len(offer.cluster.groups) == 1 and not offer.cluster.bandwidth_matrix
        ]
        self._sizes = [[size for size in sizes if size.offer == offer.name] for offer in self.offers]
        self._slowest_s, self._request = slowest_s, sizes[0].request
        self._batch = self._request.workload.global_batch_size
        self.counts = _counts(self.offers, mix)
        self.num_mixtures, self.is_stopped = len(self.counts), False
        self.are_many = self.num_mixtures > EXACT_MIXTURES
        self.min_gain = GAP if self.are_many else REL_GAP
        prices = [price_per_hour(offer.with_size(offer.sizes[-1])) / offer.sizes[-1] / HOUR_S for offer in self.offers]
        self._usd_per_s = self.counts @ np.array(prices)
        self._goodput = goodput(self.counts @ np.array([offer.losses_per_node_day for offer in self.offers]))
        self._rates = [
            np.full(sizes[-1].nodes + 1, self._batch / (sizes[0].fair_s * sizes[0].nodes)) for sizes in self._sizes
        ]
        self._is_close = [False] * len(self.offers)
        self.opened: list[Size] = []
        self._min_closed = np.inf

    def values(self, margin: float = 0.0) -> FloatArray:
        """Return (B) as USD of a step [M]; infinite where it misses the floor (C1), or is not so much of it faster."""
        rates = np.zeros(len(self.counts))
        for o, rate in enumerate(self._rates):
            rates += self.counts[:, o] * rate[self.counts[:, o]]
        step_s = self._batch / rates
        reaches = step_s <= self._slowest_s * self._goodput * (1 - margin)
        return np.where(reaches, self._usd_per_s * step_s / self._goodput, np.inf)

    @property
    def bound(self) -> float:
        """USD of a step that no mixture which waits is below; infinite without any."""
        return float(np.min(self.values(), initial=np.inf))

    @property
    def bound_of_all(self) -> float:
        """The same of all that were not opened."""
        return min(self.bound, self._min_closed)

    def open(self, incumbent: float) -> Size | None:
        """Return the mixture with the least (B), whose (O) a search tells; None where that rose, or none may save enough."""
        values = self.values()
        is_open = values < incumbent * (1 - self.min_gain)
        self._min_closed = min(self._min_closed, np.min(values[~is_open], initial=np.inf))
        self._select(is_open)
        if self.are_many and len(self.opened) >= MAX_OPENED and np.isfinite(incumbent):
            self._min_closed = min(self._min_closed, self.bound)
            self._select(np.zeros(len(self.counts), dtype=bool))
        if not len(self.counts):
            return None
        row = self._next()
        used = np.flatnonzero(self.counts[row])
        if not all(self._is_close[o] for o in used):
            for o in used:
                self._bound_rates(int(o))
            return None
        counts = [int(count) for count in self.counts[row]]
        step_s = self._batch / sum(count * self._rates[o][count] for o, count in enumerate(counts))
        cluster, part = mixture(self.offers, counts), float(self._goodput[row])
        self._select(np.arange(len(self.counts)) != row)
        made = Size(
            sum(map(len, self._sizes)) + len(self.opened),
            mixture_name([offer.name for offer in self.offers], counts),
            replace(self._request, cluster=cluster),
            self._slowest_s * part,
            peak_s=step_s,
            fair_s=step_s,
            goodput=part,
            min_gain=self.min_gain,
        )
        self.opened.append(made)
        return made

    def _next(self) -> int:
        """Return the cheapest row; of many every second time one that reaches the floor with some margin, if there is one."""
        if self.are_many and len(self.opened) % 2 == 0:
            values = self.values(MARGIN)
            if np.isfinite(values.min()):
                return int(np.argmin(values))
        return int(np.argmin(self.values()))

    def raise_size(self, size: Size) -> bool:
        """Return whether a size of an offer that has no bound yet got a higher first one, from RATE."""
        o = next((o for o, offer in enumerate(self.offers) if offer.name == size.offer), None)
        if o is None or not self.are_many or self._is_close[o]:
            return False
        self._bound_rates(o)
        return True

    def _select(self, rows: BoolArray) -> None:
        self.counts, self._usd_per_s, self._goodput = self.counts[rows], self._usd_per_s[rows], self._goodput[rows]

    def _bound_rates(self, o: int) -> None:
        """Take the rates of nodes from clusters of their own kind; of many mixtures sizes of one offer start with them as well."""
        if self._is_close[o]:
            return
        rates = dict[int, float]()
        for nodes in _that_divide_well(self._batch, sum(offer.sizes[-1] for offer in self.offers)):
            size = next((size for size in self._sizes[o] if size.nodes == nodes), None) or Size(
                0,
                "",
                replace(self._request, cluster=with_more_nodes(self.offers[o].cluster, nodes)),
                np.inf,
                peak_s=0.0,
            )
            if size.bound_s is None and size.outcome in ("not examined", "too slow"):
                bound_size(size)
            if size.bound_s is not None:
                rates[nodes] = self._batch / (size.bound_s * nodes)
        self.is_stopped |= self._request.deadline.is_over
        self._is_close[o] = True
        for n in range(len(self._rates[o])):
            best = max((rate for nodes, rate in rates.items() if 2 * nodes >= n), default=np.inf)
            self._rates[o][n] = min(self._rates[o][n], best)
        for size in self._sizes[o] if self.are_many else ():
            size.fair_s = max(size.fair_s, self._batch / (size.nodes * float(self._rates[o][size.nodes])))


def _that_divide_well(batch: int, most: int) -> list[int]:
    """Return numbers of nodes up to the most that share a batch evenly: powers of two, and its odd part times them."""
    odd = batch // (batch & -batch)
    return sorted({factor << k for factor in {1, odd} for k in range(most.bit_length()) if factor << k <= most})


def _counts(offers: Sequence[Offer], mix: int) -> IntArray:
    """Return every mixture (C3), (C4), those of fewer offers first [M, O]."""
    step = 1
    while True:
        options = [sorted({*offer.sizes[step - 1 :: step], offer.sizes[-1]}) for offer in offers]
        chosen = [used for kinds in range(2, mix + 1) for used in itertools.combinations(range(len(offers)), kinds)]
        if sum(int(np.prod([len(options[o]) for o in used])) for used in chosen) <= MAX_MIXTURES:
            break
        step += 1
    blocks = [np.zeros((0, len(offers)), dtype=np.int64)]
    for used in chosen:
        grids = np.meshgrid(*(options[o] for o in used), indexing="ij")
        block = np.zeros((grids[0].size, len(offers)), dtype=np.int64)
        block[:, list(used)] = np.stack([grid.ravel() for grid in grids], axis=1)
        blocks.append(block)
    return np.concatenate(blocks)
