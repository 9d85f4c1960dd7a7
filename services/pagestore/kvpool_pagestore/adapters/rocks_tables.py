"""Page bytes inside RocksDB: a volume is a column family of table files that never overlap and are never compacted.

A batch is written to a table file of its own, which is synced and then taken into the volume, an act that is itself
synced in the manifest. Dropping the family frees its files at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

import numpy as np
from rocksdict import IngestExternalFileOptions, SstFileWriter

from kvpool.core.errors import PageCorrupt, StartupFailed
from kvpool.core.page import PageKey
from kvpool_pagestore.adapters.rocks_database import RocksDatabase, store_faults
from kvpool_pagestore.adapters.rocks_layout import payload_key, volume_family, volume_of_family

_INCOMING: Final = "incoming"  # table files not yet taken in; what a crash leaves there is removed


class TableVolumes:
    """A rocks_volumes.PayloadVolumes. A page's position is the number of its batch."""

    def __init__(self, database: RocksDatabase) -> None:
        """Raises StartupFailed."""
        self._database = database
        self._last_batch = database.sequence_number()  # every batch adds more than one to it
        self._incoming = database.directory / _INCOMING
        self._ingest_options = IngestExternalFileOptions()
        self._ingest_options.set_move_files(True)
        try:
            self._incoming.mkdir(exist_ok=True)
            for left_over in self._incoming.iterdir():
                left_over.unlink()
        except OSError as error:
            raise StartupFailed(f"{self._incoming} cannot be emptied: {error.strerror}; make it writable") from error

    def sizes_bytes(self) -> Mapping[int, int]:
        sizes = {}
        with store_faults("measuring volumes"):
            for name in self._database.family_names():
                if (number := volume_of_family(name)) is not None:
                    family = self._database.family(name)
                    sizes[number] = family.property_int_value("rocksdb.total-sst-files-size") or 0
        return sizes

    def create(self, number: int) -> None:
        self._database.create_table_family(volume_family(number))

    def reserve(self, number: int, size_bytes: int) -> int:
        self._last_batch += 1
        return self._last_batch

    def append(self, number: int, position: int, pages: Sequence[tuple[PageKey, memoryview]]) -> Sequence[int]:
        path = str(self._incoming / f"{position}.sst")
        family = self._database.family(volume_family(number))
        try:
            with store_faults("writing pages"):
                writer = SstFileWriter(self._database.table_options)
                writer.open(path)
                for key, page in sorted(pages, key=lambda entry: entry[0].pack()):
                    writer[payload_key(position, key)] = bytes(page)  # the one copy that the binding asks for
                writer.finish()
                family.ingest_external_file([path], self._ingest_options)
        finally:
            with suppress(OSError):
                os.unlink(path)  # ingested files were moved; only a failed one is still here
        return [position] * len(pages)

    def withdraw(self, number: int, position: int, size_bytes: int) -> int:
        return size_bytes  # `append` has removed its file

    def read_into(self, number: int, position: int, key: PageKey, destination: memoryview) -> bool:
        try:
            family = self._database.family(volume_family(number))
        except KeyError:
            return False
        with store_faults(f"reading page {key}"):
            # A list of one, because only lookups of lists let other threads run meanwhile.
            found: list[bytes | None] = family.get([payload_key(position, key)]) or [None]
        page = found[0]
        if page is None:
            return False
        if len(page) != len(destination):
            raise PageCorrupt(f"page {key} has {len(page)} bytes on disk, its record says {len(destination)}")
        # numpy lets other threads run while it copies.
        np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(page, np.uint8))
        return True

    def drop(self, number: int) -> None:
        self._database.drop_family(volume_family(number))

    def close(self) -> None:
        """Nothing to do: the families are the database's."""
