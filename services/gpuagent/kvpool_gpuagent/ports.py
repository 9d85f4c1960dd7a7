"""What the gpuagent's engine needs from the world: a device that reaches the engine's cache, and a pool of pages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpool.core.cluster import ChainMatch, ChainQuery, RemoteSource
from kvpool.core.errors import KvPoolError
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout
from kvpool.core.page import PageKey

BlockIds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCopy:
    """One page to move between its slot and the engine's cache.

    page: the whole slot (header + payload + sum table), writable for a gather.
    block_ids: [chunk_tokens / block_tokens] int64, each in [0, block_count), checked before.
    skip_tokens: a scatter leaves the first this many tokens of the chunk untouched.
    """

    key: PageKey
    page: memoryview
    block_ids: BlockIds
    skip_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEvent:
    """Engine GPU work that must have finished before a gather reads; `generation` tells a re-recorded event apart."""

    slot: int
    generation: int


StopFlag = Callable[[], bool]
"""Asked between bursts; True means that nothing more may be started."""


class EngineCache(Protocol):
    """One engine rank's paged KV cache, mapped. Methods block and are called from worker threads, several at once."""

    def gather(self, copies: Sequence[PageCopy], after: EngineEvent | None, stop: StopFlag) -> int:
        """Fill slots from the cache and seal them (sum table, then header).

        Returns how many leading copies are complete: all of them, unless `stop` said so. When it returns, no work
        that touches cache or slots is left running.
        """
        ...

    def scatter(self, copy: PageCopy, first_layer: int, last_layer: int) -> None:
        """Move the page's model layers [first_layer, last_layer) into the cache; the page was verified before."""
        ...

    def close(self) -> None:
        """Unmap; nothing may be running. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedHandle:
    """Engine memory that reached the agent: a descriptor (shared memory, owned by the receiver) or CUDA IPC fields."""

    size_bytes: int
    descriptor: int | None = None
    file_offset: int = 0


class Device(Protocol):
    """Reaches engine caches."""

    name: str  # "cpu" or "cuda"

    def map_cache(
        self, spec: KeyspaceSpec, grid: ShardGrid, layout: EngineLayout, handles: Sequence[MappedHandle]
    ) -> EngineCache:
        """Map an engine's memory; takes ownership of descriptors. Blocks. Raises InvalidRequest naming the argument."""
        ...

    def register_segment(self, segment: memoryview) -> Callable[[], None]:
        """Make an arena segment fast to copy from and to (CUDA: pin it); returns what undoes it."""
        ...

    def close(self) -> None:
        """Release the device."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSlot:
    """A page may be written: fill `page`, then commit or abort."""

    key: PageKey
    page: memoryview
    lease: object  # what the pool knows it by


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSlot:
    """A page may be read (and must be verified) until released. `source` is a kvpool.v1 Source number."""

    key: PageKey
    page: memoryview
    source: int
    lease: object


@dataclass(frozen=True, slots=True, kw_only=True)
class PageWish:
    """One page that a load wants: its key, where a match saw it, and what is kept beside it."""

    key: PageKey
    chunk_index: int
    parent_hash: bytes
    group_head_hash: bytes
    chain_head_hash: bytes
    sources: tuple[RemoteSource, ...]  # best first


class PagePool(Protocol):
    """Pages of the cluster as one engine session sees them: through the local pagestore's arena, or page streams.

    Leases belong to the pool's session; a broken session raises ServiceUnavailable or SessionUnknown from every call.
    """

    kind: str  # "arena" or "remote"
    local_node_id: bytes  # of this host's pagestore once it was reached; empty before and without one
    window_pages: int  # leases of each kind held at once at most

    async def reserve(
        self, wishes: Sequence[PageWish], page_bytes: Sequence[int]
    ) -> Sequence[WriteSlot | int | KvPoolError]:
        """Per page: a slot, Admission.EXISTS or Admission.PENDING, or why not."""
        ...

    async def commit(self, slots: Sequence[WriteSlot]) -> Sequence[KvPoolError | None]:
        """Make pages visible; per page None or why not. The slots are gone either way."""
        ...

    async def abort(self, slots: Sequence[WriteSlot]) -> None:
        """Give slots back unwritten."""
        ...

    def acquire(
        self, wishes: Sequence[PageWish], wait_s: float
    ) -> AsyncGenerator[tuple[int, ReadSlot | KvPoolError | None], None]:
        """Yield (position, slot | error | None for a plain miss) as pages settle, each position once.

        A consumer that closes the generator early owns what was yielded; what settles later is released by the pool.
        """
        ...

    async def release(self, slots: Sequence[ReadSlot], corrupt: Sequence[ReadSlot] = ()) -> None:
        """End reads; `corrupt` ones failed verification."""
        ...

    async def connect(self) -> None:
        """Reach the pagestore now rather than at the first page; failing is no error, each call tries again."""
        ...

    async def close(self) -> None:
        """End the session normally: nothing is leased any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedKeyspace:
    """What the index answers to an opened keyspace."""

    keyspace: bytes  # 16-byte id
    hash_key: bytes  # 32 bytes


class IndexPort(Protocol):
    """The index as the agent sees it. Every call has a deadline; raises StoreUnavailable, DeadlineExceeded, ..."""

    async def open_keyspace(self, name: str, spec: KeyspaceSpec) -> OpenedKeyspace:
        """Bind or check a name. Raises KeyspaceMismatch, GeometryUnsupported, NotServed."""
        ...

    async def match(self, query: ChainQuery) -> ChainMatch:
        """The longest covered prefix."""
        ...


class PoolFactory(Protocol):
    """Makes the page pool of one engine session."""

    def __call__(self, keyspace: bytes, spec: KeyspaceSpec, peer_name: str) -> PagePool: ...
