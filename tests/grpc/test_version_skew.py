"""Releases that follow each other work together; those that are too far apart refuse each other and say so."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

import kvpool.client.pagestore
from kvpool.client.index import IndexClient
from kvpool.client.page_items import AcquireItem, AcquireResult, PageSource, ReserveItem
from kvpool.client.pagestore import PageStoreSession, SessionPlan
from kvpool.client.transfer import PageToRead, PageToWrite, PageTransferClient
from kvpool.core.cluster import ChainQuery, NodeInfo, NodeKind
from kvpool.core.errors import KvPoolError, NotServed, WireVersionRefused
from kvpool.core.outcome import Admission
from kvpool.core.page import PageFault, PageKey, verify
from kvpool.v1 import common_pb2, gpuagent_pb2, index_pb2, pagestore_pb2
from kvpool_index.config import IndexConfig
from tests.fixtures.agent import EngineProcess, World, running_agent
from tests.fixtures.channels import opened_channels
from tests.fixtures.index_server import running_index
from tests.fixtures.pagestore import (
    KEYSPACE,
    KEYSPACES,
    PAGE_BYTES,
    SPEC,
    TENANT,
    metadata,
    new_world,
    page_key,
    sealed_page,
)
from tests.fixtures.pagestore_server import served
from tests.fixtures.patience import patient
from tests.fixtures.recorded import newer_answer, recorded, recorder

FAR = common_pb2.PeerVersion(wire=9, wire_min=8, software="9.0.0")
SAID = r"9\.0\.0 \(wire versions 8 to 9\), .* 0\.1\.0 \(wire versions 1 to 1\)"
CONFIG = patient()
UNKNOWN = 9  # a number of every enum that no release has


@pytest.fixture
def far_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """All clients are of a release that no longer understands this one."""
    for module in ("engine_registration", "pagestore", "index", "transfer"):
        monkeypatch.setattr(f"kvpool.client.{module}.own_version_to_proto", lambda: FAR)


@pytest.mark.usefixtures("far_client")
async def test_an_index_refuses_what_is_too_far_away() -> None:
    async with running_index(config=IndexConfig(tenant=TENANT)) as index:
        client = IndexClient(patient(index_endpoints=(index.endpoint,)))
        with pytest.raises(WireVersionRefused, match=f"the caller is {SAID}"):
            await client.open_keyspace("chat", SPEC)
        node = NodeInfo(node_id=bytes(16), kind=NodeKind.PAGESTORE, host_id="a", endpoint="a:1")
        with pytest.raises(WireVersionRefused, match="upgrade the older side"):
            await client.register_node(node)
        assert (await client.list_keyspaces(), await client.list_nodes()) == ([], [])
        await client.close()


@pytest.mark.usefixtures("far_client")
async def test_an_agent_refuses_what_is_too_far_away() -> None:
    world = World()
    async with running_agent(world) as agent:
        engine = EngineProcess(agent.endpoint)
        with pytest.raises(WireVersionRefused, match=f"the engine's client is {SAID}: this side is too old"):
            await engine.open()
        assert world.index.opened == []
        engine.close()


@pytest.mark.usefixtures("far_client")
async def test_a_pagestore_refuses_what_is_too_far_away() -> None:
    with new_world() as world:
        async with served(world) as store:
            with pytest.raises(WireVersionRefused, match=f"the peer is {SAID}"):
                await store.open()
            bulk = PageTransferClient(store.node.bulk_endpoint)
            answers: list[KvPoolError | None] = []
            page = PageToRead(key=page_key(1), destination=memoryview(bytearray(PAGE_BYTES)))
            bulk.read_pages(KEYSPACES, [page], lambda at, error, hit: answers.append(error), timeout_s=60)
            assert isinstance(answers[0], WireVersionRefused)
            item = PageToWrite(key=page_key(1), page=memoryview(sealed_page(page_key(1))), metadata=metadata(1))
            bulk.write_pages(KEYSPACES, [item], lambda at, admission, error: answers.append(error), timeout_s=60)
            assert isinstance(answers[1], WireVersionRefused) and "the writer" in answers[1].message
            bulk.close()
            assert store.running.engine.gauges().sessions == 0


@asynccontextmanager
async def answering(service: str, **answers: Sequence[bytes]) -> AsyncIterator[str]:
    """A server that answers each message of a method with the next of some bytes."""

    def handler(parts: Sequence[bytes]) -> Any:
        left = list(parts)

        async def stream(requests: Any, context: Any) -> AsyncIterator[bytes]:
            async for _ in requests:
                if left:
                    yield left.pop(0)

        async def unary(request: bytes, context: Any) -> bytes:
            return parts[0]

        return unary, stream

    handlers: dict[str, Any] = {}
    for method, parts in answers.items():
        unary, stream = handler(parts)
        handlers[method] = (
            grpc.stream_stream_rpc_method_handler(stream)
            if method in ("MatchStream", "Session", "EngineSession")
            else grpc.unary_unary_rpc_method_handler(unary)
        )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(f"kvpool.v1.{service}", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_a_client_refuses_a_service_that_is_too_far_away() -> None:
    opened = index_pb2.OpenKeyspaceResponse.FromString(recorded("0.1")["open_keyspace_answer"].data)
    opened.version.CopyFrom(FAR)
    async with answering("IndexService", OpenKeyspace=[opened.SerializeToString()]) as endpoint:
        client = IndexClient(patient(index_endpoints=(endpoint,)))
        with pytest.raises(WireVersionRefused, match=f"the index is {SAID}"):
            await client.open_keyspace("chat", recorder().SPEC)
        await client.close()
    registered = index_pb2.RegisterNodeResponse(incarnation=1, announce_epoch=1, lease_ttl_ms=1000, version=FAR)
    async with answering("IndexService", RegisterNode=[registered.SerializeToString()]) as endpoint:
        client = IndexClient(patient(index_endpoints=(endpoint,)))
        with pytest.raises(WireVersionRefused, match=f"the index is {SAID}"):
            await client.register_node(NodeInfo(node_id=bytes(16), kind=NodeKind.AGENT))
        await client.close()
    session = pagestore_pb2.SessionOpened(session_id=bytes(16), heartbeat_interval_ms=1000, version=FAR)
    refused = pagestore_pb2.SessionResponse(request_id=1, opened=session).SerializeToString()
    async with answering("PageStoreService", Session=[refused]) as endpoint:
        with pytest.raises(WireVersionRefused, match="the pagestore"):
            await PageStoreSession.open(SessionPlan(endpoint=endpoint, peer_name="p", wants_arena=False), CONFIG)
    agent = gpuagent_pb2.EngineRegistered(session_id=bytes(16), hash_key=bytes(32), version=FAR)
    answer = gpuagent_pb2.EngineResponse(request_id=1, registered=agent).SerializeToString()
    async with answering("GpuAgentService", EngineSession=[answer]) as endpoint:
        engine = EngineProcess(endpoint)
        with pytest.raises(WireVersionRefused, match=f"the agent is {SAID}"):
            await engine.open()
        engine.close()


@pytest.mark.usefixtures("far_client")
async def test_a_client_goes_on_to_a_replica_of_a_release_that_fits() -> None:
    """As it finds one of two during a rolling update that goes further than one release."""
    opened = index_pb2.OpenKeyspaceResponse.FromString(recorded("0.1")["open_keyspace_answer"].data)
    async with (
        running_index(config=IndexConfig(tenant=TENANT)) as far,
        answering("IndexService", OpenKeyspace=[opened.SerializeToString()]) as fitting,
    ):
        client = IndexClient(patient(index_endpoints=(far.endpoint, fitting)))
        assert (await client.open_keyspace("chat", recorder().SPEC)).keyspace == recorder().KEYSPACE
        await client.close()


@pytest.mark.parametrize("newer", [False, True])
async def test_a_client_understands_a_recorded_and_a_newer_index(newer: bool) -> None:
    answers = {name: recorded("0.1")[name].parse() for name in ("open_keyspace_answer", "match_answer")}
    match: Any = answers["match_answer"]
    if newer:  # a tier and a kind of node that we do not know
        place = common_pb2.Location(node_id=recorder().NODE, incarnation=1, tier=UNKNOWN, shards=1)  # type: ignore[arg-type]
        match.match.runs[0].locations.insert(0, place)
        match.match.runs.add(chunk_count=2, locations=[place])
        match.match.matched_chunks = 3
        strange = common_pb2.Location(node_id=b"x" * 16, incarnation=1, tier=common_pb2.TIER_DISK, shards=1)
        match.match.runs[0].locations.insert(0, strange)
        match.match.runs.insert(1, index_pb2.MatchRun(chunk_count=1, locations=[strange]))
        match.match.matched_chunks += 1
        match.match.nodes.add(node_id=b"x" * 16, kind=UNKNOWN)
    data = {name: newer_answer(one) if newer else one.SerializeToString() for name, one in answers.items()}
    async with answering(
        "IndexService", OpenKeyspace=[data["open_keyspace_answer"]], MatchStream=[data["match_answer"]]
    ) as endpoint:
        client = IndexClient(patient(index_endpoints=(endpoint,)))
        assert (await client.open_keyspace("chat", recorder().SPEC)).keyspace == recorder().KEYSPACE
        found = await client.match_stream.match(ChainQuery(keyspace=KEYSPACE, chunk_hashes=bytes(48)))
        await client.close()
    assert found.matched_chunks == 1
    assert [place.node_id for place in found.runs[0].locations] == [recorder().NODE]
    assert list(found.nodes) == [recorder().NODE]


@pytest.mark.parametrize("newer", [False, True])
async def test_a_client_understands_a_recorded_and_a_newer_pagestore(
    newer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    channels = opened_channels(monkeypatch, kvpool.client.pagestore)
    reserved: Any = recorded("0.1")["session_reserve_answer"].parse()
    acquired: Any = recorded("0.1")["session_acquire_answer"].parse()
    if newer:
        reserved.reserve.results.add(admission=UNKNOWN)
        acquired.acquire.results[0].source = UNKNOWN
        acquired.acquire.results.add(item_index=1, outcome=UNKNOWN)
    acquired.request_id = 3
    opened = pagestore_pb2.SessionResponse(
        request_id=1, opened=pagestore_pb2.SessionOpened(session_id=bytes(16), heartbeat_interval_ms=60_000)
    )
    answers = [newer_answer(one) if newer else one.SerializeToString() for one in (opened, reserved, acquired)]
    async with answering("PageStoreService", Session=answers) as endpoint:
        plan = SessionPlan(endpoint=endpoint, peer_name="p", wants_arena=False)
        session = await PageStoreSession.open(plan, CONFIG)
        count = 2 if newer else 1
        granted = await session.reserve([ReserveItem(page_key(at), PAGE_BYTES, metadata(at)) for at in range(count)])
        assert granted[0].admission is Admission.RESERVED
        results: list[AcquireResult] = []
        async with session.acquire([AcquireItem(page_key(at)) for at in range(count)], wait_s=60) as got:
            results = [one async for one in got]
        await channels[0].close()
    assert results[0].slot is not None and results[0].slot.offset == 8192
    assert results[0].source is (PageSource.REMOTE if newer else PageSource.DISK)
    if newer:
        assert granted[1].admission is Admission.REJECTED and isinstance(granted[1].error, NotServed)
        assert results[1].slot is None and isinstance(results[1].error, NotServed)


def of_next_layout(key: PageKey) -> bytes:
    """A page of a layout that no release has yet, true in all else."""
    page = bytearray(sealed_page(key))
    page[4] += 1
    return bytes(page)


async def test_a_page_of_another_layout_is_counted_and_never_visible() -> None:
    assert verify(of_next_layout(page_key(1)), page_key(1)) is PageFault.WRONG_VERSION
    with new_world() as world:
        async with served(world) as store:
            session = await store.open()
            (granted,) = await session.reserve([ReserveItem(page_key(1), PAGE_BYTES, metadata(1))])
            assert granted.slot is not None
            with session.slot_view(*granted.slot.place) as view:
                view[:] = of_next_layout(page_key(1))
            ((_, error),) = await session.commit([granted.slot.lease_id])
            assert error.reason == "PAGE_CORRUPT"
            assert "wrong version" in error.message
            assert store.running.metric("verification_failures_total", place="commit") == 1
            async with session.acquire([AcquireItem(page_key(1))], wait_s=60) as results:
                assert [one.slot async for one in results] == [None]
            await session.close()


async def test_a_page_of_another_layout_on_disk_is_a_miss() -> None:
    with new_world() as world:
        async with served(world) as store:
            await _store_page(store, 1)
        world.memory.damage(page_key(1), 4)  # the version in its header: now one before the first
        async with served(world) as store:
            session = await store.open()
            async with session.acquire([AcquireItem(page_key(1))], wait_s=60) as results:
                (answer,) = [one async for one in results]
            assert answer.slot is None
            assert store.running.metric("verification_failures_total", place="disk") == 1
            await session.close()


async def _store_page(store: Any, number: int) -> None:
    session = await store.open()
    (granted,) = await session.reserve([ReserveItem(page_key(number), PAGE_BYTES, metadata(number))])
    with session.slot_view(*granted.slot.place) as view:
        view[:] = sealed_page(page_key(number))
    assert await session.commit([granted.slot.lease_id]) == []
    await store.running.engine.flush(TENANT, b"")
    await session.close()
