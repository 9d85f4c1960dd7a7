"""Sealing and verifying pages on the CPU, for callers in threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from kvpool.core import page as page_format
from kvpool.core.page import PageFault, PageKey
from kvpool.core.segment import MappedSegment


@dataclass(frozen=True, slots=True, eq=False)
class SummedPage:
    """A page in its slot, and what its header says or shall say."""

    page: memoryview
    key: PageKey
    codec: int
    payload_bytes: int

    def seal(self) -> None:
        """Sum and finish it; its payload is in place."""
        page_format.seal(self.page, self.key, self.codec, self.payload_bytes)

    def write_header(self) -> None:
        """Finish it; its sums are in place."""
        page_format.write_header(self.page, self.key, self.codec, self.payload_bytes)

    def verify(self) -> PageFault | None:
        """All of it."""
        return page_format.verify(self.page, self.key, self.codec, self.payload_bytes)

    def verify_header(self) -> PageFault | None:
        """Header and sum table."""
        return page_format.verify_header(self.page, self.key, self.codec, self.payload_bytes)


class PageSums(Protocol):
    """May be called in several threads at once; each call blocks its thread until all of its pages are done."""

    @property
    def is_fast(self) -> bool:
        """Whether pages in registered segments are summed about as fast as a link carries them, whatever other
        threads do."""
        ...

    def seal_all(self, pages: Sequence[SummedPage]) -> None:
        """Sum and finish pages whose payload is in place. Raises InvalidRequest for a slot shorter than its page."""
        ...

    def verify_all(self, pages: Sequence[SummedPage]) -> list[PageFault | None]:
        """What kvpool.core.page.verify says of each."""
        ...

    def register(self, segment: MappedSegment) -> Callable[[], None]:
        """Pages will lie in this segment; returns what undoes it, after which nothing here has it mapped."""
        ...

    def close(self) -> None:
        """End threads and processes; nothing is being summed."""
        ...


class ThreadSums:
    """In this process. Beside a thread that is busy in Python each block waits for its turn: measured on an H200's
    host, 1 to 4 GB/s then, on four threads of an idle interpreter 35."""

    is_fast = False

    def __init__(self, thread_count: int) -> None:
        self._threads = ThreadPoolExecutor(thread_count, thread_name_prefix="sums")

    def seal_all(self, pages: Sequence[SummedPage]) -> None:
        """See PageSums."""
        list(self._threads.map(SummedPage.seal, pages))

    def verify_all(self, pages: Sequence[SummedPage]) -> list[PageFault | None]:
        """See PageSums."""
        return list(self._threads.map(SummedPage.verify, pages))

    def register(self, segment: MappedSegment) -> Callable[[], None]:
        """See PageSums."""
        return lambda: None

    def close(self) -> None:
        """See PageSums."""
        self._threads.shutdown(wait=True)


def address_of(view: memoryview) -> int:
    """Where writable bytes lie in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
