"""Fills a Redis with a million chunks in chains in a few seconds, for the benches of the index.

    chains = MadeChains(keyspace=keyspace_id, chunk_count=1_000_000)
    await fill_redis("redis://127.0.0.1:6379/0", chains, ordinal=ordinal)
    query = ChainQuery(keyspace=keyspace_id, chunk_hashes=chains.hashes(7), ...)

`fill_redis` writes what the announcements of one node would have left behind, byte for byte but for the
digests that reconciliation compares, without the scripts that would have made it: about 15 times as fast, and good for
whatever reads. `announce_all` goes through the scripts.
`ordinal` is the node's: `(await store.nodes.open_stream(...)).ordinal`, of a node whose lease somebody renews.

Run: python -m bench.index_fill redis://127.0.0.1:6379/0 [--chunks 1000000] [--chain-chunks 512]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

from kvpool.core.cluster import CHAIN_GROUP_CHUNKS
from kvpool.core.location_digest import FIELD_BYTES
from kvpool_index.adapters.redis_connections import ConnectionGroup
from kvpool_index.adapters.redis_reads import group_key
from kvpool_index.adapters.redis_store import open_deployment
from kvpool_index.adapters.redis_wire import checked, pack
from kvpool_index.core.entries import HASH_BYTES, ChunkOperation, Entry, Operation, encode_entry
from kvpool_index.core.events import ChunkState, pack_chunks, stream_of
from kvpool_index.ports import IndexStore, StreamFence

GRID = sum(1 << 15 * group for group in range(4))  # all_shards of tests/fixtures/index_node.spec

_META = struct.Struct("<QII")  # of apply_change.lua: version, then one pair of ordinal and stream number
_COMMANDS_AT_ONCE = 512
_CHUNKS_PER_ENTRY = 64  # of the event log, as in core/events.py


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeChains:
    """Chains of made-up chunk hashes: the same ones for the same seed. The last chain may be shorter."""

    keyspace: bytes  # 16 bytes
    chunk_count: int
    chain_chunks: int = 512
    seed: int = 0

    @property
    def chain_count(self) -> int:
        """Number of chains."""
        return -(-self.chunk_count // self.chain_chunks)

    def hashes(self, chain: int) -> bytes:
        """The hashes of a chain's chunks, 16 bytes each, joined as a ChainQuery has them."""
        count = min(self.chain_chunks, self.chunk_count - chain * self.chain_chunks)
        return random.Random(f"{self.seed}/{chain}").randbytes(HASH_BYTES * count)

    def groups(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """For each chain group of all chains the hash of its head and the hashes of its chunks."""
        for chain in range(self.chain_count):
            hashes = self.hashes(chain)
            for start in range(0, len(hashes), HASH_BYTES * CHAIN_GROUP_CHUNKS):
                group = hashes[start : start + HASH_BYTES * CHAIN_GROUP_CHUNKS]
                yield (
                    group[:HASH_BYTES],
                    [group[at : at + HASH_BYTES] for at in range(0, len(group), HASH_BYTES)],
                )


async def fill_redis(
    url: str,
    chains: MadeChains,
    *,
    ordinal: int,
    fence: int = 1,
    grid: int = GRID,
    key_prefix: str = "kvpool",
) -> float:
    """Put all chains into a Redis (any URL that the index takes), as in staging of one node; returns the seconds."""
    started_at_s = time.perf_counter()
    deployment = open_deployment(url, timeout_s=60.0, max_in_flight=4)
    connections = deployment.connection_group()
    prefix = key_prefix.encode()
    meta = _META.pack(time.time_ns() // 1000, ordinal, fence)
    value = encode_entry(Entry(ordinal, (0, grid, 0)), grid)
    commands: list[bytes] = []
    keys: list[bytes] = []
    for group_head, hashes in chains.groups():
        keys.append(group_key(prefix, chains.keyspace, group_head))
        words = [b"HSET", keys[-1], b"", meta]
        for chunk in hashes:
            words += (chunk[:FIELD_BYTES], value)
        commands.append(pack(*words))
        if len(commands) == _COMMANDS_AT_ONCE:
            await _send(connections, commands, keys)
            commands, keys = [], []
    await _send(connections, commands, keys)
    await deployment.close()
    return time.perf_counter() - started_at_s


async def announce_all(
    store: IndexStore,
    fence: StreamFence,
    chains: MadeChains,
    *,
    grid: int = GRID,
    batch_chunks: int = 4096,
    with_events: bool = False,
) -> float:
    """Let one announce stream announce all chains to a store, in large batches; returns the seconds that it took.

    with_events: log the new values for watchers, as an index does.
    """
    started_at_s = time.perf_counter()
    operation = Operation(ordinal=fence.ordinal, full_shards=grid, added=(0, grid, 0))
    batch: list[ChunkOperation] = []
    for group_head, hashes in chains.groups():
        batch += [
            ChunkOperation(keyspace=chains.keyspace, chunk_hash=chunk, group_head=group_head, operation=operation)
            for chunk in hashes
        ]
        if len(batch) >= batch_chunks:
            await _announce(store, fence, batch, with_events=with_events)
            batch = []
    await _announce(store, fence, batch, with_events=with_events)
    return time.perf_counter() - started_at_s


async def _announce(store: IndexStore, fence: StreamFence, batch: list[ChunkOperation], *, with_events: bool) -> None:
    states = await store.locations.apply(fence, batch)
    by_stream: dict[int, list[ChunkState]] = {}
    for state in states if with_events else ():
        by_stream.setdefault(stream_of(state.group_head, store.events.stream_count - 1), []).append(state)
    entries = [
        (stream, pack_chunks(found[start : start + _CHUNKS_PER_ENTRY]))
        for stream, found in by_stream.items()
        for start in range(0, len(found), _CHUNKS_PER_ENTRY)
    ]
    if entries:
        await store.events.append(entries)


async def _send(connections: ConnectionGroup, commands: list[bytes], keys: list[bytes]) -> None:
    if commands:
        for reply in await connections.exchange(commands, keys):
            checked(reply)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fill a Redis with chunks of made-up chains.")
    parser.add_argument("url")
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--chain-chunks", type=int, default=512)
    parser.add_argument("--ordinal", type=int, default=1)
    parser.add_argument("--key-prefix", default="kvpool")
    given = parser.parse_args()
    chains = MadeChains(keyspace=bytes(16), chunk_count=given.chunks, chain_chunks=given.chain_chunks)
    filling = fill_redis(given.url, chains, ordinal=given.ordinal, key_prefix=given.key_prefix)
    print(f"{given.chunks} chunks in {asyncio.run(filling):.1f} s")


if __name__ == "__main__":
    main()
