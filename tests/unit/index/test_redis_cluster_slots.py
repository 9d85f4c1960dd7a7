"""Slots of a Cluster, as its specification gives them."""

import pytest
from redis.crc import key_slot

from kvpool_index.adapters.redis_cluster import slot_of


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
