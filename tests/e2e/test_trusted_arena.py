"""Stores that trust the memory of their host's pagestore, as vLLM's tier does, beside stores that verify."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvpool import connect_store
from kvpool.client.object_store import Store
from kvpool.client.store_config import StoreConfig
from kvpool.testing import eventually_sync
from tests.fixtures.direct_cluster import DirectCluster, direct_cluster
from tests.fixtures.staging import leave_staging

pytestmark = pytest.mark.e2e

OBJECT_BYTES, NAMES = 300_000, [b"one", b"two", b"three"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[DirectCluster]:
    with direct_cluster(tmp_path) as cluster:
        yield cluster


def store(cluster: DirectCluster, *, trusts_arena: bool) -> closing[Store]:
    config = StoreConfig.of(cluster.settings(trusts_arena=trusts_arena))
    return closing(connect_store("", index="", name="objects", object_bytes=OBJECT_BYTES, config=config))


def contents(seed: int) -> list[np.ndarray]:
    return [np.random.default_rng([seed, n]).integers(0, 256, OBJECT_BYTES, np.uint8) for n in range(len(NAMES))]


def read(one: Store) -> list[np.ndarray | None]:
    buffers = [np.zeros(OBJECT_BYTES, np.uint8) for _ in NAMES]
    return [buffer if came else None for buffer, came in zip(buffers, one.get(NAMES, buffers), strict=True)]


@pytest.mark.parametrize("writer_trusts", [True, False])
@pytest.mark.parametrize("from_disk", [False, True])
def test_what_one_kind_stores_the_other_reads(cluster: DirectCluster, writer_trusts: bool, from_disk: bool) -> None:
    stored = contents(1)
    with store(cluster, trusts_arena=writer_trusts) as writer, store(cluster, trusts_arena=not writer_trusts) as other:
        assert writer.put(NAMES, stored) == [True] * len(NAMES)
        if from_disk:
            asyncio.run(leave_staging(cluster.store().ready["endpoint"]))
        for one in (other, writer):
            got = read(one)
            assert all(came is not None and np.array_equal(came, was) for came, was in zip(got, stored, strict=True))


def test_a_store_that_trusts_never_takes_a_page_that_was_damaged_on_disk(
    cluster: DirectCluster, tmp_path: Path
) -> None:
    with store(cluster, trusts_arena=True) as one:
        assert one.put(NAMES, contents(2)) == [True] * len(NAMES)
        asyncio.run(leave_staging(cluster.store().ready["endpoint"]))
        for path in tmp_path.rglob("*.pages"):
            damaged = np.memmap(path, np.uint8, "r+")
            damaged[:: OBJECT_BYTES // 3] ^= 0xFF
            damaged.flush()
        assert read(one) == [None] * len(NAMES)
        eventually_sync(lambda: one.exists(NAMES) == [False] * len(NAMES))
        again = contents(3)
        assert one.put(NAMES, again) == [True] * len(NAMES)
        assert all(came is not None and np.array_equal(came, was) for came, was in zip(read(one), again, strict=True))
