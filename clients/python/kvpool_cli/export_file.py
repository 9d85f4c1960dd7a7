"""Files of exported pages on disk: written beside their name until they are whole, read with every byte verified."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from kvpool.core.chain_order import ChainCheck
from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import ExportRefused
from kvpool.core.export_format import (
    CHUNK_HEAD_BYTES,
    END_BYTES,
    HEAD_BYTES,
    MAGIC,
    SUM_BYTES,
    Digest,
    End,
    Manifest,
    chunk_of,
    end_of,
    is_end,
    mac_of,
    manifest_bytes,
    manifest_of,
    new_digest,
    pack_chunk,
    pages_bytes,
)
from kvpool.core.grid import shards_in
from kvpool.core.page import PageKey, page_bytes, verify
from kvpool_cli.errors import CommandFailed

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChunk:
    """One chunk of a file; its pages have been verified. shards: bitmap of theirs, ascending as the pages."""

    chunk_hash: bytes
    metadata: PageMetadata
    shards: int
    pages: tuple[memoryview, ...]


class ExportReader:
    """Reads a file once, front to back. Nothing is taken from it that was not verified. Use as a context manager."""

    def __init__(self, path: Path, *, read_before: Sequence[bytes] | None = None) -> None:
        """read_before: the `marks` of a whole reading; a file that was changed since is refused before it is used.

        raises: CommandFailed for a file that cannot be read, ExportRefused for one that is none of ours.
        """
        self._path = path
        self._read_before = read_before
        self.marks: list[bytes] = []  # of all up to the end of each chunk
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise CommandFailed(f"{path} cannot be read: {error.strerror}") from error
        try:
            status = os.fstat(self._file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CommandFailed(
                    f"{path} is not a regular file: it is read twice, so copy the bytes to a file first"
                )
            self.size_bytes = status.st_size
            self.digest = new_digest()
            head = self._take(HEAD_BYTES)
            self.manifest = manifest_of(head, self._take(manifest_bytes(head)))
            self._payload_sizes = self.manifest.payload_sizes()
        except ExportRefused as error:
            self._file.close()
            raise ExportRefused(f"{path} is refused: {error.message}") from error
        except BaseException:
            self._file.close()
            raise
        self._keyspace = self.manifest.keyspace
        self.good_bytes = self._file.tell()  # up to here all was verified
        self.chain = ChainCheck()
        self.pages_bytes = 0
        self.end: End | None = None  # once all has been read

    def __enter__(self) -> ExportReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def chunks(self) -> Iterator[FileChunk]:
        """All chunks; after the last one, `end` is known and the file was whole. raises: ExportRefused."""
        while not is_end(kind := self._file.peek(1)[:1]):
            if not kind:
                raise self._refused("it was cut off; export it again (the same command goes on where it stopped)")
            chunk = self._chunk()
            self._mark()
            yield chunk
            self.good_bytes = self._file.tell()
        digest = self.digest.digest()
        end = end_of(self._file.read(END_BYTES))
        if self._file.read(1):
            raise self._refused("something follows its end")
        if (end.chunk_count, end.pages_bytes) != (len(self.chain), self.pages_bytes) or end.digest != digest:
            raise self._refused("its digest does not fit its contents")
        self.end = end

    def _chunk(self) -> FileChunk:
        chunk_hash, metadata, shards = chunk_of(self._take(CHUNK_HEAD_BYTES))
        self.manifest.check_shards(shards)
        fault = self.chain.fault(chunk_hash, metadata)
        if fault:
            raise self._refused(f"chunk {chunk_hash.hex()}: {fault}")
        # Before memory is taken for them: a forged keyspace may promise pages of any size.
        chunk_bytes = pages_bytes(self._payload_sizes, shards)
        if self._file.tell() + chunk_bytes > self.size_bytes:
            raise self._refused("it was cut off in the middle of a page")
        pages = []
        for shard in shards_in(shards):
            payload_len = self._payload_sizes[shard]
            page = self._take(page_bytes(payload_len))
            key = PageKey(self._keyspace, chunk_hash, shard)
            wrong = verify(page, key, self.manifest.spec.codec, payload_len)
            if wrong is not None:
                raise self._refused(f"page {key}: {wrong}")
            pages.append(memoryview(page))
        self.chain.add(chunk_hash, metadata)
        self.pages_bytes += chunk_bytes
        return FileChunk(chunk_hash=chunk_hash, metadata=metadata, shards=shards, pages=tuple(pages))

    def _mark(self) -> None:
        self.marks.append(self.digest.digest()[:SUM_BYTES])
        at = len(self.marks)
        if self._read_before is not None and self._read_before[at - 1 : at] != self.marks[-1:]:
            raise self._refused("it was changed while it was read; import it again")

    def _take(self, size_bytes: int) -> bytes:
        try:
            data = self._file.read(size_bytes)
        except OSError as error:
            raise CommandFailed(f"{self._path} cannot be read: {error.strerror}") from error
        self.digest.update(data)
        return data

    def _refused(self, why: str) -> ExportRefused:
        return ExportRefused(f"{self._path} is refused at byte {self._file.tell()}: {why}")


def _check_replaceable(path: Path, partial: Path) -> None:
    """An earlier export may be replaced, nothing else: a FILE of tokens is easily named in its place."""
    if path.is_dir():
        raise CommandFailed(f"{path} is a directory; name a file in it")
    if _first_bytes(path) not in (None, MAGIC):
        raise CommandFailed(f"{path} exists and is not an export; the OUTPUT comes before the FILEs of tokens")
    # It is cut off where it stops being ours, so a file that somebody else left under that name would be lost.
    begun = _first_bytes(partial)
    if begun is not None and not MAGIC.startswith(begun):
        raise CommandFailed(f"{partial} exists and is not an unfinished export; move it away, or name another OUTPUT")


def _first_bytes(path: Path) -> bytes | None:
    """As many as the magic has; None where there is no such file. raises: CommandFailed."""
    if not path.exists():
        return None
    if not path.is_file():  # opening a pipe would wait for somebody to write
        raise CommandFailed(f"{path} exists and is not a regular file; name another")
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC))
    except OSError as error:
        raise CommandFailed(f"{path} cannot be read: {error.strerror}") from error


class ExportWriter:
    """Writes FILE.partial, which becomes FILE when it is whole. What an earlier export left there is gone on with."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        """raises: CommandFailed for a path that cannot be written, or where another export writes."""
        self._path = path
        self._partial = path.with_name(f"{path.name}.partial")
        self.chain = ChainCheck()
        self.pages_bytes = 0
        self._digest: Digest = new_digest()
        _check_replaceable(path, self._partial)
        try:
            self._file: BinaryIO = self._partial.open("ab")
        except OSError as error:
            raise CommandFailed(f"{self._partial} cannot be written: {error.strerror}") from error
        try:
            self._begin(manifest)
        except BaseException:
            self._file.close()
            raise

    def add(self, chunk_hash: bytes, metadata: PageMetadata, shards: int, pages: Sequence[Buffer]) -> None:
        """Append one chunk, whose pages the caller has verified and whose chain allows it. raises: CommandFailed.

        pages: of each of the shards (a bitmap), ascending; they make a whole chunk.
        """
        assert not self.chain.fault(chunk_hash, metadata) and len(pages) == shards.bit_count()
        self._write(pack_chunk(chunk_hash, metadata, shards))
        for page in pages:
            self._write(page)
            self.pages_bytes += len(page)
        self.chain.add(chunk_hash, metadata)

    def finish(self, hash_key: bytes) -> bytes:
        """End the file and give it its name, durably; the digest of its contents. raises: CommandFailed."""
        digest = self._digest.digest()
        end = End(
            chunk_count=len(self.chain),
            pages_bytes=self.pages_bytes,
            digest=digest,
            mac=mac_of(hash_key, digest, len(self.chain), self.pages_bytes),
        )
        self._write(end.pack())
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._partial.replace(self._path)
            directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):  # some file systems cannot sync a directory
                os.fsync(directory)
            os.close(directory)
        except OSError as error:
            raise CommandFailed(f"{self._path} cannot be written: {error.strerror}") from error
        return digest

    def close(self) -> None:
        """Leave what was written so far for the next export. raises: CommandFailed."""
        try:
            self._file.close()
        except OSError as error:
            raise CommandFailed(f"{self._partial} cannot be written: {error.strerror}; make room and repeat") from error

    def _begin(self, manifest: Manifest) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandFailed(f"another export writes {self._partial}; wait for it or name another file") from None
        if self._file.tell():
            self._go_on(manifest)
        if not self._file.tell():
            self._write(manifest.pack())

    def _go_on(self, manifest: Manifest) -> None:
        """Keep what is whole of an unfinished file; nothing where not even its manifest is."""
        good_bytes = 0
        with suppress(ExportRefused):
            with ExportReader(self._partial) as earlier:
                if (earlier.manifest.keyspace, earlier.manifest.key_check) != (manifest.keyspace, manifest.key_check):
                    raise CommandFailed(f"{self._partial} is an unfinished export of another keyspace; remove it")
                good_bytes = earlier.good_bytes
                self.chain = earlier.chain
                try:
                    for _ in earlier.chunks():
                        pass
                finally:
                    good_bytes, self.pages_bytes = earlier.good_bytes, earlier.pages_bytes
        self._file.truncate(good_bytes)
        self._file.seek(good_bytes)
        with self._partial.open("rb") as again:
            while piece := again.read(1 << 20):
                self._digest.update(piece)

    def _write(self, data: Buffer) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise CommandFailed(f"{self._partial} cannot be written: {error.strerror}; make room and repeat") from error
        self._digest.update(data)
