"""The unary calls of the index, through the real servicer and interceptors."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvpool.core import errors
from kvpool.core.keyspace import PUBLISHED_TENANT_SECRET, derive_hash_key, encode_keyspace, keyspace_id
from kvpool.testing import ManualClock
from kvpool.v1 import common_pb2, index_pb2
from kvpool.wire.convert_keyspace import spec_from_proto
from kvpool_index.adapters.memory import MemoryIndexStore
from kvpool_index.config import IndexConfig
from tests.fixtures.index_node import DISK, GRID, TIMEOUT_S, Chain, FakeNode, open_keyspace, refusal, spec
from tests.fixtures.index_server import RunningIndex, running_index


@pytest.fixture
async def index() -> AsyncIterator[RunningIndex]:
    async with running_index(config=IndexConfig(max_match_chunks=64, max_batch_items=8)) as running:
        yield running


def opening(name: str = "chat", **changes: object) -> index_pb2.OpenKeyspaceRequest:
    return index_pb2.OpenKeyspaceRequest(name=name, spec=spec(**changes))


async def test_open_keyspace_binds_a_name(index: RunningIndex) -> None:
    first = await index.stub.OpenKeyspace(opening())
    again = await index.stub.OpenKeyspace(opening(chunk_tokens=0))
    assert (first.created, again.created) == (True, False)
    assert first.keyspace_id == again.keyspace_id and len(first.keyspace_id) == 16
    assert first.hash_key == derive_hash_key(PUBLISHED_TENANT_SECRET, first.keyspace_id)
    other = await index.stub.OpenKeyspace(opening("other", model_revision="r2"))
    assert other.created and other.keyspace_id != first.keyspace_id and other.hash_key != first.hash_key
    listed = (await index.stub.ListKeyspaces(index_pb2.ListKeyspacesRequest())).keyspaces
    assert [(each.name, each.keyspace_id) for each in listed] == [
        ("chat", first.keyspace_id),
        ("other", other.keyspace_id),
    ]
    assert listed[0].spec == spec()


async def test_every_codec_is_a_keyspace_of_its_own(index: RunningIndex) -> None:
    codecs = [codec for codec in common_pb2.Codec.values() if codec != common_pb2.CODEC_UNSPECIFIED]
    opened = [await index.stub.OpenKeyspace(opening(f"codec-{codec}", codec=codec)) for codec in codecs]
    assert len({answer.keyspace_id for answer in opened}) == len(codecs) == 4
    refused = index.stub.OpenKeyspace(opening("int8", codec=common_pb2.CODEC_INT8_GROUP8, dtype=common_pb2.DTYPE_INT8))
    error = await refusal(refused)
    assert isinstance(error, errors.InvalidRequest) and "INT8; use RAW" in error.message


async def test_another_geometry_under_the_same_name_is_refused_by_field(index: RunningIndex) -> None:
    await index.stub.OpenKeyspace(opening())
    changed = spec()
    changed.groups[0].kv_heads = 4
    call = index.stub.OpenKeyspace(index_pb2.OpenKeyspaceRequest(name="chat", spec=changed))
    error = await refusal(call)
    assert isinstance(error, errors.KeyspaceMismatch)
    assert error.field == "groups[0].kv_heads" and "groups[0].kv_heads" in error.message
    assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "é", "a\n"])
async def test_names_that_are_refused(index: RunningIndex, name: str) -> None:
    assert isinstance(await refusal(index.stub.OpenKeyspace(opening(name))), errors.InvalidRequest)


async def test_specs_that_are_refused(index: RunningIndex) -> None:
    hybrid = spec()
    hybrid.groups[0].attention = common_pb2.ATTENTION_KIND_STATE_SPACE
    cases = [
        (spec(model_id=""), errors.InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
        (spec(codec=common_pb2.CODEC_UNSPECIFIED), errors.InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
        (spec(chunk_tokens=100), errors.InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
        (hybrid, errors.GeometryUnsupported, grpc.StatusCode.INVALID_ARGUMENT),
    ]
    for refused, kind, code in cases:
        call = index.stub.OpenKeyspace(index_pb2.OpenKeyspaceRequest(name="x", spec=refused))
        assert type(await refusal(call)) is kind
        assert await call.code() is code
    assert not (await index.stub.ListKeyspaces(index_pb2.ListKeyspacesRequest())).keyspaces


async def test_every_unary_method_is_served(index: RunningIndex) -> None:
    service = index_pb2.DESCRIPTOR.services_by_name["IndexService"]
    unary = {method.name for method in service.methods if not (method.client_streaming or method.server_streaming)}
    for name in unary:
        method = getattr(index.stub, name)
        request = getattr(index_pb2, f"{name}Request")()
        try:
            await method(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, f"{name}: {error.details()}"


async def test_a_node_lives_from_registration_to_end(index: RunningIndex) -> None:
    first, second = await FakeNode(index.stub, b"b" * 16).register(), FakeNode(index.stub, b"a" * 16, host_id="h")
    second.kind = index_pb2.NODE_KIND_AGENT
    await second.register()
    assert await first.renew(page_count=5) == 5000
    listed = (await index.stub.ListNodes(index_pb2.ListNodesRequest())).nodes
    assert [node.info.node_id for node in listed] == [b"a" * 16, b"b" * 16]
    assert listed[1].load.page_count == 5 and 0 < listed[1].lease_remaining_ms <= 5000
    agents = await index.stub.ListNodes(index_pb2.ListNodesRequest(kind=index_pb2.NODE_KIND_AGENT))
    assert [node.info.host_id for node in agents.nodes] == ["h"]
    assert index.metric("kvpool_index_live_nodes", kind="pagestore") == 1
    await first.end()
    await first.end()
    assert len((await index.stub.ListNodes(index_pb2.ListNodesRequest())).nodes) == 1
    with pytest.raises(errors.LeaseLost):
        await first.renew()


async def test_a_newer_process_stops_the_older_one(index: RunningIndex) -> None:
    node = await FakeNode(index.stub).register()
    old = node.incarnation
    await node.register(new_incarnation=True)
    assert node.incarnation > old
    stale = FakeNode(index.stub, node.node_id, incarnation=old)
    info = index_pb2.NodeInfo(node_id=node.node_id, kind=node.kind, endpoint="h:1", incarnation=old)
    register = index.stub.RegisterNode(index_pb2.RegisterNodeRequest(node=info))
    assert isinstance(await refusal(register), errors.StaleIncarnation)
    with pytest.raises(errors.StaleIncarnation):
        await stale.renew()


@pytest.mark.parametrize(
    "bad",
    [
        index_pb2.NodeInfo(node_id=b"short", kind=index_pb2.NODE_KIND_PAGESTORE, endpoint="h:1"),
        index_pb2.NodeInfo(node_id=bytes(16), kind=index_pb2.NODE_KIND_UNSPECIFIED, endpoint="h:1"),
        index_pb2.NodeInfo(node_id=bytes(16), kind=index_pb2.NODE_KIND_PAGESTORE, endpoint="no port"),
        index_pb2.NodeInfo(node_id=bytes(16), kind=index_pb2.NODE_KIND_PAGESTORE),
        index_pb2.NodeInfo(node_id=bytes(16), kind=index_pb2.NODE_KIND_AGENT, incarnation=(1 << 64) - 1),
    ],
)
async def test_registrations_that_are_refused(index: RunningIndex, bad: index_pb2.NodeInfo) -> None:
    call = index.stub.RegisterNode(index_pb2.RegisterNodeRequest(node=bad))
    assert isinstance(await refusal(call), errors.InvalidRequest)


async def test_placement(index: RunningIndex) -> None:
    keyspace = await open_keyspace(index.stub)
    request = index_pb2.PlaceRequest(keyspace_id=keyspace, chain_head_hash=bytes(16), host_id="near", count=16)
    assert not (await index.stub.Place(request)).nodes
    for host, draining in (("far", False), ("near", False), ("near", True)):
        await FakeNode(index.stub, host_id=host, draining=draining).register()
    assert [node.host_id for node in (await index.stub.Place(request)).nodes] == ["near", "far"]
    request.count = 0
    assert len((await index.stub.Place(request)).nodes) == 1
    request.count = 17
    assert isinstance(await refusal(index.stub.Place(request)), errors.InvalidRequest)
    unknown = index_pb2.PlaceRequest(keyspace_id=bytes(16), chain_head_hash=bytes(16))
    assert isinstance(await refusal(index.stub.Place(unknown)), errors.KeyspaceUnknown)


async def test_stale_locations_are_removed(index: RunningIndex) -> None:
    chain = Chain(await open_keyspace(index.stub))
    node = await FakeNode(index.stub).register()
    await node.announce(chain.added([0, 1]))

    def stale(at: int, incarnation: int, shards: int = GRID) -> index_pb2.StaleLocation:
        location = common_pb2.Location(
            node_id=node.node_id, incarnation=incarnation, tier=common_pb2.TIER_STAGING, shards=shards
        )
        change = chain.change(at)
        return index_pb2.StaleLocation(
            keyspace_id=change.keyspace_id,
            chunk_hash=change.chunk_hash,
            group_head_hash=change.group_head_hash,
            location=location,
        )

    reports = [stale(1, node.incarnation, 1), stale(0, node.incarnation - 1), stale(5, node.incarnation)]
    answer = await index.stub.ReportStale(index_pb2.ReportStaleRequest(locations=reports))
    assert list(answer.removed) == [True, False, False]
    matched = await index.stub.Match(chain.query())
    assert matched.matched_chunks == 1
    assert (await index.stub.Match(chain.query(shards=GRID ^ 1))).matched_chunks == 2, "only the shard named went"
    assert index.metric("kvpool_index_stale_reports_total", result="removed") == 1
    elsewhere = stale(0, node.incarnation)
    elsewhere.keyspace_id = bytes(16)
    answer = await index.stub.ReportStale(
        index_pb2.ReportStaleRequest(locations=[elsewhere, stale(0, node.incarnation)])
    )
    assert list(answer.removed) == [False, True], "an unknown keyspace is an answer of its item"
    reports[1].location.node_id = b"short"
    error = await refusal(index.stub.ReportStale(index_pb2.ReportStaleRequest(locations=reports)))
    assert isinstance(error, errors.InvalidRequest) and error.item_index == 1


async def test_dropping_a_keyspace(index: RunningIndex) -> None:
    chain, other = Chain(await open_keyspace(index.stub)), Chain(await open_keyspace(index.stub, "same-again"))
    assert chain.keyspace == other.keyspace, "two names of one encoding are one keyspace"
    one, two = await FakeNode(index.stub).register(), await FakeNode(index.stub).register()
    await one.announce(chain.added(range(8)))
    await two.announce(chain.added(range(4), tier=DISK))
    request = index_pb2.DropKeyspaceLocationsRequest(keyspace_id=chain.keyspace, node_id=one.node_id)
    assert (await index.stub.DropKeyspaceLocations(request)).chunk_count == 8
    assert (await index.stub.Match(chain.query())).matched_chunks == 4
    request.node_id = b""
    assert (await index.stub.DropKeyspaceLocations(request)).chunk_count == 4
    assert (await index.stub.DropKeyspaceLocations(request)).chunk_count == 0
    request.node_id = b"u" * 16
    assert (await index.stub.DropKeyspaceLocations(request)).chunk_count == 0
    request.keyspace_id = bytes(16)
    assert isinstance(await refusal(index.stub.DropKeyspaceLocations(request)), errors.KeyspaceUnknown)


async def test_tenants_are_apart() -> None:
    clock = ManualClock()
    store = MemoryIndexStore(clock)
    async with (
        running_index(store, clock=clock, config=IndexConfig(tenant="red")) as red,
        running_index(store, clock=clock, config=IndexConfig(tenant="blue")) as blue,
    ):
        chain = Chain(await open_keyspace(red.stub))
        assert await open_keyspace(blue.stub) != chain.keyspace, "the tenant is part of the encoding"
        assert len((await blue.stub.ListKeyspaces(index_pb2.ListKeyspacesRequest())).keyspaces) == 1
        drop = index_pb2.DropKeyspaceLocationsRequest(keyspace_id=chain.keyspace)
        calls: list[Any] = [blue.stub.Match(chain.query()), blue.stub.DropKeyspaceLocations(drop)]
        for call in calls:
            assert isinstance(await refusal(call), errors.KeyspaceUnknown)
        node = await FakeNode(red.stub).register()
        await node.announce(chain.added([0]))
        change = chain.change(0)
        report = index_pb2.StaleLocation(
            keyspace_id=chain.keyspace,
            chunk_hash=change.chunk_hash,
            group_head_hash=change.group_head_hash,
            location=common_pb2.Location(
                node_id=node.node_id, incarnation=node.incarnation, tier=common_pb2.TIER_STAGING, shards=GRID
            ),
        )
        request = index_pb2.ReportStaleRequest(locations=[report])
        assert list((await blue.stub.ReportStale(request)).removed) == [False]
        assert (await red.stub.Match(chain.query())).matched_chunks == 1
        assert list((await red.stub.ReportStale(request)).removed) == [True]


async def test_a_node_restores_keyspaces_of_its_own_tenant_only() -> None:
    clock = ManualClock()
    store = MemoryIndexStore(clock)
    async with running_index(store, clock=clock) as index:
        node = await FakeNode(index.stub).register()
        own, other = (encode_keyspace(tenant, spec_from_proto(spec())) for tenant in ("default", "other"))
        ask = index_pb2.ReconcileDigestsRequest(
            node_id=node.node_id, incarnation=node.incarnation, range_count=1, keyspace_encodings=[own, other]
        )
        await index.stub.ReconcileDigests(ask)
        assert await store.keyspaces.by_id(keyspace_id(own)) is not None
        assert await store.keyspaces.by_id(keyspace_id(other)) is None
        late = index_pb2.ReconcileDigestsRequest(
            node_id=bytes(16), incarnation=1, range_count=1, keyspace_encodings=[own]
        )
        assert isinstance(await refusal(index.stub.ReconcileDigests(late)), errors.LeaseLost)


async def test_info_health_and_reflection(index: RunningIndex) -> None:
    info = await index.stub.GetIndexInfo(index_pb2.GetIndexInfoRequest())
    assert (info.store, info.store_reachable, info.max_match_chunks, info.max_batch_items) == ("memory", True, 64, 8)
    health: Any = health_pb2_grpc.HealthStub(index.channel)  # its types know no attributes
    for service in ("", "kvpool.v1.IndexService"):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    reflection: Any = reflection_pb2_grpc
    call = reflection.ServerReflectionStub(index.channel).ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    names = {each.name for each in (await call.read()).list_services_response.service}
    assert "kvpool.v1.IndexService" in names
    call.cancel()


async def test_a_node_that_ended_its_lease_has_no_locations_whenever_the_index_looks(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    await node.announce(chain.added(range(4)))
    await node.end()
    change = chain.change(0)
    location = common_pb2.Location(
        node_id=node.node_id, incarnation=node.incarnation, tier=common_pb2.TIER_STAGING, shards=GRID
    )
    stale = index_pb2.StaleLocation(
        keyspace_id=change.keyspace_id,
        chunk_hash=change.chunk_hash,
        group_head_hash=change.group_head_hash,
        location=location,
    )
    report = index_pb2.ReportStaleRequest(locations=[stale])
    drop = index_pb2.DropKeyspaceLocationsRequest(keyspace_id=chain.keyspace, node_id=node.node_id)
    for _ in range(2):
        assert list((await index.stub.ReportStale(report)).removed) == [False]
        assert (await index.stub.DropKeyspaceLocations(drop)).chunk_count == 0
        await index.stub.ListNodes(index_pb2.ListNodesRequest())  # reads the ended node's record from the store
