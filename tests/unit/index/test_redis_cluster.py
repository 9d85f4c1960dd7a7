"""Reads of a Cluster of which a part, or all, is out of reach."""

from collections.abc import Sequence
from typing import Any, cast

import hiredis
import pytest
from redis.crc import key_slot

from kvpool.core.cluster import ChainQuery
from kvpool.core.errors import StoreUnavailable
from kvpool_index.adapters.redis_cluster import SLOT_COUNT, ClusterGroup, SlotMap, slot_of
from kvpool_index.adapters.redis_link import LinkOptions, RedisLink
from kvpool_index.adapters.redis_locations import RedisLocationStore
from kvpool_index.adapters.redis_nodes import RedisNodeDirectory
from kvpool_index.adapters.redis_url import Login, Server
from kvpool_index.adapters.redis_wire import Reply, pack
from kvpool_index.core.redis_stats import RedisStats
from tests.fixtures.patience import PATIENCE_S

MASTERS = (Server("a", 1), Server("b", 2))
KEYS = [b"{%d}" % number for number in range(20)]
COMMANDS = [pack(b"GET", key) for key in KEYS]
DOWN = hiredis.ReplyError("CLUSTERDOWN The cluster is down")


class Link:
    """A connection to a master that answers everything alike."""

    is_failing = False

    def __init__(self, reply: Reply) -> None:
        self.reply = reply

    async def exchange(self, commands: Sequence[bytes], **options: Any) -> list[Reply]:
        return [self.reply] * len(commands)

    async def close(self) -> None:
        pass


class Slots(SlotMap):
    """Half of the slots at each master, from these two alone."""

    def __init__(self, options: LinkOptions) -> None:
        super().__init__(MASTERS, options)
        self._owners = [MASTERS[slot * 2 // SLOT_COUNT] for slot in range(SLOT_COUNT)]

    def refresh_soon(self, *, pause_s: float = 0.0) -> None:
        pass


def group_of(*replies: Reply) -> ClusterGroup:
    options = LinkOptions(login=Login(), timeout_s=PATIENCE_S, max_in_flight=10, stats=RedisStats())
    group = ClusterGroup(Slots(options), options, None)
    group._links = {at: cast("RedisLink", Link(reply)) for at, reply in zip(MASTERS, replies, strict=True)}
    return group


async def test_what_one_master_does_not_serve_is_out_of_reach() -> None:
    replies = await group_of(DOWN, b"value").exchange_reachable(COMMANDS, KEYS)
    assert set(replies) == {None, b"value"}


async def test_a_cluster_that_serves_nothing_is_an_error_and_not_empty() -> None:
    """Each master answers, and says that the Cluster is down (cluster-require-full-coverage, and one is lost)."""
    with pytest.raises(StoreUnavailable):
        await group_of(DOWN, DOWN).exchange_reachable(COMMANDS, KEYS)


async def test_of_several_chains_those_within_reach_are_read() -> None:
    nodes = cast("RedisNodeDirectory", None)  # reads ask for none
    reads, changes = group_of(DOWN, [None, b"value"]), group_of(None, None)  # a group that is not split
    store = RedisLocationStore(reads, changes, nodes, key_prefix=b"kv")
    queries = [
        ChainQuery(keyspace=bytes(16), chunk_hashes=bytes([0] * 14) + number.to_bytes(2, "big")) for number in range(64)
    ]
    values = await store.read_chains(queries)
    assert {tuple(each) for each in values} == {(None,), (b"value",)}
    assert values == [await store.read_chain(query) for query in queries]


@pytest.mark.parametrize(
    "key",
    [
        b"",
        b"123456789",
        b"kvpool:{n}:records",
        b"{user1000}.following",
        b"foo{}{bar}",
        b"foo{{bar}}zap",
        b"foo{bar}{zap}",
        b"{",
        b"}{",
        b"a}b{c",
        bytes(range(256)),
        b"kvpool:c:" + bytes(range(100, 132)),
    ],
)
def test_slots_are_those_of_the_specification(key: bytes) -> None:
    assert slot_of(key) == key_slot(key)


def test_known_values() -> None:
    assert slot_of(b"123456789") == 0x31C3
    assert slot_of(b"{user1000}.following") == slot_of(b"{user1000}.followers") == slot_of(b"user1000")
