"""Who fits whom, and what a refusal says."""

from __future__ import annotations

import pytest

import kvpool
from kvpool.core.errors import WireVersionRefused
from kvpool.v1 import common_pb2
from kvpool.wire.versions import (
    OWN_VERSIONS,
    WireVersions,
    check_peer_version,
    own_version_to_proto,
    versions_from_proto,
)


def said(wire: int, wire_min: int, software: str = "x") -> common_pb2.PeerVersion:
    return common_pb2.PeerVersion(wire=wire, wire_min=wire_min, software=software)


def test_this_release_says_what_it_is_and_takes_the_one_before_it() -> None:
    assert versions_from_proto(own_version_to_proto()) == OWN_VERSIONS
    assert OWN_VERSIONS.software == kvpool.__version__
    assert OWN_VERSIONS.wire_min <= max(1, OWN_VERSIONS.wire - 1), "one minor release older must be understood"
    check_peer_version(common_pb2.PeerVersion(), "a peer without a version")


@pytest.mark.parametrize(
    ("wire", "wire_min", "fits"),
    [(3, 2, True), (4, 3, True), (2, 1, True), (5, 4, False), (1, 1, False), (9, 1, True), (0, 0, False)],
)
def test_each_side_must_understand_the_other(wire: int, wire_min: int, fits: bool) -> None:
    own = WireVersions(wire=3, wire_min=2, software="0.3.0")
    if fits:
        check_peer_version(said(wire, wire_min), "the agent", own)
        return
    older = "the agent" if wire < 2 else "this side"
    with pytest.raises(WireVersionRefused, match=f"this side is 0.3.0 .wire versions 2 to 3.: {older} is too old"):
        check_peer_version(said(wire, wire_min), "the agent", own)


def test_nonsense_is_the_first_version_and_no_message_of_ours() -> None:
    parsed = versions_from_proto(said(-5, 7, "\x1b[31m" + "v" * 1000))
    assert (parsed.wire, parsed.wire_min) == (1, 1)
    assert parsed.software.isprintable() and len(parsed.software) <= 64
    assert str(versions_from_proto(common_pb2.PeerVersion())) == "of an unknown release (wire versions 1 to 1)"
    for wire, wire_min in ((1, 2), (1, 0)):
        with pytest.raises(ValueError, match="wire_min"):
            WireVersions(wire=wire, wire_min=wire_min, software="")
