"""The blocks of a paged cache: which are free, who reads them, and which hold a known prefix.

A block is named by a digest of its tokens and of all before it, so that a prompt that starts alike finds the blocks of another
request. A block that nobody reads keeps its contents until it is needed: the longest unread one goes first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """Blocks 0..num_blocks-1 of ``block_size`` tokens each."""

    def __init__(self, num_blocks: int, block_size: int, *, reuses_prefixes: bool = True) -> None:
        self.num_blocks, self.block_size, self.reuses_prefixes = num_blocks, block_size, reuses_prefixes
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._unread: OrderedDict[int, None] = OrderedDict()  # with contents, longest unread first
        self._readers = [0] * num_blocks
        self._digest_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Return the blocks that nobody reads."""
        return len(self._empty) + len(self._unread)

    @property
    def num_used(self) -> int:
        """Return the blocks that somebody reads."""
        return self.num_blocks - self.num_free

    def take(self, count: int) -> list[int] | None:
        """Return blocks for one reader to write; None where not so many are free."""
        if count > self.num_free:
            return None
        blocks = []
        for _ in range(count):
            if self._empty:
                block = self._empty.pop()
            else:
                block, _ = self._unread.popitem(last=False)
                digest = self._digest_of[block]
                assert digest is not None
                del self._block_of[digest]
                self._digest_of[block] = None
            self._readers[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Let a reader go; the end of a sequence becomes the first to be overwritten."""
        for block in reversed(blocks):
            self._readers[block] -= 1
            if self._readers[block]:
                continue
            if self._digest_of[block] is None:
                self._empty.append(block)
            else:
                self._unread[block] = None

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest known start, each with one reader more."""
        known = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            if not self._readers[block]:
                del self._unread[block]
            self._readers[block] += 1
            known.append(block)
        return known

    def name(self, block: int, digest: bytes) -> None:
        """Let a full block be found; of two with equal contents the first is."""
        if self.reuses_prefixes and digest not in self._block_of and self._digest_of[block] is None:
            self._digest_of[block] = digest
            self._block_of[digest] = block


def extend_digests(known: list[bytes], tokens: Sequence[int], block_size: int, *, root: bytes = b"") -> None:
    """Append the names of a sequence's full blocks to those that are known; ``root`` keeps apart what other weights computed."""
    for start in range(len(known) * block_size, len(tokens) - block_size + 1, block_size):
        part = array("q", tokens[start : start + block_size]).tobytes()
        known.append(hashlib.blake2b(part, digest_size=16, key=known[-1] if known else root).digest())
