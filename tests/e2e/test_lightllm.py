"""lightllm's multi-level cache over real services, played as its manager, its workers and its router call it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpool.connectors.contrib.lightllm.client import CpuKvCacheClient, PoolCacheWorker, attached
from kvpool.connectors.contrib.lightllm.settings import LightLlmSettings
from kvpool.connectors.strided_pages import StridedPages
from kvpool.core.errors import InvalidRequest
from kvpool.testing import eventually_sync
from tests.fixtures.direct_cluster import DirectCluster, direct_cluster
from tests.fixtures.host_pools import random_rows, same_bits
from tests.fixtures.lightllm_caches import INT8, MLA, CacheMeta, settings_of

pytestmark = pytest.mark.e2e

TOKENS = list(range(5 * 64 + 1))


@contextmanager
def server(
    cluster: DirectCluster, directory: Path, meta: CacheMeta | None = None, host: str = "a", **given: Any
) -> Iterator[Any]:
    """(settings, owning client, worker) as in lightllm's manager process."""
    directory.mkdir(exist_ok=True)
    settings = settings_of(directory, cluster.settings(host, **given), meta)
    with serving(settings) as (owner, worker):
        yield settings, owner, worker


@contextmanager
def serving(settings: LightLlmSettings) -> Iterator[tuple[CpuKvCacheClient, PoolCacheWorker]]:
    owner = CpuKvCacheClient(only_create_meta_data=False, init_shm_data=True, settings=settings)
    try:
        yield owner, PoolCacheWorker(1.0, owner)
    finally:
        owner.close()


def offload(client: CpuKvCacheClient, hashes: list[int], seed: int) -> list[int]:
    """What a worker does when a request has finished: its kernels fill the pages that are not ready."""
    pages, ready = client.allocate_pages(hashes, disk_offload_enable=True)
    for at, (page, is_ready) in enumerate(zip(pages, ready, strict=True)):
        if page != -1 and not is_ready:
            tensor = client.cpu_kv_cache_tensor[page]
            tensor.copy_(random_rows(tensor.shape, seed + at, tensor.dtype))
    tokens = len(hashes) * client.kv_cache_tensor_meta.token_page_size
    client.update_pages_status_to_ready(pages, True, True, tokens)
    return pages


def match(client: CpuKvCacheClient, worker: PoolCacheWorker, hashes: list[int]) -> tuple[list[int], int]:
    """What lightllm's manager does with a new request: (pages that hold its prefix, how many came from the pool)."""
    pages = []
    for one in hashes:
        page, ready = client.query_one_page(one)
        if page is None:
            break
        assert ready
        pages.append(page)
    missing = worker.query_loadable_pages(hashes, len(pages))
    if not missing:
        return pages, 0
    taken, _ = client.allocate_pages(hashes[len(pages) : len(pages) + missing], disk_offload_enable=True)
    new = taken[: taken.index(-1)] if -1 in taken else taken
    whole = pages + new
    if not worker.load_pages(hashes[: len(whole)], whole, len(pages)):
        client.recycle_pages(new)
        return pages, 0
    client.update_pages_status_to_ready(whole, deref=False)
    assert client.check_allpages_ready(whole)
    return whole, len(new)


def stored(worker: PoolCacheWorker, hashes: list[int]) -> None:
    assert worker.run_once(60.0) == 1
    eventually_sync(lambda: worker.query_loadable_pages(hashes, 0) == len(hashes))


@pytest.mark.parametrize("meta", [CacheMeta(), INT8, MLA], ids=["normal", "int8", "mla"])
def test_prompts_cross_servers_through_the_cluster(tmp_path: Path, meta: CacheMeta) -> None:
    with direct_cluster(tmp_path, "ab") as cluster:
        with server(cluster, tmp_path / "one", meta) as (settings, owner, worker), attached(settings) as rank:
            hashes = rank.compute_token_list_hash(TOKENS, 64)
            assert len(hashes) == 5 and rank.compute_token_list_hash(TOKENS[:-1], 64) == hashes[:4]
            assert match(owner, worker, hashes) == ([], 0)
            offload(rank, hashes, seed=7)
            stored(worker, hashes)
            pages, loaded = match(owner, worker, hashes)
            assert len(pages) == 5 and not loaded
            rank.deref_pages(pages)
            assert owner.owner is not None and owner.owner.users == 0
        with server(cluster, tmp_path / "two", meta, "b") as (settings, owner, worker), attached(settings) as rank:
            assert rank.compute_token_list_hash(TOKENS, 64) == hashes  # any process of any server
            offload(rank, hashes[:1], seed=7)  # its own first page
            worker.run_once(60.0)
            pages, loaded = match(owner, worker, hashes)
            assert loaded == 4
            for at, page in enumerate(pages):
                tensor = rank.cpu_kv_cache_tensor[page]
                assert same_bits(tensor, random_rows(tensor.shape, 7 + at, tensor.dtype)), at
            rank.deref_pages(pages[1:])
            rank.deref_one_page(pages[0])
            assert owner.owner is not None and owner.owner.users == 0


def test_short_prompts_are_not_stored_and_a_full_cache_keeps_what_it_can(tmp_path: Path) -> None:
    with direct_cluster(tmp_path) as cluster:
        settings = settings_of(tmp_path, cluster.settings(), CacheMeta(page_num=3), offload_tokens_min=200)
        with serving(settings) as (owner, worker):
            hashes = owner.compute_token_list_hash(TOKENS, 64)
            pages, _ = owner.allocate_pages(hashes[:2], disk_offload_enable=True)
            owner.update_pages_status_to_ready(pages, True, True, 128)
            assert owner.get_pages_to_offloading() == []
            assert offload(owner, hashes, seed=1)[3:] == [-1, -1]
            stored(worker, hashes[:3])
            assert worker.query_loadable_pages(hashes, 0) == 3
            with pytest.raises(ValueError, match="token_num_in_page_list"):
                owner.update_pages_status_to_ready(pages, disk_offload_enable=True)
            with pytest.raises(InvalidRequest, match="no user"):
                owner.deref_pages(pages)


def test_a_killed_pagestore_is_a_miss_and_nothing_stays_held(tmp_path: Path) -> None:
    with direct_cluster(tmp_path) as cluster:
        with server(cluster, tmp_path / "one", load_timeout_s=2.0) as (_, owner, worker):
            hashes = owner.compute_token_list_hash(TOKENS, 64)
            offload(owner, hashes, seed=3)
            stored(worker, hashes)
        with server(cluster, tmp_path / "two", load_timeout_s=2.0) as (_, owner, worker):
            assert worker.query_loadable_pages(hashes, 0) == 5
            cluster.store().kill()
            assert match(owner, worker, hashes)[0] == []
            offload(owner, hashes, seed=3)
            assert worker.run_once(60.0) == 1  # tried, and let go of
            assert owner.owner is not None and owner.owner.users == 0
            assert len(match(owner, worker, hashes)[0]) == 5  # from its own pages


def _die_while_offloading(settings_directory: Path, given: dict[str, Any], hashes: list[int]) -> None:
    client = CpuKvCacheClient(False, False, settings=settings_of(settings_directory, given))
    client.allocate_pages(hashes, disk_offload_enable=True)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_while_it_offloads_leaves_no_page_behind(tmp_path: Path) -> None:
    with direct_cluster(tmp_path) as cluster, server(cluster, tmp_path / "one") as (_, owner, worker):
        hashes = owner.compute_token_list_hash(TOKENS, 64)
        context = multiprocessing.get_context("spawn")
        given = cluster.settings()
        dying = context.Process(target=_die_while_offloading, args=(tmp_path / "one", given, hashes))
        dying.start()
        dying.join(60)
        assert dying.exitcode == -signal.SIGKILL
        eventually_sync(lambda: owner.owner is not None and owner.owner.users == 0)
        assert match(owner, worker, hashes) == ([], 0)
        assert sorted(offload(owner, hashes, seed=1)) == [0, 1, 2, 3, 4]


def test_a_group_that_cannot_be_stored_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with direct_cluster(tmp_path) as cluster, server(cluster, tmp_path / "one") as (_, owner, worker):
        assert owner.owner is not None
        hashes = owner.compute_token_list_hash(TOKENS, 64)
        other = owner.compute_token_list_hash([7, *TOKENS], 64)
        offload(owner, hashes, seed=1)
        offload(owner, other, seed=2)
        gather, broken = StridedPages.gather, [True]

        def fails_once(pages: StridedPages, *arguments: Any) -> None:
            if broken:
                broken.clear()
                raise ValueError("a page that cannot be read")
            gather(pages, *arguments)

        monkeypatch.setattr(StridedPages, "gather", fails_once)
        assert worker.run_once(60.0) == 2 and owner.owner.users == 0
        eventually_sync(lambda: worker.query_loadable_pages(other, 0) == len(other))
        assert worker.query_loadable_pages(hashes, 0) == 0


def _own(settings_directory: Path, given: dict[str, Any], ready: Any) -> None:
    CpuKvCacheClient(False, True, settings=settings_of(settings_directory, given))
    ready.set()
    signal.pause()


def test_pages_of_an_owner_that_was_killed_mean_nothing_to_the_next(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with direct_cluster(tmp_path) as cluster:
        given = cluster.settings()
        owners = []
        try:
            for _ in range(2):
                ready = context.Event()
                owners.append(context.Process(target=_own, args=(tmp_path, given, ready)))
                owners[-1].start()
                assert ready.wait(60)
                if len(owners) == 1:
                    worker = CpuKvCacheClient(False, False, settings=settings_of(tmp_path, given))
                    hashes = worker.compute_token_list_hash(TOKENS, 64)
                    pages, _ = worker.allocate_pages(hashes, True)
                    assert pages == [0, 1, 2, 3, 4]
                    owners[0].kill()
                    owners[0].join()
                    assert worker.allocate_pages(hashes, True) == ([-1] * 5, [False] * 5)
            worker.update_pages_status_to_ready(pages, True, True, 320)  # its kernels have ended meanwhile
            assert worker.query_one_page(hashes[0]) == (None, False)
            with attached(settings_of(tmp_path, given)) as fresh:
                assert fresh.query_one_page(hashes[0]) == (None, False), "no one has filled it for this owner"
                assert fresh.allocate_pages(hashes, True) == (pages, [False] * 5)
            worker.close()
        finally:
            for owner in owners:
                owner.kill()
                owner.join()


def test_an_owner_that_is_away_means_no_page(tmp_path: Path) -> None:
    with direct_cluster(tmp_path) as cluster:
        with server(cluster, tmp_path / "one") as (settings, owner, _):
            hashes = owner.compute_token_list_hash(TOKENS, 64)
            with attached(settings) as rank:
                assert rank.query_one_page(hashes[0]) == (None, False)
                owner.close()
                assert rank.allocate_pages(hashes, True) == ([-1] * 5, [False] * 5)
                assert rank.query_one_page(hashes[0]) == (None, False)
                assert rank.compute_token_list_hash(TOKENS, 64) == []
                assert not rank.check_allpages_ready([0]) and rank.check_allpages_ready([])
                rank.deref_pages([0])
