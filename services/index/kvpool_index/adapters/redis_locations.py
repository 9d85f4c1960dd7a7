"""Chunk values in Redis: one hash for each chain group, changed by one script that keeps the digests up to date.

A group of very many chunks is split into parts, each of which is one more key. A change names its keys, so
that its sender has to know whether the group is split; if it is wrong, the script refuses and the change is sent again.

A group's key carries its digest range as a hash tag, so that groups and digests of a range lie in one slot: the script
changes both at once, and a failover that loses writes takes both back alike.
"""

import asyncio
import logging
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Final

from kvpool.core.cluster import ChainQuery
from kvpool.core.errors import InvalidRequest, LeaseLost, Overloaded, StoreUnavailable
from kvpool.core.location_digest import (
    BUCKETS_PER_RANGE,
    FIELD_BYTES,
    PART_COUNT,
    RANGE_COUNT,
    PartSpan,
    SplitGroup,
    bucket_of,
    part_of,
    range_of,
)
from kvpool_index.adapters.redis_connections import ConnectionGroup
from kvpool_index.adapters.redis_lua import load_script
from kvpool_index.adapters.redis_nodes import RedisNodeDirectory
from kvpool_index.adapters.redis_reads import (
    MARK,
    UNDIGESTED,
    part_keys,
    range_tag,
    read_groups,
    read_parts,
    read_whole_groups,
    split_groups_key,
)
from kvpool_index.adapters.redis_wire import Reply, checked, pack, pack_script
from kvpool_index.core.entries import (
    HASH_BYTES,
    SPLIT_CHUNKS,
    ChunkOperation,
    GroupRead,
    NamedChunk,
    NodeEntry,
    Operation,
    group_read,
    group_reads,
    held_by,
    ordinals_in,
    part_reads,
    removal_of,
    whole_groups,
)
from kvpool_index.core.events import ChunkState
from kvpool_index.ports import TOMBSTONE_S, StreamFence

_log = logging.getLogger(__name__)

_APPLY: Final = load_script("apply_change")
_SPLIT: Final = load_script("split_group")
_CORRECT: Final = load_script("correct_digest")
_TOO_LARGE: Final = 1  # changed, and the group is to be split
_FENCED: Final = -1
_IS_SPLIT: Final = -2
_IS_WHOLE: Final = -3
_PART_OPERATIONS: Final = 512
_CALL_OPERATIONS: Final = 64  # of one group by one script: a third of a millisecond
_SCAN_COUNT: Final = b"512"
_FEW_COUNT: Final = b"32"  # groups; what one step decodes is nothing to a match beside it
_FEW_GROUPS: Final = 8  # of split ones, whose digests are read at once
_STEP_RANGES: Final = 16  # whose groups are listed at once: half a millisecond with four million chunks in all
_STEP_KEYS: Final = 32  # hashes that are looked into at once
_STEP_COUNT: Final = b"128"  # of the chunks of each; a hash that Redis keeps packed comes whole, 512 chunks at most
_STEP_CHUNKS: Final = 2048
_GLOB: Final = frozenset(b"*?[]\\^-")
_ANY_TAG: Final = b"{???}"
_DIGEST_BYTES: Final = 8
_TOMBSTONE_MS: Final = b"%d" % (TOMBSTONE_S * 1000)
_REMEMBERED: Final = 4096  # split groups, 0.2 KiB each
_DIGESTED_AT_ONCE: Final = 16  # parts, 12 ms of Redis's time if each of their chunks is at 64 nodes
_CURSOR_DIGITS: Final = 20  # of SSCAN
_ORDINAL: Final = struct.Struct("<I")
_NOTHING: Final = Operation(ordinal=0, full_shards=0).pack(0)


class RedisLocationStore:
    """LocationStore over Redis. A read is one pipeline of HMGETs; a change is one script a group, in one slot."""

    def __init__(
        self,
        reads: ConnectionGroup,
        changes: ConnectionGroup,
        nodes: RedisNodeDirectory,
        *,
        key_prefix: bytes,
    ) -> None:
        self._reads = reads
        self._changes = changes
        self._nodes = nodes
        self._key_prefix = key_prefix
        self._prefix = key_prefix + b":c:"
        self._prefixes = [self._prefix + range_tag(number) for number in range(RANGE_COUNT)]
        self._digest_keys = [key_prefix + b":d:" + range_tag(number) for number in range(RANGE_COUNT)]
        self._group_keys = [key_prefix + b":g:" + range_tag(number) for number in range(RANGE_COUNT)]
        self._split_keys = [split_groups_key(key_prefix, number) for number in range(RANGE_COUNT)]
        self._split_places: dict[bytes, None] = {}  # keyspace and head of groups that were split, the latest last

    async def read(self, keyspace: bytes, groups: Sequence[GroupRead]) -> list[bytes | None]:
        replies = await self._reads.exchange(*read_groups(self._key_prefix, keyspace, groups))
        return _values(await self._with_parts(replies, lambda at: (keyspace, groups[at])))

    async def read_chain(self, query: ChainQuery) -> list[bytes | None]:
        keyspace, prefix = query.keyspace, self._key_prefix
        start, end = whole_groups(query)
        whole = read_whole_groups(prefix, keyspace, query.chunk_hashes[start * HASH_BYTES : end * HASH_BYTES])
        if not start and end == query.chunk_count:
            replies = await self._reads.read(whole)
        else:
            first, first_keys = read_groups(prefix, keyspace, part_reads(query, 0, start))
            commands, keys = whole.split()
            last, last_keys = read_groups(prefix, keyspace, part_reads(query, end, query.chunk_count))
            replies = await self._reads.exchange_reachable(first + commands + last, first_keys + keys + last_keys)
        replies = await self._with_parts(replies, lambda at: (keyspace, group_read(query, at)))
        return _reached(replies, query.chunk_count)

    async def read_chains(self, queries: Sequence[ChainQuery]) -> list[list[bytes | None]]:
        places: list[tuple[bytes, GroupRead]] = []
        commands: list[bytes] = []
        keys: list[bytes] = []
        ends = [0]
        for query in queries:
            groups = group_reads(query)
            its_commands, its_keys = read_groups(self._key_prefix, query.keyspace, groups)
            places += [(query.keyspace, group) for group in groups]
            commands += its_commands
            keys += its_keys
            ends.append(len(commands))
        replies = await self._reads.exchange_reachable(commands, keys) if commands else []
        replies = await self._with_parts(replies, places.__getitem__)
        return [
            _reached(replies[start:end], query.chunk_count)
            for query, (start, end) in zip(queries, pairwise(ends), strict=True)
        ]

    async def _with_parts(
        self, replies: list[Reply], group_of: Callable[[int], tuple[bytes, GroupRead]]
    ) -> list[Reply]:
        """The replies to reads of groups, of split ones with what their parts have; it takes one more round.

        group_of: keyspace and read of a reply.
        """
        # The first value of a reply is that of the mark.
        marked = [at for at, reply in enumerate(replies) if type(reply) is list and reply[0] is not None]
        if not marked:
            return replies
        split = [(at, *group_of(at)) for at in marked]
        commands: list[bytes] = []
        keys: list[bytes] = []
        for _, keyspace, group in split:
            its_commands, its_keys = read_parts(self._key_prefix, keyspace, group)
            commands += its_commands
            keys += its_keys
        values = iter(await self._reads.exchange_reachable(commands, keys))
        found = list(replies)
        for at, _, group in split:
            found[at] = [None, *(checked(next(values)) for _ in group.fields)]
        return found

    async def apply(self, fence: StreamFence, operations: Sequence[ChunkOperation]) -> list[ChunkState]:
        states: list[ChunkState] = []
        for part in _parts(operations):
            changes = zip(part, await self._change(part, fence), strict=True)
            states += [_state(each, abs(version), value) for each, (version, value) in changes]
        return states

    async def remove(self, operations: Sequence[ChunkOperation]) -> list[ChunkState | None]:
        states: list[ChunkState | None] = []
        for part in _parts(operations):
            changes = zip(part, await self._change(part, None), strict=True)
            states += [_state(each, version, value) if version > 0 else None for each, (version, value) in changes]
        return states

    async def _change(self, operations: Sequence[ChunkOperation], fence: StreamFence | None) -> list[tuple[int, bytes]]:
        """Run the script for each group, in one round unless it turns out which groups are split.

        Return for each operation the version, negative if the value is as it was, and the value.
        """
        checks, check_keys = self._nodes.fence_commands(fence) if fence is not None else ([], [])
        number = fence.number if fence is not None else 0
        answers: list[tuple[int, bytes]] = [(0, b"")] * len(operations)
        pending: Iterable[int] = range(len(operations))
        large: set[bytes] = set()
        while calls := self._calls(operations, pending):
            commands = [*checks, *(self._command([operations[at] for at in call], number) for call in calls)]
            keys = [*check_keys, *(self._key(operations[call[0]]) for call in calls)]
            replies = await self._changes.run_all(commands, keys, _APPLY)
            if fence is not None:
                self._nodes.check_fence(fence, replies[: len(checks)])
            again: list[int] = []
            for call, reply in zip(calls, replies[len(checks) :], strict=True):
                status, place = reply[0], _place(operations[call[0]])
                if status == _FENCED:
                    raise LeaseLost("a later announce stream of this node has taken over")
                if status in (_IS_SPLIT, _IS_WHOLE):
                    self._remember(place, is_split=status == _IS_SPLIT)
                    again += call
                    continue
                if status == _TOO_LARGE:
                    large.add(place)
                for at, change in zip(call, zip(reply[1::2], reply[2::2], strict=True), strict=True):
                    answers[at] = change
            pending = again
        for place in large:
            await self._split(place)
        return answers

    def _calls(self, operations: Sequence[ChunkOperation], positions: Iterable[int]) -> list[list[int]]:
        """Positions of operations that one script can do: those of one group, or of one part of a split group."""
        open_calls: dict[tuple[bytes, bytes], list[int]] = {}
        calls: list[list[int]] = []
        for at in positions:
            each = operations[at]
            place = each.keyspace + each.group_head
            home = (place, each.chunk_hash[:1] if place in self._split_places else b"")
            call = open_calls.get(home)
            if call is None or len(call) == _CALL_OPERATIONS:
                call = open_calls[home] = []
                calls.append(call)
            call.append(at)
        return calls

    async def _split(self, place: bytes) -> None:
        """Split a group, unless that has to wait: a later change will ask for it again."""
        number = range_of(place)
        sets = [self._group_keys[number], self._split_keys[number]]
        keys = [self._prefixes[number] + place, *sets, *part_keys(self._key_prefix, place)]
        command = pack_script(_SPLIT, keys, b"%d" % SPLIT_CHUNKS)
        try:
            (reply,) = await self._changes.exchange([command], keys[:1], scripts=[_SPLIT], try_again=False)
            if checked(reply):
                self._remember(place, is_split=True)
        except (StoreUnavailable, Overloaded) as error:
            _log.info("splitting a group is postponed: %s", error)

    def _remember(self, place: bytes, *, is_split: bool) -> None:
        self._split_places.pop(place, None)
        if is_split:
            self._split_places[place] = None
            if len(self._split_places) > _REMEMBERED:
                del self._split_places[next(iter(self._split_places))]

    async def drop(self, keyspace: bytes, ordinal: int | None) -> AsyncIterator[list[ChunkState]]:
        pattern = _escaped(self._prefix) + _ANY_TAG + _escaped(keyspace) + b"*"
        async for keys in self._scan(pattern):
            async for found in self._contents(keys, with_parts=True):
                removals = [
                    removal_of(entry, each)
                    for entry, value in found
                    for each in ordinals_in(value)
                    if ordinal is None or each == ordinal
                ]
                last = {
                    (state.group_head, state.chunk_hash): state
                    for state in (await self.remove(removals) if removals else [])
                    if state is not None
                }
                yield list(last.values())

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

    async def split_groups(self, ordinal: int, number: int, after: bytes) -> tuple[list[SplitGroup], bytes]:
        if after and not (after.isdigit() and int(after[:_CURSOR_DIGITS]) < 1 << 64 and len(after) <= _CURSOR_DIGITS):
            raise InvalidRequest("continuation must be empty or that of the answer before")
        sets = self._split_keys[number]
        cursor, places = await self._changes.call(sets, b"SSCAN", sets, after or b"0", b"COUNT", _FEW_COUNT)
        found: list[SplitGroup] = []
        for start in range(0, len(places), _FEW_GROUPS):
            some = places[start : start + _FEW_GROUPS]
            keys = [sets + place + part.to_bytes() for place in some for part in range(PART_COUNT)]
            digests = await self._part_digests(ordinal, keys)
            found += [
                SplitGroup(place[:HASH_BYTES], place[HASH_BYTES:], digests[at * PART_COUNT : (at + 1) * PART_COUNT])
                for at, place in enumerate(some)
            ]
        return found, b"" if cursor == b"0" else cursor

    async def part_digest(self, ordinal: int, span: PartSpan) -> int | None:
        group, part = self._span_keys(span)
        if not await self._changes.call(group, b"HEXISTS", group, MARK):
            return None
        (digest,) = await self._part_digests(ordinal, [part])
        return digest

    async def _part_digests(self, ordinal: int, keys: Sequence[bytes]) -> list[int]:
        """One node's digests of parts, which are computed where they have not been since the group was split."""
        field = _ORDINAL.pack(ordinal)
        commands = [pack(b"HMGET", key, field, UNDIGESTED) for key in keys]
        while True:
            replies = [checked(reply) for reply in await self._changes.exchange(commands, keys)]
            missing = [key for key, (_, mark) in zip(keys, replies, strict=True) if mark is not None]
            if not missing:
                return [int.from_bytes(digest or b"", "big") for digest, _ in replies]
            for start in range(0, len(missing), _DIGESTED_AT_ONCE):
                some = missing[start : start + _DIGESTED_AT_ONCE]
                # Any change of a part does so, also one that changes nothing.
                nothing = [
                    self._script(key[-1 - 2 * HASH_BYTES : -1], (key[-1:].ljust(FIELD_BYTES, b"\0"), _NOTHING), key)
                    for key in some
                ]
                await self._changes.run_all(nothing, some, _APPLY)

    async def correct_part_digest(self, ordinal: int, span: PartSpan, found: int, wanted: int) -> bool:
        group, part = self._span_keys(span)
        if await self._part_digests(ordinal, [part]) != [found]:
            return False
        keys = [part, self._digest_keys[range_of(span.group_head)], group]
        arguments = (_ORDINAL.pack(ordinal), _packed(found), _packed(wanted))
        return bool(await self._changes.run(_CORRECT, keys, *arguments))

    async def entries(self, ordinal: int, first_bucket: int, last_bucket: int) -> AsyncIterator[list[NodeEntry]]:
        for number in range(first_bucket // BUCKETS_PER_RANGE, last_bucket // BUCKETS_PER_RANGE + 1):
            sets, cursor = self._group_keys[number], b"0"
            while True:
                cursor, groups = await self._changes.call(sets, b"SSCAN", sets, cursor, b"COUNT", _SCAN_COUNT)
                inside = [
                    self._prefixes[number] + each for each in groups if first_bucket <= bucket_of(each) <= last_bucket
                ]
                async for found in self._contents(inside, with_parts=False):
                    yield [entry for entry, value in found if held_by(value, ordinal)]
                if cursor == b"0":
                    break

    async def part_entries(self, ordinal: int, span: PartSpan) -> AsyncIterator[list[NodeEntry]]:
        async for found in self._contents(self._span_keys(span), with_parts=False):
            yield [entry for entry, value in found if part_of(entry.field) == span.part and held_by(value, ordinal)]

    async def group_heads(self, keyspace: bytes) -> AsyncIterator[list[bytes]]:
        for start in range(0, RANGE_COUNT, _STEP_RANGES):
            # A group moves from the first to the second when it is split, and never back while it has chunks.
            for sets in (self._group_keys, self._split_keys):
                pending = [(key, b"0") for key in sets[start : start + _STEP_RANGES]]
                while pending:
                    commands = [pack(b"SSCAN", key, cursor, b"COUNT", _SCAN_COUNT) for key, cursor in pending]
                    replies = await self._changes.exchange(commands, [key for key, _ in pending])
                    scanned = [checked(reply) for reply in replies]
                    yield [each[HASH_BYTES:] for _, found in scanned for each in found if each.startswith(keyspace)]
                    pending = [
                        (key, cursor) for (key, _), (cursor, _) in zip(pending, scanned, strict=True) if cursor != b"0"
                    ]

    async def chunks(self) -> AsyncIterator[list[NamedChunk]]:
        async for keys in self._scan(_escaped(self._prefix) + _ANY_TAG + b"*", count=_FEW_COUNT):
            async for found in self._contents(keys, with_parts=True):
                yield [NamedChunk(entry, ordinals_in(value)) for entry, value in found]

    async def _contents(
        self, keys: Sequence[bytes], *, with_parts: bool
    ) -> AsyncIterator[list[tuple[NodeEntry, bytes]]]:
        """The chunks of groups, or of parts of groups, and their values, about _STEP_CHUNKS at a time.

        with_parts: also those of all parts of groups that are split.
        """
        pending = deque((key, b"0") for key in keys)
        while pending:
            some = [pending.popleft() for _ in range(min(len(pending), _STEP_KEYS))]
            commands = [pack(b"HSCAN", key, cursor, b"COUNT", _STEP_COUNT) for key, cursor in some]
            replies = await self._changes.exchange(commands, [key for key, _ in some])
            found: list[tuple[NodeEntry, bytes]] = []
            for (key, before), reply in zip(some, replies, strict=True):
                cursor, pairs = checked(reply)
                is_part, fields = not key.startswith(self._prefix), pairs[::2]
                entry_of = _entries_of(key, is_part=is_part)
                found += [
                    (entry_of(field), value)
                    for field, value in zip(fields, pairs[1::2], strict=True)
                    if len(field) == FIELD_BYTES
                ]
                is_complete = cursor == b"0"
                if not is_complete:
                    pending.append((key, cursor))
                # A group that was looked through in several steps may have been split in between.
                if with_parts and not is_part and (MARK in fields or (is_complete and before != b"0")):
                    pending.extend((each, b"0") for each in part_keys(self._key_prefix, key[-2 * HASH_BYTES :]))
                if len(found) >= _STEP_CHUNKS:
                    yield found
                    await asyncio.sleep(0)  # to others their turn, also if the caller has nothing to wait for
                    found = []
            yield found

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

    def _command(self, call: Sequence[ChunkOperation], fence: int) -> bytes:
        place, words = _place(call[0]), list[bytes]()
        part = None
        if place in self._split_places:
            part = self._split_keys[range_of(place)] + place + call[0].chunk_hash[:1]
        operation: Operation | None = None
        for each in call:
            is_same = each.operation is operation
            operation = each.operation
            words += each.chunk_hash[:FIELD_BYTES], b"" if is_same else operation.pack(fence)
        return self._script(place, words, part)

    def _script(self, place: bytes, words: Sequence[bytes], part: bytes | None) -> bytes:
        """The command that changes chunks of a group. part: the key of the chunks' part of a split group."""
        number = range_of(place)
        keys = [self._prefixes[number] + place, self._digest_keys[number]]
        keys += [self._group_keys[number]] if part is None else [self._split_keys[number], part]
        return pack_script(_APPLY, keys, _TOMBSTONE_MS, *words)

    def _span_keys(self, span: PartSpan) -> tuple[bytes, bytes]:
        """The keys of a group and of one of its parts."""
        place = span.keyspace + span.group_head
        number = range_of(span.group_head)
        return self._prefixes[number] + place, self._split_keys[number] + place + span.part.to_bytes()

    def _key(self, each: ChunkOperation) -> bytes:
        return self._prefixes[range_of(each.group_head)] + _place(each)


def _place(each: ChunkOperation) -> bytes:
    return each.keyspace + each.group_head


def _parts(operations: Sequence[ChunkOperation]) -> Iterator[Sequence[ChunkOperation]]:
    """Pieces that Redis finishes well within a call's timeout, so that renewals get through between them."""
    for start in range(0, len(operations), _PART_OPERATIONS):
        yield operations[start : start + _PART_OPERATIONS]


def _values(replies: Sequence[Reply]) -> list[bytes | None]:
    """The values of several groups, one after the other, without their marks."""
    values: list[bytes | None] = []
    for reply in replies:
        values += checked(reply)[1:]
    return values


def _reached(replies: Sequence[Reply], chunk_count: int) -> list[bytes | None]:
    """The same up to the first group that is out of reach; None from there on."""
    if None not in replies:
        return _values(replies)
    values = _values(replies[: replies.index(None)])
    return values + [None] * (chunk_count - len(values))


def _entries_of(key: bytes, *, is_part: bool) -> Callable[[bytes], NodeEntry]:
    """What makes the entry of a chunk out of its field in a group or in a part of one."""
    place = key[-1 - 2 * HASH_BYTES : -1] if is_part else key[-2 * HASH_BYTES :]
    return partial(NodeEntry, place[:HASH_BYTES], place[HASH_BYTES:])


def _state(each: ChunkOperation, version: int, value: bytes) -> ChunkState:
    return ChunkState(
        keyspace=each.keyspace, group_head=each.group_head, chunk_hash=each.chunk_hash, value=value, version=version
    )


def _packed(digest: int) -> bytes:
    """A digest as the store keeps it; b"" for 0, which it does not keep."""
    return digest.to_bytes(_DIGEST_BYTES, "big") if digest else b""


def _escaped(key: bytes) -> bytes:
    """A key as a pattern that matches just it."""
    return b"".join(b"\\%c" % byte if byte in _GLOB else b"%c" % byte for byte in key)
