"""Pages that `kvpool cache export` takes from a cluster: which nodes hold them, and reading them there, verified."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import reduce
from operator import or_
from types import TracebackType

from kvpool.client.index import IndexClient
from kvpool.client.pagestore_control import ListedChunk
from kvpool.client.transfer import PageToRead, PageTransferClient
from kvpool.core.chain_order import in_chain_order
from kvpool.core.cluster import NodeInfo, PageMetadata
from kvpool.core.errors import KvPoolError
from kvpool.core.export_format import Manifest
from kvpool.core.grid import ShardGrid, shards_in
from kvpool.core.outcome import Tier
from kvpool.core.page import PageKey, page_bytes, verify
from kvpool_cli.chains import Chain, matches

BATCH_BYTES = 64 << 20
_READ_TIMEOUT_S = 120.0
_SOURCES_TRIED = 4  # of one page
_NODES_AT_ONCE = 8
_CTRL_C_SEEN_S = 0.5  # one that comes just before a thread begins to wait is seen only when it has waited


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """One chunk to be exported.

    sources: nodes that hold shards of it (a bitmap), the best first. shards: those to be read, which together have all
    layers and heads; 0 where those of all nodes have not.
    """

    chunk_hash: bytes
    sources: tuple[tuple[NodeInfo, int], ...]
    shards: int

    @classmethod
    def of(cls, chunk_hash: bytes, sources: tuple[tuple[NodeInfo, int], ...], grid: ShardGrid) -> PlannedChunk:
        """A chunk in as few pages as there are."""
        present = reduce(or_, (shards for _, shards in sources), 0)
        return cls(chunk_hash, sources, grid.readable(present, grid.all_shards))


@dataclass(frozen=True, slots=True)
class FetchedChunk:
    """A whole chunk in verified pages. shards: bitmap of theirs, ascending as the pages."""

    chunk_hash: bytes
    metadata: PageMetadata
    shards: int
    pages: tuple[bytearray, ...]


async def plan_of_chain(index: IndexClient, chain: Chain) -> list[PlannedChunk]:
    """The longest prefix of a chain that the cluster holds."""
    planned: list[PlannedChunk] = []
    async for answer in matches(index, chain):
        for run in answer.runs:
            sources = tuple(
                (answer.nodes[location.node_id], location.shards)
                for location in run.locations
                if location.tier is not Tier.GPU and location.node_id in answer.nodes
            )
            for _ in range(run.chunk_count):
                planned.append(PlannedChunk.of(chain.hashes[len(planned)], sources, chain.opened.grid))
    return planned


class ListedPlan:
    """Everything that nodes list, gathered as it comes: a keyspace may have a million chunks."""

    def __init__(self) -> None:
        self._parents: dict[bytes, bytes] = {}
        self._sources: dict[bytes, tuple[tuple[NodeInfo, int], ...]] = {}

    def add(self, node: NodeInfo, chunk: ListedChunk) -> None:
        """A node holds shards of a chunk."""
        self._parents.setdefault(chunk.chunk_hash, chunk.metadata.parent_hash)
        held = (node, chunk.staging_shards | chunk.disk_shards)
        self._sources[chunk.chunk_hash] = (*self._sources.get(chunk.chunk_hash, ()), held)

    def planned(self, grid: ShardGrid) -> list[PlannedChunk]:
        """In chain order; chunks whose chain is not whole have no use and are left out."""
        return [PlannedChunk.of(one, self._sources[one], grid) for one in in_chain_order(self._parents)]


def batches(planned: Sequence[PlannedChunk], chunk_bytes: int) -> Iterator[Sequence[PlannedChunk]]:
    """Parts whose pages may be in memory together."""
    count = max(1, BATCH_BYTES // chunk_bytes)
    for start in range(0, len(planned), count):
        yield planned[start : start + count]


class PageFetcher:
    """Reads chunks from nodes' page streams, from several nodes at once. Blocking. Use as a context manager."""

    def __init__(self, manifest: Manifest, open_client: Callable[[str], PageTransferClient]) -> None:
        """open_client: makes the client of a bulk endpoint."""
        self._keyspace, self._spec = manifest.keyspace, manifest.spec
        self._payload_sizes = manifest.payload_sizes()
        self._open_client = open_client
        self._clients: dict[str, PageTransferClient] = {}
        self._lock = threading.Lock()  # of clients, and of whether more of them may be made
        self._closed = False
        self._threads = ThreadPoolExecutor(_NODES_AT_ONCE, "export")
        self.failures: dict[str, int] = {}  # why pages could not be read, and how often

    def __enter__(self) -> PageFetcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            self._closed = True
            clients = list(self._clients.values())
        for client in clients:  # which ends what they read, so that no thread waits for a node that hangs
            client.close()
        self._threads.shutdown(cancel_futures=True)

    def fetch(self, chunks: Sequence[PlannedChunk]) -> list[FetchedChunk | None]:
        """Each chunk, or None where some page of it could be had from none of its sources."""
        by_chunk = [[_Page(chunk, at, self._payload_sizes[at]) for at in shards_in(chunk.shards)] for chunk in chunks]
        missing = [page for pages in by_chunk for page in pages]
        for attempt in range(_SOURCES_TRIED):
            by_node: dict[str, list[_Page]] = {}
            for page in missing:
                node = page.source(attempt)
                if node is not None:
                    by_node.setdefault(node.bulk_endpoint, []).append(page)
            reads = [self._threads.submit(self._read, endpoint, wanted) for endpoint, wanted in by_node.items()]
            while wait(reads, timeout=_CTRL_C_SEEN_S).not_done:
                pass
            for read in reads:
                read.result()
            missing = [page for page in missing if not page.good]
            if not missing:
                break
        fetched: list[FetchedChunk | None] = []
        for chunk, pages in zip(chunks, by_chunk, strict=True):
            kept = pages[0].metadata if pages and all(page.good for page in pages) else None
            data = tuple(page.data for page in pages)
            fetched.append(FetchedChunk(chunk.chunk_hash, kept, chunk.shards, data) if kept is not None else None)
        return fetched

    def _read(self, endpoint: str, pages: Sequence[_Page]) -> None:
        client = self._client(endpoint)
        if client is None:
            return

        def settled(item: int, error: KvPoolError | None, hit: bool) -> None:
            page = pages[item]
            wrong = None
            if hit:
                wrong = verify(page.data, page.key(self._keyspace), self._spec.codec, page.payload_len)
                page.good = wrong is None and page.metadata is not None
            if not page.good:
                why = str(wrong) if wrong is not None else error.reason if error is not None else "no longer there"
                self.failures[why] = self.failures.get(why, 0) + 1

        items = [
            PageToRead(key=page.key(self._keyspace), destination=memoryview(page.data), on_metadata=page.keep)
            for page in pages
        ]
        client.read_pages([(self._keyspace, self._spec)], items, settled, timeout_s=_READ_TIMEOUT_S)

    def _client(self, endpoint: str) -> PageTransferClient | None:
        """None once the fetcher was closed."""
        with self._lock:
            client = self._clients.get(endpoint)
            if client is None and not self._closed:
                client = self._clients[endpoint] = self._open_client(endpoint)
            return client


class _Page:
    """One page on its way."""

    def __init__(self, chunk: PlannedChunk, shard: int, payload_len: int) -> None:
        self._chunk = chunk
        self._shard = shard
        self.payload_len = payload_len
        self.data = bytearray(page_bytes(payload_len))
        self.metadata: PageMetadata | None = None
        self.good = False

    def key(self, keyspace: bytes) -> PageKey:
        return PageKey(keyspace, self._chunk.chunk_hash, self._shard)

    def source(self, attempt: int) -> NodeInfo | None:
        """The node to ask in this attempt; None where there are not so many."""
        holders = [node for node, shards in self._chunk.sources if shards >> self._shard & 1]
        nodes = list({node.node_id: node for node in holders if node.bulk_endpoint}.values())
        return nodes[attempt] if attempt < len(nodes) else None

    def keep(self, metadata: PageMetadata) -> None:
        self.metadata = metadata
