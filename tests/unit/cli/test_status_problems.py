"""What `kvpool cluster status --check` calls wrong."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool_cli.status import missing_nodes, problems


def document(**changes: Any) -> dict[str, Any]:
    node = {
        "node_id": "ab" * 16,
        "kind": "pagestore",
        "host_id": "host-0",
        "draining": True,
        "disk": {"fault": "", "state": "read_write"},
        "error": "",
    }
    return {"store": {"reachable": True}, "nodes": [node], "processes": []} | changes


def with_node(**changes: Any) -> dict[str, Any]:
    return document(nodes=[document()["nodes"][0] | changes])


def test_a_cluster_that_is_well_has_none_and_draining_is_none() -> None:
    assert problems(document()) == []


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (document(store={"reachable": False}), "store is not reachable"),
        (document(nodes=[]), "no pagestore"),
        (with_node(error="cannot be reached"), "host-0) does not answer"),
        (with_node(disk={"fault": "no space left", "state": "read_only"}), "read-only: no space left"),
        (document(processes=[{"name": "agent-0", "alive": False}]), "agent-0 is not running"),
    ],
)
def test_each_thing_that_is_wrong_has_its_line(broken: dict[str, Any], said: str) -> None:
    (line,) = problems(broken)
    assert said in line


@pytest.mark.parametrize(("expected", "said"), [(0, []), (1, []), (2, ["1 of 2 pagestores have a lease"])])
def test_a_pagestore_that_should_be_there_is_missed(expected: int, said: list[str]) -> None:
    assert missing_nodes(document(), expected) == said
