"""The ring of a rank with those at its place of all islands that are there: who they are, and what becomes of a sum without one.

Generations (supervision/) say which islands there are. A rank follows to the next one where it meets the others: when a sum fails,
or at the end of one after which islands that were started anew are let in. Nothing else of an island's training ends.

A sum counts when every member has it, which all know after one more round: whoever passed it may move the anchor. If the ring
breaks before, those who are left meet in the next generation and compare: where one lacks the sum all of them do it again, weighted
by who is there now. Rings of other places may have had the sum with the lost island, which changes nothing for this one: members of
a ring always have the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from ...schema.errors import MeshwrightError
from ...schema.local_updates import LocalUpdates
from ..supervision.generations import GenerationOverError
from ..supervision.membership import Membership
from .ring import Ring
from .ring_links import heard, meet_in_ring

Words = dict[str, Any]


class IslandRing:
    """One rank's part of a ring.

    Args:
        ranks: of each island.
        idx: island of this rank.
        name: of the ring in the store.
        sends: this rank is in the ring; otherwise it only knows what the ring's ranks tell.
        state: what an island that was started anew gets, in place, from a neighbour.
        tell: returns what such an island must know besides, as JSON.

    Attributes:
        present: islands that sum up, in the order of the ring.
        num_sums: that this rank has.
        is_new: it was started anew, and has not caught up.
    """

    def __init__(
        self,
        membership: Membership,
        updates: LocalUpdates,
        ranks: Sequence[Sequence[int]],
        idx: int,
        *,
        name: str,
        sends: bool,
        state: Sequence[Tensor],
        tell: Callable[[], Words],
        timeout_s: float,
    ) -> None:
        self.membership, self._updates, self._ranks, self._idx = membership, updates, ranks, idx
        self._name, self.sends, self._state, self._tell, self._timeout_s = name, sends, state, tell, timeout_s
        self.present: tuple[int, ...] = ()
        self.num_sums, self._agreed, self.is_new = 0, (0, 0.0), membership.is_new
        self._ring: Ring | None = None
        self._sent_bytes = 0

    @property
    def weight(self) -> float:
        """The island's part of what all that are there sum up."""
        sequences = [self._updates.islands[idx].sequences for idx in self.present]
        return self._updates.islands[self._idx].sequences / sum(sequences)

    @property
    def is_first(self) -> bool:
        """No island before this one is there."""
        return self._idx == min(self.present)

    @property
    def sent_bytes(self) -> int:
        """Return what this rank has sent to other islands."""
        return self._sent_bytes + (0 if self._ring is None else self._ring.sent_bytes)

    def is_invited(self) -> bool:
        """Tell whether islands wait to be let in; ranks of the first one look now and then."""
        return self.membership.is_invited(looks=self.sends and self.is_first)

    def join(self) -> list[Words]:
        """Meet the other islands for the first time; return what each of them tells."""
        try:
            return self._meet(is_between=True)
        except (OSError, GenerationOverError) as error:
            return self._meet_again(error, is_between=True)

    def together(self, work: Callable[[Ring, float], float]) -> float:
        """Do some work with all others, given the weight of this island, once more where one is lost before all have done it.

        Returns:
            The most seconds of all members; 0 where the members that know them are lost.
        """
        number, seconds, is_done = self.num_sums + 1, 0.0, False
        while True:
            ring = self._ring
            assert ring is not None
            try:
                if not is_done:
                    seconds = work(ring, self.weight)
                    self.num_sums, is_done = number, True
                self._agreed = number, ring.maximum(seconds)
                return self._agreed[1]
            except (OSError, GenerationOverError) as error:
                self._leave()  # the neighbours see it, and come as well
                of_all = self._meet_again(error, is_between=False)
            if min(words["sums"] for words in of_all if not words["is_new"]) == number:
                return max(words["seconds"] for words in of_all if words["sums"] == number)
            self.num_sums, is_done = number - 1, False

    def let_in(self) -> None:
        """Take in the islands that wait, between two sums; all members call it after the same one."""
        if not self.sends:
            return
        self.membership.request()
        with suppress(GenerationOverError):  # those who waited are gone again
            self._meet_again(GenerationOverError("islands wait to be let in"), is_between=True)

    def _meet_again(self, error: Exception, *, is_between: bool) -> list[Words]:
        while True:
            self._follow(error)
            self._leave()
            try:
                return self._meet(is_between=is_between)
            except (OSError, GenerationOverError) as again:
                error = again

    def _follow(self, error: Exception) -> None:
        """Enter the generation that explains an error; ask for one where all islands live, but could not reach each other."""
        try:
            self.membership.follow(error)
        except OSError:
            self.membership.request()
            try:
                self.membership.follow(error)
            except OSError:
                raise MeshwrightError(
                    f"a region did not answer: {error}",
                    help="regions that are left have their checkpoints: start again with --resume, or plan without it",
                ) from None

    def _meet(self, *, is_between: bool) -> list[Words]:
        """Form the ring of the generation, and give islands that are new what they lack."""
        membership, members = self.membership, {*self.membership.generation.members}
        self.present = tuple(idx for idx in self._updates.ring if members.issuperset(self._ranks[idx]))
        if not self.sends:
            return [entry[2] for entry in heard(membership.store, self._name, self.present)] if self.is_new else []
        seconds = self._agreed[1] if self._agreed[0] == self.num_sums else 0.0
        status = {"sums": self.num_sums, "seconds": seconds, "is_new": self.is_new, "is_between": is_between}
        links, words = meet_in_ring(
            membership.store, self._name, self.present, self._idx, words=status | self._tell(),
            check=self._check, timeout_s=self._timeout_s,
        )  # fmt: skip
        self._ring = Ring(links, self.present.index(self._idx), len(self.present))
        lacks = [each["is_new"] for each in words]
        if any(lacks) and all(each["is_between"] for each in words):
            self._ring.hand_on(self._state, lacks)
        elif self.is_new:
            raise MeshwrightError(
                "the other regions are in the middle of a sum, as one of them was lost",
                help="start the same command here again to come back",
            )
        return words

    def _check(self) -> None:
        if self.membership.lacks([rank for idx in self.present for rank in self._ranks[idx]]):
            raise GenerationOverError("an island is lost")

    def _leave(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._sent_bytes, self._ring = self.sent_bytes, None
