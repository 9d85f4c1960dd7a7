"""The control server: health, reflection, sockets, and what it says when it cannot listen."""

import asyncio
import socket
import stat
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from kvpool.core.errors import StartupFailed
from kvpool_server.interceptors import (
    DeadlinePolicy,
    DefaultTenantAuthenticator,
    RequestMetrics,
    aio_interceptors,
)
from kvpool_server.listen import TcpAddress
from kvpool_server.server import LIVENESS, BulkServer, ControlServer, GrpcLimits
from tests.fixtures.patience import PATIENCE_S

SERVICE = "test.Echo"
LOOPBACK = TcpAddress("127.0.0.1", 0)


def control_server(limits: GrpcLimits | None = None) -> ControlServer:
    async def echo(request: bytes, context: Any) -> bytes:
        return request

    server = ControlServer(
        interceptors=aio_interceptors(
            metrics=RequestMetrics("test", CollectorRegistry()),
            authenticator=DefaultTenantAuthenticator("default"),
            deadlines=DeadlinePolicy(),
        ),
        service_names=[SERVICE],
        limits=limits,
    )
    handler: Any = grpc.unary_unary_rpc_method_handler(echo)
    server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Echo": handler}),))
    return server


async def echo(target: str, request: bytes) -> bytes:
    channel: Any
    async with grpc.aio.insecure_channel(target) as channel:
        return bytes(await channel.unary_unary(f"/{SERVICE}/Echo")(request, timeout=PATIENCE_S))


async def test_health_follows_the_service() -> None:
    server = control_server()
    port = server.listen_tcp(LOOPBACK)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)

        async def status(service: str) -> int:
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_S)
            return int(answer.status)

        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        assert [await status(""), await status(SERVICE)] == [not_serving, not_serving]
        assert await status(LIVENESS) == serving  # a service that waits for its store is not restarted for it
        await server.set_serving(True)
        assert [await status(""), await status(SERVICE)] == [serving, serving]
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=PATIENCE_S)
        assert (await watch.read()).status == serving
        stopping = asyncio.ensure_future(server.stop(5))
        assert (await watch.read()).status == not_serving
        watch.cancel()
        await stopping


async def test_reflection_lists_the_services() -> None:
    server = control_server()
    port = server.listen_tcp(LOOPBACK)
    await server.start()
    channel: Any  # the stubs of the stub know only grpc.Channel
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(timeout=PATIENCE_S)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        await call.done_writing()
    names = {service.name for service in answer.list_services_response.service}
    assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    await server.stop(0)


async def test_unix_socket_is_private_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    server = control_server()
    server.listen_unix(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    await server.start()
    assert await echo(f"unix:{path}", b"hello") == b"hello"
    with pytest.raises(StartupFailed, match="in use"):
        control_server().listen_unix(path)
    assert await echo(f"unix:{path}", b"still there") == b"still there"
    await server.stop(0)
    assert not path.exists()


async def test_unix_socket_can_be_opened_to_its_group(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    server = control_server()
    server.listen_unix(path, group_access=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    await server.start()
    assert await echo(f"unix:{path}", b"hello") == b"hello"
    await server.stop(0)


async def test_stale_unix_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = control_server()
    server.listen_unix(path)
    await server.start()
    assert await echo(f"unix:{path}", b"hello") == b"hello"
    await server.stop(0)


async def test_port_of_a_running_server_is_refused() -> None:
    first = control_server()
    address = TcpAddress("127.0.0.1", first.listen_tcp(LOOPBACK))
    await first.start()
    for second in (control_server(), BulkServer(threads=1, interceptors=[])):
        with pytest.raises(StartupFailed, match=rf"cannot listen on {address}: it is in use; stop .* another port"):
            second.listen_tcp(address)
    await first.stop(0)


async def test_port_taken_between_check_and_bind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_server.server.check_tcp", lambda address: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(StartupFailed, match="just taken"):
            control_server().listen_tcp(TcpAddress("127.0.0.1", taken.getsockname()[1]))


async def test_message_size_is_limited() -> None:
    server = control_server(GrpcLimits(max_message_bytes=1 << 16))
    port = server.listen_tcp(LOOPBACK)
    await server.start()
    assert len(await echo(f"127.0.0.1:{port}", bytes(1 << 16))) == 1 << 16
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await echo(f"127.0.0.1:{port}", bytes((1 << 16) + 1))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await server.stop(0)
