"""Objects by key in the cluster, for callers that have keys and host buffers: other caches, tiers, host pools.

They go through the pagestore of this host, without an agent. Whatever fails is a miss.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from types import TracebackType
from typing import Any, Self, TypeAlias

from kvpool.client.retry import LATER
from kvpool.client.store_config import StoreConfig
from kvpool.client.store_pool import AsyncStorePages
from kvpool.client.store_sync import StorePages
from kvpool.client.store_values import ChunkPlace, KeyspaceShards, OpenedShards
from kvpool.client.streaming_copy import copy
from kvpool.core.errors import InvalidRequest
from kvpool.core.external_keys import foreign_chunk_hash, object_keyspace, object_range, salt_of
from kvpool.core.grid import ShardGrid
from kvpool.core.payload import ShardPayload
from kvpool.core.retention import NO_RETENTION, Retention

ObjectKey: TypeAlias = bytes | str | tuple[bytes, ...]
"""A name: equal only for equal names. Of several parts, none of which is taken for another's beginning."""
HostBuffer: TypeAlias = Any
"""Contiguous host memory with the buffer protocol: bytes, a memoryview, a numpy array; writable for `get`."""


class AsyncObjects:
    """Objects of one size in one keyspace. Belongs to the event loop of its pages."""

    def __init__(self, pages: AsyncStorePages, space: KeyspaceShards, size_bytes: int) -> None:
        """space: of an `object_keyspace` of so many bytes."""
        self._pages, self._space, self._size_bytes = pages, space, size_bytes
        grid = ShardGrid.of(space.spec)
        shapes = [ShardPayload.of(space.spec, grid, shard) for shard in range(grid.shard_count)]
        self._parts = [object_range(shape, size_bytes) for shape in shapes]

    async def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Which of them are in the cluster."""
        opened = await self._opened()
        return await self._pages.find(opened, _chunks(opened, keys)) if opened else [False] * len(keys)

    async def get(self, keys: Sequence[ObjectKey], buffers: Sequence[HostBuffer]) -> list[bool]:
        """Read objects into buffers; which of them came. The buffer of one that did not may have been written to."""
        views = self._views(keys, buffers)
        for number, view in enumerate(views):
            if view.readonly:
                raise InvalidRequest(f"buffers[{number}] is read-only")
        opened = await self._opened()
        if opened is None:
            return [False] * len(keys)

        def take(position: int, shard: int, payload: memoryview) -> None:
            part = self._parts[shard]
            with payload[: part.size_bytes] as used:
                copy(used, views[position][part.offset_bytes : part.end_bytes])

        try:
            return await self._pages.get(opened, _chunks(opened, keys), take)
        finally:
            _release(views)

    async def put(
        self,
        keys: Sequence[ObjectKey],
        buffers: Sequence[HostBuffer],
        *,
        written: list[int] | None = None,
        retention: Retention = NO_RETENTION,
    ) -> list[bool]:
        """Write objects; which of them are in the cluster now. written: gets the positions of those that were not.

        retention: of all of them; it extends what holds for those that are there.
        """
        views = self._views(keys, buffers)
        opened = await self._opened()
        if opened is None:
            return [False] * len(keys)
        filled: set[int] = set()

        def fill(position: int, shard: int, payload: memoryview) -> None:
            filled.add(position)
            part = self._parts[shard]
            with payload[: part.size_bytes] as used:
                copy(views[position][part.offset_bytes : part.end_bytes], used)
            payload[part.size_bytes :] = bytes(payload.nbytes - part.size_bytes)

        try:
            stored = await self._pages.put(opened, _chunks(opened, keys, retention), fill)
        finally:
            _release(views)
        if written is not None:
            written += sorted(position for position in filled if stored[position])
        return stored

    async def clear(self) -> bool:
        """Drop all of them on every pagestore; False if one could not be asked."""
        opened = await self._opened()
        return opened is not None and await self._pages.clear(opened)

    async def _opened(self) -> OpenedShards | None:
        """None if the index cannot be asked now. raises: what the configuration must change."""
        try:
            return await self._pages.open(self._space)
        except LATER as error:
            self._pages.note_failure("keyspace", error)
            return None

    def _views(self, keys: Sequence[ObjectKey], buffers: Sequence[HostBuffer]) -> list[memoryview]:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        if len(views) != len(keys):
            raise InvalidRequest(f"{len(keys)} keys and {len(views)} buffers: there must be one for each")
        for number, view in enumerate(views):
            if view.nbytes != self._size_bytes:
                raise InvalidRequest(f"buffers[{number}] has {view.nbytes} bytes, objects here have {self._size_bytes}")
        return views


def _release(views: Sequence[memoryview]) -> None:
    """Let go of the caller's memory, which it may unmap: the frames of a call that failed may live on in its error."""
    for view in views:
        view.release()


def _chunks(opened: OpenedShards, keys: Sequence[ObjectKey], retention: Retention = NO_RETENTION) -> list[ChunkPlace]:
    return [ChunkPlace.alone(object_hash(opened.hash_key, key), retention) for key in keys]


@lru_cache(maxsize=1 << 14)  # what is looked up is read next
def object_hash(hash_key: bytes, key: ObjectKey) -> bytes:
    """16 bytes for a key, under the keyspace's hash key."""
    if isinstance(key, tuple):
        return foreign_chunk_hash(hash_key, key)
    return foreign_chunk_hash(hash_key, [key.encode() if isinstance(key, str) else key])


class Store:
    """Objects of one size by key. Thread-safe; calls wait, for a bounded time. After `close` everything is a miss."""

    def __init__(self, config: StoreConfig, space: KeyspaceShards, object_bytes: int) -> None:
        """Use `connect_store`."""
        self._pages = StorePages(config, f"objects of {space.name}")
        self._space, self._object_bytes = space, object_bytes

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Which objects are in the cluster, as far as the index knows: one that was just put may take a moment."""
        return self._run(lambda objects: objects.exists(keys), len(keys))

    def get(self, keys: Sequence[ObjectKey], buffers: Sequence[HostBuffer]) -> list[bool]:
        """Read objects into writable buffers of object_bytes each, verified; which of them came."""
        return self._run(lambda objects: objects.get(keys, buffers), len(keys))

    def put(self, keys: Sequence[ObjectKey], buffers: Sequence[HostBuffer]) -> list[bool]:
        """Write objects that the cluster does not have; which of them it has now. A key names one content for good."""
        return self._run(lambda objects: objects.put(keys, buffers), len(keys))

    def clear(self) -> bool:
        """Drop all objects of this store on every pagestore; False if one could not be asked."""
        return all(self._run(lambda objects: _one(objects.clear()), 1))

    def close(self) -> None:
        """End the session and the thread. Idempotent."""
        self._pages.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, work: Callable[[AsyncObjects], Awaitable[list[bool]]], count: int) -> list[bool]:
        return self._pages.run(lambda pages: work(AsyncObjects(pages, self._space, self._object_bytes)), count)


async def _one(answer: Awaitable[bool]) -> list[bool]:
    return [await answer]


def connect_store(
    pagestore: str,
    *,
    index: str | Sequence[str],
    name: str,
    revision: str = "1",
    object_bytes: int,
    host_id: str = "",
    config: StoreConfig | None = None,
) -> Store:
    """Keep objects of object_bytes bytes each in the cluster, through this host's pagestore ("unix:/path").

    index: "host:port" of each replica. name, revision: stores with equal ones, and equal sizes, have the same objects.
    config: deadlines and limits instead of the defaults; then the addresses are its own.
    Nothing is asked before the first call. raises: InvalidRequest naming the argument.
    """
    if config is None:
        endpoints = index if isinstance(index, str) else list(index)
        config = StoreConfig.of({"index_endpoints": endpoints, "pagestore": pagestore, "host_id": host_id})
    return Store(config, object_space("objects", name, revision, object_bytes, kind="object"), object_bytes)


def object_space(
    engine: str, model: str, revision: str, size_bytes: int, *, kind: str, salt: Sequence[object] = ()
) -> KeyspaceShards:
    """The keyspace of objects of one size. kind: what `engine` calls their arrangement. salt: what else must agree."""
    spec = object_keyspace(
        engine=engine,
        kind=kind[:900],
        model_id=model,
        model_revision=revision,
        size_bytes=size_bytes,
        salt=salt_of(engine, [*salt, kind]),
    )
    return KeyspaceShards.of(engine, spec, ShardGrid.of(spec).all_shards)
