"""LMCache's objects as chunks: one keyspace for each model and memory layout, their keys as chunk hashes."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvpool.connectors.direct_pool import DirectPool
from kvpool.connectors.direct_sync import LATER
from kvpool.connectors.direct_values import ChunkPlace, OpenSpace, SharedSpace
from kvpool.core.errors import KvPoolError
from kvpool.core.foreign_keys import foreign_chunk_hash, object_keyspace, object_range, salt_of
from kvpool.core.grid import ShardGrid
from kvpool.core.payload import ShardPayload

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ObjectLayout:
    """What must be equal of two objects' memory. kind: shapes and element types, in words."""

    kind: str
    size_bytes: int


def layout_of_description(description: Any) -> ObjectLayout | None:
    """Of LMCache's MemoryLayoutDesc; None if there is none."""
    if description is None:
        return None
    return _layout(description.shapes, description.dtypes)


def layout_of_object(one: Any) -> ObjectLayout | None:
    """Of LMCache's MemoryObj; None for one whose size is not what its layout says (serialized, or used in part)."""
    metadata = one.metadata  # of several tensors, or of one
    layout = _layout(metadata.shapes or [metadata.shape], metadata.dtypes or [metadata.dtype])
    return layout if layout is not None and layout.size_bytes == one.get_size() else None


def _layout(shapes: Sequence[Any], dtypes: Sequence[Any]) -> ObjectLayout | None:
    if not shapes or any(dtype is None for dtype in dtypes):
        return None
    parts = [(tuple(shape), dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    size_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts)
    kind = "; ".join(f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}" for shape, dtype in parts)
    return ObjectLayout(kind, size_bytes) if size_bytes else None


@dataclass(frozen=True, slots=True)
class ObjectNames:
    """What names objects beside their keys."""

    model_revision: str
    salt: str

    def space(self, model_name: str, layout: ObjectLayout) -> SharedSpace:
        """The keyspace of a model's objects of one layout."""
        return _space(self, model_name, layout)


@lru_cache(maxsize=1024)
def _space(names: ObjectNames, model_name: str, layout: ObjectLayout) -> SharedSpace:
    spec = object_keyspace(
        engine="lmcache",
        kind=layout.kind[:900],
        model_id=model_name,
        model_revision=names.model_revision,
        size_bytes=layout.size_bytes,
        salt=salt_of("lmcache", [names.salt, layout.kind]),
    )
    return SharedSpace.of("lmcache", spec, ShardGrid.of(spec).all_shards)


def object_hash(hash_key: bytes, key: Any) -> bytes:
    """16 bytes for LMCache's ObjectKey: rank, group and its users' salt are part of it."""
    parts = (key.chunk_hash, str(key.kv_rank).encode(), str(key.object_group_id).encode(), key.cache_salt.encode())
    return foreign_chunk_hash(hash_key, parts)


class ObjectBatch:
    """Objects of one task. Those of which no layout is known are misses."""

    def __init__(
        self,
        names: ObjectNames,
        keys: Sequence[Any],
        layouts: Sequence[ObjectLayout | None],
        objects: Sequence[Any] = (),
    ) -> None:
        """objects: their memory, if it is needed."""
        self._keys, self._objects = keys, objects
        self._groups: dict[SharedSpace, list[int]] = {}
        self._sizes = [layout.size_bytes if layout is not None else 0 for layout in layouts]
        for at, (key, layout) in enumerate(zip(keys, layouts, strict=True)):
            if layout is not None:
                self._groups.setdefault(names.space(key.model_name, layout), []).append(at)

    async def find(self, pool: DirectPool) -> list[bool]:
        """Which of them are in the cluster."""
        found = [False] * len(self._keys)
        for opened, members in await self._opened(pool):
            self._spread(found, members, await pool.find(opened, self._chunks(opened, members)))
        return found

    async def load(self, pool: DirectPool) -> list[bool]:
        """Read them; which of them came."""
        loaded = [False] * len(self._keys)
        for opened, members in await self._opened(pool):
            views = self._views(members)

            def take(
                position: int,
                shard: int,
                payload: memoryview,
                opened: OpenSpace = opened,
                members: Sequence[int] = members,
                views: Sequence[memoryview] = views,
            ) -> None:
                part = object_range(_shape(opened, shard), self._sizes[members[position]])
                with payload[: part.size_bytes] as used:
                    views[position][part.offset_bytes : part.end_bytes] = used

            self._spread(loaded, members, await pool.get(opened, self._chunks(opened, members), take))
        return loaded

    async def store(self, pool: DirectPool, fresh: list[int]) -> list[bool]:
        """Write them; which of them are in the cluster now. fresh: gets the positions of those that were not before."""
        stored = [False] * len(self._keys)
        for opened, members in await self._opened(pool):
            views = self._views(members)
            written: set[int] = set()

            def fill(
                position: int,
                shard: int,
                payload: memoryview,
                opened: OpenSpace = opened,
                members: Sequence[int] = members,
                views: Sequence[memoryview] = views,
                written: set[int] = written,
            ) -> None:
                written.add(position)
                part = object_range(_shape(opened, shard), self._sizes[members[position]])
                payload[: part.size_bytes] = views[position][part.offset_bytes : part.end_bytes]
                payload[part.size_bytes :] = bytes(payload.nbytes - part.size_bytes)

            answer = await pool.put(opened, self._chunks(opened, members), fill)
            self._spread(stored, members, answer)
            fresh += sorted(members[position] for position in written if answer[position])
        return stored

    async def _opened(self, pool: DirectPool) -> list[tuple[OpenSpace, list[int]]]:
        opened = []
        for space, members in self._groups.items():
            try:
                opened.append((await pool.open(space), members))
            except LATER as error:
                pool.note_failure("keyspace", error)
            except KvPoolError as error:
                _log.error("kvpool: objects of %s are not shared: %s", space.spec.model_id, error)
        return opened

    def _chunks(self, opened: OpenSpace, members: Sequence[int]) -> list[ChunkPlace]:
        return [ChunkPlace.alone(object_hash(opened.hash_key, self._keys[at])) for at in members]

    def _views(self, members: Sequence[int]) -> list[memoryview]:
        return [memoryview(self._objects[at].byte_array).cast("B") for at in members]

    @staticmethod
    def _spread(into: list[bool], members: Sequence[int], answer: Sequence[bool]) -> None:
        for at, one in zip(members, answer, strict=True):
            into[at] = one


def _shape(opened: OpenSpace, shard: int) -> ShardPayload:
    spec = opened.space.spec
    return ShardPayload.of(spec, ShardGrid.of(spec), shard)
