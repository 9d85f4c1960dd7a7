"""Keyspace policies <-> messages. Malformed input raises InvalidRequest naming the field."""

from __future__ import annotations

from kvpool.core.errors import InvalidRequest
from kvpool.core.policy import KeyspacePolicy, StagingMode, VersionedPolicy, WritePolicy
from kvpool.v1 import common_pb2, index_pb2
from kvpool.wire.convert import (
    check_count,
    check_id,
    enum_from_proto,
    is_newer,
    retention_from_proto,
    retention_to_proto,
)


def policy_to_proto(policy: KeyspacePolicy) -> common_pb2.KeyspacePolicy:
    """The policy as it travels."""
    return common_pb2.KeyspacePolicy(
        write_policy=common_pb2.WritePolicy.ValueType(policy.write_policy),
        staging=common_pb2.StagingMode.ValueType(policy.staging),
        selective_min_uses=policy.selective_min_uses,
        selective_min_tokens=policy.selective_min_tokens,
        replication_factor=policy.replication_factor,
        quota_bytes=policy.quota_bytes,
        retention=retention_to_proto(policy.retention),
    )


def policy_from_proto(message: common_pb2.KeyspacePolicy) -> KeyspacePolicy:
    """Raises InvalidRequest naming the field."""
    policy = KeyspacePolicy(
        write_policy=enum_from_proto(message.write_policy, WritePolicy, "policy.write_policy"),
        staging=enum_from_proto(message.staging, StagingMode, "policy.staging"),
        selective_min_uses=message.selective_min_uses,
        selective_min_tokens=message.selective_min_tokens,
        replication_factor=message.replication_factor,
        quota_bytes=message.quota_bytes,
        retention=retention_from_proto(message.retention, "policy.retention"),
    )
    policy.check()
    return policy


def is_policy_known(message: common_pb2.KeyspacePolicy) -> bool:
    """Whether all that it says is known to this release; if not, the policy is left to nodes that are newer."""
    return not is_newer(message.write_policy, WritePolicy) and not is_newer(message.staging, StagingMode)


def versioned_policy_to_proto(versioned: VersionedPolicy) -> common_pb2.VersionedPolicy:
    """A policy with its keyspace and version."""
    return common_pb2.VersionedPolicy(
        keyspace_id=versioned.keyspace, policy=policy_to_proto(versioned.policy), version=versioned.version
    )


def kept_policy_to_proto(encoding: bytes, versioned: VersionedPolicy) -> index_pb2.KeptPolicy:
    """A policy that a node kept, with the encoding of its keyspace."""
    return index_pb2.KeptPolicy(keyspace_encoding=encoding, policy=versioned_policy_to_proto(versioned))


def kept_policy_from_proto(message: index_pb2.KeptPolicy) -> tuple[bytes, VersionedPolicy]:
    """Raises InvalidRequest for a malformed policy; the encoding is not looked at."""
    return message.keyspace_encoding, versioned_policy_from_proto(message.policy)


def optional_policy_to_proto(versioned: VersionedPolicy | None) -> common_pb2.VersionedPolicy | None:
    """Unset for a keyspace that has none."""
    return None if versioned is None else versioned_policy_to_proto(versioned)


def versioned_policy_from_proto(message: common_pb2.VersionedPolicy) -> VersionedPolicy:
    """Raises InvalidRequest."""
    if not message.HasField("policy"):
        raise InvalidRequest("policy must be set")
    return VersionedPolicy(
        keyspace=check_id(message.keyspace_id, "keyspace_id"),
        policy=policy_from_proto(message.policy),
        version=check_count(message.version, "version", least=1),
    )
