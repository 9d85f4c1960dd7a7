"""An engine on a host without a pagestore, by streams: in the clear and with TLS, and when a pagestore dies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpool.client.pagestore_control import PageStoreControl
from kvpool.testing import eventually_sync
from kvpool.wire.tls_files import TlsFiles
from tests.e2e.service_processes import service_cluster
from tests.e2e.test_sglang import PAGES, backend, came, filled, keys, stored, transfer
from tests.e2e.test_tls import flags_of, variables_of
from tests.fixtures.certificates import Authority
from tests.fixtures.direct_cluster import DirectCluster, direct_cluster
from tests.fixtures.host_pools import MhaPool, same_bits
from tests.fixtures.patience import patient

pytestmark = pytest.mark.e2e

REMOTE: dict[str, Any] = {"pagestore": "remote", "host_id": "none"}
QUICK: dict[str, Any] = dict.fromkeys(
    ("match_timeout_s", "load_timeout_s", "store_timeout_s", "connect_timeout_s", "room_wait_s"), 3.0
)
SHORT_LEASE_MS = 1500


@contextmanager
def secure_cluster(tmp_path: Path, authority: Authority) -> Iterator[DirectCluster]:
    """Index and pagestores that demand certificates on every "host:port"."""
    flags = {
        name: [*flags_of(authority.issue(tmp_path / f"{name}-tls")), "--tls-client-auth", "require"]
        for name in ("index", "pagestore")
    }
    with service_cluster(tmp_path, flags=flags) as cluster:
        yield DirectCluster(cluster, "a")


def use_tls(monkeypatch: pytest.MonkeyPatch, files: TlsFiles | None) -> None:
    """As the engine's environment has it."""
    for name in ("CA", "CERT", "KEY"):
        monkeypatch.delenv(f"KVPOOL_TLS_{name}_FILE", raising=False)
    for name, value in (variables_of(files) if files is not None else {}).items():
        monkeypatch.setenv(name, value)


def test_sglangs_pages_are_streamed_and_found_from_every_host(tmp_path: Path) -> None:
    names = keys(PAGES)
    with direct_cluster(tmp_path, "ab") as cluster:
        pool, window = filled(MhaPool("page_first")), filled(MhaPool("page_first", layers=2))
        with backend(cluster, pool, **REMOTE) as one:
            one.register_mem_host_pool_v2(window, "swa")
            assert one.batch_exists(names) == 0
            stored(one, pool, names)
            side = [transfer("swa", names, window.slots(list(range(PAGES))))]
            assert one.batch_set_v2(side) == {"swa": [True] * PAGES}
            written = one.describe()["stored_bytes"]
            assert one.batch_set_v1(names, pool.slots(list(range(PAGES)))) == [True] * PAGES
            assert one.describe()["stored_bytes"] == written  # what the index has is not sent again
        for changes in (REMOTE, {"host_id": "a"}, {"host_id": "b"}):
            other, loaded = MhaPool("layer_first"), MhaPool("page_first", layers=2)
            host = changes["host_id"] if changes is not REMOTE else "a"
            with backend(cluster, other, host, **changes) as two:
                assert came(two, other, names, pool), changes
                two.register_mem_host_pool_v2(loaded, "swa")
                side = [transfer("swa", names, loaded.slots(list(range(PAGES))))]
                assert two.batch_get_v2(side) == {"swa": [True] * PAGES}
                assert all(same_bits(loaded.rows(page), window.rows(page)) for page in range(PAGES))


def test_pages_of_a_dead_pagestore_are_misses_and_are_stored_again_when_its_lease_has_ended(tmp_path: Path) -> None:
    names = keys(PAGES)
    beats = {"pagestore": ["--heartbeat-interval-ms", "300"]}
    with service_cluster(tmp_path, flags=beats, lease_ttl_ms=SHORT_LEASE_MS) as services:
        cluster = DirectCluster(services, "ab")
        pool = filled(MhaPool("page_first"))
        slots = pool.slots(list(range(PAGES)))
        with backend(cluster, pool, **REMOTE, **QUICK) as one:
            # Leases are short, and so is what this one waits: a machine that stands still ends either.
            eventually_sync(lambda: all(one.batch_set_v1(names, slots)) and one.batch_exists(names) == PAGES)
            counts = {host: _page_count(cluster, host) for host in "ab"}
            assert counts["a"] + counts["b"] >= PAGES
            dead, alive = ("a", "b") if counts["a"] >= counts["b"] else ("b", "a")
            cluster.store(dead).kill()
            assert one.batch_get_v1(names, slots).count(False) >= PAGES - counts[alive]
            eventually_sync(lambda: all(one.batch_set_v1(names, slots)) and _page_count(cluster, alive) == PAGES)
            other = MhaPool("page_first")
            with backend(cluster, other, **REMOTE) as two:
                eventually_sync(lambda: came(two, other, names, pool))


def test_streams_have_the_tls_of_all_other_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, authority = keys(PAGES), Authority("kvpool test CA")
    client, stranger = authority.issue(tmp_path / "client"), Authority("another").issue(tmp_path / "stranger")
    with secure_cluster(tmp_path, authority) as cluster:
        pool = filled(MhaPool("page_first"))
        slots = pool.slots(list(range(PAGES)))
        for files in (None, stranger):
            use_tls(monkeypatch, files)
            with backend(cluster, pool, **REMOTE, **QUICK) as one:
                assert one.batch_set_v1(names, slots) == [False] * PAGES
                assert one.batch_exists(names) == 0
        use_tls(monkeypatch, client)
        with backend(cluster, pool, **REMOTE) as one:
            stored(one, pool, names)
        other = MhaPool("layer_first")
        with backend(cluster, other, **REMOTE) as two:
            assert came(two, other, names, pool)
            authority.issue(tmp_path / "client")  # renewed under it
            assert came(two, other, names, pool)


def _page_count(cluster: DirectCluster, host: str) -> int:
    async def listed() -> int:
        control = PageStoreControl(cluster.store(host).ready["endpoint"], patient())
        try:
            return len([chunk async for chunk in control.list_chunks()])
        finally:
            await control.close()

    return asyncio.run(listed())
