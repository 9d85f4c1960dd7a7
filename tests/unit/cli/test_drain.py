"""`kvpool node drain --json`: its document."""

from kvpool.client.pagestore_control import DrainProgress
from kvpool.core.cluster import LiveNode, NodeInfo, NodeKind, NodeLoad
from kvpool.core.errors import DrainBlocked
from kvpool_cli.drain import Drained, to_document

INFO = NodeInfo(node_id=b"n" * 16, kind=NodeKind.PAGESTORE, host_id="east", endpoint="east:7200")
NODE = LiveNode(info=INFO, load=NodeLoad(), lease_remaining_ms=1000)


def progress(*, remaining_chunk_count: int, done: bool) -> DrainProgress:
    return DrainProgress(
        moved_page_count=7,
        moved_bytes=7 << 20,
        kept_page_count=2,
        remaining_chunk_count=remaining_chunk_count,
        done=done,
    )


def test_a_drain_that_ended() -> None:
    drained = Drained(node=NODE, was_cancelled=False, progress=progress(remaining_chunk_count=0, done=True))
    assert to_document(drained) == {
        "version": 1,
        "nodes": [
            {
                "node_id": INFO.node_id.hex(),
                "host_id": "east",
                "error": "",
                "cancelled": False,
                "done": True,
                "moved_pages": 7,
                "moved_bytes": 7 << 20,
                "kept_pages": 2,
                "remaining_chunks": 0,
            }
        ],
    }


def test_one_that_is_blocked_says_why_and_how_far_it_came() -> None:
    blocked = DrainBlocked("no other pagestore has room")
    reported = progress(remaining_chunk_count=9, done=False)
    (node,) = to_document(Drained(node=NODE, was_cancelled=False, progress=reported, error=blocked))["nodes"]
    assert (node["done"], node["moved_pages"], node["remaining_chunks"]) == (False, 7, 9)
    assert "no other pagestore has room" in node["error"]


def test_one_that_ended_without_a_word_is_not_done() -> None:
    (node,) = to_document(Drained(node=NODE, was_cancelled=True, progress=None))["nodes"]
    assert (node["cancelled"], node["done"], node["moved_pages"]) == (True, False, 0)
