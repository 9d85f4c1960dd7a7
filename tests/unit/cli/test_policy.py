"""`kvpool policy`: what a command line makes of a policy, and how policies are shown."""

from __future__ import annotations

import argparse

import pytest

from kvpool.client.index import NamedKeyspace
from kvpool.core.errors import InvalidRequest
from kvpool.core.keyspace import Dtype, KeyspaceSpec, KvGroup
from kvpool.core.policy import KeyspacePolicy, StagingMode, VersionedPolicy, WritePolicy
from kvpool.core.retention import Retention
from kvpool_cli.policy import changed, declare, document, render

SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(4, 2, 64),), dtype=Dtype.FP32)


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    declare(parser)
    return parser.parse_args(["set", "chat", *words])


def test_what_is_named_changes_and_the_rest_stays() -> None:
    before = KeyspacePolicy(staging=StagingMode.CACHE, quota_bytes=7, retention=Retention(ttl_ms=5))
    after = changed(before, parsed("--write-policy", "write-through", "--replicas", "2", "--priority", "-3"))
    assert after == KeyspacePolicy(
        write_policy=WritePolicy.WRITE_THROUGH,
        staging=StagingMode.CACHE,
        replication_factor=2,
        quota_bytes=7,
        retention=Retention(ttl_ms=5, priority=-3),
    )
    assert changed(after, parsed("--quota", "0", "--write-policy", "default")).quota_bytes == 0


def test_sizes_are_read_as_people_write_them() -> None:
    assert changed(KeyspacePolicy(), parsed("--quota", "1.5GiB")).quota_bytes == 3 << 29


def test_what_cannot_be_is_refused_before_anything_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidRequest, match="neither tier"):
        changed(KeyspacePolicy(write_policy=WritePolicy.STAGING_ONLY), parsed("--staging", "transit"))
    with pytest.raises(SystemExit):
        parsed("--write-policy", "sometimes")
    assert "write-back, write-through, selective, staging-only" in capsys.readouterr().err


def test_policies_are_shown_to_people_and_programs() -> None:
    policy = KeyspacePolicy(
        write_policy=WritePolicy.SELECTIVE, selective_min_uses=3, quota_bytes=1 << 30, retention=Retention(ttl_ms=9)
    )
    told = VersionedPolicy(keyspace=b"k" * 16, policy=policy, version=4)
    one = NamedKeyspace(name="chat", keyspace=b"k" * 16, spec=SPEC, policy=told)
    none = NamedKeyspace(name="other", keyspace=b"o" * 16, spec=SPEC)
    text = render([one, none])
    for part in ("chat", "selective", "1.0 GiB", "3 uses", "9 ms"):
        assert part in text
    assert text.splitlines()[-1].split() == ["other", *"------"]
    assert (document(one)["write_policy"], document(one)["version"]) == ("selective", 4)
    assert (document(none)["write_policy"], document(none)["version"]) == ("default", 0)
