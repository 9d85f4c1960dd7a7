"""Sends a node's location changes to the index on an ordered stream, across reconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc

from kvpool.client.channel import closed_channel_error
from kvpool.client.index import IndexClient
from kvpool.core.cluster import LocationChange, NodeLease
from kvpool.core.errors import KvPoolError, ServiceUnavailable, StoreUnavailable
from kvpool.v1 import index_pb2
from kvpool.wire.convert_cluster import held_chunks_to_proto, location_change_to_proto, part_span_to_proto
from kvpool.wire.status import StreamStatus
from kvpool_server.node.announce_queue import AnnounceBatch, AnnounceQueue

_Call = grpc.aio.StreamStreamCall


class Announcer:
    """One announce stream at a time over a queue that outlives streams. Belongs to one event loop."""

    def __init__(
        self,
        index: IndexClient,
        node_id: bytes,
        queue: AnnounceQueue,
        *,
        on_acknowledged: Callable[[], None],
        linger_s: float,
    ) -> None:
        """linger_s: changes of a chunk that come within it are merged, unless a caller waits for them."""
        self._index = index
        self._node_id = node_id
        self._queue = queue
        self._on_acknowledged = on_acknowledged
        self._linger_s = linger_s
        self._work = asyncio.Event()  # there may be something to send
        self._hurry = asyncio.Event()  # a caller waits for an acknowledgement
        self._waiters = 0
        self._progress = asyncio.Condition()
        self._stream: asyncio.Future[None] | None = None
        self._sent_s = float("-inf")
        self.last_progress_s = asyncio.get_running_loop().time()

    def add(self, changes: Sequence[LocationChange]) -> None:
        """Queue changes, in order."""
        if not self._queue.in_flight:
            self.last_progress_s = asyncio.get_running_loop().time()
        self._queue.add(changes)
        self._work.set()

    def wake(self) -> None:
        """There may be something to send."""
        self._work.set()

    async def wait_acknowledged(self) -> None:
        """Return when the index has everything that was added before this call."""
        target = self._queue.offered
        self._waiters += 1
        self._hurry.set()
        self._work.set()
        try:
            async with self._progress:
                await self._progress.wait_for(lambda: self._queue.acknowledged >= target and not self._queue.unsure)
        finally:
            self._waiters -= 1
            if not self._waiters:
                self._hurry.clear()

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
        status = StreamStatus(call, endpoints.config.tls)
        tasks = [asyncio.create_task(self._write(call, status, lease)), asyncio.create_task(self._read(call, status))]
        try:
            await asyncio.wait([*tasks, self._stream], return_when=asyncio.FIRST_COMPLETED)
            raise self._cause(tasks, self._stream)
        except ServiceUnavailable:
            endpoints.fail(endpoint)
            raise
        except StoreUnavailable:
            endpoints.leave(endpoint)
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
            node_id=self._node_id,
            incarnation=lease.incarnation,
            announce_epoch=lease.announce_epoch,
            process_id=lease.process_id,
        )
        try:
            await call.write(index_pb2.AnnounceRequest(open=opened))
            while True:
                self._work.clear()
                batch = self._queue.next_batch()
                if batch is None:
                    await self._notify()
                    await self._work.wait()
                    await self._linger()
                    continue
                self._sent_s = asyncio.get_running_loop().time()
                await call.write(_message(batch))
        except grpc.RpcError as error:
            raise status.error(error) from error
        except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            await asyncio.sleep(self._linger_s)  # the call has ended: let the reader say why
            raise closed_channel_error(error) from error

    async def _linger(self) -> None:
        """Let more changes of the same chunks come, unless the next batch is full or a caller waits for it."""
        if self._queue.in_flight or self._queue.has_full_batch:
            return
        now_s = asyncio.get_running_loop().time()
        pause_s = max(self._linger_s / 4, self._sent_s + self._linger_s - now_s)
        try:
            async with asyncio.timeout(pause_s):
                await self._hurry.wait()
        except TimeoutError:
            pass

    async def _read(
        self, call: _Call[index_pb2.AnnounceRequest, index_pb2.AnnounceResponse], status: StreamStatus
    ) -> None:
        try:
            async for answer in call:
                self._queue.acknowledge(answer.acknowledged_sequence)
                self.last_progress_s = asyncio.get_running_loop().time()
                self._work.set()
                self._on_acknowledged()
                await self._notify()
        except grpc.RpcError as error:
            raise status.error(error) from error
        except grpc.aio.UsageError as error:
            raise closed_channel_error(error) from error
        raise ServiceUnavailable("the index ended the announce stream")

    async def _notify(self) -> None:
        async with self._progress:
            self._progress.notify_all()


def _message(batch: AnnounceBatch) -> index_pb2.AnnounceRequest:
    if batch.part is not None:
        held = held_chunks_to_proto(batch.changes)
        return index_pb2.AnnounceRequest(replace_part=part_span_to_proto(batch.part, batch.sequence, held))
    if batch.buckets is None:
        changes = map(location_change_to_proto, batch.changes)
        return index_pb2.AnnounceRequest(batch=index_pb2.AnnounceBatch(sequence=batch.sequence, changes=changes))
    first, last = batch.buckets
    return index_pb2.AnnounceRequest(
        replace_range=index_pb2.ReplaceRange(
            sequence=batch.sequence,
            first_bucket=first,
            last_bucket=last,
            held=held_chunks_to_proto(batch.changes),
        )
    )
