"""Page bytes in a few large preallocated files (direct_io: how they get there).

The kernel reports a lost write once per open file. Each batch therefore opens its files for itself, before it writes:
were a descriptor shared, the sync of one batch could take the report that another one needed.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvpool.core.errors import PageCorrupt, StartupFailed, StoreFault
from kvpool_pagestore.adapters.direct_io import Descriptors, allows_direct
from kvpool_pagestore.adapters.durable_names import make_directories, sync_directory
from kvpool_pagestore.core.extents import BLOCK_BYTES, Extent

_log = logging.getLogger(__name__)

_DIRECTORY: Final = "extents"
_FILE_NAME: Final = re.compile(r"(\d{1,10})\.pages")
_WINDOW_BYTES: Final = 4 << 20


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

    def block_ends(self, size_bytes: int) -> Iterator[tuple[int, int, bytes]]:
        """File, number and last bytes of every block there is. Reads everything. Raises StoreFault."""
        window = memoryview(mmap.mmap(-1, _WINDOW_BYTES))
        for number, file in self._files.items():
            for start in range(0, file.block_count, _WINDOW_BYTES // BLOCK_BYTES):
                count = min(file.block_count - start, _WINDOW_BYTES // BLOCK_BYTES)
                try:
                    if not file.descriptors.read_into(Extent(number, start, count), window[: count * BLOCK_BYTES]):
                        break  # the file is cut off
                except OSError as error:
                    _log.error("blocks from %d on of %s cannot be read: %s", start, self._path(number), error.strerror)
                    continue
                for at in range(count):
                    end = (at + 1) * BLOCK_BYTES
                    yield number, start + at, bytes(window[end - size_bytes : end])

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
