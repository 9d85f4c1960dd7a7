"""`kvpool policy`: what a command line makes of a policy, and how policies are shown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpool.client.index import NamedKeyspace
from kvpool.core.errors import InvalidRequest
from kvpool.core.keyspace import Dtype, KeyspaceSpec, KvGroup
from kvpool.core.policy import KeyspacePolicy, StagingMode, VersionedPolicy, WritePolicy
from kvpool.core.retention import Retention
from kvpool_cli.main import run_command
from kvpool_cli.output import as_text
from kvpool_cli.policy import Change, document, render, to_document

SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(4, 2, 64),), dtype=Dtype.FP32)


def test_what_is_named_changes_and_the_rest_stays() -> None:
    before = KeyspacePolicy(staging=StagingMode.CACHE, quota_bytes=7, retention=Retention(ttl_ms=5))
    change = Change(
        fields={"write_policy": WritePolicy.WRITE_THROUGH, "replication_factor": 2, "quota_bytes": None},
        retention={"priority": -3, "ttl_ms": None},
    )
    assert change.applied(before) == KeyspacePolicy(
        write_policy=WritePolicy.WRITE_THROUGH,
        staging=StagingMode.CACHE,
        replication_factor=2,
        quota_bytes=7,
        retention=Retention(ttl_ms=5, priority=-3),
    )
    assert Change(fields={"quota_bytes": 0}).applied(before).quota_bytes == 0


def test_what_cannot_be_is_refused_before_anything_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidRequest, match="neither tier"):
        Change(fields={"write_policy": WritePolicy.STAGING_ONLY, "staging": StagingMode.TRANSIT}).applied(
            KeyspacePolicy()
        )
    for option, value, said in (
        ("--write-policy", "sometimes", "write-back, write-through, selective, staging-only"),
        ("--quota", "1.5 GIB", "is not a size"),
        ("--ttl", "7", "is not a duration"),
    ):
        assert run_command(["policy", "set", "--keyspace", "chat", option, value, "--index", "127.0.0.1:1"]) == 2
        assert said in capsys.readouterr().err


def test_policies_are_shown_to_people_and_programs() -> None:
    policy = KeyspacePolicy(
        write_policy=WritePolicy.SELECTIVE, selective_min_uses=3, quota_bytes=1 << 30, retention=Retention(ttl_ms=9)
    )
    reported = VersionedPolicy(keyspace=b"k" * 16, policy=policy, version=4)
    one = NamedKeyspace(name="chat", keyspace=b"k" * 16, spec=SPEC, policy=reported)
    none = NamedKeyspace(name="other", keyspace=b"o" * 16, spec=SPEC)
    text = as_text(render([one, none]))
    for part in ("chat", "selective", "1.0 GiB", "3 uses", "9 ms"):
        assert part in text
    week = replace(one, policy=replace(reported, policy=replace(policy, retention=Retention(ttl_ms=7 * 86_400_000))))
    assert "7 d" in as_text(render([week])), "as `--ttl 7d` was written"
    assert text.splitlines()[-1].split() == ["other", *"------"]
    assert (document(one)["write_policy"], document(one)["version"]) == ("selective", 4)
    assert (document(none)["write_policy"], document(none)["version"]) == ("default", 0)
    assert to_document([one]) == {"version": 1, "keyspaces": [document(one)]}, "as all documents begin"
