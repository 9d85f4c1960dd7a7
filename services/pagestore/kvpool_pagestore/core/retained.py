"""What a page's metadata asks of eviction."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.core.cluster import PageMetadata

EXPIRED_PRIORITY = -128
"""Below every priority that may be asked for (-100 to 100): what has expired goes before anything else."""


@dataclass(frozen=True, slots=True)
class Retention:
    """What was asked for a key beside its use. Times are wall time in microseconds since the epoch."""

    priority: int = 0  # -100 (first to go) to 100 (last to go)
    pinned_until_us: int = 0  # never a victim before; 0: not pinned
    expires_us: int = 0  # worthless from then on; 0: never


PLAIN = Retention()


def retention_of(metadata: PageMetadata) -> Retention:
    """The same object for all pages that ask for nothing: most do not, and there may be a million."""
    if not (metadata.priority or metadata.pinned_until_us or metadata.expires_us):
        return PLAIN
    return Retention(metadata.priority, metadata.pinned_until_us, metadata.expires_us)
