"""What the agent and its sum workers say to each other, and how the blocks of pages are shared out among them.

One message a packet, little endian. On the control socket the agent sends COMMAND, with the descriptor that it speaks
of, and gets one byte for each that maps or unmaps. On a channel it sends PIECEs and gets one u64 for each block of
them, in their order, or REFUSED if one lies in no segment that the worker has mapped.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

COMMAND = struct.Struct("<BIQ")  # Command, number of the segment, its bytes; 0 where they mean nothing
PIECE = struct.Struct("<IQQ")  # number of the segment, offset in it, bytes: whole blocks, the last one may be short
DONE, REFUSED = b"\x01", b"\x00"  # DONE is also the first that a worker says
MOST_PIECES = 4096  # of one request: it is one packet, and those end at about 200 KiB
MOST_BLOCKS = 8192  # of one answer, likewise


class Command(IntEnum):
    """What a worker is told to do."""

    MAP = 1
    UNMAP = 2
    ANSWER_ON = 3  # this channel; not acknowledged


@dataclass(frozen=True, slots=True)
class Piece:
    """Some blocks of one page. page: its number in the request that the pieces make up."""

    page: int
    blocks: range


def shared_out(block_counts: Sequence[int], share_count: int, least_blocks: int) -> list[list[Piece]]:
    """All blocks of pages in at most share_count shares of the same size, each but the last at least least_blocks."""
    total = sum(block_counts)
    size = max(-(-total // share_count), least_blocks)
    shares: list[list[Piece]] = []
    room = 0
    for page, count in enumerate(block_counts):
        first = 0
        while first < count:
            if not room:
                shares.append([])
                room = size
            taken = min(room, count - first)
            shares[-1].append(Piece(page, range(first, first + taken)))
            first += taken
            room -= taken
    return shares
