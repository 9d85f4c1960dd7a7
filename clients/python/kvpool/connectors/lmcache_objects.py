"""LMCache's objects as chunks: one keyspace for each model and memory layout, their keys as chunk hashes."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvpool.client.object_store import AsyncObjects, object_space
from kvpool.client.store_pool import AsyncStorePages
from kvpool.client.store_values import KeyspaceShards
from kvpool.core.errors import KvPoolError

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

    def space(self, model_name: str, layout: ObjectLayout) -> KeyspaceShards:
        """The keyspace of a model's objects of one layout."""
        return _space(self, model_name, layout)


@lru_cache(maxsize=1024)
def _space(names: ObjectNames, model_name: str, layout: ObjectLayout) -> KeyspaceShards:
    return object_space(
        "lmcache", model_name, names.model_revision, layout.size_bytes, kind=layout.kind, salt=[names.salt]
    )


def object_key(key: Any) -> tuple[bytes, ...]:
    """LMCache's ObjectKey as the store takes it: rank, group and its users' salt are part of it."""
    return key.chunk_hash, str(key.kv_rank).encode(), str(key.object_group_id).encode(), key.cache_salt.encode()


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
        self._groups: dict[KeyspaceShards, list[int]] = {}
        self._sizes = [layout.size_bytes if layout is not None else 0 for layout in layouts]
        for at, (key, layout) in enumerate(zip(keys, layouts, strict=True)):
            if layout is not None:
                self._groups.setdefault(names.space(key.model_name, layout), []).append(at)

    async def find(self, pages: AsyncStorePages) -> list[bool]:
        """Which of them are in the cluster."""
        return await self._each(pages, lambda objects, members: objects.exists(self._named(members)))

    async def load(self, pages: AsyncStorePages) -> list[bool]:
        """Read them; which of them came."""
        return await self._each(
            pages, lambda objects, members: objects.get(self._named(members), self._memory(members))
        )

    async def store(self, pages: AsyncStorePages, fresh: list[int]) -> list[bool]:
        """Write them; which of them are in the cluster now. fresh: gets the positions of those that were not before."""

        async def put(objects: AsyncObjects, members: Sequence[int]) -> list[bool]:
            written: list[int] = []
            stored = await objects.put(self._named(members), self._memory(members), written=written)
            fresh.extend(members[position] for position in written)
            return stored

        return await self._each(pages, put)

    async def _each(
        self, pages: AsyncStorePages, work: Callable[[AsyncObjects, Sequence[int]], Awaitable[list[bool]]]
    ) -> list[bool]:
        """The answers of one call for each keyspace, in the order of the keys."""
        answers = [False] * len(self._keys)
        for space, members in self._groups.items():
            try:
                part = await work(AsyncObjects(pages, space, self._sizes[members[0]]), members)
            except KvPoolError as error:
                _log.error("kvpool: objects of %s are not shared: %s", space.spec.model_id, error)
                continue
            for at, answer in zip(members, part, strict=True):
                answers[at] = answer
        return answers

    def _named(self, members: Sequence[int]) -> list[tuple[bytes, ...]]:
        return [object_key(self._keys[at]) for at in members]

    def _memory(self, members: Sequence[int]) -> list[memoryview]:
        return [memoryview(self._objects[at].byte_array) for at in members]
