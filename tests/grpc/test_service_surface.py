"""What holds for all three services alike, through their real servers: what is not served, health, reflection."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvpool.v1 import gpuagent_pb2, index_pb2, pagestore_pb2
from tests.fixtures.agent import World, running_agent
from tests.fixtures.index_server import running_index
from tests.fixtures.pagestore import new_world
from tests.fixtures.pagestore_server import served

FILES = (index_pb2, pagestore_pb2, gpuagent_pb2)
SERVICES = {name: service for file in FILES for name, service in file.DESCRIPTOR.services_by_name.items()}
METHODS = [method for service in SERVICES.values() for method in service.methods]
NOT_SERVED: set[str] = set()
# Refused at once, where an empty request would be served for as long as the client likes.
REQUESTS: dict[str, Any] = {"IndexService.Watch": index_pb2.WatchRequest(keyspace_id=b"short")}
TIMEOUT_S = 60.0


def name_of(method: MethodDescriptor) -> str:
    return f"{method.containing_service.name}.{method.name}"


@pytest.fixture
async def endpoints() -> AsyncIterator[dict[str, str]]:
    """Where each service listens: index, pagestore and agent as their processes serve them."""
    async with running_index() as index, running_agent(World()) as agent:
        with new_world() as world:
            async with served(world) as store:
                yield {
                    "IndexService": index.endpoint,
                    "PageStoreService": store.endpoint,
                    "PageTransferService": store.node.bulk_endpoint,
                    "GpuAgentService": agent.endpoint,  # between agents there are calls that TCP does not serve
                }


@asynccontextmanager
async def channels(endpoints: dict[str, str]) -> AsyncIterator[dict[str, grpc.aio.Channel]]:
    opened = {name: grpc.aio.insecure_channel(endpoint) for name, endpoint in endpoints.items()}
    try:
        yield opened
    finally:
        for channel in opened.values():
            await channel.close()


async def status_of(channel: grpc.aio.Channel, method: MethodDescriptor) -> tuple[grpc.StatusCode, str]:
    """How the server ends a call with one message, or with an empty stream of them."""
    message_type: Any = GetMessageClass(method.input_type)
    message = REQUESTS.get(name_of(method), message_type())
    answer_type: Any = GetMessageClass(method.output_type)
    streams = ("stream" if method.client_streaming else "unary", "stream" if method.server_streaming else "unary")
    make: Any = getattr(channel, "_".join(streams))
    stub = make(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=message_type.SerializeToString,
        response_deserializer=answer_type.FromString,
    )
    if method.client_streaming:
        call = stub(timeout=TIMEOUT_S)
        await call.done_writing()
    else:
        call = stub(message, timeout=TIMEOUT_S)
    return await call.code(), await call.details() or ""


async def test_exactly_these_calls_are_not_served_and_say_why(endpoints: dict[str, str]) -> None:
    refused = {}
    async with channels(endpoints) as opened:
        for method in METHODS:
            code, details = await status_of(opened[method.containing_service.name], method)
            assert code not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.INTERNAL), (name_of(method), details)
            if code is grpc.StatusCode.UNIMPLEMENTED:
                refused[name_of(method)] = details
    assert set(refused) == NOT_SERVED
    for name, details in refused.items():
        # The reason, and not gRPC's own "Method not found!".
        assert name.rpartition(".")[2] in details and len(details.split()) > 5, details


GARBAGE = b"\xff" * 9  # no protobuf: a tag that never ends


async def status_of_raw(
    channel: grpc.aio.Channel, path: str, message: bytes, *, client_streams: bool
) -> tuple[grpc.StatusCode, str]:
    """How the server ends a call with one message that is sent as it is."""
    make: Any = channel.stream_stream if client_streams else channel.unary_stream  # one answer is a stream of one
    call = make(path)(iter([message]) if client_streams else message, timeout=TIMEOUT_S)
    return await call.code(), await call.details() or ""


async def test_a_message_that_cannot_be_read_is_refused_and_leaves_no_trace_in_the_log(
    endpoints: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async with channels(endpoints) as opened:
        for method in METHODS:
            path = f"/{method.containing_service.full_name}/{method.name}"
            channel = opened[method.containing_service.name]
            code, details = await status_of_raw(channel, path, GARBAGE, client_streams=method.client_streaming)
            assert code is grpc.StatusCode.INVALID_ARGUMENT, (name_of(method), code, details)
            assert method.input_type.name in details, details
        for name in CONTROL:
            code, details = await status_of_raw(
                opened[name], "/grpc.health.v1.Health/Check", GARBAGE, client_streams=False
            )
            assert code is grpc.StatusCode.INVALID_ARGUMENT, (name, code, details)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO] == []


def test_the_api_says_what_is_not_served() -> None:
    root = Path(__file__).parents[2] / "proto"
    section = (root / "README.md").read_text().partition("## Not served yet")[2].partition("\n## ")[0]
    for name in NOT_SERVED:
        service, _, method = name.partition(".")
        assert f"`{name}`" in section or f"`.{method}`" in section, name
    for service in SERVICES.values():
        text = (root / service.file.name).read_text()
        body = text.partition(f"service {service.name} {{")[2].partition("\n}")[0]
        comment = ""
        for line in body.splitlines():
            if line.strip().startswith("//"):
                comment += line
            elif line.strip().startswith("rpc "):
                name = f"{service.name}.{line.split()[1].partition('(')[0]}"
                assert ("Not served yet: UNIMPLEMENTED" in comment) == (name in NOT_SERVED), name
                comment = ""


# The bulk endpoint has page streams only: a thread of its pool is never held by a watcher of health or reflection.
CONTROL = {
    "IndexService": ["IndexService"],
    "PageStoreService": ["PageStoreService", "PageTransferService"],
    "GpuAgentService": ["GpuAgentService"],
}


async def test_every_control_endpoint_answers_for_health_and_reflection(endpoints: dict[str, str]) -> None:
    async with channels({name: endpoints[name] for name in CONTROL}) as opened:
        for name, channel in opened.items():
            full_names = [SERVICES[service].full_name for service in CONTROL[name]]
            health: Any = health_pb2_grpc.HealthStub(channel)  # its types know no attributes
            for service in ("", *full_names):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING, service
            reflection: Any = reflection_pb2_grpc
            call = reflection.ServerReflectionStub(channel).ServerReflectionInfo(timeout=TIMEOUT_S)
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            listed = {each.name for each in (await call.read()).list_services_response.service}
            assert listed == {*full_names, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
            for full_name in full_names:
                await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=full_name))
                assert (await call.read()).file_descriptor_response.file_descriptor_proto, full_name
            await call.done_writing()
