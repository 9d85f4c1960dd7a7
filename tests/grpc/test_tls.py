"""TLS on real connections: who may talk to whom, what is said where it does not fit, and renewals without a restart."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID
from grpc_health.v1 import health_pb2

from kvpool.client.index import IndexClient
from kvpool.client.pagestore_control import PageStoreControl
from kvpool.client.tls import TlsCredentials, TlsFiles
from kvpool.client.transfer import PageToRead, PageToWrite, PageTransferClient
from kvpool.core.cluster import ChainQuery
from kvpool.core.errors import DeadlineExceeded, KvPoolError, ServiceUnavailable, TlsFailed
from kvpool.core.outcome import Admission
from kvpool_server.interceptors import CallLimits
from kvpool_server.listen import TcpAddress
from kvpool_server.server import ControlServer, GrpcLimits
from kvpool_server.tls import ClientAuth, ServiceTls
from tests.fixtures.certificates import Authority
from tests.fixtures.index_server import running_index
from tests.fixtures.pagestore import KEYSPACE, KEYSPACES, PAGE_BYTES, metadata, new_world, page_key, sealed_page
from tests.fixtures.pagestore_server import Served, served
from tests.fixtures.patience import PATIENCE_S, patient
from tests.fixtures.redis_server import free_port

QUERY = ChainQuery(keyspace=KEYSPACE, chunk_hashes=b"h" * 16, shards=1)
MODES = pytest.mark.parametrize("client_auth", list(ClientAuth), ids=lambda mode: mode.value)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def service_tls(files: TlsFiles, client_auth: ClientAuth = ClientAuth.REQUIRE) -> ServiceTls:
    return ServiceTls(TlsCredentials(files), client_auth)


def client_tls(files: TlsFiles, client_auth: ClientAuth = ClientAuth.REQUIRE) -> TlsCredentials:
    """With a certificate only where one is demanded."""
    if client_auth is ClientAuth.NONE:
        files = TlsFiles(ca_file=files.ca_file)
    return TlsCredentials(files)


@asynccontextmanager
async def index_client(
    endpoint: str, tls: TlsCredentials | None, timeout_s: float = PATIENCE_S
) -> AsyncIterator[IndexClient]:
    client = IndexClient(patient(index_endpoints=(endpoint,), tls=tls, call_timeout_s=timeout_s))
    try:
        yield client
    finally:
        await client.close()


def transfer(store: Served, tls: TlsCredentials | None) -> tuple[list[Any], list[bytes]]:
    """Write two pages and read them back by streams: the answers to the writes, and the bytes read."""
    client = PageTransferClient(store.node.bulk_endpoint, tls=tls)
    answers: list[Any] = []
    keys = [page_key(1), page_key(2)]
    items = [PageToWrite(key=key, page=memoryview(sealed_page(key)), metadata=metadata(1)) for key in keys]
    client.write_pages(KEYSPACES, items, lambda at, admission, error: answers.append(error or admission), timeout_s=60)
    buffers = [bytearray(PAGE_BYTES) for _ in keys]
    reads = [PageToRead(key=key, destination=memoryview(buffer)) for key, buffer in zip(keys, buffers, strict=True)]
    client.read_pages(KEYSPACES, reads, lambda at, error, hit: None, timeout_s=60)
    client.close()
    return answers, [bytes(buffer) for buffer in buffers]


@MODES
async def test_control_calls_and_streams_work(authority: Authority, tmp_path: Path, client_auth: ClientAuth) -> None:
    files = authority.issue(tmp_path / "own")
    tls = client_tls(files, client_auth)
    async with running_index(tls=service_tls(files, client_auth), client_tls=tls) as index:
        async with index_client(index.endpoint, tls) as client:
            assert (await client.get_info()).store_reachable
    probed = f"127.0.0.1:{free_port()}"
    with new_world() as world:
        async with served(world, tls=service_tls(files, client_auth), health_listen=probed) as store:
            answers, read = await asyncio.to_thread(transfer, store, tls)
            assert answers == [Admission.RESERVED] * 2
            assert read == [sealed_page(page_key(1)), sealed_page(page_key(2))]
            control = store.control()  # by the unix socket, which is plain whatever TLS there is
            assert (await control.status()).staging_page_count == 2
            await control.close()
            control = PageStoreControl(store.endpoint, patient(tls=tls))
            assert (await control.status()).staging_page_count == 2
            await control.close()
            async with grpc.aio.insecure_channel(probed) as channel:
                assert await health(channel) == health_pb2.HealthCheckResponse.SERVING


class Misfit(NamedTuple):
    """An incompatible server and client, as names of `parties`; the client's message, and the error's class."""

    server: str
    client: str
    said: str
    error: type[KvPoolError] = TlsFailed


MISFITS = [
    Misfit("good", "plain", "it expects TLS and this client has none (set tls_ca_file)", ServiceUnavailable),
    Misfit("plain", "good", "the server answered in the clear"),
    Misfit("good", "other CA", "does not come from an authority in this client's tls_ca_file"),
    Misfit("expired", "good", "the server's certificate has expired"),
    Misfit("early", "good", "not valid yet: look at the clocks"),
    Misfit("elsewhere", "good", "is not issued to the name that was connected to"),
    Misfit("only a client", "good", "is not for servers"),
    Misfit("good", "no certificate", "demands a client certificate and this client has none", ServiceUnavailable),
    Misfit("good", "expired", "it refuses this client's certificate", ServiceUnavailable),
    Misfit("good", "stranger", "it refuses this client's certificate", ServiceUnavailable),
]


@pytest.fixture(scope="module")
def parties(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TlsFiles | None]:
    """Everybody trusts the authority, but for "other CA"; everybody's certificate comes from it, but for "stranger"."""
    directory, other = tmp_path_factory.mktemp("parties"), Authority("other")
    good = authority.issue(directory / "good")
    return {
        "plain": None,
        "good": good,
        "expired": authority.issue(directory / "expired", start_days=-9, days=-1),
        "early": authority.issue(directory / "early", start_days=1, days=2),
        "elsewhere": authority.issue(directory / "elsewhere", names=["elsewhere"]),
        "only a client": authority.issue(directory / "client", usages=[ExtendedKeyUsageOID.CLIENT_AUTH]),
        "other CA": authority.issue(directory / "blind", trusted=other.pem),
        "no certificate": TlsFiles(ca_file=good.ca_file),
        "stranger": other.issue(directory / "stranger", trusted=authority.pem),
    }


@asynccontextmanager
async def control_server(tls: ServiceTls | None) -> AsyncIterator[str]:
    server = ControlServer(interceptors=[], service_names=["test"])
    endpoint = f"127.0.0.1:{server.listen_tcp(TcpAddress('127.0.0.1', 0), tls)}"
    await server.start()
    try:
        yield endpoint
    finally:
        await server.stop(0.1)


@pytest.mark.parametrize("misfit", MISFITS, ids=lambda misfit: f"{misfit.server} server, {misfit.client} client")
async def test_what_does_not_fit_is_explained(misfit: Misfit, parties: dict[str, TlsFiles | None]) -> None:
    """Of a control call, of a stream of requests, of a stream of answers and of pages, each within its deadline."""
    server, client = parties[misfit.server], parties[misfit.client]
    tls = TlsCredentials(client) if client is not None else None
    async with control_server(service_tls(server) if server is not None else None) as endpoint:
        unary = await refusal(endpoint, tls)
        async with index_client(endpoint, tls) as index:
            with pytest.raises(misfit.error) as requests:
                await index.match_stream.match(QUERY, timeout_s=60)
        control = PageStoreControl(endpoint, patient(tls=tls))
        with pytest.raises(misfit.error) as answers:
            await anext(control.drain(timeout_s=60))
        await control.close()
        transfers = PageTransferClient(endpoint, tls=tls)
        reported = await asyncio.to_thread(read_nothing, transfers)
        transfers.close()
    for error in (unary, requests.value, answers.value, reported[0][0]):
        assert type(error) is misfit.error
        assert misfit.said in str(error), error
        assert "127.0.0.1" in str(error)
        assert "either" not in str(error)


async def refusal(endpoint: str, tls: TlsCredentials | None) -> KvPoolError:
    """Of a unary call, which may be repeated until its time is over: more of it where this machine stood still."""
    for timeout_s in (0.5, 5.0, 50.0):
        async with index_client(endpoint, tls, timeout_s) as index:
            with pytest.raises(KvPoolError) as refused:
                await index.get_info()
            if not isinstance(refused.value, DeadlineExceeded):
                break
    return refused.value


async def test_what_cannot_fit_soon_is_reported_at_once(parties: dict[str, TlsFiles | None]) -> None:
    """And not when the time of the call is over: certificates do not come to fit by asking again."""
    server, client = parties["good"], parties["other CA"]
    assert server is not None and client is not None
    async with control_server(service_tls(server)) as endpoint:
        async with asyncio.timeout(60), index_client(endpoint, TlsCredentials(client), timeout_s=3600.0) as index:
            with pytest.raises(TlsFailed):
                await index.get_info()


async def test_a_name_may_be_overridden(parties: dict[str, TlsFiles | None]) -> None:
    server, client = parties["elsewhere"], parties["good"]
    assert server is not None and client is not None
    async with running_index(tls=service_tls(server), client_tls=TlsCredentials(client)) as index:
        async with index_client(index.endpoint, TlsCredentials(client, server_name="elsewhere")) as named:
            assert (await named.get_info()).store_reachable


async def health(channel: grpc.aio.Channel) -> int:
    """The status of the server as a whole."""
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        health_pb2.HealthCheckRequest.SerializeToString,
        health_pb2.HealthCheckResponse.FromString,
    )
    return int((await check(health_pb2.HealthCheckRequest(), timeout=60)).status)


async def test_health_is_answered_in_the_clear_where_that_was_asked_for(authority: Authority, tmp_path: Path) -> None:
    server = ControlServer(interceptors=[], service_names=["test"])
    server.listen_tcp(TcpAddress("127.0.0.1", 0), service_tls(authority.issue(tmp_path / "own")))
    port = server.listen_health(TcpAddress("127.0.0.1", 0))
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert await health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
        await server.set_serving(True)
        assert await health(channel) == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError, match="Method not found"):
            other = channel.unary_unary(
                "/kvpool.v1.IndexService/GetInfo",
                health_pb2.HealthCheckRequest.SerializeToString,
                health_pb2.HealthCheckResponse.FromString,
            )
            await other(health_pb2.HealthCheckRequest(), timeout=60)
    await server.stop(0.1)


async def test_clients_of_the_probe_port_leave_nothing_behind(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No watches, which last and which a hostile caller could end for others, no idle connections, no logs."""
    server = ControlServer(interceptors=[], service_names=["test"])
    server.listen_tcp(TcpAddress("127.0.0.1", 0), service_tls(authority.issue(tmp_path / "own")))
    port = server.listen_health(TcpAddress("127.0.0.1", 0), idle_s=0.2)
    await server.start()
    async with asyncio.timeout(60), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        watch: Any = channel.unary_stream("/grpc.health.v1.Health/Watch")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await watch(b"").read()
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await check(b"\xff" * 9)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO] == []
        while (state := channel.get_state()) is not grpc.ChannelConnectivity.IDLE:
            await channel.wait_for_state_change(state)
    await server.stop(0.1)


async def test_checks_that_are_not_finished_do_not_stay_at_the_probe_port() -> None:
    server = ControlServer(interceptors=[], service_names=["test"])
    limits = CallLimits(peer_open_calls=2, request_s=0.5)
    port = server.listen_health(TcpAddress("127.0.0.1", 0), limits=limits)
    await server.start()
    async with asyncio.timeout(60), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        silent: Any = channel.stream_unary("/grpc.health.v1.Health/Check")
        calls = [silent() for _ in range(5)]  # they write nothing
        codes = Counter([await call.code() for call in calls])
        assert codes == {grpc.StatusCode.DEADLINE_EXCEEDED: 2, grpc.StatusCode.RESOURCE_EXHAUSTED: 3}
        assert await health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
    await server.stop(0.1)


def read_nothing(client: PageTransferClient) -> list[tuple[KvPoolError | None, bool]]:
    """The answer to a read of a page that does not exist."""
    reported: list[tuple[KvPoolError | None, bool]] = []
    page = [PageToRead(key=page_key(1), destination=memoryview(bytearray(PAGE_BYTES)))]
    client.read_pages(KEYSPACES, page, lambda at, error, hit: reported.append((error, hit)), timeout_s=60)
    return reported


async def test_who_does_not_shake_hands_is_sent_away(authority: Authority, tmp_path: Path) -> None:
    limits = GrpcLimits(handshake_timeout_s=0.2)
    server = ControlServer(interceptors=[], service_names=["test"], limits=limits)
    port = server.listen_tcp(TcpAddress("127.0.0.1", 0), service_tls(authority.issue(tmp_path / "own")))
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(60):
        assert await reader.read() == b""
    writer.close()
    await server.stop(0.1)
