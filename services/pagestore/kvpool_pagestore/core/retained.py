"""What a page's metadata asks of eviction."""

from __future__ import annotations

from kvpool.core.cluster import PageMetadata
from kvpool.core.eviction import PLAIN, Retention


def retention_of(metadata: PageMetadata) -> Retention:
    """The same object for all pages that ask for nothing: most do not, and there may be a million."""
    if not (metadata.priority or metadata.pinned_until_us or metadata.expires_us):
        return PLAIN
    return Retention(metadata.priority, metadata.pinned_until_us, metadata.expires_us)
