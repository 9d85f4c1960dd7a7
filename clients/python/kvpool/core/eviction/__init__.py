"""Which page goes when a cache is full: one port, its policies, and replays to choose between them."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from kvpool.core.eviction.chain import ChainPolicy
from kvpool.core.eviction.lru import LruPolicy
from kvpool.core.eviction.port import EXPIRED_PRIORITY, PLAIN, EvictionPolicy, K, Retention
from kvpool.core.eviction.s3fifo import S3FifoPolicy

__all__ = [
    "DEFAULT_POLICY",
    "EXPIRED_PRIORITY",
    "PLAIN",
    "ChainPolicy",
    "EvictionPolicy",
    "LruPolicy",
    "PolicyName",
    "Retention",
    "S3FifoPolicy",
    "make_policy",
]


class PolicyName(StrEnum):
    """What a policy is called in configuration and on the command line."""

    CHAIN = "chain"
    S3_FIFO = "s3-fifo"
    LRU = "lru"


DEFAULT_POLICY = PolicyName.CHAIN
"""By evidence: bench/eviction_curve.py."""

_POLICIES: dict[PolicyName, type[Any]] = {
    PolicyName.CHAIN: ChainPolicy,
    PolicyName.S3_FIFO: S3FifoPolicy,
    PolicyName.LRU: LruPolicy,
}


def make_policy(name: PolicyName) -> EvictionPolicy[K]:
    """A new, empty policy."""
    policy: EvictionPolicy[K] = _POLICIES[name]()
    return policy
