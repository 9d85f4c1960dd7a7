"""Page bytes in plain files beside RocksDB: a volume is one file, pages lie in it one after another.

A batch is written straight from the arena and synced with one fdatasync; dropping a volume unlinks its file. None of
this needs the interpreter's lock or a copy.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from kvpool.core.errors import PageCorrupt, StartupFailed, StoreFault
from kvpool.core.page import PageKey

_DIRECTORY: Final = "volumes"
_FILE_NAME: Final = re.compile(r"(\d{1,10})\.pages")


class FileVolumes:
    """A rocks_volumes.PayloadVolumes. A page's position is its byte offset in the file."""

    def __init__(self, directory: Path) -> None:
        """Raises StartupFailed."""
        self._directory = directory / _DIRECTORY
        self._files: dict[int, _VolumeFile] = {}
        try:
            self._directory.mkdir(exist_ok=True)
            for path in self._directory.iterdir():
                if (match := _FILE_NAME.fullmatch(path.name)) is not None:
                    self._files[int(match[1])] = _VolumeFile(path, os.O_RDWR)
        except OSError as error:
            raise StartupFailed(
                f"{self._directory} cannot be used: {error.strerror}; make it and its files writable for this user"
            ) from error

    def sizes_bytes(self) -> Mapping[int, int]:
        return {number: file.size_bytes for number, file in self._files.items()}

    def create(self, number: int) -> None:
        try:
            self._files[number] = _VolumeFile(self._path(number), os.O_RDWR | os.O_CREAT | os.O_EXCL)
            _sync_directory(self._directory)  # or a power loss could take the name of a file whose bytes are durable
        except OSError as error:
            raise StoreFault(f"creating {self._path(number)} failed: {error.strerror}") from error

    def reserve(self, number: int, size_bytes: int) -> int:
        file = self._files[number]
        position, file.size_bytes = file.size_bytes, file.size_bytes + size_bytes
        return position

    def append(self, number: int, position: int, pages: Sequence[tuple[PageKey, memoryview]]) -> Sequence[int]:
        file = self._files[number]
        positions, end = [], position
        for _, page in pages:
            positions.append(end)
            end += len(page)
        try:
            for (_, page), start in zip(pages, positions, strict=True):
                _write_fully(file.descriptor, page, start)
            os.fdatasync(file.descriptor)
        except OSError as error:
            raise StoreFault(f"writing pages to {self._path(number)} failed: {error.strerror}") from error
        return positions

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
    """An open file, closed when the last thread that uses it has let go."""

    def __init__(self, path: Path, flags: int) -> None:
        self.descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
        self.size_bytes = os.fstat(self.descriptor).st_size  # or where the next batch goes

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


def _write_fully(descriptor: int, page: memoryview, offset: int) -> None:
    written = os.pwrite(descriptor, page, offset)
    while written < len(page):
        written += os.pwrite(descriptor, page[written:], offset + written)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
