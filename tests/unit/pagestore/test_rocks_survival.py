"""The RocksDB tier after kills and damage: what was durable is there, what is damaged costs itself alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.pagestore.rocks_pages import PAGE_BYTES, get, opened, page, put, scanned

# ---- kills

WRITER = """
import sys
from pathlib import Path
from tests.unit.pagestore.rocks_pages import opened, page_write
store = opened(Path(sys.argv[1]))
store.save_value("incarnation", b"41")
for start in range(0, 100_000, 4):
    store.put_batch([page_write(n) for n in range(start, start + 4)], lambda key, failure: failure or print(
        int.from_bytes(key.chunk_hash, "big"), flush=True))
    if start:
        store.delete_batch([page_write(start - 1).key])
"""


@pytest.mark.parametrize("lines", [1, 41, 90])
def test_what_was_durable_is_there_after_a_kill(tmp_path: Path, lines: int) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "disk")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={"PYTHONPATH": ":".join(sys.path)}) as process:
        assert process.stdout is not None
        durable = [int(process.stdout.readline()) for _ in range(lines)]
        process.kill()
        durable += [int(line) for line in process.stdout if line.endswith(b"\n")]
    store = opened(tmp_path / "disk")
    last = max(durable)
    for number in durable:
        found = get(store, number)
        if number % 4 == 3 and number < last:
            assert found in (None, page(number))  # it may have been deleted
        else:
            assert found == page(number)
    assert {number for number in durable if number % 4 != 3} <= scanned(store) <= set(range(last + 5))
    assert store.load_value("incarnation") == b"41"
    store.close()


# ---- damage


def file_with(directory: Path, content: bytes) -> Path:
    """The table or volume file that holds some bytes."""
    paths = [*directory.glob("*.sst"), *directory.glob("extents/*.pages")]
    return next(path for path in paths if content in path.read_bytes())


def flip(path: Path, content: bytes, at: int = 0) -> None:
    """One bit of a file, so many bytes behind where some content begins."""
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(content) + at] ^= 1
    path.write_bytes(damaged)


def test_a_flipped_byte_is_damage_or_reaches_the_reader_whose_sums_catch_it(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, 1, 2, 3)
    store.close()
    flip(file_with(tmp_path, page(2)[:4000]), page(2)[:4000], 100_000)
    store = opened(tmp_path)
    found = get(store, 2)
    assert found is not None and found != page(2) and len(found) == PAGE_BYTES
    assert (get(store, 1), get(store, 3)) == (page(1), page(3))
    put(store, 2)
    assert get(store, 2) == page(2)
    store.close()
