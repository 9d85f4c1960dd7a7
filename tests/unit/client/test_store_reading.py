"""Copies of one window by several threads, one of which fails: each lease is given back once."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvpool.client.page_items import Slot
from kvpool.client.store_reading import CopyThreads, WindowRead, _Copying
from kvpool.client.store_values import ChunkPlace, KeyspaceShards, OpenedShards, WantedPage
from kvpool.core.grid import ShardGrid
from tests.fixtures.pagestore import KEYSPACE, PAGE_BYTES, SPEC

PAGES, THREADS = 4000, 4
SPACE = OpenedShards(
    space=KeyspaceShards.of("test", SPEC, ShardGrid.of(SPEC).all_shards), keyspace=KEYSPACE, hash_key=bytes(32)
)


class Session:
    """Slots that all lie in the same bytes."""

    trusts_arena = True

    def __init__(self) -> None:
        self.given_back: list[int] = []
        self._memory = bytearray(PAGE_BYTES)

    def slot_view(self, segment_id: int, offset: int, size_bytes: int) -> memoryview:
        return memoryview(self._memory)

    def release_soon(self, lease_ids: Sequence[int]) -> None:
        self.given_back += lease_ids


@pytest.fixture
def threads_take_turns() -> Iterator[None]:
    """After every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("threads_take_turns")
@pytest.mark.parametrize("seed", range(10))
async def test_a_copy_that_fails_beside_others_gives_each_lease_back_once(seed: int) -> None:
    session: Any = Session()
    taken, lock = list[int](), threading.Lock()

    def take(position: int, shard: int, payload: memoryview) -> None:
        with lock:  # or two threads could pass the count together
            taken.append(position)
            fails = len(taken) == 20 + seed
        if fails:
            raise ValueError("planted")
        time.sleep(1e-4)  # without the interpreter's lock, as a copy

    with ThreadPoolExecutor(THREADS) as executor:
        copying = _Copying(session, SPACE, CopyThreads(executor, THREADS), take, WindowRead())
        for number in range(PAGES):
            page = WantedPage(position=number, chunk=ChunkPlace.alone(number.to_bytes(16)), shard=0)
            copying.begin(page, Slot(number + 1, 0, 0, PAGE_BYTES))
        with pytest.raises(ValueError, match="planted"):
            await copying.end()
        await asyncio.sleep(0)
    assert Counter(session.given_back) == Counter(range(1, PAGES + 1))
