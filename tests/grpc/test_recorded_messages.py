"""What a release wrote once is read by this one and means the same: message by message, and whole sessions as raw bytes
over a real channel, from clients that are older, as old, and one minor release newer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict

from kvpool.client.fds import offer_fd
from kvpool.core.cluster import ChainMatch
from kvpool.testing import eventually
from kvpool.v1 import common_pb2, gpuagent_pb2, index_pb2, pagestore_pb2
from kvpool_index.config import IndexConfig
from tests.fixtures.agent import EngineProcess, World, running_agent
from tests.fixtures.index_server import running_index
from tests.fixtures.pagestore import new_world
from tests.fixtures.pagestore_server import served
from tests.fixtures.recorded import (
    UNKNOWN_BEFORE_DATA,
    UNKNOWN_FIELDS,
    Change,
    Recorded,
    all_recorded,
    as_written,
    before_versions,
    one_minor_newer,
    recorded,
    recorder,
    releases,
)

EVERY = pytest.mark.parametrize("change", [as_written, before_versions, one_minor_newer])
EVERY_RELEASE = pytest.mark.parametrize("release", releases())
TIMEOUT_S = 60.0


@pytest.mark.parametrize("message", list(all_recorded()), ids=lambda message: f"{message.release}-{message.name}")
def test_a_message_means_what_it_meant(message: Recorded) -> None:
    parsed = message.parse()
    assert MessageToDict(parsed, preserving_proto_field_name=True) == message.means
    assert parsed.SerializeToString(deterministic=True) == message.data


def test_the_record_of_this_release_is_what_it_writes() -> None:
    ours = {name: message.SerializeToString(deterministic=True) for name, message in recorder().messages()}
    assert ours == {name: message.data for name, message in recorded(releases()[-1]).items()}


def test_each_field_of_the_api_is_in_the_record_of_this_release() -> None:
    seen: set[tuple[str, str]] = set()
    unseen = {
        (name, field)
        for file in (common_pb2, gpuagent_pb2, index_pb2, pagestore_pb2)
        for name, described in file.DESCRIPTOR.message_types_by_name.items()
        for field in described.fields_by_name
    }
    for message in recorded(releases()[-1]).values():
        parsed = message.parse()
        seen.update((parsed.DESCRIPTOR.name, field.name) for field, _ in parsed.ListFields())
    assert not unseen - seen and len(unseen) > 600


class RawStream:
    """One bidirectional call of raw bytes."""

    def __init__(self, channel: grpc.aio.Channel, method: str, answer: Any, messages: dict[str, bytes]) -> None:
        self._call: Any = channel.stream_stream(method)()
        self._answer, self._messages = answer, messages

    async def send(self, name: str) -> None:
        await self._call.write(self._messages[name])

    async def send_message(self, message: Any) -> None:
        await self._call.write(message.SerializeToString())

    async def next(self) -> Any:
        async with asyncio.timeout(TIMEOUT_S):
            data = await self._call.read()
        assert isinstance(data, bytes), "the stream ended"
        return self._answer.FromString(data)

    async def ask(self, name: str) -> Any:
        await self.send(name)
        return await self.next()

    async def end(self) -> None:
        await self._call.done_writing()


@pytest.mark.parametrize("message", recorded(releases()[-1]).values(), ids=lambda message: str(message.name))
def test_a_newer_message_has_what_we_do_not_know(message: Recorded) -> None:
    newer = one_minor_newer(message)
    assert (UNKNOWN_BEFORE_DATA if "page" in message.name and "frame" in message.name else UNKNOWN_FIELDS) in newer
    assert len(newer) > len(message.data)


@asynccontextmanager
async def raw(endpoint: str, release: str, change: Change) -> AsyncIterator[tuple[Any, dict[str, bytes]]]:
    messages = {name: change(message) for name, message in recorded(release).items()}
    async with grpc.aio.insecure_channel(endpoint) as channel:
        yield channel, messages


@EVERY_RELEASE
@EVERY
async def test_an_index_serves_them(release: str, change: Change) -> None:
    async with (
        running_index(config=IndexConfig(tenant=recorder().TENANT)) as index,
        raw(index.endpoint, release, change) as (channel, messages),
    ):
        service = "/kvpool.v1.IndexService"
        opened = index_pb2.OpenKeyspaceResponse.FromString(
            await channel.unary_unary(f"{service}/OpenKeyspace")(messages["open_keyspace"])
        )
        assert opened.keyspace_id == recorder().KEYSPACE
        assert opened.version.wire >= 1
        granted = index_pb2.RegisterNodeResponse.FromString(
            await channel.unary_unary(f"{service}/RegisterNode")(messages["register_node"])
        )
        announce = RawStream(channel, f"{service}/Announce", index_pb2.AnnounceResponse, messages)
        registered = index_pb2.RegisterNodeRequest.FromString(messages["register_node"])
        opening = index_pb2.AnnounceOpen(
            node_id=recorder().NODE,
            incarnation=granted.incarnation,
            announce_epoch=granted.announce_epoch,
            process_id=registered.process_id,
        )
        await announce.send_message(index_pb2.AnnounceRequest(open=opening))
        assert (await announce.ask("announce_batch")).acknowledged_sequence == 1
        matches = RawStream(channel, f"{service}/MatchStream", index_pb2.MatchStreamResponse, messages)
        found = await matches.ask("match")
        assert (found.request_id, found.match.matched_chunks) == (7, 1)
        (place,) = found.match.runs[0].locations
        assert (place.node_id, place.incarnation) == (recorder().NODE, granted.incarnation)
        assert found.match.nodes[0].bulk_endpoint == "10.0.0.1:7201"
        several = await matches.ask("match_several")
        assert (several.request_id, several.match.matched_chunks) == (8, 1)
        assert [each.match.matched_chunks for each in several.more] == [1, 0, 0]
        assert [each.error.reason for each in several.more] == ["", "INVALID_REQUEST", ""]
        await matches.end()
        await announce.end()


@EVERY_RELEASE
@EVERY
async def test_a_pagestore_serves_them(release: str, change: Change) -> None:
    with new_world() as world:
        async with served(world) as store, raw(store.endpoint, release, change) as (channel, messages):
            async with grpc.aio.insecure_channel(store.node.bulk_endpoint) as bulk:
                await _write_and_read(bulk, messages)
            session = RawStream(channel, "/kvpool.v1.PageStoreService/Session", pagestore_pb2.SessionResponse, messages)
            opened = await session.ask("session_open")
            assert opened.opened.version.wire >= 1
            assert (await session.ask("session_reserve")).reserve.results[0].admission == pagestore_pb2.ADMISSION_EXISTS
            assert (await session.ask("session_commit")).commit.results[0].error.reason == "LEASE_LOST"
            (hit,) = (await session.ask("session_acquire")).acquire.results
            assert (hit.outcome, hit.slot.page_bytes) == (pagestore_pb2.OUTCOME_HIT, recorder().PAGE_BYTES)
            assert (await session.ask("session_release")).HasField("release")
            await eventually(lambda: store.running.engine.gauges().leases == 0)  # also that of the page stream
            assert (await session.ask("session_heartbeat")).HasField("heartbeat")
            assert (await session.ask("session_close")).HasField("closed")


async def test_a_kind_of_message_that_is_not_known_is_refused_and_the_session_goes_on() -> None:
    """It carries what a newer release calls it in a field that this one skips."""
    newer, numbered = UNKNOWN_FIELDS, pagestore_pb2.SessionRequest(request_id=9).SerializeToString() + UNKNOWN_FIELDS
    with new_world() as world:
        async with served(world) as store, raw(store.endpoint, releases()[-1], as_written) as (channel, messages):
            session = RawStream(
                channel,
                "/kvpool.v1.PageStoreService/Session",
                pagestore_pb2.SessionResponse,
                messages | {"new": numbered},
            )
            await session.ask("session_open")
            refused = await session.ask("new")
            assert (refused.request_id, refused.error.reason) == (9, "INVALID_REQUEST")
            assert (await session.ask("session_heartbeat")).HasField("heartbeat")
            assert (await session.ask("session_close")).HasField("closed")
    async with running_index() as index, raw(index.endpoint, releases()[-1], as_written) as (channel, messages):
        service, messages = "/kvpool.v1.IndexService", messages | {"new": newer}
        matches = RawStream(channel, f"{service}/MatchStream", index_pb2.MatchStreamResponse, messages)
        assert (await matches.ask("new")).error.reason == "INVALID_REQUEST"
        assert (await matches.ask("match")).request_id == 7
        await matches.end()
        announce = RawStream(channel, f"{service}/Announce", index_pb2.AnnounceResponse, messages)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await announce.ask("new")
        assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def _write_and_read(bulk: grpc.aio.Channel, messages: dict[str, bytes]) -> None:
    service = "/kvpool.v1.PageTransferService"
    write: Any = bulk.stream_stream(f"{service}/WritePages")()
    await write.write(messages["write_pages_open"])
    await write.write(messages["write_pages_frame"])
    await write.done_writing()
    written = pagestore_pb2.WritePagesResponse.FromString(await write.read())
    assert written.admission == pagestore_pb2.ADMISSION_RESERVED, written
    read_pages: Any = bulk.unary_stream(f"{service}/ReadPages")
    read = read_pages(messages["read_pages"])
    frame = pagestore_pb2.PageFrame.FromString(await read.read())
    assert frame.outcome == pagestore_pb2.OUTCOME_HIT
    assert frame.data == recorded("0.1")["write_pages_frame"].parse().frame.data  # type: ignore[attr-defined]


@EVERY_RELEASE
@EVERY
async def test_an_agent_serves_them(release: str, change: Change) -> None:
    tool, world = recorder(), World()
    world.index.answer = lambda query: ChainMatch(matched_chunks=0)
    async with running_agent(world) as agent, raw(agent.endpoint, release, change) as (channel, messages):
        engine = EngineProcess(agent.endpoint, spec=tool.SPEC, chunk_count=tool.BLOCK_COUNT // 4)
        session = RawStream(channel, "/kvpool.v1.GpuAgentService/EngineSession", gpuagent_pb2.EngineResponse, messages)
        registered = (await session.ask("engine_register")).registered
        assert registered.version.wire >= 1
        await _lend(engine, registered)
        assert (await session.next()).ready.device == "cpu"
        assert (await session.ask("engine_match")).match.matched_chunks == 0
        for layer in engine.memory():
            layer[:] = 7
        assert (await session.ask("engine_store")).gathered.chunk_count == 1
        assert (await session.ask("engine_kept")).store_done.stored_chunks == 1
        engine.clear()
        await session.send("engine_load")
        done = await _until(session, "load_done")
        assert (done.loaded_chunks, list(done.failed_chunks)) == (1, [])
        assert [bool(block.all()) for block in engine.memory()[0][0]] == [
            number in (5, 2) for number in range(tool.BLOCK_COUNT)
        ]
        await session.send("engine_close")
        await _until(session, "closed")
        engine.close()


async def _lend(engine: EngineProcess, registered: Any) -> None:
    where = registered.descriptor_socket, registered.descriptor_token
    for number, region in enumerate(engine.regions):
        descriptor = region.lent_descriptor()
        try:
            await asyncio.to_thread(offer_fd, *where, number, region.size_bytes, descriptor)
        finally:
            os.close(descriptor)


async def _until(session: RawStream, kind: str) -> Any:
    while (answer := await session.next()).WhichOneof("kind") != kind:
        assert not answer.HasField("error"), answer
    return getattr(answer, kind)
