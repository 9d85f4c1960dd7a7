"""`kvpool cache evict --dry-run`: its table and its document."""

from kvpool.client.pagestore_control import EvictOutcome, EvictPreview
from kvpool.core.cluster import LiveNode, NodeInfo, NodeKind, NodeLoad
from kvpool.core.errors import ServiceUnavailable
from kvpool_cli.evict import preview_document, render_preview
from kvpool_cli.output import as_text

OUTCOME = EvictOutcome(page_count=8, pinned_count=2, undurable_count=0)
PREVIEW = EvictPreview(outcome=OUTCOME, chunk_count=4, staging_bytes=3 << 20, disk_bytes=8 << 20)
NOTHING = EvictPreview(
    outcome=EvictOutcome(page_count=0, pinned_count=0, undurable_count=0), chunk_count=0, staging_bytes=0, disk_bytes=0
)


def node(number: int) -> LiveNode:
    info = NodeInfo(node_id=bytes([number]) * 16, kind=NodeKind.PAGESTORE, host_id=f"host-{number}", endpoint="h:1")
    return LiveNode(info=info, load=NodeLoad(), lease_remaining_ms=1000)


def test_the_table_sums_up_what_would_go() -> None:
    lines = as_text(render_preview([(node(1), PREVIEW), (node(2), PREVIEW), (node(3), NOTHING)])).splitlines()
    assert lines[2].split() == ["01010101", "host-1", "4", "8", "3.0", "MiB", "8.0", "MiB", "2", "0"]
    assert lines[-1] == (
        "would evict 16 pages (6.0 MiB of memory, 16.0 MiB of disk) on 2 of 3 pagestores; nothing was changed"
    )


def test_the_document_cannot_be_taken_for_that_of_an_eviction() -> None:
    document = preview_document([(node(1), PREVIEW), (node(2), ServiceUnavailable("it is gone"))])
    first, second = document["nodes"]
    assert document["dry_run"] is True and "evicted_pages" not in first
    assert (first["would_evict_chunks"], first["would_evict_pages"], first["error"]) == (4, 8, "")
    assert (first["would_free_staging_bytes"], first["would_free_disk_bytes"]) == (3 << 20, 8 << 20)
    assert second["would_evict_pages"] == 0 and "gone" in second["error"]
