"""The index's store over TLS: to a server, to a master that Sentinels name, to a Cluster; what is said if it fails."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvpool.core.cluster import NodeInfo, NodeKind
from kvpool.core.errors import StartupFailed, StoreUnavailable
from kvpool.testing import eventually
from kvpool.wire.tls_files import TlsFiles
from kvpool_index.adapters.redis_store import RedisIndexStore
from tests.fixtures.certificates import Authority
from tests.fixtures.redis_server import running_redis
from tests.fixtures.redis_tls import running_tls_redis

pytestmark = pytest.mark.e2e

SCHEMES = {"single": "rediss", "sentinel": "rediss+sentinel", "cluster": "rediss+cluster"}


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def options(files: TlsFiles, *, own: bool = True) -> str:
    """Of a URL."""
    certificate = f"&ssl_certfile={files.cert_file}&ssl_keyfile={files.key_file}" if own else ""
    return f"?ssl_ca_certs={files.ca_file}{certificate}"


@contextlib.asynccontextmanager
async def opened(url: str, timeout_s: float = 60.0) -> AsyncIterator[RedisIndexStore]:
    store = RedisIndexStore(url, timeout_s=timeout_s, key_prefix=f"t{secrets.token_hex(6)}")
    try:
        yield store
    finally:
        await store.close()


@pytest.mark.parametrize("topology", SCHEMES)
async def test_every_topology_serves(authority: Authority, tmp_path: Path, topology: str) -> None:
    files = authority.issue(tmp_path / "own")
    with running_tls_redis(topology, files) as hosts:
        async with opened(f"{SCHEMES[topology]}://{hosts}{options(files)}") as store:
            info = NodeInfo(node_id=b"n" * 16, kind=NodeKind.PAGESTORE, endpoint="h:1", incarnation=0)
            await store.nodes.register(info, last_incarnation=0, lease_ttl_ms=60_000)
            assert [node.info.node_id for node in await store.nodes.snapshot()] == [info.node_id]
            assert await store.ping() > 0


async def test_what_does_not_fit_is_explained(authority: Authority, tmp_path: Path) -> None:
    files, other = authority.issue(tmp_path / "own"), Authority("other")
    blind = authority.issue(tmp_path / "blind", trusted=other.pem)
    stranger = other.issue(tmp_path / "stranger", trusted=authority.pem)
    elsewhere = authority.issue(tmp_path / "elsewhere", names=["elsewhere"])
    with contextlib.ExitStack() as stack:
        hosts, unnamed = (stack.enter_context(running_tls_redis("single", each)) for each in (files, elsewhere))
        plain = stack.enter_context(running_redis())
        for url, said in (
            (f"redis://{hosts}", "rediss://"),
            (f"rediss://127.0.0.1:{plain.port}{options(files)}", "it does not speak TLS"),
            (f"rediss://{hosts}{options(blind)}", "of no CA that is trusted"),
            (f"rediss://{hosts}{options(files, own=False)}", "ssl_certfile"),
            (f"rediss://{hosts}{options(stranger)}", "ssl_certfile"),
            (f"rediss://{unnamed}{options(files)}", "does not name that address"),
        ):
            for timeout_s in (1.0, 30.0):  # the second where this machine stood still
                async with opened(url, timeout_s=timeout_s) as store:
                    with pytest.raises(StoreUnavailable) as caught:
                        await store.ping()
                if said in str(caught.value):
                    break
            assert said in str(caught.value), url.partition("?")[0]
        async with opened(f"rediss://{unnamed}{options(files)}&ssl_check_hostname=false") as store:
            assert await store.ping() > 0


async def test_the_next_connection_uses_a_renewed_certificate(authority: Authority, tmp_path: Path) -> None:
    server = authority.issue(tmp_path / "server")
    client = Authority("other").issue(tmp_path / "client", trusted=authority.pem)
    with running_tls_redis("single", server) as hosts:
        async with opened(f"rediss://{hosts}{options(client)}", timeout_s=1.0) as store:
            with pytest.raises(StoreUnavailable):
                await store.ping()
            authority.issue(tmp_path / "client")

            async def answers() -> bool:
                with contextlib.suppress(StoreUnavailable):  # it did not in its time
                    return await store.ping() > 0
                return False

            await eventually(answers)


async def test_files_that_cannot_be_read_are_reported_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupFailed, match=r"redis_url cannot be used: .*No such file.*none"):
        RedisIndexStore(f"rediss://h:1?ssl_ca_certs={tmp_path}/none")
