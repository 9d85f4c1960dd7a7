"""Files of chunks that were stored by ranks of another TP degree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvpool.core.errors import ExportRefused
from kvpool.core.export_format import pack_chunk
from kvpool.core.keyspace import KvGroup
from kvpool.core.page import PageKey, page_bytes, seal
from kvpool_cli.export_file import ExportReader, ExportWriter
from tests.unit.cli.exported import HASH_KEY, MANIFEST, SPEC, chunk_hash, metadata


def test_a_chunk_may_be_in_pages_of_another_split(tmp_path: Path) -> None:
    """Two heads, stored by two ranks: shards 1 and 2 instead of shard 0."""
    path = tmp_path / "file.kvpx"
    spec = replace(SPEC, groups=(KvGroup(2, 2, 512),))
    manifest = replace(MANIFEST, spec=spec)
    sizes = manifest.payload_sizes()
    assert (manifest.grid.splits, manifest.grid.valid_shards) == ((1, 2), 0b111)
    pages = {}
    for shard in range(3):
        pages[shard] = bytearray(page_bytes(sizes[shard]))
        seal(pages[shard], PageKey(manifest.keyspace, chunk_hash(1), shard), spec.codec, sizes[shard])
    writer = ExportWriter(path, manifest)
    writer.add(chunk_hash(1), metadata(1), 0b110, [pages[1], pages[2]])
    writer.finish(HASH_KEY)
    writer.close()
    with ExportReader(path) as reader:
        (chunk,) = reader.chunks()
        assert (chunk.shards, [bytes(page) for page in chunk.pages]) == (0b110, [bytes(pages[1]), bytes(pages[2])])
        assert reader.pages_bytes == len(pages[1]) + len(pages[2])
    path.write_bytes(manifest.pack() + pack_chunk(chunk_hash(1), metadata(1), 0b010) + bytes(pages[1]))
    with pytest.raises(ExportRefused, match="no whole chunk"):
        with ExportReader(path) as reader:
            list(reader.chunks())
