"""Which versions of the messages this release writes and understands, and the refusal of peers that do not fit.

Fields and values that a peer does not know need no version: it ignores them. The version is for what it must know of,
and for what is no longer understood. See "How it may change" in proto/README.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import kvpool
from kvpool.core.errors import WireVersionRefused
from kvpool.v1 import common_pb2

FIRST_VERSION: Final = 1  # of a peer that sends none
_SOFTWARE_CHARS_MAX: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class WireVersions:
    """What one side speaks. It writes `wire`, and understands all from `wire_min` on that a peer may write."""

    wire: int
    wire_min: int
    software: str

    def __post_init__(self) -> None:
        if not FIRST_VERSION <= self.wire_min <= self.wire:
            raise ValueError(f"wire versions must be {FIRST_VERSION} <= wire_min <= wire, got {self}")

    def fits(self, peer: WireVersions) -> bool:
        """Whether each side understands the other."""
        return self.wire >= peer.wire_min and peer.wire >= self.wire_min

    def __str__(self) -> str:
        return f"{self.software or 'of an unknown release'} (wire versions {self.wire_min} to {self.wire})"


OWN_VERSIONS: Final = WireVersions(wire=1, wire_min=1, software=kvpool.__version__)


def own_version_to_proto(own: WireVersions = OWN_VERSIONS) -> common_pb2.PeerVersion:
    """What this side says of itself."""
    return common_pb2.PeerVersion(wire=own.wire, wire_min=own.wire_min, software=own.software)


def versions_from_proto(message: common_pb2.PeerVersion) -> WireVersions:
    """What a peer said; nothing, or nonsense, counts as the first version."""
    wire = max(message.wire, FIRST_VERSION)
    software = "".join(char for char in message.software[:_SOFTWARE_CHARS_MAX] if char.isprintable())
    return WireVersions(wire=wire, wire_min=min(max(message.wire_min, FIRST_VERSION), wire), software=software)


def check_peer_version(message: common_pb2.PeerVersion, peer: str, own: WireVersions = OWN_VERSIONS) -> None:
    """Refuse a peer that this side does not understand, or that does not understand this side.

    peer: who it is, as in "the agent". Raises WireVersionRefused naming both versions and which side to upgrade.
    """
    theirs = versions_from_proto(message)
    if own.fits(theirs):
        return
    older = peer if theirs.wire < own.wire_min else "this side"
    raise WireVersionRefused(f"{peer} is {theirs}, this side is {own}: {older} is too old for the other")
