"""SGLang's storage backend over real services: the pages that go in come out, and whatever fails is a miss."""

from __future__ import annotations

import asyncio
import hashlib
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpool.client.index import IndexClient
from kvpool.client.page_items import AcquireItem
from kvpool.client.pagestore import PageStoreSession, SessionPlan
from kvpool.client.pagestore_control import PageStoreControl
from kvpool.connectors.sglang import HiCacheCalls
from kvpool.core.page import PageKey
from kvpool.testing import eventually_sync
from tests.fixtures.direct_cluster import DirectCluster, direct_cluster
from tests.fixtures.host_pools import MhaPool, MlaPool, StorageConfig, same_bits
from tests.fixtures.patience import patient

pytestmark = pytest.mark.e2e

PAGES = 5


def keys(count: int, seed: str = "") -> list[str]:
    """Chained like SGLang's: 64 hexadecimal digits each."""
    names, last = [], seed
    for _ in range(count):
        last = hashlib.sha256(last.encode()).hexdigest()
        names.append(last)
    return names


@contextmanager
def backend(cluster: DirectCluster, pool: Any, host: str = "a", **changes: Any) -> Iterator[HiCacheCalls]:
    config = {name: changes.pop(name) for name in list(changes) if name in StorageConfig.__annotations__}
    settings = cluster.settings(host, **{"model_revision": "1", **changes})
    one = HiCacheCalls(StorageConfig(**config, extra_config=settings), {})
    try:
        one.register_mem_pool_host(pool)
        yield one
    finally:
        one.close()


def filled(pool: MhaPool, pages: Sequence[int] = range(PAGES)) -> MhaPool:
    for page in pages:
        pool.fill(page, page + 1)
    return pool


def stored(one: HiCacheCalls, pool: MhaPool, names: list[str]) -> None:
    assert one.batch_set_v1(names, pool.slots(list(range(len(names))))) == [True] * len(names)
    eventually_sync(lambda: one.batch_exists(names) == len(names))


def came(one: HiCacheCalls, pool: MhaPool, names: list[str], like: MhaPool) -> bool:
    """Whether pages are loaded to other places of another pool, bit by bit, and nothing else is touched."""
    places = list(range(len(names) + 1, 1, -1))
    before = pool.rows(0).clone()
    got = one.batch_get_v1(names, pool.slots(places))
    same = all(same_bits(pool.rows(place), like.rows(page)) for page, place in enumerate(places))
    return all(got) and same and same_bits(pool.rows(0), before)


def test_pages_cross_hosts_and_host_layouts(tmp_path: Path) -> None:
    names = keys(PAGES)
    with direct_cluster(tmp_path, "ab") as cluster:
        pool = filled(MhaPool("page_first"))
        with backend(cluster, pool) as one:
            assert one.batch_exists(names) == 0
            assert one.batch_get_v1(names, pool.slots(list(range(PAGES)))) == [False] * PAGES
            stored(one, pool, names)
            assert one.batch_exists([*names[:2], *keys(2, "none"), *names[2:]]) == 2
        for host, layout in (("b", "layer_first"), ("a", "page_first_direct"), ("a", "page_head")):
            other = MhaPool(layout)
            with backend(cluster, other, host) as two:
                assert came(two, other, names, pool), (host, layout)
                assert two.describe()["loaded_chunks"] == PAGES


@pytest.mark.parametrize("chained", [False, True])
def test_prefix_keys_make_a_chain_that_any_split_finds(tmp_path: Path, chained: bool) -> None:
    names = keys(20)
    with direct_cluster(tmp_path) as cluster:
        pool = filled(MhaPool("page_first", heads=2, pages=22), range(20))
        with backend(cluster, pool, chained=chained) as one:
            for first, end in ((0, 3), (3, 18), (18, 20)):
                before = SimpleNamespace(prefix_keys=names[:first] or None)
                written = one.batch_set_v1(names[first:end], pool.slots(list(range(first, end))), before)
                assert all(written)
            eventually_sync(lambda: one.batch_exists(names) == 20)
            for first in (1, 16, 17, 19):
                before = SimpleNamespace(prefix_keys=names[:first])
                assert one.batch_exists(names[first:], before) == 20 - first
            other = MhaPool("page_first", heads=2, pages=22)
            with backend(cluster, other, chained=chained) as two:
                assert came(two, other, names, pool)


def test_ranks_of_any_tp_share_pages(tmp_path: Path) -> None:
    names = keys(PAGES)
    with direct_cluster(tmp_path) as cluster:
        whole = filled(MhaPool("page_first", heads=8, layers=8))
        for rank in range(2):
            part = MhaPool("page_first_direct", heads=4, layers=8)
            for page in range(PAGES):
                part.rows(page).copy_(whole.rows(page)[:, :, :, rank * 4 : rank * 4 + 4])
            with backend(cluster, part, tp_rank=rank, tp_size=2) as one:
                assert one.batch_exists(names) == 0  # the other rank's heads do not count as this rank's
                stored(one, part, names)
        other = MhaPool("page_head", heads=8, layers=8)
        with backend(cluster, other) as two:
            assert came(two, other, names, whole)


def test_ranks_whose_heads_are_no_union_of_shards_keep_to_themselves(tmp_path: Path) -> None:
    names = keys(PAGES)
    with direct_cluster(tmp_path) as cluster:
        pools = [filled(MhaPool("page_first", heads=1, layers=1)) for _ in range(2)]
        pools[1].fill(0, 99)
        for rank, pool in enumerate(pools):
            with backend(cluster, pool, tp_rank=rank, tp_size=2) as one:
                assert one.batch_exists(names) == 0
                stored(one, pool, names)
        for rank, pool in enumerate(pools):
            other = MhaPool("page_first", heads=1, layers=1)
            with backend(cluster, other, tp_rank=rank, tp_size=2) as one:
                assert came(one, other, names, pool)


def test_mla_pages_are_the_same_for_all_ranks(tmp_path: Path) -> None:
    names = keys(PAGES)
    with direct_cluster(tmp_path) as cluster:
        pool = filled(MlaPool("page_first"))
        with backend(cluster, pool, is_mla_model=True, tp_size=4) as one:
            stored(one, pool, names)
        for rank, layout in enumerate(("layer_first", "page_first_direct")):
            other = MlaPool(layout)
            with backend(cluster, other, is_mla_model=True, tp_size=2, tp_rank=rank) as two:
                assert came(two, other, names, pool)


def test_what_must_be_equal_keeps_pages_apart(tmp_path: Path) -> None:
    names = keys(1)
    pool = filled(MhaPool("page_first"), [0])
    changes: list[dict[str, Any]] = [
        {"model_revision": "2"},
        {"model_name": "other"},
        {"pp_size": 2},
        {"attn_cp_size": 2},
        {"chained": True},
    ]
    with direct_cluster(tmp_path) as cluster:
        with backend(cluster, pool) as one:
            stored(one, pool, names)
        for change in changes:
            with backend(cluster, pool, **change) as two:
                assert two.batch_exists(names) == 0, change
        with backend(cluster, MhaPool("page_first", dtype=torch.float16)) as two:
            assert two.batch_exists(names) == 0
        with backend(cluster, pool, keyspace_name="mine") as two:
            assert two.batch_exists(names) == 1  # another name for the same contents


def test_a_corrupt_page_is_a_miss_and_is_dropped(tmp_path: Path) -> None:
    names = keys(2)
    with direct_cluster(tmp_path) as cluster:
        pool = filled(MhaPool("page_first", heads=2))
        with backend(cluster, pool) as one:
            stored(one, pool, names[:1])
            (first,) = held(cluster)
            stored(one, pool, names)
            (second,) = held(cluster) - {first}
            flip(cluster, second)
            other = pool.slots([5, 6])
            assert one.batch_get_v1(names, other) == [True, False]
            assert one.describe()["corrupt_pages"] == 1
            eventually_sync(lambda: one.batch_get_v1(names, other)[0])
            assert one.describe()["corrupt_pages"] == 1, "it was dropped; what the disk has is true"
            assert all(one.batch_set_v1(names, pool.slots([0, 1])))
            assert all(one.batch_get_v1(names, other)) and same_bits(pool.rows(6), pool.rows(1))


def held(cluster: DirectCluster) -> set[PageKey]:
    """The first pages of all chunks that the pagestore holds."""

    async def ask() -> set[PageKey]:
        control = PageStoreControl(cluster.settings()["pagestore"], patient())
        found = {PageKey(chunk.keyspace, chunk.chunk_hash, 0) async for chunk in control.list_chunks()}
        await control.close()
        return found

    return asyncio.run(ask())


def flip(cluster: DirectCluster, key: PageKey) -> None:
    """Change one byte of a page where it lies in the arena."""

    async def change() -> None:
        settings = cluster.settings()
        index = IndexClient(patient(index_endpoints=tuple(settings["index_endpoints"])))
        (keyspace,) = await index.list_keyspaces()
        await index.close()
        plan = SessionPlan(
            endpoint=settings["pagestore"], peer_name="test", keyspaces=((keyspace.keyspace, keyspace.spec),)
        )
        session = await PageStoreSession.open(plan, patient())
        async with session.acquire([AcquireItem(key)], wait_s=60) as answers:
            async for answer in answers:
                assert answer.slot is not None
                with session.slot_view(*answer.slot.place) as view:
                    view[1000] ^= 1
                await session.release([answer.slot.lease_id])
        assert await session.close()

    asyncio.run(change())


def test_calls_with_tensors_of_single_pages(tmp_path: Path) -> None:
    names = keys(2)
    with direct_cluster(tmp_path) as cluster:
        pool = filled(MhaPool("layer_first"), [0, 1])
        with backend(cluster, pool) as one:
            assert one.set(names[0], pool.get_data_page(0))
            assert one.batch_set(names, [pool.get_data_page(0), pool.get_data_page(pool.page_size)])
            eventually_sync(lambda: one.batch_exists(names) == 2)
            empty = [torch.zeros_like(pool.get_data_page(0)) for _ in range(3)]
            got = one.batch_get([*names, "unknown"], empty)
            assert got[2] is None
            assert same_bits(got[0], pool.get_data_page(0))
            assert same_bits(got[1], pool.get_data_page(pool.page_size))
            assert one.get(names[0], torch.zeros(7)) is None  # no page of this pool
            assert one.exists(names[0]) and not one.exists("unknown")


def test_a_killed_pagestore_is_a_miss_until_it_is_back(tmp_path: Path) -> None:
    names = keys(PAGES)
    with direct_cluster(tmp_path) as cluster:
        pool = filled(MhaPool("page_first"))
        with backend(cluster, pool, load_timeout_s=2.0) as one:
            stored(one, pool, names)
            cluster.store().kill()
            slots = pool.slots(list(range(PAGES)))
            assert one.batch_get_v1(names, slots) == [False] * PAGES
            assert one.batch_set_v1(keys(PAGES, "new"), slots) == [False] * PAGES
            assert not one.describe()["connected"]
            cluster.store().start()
            cluster.store().wait_ready()
            eventually_sync(lambda: all(one.batch_set_v1(names, slots)))
            eventually_sync(lambda: one.batch_exists(names) == PAGES)
            other = MhaPool("page_first")
            with backend(cluster, other) as two:
                assert came(two, other, names, pool)


def test_a_pagestore_that_stands_still_costs_the_deadline(tmp_path: Path) -> None:
    names = keys(PAGES)
    with direct_cluster(tmp_path) as cluster:
        pool = filled(MhaPool("page_first"))
        with backend(cluster, pool) as patient_one:
            stored(patient_one, pool, names)
        with backend(cluster, pool, load_timeout_s=1.0, connect_timeout_s=1.0) as one:
            other = pool.slots(list(range(PAGES)))
            eventually_sync(lambda: all(one.batch_get_v1(names, other)))
            cluster.store().send(signal.SIGSTOP)
            try:
                assert one.batch_get_v1(names, other) == [False] * PAGES
            finally:
                cluster.store().send(signal.SIGCONT)
            eventually_sync(lambda: all(one.batch_get_v1(names, other)))


def test_an_index_that_is_away_is_a_miss_and_what_is_local_still_loads(tmp_path: Path) -> None:
    names = keys(PAGES)
    with direct_cluster(tmp_path) as cluster:
        pool = filled(MhaPool("page_first"))
        with backend(cluster, pool) as patient_one:
            stored(patient_one, pool, names)
        with backend(cluster, pool, match_timeout_s=1.0, connect_timeout_s=1.0) as one:
            slots = pool.slots(list(range(PAGES)))
            eventually_sync(lambda: one.batch_exists(names) == PAGES and all(one.batch_get_v1(names, slots)))
            cluster.index.kill()
            assert one.batch_exists(names) == 0
            assert all(one.batch_get_v1(names, slots))
            assert all(one.batch_set_v1(keys(PAGES, "new"), slots))
        late = HiCacheCalls(StorageConfig(extra_config=cluster.settings(connect_timeout_s=0.3, model_revision="1")), {})
        late.register_mem_pool_host(pool)  # comes up without an index, and finds it later
        assert late.batch_exists(names) == 0
        assert late.batch_get_v1(names, slots) == [False] * PAGES
        late.close()


def test_more_pages_than_staging_may_have_dirty_wait_for_the_disk(tmp_path: Path) -> None:
    with direct_cluster(tmp_path) as cluster:
        pool = filled(MhaPool("page_first", layers=32, heads=8, head_dim=128, page_size=64, pages=9), range(9))
        names = keys(9)  # 8 MiB each, in an arena of 64 MiB
        with backend(cluster, pool, pages_in_flight=256) as one:
            assert one.batch_set_v1(names, pool.slots(list(range(9)))) == [True] * 9
            assert one.describe()["stored_chunks"] == 9


def test_clear_drops_the_pages_of_all_hosts(tmp_path: Path) -> None:
    names = keys(PAGES)
    with direct_cluster(tmp_path, "ab") as cluster:
        pool = filled(MhaPool("page_first"))
        with backend(cluster, pool) as one, backend(cluster, pool, "b") as two:
            stored(one, pool, names[:2])
            assert all(two.batch_set_v1(names[2:], pool.slots([2, 3, 4])))
            eventually_sync(lambda: one.batch_exists(names) == PAGES)
            assert one.clear()
            eventually_sync(lambda: not any(map(one.exists, names)))
            assert not any(two.batch_get_v1(names, pool.slots(list(range(PAGES)))))


def transfer(name: str, names: Sequence[str], slots: Any) -> Any:
    """A PoolTransfer."""
    return SimpleNamespace(name=name, keys=list(names), host_indices=slots)


def test_pages_of_side_pools_come_back_and_never_for_another_pool_or_rank(tmp_path: Path) -> None:
    names = keys(PAGES)
    with direct_cluster(tmp_path) as cluster:
        window, state = filled(MhaPool("page_first", layers=2)), filled(MhaPool("page_first", layers=3, page_size=1))
        with backend(cluster, MhaPool("page_first")) as one:
            one.register_mem_host_pool_v2(window, "swa")
            one.register_mem_host_pool_v2(state, "mamba")
            both = [
                transfer("swa", names, window.slots(list(range(PAGES)))),
                transfer("mamba", names[-1:], state.slots([PAGES - 1])),
            ]
            assert one.batch_set_v2(both) == {"swa": [True] * PAGES, "mamba": [True]}
            unequal = [transfer("swa", names, window.slots([0])), transfer("indexer", names[:1], None)]
            assert one.batch_set_v2(unequal) == {"swa": [False] * PAGES, "indexer": [False]}

        def reader(pool: Any, name: str, wanted: Sequence[str], places: list[int], **config: Any) -> list[bool]:
            with backend(cluster, MhaPool("page_first"), **config) as other:
                other.register_mem_host_pool_v2(pool, name)
                return other.batch_get_v2([transfer(name, wanted, pool.slots(places))])[name]

        loaded = MhaPool("page_first", layers=2)
        assert reader(loaded, "swa", [*names, "none"], [6, 5, 4, 3, 2, 0]) == [True] * PAGES + [False]
        assert all(same_bits(loaded.rows(6 - page), window.rows(page)) for page in range(PAGES))
        assert not loaded.rows(0).any()
        last = MhaPool("page_first", layers=3, page_size=1)
        assert reader(last, "mamba", names[-1:], [7]) == [True]
        assert same_bits(last.rows(7), state.rows(PAGES - 1))
        for changes in ({"tp_rank": 1, "tp_size": 2}, {"pp_size": 2}, {"model_revision": "2"}):
            assert reader(loaded, "swa", names[:1], [0], **changes) == [False], changes
        assert reader(loaded, "indexer", names[:1], [0]) == [False]
