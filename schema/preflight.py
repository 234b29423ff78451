"""What a look at the ranks of a job, before it begins, says of those that are slower than their peers."""

from __future__ import annotations

from .base import Frozen, PositiveFloat, PositiveInt
from .profile import RankReport, SlowComponent
from .units import format_percent

WORDS = {"compute": "multiplies", "memory": "reads memory", "link": "exchanges"}


class PreflightReport(Frozen):
    """The ranks of a job, compared.

    Attributes:
        repetitions: of each work.
        hosts: names of the nodes, in their order.
        shares_cores: ranks have no cores of their own, so that a processor's seconds count for what they compute.
        ranks: how long each takes against its peers, by their numbers; slow: beyond 5 % and three MADs.
    """

    seconds: PositiveFloat
    repetitions: PositiveInt
    hosts: tuple[str, ...]
    shares_cores: bool = False
    ranks: tuple[RankReport, ...]
    slow: tuple[SlowComponent, ...] = ()

    @property
    def slow_ranks(self) -> tuple[int, ...]:
        """The numbers of the slow ranks."""
        return tuple(sorted({rank for each in self.slow for rank in each.ranks}))

    def sentences(self) -> tuple[str, ...]:
        """Return a line for each slow rank or node."""
        return tuple(
            f"{each.name} {WORDS[each.what]} {each.ratio:.2f} times as long as its peers, which differ by "
            f"{format_percent(each.noise)}"
            for each in self.slow
        )
