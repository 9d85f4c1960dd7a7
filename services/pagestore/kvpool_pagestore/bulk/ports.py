"""What the bulk endpoint needs from the engine."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import KvPoolError
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.page import PageKey


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
    """What bulk streams (on their own threads) may ask of the engine. What takes a turn of the event loop returns a
    future, so that a stream moves bytes meanwhile.

    A stream opens one gateway session (`BulkSession`) and closes it when it ends, however it ends; that gives back all
    its leases, because a bulk stream's thread has stopped touching the slots by then.
    """

    def open_bulk(
        self,
        tenant: str,
        keyspaces: Sequence[tuple[bytes, KeyspaceSpec]],
        expected_incarnation: int,
        *,
        require_durable: bool = False,
    ) -> BulkSession:
        """Raises StaleIncarnation, TenantDenied, InvalidRequest, Draining.

        require_durable: a commit, and an EXISTS, is answered only once the page is on this node's disk.
        """
        ...


class BulkSession(Protocol):
    """Leases of one bulk stream."""

    def acquire(self, keys: Sequence[PageKey], timeout_s: float) -> Future[Sequence[ReadGrant | KvPoolError | None]]:
        """Per key: a grant, the error, or None for a plain miss. Own tiers only: never forwarded. A stream that ends
        cancels the future, or releases the views in its result."""
        ...

    def verify(self, keys: Sequence[PageKey]) -> Sequence[KvPoolError | bool]:
        """Verify pages that a reader received corrupt; drop those that fail. Per key whether it is here and good."""
        ...

    def release(self, grants: Sequence[ReadGrant]) -> None:
        """Give read leases back, before anything that is asked for later. Returns at once."""
        ...

    def reserve(self, key: PageKey, page_bytes: int, metadata: PageMetadata) -> Future[WriteGrant | int | KvPoolError]:
        """A grant, or Admission.EXISTS / Admission.PENDING, or the error (InvalidRequest, ArenaFull, ...)."""
        ...

    def put(self, key: PageKey, page: memoryview, metadata: PageMetadata) -> Future[int | KvPoolError]:
        """Begin to reserve, fill and commit a small page that is there as a whole: its Admission, or the error.

        Pages that are put while others are on their way share their steps: each alone costs more than its bytes. The
        view is looked at until the future is done.
        """
        ...

    def commit(self, grant: WriteGrant) -> Future[KvPoolError | None]:
        """Verify the page on the calling thread and begin to make it visible; PageCorrupt if it fails. Release the view
        when the future is done."""
        ...

    def abort(self, grants: Sequence[WriteGrant]) -> None:
        """Give write leases back unwritten."""
        ...

    def close(self) -> None:
        """End the session; idempotent."""
        ...
