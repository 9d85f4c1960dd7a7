"""Where an import stores chunks: copies, nodes that refuse, chunks that are there or have expired."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvpool.client.index import OpenedKeyspace
from kvpool.client.pagestore_control import ListedChunk
from kvpool.client.transfer import PageToWrite
from kvpool.core.cluster import LiveNode, NodeInfo, NodeKind, NodeLoad
from kvpool.core.errors import ArenaFull, KvPoolError, QuotaExceeded
from kvpool.core.grid import ShardGrid
from kvpool.core.outcome import Admission
from kvpool_cli import import_target
from kvpool_cli.export_file import FileChunk
from kvpool_cli.import_target import ImportTarget, Placed
from kvpool_cli.targets import Target
from tests.unit.cli.exported import HASH_KEY, MANIFEST, SPEC, chunk_hash, metadata, page

OPENED = OpenedKeyspace(keyspace=MANIFEST.keyspace, hash_key=HASH_KEY, grid=ShardGrid.of(SPEC), created=False)
NODES = [
    LiveNode(
        info=NodeInfo(
            node_id=bytes([number]) * 16,
            kind=NodeKind.PAGESTORE,
            host_id=f"host-{number}",
            endpoint=f"host-{number}:7200",
            bulk_endpoint=f"host-{number}:7201",
            incarnation=1,
        ),
        load=NodeLoad(disk_capacity_bytes=1000 if number else 0),
        lease_remaining_ms=1000,
    )
    for number in range(3)
]


class Index:
    """Places every chain on all nodes, in order."""

    def __init__(self) -> None:
        self.heads: list[bytes] = []

    async def list_nodes(self, kind: NodeKind) -> list[LiveNode]:
        return NODES

    async def place(self, keyspace: bytes, head: bytes, *, count: int) -> list[NodeInfo]:
        self.heads.append(head)
        return [node.info for node in NODES]


class Nodes:
    """Page streams of all nodes. refuse: why a node does not take a chunk."""

    def __init__(self, refuse: Callable[[str, bytes], KvPoolError | None]) -> None:
        self._refuse = refuse
        self.written: dict[bytes, list[str]] = {}
        self.durable: dict[str, bool] = {}

    def open(self, target: Target, endpoint: str) -> Any:
        nodes = self

        class Client:
            def write_pages(
                self,
                keyspaces: Any,
                items: Sequence[PageToWrite],
                on_page: Callable[[int, Admission, KvPoolError | None], None],
                *,
                timeout_s: float,
                require_durable: bool,
            ) -> None:
                nodes.durable[endpoint] = require_durable
                for number, item in enumerate(items):
                    error = nodes._refuse(endpoint, item.key.chunk_hash)
                    if error is None:
                        nodes.written.setdefault(item.key.chunk_hash, []).append(endpoint)
                    on_page(number, Admission.RESERVED if error is None else Admission.REJECTED, error)

            def close(self) -> None:
                pass

        return Client()


async def stored(
    monkeypatch: pytest.MonkeyPatch,
    chunks: Sequence[FileChunk],
    *,
    copies: int = 1,
    refuse: Callable[[str, bytes], KvPoolError | None] = lambda endpoint, chunk: None,
    held: dict[str, list[bytes]] | None = None,
) -> tuple[list[Placed], Nodes, ImportTarget, Index]:
    async def listings(target: Target, nodes: Sequence[LiveNode], call: Any) -> list[tuple[LiveNode, list[bytes]]]:
        return [(node, (held or {}).get(node.info.host_id, [])) for node in nodes]

    nodes, index = Nodes(refuse), Index()
    monkeypatch.setattr(import_target, "open_transfer", nodes.open)
    monkeypatch.setattr(import_target, "on_pagestores", listings)
    target = Target(index_endpoint="index", state=None)
    async with ImportTarget(target, index, OPENED, SPEC, copies) as into:  # type: ignore[arg-type]
        await into.look()
        return await into.store(chunks), nodes, into, index


def chunk(number: int, **kept: int) -> FileChunk:
    return FileChunk(
        chunk_hash=chunk_hash(number), metadata=metadata(number, **kept), shards=1, pages=(memoryview(page(number)),)
    )


CHAIN = [chunk(number) for number in range(1, 21)]


async def test_a_chain_goes_to_the_first_node_that_is_named_for_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    placed, nodes, _, index = await stored(monkeypatch, CHAIN)
    assert set(placed) == {Placed.STORED} and len(placed) == 20
    assert index.heads == [chunk_hash(1)], "also for its second group"
    assert set(map(tuple, nodes.written.values())) == {("host-0:7201",)}


async def test_copies_go_to_as_many_nodes_durably_where_there_is_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    placed, nodes, _, _ = await stored(monkeypatch, CHAIN[:2], copies=2)
    assert set(placed) == {Placed.STORED}
    assert sorted(nodes.written[chunk_hash(1)]) == ["host-0:7201", "host-1:7201"]  # written at once, by a thread each
    assert nodes.durable == {"host-0:7201": False, "host-1:7201": True}


async def test_another_node_is_tried_for_one_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(endpoint: str, wanted: bytes) -> KvPoolError | None:
        return QuotaExceeded("full") if endpoint == "host-0:7201" and wanted == chunk_hash(2) else None

    placed, nodes, into, _ = await stored(monkeypatch, CHAIN[:3], refuse=full)
    assert set(placed) == {Placed.STORED}
    assert nodes.written[chunk_hash(2)] == ["host-1:7201"]
    assert into.failures == {"QUOTA_EXCEEDED at host-0": 1}


async def test_chunks_that_no_node_takes_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    placed, _, into, _ = await stored(monkeypatch, CHAIN[:2], refuse=lambda endpoint, wanted: QuotaExceeded("full"))
    assert placed == [Placed.FAILED, Placed.FAILED]
    assert sum(into.failures.values()) == 6
    fewer, _, into, _ = await stored(monkeypatch, CHAIN[:2], copies=4)
    assert fewer == [Placed.FAILED, Placed.FAILED], "four copies on three nodes are not what was asked"
    assert into.failures == {"only 3 of 4 nodes take new pages": 2}


async def test_a_node_without_room_for_now_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    asked: list[bytes] = []

    def slow(endpoint: str, wanted: bytes) -> KvPoolError | None:
        asked.append(wanted)
        return ArenaFull("full") if asked.count(wanted) < 3 else None

    placed, nodes, into, _ = await stored(monkeypatch, CHAIN[:2], refuse=slow)
    assert placed == [Placed.STORED, Placed.STORED] and not into.failures
    assert set(map(tuple, nodes.written.values())) == {("host-0:7201",)} and pauses

    pauses.clear()
    never, _, into, _ = await stored(monkeypatch, CHAIN[:1], refuse=lambda endpoint, wanted: ArenaFull("full"))
    assert never == [Placed.FAILED] and sum(into.failures.values()) == 3
    assert 180 <= sum(pauses) < 200, "a minute for each of three nodes"


async def test_what_is_there_or_has_expired_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"host-2": [chunk_hash(1)]}
    chunks = [chunk(1), chunk(2, expires_us=1), chunk(3)]
    placed, nodes, _, _ = await stored(monkeypatch, chunks, held=held)
    assert placed == [Placed.PRESENT, Placed.EXPIRED, Placed.STORED]
    assert list(nodes.written) == [chunk_hash(3)]
    again, _, _, _ = await stored(monkeypatch, chunks[:1], held=held, copies=2)
    assert again == [Placed.STORED]


async def test_a_chunk_is_there_if_its_pages_have_all_layers_and_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heads in one part or two: shard 0, or shards 1 and 2."""
    grid = ShardGrid(layers=2, kv_heads=2, layer_groups=1, splits=(1, 2))
    listed = {1: (0b001, 0), 2: (0b110, 0), 3: (0, 0b110), 4: (0b010, 0b001), 5: (0b010, 0)}  # disk, staging

    class Control:
        async def list_chunks(self, keyspace: bytes, *, timeout_s: float) -> AsyncIterator[ListedChunk]:
            for number, (disk, staging) in listed.items():
                yield ListedChunk(
                    keyspace=keyspace,
                    chunk_hash=chunk_hash(number),
                    metadata=metadata(number),
                    staging_shards=staging,
                    disk_shards=disk,
                    page_reads_per_minute=0.0,
                )

    async def listings(target: Target, nodes: Sequence[LiveNode], call: Any) -> list[tuple[LiveNode, list[bytes]]]:
        return [(nodes[0], await call(Control()))]

    monkeypatch.setattr(import_target, "on_pagestores", listings)
    into = ImportTarget(Target(index_endpoint="index", state=None), Index(), replace(OPENED, grid=grid), SPEC, 1)  # type: ignore[arg-type]
    await into.look()
    assert set(into._present) == {chunk_hash(number) for number in (1, 2, 3)}


async def test_pages_are_stored_as_the_shards_that_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    class Client:
        def write_pages(self, keyspaces: Any, items: Sequence[PageToWrite], on_page: Any, **_: Any) -> None:
            written.extend(item.key.shard for item in items)
            for number in range(len(items)):
                on_page(number, Admission.RESERVED, None)

        def close(self) -> None:
            pass

    monkeypatch.setattr(Nodes, "open", lambda self, target, endpoint: Client())
    halves = replace(chunk(1), shards=0b110, pages=(memoryview(page(1)), memoryview(page(2))))
    assert (await stored(monkeypatch, [halves]))[0] == [Placed.STORED]
    assert written == [1, 2]


async def test_a_cluster_that_takes_no_pages_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nowhere(self: Index, keyspace: bytes, head: bytes, *, count: int) -> list[NodeInfo]:
        return []

    monkeypatch.setattr(Index, "place", nowhere)
    placed, _, into, _ = await stored(monkeypatch, CHAIN[:2])
    assert placed == [Placed.FAILED, Placed.FAILED]
    assert list(into.failures) == ["no node takes new pages; see `kvpool cluster status`"]
