"""Keyspace policies through the real servicer: who may set them, how nodes learn them, and what heals."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvpool.core import errors
from kvpool.core.clock import SystemClock
from kvpool.core.policy import KeyspacePolicy, WritePolicy
from kvpool.v1 import common_pb2, index_pb2
from kvpool.wire.convert_policy import policy_to_proto
from kvpool_index.adapters.memory_policies import MemoryPolicyRegistry
from kvpool_index.config import IndexConfig
from tests.fixtures.index_node import refusal, spec
from tests.fixtures.index_server import RunningIndex, running_index

POLICY = policy_to_proto(KeyspacePolicy(write_policy=WritePolicy.WRITE_THROUGH, replication_factor=2))


@pytest.fixture
async def index() -> AsyncIterator[RunningIndex]:
    async with running_index(config=IndexConfig(max_batch_items=8)) as running:
        yield running


async def opened(index: RunningIndex, name: str = "chat") -> bytes:
    answer = await index.stub.OpenKeyspace(index_pb2.OpenKeyspaceRequest(name=name, spec=spec(model_id=name)))
    return answer.keyspace_id


async def test_a_policy_shows_in_the_list_and_is_told_to_nodes(index: RunningIndex) -> None:
    keyspace, other = await opened(index), await opened(index, "other")
    told = await index.stub.SetKeyspacePolicy(index_pb2.SetKeyspacePolicyRequest(name="chat", policy=POLICY))
    assert told.keyspace_id == keyspace and told.version > 0
    listed = (await index.stub.ListKeyspaces(index_pb2.ListKeyspacesRequest())).keyspaces
    assert [(one.name, one.HasField("policy")) for one in listed] == [("chat", True), ("other", False)]
    assert listed[0].policy == common_pb2.VersionedPolicy(keyspace_id=keyspace, policy=POLICY, version=told.version)
    answer = await index.stub.GetKeyspacePolicies(index_pb2.GetKeyspacePoliciesRequest(keyspace_ids=[other, keyspace]))
    assert list(answer.policies) == [listed[0].policy]
    assert answer.policy_version == told.version


async def test_only_a_tenants_own_keyspace_has_a_name_to_set_a_policy_by(index: RunningIndex) -> None:
    error = await refusal(index.stub.SetKeyspacePolicy(index_pb2.SetKeyspacePolicyRequest(name="chat", policy=POLICY)))
    assert isinstance(error, errors.KeyspaceUnknown)


async def test_a_policy_that_cannot_be_is_refused_by_field(index: RunningIndex) -> None:
    await opened(index)
    bad = common_pb2.KeyspacePolicy(quota_bytes=-1)
    error = await refusal(index.stub.SetKeyspacePolicy(index_pb2.SetKeyspacePolicyRequest(name="chat", policy=bad)))
    assert isinstance(error, errors.InvalidRequest) and "quota_bytes" in error.message


async def test_what_a_wiped_store_lost_is_put_back_by_nodes(index: RunningIndex) -> None:
    keyspace = await opened(index)
    told = await index.stub.SetKeyspacePolicy(index_pb2.SetKeyspacePolicyRequest(name="chat", policy=POLICY))
    index.engine._policies._policies = MemoryPolicyRegistry(SystemClock())
    known = common_pb2.VersionedPolicy(keyspace_id=keyspace, policy=POLICY, version=told.version)
    request = index_pb2.GetKeyspacePoliciesRequest(keyspace_ids=[keyspace], known=[known])
    answer = await index.stub.GetKeyspacePolicies(request)
    assert list(answer.policies) == [known] and answer.policy_version == told.version
    empty = await index.stub.GetKeyspacePolicies(index_pb2.GetKeyspacePoliciesRequest(keyspace_ids=[keyspace]))
    assert list(empty.policies) == [known]


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (index_pb2.GetKeyspacePoliciesRequest(keyspace_ids=[b"short"]), "keyspace_id"),
        (index_pb2.GetKeyspacePoliciesRequest(keyspace_ids=[bytes(16)] * 9), "at most 8"),
        (
            index_pb2.GetKeyspacePoliciesRequest(known=[common_pb2.VersionedPolicy(keyspace_id=bytes(16), version=1)]),
            "policy",
        ),
        (
            index_pb2.GetKeyspacePoliciesRequest(
                known=[common_pb2.VersionedPolicy(keyspace_id=bytes(16), policy=POLICY, version=1 << 60)]
            ),
            "no index ever gave out",
        ),
    ],
)
async def test_malformed_questions_are_refused(
    index: RunningIndex, request_: index_pb2.GetKeyspacePoliciesRequest, named: str
) -> None:
    error = await refusal(index.stub.GetKeyspacePolicies(request_))
    assert isinstance(error, errors.InvalidRequest) and named in error.message
