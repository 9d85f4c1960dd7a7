"""What an operator wants of a keyspace on every pagestore: when its pages reach disk, what staging is for, how much.

0 and DEFAULT mean that the node's own configuration says. An index keeps policies encoded, and so does each pagestore.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from kvpool.core.errors import InvalidRequest
from kvpool.core.retention import NO_RETENTION, Retention

MAX_REPLICAS = 16

_FORMAT_VERSION = 1
_ENCODING = struct.Struct("<BBBqqIqqi")
_COUNT_MAX = (1 << 62) - 1

EnumT = TypeVar("EnumT", bound=IntEnum)


class WritePolicy(IntEnum):
    """When a page goes to disk. The numbers are those of the wire."""

    DEFAULT = 0  # of the node
    WRITE_BACK = 1  # a commit answers when the page is staged; it is durable soon after
    WRITE_THROUGH = 2  # a commit answers when the page is durable
    SELECTIVE = 3  # at its n-th use, or with its commit if its prompt was long; else never
    STAGING_ONLY = 4  # never; pages that are on disk already are served


class StagingMode(IntEnum):
    """What CPU memory is for. The numbers are those of the wire."""

    DEFAULT = 0  # of the node
    CACHE = 1  # a tier of its own: pages stay until they are evicted
    TRANSIT = 2  # passes bytes through: not matched, and nothing stays after a disk write or the last reader


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyspacePolicy:
    """The policy of one keyspace; the defaults leave everything to the node.

    selective_min_uses:   uses (acquired, or stored again) after which a selective page goes to disk.
    selective_min_tokens: prompt length from which a selective page goes to disk with its commit.
    replication_factor:   nodes that should hold each page.
    quota_bytes:          of staging and disk together, on each node; 0: no quota.
    retention:            of pages stored without one of their own; its pin must be 0.
    """

    write_policy: WritePolicy = WritePolicy.DEFAULT
    staging: StagingMode = StagingMode.DEFAULT
    selective_min_uses: int = 0
    selective_min_tokens: int = 0
    replication_factor: int = 0
    quota_bytes: int = 0
    retention: Retention = NO_RETENTION

    def check(self) -> None:
        """Raises InvalidRequest naming the field."""
        for name in ("selective_min_uses", "selective_min_tokens", "quota_bytes"):
            if not 0 <= getattr(self, name) <= _COUNT_MAX:
                raise InvalidRequest(f"policy.{name} must be >= 0, got {getattr(self, name)}")
        if not 0 <= self.replication_factor <= MAX_REPLICAS:
            raise InvalidRequest(
                f"policy.replication_factor must be 0 to {MAX_REPLICAS}, got {self.replication_factor}"
            )
        self.retention.check("policy.retention")
        if self.retention.pinned_until_us:
            raise InvalidRequest("policy.retention.pinned_until_us must be 0: a pin names pages, not a keyspace")
        check_combination(self.write_policy, self.staging)

    def encode(self) -> bytes:
        """Versioned and of fixed length."""
        return _ENCODING.pack(
            _FORMAT_VERSION,
            self.write_policy,
            self.staging,
            self.selective_min_uses,
            self.selective_min_tokens,
            self.replication_factor,
            self.quota_bytes,
            self.retention.ttl_ms,
            self.retention.priority,
        )

    @classmethod
    def decode(cls, encoded: bytes) -> KeyspacePolicy:
        """Raises InvalidRequest for bytes that this version does not know."""
        if len(encoded) != _ENCODING.size or encoded[0] != _FORMAT_VERSION:
            raise InvalidRequest(f"{len(encoded)} bytes are no keyspace policy of version {_FORMAT_VERSION}")
        _, write, staging, uses, tokens, replicas, quota_bytes, ttl_ms, priority = _ENCODING.unpack(encoded)
        try:
            policy = cls(
                write_policy=WritePolicy(write),
                staging=StagingMode(staging),
                selective_min_uses=uses,
                selective_min_tokens=tokens,
                replication_factor=replicas,
                quota_bytes=quota_bytes,
                retention=Retention(ttl_ms=ttl_ms, priority=priority),
            )
        except ValueError as error:
            raise InvalidRequest(f"a keyspace policy names what this version does not know: {error}") from error
        policy.check()
        return policy


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionedPolicy:
    """The policy of a keyspace as the index has it; of two, the one with the higher version holds."""

    keyspace: bytes  # 16 bytes
    policy: KeyspacePolicy
    version: int  # > 0


def check_combination(write_policy: WritePolicy, staging: StagingMode) -> None:
    """Refuse what would store nothing at all. Raises InvalidRequest."""
    if staging is StagingMode.TRANSIT and write_policy in (WritePolicy.STAGING_ONLY, WritePolicy.SELECTIVE):
        raise InvalidRequest(
            f"staging transit cannot go with {option_name(write_policy)}: such a page would be in neither tier; "
            "use write-back or write-through with transit"
        )


def option_name(member: IntEnum) -> str:
    """What people write: "write-through" for WRITE_THROUGH."""
    return member.name.lower().replace("_", "-")


def option_of(kind: type[EnumT], text: str) -> EnumT:
    """The member that people call so. Raises InvalidRequest naming the choices."""
    for member in kind:
        if option_name(member) == text:
            return member
    raise InvalidRequest(f"{text!r} is none of {', '.join(option_name(member) for member in kind)}")
