"""Chunk values in Redis: one hash for each chain group, changed by one script that keeps the digests up to date.

A group's key carries its digest range as a hash tag, so that groups and digests of a range lie in one slot: the script
changes both at once, and a failover that loses writes takes both back alike.
"""

import struct
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from kvpool.core.cluster import ChainQuery
from kvpool.core.errors import LeaseLost
from kvpool.core.location_digest import BUCKETS_PER_RANGE, FIELD_BYTES, RANGE_COUNT, bucket_of, range_of
from kvpool_index.adapters.redis_lanes import RedisLane
from kvpool_index.adapters.redis_lua import load_script
from kvpool_index.adapters.redis_nodes import RedisNodeDirectory
from kvpool_index.adapters.redis_reads import range_tag, read_groups, read_whole_groups
from kvpool_index.adapters.redis_wire import checked, pack, pack_script
from kvpool_index.core.entries import EVERY_SHARD, Operation, ordinals_in
from kvpool_index.core.events import ChunkState
from kvpool_index.core.groups import (
    HASH_BYTES,
    ChunkOperation,
    GroupRead,
    NamedChunk,
    NodeEntry,
    group_reads,
    part_reads,
    whole_groups,
)
from kvpool_index.ports import StreamFence

_APPLY: Final = load_script("apply_change")
_CORRECT: Final = load_script("correct_digest")
_FENCED: Final = -1
_CHANGED: Final = 1
_META: Final = b""  # the field of a group that is no chunk
_PART_OPERATIONS: Final = 512
_ENTRIES_GROUPS: Final = 256
_SCAN_COUNT: Final = b"512"
_FEW_COUNT: Final = b"32"  # groups; what one step decodes is nothing to a match beside it
_GLOB: Final = frozenset(b"*?[]\\^-")
_ANY_TAG: Final = b"{???}"
_DIGEST_BYTES: Final = 8
_ORDINAL: Final = struct.Struct("<I")


class RedisLocationStore:
    """LocationStore over Redis. A read is one pipeline of HMGETs; a change is one single-key script a chunk."""

    def __init__(
        self,
        reads: RedisLane,
        changes: RedisLane,
        nodes: RedisNodeDirectory,
        *,
        key_prefix: bytes,
        tombstone_ms: int,
    ) -> None:
        self._reads = reads
        self._changes = changes
        self._nodes = nodes
        self._key_prefix = key_prefix
        self._prefix = key_prefix + b":c:"
        self._prefixes = [self._prefix + range_tag(number) for number in range(RANGE_COUNT)]
        self._digest_keys = [key_prefix + b":d:" + range_tag(number) for number in range(RANGE_COUNT)]
        self._group_keys = [key_prefix + b":g:" + range_tag(number) for number in range(RANGE_COUNT)]
        self._tombstone_ms = b"%d" % tombstone_ms

    async def read(self, keyspace: bytes, groups: Sequence[GroupRead]) -> list[bytes | None]:
        return _values(await self._reads.exchange(*read_groups(self._key_prefix, keyspace, groups)))

    async def read_chain(self, query: ChainQuery) -> list[bytes | None]:
        keyspace, prefix = query.keyspace, self._key_prefix
        start, end = whole_groups(query)
        whole = read_whole_groups(prefix, keyspace, query.chunk_hashes[start * HASH_BYTES : end * HASH_BYTES])
        if not start and end == query.chunk_count:
            return _reached(await self._reads.read(whole), query.chunk_count)
        first, first_keys = read_groups(prefix, keyspace, part_reads(query, 0, start))
        commands, keys = whole.split()
        last, last_keys = read_groups(prefix, keyspace, part_reads(query, end, query.chunk_count))
        replies = await self._reads.exchange_reachable(first + commands + last, first_keys + keys + last_keys)
        return _reached(replies, query.chunk_count)

    async def read_chains(self, queries: Sequence[ChainQuery]) -> list[list[bytes | None]]:
        commands: list[bytes] = []
        keys: list[bytes] = []
        ends = [0]
        for query in queries:
            its_commands, its_keys = read_groups(self._key_prefix, query.keyspace, group_reads(query))
            commands += its_commands
            keys += its_keys
            ends.append(len(commands))
        replies = await self._reads.exchange_reachable(commands, keys) if commands else []
        return [
            _reached(replies[start:end], query.chunk_count)
            for query, (start, end) in zip(queries, pairwise(ends), strict=True)
        ]

    async def apply(self, fence: StreamFence, operations: Sequence[ChunkOperation]) -> list[ChunkState]:
        states: list[ChunkState] = []
        for part in _parts(operations):
            checks, check_keys = self._nodes.fence_commands(fence)
            commands = [*checks, *(self._command(each, fence.number) for each in part)]
            replies = await self._changes.run_all(commands, [*check_keys, *map(self._key, part)], _APPLY)
            self._nodes.check_fence(fence, replies[: len(checks)])
            answers = replies[len(checks) :]
            if any(status == _FENCED for status, _, _ in answers):
                raise LeaseLost("a later announce stream of this node has taken over")
            states += [_state(each, answer) for each, answer in zip(part, answers, strict=True)]
        return states

    async def remove(self, operations: Sequence[ChunkOperation]) -> list[ChunkState | None]:
        states: list[ChunkState | None] = []
        for part in _parts(operations):
            commands = [self._command(each, 0) for each in part]
            replies = await self._changes.run_all(commands, [*map(self._key, part)], _APPLY)
            states += [
                _state(each, reply) if reply[0] == _CHANGED else None for each, reply in zip(part, replies, strict=True)
            ]
        return states

    async def drop(self, keyspace: bytes, ordinal: int | None) -> AsyncIterator[list[ChunkState]]:
        pattern = _escaped(self._prefix) + _ANY_TAG + _escaped(keyspace) + b"*"
        async for keys in self._scan(pattern):
            yield await self._drop_groups(keyspace, keys, ordinal)

    async def digests(self, ordinal: int, ranges: Sequence[int]) -> list[int]:
        keys = [self._digest_keys[number] for number in ranges]
        field = _ORDINAL.pack(ordinal)
        commands = [pack(b"HGET", key, field) for key in keys]
        replies = await self._reads.exchange(commands, keys) if commands else []
        return [int.from_bytes(checked(reply) or b"", "big") for reply in replies]

    async def correct_digests(self, ordinal: int, digests: Mapping[int, tuple[int, int]]) -> int:
        keys = [self._digest_keys[number] for number in digests]
        field = _ORDINAL.pack(ordinal)
        commands = [
            pack_script(_CORRECT, [key], field, _packed(found), _packed(wanted))
            for key, (found, wanted) in zip(keys, digests.values(), strict=True)
        ]
        return sum(await self._changes.run_all(commands, keys, _CORRECT)) if commands else 0

    async def entries(self, ordinal: int, first_bucket: int, last_bucket: int) -> AsyncIterator[list[NodeEntry]]:
        for number in range(first_bucket // BUCKETS_PER_RANGE, last_bucket // BUCKETS_PER_RANGE + 1):
            sets = self._group_keys[number]
            groups = await self._changes.call(sets, b"SMEMBERS", sets)
            inside = [
                self._prefixes[number] + each for each in groups if first_bucket <= bucket_of(each) <= last_bucket
            ]
            for start in range(0, len(inside), _ENTRIES_GROUPS):
                named = await self._named(inside[start : start + _ENTRIES_GROUPS])
                yield [_entry(key, field) for key, field, ordinals in named if ordinal in ordinals]

    async def chunks(self) -> AsyncIterator[list[NamedChunk]]:
        async for keys in self._scan(_escaped(self._prefix) + _ANY_TAG + b"*", count=_FEW_COUNT):
            yield [NamedChunk(_entry(key, field), named) for key, field, named in await self._named(keys)]

    async def _scan(self, pattern: bytes, *, count: bytes = _SCAN_COUNT) -> AsyncIterator[list[bytes]]:
        """The keys that match, of all masters, about `count` at a time."""
        for master in await self._changes.masters():
            cursor = b"0"
            while True:
                cursor, keys = await master.call(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", count)
                if keys:
                    yield keys
                if cursor == b"0":
                    break

    async def _named(self, keys: Sequence[bytes]) -> list[tuple[bytes, bytes, list[int]]]:
        """Of groups, the key and field of each chunk and the ordinals that its value names."""
        contents = await self._changes.exchange([pack(b"HGETALL", key) for key in keys], keys) if keys else []
        found: list[tuple[bytes, bytes, list[int]]] = []
        for key, content in zip(keys, contents, strict=True):
            pairs = checked(content)
            for field, value in zip(pairs[::2], pairs[1::2], strict=True):
                if field != _META:
                    found.append((key, field, ordinals_in(value)))
        return found

    async def _drop_groups(self, keyspace: bytes, keys: Sequence[bytes], ordinal: int | None) -> list[ChunkState]:
        removals = [
            _removal(keyspace, key[-HASH_BYTES:], field, each)
            for key, field, named in await self._named(keys)
            for each in named
            if ordinal is None or each == ordinal
        ]
        last = {
            (state.group_head, state.chunk_hash): state
            for state in (await self.remove(removals) if removals else [])
            if state is not None
        }
        return list(last.values())

    def _command(self, each: ChunkOperation, fence: int) -> bytes:
        field = each.chunk_hash[:FIELD_BYTES]
        number = range_of(each.group_head)
        keys = [self._key(each), self._digest_keys[number], self._group_keys[number]]
        return pack_script(_APPLY, keys, field, each.operation.pack(fence), self._tombstone_ms)

    def _key(self, each: ChunkOperation) -> bytes:
        return self._prefixes[range_of(each.group_head)] + each.keyspace + each.group_head


def _parts(operations: Sequence[ChunkOperation]) -> Iterator[Sequence[ChunkOperation]]:
    """Pieces that Redis finishes well within a call's timeout, so that renewals get through between them."""
    for start in range(0, len(operations), _PART_OPERATIONS):
        yield operations[start : start + _PART_OPERATIONS]


def _values(replies: Sequence[Any]) -> list[bytes | None]:
    """The values of several groups, one after the other."""
    values: list[bytes | None] = []
    for reply in replies:
        values += checked(reply)
    return values


def _reached(replies: Sequence[Any], chunk_count: int) -> list[bytes | None]:
    """The same up to the first group that is out of reach: as if nobody had what comes from there on."""
    if None not in replies:
        return _values(replies)
    values = _values(replies[: replies.index(None)])
    return values + [None] * (chunk_count - len(values))


def _entry(key: bytes, field: bytes) -> NodeEntry:
    return NodeEntry(key[-2 * HASH_BYTES : -HASH_BYTES], key[-HASH_BYTES:], field)


def _removal(keyspace: bytes, head: bytes, field: bytes, ordinal: int) -> ChunkOperation:
    operation = Operation(ordinal=ordinal, full_shards=0, removed=EVERY_SHARD)
    return ChunkOperation(keyspace=keyspace, group_head=head, chunk_hash=field, operation=operation)


def _state(each: ChunkOperation, answer: Any) -> ChunkState:
    _, version, value = answer
    return ChunkState(
        keyspace=each.keyspace, group_head=each.group_head, chunk_hash=each.chunk_hash, value=value, version=version
    )


def _packed(digest: int) -> bytes:
    """A digest as the store keeps it; b"" for 0, which it does not keep."""
    return digest.to_bytes(_DIGEST_BYTES, "big") if digest else b""


def _escaped(key: bytes) -> bytes:
    """A key as a pattern that matches just it."""
    return b"".join(b"\\%c" % byte if byte in _GLOB else b"%c" % byte for byte in key)
