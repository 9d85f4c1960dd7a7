"""The engine for bulk streams, which run on threads of their own: each call hops onto the event loop and back."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import KvPoolError, ServiceUnavailable
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.outcome import Admission
from kvpool.core.page import PageKey
from kvpool_pagestore.bulk.ports import ReadGrant, WriteGrant
from kvpool_pagestore.core.page_table import Grant
from kvpool_pagestore.core.slots import PageRecord
from kvpool_pagestore.engine.fetch import Acquired, PageRequest
from kvpool_pagestore.engine.sessions import PeerSession
from kvpool_pagestore.engine.store import PageStoreEngine

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Put:
    """A whole page on its way in."""

    item: PageRecord
    page: memoryview
    done: Future[int | KvPoolError] = field(default_factory=Future)


class EngineBulkGateway:
    """A bulk.ports.BulkGateway. `loop` is the engine's; calls come from any other thread."""

    def __init__(self, engine: PageStoreEngine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop

    def open_bulk(
        self,
        tenant: str,
        keyspaces: Sequence[tuple[bytes, KeyspaceSpec]],
        expected_incarnation: int,
        *,
        require_durable: bool = False,
    ) -> EngineBulkSession:
        async def open_peer() -> PeerSession:
            self._engine.check_incarnation(expected_incarnation)
            return self._engine.sessions.open_internal(tenant, keyspaces)

        return EngineBulkSession(self._engine, self._loop, _on_loop(self._loop, open_peer()), require_durable)


class EngineBulkSession:
    """A bulk.ports.BulkSession: one stream's leases."""

    def __init__(
        self, engine: PageStoreEngine, loop: asyncio.AbstractEventLoop, peer: PeerSession, durable: bool
    ) -> None:
        self._durable = durable
        self._engine = engine
        self._loop = loop
        self._peer = peer
        self._last: PageRecord | None = None  # of the page that was written last
        self._put: deque[_Put] = deque()
        self._puts_awaited = False  # by the loop: it will look at `_put`

    def acquire(self, keys: Sequence[PageKey], timeout_s: float) -> Future[Sequence[ReadGrant | KvPoolError | None]]:
        acquired: Future[Sequence[ReadGrant | KvPoolError | None]] = Future()
        self._loop.call_soon_threadsafe(self._acquire, keys, timeout_s, acquired)
        return acquired

    def verify(self, keys: Sequence[PageKey]) -> Sequence[KvPoolError | bool]:
        return _on_loop(self._loop, self._engine.pages.verify(self._peer, keys))

    def release(self, grants: Sequence[ReadGrant]) -> None:
        lease_ids = [grant.lease_id for grant in grants]
        self._loop.call_soon_threadsafe(self._engine.pages.release, self._peer, lease_ids)

    def reserve(self, key: PageKey, page_bytes: int, metadata: PageMetadata) -> Future[WriteGrant | int | KvPoolError]:
        item = self._record(PageRecord(key, page_bytes, metadata))

        async def reserve() -> WriteGrant | int | KvPoolError:
            (answer,) = await self._engine.pages.reserve(self._peer, [item])
            if isinstance(answer, Grant):
                return WriteGrant(lease_id=answer.lease_id, page=self._engine.pages.view(answer))
            if answer is Admission.EXISTS and self._durable:
                error = await self._engine.pages.make_durable(key)
                if error is not None:
                    return error
            return int(answer) if isinstance(answer, Admission) else answer

        return asyncio.run_coroutine_threadsafe(reserve(), self._loop)

    def put(self, key: PageKey, page: memoryview, metadata: PageMetadata) -> Future[int | KvPoolError]:
        put = _Put(self._record(PageRecord(key, len(page), metadata)), page)
        self._put.append(put)
        if not self._puts_awaited:  # else `_put_all` takes this one too: it clears the flag before it looks
            self._puts_awaited = True
            asyncio.run_coroutine_threadsafe(self._put_all(), self._loop)
        return put.done

    def _record(self, record: PageRecord) -> PageRecord:
        """What is kept of a page: pages of a stream are much alike."""
        self._last = record.sharing(self._last) if self._last is not None else record
        return self._last

    async def _put_all(self) -> None:
        """All pages that are there by now, in one step each of reserving, filling and committing."""
        self._puts_awaited = False
        puts: list[_Put] = []
        while self._put:
            puts.append(self._put.popleft())
        try:
            answers = await self._answers(puts)
        except Exception as error:
            for put in puts:
                put.done.set_exception(error)
        except BaseException:  # the loop ends
            for put in puts:
                put.done.set_exception(ServiceUnavailable("the pagestore has stopped"))
            raise
        else:
            for put, answer in zip(puts, answers, strict=True):
                put.done.set_result(answer)

    async def _answers(self, puts: Sequence[_Put]) -> list[int | KvPoolError]:
        pages = self._engine.pages
        reserved = await pages.reserve(self._peer, [put.item for put in puts])
        leases: list[int] = []
        for put, answer in zip(puts, reserved, strict=True):
            if isinstance(answer, Grant):
                with pages.view(answer) as view:
                    view[:] = put.page
                leases.append(answer.lease_id)
        committed = iter(await pages.commit(self._peer, leases, durable=self._durable) if leases else ())
        return [
            await self._put_answer(put, next(committed) or Admission.RESERVED if isinstance(answer, Grant) else answer)
            for put, answer in zip(puts, reserved, strict=True)
        ]

    async def _put_answer(self, put: _Put, answer: Admission | KvPoolError) -> int | KvPoolError:
        if answer is Admission.EXISTS and self._durable:
            return await self._engine.pages.make_durable(put.item.key) or int(answer)
        return int(answer) if isinstance(answer, Admission) else answer

    def commit(self, grant: WriteGrant) -> Future[KvPoolError | None]:
        # Verified here, where the page has just passed through the processor's caches.
        fault = self._engine.pages.verify_written(self._peer, grant.lease_id)
        committing = self._engine.pages.commit_verified(self._peer, grant.lease_id, fault, durable=self._durable)
        return asyncio.run_coroutine_threadsafe(committing, self._loop)

    def abort(self, grants: Sequence[WriteGrant]) -> None:
        lease_ids = [grant.lease_id for grant in grants]

        async def abort() -> None:
            self._engine.pages.abort(self._peer, lease_ids)

        _on_loop(self._loop, abort())

    def close(self) -> None:
        async def close() -> None:
            self._engine.sessions.close(self._peer)

        _on_loop(self._loop, close())

    def _acquire(
        self,
        keys: Sequence[PageKey],
        timeout_s: float,
        acquired: Future[Sequence[ReadGrant | KvPoolError | None]],
    ) -> None:
        answers: list[ReadGrant | KvPoolError | None] = [None] * len(keys)

        def on_acquired(some: Sequence[Acquired], final: bool) -> None:
            for one in some:
                answers[one.item_index] = self._read_grant(one.grant) if one.grant is not None else one.error
            # Cancelled: the stream has ended, and its session gives the leases back.
            if final and acquired.set_running_or_notify_cancel():
                acquired.set_result(answers)

        wanted = [PageRequest(key=key) for key in keys]
        try:
            self._engine.pages.acquire(self._peer, wanted, wait_s=timeout_s, on_acquired=on_acquired)
        except Exception as error:
            if acquired.set_running_or_notify_cancel():
                acquired.set_exception(error)

    def _read_grant(self, grant: Grant) -> ReadGrant:
        page = self._engine.pages.view(grant)
        return ReadGrant(lease_id=grant.lease_id, page=page, metadata=grant.slot.page.metadata)


def _on_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(work, loop).result()
