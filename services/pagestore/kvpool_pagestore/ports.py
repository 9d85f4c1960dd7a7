"""What the pagestore's engine needs from the world."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar

from kvpool.core.cancel import CancelToken
from kvpool.core.cluster import LiveNode, LocationChange, NodeInfo, PageMetadata, RemoteSource
from kvpool.core.errors import DrainBlocked, KvPoolError
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.page import PageKey
from kvpool.core.policy import VersionedPolicy
from kvpool_pagestore.core.chunk_columns import FoundChunks
from kvpool_pagestore.core.replication import HeldChunk, Holder
from kvpool_pagestore.core.stored_pages import StoredPages

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


class Arena(Protocol):
    """Segments of shared memory. Methods block (they enter the kernel for milliseconds) unless they say otherwise."""

    def create_segment(self, segment_id: int, size_bytes: int) -> None:
        """Create and map a segment with all its memory reserved. Raises ArenaFull when there is not so much memory."""
        ...

    def prepare_segment(self, segment_id: int, size_bytes: int, is_wanted: Callable[[], bool]) -> bool:
        """Create and map a segment with all its memory in place: touching it faults no more in this process.

        `is_wanted` is asked every few tens of milliseconds; once it says no, nothing is left of the segment and the
        answer is False. Raises ArenaFull when there is not so much memory.
        """
        ...

    def view(self, segment_id: int, offset: int, size_bytes: int) -> memoryview:
        """A writable view. Does not block. Every view must be gone before the segment is destroyed."""
        ...

    def descriptor(self, segment_id: int, session_id: bytes) -> int:
        """The segment's descriptor, owned by the arena: duplicate it to pass it on. Does not block.

        From the first call on, the session's peer may map the segment: a process that follows this one learns of it
        until the session is forgotten. Raises KeyError; ArenaFull when that cannot be recorded.
        """
        ...

    def destroy_segment(self, segment_id: int) -> None:
        """Unmap and close a segment; its memory is free once no peer maps it."""
        ...

    def create_session_file(self, session_id: bytes) -> int:
        """A new locked descriptor to hand to the session's peer; the caller owns it."""
        ...

    def gone_sessions(self, session_ids: Sequence[bytes]) -> Sequence[bytes]:
        """Those whose peer processes have all let go of the session's descriptor."""
        ...

    def forget_sessions(self, session_ids: Sequence[bytes]) -> None:
        """Remove session files, and the records of what their peers got."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PageWrite:
    """One sealed page to make durable, or to send to another node. `page` views its bytes, until the call returns.

    is_used: somebody has asked for it since it came.
    """

    key: PageKey
    page: memoryview
    metadata: PageMetadata
    is_used: bool = False


OnDurable = Callable[[PageKey, KvPoolError | None], None]
"""Called with the result of one page: None once it is durable, else why it is not.

Called exactly once for each item of a batch, from the writing thread, before `put_batch` returns. Results of pages of a
batch may differ, and a key that is named twice is reported twice. None means
that the sync which covers the page's bytes and its record has returned: a process killed in the callback has the page
after its restart. A failure means that this write left nothing that a reader could find; an older copy of the page, if
there was one, may be gone or still be there.
"""


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

    def scan(self) -> Iterator[StoredPages]:
        """All durable pages, some at a time and by ascending packed key, without reading their payloads."""
        ...

    def take_found(self) -> FoundChunks | None:
        """All durable pages as `open` found them; None if it did not keep them, they changed, or were taken."""
        ...

    def put_batch(self, pages: Sequence[PageWrite], on_durable: OnDurable) -> None:
        """Write pages and sync them. Calls on_durable once per page, then returns; never raises for one page."""
        ...

    def get_into(self, key: PageKey, destination: memoryview) -> int | None:
        """Read a page into `destination`; its bytes, or None if absent. Not verified here: the engine verifies.

        Raises PageCorrupt when the store itself finds that this page is damaged: drop the page, the tier works.
        """
        ...

    def set_metadata(self, changes: Sequence[tuple[PageKey, PageMetadata]]) -> None:
        """Replace the metadata of pages, durably: it is synced when this returns. Absent pages are ignored."""
        ...

    def delete_batch(self, keys: Sequence[PageKey]) -> None:
        """Forget pages; absent ones are ignored."""
        ...

    def delete_keyspace(self, keyspace: bytes) -> None:
        """Forget all pages of a keyspace."""
        ...

    def charged_bytes(self, page_bytes: int) -> int:
        """What one page counts towards the tier's budget, all that lies beside it included. Does not block."""
        ...

    def probe(self) -> None:
        """Read and write a little, durably, as `put_batch` would. Raises StoreFault while it would fail."""
        ...

    def used_bytes(self) -> int:
        """Bytes of the tier as its file system counts them."""
        ...

    def close(self) -> None:
        """Sync and close; idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PullItem:
    """One page to pull into a slot of `destination` (exactly the page's bytes).

    on_metadata: called with the owner's metadata of it, before the page is reported and on the same thread.
    """

    key: PageKey
    destination: memoryview
    on_metadata: Callable[[PageMetadata], None] = lambda metadata: None


class PeerPages(Protocol):
    """Pages of other nodes. Blocks; called from worker threads."""

    def pull(
        self,
        source: RemoteSource,
        spec: KeyspaceSpec,
        items: Sequence[PullItem],
        deadline_s: float,
        on_page: Callable[[int, KvPoolError | None, bool], None],
        stop: CancelToken,
    ) -> None:
        """Stream pages of one keyspace into their slots. Calls on_page(item index, error, hit) once per item.

        `deadline_s` counts from now; the order is free. A page is reported as a hit only when all its bytes arrived;
        the engine verifies them. Never raises: a broken stream is reported on every item that had not settled. Returns
        soon after `stop` is stopped; no slot is touched after the return.
        """
        ...

    def verify(self, source: RemoteSource, spec: KeyspaceSpec, keys: Sequence[PageKey], deadline_s: float) -> None:
        """Ask a source whose pages of one keyspace fail their sums here to verify its own copies. Never raises."""
        ...

    def push(
        self,
        target: RemoteSource,
        spec: KeyspaceSpec,
        items: Sequence[PageWrite],
        deadline_s: float,
        *,
        require_durable: bool,
        on_page: Callable[[int, KvPoolError | None], None],
        stop: CancelToken,
    ) -> None:
        """Give pages of one keyspace to another node. Calls on_page(item index, error) once per item; None: it has it.

        require_durable: it has it on its disk. Never raises: what goes wrong is reported per item. Returns soon after
        `stop` is stopped; no page is read after the return.
        """
        ...

    def close(self) -> None:
        """End all connections; running pulls fail."""
        ...


class IndexLink(Protocol):
    """The index as the engine sees it: changes are queued for it, never waited for."""

    def announce(self, changes: Sequence[LocationChange]) -> None:
        """Queue changes, in order. Never blocks; changes of one chunk may be merged. Called on the event loop."""
        ...

    async def wait_announced(self) -> None:
        """Return when everything announced before is acknowledged; StoreUnavailable if that is unknown."""
        ...

    async def drop_keyspace(self, keyspace: bytes) -> None:
        """Remove this node's locations of a keyspace from the index."""
        ...

    def report_stale(self, key: PageKey, group_head_hash: bytes, source: RemoteSource) -> None:
        """Queue a report that `source` did not hold a page that it was said to hold. Never blocks."""
        ...

    async def fetch_policies(
        self, keyspaces: Sequence[bytes], known: Sequence[VersionedPolicy]
    ) -> Sequence[VersionedPolicy]:
        """Policies of these keyspaces, as far as they have any. known: what a store that lost it gets back.

        Raises StoreUnavailable, ServiceUnavailable, DeadlineExceeded.
        """
        ...

    async def close(self) -> None:
        """Leave the index: this node's locations are gone from every match. Idempotent."""
        ...


class Placement(Protocol):
    """Who else there is, and who holds what.

    All but `me` raise StoreUnavailable, ServiceUnavailable and DeadlineExceeded.
    """

    def me(self) -> NodeInfo | None:
        """This node as it is registered; None before it is, and after it left."""
        ...

    async def nodes(self) -> Sequence[LiveNode]:
        """The live pagestores, this one included."""
        ...

    async def holders(self, runs: Sequence[Sequence[HeldChunk]]) -> list[list[Holder]]:
        """Per chunk, the live nodes that hold some of its shards; nothing for a chunk that the index does not know.

        The chunks of a run are consecutive ones of one chain group; the answer has those of all runs, in order.
        """
        ...

    async def set_draining(self, draining: bool) -> None:
        """Have placement pass this node over, or not any more. Raises DrainBlocked if this node has no index."""
        ...

    async def leave(self) -> None:
        """End the lease: this node's locations leave every match. Not to be undone in this process."""
        ...


class NoPlacement:
    """The Placement of a node that stands alone."""

    def me(self) -> NodeInfo | None:
        return None

    async def nodes(self) -> Sequence[LiveNode]:
        return ()

    async def holders(self, runs: Sequence[Sequence[HeldChunk]]) -> list[list[Holder]]:
        return [[] for run in runs for _ in run]

    async def set_draining(self, draining: bool) -> None:
        raise DrainBlocked("this pagestore has no index and knows no other node")

    async def leave(self) -> None:
        pass


NO_PLACEMENT = NoPlacement()
