"""Bounds and times of a node's link to the index."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLinkConfig:
    """Bounds of a node's link to the index."""

    pending_max: int = 65_536  # chunks and tiers that wait to be announced; more: forgotten and told with their ranges
    batch_max: int = 512
    in_flight_max: int = 2  # batches sent and not acknowledged; a second one only if it is full
    linger_s: float = 0.02  # changes of one chunk that come within it are merged
    ack_timeout_s: float = 10.0  # no acknowledgement for so long, or for two leases: the stream is taken for dead
    reconcile_interval_s: float = 60.0  # everything held is compared with what the index knows so often
    reconcile_share: float = 0.25  # of the event loop's time, while it is compared
    stale_pending_max: int = 4096
    stale_linger_s: float = 0.05
    end_timeout_s: float = 1.0  # of ending the lease
