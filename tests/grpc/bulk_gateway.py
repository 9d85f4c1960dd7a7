"""A small BulkGateway in memory, with slots that are poisoned when they are given back, and a bulk server around it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count
from typing import TypeVar

import grpc
from prometheus_client import CollectorRegistry

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import ArenaFull, InvalidRequest, KvPoolError, PageCorrupt, StaleIncarnation
from kvpool.core.keyspace import Dtype, KeyspaceSpec, KvGroup, encode_keyspace, keyspace_id
from kvpool.core.outcome import Admission
from kvpool.core.page import PageKey, page_bytes, seal, verify
from kvpool_pagestore.bulk.ports import ReadGrant, WriteGrant
from kvpool_pagestore.bulk.servicer import BulkLimits, PageTransferServicer
from kvpool_server.interceptors.auth import DefaultTenantAuthenticator, SyncAuth, current_identity
from kvpool_server.interceptors.errors import SyncErrors
from kvpool_server.interceptors.telemetry import RequestMetrics, SyncMetrics
from kvpool_server.listen import TcpAddress
from kvpool_server.server import BulkServer

SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(2, 2, 64),), dtype=Dtype.BF16, chunk_tokens=256)
KEYSPACE = keyspace_id(encode_keyspace("tenant", SPEC))
KEYSPACES = [(KEYSPACE, SPEC)]
INCARNATION = 77
METADATA = PageMetadata(parent_hash=b"p" * 16, chunk_index=3, group_head_hash=b"g" * 16, priority=5)


T = TypeVar("T")


def done(answer: T) -> Future[T]:
    settled: Future[T] = Future()
    settled.set_result(answer)
    return settled


def key(number: int) -> PageKey:
    return PageKey(KEYSPACE, number.to_bytes(16, "big"), 1)


def sealed_page(number: int, payload_len: int) -> bytearray:
    page = bytearray(page_bytes(payload_len))
    page[64 : 64 + payload_len] = (number * 7919).to_bytes(8, "little") * (payload_len // 8) + b"x" * (payload_len % 8)
    seal(page, key(number), 1, payload_len)
    return page


class MemoryGateway:
    """Pages in a dict. `slots_max` bounds the leases of all sessions together."""

    def __init__(self, slots_max: int = 64) -> None:
        self.pages: dict[PageKey, tuple[bytearray, PageMetadata]] = {}
        self.errors: dict[PageKey, KvPoolError] = {}  # what acquire or reserve answers for a key
        self.late: dict[PageKey, Future[Sequence[ReadGrant | KvPoolError | None]]] = {}  # answers of acquires for it
        self.pending: set[PageKey] = set()
        self.lock = threading.Lock()
        self.sessions: set[MemorySession] = set()
        self.opened_count = 0
        self.lease_count = 0
        self.lease_count_max = 0
        self.slots_max = slots_max
        self.numbers = count(1)

    def store(self, number: int, payload_len: int) -> bytes:
        page = sealed_page(number, payload_len)
        self.pages[key(number)] = page, METADATA
        return bytes(page)

    def open_bulk(
        self,
        tenant: str,
        keyspaces: Sequence[tuple[bytes, KeyspaceSpec]],
        expected_incarnation: int,
        *,
        require_durable: bool = False,
    ) -> MemorySession:
        if expected_incarnation not in (0, INCARNATION):
            raise StaleIncarnation(f"incarnation {INCARNATION} is running, not {expected_incarnation}")
        for keyspace, spec in keyspaces:
            if keyspace_id(encode_keyspace(tenant, spec)) != keyspace:
                raise InvalidRequest("the keyspace id is not that of its spec")
        session = MemorySession(self)
        with self.lock:
            self.sessions.add(session)
            self.opened_count += 1
        return session

    def lease(self, delta: int) -> None:
        with self.lock:
            self.lease_count += delta
            self.lease_count_max = max(self.lease_count_max, self.lease_count)


class MemorySession:
    def __init__(self, gateway: MemoryGateway) -> None:
        self._gateway = gateway
        self._slots: dict[int, bytearray] = {}
        self._write_keys: dict[int, tuple[PageKey, PageMetadata]] = {}

    def acquire(self, keys: Sequence[PageKey], timeout_s: float) -> Future[Sequence[ReadGrant | KvPoolError | None]]:
        late = next((page_key for page_key in keys if page_key in self._gateway.late), None)
        if late is None:
            return done([self._acquire(page_key) for page_key in keys])
        return self._gateway.late[late]

    def _acquire(self, page_key: PageKey) -> ReadGrant | KvPoolError | None:
        gateway = self._gateway
        if page_key in gateway.errors:
            return gateway.errors[page_key]
        if page_key not in gateway.pages:
            return None
        page, metadata = gateway.pages[page_key]
        lease_id, slot = self._lease(len(page))
        slot[:] = page
        return ReadGrant(lease_id=lease_id, page=memoryview(slot).toreadonly(), metadata=metadata)

    def verify(self, keys: Sequence[PageKey]) -> Sequence[KvPoolError | bool]:
        """As the engine: pages that fail are dropped."""
        answers: list[KvPoolError | bool] = []
        for page_key in keys:
            page, _ = self._gateway.pages.get(page_key, (None, None))
            fault = verify(page, page_key) if page is not None else None
            if fault is not None:
                del self._gateway.pages[page_key]
            answers.append(PageCorrupt(str(fault)) if fault is not None else page is not None)
        return answers

    def release(self, grants: Sequence[ReadGrant]) -> None:
        for grant in grants:
            self._free(grant.lease_id)

    def reserve(
        self, page_key: PageKey, size_bytes: int, metadata: PageMetadata
    ) -> Future[WriteGrant | int | KvPoolError]:
        return done(self._reserve(page_key, size_bytes, metadata))

    def _reserve(self, page_key: PageKey, size_bytes: int, metadata: PageMetadata) -> WriteGrant | int | KvPoolError:
        gateway = self._gateway
        if page_key in gateway.errors:
            return gateway.errors[page_key]
        if page_key in gateway.pages:
            return Admission.EXISTS
        if page_key in gateway.pending:
            return Admission.PENDING
        if gateway.lease_count >= gateway.slots_max:
            return ArenaFull("every slot is leased")
        lease_id, slot = self._lease(size_bytes)
        self._write_keys[lease_id] = page_key, metadata
        return WriteGrant(lease_id=lease_id, page=memoryview(slot))

    def put(self, page_key: PageKey, page: memoryview, metadata: PageMetadata) -> Future[int | KvPoolError]:
        answer = self._reserve(page_key, len(page), metadata)
        if isinstance(answer, WriteGrant):
            answer.page[:] = page
            answer = self.commit(answer).result() or int(Admission.RESERVED)
        return done(answer)

    def commit(self, grant: WriteGrant) -> Future[KvPoolError | None]:
        page_key, metadata = self._write_keys.pop(grant.lease_id)
        page = bytearray(grant.page)
        fault = verify(page, page_key)
        if fault is None:
            self._gateway.pages[page_key] = page, metadata
        grant.page.release()
        self._free(grant.lease_id)
        return done(None if fault is None else PageCorrupt(str(fault)))

    def abort(self, grants: Sequence[WriteGrant]) -> None:
        for grant in grants:
            self._free(grant.lease_id)

    def close(self) -> None:
        for lease_id in list(self._slots):
            self._free(lease_id)
        with self._gateway.lock:
            self._gateway.sessions.discard(self)

    def _lease(self, size_bytes: int) -> tuple[int, bytearray]:
        lease_id = next(self._gateway.numbers)
        slot = self._slots[lease_id] = bytearray(size_bytes)
        self._gateway.lease(1)
        return lease_id, slot

    def _free(self, lease_id: int) -> None:
        slot = self._slots.pop(lease_id)
        slot[:] = b"\xee" * len(slot)  # a client that still reads it gets a page that does not verify
        slot.clear()  # raises BufferError if a view of it is still held
        self._gateway.lease(-1)


@contextmanager
def bulk_server(
    gateway: MemoryGateway,
    *,
    threads: int = 4,
    limits: BulkLimits | None = None,
    registry: CollectorRegistry | None = None,
) -> Iterator[str]:
    """Serve `gateway` on a port of its own, with the interceptors of the service; the endpoint."""
    interceptors: list[grpc.ServerInterceptor] = [SyncErrors(), SyncAuth(DefaultTenantAuthenticator("tenant"))]
    if registry is not None:
        interceptors.insert(0, SyncMetrics(RequestMetrics("pagestore", registry)))
    server = BulkServer(threads=threads, interceptors=interceptors)
    PageTransferServicer(gateway, lambda: current_identity().tenant, limits).add_to(server.grpc)
    port = server.listen_tcp(TcpAddress("127.0.0.1", 0))
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0.0)
