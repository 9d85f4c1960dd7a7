"""What the pagestore's engine needs from the world, and what its bulk endpoint needs from the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpool.core.errors import KvPoolError
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.page import PageKey


@dataclass(frozen=True, slots=True, kw_only=True)
class PageMetadata:
    """What is kept durably beside a page; see the proto message of the same name."""

    parent_hash: bytes  # 16 bytes
    chunk_index: int
    group_head_hash: bytes  # 16 bytes
    ttl_ms: int = 0
    priority: int = 0
    pinned_until_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPage:
    """One page of the disk tier as a scan finds it. `tenant` and `spec` come from the keyspace record kept beside the pages."""

    key: PageKey
    page_bytes: int
    metadata: PageMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class PageWrite:
    """One page to make durable. `page` views the arena slot (header + payload + sum table) and stays leased until on_durable."""

    key: PageKey
    page: memoryview
    metadata: PageMetadata


OnDurable = Callable[[PageKey, KvPoolError | None], None]
"""Called exactly once per page, from the writing thread, after the sync that covers the page (None) or with its failure."""


class PageStore(Protocol):
    """The disk tier. Every method blocks and is called from worker threads, several at once; none is called before `open`.

    Faults raise StoreFault (the tier is unhealthy) and never pass for a miss.
    """

    def open(self) -> None:
        """Open or create the tier. Raises StartupFailed naming the path and the cure."""
        ...

    def keyspaces(self) -> Sequence[bytes]:
        """Canonical encodings of the keyspaces that were remembered."""
        ...

    def remember_keyspace(self, encoding: bytes) -> None:
        """Keep a keyspace encoding durably; idempotent."""
        ...

    def load_value(self, name: str) -> bytes | None:
        """A small durable value of the node (for example its last incarnation), or None."""
        ...

    def save_value(self, name: str, value: bytes) -> None:
        """Keep a small value durably: it is synced when this returns."""
        ...

    def scan(self) -> Iterator[StoredPage]:
        """All durable pages, in any order, without reading their payloads."""
        ...

    def put_batch(self, pages: Sequence[PageWrite], on_durable: OnDurable) -> None:
        """Write pages and sync them. Calls on_durable once per page, then returns; never raises for one page's failure."""
        ...

    def get_into(self, key: PageKey, destination: memoryview) -> int | None:
        """Read a page into `destination`; its bytes, or None if absent. Not verified here: the engine verifies."""
        ...

    def delete_batch(self, keys: Sequence[PageKey]) -> None:
        """Forget pages; absent ones are ignored."""
        ...

    def delete_keyspace(self, keyspace: bytes) -> None:
        """Forget all pages of a keyspace."""
        ...

    def used_bytes(self) -> int:
        """Bytes of the tier as its file system counts them."""
        ...

    def close(self) -> None:
        """Sync and close; idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSource:
    """Another node that may have a page."""

    node_id: bytes
    incarnation: int
    bulk_endpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PullItem:
    """One page to pull into a slot of `destination` (exactly the page's bytes)."""

    key: PageKey
    destination: memoryview


class PeerPages(Protocol):
    """Pages of other nodes. Blocks; called from worker threads."""

    def pull(
        self,
        source: RemoteSource,
        spec: KeyspaceSpec,
        items: Sequence[PullItem],
        deadline_s: float,
        on_page: Callable[[int, KvPoolError | None, bool], None],
    ) -> None:
        """Stream pages of one keyspace into their slots. Calls on_page(item index, error, hit) once per item, in any order.

        A page is reported as a hit only when all its bytes arrived; the engine verifies them. Never raises: a broken stream is
        reported on every item that had not settled.
        """
        ...

    def close(self) -> None:
        """End all connections; running pulls fail."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LocationChange:
    """Shards of one chunk that appeared at or left a tier of this node."""

    keyspace: bytes
    chunk_hash: bytes
    group_head_hash: bytes
    tier: int  # kvpool.core.outcome.Tier
    added_shards: int
    removed_shards: int


class IndexLink(Protocol):
    """The index as the engine sees it: told of changes, never waited for."""

    def announce(self, changes: Sequence[LocationChange]) -> None:
        """Queue changes, in order. Never blocks; changes of one chunk may be merged. Called on the event loop."""
        ...

    async def wait_announced(self) -> None:
        """Return when everything announced before the call is acknowledged; raises StoreUnavailable if that cannot be told."""
        ...

    async def drop_keyspace(self, keyspace: bytes) -> None:
        """Remove this node's locations of a keyspace from the index."""
        ...

    def report_stale(self, key: PageKey, group_head_hash: bytes, source: RemoteSource) -> None:
        """Queue a report that `source` did not hold a page that it was said to hold. Never blocks."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadGrant:
    """A read lease for a bulk reader: `page` views the verified slot until released."""

    lease_id: int
    page: memoryview
    metadata: PageMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteGrant:
    """A write lease for a bulk writer: fill `page` completely, then commit or abort."""

    lease_id: int
    page: memoryview


class BulkGateway(Protocol):
    """What bulk streams (on their own threads) may ask of the engine. Every method blocks the calling thread, never the event loop.

    A stream opens one gateway session (`BulkSession`) and closes it when it ends, however it ends; that gives back all its leases,
    because a bulk stream's thread has stopped touching the slots by then.
    """

    def open_bulk(self, tenant: str, keyspaces: Sequence[tuple[bytes, KeyspaceSpec]], expected_incarnation: int) -> BulkSession:
        """Raises StaleIncarnation, TenantDenied, InvalidRequest, Draining."""
        ...


class BulkSession(Protocol):
    """Leases of one bulk stream."""

    def acquire(self, keys: Sequence[PageKey], timeout_s: float) -> Sequence[ReadGrant | KvPoolError | None]:
        """Per key: a grant, the error, or None for a plain miss. Own tiers only (staging, then disk): never forwarded."""
        ...

    def release(self, grants: Sequence[ReadGrant]) -> None:
        """Give read leases back."""
        ...

    def reserve(self, key: PageKey, page_bytes: int, metadata: PageMetadata) -> WriteGrant | int | KvPoolError:
        """A grant, or Admission.EXISTS / Admission.PENDING, or the error (InvalidRequest, ArenaFull, ...)."""
        ...

    def commit(self, grant: WriteGrant) -> KvPoolError | None:
        """Verify the page and make it visible; PageCorrupt if it fails."""
        ...

    def abort(self, grants: Sequence[WriteGrant]) -> None:
        """Give write leases back unwritten."""
        ...

    def close(self) -> None:
        """End the session; idempotent."""
        ...
