"""Which chain groups may be stored anywhere, of keyspaces whose groups have all been listed: the others are absent.

A listing of the store names every group that had a chunk when the listing began, and events name every group that got
one since. Both go into a filter that knows no removal: a group that it does not have is stored nowhere, one that it has
may be. A new filter takes its place from time to time, because groups go, and because an event can be lost: an index
that fails between a change and its event leaves it out where the node that caused it is lost as well.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

import numpy as np
import numpy.typing as npt

HASH_BYTES: Final = 16
_WORDS: Final = Struct("<4I")  # of a hash: each names one bit
_LEAST_BYTES: Final = 64


class GroupFilter:
    """A Bloom filter of groups by the hashes of their heads, which differ between keyspaces.

    With 16 bits a group it takes one absent group in 400 for a present one, with 5 bits one in 10.
    """

    __slots__ = ("_bits", "_mask")

    def __init__(self, size_bytes: int) -> None:
        """size_bytes: of which the largest power of two is taken."""
        size_bytes = 1 << (max(size_bytes, _LEAST_BYTES).bit_length() - 1)
        self._bits: npt.NDArray[np.uint8] = np.zeros(size_bytes, dtype=np.uint8)
        self._mask = size_bytes * 8 - 1

    def add(self, head: bytes) -> None:
        """Take one head, 16 bytes."""
        for word in _WORDS.unpack(head):
            at = word & self._mask
            self._bits[at >> 3] |= 1 << (at & 7)

    def add_all(self, heads: bytes) -> None:
        """Take many heads, joined."""
        at = np.frombuffer(heads, dtype="<u4") & np.uint32(self._mask)
        np.bitwise_or.at(self._bits, at >> 3, np.left_shift(1, at & 7).astype(np.uint8))

    def __contains__(self, head: bytes) -> bool:
        bits, mask = self._bits, self._mask
        return all(bits[(word & mask) >> 3] & 1 << (word & 7) for word in _WORDS.unpack(head))


class GroupListing:
    """A filter that is being filled. Of no use once the table that began it has lost events."""

    __slots__ = ("filter", "keyspaces")

    def __init__(self, size_bytes: int, keyspaces: frozenset[bytes]) -> None:
        self.filter = GroupFilter(size_bytes)
        self.keyspaces = keyspaces


class StoredGroups:
    """See the module. Belongs to one thread."""

    def __init__(self, filter_bytes: int) -> None:
        self._filter_bytes = filter_bytes
        self._listed: GroupListing | None = None
        self._coming: GroupListing | None = None

    def begin(self, keyspaces: frozenset[bytes]) -> GroupListing:
        """Begin to list the groups of these keyspaces, whose events have been noted since before; ends any other."""
        self._coming = GroupListing(self._filter_bytes, keyspaces)
        return self._coming

    def finish(self, listing: GroupListing) -> bool:
        """All groups were added to the listing's filter: it counts from now on. False if it was ended."""
        if listing is not self._coming:
            return False
        self._listed, self._coming = listing, None
        return True

    def clear(self) -> None:
        """Events were lost: nothing is known to be absent until a listing that begins from now on has finished."""
        self._listed = self._coming = None

    def note(self, head: bytes) -> None:
        """A group has a chunk now, or may have one."""
        for listing in (self._listed, self._coming):
            if listing is not None:
                listing.filter.add(head)

    def is_absent(self, keyspace: bytes, head: bytes) -> bool:
        """Whether no chunk of a group is stored anywhere, as of the latest event."""
        listed = self._listed
        return listed is not None and keyspace in listed.keyspaces and head not in listed.filter
