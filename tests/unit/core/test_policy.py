"""KeyspacePolicy: what is refused, and that the kept form comes back as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.errors import InvalidRequest
from kvpool.core.policy import MAX_REPLICAS, KeyspacePolicy, StagingMode, WritePolicy
from kvpool.core.retention import PINNED_FOREVER_US, Retention


@given(
    st.sampled_from([WritePolicy.DEFAULT, WritePolicy.WRITE_BACK, WritePolicy.WRITE_THROUGH]),
    st.sampled_from(StagingMode),
    st.integers(0, 1 << 62 - 1),
    st.integers(0, MAX_REPLICAS),
    st.integers(0, PINNED_FOREVER_US),
    st.integers(-100, 100),
)
def test_the_kept_form_comes_back(
    write: WritePolicy, staging: StagingMode, number: int, replicas: int, ttl_ms: int, priority: int
) -> None:
    policy = KeyspacePolicy(
        write_policy=write,
        staging=staging,
        selective_min_uses=number,
        selective_min_tokens=number // 2,
        replication_factor=replicas,
        quota_bytes=number // 3,
        retention=Retention(ttl_ms=ttl_ms, priority=priority),
    )
    policy.check()
    assert KeyspacePolicy.decode(policy.encode()) == policy


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"quota_bytes": -1}, "quota_bytes"),
        ({"selective_min_uses": -1}, "selective_min_uses"),
        ({"replication_factor": 17}, "replication_factor"),
        ({"retention": Retention(priority=101)}, "policy.retention.priority"),
        ({"retention": Retention(pinned_until_us=5)}, "pin"),
        ({"staging": StagingMode.TRANSIT, "write_policy": WritePolicy.STAGING_ONLY}, "staging-only"),
        ({"staging": StagingMode.TRANSIT, "write_policy": WritePolicy.SELECTIVE}, "selective"),
    ],
)
def test_what_cannot_be_is_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        replace(KeyspacePolicy(), **change).check()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "spoil", [lambda kept: kept[:-1], lambda kept: b"\x02" + kept[1:], lambda kept: b"\x01\x09" + kept[2:]]
)
def test_a_form_of_another_version_is_no_policy(spoil) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidRequest, match="keyspace policy"):
        KeyspacePolicy.decode(spoil(KeyspacePolicy().encode()))
