"""Sums of page bytes by worker processes, which no other thread of this one can hold up.

A caller shares out the blocks of its pages among all workers, asks each for its part, and waits for all. What no worker
can do, for bytes that lie in no segment or because one has gone, is done in this process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvpool.core import page as page_format
from kvpool.core.page import HEADER_BYTES, SUM_BLOCK_BYTES, SUM_BYTES, PageFault, PageFaultKind, block_count, page_bytes
from kvpool.core.segment import MappedSegment
from kvpool_gpuagent.adapters.page_sums import SummedPage, ThreadSums, address_of
from kvpool_gpuagent.adapters.sum_crew import SumCrew
from kvpool_gpuagent.adapters.sum_process import Channel, SumProcess
from kvpool_gpuagent.core.sum_frames import MOST_BLOCKS, MOST_PIECES, PIECE, Piece, shared_out

_LEAST_BLOCKS = 4  # of a share: 1 MiB, about 80 us of work


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """One page of a request. number: in the request; offset: of its payload in the segment."""

    number: int
    page: SummedPage
    segment: int
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class _Share:
    """What one worker is asked for. channel: None if it could not be asked."""

    pieces: Sequence[Piece]
    process: SumProcess | None
    channel: Channel | None

    def answer(self) -> bytes | None:
        """Sums of all pieces; None if the worker has gone, hangs, or has not mapped the segment."""
        if self.channel is None or self.process is None:
            return None
        try:
            answer = self.channel.answer()
        except OSError:
            self.channel.close()
            self.process.lose()
            return None
        self.process.give(self.channel)
        return answer if len(answer) == SUM_BYTES * sum(len(piece.blocks) for piece in self.pieces) else None


class SumWorkers:
    """See page_sums.PageSums. in_process: does what the workers cannot, and is closed with them."""

    def __init__(self, process_count: int, in_process: ThreadSums, *, restart_s: float = 5.0) -> None:
        """Workers start in the background: is_fast tells. restart_s: how long after its end one is started again."""
        self._in_process = in_process
        self._crew = SumCrew(process_count, restart_s)
        self._turns = itertools.count()

    @property
    def is_fast(self) -> bool:
        """See PageSums: while most of the workers are there, and pages lie where they can read them."""
        return self._crew.has_segments and 2 * len(self._crew.processes()) > self._crew.process_count

    @property
    def pids(self) -> Sequence[int]:
        """Of the workers that serve now."""
        return [process.pid for process in self._crew.processes()]

    def register(self, segment: MappedSegment) -> Callable[[], None]:
        """See PageSums."""
        return self._crew.register(address_of(segment.view), len(segment.view), segment.descriptor)

    def seal_all(self, pages: Sequence[SummedPage]) -> None:
        """See PageSums."""
        places, others = self._located(pages)
        self._in_process.seal_all([pages[number] for number in others])
        for place, blocks, sums in self._sums(places):
            page = place.page
            if sums is None:
                page_format.write_sums(page.page, page.payload_bytes, blocks)
            else:
                at = _table_offset(page, blocks)
                page.page[at : at + len(sums)] = sums
        for place in places:
            place.page.write_header()

    def verify_all(self, pages: Sequence[SummedPage]) -> list[PageFault | None]:
        """See PageSums."""
        places, others = self._located(pages)
        faults: list[PageFault | None] = [None] * len(pages)
        for number, fault in zip(others, self._in_process.verify_all([pages[n] for n in others]), strict=True):
            faults[number] = fault
        for place in places:
            faults[place.number] = place.page.verify_header()
        # Sums of a page come in the order of its blocks: the first fault is the one to tell.
        good = [place for place in places if faults[place.number] is None]
        for place, blocks, sums in self._sums(good):
            faults[place.number] = faults[place.number] or _compared(place.page, blocks, sums)
        return faults

    def close(self) -> None:
        """See PageSums."""
        self._crew.close()
        self._in_process.close()

    def _located(self, pages: Sequence[SummedPage]) -> tuple[list[_Place], list[int]]:
        """Pages that workers can sum, and the numbers of the others."""
        places: list[_Place] = []
        others: list[int] = []
        is_served = bool(self._crew.processes())
        for number, page in enumerate(pages):
            found = self._found(page) if is_served else None
            if found is None:
                others.append(number)
            else:
                places.append(_Place(number, page, found[0], found[1] + HEADER_BYTES))
        return places, others

    def _found(self, page: SummedPage) -> tuple[int, int] | None:
        size_bytes = page_bytes(page.payload_bytes)
        if page.page.readonly or size_bytes > len(page.page) or block_count(page.payload_bytes) > MOST_BLOCKS:
            return None  # also what is an error: it is raised where the bytes are used
        return self._crew.find(address_of(page.page), size_bytes)

    def _sums(self, places: Sequence[_Place]) -> Iterator[tuple[_Place, range, bytes | None]]:
        """Sums of all blocks, some blocks of a page at a time, in their order; None where no worker has answered."""
        for group in _groups(places):
            shares = self._asked(group)
            # All answers first: nobody takes them from a channel once this has been left.
            for share, answer in [(share, share.answer()) for share in shares]:
                at = 0
                for piece in share.pieces:
                    size_bytes = SUM_BYTES * len(piece.blocks)
                    yield group[piece.page], piece.blocks, None if answer is None else answer[at : at + size_bytes]
                    at += size_bytes

    def _asked(self, group: Sequence[_Place]) -> list[_Share]:
        processes = self._crew.processes()
        counts = [block_count(place.page.payload_bytes) for place in group]
        first = next(self._turns)  # small requests take one worker after another
        shares = []
        for number, pieces in enumerate(shared_out(counts, max(1, len(processes)), _LEAST_BLOCKS)):
            process = processes[(first + number) % len(processes)] if processes else None
            shares.append(_ask(process, pieces, group))
        return shares


def _ask(process: SumProcess | None, pieces: Sequence[Piece], group: Sequence[_Place]) -> _Share:
    if process is None:
        return _Share(pieces, None, None)
    request = b"".join(_packed(group[piece.page], piece.blocks) for piece in pieces)
    try:
        channel = process.take()
    except OSError:
        process.lose()
        return _Share(pieces, process, None)
    try:
        channel.ask(request)
    except OSError:
        channel.close()
        process.lose()
        return _Share(pieces, process, None)
    return _Share(pieces, process, channel)


def _packed(place: _Place, blocks: range) -> bytes:
    first, end = blocks.start * SUM_BLOCK_BYTES, min(blocks.stop * SUM_BLOCK_BYTES, place.page.payload_bytes)
    return PIECE.pack(place.segment, place.offset + first, end - first)


def _groups(places: Sequence[_Place]) -> Iterator[Sequence[_Place]]:
    """Places in requests that fit one packet each, however many workers share them."""
    group: list[_Place] = []
    blocks = 0
    for place in places:
        count = block_count(place.page.payload_bytes)
        if group and (blocks + count > MOST_BLOCKS or len(group) == MOST_PIECES):
            yield group
            group, blocks = [], 0
        group.append(place)
        blocks += count
    if group:
        yield group


def _table_offset(page: SummedPage, blocks: range) -> int:
    return HEADER_BYTES + page.payload_bytes + SUM_BYTES * blocks.start


def _compared(page: SummedPage, blocks: range, sums: bytes | None) -> PageFault | None:
    """Sums of some blocks beside the page's table, which its header vouches for."""
    if sums is None:
        return page_format.verify_blocks(page.page, page.payload_bytes, blocks)
    at = _table_offset(page, blocks)
    expected = bytes(page.page[at : at + len(sums)])
    if expected == sums:
        return None
    entries = range(0, len(sums), SUM_BYTES)
    bad = next(entry for entry in entries if expected[entry : entry + SUM_BYTES] != sums[entry : entry + SUM_BYTES])
    return PageFault(PageFaultKind.BAD_SUM, blocks.start + bad // SUM_BYTES)
