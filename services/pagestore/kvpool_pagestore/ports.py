"""What the pagestore's engine needs from the world, and what its bulk endpoint needs from the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

# Plain values of the whole code base, named here too so that adapters find all they need in one place.
from kvpool.core.cluster import LocationChange as LocationChange
from kvpool.core.cluster import PageMetadata as PageMetadata
from kvpool.core.cluster import RemoteSource as RemoteSource
from kvpool.core.errors import KvPoolError
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.page import PageKey

P = ParamSpec("P")
T = TypeVar("T")


class Workers(Protocol):
    """A bounded pool of threads for blocking calls."""

    threads: int

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `function` run on a thread. A started call runs to its end even when the caller is cancelled.

        Raises Overloaded when the queue is full, Draining when closed.
        """
        ...


class SessionLocks(Protocol):
    """Locked files that tell whether a peer process is gone; kvpool_server.flock is one."""

    def create_session_file(self, directory: Path, session_id: str) -> int: ...

    def peer_alive(self, directory: Path, session_id: str) -> bool: ...

    def remove_session_file(self, directory: Path, session_id: str) -> None: ...

    def list_session_files(self, directory: Path) -> list[str]: ...


class Arena(Protocol):
    """Segments of shared memory. Methods block (they enter the kernel for milliseconds) unless they say otherwise."""

    def create_segment(self, segment_id: int, size_bytes: int) -> None:
        """Create and map a segment with all its memory reserved. Raises ArenaFull when the file system has no room."""
        ...

    def view(self, segment_id: int, offset: int, size_bytes: int) -> memoryview:
        """A writable view. Does not block. Every view must be gone before the segment is destroyed."""
        ...

    def descriptor(self, segment_id: int) -> int:
        """The segment's descriptor, owned by the arena: duplicate it to pass it on. Does not block. Raises KeyError."""
        ...

    def destroy_segment(self, segment_id: int) -> None:
        """Unlink, unmap and close a segment; its memory is free once no peer maps it."""
        ...

    def create_session_file(self, session_id: bytes) -> int:
        """A new locked descriptor to hand to the session's peer; the caller owns it."""
        ...

    def gone_sessions(self, session_ids: Sequence[bytes]) -> Sequence[bytes]:
        """Those whose peer processes have all let go of the session's descriptor."""
        ...

    def forget_sessions(self, session_ids: Sequence[bytes]) -> None:
        """Remove session files."""
        ...

    def destroy_old_segments(self) -> None:
        """Destroy the segments that an earlier process of this node left behind."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPage:
    """One page of the disk tier as a scan finds it."""

    key: PageKey
    page_bytes: int
    metadata: PageMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class PageWrite:
    """One page to make durable. `page` views the arena slot (header, payload, sums), held until put_batch returns."""

    key: PageKey
    page: memoryview
    metadata: PageMetadata


OnDurable = Callable[[PageKey, KvPoolError | None], None]
"""Called once per page, from the writing thread, after the sync that covers the page (None) or with its failure."""


class PageStore(Protocol):
    """The disk tier. Every method blocks and is called from worker threads, several at once, never before `open`.

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
        """Write pages and sync them. Calls on_durable once per page, then returns; never raises for one page."""
        ...

    def get_into(self, key: PageKey, destination: memoryview) -> int | None:
        """Read a page into `destination`; its bytes, or None if absent. Not verified here: the engine verifies.

        Raises PageCorrupt when the store itself can tell that this page is damaged: drop the page, the tier is well.
        """
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
        """Stream pages of one keyspace into their slots. Calls on_page(item index, error, hit) once per item.

        `deadline_s` counts from now; the order is free. A page is reported as a hit only when all its bytes arrived;
        the engine verifies them. Never raises: a broken stream is reported on every item that had not settled.
        """
        ...

    def close(self) -> None:
        """End all connections; running pulls fail."""
        ...


SnapshotSource = Callable[[], Iterable[LocationChange]]
"""All present locations of this node; asked on the event loop when an incarnation starts from an empty index entry."""


class IndexLink(Protocol):
    """The index as the engine sees it: told of changes, never waited for."""

    def announce(self, changes: Sequence[LocationChange]) -> None:
        """Queue changes, in order. Never blocks; changes of one chunk may be merged. Called on the event loop."""
        ...

    async def wait_announced(self) -> None:
        """Return when everything announced before is acknowledged; StoreUnavailable if that cannot be told."""
        ...

    async def drop_keyspace(self, keyspace: bytes) -> None:
        """Remove this node's locations of a keyspace from the index."""
        ...

    def report_stale(self, key: PageKey, group_head_hash: bytes, source: RemoteSource) -> None:
        """Queue a report that `source` did not hold a page that it was said to hold. Never blocks."""
        ...

    async def close(self) -> None:
        """Leave the index: this node's locations are gone from every match. Idempotent."""
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
    """What bulk streams (on their own threads) may ask of the engine. Blocks the calling thread, never the event loop.

    A stream opens one gateway session (`BulkSession`) and closes it when it ends, however it ends; that gives back all
    its leases, because a bulk stream's thread has stopped touching the slots by then.
    """

    def open_bulk(
        self, tenant: str, keyspaces: Sequence[tuple[bytes, KeyspaceSpec]], expected_incarnation: int
    ) -> BulkSession:
        """Raises StaleIncarnation, TenantDenied, InvalidRequest, Draining."""
        ...


class BulkSession(Protocol):
    """Leases of one bulk stream."""

    def acquire(self, keys: Sequence[PageKey], timeout_s: float) -> Sequence[ReadGrant | KvPoolError | None]:
        """Per key: a grant, the error, or None for a plain miss. Own tiers only: never forwarded."""
        ...

    def release(self, grants: Sequence[ReadGrant]) -> None:
        """Give read leases back."""
        ...

    def reserve(self, key: PageKey, page_bytes: int, metadata: PageMetadata) -> WriteGrant | int | KvPoolError:
        """A grant, or Admission.EXISTS / Admission.PENDING, or the error (InvalidRequest, ArenaFull, ...)."""
        ...

    def commit(self, grant: WriteGrant) -> Future[KvPoolError | None]:
        """Begin to verify the page and make it visible; PageCorrupt if it fails. Release the view when it is done."""
        ...

    def abort(self, grants: Sequence[WriteGrant]) -> None:
        """Give write leases back unwritten."""
        ...

    def close(self) -> None:
        """End the session; idempotent."""
        ...
