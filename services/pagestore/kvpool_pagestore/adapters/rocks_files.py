"""Page bytes in plain files beside RocksDB: a volume is one file, pages lie in it one after another.

A batch is written straight from the arena and synced with one fdatasync; dropping a volume unlinks its file. None of
this needs the interpreter's lock or a copy.

The kernel reports a lost write once per open file. Each batch therefore opens the volume for itself, before it writes:
were the descriptor shared, the sync of one batch could take the report that another one needed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvpool.core.errors import PageCorrupt, StartupFailed, StoreFault
from kvpool.core.page import PageKey
from kvpool_pagestore.adapters.durable_names import make_directories, sync_directory

_DIRECTORY: Final = "volumes"
_FILE_NAME: Final = re.compile(r"(\d{1,10})\.pages")


class FileVolumes:
    """A rocks_volumes.PayloadVolumes. A page's position is its byte offset in the file."""

    def __init__(self, directory: Path) -> None:
        """Raises StartupFailed."""
        self._directory = directory / _DIRECTORY
        self._files: dict[int, _VolumeFile] = {}
        try:
            make_directories(self._directory)
            for path in self._directory.iterdir():
                if (match := _FILE_NAME.fullmatch(path.name)) is not None:
                    self._files[int(match[1])] = _VolumeFile(path)
        except OSError as error:
            raise StartupFailed(
                f"{self._directory} cannot be used: {error.strerror}; make it and its files writable for this user"
            ) from error

    def sizes_bytes(self) -> Mapping[int, int]:
        return {number: file.size_bytes for number, file in self._files.items()}

    def create(self, number: int) -> None:
        path = self._path(number)
        try:
            file = _VolumeFile(path, os.O_CREAT | os.O_EXCL)
            try:
                sync_directory(self._directory)  # or a power loss could take the name of a file whose bytes are durable
            except OSError:
                with suppress(OSError):
                    path.unlink()
                raise
        except OSError as error:
            raise StoreFault(f"creating {path} failed: {error.strerror}") from error
        self._files[number] = file

    def reserve(self, number: int, size_bytes: int) -> int:
        file = self._files[number]
        position, file.size_bytes = file.size_bytes, file.size_bytes + size_bytes
        return position

    def append(self, number: int, position: int, pages: Sequence[tuple[PageKey, memoryview]]) -> Sequence[int]:
        positions, end = [], position
        for _, page in pages:
            positions.append(end)
            end += len(page)
        try:
            descriptor = os.open(self._path(number), os.O_WRONLY | os.O_CLOEXEC)
            try:
                for (_, page), start in zip(pages, positions, strict=True):
                    _write_fully(descriptor, page, start)
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StoreFault(f"writing pages to {self._path(number)} failed: {error.strerror}") from error
        return positions

    def withdraw(self, number: int, position: int, size_bytes: int) -> int:
        return self._files[number].withdraw(self._path(number), position, size_bytes)

    def read_into(self, number: int, position: int, key: PageKey, destination: memoryview) -> bool:
        file = self._files.get(number)  # held while it is read: a dropped volume stays open that long
        if file is None:
            return False
        try:
            done = os.preadv(file.descriptor, [destination], position)
            while 0 < done < len(destination):
                more = os.preadv(file.descriptor, [destination[done:]], position + done)
                if more == 0:
                    break
                done += more
        except OSError as error:
            raise StoreFault(f"reading page {key} from {self._path(number)} failed: {error.strerror}") from error
        if done != len(destination):
            raise PageCorrupt(f"page {key} is cut off on disk: {self._path(number)} ends in it")
        return True

    def drop(self, number: int) -> None:
        try:
            self._path(number).unlink(missing_ok=True)
        except OSError as error:
            raise StoreFault(f"removing {self._path(number)} failed: {error.strerror}") from error
        self._files.pop(number, None)

    def close(self) -> None:
        self._files.clear()

    def _path(self, number: int) -> Path:
        return self._directory / f"{number}.pages"


class _VolumeFile:
    """A file open for reading, closed when the last thread that uses it has let go."""

    def __init__(self, path: Path, flags: int = 0) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags, 0o600)
        self.size_bytes = os.fstat(self.descriptor).st_size  # or where the next batch goes
        self._withdrawn: dict[int, int] = {}  # start of failed batches with others behind them, by their end

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    def withdraw(self, path: Path, position: int, size_bytes: int) -> int:
        """Cut failed batches off the end of the file; the bytes that came back."""
        self._withdrawn[position + size_bytes] = position
        end = self.size_bytes
        while (start := self._withdrawn.get(end)) is not None:
            end = start
        try:
            os.truncate(path, end)
        except OSError:
            return 0
        returned_bytes, self.size_bytes = self.size_bytes - end, end
        self._withdrawn = {above: start for above, start in self._withdrawn.items() if above <= end}
        return returned_bytes


def _write_fully(descriptor: int, page: memoryview, offset: int) -> None:
    written = os.pwrite(descriptor, page, offset)
    while written < len(page):
        written += os.pwrite(descriptor, page[written:], offset + written)
