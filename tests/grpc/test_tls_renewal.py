"""Renewals of certificates on real connections, without a restart: what servers show and what clients connect with."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from kvpool.client.config import ClientConfig
from kvpool.client.endpoints import Endpoints
from kvpool.client.tls import TlsCredentials
from kvpool.client.transfer import PageTransferClient
from kvpool.core.cluster import ChainQuery
from kvpool.testing import eventually
from kvpool_server.tls import ClientAuth, TlsSettings, open_tls
from tests.fixtures.certificates import Authority, not_after_s
from tests.fixtures.index_server import RunningIndex, running_index
from tests.fixtures.pagestore import SPEC, new_world
from tests.fixtures.pagestore_server import served
from tests.grpc.test_tls import index_client, read_nothing, service_tls


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


async def test_channels_that_are_two_renewals_old_are_closed(authority: Authority, tmp_path: Path) -> None:
    """Of calls and of long streams; those of the last certificates go on."""
    tls = TlsCredentials(authority.issue(tmp_path / "own"))
    endpoints = Endpoints(("127.0.0.1:1",), ClientConfig(tls=tls), lambda channel: channel)
    channels = [endpoints.stub()]
    for _ in range(3):
        authority.issue(tmp_path / "own")
        assert endpoints.stub() is endpoints.stub() is not channels[-1]
        channels.append(endpoints.stub())

    def closed() -> list[bool]:
        return [channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN for channel in channels]

    await eventually(lambda: closed() == [True, True, False, False])
    await endpoints.close()
    assert all(closed())


async def served_expiry_s(index: RunningIndex) -> int:
    """When the certificate that a new connection is shown ends."""
    host, _, port = index.endpoint.rpartition(":")
    pem = await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)), timeout=60)
    return not_after_s(pem.encode())


async def test_a_renewed_certificate_is_served_without_a_restart(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue(tmp_path / "own")
    registry = CollectorRegistry()
    settings = TlsSettings(
        tls_ca_file=files.ca_file,
        tls_cert_file=files.cert_file,
        tls_key_file=files.key_file,
        tls_client_auth=ClientAuth.NONE,
    )
    tls = open_tls(settings, registry, service="index")
    assert tls is not None

    def expiry_s(certificate: str = "own") -> float | None:
        name = "kvpool_index_certificate_expiry_timestamp_seconds"
        return registry.get_sample_value(name, {"certificate": certificate})

    async with running_index(tls=tls, client_tls=tls.client) as index:
        before_s = await served_expiry_s(index)
        assert expiry_s() == before_s < (expiry_s("ca") or 0)
        authority.issue(tmp_path / "own", days=20)
        after_s = await served_expiry_s(index)
        assert expiry_s() == after_s > before_s + 9 * 86400
        (tmp_path / "own" / "tls.key").write_bytes(b"damage")
        assert await served_expiry_s(index) == after_s
        assert expiry_s() == after_s
        assert registry.get_sample_value("kvpool_index_certificate_reload_failures_total") == 1


async def test_clients_reconnect_with_what_was_renewed(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new CA on both sides: only clients that read all files again get through. A stream goes on or is reopened."""
    server_files, files = authority.issue(tmp_path / "server"), authority.issue(tmp_path / "client")
    tls = TlsCredentials(files)
    async with AsyncExitStack() as stack:
        index = await stack.enter_async_context(running_index(tls=service_tls(server_files), client_tls=tls))
        client = await stack.enter_async_context(index_client(index.endpoint, tls))
        keyspace = (await client.open_keyspace("test", SPEC)).keyspace
        query = ChainQuery(keyspace=keyspace, chunk_hashes=b"h" * 16, shards=1)
        assert (await client.match_stream.match(query)).matched_chunks == 0
        world = stack.enter_context(new_world())
        store = await stack.enter_async_context(served(world, tls=service_tls(server_files)))
        transfers = PageTransferClient(store.node.bulk_endpoint, tls=tls)
        stack.callback(transfers.close)
        open_channel, opened = grpc.secure_channel, list[grpc.Channel]()

        def opening(*arguments: Any, **options: Any) -> grpc.Channel:
            opened.append(open_channel(*arguments, **options))
            return opened[-1]

        monkeypatch.setattr(grpc, "secure_channel", opening)
        for name in ("next", "the one after", "and one more"):
            open_before = len(opened)
            renewed = Authority(name)
            for directory in ("server", "client"):
                renewed.issue(tmp_path / directory)
            assert (await client.get_info()).store_reachable
            assert (await client.match_stream.match(query, timeout_s=60)).matched_chunks == 0
            assert await asyncio.to_thread(read_nothing, transfers) == [(None, False)]
            assert len(opened) > open_before
