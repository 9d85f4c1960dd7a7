"""Page bytes in a few large preallocated files, and which of their blocks are free (file_io: how bytes get there).

The kernel reports a lost write once per open file. Each batch therefore opens its files for itself, before it writes:
were a descriptor shared, the sync of one batch could take the report that another one needed.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np

from kvpool.core.errors import PageCorrupt, StartupFailed, StoreFault
from kvpool.core.page import PageKey
from kvpool_pagestore.adapters.file_io import Descriptors, allows_direct, make_directories
from kvpool_pagestore.adapters.records import RecordColumns, UsedBlocks, decode_place
from kvpool_pagestore.core.extents import BLOCK_BYTES, Extent, ExtentBudget, FreeExtents
from kvpool_server.data_directory import sync_directory

_log = logging.getLogger(__name__)

_DIRECTORY: Final = "extents"
_FILE_NAME: Final = re.compile(r"(\d{1,10})\.pages")
_WINDOW_BYTES: Final = 4 << 20
_GIVEN_AT_ONCE: Final = 256  # under the lock: a millisecond

Extents = tuple[Extent, ...]


class ExtentFiles:
    """The files by number. Blocks; called from several threads, but files are made and cut by one at a time."""

    def __init__(self, directory: Path) -> None:
        """Raises StartupFailed."""
        self._directory = directory / _DIRECTORY
        self._files: dict[int, _ExtentFile] = {}
        try:
            make_directories(self._directory)
            self.is_direct = allows_direct(self._directory)
            for path in self._directory.iterdir():
                if (match := _FILE_NAME.fullmatch(path.name)) is not None:
                    self._files[int(match[1])] = _ExtentFile(path, is_direct=self.is_direct)
        except OSError as error:
            raise StartupFailed(
                f"{self._directory} cannot be used: {error.strerror}; make it and its files writable for this user"
            ) from error

    @property
    def block_counts(self) -> dict[int, int]:
        """Blocks of every file."""
        return {number: file.block_count for number, file in sorted(self._files.items())}

    def create(self, number: int, block_count: int) -> None:
        """A new file with all its blocks reserved on the file system, durably. Raises StoreFault and leaves none."""
        path = self._path(number)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, block_count * BLOCK_BYTES)
                os.fsync(descriptor)
                sync_directory(self._directory)
                self._files[number] = _ExtentFile(path, is_direct=self.is_direct)
            except BaseException:
                with suppress(OSError):
                    path.unlink()
                raise
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StoreFault(f"reserving {path} failed: {error.strerror}") from error

    def cut(self, number: int, block_count: int) -> None:
        """Give the blocks of a file from `block_count` on back to the file system; all: the file goes."""
        path = self._path(number)
        try:
            if block_count:
                os.truncate(path, block_count * BLOCK_BYTES)
                self._files[number].block_count = block_count
            else:
                path.unlink()
                del self._files[number]
        except OSError as error:
            raise StoreFault(f"shrinking {path} failed: {error.strerror}") from error

    def write(self, pages: Sequence[tuple[Sequence[Extent], memoryview, bytes]]) -> None:
        """Write pages, each with a trailer at the very end of its blocks, and sync them. Raises StoreFault."""
        numbers = {extent.file for extents, _, _ in pages for extent in extents}
        opened: dict[int, Descriptors] = {}
        try:
            try:
                for number in numbers:
                    opened[number] = Descriptors(self._path(number), os.O_WRONLY, is_direct=self.is_direct)
                for extents, page, trailer in pages:
                    for extent, piece in _pieces(extents, page):
                        opened[extent.file].write(extent, piece, trailer if extent is extents[-1] else b"")
                for descriptors in opened.values():
                    descriptors.sync()
            finally:
                for descriptors in opened.values():
                    descriptors.close()
        except OSError as error:
            raise StoreFault(f"writing pages to {self._directory} failed: {error.strerror}") from error

    def read_into(self, extents: Sequence[Extent], destination: memoryview) -> None:
        """Fill `destination` with a page. Raises PageCorrupt if blocks of it are gone, StoreFault."""
        try:
            for extent, piece in _pieces(extents, destination):
                file = self._files.get(extent.file)  # held while it is read: a removed file stays open that long
                if file is None or not file.descriptors.read_into(extent, piece):
                    raise PageCorrupt(f"file {extent.file} of {self._directory} lacks blocks of the page")
        except OSError as error:
            raise StoreFault(f"reading a page from {self._directory} failed: {error.strerror}") from error

    def probe(self) -> None:
        """Read a block of each file. Raises StoreFault."""
        block = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        try:
            for number, file in list(self._files.items()):  # one may be made meanwhile
                file.descriptors.read_into(Extent(number, 0, 1), block)
        except OSError as error:
            raise StoreFault(f"reading {self._directory} failed: {error.strerror}") from error

    def block_ends(self, size_bytes: int, magic: bytes) -> Iterator[list[tuple[int, int, bytes]]]:
        """File, number and last bytes of the blocks whose last bytes begin with `magic`, a list for each 4 MiB read.

        Reads everything. Blocks that cannot be read are passed over.
        """
        window = memoryview(mmap.mmap(-1, _WINDOW_BYTES))
        blocks = np.frombuffer(window, np.uint8).reshape(-1, BLOCK_BYTES)
        begin, wanted = BLOCK_BYTES - size_bytes, np.frombuffer(magic, np.uint8)
        for number, file in self._files.items():
            for start in range(0, file.block_count, _WINDOW_BYTES // BLOCK_BYTES):
                count = min(file.block_count - start, _WINDOW_BYTES // BLOCK_BYTES)
                try:
                    if not file.descriptors.read_into(Extent(number, start, count), window[: count * BLOCK_BYTES]):
                        break  # the file is cut off
                except OSError as error:
                    _log.error("blocks from %d on of %s cannot be read: %s", start, self._path(number), error.strerror)
                    continue
                matches = (blocks[:count, begin : begin + len(magic)] == wanted).all(axis=1)
                yield [(number, start + at, blocks[at, begin:].tobytes()) for at in np.flatnonzero(matches).tolist()]

    def keep(self, name: str, content: bytes) -> None:
        """Keep a small file beside the others, durably. Raises StoreFault."""
        path, made = self._directory / name, self._directory / f"{name}.new"
        try:
            with made.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            made.rename(path)
            sync_directory(self._directory)
        except OSError as error:
            raise StoreFault(f"writing {path} failed: {error.strerror}") from error

    def kept(self, suffix: str) -> dict[str, bytes]:
        """Small files by name. Raises StoreFault."""
        try:
            return {path.name: path.read_bytes() for path in self._directory.glob(f"*{suffix}")}
        except OSError as error:
            raise StoreFault(f"reading {self._directory} failed: {error.strerror}") from error

    def kept_names(self, suffix: str) -> set[str]:
        """Names of small files. Raises StoreFault."""
        try:
            return {path.name for path in self._directory.glob(f"*{suffix}")}
        except OSError as error:
            raise StoreFault(f"reading {self._directory} failed: {error.strerror}") from error

    def close(self) -> None:
        self._files.clear()

    def _path(self, number: int) -> Path:
        return self._directory / f"{number}.pages"


class _ExtentFile:
    """A file open for reading, closed when the last thread that uses it has let go."""

    def __init__(self, path: Path, *, is_direct: bool) -> None:
        self.descriptors = Descriptors(path, os.O_RDONLY, is_direct=is_direct)
        self.block_count = path.stat().st_size // BLOCK_BYTES

    def __del__(self) -> None:
        if hasattr(self, "descriptors"):
            self.descriptors.close()


def _pieces(extents: Sequence[Extent], page: memoryview) -> Iterator[tuple[Extent, memoryview]]:
    """Each extent with the part of the page that lies in it; empty parts too: a trailer may be alone."""
    start = 0
    for extent in extents:
        yield extent, page[start : start + extent.size_bytes]
        start += extent.size_bytes


class ExtentBlocks:
    """Thread-safe. An extent is free, in one page, or on its way from one to the other."""

    def __init__(self, files: ExtentFiles, budget: ExtentBudget) -> None:
        self._files = files
        self._budget = budget
        self._free = FreeExtents()
        self._lock = threading.Lock()
        self._growing = threading.Lock()  # held while a file is made, for as long as its file system takes
        self._missing_blocks = 0  # what the file system had no room for when it was asked last
        self._readers: dict[PageKey, int] = {}
        self._read_meanwhile: dict[PageKey, list[Extent]] = {}  # freed while they were read

    def found(self, used: UsedBlocks) -> set[Extent]:
        """What pages have at a start; all else is free. Returns the extents that are not there, or another page's."""
        counts, lost = self._files.block_counts, set[Extent]()
        for number in used.files - counts.keys():
            lost.update(Extent(*row) for row in used.of_file(number).tolist())
        for number, count in counts.items():
            lost.update(self._free.give_around(number, count, used.of_file(number)))
        return lost

    def take(self, wanted: Sequence[int]) -> list[Extents] | None:
        """Blocks for each of some pages; None if all together are not free."""
        with self._lock:
            if self._free.block_count < sum(wanted):
                return None
            return [tuple(self._free.take(count)) for count in wanted]

    def take_new(self, wanted: Sequence[int]) -> list[Extents] | None:
        """Do as `take`, but make files as far as the budget allows. Raises StoreFault if one cannot be made."""
        with self._growing:
            taken = self.take(wanted)
            while taken is None and self._grow(sum(wanted)):
                taken = self.take(wanted)  # not if another writer was quicker
            return taken

    def grow_as_wanted(self) -> None:
        """Find the room that was not there. Raises StoreFault."""
        with self._growing:
            self._grow(self._missing_blocks)

    def give(self, extents: Iterable[Extent]) -> None:
        """Free extents that no record names."""
        with self._lock:
            self._free.give(extents)

    def give_unless_read(self, freed: Sequence[tuple[PageKey, Extents]]) -> None:
        """Free extents once their readers have left: no new reader finds them."""
        for start in range(0, len(freed), _GIVEN_AT_ONCE):
            with self._lock:
                for key, extents in freed[start : start + _GIVEN_AT_ONCE]:
                    if key in self._readers:
                        self._read_meanwhile.setdefault(key, []).extend(extents)
                    else:
                        self._free.give(extents)

    def give_if_read(self, keys: Sequence[bytes], records: Sequence[bytes]) -> UsedBlocks:
        """Free those of many pages that are read, as `give_unless_read` does; the blocks of the others.

        keys, records: packed and encoded. No reader will find the pages any more.
        """
        with self._lock:
            readers = {key.pack(): key for key in self._readers}
        read = [at for at, packed in enumerate(keys) if packed in readers] if readers else []
        self.give_unless_read([(readers[keys[at]], decode_place(records[at])[1]) for at in read])
        left = set(read)
        others = [record for at, record in enumerate(records) if at not in left] if left else records
        return UsedBlocks.joined([RecordColumns.of(others).used])

    def give_all(self, free: UsedBlocks) -> None:
        """Free many blocks that no record names and no reader uses."""
        for part in free.extents(_GIVEN_AT_ONCE):
            self.give(part)

    def begin_reading(self, key: PageKey) -> None:
        """Call before the page is looked up."""
        with self._lock:
            self._readers[key] = self._readers.get(key, 0) + 1

    def end_reading(self, key: PageKey) -> None:
        with self._lock:
            count = self._readers[key] - 1
            if count:
                self._readers[key] = count
            else:
                del self._readers[key]
                self._free.give(self._read_meanwhile.pop(key, ()))

    def _grow(self, block_count: int) -> bool:
        """Make files until so many blocks are free, or the budget is used up; whether any was made."""
        has_grown = False
        while self._free.block_count < block_count:
            counts = self._files.block_counts
            room = min(self._budget.file_block_count, self._budget.block_count - sum(counts.values()))
            if room <= 0:
                break
            number = max(counts, default=0) + 1
            self._missing_blocks = block_count
            self._files.create(number, room)
            self._missing_blocks = 0
            self.give([Extent(number, 0, room)])
            has_grown = True
        return has_grown
