"""Pages that a pool is asked for, and the slots that it grants."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.core.cluster import PageMetadata, RemoteSource
from kvpool.core.page import PageKey


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSlot:
    """A page may be written: fill `page`, then commit or abort."""

    key: PageKey
    page: memoryview
    lease: object  # what the pool knows it by


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSlot:
    """A page may be read (and must be verified) until released. `source` is a kvpool.v1 Source number."""

    key: PageKey
    page: memoryview
    source: int
    lease: object


@dataclass(frozen=True, slots=True, kw_only=True)
class PageWish:
    """One page that a store or load wants: its key, what is kept beside it, and where a match saw it."""

    key: PageKey
    metadata: PageMetadata
    chain_head_hash: bytes  # 16 bytes; may be empty for a load
    sources: tuple[RemoteSource, ...] = ()  # best first
