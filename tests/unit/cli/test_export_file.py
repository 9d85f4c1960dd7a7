"""Files of exported pages: whole ones are read, all others refused, unfinished ones gone on with."""

from __future__ import annotations

import os
import random
import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from kvpool.core.errors import ExportRefused
from kvpool.core.export_format import (
    CHUNK_HEAD_BYTES,
    END_BYTES,
    HEAD_BYTES,
    MAGIC,
    SUM_BYTES,
    VERSION,
    End,
    mac_of,
    manifest_of,
    pack_chunk,
)
from kvpool.core.keyspace import KvGroup
from kvpool.core.page import page_bytes
from kvpool_cli.errors import CommandFailed
from kvpool_cli.export_file import ExportReader, ExportWriter
from tests.unit.cli.exported import HASH_KEY, MANIFEST, PAYLOAD_BYTES, SPEC, chunk_hash, metadata, page, write_file

PAGE_BYTES = page_bytes(PAYLOAD_BYTES)
CHUNK_BYTES = CHUNK_HEAD_BYTES + PAGE_BYTES


def read_all(path: Path) -> list[int]:
    with ExportReader(path) as reader:
        return [chunk.metadata.chunk_index for chunk in reader.chunks()]


def forged(chunks: bytes, count: int, *, tail: bytes = b"", pages_bytes: int | None = None) -> bytes:
    """A file whose sums, digest and MAC all fit whatever chunks it has."""
    before = MANIFEST.pack() + chunks
    digest, size_bytes = blake3(before).digest(), count * PAGE_BYTES if pages_bytes is None else pages_bytes
    mac = mac_of(HASH_KEY, digest, count, size_bytes)
    return before + End(chunk_count=count, pages_bytes=size_bytes, digest=digest, mac=mac).pack() + tail


def one_chunk(number: int, **changes: object) -> bytes:
    return pack_chunk(chunk_hash(number), replace(metadata(number), **changes), 1) + bytes(page(number))  # type: ignore[arg-type]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file.kvpx"
    digest = write_file(path, 20)
    assert os.listdir(tmp_path) == ["file.kvpx"]
    with ExportReader(path) as reader:
        assert reader.manifest == MANIFEST
        chunks = list(reader.chunks())
        assert reader.end is not None and reader.end.digest == digest
        assert reader.end.mac == mac_of(HASH_KEY, digest, 20, 20 * PAGE_BYTES)
    assert [chunk.chunk_hash for chunk in chunks] == [chunk_hash(number) for number in range(1, 21)]
    assert [chunk.metadata for chunk in chunks] == [metadata(number) for number in range(1, 21)]
    assert bytes(chunks[7].pages[0]) == bytes(page(8))


def test_a_file_that_was_changed_since_it_was_verified_is_refused_at_its_first_other_chunk(tmp_path: Path) -> None:
    path = tmp_path / "file.kvpx"
    write_file(path, 3)
    with ExportReader(path) as first:
        assert len(list(first.chunks())) == len(first.marks) == 3
    with ExportReader(path, read_before=first.marks) as again:
        assert len(list(again.chunks())) == 3
    path.write_bytes(forged(one_chunk(1) + one_chunk(2, priority=7) + one_chunk(3), 3))
    with ExportReader(path, read_before=first.marks) as other:
        chunks = other.chunks()
        assert next(chunks).metadata == metadata(1)
        with pytest.raises(ExportRefused, match="changed while"):
            next(chunks)
    write_file(path, 4)
    with ExportReader(path, read_before=first.marks) as longer, pytest.raises(ExportRefused, match="changed while"):
        list(longer.chunks())


def test_retention_survives(tmp_path: Path) -> None:
    path = tmp_path / "file.kvpx"
    kept = metadata(1, ttl_ms=5, priority=-100, pinned_until_us=(1 << 63) - 1, prompt_tokens=7, expires_us=9)
    writer = ExportWriter(path, MANIFEST)
    writer.add(chunk_hash(1), kept, 1, [page(1)])
    writer.finish(HASH_KEY)
    writer.close()
    with ExportReader(path) as reader:
        assert [chunk.metadata for chunk in reader.chunks()] == [kept]


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.kvpx"
    write_file(path, 3)
    whole = path.read_bytes()
    start = len(MANIFEST.pack())
    edges = [0, 1, HEAD_BYTES, start, start + CHUNK_HEAD_BYTES, start + CHUNK_BYTES, len(whole) - END_BYTES]
    cuts = {edge + step for edge in edges for step in (-1, 0, 1)} | set(range(0, len(whole), 257))
    for cut in sorted(cut for cut in cuts if 0 <= cut < len(whole)):
        path.write_bytes(whole[:cut])
        with pytest.raises(ExportRefused):
            read_all(path)


def test_any_flipped_bit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.kvpx"
    write_file(path, 2)
    whole = path.read_bytes()
    # The MAC is the cluster's to check: it is keyed.
    places = [
        *range(0, len(MANIFEST.pack()) + CHUNK_HEAD_BYTES + 80, 3),
        *range(len(whole) - END_BYTES, len(whole) - 32),
    ]
    for at in places + random.Random(1).sample(range(len(whole) - 32), 100):
        spoilt = bytearray(whole)
        spoilt[at] ^= 1 << at % 8
        path.write_bytes(spoilt)
        with pytest.raises(ExportRefused):
            read_all(path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no file that `kvpool cache export` wrote"),
        (b"PK\x03\x04" + bytes(100), "no file that `kvpool cache export` wrote"),
        (MANIFEST.pack()[:8] + struct.pack("<HHI", VERSION + 1, 0, 10) + bytes(40), f"format version {VERSION + 1}"),
        (MANIFEST.pack()[:8] + struct.pack("<HHI", VERSION, 0, 0) + bytes(40), "manifest would have 0 bytes"),
        (MANIFEST.pack()[:8] + struct.pack("<HHI", VERSION, 0, (1 << 32) - 1) + bytes(40), "at most 65536"),
        (forged(one_chunk(1) + one_chunk(1), 2), "twice"),
        (forged(one_chunk(2), 1), "before it is not there"),
        (forged(one_chunk(1) + one_chunk(3), 2), "before it is not there"),
        (forged(one_chunk(1) + one_chunk(2, chunk_index=5), 2), "before it is not there"),
        (forged(one_chunk(1, chunk_index=1), 1), "before it is not there"),
        (forged(one_chunk(1, group_head_hash=b"x" * 16), 1), "head of its group"),
        (forged(one_chunk(1, priority=101), 1), "out of range"),
        (forged(one_chunk(1, ttl_ms=(1 << 64) - 1), 1), "out of range"),
        (forged(pack_chunk(chunk_hash(1), metadata(1), 1) + bytes(page(2)), 1), "wrong key"),
        (forged(pack_chunk(chunk_hash(1), metadata(1), 1) + bytes(PAGE_BYTES), 1), "wrong magic"),
        (forged(pack_chunk(chunk_hash(1), metadata(1), 0), 1), "no whole chunk"),
        (forged(pack_chunk(chunk_hash(1), metadata(1), 2) + bytes(page(1)), 1), "no whole chunk"),
        (forged(b"\x07" + one_chunk(1), 1), "head of a chunk"),
        (forged(one_chunk(1), 2), "does not fit its contents"),
        (forged(one_chunk(1), 1, pages_bytes=1), "does not fit its contents"),
        (forged(one_chunk(1), 1, tail=b"more"), "something follows"),
    ],
)
def test_what_is_wrong_is_said_though_all_sums_fit(data: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "file.kvpx"
    path.write_bytes(data)
    with pytest.raises(ExportRefused, match=re.escape(said)):
        read_all(path)


def test_a_keyspace_of_huge_pages_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "file.kvpx"
    large = replace(MANIFEST, spec=replace(SPEC, groups=(KvGroup(60, 8, 128),), chunk_tokens=2048))
    for shards in (large.grid.all_shards, large.grid.valid_shards):
        path.write_bytes(large.pack() + pack_chunk(chunk_hash(1), metadata(1), shards) + bytes(1000))
        with pytest.raises(ExportRefused, match="middle of a page"):
            read_all(path)
    enormous = replace(MANIFEST, spec=replace(SPEC, groups=(KvGroup(4096, 64, 1024),), chunk_tokens=4096))
    path.write_bytes(enormous.pack())
    with pytest.raises(ExportRefused, match="at most"):
        read_all(path)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b'"layer_groups": 1', b'"layer_groups": 2', "grid of 2 layer groups"),
        (b'"tiny"', b"[1234]", "cannot be read"),
        (b'"encoding": "6b', b'"encoding": "6c', "refused"),
        (b'"keyspace_id": "', b'"keyspace_ix": "', "cannot be read"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(old: bytes, new: bytes, said: str) -> None:
    packed = MANIFEST.pack()
    assert old in packed
    text = packed[HEAD_BYTES:-SUM_BYTES].replace(old, new, 1)
    head = packed[: HEAD_BYTES - 4] + struct.pack("<I", len(text))
    with pytest.raises(ExportRefused, match=said):
        manifest_of(head, text + blake3(head + text).digest(16))


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    keep_open = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        with pytest.raises(CommandFailed, match="regular file"):
            ExportReader(tmp_path / "pipe")
    finally:
        os.close(keep_open)
    with pytest.raises(CommandFailed, match="cannot be read"):
        ExportReader(tmp_path / "nothing")


@pytest.mark.parametrize("cut_bytes", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES + 5, END_BYTES + 1])
def test_an_unfinished_export_is_gone_on_with(cut_bytes: int, tmp_path: Path) -> None:
    path, partial = tmp_path / "file.kvpx", tmp_path / "file.kvpx.partial"
    digest = write_file(path, 5)
    whole = path.read_bytes()
    path.unlink()
    partial.write_bytes(whole[: len(whole) - END_BYTES - cut_bytes])
    writer = ExportWriter(path, MANIFEST)
    kept = len(writer.chain)
    assert kept == {0: 5, 1: 4, CHUNK_BYTES - 1: 4, CHUNK_BYTES + 5: 3, END_BYTES + 1: 4}[cut_bytes]
    for number in range(kept + 1, 6):
        writer.add(chunk_hash(number), metadata(number), 1, [page(number)])
    assert writer.finish(HASH_KEY) == digest
    writer.close()
    assert path.read_bytes() == whole and not partial.exists()


def test_an_export_that_ended_right_before_it_got_its_name_is_ended_again(tmp_path: Path) -> None:
    path = tmp_path / "file.kvpx"
    digest = write_file(path, 2)
    path.rename(tmp_path / "file.kvpx.partial")
    writer = ExportWriter(path, MANIFEST)
    assert len(writer.chain) == 2 and writer.finish(HASH_KEY) == digest
    writer.close()
    assert read_all(path) == [0, 1]


@pytest.mark.parametrize("begun", [b"", MAGIC[:3], MAGIC, MAGIC + b"rubbish" * 100])
def test_an_unfinished_file_without_a_manifest_is_begun_again(begun: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file.kvpx"
    (tmp_path / "file.kvpx.partial").write_bytes(begun)
    write_file(path, 2)
    assert read_all(path) == [0, 1]


def test_a_file_of_somebody_else_with_the_name_of_an_unfinished_export_is_left_alone(tmp_path: Path) -> None:
    partial = tmp_path / "file.kvpx.partial"
    partial.write_bytes(b"half of a download")
    with pytest.raises(CommandFailed, match=r"partial exists and is not an unfinished export; move it away"):
        write_file(tmp_path / "file.kvpx", 2)
    assert partial.read_bytes() == b"half of a download"
    partial.unlink()
    os.mkfifo(partial)  # waiting for a writer would hang
    with pytest.raises(CommandFailed, match="not a regular file"):
        write_file(tmp_path / "file.kvpx", 2)


def test_a_refused_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("no export at all")
    with pytest.raises(ExportRefused, match=r"notes\.txt is refused: this is no file"):
        ExportReader(path)


def test_an_unfinished_export_of_another_keyspace_is_left_alone(tmp_path: Path) -> None:
    partial = tmp_path / "file.kvpx.partial"
    other = replace(MANIFEST, tenant="another")
    partial.write_bytes(other.pack())
    with pytest.raises(CommandFailed, match="another keyspace"):
        ExportWriter(tmp_path / "file.kvpx", MANIFEST)
    assert partial.read_bytes() == other.pack()


def test_only_an_earlier_export_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text("[1, 2, 3]")
    with pytest.raises(CommandFailed, match="is not an export"):
        write_file(path)
    assert path.read_text() == "[1, 2, 3]"
    write_file(tmp_path / "file.kvpx", 1)
    write_file(tmp_path / "file.kvpx", 2)
    assert read_all(tmp_path / "file.kvpx") == [0, 1]
    with pytest.raises(CommandFailed, match="directory"):
        write_file(tmp_path)


def test_two_exports_into_one_file_are_refused(tmp_path: Path) -> None:
    first = ExportWriter(tmp_path / "file.kvpx", MANIFEST)
    with pytest.raises(CommandFailed, match="another export"):
        ExportWriter(tmp_path / "file.kvpx", MANIFEST)
    first.close()


def test_the_documentation_has_the_sizes() -> None:
    text = (Path(__file__).parents[3] / "docs" / "export-format.md").read_text()
    assert f"| - head | {CHUNK_HEAD_BYTES - SUM_BYTES} |" in text
    assert f"| head | {HEAD_BYTES} |" in text and f"| end | {END_BYTES - 64} |" in text


def test_the_documentation_says_how_the_mac_is_made(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "export-format.md").read_text()
    found = re.search(r"\| MAC \| 32 \| BLAKE3-256 of `([^`]*)\\0`, the end and the digest", text)
    assert found is not None
    write_file(tmp_path / "file.kvpx")
    raw = (tmp_path / "file.kvpx").read_bytes()
    end, mac = raw[-END_BYTES:-32], raw[-32:]
    assert mac == blake3(found[1].encode() + b"\0" + end, key=HASH_KEY).digest()
