"""The tables of `kvpool cluster status`."""

from typing import Any

from kvpool_cli.output import as_text
from kvpool_cli.status import render


def node(**changes: Any) -> dict[str, Any]:
    return {
        "node_id": "ab" * 16,
        "kind": "pagestore",
        "host_id": "host-0",
        "endpoint": "127.0.0.1:1",
        "incarnation": 7,
        "draining": False,
        "lease_remaining_ms": 1500,
        "arena": {"used_bytes": 1 << 20, "capacity_bytes": 1 << 30},
        "disk": {"used_bytes": 0, "capacity_bytes": 0, "fault": ""},
        "pages": {"staging": 3, "dirty": 1, "disk": 2},
        "sessions": 4,
        "error": "",
    } | changes


def document(**changes: Any) -> dict[str, Any]:
    return {
        "index": {"endpoint": "127.0.0.1:9", "version": "1"},
        "store": {"kind": "redis", "reachable": True, "description": "own"},
        "nodes": [node()],
        "keyspaces": [],
        "processes": [],
    } | changes


def test_a_healthy_cluster() -> None:
    text = as_text(render(document()))
    assert "redis, reachable (own)" in text
    assert "1.0 MiB of 1.0 GiB" in text
    assert "3 staged (1 dirty), 2 on disk" in text
    assert "1.5 s" in text
    assert "not running" not in text


def test_what_is_wrong_is_said() -> None:
    broken = document(
        store={"kind": "redis", "reachable": False, "description": ""},
        nodes=[
            node(error="cannot be reached"),
            node(draining=True, disk={"used_bytes": 1, "capacity_bytes": 2, "fault": "disk is full"}),
        ],
        processes=[{"name": "agent-0", "role": "agent", "pid": 1, "alive": False}],
    )
    text = as_text(render(broken))
    for part in (
        "NOT REACHABLE",
        "abababab does not answer: cannot be reached",
        "abababab: disk is full",
        "(draining)",
        "agent-0",
    ):
        assert part in text
