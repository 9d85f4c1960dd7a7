"""Keyspace policies through the real servicer: who may set them, how nodes learn them, and what heals."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio
import pytest

from kvpool.core import errors
from kvpool.core.clock import SystemClock
from kvpool.core.keyspace import encode_keyspace, keyspace_id
from kvpool.core.policy import KeyspacePolicy, WritePolicy
from kvpool.testing import ManualClock
from kvpool.v1 import common_pb2, index_pb2
from kvpool.wire.convert_keyspace import spec_from_proto
from kvpool.wire.convert_policy import policy_to_proto
from kvpool_index.adapters.memory import MemoryIndexStore
from kvpool_index.adapters.memory_nodes import MemoryPolicyRegistry
from kvpool_index.config import IndexConfig
from tests.fixtures.index_node import FakeNode, refusal, spec
from tests.fixtures.index_server import RunningIndex, running_index

POLICY = policy_to_proto(KeyspacePolicy(write_policy=WritePolicy.WRITE_THROUGH, replication_factor=2))


class WipedPolicies(MemoryPolicyRegistry):
    """Loses all that it knows, as a store that is flushed."""

    def wipe(self) -> None:
        super().__init__(SystemClock())


@pytest.fixture
def policies() -> WipedPolicies:
    return WipedPolicies(SystemClock())


@pytest.fixture
async def index(policies: WipedPolicies) -> AsyncIterator[RunningIndex]:
    clock = ManualClock()
    store = MemoryIndexStore(clock)
    store.policies = policies
    async with running_index(store, clock=clock, config=IndexConfig(max_batch_items=8)) as running:
        yield running


async def opened(index: RunningIndex, name: str = "chat") -> bytes:
    answer = await index.stub.OpenKeyspace(index_pb2.OpenKeyspaceRequest(name=name, spec=spec(model_id=name)))
    return answer.keyspace_id


async def test_a_policy_shows_in_the_list_and_is_reported_to_nodes(index: RunningIndex) -> None:
    keyspace, other = await opened(index), await opened(index, "other")
    reported = await index.stub.SetKeyspacePolicy(index_pb2.SetKeyspacePolicyRequest(name="chat", policy=POLICY))
    assert reported.keyspace_id == keyspace and reported.version > 0
    listed = (await index.stub.ListKeyspaces(index_pb2.ListKeyspacesRequest())).keyspaces
    assert [(one.name, one.HasField("policy")) for one in listed] == [("chat", True), ("other", False)]
    assert listed[0].policy == common_pb2.VersionedPolicy(keyspace_id=keyspace, policy=POLICY, version=reported.version)
    answer = await index.stub.GetKeyspacePolicies(index_pb2.GetKeyspacePoliciesRequest(keyspace_ids=[other, keyspace]))
    assert list(answer.policies) == [listed[0].policy]
    assert answer.policy_version == reported.version


async def test_only_a_tenants_own_keyspace_has_a_name_to_set_a_policy_by(index: RunningIndex) -> None:
    error = await refusal(index.stub.SetKeyspacePolicy(index_pb2.SetKeyspacePolicyRequest(name="chat", policy=POLICY)))
    assert isinstance(error, errors.KeyspaceUnknown)


async def test_a_policy_that_cannot_be_is_refused_by_field(index: RunningIndex) -> None:
    await opened(index)
    bad = common_pb2.KeyspacePolicy(quota_bytes=-1)
    error = await refusal(index.stub.SetKeyspacePolicy(index_pb2.SetKeyspacePolicyRequest(name="chat", policy=bad)))
    assert isinstance(error, errors.InvalidRequest) and "quota_bytes" in error.message


def kept(keyspace: bytes, version: int, *, tenant: str = "default", name: str = "chat") -> index_pb2.KeptPolicy:
    return index_pb2.KeptPolicy(
        keyspace_encoding=encode_keyspace(tenant, spec_from_proto(spec(model_id=name))),
        policy=common_pb2.VersionedPolicy(keyspace_id=keyspace, policy=POLICY, version=version),
    )


async def restored(index: RunningIndex, node: FakeNode, *policies: index_pb2.KeptPolicy) -> None:
    request = index_pb2.RestoreKeyspacePoliciesRequest(
        node_id=node.node_id, incarnation=node.incarnation, policies=policies
    )
    await index.stub.RestoreKeyspacePolicies(request)


async def asked(index: RunningIndex, *keyspaces: bytes) -> index_pb2.GetKeyspacePoliciesResponse:
    return await index.stub.GetKeyspacePolicies(index_pb2.GetKeyspacePoliciesRequest(keyspace_ids=keyspaces))


async def test_what_a_wiped_store_lost_is_put_back_by_nodes(index: RunningIndex, policies: WipedPolicies) -> None:
    keyspace, node = await opened(index), await FakeNode(index.stub).register()
    reported = await index.stub.SetKeyspacePolicy(index_pb2.SetKeyspacePolicyRequest(name="chat", policy=POLICY))
    policies.wipe()
    assert not (await asked(index, keyspace)).policies
    one = kept(keyspace, reported.version)
    await restored(index, node, one)
    answer = await asked(index, keyspace)
    assert list(answer.policies) == [one.policy] and answer.policy_version == reported.version


async def test_only_a_live_node_puts_policies_back_and_only_its_own_tenants(index: RunningIndex) -> None:
    keyspace, node = await opened(index), await FakeNode(index.stub).register()
    other = keyspace_id(encode_keyspace("other", spec_from_proto(spec(model_id="chat"))))
    await restored(index, node, kept(other, 5, tenant="other"))
    assert (await asked(index, keyspace, other)).policy_version == 0
    with pytest.raises(grpc.aio.AioRpcError, match="another encoding"):
        await restored(index, node, kept(other, 5))
    with pytest.raises(grpc.aio.AioRpcError, match="no index ever gave out"):
        await restored(index, node, kept(keyspace, 1 << 60))
    await node.end()
    with pytest.raises(grpc.aio.AioRpcError, match="lease"):
        await restored(index, node, kept(keyspace, 5))
    assert (await asked(index, keyspace)).policy_version == 0


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (index_pb2.GetKeyspacePoliciesRequest(keyspace_ids=[b"short"]), "keyspace_id"),
        (index_pb2.GetKeyspacePoliciesRequest(keyspace_ids=[bytes(16)] * 9), "at most 8"),
    ],
)
async def test_malformed_questions_are_refused(
    index: RunningIndex, request_: index_pb2.GetKeyspacePoliciesRequest, named: str
) -> None:
    error = await refusal(index.stub.GetKeyspacePolicies(request_))
    assert isinstance(error, errors.InvalidRequest) and named in error.message
