"""Policies and retention on the wire."""

from __future__ import annotations

import pytest

from kvpool.core.errors import InvalidRequest
from kvpool.core.policy import KeyspacePolicy, StagingMode, VersionedPolicy, WritePolicy
from kvpool.core.retention import Retention
from kvpool.v1 import common_pb2
from kvpool.wire import convert_policy

_POLICY = KeyspacePolicy(
    write_policy=WritePolicy.WRITE_THROUGH,
    staging=StagingMode.TRANSIT,
    selective_min_uses=3,
    selective_min_tokens=4,
    replication_factor=2,
    quota_bytes=1 << 40,
    retention=Retention(ttl_ms=9, priority=-7),
)


def test_a_policy_comes_back_as_it_was() -> None:
    one = VersionedPolicy(keyspace=bytes(16), policy=_POLICY, version=(1 << 64) - 1)
    assert convert_policy.versioned_policy_from_proto(convert_policy.versioned_policy_to_proto(one)) == one


def test_an_empty_message_is_the_policy_that_leaves_everything_to_the_node() -> None:
    assert convert_policy.policy_from_proto(common_pb2.KeyspacePolicy()) == KeyspacePolicy()


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (common_pb2.KeyspacePolicy(quota_bytes=-1), "quota_bytes"),
        (common_pb2.KeyspacePolicy(write_policy=9), "write_policy"),  # type: ignore[arg-type]
        (common_pb2.KeyspacePolicy(staging=9), "staging"),  # type: ignore[arg-type]
        (
            common_pb2.KeyspacePolicy(
                staging=common_pb2.STAGING_MODE_TRANSIT, write_policy=common_pb2.WRITE_POLICY_STAGING_ONLY
            ),
            "neither tier",
        ),
    ],
)
def test_a_policy_that_cannot_be_is_refused(message: common_pb2.KeyspacePolicy, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        convert_policy.policy_from_proto(message)
