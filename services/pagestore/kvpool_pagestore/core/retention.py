"""What stays longer or shorter than eviction alone decides: when pages expire, and how much is pinned. Time is passed
in, as wall time in microseconds."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import QuotaExceeded
from kvpool.core.page import PageKey
from kvpool.core.retention import Retention

_FORGOTTEN_AT_ONCE: Final = 256  # pins that have ended and are not counted any more
_SLACK: Final = 64  # entries that a heap may have too many before it is rebuilt


def with_defaults(metadata: PageMetadata, default: Retention, now_us: int) -> PageMetadata:
    """Metadata of a page that is stored now: what it says itself, or else the default of its keyspace."""
    if not (metadata.ttl_ms or metadata.priority or metadata.pinned_until_us or metadata.expires_us):
        if not (default.ttl_ms or default.priority):
            return metadata
        metadata = replace(metadata, ttl_ms=default.ttl_ms, priority=default.priority)
    if metadata.expires_us or not metadata.ttl_ms:
        return metadata
    return replace(metadata, expires_us=Retention(ttl_ms=metadata.ttl_ms).expires_us(now_us))


def extended(current: PageMetadata, wanted: PageMetadata) -> PageMetadata:
    """What holds after a page was asked to be stored again: of each wish, the one that keeps it longer."""
    if current == wanted:
        return current
    forever = not current.expires_us or not wanted.expires_us
    longer = current if current.ttl_ms >= wanted.ttl_ms else wanted
    return replace(
        current,
        ttl_ms=0 if forever else longer.ttl_ms,
        expires_us=0 if forever else max(current.expires_us, wanted.expires_us),
        priority=max(current.priority, wanted.priority),
        pinned_until_us=max(current.pinned_until_us, wanted.pinned_until_us),
        prompt_tokens=max(current.prompt_tokens, wanted.prompt_tokens),
    )


def inherited(asked: PageMetadata, owners: PageMetadata | None) -> PageMetadata:
    """Metadata of a page pulled from its owner: retention is the owner's, if it said any; a pin stays where it is.

    asked: metadata of the reader's request, which does not decide how long the page stays.
    """
    if owners is None:
        return replace(asked, pinned_until_us=0)
    return replace(
        asked,
        ttl_ms=owners.ttl_ms,
        expires_us=owners.expires_us,
        priority=owners.priority,
        pinned_until_us=0,
        prompt_tokens=owners.prompt_tokens,
    )


def is_expired(metadata: PageMetadata, now_us: int) -> bool:
    """The page is worth nothing any more: it must not be served."""
    return 0 < metadata.expires_us <= now_us


class _Times:
    """Names by the time at which they are due; a name has one time. Never many more entries than names."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, bytes]] = []
        self._due_us: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._due_us)

    def __contains__(self, name: bytes) -> bool:
        return name in self._due_us

    @property
    def next_us(self) -> int | None:
        """When it is worth looking again."""
        return self._heap[0][0] if self._heap else None

    def get(self, name: bytes) -> int:
        """0 for a name that is not here."""
        return self._due_us.get(name, 0)

    def set(self, name: bytes, due_us: int) -> None:
        if self._due_us.get(name) == due_us:
            return
        self._due_us[name] = due_us
        heapq.heappush(self._heap, (due_us, name))
        if len(self._heap) > 2 * len(self._due_us) + _SLACK:  # what was put off again and again, or forgotten
            self._heap = [(at, each) for each, at in self._due_us.items()]
            heapq.heapify(self._heap)

    def forget(self, name: bytes) -> None:
        self._due_us.pop(name, None)

    def take_due(self, now_us: int, most: int) -> list[bytes]:
        due: list[bytes] = []
        while self._heap and self._heap[0][0] <= now_us and len(due) < most:
            due_us, name = heapq.heappop(self._heap)
            if self._due_us.get(name) == due_us:
                del self._due_us[name]
                due.append(name)
        return due


class ExpiryQueue(_Times):
    """Chunks (by keyspace id + chunk hash) in the order in which they may expire.

    `take_due`: chunks that may have expired; check their metadata, and add them again if they have not.
    """

    def add(self, name: bytes, expires_us: int) -> None:
        """A chunk will expire, or later than was thought. 0, never, is not worth a word."""
        if expires_us and expires_us > self.get(name):
            self.set(name, expires_us)


class PinBook:
    """Bytes of pinned pages, bounded. Call `unpin` for pages that leave; pins end by themselves."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._pins: dict[bytes, int] = {}  # page bytes, by packed key; some of pins that have ended, too
        self._ends = _Times()
        self._pinned_bytes = 0
        self._ending_bytes: dict[int, int] = {}  # by the time at which pins end: many end together
        self._next_ends: list[int] = []  # these times, a heap
        self._ended_us = 0  # the last of these times that has passed: pins that ended by then are not counted

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, key: PageKey) -> bool:
        return self._ends.get(key.pack()) > self._ended_us

    def pinned_bytes(self, now_us: int) -> int:
        """Page bytes that are pinned now. Takes a step for each time since the last call at which pins ended."""
        while self._next_ends and self._next_ends[0] <= now_us:
            self._ended_us = heapq.heappop(self._next_ends)  # never less than before: later pins end after it
            self._pinned_bytes -= self._ending_bytes.pop(self._ended_us, 0)
        for name in self._ends.take_due(self._ended_us, _FORGOTTEN_AT_ONCE):
            del self._pins[name]
        return self._pinned_bytes

    def pin(
        self, pages: Mapping[PageKey, int], until_us: int, now_us: int, *, force: bool = False
    ) -> QuotaExceeded | None:
        """Pin pages (with their bytes) until then, all of them or, with the error, none. force: whatever the limit."""
        pinned_bytes = self.pinned_bytes(now_us)
        new_bytes = sum(size_bytes for key, size_bytes in pages.items() if key not in self)
        if not force and pinned_bytes + new_bytes > self._limit_bytes:
            return QuotaExceeded(
                f"{pinned_bytes} bytes are pinned and {new_bytes} more would be, max_pinned_share allows "
                f"{self._limit_bytes}; unpin others or pin later"
            )
        for key, size_bytes in pages.items():
            name = key.pack()
            if self._ends.get(name) == until_us and self._pins.get(name) == size_bytes:
                continue
            self.unpin((key,))
            if until_us > self._ended_us:
                self._pins[name] = size_bytes
                self._ends.set(name, until_us)
                self._count(until_us, size_bytes)
        return None

    def unpin(self, pages: Iterable[PageKey]) -> None:
        """They are gone, or not pinned any more."""
        for key in pages:
            name = key.pack()
            size_bytes, until_us = self._pins.pop(name, 0), self._ends.get(name)
            self._ends.forget(name)
            if until_us > self._ended_us:
                self._count(until_us, -size_bytes)

    def _count(self, until_us: int, size_bytes: int) -> None:
        """Add bytes that are pinned until then, or (< 0) take them away."""
        self._pinned_bytes += size_bytes
        left_bytes = self._ending_bytes.get(until_us, 0) + size_bytes
        if not left_bytes:
            self._ending_bytes.pop(until_us, None)
            return
        if until_us not in self._ending_bytes:
            heapq.heappush(self._next_ends, until_us)
        self._ending_bytes[until_us] = left_bytes
        if len(self._next_ends) > 2 * len(self._ending_bytes) + _SLACK:
            self._next_ends = sorted(self._ending_bytes)
