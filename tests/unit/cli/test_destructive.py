"""Commands that give up what engines would have to compute again, run without a terminal."""

from __future__ import annotations

import io
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvpool.client.index import NamedKeyspace
from kvpool.core.keyspace import Dtype, KeyspaceSpec, KvGroup
from kvpool.core.policy import KeyspacePolicy, VersionedPolicy
from kvpool.core.retention import Retention
from kvpool_cli import policy as policy_command
from kvpool_cli.main import run_command as main
from kvpool_cli.targets import Target

DESTRUCTIVE = [
    ["cache", "clear"],
    ["cache", "clear", "--keyspace", "llama"],
    ["cache", "evict", "--keyspace", "llama", "--whole-keyspace"],
    ["cache", "evict", "--keyspace", "llama", "TOKENS"],
]


@pytest.mark.parametrize("argv", DESTRUCTIVE)
def test_a_destructive_command_without_a_terminal_is_refused_before_anything_is_asked(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text("[1, 2, 3]")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    argv = [str(tokens) if word == "TOKENS" else word for word in argv]
    assert main([*argv, "--index", "127.0.0.1:1"]) == 2
    assert "--yes" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--keyspace", "--node"])
def test_a_name_that_came_out_empty_is_not_taken_for_all(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        ["cache", "clear"] if option == "--keyspace" else ["cache", "evict", "--keyspace", "k", "--whole-keyspace"]
    )
    assert main([*command, option, "", "--yes", "--index", "127.0.0.1:1"]) == 2  # "$NAME" of a script, say
    assert option in capsys.readouterr().err


def test_a_policy_is_not_set_for_an_empty_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "set", "--keyspace", "", "--quota", "1GiB", "--index", "127.0.0.1:1"]) == 2
    assert "--keyspace" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [*([*one, "--yes"] for one in DESTRUCTIVE[:3]), ["cache", "clear", "--dry-run"]])
@pytest.mark.usefixtures("no_retries")
def test_with_yes_or_as_a_dry_run_it_calls_the_cluster(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv, "--index", "127.0.0.1:1"]) == 1
    assert "the index at 127.0.0.1:1 does not answer" in capsys.readouterr().err


class FakeIndex:
    """An index with one keyspace, which remembers the policies that are set."""

    def __init__(self, current: KeyspacePolicy | None) -> None:
        spec = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(4, 2, 64),), dtype=Dtype.FP32)
        reported = None if current is None else VersionedPolicy(keyspace=b"k" * 16, policy=current, version=1)
        self.keyspace = NamedKeyspace(name="llama", keyspace=b"k" * 16, spec=spec, policy=reported)
        self.set: list[KeyspacePolicy] = []

    async def list_keyspaces(self) -> list[NamedKeyspace]:
        return [self.keyspace]

    async def set_keyspace_policy(self, name: str, policy: KeyspacePolicy) -> VersionedPolicy:
        assert name == self.keyspace.name
        self.set.append(policy)
        return VersionedPolicy(keyspace=self.keyspace.keyspace, policy=policy, version=2)


def install(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    """Make `kvpool policy` call `index`."""

    @asynccontextmanager
    async def open_fake(target: Target) -> AsyncIterator[FakeIndex]:
        yield index

    monkeypatch.setattr(policy_command, "open_index", open_fake)
    return index


LIMITED = KeyspacePolicy(quota_bytes=4 << 30, retention=Retention(ttl_ms=60_000))


@pytest.mark.parametrize(
    ("current", "options", "is_confirmed"),
    [
        (None, ["--quota", "1GiB"], True),
        (None, ["--ttl", "7d"], True),
        (LIMITED, ["--quota", "1GiB"], True),
        (LIMITED, ["--ttl", "30s"], True),
        (LIMITED, ["--quota", "8GiB", "--ttl", "30s"], True),
        (LIMITED, ["--reset", "--quota", "1GiB"], True),
        (LIMITED, ["--quota", "8GiB", "--ttl", "2m"], False),
        (LIMITED, ["--quota", "4GiB"], False),
        (LIMITED, ["--quota", "0", "--ttl", "0"], False),
        (LIMITED, ["--reset", "--quota", "8GiB"], False),
        (None, ["--replicas", "2", "--priority", "3"], False),
    ],
)
def test_a_policy_that_lowers_a_limit_is_not_set_without_a_terminal_unless_yes_is_given(
    current: KeyspacePolicy | None,
    options: list[str],
    is_confirmed: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    index = install(FakeIndex(current), monkeypatch)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    argv = ["policy", "set", "--keyspace", "llama", *options, "--index", "127.0.0.1:1"]
    if is_confirmed:
        assert main(argv) == 2
        assert "--yes" in capsys.readouterr().err and not index.set
        argv.append("--yes")
    assert main(argv) == 0
    assert len(index.set) == 1


def test_the_question_says_what_a_lower_limit_drops(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []
    install(FakeIndex(None), monkeypatch)
    monkeypatch.setattr(policy_command, "confirm", lambda question, yes: asked.append(question))
    assert main(["policy", "set", "-k", "llama", "--quota", "1GiB", "--ttl", "7d", "--index", "127.0.0.1:1"]) == 0
    (question,) = asked
    assert "keyspace llama" in question and "beyond 1.0 GiB" in question and "after 7 d" in question
