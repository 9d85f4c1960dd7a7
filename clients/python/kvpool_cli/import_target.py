"""Where `kvpool cache import` stores chunks: what the cluster has, which nodes to write to, and writing there."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from types import TracebackType

from kvpool.client.index import IndexClient, OpenedKeyspace
from kvpool.client.pagestore_control import PageStoreControl
from kvpool.client.transfer import PageToWrite, PageTransferClient
from kvpool.core.chunks import ROOT_HASH
from kvpool.core.cluster import LiveNode, NodeInfo
from kvpool.core.coverage import Coverage
from kvpool.core.errors import ArenaFull, KvPoolError, Overloaded
from kvpool.core.grid import shards_in
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.outcome import Admission
from kvpool.core.page import PageKey
from kvpool_cli.export_file import FileChunk
from kvpool_cli.targets import Target, live_pagestores, on_pagestores, open_transfer

_WRITE_TIMEOUT_S = 180.0
_FLUSH_TIMEOUT_S = 120.0
_BUSY_S = 60.0  # without any page taken
_PAUSE_FIRST_S = 0.05
_PAUSE_LAST_S = 2.0
_STREAMS = 4  # to one node at once: each waits for the disk, and writes of all of them become durable together
_PLACED_MAX = 16  # nodes that the index names for a chain


class Placed(Enum):
    """What became of one chunk."""

    STORED = "stored"
    PRESENT = "present"
    EXPIRED = "expired"
    FAILED = "failed"


class ImportTarget:
    """A cluster that chunks of one keyspace are stored in. Use as an asynchronous context manager."""

    def __init__(
        self, target: Target, index: IndexClient, opened: OpenedKeyspace, spec: KeyspaceSpec, copies: int
    ) -> None:
        self._target = target
        self._index = index
        self._keyspace = opened.keyspace
        self._whole = Coverage.of(opened.grid, 0)
        self._spec = spec
        self._copies = copies
        self._clients: dict[str, PageTransferClient] = {}
        self._nodes: dict[bytes, LiveNode] = {}
        self._present: dict[bytes, int] = {}  # nodes that hold all of a chunk
        self._heads: dict[bytes, bytes] = {}  # first chunk of a chain, by chunk
        self._placed: dict[bytes, list[NodeInfo]] = {}  # by first chunk
        self._used: set[bytes] = set()
        self.failures: Counter[str] = Counter()  # why pages were not taken

    async def __aenter__(self) -> ImportTarget:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for client in self._clients.values():
            client.close()

    async def look(self) -> None:
        """Learn which nodes there are and what they hold. raises: CommandFailed."""
        nodes = await live_pagestores(self._index)
        self._nodes = {node.info.node_id: node for node in nodes}

        async def held(control: PageStoreControl) -> list[bytes]:
            return [
                chunk.chunk_hash
                async for chunk in control.list_chunks(self._keyspace, timeout_s=_FLUSH_TIMEOUT_S)
                if self._whole.is_met_by(chunk.disk_shards or chunk.staging_shards)
            ]

        for _, answer in await on_pagestores(self._target, nodes, held):
            for chunk_hash in answer if not isinstance(answer, KvPoolError) else ():
                self._present[chunk_hash] = self._present.get(chunk_hash, 0) + 1

    async def store(self, chunks: Sequence[FileChunk]) -> list[Placed]:
        """Store chunks, each on as many nodes as are wanted; another node is tried for one that does not take them."""
        now_us = int(time.time() * 1e6)
        results: dict[bytes, Placed] = {}
        lacking: dict[bytes, int] = {}  # copies to be written, by chunk
        for chunk in chunks:
            head = self._head(chunk)
            if 0 < chunk.metadata.expires_us <= now_us:
                results[chunk.chunk_hash] = Placed.EXPIRED
            elif self._present.get(chunk.chunk_hash, 0) >= self._copies:
                results[chunk.chunk_hash] = Placed.PRESENT
            else:
                lacking[chunk.chunk_hash] = self._copies
                if head not in self._placed:
                    self._placed[head] = await self._index.place(self._keyspace, head, count=_PLACED_MAX)
        by_hash = {chunk.chunk_hash: chunk for chunk in chunks}
        for attempt in range(_PLACED_MAX):
            by_node: dict[bytes, list[FileChunk]] = {}
            for chunk_hash, copies in lacking.items():
                nodes = self._placed[self._heads[chunk_hash]]
                # The first attempt asks one node for each copy, each later attempt the next node in line.
                chosen = nodes[:copies] if not attempt else nodes[attempt + self._copies - 1 :][:1]
                for node in chosen:
                    if node.node_id in self._nodes:  # one that has come since we looked is passed over
                        by_node.setdefault(node.node_id, []).append(by_hash[chunk_hash])
            if not by_node:
                for chunk_hash in lacking:
                    if reason := self._too_few(self._placed[self._heads[chunk_hash]]):
                        self.failures[reason] += 1
                break
            streams = [
                asyncio.to_thread(self._write, self._nodes[node], self._client(self._nodes[node]), part)
                for node, of_node in by_node.items()
                for part in _parts(of_node)
            ]
            for taken, failures in await asyncio.gather(*streams):
                self.failures.update(failures)
                for chunk_hash in taken:
                    lacking[chunk_hash] -= 1
            lacking = {chunk_hash: copies for chunk_hash, copies in lacking.items() if copies > 0}
        for chunk in chunks:
            failed = chunk.chunk_hash in lacking
            results.setdefault(chunk.chunk_hash, Placed.FAILED if failed else Placed.STORED)
        return [results[chunk.chunk_hash] for chunk in chunks]

    async def finish(self) -> None:
        """Return when what was stored is durable and the index knows of it."""
        nodes = [self._nodes[node_id] for node_id in self._used]

        async def flush(control: PageStoreControl) -> None:
            await control.flush(self._keyspace, timeout_s=_FLUSH_TIMEOUT_S)

        for _, answer in await on_pagestores(self._target, nodes, flush):
            if isinstance(answer, KvPoolError):
                raise answer

    def _head(self, chunk: FileChunk) -> bytes:
        """The first chunk of a chunk's chain; files have every chunk after the one before it."""
        parent = chunk.metadata.parent_hash
        head = chunk.chunk_hash if parent == ROOT_HASH else self._heads[parent]
        self._heads[chunk.chunk_hash] = head
        return head

    def _too_few(self, placed: Sequence[NodeInfo]) -> str:
        """Why these nodes cannot hold all copies, whatever they have room for; empty if they are enough."""
        usable = sum(node.node_id in self._nodes for node in placed)
        if not usable:
            return "no node takes new pages; see `kvpool cluster status`"
        return f"only {usable} of {self._copies} nodes take new pages" if usable < self._copies else ""

    def _client(self, node: LiveNode) -> PageTransferClient:
        endpoint = node.info.bulk_endpoint
        client = self._clients.get(endpoint)
        if client is None:
            client = self._clients[endpoint] = open_transfer(self._target, endpoint)
        self._used.add(node.info.node_id)
        return client

    def _write(
        self, node: LiveNode, client: PageTransferClient, chunks: Sequence[FileChunk]
    ) -> tuple[list[bytes], Counter[str]]:
        """Chunks of which the node now has every page, and why it did not take others. Blocking.

        A node that has no room for now is waited for: its disk is slower than we are.
        """
        failures: Counter[str] = Counter()
        taken: list[bytes] = []
        left, pause_s, waited_s = chunks, _PAUSE_FIRST_S, 0.0
        while left:
            errors = self._write_once(node, client, left)
            busy = [chunk for chunk in left if isinstance(errors.get(chunk.chunk_hash), ArenaFull | Overloaded)]
            taken += [chunk.chunk_hash for chunk in left if chunk.chunk_hash not in errors]
            gives_up = len(busy) == len(left) and waited_s >= _BUSY_S
            for error in errors.values():
                if gives_up or not isinstance(error, ArenaFull | Overloaded):
                    failures[f"{error.reason} at {node.info.host_id}"] += 1
            if gives_up or not busy:
                break
            if len(busy) < len(left):
                pause_s, waited_s = _PAUSE_FIRST_S, 0.0
            time.sleep(pause_s)
            waited_s += pause_s
            left, pause_s = busy, min(2 * pause_s, _PAUSE_LAST_S)
        return taken, failures

    def _write_once(
        self, node: LiveNode, client: PageTransferClient, chunks: Sequence[FileChunk]
    ) -> dict[bytes, KvPoolError]:
        """Why the node has not every page of a chunk; of several causes, one that waiting does not cure."""
        items = [
            PageToWrite(key=PageKey(self._keyspace, chunk.chunk_hash, shard), page=page, metadata=chunk.metadata)
            for chunk in chunks
            for shard, page in zip(shards_in(chunk.shards), chunk.pages, strict=True)
        ]
        errors: dict[bytes, KvPoolError] = {}

        def settled(item: int, admission: Admission, error: KvPoolError | None) -> None:
            if admission is Admission.REJECTED or error is not None:
                at, cause = items[item].key.chunk_hash, error or KvPoolError("rejected")
                if at not in errors or isinstance(errors[at], ArenaFull | Overloaded):
                    errors[at] = cause

        client.write_pages(
            [(self._keyspace, self._spec)],
            items,
            settled,
            timeout_s=_WRITE_TIMEOUT_S,
            require_durable=node.load.disk_capacity_bytes > 0,
        )
        return errors


def _parts(chunks: Sequence[FileChunk]) -> list[Sequence[FileChunk]]:
    """As many as there are streams; chunks that follow each other go together."""
    step = -(-len(chunks) // _STREAMS)
    return [chunks[start : start + step] for start in range(0, len(chunks), step)]
