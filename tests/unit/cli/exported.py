"""Files of exported pages for tests: a chain of small, true pages."""

from __future__ import annotations

import random
from pathlib import Path

from kvpool.core.chunks import ROOT_HASH, group_head_index
from kvpool.core.cluster import PageMetadata
from kvpool.core.export_format import Manifest, key_check
from kvpool.core.keyspace import Dtype, KeyspaceSpec, KvGroup
from kvpool.core.page import HEADER_BYTES, PageKey, page_bytes, seal
from kvpool_cli.export_file import ExportWriter

HASH_KEY = b"k" * 32
SPEC = KeyspaceSpec(model_id="tiny", model_revision="1", groups=(KvGroup(2, 2, 16),), dtype=Dtype.BF16, chunk_tokens=16)
MANIFEST = Manifest(name="tiny", tenant="default", spec=SPEC, key_check=key_check(HASH_KEY), created_by="kvpool test")
(PAYLOAD_BYTES,) = MANIFEST.payload_sizes()


def chunk_hash(number: int) -> bytes:
    return number.to_bytes(8, "big") * 2


def metadata(number: int, **changes: int) -> PageMetadata:
    """Of chunk `number` of one chain; numbers begin at 1, indices at 0."""
    return PageMetadata(
        parent_hash=chunk_hash(number - 1) if number > 1 else ROOT_HASH,
        chunk_index=number - 1,
        group_head_hash=chunk_hash(group_head_index(number - 1) + 1),
        **changes,
    )


def page(number: int, manifest: Manifest = MANIFEST) -> bytearray:
    data = bytearray(page_bytes(PAYLOAD_BYTES))
    data[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES] = random.Random(number).randbytes(PAYLOAD_BYTES)
    seal(data, PageKey(manifest.keyspace, chunk_hash(number), 0), SPEC.codec, PAYLOAD_BYTES)
    return data


def write_file(path: Path, count: int = 20, *, hash_key: bytes = HASH_KEY, manifest: Manifest = MANIFEST) -> bytes:
    """A whole file of one chain; its digest."""
    writer = ExportWriter(path, manifest)
    try:
        for number in range(1, count + 1):
            writer.add(chunk_hash(number), metadata(number), 1, [page(number, manifest)])
        return writer.finish(hash_key)
    finally:
        writer.close()
