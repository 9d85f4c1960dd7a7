"""Sends a node's location changes to the index on an ordered stream, across reconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import grpc

from kvpool.client.announce_queue import AnnounceBatch, AnnounceQueue
from kvpool.client.channel import closed_channel_error
from kvpool.client.index import IndexClient
from kvpool.core.cluster import LocationChange, NodeLease
from kvpool.core.errors import KeyspaceUnknown, KvPoolError, ServiceUnavailable, TenantDenied
from kvpool.v1 import index_pb2
from kvpool.wire.convert_cluster import location_change_to_proto
from kvpool.wire.stream_status import StreamStatus

_Call = grpc.aio.StreamStreamCall


class Announcer:
    """One announce stream at a time over a queue that outlives streams. Belongs to one event loop."""

    def __init__(
        self,
        index: IndexClient,
        node_id: bytes,
        queue: AnnounceQueue,
        *,
        snapshot: Callable[[], Iterator[LocationChange]],
        linger_s: float,
    ) -> None:
        self._index = index
        self._node_id = node_id
        self._queue = queue
        self._snapshot = snapshot
        self._linger_s = linger_s
        self._work = asyncio.Event()  # there may be something to send
        self._progress = asyncio.Condition()
        self._stream: asyncio.Future[None] | None = None
        self._snapshot_wanted = False
        self.last_progress_s = asyncio.get_running_loop().time()

    def add(self, changes: Sequence[LocationChange]) -> None:
        """Queue changes, in order."""
        if not self._queue.in_flight:
            self.last_progress_s = asyncio.get_running_loop().time()
        self._queue.add(changes)
        self._work.set()

    def start_snapshot(self) -> None:
        """Tell everything again, on this stream or the next."""
        self._snapshot_wanted = True
        self._work.set()

    async def wait_acknowledged(self) -> None:
        """Return when the index has everything that was added before this call."""
        target = self._queue.offered
        async with self._progress:
            await self._progress.wait_for(lambda: self._queue.acknowledged >= target)

    def break_stream(self, cause: str) -> None:
        """End the running stream, if any; `run` raises ServiceUnavailable."""
        if self._stream is not None and not self._stream.done():
            self._stream.set_exception(ServiceUnavailable(cause))

    async def run(self, lease: NodeLease) -> None:
        """Run one stream until it breaks. Always raises: what ended it."""
        endpoints = self._index.endpoints
        endpoint = endpoints.endpoint
        self._queue.rewind()
        self.last_progress_s = asyncio.get_running_loop().time()
        self._stream = asyncio.get_running_loop().create_future()
        call = endpoints.stub().Announce(metadata=endpoints.config.metadata)
        status = StreamStatus(call)
        tasks = [asyncio.create_task(self._write(call, status, lease)), asyncio.create_task(self._read(call, status))]
        try:
            await asyncio.wait([*tasks, self._stream], return_when=asyncio.FIRST_COMPLETED)
            raise self._cause(tasks, self._stream)
        except ServiceUnavailable:
            endpoints.fail(endpoint)
            raise
        finally:
            call.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if not self._stream.cancel() and not self._stream.cancelled():
                self._stream.exception()  # was raised above, or came too late to matter

    def _cause(self, tasks: list[asyncio.Task[None]], stream: asyncio.Future[None]) -> KvPoolError:
        """What ended the stream; what the server said counts more than a write that failed for it."""
        for done in (*reversed(tasks), stream):
            if done.done() and not done.cancelled():
                error = done.exception()
                if isinstance(error, KvPoolError):
                    return error
                if error is not None:
                    raise error
        return ServiceUnavailable("the announce stream was cancelled")

    async def _write(
        self,
        call: _Call[index_pb2.AnnounceRequest, index_pb2.AnnounceResponse],
        status: StreamStatus,
        lease: NodeLease,
    ) -> None:
        opened = index_pb2.AnnounceOpen(
            node_id=self._node_id, incarnation=lease.incarnation, announce_epoch=lease.announce_epoch
        )
        try:
            await call.write(index_pb2.AnnounceRequest(open=opened))
            while True:
                if self._queue.dirty and not self._queue.in_flight:
                    await self._repair()
                self._work.clear()
                batch = self._next_batch()
                if batch is None:
                    await self._notify()
                    await self._work.wait()
                    await asyncio.sleep(self._linger_s)  # more changes of the same chunks may come
                    continue
                changes = [location_change_to_proto(change) for change in batch.changes]
                message = index_pb2.AnnounceBatch(sequence=batch.sequence, changes=changes)
                await call.write(index_pb2.AnnounceRequest(batch=message))
        except grpc.RpcError as error:
            raise status.error(error) from error
        except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            await asyncio.sleep(self._linger_s)  # the call has ended: let the reader say why
            raise closed_channel_error(error) from error

    def _next_batch(self) -> AnnounceBatch | None:
        try:
            if self._snapshot_wanted:
                self._queue.start_snapshot(self._snapshot())
                self._snapshot_wanted = False
            return self._queue.next_batch()
        except Exception:
            self._snapshot_wanted = True  # the owner's iterator failed half-way
            raise

    async def _read(
        self, call: _Call[index_pb2.AnnounceRequest, index_pb2.AnnounceResponse], status: StreamStatus
    ) -> None:
        try:
            async for answer in call:
                self._queue.acknowledge(answer.acknowledged_sequence)
                self.last_progress_s = asyncio.get_running_loop().time()
                self._work.set()
                await self._notify()
        except grpc.RpcError as error:
            raise status.error(error) from error
        except grpc.aio.UsageError as error:
            raise closed_channel_error(error) from error
        raise ServiceUnavailable("the index ended the announce stream")

    async def _repair(self) -> None:
        """Changes were dropped: have their keyspaces forgotten at the index, then tell everything again."""
        done: set[bytes] = set()
        while todo := self._queue.dirty - done:
            for keyspace in todo:
                try:
                    await self._index.drop_keyspace_locations(keyspace, self._node_id)
                except (KeyspaceUnknown, TenantDenied):
                    continue  # what stays behind costs one miss a location and is reported then
            done |= todo
        self._queue.dirty.clear()
        self.start_snapshot()

    async def _notify(self) -> None:
        async with self._progress:
            self._progress.notify_all()
