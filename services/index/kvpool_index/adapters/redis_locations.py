"""Chunk values in Redis: one hash for each chain group, changed by one script."""

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Final

from kvpool.core.errors import LeaseLost
from kvpool_index.adapters.redis_lanes import RedisLane
from kvpool_index.adapters.redis_link import RedisLink
from kvpool_index.adapters.redis_lua import load_script
from kvpool_index.adapters.redis_nodes import RedisNodeDirectory
from kvpool_index.adapters.redis_wire import checked, pack, pack_script
from kvpool_index.core.entries import EVERY_SHARD, Operation, decode_value
from kvpool_index.core.events import ChunkState
from kvpool_index.core.groups import FIELD_BYTES, ChunkOperation, GroupRead
from kvpool_index.ports import StreamFence

_APPLY: Final = load_script("apply_change")
_FENCED: Final = -1
_CHANGED: Final = 1
_META: Final = b""  # the field of a group that is no chunk
_PART_OPERATIONS: Final = 512
_SCAN_COUNT: Final = b"512"
_GLOB: Final = frozenset(b"*?[]\\^-")


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
        self._prefix = key_prefix + b":c:"
        self._tombstone_ms = b"%d" % tombstone_ms

    async def read(self, keyspace: bytes, groups: Sequence[GroupRead]) -> list[bytes | None]:
        head = self._prefix + keyspace
        key_bytes = len(head) + FIELD_BYTES * 2
        # Every field has eight bytes, so that a command is a few joins.
        commands = [
            b"*%d\r\n$5\r\nHMGET\r\n$%d\r\n%b%b\r\n$8\r\n%b\r\n"
            % (len(group.fields) + 2, key_bytes, head, group.head, b"\r\n$8\r\n".join(group.fields))
            for group in groups
        ]
        values: list[bytes | None] = []
        for reply in await self._reads.exchange(commands, [head + group.head for group in groups]):
            values += checked(reply)
        return values

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
        for master in await self._changes.masters():
            async for keys in self._scan(master, keyspace):
                yield await self._drop_groups(keyspace, keys, ordinal)

    async def _scan(self, master: RedisLink, keyspace: bytes) -> AsyncIterator[list[bytes]]:
        """The keys of a keyspace's groups at one master, some at a time."""
        pattern = _escaped(self._prefix + keyspace) + b"*"
        cursor = b"0"
        while True:
            cursor, keys = await master.call(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _SCAN_COUNT)
            if keys:
                yield keys
            if cursor == b"0":
                return

    async def _drop_groups(self, keyspace: bytes, keys: Sequence[bytes], ordinal: int | None) -> list[ChunkState]:
        contents = await self._changes.exchange([pack(b"HGETALL", key) for key in keys], keys)
        removals: list[ChunkOperation] = []
        for key, content in zip(keys, contents, strict=True):
            pairs = checked(content)
            for field, value in zip(pairs[::2], pairs[1::2], strict=True):
                named = [entry.ordinal for entry in decode_value(value)] if field != _META else []
                removals += [
                    _removal(keyspace, key[-FIELD_BYTES * 2 :], field, each)
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
        return pack_script(_APPLY, [self._key(each)], field, each.operation.pack(fence), self._tombstone_ms)

    def _key(self, each: ChunkOperation) -> bytes:
        return self._prefix + each.keyspace + each.group_head


def _parts(operations: Sequence[ChunkOperation]) -> Iterator[Sequence[ChunkOperation]]:
    """Pieces that Redis finishes well within a call's timeout, so that renewals get through between them."""
    for start in range(0, len(operations), _PART_OPERATIONS):
        yield operations[start : start + _PART_OPERATIONS]


def _removal(keyspace: bytes, head: bytes, field: bytes, ordinal: int) -> ChunkOperation:
    operation = Operation(ordinal=ordinal, full_shards=0, removed=EVERY_SHARD)
    return ChunkOperation(keyspace=keyspace, group_head=head, chunk_hash=field, operation=operation)


def _state(each: ChunkOperation, answer: Any) -> ChunkState:
    _, version, value = answer
    return ChunkState(
        keyspace=each.keyspace, group_head=each.group_head, chunk_hash=each.chunk_hash, value=value, version=version
    )


def _escaped(key: bytes) -> bytes:
    """A key as a pattern that matches just it."""
    return b"".join(b"\\%c" % byte if byte in _GLOB else b"%c" % byte for byte in key)
