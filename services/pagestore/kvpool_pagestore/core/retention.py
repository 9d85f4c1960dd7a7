"""What is kept longer or shorter than eviction alone would: when pages expire, and how much is pinned. Time is passed
in, as wall time in microseconds."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import replace

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import QuotaExceeded
from kvpool.core.page import PageKey
from kvpool.core.retention import Retention


def with_defaults(metadata: PageMetadata, default: Retention, now_us: int) -> PageMetadata:
    """Metadata of a page that is stored now: what it says itself, or else the default of its keyspace."""
    if not (metadata.ttl_ms or metadata.priority or metadata.pinned_until_us or metadata.expires_us):
        metadata = replace(metadata, ttl_ms=default.ttl_ms, priority=default.priority)
    if metadata.expires_us or not metadata.ttl_ms:
        return metadata
    return replace(metadata, expires_us=Retention(ttl_ms=metadata.ttl_ms).expires_us(now_us))


def extended(kept: PageMetadata, wanted: PageMetadata) -> PageMetadata:
    """What holds after a page was asked to be stored again: of each wish, the one that keeps it longer."""
    forever = not kept.expires_us or not wanted.expires_us
    longer = kept if kept.ttl_ms >= wanted.ttl_ms else wanted
    return replace(
        kept,
        ttl_ms=0 if forever else longer.ttl_ms,
        expires_us=0 if forever else max(kept.expires_us, wanted.expires_us),
        priority=max(kept.priority, wanted.priority),
        pinned_until_us=max(kept.pinned_until_us, wanted.pinned_until_us),
        prompt_tokens=max(kept.prompt_tokens, wanted.prompt_tokens),
    )


def inherited(asked: PageMetadata, owners: PageMetadata | None) -> PageMetadata:
    """Metadata of a page pulled from its owner: retention is the owner's, if it said any; a pin stays where it is.

    asked: of whoever wanted to read the page, who has no say in how long it is kept.
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


class ExpiryQueue:
    """Chunks (by keyspace id + chunk hash) in the order in which they may expire."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, bytes]] = []
        self._expires_us: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._expires_us)

    @property
    def next_us(self) -> int | None:
        """When it is worth looking again."""
        return self._heap[0][0] if self._heap else None

    def add(self, name: bytes, expires_us: int) -> None:
        """A chunk will expire, or later than was thought. 0, never, is not worth a word."""
        if expires_us and expires_us > self._expires_us.get(name, 0):
            self._expires_us[name] = expires_us
            heapq.heappush(self._heap, (expires_us, name))

    def take_due(self, now_us: int, most: int) -> list[bytes]:
        """Chunks that may have expired, at most `most`; look at what is kept beside them, and add them again if not."""
        due: list[bytes] = []
        while self._heap and self._heap[0][0] <= now_us and len(due) < most:
            expires_us, name = heapq.heappop(self._heap)
            if self._expires_us.get(name) == expires_us:
                del self._expires_us[name]
                due.append(name)
        return due


class PinBook:
    """Bytes of pinned pages, bounded. `holds` tells whether a page is still here, so that no leaver has to be told."""

    def __init__(self, limit_bytes: int, holds: Callable[[PageKey], bool]) -> None:
        self._limit_bytes = limit_bytes
        self._holds = holds
        self._pins: dict[PageKey, tuple[int, int]] = {}  # until, page bytes
        self._most_bytes = 0  # of all in _pins, whether or not they still hold

    def pinned_bytes(self, now_us: int) -> int:
        """Page bytes that are pinned and here now."""
        self._pins = {
            key: pin for key, pin in self._pins.items() if pin[0] > now_us and self._holds(key)
        }  # fmt: skip
        self._most_bytes = sum(size_bytes for _, size_bytes in self._pins.values())
        return self._most_bytes

    def pin(
        self, pages: Mapping[PageKey, int], until_us: int, now_us: int, *, force: bool = False
    ) -> QuotaExceeded | None:
        """Pin pages (with their bytes) until then, all of them or, with the error, none. force: whatever the limit."""
        new_bytes = sum(size_bytes for key, size_bytes in pages.items() if key not in self._pins)
        if not force and self._most_bytes + new_bytes > self._limit_bytes:
            pinned_bytes = self.pinned_bytes(now_us)
            new_bytes = sum(size_bytes for key, size_bytes in pages.items() if key not in self._pins)
            if pinned_bytes + new_bytes > self._limit_bytes:
                return QuotaExceeded(
                    f"{pinned_bytes} bytes are pinned and {new_bytes} more would be, max_pinned_share allows "
                    f"{self._limit_bytes}; unpin others or pin later"
                )
        for key, size_bytes in pages.items():
            self._most_bytes += size_bytes * (key not in self._pins)
            self._pins[key] = until_us, size_bytes
        return None

    def unpin(self, pages: Mapping[PageKey, int]) -> None:
        """They are not pinned any more."""
        for key in pages:
            _, size_bytes = self._pins.pop(key, (0, 0))
            self._most_bytes -= size_bytes
