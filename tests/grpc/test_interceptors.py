"""Interceptors around all four kinds of calls, on real servers: grpc.aio and the thread pool."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from kvpool.core import errors
from kvpool.core.addresses import peer_host
from kvpool.core.errors import KvPoolError
from kvpool.testing import eventually
from kvpool.wire.status import StreamStatus, error_from_rpc
from kvpool_server.interceptors import CallLimits, DeadlinePolicy, current_identity
from kvpool_server.interceptors.errors import AioErrors
from kvpool_server.interceptors.limits import OpenCalls
from kvpool_server.interceptors.wrapping import Call
from tests.grpc.echo import SERVICE, World, aio_world, sync_world


@pytest.fixture(params=["aio", "sync"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    build = aio_world if request.param == "aio" else sync_world
    async with build(DeadlinePolicy()) as built:
        yield built


KINDS = ["Unary", "Download", "Upload", "Talk"]


@pytest.mark.parametrize("method", KINDS)
async def test_identity_reaches_the_handler(world: World, method: str) -> None:
    expected = b"acme:first+acme:hello" if method == "Upload" else b"acme:hello"
    assert await world.client.last(method, b"hello") == expected
    await eventually(lambda: world.count(method, "OK") == 1)
    assert world.in_flight(method) == 0


async def test_identities_do_not_mix(world: World) -> None:
    clients = [world.client.as_tenant(tenant) for tenant in ("red", "blue", "green")] * 10
    answers = await asyncio.gather(*(client.last("Talk", b"x") for client in clients))
    assert answers == [f"{dict(client.metadata)['authorization']}:x".encode() for client in clients]


@pytest.mark.parametrize("method", KINDS)
async def test_unknown_caller_is_refused(world: World, method: str) -> None:
    failure = await world.client.as_tenant(None).failure(method, b"hello")
    assert failure.code() is grpc.StatusCode.UNAUTHENTICATED
    assert isinstance(error_from_rpc(failure), errors.Unauthenticated)
    await eventually(lambda: world.count(method, "UNAUTHENTICATED") == 1)


@pytest.mark.parametrize("method", KINDS)
async def test_domain_error_comes_back_as_itself(world: World, method: str) -> None:
    failure = await world.client.failure(method, b"invalid")
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    received = error_from_rpc(failure)
    assert isinstance(received, errors.InvalidRequest)
    assert (received.item_index, received.message) == (2, "hash of 15 bytes")
    await eventually(lambda: world.count(method, "INVALID_ARGUMENT") == 1)
    assert type(error_from_rpc(await world.client.failure(method, b"corrupt"))) is errors.PageCorrupt


async def test_aio_client_that_writes_still_learns_the_status(world: World) -> None:
    for _ in range(50):  # without StreamStatus about one in five of these is "Internal error from Core"
        call = world.client.as_tenant(None).channel.stream_stream(f"/{SERVICE}/Talk")(timeout=60)
        status = StreamStatus(call, None)
        with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)) as raised:
            await call.write(b"first")
            await call.write(bytes(100_000))
            await call.read()
        assert isinstance(status.error(raised.value), errors.Unauthenticated)


async def test_write_after_a_good_end_says_so(world: World) -> None:
    call = world.client.call("Talk", b"x")
    status = StreamStatus(call, None)
    assert [response async for response in call] == [b"acme:first", b"acme:x"]
    assert isinstance(status.error(asyncio.InvalidStateError("RPC already finished.")), errors.ServiceUnavailable)


async def test_group_of_domain_errors(world: World) -> None:
    assert isinstance(error_from_rpc(await world.client.failure("Unary", b"group")), errors.ArenaFull)


@pytest.mark.parametrize("method", KINDS)
async def test_bug_leaks_nothing_and_can_be_found(world: World, method: str, caplog: pytest.LogCaptureFixture) -> None:
    failure = await world.client.failure(method, b"bug")
    assert failure.code() is grpc.StatusCode.INTERNAL
    details = failure.details() or ""
    assert "secret" not in details and "KeyError" not in details
    assert type(error_from_rpc(failure)) is KvPoolError
    incident = details.split()[2].rstrip(";")
    record = next(record for record in caplog.records if "unexpected error" in record.message)
    assert getattr(record, "kvpool_fields")["incident"] == incident  # noqa: B009  (not in the type's fields)
    assert record.exc_info is not None and isinstance(record.exc_info[1], KeyError)


@pytest.mark.parametrize("method", KINDS)
async def test_a_message_that_cannot_be_read_is_a_bad_request_and_no_bug(
    world: World, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        received = error_from_rpc(await world.client.failure(method, b"unreadable"))
        assert isinstance(received, errors.InvalidRequest)
        assert f"/test.Echo/{method}" in received.message and "10 bytes" in received.message
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO] == []
    await eventually(lambda: world.count(method, "INVALID_ARGUMENT") == 3)
    assert isinstance(
        error_from_rpc(await world.client.as_tenant(None).failure(method, b"unreadable")), errors.Unauthenticated
    )


async def test_status_chosen_by_the_handler_is_kept(world: World, caplog: pytest.LogCaptureFixture) -> None:
    failure = await world.client.failure("Unary", b"abort")
    assert (failure.code(), failure.details()) == (grpc.StatusCode.OUT_OF_RANGE, "chosen by the handler")
    assert "unexpected error" not in caplog.text
    await eventually(lambda: world.count("Unary", "OUT_OF_RANGE") == 1)


async def test_method_without_an_implementation(world: World) -> None:
    failure = await world.client.failure("Forgotten", b"")
    assert failure.code() is grpc.StatusCode.UNIMPLEMENTED
    received = error_from_rpc(failure)
    assert isinstance(received, errors.NotServed)
    assert "/test.Echo/Forgotten" in received.message
    assert isinstance(error_from_rpc(await world.client.failure("Unary", b"stub")), errors.NotServed)


async def test_made_up_methods_add_no_labels(world: World) -> None:
    for number in range(3):
        failure = await world.client.failure(f"MadeUp{number}", b"")
        assert failure.code() is grpc.StatusCode.UNIMPLEMENTED
    assert world.count("unknown", "UNIMPLEMENTED") == 3
    names = {sample.labels.get("method") for metric in world.registry.collect() for sample in metric.samples}
    assert not any(name and "MadeUp" in name for name in names)


async def test_client_that_leaves_a_stream_ends_its_handler(world: World) -> None:
    call = world.client.call("Download", b"flood")
    assert await call.read() == b"acme:first"
    assert world.in_flight("Download") == 1
    call.cancel()
    await eventually(world.echo.finished.is_set)
    await eventually(lambda: world.in_flight("Download") == 0)
    await eventually(lambda: world.count("Download", "CANCELLED") == 1)


async def test_stream_that_is_left_cleans_up_in_its_own_task() -> None:
    async with aio_world(DeadlinePolicy()) as world:
        call = world.client.call("Download", b"flood")
        await call.read()
        call.cancel()
        await eventually(world.echo.finished.is_set)
        began_in, ended_in = world.echo.stream_tasks
        assert began_in is ended_in, "a garbage collector's task closed the generator"


FAILED_WRITE = grpc.aio.InternalError()


@pytest.mark.parametrize(
    "error",
    [
        FAILED_WRITE,
        ExceptionGroup("of a TaskGroup", [FAILED_WRITE]),
        ExceptionGroup("of a TaskGroup", [ExceptionGroup("inner", [FAILED_WRITE]), errors.ArenaFull("full")]),
    ],
)
async def test_write_to_a_client_that_left_is_no_error(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    call = Call("/test.Echo/Download", True, context=None)
    with pytest.raises(asyncio.CancelledError):
        async with AioErrors().around(call):
            raise error
    assert caplog.text == ""


async def test_a_bug_beside_a_failed_write_is_found(caplog: pytest.LogCaptureFixture) -> None:
    class Left:
        async def abort(self, *status: object) -> None:
            raise FAILED_WRITE

    with pytest.raises(asyncio.CancelledError):
        async with AioErrors().around(Call("/test.Echo/Download", True, context=Left())):
            raise ExceptionGroup("of a TaskGroup", [FAILED_WRITE, KeyError("bug")])
    assert "unexpected error" in caplog.text


async def test_thread_forgets_the_identity_of_its_last_call() -> None:
    seen: list[object] = []

    def probe(request: bytes, context: Any) -> bytes:
        try:
            seen.append(current_identity())
        except errors.Unauthenticated:
            seen.append(None)
        return b""

    async with sync_world(DeadlinePolicy(), threads=1) as world:  # one thread, so that it must be the same
        # Health probes need no credentials, so their handlers must see no identity.
        handler: Any = grpc.unary_unary_rpc_method_handler(probe)
        generic = grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": handler})
        world.server.grpc.add_generic_rpc_handlers((generic,))
        assert await world.client.last("Unary", b"hello") == b"acme:hello"
        # The one thread may still be on its way out of the call that was answered.
        await eventually(lambda: world.in_flight("Unary") == 0)
        anonymous = world.client.as_tenant(None).channel
        await anonymous.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=60)
    assert seen == [None]


async def test_deadline_of_the_client_is_counted() -> None:
    async with aio_world(DeadlinePolicy()) as world:

        async def counted() -> bool:
            """Of a call that came to the server before its deadline."""
            failure = await world.client.failure("Unary", b"wait", timeout_s=0.05)
            assert isinstance(error_from_rpc(failure), errors.DeadlineExceeded)
            return world.count("Unary", "DEADLINE_EXCEEDED") > 0

        await eventually(counted)
        await eventually(lambda: world.in_flight("Unary") == 0)


async def test_client_that_leaves_a_waiting_call_is_counted_as_cancelled() -> None:
    async with aio_world(DeadlinePolicy()) as world:
        call = world.client.call("Unary", b"wait")
        await world.echo.started.wait()
        call.cancel()
        await eventually(lambda: world.count("Unary", "CANCELLED") == 1)
        assert world.in_flight("Unary") == 0


async def test_unary_call_without_a_deadline_is_capped() -> None:
    async with aio_world(DeadlinePolicy(unary_cap_s=0.05)) as world:
        failure = await world.client.failure("Unary", b"wait", timeout_s=None)
        received = error_from_rpc(failure)
        assert isinstance(received, errors.DeadlineExceeded)
        assert "0.05 s" in received.message


async def test_streams_are_capped_only_when_declared() -> None:
    async with aio_world(DeadlinePolicy(unary_cap_s=0.05)) as world:
        call = world.client.call("Download", b"wait", timeout_s=None)
        assert await call.read() == b"acme:first"
        # A unary call that starts later hits its cap first, and the stream is still there.
        await world.client.failure("Unary", b"wait", timeout_s=None)
        assert not call.done() and not world.echo.finished.is_set()
        call.cancel()
        await eventually(world.echo.finished.is_set)
    async with aio_world(DeadlinePolicy(caps_s={f"/{SERVICE}/Download": 0.05})) as world:
        failure = await world.client.failure("Download", b"wait", timeout_s=None)
        assert isinstance(error_from_rpc(failure), errors.DeadlineExceeded)
        assert world.echo.finished.is_set()


async def test_a_cap_that_passes_before_the_first_answer_is_written_ends_the_call() -> None:
    async with aio_world(DeadlinePolicy(caps_s={f"/{SERVICE}/Download": 60.0})) as world:
        failure = await world.client.failure("Download", b"late", timeout_s=None)
        assert isinstance(error_from_rpc(failure), errors.DeadlineExceeded)


@pytest.mark.parametrize("method", ["Unary", "Download"])
async def test_a_call_whose_request_does_not_come_is_ended(method: str) -> None:
    async with aio_world(DeadlinePolicy(), CallLimits(request_s=0.05)) as world:
        call = world.client.channel.stream_stream(f"/{SERVICE}/{method}")(metadata=world.client.metadata)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()  # it has written nothing
        assert isinstance(error_from_rpc(raised.value), errors.DeadlineExceeded)
        await eventually(lambda: world.in_flight(method) == 0)
        assert await world.client.last("Unary", b"hello") == b"acme:hello"


async def test_one_peer_cannot_take_all_calls_and_places_come_back() -> None:
    async with aio_world(DeadlinePolicy(), CallLimits(peer_open_calls=2)) as world:
        waiting = [world.client.call("Unary", b"wait"), world.client.call("Download", b"wait")]
        await eventually(lambda: (world.in_flight("Unary") or 0) + (world.in_flight("Download") or 0) == 2)
        for _ in range(2):
            assert isinstance(error_from_rpc(await world.client.failure("Unary", b"hello")), errors.Overloaded)
        for call in waiting:
            call.cancel()
        await eventually(lambda: (world.in_flight("Unary") or 0) + (world.in_flight("Download") or 0) == 0)
        assert await world.client.last("Unary", b"hello") == b"acme:hello"


def test_a_peer_is_a_host_whatever_its_port() -> None:
    assert peer_host("ipv4:10.0.0.1:5") == peer_host("ipv4:10.0.0.1:6") != peer_host("ipv4:10.0.0.2:5")
    assert peer_host("ipv6:%5B::1%5D:5") == peer_host("ipv6:%5B::1%5D:6")
    assert peer_host("unix:/run/a.sock") == peer_host("unix:")
    calls = OpenCalls(CallLimits(open_calls=3, peer_open_calls=2))
    with calls.place("ipv4:1:1"), calls.place("ipv4:1:2"), calls.place("ipv4:2:1"):
        with pytest.raises(errors.Overloaded, match="3 calls"), calls.place("ipv4:3:1"):
            pass
    assert calls.count == 0


async def test_a_deadline_that_no_call_needs_is_cut() -> None:
    async with aio_world(DeadlinePolicy(longest_s=0.05)) as world:
        assert isinstance(
            error_from_rpc(await world.client.failure("Unary", b"wait", timeout_s=1e6)), errors.DeadlineExceeded
        )


async def test_client_deadline_replaces_the_cap() -> None:
    async with aio_world(DeadlinePolicy(unary_cap_s=0.01)) as world:
        call = world.client.call("Unary", b"wait", timeout_s=60)
        await world.echo.started.wait()
        await world.client.failure("Unary", b"wait", timeout_s=None)  # capped, although it began later
        assert not call.done()
        call.cancel()


async def test_pool_that_is_full_refuses_at_once() -> None:
    async with sync_world(DeadlinePolicy(), threads=4) as world:
        calls = [world.client.call("Download", b"flood") for _ in range(4)]
        for call in calls:
            await call.read()
        failure = await world.client.failure("Unary", b"hello")
        assert isinstance(error_from_rpc(failure), errors.Overloaded)
        for call in calls:
            call.cancel()
