"""Comparing and repairing the parts of groups that the index has split, over either store."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import pytest

from kvpool.client.index import IndexClient
from kvpool.core.errors import InvalidRequest, LeaseLost, StaleIncarnation
from kvpool.core.location_digest import PART_COUNT, PartSpan, SplitGroup, fingerprint, holding, part_of, range_of
from kvpool.v1 import index_pb2
from kvpool_index.core.entries import EVERY_SHARD, SPLIT_CHUNKS, ChunkOperation, Operation
from kvpool_index.engine import announce
from kvpool_index.ports import IndexStore
from tests.fixtures.index_node import GRID, TIMEOUT_S, Chain, FakeNode, held, open_keyspace, refusal
from tests.fixtures.index_server import RunningIndex
from tests.fixtures.patience import patient
from tests.fixtures.redis_server import redis_server as redis_server
from tests.grpc.test_index_reconcile import digests, matched, replace
from tests.grpc.test_index_reconcile import index as index
from tests.grpc.test_index_reconcile import store as store

MANY = SPLIT_CHUNKS + 500


class Fan:
    """Very many chunks below one head, of which a chain of 16 is in `chain`."""

    def __init__(self, keyspace: bytes, head: bytes | None = None, count: int = MANY) -> None:
        self.chain = Chain(keyspace)
        self.chain.hashes[0] = head or self.chain.hashes[0]
        self.head = self.chain.hashes[0]
        self.held = [*self.chain.hashes[:16], *(secrets.token_bytes(16) for _ in range(count - 16))]

    def added(self, chunks: Sequence[bytes]) -> list[index_pb2.LocationChange]:
        (one,) = self.chain.added([0])
        found = []
        for chunk in chunks:
            change = index_pb2.LocationChange()
            change.CopyFrom(one)
            change.chunk_hash = chunk
            found.append(change)
        return found

    def of_part(self, part: int) -> list[bytes]:
        return [chunk for chunk in self.held if part_of(chunk) == part]

    def span(self, part: int) -> PartSpan:
        return PartSpan(self.chain.keyspace, self.head, part)

    def as_reported(self) -> SplitGroup:
        """By the definition on the wire."""
        found, place = [0] * PART_COUNT, self.chain.keyspace + self.head
        for chunk in self.held:
            found[part_of(chunk)] ^= fingerprint(place + chunk[:8], holding((0, GRID, 0), GRID))
        return SplitGroup(self.chain.keyspace, self.head, found)

    def digest(self) -> int:
        found = 0
        for digest in self.as_reported().digests:
            found ^= digest
        return found


async def announced(index: RunningIndex) -> tuple[Fan, FakeNode]:
    fan, node = Fan(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    await node.announce(fan.added(fan.held))
    return fan, node


async def replace_part(node: FakeNode, fan: Fan, part: int, chunks: Sequence[bytes]) -> None:
    message = index_pb2.ReplacePart(
        sequence=1,
        keyspace_id=fan.chain.keyspace,
        group_head_hash=fan.head,
        part=part,
        held=held(fan.added(chunks)),
    )
    async with node.announcing() as stream:
        assert await stream.exchange(index_pb2.AnnounceRequest(replace_part=message)) == 1


async def split_groups(index: RunningIndex, node: FakeNode, head: bytes) -> list[SplitGroup]:
    client = IndexClient(patient(index_endpoints=(index.endpoint,)))
    try:
        return await client.reconcile_split_groups(node.node_id, node.incarnation, range_of(head))
    finally:
        await client.close()


async def test_a_chain_below_a_shared_head_is_matched(index: RunningIndex) -> None:
    fan, _ = await announced(index)
    assert await matched(index, fan.chain) == 16


async def test_a_part_says_then_what_its_owner_says(index: RunningIndex) -> None:
    fan, node = await announced(index)
    other = await FakeNode(index.stub).register()
    await other.announce(fan.added(fan.held[:20]))
    (group,) = await split_groups(index, node, fan.head)
    assert group == fan.as_reported()
    gone, *kept = fan.of_part(part_of(fan.held[1]))
    new = bytes([part_of(gone)]) + secrets.token_bytes(15)
    fan.held.remove(gone)
    fan.held.append(new)
    await replace_part(node, fan, part_of(gone), [*kept, new])
    (group,) = await split_groups(index, node, fan.head)
    assert group == fan.as_reported()
    assert (await digests(node)).digests[range_of(fan.head)] == fan.digest()
    (of_other,) = await split_groups(index, other, fan.head)
    assert sum(map(bool, of_other.digests)) == len({part_of(chunk) for chunk in [gone, *fan.held[:19]]})
    assert index.metric("kvpool_index_replaced_parts_total") == 1
    assert index.metric("kvpool_index_surplus_locations_removed_total") == 1
    assert index.metric("kvpool_index_corrected_digests_total") == 0


async def test_a_part_of_a_group_that_is_not_split_is_replaced(index: RunningIndex) -> None:
    fan, node = Fan(await open_keyspace(index.stub), count=600), await FakeNode(index.stub).register()
    await node.announce(fan.added(fan.held))
    part = part_of(fan.held[1])
    await replace_part(node, fan, part, [])
    assert await matched(index, fan.chain) == 1 - (part_of(fan.head) == part)
    fan.held = [chunk for chunk in fan.held if part_of(chunk) != part]
    assert (await digests(node)).digests[range_of(fan.head)] == fan.digest()
    assert await split_groups(index, node, fan.head) == []


async def test_the_digest_of_a_part_that_lies_is_corrected(index: RunningIndex, store: IndexStore) -> None:
    fan, node = await announced(index)
    (record,) = await store.nodes.snapshot()
    part = part_of(fan.held[1])
    true = fan.as_reported().digests[part]
    assert await store.locations.correct_part_digest(record.ordinal, fan.span(part), true, 77)
    assert await split_groups(index, node, fan.head) != [fan.as_reported()]
    await replace_part(node, fan, part, fan.of_part(part))
    assert await split_groups(index, node, fan.head) == [fan.as_reported()]
    assert (await digests(node)).digests[range_of(fan.head)] == fan.digest()
    assert index.metric("kvpool_index_corrected_digests_total") == 1


@pytest.mark.parametrize("at", ["part_digest", "correct_part_digest"])
async def test_a_report_that_comes_in_between_is_not_hidden_by_the_correction_of_a_part(
    index: RunningIndex, store: IndexStore, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    fan, node = await announced(index)
    (record,) = await store.nodes.snapshot()
    chunk = fan.held[1]
    part, true = part_of(chunk), fan.as_reported().digests[part_of(chunk)]
    assert await store.locations.correct_part_digest(record.ordinal, fan.span(part), true, 77)
    original, reports = getattr(store.locations, at), 0

    async def report_first(*arguments: object) -> object:
        nonlocal reports
        reports += 1
        operation = Operation(ordinal=record.ordinal, full_shards=GRID, removed=EVERY_SHARD)
        removal = ChunkOperation(
            keyspace=fan.chain.keyspace, group_head=fan.head, chunk_hash=chunk, operation=operation
        )
        if reports == {"part_digest": 3}.get(at, 1):  # after the one that is compared with
            await store.locations.remove([removal])
        return await original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(store.locations, at, report_first)
        await replace_part(node, fan, part, fan.of_part(part))
    assert await split_groups(index, node, fan.head) != [fan.as_reported()], "the next comparison looks again"
    await replace_part(node, fan, part, fan.of_part(part))
    assert await matched(index, fan.chain) == 16
    assert await split_groups(index, node, fan.head) == [fan.as_reported()]


async def test_a_replaced_range_leaves_split_groups_alone(index: RunningIndex, store: IndexStore) -> None:
    fan, node = await announced(index)
    small = Chain(fan.chain.keyspace)
    small.hashes[0] = small.hashes[0][:14] + fan.head[14:]
    await node.announce(small.added(range(3)))
    first = range_of(fan.head) * 16
    new = secrets.token_bytes(16)
    reported = [*small.added([0]), *fan.added([new])]
    await replace(node, index_pb2.ReplaceRange(first_bucket=first, last_bucket=first + 15, held=held(reported)))
    fan.held.append(new)
    assert await matched(index, fan.chain) == 16 and await matched(index, small) == 1
    assert await split_groups(index, node, fan.head) == [fan.as_reported()]
    true = fan.digest() ^ fingerprint(
        small.keyspace + small.hashes[0] + small.hashes[0][:8], holding((0, GRID, 0), GRID)
    )
    number = range_of(fan.head)
    assert (await digests(node)).digests[number] == true
    assert index.metric("kvpool_index_corrected_digests_total") == 0

    (record,) = await store.nodes.snapshot()
    for wrong in (77, 0):
        await store.locations.correct_digests(record.ordinal, {number: (true, wrong)})
        await replace(
            node, index_pb2.ReplaceRange(first_bucket=first, last_bucket=first + 15, held=held(small.added([0])))
        )
        assert (await digests(node)).digests[number] == true, "made of the parts and of what was named"


async def test_many_split_groups_are_named_in_several_answers(
    index: RunningIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announce, "_GROUPS_AT_ONCE", 1)
    keyspace, node = await open_keyspace(index.stub), await FakeNode(index.stub).register()
    fans = [Fan(keyspace, secrets.token_bytes(14) + b"\x12\x34", SPLIT_CHUNKS + 1) for _ in range(9)]
    for fan in fans:
        await node.announce(fan.added(fan.held))
    found = await split_groups(index, node, fans[0].head)
    assert sorted(group.group_head for group in found) == sorted(fan.head for fan in fans)
    assert {group.group_head: group for group in found} == {fan.head: fan.as_reported() for fan in fans}
    strange = await FakeNode(index.stub).register()
    assert all(not any(group.digests) for group in await split_groups(index, strange, fans[0].head))


async def test_what_is_asked_of_parts_must_make_sense(index: RunningIndex) -> None:
    keyspace, node = await open_keyspace(index.stub), await FakeNode(index.stub).register()
    fan = Fan(keyspace, count=16)

    async def refused(**fields: object) -> BaseException:
        part = index_pb2.ReplacePart(
            sequence=1,
            keyspace_id=keyspace,
            group_head_hash=fan.head,
            part=part_of(fan.head),
            held=held(fan.added([fan.head])),
        )
        for name, value in fields.items():
            setattr(part, name, value)
        with pytest.raises(InvalidRequest) as caught:
            async with node.announcing() as stream:
                await stream.exchange(index_pb2.AnnounceRequest(replace_part=part))
        return caught.value

    await refused(part=PART_COUNT)
    await refused(part=-1)
    await refused(group_head_hash=b"short")
    await refused(keyspace_id=b"")
    for fields in (
        {"part": part_of(fan.head) ^ 1},
        {"group_head_hash": secrets.token_bytes(16)},
        {"keyspace_id": secrets.token_bytes(16)},
    ):
        error = await refused(**fields)
        assert isinstance(error, InvalidRequest) and error.item_index == 0
    assert await matched(index, fan.chain) == 0

    def request(**fields: object) -> index_pb2.ReconcileSplitGroupsRequest:
        asked = index_pb2.ReconcileSplitGroupsRequest(node_id=node.node_id, incarnation=node.incarnation)
        for name, value in fields.items():
            setattr(asked, name, value)
        return asked

    for asked, error_type in (
        (request(range=4096), InvalidRequest),
        (request(range=-1), InvalidRequest),
        (request(node_id=b"n"), InvalidRequest),
        (request(node_id=secrets.token_bytes(16)), LeaseLost),
        (request(incarnation=node.incarnation - 1), StaleIncarnation),
    ):
        assert isinstance(await refusal(index.stub.ReconcileSplitGroups(asked, timeout=TIMEOUT_S)), error_type)
